"""One measurement: a case at one thread count beside its limits and baselines, as a report's row.

Times are those of calls as a user makes them; shares of a limit compare the work alone, without
the call, which the kernel and the probe of the limit have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bitnet_ops import machine, ops
from bitnet_ops.bench.cases import Case
from bitnet_ops.bench.harness import Budget, Timed, interleave
from bitnet_ops.bench.limits import ATTEMPTS, PLAIN, PLAUSIBLE, MachineLimits, ping_pong_ns
from bitnet_ops.bench.pinning import use_threads
from bitnet_ops.bench.stats import Summary, digits, paired_ratios, summarize

# Flags of rates that the machine cannot give: such a row has no ratio to show.
IMPOSSIBLE = frozenset({"above_limit", "above_bandwidth"})

Row = dict[str, Any]


@dataclass(frozen=True)
class LimitSamples:
    """One limit beside a case: the time that it allows for the case's work, in every round.

    Args:
        work, probed: units of work of the case, and of the limit's own run in `seconds`.
    """

    name: str
    unit: str
    work: int
    probed: int
    seconds: list[float]

    @property
    def rate(self) -> float:
        """Median, in `unit`."""
        return self.probed / summarize(self.seconds).median / 1e9

    @property
    def allowed_s(self) -> list[float]:
        return [s * self.work / self.probed for s in self.seconds]

    def to_dict(self, kernel_s: list[float]) -> Row:
        return {
            "value": digits(self.rate),
            "unit": self.unit,
            "allowed_us": summarize(self.allowed_s).to_dict(1e6),
            "ratio": summarize(paired_ratios(self.allowed_s, kernel_s)).to_dict(),
        }


def measure(case: Case, limits: MachineLimits, budget: Budget, baseline_budget: Budget) -> Row:
    """The row of `case` at limits.threads threads; taken again while its rates are impossible."""
    use_threads(limits.threads)
    correct = case.check()
    attempts, row = 0, Row(flags=IMPOSSIBLE)
    while attempts < ATTEMPTS and IMPOSSIBLE & set(row["flags"]):
        attempts, row = attempts + 1, _measure_once(case, limits, budget, correct)
    baselines = {name: _baseline(case, name, baseline_budget, limits) for name in case.baselines}
    return row | {"baselines": baselines, "attempts": attempts, "ping_pong_ns": ping_pong_ns()}


def _measure_once(case: Case, limits: MachineLimits, budget: Budget, correct: bool) -> Row:
    has_peak = case.integer and case.macs > 0
    loop, probed_macs = limits.peak.run(case.macs)
    form = PLAIN if case.read.warm else limits.form
    runs = [case.run, empty_call(case.read.warm), case.read.run(form)]
    rounds = interleave([*runs, *([loop] if has_peak else [])], budget, probe=limits.peak.speed)
    called_s, call_s, *limits_s = rounds.usable()
    kernel_s, read_s, *peak_s = (without_call(s, call_s) for s in (called_s, *limits_s))
    beside = [LimitSamples("read", "GB/s", case.bytes, case.read.probed_bytes, read_s)]
    if has_peak:
        beside.append(LimitSamples("int8_peak", "GMAC/s", case.macs, probed_macs, peak_s[0]))
    # the limit that allows the least speed: the roofline at this case's intensity
    limit = max(beside, key=lambda one: summarize(one.allowed_s).median)
    ratio = summarize(paired_ratios(limit.allowed_s, kernel_s))
    time = summarize(called_s)
    bandwidth = max(beside[0].rate, limits.read_gb_s)
    return {
        "name": case.name,
        "shape": case.shape,
        "dtype": case.dtype,
        "threads": limits.threads,
        "memory": case.memory,
        "format": case.format,
        "fits_in": fits_in(case.bytes, machine.cache_bytes()) if case.memory == "hot" else "memory",
        "bytes": case.bytes,
        "macs": case.macs,
        "samples": time.count,
        "rounds": len(rounds.quiet),
        "quiet_rounds": sum(rounds.quiet),
        "time_us": time.to_dict(1e6),
        "call_us": digits(summarize(call_s).median * 1e6),
        "gb_s": digits(case.bytes / time.median / 1e9),
        "gmac_s": digits(case.macs / time.median / 1e9),
        "limit": limit.name,
        "limit_value": digits(limit.rate),
        "limit_unit": limit.unit,
        "ratio": ratio.to_dict(),
        "limits": {one.name: one.to_dict(kernel_s) for one in beside},
        "flags": [
            *([] if correct else ["wrong_result"]),
            *(["disturbed"] if rounds.disturbed else []),
            *rate_flags(case, time, ratio, bandwidth),
        ],
    }


def empty_call(warm: bool = False) -> Timed:
    """An op call with next to no work. Its time is that of Python and torch, in the caches as the
    case before it leaves them: several times longer after a cold kernel than in a loop of its own.
    """
    x, weight = torch.ones(1, 16), torch.ones(16)
    return Timed(lambda _: ops.rms_norm(x, weight, 1e-5), warm)


def without_call(samples: list[float], call_s: list[float]) -> list[float]:
    """What an op's samples are without the usual time of a call, of which every op has the same.

    At least half of a sample is left: what is shorter than two calls is a measurement of calls.
    """
    call = summarize(call_s).median
    return [max(s - call, s / 2) for s in samples]


def rate_flags(case: Case, time: Summary, ratio: Summary, read_gb_s: float) -> list[str]:
    """Rates that the machine cannot give; `read_gb_s` is the best read rate seen."""
    found = ["above_limit"] if ratio.median > PLAUSIBLE else []
    if case.memory == "cold" and case.bytes / time.median / 1e9 > PLAUSIBLE * read_gb_s:
        found.append("above_bandwidth")
    return found


def _baseline(case: Case, name: str, budget: Budget, limits: MachineLimits) -> Row:
    """Time of a baseline and how often it fits the kernel's: paired with the kernel once more."""
    rounds = interleave([case.run, case.baselines[name]], budget, probe=limits.peak.speed)
    kernel_s, baseline_s = rounds.usable()
    return {
        "time_us": summarize(baseline_s).to_dict(1e6),
        "speedup": summarize(paired_ratios(baseline_s, kernel_s)).to_dict(),
        "samples": len(baseline_s),
        "disturbed": rounds.disturbed,
    }


def fits_in(size: int, caches: dict[str, int]) -> str:
    """The first cache that holds `size` bytes, as one CPU sees it; "memory" when none does."""
    return next((name for name, room in sorted(caches.items()) if size <= room), "memory")
