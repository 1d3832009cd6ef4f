"""The example of torch.export: its packages in Python for other numbers of tokens, and in C++."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bitnet_ops

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "export"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    command = [sys.executable, str(EXAMPLE / "export.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 2, 5, 32])
@pytest.mark.sampled(2)
def test_packages_take_any_number_of_tokens(exported: Path, tokens: int) -> None:
    spec = importlib.util.spec_from_file_location("export_example", EXAMPLE / "export.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = bitnet_ops.load().model
    c = model.config
    x = torch.randn(tokens, c.hidden_size, generator=torch.Generator().manual_seed(tokens))
    linear = torch._inductor.aoti_load_package(str(exported / "linear.pt2"))
    layer = torch._inductor.aoti_load_package(str(exported / "layer.pt2"))
    with torch.inference_mode():
        assert torch.equal(linear(x), model.model.layers[0].mlp.gate_proj(x))
        shape = 1, c.num_key_value_heads, example.POSITIONS, c.head_dim
        caches = [torch.zeros(shape) for _ in range(4)]
        eager = example.Layer(model)
        for start in (0, tokens - 1):  # the second call reads what the first has written
            given = x[None] + start, torch.tensor([start])
            assert torch.equal(layer(*given, *caches[:2]), eager(*given, *caches[2:]))
        assert torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])
        assert caches[0].any()


@pytest.mark.slow
def test_cpp_runs_what_python_exported(exported: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (
        ["cmake", "-S", str(EXAMPLE), "-B", str(build), prefix],
        ["cmake", "--build", str(build)],
        [str(build / "run"), str(exported)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("equal to Python's bit for bit") == 2


def test_the_page_has_the_lines_that_are_tested() -> None:
    lines = re.findall(
        r"```bash\n(.*?)```", (ROOT / "docs/guide/export.md").read_text(), re.DOTALL
    )[0]
    assert "examples/export/export.py" in lines and "cmake -S examples/export" in lines
    assert "build/export/run" in lines
