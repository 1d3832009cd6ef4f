"""Goals and their results on made-up measurements: what counts as missed, what is only shown.

Nothing here asserts a speed; the two measurements at the end only have to be figures.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from typing import Any

import pytest
import torch

from bitnet_ops import _runtime
from bitnet_ops.bench import run_ops
from bitnet_ops.bench.page import goals, measure_goals, measure_step, results
from bitnet_ops.bench.page.goal_table import AMX as AMX_ISA
from bitnet_ops.bench.page.goal_table import GOALS, Goal, parse_row, read_table
from bitnet_ops.bench.page.results import Cpu, Measured

HERE = Cpu(frozenset({"avx2", "scalar"}), frozenset({"avx2"}), 2)
AMX = Cpu(frozenset({"amx_int8", "avx512_vnni"}), frozenset({"amx_int8", "avx512_vbmi"}), 2)


def goal(**changes: Any) -> Goal:
    values: dict[str, Any] = {
        "name": "some-goal",
        "title": "some goal",
        "target": 0.8,
        "stretch": 0.9,
        "unit": "of reading",
        "quantity": "gemv_cold",
    }
    return Goal(**values | changes)


def status(value: float | None, cpu: Cpu = HERE, **changes: Any) -> str:
    return results.evaluate(goal(**changes), cpu, cpu.count, Measured(value)).status


# --- the data ------------------------------------------------------------------------------------


def test_goals_have_names_of_their_own_and_a_way_to_be_measured() -> None:
    names = [g.name for g in GOALS]
    assert len(names) == len(set(names)) == 51
    quantities = measure_goals.QUANTITIES.keys() | measure_step.QUANTITIES.keys()
    assert {g.quantity for g in GOALS} == quantities
    for g in GOALS:
        assert g.target > 0 and g.threads and set(g.threads) <= {0, 1}
        assert g.stretch is None or results.reached(g, g.target, g.stretch), g.name
        assert not g.isa or g.isa in {*_runtime.all_isas(), AMX_ISA}
        assert not g.feature or g.feature in _runtime.cpu_features()
        assert not g.unless or g.unless in _runtime.cpu_features()


@pytest.mark.parametrize(
    ("name", "target", "stretch", "at_most"),
    [
        ("gemv-cold", 0.90, 0.96, False),
        ("gemv-cold-bin", 0.88, 0.94, False),
        ("gemv-cold-base3", 0.88, 0.95, False),
        ("base3-gain", 1.15, 1.22, False),
        ("gemv-cold-avx-vnni", 0.88, 0.95, False),
        ("gemv-cold-avx2", 0.82, 0.90, False),
        ("gemv-hot-l2", 0.85, 0.96, False),
        ("gemv-hot-l3", 0.75, 0.85, False),
        ("gemm-hot-2", 0.85, 0.93, False),
        ("gemm-hot-4", 0.90, 0.96, False),
        ("gemm-hot-16", 0.92, 0.98, False),
        ("gemm-int8-32", 1.0, 1.1, False),
        ("gemm-int8-4", 1.3, 1.5, False),
        ("cost-4", 1.35, 1.2, True),
        ("no-cliff", 1.1, None, True),
        ("head-int8", 0.90, 0.96, False),
        ("head-int4", 0.90, 0.96, False),
        ("attention-bf16", 0.70, 0.88, False),
        ("attention-int8", 0.60, 0.85, False),
        ("step", 0.80, 0.91, False),
        ("overhead", 0.05, None, True),
        ("regions", 6, 4, True),
        ("prefill", 0.75, None, False),
        ("amx-gemv-cold-r0", 0.90, 1.0, False),
        ("amx-hot-64-2t", 0.55, 0.70, False),
        ("amx-hot-512-1t", 0.50, 0.72, False),
        ("amx-int8-4", 4, 6, False),
        ("amx-prefill", 0.42, 0.60, False),
    ],
)
def test_bars_are_those_that_were_set(
    name: str, target: float, stretch: float | None, at_most: bool
) -> None:
    (found,) = [g for g in GOALS if g.name == name]
    assert (found.target, found.stretch, found.at_most) == (target, stretch, at_most)


def test_quantities_take_the_arguments_of_their_goals() -> None:
    for g in GOALS:
        measure = {**measure_goals.QUANTITIES, **measure_step.QUANTITIES}[g.quantity]
        inspect.signature(measure).bind(None, 1, **dict(g.arguments))


def test_a_row_of_the_table_is_a_goal() -> None:
    row = "| a | A, b | gemm | tokens=4,8 weights=1.6bit | x | <= 2 | 1.5 | x -y +z | 1, all |"
    assert parse_row(row) == Goal(
        *("a", "A, b", "gemm", "x", 2.0, 1.5, (("tokens", (4, 8)), ("weights", "1.6bit"))),
        isa="x", feature="z", unless="y", at_most=True, threads=(1, 0),
    )  # fmt: skip
    least = parse_row("| a | A | gemm |   | x | 2 |   |   | all |")
    assert least == Goal("a", "A", "gemm", "x", 2.0)
    with pytest.raises(ValueError, match="expected the columns"):
        read_table("| name | goal |\n| --- | --- |\n")


# --- results ------------------------------------------------------------------------------------


def test_more_is_better_unless_the_goal_says_at_most() -> None:
    assert [status(v) for v in (0.95, 0.9, 0.85, 0.8, 0.79)] == [
        *("stretch", "stretch", "met", "met", "MISSED")
    ]
    at_most = dict(at_most=True, target=1.1, stretch=1.0)
    assert [status(v, **at_most) for v in (0.9, 1.05, 1.1, 1.11)] == [
        *("stretch", "met", "met", "MISSED")
    ]
    assert status(1.0, stretch=None) == "met"


def test_a_figure_above_its_limit_shows_nothing() -> None:
    assert status(1.1) == "stretch" and status(1.2) == "ABOVE LIMIT"
    assert status(1.2, unit="of plain reading") == "stretch"
    assert status(12.0, unit="x") == "stretch"
    assert status(12.0, at_most=True, target=1.1, stretch=1.0) == "MISSED"


def test_goals_of_absent_kernels_are_no_goals() -> None:
    assert status(0.1, isa="avx512_vnni") == "not on this CPU"
    assert status(0.1, isa="avx2", feature="avx512_vbmi") == "not on this CPU"
    assert status(0.1, isa="avx2") == "MISSED"
    assert status(0.1, AMX, unless="amx_int8") == "other goal on this CPU"
    assert status(0.1, AMX, isa="avx512_vnni", feature="avx512_vbmi") == "MISSED"


def test_what_is_not_built_is_missed_and_what_cannot_be_measured_is_not() -> None:
    judged = results.evaluate_all(
        [goal(), goal(name="other")],
        HERE,
        [2],
        {("some-goal", 2): Measured(None, "no such op", built=False), ("other", 2): Measured(None)},
    )
    assert [(v.status, v.missed) for v in judged] == [("NOT BUILT", True), ("not measured", False)]
    (line,) = results.missed_lines(judged)
    assert line.endswith("expected at least 0.8 of reading, got nothing: no such op")


def test_a_goal_binds_at_its_own_threads() -> None:
    low = {("some-goal", t): Measured(0.5, "2560x2560") for t in (1, 2)}
    both = results.evaluate_all([goal()], HERE, [1, 2], low)
    assert [(v.binding, v.missed, v.status) for v in both] == [
        (False, False, "MISSED"),
        (True, True, "MISSED"),
    ]
    one = results.evaluate_all([goal(threads=(1,))], HERE, [1, 2], low)
    assert [v.missed for v in one] == [True, False]
    either = results.evaluate_all([goal(threads=(1, 0))], HERE, [1, 2], low)
    assert [v.missed for v in either] == [True, True]
    # on one CPU, "all CPUs" is one thread
    single = Cpu(HERE.isas, HERE.features, 1)
    assert [v.missed for v in results.evaluate_all([goal()], single, [1], low)] == [True]


def test_table_shows_every_goal_and_names_every_miss() -> None:
    figures = {("some-goal", 2): Measured(0.5, "2560x2560"),
               ("some-goal", 1): Measured(0.9, "640x2560", disturbed=True)}  # fmt: skip
    judged = results.evaluate_all([goal(), goal(name="x", isa="avx_vnni")], HERE, [1, 2], figures)
    text = "\n".join(results.lines(judged))
    assert "640x2560 (disturbed)" in text and "(stretch)" in text
    assert text.count("not for this CPU: some goal\n") == 1
    assert "1 target(s) missed:" in text
    assert "some-goal, 2 thread(s): some goal: expected at least 0.8 of reading, got 0.5" in text
    met = results.evaluate_all([goal()], HERE, [2], {("some-goal", 2): Measured(0.85)})
    assert results.lines(met)[-1] == "every target of this CPU met"


def test_steepest_finds_the_pair_where_padding_would_pay() -> None:
    assert measure_goals.steepest([1.0, 2.0, 3.0, 4.0]).value == pytest.approx(0.75)
    found = measure_goals.steepest([1.0, 4.0, 5.0, 2.5, 6.0])
    assert (found.value, found.note) == (2.0, "M = 3 and 4")
    # not only neighbours
    assert measure_goals.steepest([1.0, 5.0, 5.1, 5.2, 4.0]).note == "M = 4 and 5"


def test_worst_of_several_shapes_is_the_figure() -> None:
    figures = [(0.9, "a", False), (0.7, "b", True), (0.8, "c", False)]
    assert measure_goals.worst(figures) == Measured(0.7, "b", True)
    assert measure_goals.worst(figures, largest=True) == Measured(0.9, "a", True)


# --- the whole -----------------------------------------------------------------------------------

TINY = run_ops.OpsSettings(shapes="demo", threads=(1, 2), quick=True, cold_mib=16, seconds=0.002)


@pytest.mark.parametrize("cpu", [HERE, AMX], ids=["without-amx", "with-amx"])
@pytest.mark.parametrize(("value", "expected"), [(0.5, "MISSED"), (0.85, "met"), (0.95, "stretch")])
def test_check_fails_exactly_when_a_target_is_missed(
    value: float, expected: str, cpu: Cpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both kinds of machine, whichever this one is: a goal for AMX binds where there is AMX."""
    monkeypatch.setitem(measure_goals.QUANTITIES, "gemv_cold", lambda c, threads: Measured(value))
    monkeypatch.setattr(goals, "this_cpu", lambda: cpu)
    monkeypatch.setattr(measure_goals, "kernels_of", contextlib.nullcontext)
    result = goals.run(TINY, goals=[goal(), goal(name="for-amx", title="only AMX", isa=AMX_ISA)])
    amx = cpu is AMX
    assert result["ok"] is (value >= 0.8)
    assert len(result["missed"]) == (value < 0.8) * (2 if amx else 1)
    assert [g["result"] for g in result["goals"]] == [expected] * (4 if amx else 2)
    assert result["absent"] == ([] if amx else ["only AMX"])


def test_wrong_result_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def metric(c: measure_goals.Context, threads: int) -> Measured:
        c.wrong.append("gemv")
        return Measured(1.0)

    monkeypatch.setitem(measure_goals.QUANTITIES, "gemv_cold", metric)
    result = goals.run(TINY, goals=[goal()])
    assert not result["ok"] and result["missed"] == [] and set(result["wrong"]) == {"gemv"}


def test_kernels_of_a_goal_are_put_back() -> None:
    before = _runtime.isa()
    with measure_goals.kernels_of(goal(isa="scalar")):
        assert _runtime.isa() == "scalar"
    assert _runtime.isa() == before


@pytest.mark.slow
def test_every_goal_of_this_cpu_gets_a_figure_and_the_report_its_fields() -> None:
    threads = torch.get_num_threads()
    result = goals.run(TINY)
    assert torch.get_num_threads() == threads
    assert result["schema"] == "bitnet_ops.bench.goals" and json.dumps(result)
    applying = [g for g in GOALS if not goals.this_cpu().lacks(g)]
    assert len(result["goals"]) == 2 * len(applying) and result["wrong"] == []
    fields = {"name", "goal", "unit", "at_most", "target", "stretch", "threads", "binding"}
    fields |= {"measured", "note", "disturbed", "result", "missed", "void"}
    shown = {"NOT BUILT", "not measured"}
    for row in result["goals"]:
        assert set(row) == fields
        assert (row["measured"] is None) == (row["result"] in shown)
    assert len(result["missed"]) == sum(g["missed"] for g in result["goals"])
    assert len(result["void"]) == sum(g["void"] for g in result["goals"])
    assert result["ok"] == (not result["missed"] and not result["void"])
