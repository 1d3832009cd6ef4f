"""Reserved: address space for many pieces of one size, which takes memory as they are written."""

from __future__ import annotations

import math
import mmap

import torch

from bitnet_ops import _runtime

_HUGE_PAGE = 2 << 20
# Without it the system may refuse to reserve more than there is memory, written or not. Linux' own
# number for the Pythons whose mmap does not name it.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class Reserved:
    """Numbers [count, *piece] of anonymous memory, not touched.

    `tensor`: all of them, contiguous. Raises MemoryError where the system refuses.
    """

    def __init__(self, count: int, piece: tuple[int, ...], dtype: torch.dtype) -> None:
        self.piece_bytes = math.prod(piece) * dtype.itemsize
        nbytes = max(1, count * self.piece_bytes)
        # Private: of shared memory the system would take nothing back.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        try:
            self._map = mmap.mmap(-1, nbytes, flags=flags)
        except (OSError, OverflowError) as error:
            raise MemoryError(
                f"KVPool: expected {nbytes >> 20} MiB of address space, got: {error}; make "
                "max_blocks smaller"
            ) from None
        if not self.piece_bytes:
            self.tensor = torch.empty((count, *piece), dtype=dtype)
            return
        numbers = torch.frombuffer(self._map, dtype=dtype)
        self.tensor = numbers.view(count, *piece)
        if nbytes >= _HUGE_PAGE:
            _runtime.prepare_pages(numbers.data_ptr(), nbytes)

    def release(self, begin: int, end: int) -> None:
        """Give the memory of pieces [begin, end) back, except pages shared with other pieces."""
        page = mmap.PAGESIZE
        start = -(-begin * self.piece_bytes // page) * page
        stop = end * self.piece_bytes // page * page
        if start < stop:
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)
