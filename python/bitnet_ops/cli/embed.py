"""`bitnet-ops embed MODEL TEXT...`: one vector a text, as lines of JSON or as cosines."""

from __future__ import annotations

import argparse

from bitnet_ops.cli.arguments import UsageError, add_json, integer
from bitnet_ops.cli.generate import MODEL_HELP, add_model_arguments, encoded, open_model
from bitnet_ops.cli.terminal import checked, print_json, print_text, read_stdin


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bitnet-ops embed MODEL TEXT... [options]"
    parser.description = (
        "Embed texts: the hidden state of the last token at length 1. Each line of the output is a "
        'JSON object {"text", "tokens", "embedding"}; with --similarity a table of cosines.'
    )
    parser.add_argument(
        "positionals",
        nargs="*",
        metavar="MODEL TEXT",
        help=f"a model ({MODEL_HELP}), then texts; - reads lines from stdin",
    )
    parser.add_argument("-m", "--model", metavar="MODEL", help="the model, by name")
    add_model_arguments(parser, drafts=False)
    parser.add_argument(
        "--dimensions", type=integer(1), metavar="N", help="keep the first N (default: all)"
    )
    parser.add_argument(
        "--similarity", action="store_true", help="print the cosine of every pair instead"
    )
    add_json(parser)


def check(args: argparse.Namespace) -> None:
    """Take MODEL off the positionals; what is left are the texts."""
    if args.model is None and args.positionals:
        args.model = args.positionals.pop(0)
    if args.model is None or not args.positionals:
        found = "neither" if args.model is None else f"only {args.model}"
        raise UsageError(f"embed: expected MODEL TEXT..., got {found}; see bitnet-ops embed --help")


def run(args: argparse.Namespace) -> int:
    texts = _texts(args.positionals)
    lm = open_model(args.model, args)
    ids = [encoded(lm, text) for text in texts]
    vectors = lm.embed(ids, dimensions=args.dimensions)
    cosines = (vectors @ vectors.T).tolist() if args.similarity else None
    rows = [
        {"text": text, "tokens": len(tokens), "embedding": vector}
        for text, tokens, vector in zip(texts, ids, vectors.tolist(), strict=True)
    ]
    if args.json:
        print_json({"model": str(lm.path), "texts": rows, "similarity": cosines})
    elif cosines is not None:
        for values in cosines:
            print_text("\t".join(f"{value:.6f}" for value in values), end="\n")
    else:
        for row in rows:
            print_json(row)
    return 0


def _texts(given: list[str]) -> list[str]:
    texts: list[str] = []
    for text in given:
        texts += read_stdin().splitlines() if text == "-" else [checked(text, "embed")]
    return texts
