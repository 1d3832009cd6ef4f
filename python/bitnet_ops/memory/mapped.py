"""The bytes of a file as memory in huge pages, where the page cache has them in such pieces.

Mapping a file costs a third of reading it into memory of one's own, and no second copy; but pages
of 4 KiB would slow down every later token. Linux maps huge pages where the file system keeps large
folios (ext4 since 6.16, XFS, Btrfs) and the file was written, or is read ahead, in large pieces.
Whether it does is measured on samples of the file.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
_SAMPLES = 16  # huge pages; a file of fewer is small enough to be read


def map_huge(descriptor: int) -> Tensor | None:
    """All bytes of an open file, uint8; None if it is small, or huge pages are not to be had.

    Writing to the tensor does not change the file. The file may be deleted, and must not be cut
    off, as long as the tensor lives.
    """
    size = os.fstat(descriptor).st_size
    if size < _SAMPLES * HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        pages = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
        pages.madvise(mmap.MADV_HUGEPAGE)  # a cold file is then read ahead in huge pages
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        return memory if _in_huge_pages(memory) else None
    except OSError:
        return None


def _in_huge_pages(memory: Tensor) -> bool:
    """Whether touching `memory` here and there has mapped a huge page each time, or nearly."""
    start = -memory.data_ptr() % HUGE_PAGE
    whole = (memory.nbytes - start) // HUGE_PAGE
    for i in range(_SAMPLES):
        memory[start + whole * i // _SAMPLES * HUGE_PAGE].item()
    return huge_bytes(memory.data_ptr()) >= (_SAMPLES - 1) * HUGE_PAGE


def huge_bytes(address: int) -> int:
    """Bytes mapped by huge pages of a file in the mapping that holds `address`; OSError."""
    ours = False
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):  # "begin-end permissions ..." opens a mapping
                begin, _, end = name.partition("-")
                ours = int(begin, 16) <= address < int(end, 16)
            elif ours and name == "FilePmdMapped:":
                return int(rest.split()[0]) << 10
    return 0
