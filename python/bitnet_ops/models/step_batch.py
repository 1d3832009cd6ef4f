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
    state: of a model with recurrent layers the slot of its state, how many of the drafts of its
        last step it begins with, and how many of its last new tokens are drafts.
    shift: what is added to the positions of its new tokens for the rotary embedding, which images
        before them may change; where keys and values go does not depend on it.
    axes: int64 [3, new tokens], their positions in time, height and width where these differ;
        `shift` is not added to them.
    rows: what stands in the place of embeddings: from which new token on, and rows f32 [n, hidden].
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    logits: int = 1
    adapter: str | None = None
    state: tuple[int, int, int] | None = None
    shift: int = 0
    axes: Tensor | None = None
    rows: Sequence[tuple[int, Tensor]] = ()


_REQUEST = (
    "positions", "slot_mapping", "query_start_loc", "seq_lens", "block_table", "logit_rows"
)  # fmt: skip


@dataclass(frozen=True)
class StepBatch:
    """The arguments of a step besides the model and the pool; all tensors but draws int64.

    token_ids, slot_mapping: [tokens]. Slot = block * block_size + offset in the block.
    positions: [tokens], or [3, tokens] where those in time, height and width differ.
    query_start_loc: [sequences + 1], where the tokens of each sequence begin.
    seq_lens: [sequences], positions with the new ones.
    block_table: [sequences, blocks of the longest], filled up with 0.
    logit_rows: [r], the tokens whose logits are wanted: in round k, for k = 0, 1, ..., token k of
        those wanted of every sequence that has so many, in their order (`logit_rounds`).
    adapters: for each sequence.
    state_steps: [sequences, 3], `state` of each; None: of a model without recurrent layers.
    largest: how many of a row's largest logits are wanted, lower ids first among equals; others may
        then be -inf. 0: all are.
    draws: float64 [r, 2], temperature and uniform of rows that are drawn without filters, as
        `ops.run_program` takes them; None: no row is.
    rows: what stands in the place of tokens' embeddings: from which token on, and f32 [n, hidden].
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    logit_rows: Tensor
    adapters: tuple[str | None, ...] = ()
    state_steps: Tensor | None = None
    largest: int = 0
    draws: Tensor | None = None
    rows: tuple[tuple[int, Tensor], ...] = ()

    @property
    def adapter_names(self) -> tuple[str | None, ...]:
        """Of each sequence; a batch made without any has none."""
        return self.adapters or (None,) * len(self.seq_lens)

    def request(self, adapters: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors of the step by the names that `ops.run_program` gives them.

        adapters: int64 [sequences], the number of each one's LoRA adapter, -1: none.
        """
        found = {name: getattr(self, name) for name in _REQUEST}
        maybe = {"adapters": adapters, "state_steps": self.state_steps, "draws": self.draws}
        return found | {name: tensor for name, tensor in maybe.items() if tensor is not None}

    @classmethod
    def of(
        cls,
        sequences: Sequence[SequenceStep],
        block_size: int,
        largest: int = 0,
        draws: Tensor | None = None,
    ) -> StepBatch:
        """The batch of `sequences`, at least one. Raises ValueError for what cannot be run."""
        if not sequences:
            raise ValueError("StepBatch: expected at least one sequence, got none")
        # Lists and no arrays: a step of one new token is to cost ten microseconds, not fifty.
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        begins, lengths, tables = [0], [], []
        axes: list[tuple[int, Tensor]] = []  # of sequences with pictures, and their rows
        embedded: list[tuple[int, Tensor]] = []
        for i, sequence in enumerate(sequences):
            new, start, blocks = sequence.token_ids, sequence.start, sequence.blocks
            end = start + len(new)
            used = -(-end // block_size)  # blocks that the step reads or writes
            if not len(new) or start < 0 or not 0 <= sequence.logits <= len(new):
                _reject_tokens(i, sequence)
            if len(blocks) < used:
                raise ValueError(
                    f"StepBatch: expected {used} blocks for sequence {i}, got {len(blocks)}"
                )
            ids += new
            shift = sequence.shift
            positions += range(start + shift, end + shift)
            if sequence.axes is not None:
                axes.append((begins[i], sequence.axes))
            if sequence.rows:
                embedded += [(begins[i] + at, rows) for at, rows in sequence.rows]
            slots += [blocks[p // block_size] * block_size + p % block_size
                      for p in range(start, end)]  # fmt: skip
            begins.append(len(ids))
            lengths.append(end)
            tables.append(blocks[:used])
        longest = max(map(len, tables))
        rows = [
            begins[i + 1] - sequences[i].logits + k
            for k, members in enumerate(logit_rounds([s.logits for s in sequences]))
            for i in members
        ]
        table = [block for t in tables for block in [*t, *[0] * (longest - len(t))]]
        parts = ids, positions, slots, begins, lengths, rows, table
        numbers = torch.from_numpy(np.array([*chain(*parts)], dtype=np.int64))  # in one piece
        views = numbers.split_with_sizes([len(part) for part in parts])
        return cls(
            token_ids=views[0],
            positions=_with_axes(views[1], axes) if axes else views[1],
            slot_mapping=views[2],
            query_start_loc=views[3],
            seq_lens=views[4],
            block_table=views[6].view(-1, longest),
            logit_rows=views[5],
            adapters=tuple(s.adapter for s in sequences),
            state_steps=_states_of(sequences),
            largest=largest,
            draws=draws,
            rows=tuple(embedded),
        )

    def __repr__(self) -> str:
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        shapes = {name: t for name, t in tensors.items() if isinstance(t, Tensor)}
        return f"StepBatch({', '.join(f'{k} {list(v.shape)}' for k, v in shapes.items())})"


def logit_rounds(wanted: Sequence[int]) -> list[list[int]]:
    """By round, the sequences that have a row of logits in it; `wanted` counts those of each.

    The rounds one after the other are the rows of a step's logits.
    """
    return [
        [i for i, count in enumerate(wanted) if count > k] for k in range(max(wanted, default=0))
    ]


def _with_axes(positions: Tensor, axes: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Positions [tokens] as [3, tokens], with those of sequences that have axes of their own."""
    found = positions.repeat(3, 1)
    for begin, own in axes:
        found[:, begin : begin + own.shape[1]] = own
    return found


def _states_of(sequences: Sequence[SequenceStep]) -> Tensor | None:
    if sequences[0].state is None:
        return None
    return torch.tensor([s.state for s in sequences], dtype=torch.int64)


def _reject_tokens(i: int, s: SequenceStep) -> None:
    raise ValueError(
        f"StepBatch: expected sequence {i} with new tokens, a start at least 0 and logits of at "
        f"most its new tokens, got {len(s.token_ids)}, {s.start} and {s.logits}"
    )
