"""`bitnet-ops verify FILE SOURCE`: does a converted model still compute what its source does?"""

from __future__ import annotations

import argparse

from bitnet_ops.cli.arguments import add_json
from bitnet_ops.cli.terminal import print_result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments to `parser`."""
    parser.description = (
        "Compare a converted model with the checkpoint it came from: every ternary weight and "
        "scale, and full logits, top-1 and perplexity on a text."
    )
    parser.add_argument("file", metavar="FILE", help="model.bin, or the folder that holds it")
    parser.add_argument("source", metavar="SOURCE", help="the folder or GGUF file it came from")
    parser.add_argument("--text", metavar="FILE", help="measure on this text, not on the built-in")
    parser.add_argument("--lora", metavar="DIR", help="the adapter that was merged, if one was")
    parser.add_argument(
        "--mmproj", metavar="FILE", help="the tower for images that was named, if one was"
    )
    parser.add_argument(
        "--draft-from",
        metavar="BASE",
        help="the base model that the draft head was taken from, if it was",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand: 0 where they agree, 1 (ConvertError) where they do not."""
    from bitnet_ops.convert.errors import ConvertError
    from bitnet_ops.convert.verify import lines, verify

    beside = {"lora": args.lora, "mmproj": args.mmproj, "draft_from": args.draft_from}
    result = verify(args.file, args.source, text=args.text, **beside)
    print_result(result, lines(result), as_json=args.json)
    failures = result["verification"]["failures"]
    if failures:
        raise ConvertError(
            "verification-failed",
            "verify: expected the file to agree with its source, got "
            + "; ".join(failures)
            + "; convert the source again",
        )
    return 0
