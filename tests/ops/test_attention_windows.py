"""Attention in a sliding window: the same bits however the work is split, and nothing of what lies
before the window, whatever it holds.

That the numbers are right is test_op_oracles.py's matter, by the samples with a window.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitnet_ops.nn.kv_config import KV_DTYPES
from bitnet_ops.nn.kv_pool import attend_rectangular as attend
from bounds import assert_equal
from isa_control import every_configuration, forced_isa, torch_threads
from op_values import SCALED_KV_DTYPES, Arguments
from ops_attention import attention_arguments, with_window

CACHES = tuple(KV_DTYPES.values())
LENGTH = 420
WINDOWS = (7, 64, 100)  # less than a chunk of 64 positions, one, and more


def arguments(rng: torch.Generator, tokens: int, window: int, cache: torch.dtype) -> Arguments:
    """Two sequences of 5 query heads a KV head, the first of which fills the cache."""
    args = attention_arguments(
        rng, tokens=tokens, heads=10, kv_heads=2, length=LENGTH, head_dim=40, cache_dtype=cache
    )
    starts = torch.tensor([LENGTH - tokens, 150 - tokens // 2])
    return with_window((*args[:3], starts, *args[4:]), window)


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_neither_calls_nor_batches_matter(
    window: int, cache: torch.dtype, isa: str, rng: torch.Generator
) -> None:
    """Prefill at once, in uneven chunks, token by token, and each sequence alone."""
    args = arguments(rng, 120, window, cache)
    query, keys, values, starts, *rest = args
    whole = attend(*args)
    for sizes in ((1,) * 100 + (20,), (7, 64, 1, 48)):
        parts, first = [], 0
        for size in sizes:
            piece = query[:, first : first + size]
            parts.append(attend(piece, keys, values, starts + first, *rest))
            first += size
        assert_equal(torch.cat(parts, dim=1), whole, str(sizes[:3]))
    scales = [None if factor is None else factor[1:] for factor in rest[1:3]]
    alone = attend(*(arg[1:] for arg in args[:4]), rest[0], *scales, window)
    assert_equal(alone[0], whole[1])


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("tokens", [1, 40])
def test_every_isa_and_thread_count_gives_the_same_bits(
    tokens: int, cache: torch.dtype, rng: torch.Generator
) -> None:
    for window in (10, 130):
        args = arguments(rng, tokens, window, cache)
        with forced_isa("scalar"), torch_threads(1):
            expected = attend(*args)
        for configuration in every_configuration():
            assert_equal(attend(*args), expected, f"{window}: {configuration}")


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_a_window_that_reaches_back_to_the_first_position_changes_nothing(
    cache: torch.dtype, isa: str, rng: torch.Generator
) -> None:
    args = arguments(rng, 120, 0, cache)
    expected = attend(*args)
    for window in (LENGTH, LENGTH + 1, 2**63 - 1):
        assert_equal(attend(*args[:-1], window), expected, str(window))


def spoilt(cache: Tensor, scale: Tensor | None, at: slice) -> tuple[Tensor, Tensor | None]:
    """Copies that hold no numbers at positions `at` of the first sequence."""
    cache = cache.clone()
    if cache.dtype in SCALED_KV_DTYPES:
        assert scale is not None
        scale = scale.clone()
        cache[0, :, at], scale[0, :, at] = 77, torch.inf
    else:
        cache[0, :, at] = torch.nan
    return cache, scale


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tokens", [1, 40])
def test_what_lies_before_the_window_takes_no_part(
    tokens: int, window: int, cache: torch.dtype, isa: str, rng: torch.Generator
) -> None:
    args = arguments(rng, tokens, window, cache)
    query, keys, values, starts, scale, key_scale, value_scale, _ = args
    clean = attend(*args)
    first = LENGTH - tokens  # of the first sequence's tokens
    for token in {0, tokens // 2, tokens - 1}:
        seen = first + token + 1 - window  # the first position that this token sees
        keys_too, key_scales = spoilt(keys, key_scale, slice(0, seen))
        values_too, value_scales = spoilt(values, value_scale, slice(0, seen))
        dirty = attend(query, keys_too, values_too, starts, scale, key_scales, value_scales, window)
        assert_equal(dirty[0, token:], clean[0, token:], f"token {token}")
        assert_equal(dirty[1], clean[1])
        assert bool(dirty[0, :token].isnan().all()), "they see a position without a number"
