"""KVPool: shapes, strides, growth without copying, memory that comes and really goes.

Resident pages are counted by the system, not by the pool. Nothing here knows ops or a model.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import mmap
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.nn.kv_config import KV_DTYPES
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.nn.storage import KV_TYPES

DEMO = Path(__file__).resolve().parents[1] / "data" / "demo-model" / "config.json"
CONFIG = dataclasses.replace(
    ModelConfig.from_hf(json.loads(DEMO.read_text())),
    num_hidden_layers=3,
    num_key_value_heads=2,
    head_dim=32,
)
LARGE = dataclasses.replace(
    CONFIG, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32, head_dim=128
)


def resident_bytes(tensor: Tensor) -> int:
    """Bytes of the memory under `tensor` (all of its storage) that the system holds pages for."""
    storage = tensor.untyped_storage()
    page = mmap.PAGESIZE
    start = storage.data_ptr() // page * page
    pages = -(-(storage.data_ptr() + storage.nbytes() - start) // page)
    present = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * page), present)
    assert status == 0, ctypes.get_errno()
    return sum(bytes(present).translate(bytes(i & 1 for i in range(256)))) * page


def tensors(pool: KVPool) -> list[Tensor]:
    every = pool.key_pool, pool.value_pool, pool.key_scale, pool.value_scale
    return [t for t in every if t is not None]


def write(pool: KVPool, block: int, value: float) -> None:
    for t in tensors(pool):
        t[:, block] = value


@pytest.mark.parametrize("name", KV_TYPES)
def test_shapes_and_order_in_memory(name: str) -> None:
    kind = KV_TYPES[name]
    pool = KVPool(CONFIG, 5, 16, KV_DTYPES[name])
    for rows in (pool.key_pool, pool.value_pool):
        assert rows.shape == (3, 5, 16, 2, 32) and rows.dtype == KV_DTYPES[name]
        assert rows.stride() == (2 * 16 * 32, 3 * 2 * 16 * 32, 32, 16 * 32, 1)
    assert pool.key_pool.data_ptr() != pool.value_pool.data_ptr()
    for scales in (pool.key_scale, pool.value_scale):
        assert (scales is not None) == kind.has_scales
        if scales is not None:
            assert scales.shape == (3, 5, 16, 2) and scales.dtype == torch.float32
            assert scales.stride() == (2 * 16, 3 * 2 * 16, 1, 16)
    assert pool.block_bytes == 2 * 3 * 2 * 16 * kind.row_bytes(32)
    assert pool.memory_usage_mb() == pytest.approx(5 * pool.block_bytes / 2**20)


def test_a_pool_that_grows_is_read_as_of_one_moment() -> None:
    pool = KVPool(CONFIG, 1, 16, torch.int8, max_blocks=3000)
    seen: set[int] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(len({cache.shape[1] for cache in pool.caches().values()}))

    readers = [threading.Thread(target=read) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for reader in readers:
            reader.start()
        for _ in range(2000):
            pool.grow(1)
    finally:
        done.set()
        sys.setswitchinterval(before)
    for reader in readers:
        reader.join()
    assert seen == {1}


@pytest.mark.parametrize("layout", ["rows", "panels"])
@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_rows_of_either_layout(name: str, layout: str) -> None:
    """What the op writes is read back as rows, and a copied block's likewise."""
    pool = KVPool(CONFIG, 4, 32, KV_DTYPES[name], layout=layout)
    g = torch.Generator().manual_seed(3)
    keys, values = (torch.randint(-127, 128, (32, 2, 32), generator=g).float() for _ in "kv")
    keys[..., 0] = values[..., 0] = 127  # so that int8 holds the numbers themselves
    slots = torch.randperm(32, generator=g) + 2 * 32
    pool.update(1, keys, values, slots)
    pool.copy_block(2, 0)
    found = pool.stored([2, 0], 64)
    pool.store([3, 1], {key: rows[:, :, :50] for key, rows in found.items()})
    again = pool.stored([3, 1], 50)
    for key, wanted in (("key", keys), ("value", values)):
        rows = found[key][1]
        assert rows.shape == (2, 64, 32) and rows.dtype == KV_DTYPES[name]
        for block in rows.split(32, dim=1):
            assert torch.equal(block.transpose(0, 1).float()[slots - 2 * 32], wanted)
        assert torch.equal(again[key][1], rows[:, :50])
    for read, wanted in zip(pool.read(1, [2], 32), (keys, values), strict=True):
        torch.testing.assert_close(read.transpose(0, 1)[slots - 2 * 32], wanted, rtol=1e-6, atol=0)


def test_which_pools_lie_in_panels() -> None:
    def layout(dtype: torch.dtype, block_size: int = 64, **more: str) -> str:
        return KVPool(CONFIG, 1, block_size, dtype, **more).layout  # type: ignore[arg-type]

    assert layout(torch.bfloat16) == layout(torch.int8, 16) == "panels"
    assert layout(torch.bfloat16, 24) == layout(torch.float16) == layout(torch.float32) == "rows"
    assert layout(torch.int8, layout="rows") == "rows"
    for block_size, dtype in ((24, torch.int8), (64, torch.float16)):
        with pytest.raises(ValueError, match="expected layout \"rows\" or, of bf.* got 'panels'"):
            layout(dtype, block_size, layout="panels")


def test_memory_of_8k_positions_of_a_large_model() -> None:
    """32 layers of 32 heads of 128: 4096 MiB in bfloat16; half of it in int8, and the scales."""
    assert KVPool(LARGE, 128, 64, torch.bfloat16).memory_usage_mb() == 4096
    assert KVPool(LARGE, 128, 64, torch.float32).memory_usage_mb() == 8192
    scales = 2 * 32 * 32 * 8192 * 4 / 2**20
    assert KVPool(LARGE, 128, 64, torch.int8).memory_usage_mb() == 2048 + scales
    assert scales == 64


def resident_kb() -> int:
    """Of the whole process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def test_reserving_costs_no_memory() -> None:
    before = resident_kb()
    pool = KVPool(LARGE, 1, 64, torch.bfloat16, max_blocks=2048)  # 64 GiB of addresses
    assert resident_kb() - before < 1024
    pool.value_pool[31, 0] = 1
    assert resident_kb() - before < 8 * 1024, "a page for every row, be it a huge one"


@pytest.mark.parametrize("name", KV_TYPES)
def test_growth_copies_nothing(name: str) -> None:
    pool = KVPool(CONFIG, 2, 16, KV_DTYPES[name], max_blocks=6)
    write(pool, 1, 3)
    before = tensors(pool)
    pool.grow(3)
    assert pool.blocks == 5
    for old, new in zip(before, tensors(pool), strict=True):
        assert new.shape[1] == 5 and new.data_ptr() == old.data_ptr()
        assert new.stride() == old.stride()
        new[:, 0] = 7
        assert bool((old[:, 0] == 7).all()) and bool((new[:, 1] == 3).all())
    write(pool, 4, 5)
    with pytest.raises(ValueError, match="from 0 to 1 more blocks .* got 2"):
        pool.grow(2)
    assert pool.blocks == 5


@pytest.mark.parametrize("name", KV_TYPES)
def test_a_copied_block_is_equal_and_its_own(name: str) -> None:
    pool = KVPool(CONFIG, 4, 16, KV_DTYPES[name])
    for i, t in enumerate(tensors(pool)):
        t[:] = torch.arange(t.numel()).view_as(t) % 50 + i
    before = [t.clone() for t in tensors(pool)]
    pool.copy_block(1, 3)
    write(pool, 1, 0)
    for old, new in zip(before, tensors(pool), strict=True):
        assert torch.equal(new[:, 3], old[:, 1]) and bool((new[:, 1] == 0).all())
        assert torch.equal(new[:, 0], old[:, 0]) and torch.equal(new[:, 2], old[:, 2])


@pytest.mark.parametrize("name", KV_TYPES)
def test_contents_leave_and_enter_as_they_are_stored(name: str) -> None:
    """By block and by layer; what lies behind the length stays."""
    source, target = (KVPool(CONFIG, 6, 16, KV_DTYPES[name]) for _ in "ab")
    generator = torch.Generator().manual_seed(2)
    key, value = (torch.randn(40, 2, 32, generator=generator) for _ in "kv")
    blocks = [4, 0, 3]
    slots = torch.tensor([blocks[p // 16] * 16 + p % 16 for p in range(40)])
    rows = KVPool(CONFIG, 6, 16, KV_DTYPES[name], layout="rows")  # as their views show them
    for layer in range(3):
        for pool in (source, rows):
            pool.update(layer, key + layer, value - layer, slots)
    found = source.stored(blocks, 40)
    assert found["key"].shape == (3, 2, 40, 32) and found["key"].dtype == KV_DTYPES[name]
    for i in range(40):
        block, offset = blocks[i // 16], i % 16
        for part, pool in (("key", rows.key_pool), ("value", rows.value_pool)):
            stored, there = found[part][:, :, i], pool[:, block, offset]
            assert torch.equal(stored.view(torch.uint8), there.contiguous().view(torch.uint8))
    write(target, 5, 1)
    target.store([5, 2, 1], found)
    for layer in range(3):
        expected = source.read(layer, blocks, 40)
        for a, b, exact in zip(
            target.read(layer, [5, 2, 1], 40), expected, (key + layer, value - layer), strict=True
        ):
            assert torch.equal(a, b) and a.shape == (2, 40, 32) and a.dtype == torch.float32
            size = exact.abs().amax(-1, keepdim=True) * KV_TYPES[name].error
            assert bool(((a.transpose(0, 1) - exact).abs() <= size).all())
    rest = target.stored([5, 2, 1], 48)["key"][:, :, 40:].float()
    assert not rest.any(), "behind the length"


@pytest.mark.parametrize("name", KV_TYPES)
def test_released_memory_returns(name: str) -> None:
    """Counted by the system; blocks beside the released ones keep their contents."""
    config = dataclasses.replace(CONFIG, num_key_value_heads=4, head_dim=128)
    pool = KVPool(config, 20, 64, KV_DTYPES[name])
    for block in range(20):
        write(pool, block, block)
    rows = (pool.key_pool, pool.value_pool)
    per_pool = 3 * 20 * 4 * 64 * 128 * pool.dtype.itemsize
    assert [resident_bytes(t) for t in rows] == [per_pool, per_pool]
    gone = [3, 4, 5, 9, 11, 12]
    pool.release(reversed(gone))
    assert [resident_bytes(t) for t in rows] == [per_pool * 14 // 20] * 2
    for t in tensors(pool):
        for block in set(range(20)) - set(gone):
            held = torch.tensor(float(block)).to(t.dtype).float()  # 8-bit floats round some
            assert bool((t[:, block].float() == held).all())
    write(pool, 4, 9)
    assert bool((pool.key_pool[:, 4] == 9).all())
    pool.release(range(20))
    assert sum(resident_bytes(t) for t in tensors(pool)) <= len(tensors(pool)) * 2 * 4096


def mapped(tensor: Tensor) -> dict[str, int | str]:
    """What the system says of the mapping under `tensor`: the fields of smaps, sizes in KiB."""
    address, found = tensor.untyped_storage().data_ptr(), {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *words = line.split()
        if name.endswith(":"):
            if inside:
                found[name[:-1]] = int(words[0]) if words[-1] == "kB" else " ".join(words)
        else:
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = begin <= address < end
    return found


def test_a_large_pool_has_huge_pages_and_gives_them_back() -> None:
    """Counted by the system; where it has none, none are counted."""
    config = dataclasses.replace(CONFIG, num_key_value_heads=4, head_dim=128)
    pool = KVPool(config, 512, 64, torch.bfloat16, max_blocks=1024)
    block_kb = pool.block_bytes // 2 >> 10
    for block in range(512):
        pool.key_pool[:, block] = 1
    written = mapped(pool.key_pool)
    assert block_kb * 512 <= int(written["Rss"]) <= block_kb * 512 + 4096
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if enabled.exists() and "[never]" not in enabled.read_text():
        assert "hg" in str(written["VmFlags"]).split(), "not advised"
        assert int(written["AnonHugePages"]) >= 2048
    else:
        assert not written["AnonHugePages"]
    pool.release(range(0, 512, 2))
    assert int(mapped(pool.key_pool)["Rss"]) <= block_kb * 256 + 4096
    assert bool((pool.key_pool[:, 1::2] == 1).all())
    pool.release(range(512))
    nothing = mapped(pool.key_pool)
    assert int(nothing["Rss"]) <= 4096 and int(nothing["AnonHugePages"]) <= 4096


def test_blocks_that_are_no_whole_pages_lose_only_themselves() -> None:
    pool = KVPool(CONFIG, 9, 3, torch.float32)  # 768 bytes a block and layer
    for block in range(9):
        write(pool, block, block + 1)
    pool.release([0, 2, 3, 8])
    pool.release([])
    for block in (1, 4, 5, 6, 7):
        assert bool((pool.key_pool[:, block] == block + 1).all())


def test_memory_lives_as_long_as_a_tensor_over_it() -> None:
    pool = KVPool(CONFIG, 2, 16)
    write(pool, 1, 5)
    rows = pool.value_pool[1]
    del pool
    assert bool((rows[1] == 5).all())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"blocks": 0}, "expected blocks an integer above 0, got 0"),
        ({"blocks": True}, "expected blocks an integer above 0, got True"),
        ({"block_size": 0}, "expected block_size an integer above 0, got 0"),
        ({"max_blocks": 3}, "expected max_blocks an integer above 3, got 3"),
        ({"dtype": torch.float64}, "KVPool: expected dtype .*, got torch.float64"),
        ({"dtype": "int7"}, "or int8, got 'int7'"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVPool(CONFIG, **{"blocks": 4, **wrong})  # type: ignore[arg-type]


def test_no_address_space_is_an_error_that_says_so() -> None:
    with pytest.raises(MemoryError, match="MiB of address space, got: .* make max_blocks smaller"):
        KVPool(LARGE, 1, max_blocks=1 << 40)


@pytest.mark.parametrize("block", [-1, 4])
def test_blocks_outside_the_pool_are_rejected(block: int) -> None:
    pool = KVPool(CONFIG, 4)
    for act in (
        lambda: pool.copy_block(block, 1),
        lambda: pool.copy_block(1, block),
        lambda: pool.release([block]),
        lambda: pool.read(0, [block], 1),
        lambda: pool.stored([block], 1),
    ):
        with pytest.raises(ValueError, match=f"expected a block from 0 to 3, got {block}"):
            act()
