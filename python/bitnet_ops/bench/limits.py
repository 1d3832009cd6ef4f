"""The two limits of every row: reading memory, and multiplying int8 out of registers.

Both run on the same threads as the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitnet_ops import _runtime
from bitnet_ops.bench import pinning
from bitnet_ops.bench.harness import Budget, SpeedProbe, Timed, digits, interleave, summarize
from bitnet_ops.bench.memory import ColdMemory, round_up

_PEAK_SECONDS = 2e-4  # long against entering a parallel region, short against a time slice
_MAX_TIMES = 100  # at most 20 ms
_READ_WINDOW = 1 << 24
# A figure above its limit by more than this has a wrong limit or a wrong clock.
PLAUSIBLE = 1.1
# A measurement that cannot be true, or that others disturbed, is taken so often.
ATTEMPTS = 3
# More threads that read less than this share of what fewer read wait for a CPU.
_MIN_GAIN = 0.7


class ReadForm(NamedTuple):
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


def read_slots(slots: Sequence[Tensor], form: ReadForm, shift: int = 0, **kind: bool) -> Timed:
    """Call i reads slot i + shift; `kind` is what `Timed` has."""
    places = [(slot.data_ptr(), slot.nbytes) for slot in slots]
    count, read = len(slots), _runtime.probe_read
    return Timed(lambda i: read(*places[(i + shift) % count], *form), **kind)


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

    def run(self, form: ReadForm = PLAIN) -> Timed:
        half = len(self.slots) // 2
        return read_slots(self.slots, form, half, warm=self.warm, cold=not self.warm)


def read_limit(memory: ColdMemory, slot_bytes: int, *, hot: bool) -> ReadLimit:
    """The pass that stands beside a kernel reading `slot_bytes`.

    The probe reads whole pages, so a slot is rounded up and its time scaled down by bytes. Hot: one
    slot over and over, the size of the kernel's operands, in the same cache as they are.
    """
    slots = memory.slots(round_up(slot_bytes))
    return ReadLimit(slots[:1] if hot else slots, warm=hot)


class PeakLimit:
    """The int8 multiply-add loop of the ISA in use, on the threads in force.

    A call is as long as the work it is compared with, so that other processes interrupt both alike,
    but at least 0.2 ms: the clock of some CPUs changes when the loop begins.

    Attributes: `speed`, which tells by the same loop whether the CPUs run at full speed.
    """

    def __init__(self) -> None:
        self._min_iterations = self._calibrate()
        self._macs_of_one = _runtime.probe_int8_peak(1)
        self.speed = SpeedProbe(lambda: _runtime.probe_int8_peak(self._min_iterations))

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
        run = Timed(lambda _: _runtime.probe_int8_peak(iterations))
        return min(interleave([run], Budget(0.0, min_rounds=5)).samples[0])

    def run(self, macs: int = 0) -> tuple[Timed, int]:
        """A run of about `macs` multiply-adds, and how many they are exactly."""
        iterations = min(
            max(self._min_iterations, macs // self._macs_of_one), _MAX_TIMES * self._min_iterations
        )
        run = Timed(lambda _: _runtime.probe_int8_peak(iterations))
        return run, iterations * self._macs_of_one


@dataclass(frozen=True)
class MachineLimits:
    """What the machine gives one thread count now, without a kernel between.

    read_gb_s: of the best form of reading, `form`, which is the limit beside cold rows; `forms` has
        all. unstable: other processes had the CPUs in every attempt; it is no limit to show.
    """

    threads: int
    read_gb_s: float
    int8_peak_gmac_s: float
    peak: PeakLimit
    unstable: bool = False
    form: ReadForm = PLAIN
    forms: dict[ReadForm, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON values; no figure of an unstable limit is among them."""
        shown = {"read_gb_s": self.read_gb_s, "int8_peak_gmac_s": self.int8_peak_gmac_s}
        forms = {} if self.unstable else self.forms
        return {
            "threads": self.threads,
            "unstable": self.unstable,
            **{name: None if self.unstable else digits(rate) for name, rate in shown.items()},
            "read_form": str(self.form),
            "read_forms_gb_s": {str(form): digits(rate) for form, rate in forms.items()},
        }


def measure_limits(memory: ColdMemory, threads: int, budget: Budget) -> MachineLimits:
    """Reading all of `memory` in every form, and the int8 peak, all alternating.

    Taken again while others had the CPUs; where they always had, the result is unstable.
    """
    pinning.use_threads(threads)
    peak, windows = PeakLimit(), memory.slots(_READ_WINDOW)
    loop, macs = peak.run()
    # every form begins elsewhere, so that none finds in the cache what another has just read
    firsts = [which * len(windows) // len(FORMS) for which in range(len(FORMS))]
    reads = [read_slots(windows, form, at) for form, at in zip(FORMS, firsts, strict=True)]
    for _ in range(ATTEMPTS):
        rounds = interleave([*reads, loop], budget, probe=peak.speed)
        if not rounds.disturbed:
            break
    *read_s, peak_s = (summarize(samples).median for samples in rounds.usable())
    forms = {form: _READ_WINDOW / s / 1e9 for form, s in zip(FORMS, read_s, strict=True)}
    best = max(forms, key=forms.__getitem__)
    rate = macs / peak_s / 1e9
    return MachineLimits(threads, forms[best], rate, peak, rounds.disturbed, best, forms)


def measure_all_limits(
    memory: ColdMemory, threads: Sequence[int], budget: Budget
) -> list[MachineLimits]:
    """The limits of every thread count; one that cannot be, beside fewer threads, is unstable."""
    found = [measure_limits(memory, count, budget) for count in threads]

    def waits(limits: MachineLimits, fewer: MachineLimits) -> bool:
        slower = limits.read_gb_s < _MIN_GAIN * fewer.read_gb_s
        return limits.threads > fewer.threads and slower

    return [
        replace(limits, unstable=True) if any(waits(limits, other) for other in found) else limits
        for limits in found
    ]


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
