"""Specs of the probes: their results depend on the machine by purpose."""

from __future__ import annotations

import torch
from torch import Tensor

from op_changes import I32, to, value
from op_spec import Call, Rejections, spec
from op_values import Built


def _probe_read(buffer: Tensor, streams: int = 1, distance: int = 0) -> Tensor:
    """A checksum of the whole pages; its value is the kernel's own affair."""
    pages = buffer.flatten()[: buffer.numel() // 4096 * 4096]
    return pages.to(torch.int64).sum().reshape(1)


def _probe_read_samples() -> Built:
    for n in (1, 4096, 10000):
        yield str(n), lambda g, n=n: (
            torch.randint(0, 256, (n,), generator=g, dtype=torch.uint8),
        )  # fmt: skip


_PROBE_READ_REJECTIONS: Rejections = [
    ({"buffer": to("buffer", I32)}, "buffer", "of dtype uint8, got int32"),
    ({"buffer": lambda a: a["buffer"][::2]}, "buffer", "contiguous"),
    ({"streams": value(3)}, "streams", "1, 2 or 4, got 3"),
    ({"distance": value(-1)}, "distance", "from 0 to 65536 bytes, got -1"),
]  # fmt: skip

spec(
    _probe_read,
    samples=_probe_read_samples,
    large=[],
    comparable=False,
    calls={
        "": Call(
            lambda g: {
                "buffer": torch.zeros(5000, dtype=torch.uint8), "streams": 1, "distance": 0,
            },
            _PROBE_READ_REJECTIONS,
        ),
    },
)  # fmt: skip


def _probe_int8_peak(seed: Tensor, iterations: int) -> Tensor:
    """The number of multiply-adds depends on the ISA and the threads; 0 stands for 'unknown'."""
    return torch.zeros(1, dtype=torch.int64)


def _probe_int8_peak_samples() -> Built:
    yield "short", lambda g: (torch.ones(1, dtype=torch.uint8), 10)


_PROBE_INT8_PEAK_REJECTIONS: Rejections = [
    ({"iterations": value(-1)}, "iterations", "0 or more, got -1"),
    ({"seed": to("seed", I32)}, "seed", "of dtype uint8, got int32"),
]  # fmt: skip

spec(
    _probe_int8_peak,
    samples=_probe_int8_peak_samples,
    large=[],
    comparable=False,
    calls={
        "": Call(
            lambda g: {"seed": torch.zeros(1, dtype=torch.uint8), "iterations": 1},
            _PROBE_INT8_PEAK_REJECTIONS,
        ),
    },
)
