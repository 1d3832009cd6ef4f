"""Layers, includes, no leak of an instruction set, one dispatch state, one OpenMP runtime."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import check_includes  # noqa: E402
import check_isa_symbols  # noqa: E402


def run_python(code: str) -> str:
    """stdout of `code` in a fresh interpreter."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def test_imports_keep_the_contracts_of_pyproject() -> None:
    run = "from importlinter.cli import lint_imports; print(lint_imports(no_cache=True))"
    assert run_python(run).splitlines()[-1] == "0"


def test_includes_keep_the_rules() -> None:
    assert check_includes.check(ROOT / "csrc") == []


@pytest.mark.parametrize(
    ("file", "include", "allowed"),
    [
        ("kernels/avx2.cpp", "<immintrin.h>", True),
        ("kernels/avx2.cpp", "<vector>", False),
        ("kernels/rows/rows.inl", '"engine/products/product.h"', False),
        ("format/reader.cpp", "<Python.h>", False),
        ("runtime/team.cpp", '"kernels/kernel_table.h"', False),
        ("engine/products/product.cpp", "<immintrin.h>", False),
        ("engine/products/product.cpp", '"kernels/rows/rows.inl"', False),
        ("bindings.cpp", "<torch/csrc/stable/tensor.h>", False),
        ("ops/linear.cpp", "<torch/csrc/stable/tensor.h>", True),
        ("ops/linear.cpp", "<ATen/ATen.h>", False),
        ("elsewhere/x.h", "<vector>", False),
    ],
)
def test_a_wrong_include_is_seen_through_headers_too(
    tmp_path: Path, file: str, include: str, allowed: bool
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#include {include}\n")
    assert (check_includes.check_file(path, tmp_path) == []) is allowed
    if include.startswith("<") and not file.startswith(("kernels", "elsewhere")):
        path.write_text('#include "runtime/first.h"\n')
        (tmp_path / "runtime").mkdir(exist_ok=True)
        (tmp_path / "runtime" / "first.h").write_text('#include "runtime/second.h"\n')
        (tmp_path / "runtime" / "second.h").write_text(f"#include {include}\n")
        assert [p for p in check_includes.check_file(path, tmp_path) if "->" in p] or allowed


# --- objects -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_isa_leaks_and_ops_library_uses_the_stable_abi() -> None:
    assert check_isa_symbols.check(check_isa_symbols.package_tree()) == []


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("namespace bitnet::avx2 { int table() { return 1; } }", ""),
        ("namespace bitnet::avx2 { int rows() { return 1; } }", "expected the one exported symbol"),
        (
            "template <class T> __attribute__((noinline)) T twice(T x) { return x + x; }\n"
            "namespace bitnet::avx2 { int v; int table() { return twice(v); } }",
            "weak or merged symbol int twice<int>(int)",
        ),
        (
            "namespace bitnet { int shared(); }\n"
            "namespace bitnet::avx2 { int table() { return shared(); } }",
            "needs foreign symbol bitnet::shared()",
        ),
    ],
)
def test_an_isa_object_that_leaks_is_seen(tmp_path: Path, source: str, complaint: str) -> None:
    (tmp_path / "x.cpp").write_text(source)
    command = ["g++", "-std=c++20", "-O2", "-fPIC", "-c", "x.cpp", "-o", "x.o"]
    subprocess.run(command, cwd=tmp_path, check=True)
    problems = check_isa_symbols.check_isa_object(tmp_path / "x.o", "avx2")
    assert complaint in "\n".join(problems) and bool(problems) == bool(complaint)


def test_one_openmp_runtime_and_one_kernel_library_are_mapped() -> None:
    maps = run_python(
        "import torch, bitnet_ops, bitnet_ops._runtime\n"
        "torch.set_num_threads(2)\n"
        "bitnet_ops.ops.quantize_activations(torch.ones(64, 512))\n"
        "print(open('/proc/self/maps').read())"
    )
    paths = {Path(line.split()[-1]) for line in maps.splitlines() if "/" in line}
    assert len([p for p in paths if re.match(r"lib(gomp|omp|iomp5)\b", p.name)]) == 1, paths
    assert len([p for p in paths if p.name == "libbitnet_kernels.so"]) == 1
