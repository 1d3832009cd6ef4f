"""What a command has around it: standard streams, signals, text that comes in, lines that go out.

Streams may be closed, and bytes may be no text: a byte that is no UTF-8 is named with its place,
instead of a codec's message. A warning is one line, as an error is. Commands print by the functions
here alone, so that nothing out of a file reaches a terminal that would obey it.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TextIO

from bitnet_ops.errors import BitNetError
from bitnet_ops.untrusted import json_text, printable

if TYPE_CHECKING:
    from rich.status import Status


class TextError(BitNetError, ValueError):
    """Input that is no UTF-8, or that cannot be read."""

    code = "text"


class _ClosedStdin(io.TextIOWrapper):
    """/dev/null in place of a standard input that was closed before we began, to be told apart."""


def prepare(*, own_process: bool) -> None:
    """Make the process fit for any command: every stream is there, any text can be printed.

    `own_process`: also end by SIGTERM and SIGHUP as by an exception, so that what is half written
    is removed, and print warnings in a line each.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a stand-in without the method
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if own_process:
        if os.environ.get("BITNET_OPS_DEBUG") != "1":
            warnings.showwarning = _warn
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
                signal.signal(number, _terminate)


def _open_closed_streams() -> None:
    """Put /dev/null where a stream is closed, or the next file opened would be stdout."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdin is None:
        sys.stdin = _ClosedStdin(open(0, "rb", buffering=0, closefd=False), encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the clearing up
    raise SystemExit(128 + number)


# Text that comes in -------------------------------------------------------------------------------

_ESCAPED = re.compile("[\udc80-\udcff]")  # how Python carries a byte that is no UTF-8


def checked(text: str, where: str) -> str:
    """`text`, if it is Unicode throughout. `where` is what to call it in a message."""
    if match := _ESCAPED.search(text):
        before = text[: match.start()].encode("utf-8", "surrogateescape")
        raise _no_utf8(where, ord(match[0]) - 0xDC00, len(before))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X}"
        raise TextError(f"{where}: expected UTF-8 text, got half a character, {found}") from None
    return text


def read_stdin() -> str:
    """All of standard input as text."""
    if sys.stdin is None or isinstance(sys.stdin, _ClosedStdin):
        raise TextError("stdin: expected text, got a closed stream; give the text as an argument")
    buffer = getattr(sys.stdin, "buffer", None)
    if buffer is None:  # replaced by a stream of text
        return checked(sys.stdin.read(), "stdin")
    data: bytes = buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _no_utf8("stdin", data[error.start], error.start) from None


def without_line_end(text: str) -> str:
    """`text` less the line end that `echo` or an editor has put behind it."""
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def _no_utf8(where: str, byte: int, offset: int) -> TextError:
    return TextError(
        f"{where}: expected UTF-8 text, got the byte 0x{byte:02x} at offset {offset}; convert it, "
        "for instance with iconv"
    )


# Lines that go out --------------------------------------------------------------------------------


class Report(Protocol):
    """What a command's work gives back."""

    def to_dict(self) -> dict[str, Any]: ...

    def lines(self) -> list[str]: ...


def show(
    work: Callable[..., Report], doing: str, *, as_json: bool, wrote: str | None = None
) -> int:
    """Call `work(progress=...)`, the bar to advance or None, and print its report; returns 0.

    doing: what that is, for where no bar can move; wrote: the destination, where the lines of the
    report do not name it.
    """
    from bitnet_ops.convert.progress import progress_bar

    with progress_bar(doing, enabled=not as_json) as progress:
        report = work(progress=progress)
    lines = [*([f"wrote {wrote}"] if wrote else []), *report.lines()]
    print_result(report.to_dict(), lines, as_json=as_json)
    return 0


class ProgressLine:
    """Called with what is being done. `print_lines`: of the result, while that goes on."""

    def __init__(self, status: Status | None) -> None:
        self._status = status  # the line of a terminal
        self.text = "starting"

    def __call__(self, text: str) -> None:
        self.text = text
        if self._status is not None:
            from rich.text import Text

            # rich redraws from a thread of its own; a slow rate keeps it out of measurements
            self._status.update(Text(printable(text)), speed=0.1)

    def print_lines(self, lines: Iterable[object]) -> None:
        if self._status is not None:
            self._status.stop()  # it has taken stdout's place, too
        print_lines(lines)
        if self._status is not None:
            self._status.start()


@contextlib.contextmanager
def progress_line() -> Iterator[ProgressLine]:
    """A line on a terminal's stderr that says what is being done; gone at its end.

    Elsewhere what takes long is said in lines that stay.
    """
    if not sys.stderr.isatty():
        from bitnet_ops.convert.progress import told_when_slow

        line = ProgressLine(None)
        with told_when_slow(lambda: line.text):
            yield line
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield ProgressLine(status)


def print_result(value: dict[str, Any], lines: Iterable[object], *, as_json: bool) -> None:
    """One JSON object on stdout, or its text."""
    if as_json:
        print_json(value, indent=1)
    else:
        print_lines(lines)


def print_lines(lines: Iterable[object]) -> None:
    """Lines for people on stdout."""
    print("\n".join(map(printable, lines)), flush=True)


def print_json(value: Any, indent: int | None = None) -> None:
    """`value` as JSON on stdout: as it is where that is UTF-8, in ASCII where it is not.

    There `backslashreplace` would write a letter as \\xe9, which no reader of JSON takes.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(json_text(value, indent, ascii=codecs.lookup(encoding).name != "utf-8"))


def print_text(text: str, end: str = "", *, dim: bool = False) -> None:
    """What a model writes or goes on from, as it comes, on stdout.

    A file or a pipe gets it as it is, a terminal without what that would obey, and `dim` if so.
    """
    if sys.stdout.isatty():
        text = printable(text, prose=True)
        if dim and text and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb":
            text = f"\x1b[2m{text}\x1b[22m"
    print(text, end=end, flush=True)


def say(line: object) -> None:
    """A line for people on stderr, beside the result."""
    print(printable(line), file=sys.stderr)


def one_line(error: BaseException) -> str:
    """The error as one line: what went wrong, and in brackets a short word for scripts."""
    text = printable(" ".join(str(error).split()))
    if isinstance(error, MemoryError) and not text:
        text = "expected more memory than this process may have; raise its limit (ulimit -v)"
    if isinstance(error, KeyError | NotImplementedError | AssertionError) or not text:
        text = f"{type(error).__name__}: {text}"
    code = getattr(error, "code", None)
    if not isinstance(code, str):
        name = type(error).__name__.removeprefix("_")
        words = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z]+", name)
        code = "-".join(words).lower().removesuffix("-error")
    return text if text.endswith(f"[{code}]") else f"{text} [{code}]"


def print_error(error: BaseException) -> None:
    print(f"bitnet-ops: error: {one_line(error)}", file=sys.stderr)


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """The hook of `warnings`, without the place in the source, which helps nobody at a terminal."""
    with contextlib.suppress(OSError):  # the reader of stderr is gone
        text = printable(" ".join(str(message).split()))
        print(f"bitnet-ops: warning: {text}", file=file or sys.stderr)
