"""Arena: one stretch of memory for many tensors, so that reading them in order is one stream.

Advised for huge pages before it is touched: filling half a gigabyte by pages of 4 KiB costs five
times the copy, and reading it costs address translations.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bitnet_ops import _runtime

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
_HUGE_PAGE = 2 << 20


def return_heap() -> None:
    """Give the free memory of the C library's heap back to the system, where it can (glibc).

    Between temporary tensors of megabytes small objects settle: their holes are free, but the next
    tensor does not fit, and the heap grows by gigabytes that nobody uses.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to ALIGNMENT: what a tensor takes of an arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def stretch(memory: Tensor, begin: int, end: int) -> Tensor:
    """Bytes [begin, end) of the uint8 `memory` as a tensor whose storage is these bytes alone.

    A slice would share the storage of all of `memory`, and whoever saves, pickles or copies a
    tensor does so with its whole storage. The memory lives as long as any tensor over it.
    """
    return torch.from_numpy(memory.numpy()[begin:end])


class Arena:
    """Memory of `nbytes`, handed out front to back; alive as long as any tensor in it.

    `memory`: all of it, uint8 [nbytes]; the pages nobody has written hold no memory yet.
    """

    def __init__(self, nbytes: int) -> None:
        # Small arenas stay small; a large one begins on a huge page.
        spare = _HUGE_PAGE if nbytes >= _HUGE_PAGE else ALIGNMENT
        memory = torch.empty(nbytes + spare, dtype=torch.uint8)
        start = -memory.data_ptr() % spare
        self.memory = memory[start : start + nbytes]
        self._used = 0
        if nbytes >= _HUGE_PAGE:
            _runtime.prepare_pages(memory.data_ptr(), memory.nbytes)

    def take(self, shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
        """The next tensor, contiguous and aligned to ALIGNMENT; its contents are undefined.

        Raises ValueError when the arena is used up.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        end = self._used + nbytes
        if end > self.memory.nbytes:
            raise ValueError(
                f"Arena: expected at most {self.memory.nbytes - self._used} more bytes, "
                f"got {nbytes}; make it larger"
            )
        view = stretch(self.memory, self._used, end).view(dtype).view(tuple(shape))
        self._used = aligned(end)
        return view
