"""`python -m benchmarks.update_performance PAGE`: figures, pictures and page of this machine.

Runs bench ops, the goals and bench model, keeps what a section shows below plots/ of the page's
folder, and writes the page from all that is stored there. About a quarter of an hour; leave the
machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import compare_engines, engines, goals, page, plots
from benchmarks.parts import parts_rows
from benchmarks.torch_int8 import with_int8
from bitnet_ops.bench import report, run_model, run_ops
from bitnet_ops.bench.limits import MachineLimits
from bitnet_ops.bench.measure import Row
from bitnet_ops.bench.pinning import pinned
from bitnet_ops.bench.run_model import ModelBench, ModelSettings
from bitnet_ops.bench.run_ops import OpsSettings, Progress
from bitnet_ops.bench.shapes import USUAL
from bitnet_ops.cli.bench import progress_line
from bitnet_ops.untrusted import UntrustedFileError, read_json_object

_FORMATS = ((USUAL, "int8"), ("1.6bit", "int4"), ("canonical", "int8"))
_ENGINE_SECONDS = 60.0
Step = Callable[[Progress], dict[str, Any]]


def _settings(*, quick: bool) -> tuple[OpsSettings, ModelSettings, ModelSettings]:
    threads = tuple(sorted({1, torch.get_num_threads()}))
    if quick:
        small: dict[str, Any] = {"threads": threads, "quick": True, "cold_mib": 16}
        tiny = ModelSettings("tiny", _FORMATS[:1], (16,), (0, 8), (1, 2), **small)
        return OpsSettings("demo", (1, 4), seconds=0.002, **small), tiny, tiny
    tokens = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
    large = ModelSettings(formats=_FORMATS, threads=threads)
    small_model = ModelSettings(
        "0.7b", _FORMATS[:1], (128, 512), (0, 2048), (1, 4), threads=threads
    )
    return OpsSettings(tokens=tokens, threads=threads, seconds=0.25), large, small_model


def _steps(*, quick: bool) -> dict[str, Step]:
    """What is measured, by the name of its report."""
    shapes, large, small = _settings(quick=quick)
    asked = () if quick else compare_engines.USUAL_ENGINES

    def with_engines(bench: ModelBench, limits: list[MachineLimits]) -> list[Row]:
        rows = parts_rows(bench, limits)
        return rows + compare_engines.all_rows(bench, limits, asked, _ENGINE_SECONDS)

    def large_model(progress: Progress) -> dict[str, Any]:
        found = run_model.run(large, progress, with_engines)
        return found | {"missing": engines.missing(asked)}

    return {
        "goals": lambda progress: goals.run(shapes, progress),
        "model": large_model,
        "small-model": lambda progress: run_model.run(small, progress, parts_rows),
        "ops": lambda progress: run_ops.run(shapes, progress, with_int8),
    }


def _kept(file: Path) -> dict[str, Any]:
    """The report of a step that was run before; ValueError for a file that is none."""
    try:
        kept = read_json_object(file)
    except UntrustedFileError as error:
        raise ValueError(f"{error}; remove it to run the step again") from None
    if not str(kept.get("schema")).startswith("bitnet_ops.bench."):
        raise ValueError(f"expected a report of bench in {file}, got another file")
    return kept


def measure(data: Path | None, progress: Progress, *, quick: bool) -> dict[str, dict[str, Any]]:
    """Every report; one that is in `data` is not measured again."""
    found = {}
    for name, step in _steps(quick=quick).items():
        file = data / f"{name}.json" if data else None
        if file and file.is_file():
            found[name] = _kept(file)
            continue
        progress(name)
        with pinned():
            found[name] = step(progress)
        if file:
            report.write_json(found[name], file)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    name = "python -m benchmarks.update_performance"
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    parser.add_argument("page", type=Path, help="for instance docs/performance.md")
    parser.add_argument("--stored", action="store_true", help="measure nothing, write the page")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="keep the JSON of every step in DIR; a step whose file is there is not run again",
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to try the page itself")
    args = parser.parse_args(argv)
    if not args.page.absolute().parent.is_dir() or args.page.is_dir():
        parser.error(f"expected a file in a directory that exists, got {args.page}")
    if not args.stored:
        try:
            plots.require(str(args.page.parent / "plots"))
            if args.data:
                args.data.mkdir(parents=True, exist_ok=True)
            with progress_line() as progress:
                found = measure(args.data, progress, quick=args.quick)
        except ValueError as error:
            parser.error(str(error))
        models = [found["model"], found["small-model"]]
        page.store(found["ops"], found["goals"], models, args.page)
    page.write(args.page)
    print(f"wrote {args.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
