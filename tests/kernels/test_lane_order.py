"""Float sums run in the documented order: bit-equal to an emulation that shares no code.

This pins the order itself; that all ISAs and threads agree is test_bit_identity.py's matter.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lane_order
from bitnet_ops import ops
from bounds import assert_equal
from op_catalogue import reference
from op_values import activations, gain, positive, random_packed
from ops_fused import mlp_arguments

# Without a wide long double the emulation itself would be wrong; x86, where the SIMD kernels of
# this project run natively, has one.
pytestmark = pytest.mark.skipif(
    not lane_order.HAS_WIDE_FLOAT, reason="numpy's long double is no wider than float64 here"
)

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 100, 257, 640, 2560)


@pytest.mark.parametrize("k", LENGTHS)
def test_lm_head_sums_in_lane_order(k: int, isa: str, rng: torch.Generator) -> None:
    x, weight = torch.randn(3, k, generator=rng), torch.randn(9, k, generator=rng)
    expected = lane_order.dot(x.numpy()[:, None], weight.numpy()[None])
    assert_equal(ops.lm_head(x, weight), torch.from_numpy(expected), f"K={k}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lm_head_widens_16_bit_weights_exactly(
    dtype: torch.dtype, isa: str, rng: torch.Generator
) -> None:
    x, weight = torch.randn(2, 77, generator=rng), torch.randn(5, 77, generator=rng).to(dtype)
    expected = lane_order.dot(x.numpy()[:, None], weight.float().numpy()[None])
    assert_equal(ops.lm_head(x, weight), torch.from_numpy(expected))


@pytest.mark.parametrize("k", LENGTHS)
def test_rms_norm_sums_in_lane_order(k: int, isa: str, rng: torch.Generator) -> None:
    x, weight = activations(rng, 4, k), gain(rng, k)
    expected = lane_order.rms_norm(x.numpy(), weight.numpy(), 1e-5)
    assert_equal(ops.rms_norm(x, weight, 1e-5), torch.from_numpy(expected), f"K={k}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_rounds_to_16_bits_before_the_gain(
    dtype: torch.dtype, isa: str, rng: torch.Generator
) -> None:
    x, weight = activations(rng, 6, 333, dtype=dtype), gain(rng, 333, torch.float32)
    ones = torch.ones(333)
    normalised = _emulated_norm(x.float(), ones, 1e-5)
    before = (normalised.to(dtype).float() * weight).to(dtype)
    after = (normalised * weight).to(dtype)
    assert not torch.equal(before, after)  # else the order could not be seen
    assert_equal(ops.rms_norm(x, weight, 1e-5), before, str(dtype))
    assert_equal(ops.add_rms_norm(x, torch.zeros_like(x), weight, 1e-5)[0], before, str(dtype))


def _emulated_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.from_numpy(lane_order.rms_norm(x.numpy(), weight.numpy(), eps))


def test_qkv_forward_equals_the_emulation(isa: str, rng: torch.Generator) -> None:
    x, norm = activations(rng, 5, 300), gain(rng, 300)
    qkv = [part for n in (20, 8, 8) for part in (random_packed(rng, n, 300), positive(rng, 1))]
    hidden = _emulated_norm(x, norm, 1e-5)
    for i, result in enumerate(ops.qkv_forward(x, norm, *qkv, 1e-5)):
        assert_equal(result, reference.linear(hidden, qkv[2 * i], qkv[2 * i + 1]))


@pytest.mark.parametrize("sub_norm", [True, False])
def test_mlp_forward_equals_the_emulation(sub_norm: bool, isa: str, rng: torch.Generator) -> None:
    args = mlp_arguments(rng, activations(rng, 5, 300), "relu2", sub_norm, 450)
    x, norm, gate, gate_scale, up, up_scale, sub_weight, down, down_scale, eps, _ = args
    hidden = _emulated_norm(x, norm, eps)
    gated = reference.linear(hidden, gate, gate_scale)
    product = reference.relu2_mul(gated, reference.linear(hidden, up, up_scale))
    if sub_norm:
        product = _emulated_norm(product, sub_weight, eps)
    assert_equal(ops.mlp_forward(*args), reference.linear(product, down, down_scale))


def test_the_emulated_fma_rounds_once() -> None:
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: rounded before the sum the last term is lost.
    a = np.float32(1 + 2**-12)
    fused = lane_order.fma(np.array(a), np.array(a), np.array(np.float32(-1 - 2**-11)))
    assert fused == np.float32(2**-24)
