"""`bitnet-ops bench`: arguments, progress and exit status of the benchmarks.

It must not know how anything is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bitnet_ops.bench import command_model, command_page, names
from bitnet_ops.bench.shapes import MODELS, parse_counts, parse_shapes, parse_words
from bitnet_ops.cli.arguments import Parser, UsageError

if TYPE_CHECKING:
    from bitnet_ops.bench import run_ops


class _Defaults(NamedTuple):
    m: str
    cold_mib: int
    seconds: float


_QUICK = _Defaults("1,4,32", 256, 0.15)
_FULL = _Defaults("1,2,4,8,16,32,64,128,512,2048", 512, 0.4)
_MOST_TOKENS = 4096
_MOST_THREADS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments to `parser`."""
    parser.description = "Measure against limits of this machine, taken in the same process."
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    model = kinds.add_parser(
        "model", help="prefill and decode of a whole model", description=command_model.DESCRIPTION
    )
    command_model.add_arguments(model)
    page = kinds.add_parser(
        "page", help="everything, as a page of documentation", description=command_page.DESCRIPTION
    )
    command_page.add_arguments(page)
    ops = kinds.add_parser("ops", help="every op on model shapes", description=_OPS_DESCRIPTION)
    ops.add_argument("--quick", action="store_true", help="below a minute on two cores; less exact")
    ops.add_argument(
        "--check",
        action="store_true",
        help="measure the goals for speed instead: must, ambitious, measured, verdict; exit status "
        "1 names every must that is missed",
    )
    for kind in (model, page, ops):
        kind.set_defaults(_parser=kind)  # who complains of an unknown option
    command_model.add_outputs(ops)
    ops.add_argument("-t", "--threads", help="thread counts such as 1,2 (default: 1 and all)")
    ops.add_argument(
        "--shapes",
        default="2b-4t",
        help=f"names ({', '.join(MODELS)}) and NxK, separated by commas (default: 2b-4t)",
    )
    ops.add_argument("--m", help=f"tokens of the products (default: {_FULL.m}; quick: {_QUICK.m})")
    ops.add_argument(
        "--weight-format",
        default="auto",
        help=f"of {', '.join(names.FORMATS)}, separated by commas (default: the one that models "
        "are loaded in)",
    )
    ops.add_argument(
        "--cold-mib",
        type=int,
        help=f"memory that cold operands cycle through (default: {_FULL.cold_mib}; "
        f"quick: {_QUICK.cold_mib})",
    )
    ops.add_argument(
        "--seconds",
        type=float,
        help=f"time for one row (default: {_FULL.seconds}; quick: {_QUICK.seconds})",
    )


_OPS_DESCRIPTION = (
    "Time the ops hot (operands in a cache) and cold (operands in memory), alternating with a "
    "read-only pass and with the int8 multiply-add peak; ratio 1.00 is the limit. torch's own "
    "bfloat16 product runs beside them. Every result is checked first. Exit status 1 when one is "
    "wrong."
)


def settings_of(args: argparse.Namespace) -> run_ops.Settings:
    """The settings that the arguments ask for; ValueError names a wrong one."""
    import torch

    from bitnet_ops.bench import run_ops

    defaults = _QUICK if args.quick else _FULL
    parse_shapes(args.shapes)  # complain before anything is measured
    cold_mib = defaults.cold_mib if args.cold_mib is None else int(args.cold_mib)
    seconds = defaults.seconds if args.seconds is None else float(args.seconds)
    if not 16 <= cold_mib <= 1 << 16:
        raise ValueError(f"--cold-mib: expected 16 to {1 << 16}, got {cold_mib}")
    if not 0 < seconds <= 60:
        raise ValueError(f"--seconds: expected more than 0 and at most 60, got {seconds}")
    all_threads = torch.get_num_threads()
    threads = args.threads or (f"1,{all_threads}" if all_threads > 1 else "1")
    return run_ops.Settings(
        shapes=args.shapes,
        tokens=tuple(parse_counts("--m", args.m or defaults.m, _MOST_TOKENS)),
        threads=tuple(parse_counts("--threads", threads, _MOST_THREADS)),
        formats=tuple(_formats(args.weight_format)),
        quick=args.quick,
        cold_mib=cold_mib,
        seconds=seconds,
    )


def _formats(text: str) -> list[str]:
    if text == "auto":
        return [names.USUAL]
    return parse_words("--weight-format", text, names.FORMATS)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 0, or 1 when a result was wrong or a must of --check was missed."""
    if args.kind == "page":
        with _progress_line(enabled=sys.stderr.isatty()) as progress:
            return command_page.run(args, progress)
    return _run_model(args) if args.kind == "model" else _run_ops(args)


def _usage(args: argparse.Namespace, read: Callable[[], Any]) -> Any:
    """What `read` makes of the arguments; a plain ValueError of it is wrong usage."""
    from bitnet_ops.bench import plots

    pictures = plots.OPS_PLOTS if args.kind == "ops" else plots.MODEL_PLOTS
    try:
        found = read()
        _require(args, pictures)
    except ValueError as error:
        if type(error) is not ValueError:  # a model that cannot be read
            raise
        raise UsageError(f"bench {args.kind}: {error}") from error
    return found


def _run_ops(args: argparse.Namespace) -> int:
    from bitnet_ops.bench import check, plots, report, run_ops
    from bitnet_ops.bench.pinning import pinned

    settings = _usage(args, lambda: settings_of(args))
    if args.check and not parse_shapes(args.shapes).models:
        raise UsageError("bench ops: --check: expected the name of a model in --shapes, got none")
    with _progress_line(enabled=sys.stderr.isatty()) as progress:
        with pinned():
            result = (check if args.check else run_ops).run(settings, progress=progress)
    if args.json:
        print(report.as_json(result))
    elif args.check:
        print("\n".join([*report.header_lines(result), "", *result["lines"]]))
    else:
        report.print_report(result)
    if args.output:
        report.write_json(result, args.output, replace=args.force)
    if args.plots and not args.check:
        _say_written(plots.draw_ops(result, Path(args.plots)))
    return 0 if result["ok"] else 1


def _run_model(args: argparse.Namespace) -> int:
    from bitnet_ops.bench import plots, report, report_model, run_model
    from bitnet_ops.bench.pinning import pinned

    settings = _usage(args, lambda: command_model.settings_of(args))
    with _progress_line(enabled=sys.stderr.isatty()) as progress:
        with pinned():
            result = run_model.run(settings, progress)
    print(report.as_json(result) if args.json else "\n".join(report_model.lines(result)))
    if args.output:
        report.write_json(result, args.output, replace=args.force)
    if args.plots:
        _say_written(plots.draw_model(result, Path(args.plots)))
    return 0


def _say_written(paths: list[Path]) -> None:
    for path in paths:
        print(f"wrote {path}", file=sys.stderr)


def _require(args: argparse.Namespace, names: tuple[str, ...]) -> None:
    """Refuse a report or plots that could not be written, before minutes are spent on them."""
    from bitnet_ops.bench import plots, report
    from bitnet_ops.formats import destination

    if args.output:
        file = Path(args.output)
        if not file.absolute().parent.is_dir() or not os.access(file.absolute().parent, os.W_OK):
            raise ValueError(f"--output: expected a file in a directory to write to, got {file}")
        destination.check(file, report.REPORT_FILE, replace=args.force)
    if args.plots:
        plots.require(args.plots, names, replace=args.force)


@contextmanager
def _progress_line(*, enabled: bool) -> Iterator[run_ops.Progress]:
    if not enabled:
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        # rich redraws from a thread of its own; a slow rate keeps it out of the measurements
        yield lambda text: status.update(text, speed=0.1)


def main() -> int:
    """`python benchmarks/bench_ops.py ...`, the same as `bitnet-ops bench ops ...`."""
    parser = Parser(prog="bitnet-ops bench")
    add_arguments(parser)
    return run(parser.parse_args(["ops", *sys.argv[1:]]))
