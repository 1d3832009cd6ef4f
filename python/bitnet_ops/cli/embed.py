"""`bitnet-ops embed MODEL TEXT...`: one vector a text, as lines of JSON or as cosines.

It must not know how vectors are made: LanguageModel does that.
"""

from __future__ import annotations

import argparse
import json

from bitnet_ops.cli import streams
from bitnet_ops.cli.generate import _integer, add_model_arguments, open_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Embed texts: the hidden state of the last token at length 1. Each line of the output is a "
        'JSON object {"text", "tokens", "embedding"}; with --similarity a table of cosines.'
    )
    parser.add_argument("model", metavar="MODEL", help="a converted model (directory or .bin)")
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="texts; - reads lines from stdin")
    add_model_arguments(parser)
    parser.add_argument(
        "--dimensions", type=_integer(1), metavar="N", help="keep the first N (default: all)"
    )
    parser.add_argument(
        "--similarity", action="store_true", help="print the cosine of every pair instead"
    )


def run(args: argparse.Namespace) -> int:
    lm = open_model(args.model, args)
    texts = _texts(args.texts)
    ids = [lm.encode(text) for text in texts]
    vectors = lm.embed(ids, dimensions=args.dimensions)
    if args.similarity:
        for row in (vectors @ vectors.T).tolist():
            print("\t".join(f"{value:.6f}" for value in row))
        return 0
    for text, tokens, vector in zip(texts, ids, vectors.tolist(), strict=True):
        value = {"text": text, "tokens": len(tokens), "embedding": vector}
        print(json.dumps(value, ensure_ascii=False))
    return 0


def _texts(given: list[str]) -> list[str]:
    texts: list[str] = []
    for text in given:
        if text == "-":
            texts += streams.read_stdin("embed").splitlines()
        else:
            texts.append(streams.utf8_argument("embed", "TEXT", text))
    return texts
