"""What a benchmark case is, and the check of its result against plain C++.

A case is one op at one shape, hot or cold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bitnet_ops import _runtime
from bitnet_ops.bench.harness import Timed
from bitnet_ops.bench.limits import ReadLimit

Result = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    shape: what the op's sizes are called: M tokens, N output and K input features, or others.
    bytes: what one call has to read (cold operands), or to read and write (small hot ones).
    check: True when the op's result is right; it runs on the ISA and threads in force.
    macs: multiply-adds of one call; `integer`: they are int8 and have the int8 peak as a limit.
    baselines: name -> the same work by torch alone.
    format: of the weights that are read, where the op has more than one.
    dtype: of the activations that go in.
    """

    name: str
    shape: dict[str, int]
    bytes: int
    run: Timed
    read: ReadLimit
    check: Callable[[], bool]
    macs: int = 0
    integer: bool = False
    baselines: dict[str, Timed] = field(default_factory=dict)
    format: str = "-"
    dtype: str = "bfloat16"

    @property
    def memory(self) -> str:
        """cold: every call reads other memory, cycled over far more than the last cache holds;
        hot: every call reads what the call before it read."""
        return "hot" if self.run.warm else "cold"


def cycle(
    function: Callable[..., object], operands: Sequence[Sequence[object]], *, hot: bool
) -> Timed:
    """`function` on operands[i mod count] at call i; hot keeps to the first."""
    if hot:
        first = operands[0]
        return Timed(lambda _: function(*first), warm=True)
    count = len(operands)
    return Timed(lambda i: function(*operands[i % count]), cold=True)


def baseline_cycle(
    function: Callable[..., object], operands: Sequence[Sequence[object]], *, hot: bool
) -> Timed:
    """As `cycle`, half the memory away from the kernel, whose operands it may share."""
    half = len(operands) // 2
    return cycle(function, [*operands[half:], *operands[:half]], hot=hot)


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


def equal(got: Result, expected: Result) -> bool:
    """Whether two results, of one tensor or of several, are the same bits."""
    pair = [[r] if isinstance(r, Tensor) else r for r in (got, expected)]
    return all(torch.equal(g, e) for g, e in zip(*pair, strict=True))


def equal_to_scalar(function: Callable[[], Result]) -> bool:
    """Whether the ISA and threads in force give the bits that plain C++ gives on one thread."""
    got = function()
    with scalar_on_one_thread():
        return equal(got, function())
