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
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.kv_config import KV_DTYPES, CacheCapacityError
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
    written = [tokens(rng, cache.batch, count) for _ in range(CONFIG.num_hidden_layers)]
    for layer, (key, value) in enumerate(written):
        cache.update(layer, key, value)
    cache.advance(count)
    return written


def test_shapes_and_memory() -> None:
    """In whole blocks of 64 positions."""
    cache = KVCache(CONFIG, 3, 70)
    assert cache.batch == 3 and cache.dtype == torch.float32 and cache.max_len == 70
    assert cache.nbytes == 2 * 2 * 3 * 2 * 128 * 8 * 4
    assert KVCache(CONFIG, 3, 70, torch.bfloat16).nbytes == cache.nbytes // 2
    assert KVCache(CONFIG, 3, 70, torch.int8).nbytes == cache.nbytes // 4 + 2 * 2 * 3 * 2 * 128 * 4
    assert cache.lengths.tolist() == [0, 0, 0] and cache.used_blocks == 0


@pytest.mark.parametrize("name", KV_TYPES)
def test_update_writes_after_each_length(rng: torch.Generator, name: str) -> None:
    """Rounded to the cache's type by torch, or with a scale for every row; no further off."""
    kind, dtype = KV_TYPES[name], KV_DTYPES[name]
    cache = KVCache(CONFIG, 2, 10, dtype)
    assert cache.type is kind and cache.nbytes == 2 * 2 * 2 * 2 * 64 * kind.row_bytes(8)
    cache.set_length(1, 3)
    (written, _) = fill(cache, rng, 4)
    for held, new in zip(cache.get(0), written, strict=True):
        for row, start in ((0, 0), (1, 3)):
            want, got = new[row].transpose(0, 1), held[row, :, start : start + 4]
            if not kind.has_scales:
                assert torch.equal(got, want.to(dtype).float())
            bound = kind.error * want.double().abs().amax(-1, keepdim=True)
            bound = bound.clamp(min=kind.floor)
            assert bool(((got.double() - want.double()).abs() <= bound).all())
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


def test_capacity_is_checked_before_anything_is_written(rng: torch.Generator) -> None:
    cache = KVCache(CONFIG, 2, 10)
    fill(cache, rng, 1)
    cache.set_length(1, 8)
    before = cache.get(0)
    with pytest.raises(CacheCapacityError, match="at most 2 new tokens, got 3; 8 of 10 positions"):
        cache.positions(3)
    assert cache.positions(2).shape == (2, 2)
    for write in (lambda: cache.update(0, *tokens(rng, 2, 3)), lambda: cache.prepare(3)):
        with pytest.raises(CacheCapacityError, match="at most 2 new tokens, got 3"):
            write()
    for a, b in zip(cache.get(0), before, strict=True):
        assert torch.equal(a[:, :, :1], b[:, :, :1])
    assert cache.lengths.tolist() == [1, 8]


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
    assert torch.equal(cache.get(0)[0], key.transpose(1, 2))


def test_a_row_is_the_sequence_itself(rng: torch.Generator) -> None:
    cache = KVCache(CONFIG, 3, 200)
    row = cache.row(1)
    ((key, _), _) = fill(row, rng, 70)
    assert cache.lengths.tolist() == [0, 70, 0] and row.lengths.tolist() == [70]
    assert torch.equal(cache.get(0)[0][1], key[0].transpose(0, 1))
    cache.truncate(5)
    assert row.lengths.tolist() == [5] and cache.used_blocks == 1
    assert torch.equal(row.get(0)[0], key[:, :5].transpose(1, 2))
