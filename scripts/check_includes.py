#!/usr/bin/env python3
"""Who may include whom in csrc: torch in ops/ alone, SIMD in kernels/ alone, threads above kernels.

One line per violation, exit status 1. What a header includes counts for whoever includes it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "csrc"

INTRINSICS = r"immintrin\.h|arm_neon\.h|cstdint|cstddef"
NO_TORCH = r"(?!torch/|ATen/|c10/).*"
NEITHER = r"(?!torch/|ATen/|c10/|pybind11/|Python\.h).*"  # neither torch nor Python
NO_SIMD = NEITHER + r"(?<!mmintrin\.h)(?<!arm_neon\.h)"
STABLE_TORCH = (
    r"torch/(csrc/stable|csrc/inductor/aoti_torch/c|headeronly)/.*|"
    r"(?!torch/|ATen/|c10/|pybind11/|Python\.h|omp\.h).*"
)
# Beginning of a file's name -> own headers that it may include, other headers that it may reach.
# The first row that fits.
RULES = [
    ("kernels/dispatch", r"kernels/(dispatch|features|kernel_table|isa_tables)\.h", NEITHER),
    ("kernels/features", r"kernels/features\.h", NEITHER),
    ("kernels/check_words", "", NEITHER),
    ("kernels/tile_check", r"kernels/(check_words|features|tile_check)\.h", NEITHER),
    (
        "kernels/pair_unit",
        r"kernels/(check_words|dispatch|features|kernel_table|pair_unit)\.h",
        NEITHER,
    ),
    ("kernels/", r"kernels/(?!dispatch).*|format/layout\.h", INTRINSICS),
    ("runtime/", r"runtime/.*", NEITHER),
    ("format/", r"format/.*", NEITHER),
    (
        "engine/",
        r"(engine|runtime)/.*|format/layout\.h|kernels/(dispatch|kernel_table|pair_unit|tile_check)\.h",
        NO_SIMD,
    ),
    ("tests/", r"(tests|engine|runtime|format|kernels)/.*", NEITHER),
    (
        "bindings",
        r"bindings.*|(runtime|format)/.*|engine/products/(plan|tune)\.h|"
        r"kernels/(dispatch|features|kernel_table|pair_unit|tile_check)\.h",
        NO_TORCH,
    ),
    ("manylinux_2_28", "", NEITHER),
    ("hf_kernel", r"runtime/.*|format/layout\.h|kernels/(dispatch|kernel_table)\.h", NEITHER),
    (
        "ops",
        r"(ops|engine|runtime)/.*|format/layout\.h|kernels/(dispatch|kernel_table)\.h",
        STABLE_TORCH,
    ),
]
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]', re.MULTILINE)


def check_file(path: Path, sources: Path) -> list[str]:
    """Violations in the file `path` below `sources`."""
    name = path.relative_to(sources).as_posix()
    rule = next((row for row in RULES if name.startswith(row[0])), None)
    if rule is None:
        return [f"{name}: expected a row in RULES of scripts/check_includes.py, got none"]
    _, own, others = rule
    problems, seen, todo = [], {name}, [(path, [name])]
    for file, way in todo:  # grows: breadth first
        for opening, header in INCLUDE.findall(file.read_text(encoding="utf-8")):
            is_own = opening == '"'  # the build makes some
            if (sources / header).is_file() and header not in seen:
                seen.add(header)
                todo.append((sources / header, [*way, header]))
            if is_own and len(way) > 1:
                continue  # that header's own rule
            if not re.fullmatch(own if is_own else others, header):
                problems.append(f"{' -> '.join([*way, header])}: '{rule[0]}' must not")
    return problems


def check(sources: Path) -> list[str]:
    files = [p for p in sorted(sources.rglob("*")) if p.suffix in {".cpp", ".h", ".inl"}]
    assert files, f"{sources}: expected C++ files, found none"
    return [problem for path in files for problem in check_file(path, sources)]


if __name__ == "__main__":
    found = check(SOURCES)
    sys.exit("\n".join(found) if found else 0)
