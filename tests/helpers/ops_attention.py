"""Attention over rectangular caches, and writing them: what those of pools are told by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitnet_ops.nn.kv_pool import attend_rectangular, update_rectangular
from bounds import EXP_ERROR, U, smallest, storing_error, sum_error
from cache_types import BF16_MIN, KV_TYPES_TEXT, rounded
from op_changes import BF16
from op_spec import reference
from op_values import SCALED_KV_DTYPES, Arguments, positive

OF_KV_TYPES = f"of dtype {KV_TYPES_TEXT}, got "


def cache_memory(
    g: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, shift: float = 0.0
) -> tuple[Tensor, list[Tensor]]:
    """A cache about normal around `shift`; and its scales, if it has some."""
    if dtype not in SCALED_KV_DTYPES:
        return (torch.randn(*shape, generator=g) + shift).to(dtype), []
    codes = torch.randint(-127, 128, shape, generator=g, dtype=dtype)
    return codes, [positive(g, *shape[:-1]) / 50]


def attention_by(o: Any) -> Callable[..., Tensor]:
    """Attention over rectangular caches as the ops of `o` do it."""
    return attention if o is reference else getattr(o, "attention", attend_rectangular)


def kv_cache_update_by(o: Any) -> Callable[..., None]:
    """Writing them likewise."""
    return kv_cache_update if o is reference else getattr(o, "kv_cache_update", update_rectangular)


# attention ----------------------------------------------------------------------------------------


def attention_arguments(
    g: torch.Generator,
    *,
    batch: int = 2,
    tokens: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    length: int = 12,
    head_dim: int = 16,
    query_dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32,
) -> Arguments:
    """The scales of caches that have some come last."""
    cache = (batch, kv_heads, length, head_dim)
    query = torch.randn(batch, tokens, heads, head_dim, generator=g).to(query_dtype)
    keys, key_scale = cache_memory(g, cache, cache_dtype)
    values, value_scale = cache_memory(g, cache, cache_dtype, 0.5)
    starts = torch.randint(0, length - tokens + 1, (batch,), generator=g)
    return (query, keys, values, starts, head_dim**-0.5, *key_scale, *value_scale)


def _dequantized(cache: Tensor, scale: Tensor | None) -> Tensor:
    wide = cache.to(torch.float64)
    return wide if scale is None else wide * scale.to(torch.float64)[..., None]


def with_window(args: Arguments, window: int) -> Arguments:
    """Of `attention`, with the arguments that stand before the window."""
    return (*args, *[None] * (7 - len(args)), window)


def seen_from(position: int, window: int) -> slice:
    """The positions that a token at `position` sees: all up to itself, or the last `window`."""
    first = position - window + 1 if window else 0
    return slice(max(first, 0), position + 1)


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    start_positions: Tensor,
    scale: float,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """F [B, T, H, D] over caches [B, KV, L, D] -> query.dtype [B, T, H, D]."""
    key_cache, value_cache = (
        _dequantized(key_cache, key_scale),
        _dequantized(value_cache, value_scale),
    )
    out = torch.empty_like(query, dtype=torch.float64, memory_format=torch.contiguous_format)
    heads_per_kv = query.shape[2] // key_cache.shape[1]
    for b, start in enumerate(start_positions.tolist()):
        for t in range(query.shape[1]):
            for h in range(query.shape[2]):
                visible = seen_from(start + t, window)
                keys = key_cache[b, h // heads_per_kv, visible]
                values = value_cache[b, h // heads_per_kv, visible]
                scores = keys @ query[b, t, h].to(torch.float64) * scale
                out[b, t, h] = torch.softmax(scores, dim=0) @ values
    return out.to(torch.float32).to(query.dtype)


def attention_over_bfloat16(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    start_positions: Tensor,
    scale: float,
    key_scale: None = None,
    value_scale: None = None,
    window: int = 0,
) -> Tensor:
    """`attention` with the roundings of the definition to bfloat16: of queries and of weights.

    Weights are rounded relative to the largest of their chunk of 64 positions; sums are float64.
    """
    out = torch.empty(query.shape, dtype=torch.float64)
    group = query.shape[2] // key_cache.shape[1]
    wide = rounded(query, BF16).double()
    for b, start in enumerate(start_positions.tolist()):
        for t in range(query.shape[1]):
            for h in range(query.shape[2]):
                visible = seen_from(start + t, window)
                scores = key_cache[b, h // group, visible].double() @ wide[b, t, h] * scale
                chunks = torch.arange(visible.start, visible.stop) // 64
                tops = torch.stack([scores[chunks == c].max() for c in chunks])
                weights = rounded(torch.exp(scores - tops).float(), BF16).double()
                weights *= torch.exp(tops - scores.max())
                values = value_cache[b, h // group, visible].double()
                out[b, t, h] = weights @ values / weights.sum()
    return out.to(torch.float32).to(query.dtype)


def attention_bound(args: Arguments, expected: Tensor) -> Tensor:
    if expected.numel() == 0:
        return torch.zeros(expected.shape, dtype=torch.float64)
    if len(args) > 5 and args[5] is not None:
        return int8_attention_bound(args[:7], expected)
    args = args[:5]  # a window leaves out terms of what follows
    if args[1].dtype == torch.bfloat16:
        return bfloat16_attention_bound(args, expected)
    query, key_cache, value_cache, starts, scale = args
    tokens, heads, head_dim = query.shape[1:]
    group = heads // key_cache.shape[1]
    keys = key_cache.double().repeat_interleave(group, dim=1)
    values = value_cache.double().repeat_interleave(group, dim=1)
    magnitude = torch.einsum("bthd,bhld->bthl", query.double().abs(), keys.abs()) * abs(scale)
    visible = starts[:, None] + torch.arange(tokens) + 1
    length = int(visible.max())
    # Error of a score: the dot product, then * scale and - max; exp turns it into a relative error
    # of a weight, numerator and denominator both.
    score = magnitude[..., :length].amax(dim=-1) * (sum_error(head_dim) + 3 * U)
    relative = 2 * (score + EXP_ERROR) + 2 * sum_error(length) + 4 * U
    largest = values[:, :, :length].abs().amax(dim=2)
    bound = relative[..., None] * largest[:, None]
    stored = storing_error(expected.dtype) * expected.double().abs()
    return bound + stored + smallest(expected.dtype)


BF16_STEP = 2.0**-8  # what rounding to bfloat16 moves a number by, relative to it


def bfloat16_error(magnitude: Tensor) -> Tensor:
    """Relative to the weighted magnitudes of values: queries and weights rounded to bfloat16.

    magnitude: the largest sum of |query * key| * scale. Scores move by a step of it, and by less
    than 32 U of it in two chains of 16 and adding them up; then every weight by a factor, in
    numerator and denominator.
    """
    factor = torch.exp(2 * magnitude * (BF16_STEP + 32 * U))
    return factor * (1 + BF16_STEP) / (1 - BF16_STEP) - 1


def bfloat16_attention_bound(args: Arguments, expected: Tensor) -> Tensor:
    """Queries and weights rounded to 8 bits, everything else as with the other caches."""
    query, keys, values, starts, scale = args
    tokens, heads, head_dim = query.shape[1:]
    assert head_dim <= 256 and abs(scale) <= 1  # 16 + 1 + 8 roundings of a score
    group, length = heads // keys.shape[1], int((starts + tokens).max())
    wide = keys[:, :, :length].double().abs().repeat_interleave(group, dim=1)
    size = query.double().abs() + BF16_MIN
    magnitude = torch.einsum("bthd,bhld->bthl", size, wide).amax(-1) * abs(scale)
    largest = values[:, :, :length].double().abs().amax(2).repeat_interleave(group, dim=1)
    moved = bfloat16_error(magnitude)[..., None] + length * BF16_MIN
    floats = attention_bound((query, keys.float(), values.float(), starts, scale), expected)
    return floats + 1.01 * moved * largest[:, None]


def int8_attention_bound(args: Arguments, expected: Tensor) -> Tensor:
    """Queries and weights rounded to 16 bits, everything else as with float caches.

    A weight times the scale of its value is off by half a step of the largest of its chunk, and a
    step is that / 32512; the factors' own roundings move a code by less than 0.004.
    """
    half_step = 0.504 / 32512
    query, keys, values, starts, scale, key_scale, value_scale = args
    plain = keys.double() * key_scale.double()[..., None]
    floats = (query, plain, values.double() * value_scale.double()[..., None], starts, scale)
    group, length = query.shape[2] // keys.shape[1], int((starts + query.shape[1]).max())
    steps = half_step * query.double().abs().amax(-1) * abs(scale)  # of a score, for every feature
    largest_key = plain[:, :, :length].abs().sum(-1).amax(-1).repeat_interleave(group, dim=1)
    score = (
        steps * largest_key[:, None]
        + 6
        * U
        * query.double().norm(dim=-1)
        * abs(scale)
        * (plain[:, :, :length].norm(dim=-1).amax(-1).repeat_interleave(group, dim=1)[:, None])
    )
    size = floats[2][:, :, :length].abs().amax(dim=2).repeat_interleave(group, dim=1)[:, None]
    # A weight is at most 1, and so is the sum of all.
    codes = values[:, :, :length].double().abs().sum(2).repeat_interleave(group, dim=1)
    largest_scale = value_scale[:, :, :length].double().amax(-1).repeat_interleave(group, dim=1)
    lost = half_step * (largest_scale[..., None] * codes)[:, None]
    return attention_bound(floats, expected) + 2.02 * score[..., None] * size + 1.01 * lost


# kv_cache_update ----------------------------------------------------------------------------------


def cache_arguments(
    g: torch.Generator,
    *,
    batch: int = 2,
    tokens: int = 3,
    kv_heads: int = 2,
    length: int = 9,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32,
) -> Arguments:
    """The scales of caches that have some come last."""
    shape = (batch, kv_heads, length, head_dim)
    caches, scales = zip(*(cache_memory(g, shape, cache_dtype) for _ in "kv"), strict=True)
    new = [torch.randn(batch, tokens, kv_heads, head_dim, generator=g).to(dtype) for _ in "kv"]
    starts = torch.randint(0, length - tokens + 1, (batch,), generator=g)
    return (*caches, *new, starts, *scales[0], *scales[1])


def kv_cache_update(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    start_positions: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write key, value [B, T, KV, D] into the caches [B, KV, L, D] at start .. start + T - 1."""
    new = (key_cache, key, key_scale), (value_cache, value, value_scale)
    for b, start in enumerate(start_positions.tolist()):
        at = slice(start, start + key.shape[1])
        for cache, rows, scales in new:
            moved = rows[b].transpose(0, 1)
            if scales is not None:
                moved, scales[b, :, at] = _quantized_rows(moved)
            cache[b, :, at] = rounded(moved, cache.dtype)


def _quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """F [..., D] -> int8 codes and float32 scales [...]."""
    x = x.to(torch.float32)
    finite = torch.isfinite(x).all(dim=-1)
    absmax = x.abs().amax(dim=-1).clamp(min=1e-30)
    codes = torch.round(x * (torch.tensor(127.0) / absmax)[..., None])
    codes = torch.where(finite[..., None], codes, torch.zeros_like(codes))
    return codes.to(torch.int8), torch.where(finite, absmax / 127.0, torch.nan)
