"""BITNET_OPS_TUNING=product=NAME: every row of the list of products gives the same results.

A process reads the variable once, so each name has one of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bitnet_ops import _runtime
from isa_control import ISAS

NAMES = _runtime.product_names()
# Tokens and rows on both sides of what each row usually takes.
PROGRAM = """
import hashlib, torch
from bitnet_ops import ops
rng = torch.Generator().manual_seed(1)
digest = hashlib.sha256()
for rows, k in ((37, 300), (1100, 640)):
    codes = torch.randint(-1, 2, (rows, k), generator=rng, dtype=torch.int8)
    packed = ops.pack(codes)
    scale = torch.rand(rows, generator=rng)
    for fmt in ("canonical", "2bit", "1.6bit"):
        weight = packed if fmt == "canonical" else ops.repack(packed, k, fmt)
        for tokens in (1, 3, 17, 70):
            x = torch.randint(-127, 128, (tokens, k), generator=rng, dtype=torch.int8)
            sums = ops.gemm(weight, x, shape=(rows, k))
            assert torch.equal(sums, x.int() @ codes.int().T), (rows, k, fmt, tokens)
            y = ops.linear(x.float(), weight, scale, shape=(rows, k))
            digest.update(y.numpy().tobytes())
print(digest.hexdigest())
"""


def digest(tuning: str, isa: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "BITNET_OPS_TUNING": tuning, "BITNET_OPS_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("isa", ISAS)
def test_every_product_gives_the_same_results(isa: str) -> None:
    usual = digest("tables=0", isa)
    assert len(usual) == 65
    assert {"gemv", "direct", "canonical"} <= set(NAMES)
    for name in NAMES:
        assert digest(f"product={name}", isa) == usual, name


@pytest.mark.parametrize("name", ["panels", "tables_"])
def test_an_unknown_product_is_an_error(name: str) -> None:
    program = "import bitnet_ops; bitnet_ops._runtime.tuning()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "BITNET_OPS_TUNING": f"product={name}"},
        capture_output=True,
        text=True,
    )
    said = "BITNET_OPS_TUNING: expected product=a name of the list of products ("
    assert done.returncode != 0 and said in done.stderr
    assert f"got 'product={name}'" in done.stderr
