"""`python -m benchmarks.many_cores`: what a step would take on CPUs with more cores than this one.

The real plan of stages (units, claim rules, weights of each stage, as `bench_step` prints them for
so many threads) runs in a simulator: threads claim units as runtime/staged_executor.h says, a unit
takes what it takes here on one thread, reading is bounded by the memory's bandwidth, and threads
that enter and leave a stage pass one after the other. It is checked against 1 and 2 real threads.
It knows neither caches nor frequencies: what it answers is whether the plan has enough units and
what barriers cost.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import os
import shlex
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

# name -> (tokens, context, layers), of which a decode step has one token behind a context
STEPS = {
    "decode": (1, 128),
    "16 sequences": (16, 128),
    "prompt of 128": (128, 0),
    "prompt of 512": (512, 0),
}


@dataclass(frozen=True)
class Stage:
    """As bench_step prints it; times in ns of one thread."""

    name: str
    units: int
    least: int
    most: int
    parts: int
    ns: float
    prepare_ns: float
    bytes: int


@dataclass(frozen=True)
class Machine:
    """What the model takes a CPU to be: ns of an atomic change of a shared line, GB/s of memory."""

    threads: int
    group: int = 0  # arrivals counted by groups of so many threads, 0: all on one line
    line_ns: float = 60.0
    group_line_ns: float = 25.0  # within a group of cores
    publish_ns: float = 150.0
    claim_ns: float = 25.0
    steal_ns: float = 120.0
    bandwidth: float = 0.0  # GB/s of all threads together, 0: without a bound


def read_plan(text: str) -> tuple[list[Stage], dict[int, float]]:
    """The stages that have units, and the measured ns of whole steps by threads."""
    stages, measured = [], {}
    for line in text.splitlines():
        words = shlex.split(line)
        if words[:1] == ["plan"] and int(words[2]) > 0:
            units, least, most, parts, ns, prepare_ns, size = map(int, words[2:9])
            stages.append(Stage(words[1], units, least, most, parts, ns, prepare_ns, size))
        elif words[:1] == ["threads"]:
            measured[int(words[1])] = float(words[2])
    return stages, measured


def arrivals_ns(machine: Machine) -> float:
    """Until the last of all threads has changed the count, which they do one after the other."""
    if machine.group == 0 or machine.threads <= machine.group:
        return machine.threads * machine.line_ns
    groups = -(-machine.threads // machine.group)
    return machine.group * machine.group_line_ns + groups * machine.line_ns


def simulate(stage: Stage, machine: Machine) -> tuple[float, float]:
    """(ns of the stage, ns of it that the mean thread does not work)."""
    threads = machine.threads
    busy = min(threads, stage.units)
    work_ns = stage.ns - stage.prepare_ns
    if machine.bandwidth and stage.bytes:
        at_once = busy * stage.bytes / work_ns  # bytes a ns are GB/s
        work_ns *= max(1.0, at_once / machine.bandwidth)
    unit_ns = work_ns / stage.units
    # dealt out as partition_begin of runtime/parallel.h does
    begins = [-(-stage.units * p // threads) for p in range(threads + 1)]
    left = [after - before for before, after in itertools.pairwise(begins)]
    entering = arrivals_ns(machine) / threads if threads > 1 else 0.0
    ready = [(i * entering, i) for i in range(threads)]
    worked, end = 0.0, 0.0
    entered: set[int] = set()
    while ready:
        now, thread = heapq.heappop(ready)
        victim = thread if left[thread] else max(range(threads), key=left.__getitem__)
        if not left[victim]:
            end = max(end, now)
            continue
        take = min(max(left[victim] // stage.parts, stage.least), stage.most, left[victim])
        left[victim] -= take
        took = take * unit_ns
        if thread not in entered:
            entered.add(thread)
            took += stage.prepare_ns
        worked += took
        cost = machine.claim_ns if victim == thread else machine.steal_ns
        heapq.heappush(ready, (now + took + (cost if threads > 1 else 0.0), thread))
    # leaving overlaps but for those who end together: half of them, and then the word is written
    if threads > 1:
        end += arrivals_ns(machine) / 2 + machine.publish_ns
    return end, end - worked / threads


def step(stages: list[Stage], machine: Machine) -> tuple[float, float, float]:
    """(ns of the step, share that threads wait, share of barriers alone)."""
    total = waiting = 0.0
    for stage in stages:
        ns, idle = simulate(stage, machine)
        total += ns
        waiting += idle
    barrier = arrivals_ns(machine) * 1.5 + machine.publish_ns if machine.threads > 1 else 0.0
    return total, waiting / total, len(stages) * barrier / total


def run_bench(binary: Path, options: argparse.Namespace, name: str, threads: int) -> str:
    """bench_step's lines for one kind of step on a plan for so many threads."""
    tokens, context = STEPS[name]
    words = [options.model, tokens, context, options.layers, options.head_rows, options.steps]
    environment = {**os.environ, "BENCH_STEP_PLAN": str(threads)}
    command = [str(binary), *map(str, words)]
    return subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def report(binary: Path, options: argparse.Namespace, name: str) -> None:
    print(f"\n{name}, {options.model}, {options.layers} layers, head of {options.head_rows} rows")
    stages, measured = read_plan(run_bench(binary, options, name, 2))
    for threads in (1, 2):
        machine = Machine(threads, bandwidth=options.local_bandwidth)
        found = step(stages, machine)[0]
        print(
            f"  check: {threads} thread(s) {found / 1e6:.2f} ms by the model, "
            f"{measured[threads] / 1e6:.2f} measured ({found / measured[threads]:.2f})"
        )
    # the finer a plan is cut, the more one thread may take for it: both times are shown
    print("  threads   GB/s  on 1, ms   on all   times 1   waiting   barriers   by groups of 8")
    for label, machine in machines(options.bandwidth):
        plan, _ = read_plan(run_bench(binary, options, name, machine.threads))
        one = step(plan, Machine(1))[0]  # of the same measurement of the same units
        ns, waiting, barriers = step(plan, machine)
        grouped = step(plan, replace(machine, group=8))[2]
        print(
            f"  {label:>7}  {machine.bandwidth:5.0f}  {one / 1e6:8.2f}  {ns / 1e6:7.3f}"
            f"   {one / ns:7.1f}   {waiting:6.1%}"
            f"    {barriers:6.1%}     {grouped:6.1%}"
        )


def machines(bandwidth: float) -> list[tuple[str, Machine]]:
    """Servers of one socket, whose memory 8 threads fill half, and one of two sockets."""
    shares = {8: 0.5, 16: 1.0, 32: 1.0, 64: 1.0}
    found = [(str(n), Machine(n, bandwidth=bandwidth * share)) for n, share in shares.items()]
    two = Machine(64, line_ns=120.0, publish_ns=300.0, bandwidth=2 * bandwidth)
    return [*found, ("2 x 32", two)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--binary", type=Path, default=Path("build/kernels/bench_step"))
    parser.add_argument("--model", default="2b-4t", choices=["0.7b", "2b-4t"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--head-rows", type=int, default=32000)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kinds", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--bandwidth", type=float, default=300.0, help="GB/s of a socket's memory")
    parser.add_argument(
        "--local-bandwidth", type=float, default=0.0, help="GB/s of this machine's, for the check"
    )
    options = parser.parse_args()
    for name in options.kinds:
        report(options.binary, options, name)


if __name__ == "__main__":
    main()
