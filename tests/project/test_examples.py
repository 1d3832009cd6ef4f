"""Every block of python and bash on the pages runs as pasted, with small models in their place.

`bitnet-ops serve` runs on a free port until it is ready and is then ended; what asks localhost:8080
asks a server of the demo model. A block that cannot run has `<!-- not run: reason -->` on the line
before it. It is compiled, its names are defined, and its `bitnet-ops` commands are words that the
command line takes.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bitnet_ops import cli
from bitnet_ops.convert import export_gguf
from bitnet_ops.language_model import DEMO_DIR
from served import app_of, serving

ROOT = Path(__file__).resolve().parents[2]
HISTORY = ("CHANGELOG.md", "docs/log.md")  # what they name may be gone
PAGES = {
    name: path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("csrc/**/*.md")]
    if (name := path.relative_to(ROOT).as_posix()) not in HISTORY
}
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>[\w-]*)\n(?P<code>.*?)^```$",
    flags=re.DOTALL | re.MULTILINE,
)
COMMANDS = r"^\$? ?(bitnet-ops|cmake|pip|python|scripts/\w+) "
MASTERS = ROOT / "tests" / "data" / "demo-model"
CHECKPOINTS = ("bitnet-2b", "masters", "checkpoint", "microsoft/bitnet-b1.58-2B-4T")
ADAPTERS = ("adapter", "adapters/fr", "adapters/law", "adapters/chess")
PORT = "localhost:8080"
SERVE = """
bitnet-ops() {
  if [ "$1" != serve ]; then command bitnet-ops "$@"; return; fi
  command bitnet-ops "$@" --port 0 2>said &
  until grep -q ^ready said; do kill -0 $! || { cat said >&2; exit 1; }; sleep 0.1; done
  kill -TERM $!
  wait $!
}
"""
WRITES = re.compile(r"^bitnet-ops (?:convert|quantize|export|dummy) \S+ (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    reason: str | None


BLOCKS = {
    f"{page}-{i}": Block(found["language"], found["code"], found["reason"])
    for page, text in PAGES.items()
    for i, found in enumerate(FENCE.finditer(text))
}
RUN = [name for name, b in BLOCKS.items() if b.language in ("python", "bash") and not b.reason]
LEFT_OUT = [name for name, block in BLOCKS.items() if block.reason]


def test_no_block_escapes() -> None:
    fences = sum(len(re.findall(r"^ *```", text, re.MULTILINE)) for text in PAGES.values())
    assert fences == 2 * len(BLOCKS), "a fence is indented, or not closed"
    assert len(RUN) > 15 and {BLOCKS[name].language for name in LEFT_OUT} == {"python", "bash"}
    for name, block in BLOCKS.items():
        if block.language not in ("python", "bash", "dockerfile"):
            assert not re.search(COMMANDS, block.code, re.MULTILINE), f"{name}: ```bash it is"
    marks = sum(len(re.findall("^<!-- not run", text, re.M)) for text in PAGES.values())
    assert marks == len(LEFT_OUT), "a mark that stands before no block"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what pages name: a converted model, a checkpoint, a GGUF file, adapters."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(DEMO_DIR, folder / "my-model")
    export_gguf(DEMO_DIR, folder / "model.gguf")
    for name in CHECKPOINTS:
        shutil.copytree(MASTERS, folder / name)
    for name in ADAPTERS:
        _write_adapter(folder / name)
    return folder


def _write_adapter(folder: Path) -> None:
    folder.mkdir(parents=True)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {"A": torch.randn(2, 256), "B": torch.randn(256, 2)}
    tensors = {f"{module}.lora_{name}.weight": value for name, value in factors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Host and port of a server of the demo model."""
    with serving(app_of()) as address:
        yield address.removeprefix("http://")


@pytest.mark.parametrize("name", RUN)
@pytest.mark.sampled(6)
def test_block_runs_as_pasted(
    name: str, models: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    block = BLOCKS[name]
    code = block.code
    if PORT in code and "bitnet-ops serve" not in code:
        code = code.replace(PORT, request.getfixturevalue("server"))
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    for written in WRITES.findall(block.code):
        shutil.rmtree(tmp_path / written, ignore_errors=True)
    command = {
        "python": [sys.executable, "-c", code],
        "bash": ["bash", "-euo", "pipefail", "-c", SERVE + code],
    }[block.language]
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", LEFT_OUT)
def test_block_that_is_not_run_has_no_unknown_names(name: str) -> None:
    block = BLOCKS[name]
    if block.language == "python":
        tree = ast.parse(block.code)
        assert _used(tree) <= _bound(tree) | set(dir(builtins))
        return
    subprocess.run(["bash", "-n", "-c", block.code], check=True)
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["bitnet-ops"]:
            cli._parse(words[1:])
        elif words and words[0].startswith("scripts/"):
            assert (ROOT / words[0]).exists()
        elif words[:2] == ["python", "-m"] and words[2].startswith(("bitnet_ops", "benchmarks")):
            assert importlib.util.find_spec(words[2])


def _used(tree: ast.AST) -> set[str]:
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return {node.id for node in names if isinstance(node.ctx, ast.Load)}


def _bound(tree: ast.AST) -> set[str]:
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    return bound


def test_what_pages_call_needs_no_import_but_the_packages() -> None:
    """`bitnet_ops.convert.convert(...)`, and each name that a page imports."""
    text = "\n".join(PAGES.values())
    called = set(re.findall(r"(?<![\w.])(bitnet_ops(?:\.\w+)+)\(", text))
    imported = set(re.findall(r"^ *(from bitnet_ops[\w.]* import [\w, ]+)", text, re.MULTILINE))
    assert "bitnet_ops.convert.convert" in called and len(imported) > 3
    code = "\n".join(["import bitnet_ops", *sorted(called), *sorted(imported)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
