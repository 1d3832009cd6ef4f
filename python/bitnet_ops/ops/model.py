"""The wrapper of torch.ops.bitnet.decode_step; bitnet_ops.ops exports it beside the other ops.

Conventions and errors are those of bitnet_ops.ops. It must not know models.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from bitnet_ops._grad import refuse_grad as _refuse_grad

_DECODE_STEP = torch.ops.bitnet.decode_step.default


def decode_step(
    x: Tensor,
    weights: list[Tensor],
    scales: Tensor,
    norm_weights: Tensor,
    head_weight: Tensor,
    head_scale: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    start_positions: Tensor,
    dtype: torch.dtype,
    num_heads: int,
    intermediate_size: int,
    vocab_size: int,
    sub_norms: bool,
    activation: str,
    eps: float,
    rope_theta: float,
    scale: float,
    logits_to_keep: int = 0,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """All layers, the last norm and the head on new tokens: one call, one parallel region.

    Per layer, with h rounded to `dtype`: `q, k, v = qkv_forward(h)`, `rope` of q and k,
    `kv_cache_update`, `attention`, (`rms_norm`,) `linear`, added to x; then `mlp_forward`, added
    to x; at the end `lm_head(rms_norm(x))`. Equal to that composition bit for bit. For decoding,
    for checking a draft and for the chunks of a prompt; memory for activations grows with B * T.

    Args:
        x: float32 [B, T, K], the embedded tokens; the residual stream stays float32.
        weights: packed q, k, v, o, gate, up, down of the first layer, then of the next; every
            layout that `linear` takes.
        scales: float32 [layers, 7], the factors of these weights, contiguous.
        norm_weights: float32, one contiguous row of all norm weights in the order of use: for each layer
            [K] before q, k, v, ([num_heads * D] before o,) [K] before gate and up, ([intermediate_size] before
            down;) at the end [K] before the head. In brackets: with sub_norms.
        head_weight, head_scale: as `lm_head` takes them.
        key_cache, value_cache: float32, bfloat16 or int8 [layers, B, KV, L, D], contiguous within
            a layer; both are mutated.
        start_positions: int64 [B], how many tokens of each sequence came before.
        dtype: float32 or bfloat16, what activations are rounded to between operations.
        num_heads: query heads H; D is the caches' head dimension.
        intermediate_size: output features of gate and up.
        vocab_size: output features of the head.
        sub_norms: whether the norms in brackets exist.
        activation: "relu2" or "silu".
        eps: of every norm.
        rope_theta: base of the rotary embedding.
        scale: multiplies the attention scores, usually 1 / sqrt(D).
        logits_to_keep: above 0, only that many last tokens of each sequence get logits, and only
            they are computed behind the last layer's attention; 0: all.
        key_scale, value_scale: float32 [layers, B, KV, L] with int8 caches, contiguous within a
            layer; mutated.
    Returns:
        float32 [B, T, vocab_size], the logits; with logits_to_keep that many tokens at most.
    Raises:
        RuntimeError: a wrong dtype or shape, an odd D, H not a multiple of KV, a position outside
            the caches; nothing has been written then.
    Source: transformers BitNetForCausalLM, LlamaForCausalLM.
    """
    if torch.is_grad_enabled():
        _refuse_grad(
            "decode_step", x=x, scales=scales, norm_weights=norm_weights, head_weight=head_weight
        )
        _refuse_grad("decode_step", head_scale=head_scale)
        _refuse_grad("decode_step", key_cache=key_cache, value_cache=value_cache)
        _refuse_grad("decode_step", key_scale=key_scale, value_scale=value_scale)
    return cast(
        Tensor,
        _DECODE_STEP(
            x,
            weights,
            scales,
            norm_weights,
            head_weight,
            head_scale,
            key_cache,
            value_cache,
            start_positions,
            dtype,
            num_heads,
            intermediate_size,
            vocab_size,
            sub_norms,
            activation,
            eps,
            rope_theta,
            scale,
            logits_to_keep,
            key_scale,
            value_scale,
        ),
    )
