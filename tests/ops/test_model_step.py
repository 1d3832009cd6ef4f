"""model_step in random schedules: a token's logits are those of its sequence alone, bit for bit.

Whatever else is in the call, whatever the blocks, their size and order, and the chunks.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitnet_ops import ops
from cache_panels import PANEL_DTYPES
from op_schema import named
from op_values import KV_DTYPES, SCALED_KV_DTYPES, dtype_name
from ops_model import decode_step_arguments

LENGTHS = (1, 5, 70, 33, 64, 12)  # of the sequences; more than a chunk of 64 positions among them
KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 2, 16, 64, 2


class Subject:
    """A tiny model, sequences, and what each gives alone, one token after the other.

    windows: of its layers, none or all of them.
    """

    def __init__(self, kv_dtype: torch.dtype, windows: tuple[int, ...]) -> None:
        g = torch.Generator().manual_seed(5)
        self.kv_dtype, self.windows = kv_dtype, windows
        arguments = decode_step_arguments(
            g, layers=LAYERS, hidden=HIDDEN, heads=4, kv_heads=KV_HEADS, head_dim=HEAD_DIM, batch=1,
            inner=96, length=max(LENGTHS), weight_format="2bit", cache_dtype=kv_dtype,
            windows=windows,
        )  # fmt: skip
        self.model: dict[str, Any] = named("decode_step", arguments)
        cache_names = ("key_cache", "value_cache", "key_scale", "value_scale")
        caches = {name: self.model.pop(name, None) for name in cache_names}
        for name in ("x", "start_positions", "logits_to_keep"):
            self.model.pop(name)
        self.tokens = [torch.randn(n, HIDDEN, generator=g) for n in LENGTHS]
        self.alone = []
        for x in self.tokens:
            rows = [
                ops.decode_step(
                    x=x[None, t : t + 1], start_positions=torch.tensor([t]), **caches, **self.model
                )[0]
                for t in range(len(x))
            ]
            self.alone.append(torch.cat(rows))

    @property
    def poison(self) -> float:
        """What must never be read: NaN, or codes with the scale NaN."""
        return 77 if self.kv_dtype in SCALED_KV_DTYPES else float("nan")

    def spoil(self, pools: dict[str, Any], blocks: Tensor, length: int) -> None:
        """Poison the blocks of a sequence that lie before the windows of all tokens to come."""
        size = pools["key_pool"].shape[2]
        for block in blocks[: max(length + 1 - max(self.windows), 0) // size].tolist():
            for name in ("key_pool", "value_pool"):
                pools[name][:, block] = self.poison
            for name in ("key_scale", "value_scale"):
                if pools[name] is not None:
                    pools[name][:, block] = float("nan")

    def pools(self, blocks: int, size: int) -> dict[str, Any]:
        """Full of what must never be read."""
        shape = LAYERS, blocks, KV_HEADS, size, HEAD_DIM
        scaled = self.kv_dtype in SCALED_KV_DTYPES
        pools = [torch.full(shape, self.poison, dtype=self.kv_dtype).transpose(2, 3) for _ in "kv"]
        scales = [torch.full(p.shape[:-1], float("nan")) if scaled else None for p in pools]
        return dict(
            zip(("key_pool", "value_pool", "key_scale", "value_scale"), [*pools, *scales],
                strict=True)
        )  # fmt: skip


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
@settings(max_examples=350 * int(os.environ.get("BITNET_TEST_SCHEDULES", "1")))
@given(schedules())
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
    pools["layout"] = layouts(kv_dtype, size)[seed % len(layouts(kv_dtype, size))]
    done = dict.fromkeys(range(len(LENGTHS)), 0)
    for call in calls:
        positions = [torch.arange(done[s], done[s] + n) for s, n in call]
        rows = [s for s, _ in call]
        for s, n in call:
            done[s] += n
        logits = ops.model_step(
            x=torch.cat([subject.tokens[s][p] for s, p in zip(rows, positions, strict=True)]),
            positions=torch.cat(positions),
            slot_mapping=torch.cat([
                table[s][p // size] * size + p % size
                for s, p in zip(rows, positions, strict=True)
            ]),
            query_start_loc=torch.tensor([0, *itertools.accumulate(n for _, n in call)]),
            seq_lens=torch.tensor([done[s] for s in rows]),
            block_table=table[rows],
            logit_rows=torch.arange(sum(n for _, n in call)),
            **pools,
            **subject.model,
        )  # fmt: skip
        expected = torch.cat([subject.alone[s][p] for s, p in zip(rows, positions, strict=True)])
        assert torch.equal(logits, expected)
        for s in rows if subject.windows else []:
            subject.spoil(pools, table[s], done[s])
