"""The house's own rules: layers, headers, no ISA leaks, one dispatch state, one OpenMP runtime.

Every check is also shown to fail on a file made to break it.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_script(name: str) -> ModuleType:
    """The module scripts/<name>.py."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


layers = load_script("check_layers")
isa_symbols = load_script("check_isa_symbols")


# --- layers --------------------------------------------------------------------------------------


def test_layers_hold() -> None:
    assert layers.check(ROOT) == []


@pytest.mark.parametrize(
    ("module", "text", "complaint"),
    [
        ("nn/head", "import bitnet_ops.generate.engine", "'nn' must not import 'generate'"),
        ("generate/engine", "from bitnet_ops import cli", "'generate' must not import 'cli'"),
        ("cli", "from . import integrations", ""),
        ("bench", "from . import integrations", "'bench' must not import 'integrations'"),
        ("config", "def f():\n    from .nn.linear import BitLinear", "must not import 'nn'"),
        ("models/llama", "from ..generate import engine", "'models' must not import 'generate'"),
        ("models/llama", "from .. import *", "'models' must not import '__init__'"),
        ("ops/head", "import sglang.srt", "may import sglang"),
        ("nn/linear", "from transformers import AutoModel", "may import transformers"),
        ("bench/model", "from benchmarks import engines", "may import benchmarks"),
        ("newcomer", "", "layer 'newcomer' has no row"),
    ],
)
def test_layer_check_sees_python_violations(
    tmp_path: Path, module: str, text: str, complaint: str
) -> None:
    path = tmp_path / f"{module}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    problems = layers.check_python_file(path, tmp_path)
    assert len(problems) == bool(complaint)
    assert not complaint or complaint in problems[0]


@pytest.mark.parametrize(
    ("file", "include", "allowed"),
    [
        ("kernels/avx2.cpp", "<immintrin.h>", True),
        ("kernels/avx2.cpp", "<vector>", False),
        ("kernels/avx2.cpp", "<cmath>", False),
        ("kernels/generic/rows.inl", "<torch/csrc/stable/tensor.h>", False),
        ("kernels/generic/rows.inl", '"ops/checks.h"', False),
        ("kernels/dispatch.cpp", "<string>", True),
        ("kernels/dispatch.cpp", '"torch/csrc/stable/ops.h"', False),
        ("runtime/team.cpp", '"kernels/kernel_table.h"', False),
        ("kernels/avx2.cpp", '"kernels/dispatch.h"', False),
        ("format/reader.cpp", "<Python.h>", False),
        ("format/reader.cpp", '"kernels/dispatch.h"', False),
        ("bindings.cpp", "<pybind11/pybind11.h>", True),
        ("bindings.cpp", "<torch/csrc/stable/tensor.h>", False),
        ("ops/linear.cpp", "<torch/csrc/stable/tensor.h>", True),
        ("ops/linear.cpp", "<torch/extension.h>", False),
        ("ops/linear.cpp", "<ATen/ATen.h>", False),
        ("ops/linear.cpp", "<pybind11/pybind11.h>", False),
        ("ops/linear.cpp", '"kernels/simd_avx2.h"', False),
        ("engine/product.cpp", "<vector>", True),
        ("engine/product.cpp", '"runtime/parallel.h"', True),
        ("engine/product.cpp", "<torch/csrc/stable/tensor.h>", False),
        ("engine/product.cpp", '"ops/checks.h"', False),
        ("engine/product.cpp", "<immintrin.h>", False),
        ("engine/product.cpp", '"kernels/generic/rows.inl"', False),
        ("ops/linear.cpp", '"engine/product.h"', True),
        ("elsewhere/x.h", "<vector>", False),
    ],
)
def test_layer_check_of_includes(tmp_path: Path, file: str, include: str, allowed: bool) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#include {include}\n")
    assert (layers.check_cpp_file(path, tmp_path) == []) is allowed


@pytest.mark.parametrize(
    ("file", "header", "complaint"),
    [
        ("engine/product.cpp", "<torch/csrc/stable/tensor.h>", True),
        ("tests/test_engine.cpp", "<ATen/ATen.h>", True),
        ("bindings.cpp", "<torch/csrc/stable/tensor.h>", True),
        ("ops/linear.cpp", "<torch/csrc/stable/tensor.h>", False),
        ("engine/product.cpp", "<vector>", False),
    ],
)
def test_layer_check_follows_includes(
    tmp_path: Path, file: str, header: str, complaint: bool
) -> None:
    for name, text in (
        (file, '#include "runtime/first.h"\n'),
        ("runtime/first.h", '#include "runtime/second.h"\n'),
        ("runtime/second.h", f"#include {header}\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    problems = layers.check_cpp_file(tmp_path / file, tmp_path)
    way = f"runtime/first.h -> runtime/second.h -> {header.strip('<>')}"
    assert [problem.endswith(way) for problem in problems] == ([True] if complaint else [])


@pytest.mark.parametrize(
    ("imports", "circles"),
    [
        ({"a": "from bitnet_ops.rooms import b", "b": "import bitnet_ops.rooms.c", "c": ""}, 0),
        ({"a": "from . import b", "b": "import bitnet_ops.rooms.c", "c": "from .a import x"}, 1),
        ({"a": "from .b import x", "b": "def f():\n    from bitnet_ops.rooms.a import y"}, 1),
        ({"a": "from .b import x", "b": "if TYPE_CHECKING:\n    from .a import y"}, 0),
        ({"a": "from .b import x", "b": "from .a import y", "c": "import bitnet_ops.d"}, 1),
        ({"a": "from bitnet_ops import d", "c": "from bitnet_ops.d import x"}, 1),
    ],
)
def test_circles_are_seen(tmp_path: Path, imports: dict[str, str], circles: int) -> None:
    (tmp_path / "rooms").mkdir()
    for name, text in imports.items():
        (tmp_path / "rooms" / f"{name}.py").write_text(text)
    back = "from bitnet_ops.rooms import a" if "d" in imports["a"] else ""
    (tmp_path / "d.py").write_text(back)
    assert len(layers.check_circles(tmp_path)) == circles


def test_rows_of_layers_are_in_order() -> None:
    assert layers.check_order({"low": set(), "high": {"low"}, "top": {"*"}}) == []
    for table in ({"low": {"high"}, "high": set()}, {"low": {"low"}}, {"low": {"missing"}}):
        assert len(layers.check_order(table)) == 1


def test_layer_check_of_nothing_is_a_failure(tmp_path: Path) -> None:
    assert len(layers.check(tmp_path)) == 1


# --- files ---------------------------------------------------------------------------------------

LONGEST_FILE = 500  # lines; CONTRIBUTING.md


def source_files() -> list[Path]:
    folders = ("python", "csrc", "tests", "scripts", "benchmarks", "examples", "build_backend")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    suffixes = {".py", ".cpp", ".h", ".inl"}
    # stubs stand for files of others and refer to their package, which says what they are
    return [p for p in found if p.suffix in suffixes and not {"data", "stubs"} & set(p.parts)]


def header_lines(path: Path) -> int:
    """Lines of the docstring or of the comment that a source file opens with."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return len((ast.get_docstring(ast.parse(text)) or "").splitlines())
    return next(i for i, line in enumerate([*text.splitlines(), ""]) if not line.startswith("//"))


def test_every_source_file_says_what_it_is_and_ends_in_time() -> None:
    files = source_files()
    assert len(files) > 200
    silent = [str(p.relative_to(ROOT)) for p in files if header_lines(p) == 0]
    assert not silent, f"no line that says what the file is for: {', '.join(silent)}"
    long = [str(p.relative_to(ROOT)) for p in files if p.read_bytes().count(b"\n") > LONGEST_FILE]
    assert not long, f"more than {LONGEST_FILE} lines in: {', '.join(long)}"


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.cpp", "// One.\n#include <vector>\n", 1),
        ("a.h", "#pragma once\n", 0),
        ("a.inl", "// One.\n// two.\n// Three.\n\n// No more.\n", 3),
        ("a.py", "import ast\n", 0),
        ("a.py", '"""One."""\n', 1),
        ("a.py", '"""One.\n\nThree.\n"""\n# four\n', 3),
    ],
)
def test_header_lines_are_counted(tmp_path: Path, name: str, text: str, lines: int) -> None:
    (tmp_path / name).write_text(text)
    assert header_lines(tmp_path / name) == lines


# --- ISA objects ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_isa_leaks_and_ops_library_uses_the_stable_abi() -> None:
    assert isa_symbols.check(ROOT / "build" / "kernels") == []


def compile_object(tmp_path: Path, source: str, *flags: str) -> Path:
    (tmp_path / "x.cpp").write_text(source)
    command = ["g++", "-std=c++20", "-O2", "-fPIC", *flags, "x.cpp", "-o", "x.o"]
    subprocess.run(
        [*command, "-c"] if "-shared" not in flags else command, cwd=tmp_path, check=True
    )
    return tmp_path / "x.o"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("namespace bitnet::avx2 { int table() { return 1; } }", None),
        ("namespace bitnet::avx2 { int rows() { return 1; } }", "expected the one exported symbol"),
        (
            "namespace bitnet::avx2 { int table() { return 1; } int other() { return 2; } }",
            "expected the one exported symbol",
        ),
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
def test_isa_object_check(tmp_path: Path, source: str, complaint: str | None) -> None:
    problems = isa_symbols.check_isa_object(compile_object(tmp_path, source), "avx2")
    if complaint is None:
        assert problems == []
    else:
        assert any(complaint in problem for problem in problems)


@pytest.mark.skipif("x86_64" not in sys.implementation._multiarch, reason="the rule is about x86")
def test_baseline_check_sees_avx(tmp_path: Path) -> None:
    source = "void f(float* x) { for (int i = 0; i < 64; ++i) x[i] += 1.0f; }"
    assert isa_symbols.check_baseline(compile_object(tmp_path, source)) == []
    problems = isa_symbols.check_baseline(compile_object(tmp_path, source, "-O3", "-mavx2"))
    assert len(problems) == 1 and "AVX instructions" in problems[0]


def test_ops_library_check_sees_internal_symbols_and_openmp(tmp_path: Path) -> None:
    source = (
        "namespace at { int internal(); }\n"
        'extern "C" int aoti_torch_fine();\n'
        'extern "C" int omp_get_max_threads();\n'
        "int f() { return at::internal() + aoti_torch_fine() + omp_get_max_threads(); }"
    )
    library = compile_object(tmp_path, source, "-shared", "-fopenmp")
    problems = isa_symbols.check_ops_library(library)
    assert any("needs at::internal()" in problem for problem in problems)
    assert any("links libgomp" in problem for problem in problems)
    assert not any("aoti_torch_fine" in problem for problem in problems)


def test_objdump_and_friends_are_there() -> None:
    assert all(shutil.which(tool) for tool in ("nm", "objdump", "readelf", "g++"))


# --- the process ---------------------------------------------------------------------------------


def run_python(code: str) -> str:
    """stdout of `code` in a fresh interpreter."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_one_openmp_runtime_and_one_kernel_library_are_mapped() -> None:
    maps = run_python(
        "import torch, bitnet_ops, bitnet_ops._runtime\n"
        "torch.set_num_threads(2)\n"
        "bitnet_ops.ops.quantize_activations(torch.ones(64, 512))\n"
        "print(open('/proc/self/maps').read())"
    )
    paths = {line.split()[-1] for line in maps.splitlines() if "/" in line}
    openmp = [path for path in paths if re.match(r"lib(gomp|omp|iomp5)\b", Path(path).name)]
    assert len(openmp) == 1, openmp
    kernels = [path for path in paths if Path(path).name == "libbitnet_kernels.so"]
    assert len(kernels) == 1, kernels


def test_importing_the_package_does_not_import_optional_packages() -> None:
    loaded = run_python(
        "import sys, bitnet_ops; print([m for m in ('sglang', 'vllm', 'transformers', 'gguf',"
        " 'matplotlib', 'bitnet_ops.integrations') if m in sys.modules])"
    )
    assert loaded.strip() == "[]"
