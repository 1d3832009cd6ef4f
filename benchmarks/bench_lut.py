"""Table look-up (lut_prototype.cpp) and this package's GEMV, alternating, for docs/notes/lut.md.

    python -m benchmarks.bench_lut [--shape 1024x2560] [--seconds 2]

One thread, int8 activations and int32 sums on both sides, weights hot in the L2 cache, so that
arithmetic is what is compared: from memory both read 2 bits a weight. Each instruction set in a
process of its own; g++ compiles the prototype for it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

SOURCE = Path(__file__).with_name("lut_prototype.cpp")
# ours, and what the compiler is told for the prototype
ISAS = {"avx2": ["-mavx2"], "avx512_vnni": ["-mavx512f", "-mavx512bw"]}


def _call(function: Any, *arguments: Any) -> None:
    function(*arguments[:-1])


def measure(shape: tuple[int, int], seconds: float) -> None:
    """One row, for the instruction set of this process."""
    import torch

    from bitnet_ops import _runtime
    from bitnet_ops.bench.harness import Budget, Timed, interleave
    from bitnet_ops.nn.packing import pack_ternary

    torch.set_num_threads(1)
    isa = _runtime.isa()
    n, k = shape
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-1, 2, (n, k), generator=generator, dtype=torch.int8)
    x = torch.randint(-127, 128, (k,), generator=generator, dtype=torch.int8)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "lut.so"
        flags = ["-O3", "-std=c++20", "-shared", "-fPIC", *ISAS[isa]]
        subprocess.run(["g++", *flags, str(SOURCE), "-o", str(library)], check=True)
        lut = ctypes.CDLL(str(library))
    indices = torch.zeros(n // 128, k // 2, 64, dtype=torch.uint8)
    tables, sums = torch.zeros(16 * k, dtype=torch.uint8), torch.zeros(n, dtype=torch.int32)
    sizes = ctypes.c_int64(n), ctypes.c_int64(k)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (indices, x, tables, sums)]
    lut.lut_pack(ctypes.c_void_p(codes.data_ptr()), *sizes, pointers[0])
    look_up = partial(_call, lut.lut_gemv, *pointers[:2], *sizes, *pointers[2:])
    packed = pack_ternary(codes, torch.ones(1)).repack("2bit")
    product = torch.ops.bitnet.gemv
    arguments = packed.weight, x, None, None, (n, k)
    look_up(0)
    exact = codes.int() @ x.int()
    if not torch.equal(sums, exact) or not torch.equal(product(*arguments).int(), exact):
        raise SystemExit("bench_lut: expected both to give the exact sums, they do not")
    tiny = pack_ternary(codes[:4, :128], torch.ones(1)).repack("2bit")
    empty = tiny.weight, x[:128].contiguous(), None, None, (4, 128)
    runs = [
        Timed(look_up, warm=True),
        Timed(lambda _: product(*arguments), warm=True),
        Timed(lambda _: product(*empty), warm=True),  # the cost of a call, for both to be compared
    ]
    rounds = interleave(runs, Budget(seconds, min_rounds=20))
    table, ours, call = (median(samples) for samples in rounds.usable())
    rate = [n * k / value * 1e-9 for value in (table, ours, ours - call)]
    print(
        f"{isa:<12} {n}x{k:<6}{1e6 * table:>10.1f}{1e6 * ours:>9.1f}{1e6 * call:>9.1f}"
        f"{rate[0]:>12.1f}{rate[1]:>9.1f}{rate[2]:>13.1f}"
        f"{rate[2] / rate[0]:>8.2f}{'  disturbed' if rounds.disturbed else ''}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="1024x2560", help="outputs x inputs, a multiple of 128")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    n, k = (int(size) for size in options.shape.split("x"))
    if options.only:
        measure((n, k), options.seconds)
        return 0
    from bitnet_ops import _runtime, machine

    print(f"{machine.cpu_model()}, 1 thread")
    print(
        "ISA          shape        look-up us  gemv us  call us  look-up MAC/ns   gemv  less call"
        "   ratio"
    )
    for isa in ISAS:
        if isa not in _runtime.available_isas():
            continue
        command = [sys.executable, "-m", "benchmarks.bench_lut", "--only"]
        command += ["--shape", options.shape, "--seconds", str(options.seconds)]
        subprocess.run(command, env={**os.environ, "BITNET_OPS_ISA": isa}, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
