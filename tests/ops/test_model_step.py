"""model_step in random schedules: a token's logits are those of its sequence alone, bit for bit.

Whatever else is in the call, whatever the blocks, their size and order, and the chunks.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitnet_ops import ops
from cache_panels import PANEL_DTYPES
from op_values import KV_DTYPES, SCALED_KV_DTYPES, dtype_name
from programs import program

LENGTHS = (1, 5, 70, 33, 64, 12)  # of the sequences; more than a chunk of 64 positions among them
KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 2, 16, 64, 2


class Subject:
    """A tiny model, sequences, and what each gives alone, one token after the other.

    windows: of its layers, none or all of them.
    """

    def __init__(self, kv_dtype: torch.dtype, windows: tuple[int, ...]) -> None:
        g = torch.Generator().manual_seed(5)
        self.kv_dtype, self.windows = kv_dtype, windows
        self.sample = program(
            g, layers=LAYERS, hidden=HIDDEN, heads=4, kv_heads=KV_HEADS, head_dim=HEAD_DIM,
            inner=96, weight_format="2bit", windows=windows,
        )  # fmt: skip
        self.handle = self.sample.bind()
        self.tokens = [torch.randn(n, HIDDEN, generator=g) for n in LENGTHS]
        self.alone = []
        for x in self.tokens:
            caches, zero = self.pools(1, len(x)), torch.zeros(1, dtype=torch.int64)
            rows = [
                self.step(x[t : t + 1], caches, "rows", zero + t, zero + t, torch.tensor([0, 1]),
                          zero + t + 1, zero[None], zero)
                for t in range(len(x))
            ]  # fmt: skip
            self.alone.append(torch.cat(rows))

    def step(self, x: Tensor, caches: list[Tensor], layout: str, *where: Tensor) -> Tensor:
        return ops.model_step(
            x, self.handle, caches, *where, self.sample.out_features, layout=layout
        )

    @property
    def poison(self) -> float:
        """What must never be read: NaN, or codes with the scale NaN."""
        return 77 if self.kv_dtype in SCALED_KV_DTYPES else float("nan")

    def spoil(self, pools: list[Tensor], blocks: Tensor, length: int) -> None:
        """Poison the blocks of a sequence that lie before the windows of all tokens to come."""
        size = pools[0].shape[2]
        for block in blocks[: max(length + 1 - max(self.windows), 0) // size].tolist():
            for pool in pools[:2]:
                pool[:, block] = self.poison
            for scales in pools[2:]:
                scales[:, block] = float("nan")

    def pools(self, blocks: int, size: int) -> list[Tensor]:
        """Full of what must never be read."""
        shape = LAYERS, blocks, KV_HEADS, size, HEAD_DIM
        pools = [torch.full(shape, self.poison, dtype=self.kv_dtype).transpose(2, 3) for _ in "kv"]
        if self.kv_dtype not in SCALED_KV_DTYPES:
            return pools
        return [*pools, *(torch.full(p.shape[:-1], float("nan")) for p in pools)]


def layouts(dtype: torch.dtype, size: int) -> tuple[str, ...]:
    """In which a pool of such blocks may be."""
    return ("rows", "panels") if dtype in PANEL_DTYPES and size % 16 == 0 else ("rows",)


WINDOWS = (), (20, 7), (37, 37)  # of the layers
SUBJECTS = {(dtype, windows): Subject(dtype, windows) for dtype in KV_DTYPES for windows in WINDOWS}


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, int, list[list[tuple[int, int]]]]:
    """Block size, a seed for the order of blocks, and calls: (sequence, new tokens) each."""
    size = draw(st.sampled_from([1, 3, 16, 32, 64, 128]))
    left = dict(enumerate(LENGTHS))
    calls = []
    while left and len(calls) < 12:
        chosen = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        call = []
        for s in chosen:
            n = draw(st.one_of(st.integers(1, min(3, left[s])), st.integers(1, left[s])))
            call.append((s, n))
            left[s] -= n
            if not left[s]:
                del left[s]
        calls.append(call)
    return size, draw(st.integers(0, 2**32)), calls


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=dtype_name)
@settings(max_examples=100 * int(os.environ.get("BITNET_TEST_SCHEDULES", "1")))
@given(schedules())
@pytest.mark.sampled(3)
def test_logits_do_not_depend_on_the_schedule(
    kv_dtype: torch.dtype, schedule: tuple[int, int, list[list[tuple[int, int]]]]
) -> None:
    size, seed, calls = schedule
    subject = SUBJECTS[kv_dtype, WINDOWS[seed % len(WINDOWS)]]
    columns = [-(-n // size) for n in LENGTHS]
    order = torch.randperm(sum(columns) + 1, generator=torch.Generator().manual_seed(seed))
    table = torch.full((len(LENGTHS), max(columns)), -1)  # what is not needed is not looked at
    for row, blocks in zip(table, order.split([*columns, 1]), strict=False):
        row[: len(blocks)] = blocks
    pools = subject.pools(len(order), size)
    layout = layouts(kv_dtype, size)[seed % len(layouts(kv_dtype, size))]
    done = dict.fromkeys(range(len(LENGTHS)), 0)
    for call in calls:
        positions = [torch.arange(done[s], done[s] + n) for s, n in call]
        rows = [s for s, _ in call]
        for s, n in call:
            done[s] += n
        logits = subject.step(
            torch.cat([subject.tokens[s][p] for s, p in zip(rows, positions, strict=True)]),
            pools,
            layout,
            torch.cat(positions),
            torch.cat([
                table[s][p // size] * size + p % size
                for s, p in zip(rows, positions, strict=True)
            ]),
            torch.tensor([0, *itertools.accumulate(n for _, n in call)]),
            torch.tensor([done[s] for s in rows]),
            table[rows],
            torch.arange(sum(n for _, n in call)),
        )  # fmt: skip
        expected = torch.cat([subject.alone[s][p] for s, p in zip(rows, positions, strict=True)])
        assert torch.equal(logits, expected)
        for s in rows if subject.windows else []:
            subject.spoil(pools, table[s], done[s])
