"""The specs of all ops, gathered from the files ops_*.py beside this one, and lists made of them.

An op of torch.ops.bitnet without a spec fails test_ops.py.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch import Tensor

from bounds import assert_equal, assert_within
from op_schema import MUTATED
from op_spec import SPECS, Call, Sample, composed, reference
from op_values import Arguments

__all__ = ["SPECS", "Call", "Sample", "composed", "reference"]

for _path in sorted(Path(__file__).parent.glob("ops_*.py")):
    importlib.import_module(_path.stem)

SAMPLES: dict[str, list[Sample]] = {
    op: [Sample(op, name, build) for name, build in spec.samples()] for op, spec in SPECS.items()
}
ALL_SAMPLES = [sample for samples in SAMPLES.values() for sample in samples]
COMPARABLE_SAMPLES = [sample for sample in ALL_SAMPLES if SPECS[sample.op].comparable]
LARGE = [Sample(op, "large", build) for op, spec in SPECS.items() for build in spec.large]
# By "op" or "op variant".
CALLS: dict[str, Call] = {
    f"{op} {variant}".strip(): call
    for op, spec in SPECS.items()
    for variant, call in spec.calls.items()
}


def results(returned: Any, args: Arguments, op: str) -> list[Tensor]:
    """Everything an op call has produced: its returned tensors and the tensors it mutated."""
    if returned is None:
        produced: list[Tensor] = []
    elif isinstance(returned, Tensor):
        produced = [returned]
    else:
        produced = list(returned)
    # the last ones are scales, which only int8 caches have
    given = [args[index] for index in MUTATED[op] if index < len(args)]
    mutated = [t for arg in given for t in (arg if isinstance(arg, list) else [arg])]
    return produced + [tensor for tensor in mutated if tensor is not None]


def assert_agrees(op: str, args: Arguments, actual: Tensor, expected: Tensor) -> None:
    """Compare one result of `op` on `args` with the reference, exactly or within its bound."""
    bound = SPECS[op].bound
    if bound is None or not expected.is_floating_point():
        assert_equal(actual, expected, op)
    else:
        assert_within(actual, expected, bound(args, expected), op)
