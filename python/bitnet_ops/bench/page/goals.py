"""`bitnet-ops bench ops --check`: every goal for speed measured at every thread count."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bitnet_ops import _runtime, machine
from bitnet_ops.bench import environment, report, run_model
from bitnet_ops.bench.limits import ATTEMPTS
from bitnet_ops.bench.page import measure_goals, measure_step, results
from bitnet_ops.bench.page.goal_table import GOALS, Goal
from bitnet_ops.bench.page.results import Cpu, Measured, Result
from bitnet_ops.bench.run_ops import OpsSettings, make_workspace
from bitnet_ops.bench.shapes import MODELS

Progress = Callable[[str], None]
# The synthetic model that goes with the shapes of a model.
DUMMIES = {"2b-4t": "2b-4t", "demo": "tiny"}


def this_cpu() -> Cpu:
    """The kernels and features of this CPU."""
    features = _runtime.cpu_features()
    return Cpu(
        frozenset(_runtime.available_isas()),
        frozenset(name for name, present in features.items() if present),
        machine.cpus_available(),
    )


def run(
    settings: OpsSettings,
    progress: Progress = lambda _: None,
    goals: Sequence[Goal] = GOALS,
) -> dict[str, Any]:
    """Measure `goals` on the shapes of one model. Threads are put back as they were."""
    before, start = torch.get_num_threads(), time.perf_counter()
    progress("filling memory")
    ws, cpu = make_workspace(settings), this_cpu()
    env = environment.describe(ws, list(settings.threads))
    context = measure_goals.Context(ws, MODELS[settings.shapes], settings.seconds)
    model = run_model.ModelSettings(dummy=DUMMIES[settings.shapes], quick=settings.quick)
    steps = measure_step.StepContext(ws, model, context.limits)
    figures: dict[tuple[str, int], Measured] = {}
    try:
        for goal in goals:
            if cpu.lacks(goal):
                continue
            for threads in settings.threads:
                progress(f"{goal.title}, {threads} thread(s)")
                attempts = 1 if settings.quick else ATTEMPTS
                figures[goal.name, threads] = _measure_until_valid(
                    context, steps, goal, threads, cpu, attempts
                )
        with torch.inference_mode():
            limits = [context.limits(threads).to_dict() for threads in settings.threads]
    finally:
        torch.set_num_threads(before)
    found = results.evaluate_all(goals, cpu, settings.threads, figures)
    return build(env, limits, found, context.wrong, time.perf_counter() - start)


def _measure_until_valid(
    context: measure_goals.Context,
    steps: measure_step.StepContext,
    goal: Goal,
    threads: int,
    cpu: Cpu,
    attempts: int,
) -> Measured:
    """The first figure that can be believed, else the last of some; limits are taken again too."""
    for _ in range(attempts):
        figure = _measure(context, steps, goal, threads)
        if results.evaluate(goal, cpu, threads, figure).status not in results.VOID:
            break
        context.forget_unstable_limits()
    return figure


def _measure(
    context: measure_goals.Context, steps: measure_step.StepContext, goal: Goal, threads: int
) -> Measured:
    arguments = dict(goal.arguments)
    with measure_goals.kernels_of(goal), torch.inference_mode():
        if goal.quantity in measure_step.QUANTITIES:
            return measure_step.QUANTITIES[goal.quantity](steps, threads, **arguments)
        return measure_goals.QUANTITIES[goal.quantity](context, threads, **arguments)


def build(
    env: dict[str, Any],
    limits: list[dict[str, Any]],
    found: Sequence[Result],
    wrong: Sequence[str],
    seconds: float,
) -> dict[str, Any]:
    """The whole report; `ok` is False when a target was missed or not shown, or a result wrong."""
    missed, void = results.missed_lines(found), results.void_lines(found)
    return {
        "schema": "bitnet_ops.bench.goals",
        "schema_version": report.SCHEMA_VERSION,
        "ok": not missed and not wrong and not void,
        "seconds": round(seconds, 1),
        "environment": env,
        "limits": limits,
        "warnings": environment.warnings(env, limits),
        "wrong": list(wrong),
        "missed": missed,
        "void": void,
        "absent": results.absent(found),
        "goals": [result.to_dict() for result in found if result.applies],
        "lines": results.lines(found),
    }
