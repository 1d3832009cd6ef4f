"""BitNetForCausalLM for SGLang: its layers, caches and sampling around our program of the model.

For checkpoint folders as they are (`bitnet-ops sglang --per-layer`, or SGLang without our
launcher). Linears are SGLang's own with our method, q, k and v fused, gate and up too, so weight
updates and LoRA reach them; attention is RadixAttention, over SGLang's pool; what lies between is
`models/composed.py`. Without this class SGLang runs transformers' model with seven unfused linears
a layer. Loaded by SGLang's registry only. It must not know how weights are stored: the layers' own
weight_loaders do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from bitnet_ops import ops
from bitnet_ops.blocks.attention import GLOBAL_ROPE
from bitnet_ops.blocks.listing import listing
from bitnet_ops.config import ModelConfig
from bitnet_ops.integrations.checkpoint import FUSED, CheckpointError, check_activation_dtype
from bitnet_ops.models.composed import Composed
from bitnet_ops.nn.rotary import rotary

# checkpoint's layer -> (fused layer, shard id)
_PLACES = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class Norm(nn.Module):
    """The weight of an RMSNorm; float32, as the ops read it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        weight = torch.ones(size, dtype=torch.float32)
        self.weight = nn.Parameter(weight, requires_grad=False)


class Projection(nn.Module):
    """Projections of a program: those of one linear of SGLang's, which may be a fused one.

    The program asks for all parts of an input one after the other; the first computes them.
    """

    def __init__(self, linear: nn.Module, sizes: list[int] | None = None) -> None:
        super().__init__()
        self._linear, self._sizes = (linear,), sizes  # not a second time among the modules
        self._x: Tensor | None = None
        self._parts: Iterator[Tensor] = iter(())

    def forward(self, x: Tensor) -> Tensor:
        if self._x is not x:
            y, _ = self._linear[0](x)
            self._x, self._parts = x, iter(y.split(self._sizes or y.shape[-1], dim=-1))
        return next(self._parts).contiguous()


class BitNetAttention(nn.Module):
    def __init__(self, c: ModelConfig, layer_id: int, quant_config: Any, prefix: str) -> None:
        super().__init__()
        hidden, heads, kv_heads = c.hidden_size, c.num_attention_heads, c.num_key_value_heads
        query, kv = heads * c.head_dim, kv_heads * c.head_dim
        self.sizes = [query, kv, kv]
        self.qkv_proj = QKVParallelLinear(
            hidden, c.head_dim, heads, kv_heads, bias="self_attn.q_proj" in c.biases,
            quant_config=quant_config, prefix=f"{prefix}.qkv_proj",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            query, hidden, bias="self_attn.o_proj" in c.biases,
            quant_config=quant_config, prefix=f"{prefix}.o_proj",
        )  # fmt: skip
        self.attn_sub_norm = Norm(query)
        self.attn = RadixAttention(
            heads, c.head_dim, c.attention_scale, num_kv_heads=kv_heads, layer_id=layer_id,
            quant_config=quant_config, prefix=f"{prefix}.attn",
        )  # fmt: skip


class BitNetMLP(nn.Module):
    def __init__(self, c: ModelConfig, quant_config: Any, prefix: str) -> None:
        super().__init__()
        hidden, inner = c.hidden_size, c.intermediate_size
        options = {"bias": False, "quant_config": quant_config}
        self.sizes = [inner, inner]
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, self.sizes, prefix=f"{prefix}.gate_up_proj", **options
        )
        self.down_proj = RowParallelLinear(inner, hidden, prefix=f"{prefix}.down_proj", **options)
        self.ffn_sub_norm = Norm(inner)


class BitNetDecoderLayer(nn.Module):
    def __init__(self, c: ModelConfig, layer_id: int, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size)
        self.self_attn = BitNetAttention(c, layer_id, quant_config, f"{prefix}.self_attn")
        self.post_attention_layernorm = Norm(c.hidden_size)
        self.mlp = BitNetMLP(c, quant_config, f"{prefix}.mlp")

    def projections(self, prefix: str) -> dict[str, Projection]:
        """The projections of the layer by the names that programs give them."""
        qkv = Projection(self.self_attn.qkv_proj, self.self_attn.sizes)
        gate_up = Projection(self.mlp.gate_up_proj, self.mlp.sizes)
        return {
            **{f"{prefix}.self_attn.{key}_proj": qkv for key in "qkv"},
            f"{prefix}.self_attn.o_proj": Projection(self.self_attn.o_proj),
            **{f"{prefix}.mlp.{key}_proj": gate_up for key in ("gate", "up")},
            f"{prefix}.mlp.down_proj": Projection(self.mlp.down_proj),
        }


class BitNetModel(nn.Module):
    def __init__(self, c: ModelConfig, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            c.vocab_size, c.hidden_size, quant_config=quant_config, prefix=f"{prefix}.embed_tokens"
        )
        self.layers = nn.ModuleList(
            BitNetDecoderLayer(c, i, quant_config, f"{prefix}.layers.{i}")
            for i in range(c.num_hidden_layers)
        )
        self.norm = Norm(c.hidden_size)


class BitNetForCausalLM(nn.Module):
    """BitNet b1.58 (2B-4T architecture) on one rank; weights come by `load_weights`, strictly."""

    packed_modules_mapping = FUSED

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        parallel = get_parallel()
        if parallel.tp_size > 1 or parallel.pp_size > 1:
            raise CheckpointError(
                "bitnet: expected tensor- and pipeline-parallel size 1, got "
                f"{parallel.tp_size} and {parallel.pp_size}; the sub-norms span all heads and the "
                "whole intermediate size, and no reduction across ranks is implemented"
            )
        self.config, self.quant_config = config, quant_config
        self.dtype = torch.get_default_dtype()  # of the model, while SGLang makes it
        check_activation_dtype(self.dtype)
        said = {**config.to_dict(), "architectures": None}
        c = ModelConfig.from_hf(said, ignore_unknown=True)
        self.model = BitNetModel(c, quant_config, f"{prefix}.model" if prefix else "model")
        if config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens
        else:
            self.lm_head = ParallelLMHead(
                config.vocab_size, config.hidden_size, quant_config=quant_config, prefix="lm_head"
            )
        self.logits_processor = LogitsProcessor(config)
        self._rope, self._eps = rotary(c), c.rms_norm_eps
        factor = self._rope.attention_factor
        self._listing = listing(c, str(self.dtype).removeprefix("torch."), factor)
        self._projections: dict[str, Projection] = {}
        layers: Any = self.model.layers
        for i, layer in enumerate(layers):
            self._projections.update(layer.projections(f"model.layers.{i}"))
        self._loaded: set[str] = set()

    def _module(self, name: str) -> nn.Module:
        return self._projections.get(name) or self.get_submodule(name)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
    ) -> Any:
        layers: Any = self.model.layers

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = (x.flatten(1) for x in (q, k, v))
            attended: Tensor = layers[i].self_attn.attn(*rows, forward_batch)
            return attended.view_as(q)

        x = self.model.embed_tokens(input_ids) if input_embeds is None else input_embeds
        ropes = {GLOBAL_ROPE: self._rope}
        composed = Composed(self._listing, self._module, positions, ropes, attend)
        x = composed.run(x.float())
        hidden = ops.rms_norm(x, self.model.norm.weight, self._eps).to(self.dtype)
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_embed_and_head(self) -> tuple[Tensor, Tensor]:
        return self.model.embed_tokens.weight, self.lm_head.weight

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a checkpoint's tensors by their Hugging Face names.

        Raises CheckpointError for a tensor without a place, and, once all that will come has come,
        for a parameter without a tensor. A later call may bring a part only (weight updates).
        """
        params = dict(self.named_parameters())
        for name, tensor in weights:
            if self.config.tie_word_embeddings and name == "lm_head.weight":
                continue  # some writers store the tied head a second time
            target, arguments = _place(name)
            if target not in params:
                raise CheckpointError(
                    f"bitnet: expected only tensors of BitNetForCausalLM, got {name!r} "
                    f"{list(tensor.shape)}; config.json and the weights disagree"
                )
            param = params[target]
            getattr(param, "weight_loader", default_weight_loader)(param, tensor, *arguments)
            self._loaded.add(target)
        # A ternary layer looks after its own weight_scale: online masters come without one.
        absent = [n for n in params if n not in self._loaded and not n.endswith("weight_scale")]
        if absent:
            raise CheckpointError(
                f"bitnet: expected every tensor of BitNetForCausalLM, got none for {absent[:4]}"
                f"{' and more' if len(absent) > 4 else ''}; the checkpoint is incomplete"
            )


def _place(name: str) -> tuple[str, tuple]:
    """A checkpoint's name -> (parameter's name, further arguments of its weight_loader)."""
    parent, _, leaf = name.rpartition(".")
    grandparent, _, layer = parent.rpartition(".")
    if layer not in _PLACES:
        return name, ()
    fused, shard_id = _PLACES[layer]
    return f"{grandparent}.{fused}.{leaf}", (shard_id,)


EntryClass = BitNetForCausalLM
