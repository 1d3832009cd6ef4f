"""KVCache: lengths, views, truncation, capacity.

The ops that write and read it are tested elsewhere; nothing here knows a model.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.nn.kv_cache import KV_DTYPES, CacheCapacityError, KVCache
from bitnet_ops.nn.storage import KV_TYPES
from cache_types import KV_TYPES_TEXT

DEMO = Path(__file__).resolve().parents[1] / "data" / "demo-model" / "config.json"
CONFIG = dataclasses.replace(
    ModelConfig.from_hf(json.loads(DEMO.read_text())), num_hidden_layers=2, head_dim=8
)


def tokens(rng: torch.Generator, batch: int, count: int) -> tuple[Tensor, Tensor]:
    """Random (key, value), each [B, T, KV, D]."""
    shape = (batch, count, CONFIG.num_key_value_heads, CONFIG.head_dim)
    return torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)


def fill(cache: KVCache, rng: torch.Generator, count: int) -> list[tuple[Tensor, Tensor]]:
    """Append `count` random tokens to every sequence and layer; what was written, per layer."""
    written = [tokens(rng, cache.batch, count) for _ in cache.keys]
    for layer, (key, value) in enumerate(written):
        cache.update(layer, key, value)
    cache.advance(count)
    return written


def test_shapes_and_memory() -> None:
    cache = KVCache(CONFIG, 3, 20)
    assert [tuple(k.shape) for k in cache.keys] == [(3, 2, 20, 8)] * 2
    assert cache.batch == 3 and cache.dtype == torch.float32
    assert cache.nbytes == 2 * 2 * 3 * 2 * 20 * 8 * 4
    assert KVCache(CONFIG, 3, 20, torch.bfloat16).nbytes == cache.nbytes // 2
    assert KVCache(CONFIG, 3, 20, torch.int8).nbytes == cache.nbytes // 4 + 2 * 2 * 3 * 2 * 20 * 4
    assert cache.lengths.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", KV_TYPES)
def test_update_writes_after_each_length(rng: torch.Generator, name: str) -> None:
    """Rounded to the cache's type by torch, or with a scale for every row; no further off."""
    kind, dtype = KV_TYPES[name], KV_DTYPES[name]
    cache = KVCache(CONFIG, 2, 10, dtype)
    assert cache.type is kind and cache.nbytes == 2 * 2 * 2 * 2 * 10 * kind.row_bytes(8)
    cache.set_length(1, 3)
    (written, _) = fill(cache, rng, 4)
    held = (cache.keys[0], cache.values[0])
    for codes, scale, new in zip(held, cache.scales(0), written, strict=True):
        assert (scale is not None) == kind.has_scales
        for row, start in ((0, 0), (1, 3)):
            at = slice(start, start + 4)
            want, got = new[row].transpose(0, 1), codes[row, :, at]
            if scale is None:
                assert torch.equal(got.double(), want.to(dtype).double())
                stored = got.double()
            else:
                assert scale.shape == (2, CONFIG.num_key_value_heads, 10)
                stored = got.double() * scale[row, :, at].double()[..., None]
            bound = kind.error * want.double().abs().amax(-1, keepdim=True)
            bound = bound.clamp(min=kind.floor)
            assert bool(((stored - want.double()).abs() <= bound).all())
    assert cache.lengths.tolist() == [4, 7]


def test_positions_are_absolute_and_per_sequence(rng: torch.Generator) -> None:
    cache = KVCache(CONFIG, 2, 10)
    cache.set_length(1, 5)
    assert cache.positions(3).tolist() == [[0, 1, 2], [5, 6, 7]]
    one = cache.positions(1)
    assert one.tolist() == [[0], [5]]
    cache.advance(1)
    assert one.tolist() == [[0], [5]], "positions handed out must not move"
    assert cache.positions(1).tolist() == [[1], [6]]


def test_capacity_is_checked_before_anything_is_written() -> None:
    cache = KVCache(CONFIG, 2, 10)
    cache.keys[0].zero_()
    cache.set_length(1, 8)
    with pytest.raises(CacheCapacityError, match="at most 2 new tokens, got 3; 8 of 10 positions"):
        cache.positions(3)
    assert cache.positions(2).shape == (2, 2)
    with pytest.raises(RuntimeError, match="kv_cache_update"):
        cache.update(0, *tokens(torch.Generator(), 2, 3))
    assert torch.equal(cache.keys[0], torch.zeros_like(cache.keys[0]))


def test_more_positions_than_the_model_has_are_rejected() -> None:
    assert KVCache(CONFIG, 1, 1024).max_len == 1024
    with pytest.raises(CacheCapacityError, match="max_position_embeddings 1024, got 1025"):
        KVCache(CONFIG, 1, 1025)
    with pytest.raises(CacheCapacityError, match="got 0"):
        KVCache(CONFIG, 1, 0)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=f"expected dtype {KV_TYPES_TEXT}, got torch.float64"):
        KVCache(CONFIG, 1, 8, torch.float64)
    with pytest.raises(ValueError, match="batch above 0, got 0"):
        KVCache(CONFIG, 0, 8)
    cache = KVCache(CONFIG, 1, 8)
    with pytest.raises(CacheCapacityError, match="from 0 to 8, got 9"):
        cache.set_length(0, 9)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        cache.truncate(-1)


def test_clear_and_truncate(rng: torch.Generator) -> None:
    cache = KVCache(CONFIG, 2, 10)
    fill(cache, rng, 4)
    cache.set_length(1, 2)
    cache.truncate(3)
    assert cache.lengths.tolist() == [3, 2]
    cache.clear()
    assert cache.lengths.tolist() == [0, 0]
    ((key, _), _) = fill(cache, rng, 2)
    assert torch.equal(cache.keys[0][:, :, :2], key.transpose(1, 2))


def test_row_shares_memory_but_not_lengths(rng: torch.Generator) -> None:
    cache = KVCache(CONFIG, 3, 10)
    cache.keys[0].zero_()
    row = cache.row(1)
    ((key, _), _) = fill(row, rng, 4)
    assert torch.equal(cache.keys[0][1, :, :4], key[0].transpose(0, 1))
    assert not cache.keys[0][0].any() and not cache.keys[0][2].any()
    assert cache.lengths.tolist() == [0, 0, 0] and row.lengths.tolist() == [4]
    cache.set_length(1, 4)
    assert cache.lengths.tolist() == [0, 4, 0]
