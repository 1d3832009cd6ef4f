"""The floating-point types of KV caches against torch's casts, on every instruction set.

Exhaustive: every code is read, every bfloat16 and float16 is written, and float32 numbers at and
beside every tie, and at random. Codes go in and out through the ops: a query over one position gets
its value back unchanged, since the only weight is 1.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bitnet_ops.nn.kv_pool import attend_rectangular as attend
from bitnet_ops.nn.kv_pool import update_rectangular
from cache_types import E4M3, EIGHT_BITS, INFINITE, LARGEST, OVERFLOW, rounded


def written(x: Tensor, dtype: torch.dtype) -> Tensor:
    """F [n] -> [n] of `dtype`, as kv_cache_update writes them; n a multiple of 256."""
    rows = x.view(1, -1, 1, 256)
    caches = [torch.zeros(1, 1, rows.shape[1], 256, dtype=dtype) for _ in "kv"]
    update_rectangular(*caches, rows, -rows, torch.zeros(1, dtype=torch.int64))
    assert torch.equal((-caches[1].float()).nan_to_num(), caches[0].float().nan_to_num())
    return caches[0].flatten()


def read(codes: Tensor, heads: int) -> Tensor:
    """[n] of any type of caches -> float32 [n], by `heads` queries over one position each."""
    values = codes.view(-1, 1, 1, 128)
    queries = torch.zeros(len(values), 1, heads, 128)
    starts = torch.zeros(len(values), dtype=torch.int64)
    out = attend(queries, torch.zeros_like(values), values, starts, 1.0)
    for head in range(1, heads):
        assert torch.equal(out[:, :, head].view(torch.int32), out[:, :, 0].view(torch.int32))
    return out[:, :, 0].flatten()


def bits(x: Tensor) -> Tensor:
    """The codes of x, every NaN the same one."""
    wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize]
    return torch.where(x.float().isnan(), torch.full((), -1).to(wide), x.view(wide))


def every(dtype: torch.dtype) -> Tensor:
    """All numbers of a type of one or two bytes, NaN and infinities among them."""
    if dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(dtype)
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def float32_samples(dtype: torch.dtype) -> Tensor:
    """Every number of `dtype`, every tie, what lies beside them; 2^20 random patterns."""
    finite = every(dtype).double()
    finite = finite[finite.isfinite() & (finite >= 0)].sort().values
    beyond = finite[-1] + (finite[-1] - finite[-2])
    ties = (finite + torch.cat([finite[1:], beyond[None]])) / 2
    exact = torch.cat([finite, ties, beyond[None]]).float()
    beside = [torch.nextafter(exact, torch.tensor(to)) for to in (0.0, math.inf)]
    some = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(1))
    x = torch.cat([exact, *beside])
    x = torch.cat([x, -x, some.to(torch.int32).view(torch.float32)])
    return torch.nn.functional.pad(x, (0, -len(x) % 256))


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 32], ids=str)
@pytest.mark.parametrize("dtype", [*EIGHT_BITS, torch.float16, torch.bfloat16], ids=str)
def test_every_code_is_read_as_torch_does(dtype: torch.dtype, heads: int, isa: str) -> None:
    """32 heads of one KV head take the path of blocks, which lays the values out first."""
    codes = every(dtype)
    expected = codes.float() + 0.0  # the sum of values begins with 0, which makes -0 one, too
    assert torch.equal(bits(read(codes, heads)), bits(expected))


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [*EIGHT_BITS, torch.float16, torch.bfloat16], ids=str)
def test_every_short_float_is_written_as_torch_does(
    dtype: torch.dtype, source: torch.dtype, isa: str
) -> None:
    x = every(source)
    assert len(x) == 2**16
    assert torch.equal(bits(written(x, dtype)), bits(rounded(x, dtype)))


@pytest.mark.parametrize("dtype", [*EIGHT_BITS, torch.float16, torch.bfloat16], ids=str)
def test_floats_are_written_as_torch_does(dtype: torch.dtype, isa: str) -> None:
    x = float32_samples(dtype)
    assert len(x) > 2**20
    assert torch.equal(bits(written(x, dtype)), bits(rounded(x, dtype)))


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_where_the_types_differ_from_torch(dtype: torch.dtype) -> None:
    """float8_e4m3fn nowhere, or (torch up to 2.12) beyond 464; float8_e5m2 at finite overflow."""
    x = every(torch.bfloat16)
    differs = bits(written(x, dtype)) != bits(x.to(dtype))
    size = x.float().abs()
    if dtype == E4M3:
        saturates = torch.tensor(1e6).to(E4M3).float().item() == 448
        expected = torch.zeros_like(differs) if saturates else size > 464
    else:
        expected = (size >= OVERFLOW[dtype]) & size.isfinite()
    assert torch.equal(differs, expected)


@pytest.mark.parametrize("dtype", [*EIGHT_BITS, torch.float16], ids=str)
def test_what_lies_beyond_a_type(dtype: torch.dtype, isa: str) -> None:
    """8-bit floats saturate; NaN stays NaN, an infinity where there is one."""
    huge = torch.finfo(torch.float32).max
    x = torch.zeros(256)
    x[:6] = torch.tensor([1e9, -huge, math.inf, -math.inf, math.nan, -0.0])
    got = written(x, dtype).float()
    largest, infinite = LARGEST.get(dtype, math.inf), INFINITE.get(dtype, math.inf)
    assert got[:4].tolist() == [largest, -largest, infinite, -infinite]
    assert got[4].isnan() and not got[5:].any() and got[5].signbit()


@pytest.mark.parametrize("dtype", [*EIGHT_BITS, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_nan_in_a_cache_reaches_the_tokens_that_see_it(
    tokens: int, dtype: torch.dtype, isa: str, rng: torch.Generator
) -> None:
    """For 40 tokens of two heads, by the path of blocks."""
    shape = (1, 1, 200, 32)
    keys, values = (torch.randn(shape, generator=rng).to(dtype) for _ in "kv")
    query = torch.randn(1, tokens, 2, 32, generator=rng)
    starts = torch.tensor([160])
    clean = attend(query, keys, values, starts, 0.2)
    assert bool(clean.isfinite().all())
    for cache in (keys, values):
        saved = cache[0, 0, 160 + tokens // 2, 5].clone()
        cache[0, 0, 160 + tokens // 2, 5] = math.nan
        dirty = attend(query, keys, values, starts, 0.2)
        cache[0, 0, 160 + tokens // 2, 5] = saved
        assert torch.equal(dirty[:, : tokens // 2], clean[:, : tokens // 2])
        assert bool(dirty[:, tokens // 2 :, :, 5].isnan().all())
        assert bool(dirty[:, tokens // 2 :, :, 6:].isnan().all()) == (cache is keys)


@pytest.mark.parametrize("dtype", [*EIGHT_BITS, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [5, 32, 37, 100, 128])
def test_attention_is_that_over_the_decoded_numbers(
    head_dim: int, dtype: torch.dtype, isa: str, rng: torch.Generator
) -> None:
    """To the bit: these types have the arithmetic of float32, whatever the shape.

    That of bfloat16 is tests/ops/test_bfloat16_order.py's matter.
    """
    for group, tokens in ((1, 1), (2, 1), (3, 1), (4, 2), (5, 1), (2, 30)):
        for length in (30, 64, 150):
            shape = (2, 2, length, head_dim)
            keys, values = ((torch.randn(shape, generator=rng) * 2).to(dtype) for _ in "kv")
            query = torch.randn(2, tokens, 2 * group, head_dim, generator=rng)
            rest = torch.tensor([length - tokens, 0]), head_dim**-0.5
            expected = attend(query, keys.float(), values.float(), *rest)
            assert torch.equal(attend(query, keys, values, *rest), expected)
