#!/usr/bin/env python3
"""Proves by nm, objdump and readelf that no ISA leaks, and what `_ops.so` needs of torch.

1. Each ISA object exports ONE strong symbol, its table getter in namespace bitnet::<isa>; it has no
   weak symbol (the linker would merge it with a copy compiled for another CPU: an illegal
   instruction on older machines) and needs nothing but libc, libm and other getters.
2. Baseline code (dispatch, formats, scalar table, `_ops.so`, `_runtime`) has no AVX instruction.
3. `_ops.so` takes from torch only the stable C interface, and links no OpenMP runtime of its own.

Brings the kernel objects up to date where the package was built. Standard library only; exit
status 1 and one line per violation.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What an ISA object may leave undefined besides getters: C functions of libc and libm, which are
# compiled once for the baseline and choose their own variant at run time.
C_LIBRARY = re.compile(
    r"mem(cpy|move|set|cmp)|f?abort|__stack_chk_fail|_GLOBAL_OFFSET_TABLE_|"
    r"(fma|sqrt|exp|log|floor|ceil|rint|nearbyint|round|roundeven|trunc|pow|sin|cos)f?"
)
GETTER = re.compile(r"bitnet::(\w+)::table\(\)")
AVX = re.compile(r"\s(v[a-z0-9]+)\s+.*%(?:xmm|ymm|zmm)\d+|%[yz]mm\d+")
# Anything versioned comes from the C or C++ runtime; the unversioned names are the linker's own.
# The last one is weak: of the OpenMP runtime that torch loaded, if that knows it (torch_views.cpp).
RUNTIME_SYMBOL = re.compile(
    r".*@(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+|__gmon_start__|_ITM_\w+|__cxa_finalize.*|__tls_get_addr.*"
    r"|omp_pause_resource_all"
)


def run(*command: str | Path) -> str:
    return subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True
    ).stdout


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """(nm type letter, demangled name) of every symbol that nm lists with `options`."""
    rows = [
        re.match(r"(?:[0-9a-f]+)?\s+(\w) (.+)", line)
        for line in run("nm", "-C", *options, path).splitlines()
    ]
    return [(row[1], row[2]) for row in rows if row]


def check_isa_object(path: Path, isa: str) -> list[str]:
    """Violations of rule 1 in the object file of `isa`."""
    problems, getters = [], []
    for kind, name in symbols(path):
        if kind in "WwVvu":
            problems.append(f"{path}: weak or merged symbol {name} (type {kind})")
        elif kind == "U":
            if not C_LIBRARY.fullmatch(name) and not GETTER.fullmatch(name):
                problems.append(f"{path}: needs foreign symbol {name}")
        elif kind.isupper():
            getters.append(name)
    expected = f"bitnet::{isa}::table()"
    if getters != [expected]:
        problems.append(f"{path}: expected the one exported symbol {expected}, got {getters}")
    return problems


def check_baseline(path: Path) -> list[str]:
    """Violations of rule 2: AVX instructions in code that runs on every x86-64."""
    text = run("objdump", "-d", "--no-show-raw-insn", path)
    if "elf64-x86-64" not in text:
        return []  # the rule is about x86; other architectures have their SIMD in the baseline
    hits = [line.strip() for line in text.splitlines() if AVX.search(line)]
    return [f"{path}: {len(hits)} AVX instructions in baseline code: {hits[0]}"] if hits else []


def check_ops_library(path: Path) -> list[str]:
    """Violations of rule 3 in `_ops.so`."""
    problems = []
    for _, name in symbols(path, "-D", "--undefined-only"):
        stable = name.startswith(("aoti_torch_", "torch_", "bitnet::"))
        if not stable and not RUNTIME_SYMBOL.fullmatch(name):
            problems.append(f"{path}: needs {name}, which is not in torch's stable C interface")
    for needed in re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", path)):
        if re.match(r"lib(gomp|omp|iomp5|torch|c10|torch_python)\b", needed):
            problems.append(f"{path}: links {needed}")
    return problems


def build_objects(build: Path) -> None:
    """Configure and build the kernel library in `build`; quick when nothing changed."""
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = [*generator, "-DBITNET_KERNELS_ONLY=ON"]
    run(
        "cmake", "-S", ROOT, "-B", build, *([] if (build / "CMakeCache.txt").is_file() else options)
    )
    run("cmake", "--build", build, "--parallel", "2", "--target", "bitnet_kernels")


def package_tree() -> Path:
    """Where pip built what is installed here, or a folder for the kernels alone."""
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    caches = sorted(ROOT.glob(f"build/{tag}-*/CMakeCache.txt"))
    return caches[0].parent if caches else ROOT / "build" / "kernels"


def isa_objects(build: Path) -> dict[str, Path]:
    """ISA name -> object file, from the build tree."""
    found = build.glob("CMakeFiles/bitnet_isa_*.dir/csrc/kernels/*.o")
    return {re.search(r"/bitnet_isa_(\w+)\.dir/", str(path))[1]: path for path in sorted(found)}


def installed_binaries() -> list[Path]:
    """`_ops.so` and `_runtime` of the bitnet_ops that this interpreter would import."""
    try:
        specs = [importlib.util.find_spec(f"bitnet_ops.{name}") for name in ("_ops", "_runtime")]
    except ModuleNotFoundError:
        specs = []
    binaries = [Path(spec.origin) for spec in specs if spec and spec.origin]
    if len(binaries) != 2:
        raise SystemExit("check_isa_symbols: bitnet_ops is not installed here; run scripts/test")
    return binaries


def check(build: Path) -> list[str]:
    """Every violation, and a complaint when the build has no ISA at all."""
    build_objects(build)
    isas = isa_objects(build)
    if not {"scalar"} < set(isas):
        return [f"{build}: expected objects of scalar and at least one more ISA, got {set(isas)}"]
    core = sorted(build.glob("CMakeFiles/bitnet_core.dir/**/*.o"))
    ops, runtime = installed_binaries()
    problems = [line for isa, path in isas.items() for line in check_isa_object(path, isa)]
    for path in [*core, isas["scalar"], ops, runtime]:
        problems += check_baseline(path)
    return problems + check_ops_library(ops)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=package_tree())
    problems = check(parser.parse_args().build)
    for line in problems:
        print(line, file=sys.stderr)
    print(f"check_isa_symbols: {len(problems)} violation(s)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
