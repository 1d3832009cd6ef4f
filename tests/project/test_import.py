"""Importing bitnet_ops: quick, complete, and clear about what is wrong when it cannot load.

Each case runs in a fresh interpreter. Packaging as such is test_packaging.py's matter.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

import bitnet_ops


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_import_registers_the_ops_and_loads_nothing_heavy() -> None:
    code = """
import sys
import torch
before = set(sys.modules)
import bitnet_ops
torch.ops.bitnet.linear.default
new = {name.split(".")[0] for name in set(sys.modules) - before}
heavy = new & {"transformers", "tokenizers", "safetensors", "jinja2", "rich", "sglang", "vllm"}
print(sorted(heavy), "bitnet_ops.ops" in sys.modules)
"""
    run = python(code)
    assert run.stdout.strip() == "[] True", run.stderr


def test_public_names_resolve_and_are_listed() -> None:
    for name in bitnet_ops.__all__:
        assert getattr(bitnet_ops, name) is not None
        assert name in dir(bitnet_ops)
    assert bitnet_ops.__version__ == importlib.metadata.version("bitnet-ops")
    with pytest.raises(AttributeError, match="'bitnet_ops' has no attribute 'lod'"):
        bitnet_ops.lod  # noqa: B018


# (what is done before the import, words that the ImportError must hold)
BROKEN = {
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
    for word in words:
        assert word in last
