"""What scripts/prove_hf_kernel checks of a built kernel: `prove.py FOLDER`.

Two copies of the operators live in this process, the installed package's and the kernel's; they
have to agree bit for bit, each under its own name.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

import torch
from kernel_abi_check import ObjectFile

import bitnet_ops
from kernels import get_loaded_kernels, get_local_kernel

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "hf-kernels.md"
PAGE_FOLDER = "bitnet-ops-kernel"


def check_abi(library: Path) -> None:
    """No symbol newer than manylinux_2_28, none of Python, and of torch the stable C ones alone."""
    found = ObjectFile(str(library))
    old = found.check_manylinux("manylinux_2_28")
    assert not old, f"expected symbols of manylinux_2_28 or older, got {old}"
    python = found.check_python_abi("3.10")
    assert not python, f"expected no symbols outside Python's stable ABI, got {python}"


def check_operators(kernel: ModuleType) -> int:
    """How many operators there are; a product, a norm and a shape under torch.compile agree."""
    kernel_ops = importlib.import_module("._ops", kernel.__name__).ops
    names = {n for n in bitnet_ops.ops.__all__ if hasattr(torch.ops.bitnet, n)}
    missing = [n for n in sorted(names) if not hasattr(kernel, n) or not hasattr(kernel_ops, n)]
    assert not missing, f"expected every operator in the kernel, got none of {missing}"
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-1, 2, (96, 384), generator=generator, dtype=torch.int8)
    x = torch.randn(5, 384, generator=generator)
    results = []
    for ops in (bitnet_ops.ops, kernel):
        packed = ops.repack(ops.pack(codes), 384, "2bit")  # type: ignore[attr-defined]
        scale = torch.tensor([0.5])
        linear = ops.linear(x, packed, scale, None, (96, 384))  # type: ignore[attr-defined]
        norm = ops.rms_norm(x, torch.ones(384), 1e-5)  # type: ignore[attr-defined]
        results.append((packed, linear, norm))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs), "expected the kernel's results to be the package's"
    weight = results[1][0]

    def product(x: torch.Tensor) -> torch.Tensor:
        return kernel.linear(x, weight, torch.ones(1), None, (96, 384))  # type: ignore[attr-defined]

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), product(x))
    assert product(x).shape == (5, 96)
    return len(names)


def check_gradients(kernel: ModuleType) -> None:
    """Both copies have their own: equal ones of linear, and a message where there is none."""
    packed = kernel.repack(kernel.pack(torch.ones(96, 384, dtype=torch.int8)), 384, "2bit")
    found = []
    for ops in (bitnet_ops.ops, kernel):
        x = torch.randn(2, 384, generator=torch.Generator().manual_seed(2)).requires_grad_()
        ops.linear(x, packed, torch.tensor([0.5]), None, (96, 384)).square().sum().backward()
        found.append(x.grad)
        wanting = torch.ones(2, 384, requires_grad=True)
        try:
            ops.quantize_activations(wanting)
        except RuntimeError as error:
            assert "quantize_activations: expected" in str(error), error
        else:
            raise AssertionError("expected an op without a gradient to say so, got a result")
    assert torch.equal(*found), "expected the package's gradient"


def check_errors(kernel: ModuleType) -> None:
    """A bad argument reaches Python as the package's one line: exceptions cross the library."""
    try:
        kernel.pack(torch.zeros(2, 2))  # type: ignore[attr-defined]
    except RuntimeError as error:
        assert "pack: expected" in str(error), error
    else:
        raise AssertionError("expected pack of floating numbers to be rejected, got a result")


def run_page(folder: Path) -> None:
    """The example of docs/guide/hf-kernels.md, with this kernel; what it computes is finite."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block.count(PAGE_FOLDER) == 1
    names: dict[str, object] = {}
    exec(block.replace(PAGE_FOLDER, str(folder)), names)
    y = names["y"]
    assert isinstance(y, torch.Tensor) and y.shape == (1, 64) and bool(y.isfinite().all())


def main(folder: Path) -> None:
    (variant,) = (folder / "build").iterdir()
    (library,) = variant.glob("*.so")
    check_abi(library)
    warnings.simplefilter("error")  # torch warns where one copy's operators replace another's
    kernel = get_local_kernel(folder)
    warnings.resetwarnings()
    (loaded,) = get_loaded_kernels()
    assert loaded.metadata.name.python_name == "bitnet_ops"
    assert library.name.startswith(loaded.metadata.id)
    with torch.inference_mode():
        count = check_operators(kernel)
        check_errors(kernel)
    check_gradients(kernel)
    run_page(folder)
    size = library.stat().st_size / 2**20
    print(f"{variant.name}: {count} operators under torch.ops.{loaded.metadata.id}, {size:.1f} MiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
