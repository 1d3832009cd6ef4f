"""`python -m benchmarks.goals [--check]`: every goal for speed measured at every thread count."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import goal_quantities, goal_results, goal_step_quantities
from benchmarks.goal_results import Cpu, Measured, Result
from benchmarks.goal_table import GOALS, Goal
from bitnet_ops import _runtime, machine
from bitnet_ops.bench import report, session
from bitnet_ops.bench.limits import ATTEMPTS
from bitnet_ops.bench.ops import OpsSettings, make_workspace
from bitnet_ops.bench.pinning import pinned
from bitnet_ops.bench.run_model import ModelSettings
from bitnet_ops.bench.shapes import MODELS
from bitnet_ops.cli.bench import require_output
from bitnet_ops.cli.terminal import progress_line

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
    env = session.describe(ws, list(settings.threads))
    context = goal_quantities.Context(ws, MODELS[settings.shapes], settings.seconds)
    model = ModelSettings(dummy=DUMMIES[settings.shapes], quick=settings.quick)
    steps = goal_step_quantities.StepContext(ws, model, context.limits)
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
    found = goal_results.evaluate_all(goals, cpu, settings.threads, figures)
    return build(env, limits, found, context.wrong, time.perf_counter() - start)


def _measure_until_valid(
    context: goal_quantities.Context,
    steps: goal_step_quantities.StepContext,
    goal: Goal,
    threads: int,
    cpu: Cpu,
    attempts: int,
) -> Measured:
    """The first figure that can be believed, else the last of some; limits are taken again too."""
    for _ in range(attempts):
        figure = _measure(context, steps, goal, threads)
        if goal_results.evaluate(goal, cpu, threads, figure).status not in goal_results.VOID:
            break
        context.forget_unstable_limits()
    return figure


def _measure(
    context: goal_quantities.Context,
    steps: goal_step_quantities.StepContext,
    goal: Goal,
    threads: int,
) -> Measured:
    arguments = dict(goal.arguments)
    with goal_quantities.kernels_of(goal), torch.inference_mode():
        if goal.quantity in goal_step_quantities.QUANTITIES:
            return goal_step_quantities.QUANTITIES[goal.quantity](steps, threads, **arguments)
        return goal_quantities.QUANTITIES[goal.quantity](context, threads, **arguments)


def build(
    env: dict[str, Any],
    limits: list[dict[str, Any]],
    found: Sequence[Result],
    wrong: Sequence[str],
    seconds: float,
) -> dict[str, Any]:
    """The whole report; `ok` is False when a target was missed or not shown, or a result wrong."""
    missed, void = goal_results.missed_lines(found), goal_results.void_lines(found)
    return {
        "schema": "bitnet_ops.bench.goals",
        "schema_version": report.SCHEMA_VERSION,
        "ok": not missed and not wrong and not void,
        "seconds": round(seconds, 1),
        "environment": env,
        "limits": limits,
        "warnings": session.warnings(env, limits),
        "wrong": list(wrong),
        "missed": missed,
        "void": void,
        "absent": goal_results.absent(found),
        "goals": [result.to_dict() for result in found if result.applies],
        "lines": goal_results.lines(found),
    }


def settings_of(*, quick: bool) -> OpsSettings:
    """What `bench ops` would measure for the goals and for the page; quick: tiny shapes."""
    threads = tuple(sorted({1, torch.get_num_threads()}))
    if quick:
        return OpsSettings("demo", (1, 4), threads, quick=True, cold_mib=16, seconds=0.002)
    tokens = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
    return OpsSettings(tokens=tokens, threads=threads, seconds=0.25)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goals", description=__doc__)
    parser.add_argument("--check", action="store_true", help="status 1 when a target is missed")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to try the command")
    parser.add_argument("--output", metavar="FILE", help="also write everything to FILE, as JSON")
    args = parser.parse_args(argv)
    require_output(args.output, replace=False)
    with progress_line() as progress, pinned():
        result = run(settings_of(quick=args.quick), progress)
    print("\n".join([*report.header_lines(result), "", *result["lines"]]))
    if args.output:
        report.write_json(result, args.output)
    return 1 if args.check and not result["ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
