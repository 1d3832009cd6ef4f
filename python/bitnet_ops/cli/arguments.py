"""The parser of the command line; an unknown option or command is one line with the nearest one.

Also the types and options that commands share. It imports neither torch nor anything of ours that
does, so that --help and wrong arguments are answered at once.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from bitnet_ops.errors import BitNetError

# Options of other programs that people type here -> what to know.
_OF_OTHERS = {"-ngl": "; there is no GPU to put layers on, all of them run on the CPU"}


class UsageError(BitNetError, ValueError):
    """Words on the command line that ask for nothing, or for what contradicts itself."""

    code = "usage"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing where no known word is like `word`."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def listed(words: Iterable[object]) -> str:
    """`a, b or c`."""
    *most, last = map(str, words)
    return f"{', '.join(most)} or {last}" if most else last


class _Help(argparse.HelpFormatter):
    """argparse's, with room for `--repetition-penalty R` beside its help."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{**options, "max_help_position": 30})

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """A switch and its opposite as one word."""
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0].removeprefix('--')}"
        return super()._format_action_invocation(action)


# Commands whose options fill more than a screen, and the options that --help-all alone explains.
_LONG = frozenset({"generate", "chat", "serve"})
_SELDOM = frozenset(
    """--attention --sparsity --weight-format --head-format --activation-format --cache --no-convert
    --no-draft --no-vision --image-max-tokens --mmproj --images-per-request --image-host
    --image-folder --max-per-client --request-time --drain --prefix-dir-mb""".split()
)


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, Parser)
        parser.explains_all = True
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UsageErrors in the project's style.

    Options are written out or by their aliases, never by a beginning: a beginning that is unique
    today is ambiguous when an option is added.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": _Help, **options})
        self.takes_more = False  # whether any number of words may stand behind --
        self.explains_all = self.command not in _LONG
        if not self.explains_all:
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help="all options explained")

    def format_help(self) -> str:
        if self.explains_all:
            return super().format_help()
        seldom = [a for a in self._actions if _SELDOM.intersection(a.option_strings)]
        helps = [action.help for action in seldom]
        try:
            for action in seldom:
                action.help = argparse.SUPPRESS
            text = super().format_help()
        finally:
            for action, help in zip(seldom, helps, strict=True):
                action.help = help
        names = textwrap.fill(
            "more, by --help-all: " + " ".join(a.option_strings[-1] for a in seldom),
            width=max(40, shutil.get_terminal_size().columns - 2),
            subsequent_indent="  ",
            break_on_hyphens=False,
        )
        return f"{text}\n{names}\n"

    @property
    def command(self) -> str:
        """`generate`, `bench ops`; nothing for the parser of all commands."""
        return self.prog.partition(" ")[2]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._reject_runs(itertools.takewhile(lambda word: word != "--", args or ()))
        return super().parse_known_args(args, namespace)

    def _reject_runs(self, words: Iterable[str]) -> None:
        """Complain of letters that argparse would read as an option and its number, -n gl."""
        numbers = {
            text
            for action in self._actions
            for text in action.option_strings
            if len(text) == 2 and action.type is not None
        }
        for word in words:
            if re.fullmatch(r"-[A-Za-z][A-Za-z-]+", word) and word[:2] in numbers:
                hint = f"-{word}" if f"-{word}" in self.known_options() else ""
                guess = f"; did you mean {hint}?" if hint else _OF_OTHERS.get(word, "")
                self.reject(f"expected an option of this command, got {word}{guess}")

    def known_options(self) -> list[str]:
        return [text for action in self._actions for text in action.option_strings]

    def reject(self, problem: str) -> NoReturn:
        """Raise UsageError(`command: problem`) with where the options are described."""
        shown = f"{self.command}: {problem}" if self.command else problem
        remedy = "" if "did you mean" in problem else f"; see {self.prog} --help"
        raise UsageError(f"{shown}{remedy}")

    def error(self, message: str) -> NoReturn:
        """argparse's own complaints, reworded: what was expected, what was got."""
        if match := re.fullmatch(r"argument (.*?): (.*)", message, re.DOTALL):
            option, problem = match.groups()
            problem = re.sub(
                r"^expected (one|at least one) argument$", r"expected a value", problem
            )
            problem += ", got none" if problem == "expected a value" else ""
            self.reject(f"{option}: {problem}")
        if match := re.fullmatch(r"the following arguments are required: (.*)", message):
            self.reject(f"expected {match[1]}, got none")
        self.reject(message)

    def reject_unknown(self, words: Sequence[str]) -> NoReturn:
        """Complain of the first of `words`, which no option or positional took."""
        options = [word for word in words if word.startswith("-") and word != "-"]
        word = (options or list(words))[0].partition("=")[0]
        kind = "an option of this command" if options else "no further argument"
        guess = did_you_mean(word, self.known_options()) if options else ""
        # of a command that hands options on: where those stand
        guess = guess or (self.get_default("options_of_others") or "" if options else "")
        self.reject(f"expected {kind}, got {word}{guess}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # argparse's hook for `choices`; its own message quotes every choice and guesses nothing
        if action.choices is not None and value not in action.choices:
            choices = list(map(str, action.choices))
            problem = f"expected {listed(choices)}, got {value!r}"
            raise argparse.ArgumentError(action, problem + did_you_mean(str(value), choices))


def integer(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
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


def number(expected: str, good: Callable[[float], bool]) -> Callable[[str], float]:
    """An argparse type: a finite number for which `good` holds; `expected` says which those are."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (abs(value) < float("inf") and good(value)):
            raise argparse.ArgumentTypeError(f"expected a number {expected}, got {text!r}")
        return value

    return convert


def non_empty(text: str) -> str:
    """An argparse type: text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("expected a text that is not empty, got ''")
    return text


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json, which means the same everywhere: one JSON object on stdout instead of the text."""
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout instead of text"
    )


def add_force(parser: argparse.ArgumentParser, what: str) -> None:
    """--force, which means the same everywhere: replace what an earlier run left."""
    parser.add_argument("--force", action="store_true", help=f"replace {what} if it exists")


def add_threads(
    parser: argparse._ActionsContainer,
    default: str = "$OMP_NUM_THREADS, else one a physical core within the quota",
) -> None:
    parser.add_argument(
        "-t", "--threads", type=integer(1, 1024), metavar="N", help=f"default: {default}"
    )
