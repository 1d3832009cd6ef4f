"""Specs of attention and of its caches."""

from __future__ import annotations

import torch
from torch import Tensor

from bounds import EXP_ERROR, U, smallest, storing_error, sum_error
from cache_types import BF16_LEAST, E4M3, KV_TYPES_TEXT, rounded
from op_changes import (
    BF16,
    F32,
    F64,
    FLOATS_TEXT,
    I32,
    add_dim,
    narrow,
    noncontiguous,
    to,
    value,
)
from op_schema import named, positional
from op_spec import Call, Rejections, spec
from op_values import (
    CACHE_DTYPES,
    FLOATS,
    KV_DTYPES,
    SCALED_KV_DTYPES,
    Arguments,
    Built,
    dtype_name,
    positive,
    strided,
    transposed,
)

OF_KV_TYPES = f"of dtype {KV_TYPES_TEXT}, got "


def cache_memory(
    g: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, shift: float = 0.0
) -> tuple[Tensor, list[Tensor]]:
    """A cache about normal around `shift`; and its scales, if it has some."""
    if dtype not in SCALED_KV_DTYPES:
        return (torch.randn(*shape, generator=g) + shift).to(dtype), []
    codes = torch.randint(-127, 128, shape, generator=g, dtype=dtype)
    return codes, [positive(g, *shape[:-1]) / 50]


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


def with_window(op: str, args: Arguments, window: int) -> Arguments:
    return positional(op, **{**named(op, args), "window": window})


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
    size = query.double().abs() + BF16_LEAST
    magnitude = torch.einsum("bthd,bhld->bthl", size, wide).amax(-1) * abs(scale)
    largest = values[:, :, :length].double().abs().amax(2).repeat_interleave(group, dim=1)
    moved = bfloat16_error(magnitude)[..., None] + length * BF16_LEAST
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


def _attention_samples() -> Built:
    for query in FLOATS:
        for cache in KV_DTYPES:
            yield (
                f"{dtype_name(query)}_over_{dtype_name(cache)}",
                lambda g, q=query, c=cache: attention_arguments(g, query_dtype=q, cache_dtype=c),
            )
    yield "decode", lambda g: attention_arguments(g, tokens=1)
    yield "decode_int8", lambda g: attention_arguments(
        g, batch=1, tokens=1, heads=8, length=150, head_dim=50, cache_dtype=torch.int8
    )  # fmt: skip
    yield "one_head", lambda g: attention_arguments(g, heads=1, kv_heads=1, head_dim=5)
    yield "group_of_four", lambda g: attention_arguments(g, heads=8, kv_heads=2, batch=1)
    yield "long", lambda g: attention_arguments(g, length=70, tokens=2, batch=1)
    yield "no_tokens", lambda g: attention_arguments(g, tokens=0)
    yield "no_batch", lambda g: attention_arguments(g, batch=0)
    for cache in KV_DTYPES:
        for window in (5, 70):
            yield (
                f"window_of_{window}_over_{dtype_name(cache)}",
                lambda g, c=cache, w=window: with_window(
                    "attention",
                    attention_arguments(
                        g, batch=1, tokens=90, length=150, heads=3, kv_heads=1, cache_dtype=c
                    ),
                    w,
                ),
            )
    yield (
        "decode_in_a_window",
        lambda g: with_window(
            "attention", attention_arguments(g, tokens=1, length=300, cache_dtype=BF16), 100
        ),
    )
    yield "strided_query", lambda g: (
        lambda q, *rest: (strided(q), *rest)
    )(*attention_arguments(g))  # fmt: skip


def wide_cache(a: Arguments) -> Tensor:
    return torch.zeros(2, 2, 12, 513, dtype=torch.int8)


def wide_query(a: Arguments) -> Tensor:
    return torch.zeros(2, 3, 4, 513)


_ATTENTION_REJECTIONS: Rejections = [
    ({"query": to("query", F64)}, "query", FLOATS_TEXT + "float64"),
    ({"query": lambda a: a["query"][0]}, "query", "with 4 dimensions"),
    ({"query": lambda a: a["query"][..., :8]}, "query", "of shape [2, 3, 4, 16]"),
    ({"query": narrow("query", 0)}, "query", "of shape [2, 3, 4, 16]"),
    ({"query": narrow("query", 2)}, "query", "multiple of the cache's 2 heads, got 3"),
    ({"key_cache": to("key_cache", F64)}, "key_cache", OF_KV_TYPES + "float64"),
    ({"key_scale": value(torch.ones(2, 2, 12))}, "key_scale", "to be left out"),
    ({"value_cache": to("value_cache", BF16)}, "value_cache", "of dtype float32"),
    ({"value_cache": to("value_cache", E4M3)}, "value_cache", "float32, got float8_e4m3fn"),
    ({"value_cache": narrow("value_cache", 2)}, "value_cache", "shape of key_cache"),
    ({"key_cache": noncontiguous("key_cache")}, "key_cache", "contiguous"),
    ({"value_cache": noncontiguous("value_cache")}, "value_cache", "contiguous"),
    (
        {"start_positions": to("start_positions", I32)},
        "start_positions", "of dtype int64, got int32",
    ),
    ({"start_positions": narrow("start_positions")}, "start_positions", "shape [2]"),
    (
        {"start_positions": value(torch.tensor([0, 10]))},
        "start_positions", "in [0, 9] for 3 token(s) in a cache of length 12, got 10 for sequence",
    ),
    ({"start_positions": value(torch.tensor([-1, 0]))}, "start_positions", "got -1 for sequence 0"),
    (
        {"start_positions": value(torch.tensor([2**63 - 1, 0]))},
        "start_positions", "got 9223372036854775807 for sequence 0",
    ),
    ({"scale": value(float("nan"))}, "scale", "finite, got nan"),
    ({"scale": value(float("inf"))}, "scale", "finite, got inf"),
    ({"window": value(-1)}, "window", "at least 0 (none), got -1"),
]  # fmt: skip
_ATTENTION_INT8_REJECTIONS: Rejections = [
    ({"key_scale": value(None)}, "key_scale", "int8 caches, got none"),
    ({"value_scale": value(None)}, "value_scale", "int8 caches, got none"),
    ({"key_scale": to("key_scale", BF16)}, "key_scale", "of dtype float32"),
    ({"key_scale": narrow("key_scale")}, "key_scale", "of shape [2, 2, 12]"),
    ({"value_scale": noncontiguous("value_scale")}, "value_scale", "contiguous"),
    ({"value_cache": to("value_cache", F32)}, "value_cache", "of dtype int8"),
    ({"key_cache": to("key_cache", torch.uint8)}, "key_cache", "got uint8"),
    ({"value_scale": lambda a: a["key_scale"]}, "value_scale", "in its own memory"),
    (
        {"key_cache": wide_cache, "value_cache": wide_cache, "query": wide_query},
        "key_cache", "with heads of at most 512 features for int8, got 513",
    ),
    ({"start_positions": to("start_positions", I32)}, "start_positions", "of dtype int64"),
    ({"scale": value(float("nan"))}, "scale", "finite, got nan"),
]  # fmt: skip

spec(
    attention,
    samples=_attention_samples,
    large=[
        lambda g: attention_arguments(
            g, batch=3, tokens=19, heads=6, kv_heads=2, length=131, head_dim=40,
        ),
        lambda g: attention_arguments(
            g, batch=1, tokens=1, heads=10, kv_heads=5, length=700, head_dim=64,
            cache_dtype=torch.bfloat16,
        ),
    ],
    calls={
        "": Call(lambda g: named("attention", attention_arguments(g)), _ATTENTION_REJECTIONS),
        "int8": Call(
            lambda g: named("attention", attention_arguments(g, cache_dtype=torch.int8)),
            _ATTENTION_INT8_REJECTIONS,
        ),
    },
    bound=attention_bound,
    empty={
        "": lambda: (
            torch.empty(1, 0, 1, 8), *(torch.empty(1, 1, 0, 8) for _ in "kv"),
            torch.zeros(1, dtype=torch.int64), 1.0,
        ),
    },
)  # fmt: skip

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


def _kv_cache_update_samples() -> Built:
    for dtype in FLOATS:
        for cache in CACHE_DTYPES:
            yield (
                f"{dtype_name(dtype)}_into_{dtype_name(cache)}",
                lambda g, d=dtype, c=cache: cache_arguments(g, dtype=d, cache_dtype=c),
            )
        for cache in SCALED_KV_DTYPES:
            yield (
                f"{dtype_name(dtype)}_into_{dtype_name(cache)}",
                lambda g, d=dtype, c=cache: cache_arguments(g, dtype=d, cache_dtype=c, head_dim=37),
            )
    yield "decode", lambda g: cache_arguments(g, tokens=1)
    yield "whole_cache", lambda g: cache_arguments(g, tokens=9)
    yield "no_tokens", lambda g: cache_arguments(g, tokens=0)
    yield "strided", lambda g: (
        lambda kc, vc, k, v, s: (kc, vc, strided(k), transposed(v), s)
    )(*cache_arguments(g))  # fmt: skip


def overlapping_caches(a: Arguments) -> Tensor:
    """A value cache that begins in the middle of the key cache."""
    key_cache = a["key_cache"]
    memory = torch.zeros(key_cache.numel() * 2)
    a["key_cache"] = memory[: key_cache.numel()].view_as(key_cache)
    start = key_cache.numel() // 2
    return memory[start : start + key_cache.numel()].view_as(key_cache)


def key_inside_cache(a: Arguments) -> Tensor:
    """New keys that are a contiguous piece of the very cache they are to be written into."""
    return a["key_cache"].flatten()[8 : 8 + a["key"].numel()].view_as(a["key"])


_CACHE_UPDATE_REJECTIONS: Rejections = [
    ({"key": to("key", F64)}, "key", FLOATS_TEXT + "float64"),
    ({"value": to("value", BF16)}, "value", "of dtype float32, got bfloat16"),
    ({"key": narrow("key", 2)}, "key", "[2, 3, 2, 8], got [2, 3, 1, 8]"),
    ({"value": narrow("value", 1)}, "value", "of the shape of key"),
    ({"key": lambda a: a["key"][0]}, "key", "with 4 dimensions"),
    ({"key_cache": to("key_cache", F64)}, "key_cache", OF_KV_TYPES + "float64"),
    ({"value_cache": to("value_cache", E4M3)}, "value_cache", "float32, got float8_e4m3fn"),
    ({"key_cache": noncontiguous("key_cache")}, "key_cache", "contiguous"),
    ({"value_cache": noncontiguous("value_cache")}, "value_cache", "contiguous"),
    ({"value_cache": lambda a: a["key_cache"]}, "value_cache", "in its own memory"),
    ({"value_cache": overlapping_caches}, "value_cache", "in its own memory"),
    ({"key": key_inside_cache}, "key", "in its own memory"),
    (
        {"start_positions": value(torch.tensor([7, 0]))},
        "start_positions", "in [0, 6] for 3 token(s) in a cache of length 9, got 7 for sequence 0",
    ),
    ({"start_positions": value(torch.tensor([0, -1]))}, "start_positions", "got -1 for sequence 1"),
]  # fmt: skip
_KV_CACHE_UPDATE_INT8_REJECTIONS: Rejections = [
    ({"key": to("key", torch.int8)}, "key", FLOATS_TEXT + "int8"),
    ({"value": to("value", BF16)}, "value", "of dtype float32"),
    ({"key_cache": narrow("key_cache")}, "value_cache", "of the shape"),
    ({"value_cache": to("value_cache", F32)}, "value_cache", "dtype int8"),
    ({"start_positions": value(torch.tensor([7, 0]))}, "start_positions", "in [0, 6]"),
    ({"value_scale": value(None)}, "value_scale", "caches, got none"),
    ({"key_scale": add_dim("key_scale")}, "key_scale", "shape [2, 2, 9]"),
]  # fmt: skip

spec(
    kv_cache_update,
    samples=_kv_cache_update_samples,
    large=[
        lambda g: cache_arguments(
            g, batch=3, tokens=40, kv_heads=4, length=64, head_dim=40, cache_dtype=torch.bfloat16,
        ),
    ],
    calls={
        "": Call(lambda g: named("kv_cache_update", cache_arguments(g)), _CACHE_UPDATE_REJECTIONS),
        "int8": Call(
            lambda g: named("kv_cache_update", cache_arguments(g, cache_dtype=torch.int8)),
            _KV_CACHE_UPDATE_INT8_REJECTIONS,
        ),
    },
    mutates=frozenset({"key_cache", "value_cache", "key_scale", "value_scale"}),
    overlapping=lambda g, dtype: cache_arguments(g, cache_dtype=dtype),
    empty={
        "": lambda: (
            *(torch.empty(1, 1, 2**40, 0) for _ in "kv"),
            *(torch.empty(1, 2**40, 1, 0) for _ in "kv"), torch.zeros(1, dtype=torch.int64),
        ),
    },
)  # fmt: skip
