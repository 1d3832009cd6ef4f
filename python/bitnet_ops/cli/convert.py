"""`bitnet-ops convert SRC DST`: the arguments of the converter.

Everything it does is one call of `convert`.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from bitnet_ops.cli.arguments import UsageError, add_force, add_json
from bitnet_ops.cli.terminal import show

if TYPE_CHECKING:
    from bitnet_ops.convert.progress import Progress
    from bitnet_ops.convert.report import ConvertReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments to `parser`."""
    parser.description = (
        "Convert a Hugging Face checkpoint (BitNet b1.58, 1bitLLM, ternary Llama, Qwen, Gemma 3, "
        "MiniCPM, TriLM, Bonsai; docs/reference/families.md), a GGUF file or an older .bin file to "
        "a folder with model.bin, the tokenizer and report.json."
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="folder with config.json and safetensors, a .gguf file, a Hugging Face id, or a "
        ".bin file to write anew",
    )
    parser.add_argument("destination", metavar="DST", help="folder to create")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare weights and full logits with the source (transformers, or a plain forward)",
    )
    parser.add_argument("--text", metavar="FILE", help="compare on this text (with --verify)")
    parser.add_argument(
        "--lora", metavar="DIR", help="merge a PEFT adapter into the masters, before ternarising"
    )
    add_force(parser, "an earlier result at DST")
    parser.add_argument(
        "--assume-online",
        action="store_true",
        help="ternarise a checkpoint that has no quantization_config, on your word",
    )
    parser.add_argument(
        "--format",
        choices=("v2", "v1"),
        default="v2",
        help="version of model.bin (FORMAT.md); v1 for readers that know no other",
    )
    parser.add_argument(
        "--i2s-layout",
        choices=("a", "b", "c"),
        help="of a GGUF file's I2_S tensors: a (x86, the default), b (ARM), c (newer x86 files)",
    )
    parser.add_argument(
        "--q2-block",
        type=int,
        choices=(64, 128),
        help="weights that share a scale in a GGUF file's tensors of type number 42, where its "
        "sizes do not tell: 64 (Q2_0) or 128 (Prism's earlier files)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help='take the tokenizer files from DIR instead of a GGUF file\'s metadata, or "none"',
    )
    parser.add_argument(
        "--mmproj",
        metavar="FILE",
        help="GGUF file with the model's tower for images (by default: the checkpoint's own, or "
        "the mmproj file beside a GGUF file)",
    )
    parser.add_argument(
        "--no-vision",
        action="store_true",
        help="leave the tower for images out: the model reads texts alone",
    )
    parser.add_argument(
        "--draft-from",
        metavar="BASE",
        help="base model to take a draft head from (default: the source's own)",
    )
    parser.add_argument("--no-draft", action="store_true", help="leave the draft head out")
    parser.add_argument(
        "--draft-feed",
        choices=("after", "before"),
        help="feed the head's next draft its layer's output after its norm (the default) or before",
    )
    parser.add_argument(
        "--trust-scales",
        action="store_true",
        help="convert packed weights although their scales look as if taken in the wrong sense",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read pytorch_model*.bin where there are no safetensors (tensors alone, no code)",
    )
    add_json(parser)


def check(args: argparse.Namespace) -> None:
    """Reject options that ask for nothing."""
    if args.text is not None and not args.verify:
        raise UsageError("convert: expected --text only with --verify, got it alone; add --verify")
    if args.mmproj is not None and args.no_vision:
        raise UsageError("convert: expected --mmproj or --no-vision, got both; choose one of them")
    if args.no_draft and (args.draft_from is not None or args.draft_feed is not None):
        other = "--draft-from" if args.draft_from is not None else "--draft-feed"
        raise UsageError(f"convert: expected {other} or --no-draft, got both; choose one of them")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; returns 0. A ConvertError says why not; the command line prints it."""
    doing = f"converting {args.source}"
    return show(partial(_convert, args), doing, as_json=args.json, wrote=args.destination)


def _convert(args: argparse.Namespace, progress: Progress | None) -> ConvertReport:
    from bitnet_ops.convert import convert
    from bitnet_ops.loading.hub import local_path

    return convert(
        local_path(args.source),
        args.destination,
        verify=args.verify,
        text=args.text,
        force=args.force,
        format_version=int(args.format.removeprefix("v")),
        assume_online=args.assume_online,
        trust_scales=args.trust_scales,
        allow_pickle=args.allow_pickle,
        lora=args.lora,
        i2s_layout=args.i2s_layout,
        q2_block=args.q2_block,
        tokenizer=args.tokenizer,
        mmproj=args.mmproj,
        vision=not args.no_vision,
        draft_from=None if args.draft_from is None else local_path(args.draft_from),
        draft=not args.no_draft,
        draft_feed=args.draft_feed,
        progress=progress,
    )
