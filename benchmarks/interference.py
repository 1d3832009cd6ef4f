"""`python -m benchmarks.interference`: decode and prompts beside what disturbs two threads.

Each scenario runs in a process of its own on a model of 2B-4T's dims with few layers: alone with
one and with two threads, with both threads forced onto one CPU, put there and let go again, and
beside a busy process bound to the second CPU at nice 0, at nice 19 and in another scheduling group.
Of every scenario the median of some runs and the worst one are printed, and their shares of one
thread alone. `--before PYTHON`, the interpreter of an environment with an older version, measures
each scenario with that version first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.process import ROOT

_SPIN = "import os, sys\nos.nice(int(sys.argv[1]))\nos.sched_setaffinity(0, {int(sys.argv[2])})\n"
_SPIN += "print(flush=True)\nwhile True:\n    sum(range(100000))\n"


@dataclass(frozen=True)
class Scenario:
    """What surrounds the threads."""

    threads: int = 2
    nice: int | None = None  # of a busy process bound to the second CPU
    group: bool = False  # that process in a session, hence a scheduling group, of its own
    one_cpu: str = ""  # "held" there, or "put" there before each run and let go


SCENARIOS = {
    "one thread": Scenario(threads=1),
    "two threads": Scenario(),
    "both on one CPU": Scenario(one_cpu="held"),
    "put on one CPU": Scenario(one_cpu="put"),
    "neighbour, nice 0": Scenario(nice=0),
    "neighbour, nice 19": Scenario(nice=19),
    "neighbour, other group": Scenario(nice=0, group=True),
    "put beside other group": Scenario(nice=0, group=True, one_cpu="put"),
    "one thread, nice 0": Scenario(threads=1, nice=0),
}


def _move_threads(cpus: set[int]) -> None:
    for tid in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # a thread that ended meanwhile
            os.sched_setaffinity(int(tid), cpus)


@contextlib.contextmanager
def _neighbour(scenario: Scenario, cpu: int) -> Iterator[None]:
    if scenario.nice is None:
        yield
        return
    command = [sys.executable, "-c", _SPIN, str(scenario.nice), str(cpu)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, start_new_session=scenario.group
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it is bound and about to spin
        try:
            yield
        finally:
            process.kill()


def measure(scenario: Scenario, layers: int, runs: int, prompt: int) -> dict[str, list[float]]:
    """Tokens a second of `runs` runs of decoding and of prompts."""
    import torch

    from bitnet_ops.bench.model import BenchModel
    from bitnet_ops.dummy.configs import CONFIGS

    torch.set_num_threads(scenario.threads)
    cut = {"num_hidden_layers": layers, "vocab_size": 32000, "bos_token_id": 0, "eos_token_id": 1}
    CONFIGS["cut"] = {**CONFIGS["2b-4t"], **cut}
    model = BenchModel("cut", "auto", "int8")
    cpus = os.sched_getaffinity(0)
    steps = 16
    ids = torch.randint(0, 32000, (1, prompt))
    found: dict[str, list[float]] = {"decode": [], "prompt": []}
    decode = model.decode_run(1, 0, steps)
    with _neighbour(scenario, max(cpus)):
        for run in range(runs + 1):
            if scenario.one_cpu:
                _move_threads({min(cpus)})
            if scenario.one_cpu == "put":
                _move_threads(cpus)
            start = time.perf_counter()
            for i in range(steps):
                decode.call(i)
            middle = time.perf_counter()
            model.model(ids, model.cache(1, 0, prompt), 1)
            end = time.perf_counter()
            if run:  # the first one warms up
                found["decode"].append(steps / (middle - start))
                found["prompt"].append(prompt / (end - middle))
    return found


def _in_a_process(python: str, name: str, options: argparse.Namespace) -> dict[str, list[float]]:
    command = [python, "-m", "benchmarks.interference", "--one", name]
    for option in ("layers", "runs", "prompt"):
        command += [f"--{option}", str(getattr(options, option))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    result: dict[str, list[float]] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--only", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument(
        "--before", metavar="PYTHON", help="measure this interpreter's version, too"
    )
    parser.add_argument("--one", choices=list(SCENARIOS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        found = measure(SCENARIOS[options.one], options.layers, options.runs, options.prompt)
        print(json.dumps(found))
        return
    print("tokens/s: median (worst) of", options.runs, "runs, and their share of one thread alone")
    versions = {"now": sys.executable}
    if options.before:
        versions = {"before": options.before, **versions}
    alone: dict[tuple[str, str], float] = {}
    for name in options.only:
        for version, python in versions.items():
            found = _in_a_process(python, name, options)
            cells = []
            for kind, rates in found.items():
                middle, worst = statistics.median(rates), min(rates)
                one = alone.setdefault((version, kind), middle)
                shares = f"{middle / one:.2f} ({worst / one:.2f})"
                cells.append(f"{kind} {middle:7.1f} ({worst:7.1f})  {shares}")
            label = f"{version:7}" if options.before else ""
            print(f"{name:24}{label}" + "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
