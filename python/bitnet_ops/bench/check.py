"""`bench ops --check`: every goal measured at every thread count, and the verdicts.

It must not know the command line, nor how anything is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bitnet_ops import _runtime, machine
from bitnet_ops.bench import environment, measure_goals, measure_step, run_model, verdicts
from bitnet_ops.bench.goals import GOALS, Goal
from bitnet_ops.bench.rows import ATTEMPTS
from bitnet_ops.bench.run_ops import Settings, make_workspace
from bitnet_ops.bench.shapes import parse_shapes
from bitnet_ops.bench.verdicts import Machine, Measured, Verdict

Progress = Callable[[str], None]
SCHEMA = "bitnet_ops.bench.check"
SCHEMA_VERSION = 1
# The synthetic model that goes with a set of shapes.
DUMMIES = {"2b-4t": "2b-4t", "demo": "tiny"}


def this_machine() -> Machine:
    """The kernels and features of this CPU."""
    features = _runtime.cpu_features()
    return Machine(
        frozenset(_runtime.available_isas()),
        frozenset(name for name, present in features.items() if present),
        machine.cpus_available(),
    )


def run(
    settings: Settings,
    progress: Progress = lambda _: None,
    goals: Sequence[Goal] = GOALS,
) -> dict[str, Any]:
    """Measure `goals` and judge them. Threads are put back as they were."""
    before, start = torch.get_num_threads(), time.perf_counter()
    progress("filling memory")
    name = next(iter(parse_shapes(settings.shapes).models), None)
    if name is None:
        raise ValueError("--check: expected the name of a model in --shapes, got matrices only")
    ws = make_workspace(settings)
    here = this_machine()
    env = environment.describe(ws, list(settings.threads))
    context = measure_goals.Context(
        ws, parse_shapes(settings.shapes).models[name], settings.seconds
    )
    model = run_model.Settings(dummy=DUMMIES[name], quick=settings.quick)
    steps = measure_step.StepContext(ws, model, context.bulk)
    figures: dict[tuple[str, int], Measured] = {}
    try:
        for goal in goals:
            if here.lacks(goal):
                continue
            for threads in settings.threads:
                progress(f"{goal.title}, {threads} thread(s)")
                figures[goal.id, threads] = _measure_until_valid(
                    context, steps, goal, threads, here, 1 if settings.quick else ATTEMPTS
                )
        with torch.inference_mode():
            limits = [context.bulk(threads).to_dict() for threads in settings.threads]
    finally:
        torch.set_num_threads(before)
    judged = verdicts.judge(goals, here, settings.threads, figures)
    return report(env, limits, judged, context.wrong, time.perf_counter() - start)


def _measure_until_valid(
    context: measure_goals.Context,
    steps: measure_step.StepContext,
    goal: Goal,
    threads: int,
    here: Machine,
    attempts: int,
) -> Measured:
    """The first figure that can be believed, else the last of some; limits are taken again too."""
    for _ in range(attempts):
        figure = _measure(context, steps, goal, threads)
        if verdicts.status_of(goal, here, figure) not in verdicts.VOID:
            break
        context.forget_disturbed_limits()
    return figure


def _measure(
    context: measure_goals.Context, steps: measure_step.StepContext, goal: Goal, threads: int
) -> Measured:
    if goal.metric not in measure_step.METRICS:
        return measure_goals.measure_goal(context, goal, threads)
    with measure_goals.kernels_of(goal), torch.inference_mode():
        return measure_step.METRICS[goal.metric](steps, threads, **goal.keywords())


def report(
    env: dict[str, Any],
    limits: list[dict[str, Any]],
    judged: Sequence[Verdict],
    wrong: Sequence[str],
    seconds: float,
) -> dict[str, Any]:
    """The whole result; `ok` is False when a must was missed or not shown, or a result wrong."""
    missed, void = verdicts.missed_lines(judged), verdicts.void_lines(judged)
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "ok": not missed and not wrong and not void,
        "seconds": round(seconds, 1),
        "environment": env,
        "limits": limits,
        "warnings": environment.warnings(env, limits),
        "wrong": list(wrong),
        "missed": missed,
        "void": void,
        "goals": [verdict.to_dict() for verdict in judged],
        "lines": verdicts.lines(judged),
    }
