"""scripts/build_hf_kernel: what it makes of the wrappers; the proof builds and loads the kernel.

A name of the package that is left would let the kernel replace the installed one's operators.
"""

from __future__ import annotations

import ast
import re
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from bitnet_ops import _runtime

ROOT = Path(__file__).resolve().parents[2]
SPACE = "_bitnet_ops_cpu_0123456789ab"


@pytest.fixture(scope="module")
def build() -> ModuleType:
    loader = SourceFileLoader("build_hf_kernel", str(ROOT / "scripts" / "build_hf_kernel"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def strings_and_imports(text: str) -> list[str]:
    """Every string that is no documentation, every attribute path and every absolute import."""
    tree, found = ast.parse(text), []
    documented = ast.Module | ast.FunctionDef | ast.ClassDef
    docs = {ast.get_docstring(n, clean=False) for n in ast.walk(tree) if isinstance(n, documented)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [] if node.value in docs else [node.value]
        elif isinstance(node, ast.Attribute):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append(node.module or "")
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


def test_no_wrapper_names_the_package_or_its_operators(build: ModuleType) -> None:
    files = sorted(build.OPS.glob("*.py"))
    assert {"__init__.py", "_operator.py", "gradients.py"} <= {file.name for file in files}
    for file in files:
        if file.name == "_library.py":
            continue  # written anew
        made = build.wrapper(file.read_text(), SPACE)
        for name in strings_and_imports(made):
            left = re.search(r"\bbitnet\b|\bbitnet_ops\b", name)
            assert left is None or "\n" in name or " " in name, (file.name, name)


def test_an_import_that_it_does_not_know_is_named(build: ModuleType) -> None:
    with pytest.raises(SystemExit, match="expected imports that it knows, got .*bitnet_ops.nn"):
        build.wrapper("from bitnet_ops.nn import linear\n", SPACE)


def test_the_layouts_are_the_packages(build: ModuleType) -> None:
    """Both ask csrc/format/layout.h; the proof compares what they give."""
    source = (ROOT / "csrc" / "hf_kernel.cpp").read_text(encoding="utf-8")
    table = (ROOT / "csrc" / "format" / "layout.h").read_text(encoding="utf-8")
    assert "bitnet_layout_name" in build.RUNTIME and "kWeightLayouts[place].name" in source
    assert [*_runtime.layouts()] == re.findall(r'^    \{"([^"]+)", (?:true|false)', table, re.M)


def test_another_source_has_another_namespace(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "csrc" / "a.cpp"
    file.parent.mkdir()
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "sources", lambda: [file])
    found = []
    for text in ("int a;", "int b;", "int a;"):
        file.write_text(text)
        found.append(build.namespace())
    assert found[0] == found[2] != found[1]
    assert re.fullmatch(r"_bitnet_ops_cpu_[0-9a-f]{12}", found[0])


def test_the_pages_command_is_the_script() -> None:
    page = (ROOT / "docs" / "guide" / "hf-kernels.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^```bash\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    script, folder = command.split()
    assert (ROOT / script).is_file()
    assert f'get_local_kernel(Path("{folder}"))' in page
