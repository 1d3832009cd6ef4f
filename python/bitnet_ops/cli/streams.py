"""What a process is given: standard streams that may be closed, signals, bytes that are no text.

Also what it says beside its result: a warning is one line, as an error is.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import signal
import sys
import warnings
from types import FrameType
from typing import Any, NoReturn, TextIO

from bitnet_ops.untrusted import printable


class ClosedStdin(io.TextIOWrapper):
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


def json_text(value: Any, indent: int | None = None) -> str:
    """`value` as JSON for stdout: as it is where that is UTF-8, in ASCII where it is not.

    There `backslashreplace` would write a letter as \\xe9, which no reader of JSON takes.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return json.dumps(value, indent=indent, ensure_ascii=codecs.lookup(encoding).name != "utf-8")


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


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the clearing up
    raise SystemExit(128 + number)


def _open_closed_streams() -> None:
    """Put /dev/null where a stream is closed, or the next file opened would be stdout."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdin is None:
        sys.stdin = ClosedStdin(open(0, "rb", buffering=0, closefd=False), encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)
