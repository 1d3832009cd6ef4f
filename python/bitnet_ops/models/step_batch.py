"""StepBatch: the tensors of one model step over a paged KV cache, and how they are made.

The new tokens of all sequences stand one after the other; prompt chunks, single tokens and drafts
mix. It must not know who schedules the sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class SequenceStep(NamedTuple):
    """What one sequence brings to a step.

    token_ids: its new tokens, at least one, which stand at the positions from `start` on.
    blocks: its block table; it covers all positions up to the new ones.
    logits: of that many of its last tokens logits are wanted; 0 in the middle of a prompt.
    adapter: the name of its LoRA adapter, if any.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    logits: int = 1
    adapter: str | None = None


@dataclass(frozen=True)
class StepBatch:
    """The arguments of a step besides the model and the pool; all tensors int64.

    token_ids, positions, slot_mapping: [tokens]. Slot = block * block_size + offset in the block.
    query_start_loc: [sequences + 1], where the tokens of each sequence begin.
    seq_lens: [sequences], positions with the new ones.
    block_table: [sequences, blocks of the longest], filled up with 0.
    logit_rows: [r], the tokens whose logits are wanted: in round k, for k = 0, 1, ..., token k of
        those wanted of every sequence that has so many, in their order (`logit_rounds`).
    adapters: for each sequence.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    logit_rows: Tensor
    adapters: tuple[str | None, ...] = ()

    @classmethod
    def of(cls, sequences: Sequence[SequenceStep], block_size: int) -> StepBatch:
        """The batch of `sequences`, at least one. Raises ValueError for what cannot be run."""
        if not sequences:
            raise ValueError("StepBatch: expected at least one sequence, got none")
        counts = np.array([len(s.token_ids) for s in sequences])
        starts = np.array([s.start for s in sequences])
        lengths = starts + counts
        used = -(-lengths // block_size)  # blocks of each sequence that the step reads or writes
        _check(sequences, used)
        begins = np.zeros(len(sequences) + 1, dtype=np.int64)
        np.cumsum(counts, out=begins[1:])
        owners = np.repeat(np.arange(len(sequences)), counts)
        positions = np.arange(begins[-1]) + (starts - begins[:-1])[owners]
        table = np.zeros((len(sequences), used.max()), dtype=np.int64)
        for row, sequence, n in zip(table, sequences, used, strict=True):
            row[:n] = sequence.blocks[:n]
        slots = table[owners, positions // block_size] * block_size + positions % block_size
        rows = [
            begins[i + 1] - sequences[i].logits + k
            for k, members in enumerate(logit_rounds([s.logits for s in sequences]))
            for i in members
        ]
        ids = np.fromiter(chain.from_iterable(s.token_ids for s in sequences), np.int64, begins[-1])
        return cls(
            token_ids=torch.from_numpy(ids),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            query_start_loc=torch.from_numpy(begins),
            seq_lens=torch.from_numpy(lengths),
            block_table=torch.from_numpy(table),
            logit_rows=torch.tensor(rows, dtype=torch.int64),
            adapters=tuple(s.adapter for s in sequences),
        )

    def __repr__(self) -> str:
        shapes = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "adapters"}
        return f"StepBatch({', '.join(f'{k} {list(v.shape)}' for k, v in shapes.items())})"


def logit_rounds(wanted: Sequence[int]) -> list[list[int]]:
    """By round, the sequences that have a row of logits in it; `wanted` counts those of each.

    The rounds one after the other are the rows of a step's logits.
    """
    return [
        [i for i, count in enumerate(wanted) if count > k] for k in range(max(wanted, default=0))
    ]


def _check(sequences: Sequence[SequenceStep], used: np.ndarray) -> None:
    for i, (s, n) in enumerate(zip(sequences, used.tolist(), strict=True)):
        if not len(s.token_ids) or s.start < 0 or not 0 <= s.logits <= len(s.token_ids):
            raise ValueError(
                f"StepBatch: expected sequence {i} with new tokens, a start at least 0 and logits "
                f"of at most its new tokens, got {len(s.token_ids)}, {s.start} and {s.logits}"
            )
        if len(s.blocks) < n:
            raise ValueError(
                f"StepBatch: expected {n} blocks for sequence {i}, got {len(s.blocks)}"
            )
