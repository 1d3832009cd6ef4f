"""`bitnet-ops dummy NAME DST`: the arguments of the writer of synthetic models."""

from __future__ import annotations

import argparse

from bitnet_ops.cli.arguments import add_force, integer
from bitnet_ops.cli.terminal import print_lines
from bitnet_ops.dummy.configs import CONFIGS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments to `parser`."""
    parser.description = (
        "Write a directory with model.bin: random ternary weights in the shapes of a real model, "
        "to measure speed and loading. Its tokenizer has bytes for text, and its text means "
        "nothing."
    )
    parser.add_argument("name", choices=sorted(CONFIGS), metavar="NAME", help=", ".join(CONFIGS))
    parser.add_argument("destination", metavar="DST", help="directory to create")
    add_force(parser, "DST")
    parser.add_argument(
        "--seed", type=integer(0, 2**63 - 1), default=0, metavar="S", help="default 0"
    )


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; returns 0."""
    from bitnet_ops.convert.progress import progress_bar
    from bitnet_ops.dummy.model import write

    with progress_bar(f"writing {args.destination}") as progress:
        options = {"seed": args.seed, "force": args.force}
        file = write(args.name, args.destination, **options, progress=progress)
    print_lines([f"wrote {file}"])
    return 0
