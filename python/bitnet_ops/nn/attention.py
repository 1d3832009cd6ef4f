"""Attention policies: what a layer does with its projected queries, keys and values.

One policy today, dense causal attention over the whole cache. A policy rotates, writes the cache
and reads it; it must not know weights, norms or models.
"""

from __future__ import annotations

from torch import Tensor

from bitnet_ops import ops


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    start_positions: Tensor,
    scale: float,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Rotate, append to the cache, attend causally: query F [B, T, H, D] -> the same shape.

    key, value F [B, T, KV, D]; cos_sin f32 [B, T, D] of the tokens' absolute positions; caches
    [B, KV, L, D], written at start_positions int64 [B]; scale multiplies the scores. Query head n
    reads kv head n // (H / KV); token t of sequence b sees positions 0 .. start_positions[b] + t.
    key_scale, value_scale f32 [B, KV, L] with int8 caches.
    """
    query = ops.rope(query, cos_sin)
    key = ops.rope(key, cos_sin)
    ops.kv_cache_update(key_cache, value_cache, key, value, start_positions, key_scale, value_scale)
    return ops.attention(
        query, key_cache, value_cache, start_positions, scale, key_scale, value_scale
    )
