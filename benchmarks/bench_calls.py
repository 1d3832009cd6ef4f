"""What a call of an op costs: ours, and of the same schema one that does nothing (call_floor.cpp).

    python -m benchmarks.bench_calls [--instructions]

Small sizes, one thread. The floor is torch's: Python, dispatcher, arguments taken apart, results
allocated. What an op takes above it are its checks, its memory and its work. `--instructions`
counts them under valgrind (its package, with headers), where AVX2 is the newest instruction set:
that a machine is busy changes no count.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("call_floor.cpp")
K, N = 256, 128
COUNTED = 100  # calls
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # as CMakeLists.txt has it
OURS, FLOOR = "bitnet", "bitnet_floor"


def build(library: Path) -> None:
    """Compile call_floor.cpp."""
    import torch

    home = Path(torch.__file__).parent
    include = [f"-I{home / 'include'}", STABLE_ABI]
    flags = ["-O2", "-std=c++20", "-shared", "-fPIC", *include, f"-L{home / 'lib'}"]
    command = ["g++", *flags, str(SOURCE), "-ltorch_cpu", "-o", str(library)]
    subprocess.run(command, check=True)


def calls(namespace: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each op by name, to be called on tensors of its own."""
    import torch

    import bitnet_ops

    ops = getattr(torch.ops, namespace)
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-1, 2, (N, K), generator=generator, dtype=torch.int8)
    weight = bitnet_ops.ops.repack(bitnet_ops.ops.pack(codes), K, "2bit")
    q = torch.randint(-127, 128, (K,), generator=generator, dtype=torch.int8)
    x, one, gain = torch.randn(1, K, generator=generator), torch.ones(1), torch.ones(K)
    yield "gemv", lambda: ops.gemv.default(weight, q, one, one, (N, K))
    yield "linear", lambda: ops.linear.default(x, weight, one, None, (N, K))
    yield "quantize_activations", lambda: ops.quantize_activations.default(x)
    yield "rms_norm", lambda: ops.rms_norm.default(x, gain, 1e-5)


def repeat(run: Callable[[], Any], _: int) -> None:
    for _ in range(COUNTED):
        run()


def measure(seconds: float) -> None:
    """The table of times."""
    from statistics import median

    from bitnet_ops.bench.harness import Budget, Timed, interleave

    for (name, ours), (_, floor) in zip(calls(OURS), calls(FLOOR), strict=True):
        runs = [Timed(partial(repeat, run), warm=True) for run in (ours, floor)]
        rounds = interleave(runs, Budget(seconds, min_rounds=20))
        ours_ns, floor_ns = (1e9 * median(samples) / COUNTED for samples in rounds.usable())
        print_row(name, ours_ns, floor_ns, "  disturbed" if rounds.disturbed else "")


def print_row(name: str, ours: float, floor: float, note: str = "") -> None:
    print(f"{name:<22}{ours:>10.0f}{floor:>10.0f}{ours - floor:>10.0f}{note}")


def count_here(library: Path) -> None:
    """In a process under valgrind: what it is to count."""
    counter = ctypes.CDLL(str(library))
    for namespace in (OURS, FLOOR):
        for name, run in calls(namespace):
            for _ in range(30):
                run()
            counter.count_start()
            for _ in range(COUNTED):
                run()
            counter.count_stop(f"{namespace} {name}".encode())


def count(library: Path, folder: Path) -> None:
    """The table of instructions."""
    file = folder / "callgrind"
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
    words = [*valgrind, f"--callgrind-out-file={file}", sys.executable, "-m", __spec__.name]
    subprocess.run(
        [*words, "--counted", str(library)],
        env={**os.environ, "BITNET_OPS_ISA": "avx2"}, check=True, capture_output=True,
    )  # fmt: skip
    found: dict[str, float] = {}
    for part in folder.glob("callgrind.*"):
        text = part.read_text()
        name = re.search(r"^desc: Trigger: Client Request: (.+)$", text, re.M)
        total = re.search(r"^(?:summary|totals): (\d+)", text, re.M)
        if name and total:
            found[name[1]] = int(total[1]) / COUNTED
    if not found:
        raise SystemExit("bench_calls: expected valgrind/callgrind.h, found none")
    for op in [key.split()[1] for key in sorted(found) if key.startswith(f"{OURS} ")]:
        print_row(op, found[f"{OURS} {op}"], found[f"{FLOOR} {op}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--instructions", action="store_true", help="count them under valgrind")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    parser.add_argument("--counted", metavar="LIBRARY", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        library = args.counted or Path(temporary) / "call_floor.so"
        if not args.counted:
            build(library)
        import torch

        torch.ops.load_library(str(library))
        torch.set_num_threads(1)
        with torch.inference_mode():
            if args.counted:
                return count_here(library)
            what = "instructions" if args.instructions else "nanoseconds"
            print(f"{what + ' a call':<22}{'op':>10}{'floor':>10}{'above it':>10}")
            return count(library, Path(temporary)) if args.instructions else measure(args.seconds)


if __name__ == "__main__":
    main()
