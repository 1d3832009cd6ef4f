"""`bitnet-ops`: the table of commands; errors as one line on stderr, Ctrl-C, closed pipes.

A subcommand is a module with add_arguments(parser), run(args) -> int and perhaps check(args), which
rejects what the parser cannot; it is imported only when it is the one asked for. Torch and what
needs it are imported by run, never for --help or wrong usage. BITNET_OPS_DEBUG=1 shows tracebacks.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from bitnet_ops import _interrupt, read_affinity
from bitnet_ops.cli import terminal
from bitnet_ops.cli.arguments import Parser, UsageError, did_you_mean

# name -> (module, help line); the order is that of --help.
COMMANDS = {
    "generate": ("bitnet_ops.cli.generate", "continue a text"),
    "chat": ("bitnet_ops.cli.chat", "converse with a model"),
    "serve": ("bitnet_ops.cli.serve", "serve models over HTTP, with a page to talk on"),
    "embed": ("bitnet_ops.cli.embed", "turn texts into vectors"),
    "sglang": ("bitnet_ops.cli.sglang", "serve a model with SGLang (OpenAI's HTTP interface)"),
    "vllm": ("bitnet_ops.cli.vllm", "serve a checkpoint with vLLM (OpenAI's HTTP interface)"),
    "convert": ("bitnet_ops.cli.convert", "convert a Hugging Face, GGUF or .bin model"),
    "export": ("bitnet_ops.cli.export", "write a converted model as a GGUF file"),
    "quantize": ("bitnet_ops.cli.quantize", "ternarise masters trained for b1.58"),
    "verify": ("bitnet_ops.cli.verify", "compare a model with its source"),
    "inspect": ("bitnet_ops.cli.inspect", "list the tensors of a model, or compare two"),
    "cache": ("bitnet_ops.cli.cache", "list conversions that were kept, or remove old ones"),
    "doctor": (
        "bitnet_ops.cli.doctor",
        "CPU features, kernels, threads, torch: what is used and why",
    ),
    "dummy": ("bitnet_ops.cli.dummy", "write a synthetic model of a real one's size"),
    "bench": ("bitnet_ops.cli.bench", "measure the kernels against this machine's limits"),
}

# Commands of other programs that people type here -> what to know.
_RUN = "`bitnet-ops chat MODEL` converses, `bitnet-ops generate MODEL TEXT` continues a text"
_PULL = "a Hugging Face id is downloaded where it is named: `bitnet-ops chat ORG/NAME`"
_LIST = "`bitnet-ops cache list` shows conversions that were kept; other models are your folders"
_OF_OTHERS = {
    "run": _RUN,
    "pull": _PULL,
    "download": _PULL,
    "list": _LIST,
    "ls": _LIST,
    "rm": "`bitnet-ops cache prune` removes conversions that were kept",
    "show": "`bitnet-ops inspect MODEL` lists what a model holds",
    "create": "`bitnet-ops convert SRC DST` makes a model",
    "ps": "nothing runs in the background; the page /status shows what a server does",
    "stop": "nothing runs in the background; Ctrl-C ends a server",
    "start": "`bitnet-ops serve MODEL` starts a server",
    "help": "`bitnet-ops --help` lists the commands",
}

# 1: it was tried and failed, or the answer is no (models differ, a goal is missed, a problem is
# found). 2: the words on the command line are wrong. 141 as a shell counts a broken pipe.
EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, _interrupt.EXIT_INTERRUPTED, 141


def build_parser(command: str | None) -> Parser:
    """The parser, with the arguments of `command` alone filled in."""
    parser = Parser(
        prog="bitnet-ops",
        description="Ternary (BitNet b1.58) language models on the CPU.",
        epilog="`bitnet-ops COMMAND --help` has the options of a command. Environment: "
        "BITNET_OPS_ISA forces an instruction set, BITNET_OPS_DEBUG=1 shows tracebacks. "
        "Exit status: 0 done, 1 failed, 2 wrong usage.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (module, help_line) in COMMANDS.items():
        sub = subparsers.add_parser(name, help=help_line, description=help_line)
        if name == command:
            imported = importlib.import_module(module)
            imported.add_arguments(sub)
            sub.set_defaults(_module=imported, _parser=sub)  # names that no option can have
            names = {action.dest for action in sub._actions}
            parser.takes_more = "positionals" in names or sub.get_default("passed_on") is not None
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    command = next((a for a in argv if not a.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        if command in _OF_OTHERS:
            raise UsageError(f"expected a command, got {command}; here {_OF_OTHERS[command]}")
        guess = did_you_mean(command, COMMANDS) or "; see bitnet-ops --help"
        raise UsageError(f"expected a command among {', '.join(COMMANDS)}, got {command}{guess}")
    parser = build_parser(command)
    words, behind = list(argv), []
    if "--" in words and parser.takes_more:
        at = words.index("--")
        words, behind = words[:at], words[at + 1 :]
    args, extra = parser.parse_known_args(words)
    if not args.command and not args.version and not extra:
        parser.print_help(sys.stderr)
        raise SystemExit(EXIT_USAGE)
    # What stands behind -- is for the program that a command starts, if it starts one.
    passed_on = getattr(args, "passed_on", None)
    if passed_on is not None:
        passed_on += behind
    # argparse takes positionals in one go; `generate MODEL --option x PROMPT` leaves PROMPT over.
    rest = getattr(args, "positionals", None)
    if rest is not None and not any(e.startswith("-") and e != "-" for e in extra):
        rest += [*extra, *behind]
    elif extra:
        getattr(args, "_parser", parser).reject_unknown(extra)
    if hasattr(getattr(args, "_module", None), "check"):
        args._module.check(args)
    return args


def _print_version() -> int:
    from importlib import metadata

    ours, torch = metadata.version("bitnet-ops"), metadata.version("torch")
    terminal.print_lines([f"bitnet-ops {ours} (torch {torch})"])
    return 0


def _close_pipe() -> int:
    # The reader is gone; what is still buffered must not raise again when Python exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_PIPE


def _take_threads() -> None:
    """As many threads as were asked for, else no second one on a core, none beyond the quota."""
    import torch

    from bitnet_ops import machine

    machine.torch_threads = torch.get_num_threads()
    if (count := machine.wanted_threads()) is not None and count != machine.torch_threads:
        torch.set_num_threads(count)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns the exit status: 0, 1 (failed), 2 (wrong usage), 130 (Ctrl-C), 141 (closed pipe). Raises
    SystemExit for --help and for no command at all.
    """
    terminal.prepare(own_process=argv is None)
    try:
        args = _parse(sys.argv[1:] if argv is None else argv)
        if args.version:
            status = _print_version()
        else:
            if argv is None:
                from bitnet_ops import machine

                machine.set_tuning("spread", "1")  # a host process is asked first
            read_affinity()
            importlib.import_module("bitnet_ops.ops")  # torch and the op library, before Ctrl-C
            if argv is None:
                _take_threads()
            _interrupt.as_exception()
            status = int(args._module.run(args))
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        return _close_pipe()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if os.environ.get("BITNET_OPS_DEBUG") == "1":
            raise
        terminal.print_error(error)
        return getattr(error, "status", EXIT_USAGE if isinstance(error, UsageError) else 1)
