"""StatePool: the recurrent states of Gated DeltaNet layers, one slot for each sequence.

A slot holds, of every such layer, the state behind the tokens that are certain, the last inputs of
the convolution, and what is kept of drafts (`ops.delta_net`). Address space is reserved for as many
slots as there may be; the system gives memory as they are written. Whose slot it is is not its
matter. A slot in use cannot be brought back to an earlier token: copies can (`copy`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from bitnet_ops.config.hybrid import STATE_COLUMNS, DeltaNet
from bitnet_ops.memory.reserved import Reserved

MOST_KEPT_DRAFTS = 8
_KEPT_EXTRA = STATE_COLUMNS + 16  # behind a draft's key, of each slab: errors, decay


def slot_bytes(delta_net: DeltaNet) -> int:
    """Bytes of a slot, without what is kept of drafts."""
    d = delta_net
    state = d.value_heads * d.key_dim * d.value_dim
    return 4 * len(d.layers) * (state + (d.kernel - 1) * d.channels)


class StatePool:
    """Slots, all float32, as `ops.delta_net` and `ops.model_step` take them.

    Attributes: `recurrent` [slots, layers, HV, DV / 32, DK, 32], `inputs` [slots, layers, kernel -
    1 + drafts, C], `kept` [slots, layers, drafts, HV, DV / 32, DK + 48]; `tensors`, the three.

    Args:
        delta_net: the model's layers and their sizes.
        slots: how many there are, at least 1.
        drafts: tokens of a step that may be taken back, at most.
    Contents are not initialised: a sequence at position 0 needs none. Raises MemoryError without
    address space.
    """

    def __init__(self, delta_net: DeltaNet, slots: int, *, drafts: int = MOST_KEPT_DRAFTS) -> None:
        d, layers = delta_net, len(delta_net.layers)
        self.delta_net, self.slots, self.drafts = delta_net, slots, drafts
        slabs = d.value_heads, d.value_dim // STATE_COLUMNS
        shapes = (
            (layers, *slabs, d.key_dim, STATE_COLUMNS),
            (layers, d.kernel - 1 + drafts, d.channels),
            (layers, drafts, *slabs, d.key_dim + _KEPT_EXTRA),
        )
        self._memory = [Reserved(slots, shape, torch.float32) for shape in shapes]
        self.tensors = tuple(memory.tensor for memory in self._memory)

    def __repr__(self) -> str:
        return (
            f"StatePool(layers={len(self.delta_net.layers)}, slots={self.slots}, "
            f"{self.slots * slot_bytes(self.delta_net) / 2**20:.0f} MiB)"
        )

    def copy(self, source: int, target: int, drafts: int = 0) -> None:
        """Slot `target` becomes a copy of slot `source`, with so many of its drafts."""
        recurrent, inputs, kept = self.tensors
        recurrent[target] = recurrent[source]
        rows = self.delta_net.kernel - 1 + drafts
        inputs[target, :, :rows] = inputs[source, :, :rows]
        if drafts:
            kept[target, :, :drafts] = kept[source, :, :drafts]

    def stored(self, slot: int, drafts: int = 0) -> dict[str, Tensor]:
        """Copies of what `copy` copies, by name."""
        recurrent, inputs, kept = self.tensors
        rows = self.delta_net.kernel - 1 + drafts
        return {
            "recurrent": recurrent[slot].clone(),
            "inputs": inputs[slot, :, :rows].clone(),
            **({"kept": kept[slot, :, :drafts].clone()} if drafts else {}),
        }

    def store(self, slot: int, found: Mapping[str, Tensor]) -> None:
        """Write what `stored` has given."""
        recurrent, inputs, kept = self.tensors
        recurrent[slot] = found["recurrent"]
        inputs[slot, :, : found["inputs"].shape[1]] = found["inputs"]
        if "kept" in found:
            kept[slot, :, : found["kept"].shape[1]] = found["kept"]

    def parts(self, slot: int) -> list[Tensor]:
        """The memory of a slot without drafts, not copied: states, inputs of the convolution."""
        recurrent, inputs, _ = self.tensors
        return [recurrent[slot], inputs[slot, :, : self.delta_net.kernel - 1]]

    def release(self, slots: Iterable[int]) -> None:
        """Give the memory of `slots` back to the system; their contents are lost."""
        for slot in slots:
            for memory in self._memory:
                memory.release(slot, slot + 1)
