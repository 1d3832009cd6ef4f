"""What a benchmark must not pass off as a figure: warm memory, limits others disturbed, sums above
their whole, threads on one CPU.

Timings are made up; only pinning touches the machine. Nothing here asserts a speed.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench import SyntheticPeak, measure_synthetic, synthetic_case
from test_bench_command import tiny_report
from test_bench_goals import AMX, HERE, TINY, goal, status

from bitnet_ops import _runtime, machine
from bitnet_ops.bench import (
    harness,
    limits,
    pinning,
    report,
    run_model,
    shapes,
)
from bitnet_ops.bench.harness import Budget, Timed
from bitnet_ops.bench.memory import Workspace
from bitnet_ops.bench.page import goals, measure_goals, measure_step, parts, results
from bitnet_ops.bench.page.goal_table import GOALS, LEAST_OVERHEAD
from bitnet_ops.bench.page.results import Cpu, Measured

# --- cold memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("quantity", ["cold_cost", "base3_gain"])
def test_runs_that_alternate_on_cold_memory_never_meet(
    quantity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M = 1 read what M = 4 had just loaded: its time was that of a cache."""
    context = measure_goals.Context(Workspace(16 << 20, 0), shapes.MODELS["demo"], 0.001)
    slot = context.ws.ternary.slots(4096)[0].data_ptr()
    read: list[list[int]] = []

    def note(weight: torch.Tensor, *_: Any, **__: Any) -> None:
        read[-1].append(weight.data_ptr() - slot)

    def interleave(runs: list[Timed], budget: Budget, probe: Any) -> harness.Rounds:
        for run in runs:
            read.append([])
            for i in range(20):
                run.call(i)
        return harness.Rounds([[1.0]] * len(runs), [0.0])

    for name in ("gemv", "gemm"):
        monkeypatch.setattr(measure_goals.cases_ops.ops, name, note)
    monkeypatch.setattr(measure_goals, "interleave", interleave)
    monkeypatch.setattr(context, "limits", lambda threads: SomeLimits())
    monkeypatch.setattr(measure_goals, "use_threads", lambda threads: None)
    arguments = {"tokens": (4,)} if quantity == "cold_cost" else {}
    measure_goals.QUANTITIES[quantity](context, 1, **arguments)
    assert read and len(read) % 2 == 0
    for first, second in zip(read[::2], read[1::2], strict=True):
        # other slots in every round, and far from those of the round before
        assert min(abs(a - b) for a, b in zip(first, second, strict=True)) > 4 << 20
        assert not set(first) & set(second)


class SomeLimits:
    """Limits that nobody divides by."""

    class peak:  # noqa: N801
        speed = None


# --- figures that cannot be ----------------------------------------------------------------------


def test_a_figure_above_its_limit_is_void_and_not_missed() -> None:
    (result,) = results.evaluate_all([goal()], HERE, [2], {("some-goal", 2): Measured(303.0)})
    assert result.status == "ABOVE LIMIT" and result.void and not result.missed
    assert results.missed_lines([result]) == []
    assert "ABOVE LIMIT, got 303 of reading; measure again" in results.void_lines([result])[0]
    text = "\n".join(results.lines([result]))
    assert "1 target(s) without a measurement:" in text and "every target" not in text


def test_parts_that_take_longer_than_the_step_show_nothing() -> None:
    overhead = dict(unit="of a step", at_most=True, target=0.05, stretch=None)
    assert status(-0.06, **overhead) == "IMPOSSIBLE"
    assert status(-0.01, **overhead) == "met" and status(0.06, **overhead) == "MISSED"
    assert next(g for g in GOALS if g.name == "overhead").least == LEAST_OVERHEAD


def test_a_disturbed_figure_below_its_bar_is_void() -> None:
    def judged(value: float) -> results.Result:
        figure = Measured(value, disturbed=True)
        return results.evaluate_all([goal()], HERE, [2], {("some-goal", 2): figure})[0]

    assert judged(0.5).status == "DISTURBED" and judged(0.5).void and not judged(0.5).missed
    assert judged(0.85).status == "met" and not judged(0.85).void


def test_check_measures_again_and_is_not_ok_without_a_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(goals, "this_cpu", lambda: HERE)
    figures = [Measured(4.95), Measured(0.5, disturbed=True), Measured(0.93)]

    def run(*values: Measured) -> dict[str, Any]:
        answers = iter([Measured(0.93), *values])  # one thread binds nothing here
        monkeypatch.setitem(measure_goals.QUANTITIES, "gemv_cold", lambda c, t: next(answers))
        return goals.run(dataclasses.replace(TINY, quick=False), goals=[goal()])

    assert run(*figures)["ok"] is True
    result = run(figures[0], figures[1], figures[0])
    assert result["ok"] is False and result["missed"] == [] and len(result["void"]) == 1
    assert [g["void"] for g in result["goals"]] == [False, True]


def test_unstable_limits_are_taken_again_and_never_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = [0.9, 0.9, 0.0]
    taken: list[float] = []

    def interleave(runs: list[Timed], budget: Budget, probe: Any) -> harness.Rounds:
        taken.append(waits[len(taken) % 3])
        return harness.Rounds([[1e-3] * 3 for _ in runs], [taken[-1]] * 3)

    monkeypatch.setattr(limits, "interleave", interleave)
    monkeypatch.setattr(limits, "PeakLimit", SyntheticPeak)
    memory = Workspace(32 << 20, 0).ternary
    threads = torch.get_num_threads()
    assert not limits.measure_limits(memory, threads, Budget(0.001)).unstable and len(taken) == 3
    waits[2] = 0.9
    found = limits.measure_limits(memory, threads, Budget(0.001))
    assert found.unstable and len(taken) == 6
    result = tiny_report([])
    for unstable in (True, False):
        shown = dataclasses.replace(found, unstable=unstable).to_dict()
        assert (shown["read_gb_s"] is None) is (shown["int8_peak_gmac_s"] is None) is unstable
        result["limits"] = [shown]
        (line,) = [x for x in report.header_lines(result) if x.startswith("limits, ")]
        assert ("GB/s" in line) is not unstable
    context = measure_goals.Context(Workspace(16 << 20, 0), shapes.MODELS["demo"], 0.001)
    context.known = {("a", 1): found}
    context.forget_unstable_limits()
    assert context.known == {}


def test_limits_of_threads_that_wait_for_one_cpu_are_unstable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two threads that read 2 GB/s where one reads 20: no process could be blamed for it."""
    rates = {1: 20.0, 2: 2.0, 4: 15.0}

    def measure_limits(memory: Any, threads: int, budget: Budget) -> limits.MachineLimits:
        return limits.MachineLimits(threads, rates[threads], 100.0, None)  # type: ignore[arg-type]

    monkeypatch.setattr(limits, "measure_limits", measure_limits)
    found = limits.measure_all_limits(None, [1, 2, 4], Budget(0.0))  # type: ignore[arg-type]
    assert [one.unstable for one in found] == [False, True, False]


def test_a_row_above_its_limit_is_taken_again_and_shows_no_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    impossible = [40e-6] * 3, [100e-6] * 3, [1e-6] * 3, [1.0], [1.0]
    row = measure_synthetic(monkeypatch, synthetic_case(), *impossible)
    assert row["flags"] == ["above_limit", "above_bandwidth"] and row["attempts"] == limits.ATTEMPTS
    for flags, shown in (([], "0.80"), (["above_limit"], "-")):
        (made,) = tiny_report(flags)["rows"]
        assert report.ops_cells(made)[report.OPS_COLUMNS.index("ratio")] == shown


def test_parts_are_taken_again_while_they_exceed_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, True, False])
    monkeypatch.setattr(parts, "_parts_once", lambda *_: {"impossible": next(answers)})
    bench = run_model.ModelBench(None, None, run_model.ModelSettings())  # type: ignore[arg-type]
    row = parts.parts_row(bench, None, 0)  # type: ignore[arg-type]
    assert row == {"impossible": False} and next(answers, None) is None
    cells: dict[str, Any] = {"overhead": -0.06, "rest_ms": -1.0, "rest": 0.5, "step_ms": 10.0}
    monkeypatch.setattr(measure_step, "parts_row", lambda *_: cells | {"impossible": True,
                        "disturbed": False})  # fmt: skip

    class Context:
        def usual(self) -> None: ...
        def limits(self, threads: int) -> None: ...

    measured = measure_step.overhead(Context(), 1)  # type: ignore[arg-type]
    assert measured.value == -0.06 and "longer than the step" in measured.note


# --- goals of AMX machines -----------------------------------------------------------------------


def test_every_hot_product_of_few_tokens_has_a_goal_on_every_machine() -> None:
    """M = 1 hot had none on AMX machines, where the usual one has an `unless`."""
    for here in (AMX, Cpu(frozenset({"avx512_vnni"}), frozenset({"avx512_vnni"}), 2)):
        bound = [g for g in GOALS if not here.lacks(g)]
        hot = {dict(g.arguments).get("tokens", (1,)) for g in bound
               if g.quantity in ("gemm_hot", "gemv_hot")}  # fmt: skip
        assert {(1,), (2,), (4,)} <= hot, here


# --- pinning -------------------------------------------------------------------------------------


def masks() -> dict[int, set[int]]:
    return {int(tid): os.sched_getaffinity(int(tid)) for tid in os.listdir("/proc/self/task")}


@pytest.mark.skipif(len(machine.affinity()) < 2, reason="one CPU: nothing to tell apart")
def test_threads_get_cpus_of_their_own_and_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def ping_pong(first: int, last: int, **_: Any) -> list[float]:
        asked.append((first, last))
        return [1.0]

    monkeypatch.setattr(_runtime, "ping_pong_ns", ping_pong)
    before, threads = masks(), torch.get_num_threads()
    try:
        with pinning.pinned():
            for count in (2, 1, 2):
                pinning.use_threads(count)
                assert torch.get_num_threads() == count
                own = [os.sched_getaffinity(tid) for tid in pinning.team()]
                assert len(own) == count and all(len(mask) == 1 for mask in own)
                assert len(set.union(*own)) == count
            limits.ping_pong_ns()
            assert asked[-1] == (pinning.cpus()[0], pinning.cpus()[-1])
            assert pinning.cpus() == sorted(before[os.getpid()])
            with pinning.unpinned():
                assert machine.affinity() == sorted(before[os.getpid()])
        assert all(mask == before[os.getpid()] for mask in masks().values())
    finally:
        torch.set_num_threads(threads)


def test_a_host_process_is_never_pinned() -> None:
    """Outside the commands' own `pinned` the bench sets a number of threads and nothing else."""
    before, threads = masks(), torch.get_num_threads()
    try:
        pinning.use_threads(2)
        assert all(masks().get(tid, mask) == mask for tid, mask in before.items())
    finally:
        torch.set_num_threads(threads)


def test_one_cpu_of_each_core_comes_first(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert machine.one_of_each_core_first([0, 1, 2, 3], tmp_path) == [0, 1, 2, 3]
    assert machine.one_of_each_core_first([0, 2, 1, 3], tmp_path) == [0, 1, 2, 3]
    assert machine.one_of_each_core_first([0, 9], tmp_path) == [0, 9]


# --- the peak of AMX -----------------------------------------------------------------------------


def test_the_peak_of_an_isa_is_that_of_its_widest_unit() -> None:
    """amx_int8: 4 steps of 2 x 2 tiles an iteration, not the loop of the vector unit."""
    before = _runtime.isa()
    try:
        for isa in _runtime.available_isas():
            _runtime.force_isa(isa)
            macs = _runtime.probe_int8_peak(1) // torch.get_num_threads()
            assert (macs == 4 * 4 * 16 * 16 * 64) == (isa == "amx_int8"), isa
    finally:
        _runtime.force_isa(before)
