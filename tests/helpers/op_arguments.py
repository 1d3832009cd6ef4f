"""Whole argument lists of the ops that take many: fused projections, attention, caches, a step.

Each function returns arguments in the order of the op's schema.
"""

from __future__ import annotations

import torch
from torch import Tensor

from op_schema import named, positional
from op_values import (
    SCALED_KV_DTYPES,
    Arguments,
    activations,
    gain,
    positive,
    private,
    quantized_head,
    random_packed,
)


def mlp_arguments(
    g: torch.Generator, x: Tensor, activation: str, sub_norm: bool = True, intermediate: int = 150
) -> Arguments:
    k, dtype = x.shape[-1], x.dtype
    return (
        x, gain(g, k, dtype),
        random_packed(g, intermediate, k), positive(g, 1),
        random_packed(g, intermediate, k), positive(g, 1),
        gain(g, intermediate, dtype) if sub_norm else None,
        random_packed(g, k, intermediate), positive(g, 1),
        1e-5, activation,
    )  # fmt: skip


def private_mlp_arguments(g: torch.Generator, k: int, inner: int, fmt: str) -> Arguments:
    args = list(mlp_arguments(g, activations(g, 3, k), "relu2", intermediate=inner))
    for index, width in ((2, k), (4, k), (7, inner)):
        args[index] = private(args[index], width, fmt)
    return (*args, [inner, k])


def qkv_arguments(g: torch.Generator, x: Tensor, k: int, gain_dtype: torch.dtype) -> Arguments:
    shards = [part for n in (12, 4, 6) for part in (random_packed(g, n, k), positive(g, 1))]
    return (x, gain(g, k, gain_dtype), *shards, 1e-5)


def private_qkv_arguments(g: torch.Generator, k: int, fmt: str) -> Arguments:
    args = list(qkv_arguments(g, activations(g, 3, k), k, torch.float32))
    rows = [args[index].shape[0] for index in (2, 4, 6)]
    for index in (2, 4, 6):
        args[index] = private(args[index], k, fmt)
    return (*args, rows)


def cache_memory(
    g: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, shift: float = 0.0
) -> tuple[Tensor, list[Tensor]]:
    """A cache about normal around `shift`; and its scales, if it has some."""
    if dtype not in SCALED_KV_DTYPES:
        return (torch.randn(*shape, generator=g) + shift).to(dtype), []
    codes = torch.randint(-127, 128, shape, generator=g, dtype=dtype)
    return codes, [positive(g, *shape[:-1]) / 50]


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


def head_arguments(g: torch.Generator, x: Tensor, v: int, form: str, group: int) -> Arguments:
    return (x, *quantized_head(g, v, x.shape[-1], form, group), v)


def decode_step_arguments(
    g: torch.Generator,
    *,
    layers: int = 1,
    batch: int = 2,
    tokens: int = 1,
    hidden: int = 70,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    inner: int = 150,
    vocab: int = 37,
    length: int = 12,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32,
    head: tuple[str, int] | torch.dtype = torch.float32,
    weight_format: str = "canonical",
    sub_norms: bool = True,
    activation: str = "relu2",
    logits_to_keep: int = 0,
) -> Arguments:
    """The scales of caches that have some come last."""
    query, kv = heads * head_dim, kv_heads * head_dim
    shapes = [(query, hidden), (kv, hidden), (kv, hidden), (hidden, query)]
    shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    gains = layers * (2 * hidden + (query + inner if sub_norms else 0)) + hidden
    cache = (layers, batch, kv_heads, length, head_dim)
    weights = [(random_packed(g, n, k), k) for _ in range(layers) for n, k in shapes]
    if weight_format != "canonical":
        weights = [(private(w, k, weight_format), k) for w, k in weights]
    if isinstance(head, tuple):
        head_parts: Arguments = quantized_head(g, vocab, hidden, *head)
    else:
        head_parts = (torch.randn(vocab, hidden, generator=g).to(head), None)
    keys, key_scale = cache_memory(g, cache, cache_dtype)
    values, value_scale = cache_memory(g, cache, cache_dtype, 0.5)
    return positional(
        "decode_step",
        x=activations(g, batch, tokens, hidden),
        weights=[weight for weight, _ in weights],
        scales=positive(g, layers, 7) / 8, norm_weights=gain(g, gains),
        head_weight=head_parts[0], head_scale=head_parts[1],
        key_cache=keys, value_cache=values,
        start_positions=torch.randint(0, length - tokens + 1, (batch,), generator=g),
        dtype=dtype, num_heads=heads, intermediate_size=inner, vocab_size=vocab,
        sub_norms=sub_norms, activation=activation, eps=1e-5, rope_theta=10000.0,
        scale=head_dim**-0.5, logits_to_keep=logits_to_keep,
        **dict(zip(("key_scale", "value_scale"), (*key_scale, *value_scale), strict=False)),
    )  # fmt: skip


def with_gaps(arguments: Arguments) -> Arguments:
    """Caches that are the first sequences of a longer batch, as KVCache.keep leaves them."""
    given = named("decode_step", arguments)
    for name in ("key_cache", "value_cache"):
        cache = given[name]
        wide = torch.zeros(cache.shape[0], cache.shape[1] + 2, *cache.shape[2:], dtype=cache.dtype)
        wide[:, : cache.shape[1]] = cache
        given[name] = wide[:, : cache.shape[1]]
    return positional("decode_step", **given)
