"""BITNET_OPS_TUNING=product=NAME: every row of the list of products gives the same results.

A process reads the variable once, so each name has one of its own; they are forks of one that has
imported torch and started nothing.
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
import hashlib, os, sys, torch

def digest():
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
    return digest.hexdigest()

for tuning in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        os.environ["BITNET_OPS_TUNING"] = tuning
        print(digest(), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(f"{tuning}: see above")
"""


def digests(isa: str, tunings: list[str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *tunings],
        env={**os.environ, "BITNET_OPS_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("isa", ISAS)
def test_every_product_gives_the_same_results(isa: str) -> None:
    assert {"gemv", "direct", "canonical"} <= set(NAMES)
    tunings = ["tables=0", *(f"product={name}" for name in NAMES)]
    found = digests(isa, tunings)
    assert len(found) == len(tunings) and len(found[0]) == 64
    assert set(found) == {found[0]}, dict(zip(tunings, found, strict=True))


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
