"""The memory that benchmarks read: a ternary arena and a bfloat16 arena, larger than every cache.

A cold operand is a slot of an arena, and consecutive calls take consecutive slots: by the time a
slot comes round again, the whole arena has passed through the caches. It must not know ops or
timing.
"""

from __future__ import annotations

import contextlib
import mmap
import re
from pathlib import Path

import torch
from torch import Tensor

ALIGNMENT = 4096  # of slots; also what the read probe reads in multiples of
_TILE_BYTES = 1 << 23  # random data of this size is repeated: contents repeat, addresses do not


def round_up(count: int, multiple: int = ALIGNMENT) -> int:
    """The smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


class Arena:
    """`size` bytes of anonymous memory, huge pages asked for, filled by repeating `tile`."""

    def __init__(self, size: int, tile: Tensor) -> None:
        size = round_up(size, _TILE_BYTES)
        # private: huge pages of shared memory are another setting of the kernel, usually off
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them; huge_share() will tell
                memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the map alive
        self.bytes.view(-1, _TILE_BYTES).copy_(tile.view(torch.uint8).view(1, -1))

    def slots(self, slot_bytes: int) -> list[Tensor]:
        """As many disjoint uint8 slots of `slot_bytes` as fit, each at a page boundary."""
        step = round_up(slot_bytes)
        count = self.bytes.numel() // step
        return [self.bytes[i * step : i * step + slot_bytes] for i in range(count)]

    def huge_share(self) -> float | None:
        """Which part of the mapping lies in huge pages (Linux), 0 to 1."""
        try:
            text = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        address = self.bytes.data_ptr()
        mapping = re.compile(
            r"^([0-9a-f]+)-([0-9a-f]+) .*?^AnonHugePages:\s*(\d+) kB", re.MULTILINE | re.DOTALL
        )
        for match in mapping.finditer(text):
            start, end = int(match[1], 16), int(match[2], 16)
            if start <= address < end:
                return (int(match[3]) << 10) / (end - start)
        return None


def ternary_tile(generator: torch.Generator) -> Tensor:
    """Random packed weights: every byte holds four codes of 0, 1, 2."""
    fields = torch.randint(0, 3, (4, _TILE_BYTES), dtype=torch.uint8, generator=generator)
    return fields[0] << 6 | fields[1] << 4 | fields[2] << 2 | fields[3]


def unpack_fields(weight: Tensor) -> Tensor:
    """int8 [N, 4 R] of -1, 0, 1 from packed uint8 [N, R]: FORMAT.md in four shifts.

    Written a second time on purpose: it checks the op's results and must not share its code.
    """
    blocks = weight.view(weight.shape[0], -1, 1, 32)
    fields = torch.cat([blocks >> shift & 3 for shift in (6, 4, 2, 0)], dim=2)
    return fields.reshape(weight.shape[0], -1).to(torch.int8) - 1


def bfloat16_tile(generator: torch.Generator) -> Tensor:
    """Normal random bfloat16 values of standard deviation 1."""
    return torch.randn(_TILE_BYTES // 2, generator=generator).bfloat16()


class Workspace:
    """Both arenas and the random generator of activations.

    Args:
        cold_bytes: size of the ternary arena; the bfloat16 arena is at least as large.
        dense_bytes: the largest bfloat16 operand (the output head).
    """

    def __init__(self, cold_bytes: int, dense_bytes: int) -> None:
        self.generator = torch.Generator().manual_seed(20261121)
        self.ternary = Arena(cold_bytes, ternary_tile(self.generator))
        self.dense = Arena(max(cold_bytes, dense_bytes), bfloat16_tile(self.generator))
