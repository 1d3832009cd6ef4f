"""`python -m benchmarks.many_cores`: what a step would take on CPUs with more cores than this one.

The real plan of stages (units, claim rules, weights of each stage, as `bench_step` prints them for
so many threads) runs in a simulator: threads claim units as runtime/staged_executor.h says, a unit
takes what it takes here on one thread, reading is bounded by the memory's bandwidth, and what
threads write for each other costs transfers of cache lines. Two schemes: "shared", in which every
thread entered and left a stage by changing one line and one thread distributed the ranges of all,
and "grouped", which is built. It is checked against 1 and 2 real threads. It knows neither caches
nor frequencies: what it answers is whether the plan has enough units and what barriers cost.

Where the assumed latencies come from: 15 to 19 ns between cores of one L3 and up to 79.5 between
those of two (AnandTech on the Ryzen 9 7950X), 40 to 42 within one mesh (Intel's Memory Latency
Checker on a Xeon E5-2660 v4, quoted by J. McCalpin), 70 cycles at least for a contended increment
(T. Downs, "A concurrency cost hierarchy"). Across sockets, for who reads a line one after the
other, and for how many misses a core has in flight: plausible, without a source.
`bench_stages THREADS`, built beside it, measures a machine that is at hand (CONTRIBUTING: Work).
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
    minimum: int
    maximum: int
    parts: int
    ns: float
    prepare_ns: float
    bytes: int


@dataclass(frozen=True)
class Machine:
    """What the model takes a CPU to be, in ns; the bandwidth in GB/s of all threads together."""

    threads: int
    scheme: str = "grouped"  # or "shared"
    barrier: bool = True  # False: stages begin and end for nothing, claims cost what they do
    group: int = 8  # cores of one cache, whose arrivals are counted together
    line_ns: float = 60.0  # a change of a line, or a read, that a core of another group had
    group_line_ns: float = 25.0  # that one of the same group had
    publish_ns: float = 150.0  # until the first waiting thread has read the changed word
    reader_ns: float = 5.0  # each further one
    in_flight: int = 8  # misses of a core that overlap
    claim_ns: float = 25.0
    bandwidth: float = 0.0  # 0: without a bound

    @property
    def groups(self) -> int:
        return -(-self.threads // self.group)

    @property
    def far_ns(self) -> float:
        """What a line costs that all threads share."""
        return self.line_ns if self.groups > 1 else self.group_line_ns

    def scan_ns(self, near: int, far: int) -> float:
        """Reading so many lines that others have written."""
        return (near * self.group_line_ns + far * self.far_ns) / self.in_flight

    def opening(self) -> list[float]:
        """When each thread may claim, after the last one of the stage before has arrived."""
        if self.threads == 1 or not self.barrier:
            return [0.0] * self.threads
        if self.scheme == "grouped":
            return [self.publish_ns + i * self.reader_ns for i in range(self.threads)]
        distributed = self.threads * self.far_ns / self.in_flight + self.publish_ns
        # a change of the one line each, then the own range that another thread has written; that
        # a compare and swap fails beside others is not counted
        turn = max(self.reader_ns, self.far_ns)
        return [distributed + (i + 1) * turn + self.far_ns for i in range(self.threads)]

    def last_look_ns(self) -> float:
        """What a thread reads until it knows that nothing is left to claim."""
        if self.threads == 1 or not self.barrier:
            return 0.0
        if self.scheme == "grouped" and self.groups > 1:
            return self.scan_ns(self.group, self.groups)
        return self.scan_ns(0, self.threads)

    def arrivals_ns(self) -> float:
        """Until the last thread has counted: half of them are taken to end together."""
        if self.threads == 1 or not self.barrier:
            return 0.0
        if self.scheme == "grouped" and self.groups > 1:
            return (self.group * self.group_line_ns + self.groups * self.line_ns) / 2
        return self.threads * self.far_ns / 2


def read_plan(text: str) -> tuple[list[Stage], dict[int, float]]:
    """The stages that have units, and the measured ns of whole steps by threads."""
    stages, measured = [], {}
    for line in text.splitlines():
        words = shlex.split(line)
        if words[:1] == ["plan"] and int(words[2]) > 0:
            units, minimum, maximum, parts, ns, prepare_ns, size = map(int, words[2:9])
            stages.append(Stage(words[1], units, minimum, maximum, parts, ns, prepare_ns, size))
        elif words[:1] == ["threads"]:
            measured[int(words[1])] = float(words[2])
    return stages, measured


class Ranges:
    """The unclaimed units of each partition, distributed as partition_begin of parallel.h does."""

    def __init__(self, stage: Stage, machine: Machine) -> None:
        threads = machine.threads
        begins = [-(-stage.units * p // threads) for p in range(threads + 1)]
        self.left = [after - before for before, after in itertools.pairwise(begins)]
        self.stage, self.machine = stage, machine

    def slowest(self, first: int, last: int) -> int:
        return max(range(first, last), key=self.left.__getitem__)

    def victim(self, thread: int) -> tuple[int, float] | None:
        """Whose units a thread takes next, and what the claim costs; None: nothing is left."""
        m = self.machine
        if self.left[thread]:
            return thread, m.claim_ns if m.threads > 1 else 0.0
        if m.scheme == "shared" or m.groups == 1:
            found = self.slowest(0, m.threads)
            return (found, m.far_ns + m.scan_ns(0, m.threads)) if self.left[found] else None
        own = thread // m.group
        for i in range(m.groups):
            first = (own + i) % m.groups * m.group
            found = self.slowest(first, min(first + m.group, m.threads))
            if self.left[found] and i == 0:
                return found, m.group_line_ns + m.scan_ns(m.group, 0)
            if self.left[found]:
                return found, m.line_ns + m.scan_ns(1, m.group + i)
        return None

    def take(self, victim: int) -> int:
        left, stage = self.left[victim], self.stage
        taken = min(max(left // stage.parts, stage.minimum), stage.maximum, left)
        self.left[victim] -= taken
        return taken


def simulate(stage: Stage, machine: Machine) -> tuple[float, float]:
    """(ns of the stage, ns of it that the mean thread does not work)."""
    threads = machine.threads
    work_ns = stage.ns - stage.prepare_ns
    if machine.bandwidth and stage.bytes:
        at_once = min(threads, stage.units) * stage.bytes / work_ns  # bytes a ns are GB/s
        work_ns *= max(1.0, at_once / machine.bandwidth)
    unit_ns = work_ns / stage.units
    ranges = Ranges(stage, machine)
    ready = [(at, i) for i, at in enumerate(machine.opening())]
    worked, end = 0.0, 0.0
    entered: set[int] = set()
    while ready:
        now, thread = heapq.heappop(ready)
        found = ranges.victim(thread)
        if found is None:
            end = max(end, now)
            continue
        victim, cost = found
        took = ranges.take(victim) * unit_ns
        if thread not in entered:
            entered.add(thread)
            took += stage.prepare_ns
        worked += took
        heapq.heappush(ready, (now + took + cost, thread))
    end += machine.last_look_ns() + machine.arrivals_ns()
    return end, end - worked / threads


def step(stages: list[Stage], machine: Machine) -> tuple[float, float]:
    """(ns of the step, share that threads wait)."""
    total = waiting = 0.0
    for stage in stages:
        ns, idle = simulate(stage, machine)
        total += ns
        waiting += idle
    return total, waiting / total


def lost(stages: list[Stage], machine: Machine) -> float:
    """The share of a step by which it is longer than if stages began and ended for nothing."""
    return 1 - step(stages, replace(machine, barrier=False))[0] / step(stages, machine)[0]


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
    print(
        "  threads   GB/s  on 1, ms   on all   times 1   waiting   barriers   shared: all  barriers"
    )
    for label, machine in machines(options):
        plan, _ = read_plan(run_bench(binary, options, name, machine.threads))
        one = step(plan, Machine(1))[0]  # of the same measurement of the same units
        ns, waiting = step(plan, machine)
        before = replace(machine, scheme="shared")
        print(
            f"  {label:>7}  {machine.bandwidth:5.0f}  {one / 1e6:8.2f}  {ns / 1e6:7.3f}"
            f"   {one / ns:7.1f}   {waiting:6.1%}    {lost(plan, machine):6.1%}"
            f"       {step(plan, before)[0] / 1e6:7.3f}    {lost(plan, before):6.1%}"
        )


def machines(options: argparse.Namespace) -> list[tuple[str, Machine]]:
    """Servers of one socket, whose memory 8 threads fill half, and one of two sockets."""
    shares = {8: 0.5, 16: 1.0, 32: 1.0, 64: 1.0}
    one = Machine(1, line_ns=options.line_ns, group_line_ns=options.group_line_ns)
    found = [
        (str(n), replace(one, threads=n, bandwidth=options.bandwidth * share))
        for n, share in shares.items()
    ]
    far = replace(one, line_ns=2 * one.line_ns, publish_ns=2 * one.publish_ns)
    return [*found, ("2 x 32", replace(far, threads=64, bandwidth=2 * options.bandwidth))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--binary", type=Path, required=True,
        help="bench_step: cmake --build TREE --target bench_step (CONTRIBUTING.md, Work)",
    )  # fmt: skip
    parser.add_argument("--model", default="2b-4t", choices=["0.7b", "2b-4t"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--head-rows", type=int, default=32000)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kinds", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--bandwidth", type=float, default=300.0, help="GB/s of a socket's memory")
    parser.add_argument(
        "--local-bandwidth", type=float, default=0.0, help="GB/s of this machine's, for the check"
    )
    parser.add_argument("--line-ns", type=float, default=Machine.line_ns)
    parser.add_argument("--group-line-ns", type=float, default=Machine.group_line_ns)
    options = parser.parse_args()
    for name in options.kinds:
        report(options.binary, options, name)


if __name__ == "__main__":
    main()
