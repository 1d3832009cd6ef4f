"""Inputs of every op of torch.ops.bitnet: dtypes, shapes, strides, empty batches, leading dims.

The builders are in op_samples_ternary.py and op_samples_layer.py. A sample is made afresh on every
call (some ops mutate their arguments) and is the same every time. Expected values and tolerances
live in the tests.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import op_samples_layer
import op_samples_ternary
from op_schema import MUTATED
from op_values import Arguments

_BUILDERS = {**op_samples_ternary.BUILDERS, **op_samples_layer.BUILDERS}


@dataclass(frozen=True)
class Sample:
    op: str
    name: str
    build: Callable[[torch.Generator], Arguments]

    @property
    def id(self) -> str:
        return f"{self.op}-{self.name}"

    def args(self) -> Arguments:
        return self.build(torch.Generator().manual_seed(zlib.crc32(self.id.encode())))


SAMPLES: dict[str, list[Sample]] = {
    op: [Sample(op, name, build) for name, build in builder()] for op, builder in _BUILDERS.items()
}
ALL_SAMPLES = [sample for samples in SAMPLES.values() for sample in samples]
# Results of the probes depend on the machine by purpose; what is compared leaves them out.
# A private layout depends on the ISA by purpose; unprepack shows that it holds the same weights.
COMPARABLE_SAMPLES = [
    sample
    for sample in ALL_SAMPLES
    if not sample.op.startswith("_probe") and sample.op != "prepack"
]


def results(returned: Any, args: Arguments, op: str) -> list[Tensor]:
    """Everything an op call has produced: its returned tensors and the tensors it mutated."""
    if returned is None:
        produced: list[Tensor] = []
    elif isinstance(returned, Tensor):
        produced = [returned]
    else:
        produced = list(returned)
    # the last ones are scales, which only int8 caches have
    return produced + [args[index] for index in MUTATED[op] if index < len(args)]
