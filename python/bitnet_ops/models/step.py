"""A decoder's weights as the arguments of `ops.decode_step`, which runs a whole step in one call.

Scales and norm weights are gathered into one tensor each, in whose memory the modules' own buffers
lie: there is one copy of every number, and a buffer changed in place changes what the step reads.
It must not know ids, caches' owners or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bitnet_ops import ops
from bitnet_ops.config import PROJECTIONS, ModelConfig
from bitnet_ops.memory.arena import stretch
from bitnet_ops.models.layer import is_plain

if TYPE_CHECKING:
    from bitnet_ops.nn.head import HeadWeight
    from bitnet_ops.nn.kv_cache import KVCache


class Step:
    """What `ops.decode_step` needs of one model, gathered once.

    Args:
        config: the architecture.
        layers: the decoder's layers, with the submodules of a Hugging Face checkpoint.
        norm: the last norm; `weight` f32 [hidden].
        dtype: of the activations.
    """

    def __init__(
        self, config: ModelConfig, layers: Sequence[nn.Module], norm: nn.Module, dtype: torch.dtype
    ) -> None:
        c = self._config = config
        norms = [layer.get_submodule(name) for layer in layers for name in _norm_names(c)]
        projections = [layer.get_submodule(name) for layer in layers for name in PROJECTIONS]
        self.norm_weights = _gather([*norms, norm], "weight")
        self.scales = _gather(projections, "weight_scale").view(len(layers), len(PROJECTIONS))
        self.weights = [projection.get_buffer("weight") for projection in projections]
        self._dtype, self._scale = dtype, c.head_dim**-0.5

    @staticmethod
    def expresses(config: ModelConfig, layers: Sequence[nn.Module]) -> bool:
        """Whether decode_step can run these layers; composed ops can run all of them."""
        c = config
        projections = [layer.get_submodule(p) for layer in layers for p in PROJECTIONS]
        return (
            not c.qk_norm
            and c.sub_norm_eps in (None, c.rms_norm_eps)
            and all(is_plain(p) and _one_scale(p) for p in projections)
        )

    def __call__(
        self, x: Tensor, cache: KVCache, head: HeadWeight, logits_to_keep: int = 0
    ) -> Tensor:
        """Embedded tokens f32 [B, T, hidden] -> logits f32 [B, T, V]; the cache is written.

        `logits_to_keep` > 0: of that many last tokens only.
        """
        c = self._config
        return ops.decode_step(
            x=x,
            weights=self.weights,
            scales=self.scales,
            norm_weights=self.norm_weights,
            head_weight=head.weight,
            head_scale=head.scale,
            key_cache=cache.key_cache,
            value_cache=cache.value_cache,
            start_positions=cache.lengths,
            dtype=self._dtype,
            num_heads=c.num_attention_heads,
            intermediate_size=c.intermediate_size,
            vocab_size=c.vocab_size,
            sub_norms=c.sub_norms,
            activation=c.hidden_act,
            eps=c.rms_norm_eps,
            rope_theta=c.rope_theta,
            scale=self._scale,
            logits_to_keep=logits_to_keep,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
        )


def _one_scale(projection: nn.Module) -> bool:
    scale = projection.get_buffer("weight_scale")
    return scale.dtype == torch.float32 and scale.numel() == 1


def _norm_names(c: ModelConfig) -> tuple[str, ...]:
    """The norms of a layer in the order in which decode_step uses them."""
    if not c.sub_norms:
        return "input_layernorm", "post_attention_layernorm"
    return (
        "input_layernorm",
        "self_attn.attn_sub_norm",
        "post_attention_layernorm",
        "mlp.ffn_sub_norm",
    )


@torch.inference_mode(False)  # or the buffers could not be changed in place outside of it
def _gather(modules: Sequence[nn.Module], name: str) -> Tensor:
    """One tensor of the modules' buffers `name`, each of which comes to lie in its part."""
    flat = torch.cat([module.get_buffer(name).flatten() for module in modules])
    memory, at = flat.view(torch.uint8), 0
    for module in modules:
        old = module.get_buffer(name)
        part = stretch(memory, at, at + old.nbytes)  # a slice would be saved with all the others
        setattr(module, name, part.view(old.dtype).view_as(old))
        at += old.nbytes
    return flat
