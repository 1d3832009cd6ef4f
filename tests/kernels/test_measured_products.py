"""BITNET_OPS_TUNING=measure=1: threads that come at once, and no result depends on the choice.

A process measures once for an ISA, so each case has one of its own.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import pytest

from bitnet_ops import _runtime
from isa_control import ISAS, forced_isa

# Six threads at once, each with inputs of its own; what the row says behind them.
PROGRAM = """
import hashlib, sys, threading, torch
from bitnet_ops import _runtime, ops
rng = torch.Generator().manual_seed(1)
codes = torch.randint(-1, 2, (1500, 640), generator=rng, dtype=torch.int8)
weight = ops.repack(ops.pack(codes), 640, sys.argv[1])
x = torch.randint(-127, 128, (6, 70, 640), generator=rng, dtype=torch.int8)
sums = [torch.empty(0)] * 6
ready = threading.Barrier(6)
def product(i):
    ready.wait()
    sums[i] = ops.gemm(weight, x[i], shape=(1500, 640))
threads = [threading.Thread(target=product, args=(i,)) for i in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert torch.equal(torch.stack(sums), x.int() @ codes.int().T)
again = ops.gemm(weight, x[0], shape=(1500, 640))
assert torch.equal(again, sums[0])
print(_runtime.tuning())
"""


@pytest.mark.parametrize("fmt", ["2bit", "1.6bit"])
@pytest.mark.parametrize("isa", ISAS)
def test_threads_that_come_at_once_get_the_same_sums(isa: str, fmt: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, fmt],
        env={**os.environ, "BITNET_OPS_TUNING": "measure=1", "BITNET_OPS_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout)["products"] == "measured"


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("fmt", ["2bit", "1.6bit"])
@pytest.mark.parametrize("isa", ISAS)
def test_times_of_products(isa: str, fmt: str, grouped: bool) -> None:
    known = set(_runtime.product_names())
    with forced_isa(isa):
        assert _runtime.product_times(fmt, 1, grouped) == {}
        for tokens in (4, 16, 100):
            seconds = _runtime.product_times(fmt, tokens, grouped)
            assert set(seconds) <= known and all(0 < s < 10 for s in seconds.values())
            plan = _runtime.product_plan(fmt, 1024, 1024, tokens, 1, grouped)
            assert not seconds or plan["algorithm"] in seconds


@pytest.mark.parametrize(
    ("fmt", "tokens", "expected"),
    [("3bit", 4, "the name of a layout"), ("2bit", 0, "numbers from 1 to 2^20, got 0")],
)
def test_times_of_no_product_are_an_error(fmt: str, tokens: int, expected: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(f"product_times: expected {expected}")):
        _runtime.product_times(fmt, tokens)
