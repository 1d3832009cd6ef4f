"""`bitnet-ops bench page`: everything that docs/performance.md says about this machine, in one go.

It must not know how anything is measured or shown.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from bitnet_ops.bench import check, pages, plots, report, run_model, run_ops, weights
from bitnet_ops.bench.pinning import pinned
from bitnet_ops.bench.run_ops import Progress

DESCRIPTION = (
    "Run bench ops, its --check and bench model, and write this machine's section of a page such "
    "as docs/performance.md, with plots beside it. About a quarter of an hour; leave the machine "
    "alone meanwhile."
)
_FORMATS = ((weights.USUAL, "int8"), ("1.6bit", "int4"), ("canonical", "int8"))
_STEPS = ("check", "model", "small-model", "ops")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench page`."""
    parser.add_argument("page", help="the Markdown file to write, for instance docs/performance.md")
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="keep the JSON of every step in DIR; a step whose file is there is not run again",
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to try the page itself")


def _settings(*, quick: bool) -> tuple[run_ops.Settings, dict[str, run_model.Settings]]:
    all_threads = torch.get_num_threads()
    threads = (1, all_threads) if all_threads > 1 else (1,)
    if quick:
        small: dict[str, Any] = {"threads": threads, "quick": True, "cold_mib": 16}
        tiny = run_model.Settings("tiny", _FORMATS[:1], (16,), (0, 8), (1, 2), **small)
        shapes = run_ops.Settings("demo", (1, 4), formats=(weights.USUAL,), seconds=0.002, **small)
        return shapes, {"model": tiny, "small-model": tiny}
    shapes = run_ops.Settings(
        tokens=(1, 2, 4, 8, 16, 32, 64, 128, 512, 2048),
        threads=threads,
        formats=(weights.USUAL,),
        seconds=0.25,
    )
    large = run_model.Settings(
        formats=_FORMATS, threads=threads, rivals=("hf-bf16", "litespark", "llama-cpp")
    )
    small_model = run_model.Settings(
        "0.7b", _FORMATS[:1], (128, 512), (0, 2048), (1, 4), threads=threads
    )
    return shapes, {"model": large, "small-model": small_model}


def run(args: argparse.Namespace, progress: Progress) -> int:
    """Run what is not there yet and write the page; 0."""
    page = Path(args.page)
    if not page.parent.is_dir():
        raise ValueError(f"page: expected a file in a directory that exists, got {args.page}")
    plots.require(str(page.parent / "plots"))
    data = Path(args.data) if args.data else None
    if data:
        data.mkdir(parents=True, exist_ok=True)
    shapes, models = _settings(quick=args.quick)
    found: dict[str, Any] = {}
    for step in _STEPS:
        file = data / f"{step}.json" if data else None
        if file and file.is_file():
            found[step] = json.loads(file.read_text(encoding="utf-8"))
            continue
        progress(step)
        with pinned():
            found[step] = _measure(step, shapes, models, progress)
        if file:
            report.write_json(found[step], file)
    pages.write_page(found["ops"], found["check"], [found["model"], found["small-model"]], page)
    print(f"wrote {page} and its plots")
    return 0


def _measure(
    step: str,
    shapes: run_ops.Settings,
    models: dict[str, run_model.Settings],
    progress: Progress,
) -> dict[str, Any]:
    if step == "check":
        return check.run(shapes, progress)
    if step == "ops":
        return run_ops.run(shapes, progress)
    return run_model.run(models[step], progress)
