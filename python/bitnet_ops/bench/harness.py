"""Timing: several runs alternate in one process until a time budget is spent; figures of samples.

A run is a function of its call number. The clock and the account of waiting are arguments, so that
the tests feed it synthetic times.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bitnet_ops import machine

# A sample shorter than this is made of several calls: the clock itself takes some 50 ns.
_SAMPLE_NS = 20_000
# One of cold runs is made of as many calls as the slowest run makes in this time: long against
# finding its code and the other threads again, short against a time slice.
_COLD_SAMPLE_NS = 1_000_000
_MAX_CALLS = 64
# A call longer than this reloads every cache many times over; going warm into it changes nothing.
_NEVER_WARM_NS = 50_000_000

# A round is quiet when its threads waited for a CPU for less than this share of its time ...
_QUIET_SHARE = 0.05
# ... and the loop of a SpeedProbe took at most this many times its shortest time, before and after.
_FULL_SPEED = 1.06

Clock = Callable[[], int]


@dataclass(frozen=True)
class Timed:
    """Something to time.

    call: is given 0, 1, 2, ... and chooses its operands by it, so that a cold run meets other
        memory on every call.
    warm: one untimed call goes before every sample, so that a hot run finds its operands in the
        cache whatever the run before it did.
    cold: every call reads other memory. Calls in a row make a sample, as a token's do; all cold
        runs of a measurement make as many, so that they stay as far from each other's memory as
        they were at first.
    """

    call: Callable[[int], object]
    warm: bool = False
    cold: bool = False


@dataclass(frozen=True)
class Budget:
    """How long to alternate: rounds until `seconds` are over, within the two bounds.

    Up to three times as long while other processes leave fewer than `min_rounds` quiet rounds.
    """

    seconds: float
    min_rounds: int = 5
    max_rounds: int = 2000


class SpeedProbe:
    """Tells whether the CPUs run at full speed: a neighbour on the same physical cores, of whom
    a virtual machine sees nothing else, takes up to half of what they can multiply.

    Args:
        loop: the same work out of registers on every call, some 0.2 ms of it.
    """

    def __init__(self, loop: Callable[[], object], clock: Clock = time.perf_counter_ns) -> None:
        self._loop, self._clock = loop, clock
        self._shortest = math.inf  # of all rounds that this probe has stood beside

    def sample(self) -> float:
        """Nanoseconds of the loop now."""
        start = self._clock()
        self._loop()
        elapsed = self._clock() - start
        self._shortest = min(self._shortest, elapsed)
        return elapsed

    def full_speed(self, elapsed: float) -> bool:
        """Whether a sample is about as short as the shortest so far."""
        return elapsed <= _FULL_SPEED * self._shortest


class _Sampler:
    """One run with its call counter and its number of calls a sample."""

    def __init__(self, run: Timed, clock: Clock) -> None:
        self._call, self._warm, self._clock, self._next = run.call, run.warm, clock, 0
        # The first call pays for page faults and thread start; the shorter of two is the usual one.
        self.single_ns = max(min(self._take(1), self._take(1)), 1)
        self.calls = min(_MAX_CALLS, math.ceil(_SAMPLE_NS / self.single_ns))
        self._warm = run.warm and self.single_ns < _NEVER_WARM_NS

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
        return self._take(self.calls) / self.calls * 1e-9


def _samplers(runs: Sequence[Timed], clock: Clock) -> list[_Sampler]:
    samplers = [_Sampler(run, clock) for run in runs]
    cold = [sampler for run, sampler in zip(runs, samplers, strict=True) if run.cold]
    if cold:
        in_a_row = _COLD_SAMPLE_NS // max(sampler.single_ns for sampler in cold)
        calls = max(min(in_a_row, _MAX_CALLS), *(sampler.calls for sampler in cold))
        for sampler in cold:
            sampler.calls = calls
    return samplers


@dataclass
class Rounds:
    """Seconds per call: samples[j][r] is run j in round r.

    waited[r]: the share of round r in which its threads waited for a CPU; speeds: the probe's
    samples before the first round and after every round, or nothing.
    """

    samples: list[list[float]]
    waited: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    probe: SpeedProbe | None = None

    @property
    def quiet(self) -> list[bool]:
        """Which rounds had the CPUs to themselves, as far as can be known by now."""
        quiet = [share <= _QUIET_SHARE for share in self.waited]
        if self.probe is None:
            return quiet
        fast = [self.probe.full_speed(elapsed) for elapsed in self.speeds]
        return [q and a and b for q, a, b in zip(quiet, fast, fast[1:], strict=False)]

    @property
    def disturbed(self) -> bool:
        """Whether too few rounds were quiet to use those alone."""
        return sum(self.quiet) < min(3, len(self.waited))

    def usable(self) -> list[list[float]]:
        """The samples of quiet rounds, or of all rounds where too few were quiet."""
        if self.disturbed:
            return self.samples
        return [list(itertools.compress(values, self.quiet)) for values in self.samples]


def interleave(
    runs: Sequence[Timed],
    budget: Budget,
    clock: Clock = time.perf_counter_ns,
    waited: Clock = machine.run_delay_ns,
    probe: SpeedProbe | None = None,
) -> Rounds:
    """Alternate between `runs`.

    In every round each run gives one sample, in order, so that samples of one round see the same
    state of the machine and may be paired. The garbage collector is off meanwhile. `waited` is a
    running account of nanoseconds spent waiting for a CPU; `probe` runs between rounds.
    """
    samplers = _samplers(runs, clock)
    rounds = Rounds([[] for _ in runs], probe=probe)
    collecting = gc.isenabled()
    gc.disable()
    try:
        if probe is not None:
            rounds.speeds.append(probe.sample())
        start = clock()
        while _goes_on(rounds, budget, (clock() - start) * 1e-9):
            _one_round(samplers, rounds, clock, waited)
    finally:
        if collecting:
            gc.enable()
    return rounds


def _goes_on(rounds: Rounds, budget: Budget, elapsed: float) -> bool:
    done = len(rounds.waited)
    if done < budget.min_rounds:
        return True
    if done >= budget.max_rounds:
        return False
    if elapsed < budget.seconds:
        return True
    return elapsed < 3 * budget.seconds and sum(rounds.quiet) < budget.min_rounds


def _one_round(samplers: Sequence[_Sampler], rounds: Rounds, clock: Clock, waited: Clock) -> None:
    start, waited_before = clock(), waited()
    for sampler, values in zip(samplers, rounds.samples, strict=True):
        values.append(sampler.sample())
    rounds.waited.append((waited() - waited_before) / max(clock() - start, 1))
    if rounds.probe is not None:
        rounds.speeds.append(rounds.probe.sample())


# --- figures of samples --------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """Median, 10th and 90th percentile of `count` samples, in the samples' unit."""

    median: float
    p10: float
    p90: float
    count: int

    def to_dict(self, factor: float = 1.0) -> dict[str, float]:
        """Median, p10 and p90 in another unit, of which the samples' has `factor`."""
        return {name: digits(getattr(self, name) * factor) for name in ("median", "p10", "p90")}


def summarize(samples: Sequence[float]) -> Summary:
    """Median, p10 and p90 of at least one sample, linear between neighbours.

    Medians, because a neighbour's time slice is an outlier, not a fact.
    """
    median, p10, p90 = np.percentile(samples, (50, 10, 90)).tolist()
    return Summary(median, p10, p90, len(samples))


def percentile(samples: Sequence[float], rank: float) -> float:
    """The percentile `rank`, 0 to 100, of at least one sample, linear between neighbours."""
    return float(np.percentile(samples, rank))


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """numerators[r] / denominators[r] of samples taken in the same round r.

    Pairs share the state of the machine (clock, neighbours, where a hypervisor put the cores),
    which changes between rounds by more than the ratio does.
    """
    return [n / d for n, d in zip(numerators, denominators, strict=True)]


def digits(value: float) -> float:
    """Five significant digits: more would be noise in a file that people read."""
    return float(f"{value:.5g}")
