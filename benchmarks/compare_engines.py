"""`python -m benchmarks.compare_engines`: other engines beside ours on a model of one shape.

Decode at context 0 alternates with ours; a prompt is timed once. Engines that are not installed are
named and left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from benchmarks import engines
from benchmarks.engines import ENGINES, OtherEngine
from bitnet_ops.bench import report, run_model
from bitnet_ops.bench.harness import Budget, Timed, digits, interleave, paired_ratios, summarize
from bitnet_ops.bench.limits import MachineLimits
from bitnet_ops.bench.pinning import pinned, unpinned, use_threads
from bitnet_ops.bench.report import Row, Table, number
from bitnet_ops.bench.run_model import DECODED, ModelBench, ModelSettings, time_once
from bitnet_ops.bench.shapes import USUAL, parse_counts, parse_words
from bitnet_ops.cli.arguments import add_force, add_json
from bitnet_ops.cli.bench import require_output
from bitnet_ops.cli.terminal import progress_line
from bitnet_ops.dummy.configs import CONFIGS, GROUPED

USUAL_ENGINES = ("hf-bf16", "litespark", "llama-cpp")
_PILOT = 16  # tokens of a prompt that no engine takes long over: it predicts the longer ones


def engine_rows(
    bench: ModelBench, limits: MachineLimits, engine: OtherEngine, max_seconds: float
) -> list[Row]:
    """The engine's decode step at context 0, alternating with ours, and its prefill.

    A figure that would take longer than `max_seconds` is left out.
    """
    use_threads(limits.threads)
    common = {"kind": "engine", "name": engine.name, "threads": limits.threads}
    ours, theirs = bench.model.decode_run(1, 0, DECODED), engine.decode_run(limits.threads)
    # a pause, so that threads of theirs that still spin do not take the CPUs from ours
    pause = Timed(lambda _: time.sleep(0.01))
    rounds = interleave([ours, theirs, pause], Budget(max_seconds / 4, 3, 16))
    ours_s, theirs_s, _ = rounds.usable()
    decode = {
        "what": "decode",
        "tokens": 1,
        "tokens_per_s": digits(1 / summarize(theirs_s).median),
        "speedup": digits(summarize(paired_ratios(theirs_s, ours_s)).median),
        "disturbed": rounds.disturbed,
    }
    rows, predicted = [common | decode], 0.0
    prompts = sorted({_PILOT, *bench.settings.prompts})
    for tokens, later in zip(prompts, [*prompts[1:], 0], strict=True):
        row: Row = common | {"what": "prefill", "tokens": tokens}
        if predicted > max_seconds:
            rows.append(row | {"note": f"left out: about {predicted:.0f} s"})
            continue
        seconds = time_once(engine.prefill_run(tokens, limits.threads))
        mine = time_once(bench.model.prefill_run(tokens))
        rate = {"tokens_per_s": digits(tokens / seconds), "speedup": digits(seconds / mine)}
        rows.append(row | rate)
        predicted = seconds * later / tokens
    return rows


def all_rows(
    bench: ModelBench, limits: Sequence[MachineLimits], names: Sequence[str], max_seconds: float
) -> list[Row]:
    """Every installed engine of `names` at the largest thread count."""
    rows = []
    most = max(limits, key=lambda one: one.threads)
    with unpinned():
        for engine in engines.installed(names, bench.settings.dummy):
            rows += engine_rows(bench, most, engine, max_seconds)
            engine.close()
    return rows


def engine_table(rows: Sequence[Row]) -> Table:
    """One line for each row of the kind "engine"."""
    cells = []
    for row in rows:
        measured = "tokens_per_s" in row
        notes = [row["note"]] if "note" in row else []
        cells.append(
            [
                *(str(row[name]) for name in ("name", "threads", "what", "tokens")),
                number(row["tokens_per_s"]) if measured else "-",
                number(row["speedup"]) if measured else "-",
                ", ".join(notes + ["disturbed"] * bool(row.get("disturbed"))),
            ]
        )
    titles = ["engine", "T", "what", "tokens", "its tok/s", "ours is x faster", "notes"]
    return "Other engines in this run, same threads", titles, cells


def main(argv: Sequence[str] | None = None) -> int:
    import torch

    name = "python -m benchmarks.compare_engines"
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    # the other engines are given BitNet's network with one scale a matrix, whatever the sizes
    names = [dummy for dummy in CONFIGS if dummy not in GROUPED]
    parser.add_argument("--dummy", choices=names, default="2b-4t", help="default: 2b-4t")
    parser.add_argument(
        "--engines",
        default=",".join(USUAL_ENGINES),
        help=f"of {', '.join(ENGINES)}; default: {', '.join(USUAL_ENGINES)}",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="for one figure (default: 60)")
    parser.add_argument("--prompts", default="128,512,2048", help="default: 128,512,2048")
    parser.add_argument("-t", "--threads", help="default: all")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
    add_json(parser)
    parser.add_argument("--output", metavar="FILE", help="also write everything to FILE, as JSON")
    add_force(parser, "an earlier report")
    args = parser.parse_args(argv)
    try:
        asked = parse_words("--engines", args.engines, list(ENGINES))
        settings = ModelSettings(
            dummy=args.dummy,
            formats=((USUAL, "int8"),),
            prompts=parse_counts("--prompts", args.prompts, 8192),
            contexts=(0,),
            batches=(1,),
            threads=parse_counts("--threads", args.threads or str(torch.get_num_threads()), 1024),
            cold_mib=128 if args.quick else 512,
            quick=args.quick,
        )
        require_output(args.output, replace=args.force)
    except ValueError as error:
        parser.error(str(error))
    with progress_line() as progress, pinned():
        result = run_model.run(
            settings,
            progress,
            lambda bench, limits: all_rows(bench, limits, asked, args.seconds),
        )
    result["missing"] = engines.missing(asked)
    if args.output:
        report.write_json(result, args.output, replace=args.force)
    title, titles, cells = engine_table([row for row in result["rows"] if row["kind"] == "engine"])
    text = [*report.lines(result), "", title, *report.text_table(titles, cells)]
    text += [f"not installed here: {', '.join(result['missing'])}"] * bool(result["missing"])
    print(report.as_json(result) if args.json else "\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
