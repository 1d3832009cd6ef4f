"""The memory that benchmarks read: ternary weights and bfloat16 numbers, larger than every cache.

A cold operand is a slot of such memory, and consecutive calls take consecutive slots: by the time a
slot comes round again, all of it has passed through the caches.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from bitnet_ops.nn.packing import packed_shape

ALIGNMENT = 4096  # of slots; also what the read probe reads in multiples of
_FILL_BYTES = 1 << 23  # random data of this size is repeated: contents repeat, addresses do not


def round_up(count: int, multiple: int = ALIGNMENT) -> int:
    return -(-count // multiple) * multiple


class ColdMemory:
    """`size` bytes of anonymous memory, huge pages asked for, filled by repeating `fill`."""

    def __init__(self, size: int, fill: Tensor) -> None:
        size = round_up(size, _FILL_BYTES)
        # private: huge pages of shared memory are another setting of the kernel, usually off
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the map alive
        self.bytes.view(-1, _FILL_BYTES).copy_(fill.view(torch.uint8).view(1, -1))

    def slots(self, slot_bytes: int) -> list[Tensor]:
        """As many disjoint uint8 slots of `slot_bytes` as fit, each at a page boundary."""
        step = round_up(slot_bytes)
        count = self.bytes.numel() // step
        return [self.bytes[i * step : i * step + slot_bytes] for i in range(count)]

    def tensors(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> tuple[list[list[Tensor]], int]:
        """Slots with one tensor a shape, and the bytes of a slot."""
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        found = [
            [p.view(dtype).view(*s) for p, s in zip(slot.split(sizes), shapes, strict=True)]
            for slot in self.slots(sum(sizes))
        ]
        return found, sum(sizes)


def require_slots(slots: Sequence[object], what: str, *, hot: bool) -> None:
    """Reject a cold case that would read the same memory in every call, from the cache."""
    if len(slots) < (1 if hot else 2):
        raise ValueError(
            f"bench: expected room for at least two copies of {what}, got {len(slots)}; "
            "raise --cold-mib or choose a smaller shape"
        )


class Workspace:
    """Ternary and bfloat16 cold memory, and the random generator of activations.

    Args:
        cold_bytes: size of the ternary memory; the bfloat16 memory is at least as large.
        dense_bytes: the largest bfloat16 operand (the output head).
    """

    def __init__(self, cold_bytes: int, dense_bytes: int) -> None:
        self.generator = g = torch.Generator().manual_seed(20261121)
        # every byte holds four codes of 0, 1, 2, which is valid in the 2-bit layouts, and so is
        # every byte up to 242 in the base-3 layout
        fields = torch.randint(0, 3, (4, _FILL_BYTES), dtype=torch.uint8, generator=g)
        fill = fields[0] << 6 | fields[1] << 4 | fields[2] << 2 | fields[3]
        self.ternary = ColdMemory(cold_bytes, fill)
        numbers = torch.randn(_FILL_BYTES // 2, generator=g).bfloat16()
        self.dense = ColdMemory(max(cold_bytes, dense_bytes), numbers)

    def matrices(
        self, n: int, k: int, weight_format: str, *, hot: bool
    ) -> tuple[list[list[Tensor]], int]:
        """Slots with a ternary matrix (N, K), and the bytes of a slot.

        Nothing is converted: cold memory holds valid bytes of every format, but not the padding
        that a CPU's own format wants, so results of such a slot must not be checked.
        """
        layout = packed_shape(n, k, weight_format)
        found, size = self.ternary.tensors([layout], torch.uint8)
        require_slots(found, f"{n}x{k}", hot=hot)
        return found[:1] if hot else found, size
