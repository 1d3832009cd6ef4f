"""What caches over one pool share: blocks that are counted, memory that returns, threads, models.

Random schedules are test_kv_schedules.py's matter.
"""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bitnet_ops
from bitnet_ops import KVCache, KVCacheConfig, KVCacheDtype
from bitnet_ops.nn import blocks
from bitnet_ops.nn.blocks import PoolFullError
from bitnet_ops.nn.kv_pool import KVPool

SIZES: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 64, "block_size": 16}


def config(max_seq_len: int, **more: Any) -> KVCacheConfig:
    return KVCacheConfig(max_seq_len, **{**SIZES, **more})


def write(cache: KVCache, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(cache.batch, tokens, 4, 64, generator=generator) for _ in "kv")
    for layer in range(2):
        cache.update(layer, key, value)
    cache.advance(tokens)
    return key, value


def test_forks_share_blocks_until_one_writes() -> None:
    cache = KVCache(config(100))
    write(cache, 40)  # 3 blocks of 16
    twins = [cache.fork() for _ in range(3)]
    assert cache.used_blocks == 3 == twins[0].used_blocks
    before = cache.get(1)
    write(twins[0], 1)  # the last block is its own now
    assert cache.used_blocks == 4
    write(twins[0], 8)  # a further one
    assert cache.used_blocks == 5
    write(cache, 1)
    write(twins[1], 1)  # two hold what is left: each copies but the last
    assert cache.used_blocks == 7
    write(twins[2], 1)
    assert cache.used_blocks == 7
    for each in (cache, *twins):
        for found, old in zip(each.get(1), before, strict=True):
            assert torch.equal(found[:, :, :40], old)
    del twins, each
    assert cache.used_blocks == 3 and cache.lengths.tolist() == [41]
    cache.clear()
    assert cache.used_blocks == 0


def test_growth_copies_nothing() -> None:
    """Neither more positions nor a fork moves what there is; a fork brings its own room."""
    cache = KVCache(config(64, batch=2))
    write(cache, 20)
    address, blocks = cache.pool.key_pool.data_ptr(), [[*row] for row in cache.blocks]
    assert cache.pool.blocks == 8
    twin = cache.fork()
    assert cache.pool.blocks == 16 and cache.pool.key_pool.data_ptr() == address
    write(cache, 44)
    write(twin, 44)
    assert [row[0] for row in cache.blocks] == [row[0] for row in blocks]
    assert cache.used_blocks == 14  # the first block of each row is shared still
    del twin
    for _ in range(100):  # room of the dead is taken again
        cache.fork()
    assert cache.pool.blocks == 16


def test_a_full_pool_names_the_blocks_needed_and_free() -> None:
    cache = KVCache(config(64, blocks=5))
    write(cache, 64)
    twin = cache.fork()
    twin.truncate(50)
    before = twin.get(0), cache.get(0)
    with pytest.raises(PoolFullError, match="expected 3 free blocks, got 1 of 5; wait until"):
        twin.update(0, *(torch.zeros(1, 40, 4, 64) for _ in "kv"), 20)  # in the last three blocks
    assert twin.lengths.tolist() == [50]
    for old, new in zip(before, (twin.get(0), cache.get(0)), strict=True):
        for a, b in zip(old, new, strict=True):
            assert torch.equal(a, b)
    write(twin, 2)  # one block is enough for the end
    cache.clear()
    assert twin.free_blocks == 1
    write(twin, 12)


def test_forks_beyond_the_addresses_share_what_there_is() -> None:
    """There is room for 32 forks; those after them can be made, and write while a block is free."""
    cache = KVCache(config(16))
    write(cache, 1)
    twins = [cache.fork() for _ in range(40)]
    for twin in twins[:32]:
        write(twin, 1)
    assert (cache.used_blocks, cache.free_blocks) == (33, 0)
    with pytest.raises(PoolFullError, match="expected 1 free blocks, got 0 of 33"):
        write(twins[32], 1)
    del twin, twins[:2]
    write(twins[30], 1)
    assert (cache.used_blocks, cache.free_blocks) == (32, 1)


def test_without_addresses_for_forks_a_cache_is_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scarce(*arguments: Any, max_blocks: int | None = None, state_slots: int = 1) -> KVPool:
        if max_blocks is not None:
            raise MemoryError("no addresses")
        return KVPool(*arguments)

    monkeypatch.setattr(blocks, "KVPool", scarce)
    cache = KVCache(config(40))
    write(cache, 16)
    twin = copy.deepcopy(cache)
    write(twin, 16)
    assert cache.pool.blocks == 3 and twin.lengths.tolist() == [32]


def test_saved_caches_enter_a_pool_that_is_full_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "cache.safetensors"
    cache = KVCache(config(64, blocks=4))
    key, _ = write(cache, 60)
    cache.save(file)
    write(cache, 4, seed=1)
    cache.restore(file)
    assert cache.lengths.tolist() == [60] and cache.free_blocks == 0
    assert torch.equal(cache.get(0)[0], key.transpose(1, 2).bfloat16().float())
    twin = cache.fork()
    with pytest.raises(PoolFullError, match="expected 4 free blocks, got 0 of 4"):
        twin.restore(file)
    assert twin.lengths.tolist() == [60]


def resident_kb() -> int:
    """Of the whole process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


@pytest.mark.parametrize("how", ["trim", "drop"])
def test_memory_comes_as_it_is_written_and_returns(how: str) -> None:
    """64 MiB of keys and values; counted by the system."""
    start = resident_kb()
    cache = KVCache(KVCacheConfig(1 << 20, 4, 8, 128, KVCacheDtype.BF16))
    assert resident_kb() - start < 4096, "reserved, not taken"
    rows = torch.zeros(1, 512, 8, 128)
    for at in range(0, 4096, 512):
        for layer in range(4):
            cache.update(layer, rows, rows, at)
    taken = resident_kb()
    assert taken - start > 60 << 10
    if how == "trim":
        cache.truncate(0)
        cache.trim()
    else:
        del cache
    assert taken - resident_kb() > 60 << 10


def test_forks_in_threads() -> None:
    """Each thread goes on from the same 40 positions with tokens of its own."""
    cache = KVCache(config(400, dtype=KVCacheDtype.FP32))
    start, _ = write(cache, 40)
    failures: list[str] = []
    parents = [cache.fork() for _ in range(4)]

    def work(number: int) -> None:
        for turn in range(20):
            twin = parents[number].fork()
            parts = [start]
            for i in range(6):
                parts.append(write(twin, 17, seed=1000 * number + 10 * turn + i)[0])
            if not torch.equal(twin.get(1)[0], torch.cat(parts, 1).transpose(1, 2)):
                failures.append(f"{number}, {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    parents.clear()
    assert cache.used_blocks == 3


@pytest.mark.parametrize("dtype", [KVCacheDtype.FP32, KVCacheDtype.INT8])
@pytest.mark.parametrize("block_size", [1, 16, 64, 100])
@torch.inference_mode()
def test_a_model_goes_on_from_a_fork_as_from_a_cache_of_its_own(
    block_size: int, dtype: KVCacheDtype
) -> None:
    model = bitnet_ops.load().model
    c = model.config
    sizes = c.num_hidden_layers, c.num_key_value_heads, c.head_dim
    form = KVCacheConfig(128, *sizes, dtype, block_size=block_size)
    prompt = torch.arange(5, 75)[None]
    cache = KVCache(form)
    model(prompt, cache)
    for first in (7, 9):
        twin, alone = cache.fork(), KVCache(c, 1, 128, form.torch_dtype)
        more = torch.tensor([[first, 3, 5]])
        assert torch.equal(model(more, twin), model(torch.cat([prompt, more], 1), alone)[:, -3:])
    assert cache.lengths.tolist() == [70]
