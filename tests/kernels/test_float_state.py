"""Results do not depend on the floating-point state of a thread, and the caller's state stays.

torch.set_flush_denormal and C's fesetround change what every operation of a thread gives; ops
compute in the default state on every thread.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitnet_ops import ops
from isa_control import torch_threads
from op_catalogue import COMPARABLE_SAMPLES, Sample, results

_LIBM = ctypes.CDLL(None)
# fenv.h of x86 and of 64-bit Arm
_X86 = {"upward": 0x800, "downward": 0x400, "toward zero": 0xC00}
_ARM = {"upward": 0x400000, "downward": 0x800000, "toward zero": 0xC00000}
MODES = _ARM if platform.machine() in ("aarch64", "arm64") else _X86
STATES = ["flush", *MODES]
SCALED_BY = 2.0**-131  # float32 values about 1 become subnormal


@contextlib.contextmanager
def state(name: str) -> Iterator[None]:
    """The calling thread in another floating-point state."""
    if name == "flush":
        assert torch.set_flush_denormal(True), "this CPU can flush subnormal numbers"
    else:
        assert _LIBM.fesetround(MODES[name]) == 0
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        _LIBM.fesetround(0)


def scaled(arg: Any) -> Any:
    """A copy; what is float32 is made subnormal."""
    if isinstance(arg, list):
        return [scaled(part) for part in arg]
    if not isinstance(arg, Tensor):
        return arg
    return arg * SCALED_BY if arg.dtype == torch.float32 else arg.clone()


def outcome(sample: Sample, args: tuple[Any, ...]) -> list[Tensor]:
    return results(getattr(ops, sample.op)(*args), args, sample.op)


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [
        t.contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in tensors if t.numel()
    ]


@pytest.mark.parametrize("name", STATES)
def test_the_states_are_other_states(name: str) -> None:
    """Else the tests below would show nothing: torch's own operations answer differently."""
    a, b = torch.tensor([2.0**-100, 1.0, -1.0]), torch.tensor([2.0**-40, 3.0, 3.0])
    expected = torch.cat([a * b, a / b])
    with state(name):
        got = torch.cat([a * b, a / b])
    assert not torch.equal(expected, got)
    assert torch.equal(torch.cat([a * b, a / b]), expected), "the state was put back"


@pytest.mark.parametrize("scale", [False, True], ids=["as they are", "subnormal"])
def test_no_op_depends_on_the_callers_state(scale: bool) -> None:
    checked = 0
    for sample in COMPARABLE_SAMPLES:
        given = sample.args()  # kept: a program lives as long as its handle
        args = tuple(map(scaled, given)) if scale else given
        wanted = bits(outcome(sample, copy.deepcopy(args)))
        for name in STATES:
            again = copy.deepcopy(args)
            with state(name):
                got = outcome(sample, again)
            assert bits(got) == wanted, f"{sample.id}, {name}"
            checked += len(wanted)
    assert checked > 100


@pytest.mark.parametrize("name", STATES)
def test_the_callers_state_is_put_back(name: str) -> None:
    a, b = torch.tensor([2.0**-100, 1.0, -1.0]), torch.tensor([2.0**-40, 3.0, 3.0])
    x, weight = torch.ones(1, 2), torch.ones(2)
    with state(name):
        before = a * b, a / b
        ops.rms_norm(x, weight, 1e-5)
        with pytest.raises(RuntimeError, match="eps"):
            ops.rms_norm(x, weight, -1.0)
        assert torch.equal(before[0], a * b) and torch.equal(before[1], a / b)


HERE = Path(__file__).resolve().parent
CHILD = r"""
import ctypes, sys, torch
sys.path[:0] = sys.argv[1].split(":")
from test_float_state import state
from bitnet_ops import _runtime, ops

torch.set_num_threads(2)
g = torch.Generator().manual_seed(2)
x = torch.randn(64, 1024, generator=g)
weight = torch.randint(0, 256, (2048, 256), generator=g, dtype=torch.uint8) & 0x55
scale, tiny, gain = torch.tensor([0.37]), torch.tensor([1e-41]), torch.randn(1024, generator=g)

def run():
    out = [ops.linear(x, weight, scale), ops.linear(x, weight, tiny), ops.rms_norm(x, gain, 1e-5)]
    return torch.cat([t.flatten() for t in out])

with state(sys.argv[2]):  # the pool's threads are made now, and inherit the state
    inside = run()
assert _runtime.region_count() >= 3
assert torch.equal(run().view(torch.int32), inside.view(torch.int32))
torch.set_num_threads(1)
assert torch.equal(run().view(torch.int32), inside.view(torch.int32))
"""


@pytest.mark.parametrize("name", STATES)
def test_no_op_depends_on_the_state_of_the_pools_threads(name: str) -> None:
    command = [
        sys.executable,
        "-c",
        CHILD,
        f"{HERE}:{HERE.parent / 'helpers'}",
        name,
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


def test_threads_of_one_call_agree() -> None:
    """Only the calling thread flushes; the pool's are older and do not."""
    x, weight = torch.ones(64, 1024), torch.full((2048, 256), 0x55 + 0x55, dtype=torch.uint8)
    tiny = torch.tensor([1e-41])
    with torch_threads(2):
        expected = ops.linear(x, weight, tiny)
        assert (expected != 0).all(), "the sums are subnormal, not zero"
        with state("flush"):
            got = ops.linear(x, weight, tiny)
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
