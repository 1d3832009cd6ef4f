"""DraftWords: the words that a draft head chooses among, and the rows of the output head of these.

A draft that read the whole output head would cost a quarter of a step. So a draft head has a list
of words and, in a small head, their rows: copies of the trunk's bytes, so that their logits are the
trunk's, bit for bit. The list follows the text. A token that is seen enters, and one that has not
been seen for longest leaves: docs/notes/drafts.md has what that is worth in which language. The
list decides how many drafts are right, never which tokens come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bitnet_ops.memory.arena import Arena, aligned
from bitnet_ops.nn.head import HeadWeight
from bitnet_ops.nn.storage import LAYOUTS

# With less, drafts miss words; with more, each is dearer (docs/notes/drafts.md has both).
DEFAULT_WORDS = 16384

_STAY = 4  # the first 1/4 of the list never leaves: bytes, punctuation, the commonest words
# What a call of `learn` may copy. A row in tiles touches the lines of its neighbours too, and takes
# time of its own; both bounds are from measurements (docs/notes/drafts.md).
_STEP_BYTES, _STEP_ROWS = 1 << 20, 64
_LANE = 4  # bytes that a row has in a step of a tile, int4 or ternary
_LINE = 64  # bytes of a cache line

_Array = np.ndarray[Any, Any]


class DraftWords:
    """A list of words and the output head of these words alone.

    The engine's thread alone calls `learn`, between steps: buffers and `ids` change in place, and
    no number that counts changes of tensors or of modules is raised. Whoever casts or replaces the
    trunk's head makes a new one.

    Args:
        head: the trunk's output head [V, K], in any format and layout.
        size: words of the list, at least 1; V or more: the trunk's head itself, nothing is copied.
        always: ids that are in the list from the beginning and never leave, such as special tokens.
    Attributes:
        head: HeadWeight [n, K] in the trunk's format, n = min(size, V); row i is that of ids[i].
        ids: int64 [n], each id once; at first the lowest ids and `always`.
        rows_of_call: how many words may enter in one call of `learn`.
    Raises:
        ValueError: a size below 1, an id of `always` outside 0 .. V - 1, or more of them than the
            list has places.
    """

    head: HeadWeight
    ids: Tensor
    rows_of_call: int

    def __init__(
        self, head: HeadWeight, size: int = DEFAULT_WORDS, always: Iterable[int] = ()
    ) -> None:
        if size < 1:
            raise ValueError(f"DraftWords: expected size at least 1, got {size}")
        self._trunk, self._vocabulary = head, head.out_features
        n = min(size, self._vocabulary)
        self.ids = torch.arange(n)
        self._ids = self.ids.numpy()
        self._stay = n // _STAY
        self._always = frozenset(always)
        self._check(self._always)
        # id -> its row, of the words that may leave, the one not seen for longest first
        self._recent: OrderedDict[int, int] = OrderedDict()
        # words that have been seen but have no row yet, the last one seen at the end
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._copies: list[_Copy] = []
        self.head, self.rows_of_call = head, 0
        if size >= self._vocabulary:
            return
        self.head, self._copies = _first_rows(head, n)
        touched = max(1, sum(copy.touched for copy in self._copies))
        self.rows_of_call = max(1, min(_STEP_ROWS, _STEP_BYTES // touched))
        self._recent.update((i, i) for i in range(n - 1, self._stay - 1, -1))
        self._hold(sorted(self._always))

    def _check(self, ids: Iterable[int]) -> None:
        for i in ids:
            if not 0 <= i < self._vocabulary:
                raise ValueError(
                    f"DraftWords: expected ids from 0 to {self._vocabulary - 1}, got {i}"
                )

    def _hold(self, ids: Collection[int]) -> None:
        """Give `ids` places for good."""
        held = [i for i in ids if i >= self._stay]
        if len(held) > len(self._recent):
            raise ValueError(
                f"DraftWords: expected at most {len(self._recent)} ids that always stay in a list "
                f"of {len(self.ids)}, got {len(held)}; make it larger"
            )
        new = []
        for i in held:
            if self._recent.pop(i, None) is None:
                new.append(i)
        self._put(new, [self._recent.popitem(last=False)[1] for _ in new])

    def __contains__(self, word: int) -> bool:
        """Whether the list has the id `word` now."""
        if not self._copies:
            return 0 <= word < self._vocabulary
        return 0 <= word < self._stay or word in self._recent or word in self._always

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, also of a pickle, has rows of its own, of its own trunk; it begins anew.
        return type(self), (self._trunk, len(self.ids), self._always)

    def __repr__(self) -> str:
        return f"DraftWords({len(self.ids)} of {self._vocabulary} words, {self.head.head_format})"

    def learn(self, ids: Iterable[int]) -> None:
        """Let tokens that have been seen enter the list; others leave.

        A call copies few rows, so that it never takes longer than about 0.2 ms and 0.2 us a token;
        words that found no place in it wait for the next calls, those seen last in front. So call
        it once a step, also without ids. Raises ValueError for an id that is none.
        """
        if not self._copies:
            return
        recent, waiting, stay, always = self._recent, self._waiting, self._stay, self._always
        for i in ids:
            if i in recent:
                recent.move_to_end(i)
            elif not 0 <= i < stay and i not in always:
                waiting[i] = None
                waiting.move_to_end(i)
        if waiting:
            self._enter()

    def _enter(self) -> None:
        recent, waiting = self._recent, self._waiting
        while len(waiting) > len(recent):  # those would push out what has been seen after them
            waiting.popitem(last=False)
        new = [waiting.popitem()[0] for _ in range(min(self.rows_of_call, len(waiting)))]
        new.reverse()
        try:
            self._check(new)
        except ValueError:
            waiting.clear()
            raise
        places = [recent.popitem(last=False)[1] for _ in new]
        recent.update(zip(new, places, strict=True))
        self._put(new, places)

    def _put(self, ids: list[int], places: list[int]) -> None:
        if ids:
            self._ids[places] = ids
            for copy in self._copies:
                copy.rows(ids, places)


# Rows of every layout -----------------------------------------------------------------------------


class _Copy(Protocol):
    """Copies single rows of a tensor to a smaller one of the same layout.

    `touched`: bytes of the lines of memory that one row takes, in both: what it costs.
    """

    touched: int

    def rows(self, ids: list[int], places: list[int]) -> None: ...


def _first_rows(head: HeadWeight, n: int) -> tuple[HeadWeight, list[_Copy]]:
    """A head of the first n rows of `head`, and what copies other rows into it."""
    tensors = [t for t in (head.weight, head.scale) if t is not None]
    counts = [-(-n // _rows_of_block(head, tensor)) for tensor in tensors]
    parts = [t[:count].detach() for t, count in zip(tensors, counts, strict=True)]
    arena = Arena(sum(aligned(part.nbytes) for part in parts))
    small = [arena.take(part.shape, part.dtype).copy_(part) for part in parts]
    copies = [_copy(head, *pair) for pair in zip(tensors, small, strict=True)]
    made = HeadWeight(small[0], small[1] if len(small) > 1 else None, n, head.in_features)
    made.signs = head.signs
    return made.train(head.training), copies


def _rows_of_block(head: HeadWeight, tensor: Tensor) -> int:
    """How many rows an entry of the first dimension of `tensor` has, a head's weight or scale."""
    if tensor.dim() < 3:
        return 1
    if tensor is head.scale:
        return tensor.shape[2]
    if head.head_format == "int4":
        return tensor.shape[2] // _LANE
    fields = LAYOUTS["2bit" if tensor.dim() == 3 else "1.6bit"]["fields"]
    return fields * (tensor[0, 0].numel() // _LANE)


def _copy(head: HeadWeight, source: Tensor, target: Tensor) -> _Copy:
    if source.dim() < 3:
        return _WholeRows(source, target)
    if source is head.scale:
        return _Lanes(source, target)
    if head.head_format == "int4":
        return _Lanes(source.view(torch.int32), target.view(torch.int32))
    return (_TwoBits if source.dim() == 3 else _Base3)(source, target)


def _array(tensor: Tensor) -> _Array:
    """The memory of a tensor. Writing to it does not count as a change of the tensor.

    Numbers that numpy has no type for are read as integers of their size.
    """
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
    array: _Array = tensor.detach().view(integer).numpy()
    return array


class _WholeRows:
    """Rows that lie side by side, or one number a row."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._from, self._to = _array(source), _array(target)
        self.touched = 2 * max(_LINE, self._from[0].nbytes)

    def rows(self, ids: list[int], places: list[int]) -> None:
        self._to[places] = self._from[ids]


class _Lanes:
    """[tiles, steps, lanes]: a number of each step belongs to the row of its lane."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._from, self._to = _array(source), _array(target)
        self.touched = 2 * self._from[0].nbytes

    def rows(self, ids: list[int], places: list[int]) -> None:
        lanes = self._from.shape[2]
        for i, place in zip(ids, places, strict=True):
            row = self._from[i // lanes, :, i % lanes]
            self._to[place // lanes, :, place % lanes] = row


class _TwoBits:
    """Tiles of 2 bits a weight: a lane's number of a step holds four codes of each of four rows."""

    _CODES = 0x03030303  # of the first row

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._from = _array(source).view(np.uint32)
        self._to = _array(target).view(np.uint32)
        self.touched = 2 * self._from[0].nbytes

    def _at(self, row: int) -> tuple[int, int, np.uint32]:
        """The tile and the lane of a row, and the shift of its codes."""
        lanes = self._from.shape[2]
        field, lane = divmod(row, lanes)
        tile, field = divmod(field, 4)
        return tile, lane, np.uint32(2 * field)

    def rows(self, ids: list[int], places: list[int]) -> None:
        mask = np.uint32(self._CODES)
        for i, place in zip(ids, places, strict=True):
            tile, lane, shift = self._at(i)
            codes = self._from[tile, :, lane] >> shift
            codes &= mask
            tile, lane, shift = self._at(place)
            codes <<= shift
            row = self._to[tile, :, lane]
            codes |= row & ~(mask << shift)
            row[:] = codes


class _Base3:
    """Tiles of 1.6 bits a weight: a byte of a lane holds one code of each of five rows."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        # the four bytes of a lane as one number: a row is then gathered and put back at once
        self._from = _array(source.view(torch.int32).squeeze(-1))
        self._to = _array(target.view(torch.int32).squeeze(-1))
        self.touched = 3 * self._from[0].nbytes  # looking bytes up takes as long as half of that
        self._code, self._with_code = _base3_tables()

    def _at(self, row: int) -> tuple[int, int, int]:
        """The tile, the lane and the field of a row."""
        field, lane = divmod(row, self._from.shape[2])
        tile, field = divmod(field, 5)
        return tile, lane, field

    def rows(self, ids: list[int], places: list[int]) -> None:
        for i, place in zip(ids, places, strict=True):
            tile, lane, field = self._at(i)
            source = np.ascontiguousarray(self._from[tile, :, lane]).view(np.uint8)
            # "clip" is the one mode that does not copy to check indices
            codes = self._code[field].take(source, mode="clip")
            tile, lane, field = self._at(place)
            row = self._to[tile, :, lane]
            codes += np.ascontiguousarray(row).view(np.uint8)
            row[:] = self._with_code[field].take(codes, mode="clip").view(row.dtype)


def _base3_tables() -> tuple[_Array, _Array]:
    """uint16 [5, 256], 256 times the code of a field in a byte, and uint8 [5, 768].

    The latter: the byte b with code c in that field instead, at 256 c + b. A byte is
    ceil(256 v / 243), and the digits of v in base 3 are the codes, field 0 the highest.
    """
    values = np.arange(243)
    made = (256 * values + 242) // 243
    code = np.zeros((5, 256), np.uint16)
    with_code = np.zeros((5, 768), np.uint8)
    for field in range(5):
        power = 3 ** (4 - field)
        digit = values // power % 3
        code[field, made] = 256 * digit
        for new in range(3):
            with_code[field, 256 * new + made] = made[values + (new - digit) * power]
    return code, with_code
