"""What Ctrl-C does while the command line starts: the process ends at once, silently, with 130.

Nothing has to be cleaned up then, and half-imported modules turn a KeyboardInterrupt into all kinds
of tracebacks.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import NoReturn

EXIT_INTERRUPTED = 130


def _leave(_signal: int, _frame: FrameType | None) -> NoReturn:
    os._exit(EXIT_INTERRUPTED)


def quiet() -> None:
    """From now on Ctrl-C ends the process, unless its parent had it ignored (nohup, `&`)."""
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _leave)


def as_exception() -> None:
    """Undo `quiet`: Ctrl-C is a KeyboardInterrupt again, for whoever has something to clean up."""
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)
