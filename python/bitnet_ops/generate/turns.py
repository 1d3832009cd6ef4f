"""Which thread steps an engine: one at a time, any that needs a token, or the one that owns it.

Ctrl-C during a step is raised after the step, so that the engine's state is never half changed.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal converts to and from enums: 2 us a call
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sized
from typing import Any

from bitnet_ops.ops._library import check_threads_after_fork

_SIGINT = int(signal.SIGINT)
_LONGEST_WAIT_S = 0.05  # until a thread that waits looks whether Ctrl-C was pressed


class InterruptsHeld:
    """Ctrl-C during the body is raised at its end. Only the main thread ever gets it.

    `pressed` says that it was.
    """

    def __enter__(self) -> InterruptsHeld:
        self.pressed: list[Any] = []
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            before = _signal.getsignal(_SIGINT)
            if callable(before):  # not so where it is ignored, or ends the process at once
                self._before = before
                _signal.signal(_SIGINT, lambda *args: self.pressed.append(args))
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _signal.signal(_SIGINT, self._before)
            if self.pressed:
                self._before(*self.pressed[0])


class Turn:
    """Whose turn it is to change the engine: that of one thread at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken_by: int | None = None
        self._owner: int | None = None  # the only thread whose turn it may be, if there is one
        self._bell: threading.Event | None = None  # that wakes it
        self._dismiss: Callable[[], None] | None = None  # that ends it
        self._torn = False
        _TURNS.add(self)

    def after_fork(self) -> None:
        """In the child, where only the thread that forked goes on."""
        self._torn = self._taken_by not in (None, threading.get_ident())
        self._changed, self._owner = threading.Condition(), None

    @property
    def owned(self) -> bool:
        return self._owner is not None

    @property
    def taken(self) -> bool:
        """Whether this thread would have to wait."""
        return self._taken_by is not None or self._owner not in (None, threading.get_ident())

    def run(self, change: Callable[[], None], unless: Sized = ()) -> None:
        """Call `change` when it is this thread's turn, unless something is in `unless` by then."""
        if self._taken_by == threading.get_ident():
            raise RuntimeError("engine: expected a consumer to take its event, got one that steps")
        if self._torn:
            raise RuntimeError(
                "engine: expected an engine that was at rest when this process was forked, got one "
                "that another thread was stepping; load the model anew in this process"
            )
        check_threads_after_fork()
        while True:
            with InterruptsHeld():
                if self._take():
                    try:
                        change()
                    finally:
                        self._give()
                    return
            # An interrupt inside `wait` could let go of a lock that another thread holds.
            with InterruptsHeld() as held, self._changed:
                while self.taken and not unless and not held.pressed:
                    self._changed.wait(_LONGEST_WAIT_S)
                if unless:
                    return

    def _take(self) -> bool:
        with self._changed:
            if self.taken:
                return False
            self._taken_by = threading.get_ident()
            return True

    def _give(self) -> None:
        with self._changed:
            self._taken_by = None
            self._changed.notify_all()

    def own(
        self,
        thread: int | None,
        bell: threading.Event | None = None,
        dismiss: Callable[[], None] | None = None,
    ) -> None:
        """Let `thread` alone have it from now on, which waits for `bell`; None: whoever wants.

        `dismiss` ends that thread.
        """
        with self._changed:
            if thread is not None and self._owner is not None:
                raise RuntimeError("engine: expected an engine without a thread, got one that has")
            self._owner, self._bell, self._dismiss = thread, bell, dismiss
            self._changed.notify_all()

    def dismiss_owner(self) -> None:
        """End the thread that owns it, if one does."""
        if (dismiss := self._dismiss) is not None:
            dismiss()

    def wake(self) -> None:
        """Tell the owner that there is something to do."""
        if (bell := self._bell) is not None:
            bell.set()


_TURNS: weakref.WeakSet[Turn] = weakref.WeakSet()


def _after_fork() -> None:
    for turn in list(_TURNS):
        turn.after_fork()


os.register_at_fork(after_in_child=_after_fork)
