"""Attention over bfloat16 caches, bit for bit, against the order of its definition in numpy.

The emulation follows kernel_table.h, attend_chunk: one float32 number after the other, vectors only
across positions or features that do not meet. Its fused multiply-add is exact.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitnet_ops.nn.kv_pool import attend_rectangular as attend
from bounds import assert_equal
from cache_types import rounded
from isa_control import every_configuration
from ops_attention import attention_arguments

Floats = NDArray[np.float32]
F = np.float32


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c, rounded once: the product is exact in float64, the sum is rounded to odd there."""
    p, c64 = a.astype(np.float64) * b, np.float64(c)
    s = p + c64
    back = s - p
    lost = (p - (s - back)) + (c64 - back)
    bits = np.ascontiguousarray(s).view(np.int64)
    toward = np.where((lost > 0) == (s > 0), 1, -1)
    odd = np.where((lost != 0) & (bits % 2 == 0), bits + toward, bits)
    return odd.view(np.float64).astype(F)


def exp(x: Floats) -> Floats:
    v = np.minimum(F(89), np.maximum(F(-87), x))
    n = np.rint(v * F(1.44269504088896341)).astype(F)
    r = fma(n, F(2.12194440e-4), fma(n, F(-0.693359375), v))
    p = np.full_like(r, F(1) / F(5040))
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        p = fma(p, r, np.full_like(r, F(1) / F(divisor)))
    return p * np.exp2(n)


def as_bfloat16(x: Floats) -> Floats:
    return rounded(torch.from_numpy(np.array(x)), torch.bfloat16).float().numpy()


def two_chains(a: Floats, b: Floats) -> Floats:
    """Over the first axis: [n, ...] and [n, ...] -> [...]."""
    total = np.zeros(np.broadcast_shapes(a.shape, b.shape)[1:], F)
    for group in range(0, len(a), 32):
        chains = [np.zeros_like(total), np.zeros_like(total)]
        for i in range(group, min(group + 32, len(a))):
            chains[i % 2] = fma(a[i], b[i], chains[i % 2])
        total = total + (chains[0] + chains[1])
    return total


def chunk(query: Floats, keys: Floats, values: Floats, scale: float) -> tuple[Floats, F, F]:
    """Of one query row [D] and up to 64 positions [n, D]: acc [D], max, sum."""
    scores = F(scale) * two_chains(query[:, None], np.ascontiguousarray(keys.T))
    top = scores.max()
    weights = as_bfloat16(exp(scores - top))
    lanes = np.zeros(16, F)
    for j, weight in enumerate(weights):
        lanes[j % 16] += weight
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return two_chains(weights[:, None], values), top, lanes[0]


def attention(query: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """F [T, H, D] over bfloat16 [KV, L, D] -> float32 [T, H, D]."""
    out = torch.empty(query.shape)
    for t in range(query.shape[0]):
        for h in range(query.shape[1]):
            q = as_bfloat16(query[t, h].float().numpy())
            kv = h // (query.shape[1] // keys.shape[0])
            k, v = (x[kv, : start + t + 1].float().numpy() for x in (keys, values))
            acc, top, total = chunk(q, k[:64], v[:64], scale)
            for at in range(64, len(k), 64):
                later, peak, more = chunk(q, k[at : at + 64], v[at : at + 64], scale)
                best = max(top, peak)
                keep, take = exp(np.array([top - best, peak - best]))
                total = fma(np.array(more), take, np.array(total * keep))[()]
                acc, top = fma(later, np.broadcast_to(take, later.shape), acc * keep), best
            out[t, h] = torch.from_numpy(acc / total)
    return out


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "length", "head_dim"),
    [
        (1, 4, 1, 200, 128),
        (1, 1, 1, 65, 33),
        (3, 6, 2, 98, 40),
        (9, 8, 2, 70, 64),
        (30, 2, 1, 95, 5),
    ],
    ids=str,
)
def test_every_configuration_follows_the_order(
    tokens: int, heads: int, kv_heads: int, length: int, head_dim: int, rng: torch.Generator
) -> None:
    query, keys, values, _, scale = attention_arguments(
        rng, batch=1, tokens=tokens, heads=heads, kv_heads=kv_heads, length=length,
        head_dim=head_dim, cache_dtype=torch.bfloat16,
    )  # fmt: skip
    start = length - tokens
    expected = attention(query[0], keys[0], values[0], start, scale)
    for configuration in every_configuration():
        out = attend(query, keys, values, torch.tensor([start]), scale)
        assert_equal(out[0], expected, configuration)


def test_what_is_tiny_counts_as_zero(isa: str, rng: torch.Generator) -> None:
    """In queries, whose smallest numbers would else decide between huge keys; written likewise."""
    query = torch.zeros(1, 1, 1, 32)
    query[..., 0] = 2.0**-56
    keys = torch.zeros(1, 1, 2, 32, dtype=torch.bfloat16)
    keys[0, 0, 1, 0] = 2.0**60
    values = torch.eye(2, 32, dtype=torch.bfloat16)[None, None]
    out = attend(query, keys, values, torch.tensor([1]), 1.0)
    assert out.flatten()[:2].tolist() == [0.5, 0.5]
    query[..., 0] = 2.0**-55
    out = attend(query, keys, values, torch.tensor([1]), 1.0)
    assert out.flatten()[:2].tolist()[1] > 0.99
