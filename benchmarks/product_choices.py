"""`python -m benchmarks.product_choices`: what measuring chooses on this CPU, and how steadily.

For every layout, with and without scales of groups, and every number of tokens that has a choice
of its own: the algorithm that is known for this CPU (without one: usual for its instruction set),
the measured one, and how many times as long the first takes (best of several measurements). Then
`--starts` fresh processes measure again, alone and beside two busy processes: how many choices
differ from the first, what the worst of them costs, and what all measurements of a process take.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import cast

from benchmarks.process import answer

_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 16, 24, 32, 64)
_BUSY = "while True: sum(range(100000))"

Times = dict[str, float]


def _kinds() -> list[tuple[str, bool, int]]:
    return [(f, g, t) for f in ("2bit", "1.6bit") for g in (False, True) for t in _TOKENS]


def _choices() -> None:
    """In a process of its own: the algorithm of each kind, and the seconds that asking took."""
    from bitnet_ops import _runtime

    start, found = time.perf_counter(), {}
    for layout, grouped, tokens in _kinds():
        plan = _runtime.product_plan(layout, 1024, 1024, tokens, 1, grouped)
        found[f"{layout} {grouped} {tokens}"] = plan["algorithm"]
    answer(choices=found, seconds=time.perf_counter() - start)


def _fresh(measure: bool) -> tuple[dict[str, str], float]:
    setting = {"BITNET_OPS_TUNING": "measure=1"} if measure else {}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.product_choices", "--child"],
        env={**os.environ, **setting},
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    return cast("dict[str, str]", said["choices"]), float(said["seconds"])


def _best_times(rounds: int) -> dict[str, Times]:
    from bitnet_ops import _runtime

    best: dict[str, Times] = {}
    for _ in range(rounds):
        for layout, grouped, tokens in _kinds():
            kept = best.setdefault(f"{layout} {grouped} {tokens}", {})
            for name, s in _runtime.product_times(layout, tokens, grouped).items():
                kept[name] = min(s, kept.get(name, s))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return _choices()
    from bitnet_ops import _runtime

    known, measured = _fresh(False)[0], _fresh(True)[0]
    best = _best_times(options.rounds)
    tuning = _runtime.tuning()
    print(f"{tuning['cpu']}, {_runtime.isa()}, without measuring: {tuning['products']}")
    for kind, times in best.items():
        if not times:
            continue
        layout, grouped, tokens = kind.split()
        a, b = known[kind], measured[kind]
        cost = "" if a == b else f"  {a} takes {times[a] / times[b]:.2f} times as long"
        groups = "groups" if grouped == "True" else ""
        print(f"{layout:7}{groups:7}{tokens:>3} tokens  known {a:16} measured {b:16}{cost}")
    for name, count in (("alone", 0), ("beside two busy processes", 2)):
        busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
        try:
            starts = [_fresh(True) for _ in range(options.starts)]
        finally:
            for process in busy:
                process.kill()
        flips = [(k, c[k]) for c, _ in starts for k in c if c[k] != measured[k]]
        costs = [best[k][other] / best[k][measured[k]] for k, other in flips]
        all_choices = options.starts * sum(1 for times in best.values() if times)
        worst = f", the worst takes {max(costs):.2f} times as long" if costs else ""
        seconds = sorted(s for _, s in starts)
        print(
            f"{options.starts} starts {name}: {len(flips)} of {all_choices} choices differ{worst}; "
            f"measuring everything takes {1e3 * seconds[0]:.0f} to {1e3 * seconds[-1]:.0f} ms"
        )


if __name__ == "__main__":
    main()
