"""`bitnet-ops chat [MODEL]`: converse at the terminal, through the model's own chat template.

A model without a template was not made for conversation: that is said, and --plain offers to
continue each line as text instead; nothing is guessed. It must not know templates: tokenizer.py
does.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from bitnet_ops.cli import streams
from bitnet_ops.cli.generate import (
    add_model_arguments,
    add_sampling_arguments,
    figures,
    open_model,
    sampling_options,
)
from bitnet_ops.untrusted import printable

if TYPE_CHECKING:
    from bitnet_ops.language_model import Conversation, LanguageModel

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bitnet-ops chat [MODEL] [options]"
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a converted model (directory or .bin; default: the embedded demo)",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="no template: continue each line as text (for models not made for conversation)",
    )
    parser.add_argument(
        "--stats", action="store_true", help="figures after every answer, on stderr"
    )
    add_model_arguments(parser)
    add_sampling_arguments(parser, max_new_tokens=256)


def run(args: argparse.Namespace) -> int:
    if args.plain and args.system is not None:
        raise ValueError("chat: expected --system only with a chat template, got --plain as well")
    if args.system is not None:
        streams.utf8_argument("chat", "--system", args.system)
    lm = open_model(args.model, args)
    if args.model is None:
        print(
            "the embedded demo model continues Biblical English; it is no assistant",
            file=sys.stderr,
        )
    if not args.plain:
        lm.tokenizer.render_chat([{"role": "user", "content": ""}])  # a model without one ends here
    print(HELP, file=sys.stderr)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    turn = _Plain(lm, args) if args.plain else _Chat(lm, args)
    while (line := _read_line()) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            turn.reset()
        elif line:
            _answer(turn, line, args.stats)
    return 0


def _read_line() -> str | None:
    """A line without its end; None at the end of input or on Ctrl-C."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        return None


class _Chat:
    """Turns of one conversation."""

    def __init__(self, lm: LanguageModel, args: argparse.Namespace) -> None:
        self._start: Callable[[], Conversation] = lambda: lm.chat(**sampling_options(args))
        self._system: str | None = args.system
        self.reset()

    def reset(self) -> None:
        self.conversation = self._start()
        if self._system is not None:
            self.conversation.messages.append({"role": "system", "content": self._system})

    def say(self, line: str) -> Iterator[str]:
        return self.conversation.say(line)

    def figures(self) -> str:
        return figures(self.conversation.last) if self.conversation.last else ""


class _Plain:
    """Each line is a text of its own, to be continued."""

    def __init__(self, lm: LanguageModel, args: argparse.Namespace) -> None:
        self._lm, self._args = lm, args

    def reset(self) -> None:
        """Nothing is remembered between lines."""

    def say(self, line: str) -> Iterator[str]:
        self._stream = self._lm.stream(line, **sampling_options(self._args))
        return iter(self._stream)

    def figures(self) -> str:
        return figures(self._stream)


def _answer(turn: _Chat | _Plain, line: str, stats: bool) -> None:
    """Print one answer; an error ends the turn, not the conversation."""
    try:
        for piece in turn.say(line):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except ValueError as error:
        print(f"bitnet-ops: error: {printable(error)}", file=sys.stderr)
        return
    print(flush=True)
    if stats:
        print(turn.figures(), file=sys.stderr)
