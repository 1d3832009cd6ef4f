"""Specs of the norms, the activations of an MLP and the rotation of positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bounds import EXP_ERROR, TINY, U, rms_norm_error, smallest, storing_error
from op_changes import BF16, F16, F64, FLOATS_TEXT, I32, K, M, narrow, to, value
from op_spec import Call, Rejections, fixed, spec
from op_values import (
    ACTIVATIONS,
    FLOATS,
    Arguments,
    Built,
    activations,
    dtype_name,
    frequencies,
    gain,
    strided,
    transposed,
)

# rms_norm -----------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """F [..., K] -> x.dtype [..., K]; the normalised value is rounded before the gain."""
    exact = x.to(torch.float64)
    inv_rms = 1.0 / torch.sqrt((exact * exact).mean(dim=-1, keepdim=True) + eps)
    normalised = (exact * inv_rms).to(torch.float32).to(x.dtype)
    return (normalised.to(torch.float32) * weight.to(torch.float32)).to(x.dtype)


def _rms_norm_bound(args: Arguments, expected: Tensor) -> Tensor:
    x, dtype = args[0], expected.dtype
    # A 16-bit result is rounded twice, before and after the gain.
    relative = rms_norm_error(x.shape[-1]) + 2 * storing_error(dtype)
    return expected.double().abs() * relative + smallest(dtype)


def _rms_norm_samples() -> Built:
    for dtype in FLOATS:
        yield dtype_name(dtype), lambda g, d=dtype: (
            activations(g, 3, 70, dtype=d), gain(g, 70, d), 1e-5,
        )  # fmt: skip
    yield "bfloat16_float32_gain", lambda g: (
        activations(g, 3, 70, dtype=torch.bfloat16), gain(g, 70), 1e-5,
    )  # fmt: skip
    yield "vector", lambda g: (activations(g, 5), gain(g, 5), 1e-6)
    yield "leading_dims", lambda g: (activations(g, 2, 3, 64), gain(g, 64), 1e-5)
    yield "no_tokens", lambda g: (activations(g, 0, 64), gain(g, 64), 1e-5)
    yield "strided", lambda g: (strided(activations(g, 3, 64)), strided(gain(g, 64)), 1e-5)
    yield "zeros", lambda g: (torch.zeros(2, 20), gain(g, 20), 1e-5)


_RMS_NORM_REJECTIONS: Rejections = [
    ({"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
    ({"x": lambda a: a["x"][0, 0]}, "x", "at least 1 dimension"),
    ({"x": lambda a: a["x"][:, :0]}, "x", "at least one feature"),
    ({"weight": narrow("weight")}, "weight", "of shape [160], got [159]"),
    ({"weight": to("weight", I32)}, "weight", FLOATS_TEXT + "int32"),
    ({"eps": value(-1e-5)}, "eps", "finite and not negative"),
    ({"eps": value(float("nan"))}, "eps", "finite and not negative, got nan"),
    ({"eps": value(float("inf"))}, "eps", "finite and not negative, got inf"),
]  # fmt: skip

spec(
    rms_norm,
    samples=_rms_norm_samples,
    large=[lambda g: (activations(g, 61, 1031), gain(g, 1031), 1e-5)],
    calls={
        "": Call(
            lambda g: {"x": activations(g, M, K), "weight": gain(g, K), "eps": 1e-5},
            _RMS_NORM_REJECTIONS,
        ),
    },
    bound=_rms_norm_bound,
    rows={"": lambda g, dtype: fixed(gain(g, 64, dtype), 1e-5)},
    empty={"": lambda: (torch.empty(2**40, 0), torch.empty(0), 0.0)},
)

# add_rms_norm -------------------------------------------------------------------------------------


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """F [..., K] twice -> (y, residual_out)."""
    residual_out = (x.to(torch.float32) + residual.to(torch.float32)).to(x.dtype)
    return rms_norm(residual_out, weight, eps), residual_out


def _add_rms_norm_samples() -> Built:
    for name, norm_arguments in _rms_norm_samples():

        def arguments(
            g: torch.Generator, build: Callable[[torch.Generator], Arguments] = norm_arguments
        ) -> Arguments:
            x, weight, eps = build(g)
            return x, activations(g, *x.shape, dtype=x.dtype), weight, eps

        yield name, arguments


_ADD_RMS_NORM_REJECTIONS: Rejections = [
    ({"residual": narrow("residual", 0)}, "residual", "of the shape of x [3, 160]"),
    ({"residual": to("residual", BF16)}, "residual", "of dtype float32"),
    ({"weight": narrow("weight")}, "weight", "of shape [160], got [159]"),
    ({"x": to("x", I32)}, "x", FLOATS_TEXT + "int32"),
    ({"eps": value(-1.0)}, "eps", "finite and not negative"),
]  # fmt: skip


def _with_residual(*rest: Any) -> Callable[[Tensor], Arguments]:
    return lambda x: (x, x.flip(-1), *rest)


spec(
    add_rms_norm,
    samples=_add_rms_norm_samples,
    large=[
        lambda g: (activations(g, 61, 1031), activations(g, 61, 1031), gain(g, 1031), 1e-5),
    ],
    calls={
        "": Call(
            lambda g: {
                "x": activations(g, M, K), "residual": activations(g, M, K),
                "weight": gain(g, K), "eps": 1e-5,
            },
            _ADD_RMS_NORM_REJECTIONS,
        ),
    },
    bound=_rms_norm_bound,
    rows={"": lambda g, dtype: _with_residual(gain(g, 64, dtype), 1e-5)},
)  # fmt: skip

# relu2_mul ----------------------------------------------------------------------------------------


def relu2_mul(gate: Tensor, up: Tensor) -> Tensor:
    """max(gate, 0)^2 * up in float32."""
    positive = torch.relu(gate.to(torch.float32))
    return (positive * positive * up.to(torch.float32)).to(gate.dtype)


def _relu2_mul_samples() -> Built:
    for dtype in ACTIVATIONS:
        yield dtype_name(dtype), lambda g, d=dtype: (
            activations(g, 3, 37, dtype=d) * 20, activations(g, 3, 37, dtype=d) * 30,
        )  # fmt: skip
    yield "vector", lambda g: (activations(g, 5), activations(g, 5))
    yield "leading_dims", lambda g: (activations(g, 2, 2, 9), activations(g, 2, 2, 9))
    yield "no_tokens", lambda g: (activations(g, 0, 8), activations(g, 0, 8))
    yield "strided", lambda g: (strided(activations(g, 3, 16)), transposed(activations(g, 3, 16)))


_RELU2_MUL_REJECTIONS: Rejections = [
    (
        {"gate": to("gate", F16), "up": to("up", F16)},
        "gate", "65504 in healthy models), got float16",
    ),
    ({"gate": to("gate", I32)}, "gate", FLOATS_TEXT + "int32"),
    ({"up": to("up", BF16)}, "up", "of dtype float32, got bfloat16"),
    ({"up": narrow("up")}, "up", "of the shape of gate [3, 160], got [3, 159]"),
    ({"up": lambda a: a["up"][:1]}, "up", "of the shape of gate"),
]  # fmt: skip

spec(
    relu2_mul,
    samples=_relu2_mul_samples,
    large=[lambda g: (activations(g, 61, 1031), activations(g, 61, 1031))],
    calls={
        "": Call(
            lambda g: {"gate": activations(g, M, K), "up": activations(g, M, K)},
            _RELU2_MUL_REJECTIONS,
        ),
    },
    rows={"": lambda g, dtype: lambda x: (x, x.flip(-1))},
    row_dtypes=ACTIVATIONS,  # float16 is rejected by contract
    empty={"": lambda: (torch.empty(2**40, 0), torch.empty(2**40, 0))},
)

# silu_and_mul -------------------------------------------------------------------------------------


def silu_and_mul(x: Tensor) -> Tensor:
    """[..., 2d] -> [..., d]: silu(first half) * second half."""
    gate, up = x.to(torch.float64).chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(torch.float32).to(x.dtype)


def _silu_and_mul_bound(args: Arguments, expected: Tensor) -> Tensor:
    gate, up = args[0].double().abs().chunk(2, dim=-1)
    # exp, + 1, /, * up; where exp(-gate) overflows float32 the exact result is below TINY * gate.
    relative = EXP_ERROR + 3 * U + storing_error(expected.dtype)
    return expected.double().abs() * relative + TINY * gate * up + smallest(expected.dtype)


def _silu_and_mul_samples() -> Built:
    for dtype in FLOATS:
        yield dtype_name(dtype), lambda g, d=dtype: (activations(g, 3, 74, dtype=d),)
    yield "vector", lambda g: (activations(g, 2),)
    yield "leading_dims", lambda g: (activations(g, 2, 3, 34),)
    yield "no_tokens", lambda g: (activations(g, 0, 8),)
    yield "strided", lambda g: (strided(activations(g, 3, 16)),)
    yield "wide_range", lambda g: (torch.randn(4, 66, generator=g) * 40,)


_SILU_AND_MUL_REJECTIONS: Rejections = [
    ({"x": narrow("x")}, "x", "even last dimension (gate, then up), got 159"),
    ({"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
    ({"x": lambda a: a["x"][0, 0]}, "x", "at least 1 dimension"),
]  # fmt: skip

spec(
    silu_and_mul,
    samples=_silu_and_mul_samples,
    large=[lambda g: (torch.randn(61, 2062, generator=g) * 20,)],
    calls={"": Call(lambda g: {"x": activations(g, M, K)}, _SILU_AND_MUL_REJECTIONS)},
    bound=_silu_and_mul_bound,
    rows={"": lambda g, dtype: fixed()},
    empty={"": lambda: (torch.empty(2**40, 0),)},
)

# gelu_tanh_and_mul --------------------------------------------------------------------------------


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """[..., 2d] -> [..., d]: gelu of the first half, by tanh, * second half."""
    gate, up = x.to(torch.float64).chunk(2, dim=-1)
    y = torch.nn.functional.gelu(gate, approximate="tanh") * up
    return y.to(torch.float32).to(x.dtype)


def _gelu_tanh_and_mul_bound(args: Arguments, expected: Tensor) -> Tensor:
    gate, up = args[0].double().abs().chunk(2, dim=-1)
    # The exponent of exp(-2 t) is off by 6 roundings of its size, at most 89 where it matters; then
    # exp, + 1, /, * up. Far below zero the oracle's 1 + tanh(t) itself loses its digits, and the
    # value is less than 2^-40 of the gate.
    relative = 89 * 6 * U + EXP_ERROR + 3 * U + storing_error(expected.dtype)
    return expected.double().abs() * relative + 2.0**-40 * gate * up + smallest(expected.dtype)


spec(
    gelu_tanh_and_mul,
    samples=_silu_and_mul_samples,
    large=[lambda g: (torch.randn(61, 2062, generator=g) * 20,)],
    calls={"": Call(lambda g: {"x": activations(g, M, K)}, _SILU_AND_MUL_REJECTIONS)},
    bound=_gelu_tanh_and_mul_bound,
    rows={"": lambda g, dtype: fixed()},
    empty={"": lambda: (torch.empty(2**40, 0),)},
)

# rope_table ---------------------------------------------------------------------------------------


def rope_table(positions: Tensor, inv_freq: Tensor, attention_factor: float = 1.0) -> Tensor:
    """int64 [...], float32 [D / 2] -> float32 [..., D]: cosines, then sines."""
    angle = positions.to(torch.float64)[..., None] * inv_freq.double()
    return (torch.cat([angle.cos(), angle.sin()], dim=-1) * attention_factor).to(torch.float32)


def _rope_table_bound(args: Arguments, expected: Tensor) -> Tensor:
    positions, inv_freq, *factor = args
    angle = positions.double()[..., None] * inv_freq.double()
    # A position above 2^24 and the angle are rounded; cos and sin have slope 1 at most and are
    # rounded themselves, as are the factor and the product with it.
    error = (angle.abs() * 2 * U + 3 * U) * max([1.0, *factor])
    return torch.cat([error, error], dim=-1)


def _rope_table_samples() -> Built:
    yield "vector", lambda g: (torch.arange(7), frequencies(16))
    yield "batch", lambda g: (
        torch.randint(0, 4096, (2, 5), generator=g), frequencies(128, 5e5), 1.1386294
    )  # fmt: skip
    yield "scalar", lambda g: (torch.tensor(100), frequencies(6), 0.5)
    yield "none", lambda g: (torch.zeros(0, dtype=torch.int64), frequencies(8))
    yield "strided", lambda g: (torch.arange(20)[::3], strided(frequencies(16)))


_ROPE_TABLE_REJECTIONS: Rejections = [
    ({"positions": to("positions", I32)}, "positions", "of dtype int64, got int32"),
    ({"positions": to("positions", F16)}, "positions", "got float16"),
    ({"inv_freq": to("inv_freq", F64)}, "inv_freq", "of dtype float32, got float64"),
    ({"inv_freq": lambda a: a["inv_freq"][None]}, "inv_freq", "with 1 dimension"),
    ({"inv_freq": lambda a: a["inv_freq"][:0]}, "inv_freq", "1 to 32768 frequencies, got 0"),
    ({"inv_freq": lambda a: torch.ones(32769)}, "inv_freq", "1 to 32768 frequencies, got 32769"),
    ({"attention_factor": value(0.0)}, "attention_factor", "finite and positive"),
    ({"attention_factor": value(float("nan"))}, "attention_factor", "finite and positive, got nan"),
]  # fmt: skip

spec(
    rope_table,
    samples=_rope_table_samples,
    large=[lambda g: (torch.arange(600), frequencies(126, 5e5), 1.25)],
    calls={
        "": Call(
            lambda g: {"positions": torch.arange(5), "inv_freq": frequencies(16)},
            _ROPE_TABLE_REJECTIONS,
        ),
    },
    bound=_rope_table_bound,
    empty={
        "rows": lambda: (torch.empty(2**40, 0, dtype=torch.int64), torch.ones(32)),
        "out": lambda: (torch.zeros(2**20, dtype=torch.int64), torch.ones(32768)),
    },
)

# rope ---------------------------------------------------------------------------------------------


def rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """F [..., H, D] rotated by float32 [..., D]; half-split; products and sum in float32."""
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    cos, sin = cos_sin[..., None, :].chunk(2, dim=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(rotated, dim=-1).to(x.dtype)


def _unit_table(g: torch.Generator, *shape: int) -> Tensor:
    angle = torch.rand(*shape[:-1], shape[-1] // 2, generator=g) * 6.28
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def _rope_samples() -> Built:
    for dtype in FLOATS:
        yield dtype_name(dtype), lambda g, d=dtype: (
            activations(g, 3, 4, 32, dtype=d), _unit_table(g, 3, 32),
        )  # fmt: skip
    yield "batch", lambda g: (activations(g, 2, 3, 4, 6), _unit_table(g, 2, 3, 6))
    yield "one_token", lambda g: (activations(g, 5, 64), _unit_table(g, 64))
    yield "no_tokens", lambda g: (activations(g, 0, 4, 8), _unit_table(g, 0, 8))
    yield "view_of_qkv", lambda g: (
        activations(g, 3, 6 * 16)[:, 16:80].reshape(3, 4, 16), strided(_unit_table(g, 3, 16)),
    )  # fmt: skip


_ROPE_REJECTIONS: Rejections = [
    ({"x": lambda a: a["x"][..., :15]}, "x", "even head dimension, got 15"),
    ({"x": lambda a: a["x"][0, 0]}, "x", "at least 2 dimension"),
    ({"cos_sin": to("cos_sin", BF16)}, "cos_sin", "of dtype float32, got bfloat16"),
    ({"cos_sin": narrow("cos_sin", 0)}, "cos_sin", "of shape [3, 16], got [2, 16]"),
    ({"cos_sin": lambda a: a["cos_sin"][:, :8]}, "cos_sin", "of shape [3, 16], got [3, 8]"),
    ({"cos_sin": lambda a: a["cos_sin"][:1]}, "cos_sin", "of shape [3, 16], got [1, 16]"),
]  # fmt: skip

spec(
    rope,
    samples=_rope_samples,
    large=[lambda g: (activations(g, 61, 9, 126), torch.randn(61, 126, generator=g))],
    calls={
        "": Call(
            lambda g: {
                "x": activations(g, M, 4, 16), "cos_sin": torch.randn(M, 16, generator=g),
            },
            _ROPE_REJECTIONS,
        ),
    },
    rows={"": lambda g, dtype: lambda x: (x.reshape(-1, 4, 16), torch.ones(len(x), 16) * 0.6)},
    empty={"": lambda: (torch.empty(2**40, 0, 8), torch.empty(0, 8))},
)  # fmt: skip
