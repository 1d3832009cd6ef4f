"""Wrappers of the ops that are parts of a layer: fused projections, attention and its cache.

Conventions and errors are those of bitnet_ops.ops, which exports them. It must not know how a
model joins these parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from bitnet_ops.ops._grad import refuse_grad as _refuse_grad

_ops = torch.ops.bitnet

_QKV_FORWARD = _ops.qkv_forward.default
_MLP_FORWARD = _ops.mlp_forward.default
_ATTENTION = _ops.attention.default
_KV_CACHE_UPDATE = _ops.kv_cache_update.default


def qkv_forward(
    x: Tensor,
    norm_weight: Tensor,
    q_weight: Tensor,
    q_scale: Tensor,
    k_weight: Tensor,
    k_scale: Tensor,
    v_weight: Tensor,
    v_scale: Tensor,
    eps: float,
    out_features: Sequence[int] = (),
    in_features: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, quantisation and the three attention projections in one op.

    `h = rms_norm(x, norm_weight, eps)`, then `linear(h, w, scale)` for q, k and v: equal to that
    composition bit for bit. Every projection keeps its own scale.

    Args:
        x: F [..., K].
        norm_weight: F [K].
        q_weight, k_weight, v_weight: packed uint8 [N_i, 32 * ceil(K / 128)], or private layouts.
        q_scale, k_scale, v_scale: float32 [1] or [N_i].
        eps: as `rms_norm`.
        out_features: the three N_i; needed with private layouts, else it may be empty.
        in_features: the K that the weights were packed for; None takes any that fits their bytes.
    Returns:
        (q, k, v), x.dtype [..., N_i].
    Raises:
        RuntimeError: as `rms_norm` and `linear`.
    Source: transformers BitNetAttention.
    """
    if torch.is_grad_enabled():
        _refuse_grad("qkv_forward", x=x, norm_weight=norm_weight, q_scale=q_scale)
        _refuse_grad("qkv_forward", k_scale=k_scale, v_scale=v_scale)
    return cast(
        "tuple[Tensor, Tensor, Tensor]",
        _QKV_FORWARD(
            x,
            norm_weight,
            q_weight,
            q_scale,
            k_weight,
            k_scale,
            v_weight,
            v_scale,
            eps,
            out_features,
            in_features,
        ),
    )


def mlp_forward(
    x: Tensor,
    norm_weight: Tensor,
    gate_weight: Tensor,
    gate_scale: Tensor,
    up_weight: Tensor,
    up_scale: Tensor,
    sub_norm_weight: Tensor | None,
    down_weight: Tensor,
    down_scale: Tensor,
    eps: float,
    activation: str,
    out_features: Sequence[int] = (),
    in_features: Sequence[int] = (),
) -> Tensor:
    """Norm, gate and up, activation, sub-norm and down projection in one op; no residual inside.

    `h = rms_norm(x)`, `z = act(linear(h, gate), linear(h, up))`, `y = linear(rms_norm(z), down)`,
    where act is `relu2_mul` or `silu_and_mul`; without sub_norm_weight the second norm is left
    out. Equal to that composition bit for bit for float32 and bfloat16. For float16 everything
    between the first norm and y stays float32, because squared ReLU overflows float16.

    Args:
        x: F [..., K].
        norm_weight: F [K].
        gate_weight, up_weight: packed uint8 [I, 32 * ceil(K / 128)], or private layouts.
        sub_norm_weight: F [I] or None.
        down_weight: packed uint8 [N, 32 * ceil(I / 128)], or a private layout.
        gate_scale, up_scale, down_scale: float32 [1] or one per row.
        eps: as `rms_norm`, for both norms.
        activation: "relu2" or "silu".
        out_features: (I, N); needed with private layouts, else it may be empty.
        in_features: (K, I), what gate and up, and down were packed for; empty takes any that fit.
    Returns:
        x.dtype [..., N].
    Raises:
        RuntimeError: as `rms_norm` and `linear`; another activation.
    Source: transformers BitNetMLP, LlamaMLP.
    """
    if torch.is_grad_enabled():
        _refuse_grad("mlp_forward", x=x, norm_weight=norm_weight, gate_scale=gate_scale)
        _refuse_grad("mlp_forward", up_scale=up_scale, down_scale=down_scale)
        _refuse_grad("mlp_forward", sub_norm_weight=sub_norm_weight)
    return cast(
        Tensor,
        _MLP_FORWARD(
            x,
            norm_weight,
            gate_weight,
            gate_scale,
            up_weight,
            up_scale,
            sub_norm_weight,
            down_weight,
            down_scale,
            eps,
            activation,
            out_features,
            in_features,
        ),
    )


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    start_positions: Tensor,
    scale: float,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Causal grouped-query attention over a KV cache, prefill and decode alike.

    `softmax(scale * q k^T) v` in float32; token t of sequence b sees the cache positions
    0 .. start_positions[b] + t; query head h reads key/value head h // (H / KV).
    Positions are taken in chunks of 64, whose softmaxes are merged in ascending order, so a token's
    result does not depend on how prefill was split. Positions that score -inf weigh nothing.
    Over int8 caches queries and weights become 16-bit integers and both sums are exact, so the
    result is off by those roundings alone (csrc/kernels/kernel_table.h, attend_chunk).

    Args:
        query: F [B, T, H, D], already rotated.
        key_cache, value_cache: float32, bfloat16 or int8 [B, KV, L, D], contiguous, holding the
            keys and values of these T tokens too (`kv_cache_update` first).
        start_positions: int64 [B], how many tokens of each sequence came before.
        scale: multiplies the scores, usually 1 / sqrt(D).
        key_scale, value_scale: float32 [B, KV, L] with int8 caches, whose D is at most 512.
    Returns:
        query.dtype [B, T, H, D].
    Raises:
        RuntimeError: a wrong dtype or shape, H not a multiple of KV, a position beyond L, scales
            without int8 caches or the other way round.
    Source: Vaswani et al. 2017; GQA, arXiv 2305.13245.
    """
    if torch.is_grad_enabled():
        _refuse_grad("attention", query=query, key_cache=key_cache, value_cache=value_cache)
        _refuse_grad("attention", key_scale=key_scale, value_scale=value_scale)
    return cast(
        Tensor,
        _ATTENTION(query, key_cache, value_cache, start_positions, scale, key_scale, value_scale),
    )


def kv_cache_update(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    start_positions: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write the keys and values of T new tokens into the caches, in place.

    `key_cache[b, h, start_positions[b] + t] = key[b, t, h]`, likewise value, rounded to the
    cache's dtype. A position out of range is an error before anything is written. An int8 cache
    gets `round(x * (127 / a))`, half to even, and the scale `a / 127`, with a = max(absmax of the
    row, 1e-30); a row that holds NaN or an infinity becomes zeros with the scale NaN.

    Args:
        key_cache, value_cache: float32, bfloat16 or int8 [B, KV, L, D], contiguous; both are
            mutated.
        key, value: F [B, T, KV, D], of one dtype.
        start_positions: int64 [B].
        key_scale, value_scale: float32 [B, KV, L] with int8 caches, mutated too.
    Raises:
        RuntimeError: a wrong dtype or shape, a position outside the cache, overlapping tensors.
    Source: the usual KV cache of decoder inference.
    """
    if torch.is_grad_enabled():
        _refuse_grad("kv_cache_update", key_cache=key_cache, value_cache=value_cache)
        _refuse_grad("kv_cache_update", key=key, value=value)
        _refuse_grad("kv_cache_update", key_scale=key_scale, value_scale=value_scale)
    _KV_CACHE_UPDATE(key_cache, value_cache, key, value, start_positions, key_scale, value_scale)
