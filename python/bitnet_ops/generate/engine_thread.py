"""A thread of its own that owns engines, for those who serve: it alone steps them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from typing import Any, Generic, TypeVar

from bitnet_ops.generate.engine import Engine

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


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
            if engine._core.requests:
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
