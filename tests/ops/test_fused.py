"""Fused ops equal the composition of the unfused ones, bit for bit.

Scales are not 1, activations have a mean, and every projection has its own scale: an omitted,
repeated or exchanged factor, or a sum subtracted twice, cannot hide.
"""

from __future__ import annotations

import pytest
import torch

from bitnet_ops import ops
from bounds import assert_equal
from isa_control import every_configuration
from op_catalogue import composed
from op_values import FLOATS, FORMATS, activations, gain, positive, random_packed
from ops_fused import grouped_arguments, mlp_arguments

# Leading dimensions: one token, a vector, several tokens, a batch, none.
LEADING = [(1,), (), (7,), (2, 3), (0,)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_qkv_forward_is_its_composition(
    dtype: torch.dtype, leading: tuple[int, ...], rng: torch.Generator
) -> None:
    k = 200
    x = activations(rng, *leading, k, dtype=dtype)
    shards = [part for n in (24, 8, 6) for part in (random_packed(rng, n, k), positive(rng, 1))]
    args = (x, gain(rng, k, dtype), *shards, 1e-5)
    for configuration in every_configuration():
        fused = ops.qkv_forward(*args)
        for name, ours, theirs in zip(
            "qkv", fused, composed(ops, "qkv_forward", *args), strict=True
        ):
            assert_equal(ours, theirs, f"{name} {configuration}")
            assert ours.shape[:-1] == leading


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("leading", LEADING, ids=str)
@pytest.mark.parametrize("activation", ["relu2", "silu"])
@pytest.mark.parametrize("sub_norm", [True, False])
def test_mlp_forward_is_its_composition(
    dtype: torch.dtype,
    leading: tuple[int, ...],
    activation: str,
    sub_norm: bool,
    rng: torch.Generator,
) -> None:
    x = activations(rng, *leading, 200, dtype=dtype)
    args = mlp_arguments(rng, x, activation, sub_norm, 333)
    for configuration in every_configuration():
        fused = ops.mlp_forward(*args)
        assert_equal(fused, composed(ops, "mlp_forward", *args), configuration)
        assert fused.shape == x.shape and fused.dtype == dtype


@pytest.mark.parametrize("form", ["int8", "int8_group", "int16_group"])
@pytest.mark.parametrize("weight_format", ["canonical", *FORMATS])
@pytest.mark.parametrize("op", ["qkv_forward", "mlp_forward"])
def test_scales_of_groups(op: str, weight_format: str, form: str, rng: torch.Generator) -> None:
    args = grouped_arguments(op, rng, form, weight_format)
    fused = getattr(ops, op)(*args)
    expected = composed(ops, op, *args)
    if isinstance(fused, torch.Tensor):
        fused, expected = (fused,), (expected,)
    for ours, theirs in zip(fused, expected, strict=True):
        assert_equal(ours, theirs)
        assert bool((ours != 0).any())


def test_gains_of_another_dtype_and_scales_per_row(rng: torch.Generator) -> None:
    x = activations(rng, 3, 128, dtype=torch.bfloat16)
    shards = [part for n in (12, 4, 4) for part in (random_packed(rng, n, 128), positive(rng, n))]
    args = (x, gain(rng, 128), *shards, 1e-5)
    for ours, theirs in zip(
        ops.qkv_forward(*args), composed(ops, "qkv_forward", *args), strict=True
    ):
        assert_equal(ours, theirs)


def test_add_rms_norm_is_its_composition(rng: torch.Generator) -> None:
    for dtype in FLOATS:
        x, residual = activations(rng, 5, 333, dtype=dtype), activations(rng, 5, 333, dtype=dtype)
        weight = gain(rng, 333, dtype)
        y, residual_out = ops.add_rms_norm(x, residual, weight, 1e-5)
        assert_equal(residual_out, x + residual)  # torch rounds once as well
        assert_equal(y, ops.rms_norm(residual_out, weight, 1e-5))


def test_linear_is_its_composition(rng: torch.Generator) -> None:
    weight, scale = random_packed(rng, 45, 200), positive(rng, 45)
    for dtype in FLOATS:
        x, bias = activations(rng, 6, 200, dtype=dtype), torch.randn(45, generator=rng).to(dtype)
        product = ops.gemm(weight, *ops.quantize_activations(x), scale)
        assert_equal(ops.linear(x, weight, scale), product.to(dtype))
        assert_equal(ops.linear(x, weight, scale, bias), (product + bias.float()).to(dtype))


def test_per_row_scale_equals_separate_projections(rng: torch.Generator) -> None:
    """One fused matrix with a scale per row stands for several with a scale each."""
    parts = [(random_packed(rng, n, 160), positive(rng, 1)) for n in (10, 3, 7)]
    x = activations(rng, 4, 160)
    weight = torch.cat([w for w, _ in parts])
    scale = torch.cat([s.expand(len(w)) for w, s in parts])
    separate = torch.cat([ops.linear(x, w, s) for w, s in parts], dim=-1)
    assert_equal(ops.linear(x, weight, scale), separate)


def test_gemv_equals_gemm_of_one_row(rng: torch.Generator) -> None:
    weight = random_packed(rng, 37, 300)
    q, scale = ops.quantize_activations(activations(rng, 300))
    assert_equal(ops.gemv(weight, q), ops.gemm(weight, q[None])[0])
    w_scale = positive(rng, 1)
    scaled = ops.gemm(weight, q[None], scale[None], w_scale)[0]
    assert_equal(ops.gemv(weight, q, scale, w_scale), scaled)
    assert_equal(ops.gemv(weight, q, scale.reshape(1), w_scale), scaled)


def test_float16_mlp_survives_where_squared_relu_overflows_float16(rng: torch.Generator) -> None:
    args = list(mlp_arguments(rng, activations(rng, 4, 128, dtype=torch.float16), "relu2"))
    args[3], args[5] = torch.tensor([30.0]), torch.tensor([30.0])
    hidden = ops.rms_norm(args[0], args[1], 1e-5).float()
    gate, up = ops.linear(hidden, args[2], args[3]), ops.linear(hidden, args[4], args[5])
    assert ops.relu2_mul(gate, up).max() > 65504
    assert bool(ops.mlp_forward(*args).isfinite().all())
