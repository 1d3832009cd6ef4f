"""What every benchmark's run has in common: memory, limits, threads, the report's frame."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

import torch

from bitnet_ops.bench import environment, report
from bitnet_ops.bench.harness import Budget
from bitnet_ops.bench.limits import MachineLimits, measure_all_limits
from bitnet_ops.bench.memory import Workspace

Progress = Callable[[str], None]


class Settings(Protocol):
    """A dataclass of settings that says on how many threads to measure."""

    @property
    def threads(self) -> tuple[int, ...]: ...


def measured(
    kind: str,
    settings: Settings,
    make_workspace: Callable[[], Workspace],
    measure: Callable[[Workspace, list[MachineLimits]], dict[str, Any]],
    progress: Progress,
) -> report.Report:
    """The report of `bench <kind>`; threads are put back as they were.

    measure: with memory and the limits of every thread count, the `rows` and whatever else the
    report has; `ok` if a result may be wrong.
    """
    before, start = torch.get_num_threads(), time.perf_counter()
    progress("filling memory")
    ws = make_workspace()
    env = environment.describe(ws, list(settings.threads))
    try:
        with torch.inference_mode():
            progress("limits")
            limits = measure_all_limits(ws.ternary, settings.threads, Budget(0.5))
            found = measure(ws, limits)
    finally:
        torch.set_num_threads(before)
    shown = [one.to_dict() for one in limits]
    return {
        "schema": f"bitnet_ops.bench.{kind}",
        "schema_version": report.SCHEMA_VERSION,
        "ok": True,
        "seconds": round(time.perf_counter() - start, 1),
        "environment": env,
        "settings": asdict(settings),  # type: ignore[call-overload]
        "limits": shown,
        "warnings": environment.warnings(env, shown),
        **found,
    }
