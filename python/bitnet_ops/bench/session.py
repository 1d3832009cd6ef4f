"""What every benchmark's run has in common: memory, limits, threads, the state of the machine."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from statistics import median
from typing import Any, Protocol

import torch

from bitnet_ops import _runtime, machine, ops
from bitnet_ops.bench import report
from bitnet_ops.bench.harness import Budget, Timed, interleave
from bitnet_ops.bench.limits import MachineLimits, measure_all_limits, ping_pong_ns
from bitnet_ops.bench.memory import Workspace
from bitnet_ops.errors import counted

Progress = Callable[[str], None]
Tell = Callable[[list[str]], None]  # takes lines of the report as they come


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
    tell: Tell = lambda lines: None,
) -> report.Report:
    """The report of `bench <kind>`; threads are put back as they were.

    measure: with memory and the limits of every thread count, the `rows` and whatever else the
    report has; `ok` if a result may be wrong. tell: takes the lines about the machine, first.
    """
    before, start = torch.get_num_threads(), time.perf_counter()
    progress("filling memory")
    ws = make_workspace()
    env = describe(ws, list(settings.threads))
    try:
        with torch.inference_mode():
            progress("limits")
            limits = measure_all_limits(ws.ternary, settings.threads, Budget(0.5))
            shown = [one.to_dict() for one in limits]
            tell(report.header_lines({"environment": env, "limits": shown}))
            found = measure(ws, limits)
    finally:
        torch.set_num_threads(before)
    return {
        "schema": f"bitnet_ops.bench.{kind}",
        "schema_version": report.SCHEMA_VERSION,
        "ok": True,
        "seconds": round(time.perf_counter() - start, 1),
        "environment": env,
        "settings": asdict(settings),  # type: ignore[call-overload]
        "limits": shown,
        "warnings": warnings(env, shown),
        **found,
    }


def empty_call(warm: bool = False) -> Timed:
    """An op call with next to no work. Its time is that of Python and torch, in the caches as the
    case before it leaves them: several times longer after a cold kernel than in a loop of its own.
    """
    x, weight = torch.ones(1, 16), torch.ones(16)
    return Timed(lambda _: ops.rms_norm(x, weight, 1e-5), warm)


def describe(ws: Workspace, threads: list[int]) -> dict[str, Any]:
    """CPU, ISA, threads, compiler, torch, pages, load, core-to-core latency, as JSON values."""
    (call_s,) = interleave([empty_call()], Budget(0.05, min_rounds=20)).usable()
    return {
        "time_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": machine.cpu_model(),
        "virtual": "hypervisor" in machine.cpu_flags(),
        "cpus_available": machine.cpus_available(),
        "cache_bytes": machine.cache_bytes(),
        "isa": _runtime.isa(),
        "threads": threads,
        "thread_environment": machine.thread_environment(),
        "bitnet_ops": metadata.version("bitnet-ops"),
        "build": _runtime.build_info(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "page_bytes": machine.page_bytes(),
        "transparent_huge_pages": machine.transparent_huge_pages(),
        "cold_bytes": [memory.bytes.numel() for memory in (ws.ternary, ws.dense)],
        "load_average": machine.load_average(),
        "ping_pong_ns": ping_pong_ns(timeout_s=0.25),
        "op_call_us": round(median(call_s) * 1e6, 3),
    }


def warnings(environment: dict[str, Any], limits: list[dict[str, Any]]) -> list[str]:
    """What a reader of the figures has to know before believing them."""
    found = [
        f"no limits for {counted(limit['threads'], 'thread')}: others had the CPUs, or more "
        "threads read less than fewer; believe no row of that count"
        for limit in limits
        if limit["unstable"]
    ]
    load, cpus = environment["load_average"], environment["cpus_available"]
    if load is not None and load[0] > cpus / 2:
        found.append(
            f"load average {load[0]:g} on {counted(cpus, 'CPU')}: other processes run; use the "
            "ratios only"
        )
    maximum = max(environment["threads"])
    if maximum > cpus:
        found.append(f"{maximum} threads on {counted(cpus, 'CPU')}: threads wait for each other")
    last_cache = max(environment["cache_bytes"].values(), default=0)
    if environment["cold_bytes"][0] < 4 * last_cache:
        found.append(
            f"cold memory of {environment['cold_bytes'][0] >> 20} MiB beside a cache of "
            f"{last_cache >> 20} MiB: cold rows may be warm; raise --cold-mib"
        )
    return found
