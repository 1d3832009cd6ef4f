"""What the tests know of an op, in one object: its reference, inputs, bad calls and tolerance.

`spec(...)` enters an op in SPECS, in the file of its group (ops_*.py); op_catalogue.py gathers them
and the tests that go over all ops take everything from there. It must not know what the ops are.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from op_schema import bound as bound_arguments
from op_values import FLOATS, Arguments, Built

Named = dict[str, Any]
Change = Callable[[Named], Any]
# What is changed in a good call, the argument that is blamed, words of the message.
Rejections = list[tuple[dict[str, Change], str, str]]
Rows = Callable[[torch.Generator, torch.dtype], Callable[[Tensor], Arguments]]


@dataclass(frozen=True)
class Call:
    """A call that works, by argument names; and ways to spoil it."""

    build: Callable[[torch.Generator], Named]
    rejections: Rejections = field(default_factory=list)

    def arguments(self) -> Named:
        return self.build(torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class Sample:
    """Arguments, made afresh on every call (some ops mutate them) and the same every time."""

    op: str
    name: str
    build: Callable[[torch.Generator], Arguments]

    @property
    def id(self) -> str:
        return f"{self.op}-{self.name}"

    def args(self) -> Arguments:
        return self.build(torch.Generator().manual_seed(zlib.crc32(self.id.encode())))


@dataclass(frozen=True)
class OpSpec:
    """All of an op. Keys of dictionaries tell variants of its arguments apart; "" is the plain one.

    Args:
        function: the op in plain torch, slow and obvious: an oracle that shares no code with it. Of
            a fused op (`composed`) it takes (o, a): whose ops it composes, and the arguments.
        samples: dtypes, shapes, strides, empty batches, leading dimensions.
        large: inputs large enough that every thread and tile has a share, of sizes that divide by
            nothing.
        calls: good calls, each with rejections in which every argument is blamed.
        bound: (args, expected) -> how far each element may lie from the reference; None: equal.
        comparable: whether a result depends on neither the machine nor the instruction set.
        rows: variant -> arguments as a function of x [M, 64], whose rows must not touch each other.
        row_dtypes: of x in `rows`.
        poison_spreads: whether one NaN or infinity in a row makes its whole result NaN.
        passes_gradient: arguments that may require grad.
        mutates: arguments that are written.
        overlapping: arguments for caches of a dtype, if the op mutates them: no two may overlap.
        huge: more good calls in which integers are replaced by huge and negative ones.
        list_lengths: how many integers an argument takes that is a list of them.
        empty: arguments of huge shape without elements, or that would need all memory.
    """

    name: str
    function: Callable[..., Any]
    samples: Callable[[], Built]
    large: Sequence[Callable[[torch.Generator], Arguments]]
    calls: dict[str, Call]
    bound: Callable[[Arguments, Tensor], Tensor] | None = None
    composed: bool = False
    comparable: bool = True
    rows: dict[str, Rows] = field(default_factory=dict)
    row_dtypes: tuple[torch.dtype, ...] = FLOATS
    poison_spreads: bool = False
    passes_gradient: frozenset[str] = frozenset()
    mutates: frozenset[str] = frozenset()
    overlapping: Callable[[torch.Generator, torch.dtype], Arguments] | None = None
    huge: dict[str, Callable[[torch.Generator], Named]] = field(default_factory=dict)
    list_lengths: dict[str, int] = field(default_factory=dict)
    empty: dict[str, Callable[[], Arguments]] = field(default_factory=dict)

    @property
    def reference(self) -> Callable[..., Any]:
        return functools.partial(composed, reference, self.name) if self.composed else self.function


SPECS: dict[str, OpSpec] = {}


def spec(function: Callable[..., Any], **fields: Any) -> None:
    """Enters the op that `function` is named after."""
    name = function.__name__
    assert name not in SPECS, name
    SPECS[name] = OpSpec(name, function, **fields)


def fixed(*rest: Any) -> Callable[[Tensor], Arguments]:
    """For `rows`: x and always the same other arguments."""
    return lambda x: (x, *rest)


def composed(o: Any, op: str, *args: Any, **kwargs: Any) -> Any:
    """The fused op `op` made of the ops it fuses, those of `o`: equal to it bit for bit."""
    return SPECS[op].function(o, bound_arguments(op, args, kwargs))


class _References:
    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op not in SPECS:
            raise AttributeError(op)
        return SPECS[op].reference


# Sums run in int64 or float64. What the contract rounds to float32 is rounded there too, so that
# integer and elementwise ops must agree exactly and reductions within a bound.
reference = _References()
