"""Goals and verdicts on made-up measurements: what counts as missed, what is only shown.

Nothing here asserts a speed; the two measurements at the end only have to be figures.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import torch

from bitnet_ops import _runtime
from bitnet_ops.bench import check, goals, measure_goals, measure_step, run_ops, verdicts
from bitnet_ops.bench.goals import Goal
from bitnet_ops.bench.verdicts import Machine, Measured

HERE = Machine(frozenset({"avx2", "scalar"}), frozenset({"avx2"}), cpus=2)
AMX = Machine(frozenset({"amx_int8", "avx512_vnni"}), frozenset({"amx_int8", "avx512_vbmi"}), 2)


def goal(**changes: Any) -> Goal:
    values: dict[str, Any] = {
        "id": "some-goal",
        "title": "some goal",
        "must": 0.8,
        "ambitious": 0.9,
        "unit": "of reading",
        "metric": "gemv_cold",
    }
    return Goal(**values | changes)


def status(value: float | None, machine: Machine = HERE, **changes: Any) -> str:
    return verdicts.status_of(goal(**changes), machine, Measured(value))


# --- the data ------------------------------------------------------------------------------------


def test_goals_have_names_of_their_own_and_a_way_to_be_measured() -> None:
    names = [g.id for g in goals.GOALS]
    assert len(names) == len(set(names)) >= 45
    metrics = measure_goals.METRICS.keys() | measure_step.METRICS.keys()
    assert {g.metric for g in goals.GOALS} == metrics
    for g in goals.GOALS:
        assert g.must > 0 and g.threads and set(g.threads) <= {0, 1}
        assert g.ambitious is None or verdicts.reached(g, g.must, g.ambitious), g.id
        assert not g.isa or g.isa in {*_runtime.all_isas(), goals.AMX}
        assert not g.feature or g.feature in _runtime.cpu_features()
        assert not g.unless or g.unless in _runtime.cpu_features()


@pytest.mark.parametrize(
    ("name", "must", "ambitious", "at_most"),
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
    name: str, must: float, ambitious: float | None, at_most: bool
) -> None:
    (found,) = [g for g in goals.GOALS if g.id == name]
    assert (found.must, found.ambitious, found.at_most) == (must, ambitious, at_most)


def test_metrics_take_the_arguments_of_their_goals() -> None:
    import inspect

    for g in goals.GOALS:
        metric = {**measure_goals.METRICS, **measure_step.METRICS}[g.metric]
        inspect.signature(metric).bind(None, 1, **g.keywords())


# --- verdicts ------------------------------------------------------------------------------------


def test_more_is_better_unless_the_goal_says_at_most() -> None:
    assert [status(v) for v in (0.95, 0.9, 0.85, 0.8, 0.79)] == [
        *("ambitious", "ambitious", "met", "met", "MISSED")
    ]
    at_most = dict(at_most=True, must=1.1, ambitious=1.0)
    assert [status(v, **at_most) for v in (0.9, 1.05, 1.1, 1.11)] == [
        *("ambitious", "met", "met", "MISSED")
    ]
    assert status(1.0, ambitious=None) == "met"


def test_a_figure_above_its_limit_shows_nothing() -> None:
    assert status(1.1) == "ambitious" and status(1.2) == "ABOVE LIMIT"
    assert status(1.2, unit="of plain reading") == "ambitious"
    assert status(12.0, unit="x") == "ambitious"
    assert status(12.0, at_most=True, must=1.1, ambitious=1.0) == "MISSED"


def test_goals_of_absent_kernels_are_no_goals() -> None:
    assert status(0.1, isa="avx512_vnni") == "not on this CPU"
    assert status(0.1, isa="avx2", feature="avx512_vbmi") == "not on this CPU"
    assert status(0.1, isa="avx2") == "MISSED"
    assert status(0.1, AMX, unless="amx_int8") == "other goal on this CPU"
    assert status(0.1, AMX, isa="avx512_vnni", feature="avx512_vbmi") == "MISSED"


def test_what_is_not_built_is_missed_and_what_cannot_be_measured_is_not() -> None:
    judged = verdicts.judge(
        [goal(), goal(id="other")],
        HERE,
        [2],
        {("some-goal", 2): Measured(None, "no such op", built=False), ("other", 2): Measured(None)},
    )
    assert [(v.status, v.missed) for v in judged] == [("NOT BUILT", True), ("not measured", False)]
    (line,) = verdicts.missed_lines(judged)
    assert line.endswith("expected at least 0.8 of reading, got nothing: no such op")


def test_a_goal_binds_at_its_own_threads() -> None:
    low = {("some-goal", t): Measured(0.5, "2560x2560") for t in (1, 2)}
    both = verdicts.judge([goal()], HERE, [1, 2], low)
    assert [(v.binding, v.missed, v.status) for v in both] == [
        (False, False, "MISSED"),
        (True, True, "MISSED"),
    ]
    one = verdicts.judge([goal(threads=(1,))], HERE, [1, 2], low)
    assert [v.missed for v in one] == [True, False]
    either = verdicts.judge([goal(threads=(1, 0))], HERE, [1, 2], low)
    assert [v.missed for v in either] == [True, True]
    # on one CPU, "all CPUs" is one thread
    single = Machine(HERE.isas, HERE.features, cpus=1)
    assert [v.missed for v in verdicts.judge([goal()], single, [1], low)] == [True]


def test_table_shows_every_goal_and_names_every_miss() -> None:
    figures = {("some-goal", 2): Measured(0.5, "2560x2560"),
               ("some-goal", 1): Measured(0.9, "640x2560", disturbed=True)}  # fmt: skip
    judged = verdicts.judge([goal(), goal(id="x", isa="avx_vnni")], HERE, [1, 2], figures)
    text = "\n".join(verdicts.lines(judged))
    assert "640x2560; disturbed" in text and "(ambitious)" in text
    assert text.count("not on this CPU") == 1 and "1, 2" in text
    assert "1 must goal(s) missed:" in text
    assert "some-goal, 2 thread(s): some goal: expected at least 0.8 of reading, got 0.5" in text
    met = verdicts.judge([goal()], HERE, [2], {("some-goal", 2): Measured(0.85)})
    assert verdicts.lines(met)[-1] == "every must goal of this CPU met"


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

TINY = run_ops.Settings(shapes="demo", threads=(1, 2), quick=True, cold_mib=16, seconds=0.002)


@pytest.mark.parametrize("machine", [HERE, AMX], ids=["without-amx", "with-amx"])
@pytest.mark.parametrize(
    ("value", "verdict"), [(0.5, "MISSED"), (0.85, "met"), (0.95, "ambitious")]
)
def test_check_fails_exactly_when_a_must_is_missed(
    value: float, verdict: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both kinds of machine, whichever this one is: a goal for AMX binds where there is AMX."""
    monkeypatch.setitem(measure_goals.METRICS, "gemv_cold", lambda c, threads: Measured(value))
    monkeypatch.setattr(check, "this_machine", lambda: machine)
    monkeypatch.setattr(measure_goals, "kernels_of", contextlib.nullcontext)
    result = check.run(TINY, goals=[goal(), goal(id="for-amx", isa=goals.AMX)])
    amx = machine is AMX
    assert result["ok"] is (value >= 0.8)
    assert len(result["missed"]) == (value < 0.8) * (2 if amx else 1)
    expected = [verdict] * 2 if amx else ["not on this CPU"] * 2
    assert [g["verdict"] for g in result["goals"]] == [verdict] * 2 + expected


def test_wrong_result_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def metric(c: measure_goals.Context, threads: int) -> Measured:
        c.wrong.append("gemv")
        return Measured(1.0)

    monkeypatch.setitem(measure_goals.METRICS, "gemv_cold", metric)
    result = check.run(TINY, goals=[goal()])
    assert not result["ok"] and result["missed"] == [] and set(result["wrong"]) == {"gemv"}


def test_kernels_of_a_goal_are_put_back() -> None:
    before = _runtime.isa()
    with measure_goals.kernels_of(goal(isa="scalar")):
        assert _runtime.isa() == "scalar"
    assert _runtime.isa() == before


@pytest.mark.slow
def test_every_goal_of_this_cpu_gets_a_figure_and_the_report_its_fields() -> None:
    threads = torch.get_num_threads()
    result = check.run(TINY)
    assert torch.get_num_threads() == threads
    assert result["schema"] == "bitnet_ops.bench.check" and json.dumps(result)
    assert len(result["goals"]) == 2 * len(goals.GOALS) and result["wrong"] == []
    fields = {"id", "goal", "unit", "at_most", "must", "ambitious", "threads", "binding"}
    fields |= {"measured", "note", "disturbed", "verdict", "missed", "void"}
    shown = {"not on this CPU", "other goal on this CPU", "NOT BUILT", "not measured"}
    for row in result["goals"]:
        assert set(row) == fields
        assert (row["measured"] is None) == (row["verdict"] in shown)
    assert len(result["missed"]) == sum(g["missed"] for g in result["goals"])
    assert len(result["void"]) == sum(g["void"] for g in result["goals"])
    assert result["ok"] == (not result["missed"] and not result["void"])
