"""What is typed in a conversation: messages, commands, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Iterator

from bitnet_ops.cli.arguments import did_you_mean
from bitnet_ops.cli.texts import TextError, checked

HELP = '''\
/help    show this
/reset   forget the conversation
/exit    end it; so do Ctrl-D, and Ctrl-C twice
//...    send a message that begins with a slash
A line that ends in \\ goes on in the next; """ begins and ends a message of several lines.
Ctrl-C stops an answer; at the prompt it clears the line.'''


class Command(enum.Enum):
    HELP = "/help"
    RESET = "/reset"
    EXIT = "/exit"


_ALIASES = {"/?": Command.HELP, "/quit": Command.EXIT, "/bye": Command.EXIT}
_WORDS = {**{command.value: command for command in Command}, **_ALIASES}
_QUOTES = '"""'


class Input:
    """Iterates over messages (str), commands, and TextErrors for what is neither, up to the end.

    Attribute `interactive`: whether somebody types. If so, Ctrl-C clears the line and twice ends;
    if not, it is a KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        with contextlib.suppress(AttributeError):  # a stream of text has no bytes to be wrong
            sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (line editing and history for input())

    def __iter__(self) -> Iterator[str | Command | TextError]:
        interrupts = 0
        while True:
            try:
                entry = self._entry()
            except EOFError:
                self._end_line()
                return
            except KeyboardInterrupt:
                self._end_line()
                if not self.interactive:
                    raise
                interrupts += 1
                if interrupts == 2:
                    return
                print("(Ctrl-C again, or Ctrl-D, ends the conversation)", file=sys.stderr)
                continue
            interrupts = 0
            if entry is Command.EXIT:
                return
            if entry != "":
                yield entry

    def _end_line(self) -> None:
        if self.interactive:
            print(file=sys.stderr)

    def _line(self, prompt: str) -> str:
        return input(prompt if self.interactive else "")

    def _entry(self) -> str | Command | TextError:
        try:
            text = self._text()
            if text.startswith("/") and not text.startswith("//"):
                return _command(text)
            return checked(text.removeprefix("/"), "chat")
        except TextError as error:
            return error

    def _text(self) -> str:
        """A line, or the lines that go together, without the space around them."""
        line = self._line("> ")
        if line.lstrip().startswith(_QUOTES):
            return self._block(line.lstrip().removeprefix(_QUOTES))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._line(". "))
            except EOFError:
                break
        return "\n".join(lines).strip()

    def _block(self, first: str) -> str:
        """The lines up to closing quotes, or to the end of input."""
        lines = [first]
        while not lines[-1].rstrip().endswith(_QUOTES):
            try:
                lines.append(self._line(". "))
            except EOFError:
                return "\n".join(lines).strip()
        lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(lines).strip()


def _command(text: str) -> Command:
    word = text.split()[0]
    if text in _WORDS:
        return _WORDS[text]
    guess = did_you_mean(word, _WORDS) or "; /help lists them"
    raise TextError(
        f"chat: expected a command, got {word}{guess} (//... sends a message that begins with /)"
    )
