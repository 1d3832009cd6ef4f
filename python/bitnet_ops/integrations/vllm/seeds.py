"""Requests with a seed on a CPU, where vLLM 0.32 ends as soon as such a prompt comes in chunks.

vLLM draws a token behind every chunk and forgets it, and winds the request's generator back by an
offset (`GPUModelRunner._bookkeeping_sync`), which a generator of a CPU has not: "CPU Generator does
not use offset". Prompts of hybrids are always cut, where states are kept. It must not know models.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

_DONE = "_bitnet_ops_winds_back"


def wind_back_by_state(runner: type) -> None:
    """Let a runner's class keep the generators of such draws as they were; once.

    runner: vLLM's CPUModelRunner. One of another form is left alone.
    """
    names = "_sample", "_bookkeeping_sync"
    if getattr(runner, _DONE, False) or not all(hasattr(runner, name) for name in names):
        return
    for name, around in zip(names, (_kept, _hidden), strict=True):
        setattr(runner, name, _within(getattr(runner, name), around))
    setattr(runner, _DONE, True)


def _within(method: Callable, around: Callable[[Any], Any]) -> Callable:
    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        with around(self):
            return method(self, *args, **kwargs)

    return called


def _forgotten(runner: Any) -> dict[int, Any]:
    """The generators of requests whose drawn token is forgotten, by their row."""
    batch = runner.input_batch
    rows = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
    return {row: batch.generators[row] for row in rows if row in batch.generators}


@contextlib.contextmanager
def _kept(runner: Any) -> Iterator[None]:
    states = [(one, one.get_state()) for one in _forgotten(runner).values()]
    yield
    for one, state in states:
        one.set_state(state)


@contextlib.contextmanager
def _hidden(runner: Any) -> Iterator[None]:
    hidden, generators = _forgotten(runner), runner.input_batch.generators
    for row in hidden:
        del generators[row]
    try:
        yield
    finally:
        generators.update(hidden)
