"""Prompts: token ids, and among them runs of rows, parts that are no text, such as images.

Each row stands where a token's embedding would. Its position shows a padding id, so that lengths,
blocks and texts need not know of rows. Two things differ: the prefix cache tells rows by their
content (`RowRuns.content`), and a row may stand at a place of its own in time, height and width
(`RowRuns.positions`). All that is known here: the scheduler, the pool and the model see ids,
contents, positions and rows.
"""

from __future__ import annotations

import hashlib
import operator
import os
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bitnet_ops.arguments import check_integer, shown
from bitnet_ops.errors import BitNetError


class PromptError(BitNetError, ValueError):
    """A prompt that cannot be run: empty, with ids outside the vocabulary, or too long."""


def token_ids(prompt: object, who: str = "prompt") -> list[int]:
    """The ids of one prompt: of a sequence of integers, or of a tensor or array [T] or [1, T].

    Raises TypeError for anything else, texts and booleans included.
    """
    values: object = prompt
    if callable(tolist := getattr(prompt, "tolist", None)):  # a tensor, a NumPy array
        values = tolist()
        if isinstance(values, list) and len(values) == 1 and isinstance(values[0], list):
            values = values[0]
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise TypeError(f"{who}: expected token ids as a list of integers, got {kind_of(prompt)}")
    if all(type(i) is int for i in values):
        return list(values)
    ids = []
    for at, value in enumerate(values):
        if isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, Tensor):
            raise TypeError(
                f"{who}: expected token ids as a list of integers, got {kind_of(value)} at {at}"
            )
        ids.append(operator.index(value))
    return ids


def kind_of(value: object) -> str:
    """What `value` is, in words for a message."""
    if isinstance(value, Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "None" if value is None else f"{shown(value, 40)} ({type(value).__name__})"


def check_prompt(ids: Sequence[int], vocab_size: int, max_positions: int) -> None:
    """Raise PromptError for ids that a model of these sizes cannot run."""
    if not len(ids):
        raise PromptError(
            "engine: expected a prompt of at least one token, got an empty one; start it with the "
            "model's bos token"
        )
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise PromptError(
            f"engine: expected prompt ids from 0 to {vocab_size - 1}, got {min(ids)} to "
            f"{max(ids)}; the tokenizer belongs to another model"
        )
    if len(ids) > max_positions:
        raise PromptError(
            f"engine: expected a prompt of at most {max_positions} tokens "
            f"(max_position_embeddings), got {len(ids)}; shorten it"
        )


# Rows ------------------------------------------------------------------------------------------

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class PromptRows:
    """Rows in the place of tokens.

    rows: float [n, hidden_size], n at least 1; finite. Copied to float32.
    pad_id: the token id that these positions show.
    identity: tells these rows from others in the prefix cache: equal identities must mean equal
        rows. None: the rows are never found by another prompt.
    grid: (height, width) of an image, row by row, height * width = n: row (r, s) stands at time t,
        height t + r and width t + s, where t is the position behind what comes before, and the
        next token stands max(height, width) behind t. None: each row stands behind the one before
        it, as tokens do.
    Raises TypeError or ValueError for anything else.
    """

    rows: Tensor = field(repr=False)
    pad_id: int
    identity: bytes | None = field(default=None, repr=False)
    grid: tuple[int, int] | None = None
    _contents: array[int] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        who = "PromptRows: expected"
        rows = self.rows
        if not isinstance(rows, Tensor) or rows.dtype not in _FLOATS or rows.dim() != 2:
            raise TypeError(f"{who} rows as a float tensor [n, hidden_size], got {kind_of(rows)}")
        if not rows.shape[0] or rows.device.type != "cpu":
            raise ValueError(f"{who} at least one row on the CPU, got {kind_of(rows)}")
        check_integer(f"{who} pad_id", self.pad_id, 0)
        if self.identity is not None and not isinstance(self.identity, bytes):
            raise TypeError(f"{who} identity as bytes or None, got {kind_of(self.identity)}")
        if self.grid is not None:
            height, width = map(operator.index, self.grid)
            if min(height, width) < 1 or height * width != rows.shape[0]:
                raise ValueError(f"{who} a grid of {rows.shape[0]} rows, got {height} x {width}")
            object.__setattr__(self, "grid", (height, width))
        values = rows.detach().to(torch.float32, copy=True).contiguous()
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"{who} finite rows, got some with NaN or infinity")
        object.__setattr__(self, "rows", values)

    def __len__(self) -> int:
        return self.rows.shape[0]

    @property
    def advance(self) -> int:
        """How far behind its first row's time the next token stands."""
        return len(self) if self.grid is None else max(self.grid)

    def offsets(self) -> Tensor:
        """Of every row in time, height and width from the first one's: int64 [3, n]."""
        if self.grid is None:
            return torch.arange(len(self)).expand(3, -1)
        height, width = self.grid
        rows = torch.arange(height).repeat_interleave(width)
        return torch.stack([torch.zeros_like(rows), rows, torch.arange(width).repeat(height)])

    def contents(self) -> array[int]:
        """A number for every row that stands for it in keys of the prefix cache; all below 0.

        63 bits of a hash of identity, grid and place: a chosen row that is taken for a given one
        would take 2^62 trials. Computed once; without an identity anew each time.
        """
        if self._contents is not None:
            return self._contents
        identity = os.urandom(32) if self.identity is None else self.identity
        state = hashlib.sha256(repr((self.grid, len(self))).encode() + identity)
        found = array("q")
        for i in range(len(self)):
            row = state.copy()
            row.update(b"%d" % i)
            found.append(-1 - (int.from_bytes(row.digest()[:8], "little") >> 1))
        if self.identity is not None:
            object.__setattr__(self, "_contents", found)
        return found


class RowRuns:
    """The runs of rows of one prompt: where they are, and what follows from it.

    Attributes: `delta`: what the position of a token behind all runs is beside its index.
    """

    def __init__(self, runs: Sequence[tuple[int, PromptRows]]) -> None:
        self._runs = list(runs)
        self._starts = [start for start, _ in runs]
        self._deltas = [0]  # before the first run, behind each
        for _, run in runs:
            self._deltas.append(self._deltas[-1] + run.advance - len(run))

    @property
    def delta(self) -> int:
        return self._deltas[-1]

    @property
    def borders(self) -> list[int]:
        """Where runs begin and end."""
        return sorted({at for start, run in self._runs for at in (start, start + len(run))})

    def content(self, ids: Sequence[int]) -> array[int]:
        """`ids` with what stands for rows in keys of the prefix cache."""
        found = array("q", ids)
        for start, run in self._runs:
            found[start : start + len(run)] = run.contents()
        return found

    def _between(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """(number of the run, first, last + 1 of its rows) that stand in [begin, end)."""
        found = []
        first = max(0, bisect_right(self._starts, begin) - 1)
        for i in range(first, len(self._runs)):
            start, run = self._runs[i]
            if start >= end:
                break
            if (low := max(0, begin - start)) < (high := min(len(run), end - start)):
                found.append((i, low, high))
        return found

    def rows(self, begin: int, end: int) -> list[tuple[int, Tensor]]:
        """Rows in [begin, end): where each run begins behind `begin`, and f32 [n, hidden]."""
        return [
            (self._starts[i] + low - begin, self._runs[i][1].rows[low:high])
            for i, low, high in self._between(begin, end)
        ]

    def shift(self, begin: int) -> int:
        """What the position of a token at index `begin` is beside its index."""
        return self._deltas[bisect_right(self._starts, begin)]

    def positions(self, begin: int, end: int) -> Tensor | None:
        """Positions in time, height and width of [begin, end): int64 [3, n].

        None where the axes agree and all are shifted by `shift(begin)`.
        """
        if not (found := self._between(begin, end)):
            return None
        axes = torch.arange(begin, end).repeat(3, 1)
        for i, start in enumerate(self._starts):
            axes[:, max(0, start - begin) :] += self._deltas[i + 1] - self._deltas[i]
        for i, low, high in found:
            start, run = self._runs[i]
            at = slice(start + low - begin, start + high - begin)
            axes[:, at] = start + self._deltas[i] + run.offsets()[:, low:high]
        return axes


def split_prompt(prompt: Sequence[Any], hidden_size: int) -> tuple[Sequence[Any], RowRuns | None]:
    """The ids of a prompt in which PromptRows stand among ids or lists of ids, and its runs.

    None where it has no rows. Raises PromptError for rows of another width.
    """
    if not isinstance(prompt, list | tuple) or not any(isinstance(p, PromptRows) for p in prompt):
        return prompt, None
    ids: list[Any] = []
    runs = []
    for part in prompt:
        if isinstance(part, PromptRows):
            if part.rows.shape[1] != hidden_size:
                raise PromptError(
                    f"engine: expected rows of the model's hidden_size {hidden_size}, got rows of "
                    f"{part.rows.shape[1]}"
                )
            runs.append((len(ids), part))
            ids += [part.pad_id] * len(part)
        elif isinstance(part, Sequence) and not isinstance(part, str | bytes):
            ids += part
        else:
            ids.append(part)
    return ids, RowRuns(runs)
