"""BitNetForCausalLM for SGLang: fused qkv and gate/up, RadixAttention, our norm and activation ops.

SGLang finds it by the architecture's name in config.json. Without it SGLang runs transformers'
model with seven unfused linears a layer; with it four. Loaded by SGLang's registry only. It must
not know how weights are stored: the layers' own weight_loaders do. Differences from Llama:
attn_sub_norm before o_proj, relu(gate)^2 * up, ffn_sub_norm before down_proj.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from bitnet_ops import ops
from bitnet_ops.integrations.checkpoint import CheckpointError

# checkpoint's layer -> (fused layer, shard id)
FUSED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class Norm(nn.Module):
    """RMSNorm over torch.ops.bitnet; with a residual it is added first and returned updated."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)"""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class BitNetAttention(nn.Module):
    def __init__(self, config: Any, layer_id: int, quant_config: Any, prefix: str) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        kv_heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        self.sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        options = {"bias": bool(config.attention_bias), "quant_config": quant_config}
        self.qkv_proj = QKVParallelLinear(
            hidden, head_dim, heads, kv_heads, prefix=f"{prefix}.qkv_proj", **options
        )
        self.o_proj = RowParallelLinear(self.sizes[0], hidden, prefix=f"{prefix}.o_proj", **options)
        self.attn_sub_norm = Norm(self.sizes[0], config.rms_norm_eps)
        rope = config.rope_parameters
        self.rotary_emb = get_rope(
            head_dim,
            rotary_dim=head_dim,
            max_position=config.max_position_embeddings,
            base=rope["rope_theta"],
            rope_scaling=rope,
            is_neox_style=True,
        )
        self.attn = RadixAttention(
            heads,
            head_dim,
            head_dim**-0.5,
            num_kv_heads=kv_heads,
            layer_id=layer_id,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: Tensor, x: Tensor, forward_batch: Any) -> Tensor:
        qkv, _ = self.qkv_proj(x)
        q, k, v = qkv.split(self.sizes, dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        y = self.attn_sub_norm(self.attn(q, k, v, forward_batch))
        return self.o_proj(y)[0]


class BitNetMLP(nn.Module):
    def __init__(self, config: Any, quant_config: Any, prefix: str) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        if config.hidden_act != "relu2":
            raise CheckpointError(f"bitnet: expected hidden_act 'relu2', got {config.hidden_act!r}")
        options = {"bias": False, "quant_config": quant_config}
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner, inner], prefix=f"{prefix}.gate_up_proj", **options
        )
        self.down_proj = RowParallelLinear(inner, hidden, prefix=f"{prefix}.down_proj", **options)
        self.ffn_sub_norm = Norm(inner, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, dim=-1)
        return self.down_proj(self.ffn_sub_norm(ops.relu2_mul(gate, up)))[0]


class BitNetDecoderLayer(nn.Module):
    def __init__(self, config: Any, layer_id: int, quant_config: Any, prefix: str) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Norm(size, eps)
        self.self_attn = BitNetAttention(config, layer_id, quant_config, f"{prefix}.self_attn")
        self.post_attention_layernorm = Norm(size, eps)
        self.mlp = BitNetMLP(config, quant_config, f"{prefix}.mlp")

    def forward(
        self, positions: Tensor, x: Tensor, forward_batch: Any, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(positions, x, forward_batch)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class BitNetModel(nn.Module):
    def __init__(self, config: Any, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            quant_config=quant_config,
            prefix=f"{prefix}.embed_tokens",
        )
        self.layers = nn.ModuleList(
            BitNetDecoderLayer(config, i, quant_config, f"{prefix}.layers.{i}")
            for i in range(config.num_hidden_layers)
        )
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, embeds: Any
    ) -> Tensor:
        x = self.embed_tokens(input_ids) if embeds is None else embeds
        residual = None
        for layer in self.layers:
            x, residual = layer(positions, x, forward_batch, residual)
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]


class BitNetForCausalLM(nn.Module):
    """BitNet b1.58 (2B-4T architecture) on one rank; weights come by `load_weights`, strictly."""

    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        parallel = get_parallel()
        if parallel.tp_size > 1 or parallel.pp_size > 1:
            raise CheckpointError(
                "bitnet: expected tensor- and pipeline-parallel size 1, got "
                f"{parallel.tp_size} and {parallel.pp_size}; the sub-norms span all heads and the "
                "whole intermediate size, and no reduction across ranks is implemented"
            )
        self.config = config
        self.quant_config = quant_config
        self.model = BitNetModel(config, quant_config, f"{prefix}.model" if prefix else "model")
        if config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens
        else:
            self.lm_head = ParallelLMHead(
                config.vocab_size, config.hidden_size, quant_config=quant_config, prefix="lm_head"
            )
        self.logits_processor = LogitsProcessor(config)
        self._loaded: set[str] = set()

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
    ) -> Any:
        hidden = self.model(input_ids, positions, forward_batch, input_embeds)
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
    if layer not in FUSED:
        return name, ()
    fused, shard_id = FUSED[layer]
    return f"{grandparent}.{fused}.{leaf}", (shard_id,)


EntryClass = BitNetForCausalLM
