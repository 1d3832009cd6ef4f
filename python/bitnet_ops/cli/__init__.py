"""`bitnet-ops`: one subcommand a word; a wrong input is one line on stderr and exit status 2.

A subcommand is a module with add_arguments(parser) and run(args) -> int, imported only when it is
the one asked for. Here: the table, the error policy, Ctrl-C and closed pipes. It must not know how
any subcommand does its work. BITNET_OPS_DEBUG=1 shows tracebacks.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from bitnet_ops.cli import streams
from bitnet_ops.untrusted import printable

# name -> (module, help line); the order is that of --help.
COMMANDS = {
    "generate": ("bitnet_ops.cli.generate", "continue a text"),
    "chat": ("bitnet_ops.cli.chat", "converse with a model"),
    "embed": ("bitnet_ops.cli.embed", "turn texts into vectors"),
    "convert": ("bitnet_ops.convert.command", "convert a Hugging Face or GGUF model"),
    "export": ("bitnet_ops.convert.export", "write a converted model as a GGUF file"),
    "quantize": ("bitnet_ops.convert.quantize_command", "ternarise masters trained for b1.58"),
    "verify": ("bitnet_ops.convert.verify_command", "compare a model with its source"),
    "inspect": ("bitnet_ops.convert.inspect", "list the tensors of a model, or compare two"),
    "doctor": ("bitnet_ops.doctor", "CPU features, kernels, threads, torch: what is used and why"),
    "dummy": ("bitnet_ops.dummy", "write a synthetic model of a real one's size"),
    "bench": ("bitnet_ops.bench.command", "measure the kernels against this machine's limits"),
}

EXIT_ERROR, EXIT_INTERRUPTED, EXIT_PIPE = 2, 130, 141


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser, with the arguments of `command` alone filled in."""
    parser = argparse.ArgumentParser(
        prog="bitnet-ops",
        description="Ternary (BitNet b1.58) language models on the CPU.",
        epilog="`bitnet-ops COMMAND --help` has the options of a command. Environment: "
        "BITNET_OPS_ISA forces an instruction set, BITNET_OPS_DEBUG=1 shows tracebacks.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (module, help_line) in COMMANDS.items():
        sub = subparsers.add_parser(name, help=help_line, description=help_line)
        if name == command:
            imported = importlib.import_module(module)
            imported.add_arguments(sub)
            sub.set_defaults(run=imported.run)
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    command = next((a for a in argv if not a.startswith("-")), None)
    parser = build_parser(command)
    args, extra = parser.parse_known_args(argv)
    # argparse takes positionals in one go; `generate MODEL --option x PROMPT` leaves PROMPT over.
    rest = getattr(args, "positionals", None)
    if rest is not None and not any(e.startswith("-") and e != "-" for e in extra):
        rest += extra
    elif extra:
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    if not args.command and not args.version:
        parser.print_help(sys.stderr)
        raise SystemExit(EXIT_ERROR)
    return args


def _print_version() -> int:
    import torch

    import bitnet_ops

    print(f"bitnet-ops {bitnet_ops.__version__} (torch {torch.__version__})")
    return 0


def _one_line(error: BaseException) -> str:
    """The error as one line: what went wrong is in its message, the type only if that is empty."""
    text = printable(" ".join(str(error).split()))
    if isinstance(error, KeyError | NotImplementedError | AssertionError) or not text:
        return f"{type(error).__name__}: {text}"
    return text


def _close_pipe() -> int:
    # The reader is gone; what is still buffered must not raise again when Python exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_PIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 2 (error), 130 (Ctrl-C), 141 (closed pipe)."""
    streams.prepare(own_process=argv is None)
    try:
        args = _parse(sys.argv[1:] if argv is None else argv)
        status = _print_version() if args.version else int(args.run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        return _close_pipe()
    except KeyboardInterrupt:
        print("bitnet-ops: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        if os.environ.get("BITNET_OPS_DEBUG") == "1":
            raise
        print(f"bitnet-ops: error: {_one_line(error)}", file=sys.stderr)
        return EXIT_ERROR
