"""Chat templates, rendered in a process of their own with limits of time, memory and output.

A template is a program: it may never end or fill the memory, in one call that nothing can interrupt
from inside. A process can be ended. It is started at the first call and kept for later ones, which
cost a tenth of a millisecond more than calls here.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import IO, Any

from bitnet_ops.errors import BitNetError

_SCRIPT = Path(__file__).with_name("_bounded_child.py")
_MAX_ANSWER_BYTES = 256 << 20  # twelve for each character of the largest text
_WALL_S = 120.0  # when the machine is so busy that the child hardly runs


class LimitError(BitNetError):
    """A call that went beyond a limit; the message says which, as in "... got <message>"."""


class ProcessError(BitNetError):
    """There is no process to call in; the message says why, as in "... got <message>"."""


class ChildError(BitNetError):
    """An exception in the child: `classes`, the names of its class and bases; `line` if it has."""

    def __init__(self, name: str, message: str, classes: list[str], line: int | None) -> None:
        super().__init__(message)
        self.name, self.message, self.classes, self.line = name, message, classes, line


def interpreter() -> str:
    """The Python that this process runs in, to start another one of.

    Raises ProcessError where there is none: in a frozen application, or one that embeds Python,
    `sys.executable` is nothing, or the application, which must not be started once more.
    """
    own, version = sys.executable or "", f"{sys.version_info.major}.{sys.version_info.minor}"
    installed = os.path.join(sys.exec_prefix, "bin", f"python{version}")
    frozen = getattr(sys, "frozen", False)
    for path in () if frozen else (own, installed):
        if os.path.basename(path).lower().startswith(("python", "pypy")) and os.path.isfile(path):
            return path
    kind = "a frozen application" if frozen else f"sys.executable {own!r}"
    raise ProcessError(f"no Python interpreter to start one with: {kind}")


class BoundedProcess:
    """A child process that renders; calls from several threads take turns.

    `memory_bytes`: what it may have beyond what it starts with (where the system can limit it).
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._forget()
        _ALL.add(self)

    def _forget(self) -> None:
        """Begin anew, also after a fork: the child belongs to the process that started it."""
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def call(self, cpu_s: float, *, template: str, variables: dict[str, Any]) -> str:
        """The text of `template`, for which the child may use `cpu_s` seconds of CPU time.

        Raises LimitError, after which the next call starts another child, ChildError, and
        ProcessError where no child can be had.
        """
        with self._lock:
            if self._child is None:
                self._spawn()
            return self._ask(cpu_s, template, variables)

    def _spawn(self) -> None:
        command = [interpreter(), "-I", "-S", "-B", "-X", "utf8", str(_SCRIPT)]
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is not for it
            )
        except (OSError, ValueError) as error:
            raise ProcessError(f"none ({error})") from None
        self._child = child
        path = [os.path.abspath(entry) for entry in sys.path]
        try:
            _send(child.stdin, {"memory_bytes": self._memory_bytes, "path": path})
            _receive(child.stdout, time.monotonic() + _WALL_S)  # that it is ready
        except BaseException as error:
            status = self._end()
            if isinstance(error, (EOFError, OSError)):
                raise ProcessError(f"one that ended at its start (exit status {status})") from None
            raise

    def _ask(self, cpu_s: float, template: str, variables: dict[str, Any]) -> str:
        assert self._child is not None
        request = {"cpu_s": cpu_s, "template": template, "variables": variables}
        try:
            _send(self._child.stdin, request)
            answer = _receive(self._child.stdout, time.monotonic() + _WALL_S + cpu_s)
        except BaseException as error:  # Ctrl-C too: the answer to come would be taken for another
            status = self._end()
            if isinstance(error, (EOFError, BrokenPipeError, TimeoutError)):
                raise LimitError(_reason(status, cpu_s)) from None
            raise
        if "value" in answer:
            return str(answer["value"])
        if answer["error"] in ("MemoryError", "TooLong"):
            if answer["error"] == "MemoryError":
                self._end()  # what it holds is not known
            raise LimitError(_WORDS[answer["error"]])
        raise ChildError(answer["error"], answer["message"], answer["classes"], answer["line"])

    def _end(self) -> int | None:
        """Kill the child; its exit status."""
        child, self._child = self._child, None
        if child is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.2)  # it may be dying already, and its own signal says why
        child.kill()
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        return child.wait()

    def close(self) -> None:
        """End the child, if there is one; another call starts another."""
        with self._lock:
            if self._child is not None:
                with contextlib.suppress(OSError):
                    assert self._child.stdin is not None
                    self._child.stdin.close()  # the end of its work
            self._end()


_WORDS = {
    "MemoryError": "more memory than it may have",
    "TooLong": "more text than any model reads",
}


def _reason(status: int | None, cpu_s: float) -> str:
    if status == -signal.SIGPROF:  # the timer
        return f"no end within {cpu_s:g} s of computing"
    if status == -signal.SIGABRT:  # how the C library may end without memory
        return _WORDS["MemoryError"]
    if status == -signal.SIGKILL:  # ours, after waiting
        return "no answer"
    return f"a crash (exit status {status})"


def _send(pipe: IO[bytes] | None, value: dict[str, Any]) -> None:
    assert pipe is not None
    data = json.dumps(value).encode("ascii")
    pipe.write(struct.pack("<Q", len(data)) + data)
    pipe.flush()


def _receive(pipe: IO[bytes] | None, deadline: float) -> dict[str, Any]:
    assert pipe is not None
    size = struct.unpack("<Q", _read(pipe.fileno(), 8, deadline))[0]
    if size > _MAX_ANSWER_BYTES:
        raise EOFError
    answer = json.loads(_read(pipe.fileno(), size, deadline))
    if not isinstance(answer, dict):
        raise EOFError
    return answer


def _read(descriptor: int, size: int, deadline: float) -> bytes:
    """`size` bytes, by the deadline (TimeoutError); EOFError if the other end is closed."""
    parts, left = [], size
    while left:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
        part = os.read(descriptor, min(left, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


_ALL: weakref.WeakSet[BoundedProcess] = weakref.WeakSet()


def _close_all() -> None:
    for process in list(_ALL):
        process.close()


def _forget_all() -> None:
    for process in list(_ALL):
        process._forget()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)
