"""SGLang's BitNetForCausalLM over stand-ins of its layers: our Decoder's states, bit for bit.

The stand-ins hold our linear method's parameters and attend over a cache of their own; the real
ones serve in tests/engines.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bitnet_ops
import engine_surfaces
from bitnet_ops import ops
from bitnet_ops.integrations import BitNetLinearMethod, CheckpointError, ScaleRule

DEMO = Path(__file__).resolve().parents[1] / "data" / "demo-model"
IDS = torch.tensor([5, 80, 81, 7, 300, 12])


class Linear(nn.Module):
    """Of any kind, on one rank; the method does the rest."""

    def __init__(self, columns, sizes, replicas=None):
        super().__init__()
        if replicas is not None:
            self.num_kv_head_replicas = replicas
        self.quant_method = BitNetLinearMethod(ScaleRule.ONLINE)
        rows = sum(sizes)
        self.quant_method.create_weights(self, columns, sizes, columns, rows, torch.float32)

    def forward(self, x):
        return self.quant_method.apply(self, x), None


def qkv(hidden, dim, heads, kv_heads, **_):
    return Linear(hidden, [dim * heads, dim * kv_heads, dim * kv_heads], replicas=1)


class RadixAttention(nn.Module):
    """All the tokens of one prompt attend to each other, causally."""

    def __init__(self, heads, head_dim, scale, num_kv_heads, layer_id, **_):
        super().__init__()
        self.shape, self.scale, self.heads = (1, -1, num_kv_heads, head_dim), scale, heads

    def forward(self, q, k, v, forward_batch):
        tokens = len(q)
        pools = [torch.zeros(1, tokens, *self.shape[2:]) for _ in "kv"]
        new = [x.view(tokens, *self.shape[2:]) for x in (k, v)]
        ops.paged_cache_update(*pools, *new, torch.arange(tokens))
        where = torch.tensor([0, tokens]), torch.tensor([tokens]), torch.tensor([[0]])
        heads = q.view(tokens, self.heads, self.shape[-1])
        return ops.paged_attention(heads, *pools, *where, self.scale).view(tokens, -1)


class Embedding(nn.Module):
    def __init__(self, vocabulary, hidden, **_):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(vocabulary, hidden), requires_grad=False)

    def forward(self, ids):
        return self.weight[ids]


def hidden_states(input_ids, hidden, head, forward_batch):
    return hidden


def load_param(param, loaded):
    param.data.copy_(loaded)


@pytest.fixture
def bitnet(monkeypatch):
    """models/bitnet.py over the stand-ins."""
    layers, one = "sglang.srt.layers", types.SimpleNamespace(tp_size=1, pp_size=1)
    surface = {
        f"{layers}.linear": {
            "QKVParallelLinear": qkv,
            "MergedColumnParallelLinear": lambda columns, sizes, **_: Linear(columns, sizes),
            "RowParallelLinear": lambda columns, rows, **_: Linear(columns, [rows]),
        },
        f"{layers}.logits_processor": {"LogitsProcessor": lambda config: hidden_states},
        f"{layers}.radix_attention": {"RadixAttention": RadixAttention},
        f"{layers}.vocab_parallel_embedding": {
            "ParallelLMHead": Embedding,
            "VocabParallelEmbedding": Embedding,
        },
        "sglang.srt.model_loader.weight_utils": {"default_weight_loader": load_param},
        "sglang.srt.runtime_context": {"get_parallel": lambda: one},
    }
    engine_surfaces.install(monkeypatch, surface)
    name = "bitnet_ops.integrations.sglang.models.bitnet"
    yield importlib.import_module(name)
    sys.modules.pop(name)


class Config:
    def __init__(self):
        self.__dict__.update(json.loads((DEMO / "config.json").read_text()))

    def to_dict(self):
        return {**self.__dict__, "context_len": 256}  # which SGLang adds


def make(bitnet, **changes):
    model = bitnet.BitNetForCausalLM(Config())
    tensors = load_file(DEMO / "model.safetensors") | changes
    model.load_weights((name, t) for name, t in tensors.items() if t is not None)
    return model


def test_hidden_states_are_those_of_our_decoder(bitnet, tmp_path):
    model, positions = make(bitnet), torch.arange(len(IDS))
    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.quant_method.process_weights_after_loading(layer)
    options = {"head_format": "float32", "cache": tmp_path}
    ours = bitnet_ops.load(DEMO, **options).model.hidden(IDS[None])[0]
    assert torch.equal(model(IDS, positions, None), ours)
    given = model.model.embed_tokens(IDS)
    assert torch.equal(model(IDS, positions, None, input_embeds=given), ours)


def test_a_later_call_may_bring_some_weights(bitnet):
    model = make(bitnet)
    name = "model.layers.1.mlp.up_proj.weight"
    before = model.model.layers[1].mlp.gate_up_proj.weight.clone()
    model.load_weights([(name, -load_file(DEMO / "model.safetensors")[name])])
    assert not torch.equal(model.model.layers[1].mlp.gate_up_proj.weight, before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, r"got none for \['model.norm.weight'\]"),
        ({"model.layers.0.bogus.weight": torch.ones(4)}, "got 'model.layers.0.bogus.weight'"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(4)}, "got 'model.layers.0.self_att"),
    ],
)
def test_weights_are_loaded_strictly(bitnet, changes, message):
    with pytest.raises(CheckpointError, match=message):
        make(bitnet, **changes)
    make(bitnet, **{"lm_head.weight": torch.ones(4)})  # some writers store a tied head again
