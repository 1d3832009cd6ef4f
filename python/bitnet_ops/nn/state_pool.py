"""StatePool: what blocks keep for sequences, such as recurrent states, one slot for each sequence.

A slot holds, of every such block, its buffers behind the tokens that are certain, and in rows of
them what is kept of drafts (`ops.delta_net`). Address space is reserved for as many slots as there
may be; the system gives memory as they are written. Whose slot it is is not its matter, nor what
the numbers mean. A slot in use cannot be brought back to an earlier token: copies can (`copy`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from bitnet_ops.blocks.listing import Kept
from bitnet_ops.memory.reserved import Reserved

MAX_KEPT_DRAFTS = 8


def slot_bytes(kept: Mapping[str, Kept]) -> int:
    """Bytes of a slot, without what is kept of drafts; 0 where nothing is kept for sequences."""
    return sum(
        math.prod(_shape(one, 0)) * _dtype(one).itemsize
        for one in kept.values()
        if one.buffer.per == "sequence"
    )


def _shape(kept: Kept, drafts: int) -> tuple[int, ...]:
    """Of a slot's part of a buffer, with the rows of so many drafts."""
    rows = () if kept.buffer.rows is None else (kept.buffer.rows + drafts,)
    return kept.layers, *rows, *kept.buffer.shape


def _dtype(kept: Kept) -> torch.dtype:
    found: torch.dtype = getattr(torch, str(kept.buffer.dtype))
    return found


class StatePool:
    """Slots of named buffers [slots, layers, ...], those with rows [slots, layers, rows, ...].

    Attributes: `tensors`, the buffers by name, as `ops.run_program` takes them.

    Args:
        kept: the buffers of sequences.
        slots: how many there are, at least 1.
        drafts: tokens of a step that may be taken back, at most.
    Contents are not initialised: a sequence at position 0 needs none. Raises MemoryError without
    address space.
    """

    def __init__(
        self, kept: Mapping[str, Kept], slots: int, *, drafts: int = MAX_KEPT_DRAFTS
    ) -> None:
        self.kept, self.slots, self.drafts = kept, slots, drafts
        self._memory = [Reserved(slots, _shape(one, drafts), _dtype(one)) for one in kept.values()]
        self.tensors = dict(zip(kept, (m.tensor for m in self._memory), strict=True))

    def __repr__(self) -> str:
        layers = max(one.layers for one in self.kept.values())
        mib = self.slots * slot_bytes(self.kept) / 2**20
        return f"StatePool(layers={layers}, slots={self.slots}, {mib:.0f} MiB)"

    def views(self, slot: int, drafts: int = 0) -> dict[str, Tensor]:
        """The memory of a slot with so many of its drafts, not copied; nothing empty."""
        found = {}
        for name, one in self.kept.items():
            rows = one.buffer.rows
            view = self.tensors[name][slot]
            if rows is None:
                found[name] = view
            elif rows + drafts:
                found[name] = view[:, : rows + drafts]
        return found

    def copy(self, source: int, target: int, drafts: int = 0) -> None:
        """Slot `target` becomes a copy of slot `source`, with so many of its drafts."""
        into = self.views(target, drafts)
        for name, view in self.views(source, drafts).items():
            into[name].copy_(view)

    def stored(self, slot: int, drafts: int = 0) -> dict[str, Tensor]:
        """Copies of what `copy` copies, by name."""
        return {name: view.clone() for name, view in self.views(slot, drafts).items()}

    def store(self, slot: int, found: Mapping[str, Tensor]) -> None:
        """Write what `stored` has given."""
        for name, part in found.items():
            view = self.tensors[name][slot]
            rows = self.kept[name].buffer.rows
            (view if rows is None else view[:, : part.shape[1]]).copy_(part)

    def clear(self, slot: int) -> None:
        """Make the memory of a slot 0."""
        for view in self.views(slot).values():
            view.zero_()

    def parts(self, slot: int) -> list[Tensor]:
        """The memory of a slot without drafts, not copied."""
        return list(self.views(slot).values())

    def release(self, slots: Iterable[int]) -> None:
        """Give the memory of `slots` back to the system; their contents are lost."""
        for slot in slots:
            for memory in self._memory:
                memory.release(slot, slot + 1)
