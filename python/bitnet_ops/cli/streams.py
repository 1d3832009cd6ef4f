"""What a process is given: standard streams that may be closed, signals, bytes that may be no text.

It must not know any command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def prepare(*, own_process: bool) -> None:
    """Make the process fit for any command: every stream is there, any text can be printed.

    `own_process`: also end by SIGTERM and SIGHUP as by an exception, so that what is half written
    is removed.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a stand-in without the method
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if own_process:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
                signal.signal(number, _terminate)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the clearing up
    raise SystemExit(128 + number)


def _open_closed_streams() -> None:
    """Put /dev/null where a stream is closed, or the next file opened would be stdout."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)


def read_stdin(command: str) -> str:
    """All of standard input as UTF-8 text; ValueError names the first byte that is none."""
    buffer = getattr(sys.stdin, "buffer", None)
    if buffer is None:  # a stand-in that has text already
        return sys.stdin.read()
    data = buffer.read()
    try:
        return str(data.decode("utf-8")).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise _not_utf8(command, "standard input", data[error.start], error.start) from None


def utf8_argument(command: str, name: str, text: str) -> str:
    """`text`, an argument of the command line; ValueError if it was no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        before = text[: error.start].encode("utf-8")
        byte = os.fsencode(text[error.start])[0]
        raise _not_utf8(command, name, byte, len(before)) from None
    return text


def _not_utf8(command: str, name: str, byte: int, offset: int) -> ValueError:
    return ValueError(
        f"{command}: expected UTF-8 in {name}, got byte 0x{byte:02x} at offset {offset}; "
        "convert the text, for instance with iconv"
    )
