"""`python -m benchmarks.update_performance PAGE`: `bench page` with other engines beside.

They run in the large model's part, those that are installed here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import compare_engines, engines
from bitnet_ops.bench.limits import MachineLimits
from bitnet_ops.bench.measure import Row
from bitnet_ops.bench.page import measure, render
from bitnet_ops.bench.run_model import ModelBench
from bitnet_ops.cli.bench import progress_line

_ENGINE_SECONDS = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    name = "python -m benchmarks.update_performance"
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    parser.add_argument("page", type=Path, help="for instance docs/notes/performance.md")
    parser.add_argument("--stored", action="store_true", help="measure nothing, write the page")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="keep the JSON of every step in DIR; a step whose file is there is not run again",
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to try the page itself")
    args = parser.parse_args(argv)
    asked = () if args.quick else compare_engines.USUAL_ENGINES

    def engine_rows(bench: ModelBench, limits: list[MachineLimits]) -> list[Row]:
        return compare_engines.all_rows(bench, limits, asked, _ENGINE_SECONDS)

    try:
        measure.check(args.page)
        if args.stored:
            render.write(args.page)
        else:
            with progress_line() as progress:
                measure.write(
                    args.page,
                    progress,
                    quick=args.quick,
                    data=args.data,
                    engine_rows=engine_rows,
                    missing=engines.missing(asked),
                )
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {args.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
