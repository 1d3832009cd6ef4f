"""`bitnet-ops bench model`: arguments of the benchmark of a whole model.

It must not know how anything is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from bitnet_ops.bench import names
from bitnet_ops.bench.shapes import parse_counts, parse_words
from bitnet_ops.cli.arguments import add_force, add_json
from bitnet_ops.dummy.configs import CONFIGS

if TYPE_CHECKING:
    from bitnet_ops.bench import run_model

DESCRIPTION = (
    "Time prefill and decode of a model, or of a synthetic one with random weights, against "
    "reading its bytes and against the int8 peak, both alternating with it; with the time by layer "
    "part and other engines in the same run."
)
_DEFAULT_FORMATS = "auto+int8"
_DUMMY = "2b-4t"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench model`."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a converted model (default: a synthetic one)"
    )
    parser.add_argument(
        "--dummy", help=f"which synthetic model: {', '.join(CONFIGS)} (default: {_DUMMY})"
    )
    parser.add_argument(
        "--formats",
        default=_DEFAULT_FORMATS,
        help="pairs of weight and head format such as 2bit+int8,1.6bit+int4; the first one gets "
        f"every measurement (default: {_DEFAULT_FORMATS})",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=names.CACHES,
        default=names.CACHES[0],
        help=f"type of the KV cache (default: {names.CACHES[0]})",
    )
    parser.add_argument("--prompts", help="tokens of the prompts (default: 128,512,2048)")
    parser.add_argument("--contexts", help="tokens behind which to decode (default: 0,2048,8192)")
    parser.add_argument("--batches", help="sequences decoded together (default: 1,2,4,8)")
    parser.add_argument("-t", "--threads", help="thread counts such as 1,2 (default: 1 and all)")
    parser.add_argument(
        "--rivals",
        default="auto",
        help=f"of {', '.join(names.RIVALS)}, or none; auto: hf-bf16, litespark and llama-cpp where "
        "they are installed",
    )
    parser.add_argument(
        "--rival-seconds",
        type=float,
        default=60.0,
        help="leave out a figure of another engine that would take longer (default: 60)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
    add_outputs(parser)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add where `bench ops` and `bench model` put what they measured."""
    add_json(parser)
    parser.add_argument("--output", metavar="FILE", help="also write everything to FILE, as JSON")
    parser.add_argument("--plots", metavar="DIR", help="also draw PNG plots into DIR (matplotlib)")
    add_force(parser, "an earlier report or plot")


def _counts(option: str, text: str, most: int, least: int = 1) -> tuple[int, ...]:
    if least == 0:
        words = text.split(",")
        rest = [w for w in words if w != "0"]
        found = parse_counts(option, ",".join(rest), most) if rest else []
        return tuple(sorted({*([0] if "0" in words else []), *found}))
    return tuple(parse_counts(option, text, most))


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for word in text.split(","):
        weight_format, plus, head = word.partition("+")
        if not plus:
            raise ValueError(f"--formats: expected pairs such as 2bit+int8, got '{word}'")
        weight_format = names.USUAL if weight_format == "auto" else weight_format
        parse_words("--formats", weight_format, names.FORMATS)
        parse_words("--formats", head, names.HEAD_FORMATS)
        pairs.append((weight_format, head))
    return tuple(dict.fromkeys(pairs))


def _rivals(text: str, *, own_model: bool) -> tuple[str, ...]:
    if text == "none" or (own_model and text == "auto"):
        return ()
    if own_model:
        raise ValueError(
            f"--rivals: expected none with MODEL, got {text}; other engines run on the synthetic "
            "models of --dummy"
        )
    if text == "auto":
        return ("hf-bf16", "litespark", "llama-cpp")
    return tuple(parse_words("--rivals", text, list(names.RIVALS)))


def settings_of(args: argparse.Namespace) -> run_model.Settings:
    """The settings that the arguments ask for; ValueError names a wrong one."""
    import torch

    from bitnet_ops.bench import run_model

    if args.model is not None and args.dummy is not None:
        raise ValueError(f"expected MODEL or --dummy, got {args.model} and {args.dummy}")
    dummy = args.dummy or _DUMMY
    parse_words("--dummy", dummy, list(CONFIGS))
    if not 0 < args.rival_seconds <= 3600:
        raise ValueError(
            f"--rival-seconds: expected more than 0 and at most 3600, got {args.rival_seconds}"
        )
    quick, all_threads = args.quick, torch.get_num_threads()
    threads = args.threads or (f"1,{all_threads}" if all_threads > 1 else "1")
    prompts = _counts("--prompts", args.prompts or ("128" if quick else "128,512,2048"), 8192)
    given = args.contexts or ("0" if quick else "0,2048,8192")
    contexts = _counts("--contexts", given, 16000, least=0)
    settings = run_model.Settings(
        dummy=dummy,
        formats=_pairs(args.formats),
        kv_dtype=args.kv_dtype,
        prompts=prompts,
        contexts=contexts,
        batches=_counts("--batches", args.batches or ("1,4" if quick else "1,2,4,8"), 64),
        threads=_counts("--threads", threads, 1024),
        rivals=_rivals(args.rivals, own_model=args.model is not None),
        rival_seconds=args.rival_seconds,
        cold_mib=128 if quick else 512,
        quick=quick,
    )
    return settings if args.model is None else _of_model(args, settings)


def _of_model(args: argparse.Namespace, settings: run_model.Settings) -> run_model.Settings:
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
