"""`bitnet-ops bench model`: arguments of the benchmark of a whole model.

It must not know how anything is measured.
"""

from __future__ import annotations

import argparse

import torch

from bitnet_ops import dummy
from bitnet_ops.bench import cases_other, run_model, weights
from bitnet_ops.bench.rivals import RIVALS
from bitnet_ops.bench.shapes import parse_counts, parse_words

DESCRIPTION = (
    "Time prefill and decode of a synthetic model, in memory and with random weights, against "
    "reading its bytes and against the int8 peak, both alternating with it; with the time by layer "
    "part and other engines in the same run."
)
FORCE_HELP = "replace earlier reports and plots"
_DEFAULT_FORMATS = "auto+int8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench model`."""
    parser.add_argument(
        "--dummy",
        default="2b-4t",
        help=f"which synthetic model: {', '.join(dummy.CONFIGS)} (default: 2b-4t)",
    )
    parser.add_argument(
        "--formats",
        default=_DEFAULT_FORMATS,
        help="pairs of weight and head format such as 2bit+int8,1.6bit+int4; the first one gets "
        f"every measurement (default: {_DEFAULT_FORMATS})",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=cases_other.CACHES,
        default=cases_other.CACHES[0],
        help=f"type of the KV cache (default: {cases_other.CACHES[0]})",
    )
    parser.add_argument("--prompts", help="tokens of the prompts (default: 128,512,2048)")
    parser.add_argument("--contexts", help="tokens behind which to decode (default: 0,2048,8192)")
    parser.add_argument("--batches", help="sequences decoded together (default: 1,2,4,8)")
    parser.add_argument("--threads", help="thread counts such as 1,2 (default: 1 and all)")
    parser.add_argument(
        "--rivals",
        default="auto",
        help=f"of {', '.join(RIVALS)}, or none; auto: hf-bf16, litespark and llama-cpp where they "
        "are installed",
    )
    parser.add_argument(
        "--rival-seconds",
        type=float,
        default=60.0,
        help="leave out a figure of another engine that would take longer (default: 60)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")
    parser.add_argument("--plots", metavar="DIR", help="also draw PNG plots into DIR (matplotlib)")
    parser.add_argument("--force", action="store_true", help=FORCE_HELP)


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
        weight_format = weights.USUAL if weight_format == "auto" else weight_format
        parse_words("--formats", weight_format, weights.FORMATS)
        parse_words("--formats", head, cases_other.HEAD_FORMATS)
        pairs.append((weight_format, head))
    return tuple(dict.fromkeys(pairs))


def _rivals(text: str) -> tuple[str, ...]:
    if text == "none":
        return ()
    if text == "auto":
        return ("hf-bf16", "litespark", "llama-cpp")
    return tuple(parse_words("--rivals", text, list(RIVALS)))


def settings_of(args: argparse.Namespace) -> run_model.Settings:
    """The settings that the arguments ask for; ValueError names a wrong one."""
    parse_words("--dummy", args.dummy, list(dummy.CONFIGS))
    if not 0 < args.rival_seconds <= 3600:
        raise ValueError(
            f"--rival-seconds: expected more than 0 and at most 3600, got {args.rival_seconds}"
        )
    quick, all_threads = args.quick, torch.get_num_threads()
    threads = args.threads or (f"1,{all_threads}" if all_threads > 1 else "1")
    return run_model.Settings(
        dummy=args.dummy,
        formats=_pairs(args.formats),
        kv_dtype=args.kv_dtype,
        prompts=_counts("--prompts", args.prompts or ("128" if quick else "128,512,2048"), 8192),
        contexts=_counts(
            "--contexts", args.contexts or ("0" if quick else "0,2048,8192"), 16000, least=0
        ),
        batches=_counts("--batches", args.batches or ("1,4" if quick else "1,2,4,8"), 64),
        threads=_counts("--threads", threads, 1024),
        rivals=_rivals(args.rivals),
        rival_seconds=args.rival_seconds,
        cold_mib=128 if quick else 512,
        quick=quick,
    )
