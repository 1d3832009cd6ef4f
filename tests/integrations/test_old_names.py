"""torch.ops.sgl_kernel.bitnet_*: old names and shapes, right results, against plain float64.

Scales differ from 1 and activations have a mean: what the old fused ops were wrong about.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.integrations import old_names

ROOT = Path(__file__).resolve().parents[2]
old = torch.ops.sgl_kernel
G = torch.Generator().manual_seed(4)


def matrix(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """(packed, codes as float64)."""
    codes = torch.randint(-1, 2, (rows, columns), generator=G).to(torch.int8)
    return ops.pack(codes), codes.double()


def quantized(x: Tensor) -> Tensor:
    """What int8 activations per token stand for, float64."""
    s = 127 / x.float().abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (x.float() * s).round().clamp(-128, 127).double() / s.double()


def close(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=3e-6, atol=3e-6)


def test_gemv_scales_by_a_float_and_not_by_the_activations() -> None:
    packed, w = matrix(40, 256)
    a = torch.randint(-128, 128, (256,), generator=G).to(torch.int8)
    close(old.bitnet_gemv_cpu(packed, a, 0.8), 0.8 * (w @ a.double()))


def test_gemm_fills_its_memory_by_outputs() -> None:
    packed, w = matrix(40, 256)
    a = torch.randint(-128, 128, (3, 256), generator=G).to(torch.int8)
    got = old.bitnet_gemm_cpu(packed, a, 1.5)
    assert got.shape == (3, 40) and got.is_contiguous()
    close(got.view(40, 3).t(), 1.5 * (a.double() @ w.t()))


@pytest.mark.parametrize("size", [0.0, 1e-8, 3.0])
def test_activations_get_one_scale_for_all(size: float) -> None:
    x = torch.randn(2, 50, generator=G) * size
    codes, scale = old.bitnet_quantize_activations_cpu(x)
    assert codes.dtype == torch.int8 and codes.shape == x.shape and scale.shape == (1,)
    largest = float(x.abs().max())
    assert float(scale) == pytest.approx(largest / 127 if largest >= 1e-6 else 1.0)
    assert float((codes * scale - x).abs().max()) <= 0.51 * float(scale)


def test_qkv_is_the_three_products() -> None:
    x = torch.randn(256, generator=G) + 0.7
    parts = [matrix(rows, 256) for rows in (64, 32, 32)]
    scales = (0.5, 1.7, 2.0)
    got = old.bitnet_qkv_forward_cpu(x, *(p for p, _ in parts), *scales)
    for y, (_, w), scale in zip(got, parts, scales, strict=True):
        close(y, scale * (w @ quantized(x)))


def test_mlp_is_its_composition() -> None:
    x = torch.randn(128, generator=G) + 0.7
    (gate, wg), (up, wu), (down, wd) = matrix(384, 128), matrix(384, 128), matrix(128, 384)
    norm, eps = torch.rand(384, generator=G) + 0.5, 1e-5
    got = old.bitnet_mlp_forward_cpu(x, gate, up, down, 0.5, 1.5, 2.0, norm, eps)
    q = quantized(x)
    z = (0.5 * (wg @ q)).clamp(min=0) ** 2 * (1.5 * (wu @ q))
    z = z / (z.square().mean() + eps).sqrt() * norm.double()
    expected = 2.0 * (wd @ quantized(z))
    # A z at the middle between two steps may go the other way: a step of down's activations.
    step = 2.0 * float(z.abs().max()) / 127
    assert float((got.double() - expected).abs().max()) <= 2.01 * step
    assert float((got.double() - expected).abs().mean()) <= 0.05 * step


def test_norm_and_activation_are_ours() -> None:
    x, weight = torch.randn(3, 64, generator=G).bfloat16(), torch.rand(64, generator=G).bfloat16()
    assert torch.equal(old.rmsnorm_cpu(x, weight, 1e-6), ops.rms_norm(x, weight, 1e-6))
    assert torch.equal(old.silu_and_mul_cpu(x), ops.silu_and_mul(x))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((40, 100), torch.uint8), ((40, 64), torch.int8), ((40,), torch.uint8)]
)
def test_another_packing_is_named(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a = torch.zeros(256, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"packed as uint8 \[outputs, 64\] for 256 inputs"):
        old.bitnet_gemv_cpu(torch.zeros(shape, dtype=dtype), a, 1.0)


def test_our_own_gemv_says_what_a_float_scale_must_be() -> None:
    packed, _ = matrix(8, 128)
    a = torch.zeros(128, dtype=torch.int8)
    says = r"x_scale as a tensor or None, got float 0\.8; pass torch\.tensor\(\[0\.8\]\)$"
    with pytest.raises(RuntimeError, match=says):
        ops.gemv(packed, a, 0.8)  # type: ignore[arg-type]
    with torch.inference_mode(), pytest.raises(RuntimeError, match="weight_scale as a tensor"):
        ops.gemv(packed, a, torch.ones(1), 0.5)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"weight as a tensor, got str"):
        ops.gemv("packed", a)  # type: ignore[arg-type]


def _calls() -> dict[str, tuple[object, ...]]:
    """Arguments of one call of each operator."""
    packed, _ = matrix(40, 128)
    up, down = matrix(128, 128)[0], matrix(128, 128)[0]
    codes = torch.randint(-128, 128, (3, 128), generator=G).to(torch.int8)
    x, norm = torch.randn(128, generator=G), torch.ones(128)
    return {
        "bitnet_gemv_cpu": (packed, codes[0], 0.8),
        "bitnet_gemm_cpu": (packed, codes, 0.8),
        "bitnet_quantize_activations_cpu": (x[None],),
        "bitnet_qkv_forward_cpu": (x, packed, up, packed, 0.5, 1.0, 2.0),
        "bitnet_mlp_forward_cpu": (x, up, up, down, 0.5, 1.0, 2.0, norm, 1e-5),
        "rmsnorm_cpu": (x[None].bfloat16(), norm.bfloat16(), 1e-5),
        "silu_and_mul_cpu": (x[None],),
    }


@pytest.mark.parametrize("name", old_names.NAMES)
def test_shapes_for_the_compiler_are_those_of_the_call(name: str) -> None:
    checks = "test_schema", "test_faketensor"
    torch.library.opcheck(getattr(old, name).default, _calls()[name], test_utils=checks)


def test_only_who_imports_it_gets_the_names() -> None:
    code = (
        "import torch, bitnet_ops; print(hasattr(torch.ops.sgl_kernel, 'bitnet_gemv_cpu'))\n"
        "import bitnet_ops.integrations.old_names as s\n"
        "print(hasattr(torch.ops.sgl_kernel, 'bitnet_gemv_cpu'), s.KEPT)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "True []"]


def test_names_of_another_library_are_left_alone() -> None:
    code = (
        "import torch\n"
        "other = torch.library.Library('sgl_kernel', 'FRAGMENT')\n"
        "other.define('rmsnorm_cpu(Tensor x, Tensor weight, float eps) -> Tensor')\n"
        "other.impl('rmsnorm_cpu', lambda x, weight, eps: x + 1, 'CPU')\n"
        "import bitnet_ops.integrations.old_names as s\n"
        "x = torch.zeros(1, 4)\n"
        "print(s.KEPT, torch.ops.sgl_kernel.rmsnorm_cpu(x, x[0], 1e-6).sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['rmsnorm_cpu'] 4.0"


def test_the_page_lists_every_name() -> None:
    page = (ROOT / "docs" / "guide" / "old-names.md").read_text(encoding="utf-8")
    assert set(old_names.NAMES) <= set(re.findall(r"`(\w+)`", page))
