"""KVCache by KVCacheConfig, as earlier users called it: sizes, update, get, fork, save, restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bitnet_ops
from bitnet_ops import KVCache, KVCacheConfig, KVCacheDtype
from bitnet_ops.nn.kv_config import CacheCapacityError
from bitnet_ops.nn.storage import KV_TYPES

SIZES: dict[str, Any] = {"max_seq_len": 20, "num_layers": 2, "num_kv_heads": 3, "head_dim": 16}
DTYPES = [d for d in KVCacheDtype if d.value in KV_TYPES]


def rows(seed: int, batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(batch, tokens, 3, 16, generator=g) for _ in "kv")
    return key, value


def test_the_names_are_those_of_the_package() -> None:
    assert {"KVCache", "KVCacheConfig", "KVCacheDtype"} <= set(bitnet_ops.__all__)
    assert {d.value for d in KVCacheDtype} >= set(KV_TYPES)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("FP32", 8192), ("BF16", 4096), ("FP16", 4096), ("FP8_E4M3", 2048), ("FP8_E5M2", 2048),
     ("INT8", 2048 + 64)],  # with a float32 scale for every row of 128
)  # fmt: skip
def test_memory_of_8k_positions_of_32_layers(dtype: str, expected: float) -> None:
    if KVCacheDtype[dtype].value not in KV_TYPES:
        pytest.fail(f"no caches of {dtype}")
    config = KVCacheConfig(8192, 32, 32, 128, KVCacheDtype[dtype])
    assert config.memory_mb == expected
    assert KVCache(config).memory_usage_mb() == expected  # not touched, so it costs nothing


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_what_is_written_is_read(dtype: KVCacheDtype) -> None:
    cache = KVCache(KVCacheConfig(**SIZES, dtype=dtype, batch=2))
    key, value = rows(1, 2, 5)
    for layer in range(2):
        cache.update(layer, key, value, 0)
    assert cache.lengths.tolist() == [5, 5]
    more = rows(2, 2, 1)
    cache.update(1, *more, torch.tensor([5, 3]))  # the second sequence: in the middle
    assert cache.lengths.tolist() == [6, 5]
    keys, values = cache.get(1)
    assert keys.shape == values.shape == (2, 3, 6, 16) and keys.dtype == torch.float32
    error = KV_TYPES[dtype.value].error
    for found, first, second in ((keys, key, more[0]), (values, value, more[1])):
        expected = torch.zeros(2, 3, 6, 16)
        expected[:, :, :5] = first.transpose(1, 2)
        expected[0, :, 5], expected[1, :, 3] = second[0, 0], second[1, 0]
        size = expected.abs().amax(-1, keepdim=True)
        assert bool(((found - expected).abs() <= error * size).all())
    assert torch.equal(keys[1, :, 5], torch.zeros(3, 16))  # behind the end of the second


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_fork_truncate_save_and_restore(dtype: KVCacheDtype, tmp_path: Path) -> None:
    config = KVCacheConfig(**SIZES, dtype=dtype, batch=2)
    cache = KVCache(config)
    for layer in range(2):
        cache.update(layer, *rows(layer, 2, 7), 0)
    before = [cache.get(layer) for layer in range(2)]
    twin, second = cache.fork(), cache.fork(1)
    cache.update(0, *rows(9, 2, 7), 0)
    cache.truncate([2, 4])
    assert cache.lengths.tolist() == [2, 4]
    for layer in range(2):
        for a, b, c in zip(twin.get(layer), second.get(layer), before[layer], strict=True):
            assert torch.equal(a, c) and torch.equal(b, c[1:])
    twin.save(tmp_path / "cache.safetensors")
    other = KVCache(config)
    other.restore(tmp_path / "cache.safetensors")
    assert other.lengths.tolist() == [7, 7]
    for layer in range(2):
        for a, c in zip(other.get(layer), before[layer], strict=True):
            assert torch.equal(a, c)
    assert [p.name for p in tmp_path.iterdir()] == ["cache.safetensors"]


def test_what_cannot_be_restored(tmp_path: Path) -> None:
    file = tmp_path / "cache.safetensors"
    cache = KVCache(KVCacheConfig(**SIZES))
    cache.update(0, *rows(0, 1, 7), 0)
    cache.save(file)
    for change, words in (
        ({"dtype": "INT8"}, "expected the tensors key_cache, key_scale"),
        ({"dtype": "FP32"}, "expected key_cache torch.float32"),
        ({"num_layers": 3}, r"expected key_cache torch.bfloat16 \[3, 1, 3, 7, 16\]"),
        ({"max_seq_len": 6}, "expected at most 6 positions"),
    ):
        with pytest.raises(ValueError, match=words):
            KVCache(KVCacheConfig(**(SIZES | change))).restore(file)
    file.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="expected a saved cache"):
        cache.restore(file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_seq_len": 0}, "expected max_seq_len an integer above 0, got 0"),
        ({"batch": True}, "expected batch an integer above 0, got True"),
        ({"head_dim": 1.5}, "expected head_dim an integer above 0, got 1.5"),
        ({"dtype": "int4"}, "expected dtype one of KVCacheDtype.FP32, .*, got 'int4'"),
    ],
)
def test_wrong_sizes(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"KVCacheConfig: {words}"):
        KVCacheConfig(**(SIZES | change))


def test_other_wrong_calls() -> None:
    config = KVCacheConfig(**SIZES, dtype=torch.float32)  # type: ignore[arg-type]
    assert config.dtype is KVCacheDtype.FP32
    with pytest.raises(ValueError, match="a KVCacheConfig and nothing else"):
        KVCache(config, 2)
    cache = KVCache(config)
    with pytest.raises(ValueError, match="expected one length, or one for each of 1 seq"):
        cache.truncate([1, 2])
    with pytest.raises(ValueError, match="expected length at least 0"):
        cache.truncate(-1)
    for at in (20, -1):
        with pytest.raises(
            CacheCapacityError, match=f"seq_pos from 0 to 19 for 1 tokens, got {at}"
        ):
            cache.update(0, *rows(0, 1, 1), at)
    with pytest.raises(
        ValueError, match=r"seq_pos one integer, or one for each of 1 .*, got \[2\]"
    ):
        cache.update(0, *rows(0, 1, 1), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"key and value \[1, T, KV, D\], got \[2, 1, 3, 16\]"):
        cache.update(0, *rows(0, 2, 1), 0)
    for layer in (-1, 2):
        with pytest.raises(IndexError, match=f"a layer from 0 to 1, got {layer}"):
            cache.get(layer)
    with pytest.raises(RuntimeError, match="paged_cache_update: expected key"):
        cache.update(0, torch.zeros(1, 1, 2, 16), torch.zeros(1, 1, 2, 16))
