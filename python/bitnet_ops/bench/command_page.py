"""`bitnet-ops bench page`: everything that docs/performance.md says about this machine, in one go.

It must not know how anything is measured or shown.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet_ops.bench import names
from bitnet_ops.cli.arguments import UsageError
from bitnet_ops.untrusted import UntrustedFileError, read_json_object

if TYPE_CHECKING:
    from bitnet_ops.bench import run_model, run_ops
    from bitnet_ops.bench.run_ops import Progress

DESCRIPTION = (
    "Run bench ops, its --check and bench model, and write this machine's section of a page such "
    "as docs/performance.md, with plots beside it. About a quarter of an hour; leave the machine "
    "alone meanwhile."
)
_FORMATS = ((names.USUAL, "int8"), ("1.6bit", "int4"), ("canonical", "int8"))
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
    import torch

    from bitnet_ops.bench import run_model, run_ops

    all_threads = torch.get_num_threads()
    threads = (1, all_threads) if all_threads > 1 else (1,)
    if quick:
        small: dict[str, Any] = {"threads": threads, "quick": True, "cold_mib": 16}
        tiny = run_model.Settings("tiny", _FORMATS[:1], (16,), (0, 8), (1, 2), **small)
        shapes = run_ops.Settings("demo", (1, 4), formats=(names.USUAL,), seconds=0.002, **small)
        return shapes, {"model": tiny, "small-model": tiny}
    shapes = run_ops.Settings(
        tokens=(1, 2, 4, 8, 16, 32, 64, 128, 512, 2048),
        threads=threads,
        formats=(names.USUAL,),
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
    from bitnet_ops.bench import pages, plots, report
    from bitnet_ops.bench.pinning import pinned

    page = Path(args.page)
    if page.exists() and not page.is_file():
        raise ValueError(f"page: expected a file, got {args.page}, which is none")
    if not page.parent.is_dir():
        raise UsageError(f"bench page: expected a file in a directory that exists, got {args.page}")
    plots.require(str(page.parent / "plots"))
    data = Path(args.data) if args.data else None
    if data:
        data.mkdir(parents=True, exist_ok=True)
    shapes, models = _settings(quick=args.quick)
    found: dict[str, Any] = {}
    for step in _STEPS:
        file = data / f"{step}.json" if data else None
        if file and file.is_file():
            found[step] = _kept(file)
            continue
        progress(step)
        with pinned():
            found[step] = _measure(step, shapes, models, progress)
        if file:
            report.write_json(found[step], file)
    pages.write_page(found["ops"], found["check"], [found["model"], found["small-model"]], page)
    print(f"wrote {page} and its plots")
    return 0


def _kept(file: Path) -> dict[str, Any]:
    """The report of a step that was run before; ValueError for a file that is none."""
    try:
        kept = read_json_object(file)
    except UntrustedFileError as error:
        raise ValueError(f"page: {error}; remove it to run the step again") from None
    if not str(kept.get("schema")).startswith("bitnet_ops.bench."):
        raise ValueError(f"page: expected a report of bench in {file}, got another file")
    return kept


def _measure(
    step: str,
    shapes: run_ops.Settings,
    models: dict[str, run_model.Settings],
    progress: Progress,
) -> dict[str, Any]:
    from bitnet_ops.bench import check, run_model, run_ops

    if step == "check":
        return check.run(shapes, progress)
    if step == "ops":
        return run_ops.run(shapes, progress)
    return run_model.run(models[step], progress)
