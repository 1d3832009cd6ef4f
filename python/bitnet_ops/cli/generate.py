"""`bitnet-ops generate [MODEL] PROMPT`: stream a continuation; also the options chat shares.

Text goes to stdout, figures to stderr; --json gives one object on stdout instead. It must not know
how text is made: LanguageModel does that.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitnet_ops.language_model import LanguageModel, TextStream


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bitnet-ops generate [MODEL] PROMPT [options]"
    parser.add_argument(
        "positionals",
        nargs="+",
        metavar="[MODEL] PROMPT",
        help="a converted model (directory or .bin; default: the embedded demo), and the text to "
        "continue (- reads it from stdin)",
    )
    add_model_arguments(parser)
    add_sampling_arguments(parser, max_new_tokens=128)
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end of text")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a stream")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--threads", type=_integer(1, 1024), metavar="N", help="default: torch's choice"
    )
    kinds = ("float32", "bfloat16", "int8")
    group.add_argument("--kv-dtype", choices=kinds, default="bfloat16", help="default bfloat16")
    group.add_argument(
        "--weight-format",
        choices=("auto", "2bit", "1.6bit", "canonical"),
        default="auto",
        help="layout of ternary weights in memory; the text is the same (default auto: 2bit)",
    )
    group.add_argument(
        "--cache",
        action="store_true",
        help="keep the prepared model in a file for later runs (in BITNET_OPS_CACHE if set, which "
        "also switches this on; safe to delete)",
    )
    group.add_argument(
        "--lora", metavar="DIR", help="run the LoRA adapter of a PEFT directory beside the model"
    )
    group.add_argument(
        "--head-format",
        choices=("int8", "int4", "bf16", "float32", "stored"),
        default="int8",
        help="of the output head and a tied embedding (default int8; stored: as in the file)",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    group = parser.add_argument_group("sampling (default: greedy)")
    add: Callable[..., Any] = group.add_argument
    add(
        "-n",
        "--max-new-tokens",
        type=_integer(0),
        default=max_new_tokens,
        metavar="N",
        help=f"default {max_new_tokens}",
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    add("--top-k", type=_integer(0), default=0, metavar="K", help="0 keeps all (default)")
    add("--top-p", type=float, default=1.0, metavar="P", help="1 keeps all (default)")
    add("--min-p", type=float, default=0.0, metavar="P", help="0 keeps all (default)")
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="1 is none (default)")
    add("--seed", type=_integer(0), metavar="S", help="makes sampling repeatable")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable")


def _integer(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """An argparse type: an integer from `minimum` to `maximum`, if there is one."""
    limits = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"expected an integer {limits}, got {text!r}")
        return value

    return convert


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of LanguageModel.stream that the command line gives."""
    names = "max_new_tokens temperature top_k top_p min_p repetition_penalty seed stop".split()
    return {name: getattr(args, name) for name in names}


def open_model(path: str | None, args: argparse.Namespace) -> LanguageModel:
    """Load the model under the thread and cache options; remarks about it go to stderr."""
    import torch

    from bitnet_ops.kv_cache import KV_DTYPES
    from bitnet_ops.language_model import load

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    lm = load(
        path,
        kv_dtype=KV_DTYPES[args.kv_dtype],
        weight_format=args.weight_format,
        head_format=args.head_format,
        cache=args.cache or None,
        lora=args.lora,
    )
    for note in lm.config.notes:
        print(f"note: {note}", file=sys.stderr)
    return lm


def figures(stream: TextStream) -> str:
    """One line for people: prompt, time to first token, speed."""
    import torch

    from bitnet_ops import _runtime

    t = stream.timing
    reused = f" ({t.reused_tokens} cached)" if t.reused_tokens else ""
    speed = f", {t.decode_tokens_per_s:.1f} tokens/s" if t.decoded_tokens else ""
    return (
        f"prompt {t.prompt_tokens} tokens{reused} | first token {1000 * t.first_token_s:.1f} ms | "
        f"{t.new_tokens} tokens{speed} | {_runtime.isa()}, "
        f"{torch.get_num_threads()} threads"
    )


def run(args: argparse.Namespace) -> int:
    if len(args.positionals) > 2:
        raise ValueError(
            f"generate: expected [MODEL] PROMPT, got {len(args.positionals)} arguments; "
            "put the prompt in quotes"
        )
    model, prompt = [None, *args.positionals][-2:]
    if prompt == "-":
        prompt = sys.stdin.read()
    began = time.perf_counter()
    lm = open_model(model, args)
    load_s = time.perf_counter() - began
    stream = lm.stream(prompt, ignore_eos=args.ignore_eos, **sampling_options(args))
    if args.json:
        text = "".join(stream)
        print(json.dumps(_report(lm, args, prompt, text, stream, load_s), ensure_ascii=False))
        return 0
    return _print_stream(prompt, stream)


def _print_stream(prompt: str, stream: TextStream) -> int:
    status, shown = 0, False
    try:
        for piece in stream:
            print(piece if shown else prompt + piece, end="", flush=True)
            shown = True  # the prompt waits for the first token, so that an error stands alone
    except KeyboardInterrupt:
        status = 130
    print("" if shown else prompt, flush=True)
    print(figures(stream), file=sys.stderr)
    return status


def _report(
    lm: LanguageModel,
    args: argparse.Namespace,
    prompt: str,
    text: str,
    stream: TextStream,
    load_s: float,
) -> dict[str, Any]:
    import torch

    from bitnet_ops import _runtime

    t, g = stream.timing, stream.generation
    options = sampling_options(args)
    return {
        "model": str(lm.path),
        "prompt": prompt,
        "text": text,
        "token_ids": g.token_ids,
        "finish_reason": g.finish_reason,
        "sampling": {**options, "seed": g.seed},
        "prompt_tokens": t.prompt_tokens,
        "new_tokens": t.new_tokens,
        "load_s": load_s,
        "time_to_first_token_s": t.first_token_s,
        "decode_s": t.decode_s,
        "decode_tokens_per_s": t.decode_tokens_per_s,
        "isa": _runtime.isa(),
        "threads": torch.get_num_threads(),
        "kv_dtype": args.kv_dtype,
        "weight_format": lm.model.weight_format,
        "head_format": lm.model.head.head_format,
        "lora": args.lora,
    }
