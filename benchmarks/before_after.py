"""`python -m benchmarks.before_after PYTHON`: this version and an older one by turns, whole models.

PYTHON is the interpreter of an environment in which the older version is installed. Each version
has a process with the model loaded; in every turn both take the same measurement one after the
other, the order changing, so that what a host's other guests take is taken from both. Printed are
both medians and the median and range of the ratios of the turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from benchmarks.process import Floor, Process, answer, by_turns
from bitnet_ops import machine

_REST_S = 0.05  # for threads of the other process that still spin
_STEPS = 32  # decoded tokens a turn
_LONG_PROMPT = 512  # a longer one takes seconds, beside which its first pages are nothing


def _started(python: str, options: argparse.Namespace) -> Process:
    """The version of `python` with a model in memory."""
    work = [options.dummy, str(options.threads), options.format]
    command = [python, "-m", "benchmarks.before_after", "--work", *work, "-"]
    return Process(f"before_after, {python}", command)


def _rate(version: Process, what: str, kv: str, size: int) -> float:
    """Tokens a second of a prompt of `size` tokens, of decoding behind so many, or of so many
    sequences decoded together.
    """
    time.sleep(_REST_S)
    return float(version.ask(what, kv, size)["rate"])


def _work(dummy: str, threads: int, formats: str) -> None:
    """The process of a version, of this one or of an older one: a line in, tokens a second out."""
    import torch

    import bitnet_ops
    from bitnet_ops import _runtime
    from bitnet_ops.bench.model import BenchModel

    torch.set_num_threads(threads)
    model: Any = BenchModel(dummy, *formats.split("+"))
    answer(isa=_runtime.isa(), build=_runtime.build_info(), at=bitnet_ops.__file__)
    asked = ""
    for line in sys.stdin:
        what, kv, size = line.split()
        if line != asked:  # caches and prompts are made once, outside of the time
            model.kv_dtype = getattr(torch, kv)
            run = _run(model, what, int(size))
            asked = line
        calls = 1 if what == "prompt" else _STEPS
        tokens = calls if what == "decode" else calls * int(size)
        start = time.perf_counter()
        for i in range(calls):
            run.call(i)
        answer(rate=tokens / (time.perf_counter() - start))


def _run(model: Any, what: str, size: int) -> Any:
    if what == "prompt":
        return model.prefill_run(size)
    batch, context = (size, 0) if what == "batch" else (1, size)
    return model.decode_run(batch, context, _STEPS)


def _row(what: str, kv: str, size: int, turns: Iterator[tuple[float, float]], floor: Floor) -> str:
    before, after = zip(*turns, strict=True)
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    names = {"prompt": "prompt of {:,}", "decode": "decode behind {:,}", "batch": "{:,} sequences"}
    name = names[what].format(size)
    floor.see(f"{name}, {kv}", ratios)
    return (
        f"{name:22}{kv:10}{statistics.median(before):9.1f} ->{statistics.median(after):9.1f}"
        f"{statistics.median(ratios):9.2f}  ({min(ratios):.2f}-{max(ratios):.2f})"
    )


def _turns(
    before: Process, after: Process, what: str, kv: str, size: int, count: int
) -> Iterator[tuple[float, float]]:
    if what != "prompt" or size <= _LONG_PROMPT:  # pages and caches
        for version in (before, after):
            _rate(version, what, kv, size)
    yield from by_turns(before, after, count, lambda version: _rate(version, what, kv, size))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.before_after", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("before", metavar="PYTHON", help="interpreter of the older version")
    parser.add_argument("--dummy", default="2b-4t")
    parser.add_argument("--threads", "-t", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 512, 2048, 8192])
    parser.add_argument("--contexts", type=int, nargs="*", default=[0, 2048, 8192])
    parser.add_argument("--batches", type=int, nargs="*", default=[], help="sequences together")
    parser.add_argument("--format", default="auto+int8", help="WEIGHTS+HEAD")
    parser.add_argument("--kv-dtype", nargs="+", default=["bfloat16", "int8"])
    parser.add_argument("--floor", type=float, metavar="RATIO", help="fail where it is slower")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = _parser().parse_args()
    if options.work:
        dummy, threads, formats = options.work
        _work(dummy, int(threads), formats)
        return
    floor = Floor(options.floor)
    with ExitStack() as stack:
        before, after = (
            stack.enter_context(_started(python, options))
            for python in (options.before, sys.executable)
        )
        of = f"{options.dummy} in {options.format}, {options.threads} threads"
        print(f"{of}, {machine.cpu_model()}")
        for name, version in (("before", before), ("after", after)):
            print(f"{name}: {version.about}")
        print(f"tokens/s, medians of {options.turns} turns; ratio (range)", flush=True)
        for kv in options.kv_dtype:
            wanted = {
                "prompt": options.prompts,
                "decode": options.contexts,
                "batch": options.batches,
            }
            for what, sizes in wanted.items():
                for size in sizes:
                    turns = _turns(before, after, what, kv, size, options.turns)
                    print(_row(what, kv, size, turns, floor), flush=True)
    floor.leave()


if __name__ == "__main__":
    main()
