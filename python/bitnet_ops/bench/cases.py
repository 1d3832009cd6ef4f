"""What a benchmark case is, and the two ways its result is checked before it is timed.

A case is one op at one shape, hot or cold. It must not know budgets, rows or other cases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bitnet_ops import _runtime
from bitnet_ops.bench.harness import Run
from bitnet_ops.bench.limits import ReadLimit


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    shape: what the op's sizes are called: M tokens, N output and K input features, or others.
    dtype: of the activations that go in.
    memory: "cold": every call reads other memory, cycled over far more than the last cache holds;
        "hot": every call reads what the call before it read.
    bytes: what one call has to read (cold operands), or to read and write (small hot ones).
    macs: multiply-adds of one call; `integer`: they are int8 and have the int8 peak as a limit.
    check: True when the op's result is right; it runs on the ISA and threads in force.
    rivals: name -> the same work by torch alone.
    format: of the weights that are read, where the op has more than one.
    """

    name: str
    shape: dict[str, int]
    dtype: str
    memory: str
    bytes: int
    macs: int
    integer: bool
    run: Run
    read: ReadLimit
    check: Callable[[], bool]
    rivals: dict[str, Run] = field(default_factory=dict)
    format: str = "-"


def cycle(function: Callable[..., object], operands: Sequence[Any], *, hot: bool) -> Run:
    """`function` on operands[i mod count] at call i; hot keeps to the first."""
    if hot:
        first = operands[0]
        return Run(lambda _: function(*first), warm=True)
    count = len(operands)
    return Run(lambda i: function(*operands[i % count]))


def rival_cycle(function: Callable[..., object], operands: Sequence[Any], *, hot: bool) -> Run:
    """As `cycle`, half the arena away from the kernel, whose operands it may share."""
    half = len(operands) // 2
    return cycle(function, [*operands[half:], *operands[:half]], hot=hot)


def half_away(case: Case) -> Run:
    """The case's run at the other half of cold memory: beside another run on the same memory, which
    would leave in the cache what this one is to read from memory.
    """
    half, call = len(case.read.slots) // 2, case.run.call
    return Run(lambda i: call(i + half), case.run.warm)


def require_slots(slots: Sequence[object], what: str, hot: bool) -> None:
    """Refuse a cold case that would read the same memory in every call, from the cache."""
    if len(slots) < (1 if hot else 2):
        raise ValueError(
            f"bench: expected room for at least two copies of {what}, got {len(slots)}; "
            "raise --cold-mib or choose a smaller shape"
        )


@contextlib.contextmanager
def scalar_on_one_thread() -> Iterator[None]:
    """The plain C++ kernels on one thread, for the time of a check."""
    isa, threads = _runtime.isa(), torch.get_num_threads()
    _runtime.force_isa("scalar")
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _runtime.force_isa(isa)


def equal_to_scalar(function: Callable[[], Tensor | tuple[Tensor, ...]]) -> bool:
    """Whether the ISA and threads in force give the bits that plain C++ gives on one thread."""
    got = function()
    with scalar_on_one_thread():
        expected = function()
    if isinstance(got, Tensor) or isinstance(expected, Tensor):
        got, expected = (got,), (expected,)  # type: ignore[assignment]
    return all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
