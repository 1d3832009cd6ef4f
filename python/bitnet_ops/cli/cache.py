"""`bitnet-ops cache list|prune`: conversions that loading has kept, and the removal of old ones."""

from __future__ import annotations

import argparse
import time
from typing import Any

from bitnet_ops.cli.arguments import add_json, integer
from bitnet_ops.cli.terminal import print_result
from bitnet_ops.errors import counted

_DAY_S = 86400
_DAYS = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments to `parser`."""
    parser.description = (
        "Checkpoints and GGUF files that were named to generate, chat and the like are converted "
        "once and kept. list shows these conversions, prune removes those that nothing has loaded "
        "for a month. Whatever is removed is made again when it is named again."
    )
    parser.add_argument("action", choices=("list", "prune"), metavar="list|prune")
    parser.add_argument(
        "--days",
        type=integer(0, 36500),
        default=_DAYS,
        metavar="N",
        help=f"prune: not loaded for N days (default {_DAYS}; 0 removes all)",
    )
    parser.add_argument("--cache", metavar="DIR", help="instead of $BITNET_OPS_CACHE or ~/.cache")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; returns 0."""
    from bitnet_ops.conversions import conversions, prune
    from bitnet_ops.loading.resolve import cache_directory

    cache = cache_directory(args.cache)
    asked = args.action == "prune"
    found = prune(cache, args.days * _DAY_S) if asked else conversions(cache)
    rows = [{"path": str(one.folder), "bytes": one.bytes, "used": int(one.used)} for one in found]
    report = {"cache": str(cache), "action": args.action, "conversions": rows}
    print_result(report, _lines(report), as_json=args.json)
    return 0


def _lines(report: dict[str, Any]) -> list[str]:
    rows, what = report["conversions"], "removed" if report["action"] == "prune" else "kept"
    total = sum(row["bytes"] for row in rows)
    days = [time.strftime("%Y-%m-%d", time.localtime(row["used"])) for row in rows]
    return [
        *(
            f"{row['bytes'] / 2**20:10,.1f} MiB  {day}  {row['path']}"
            for row, day in zip(rows, days, strict=True)
        ),
        f"{what}: {counted(len(rows), 'conversion')}, {total / 2**20:,.1f} MiB, in "
        f"{report['cache']}",
    ]
