"""`python -m benchmarks.products_before_after PYTHON`: products by turns with an older version.

PYTHON is the interpreter of an environment in which the older version is installed. Each version
has a process with copies of the same weights, 100 MB or, for a turn of many tokens, at least two
that may stay in a cache. In every turn each multiplies by its copies, the order changing, so that
what a host's other guests take is taken from both.
Printed is a table in Markdown: GMAC/s before and after (medians), each as a share of the limit, and
the median of the ratios of the turns. BITNET_OPS_ISA in the environment holds for both versions.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

from benchmarks.process import Floor, Process, answer, by_turns
from bitnet_ops import machine

_REST_S = 0.01  # for threads of the other process that still spin
_COPIES_BYTES = 100e6  # of weights, three times the last cache of the machines at hand
_MIN_MACS = 4e9  # a turn of several milliseconds also with a product of few tokens
_ATTEMPTS = 3
_QUIET = 0.06  # quartiles of the turns' ratios so far apart: others had the CPUs
_BITS = {"2bit": 2.0, "1.6bit": 1.6}
_SHAPES = (
    "640x2560 1280x2560 2560x2560 3840x2560 6912x2560 13824x2560 12288x4096 2560x6912 4096x12288"
)


class Cell(NamedTuple):
    """GMAC/s of a product with both versions; a turn's ratio is after / before."""

    before: list[float]
    after: list[float]

    def ratios(self) -> list[float]:
        return [a / b for b, a in zip(self.before, self.after, strict=True)]

    def disturbed(self) -> bool:
        low, _, high = statistics.quantiles(self.ratios(), n=4)
        return high - low > _QUIET

    def shown(self, limit: float) -> str:
        """`limit` in GMAC/s."""
        before, after = statistics.median(self.before), statistics.median(self.after)
        rates = f"{before:.0f} ({_share(before / limit)}), {after:.0f} ({_share(after / limit)})"
        return f"{rates} {statistics.median(self.ratios()):.2f}{' ?' * self.disturbed()}"


class Limits(NamedTuple):
    """What the machine gives a number of threads: multiply-adds, and bytes read."""

    peak_gmac_s: float
    read_gb_s: float

    def of(self, tokens: int, bits: float) -> float:
        """GMAC/s of weights of so many bits that come from memory once for all tokens."""
        return min(self.peak_gmac_s, self.read_gb_s * 8 / bits * tokens)


def _share(value: float) -> str:
    return f"{value:.2f}".removeprefix("0")


def _started(python: str, weight_format: str) -> Process:
    command = [python, "-m", "benchmarks.products_before_after", weight_format, "--work"]
    return Process(f"products_before_after, {python}", command)


class _Worker:
    """The process of a version, of this one or of an older one."""

    def __init__(self, weight_format: str) -> None:
        import torch

        self._torch, self._format = torch, weight_format
        self._shape, self._weights, self._x = (0, 0), [], torch.empty(0)  # type: Any, Any, Any

    def limits(self, threads: int) -> dict[str, float]:
        """What so many threads give, and whether others had the CPUs meanwhile."""
        from bitnet_ops.bench.harness import Budget
        from bitnet_ops.bench.limits import measure_limits
        from bitnet_ops.bench.memory import ColdMemory

        filled = self._torch.ones(1 << 23, dtype=self._torch.uint8)
        memory = ColdMemory(int(_COPIES_BYTES), filled)
        found = measure_limits(memory, threads, Budget(0.5))
        peak, read = found.int8_peak_gmac_s, found.read_gb_s
        return {"peak": peak, "read": read, "unstable": found.unstable}

    def threads(self, threads: int) -> dict[str, float]:
        self._torch.set_num_threads(threads)
        return {}

    def product(self, n: int, k: int, m: int) -> dict[str, float]:
        """Makes its weights and tokens, and calls it once with each."""
        from bitnet_ops.nn.packing import pack_ternary

        torch = self._torch
        if self._shape != (n, k):
            torch.manual_seed(n + k)
            codes = torch.randint(-1, 2, (n, k), dtype=torch.int8)
            first = pack_ternary(codes, 0.5).repack(self._format)
            count = max(2, int(_COPIES_BYTES / first.nbytes))
            copies = (first.weight.clone() for _ in range(count))
            self._weights = [first.with_weight(copy, first.format) for copy in copies]
            self._shape = (n, k)
        self._x = torch.randn(m, k).to(torch.bfloat16)
        self._calls(self._weights)
        return {}

    def turn(self) -> dict[str, float]:
        """GMAC/s of the product over the copies of a turn."""
        macs = self._shape[0] * self._shape[1] * self._x.shape[0]
        times = max(1, round(_MIN_MACS / (macs * len(self._weights))))
        few = max(2, min(len(self._weights), round(_MIN_MACS / macs)))
        weights = self._weights[:few] if times == 1 else self._weights * times
        self._calls(weights[:2])
        start = time.perf_counter()
        self._calls(weights)
        return {"rate": macs * len(weights) / (time.perf_counter() - start) / 1e9}

    def _calls(self, weights: Iterable[Any]) -> None:
        with self._torch.inference_mode():
            for weight in weights:
                weight.linear(self._x)


def _work(weight_format: str) -> None:
    """A line in (what, and its numbers), an answer out."""
    import bitnet_ops
    from bitnet_ops import _runtime

    worker = _Worker(weight_format)
    answer(isa=_runtime.isa(), build=_runtime.build_info(), at=bitnet_ops.__file__)
    for line in sys.stdin:
        what, *numbers = line.split()
        answer(**getattr(worker, what)(*map(int, numbers)))


def _rate(version: Process) -> float:
    time.sleep(_REST_S)
    return float(version.ask("turn")["rate"])


def _cell(versions: tuple[Process, Process], product: tuple[int, int, int], turns: int) -> Cell:
    """Measured again, up to three times, while others have the CPUs."""
    for version in versions:
        version.ask("product", *product)
    for _ in range(_ATTEMPTS):
        before, after = zip(*by_turns(*versions, turns, _rate), strict=True)
        cell = Cell(list(before), list(after))
        if not cell.disturbed():
            break
    return cell


def _shape(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    return int(n), int(k)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.products_before_after",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("before", metavar="PYTHON", help="interpreter of the older version")
    parser.add_argument("--shapes", nargs="+", metavar="NxK", default=_SHAPES.split())
    tokens = [1, 4, 8, 12, 16, 24, 32, 64, 128, 512]
    parser.add_argument("--tokens", "-m", type=int, nargs="+", metavar="M", default=tokens)
    parser.add_argument("--threads", "-t", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=9, help="at least 2")
    parser.add_argument("--format", choices=sorted(_BITS), default="2bit")
    parser.add_argument("--floor", type=float, metavar="RATIO", help="fail where it is slower")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    return parser


def _rows(
    versions: tuple[Process, Process], options: argparse.Namespace, threads: int, floor: Floor
) -> None:
    for version in versions:
        version.ask("threads", threads)
    found = versions[1].ask("limits", threads)
    limits = Limits(found["peak"], found["read"])
    peak, read = limits
    mark = " ?" * bool(found["unstable"])
    print(f"\nThreads {threads}; limits: {peak:.0f} GMAC/s, {read:.0f} GB/s{mark}.\n")
    print("| N x K |", " | ".join(f"M = {m}" for m in options.tokens), "|")
    print("|---" * (len(options.tokens) + 1) + "|")
    for n, k in map(_shape, options.shapes):
        shown = []
        for m in options.tokens:
            cell = _cell(versions, (n, k, m), options.turns)
            floor.see(f"{m} x {n} x {k}, {threads} threads", cell.ratios())
            shown.append(cell.shown(limits.of(m, _BITS[options.format])))
        print(f"| {n} x {k} |", " | ".join(shown), "|", flush=True)


def main() -> None:
    options = _parser().parse_args()
    if options.work:
        _work(options.before)
        return
    floor = Floor(options.floor)
    with ExitStack() as stack:
        before, after = (
            stack.enter_context(_started(python, options.format))
            for python in (options.before, sys.executable)
        )
        print(f"{options.format}, {machine.cpu_model()}, load {os.getloadavg()[0]:.1f}")
        for name, version in (("before", before), ("after", after)):
            print(f"{name}: {version.about}")
        print("GMAC/s before (share of the limit), after (share), ratio; ? disturbed")
        for threads in options.threads:
            _rows((before, after), options, threads, floor)
    floor.leave()


if __name__ == "__main__":
    main()
