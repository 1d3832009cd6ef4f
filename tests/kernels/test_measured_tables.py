"""BITNET_OPS_TUNING=tables=measure: what asks for the measurement; no result depends on it.

A process measures once for an ISA, so each case has one of its own.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from typing import Any

import pytest

from isa_control import ISAS

HAVE_TABLES = {"avx2", "avx_vnni", "avx512_vnni"}
# Six threads at once, each with inputs of its own; what the row says before and after.
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


def row_after(use: str, isa: str, fmt: str = "2bit") -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, fmt],
        env={**os.environ, "BITNET_OPS_TUNING": f"tables={use}", "BITNET_OPS_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    row: dict[str, Any] = ast.literal_eval(done.stdout)
    return row


@pytest.mark.parametrize("fmt", ["2bit", "1.6bit"])
@pytest.mark.parametrize("isa", ISAS)
def test_threads_that_come_at_once_get_the_same_sums(isa: str, fmt: str) -> None:
    row = row_after("measure", isa, fmt)
    if isa in HAVE_TABLES:
        assert row["sum_tables_gain"] > 0 and row["sum_tables_ms"] > 0
        assert row["sum_tables"] == (row["sum_tables_gain"] >= 1.05)
    else:
        assert (row["sum_tables"], row["sum_tables_gain"]) == (False, None)


@pytest.mark.parametrize("isa", ISAS)
def test_nothing_is_measured_where_the_variable_decides(isa: str) -> None:
    for use in ("0", "1"):
        row = row_after(use, isa)
        assert row["sum_tables"] == (use == "1" and isa in HAVE_TABLES)
        assert row["sum_tables_gain"] is None
