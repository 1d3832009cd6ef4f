"""Importing bitnet_ops: quick, complete, documented, and clear when it cannot load."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import subprocess
import sys
from typing import Any

import grimp
import pytest
import torch

import bitnet_ops
from bitnet_ops import ops

CLASSES = [name for name in bitnet_ops.__all__ if inspect.isclass(getattr(bitnet_ops, name))]
FUNCTIONS = ["accelerate", "load"]
OPERATORS = sorted(
    name.split("::")[1]
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("bitnet::") and not name.startswith("bitnet::_") and "." not in name
)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_import_registers_the_ops_and_loads_nothing_heavy() -> None:
    run = python(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import bitnet_ops\n"
        "torch.ops.bitnet.linear.default\n"
        "new = set(sys.modules) - before\n"
        "heavy = {'transformers', 'tokenizers', 'safetensors', 'jinja2', 'rich', 'sglang', 'vllm',"
        " 'gguf', 'matplotlib', 'bitnet_ops.integrations'}\n"
        "print(sorted(heavy & new), 'bitnet_ops.ops' in new)"
    )
    assert run.stdout.strip() == "[] True", run.stderr


def test_opening_a_model_imports_no_converter() -> None:
    run = python(
        "import sys, bitnet_ops\n"
        "bitnet_ops.load().generate('In', max_new_tokens=1)\n"
        "print([name for name in sys.modules if name.startswith('bitnet_ops.convert')])"
    )
    assert run.stdout.strip() == "[]", run.stderr


def test_no_modules_import_each_other_not_even_for_their_types() -> None:
    graph = grimp.build_graph(
        "bitnet_ops", exclude_type_checking_imports=False, cache_dir=None
    )  # the package itself imports names for types only
    below = {m: graph.find_modules_directly_imported_by(m) & graph.modules for m in graph.modules}
    below.pop("bitnet_ops")
    while leaves := {m for m, found in below.items() if not found & below.keys()}:
        below = {m: found for m, found in below.items() if m not in leaves}
    assert not below


# (what is done before the import, words that the ImportError must hold)
BROKEN = {
    "other_python": (
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n.endswith('_runtime') else real(n, *a)",
        ["its module _runtime for Python 3.", "found ", "a Python that it was built for"],
    ),
    "old_torch": (
        "torch.__version__ = '2.9.1+cpu'",
        ["expected torch >= 2.10, got torch 2.9.1+cpu", "upgrade torch", "built with compiler"],
    ),
    "no_binary": (
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n == 'bitnet_ops._ops' else real(n, *a)",
        ["expected the compiled op library", "was not built for this Python", "pip install ."],
    ),
    "not_a_library": (
        "def load_library(path): raise OSError('invalid ELF header')\n"
        "torch.ops.load_library = load_library",
        ["to load into torch", "got: invalid ELF header", "built with compiler", "pip install ."],
    ),
}


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_a_broken_installation_says_what_is_wrong_and_what_to_do(case: str) -> None:
    action, words = BROKEN[case]
    run = python(f"import importlib.util\nimport torch\n{action}\nimport bitnet_ops\n")
    last = run.stderr.strip().splitlines()[-1]
    assert run.returncode == 1 and last.startswith("ImportError: bitnet_ops: expected"), run.stderr
    assert [word for word in words if word not in last] == []


# --- public names --------------------------------------------------------------------------------


def missing_in(doc: str, function: Any) -> list[str]:
    """Parameters of `function` that `doc` does not name."""
    names = [n for n in inspect.signature(function).parameters if n not in ("self", "cls")]
    return [name for name in names if not re.search(rf"\b{name}\b", doc)]


def test_public_names_resolve_and_are_listed() -> None:
    for name in bitnet_ops.__all__:
        assert getattr(bitnet_ops, name) is not None and name in dir(bitnet_ops)
    for name in bitnet_ops._PACKAGES:
        package = getattr(bitnet_ops, name)
        assert name in dir(bitnet_ops) and set(getattr(package, "__all__", ())) <= set(dir(package))
    assert set(bitnet_ops.__all__) - set(CLASSES) - set(FUNCTIONS) == {"__version__", "ops"}
    assert bitnet_ops.__version__ == importlib.metadata.version("bitnet-ops")
    with pytest.raises(AttributeError, match="'bitnet_ops' has no attribute 'lod'"):
        bitnet_ops.lod  # noqa: B018


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_and_its_methods_are_documented(name: str) -> None:
    cls = getattr(bitnet_ops, name)
    assert cls.__doc__ and len(cls.__doc__) > 60
    for method, value in vars(cls).items():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if not method.startswith("_") and inspect.isfunction(function):
            assert function.__doc__, method


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_names_arguments_results_and_errors(name: str) -> None:
    function = getattr(bitnet_ops, name)
    assert missing_in(function.__doc__, function) == []
    assert "Returns" in function.__doc__ and "Raises" in function.__doc__


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_names_arguments_results_and_errors(name: str) -> None:
    """The wrapper's docstring is the reference."""
    function = getattr(ops, name)
    doc = function.__doc__
    assert missing_in(doc, function) == []
    assert "Args:" in doc and "Raises:" in doc
    assert "Returns:" in doc or re.search(r"(?i)writ|chang|release", doc)  # those that give nothing
    assert re.search(r"\[[^\]]*\]", doc)  # shapes stand in brackets
