"""`bench ops`: which cases run at which settings, and one row a case beside its limits.

Times are those of calls as a user makes them; shares of a limit compare the work alone, without
the call of an op, which the probe of a limit does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bitnet_ops import machine
from bitnet_ops.bench import cases, report
from bitnet_ops.bench.cases import Case
from bitnet_ops.bench.harness import (
    Budget,
    Summary,
    Timed,
    digits,
    interleave,
    paired_ratios,
    summarize,
)
from bitnet_ops.bench.limits import ATTEMPTS, PLAIN, PLAUSIBLE, MachineLimits, ping_pong_ns
from bitnet_ops.bench.memory import Workspace
from bitnet_ops.bench.pinning import use_threads
from bitnet_ops.bench.report import IMPOSSIBLE, Row
from bitnet_ops.bench.session import Progress, empty_call, measured
from bitnet_ops.bench.shapes import HEAD_FORMATS, KV_DTYPES, USUAL, ModelShape, parse_shapes


@dataclass(frozen=True)
class OpsSettings:
    """What to run. tokens: the M of the products; seconds: for one row, baselines not counted."""

    shapes: str = "2b-4t"
    tokens: tuple[int, ...] = (1, 4, 32)
    threads: tuple[int, ...] = (1,)
    quick: bool = False
    formats: tuple[str, ...] = (USUAL,)
    cold_mib: int = 512
    seconds: float = 0.5


# --- which cases ---------------------------------------------------------------------------------


def memories(m: int, *, quick: bool) -> list[bool]:
    """Cold (False) and hot (True). Quick: one of them for M > 1, hot where there are many.

    From 128 tokens on only hot: reading the weights is a small part of the time.
    """
    if m >= 128:
        return [True]
    if not quick or m == 1:
        return [False, True]
    return [m >= 16]


def _model_cases(ws: Workspace, model: ModelShape, settings: OpsSettings) -> Iterator[Case]:
    """Besides the products: what a layer and the head need."""
    for m in sorted({1, max(settings.tokens)}):
        for hot in memories(m, quick=True):
            for weights in settings.formats:
                shape = model.hidden_size, model.q_features, m
                yield cases.linear_case(ws, *shape, hot=hot, weight_format=weights)
        yield from cases.row_cases(ws, model, m)
    for context in (512,) if settings.quick else (128, 512, 2048, 8192):
        for kv_dtype in KV_DTYPES:
            yield cases.attention_case(ws, model, context, kv_dtype)
    for head_format in HEAD_FORMATS:
        yield cases.head_case(ws, model, head_format)


def all_cases(ws: Workspace, settings: OpsSettings) -> Iterator[Case]:
    """The cases of `settings`, made one at a time."""
    shapes = parse_shapes(settings.shapes)
    matrices = [m for model in shapes.models.values() for m in model.linears(quick=settings.quick)]
    for n, k in dict.fromkeys([*matrices, *shapes.matrices]):
        for m in settings.tokens:
            for hot in memories(m, quick=settings.quick):
                for weights in settings.formats:
                    yield cases.matmul_case(ws, n, k, m, hot=hot, weight_format=weights)
    for model in shapes.models.values():
        yield from _model_cases(ws, model, settings)


def make_workspace(settings: OpsSettings) -> Workspace:
    """Cold memory of both kinds; rejected with the remedy when memory is short."""
    models = parse_shapes(settings.shapes).models.values()
    head = max((2 * model.vocab_size * model.hidden_size for model in models), default=0)
    cold = settings.cold_mib << 20
    memory = machine.memory_bytes()
    room = [r for r in (memory["available"], memory["limit"]) if r is not None]
    needed = cold + max(cold, head) + (1 << 29)
    if room and min(room) < needed:
        raise ValueError(
            f"bench: expected {needed >> 20} MiB of free memory, got {min(room) >> 20} MiB; "
            "lower --cold-mib, or choose --shapes demo"
        )
    return Workspace(cold, head)


def run(
    settings: OpsSettings,
    progress: Progress = lambda _: None,
    prepare: Callable[[Case], Case] = lambda case: case,
) -> report.Report:
    """Measure everything and return the report. Threads are put back as they were.

    `prepare` is given every case before it is measured, and may add baselines to it.
    """
    budget, baseline_budget = Budget(settings.seconds), Budget(settings.seconds / 2, min_rounds=1)

    def rows(ws: Workspace, limits: list[MachineLimits]) -> dict[str, Any]:
        found: list[Row] = []
        for case in map(prepare, all_cases(ws, settings)):
            progress(f"{case.name} {report.shape_text(case.shape)} {case.memory}")
            found += [measure(case, one, budget, baseline_budget) for one in limits]
        return {"ok": not any("wrong_result" in row["flags"] for row in found), "rows": found}

    return measured("ops", settings, lambda: make_workspace(settings), rows, progress)


# --- one row -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LimitSamples:
    """A limit beside a case, whose own run does `probed` units of work in each of `seconds`."""

    unit: str
    probed: int
    seconds: list[float]
    allowed_s: list[float]  # for the case's work, in every round

    @classmethod
    def of(cls, unit: str, work: int, probed: int, seconds: list[float]) -> LimitSamples:
        """`work`: units of the case."""
        return cls(unit, probed, seconds, [s * work / probed for s in seconds])

    @property
    def rate(self) -> float:
        """Median, in `unit`."""
        return self.probed / summarize(self.seconds).median / 1e9

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
    baselines = {
        name: _baseline(case, run, baseline_budget, limits) for name, run in case.baselines.items()
    }
    return row | {"baselines": baselines, "attempts": attempts, "ping_pong_ns": ping_pong_ns()}


def _measure_once(case: Case, limits: MachineLimits, budget: Budget, correct: bool) -> Row:
    has_peak = case.integer and case.macs > 0
    loop, probed_macs = limits.peak.run(case.macs)
    form = PLAIN if case.read.warm else limits.form
    call = case.call
    empty = Timed(lambda _: call(), case.read.warm) if call else empty_call(case.read.warm)
    runs = [case.run, empty, case.read.run(form)]
    rounds = interleave([*runs, *([loop] if has_peak else [])], budget, probe=limits.peak.speed)
    called_s, call_s, read_s, *peak_s = rounds.usable()
    kernel_s = without_call(called_s, call_s)
    beside = {"read": LimitSamples.of("GB/s", case.bytes, case.read.probed_bytes, read_s)}
    if has_peak:
        beside["int8_peak"] = LimitSamples.of("GMAC/s", case.macs, probed_macs, peak_s[0])
    # the limit that allows the least speed: the roofline at this case's intensity
    name = max(beside, key=lambda name: summarize(beside[name].allowed_s).median)
    limit = beside[name]
    ratio, time = summarize(paired_ratios(limit.allowed_s, kernel_s)), summarize(called_s)
    bandwidth = max(beside["read"].rate, limits.read_gb_s)
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
        "limit": name,
        "limit_value": digits(limit.rate),
        "limit_unit": limit.unit,
        "ratio": ratio.to_dict(),
        "limits": {name: one.to_dict(kernel_s) for name, one in beside.items()},
        "flags": [
            *([] if correct else ["wrong_result"]),
            *(["disturbed"] if rounds.disturbed else []),
            *_rate_flags(case, time, ratio, bandwidth),
        ],
    }


def without_call(samples: list[float], call_s: list[float]) -> list[float]:
    """What an op's samples are without the usual time of a call.

    At least half of a sample is left: what is shorter than two calls is a measurement of calls.
    """
    call = summarize(call_s).median
    return [max(s - call, s / 2) for s in samples]


def _rate_flags(case: Case, time: Summary, ratio: Summary, read_gb_s: float) -> list[str]:
    """Rates that the machine cannot give; `read_gb_s` is the best read rate seen."""
    found = ["above_limit"] if ratio.median > PLAUSIBLE else []
    if case.memory == "cold" and case.bytes / time.median / 1e9 > PLAUSIBLE * read_gb_s:
        found.append("above_bandwidth")
    return found


def _baseline(case: Case, baseline: Timed, budget: Budget, limits: MachineLimits) -> Row:
    """Time of a baseline and how often it fits the kernel's: paired with the kernel once more."""
    rounds = interleave([case.run, baseline], budget, probe=limits.peak.speed)
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
