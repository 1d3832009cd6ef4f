"""The probes: what memory and the integer units of this machine can do at best.

Benchmarks divide by them. They must not be of use to a model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitnet_ops.ops._operator import operator

__all__ = [
    "_probe_read",
    "_probe_int8_peak",
]


@operator
def _probe_read(buffer: Tensor, streams: int = 1, distance: int = 0) -> Tensor:
    """Read a uint8 buffer once: the bandwidth limit of benchmarks.

    Whole pages of 4096 bytes are read, by every thread as 1, 2 or 4 sequential streams, each
    prefetched by software `distance` bytes ahead (0: not at all). Which form is the fastest differs
    between CPUs. Returns int64 [1], a checksum that depends on every byte read, so that no compiler
    may leave one out.
    """
    return buffer.new_empty((1,), dtype=torch.int64)


@operator
def _probe_int8_peak(seed: Tensor, iterations: int) -> Tensor:
    """Run the int8 product of the unit that large products run on: the compute limit of benchmarks.

    The vector unit multiplies out of registers, a matrix unit (AMX) 2 x 2 tiles out of L1, on data
    that are no zeros. seed is a uint8 tensor that only carries the device; iterations may be 0: an
    empty parallel region, what entering and leaving one costs. Returns int64 [1], the multiply-adds
    executed by all threads.
    """
    return seed.new_empty((1,), dtype=torch.int64)
