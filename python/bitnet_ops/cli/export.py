"""`bitnet-ops export MODEL OUT.gguf`: the arguments of the exporter.

Everything it does is one call of `export_gguf`.
"""

from __future__ import annotations

import argparse
from functools import partial

from bitnet_ops.cli.arguments import add_force, add_json
from bitnet_ops.cli.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments to `parser`."""
    parser.description = (
        "Write a converted model as a GGUF file. Which program opens it depends on its type and on "
        "the architecture: the BitNets of microsoft/bitnet-b1.58-2B-4T open in bitnet.cpp alone, "
        "Qwen3 and Qwen3.5 do not open there. The report names the programs."
    )
    parser.add_argument("model", metavar="MODEL", help="converted folder, or model.bin")
    parser.add_argument("file", metavar="OUT.gguf", help="file to write")
    parser.add_argument(
        "--type",
        choices=("i2_s", "tq1_0", "tq2_0", "pq2_0"),
        default="i2_s",
        help="of the ternary matrices: i2_s (the default, exact: bitnet.cpp opens this, llama.cpp "
        "does not), tq1_0 or tq2_0 (llama.cpp: float16 scales, K %% 256 == 0), pq2_0 (PrismML's "
        "fork of llama.cpp alone: a float16 scale for 128 weights, as Bonsai models have them)",
    )
    parser.add_argument("--no-tokenizer", action="store_true", help="leave the vocabulary out")
    add_force(parser, "OUT.gguf")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; returns 0. A ConvertError says why not; the command line prints it."""
    from bitnet_ops.convert.gguf_export import export_gguf

    work = partial(
        export_gguf,
        args.model,
        args.file,
        type=args.type,
        tokenizer=not args.no_tokenizer,
        force=args.force,
    )
    return show(work, f"exporting {args.model}", as_json=args.json)
