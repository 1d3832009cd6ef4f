"""StepBatch: every tensor by its definition, one token at a time."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from bitnet_ops.models.step_batch import SequenceStep, StepBatch, logit_rounds


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[SequenceStep], int]:
    size = draw(st.integers(1, 5))
    found = []
    for _ in range(draw(st.integers(1, 5))):
        ids = draw(st.lists(st.integers(0, 99), min_size=1, max_size=7))
        start = draw(st.integers(0, 20))
        spare = draw(st.integers(0, 2))
        count = -(-(start + len(ids)) // size) + spare
        blocks = draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
        adapter = draw(st.sampled_from([None, "a"]))
        found.append(SequenceStep(ids, start, blocks, draw(st.integers(0, len(ids))), adapter))
    return found, size


@hypothesis.settings(max_examples=500)
@hypothesis.given(sequences())
def test_every_token_has_its_place(case: tuple[list[SequenceStep], int]) -> None:
    some, size = case
    batch = StepBatch.of(some, size)
    ids, positions, slots, begins, rows = [], [], [], [0], {}
    for i, s in enumerate(some):
        for j, token in enumerate(s.token_ids):
            position = s.start + j
            if (k := j - (len(s.token_ids) - s.logits)) >= 0:
                rows[k, i] = len(ids)
            ids.append(token)
            positions.append(position)
            slots.append(s.blocks[position // size] * size + position % size)
        begins.append(len(ids))
        table, needed = batch.block_table[i].tolist(), positions[-1] // size + 1
        assert table == [*s.blocks[:needed], *[0] * (len(table) - needed)]
    for name in ("token_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens",
                 "block_table", "logit_rows"):  # fmt: skip
        assert getattr(batch, name).dtype == torch.int64
    assert batch.token_ids.tolist() == ids and batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots and batch.query_start_loc.tolist() == begins
    assert batch.seq_lens.tolist() == [s.start + len(s.token_ids) for s in some]
    assert batch.block_table.shape[1] == max(-(-int(n) // size) for n in batch.seq_lens)
    assert batch.logit_rows.tolist() == [rows[key] for key in sorted(rows)]
    assert batch.adapters == tuple(s.adapter for s in some)
    assert sum(map(len, logit_rounds([s.logits for s in some]))) == len(batch.logit_rows)


def test_rounds_list_who_has_so_many() -> None:
    assert logit_rounds([1, 0, 3, 2]) == [[0, 2, 3], [2, 3], [2]]
    assert logit_rounds([0, 0]) == logit_rounds([]) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"token_ids": []}, "sequence 1 with new tokens.*got 0, 3 and 1"),
        ({"start": -1}, "got 2, -1 and 1"),
        ({"logits": 3}, "got 2, 3 and 3"),
        ({"blocks": [7]}, "expected 2 blocks for sequence 1, got 1"),
    ],
)
def test_what_cannot_be_run_is_rejected(wrong: dict[str, Any], message: str) -> None:
    right = SequenceStep([5, 6], 3, [7, 8])
    StepBatch.of([right, right], 4)
    with pytest.raises(ValueError, match=message):
        StepBatch.of([right, right._replace(**wrong)], 4)


def test_there_is_a_sequence() -> None:
    with pytest.raises(ValueError, match="at least one sequence, got none"):
        StepBatch.of([], 4)


def test_its_text_shows_the_shapes() -> None:
    batch = StepBatch.of([SequenceStep([5, 6], 3, [7, 8]), SequenceStep([1], 0, [2])], 4)
    assert "token_ids [3]" in repr(batch) and "block_table [2, 2]" in repr(batch)
