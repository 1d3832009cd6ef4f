"""KVCache under random schedules against plain tensors: contents, lengths and blocks to the last.

The oracle keeps every sequence as one tensor a layer and copies it to fork; of blocks it knows only
which ones are shared, by objects that stand for them.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import hypothesis
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from bitnet_ops import KVCache, KVCacheConfig
from bitnet_ops.nn.blocks import PoolFullError
from bitnet_ops.nn.kv_config import CacheCapacityError, KVCacheDtype

LAYERS, KV, DIM = 2, 2, 4
INT8 = KVCacheDtype.INT8


def held(x: Tensor, dtype: KVCacheDtype) -> Tensor:
    """What a cache of that type holds of rows f32 [..., D]."""
    if dtype is not INT8:
        return x.to(getattr(torch, dtype.value)).float()
    size = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return (x * (127 / size)).round() * (size / 127)


def failure(act: Callable[[], None]) -> object:
    """The error of a call: (needed, free) of a full pool, else its class; None without one.

    Not by pytest.raises, whose traceback would hold caches for longer than they live.
    """
    try:
        act()
    except PoolFullError as error:
        return error.needed, error.free
    except Exception as error:
        return type(error)
    return None


class Sequence:
    """The oracle's: `rows` [2 (key, value), layers, KV, length, D], and its blocks as objects."""

    def __init__(self) -> None:
        self.rows = torch.zeros(2, LAYERS, KV, 0, DIM)
        self.blocks: list[object] = []

    @property
    def length(self) -> int:
        return self.rows.shape[3]


class Schedules(RuleBasedStateMachine):
    @initialize(
        block_size=st.integers(1, 6),
        max_len=st.integers(4, 20),
        batch=st.integers(1, 3),
        dtype=st.sampled_from(KVCacheDtype),
        few=st.none() | st.integers(2, 12),
    )
    def start(
        self, block_size: int, max_len: int, batch: int, dtype: KVCacheDtype, few: int | None
    ) -> None:
        self.config = KVCacheConfig(
            max_len, LAYERS, KV, DIM, dtype, batch, block_size=block_size, blocks=few
        )
        self.generator = torch.Generator().manual_seed(block_size + max_len)
        # the first one stays, to count the blocks of all
        self.caches = [(KVCache(self.config), [Sequence() for _ in range(batch)])]
        self.files: list[tuple[Path, list[Sequence]]] = []
        self.folder = tempfile.TemporaryDirectory()

    # The oracle's books ---------------------------------------------------------------------------

    def references(self) -> Counter[object]:
        return Counter(b for _, rows in self.caches for row in rows for b in row.blocks)

    def free(self) -> int:
        first = self.caches[0][0]
        return first.pool.blocks - len(self.references())

    def count(self, positions: int) -> int:
        return -(-positions // self.config.block_size)

    def prepare(self, rows: list[Sequence], ranges: list[tuple[int, int]]) -> int | None:
        """Take the blocks; how many are needed where the pool has too few of them."""
        references, size = self.references(), self.config.block_size
        lacking, shared = [], []
        for row, (begin, end) in zip(rows, ranges, strict=True):
            lacking.append(max(0, self.count(end) - len(row.blocks)))
            for i in range(begin // size, min(self.count(end), len(row.blocks))):
                if references[row.blocks[i]] > 1:
                    shared.append((row, i))
        if (needed := sum(lacking) + len(shared)) > self.free():
            return needed
        for row, i in shared:
            row.blocks[i] = object()
        for row, count in zip(rows, lacking, strict=True):
            row.blocks += [object() for _ in range(count)]
        return None

    def truncate(self, row: Sequence, length: int) -> None:
        row.rows = row.rows[:, :, :, :length].clone()
        del row.blocks[self.count(row.length) :]

    def pick(self, data: st.DataObject) -> tuple[KVCache, list[Sequence]]:
        # By number: what is drawn is held for a report, and a held cache does not go.
        return self.caches[data.draw(st.integers(0, len(self.caches) - 1))]

    def write(self, data: st.DataObject, cache: KVCache, rows: list[Sequence]) -> None:
        tokens = data.draw(st.integers(1, 6))
        new = torch.randn(2, LAYERS, cache.batch, tokens, KV, DIM, generator=self.generator)
        starts: list[int] | None = None
        if data.draw(st.booleans()):
            starts = [data.draw(st.integers(0, row.length)) for row in rows]
        begins = starts or [row.length for row in rows]
        at = None if starts is None else torch.tensor(starts)

        def act() -> None:
            for layer in range(LAYERS):
                cache.update(layer, new[0, layer], new[1, layer], at)
            if at is None:
                cache.advance(tokens)

        if max(begins) + tokens > self.config.max_seq_len:
            assert failure(act) is CacheCapacityError
            return
        needed = self.prepare(rows, [(begin, begin + tokens) for begin in begins])
        if needed is not None:
            assert failure(act) == (needed, self.free())
            return
        act()
        for i, (row, begin) in enumerate(zip(rows, begins, strict=True)):
            piece = held(new[:, :, i].transpose(2, 3), self.config.dtype)
            behind = row.rows[:, :, :, begin + tokens :]
            row.rows = torch.cat([row.rows[:, :, :, :begin], piece, behind], 3)

    # What users do --------------------------------------------------------------------------------

    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        self.write(data, *self.pick(data))

    @rule(data=st.data())
    def update_a_row(self, data: st.DataObject) -> None:
        cache, rows = self.pick(data)
        i = data.draw(st.integers(0, cache.batch - 1))
        self.write(data, cache.row(i), rows[i : i + 1])

    @precondition(lambda self: len(self.caches) < 8)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        cache, rows = self.pick(data)
        i = data.draw(st.none() | st.integers(0, cache.batch - 1))
        twins = []
        for row in rows if i is None else [rows[i]]:
            twin = Sequence()
            twin.rows, twin.blocks = row.rows.clone(), row.blocks[: self.count(row.length)]
            twins.append(twin)
        self.caches.append((cache.fork(i), twins))

    @precondition(lambda self: len(self.caches) > 1)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        del self.caches[data.draw(st.integers(1, len(self.caches) - 1))]

    @rule(data=st.data())
    def shorten(self, data: st.DataObject) -> None:
        cache, rows = self.pick(data)
        ends = [data.draw(st.integers(0, self.config.max_seq_len)) for _ in rows]
        if data.draw(st.booleans()):
            cache.truncate(ends)
        else:
            ends = ends[:1] * len(rows)
            cache.truncate(ends[0])
        for row, end in zip(rows, ends, strict=True):
            self.truncate(row, end)

    @rule(data=st.data())
    def set_length(self, data: st.DataObject) -> None:
        cache, rows = self.pick(data)
        i = data.draw(st.integers(0, cache.batch - 1))
        length = data.draw(st.integers(0, rows[i].length))
        cache.set_length(i, length)
        self.truncate(rows[i], length)

    @precondition(lambda self: len(self.files) < 4)
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        cache, rows = self.pick(data)
        path = Path(self.folder.name) / f"{len(self.files)}.safetensors"
        cache.save(path)
        copies = [Sequence() for _ in rows]
        for copy, row in zip(copies, rows, strict=True):
            copy.rows = row.rows.clone()
        self.files.append((path, copies))

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        cache, rows = self.pick(data)
        path, saved = data.draw(st.sampled_from(self.files))
        if len(saved) != len(rows):
            assert failure(lambda: cache.restore(path)) is ValueError
            return
        references = self.references()
        needed = sum(self.count(s.length) for s in saved)
        own = sum(references[block] == 1 for row in rows for block in row.blocks)
        if needed > (room := self.free() + own):
            assert failure(lambda: cache.restore(path)) == (needed, room)
            return
        cache.restore(path)
        for row, copy in zip(rows, saved, strict=True):
            row.rows = copy.rows.clone()
            row.blocks = [object() for _ in range(self.count(row.length))]

    @rule()
    def trim(self) -> None:
        self.caches[-1][0].trim()

    # What has to hold -----------------------------------------------------------------------------

    @invariant()
    def blocks_are_counted(self) -> None:
        if not hasattr(self, "caches"):
            return
        used = len(self.references())
        for cache, rows in self.caches:
            assert cache.lengths.tolist() == [row.length for row in rows]
            assert (cache.used_blocks, cache.free_blocks) == (used, cache.pool.blocks - used)

    @invariant()
    def contents_are_equal(self) -> None:
        for cache, rows in getattr(self, "caches", ()):
            for layer in range(LAYERS):
                for found, which in zip(cache.get(layer), range(2), strict=True):
                    expected = torch.zeros_like(found)
                    for i, row in enumerate(rows):
                        expected[i, :, : row.length] = row.rows[which, layer]
                    assert torch.equal(found, expected)

    def teardown(self) -> None:
        if hasattr(self, "caches"):
            first = self.caches[0][0]
            del self.caches[1:]
            first.clear()
            assert first.used_blocks == 0
            self.folder.cleanup()


TestSchedules = Schedules.TestCase
TestSchedules.settings = hypothesis.settings(max_examples=150, stateful_step_count=40)
