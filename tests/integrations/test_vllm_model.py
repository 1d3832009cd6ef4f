"""vLLM's model class: the whole decoder over vLLM's paged cache, against a stand-in of vLLM.

Oracles: the demo model's recorded greedy tokens (transformers), and for logits transformers itself
where the head is not quantised.
"""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import bitnet_ops.integrations.vllm as plugin
import engine_surfaces
from bitnet_ops.integrations import CheckpointError

DEMO = Path(__file__).resolve().parents[1] / "data" / "demo-model"
BLOCK = 32


@pytest.fixture
def surface(monkeypatch):
    modules = engine_surfaces.install(monkeypatch, engine_surfaces.vllm())
    plugin.register()
    return modules


class HfConfig:
    def __init__(self, **changes):
        self.values = {**json.loads((DEMO / "config.json").read_text()), **changes}

    def to_dict(self):
        return {**self.values, "added_by_the_engine": 1}


def vllm_config(surface, *, dtype=torch.float32, head="stored", ranks=(1, 1), cache="auto", **hf):
    method = surface["vllm.model_executor.layers.quantization"].CLASSES["bitnet"]
    config = HfConfig(**hf)
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(hf_config=config, dtype=dtype),
        parallel_config=types.SimpleNamespace(
            tensor_parallel_size=ranks[0], pipeline_parallel_size=ranks[1]
        ),
        quant_config=method.from_config(config.values["quantization_config"]),
        additional_config={"bitnet_head_format": head} if head else {},
        cache_config=types.SimpleNamespace(cache_dtype=cache, block_size=BLOCK),
        compilation_config=types.SimpleNamespace(static_forward_context={}),
    )


def make(config):
    from bitnet_ops.integrations.vllm.model import BitNetForCausalLM

    return BitNetForCausalLM(vllm_config=config)


def tensors():
    return load_file(DEMO / "model.safetensors")


def loaded(config, blocks=16):
    """The model with its weights and a cache as vLLM binds it, full of what must not be read."""
    model = make(config)
    model.load_weights(tensors().items())
    (name, layer), *more = config.compilation_config.static_forward_context.items()
    assert not more
    spec = layer.get_kv_cache_spec(config)
    shape = blocks, spec.num_kv_heads, spec.block_size, 2 * spec.head_size
    layer.bind_kv_cache(torch.full(shape, float("nan"), dtype=spec.dtype))
    return model, name


def step(model, name, sequences, tables):
    """One forward of [(new ids, start)]; the hidden states, as vLLM would get them."""
    builder = model.kv.get_attn_backend().get_builder_cls()(None, [name], None, torch.device("cpu"))
    ids = [i for new, _ in sequences for i in new]
    positions = [p for new, start in sequences for p in range(start, start + len(new))]
    owner = [s for s, (new, _) in enumerate(sequences) for _ in new]
    slots = [
        tables[s][p // BLOCK] * BLOCK + p % BLOCK for s, p in zip(owner, positions, strict=True)
    ]
    begins = torch.tensor([0, *(len(new) for new, _ in sequences)]).cumsum(0)
    common = types.SimpleNamespace(
        num_reqs=len(sequences),
        num_actual_tokens=len(ids),
        query_start_loc=begins.int(),
        seq_lens=torch.tensor([start + len(new) for new, start in sequences]).int(),
        block_table_tensor=torch.tensor(tables).int(),
        slot_mapping=torch.tensor(slots),
    )
    engine_surfaces.ForwardContext.attn_metadata = {name: builder.build(0, common)}
    padding = [0] * 3  # vLLM may pad what it hands over
    hidden = model(
        input_ids=torch.tensor(ids + padding).int(), positions=torch.tensor(positions + padding)
    )
    assert hidden.shape == (len(ids) + 3, model.config.hidden_size)
    return hidden, begins[1:] - 1


def cases():
    return json.loads((DEMO / "expected.json").read_text())["cases"]


def prompt_ids(case):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO)(case["prompt"]).input_ids


def test_two_sequences_over_mixed_blocks_give_transformers_greedy_tokens(surface):
    model, name = loaded(vllm_config(surface))
    wanted, tables = cases()[:2], [[7, 2, 11], [3, 14, 5]]
    texts = [prompt_ids(case) for case in wanted]
    new, start = [list(t) for t in texts], [0, 0]
    answers = [[], []]
    for _ in range(12):
        hidden, last = step(model, name, list(zip(new, start, strict=True)), tables)
        tokens = model.compute_logits(hidden[last]).argmax(-1).tolist()
        start = [s + len(n) for s, n in zip(start, new, strict=True)]
        new = [[t] for t in tokens]
        for answer, token in zip(answers, tokens, strict=True):
            answer.append(token)
    assert answers == [case["greedy_ids"][:12] for case in wanted]


@pytest.mark.parametrize("head", ["stored", "float32", "bf16", "int8"])
def test_hidden_states_are_those_of_the_composed_ops(surface, head):
    """What the one op gives without a head's matrix."""
    model, name = loaded(vllm_config(surface, head=head))
    ids = prompt_ids(cases()[0])
    hidden, _ = step(model, name, [(ids, 0)], [[4, 1, 0]])
    decoder = model.decoder
    decoder.run_as = "ops"
    composed = decoder.hidden(torch.tensor([ids]))[0]
    assert torch.equal(hidden[: len(ids)], composed)


def test_logits_with_an_int8_head_are_those_of_our_own_engine(surface):
    import bitnet_ops

    model, name = loaded(vllm_config(surface, head=None))
    assert model.decoder.head.head_format == "int8"
    ids = prompt_ids(cases()[0])
    hidden, _ = step(model, name, [(ids, 0)], [[4, 1, 0]])
    ours = model.compute_logits(hidden[: len(ids)])
    own = bitnet_ops.load(DEMO)
    assert torch.equal(ours, own.model(torch.tensor([ids]))[0])


def test_the_cache_holds_all_layers_and_a_block_its_keys_before_its_values(surface):
    from bitnet_ops.integrations.vllm.kv_layer import pools_of

    config = vllm_config(surface, dtype=torch.bfloat16)
    model = make(config)
    c, spec = model.config, model.kv.get_kv_cache_spec(config)
    assert (spec.num_kv_heads, spec.head_size) == (
        c.num_hidden_layers * c.num_key_value_heads,
        c.head_dim,
    )
    assert spec.dtype == torch.bfloat16 and spec.block_size == BLOCK
    cache = torch.arange(3 * spec.num_kv_heads * BLOCK * 2 * c.head_dim).float()
    cache = cache.view(3, spec.num_kv_heads, BLOCK, 2 * c.head_dim)
    keys, values = pools_of(cache, c)
    assert keys.shape == (c.num_hidden_layers, 3, BLOCK, c.num_key_value_heads, c.head_dim)
    head = cache[2, 4 * c.num_key_value_heads + 1].flatten()  # layer 4, head 1 of block 2
    half = BLOCK * c.head_dim
    assert torch.equal(keys[4, 2, :, 1].flatten(), head[:half])
    assert torch.equal(values[4, 2, :, 1].flatten(), head[half:])
    with pytest.raises(NotImplementedError, match="the whole decoder is one op"):
        model.kv.get_attn_backend().get_impl_cls()


def test_a_step_without_a_cache_is_a_trial_of_vllms(surface):
    model, _ = loaded(vllm_config(surface))
    hidden = model(input_ids=torch.zeros(5).int(), positions=torch.arange(5))
    assert hidden.shape == (5, 256) and not hidden.any()
    assert model.embed_input_ids(torch.tensor([3]).int()).shape == (1, 256)
    with pytest.raises(ValueError, match="expected token ids, got embeddings"):
        model(torch.zeros(5).int(), torch.arange(5), inputs_embeds=hidden)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": (2, 1)}, "size 1, got 2 and 1; .*sub-norms span all ranks"),
        ({"ranks": (1, 2)}, "size 1, got 1 and 2"),
        ({"cache": "fp8"}, "KV cache of float32 or bfloat16, got torch.uint8; leave --kv"),
    ],
)
def test_what_one_op_cannot_do_is_rejected(surface, options, message):
    with pytest.raises(CheckpointError, match=message):
        make(vllm_config(surface, **options))


def test_a_foreign_checkpoint_is_not_taken(surface):
    config = vllm_config(surface)
    config.quant_config = None
    with pytest.raises(CheckpointError, match="quant_method 'bitnet', got none"):
        make(config)
    config.quant_config = types.SimpleNamespace(get_name=lambda: "fp8")
    with pytest.raises(CheckpointError, match="quant_method 'bitnet', got fp8"):
        make(config)


def test_an_unknown_head_format_is_rejected(surface):
    with pytest.raises(ValueError, match="head_format"):
        make(vllm_config(surface, head="int3"))


def test_projections_left_dense_are_rejected_with_the_way_out(surface):
    quantization = HfConfig().values["quantization_config"]
    listed = {**quantization, "modules_to_not_convert": ["model.layers.1.mlp.up_proj"]}
    model = make(vllm_config(surface, quantization_config=listed))
    with pytest.raises(CheckpointError, match="layers.1.mlp.up_proj.weight in mod.*--model-impl"):
        model.load_weights(tensors().items())


def test_tensors_missing_misplaced_or_misshapen_are_rejected(surface):
    name = "model.layers.2.mlp.up_proj.weight"
    good = tensors()
    for change, message in (
        ({name: None}, f"got none for .*{name}"),
        ({"model.norm.weight": None}, "got none for .*model.norm.weight"),
        ({name: good[name][:8]}, r"expected weight \[768, 256\] .* got \[8, 256\]"),
        ({"model.norm.weight": torch.ones(8)}, r"model.norm.weight floating-point \[256\]"),
        ({"model.extra.weight": torch.ones(8)}, "expected only tensors of bitnet, got 'model.ex"),
        ({f"{name}_scale": torch.ones(1)}, "expected no weight_scale"),
    ):
        model = make(vllm_config(surface))
        changed = {k: v for k, v in {**good, **change}.items() if v is not None}
        with pytest.raises(CheckpointError, match=message):
            model.load_weights(changed.items())
        with pytest.raises(CheckpointError, match="got none; --load-format dummy"):
            model(torch.zeros(1).int(), torch.zeros(1).long())
        with pytest.raises(CheckpointError, match="got none; --load-format dummy"):
            model.compute_logits(torch.zeros(1, 256))


def test_vllms_default_dtype_while_it_loads_changes_nothing(surface):
    ids, found = prompt_ids(cases()[0]), []
    for default in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            model, name = loaded(vllm_config(surface, head="int8"))
            assert torch.get_default_dtype() == default
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(step(model, name, [(ids, 0)], [[4, 1, 0]])[0])
    assert torch.equal(*found)


def test_what_some_writers_add_is_passed_over(surface):
    model = make(vllm_config(surface))
    more = {
        "lm_head.weight": torch.ones(1),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1),
    }
    model.load_weights({**tensors(), **more}.items())
    assert model.decoder is not None
