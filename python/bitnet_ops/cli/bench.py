"""`bitnet-ops bench ops|model|engine|page`: arguments, progress and exit status of the benchmarks.

It must not know how anything is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bitnet_ops.bench.shapes import (
    HEAD_FORMATS,
    KV_DTYPES,
    MODELS,
    USUAL,
    WEIGHT_FORMATS,
    parse_counts,
    parse_shapes,
    parse_words,
)
from bitnet_ops.cli.arguments import UsageError, add_force, add_json
from bitnet_ops.dummy.configs import CONFIGS

if TYPE_CHECKING:
    from bitnet_ops.bench.run_engine import EngineSettings
    from bitnet_ops.bench.run_model import ModelSettings
    from bitnet_ops.bench.run_ops import OpsSettings
    from bitnet_ops.bench.session import Progress


class _Defaults(NamedTuple):
    m: str
    cold_mib: int
    seconds: float


_QUICK = _Defaults("1,4,32", 256, 0.15)
_FULL = _Defaults("1,2,4,8,16,32,64,128,512,2048", 512, 0.4)
_MOST_TOKENS = 4096
_MOST_THREADS = 1024
_DUMMY = "2b-4t"
_FORMATS = "auto+int8"
# What earlier versions had here, and where it is now.
_MOVED = {
    "--plots": "python -m bitnet_ops.bench.page.plots",
    "--rivals": "python -m benchmarks.compare_engines --engines",
    "--rival-seconds": "python -m benchmarks.compare_engines --seconds",
}
_OPS_DESCRIPTION = (
    "Time the ops hot (operands in a cache) and cold (operands in memory), alternating with a "
    "read-only pass and with the int8 multiply-add peak; ratio 1.00 is the limit. torch's own "
    "bfloat16 product runs beside them. Every result is checked first. Exit status 1 when one is "
    "wrong."
)
_MODEL_DESCRIPTION = (
    "Time prefill and decode of a model, or of a synthetic one with random weights, against "
    "reading its bytes and against the int8 peak, both alternating with it."
)
_PAGE = "bitnet-ops-page/performance.md"
_PAGE_DESCRIPTION = (
    "Measure this machine, about a quarter of an hour on an idle one, and write or complete a page "
    "in Markdown with a section for every kind of CPU: goals for speed, a large and a small model, "
    "every op, plots where matplotlib is installed. To contribute the section of your CPU, send "
    "the folder that the last line names to the project, for its docs/notes/plots."
)
_ENGINE_DESCRIPTION = (
    "Time many requests at once: streams that decode together, against reading the step's bytes "
    "once and against the int8 multiply-adds of its tokens, both alternating with them; a prompt "
    "that arrives beside streams; a queue of mixed requests; a shared prefix; the cost of drafts."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments to `parser`."""
    parser.description = "Measure against limits of this machine, taken in the same process."
    kinds = parser.add_subparsers(dest="kind", metavar="ops|model|engine|page", required=True)
    ops = kinds.add_parser("ops", help="every op on model shapes", description=_OPS_DESCRIPTION)
    model = kinds.add_parser(
        "model", help="prefill and decode of a whole model", description=_MODEL_DESCRIPTION
    )
    engine = kinds.add_parser(
        "engine", help="many requests at once", description=_ENGINE_DESCRIPTION
    )
    _add_engine_arguments(engine)
    _add_ops_arguments(ops)
    _add_model_arguments(model)
    page = kinds.add_parser(
        "page", help="a page on this kind of CPU, to contribute", description=_PAGE_DESCRIPTION
    )
    _add_page_arguments(page)
    for kind in (ops, model, engine):
        kind.set_defaults(_parser=kind)  # who complains of an unknown option
        kind.add_argument("-t", "--threads", help="thread counts such as 1,2 (default: 1 and all)")
        add_json(kind)
        kind.add_argument("--output", metavar="FILE", help="also write everything to FILE, as JSON")
        add_force(kind, "an earlier report")
        kind.add_argument("--plots", help=argparse.SUPPRESS)


def _add_ops_arguments(ops: argparse.ArgumentParser) -> None:
    ops.add_argument("--quick", action="store_true", help="below a minute on two cores; less exact")
    ops.add_argument(
        "--check",
        action="store_true",
        help="measure the goals for speed instead; exit status 1 when one is missed",
    )
    ops.add_argument(
        "--shapes",
        default="2b-4t",
        help=f"names ({', '.join(MODELS)}) and NxK, separated by commas (default: 2b-4t)",
    )
    ops.add_argument("--m", help=f"tokens of the products (default: {_FULL.m}; quick: {_QUICK.m})")
    ops.add_argument(
        "--weight-format",
        default="auto",
        help=f"of {', '.join(WEIGHT_FORMATS)}, separated by commas (default: the one that models "
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


def _add_model_arguments(model: argparse.ArgumentParser) -> None:
    model.add_argument(
        "model", nargs="?", metavar="MODEL", help="a converted model (default: a synthetic one)"
    )
    model.add_argument(
        "--dummy", help=f"which synthetic model: {', '.join(CONFIGS)} (default: {_DUMMY})"
    )
    model.add_argument(
        "--formats",
        default=_FORMATS,
        help="pairs WEIGHTS+HEAD of formats with commas between; the first one gets every "
        f"measurement (default: {_FORMATS})",
    )
    model.add_argument(
        "--kv-dtype",
        default=KV_DTYPES[0],
        help=f"types of the KV cache, of {', '.join(KV_DTYPES)}, or all; the first one gets every "
        f"measurement, the others one sequence and the prompts (default: {KV_DTYPES[0]})",
    )
    model.add_argument("--prompts", help="tokens of the prompts (default: 128,512,2048)")
    model.add_argument("--contexts", help="tokens behind which to decode (default: 0,2048,8192)")
    model.add_argument("--batches", help="sequences decoded together (default: 1,2,4,8)")
    model.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
    for option in ("--rivals", "--rival-seconds"):
        model.add_argument(option, help=argparse.SUPPRESS)


def _add_engine_arguments(engine: argparse.ArgumentParser) -> None:
    engine.add_argument(
        "--dummy",
        default=_DUMMY,
        help=f"which synthetic model: {', '.join(CONFIGS)} (default: {_DUMMY})",
    )
    engine.add_argument(
        "--formats", default=_FORMATS, help=f"WEIGHTS+HEAD formats (default: {_FORMATS})"
    )
    engine.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default=KV_DTYPES[0],
        help=f"type of the KV cache (default: {KV_DTYPES[0]})",
    )
    engine.add_argument("--streams", help="numbers of streams (default: 1,2,4,8,16,32,64)")
    engine.add_argument("--contexts", help="tokens behind which they decode (default: 128,2048)")
    engine.add_argument("--prompt", type=int, help="tokens of the arriving prompt (default: 2048)")
    engine.add_argument("--quick", action="store_true", help="fewer and shorter measurements")


def _add_page_arguments(page: argparse.ArgumentParser) -> None:
    page.add_argument("page", nargs="?", metavar="FILE", help=f"the page (default: {_PAGE})")
    page.add_argument("--stored", action="store_true", help="measure nothing, write the page")
    page.add_argument(
        "--data",
        metavar="DIR",
        help="keep the JSON of every step in DIR; a step whose file is there is not run again",
    )
    page.add_argument("--quick", action="store_true", help="tiny shapes, to try the page itself")


def check(args: argparse.Namespace) -> None:
    """Reject what has moved out of the package, and say where it is."""
    for word in (o for o in _MOVED if getattr(args, o.strip("-").replace("-", "_"), None)):
        raise UsageError(
            f"bench: expected ops, model, engine or page and their options, got {word}, which is "
            f"now `{_MOVED[word]}`, in the project's source tree"
        )


def _threads(args: argparse.Namespace) -> tuple[int, ...]:
    import torch

    most = torch.get_num_threads()
    return parse_counts(
        "--threads", args.threads or (f"1,{most}" if most > 1 else "1"), _MOST_THREADS
    )


def ops_settings(args: argparse.Namespace) -> OpsSettings:
    """The settings that the arguments of `bench ops` ask for; ValueError names a wrong one."""
    from bitnet_ops.bench.run_ops import OpsSettings

    defaults = _QUICK if args.quick else _FULL
    parse_shapes(args.shapes)  # complain before anything is measured
    cold_mib = defaults.cold_mib if args.cold_mib is None else int(args.cold_mib)
    seconds = defaults.seconds if args.seconds is None else float(args.seconds)
    if not 16 <= cold_mib <= 1 << 16:
        raise ValueError(f"--cold-mib: expected 16 to {1 << 16}, got {cold_mib}")
    if not 0 < seconds <= 60:
        raise ValueError(f"--seconds: expected more than 0 and at most 60, got {seconds}")
    formats = USUAL if args.weight_format == "auto" else args.weight_format
    return OpsSettings(
        shapes=args.shapes,
        tokens=parse_counts("--m", args.m or defaults.m, _MOST_TOKENS),
        threads=_threads(args),
        formats=parse_words("--weight-format", formats, WEIGHT_FORMATS),
        quick=args.quick,
        cold_mib=cold_mib,
        seconds=seconds,
    )


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for word in text.split(","):
        weight_format, plus, head = word.partition("+")
        if not plus:
            raise ValueError(f"--formats: expected pairs such as 2bit+int8, got '{word}'")
        weight_format = USUAL if weight_format == "auto" else weight_format
        parse_words("--formats", weight_format, WEIGHT_FORMATS)
        parse_words("--formats", head, HEAD_FORMATS)
        pairs.append((weight_format, head))
    return tuple(dict.fromkeys(pairs))


def model_settings(args: argparse.Namespace) -> ModelSettings:
    """The settings that the arguments of `bench model` ask for; ValueError names a wrong one."""
    from bitnet_ops.bench.run_model import ModelSettings

    if args.model is not None and args.dummy is not None:
        raise ValueError(f"expected MODEL or --dummy, got {args.model} and {args.dummy}")
    parse_words("--dummy", args.dummy or _DUMMY, list(CONFIGS))
    quick = args.quick
    contexts = args.contexts or ("0" if quick else "0,2048,8192")
    settings = ModelSettings(
        dummy=args.dummy or _DUMMY,
        formats=_pairs(args.formats),
        kv_dtypes=parse_words(
            "--kv-dtype",
            ",".join(KV_DTYPES) if args.kv_dtype == "all" else args.kv_dtype,
            KV_DTYPES,
        ),
        prompts=parse_counts(
            "--prompts", args.prompts or ("128" if quick else "128,512,2048"), 8192
        ),
        contexts=parse_counts("--contexts", contexts, 16384 - 64, least=0),
        batches=parse_counts("--batches", args.batches or ("1,4" if quick else "1,2,4,8"), 64),
        threads=_threads(args),
        cold_mib=128 if quick else 512,
        quick=quick,
    )
    return settings if args.model is None else _of_model(args, settings)


def engine_settings(args: argparse.Namespace) -> EngineSettings:
    """The settings that the arguments of `bench engine` ask for; ValueError names a wrong one."""
    from bitnet_ops.bench.run_engine import EngineSettings

    parse_words("--dummy", args.dummy, list(CONFIGS))
    quick, pairs = args.quick, _pairs(args.formats)
    if len(pairs) != 1:
        raise ValueError(f"--formats: expected one pair such as 2bit+int8, got {args.formats}")
    prompt = (256 if quick else 2048) if args.prompt is None else args.prompt
    if not 1 <= prompt <= 1 << 16:
        raise ValueError(f"--prompt: expected 1 to {1 << 16}, got {prompt}")
    streams = args.streams or ("1,4,16" if quick else "1,2,4,8,16,32,64")
    return EngineSettings(
        dummy=args.dummy,
        formats=pairs[0],
        kv_dtype=args.kv_dtype,
        streams=parse_counts("--streams", streams, 64),
        contexts=parse_counts(
            "--contexts", args.contexts or ("128" if quick else "128,2048"), 16000
        ),
        prompt=prompt,
        threads=_threads(args),
        cold_mib=128 if quick else 512,
        quick=quick,
    )


def _of_model(args: argparse.Namespace, settings: ModelSettings) -> ModelSettings:
    """`settings` for the model args.model: within its context where nothing was asked for."""
    from bitnet_ops.bench.run_model import DECODED
    from bitnet_ops.language_model import load

    lm = load(args.model, weight_format="canonical", head_format="stored")  # nothing is copied
    if lm.config.embedding_only:
        raise ValueError(f"MODEL: expected one that generates, got an embedding model {lm.path}")
    most = lm.config.max_position_embeddings
    for option, asked, counts, room in (
        ("--prompts", args.prompts, settings.prompts, 0),
        ("--contexts", args.contexts, settings.contexts, DECODED),
    ):
        if asked and max(counts) + room > most:
            raise ValueError(
                f"{option}: expected at most {most - room}, for the model has {most} positions, "
                f"got {max(counts)}"
            )
    return dataclasses.replace(
        settings,
        model=str(lm.path),
        prompts=tuple(n for n in settings.prompts if n <= most) or (most // 2,),
        contexts=tuple(n for n in settings.contexts if n + DECODED <= most),
    )


def _goal_settings(args: argparse.Namespace) -> OpsSettings:
    """As for `bench ops`, of the shapes of one model that the goals speak of."""
    from bitnet_ops.bench.page.goals import DUMMIES

    if args.shapes not in DUMMIES:
        raise ValueError(
            f"--shapes: expected with --check {' or '.join(DUMMIES)}, got {args.shapes}"
        )
    return ops_settings(args)


def _run_page(args: argparse.Namespace) -> int:
    from bitnet_ops.bench.page import measure, render

    page = Path(args.page or _PAGE)
    if args.page is None:
        page.parent.mkdir(exist_ok=True)
    try:
        measure.check(page)
        if args.stored:
            render.write(page)
        else:
            data = None if args.data is None else Path(args.data)
            with progress_line() as progress:
                folder = measure.write(page, progress, quick=args.quick, data=data)
    except ValueError as error:
        raise UsageError(f"bench page: {error}") from error
    print(f"wrote {page}")
    if not args.stored:
        print(f"this machine's figures and plots: {folder}")
    return 0


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 0, or 1 when a result was wrong or a goal missed."""
    from bitnet_ops.bench import report, run_engine, run_model, run_ops
    from bitnet_ops.bench.page import goals
    from bitnet_ops.bench.pinning import pinned

    if args.kind == "page":
        return _run_page(args)
    settings: Any
    measure: Callable[..., dict[str, Any]]
    try:
        if args.kind == "ops" and args.check:
            settings, measure = _goal_settings(args), goals.run
        elif args.kind == "ops":
            settings, measure = ops_settings(args), run_ops.run
        elif args.kind == "engine":
            settings, measure = engine_settings(args), run_engine.run
        else:
            settings, measure = model_settings(args), run_model.run
        require_output(args.output, replace=args.force)
    except ValueError as error:
        if type(error) is not ValueError:  # a model that cannot be read
            raise
        raise UsageError(f"bench {args.kind}: {error}") from error
    with progress_line() as progress, pinned():
        result = measure(settings, progress)
    if args.kind == "ops" and args.check:
        lines = [*report.header_lines(result), "", *result["lines"]]
    else:
        lines = report.lines(result)
    print(report.as_json(result) if args.json else "\n".join(lines))
    if args.output:
        report.write_json(result, args.output, replace=args.force)
    return 0 if result["ok"] else 1


def require_output(output: str | None, *, replace: bool) -> None:
    """Reject a report that could not be written, before minutes are spent on it."""
    from bitnet_ops.bench import report
    from bitnet_ops.formats import destination

    if output:
        file = Path(output)
        if not file.absolute().parent.is_dir() or not os.access(file.absolute().parent, os.W_OK):
            raise ValueError(f"--output: expected a file in a directory to write to, got {file}")
        destination.check(file, report.REPORT_FILE, replace=replace)


@contextmanager
def progress_line() -> Iterator[Progress]:
    """What is being measured, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        # rich redraws from a thread of its own; a slow rate keeps it out of the measurements
        yield lambda text: status.update(text, speed=0.1)
