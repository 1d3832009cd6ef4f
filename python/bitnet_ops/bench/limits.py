"""The two limits of every row: reading memory, and multiplying int8 out of registers.

Both run on the same threads as the kernels, through torch.ops.bitnet, so that a call of a probe
costs what a call of a kernel costs. It must not know what is measured against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from bitnet_ops import _runtime, ops
from bitnet_ops.bench import pinning
from bitnet_ops.bench.harness import Budget, Run, SpeedProbe, interleave
from bitnet_ops.bench.workspace import Arena, round_up

_PEAK_SECONDS = 2e-4  # long against entering a parallel region, short against a time slice
_MOST_TIMES = 100  # at most 20 ms
_BULK_WINDOW = 1 << 24


@dataclass(frozen=True)
class ReadForm:
    """How every thread reads: so many sequential streams, prefetched so many bytes ahead (0: not).

    One CPU is fastest with a prefetch far ahead, another with several streams and none; only the
    best form is a limit.
    """

    streams: int = 1
    distance: int = 0

    def __str__(self) -> str:
        prefetch = f", prefetch {self.distance} B ahead" if self.distance else ""
        return f"{self.streams} stream{'s' * (self.streams > 1)}{prefetch}"


PLAIN = ReadForm()
FORMS = (PLAIN, ReadForm(1, 2048), ReadForm(1, 6144), ReadForm(2), ReadForm(4))


@dataclass(frozen=True)
class ReadLimit:
    """A read-only pass over slots.

    Cold: call i reads slot i + half of them, far from the kernel's. Hot: always the first slot,
    the kernel's own memory, since other memory would drive that out of the cache.
    """

    slots: list[Tensor]
    warm: bool

    @property
    def probed_bytes(self) -> int:
        return self.slots[0].numel()

    def run(self, form: ReadForm = PLAIN) -> Run:
        slots, count = self.slots, len(self.slots)
        shift, streams = count // 2, form.streams
        distance = form.distance
        return Run(
            lambda i: ops._probe_read(slots[(i + shift) % count], streams, distance), self.warm
        )


def read_limit(arena: Arena, slot_bytes: int, *, hot: bool) -> ReadLimit:
    """The pass that stands beside a kernel reading `slot_bytes`.

    The probe reads whole pages, so a slot is rounded up and its time scaled down by bytes. Hot: one
    slot over and over, the size of the kernel's operands, in the same cache as they are.
    """
    slots = arena.slots(round_up(slot_bytes))
    return ReadLimit(slots[:1] if hot else slots, warm=hot)


class PeakLimit:
    """The int8 multiply-add loop of the ISA in use, on the threads in force.

    A call is as long as the work it is compared with, so that other processes interrupt both alike,
    but at least 0.2 ms: the clock of some CPUs changes when the loop begins.

    Attributes: `speed`, which tells by the same loop whether the CPUs run at full speed.
    """

    def __init__(self) -> None:
        self._seed = torch.arange(64, dtype=torch.uint8)
        self._least = self._calibrate()
        self._macs_of_one = int(ops._probe_int8_peak(self._seed, 1).item())
        self.speed = SpeedProbe(lambda: ops._probe_int8_peak(self._seed, self._least))

    def _calibrate(self) -> int:
        """Iterations of 0.2 ms. On one thread: each thread does them all, and none has to wait."""
        threads = torch.get_num_threads()
        pinning.use_threads(1)
        try:
            iterations = 100
            while (seconds := self._shortest(iterations)) < _PEAK_SECONDS / 4:
                iterations *= 2
        finally:
            pinning.use_threads(threads)
        return max(1, int(iterations * _PEAK_SECONDS / seconds))

    def _shortest(self, iterations: int) -> float:
        run = Run(lambda _: ops._probe_int8_peak(self._seed, iterations))
        return min(interleave([run], Budget(0.0, min_rounds=5)).samples[0])

    def run(self, macs: int = 0) -> tuple[Run, int]:
        """A run of about `macs` multiply-adds, and how many they are exactly."""
        seed = self._seed
        iterations = min(max(self._least, macs // self._macs_of_one), _MOST_TIMES * self._least)
        return Run(lambda _: ops._probe_int8_peak(seed, iterations)), iterations * self._macs_of_one


def bulk_read_runs(arena: Arena, forms: Sequence[ReadForm] = FORMS) -> tuple[list[Run], int]:
    """Reading the whole arena in windows, in every form, and the bytes of a window."""
    windows = arena.slots(_BULK_WINDOW)

    def run(which: int, form: ReadForm) -> Run:
        # every form begins elsewhere, so that none finds in the cache what another has just read
        first = which * len(windows) // len(forms)
        return Run(
            lambda i: ops._probe_read(
                windows[(i + first) % len(windows)], form.streams, form.distance
            )
        )

    return [run(which, form) for which, form in enumerate(forms)], _BULK_WINDOW


def ping_pong_ns(timeout_s: float = 0.05) -> float | None:
    """Round trip of a cache line between the first and the last CPU of the affinity mask, in ns.

    On a virtual machine it tells whether the two cores share a cache now. None with one CPU, or
    when the two threads did not run at the same time within `timeout_s`: others keep them busy.
    """
    cpus = pinning.cpus()
    if len(cpus) < 2:
        return None
    batches = _runtime.ping_pong_ns(cpus[0], cpus[-1], timeout_s=timeout_s)
    return round(median(batches), 1) if batches else None
