"""How each goal is measured: one function per quantity of goals.md, on the cases of `bench ops`.

Figures are the worst over the shapes that a goal speaks of, and say which that was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.goal_results import Measured
from benchmarks.goal_table import Goal
from benchmarks.torch_int8 import with_int8
from bitnet_ops import _runtime, machine
from bitnet_ops.bench import cases
from bitnet_ops.bench.cases import Case
from bitnet_ops.bench.harness import Budget, Timed, interleave, paired_ratios, summarize
from bitnet_ops.bench.limits import PLAIN, MachineLimits, measure_limits
from bitnet_ops.bench.memory import Workspace
from bitnet_ops.bench.ops import measure
from bitnet_ops.bench.pinning import use_threads
from bitnet_ops.bench.report import Row
from bitnet_ops.bench.shapes import USUAL, ModelShape

# Matrices below this many weights spend too much of their time entering and leaving a region.
LARGE = 6_500_000


def half_away(case: Case) -> Timed:
    """The case's run at the other half of cold memory: beside another run on the same memory, which
    would leave in the cache what this one is to read from memory.
    """
    half, call = len(case.read.slots) // 2, case.run.call
    return dataclasses.replace(case.run, call=lambda i: call(i + half))


@dataclass
class Context:
    """What the measurements share; `seconds` is the time for one figure of one shape."""

    ws: Workspace
    model: ModelShape
    seconds: float
    known: dict[tuple[str, int], MachineLimits] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def limits(self, threads: int) -> MachineLimits:
        """The limits with the kernels in use, measured once."""
        key = (_runtime.isa(), threads)
        if key not in self.known:
            self.known[key] = measure_limits(self.ws.ternary, threads, Budget(self.seconds))
        return self.known[key]

    def forget_unstable_limits(self) -> None:
        """Limits that others disturbed are taken again when they are next asked for."""
        self.known = {key: found for key, found in self.known.items() if not found.unstable}

    def large(self) -> list[tuple[int, int]]:
        """The model's matrices that are large enough, or its largest one."""
        shapes = self.model.linears(quick=False)
        return [s for s in shapes if s[0] * s[1] >= LARGE] or [max(shapes, key=_size)]

    def row(self, case: Case, threads: int, *, plain: bool = False, baselines: bool = False) -> Row:
        """One measurement; a wrong result is remembered."""
        limits = self.limits(threads)
        if plain:
            limits = dataclasses.replace(limits, form=PLAIN)
        if not baselines:
            case = dataclasses.replace(case, baselines={})
        row = measure(case, limits, Budget(self.seconds), Budget(self.seconds / 2, min_rounds=3))
        if "wrong_result" in row["flags"]:
            self.wrong.append(f"{case.name} {case.shape} {case.format}")
        return row


def _size(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


def _name(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def worst(figures: Iterable[tuple[float, str, bool]], *, largest: bool = False) -> Measured:
    """The smallest (or largest) of (value, note, disturbed)."""
    found = list(figures)
    value, note, _ = (max if largest else min)(found, key=lambda figure: figure[0])
    return Measured(value, note, any(disturbed for _, _, disturbed in found))


def _share(row: Row, limit: str, note: str) -> tuple[float, str, bool]:
    return row["limits"][limit]["ratio"]["median"], note, "disturbed" in row["flags"]


def gemv_cold(c: Context, threads: int, weights: str, limit: str = "best") -> Measured:
    """Share of reading of gemv on memory that no cache holds."""

    def share(shape: tuple[int, int]) -> tuple[float, str, bool]:
        case = cases.matmul_case(c.ws, *shape, 1, hot=False, weight_format=weights)
        return _share(c.row(case, threads, plain=limit == "plain"), "read", _name(shape))

    return worst(share(shape) for shape in c.large())


def base3_gain(c: Context, threads: int) -> Measured:
    """How many times faster gemv is on 1.6bit than on 2bit weights, cold, alternating."""

    def gain(shape: tuple[int, int]) -> tuple[float, str, bool]:
        use_threads(threads)
        two_bit, base3 = (
            cases.matmul_case(c.ws, *shape, 1, hot=False, weight_format=f)
            for f in ("2bit", "1.6bit")
        )
        pair = [two_bit.run, half_away(base3)]
        rounds = interleave(pair, Budget(c.seconds), probe=c.limits(threads).peak.speed)
        ratio = summarize(paired_ratios(*rounds.usable())).median
        return ratio, _name(shape), rounds.disturbed

    return worst(gain(shape) for shape in c.large())


def gemv_hot(c: Context, threads: int, cache: str) -> Measured:
    """Share of the int8 peak of gemv on the largest matrix that stays in a cache."""
    room = machine.cache_bytes().get(cache, 0) * 0.85
    shapes = c.model.linears(quick=False)
    fitting = [s for s in shapes if s[0] * s[1] / 4 <= room] or [min(shapes, key=_size)]
    shape = max(fitting, key=_size)
    case = cases.matmul_case(c.ws, *shape, 1, hot=True, weight_format=USUAL)
    return worst([_share(c.row(case, threads), "int8_peak", f"{_name(shape)}, {case.format}")])


def _products(
    c: Context, threads: int, tokens: tuple[int, ...], limit: str, *, hot: bool, plain: bool = False
) -> Measured:
    def share(shape: tuple[int, int], m: int) -> tuple[float, str, bool]:
        chosen: Any = {"hot": hot, "weight_format": USUAL}
        case = cases.matmul_case(c.ws, *shape, m, **chosen)
        note = f"M = {m}, {_name(shape)}, {case.format}"
        return _share(c.row(case, threads, plain=plain), limit, note)

    return worst(share(shape, m) for shape in c.large() for m in tokens)


def gemm_hot(c: Context, threads: int, tokens: tuple[int, ...]) -> Measured:
    """Share of the int8 peak of gemm on weights in a cache."""
    return _products(c, threads, tokens, "int8_peak", hot=True)


def gemm_cold_peak(c: Context, threads: int, tokens: tuple[int, ...]) -> Measured:
    """Share of the int8 peak of gemm on weights in memory."""
    return _products(c, threads, tokens, "int8_peak", hot=False)


def gemm_cold_read(c: Context, threads: int, tokens: tuple[int, ...]) -> Measured:
    """Share of plain reading of gemm on weights in memory."""
    return _products(c, threads, tokens, "read", hot=False, plain=True)


def against_int8(c: Context, threads: int, tokens: tuple[int, ...]) -> Measured:
    """How many times faster gemm is than torch's best int8 linear, alternating, hot."""
    shape = max(c.large(), key=lambda s: (s[0] <= c.model.intermediate_size, _size(s)))

    def speedup(m: int) -> tuple[float, str, bool]:
        chosen: Any = {"hot": True, "weight_format": USUAL}
        case = cases.matmul_case(c.ws, *shape, m, **chosen)
        row = c.row(with_int8(dataclasses.replace(case, baselines={})), threads, baselines=True)
        found = {n: r["speedup"]["median"] for n, r in row["baselines"].items()}
        best = min(found, key=found.__getitem__)
        disturbed = any(r["disturbed"] for r in row["baselines"].values())
        return (
            found[best],
            f"M = {m}, {_name(shape)}, {best.removeprefix('torch_int8_')}",
            disturbed,
        )

    return worst(speedup(m) for m in tokens)


def cold_cost(c: Context, threads: int, tokens: tuple[int]) -> Measured:
    """Time of some tokens in times of one token, weights in memory, alternating.

    Where multiplying takes longer than that at the int8 peak, in times of that: no kernel is
    faster.
    """

    def cost(shape: tuple[int, int]) -> tuple[float, str, bool]:
        use_threads(threads)
        many, one = (
            cases.matmul_case(c.ws, *shape, m, hot=False, weight_format=USUAL) for m in (*tokens, 1)
        )
        rounds = interleave(
            [many.run, half_away(one)], Budget(c.seconds), probe=c.limits(threads).peak.speed
        )
        many_s, one_s = rounds.usable()
        multiplying = many.macs / (c.limits(threads).int8_peak_gmac_s * 1e9)
        ratio = summarize(paired_ratios(many_s, [max(s, multiplying) for s in one_s])).median
        return ratio, _name(shape), rounds.disturbed

    return worst((cost(shape) for shape in c.large()), largest=True)


def cliff(c: Context, threads: int, tokens: tuple[int]) -> Measured:
    """The largest time(M) / time(M') of M < M' <= tokens, every M alternating with every other."""
    use_threads(threads)
    shape = min(c.large(), key=_size)
    runs = [
        cases.matmul_case(c.ws, *shape, m, hot=True, weight_format=USUAL).run
        for m in range(1, tokens[0] + 1)
    ]
    budget = Budget(4 * c.seconds, min_rounds=9)
    rounds = interleave(runs, budget, probe=c.limits(threads).peak.speed)
    return steepest([summarize(samples).median for samples in rounds.usable()], rounds.disturbed)


def steepest(times: list[float], disturbed: bool = False) -> Measured:
    """The largest times[M-1] / times[M'-1] of any M < M', and which."""
    value, note = 0.0, ""
    for m, time in enumerate(times[:-1], 1):
        later = min(range(m, len(times)), key=times.__getitem__)
        if time / times[later] > value:
            value, note = time / times[later], f"M = {m} and {later + 1}"
    return Measured(value, note, disturbed)


def head(c: Context, threads: int, head: str) -> Measured:
    """Share of reading of lm_head on a quantised head."""
    row = c.row(cases.head_case(c.ws, c.model, head), threads)
    return worst([_share(row, "read", "")])


def attention(c: Context, threads: int, cache: str, contexts: tuple[int, ...]) -> Measured:
    """Share of reading of decode attention over a pool of blocks, as the engine has one."""

    def share(context: int) -> tuple[float, str, bool]:
        case = cases.attention_case(c.ws, c.model, context, cache)
        return _share(c.row(case, threads), "read", f"context {context}")

    return worst(share(context) for context in contexts)


def against_sdpa(c: Context, threads: int, contexts: tuple[int, ...]) -> Measured:
    """How many times faster decode attention is than torch's, alternating."""

    def speedup(context: int) -> tuple[float, str, bool]:
        row = c.row(cases.attention_case(c.ws, c.model, context), threads, baselines=True)
        baseline = row["baselines"]["torch_bf16"]
        return baseline["speedup"]["median"], f"context {context}", baseline["disturbed"]

    return worst(speedup(context) for context in contexts)


def not_measured(c: Context, threads: int) -> Measured:
    """A loop that no op exposes; the C++ prototype measured it."""
    return Measured(None, "no op runs this loop alone")


QUANTITIES: dict[str, Callable[..., Measured]] = {
    f.__name__: f
    for f in (
        *(gemv_cold, base3_gain, gemv_hot, gemm_hot, gemm_cold_peak, gemm_cold_read),
        *(against_int8, cold_cost, cliff, head, attention, against_sdpa, not_measured),
    )
}


@contextmanager
def kernels_of(goal: Goal) -> Iterator[None]:
    """The kernels that the goal speaks of, for the time of its measurement."""
    before = _runtime.isa()
    if goal.isa:
        _runtime.force_isa(goal.isa)
    try:
        yield
    finally:
        _runtime.force_isa(before)
