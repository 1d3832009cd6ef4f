"""Timing: several runs alternate in one process until a time budget is spent.

It must not know ops, tensors or limits: a run is a function of its call number. The clock is an
argument, so that the tests feed it synthetic times.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A sample shorter than this is made of several calls: the clock itself takes some 50 ns.
_SAMPLE_NS = 20_000
_MOST_CALLS = 64
# A call longer than this reloads every cache many times over; going warm into it changes nothing.
_NEVER_WARM_NS = 50_000_000

Clock = Callable[[], int]


@dataclass(frozen=True)
class Run:
    """Something to time.

    call: is given 0, 1, 2, ... and chooses its operands by it, so that a cold run meets other
        memory on every call.
    warm: one untimed call goes before every sample, so that a hot run finds its operands in the
        cache whatever the run before it did.
    """

    call: Callable[[int], object]
    warm: bool = False


@dataclass(frozen=True)
class Budget:
    """How long to alternate: rounds until `seconds` are over, within the two bounds."""

    seconds: float
    min_rounds: int = 5
    max_rounds: int = 2000


class _Sampler:
    """One run with its call counter and its number of calls a sample."""

    def __init__(self, run: Run, clock: Clock) -> None:
        self._call, self._warm, self._clock, self._next = run.call, run.warm, clock, 0
        # The first call pays for page faults and thread start; the shorter of two is the usual one.
        single = min(self._take(1), self._take(1))
        self._calls = min(_MOST_CALLS, max(1, math.ceil(_SAMPLE_NS / max(single, 1))))
        self._warm = run.warm and single < _NEVER_WARM_NS

    def _take(self, calls: int) -> int:
        """Nanoseconds of `calls` calls."""
        call, first = self._call, self._next
        if self._warm:
            call(first)
        start = self._clock()
        for i in range(first, first + calls):
            call(i)
        elapsed = self._clock() - start
        self._next += calls
        return elapsed

    def sample(self) -> float:
        """Seconds per call."""
        return self._take(self._calls) / self._calls * 1e-9


def interleave(
    runs: Sequence[Run], budget: Budget, clock: Clock = time.perf_counter_ns
) -> list[list[float]]:
    """Seconds per call: samples[j][r] is run j in round r.

    In every round each run gives one sample, in order, so that samples of one round see the same
    state of the machine and may be paired. The garbage collector is off meanwhile.
    """
    samplers = [_Sampler(run, clock) for run in runs]
    samples: list[list[float]] = [[] for _ in runs]
    collecting = gc.isenabled()
    gc.disable()
    try:
        end = clock() + int(budget.seconds * 1e9)
        rounds = 0
        while rounds < budget.min_rounds or (rounds < budget.max_rounds and clock() < end):
            for sampler, values in zip(samplers, samples, strict=True):
                values.append(sampler.sample())
            rounds += 1
    finally:
        if collecting:
            gc.enable()
    return samples
