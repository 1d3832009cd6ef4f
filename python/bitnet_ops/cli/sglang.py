"""`bitnet-ops sglang MODEL`: serve a model with SGLang's OpenAI-compatible server.

Converts what is no converted model, as `generate` does, and starts SGLang in this process's place.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from bitnet_ops.cli.arguments import add_threads, integer
from bitnet_ops.cli.child import run_until_it_ends
from bitnet_ops.cli.terminal import print_lines, say
from bitnet_ops.nn.storage import DEFAULT_HEAD_FORMAT, HEAD_FORMATS, current_head_format


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments to `parser`."""
    parser.usage = "bitnet-ops sglang MODEL [options] [-- options of SGLang]"
    parser.description = (
        "Start SGLang's OpenAI-compatible HTTP server on a model, with all that SGLang needs on a "
        "CPU. Needs sglang in the same environment (docs/guide/sglang.md). What stands behind -- "
        "is passed on to sglang.launch_server and wins over what is set here."
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="converted directory, .bin, checkpoint folder, .gguf, or Hugging Face id",
    )
    parser.set_defaults(passed_on=[])  # what stands behind --
    parser.set_defaults(options_of_others="; SGLang's options stand behind --")
    parser.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1")
    parser.add_argument(
        "--port", type=integer(1, 65535), default=30000, metavar="P", help="default 30000"
    )
    add_threads(parser, "$OMP_NUM_THREADS, else SGLang's choice; of each rank")
    parser.add_argument(
        "--head-format",
        choices=tuple(HEAD_FORMATS),
        type=current_head_format,
        default=DEFAULT_HEAD_FORMAT,
        help=f"of the output head (default {DEFAULT_HEAD_FORMAT})",
    )
    parser.add_argument(
        "--per-layer",
        action="store_true",
        help="serve a checkpoint folder as it is, by SGLang's own model code with our linears: "
        "slower, and for more than one rank or LoRA",
    )
    parser.add_argument(
        "--untested", action="store_true", help="try another version of sglang than those tested"
    )
    parser.add_argument(
        "--print", action="store_true", help="print the command and its environment; start nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; returns SGLang's exit status."""
    from bitnet_ops.conversions import resolve
    from bitnet_ops.integrations.sglang import launch, serving
    from bitnet_ops.loading.hub import local_path

    launch.check_version(args.untested)
    with tempfile.TemporaryDirectory(prefix="bitnet-ops-sglang-") as temporary:
        folder, name = Path(args.model), Path(args.model).resolve().name
        ranks = launch.ranks(args.passed_on)
        if args.per_layer:
            folder = local_path(args.model)
            launch.check_checkpoint(folder, ranks)
        else:
            launch.check_whole(ranks)
            launch.check_drafts(args.passed_on)
            file = resolve(args.model).file
            folder = serving.write_folder(file, Path(temporary), args.head_format)
            if parts := serving.left_alone(file):
                say(
                    f"SGLang serves texts by the decoder alone: the model's {' and '.join(parts)} "
                    "stays unused; bitnet-ops serve uses it"
                )
        ranks *= launch.copies(args.passed_on)
        env = launch.environment(os.environ, launch.architectures(folder), ranks)
        if args.threads:  # of each rank
            env["OMP_NUM_THREADS"] = str(args.threads)
        options = ["--host", args.host, "--port", str(args.port), *args.passed_on]
        words = launch.command(folder, name, options)
        if args.print:
            changed = {key: env[key] for key in sorted(env) if os.environ.get(key) != env[key]}
            print_lines([*(f"{key}={value}" for key, value in changed.items()), *words])
            return 0
        say(
            f"starting SGLang with the model {name}; its imports take half a minute and more, "
            "GET /health answers when it is ready"
        )
        return run_until_it_ends(words, env)
