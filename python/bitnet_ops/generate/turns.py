"""Which thread steps an engine: one at a time, any that needs a token, or the one that owns it.

Ctrl-C during a step is raised after the step, so that the engine's state is never half changed.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal converts to and from enums: 2 us a call
import contextlib
import logging
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sized
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from bitnet_ops.ops._library import check_threads_after_fork

if TYPE_CHECKING:
    from bitnet_ops.generate.engine import Engine

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
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


class EngineThread:
    """A thread of its own that owns engines: it alone steps, until `close`.

    Others add requests, each with a consumer, and abort them; a Run waits for its tokens. Engines
    take their steps by turns. The thread sleeps while there is nothing to do. After `close` what is
    left waits for whoever steps next.
    """

    def __init__(self, *engines: Engine) -> None:
        self.engines, self._closing = engines, False
        self._bell = threading.Event()  # there is something new to do
        self._jobs: deque[_Job[Any]] = deque()
        self._thread = threading.Thread(target=self._run, name="bitnet-ops engine", daemon=True)
        self._begins = threading.Event()
        self._thread.start()
        owned: list[Engine] = []
        try:
            for engine in engines:
                engine._turn.own(self._thread.ident, self._bell, self.close)
                owned.append(engine)
        except RuntimeError:
            for engine in owned:
                engine._turn.own(None)
            self._closing = True
            raise
        finally:
            self._begins.set()
        self._bell.set()  # requests may wait already

    def run(self, steps: Callable[[], Generator[None, None, T]]) -> Future[T]:
        """Run what is no request of an engine, one step of `steps` beside each of the engines'.

        `steps` makes a generator that yields between steps; what it returns is the result. A future
        that is cancelled ends it after the step that it is in.
        """
        job = _Job(steps)
        self._jobs.append(job)
        self._bell.set()
        return job.future

    def _run(self) -> None:
        self._begins.wait()
        if self._closing:
            return
        try:
            while not self._closing:
                self._bell.wait()
                self._bell.clear()  # before looking, so that what comes meanwhile rings again
                while self._step() and not self._closing:
                    pass
        finally:
            for engine in self.engines:
                engine._turn.own(None)
            for job in self._jobs:
                job.future.cancel()

    def _step(self) -> bool:
        """A step of each engine that has requests, and of the oldest job; False: nothing to do."""
        busy = False
        for engine in self.engines:
            if engine._requests:
                busy = True
                try:
                    engine.step()
                except Exception:  # its requests have failed, and it begins anew
                    _LOG.exception("engine: a step failed")
        if self._jobs:
            busy = True
            if self._jobs[0].step():
                self._jobs.popleft()
        return busy

    def close(self) -> None:
        """End the thread after the step that it is in; what `run` has not finished is cancelled."""
        self._closing = True
        self._bell.set()
        self._thread.join()

    def __enter__(self) -> EngineThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Job(Generic[T]):
    """Work between the steps of engines, and the future of its result."""

    def __init__(self, make: Callable[[], Generator[None, None, T]]) -> None:
        self.future: Future[T] = Future()
        self._make = make
        self._steps: Generator[None, None, T] | None = None

    def step(self) -> bool:
        """Go on with it; whether that was the end."""
        if self.future.cancelled():
            return True
        with contextlib.suppress(InvalidStateError):  # it is cancelled just now
            try:
                if self._steps is None:
                    self._steps = self._make()
                next(self._steps)
                return False
            except StopIteration as end:
                self.future.set_result(end.value)
            except Exception as error:
                self.future.set_exception(error)
        return True
