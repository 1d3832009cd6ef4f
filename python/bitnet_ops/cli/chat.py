"""`bitnet-ops chat [MODEL]`: converse at the terminal, through the model's own chat template.

A model without a template was not trained for conversation and is rejected; --plain continues each
message as text instead.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, cast

from bitnet_ops.cli.arguments import UsageError
from bitnet_ops.cli.chat_input import HELP, Command, Input
from bitnet_ops.cli.errors import one_line
from bitnet_ops.cli.generate import (
    MODEL_HELP,
    add_model_arguments,
    add_sampling_arguments,
    figures,
    open_model,
    print_logprobs,
    sampling_options,
    why_it_ended,
)
from bitnet_ops.cli.texts import TextError, checked

if TYPE_CHECKING:
    from bitnet_ops.language_model import Conversation, LanguageModel, TextStream

# The embedded demo is small: greedy, it soon repeats itself. The seed is fixed, so that a
# conversation can be had again.
_DEMO_SAMPLING = {"temperature": 0.7, "top_k": 40, "seed": 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bitnet-ops chat [MODEL] [options]"
    parser.description = (
        "Converse with a model through its own chat template; /help lists what can be typed."
    )
    parser.add_argument(
        "positional_model",
        nargs="?",
        metavar="MODEL",
        help=f"{MODEL_HELP} (default: the embedded demo)",
    )
    parser.add_argument("-m", "--model", metavar="MODEL", help="the model, by name")
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="no template: continue each message as text (for models not made for conversation)",
    )
    parser.add_argument(
        "--stats", action="store_true", help="figures after every answer, on stderr"
    )
    add_model_arguments(parser)
    add_sampling_arguments(
        parser,
        max_new_tokens=256,
        default="greedy; for the demo temperature 0.7, top-k 40, seed 0",
    )


def check(args: argparse.Namespace) -> None:
    """Reject what contradicts itself; MODEL and --model become one."""
    if args.plain and args.system is not None:
        raise UsageError("chat: expected --system only with a chat template, got --plain as well")
    if args.model is not None and args.positional_model is not None:
        raise UsageError(f"chat: expected one model, got -m {args.model} and more; leave one out")
    args.model = args.positional_model if args.model is None else args.model
    if args.system is not None:
        checked(args.system, "--system")


def run(args: argparse.Namespace) -> int:
    model = args.model
    options = _options(args, demo=model is None)
    lm = open_model(model, args)
    if model is None:
        print(
            "the embedded demo model continues Biblical English; it is no assistant",
            file=sys.stderr,
        )
    if not args.plain:
        lm.tokenizer.render_chat([{"role": "user", "content": ""}])  # a model without one ends here
    turns = _Plain(lm, options) if args.plain else _Chat(lm, options, args.system)
    return _converse(turns, args.stats)


def _options(args: argparse.Namespace, *, demo: bool) -> dict[str, Any]:
    """What was asked for; of the demo, where nothing about sampling was, samples."""
    options = sampling_options(args)
    names = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "seed",
    )
    if demo and all(getattr(args, name) is None for name in names):
        return {**options, **_DEMO_SAMPLING}
    return options


def _converse(turns: _Chat | _Plain, stats: bool) -> int:
    """0 at the end of the conversation; in a script 1 if a turn failed, 130 after Ctrl-C."""
    failed = False
    source = Input()
    print("/help lists the commands; Ctrl-D ends the conversation", file=sys.stderr)
    try:
        for entry in source:
            try:
                failed |= not _take(turns, entry, stats)
            except KeyboardInterrupt:  # between the last piece and the prompt, at a terminal
                if not source.interactive:
                    raise
    except KeyboardInterrupt:  # in a script
        return 130
    return int(failed and not source.interactive)


def _take(turns: _Chat | _Plain, entry: str | Command | TextError, stats: bool) -> bool:
    """Do what an entry says; whether that went well."""
    if entry is Command.RESET:
        turns.reset()
    elif entry is Command.HELP:
        print(HELP, file=sys.stderr)
    elif isinstance(entry, TextError):
        _complain(entry)
        return False
    else:
        return _answer(turns, cast(str, entry), stats)
    return True


def _complain(error: Exception) -> None:
    print(f"bitnet-ops: error: {one_line(error)}", file=sys.stderr)


class _Chat:
    """Turns of one conversation."""

    def __init__(self, lm: LanguageModel, options: dict[str, Any], system: str | None) -> None:
        self._lm, self._options = lm, options
        self._start: Callable[[], Conversation] = lambda: lm.chat(**options)
        self._system = system
        self.reset()

    def reset(self) -> None:
        self.conversation = self._start()
        if self._system is not None:
            self.conversation.messages.append({"role": "system", "content": self._system})

    def say(self, text: str) -> Iterator[str]:
        pieces = self.conversation.say(text)
        if self.conversation.dropped:
            context = self._lm.config.max_position_embeddings
            print(
                f"note: the context of {context} tokens is full; the oldest "
                f"{self.conversation.dropped} messages are forgotten",
                file=sys.stderr,
            )
        return pieces

    def stream(self) -> TextStream | None:
        return self.conversation.last

    def tell(self, stream: TextStream) -> None:
        print_logprobs(self._lm, stream)

    def remark(self, stream: TextStream, stats: bool) -> str:
        return _remark(self._lm, stream, self._options, stats)


class _Plain:
    """Each message is a text of its own, to be continued."""

    def __init__(self, lm: LanguageModel, options: dict[str, Any]) -> None:
        self._lm, self._options = lm, options
        self._stream: TextStream | None = None

    def reset(self) -> None:
        """Nothing is remembered between messages."""

    def say(self, text: str) -> Iterator[str]:
        self._stream = self._lm.stream(text, **self._options)
        return iter(self._stream)

    def stream(self) -> TextStream | None:
        return self._stream

    def tell(self, stream: TextStream) -> None:
        print_logprobs(self._lm, stream)

    def remark(self, stream: TextStream, stats: bool) -> str:
        return _remark(self._lm, stream, self._options, stats)


def _remark(lm: LanguageModel, stream: TextStream, options: dict[str, Any], stats: bool) -> str:
    """What there is to say about an answer: its figures, or that it was cut off; else nothing."""
    ended = why_it_ended(lm, stream, options)
    if stats:
        return f"{figures(stream)} | {ended}"
    return ended if stream.generation.finish_reason in ("length", "context") else ""


def _answer(turns: _Chat | _Plain, text: str, stats: bool) -> bool:
    """Print one answer; an error ends the turn, not the conversation. Whether there was none.

    Ctrl-C stops the answer, which is kept as far as it came.
    """
    try:
        pieces = cast(Generator[str, None, None], turns.say(text))
        with contextlib.closing(pieces):
            for piece in pieces:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    except ValueError as error:
        _complain(error)
        return False
    print(flush=True)
    stream = turns.stream()
    if stream is not None:
        turns.tell(stream)
    remark = turns.remark(stream, stats) if stream is not None else ""
    if remark:
        print(f"({remark})" if not stats else remark, file=sys.stderr)
    return True
