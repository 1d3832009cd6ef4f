"""One measurement: a case at one thread count beside its limits and rivals, as a report's row.

Times are those of calls as a user makes them; shares of a limit compare the work alone, without
the call, which the kernel and the probe of the limit have in common.

It must not know which cases exist or how rows are shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from bitnet_ops import machine, ops
from bitnet_ops.bench.cases import Case
from bitnet_ops.bench.harness import Budget, Run, interleave
from bitnet_ops.bench.limits import (
    FORMS,
    PLAIN,
    PeakLimit,
    ReadForm,
    bulk_read_runs,
    ping_pong_ns,
)
from bitnet_ops.bench.pinning import use_threads
from bitnet_ops.bench.stats import Summary, paired_ratios, summarize
from bitnet_ops.bench.workspace import Arena

# A row above its limit by more than this has a wrong limit or a wrong clock.
PLAUSIBLE = 1.1
# A measurement that cannot be true, or that others disturbed, is taken so often.
ATTEMPTS = 3
# Flags of rates that the machine cannot give: such a row has no ratio to show.
IMPOSSIBLE = frozenset({"above_limit", "above_bandwidth"})

Row = dict[str, Any]


@dataclass(frozen=True)
class Bulk:
    """The limits of one thread count without a kernel between: what the machine gives now.

    read_gb_s: of the best form of reading, which is the limit beside cold rows; `forms` has all.
    """

    threads: int
    read_gb_s: float
    int8_peak_gmac_s: float
    peak: PeakLimit
    disturbed: bool = False
    form: ReadForm = PLAIN
    forms: dict[ReadForm, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "threads": self.threads,
            "read_gb_s": digits(self.read_gb_s),
            "read_form": str(self.form),
            "read_forms_gb_s": {str(form): digits(rate) for form, rate in self.forms.items()},
            "int8_peak_gmac_s": digits(self.int8_peak_gmac_s),
            "disturbed": self.disturbed,
        }


def measure_bulk(arena: Arena, threads: int, budget: Budget) -> Bulk:
    """Read bandwidth over the whole arena in every form, and the int8 peak, all alternating.

    Taken again while others had the CPUs; where they always had, the result says so.
    """
    use_threads(threads)
    peak = PeakLimit()
    reads, window = bulk_read_runs(arena)
    loop, macs = peak.run()
    for _ in range(ATTEMPTS):
        rounds = interleave([*reads, loop], budget, probe=peak.speed)
        if not rounds.disturbed:
            break
    *read_s, peak_s = (summarize(samples).median for samples in rounds.usable())
    forms = {form: window / s / 1e9 for form, s in zip(FORMS, read_s, strict=True)}
    best = max(forms, key=forms.__getitem__)
    rate = macs / peak_s / 1e9
    return Bulk(threads, forms[best], rate, peak, rounds.disturbed, best, forms)


@dataclass(frozen=True)
class LimitSamples:
    """One limit beside a case: the time that it allows for the case's work, in every round."""

    name: str
    unit: str
    rate: float  # median, in `unit`
    allowed_s: list[float]


def limit_samples(
    name: str, unit: str, work: int, probed: int, seconds: list[float]
) -> LimitSamples:
    """The limit that did `probed` units of work in `seconds`, applied to `work` units."""
    rate = probed / summarize(seconds).median / 1e9
    return LimitSamples(name, unit, rate, [s * work / probed for s in seconds])


def binding(limits: list[LimitSamples]) -> LimitSamples:
    """The limit that allows the least speed: the roofline at this case's intensity."""
    return max(limits, key=lambda limit: summarize(limit.allowed_s).median)


def measure(case: Case, bulk: Bulk, budget: Budget, rival_budget: Budget) -> Row:
    """The row of `case` at bulk.threads threads; taken again while its rates are impossible."""
    use_threads(bulk.threads)
    correct = case.check()
    attempts, row = 0, Row(flags=IMPOSSIBLE)
    while attempts < ATTEMPTS and IMPOSSIBLE & set(row["flags"]):
        attempts, row = attempts + 1, _measure_once(case, bulk, budget, correct)
    rivals = {name: _rival(case, name, rival_budget, bulk) for name in case.rivals}
    return row | {"rivals": rivals, "attempts": attempts, "ping_pong_ns": ping_pong_ns()}


def _measure_once(case: Case, bulk: Bulk, budget: Budget, correct: bool) -> Row:
    has_peak = case.integer and case.macs > 0
    loop, probed_macs = bulk.peak.run(case.macs)
    form = PLAIN if case.read.warm else bulk.form
    runs = [case.run, empty_call(case.read.warm), case.read.run(form)]
    rounds = interleave([*runs, *([loop] if has_peak else [])], budget, probe=bulk.peak.speed)
    called_s, call_s, *limits_s = rounds.usable()
    kernel_s, read_s, *peak_s = (without_call(s, call_s) for s in (called_s, *limits_s))
    limits = [limit_samples("read", "GB/s", case.bytes, case.read.probed_bytes, read_s)]
    if has_peak:
        limits.append(limit_samples("int8_peak", "GMAC/s", case.macs, probed_macs, peak_s[0]))
    limit = binding(limits)
    ratio = summarize(paired_ratios(limit.allowed_s, kernel_s))
    time = summarize(called_s)
    bandwidth = max(limits[0].rate, bulk.read_gb_s)
    return {
        "name": case.name,
        "shape": case.shape,
        "dtype": case.dtype,
        "threads": bulk.threads,
        "memory": case.memory,
        "format": case.format,
        "fits_in": fits_in(case.bytes, machine.cache_bytes()) if case.memory == "hot" else "memory",
        "bytes": case.bytes,
        "macs": case.macs,
        "samples": time.count,
        "rounds": len(rounds.quiet),
        "quiet_rounds": sum(rounds.quiet),
        "time_us": summary_dict(time.scaled(1e6)),
        "call_us": digits(summarize(call_s).median * 1e6),
        "gb_s": digits(case.bytes / time.median / 1e9),
        "gmac_s": digits(case.macs / time.median / 1e9),
        "limit": limit.name,
        "limit_value": digits(limit.rate),
        "limit_unit": limit.unit,
        "ratio": summary_dict(ratio),
        "limits": {one.name: _limit(one, kernel_s) for one in limits},
        "flags": [
            *([] if correct else ["wrong_result"]),
            *(["disturbed"] if rounds.disturbed else []),
            *rate_flags(case, time, ratio, bandwidth),
        ],
    }


def empty_call(warm: bool) -> Run:
    """An op call with next to no work. Its time is that of Python and torch, in the caches as the
    case before it leaves them: several times longer after a cold kernel than in a loop of its own.
    """
    x, weight = torch.ones(1, 16), torch.ones(16)
    return Run(lambda _: ops.rms_norm(x, weight, 1e-5), warm)


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


def _rival(case: Case, name: str, budget: Budget, bulk: Bulk) -> Row:
    """Time of the rival and how often it fits the kernel's: paired with the kernel once more."""
    rounds = interleave([case.run, case.rivals[name]], budget, probe=bulk.peak.speed)
    kernel_s, rival_s = rounds.usable()
    return {
        "time_us": summary_dict(summarize(rival_s).scaled(1e6)),
        "speedup": summary_dict(summarize(paired_ratios(rival_s, kernel_s))),
        "samples": len(rival_s),
        "disturbed": rounds.disturbed,
    }


def fits_in(size: int, caches: dict[str, int]) -> str:
    """The first cache that holds `size` bytes, as one CPU sees it; "memory" when none does."""
    return next((name for name, room in sorted(caches.items()) if size <= room), "memory")


def _limit(limit: LimitSamples, kernel_s: list[float]) -> Row:
    return {
        "value": digits(limit.rate),
        "unit": limit.unit,
        "allowed_us": summary_dict(summarize(limit.allowed_s).scaled(1e6)),
        "ratio": summary_dict(summarize(paired_ratios(limit.allowed_s, kernel_s))),
    }


def summary_dict(summary: Summary) -> dict[str, float]:
    return {name: digits(getattr(summary, name)) for name in ("median", "p10", "p90")}


def digits(value: float) -> float:
    """Five significant digits: more would be noise in a file that people read."""
    return float(f"{value:.5g}")
