"""The state of the machine that goes with every result, and what makes results doubtful."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from importlib import metadata
from statistics import median
from typing import Any

import torch

from bitnet_ops import _runtime, machine
from bitnet_ops.bench.harness import Budget, interleave
from bitnet_ops.bench.limits import ping_pong_ns
from bitnet_ops.bench.measure import empty_call
from bitnet_ops.bench.memory import Workspace


def op_call_us() -> float:
    """Median time of a call with next to no work in it: what every row's time contains."""
    (seconds,) = interleave([empty_call()], Budget(0.05, min_rounds=20)).usable()
    return round(median(seconds) * 1e6, 3)


def describe(ws: Workspace, threads: list[int]) -> dict[str, Any]:
    """CPU, ISA, threads, compiler, torch, pages, load, core-to-core latency, as JSON values."""
    memories = (ws.ternary, ws.dense)
    shares = [memory.huge_share() for memory in memories]
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
        "cold_bytes": [memory.bytes.numel() for memory in memories],
        "cold_huge_share": [None if s is None else round(s, 3) for s in shares],
        "load_average": machine.load_average(),
        "ping_pong_ns": ping_pong_ns(timeout_s=0.25),
        "op_call_us": op_call_us(),
    }


def warnings(environment: dict[str, Any], limits: list[dict[str, Any]]) -> list[str]:
    """What a reader of the figures has to know before believing them."""
    found = [
        f"no limits for {limit['threads']} thread(s): others had the CPUs, or more threads read "
        "less than fewer; believe no row of that count"
        for limit in limits
        if limit["unstable"]
    ]
    load, cpus = environment["load_average"], environment["cpus_available"]
    if load is not None and load[0] > cpus / 2:
        found.append(
            f"load average {load[0]:g} on {cpus} CPUs: other processes run; use the ratios only"
        )
    most = max(environment["threads"])
    if most > cpus:
        found.append(f"{most} threads on {cpus} CPUs: threads wait for each other")
    last_cache = max(environment["cache_bytes"].values(), default=0)
    if environment["cold_bytes"][0] < 4 * last_cache:
        found.append(
            f"cold memory of {environment['cold_bytes'][0] >> 20} MiB beside a cache of "
            f"{last_cache >> 20} MiB: cold rows may be warm; raise --cold-mib"
        )
    return found
