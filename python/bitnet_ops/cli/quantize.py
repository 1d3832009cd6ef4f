"""`bitnet-ops quantize SRC DST`: the arguments of `quantize`."""

from __future__ import annotations

import argparse
from functools import partial

from bitnet_ops.cli.arguments import add_force, add_json
from bitnet_ops.cli.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments to `parser`."""
    parser.description = (
        "Ternarise the bf16, fp16 or fp32 masters of a Hugging Face causal model that was trained "
        "for BitNet b1.58. Masters that show no such training are rejected, with the statistics."
    )
    parser.add_argument("source", metavar="SRC", help="folder with config.json and safetensors")
    parser.add_argument("destination", metavar="DST", help="folder to create")
    parser.add_argument(
        "--form",
        choices=("bin", "packed"),
        default="bin",
        help="bin: model.bin (default); packed: a Hugging Face folder, autobitlinear offline",
    )
    parser.add_argument(
        "--text", metavar="FILE", help="decide by the loss on this text, rounded and unrounded"
    )
    parser.add_argument(
        "--assume-trained",
        action="store_true",
        help="go on although nothing shows training for b1.58: the result will talk nonsense",
    )
    parser.add_argument("--verify", action="store_true", help="as of convert (form bin)")
    add_force(parser, "an earlier result at DST")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; returns 0. A ConvertError says why not; the command line prints it."""
    from bitnet_ops.convert.quantize import quantize

    work = partial(
        quantize,
        args.source,
        args.destination,
        form=args.form,
        text=args.text,
        assume_trained=args.assume_trained,
        verify=args.verify,
        force=args.force,
    )
    return show(work, f"ternarising {args.source}", as_json=args.json, wrote=args.destination)
