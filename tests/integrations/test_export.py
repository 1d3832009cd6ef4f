"""The example of torch.export: its packages in Python for other numbers of tokens, and in C++."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bitnet_ops
from op_catalogue import SPECS

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
@pytest.mark.sampled(1)
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


class Ops(torch.nn.Module):
    """Calls of ops by name, one behind the other, with arguments that are the module's own."""

    def __init__(self, calls: dict[str, dict[str, Any]]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, _: Tensor) -> list[Tensor]:
        results = []
        for op, arguments in self.calls.items():
            result = getattr(torch.ops.bitnet, op)(**arguments)
            results += [result] if isinstance(result, Tensor) else result
        return results


@pytest.mark.slow
def test_lists_may_be_left_out_of_what_is_compiled(tmp_path: Path) -> None:
    """torch gives a compiled op none where its caller gave no list, or an empty one."""
    calls: dict[str, dict[str, Any]] = {}
    for op, spec in SPECS.items():
        optional = {
            a.name
            for a in getattr(torch.ops.bitnet, op).default._schema.arguments
            if str(a.type) in ("List[int]", "Optional[List[int]]") and a.has_default_value()
        }
        if optional:
            arguments = next(iter(spec.calls.values())).arguments()
            calls[op] = {k: v for k, v in arguments.items() if k not in optional}
            assert not optional & calls[op].keys()
    assert calls.keys() >= {"gemv", "linear", "qkv_forward", "lm_head", "embedding", "rope"}
    module, x = Ops(calls), torch.zeros(1)
    with torch.no_grad():
        program = torch.export.export(module, (x,))
        file = str(tmp_path / "ops.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=file)
        for ours, expected in zip(
            torch._inductor.aoti_load_package(file)(x), module(x), strict=True
        ):
            assert torch.equal(ours, expected)


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
