"""Specs of the norms, the activations of an MLP and the rotation of positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

# gated --------------------------------------------------------------------------------------------


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up"""
    if activation == "relu2":
        return relu2_mul(gate, up)
    g, u = gate.to(torch.float64), up.to(torch.float64)
    if activation == "gelu_pytorch_tanh":
        y = torch.nn.functional.gelu(g, approximate="tanh")
    else:
        y = torch.sigmoid(g) if activation == "sigmoid" else g / (1.0 + torch.exp(-g))
    return (y * u).to(torch.float32).to(gate.dtype)


def _gated_bound(args: Arguments, expected: Tensor) -> Tensor:
    gate, up, activation = args
    if activation == "relu2":
        return torch.zeros(expected.shape, dtype=torch.float64)
    halves = (torch.cat([gate, up], -1),)
    if activation == "gelu_pytorch_tanh":
        return _gelu_tanh_and_mul_bound(halves, expected)
    # where exp(-gate) overflows float32 a sigmoid's exact result is below TINY * up
    extra = TINY * up.double().abs() if activation == "sigmoid" else 0
    return _silu_and_mul_bound(halves, expected) + extra


def _gated_samples() -> Built:
    for activation in ("relu2", "silu", "gelu_pytorch_tanh", "sigmoid"):
        for dtype in ACTIVATIONS if activation == "relu2" else FLOATS:
            yield f"{activation}_{dtype_name(dtype)}", lambda g, d=dtype, a=activation: (
                activations(g, 3, 37, dtype=d), activations(g, 3, 37, dtype=d), a,
            )  # fmt: skip
    yield "vector", lambda g: (activations(g, 5), activations(g, 5), "sigmoid")
    yield "leading_dims", lambda g: (activations(g, 2, 2, 9), activations(g, 2, 2, 9), "silu")
    yield "no_tokens", lambda g: (activations(g, 0, 8), activations(g, 0, 8), "sigmoid")
    yield "strided", lambda g: (
        strided(activations(g, 3, 16)), transposed(activations(g, 3, 16)), "sigmoid",
    )  # fmt: skip
    yield "wide_range", lambda g: (
        torch.randn(4, 33, generator=g) * 60, activations(g, 4, 33), "sigmoid",
    )  # fmt: skip


spec(
    gated,
    samples=_gated_samples,
    large=[lambda g: (activations(g, 61, 1031), activations(g, 61, 1031), "sigmoid")],
    calls={
        "": Call(
            lambda g: {
                "gate": activations(g, M, K), "up": activations(g, M, K), "activation": "sigmoid",
            },
            [
                ({"gate": to("gate", I32)}, "gate", FLOATS_TEXT + "int32"),
                ({"gate": lambda a: a["gate"][0, 0]}, "gate", "at least 1 dimension"),
                (
                    {"gate": to("gate", F16), "up": to("up", F16), "activation": value("relu2")},
                    "gate", "65504 in healthy models), got float16",
                ),
                ({"up": to("up", BF16)}, "up", "of dtype float32, got bfloat16"),
                ({"up": narrow("up")}, "up", "of the shape of gate [3, 160], got [3, 159]"),
                ({"activation": value("tanh")}, "activation", "or sigmoid, got tanh"),
            ],
        ),
    },
    bound=_gated_bound,
    rows={
        f"{name}": lambda g, dtype, a=name: lambda x: (x, x.flip(-1), a)
        for name in ("silu", "sigmoid")
    },
    empty={"": lambda: (torch.empty(2**40, 0), torch.empty(2**40, 0), "sigmoid")},
)  # fmt: skip

# hadamard -----------------------------------------------------------------------------------------


def hadamard(x: Tensor, signs: Tensor, inverse: bool = False) -> Tensor:
    """Blocks of the last dimension by H_ij = (-1)^popcount(i & j) / sqrt(B), and the signs."""
    i = torch.arange(signs.shape[1])
    both = i[:, None] & i
    odd = sum((both >> bit & 1 for bit in range(len(i).bit_length())), torch.zeros_like(both))
    matrix = (1.0 - 2.0 * (odd % 2)).double() / len(i) ** 0.5
    blocks = x.to(torch.float64).unflatten(-1, signs.shape)
    y = (blocks @ matrix) * signs if inverse else (blocks * signs) @ matrix
    return y.flatten(-2).to(torch.float32).to(x.dtype)


def _hadamard_bound(args: Arguments, expected: Tensor) -> Tensor:
    """A rounding of a partial sum a stage, log2 B of them, then those of the factor."""
    x, signs = args[0], args[1]
    block = signs.shape[1]
    sums = x.double().abs().unflatten(-1, signs.shape).sum(-1, keepdim=True) / block**0.5
    roundings = (block.bit_length() + 3) * U * sums.expand(*x.shape[:-1], *signs.shape)
    return (
        roundings.flatten(-2)
        + expected.double().abs() * storing_error(x.dtype)
        + smallest(x.dtype)
    )  # fmt: skip


def _signs(g: torch.Generator, blocks: int, size: int) -> Tensor:
    return 2.0 * torch.randint(0, 2, (blocks, size), generator=g) - 1.0


def _hadamard_samples() -> Built:
    for dtype in FLOATS:
        for inverse in (False, True):
            yield f"{dtype_name(dtype)}_{inverse}", lambda g, d=dtype, i=inverse: (
                activations(g, 3, 192, dtype=d), _signs(g, 3, 64), i,
            )  # fmt: skip
    for block in (16, 32, 128, 512, 8192):
        yield f"block_{block}", lambda g, b=block: (activations(g, 2, 2 * b), _signs(g, 2, b))
    yield "vector", lambda g: (activations(g, 16), _signs(g, 1, 16))
    yield "leading_dims", lambda g: (activations(g, 2, 3, 32), _signs(g, 1, 32))
    yield "no_tokens", lambda g: (activations(g, 0, 32), _signs(g, 1, 32))
    yield "strided", lambda g: (strided(activations(g, 3, 64)), _signs(g, 2, 32))


spec(
    hadamard,
    samples=_hadamard_samples,
    large=[lambda g: (activations(g, 61, 1536), _signs(g, 3, 512), True)],
    calls={
        "": Call(
            lambda g: {"x": activations(g, M, K), "signs": _signs(g, 5, 32), "inverse": True},
            [
                ({"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
                ({"x": lambda a: a["x"][0, 0]}, "x", "at least 1 dimension"),
                ({"x": narrow("x")}, "signs", "from 16 on that divides 159 features, got 32"),
                ({"signs": to("signs", BF16)}, "signs", "of dtype float32, got bfloat16"),
                ({"signs": lambda a: a["signs"][0]}, "signs", "with 2 dimensions"),
                ({"signs": narrow("signs", 0)}, "signs", "of shape [5, 32], got [4, 32]"),
                ({"signs": lambda a: torch.ones(20, 8)}, "signs", "power of two from 16 on"),
                ({"signs": lambda a: torch.ones(8, 20)}, "signs", "power of two from 16 on"),
                ({"signs": lambda a: torch.ones(5, 0)}, "signs", "from 16 on that divides"),
                ({"signs": lambda a: strided(a["signs"])}, "signs", "contiguous"),
                (
                    {"x": lambda a: a["x"][:, :0], "inverse": value(False)},
                    "signs", "of shape [0, 32], got [5, 32]",
                ),
            ],
        ),
    },
    bound=_hadamard_bound,
    rows={"": lambda g, dtype: fixed(_signs(g, 2, 32))},
    empty={"": lambda: (torch.empty(2**40, 0), torch.empty(0, 16))},
)  # fmt: skip

# rope ---------------------------------------------------------------------------------------------


def rope(
    x: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    attention_factor: float = 1.0,
    sections: Sequence[int] | None = None,
) -> Tensor:
    """F [..., H, D] rotated by positions [...]; half-split; products and sum in float32.

    With sections positions [3, ...], whose angles are interleaved as transformers' Qwen3.5 does.
    """
    angle = (positions.to(torch.float32)[..., None] * inv_freq).double()[..., None, :]
    if sections:
        angle, *axes = angle
        angle = angle.clone()
        for first, (count, axis) in enumerate(zip(sections[1:], axes, strict=True), 1):
            taken = slice(first, 3 * count, 3)
            angle[..., taken] = axis[..., taken]
    cos, sin = ((f(angle).float() * attention_factor) for f in (torch.cos, torch.sin))
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(rotated, dim=-1).to(x.dtype)


def cosines_and_sines(o: Any, positions: Tensor, *frequencies_and_factor: Any) -> Tensor:
    """float32 [..., D] of such positions: what `rope` of `o` makes of a head (1, 0)."""
    half = len(frequencies_and_factor[0])
    head = torch.tensor([1.0, 0.0]).repeat_interleave(half).expand(*positions.shape, 1, -1)
    rotated: Tensor = o.rope(head, positions, *frequencies_and_factor)
    return rotated[..., 0, :]


def _places(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 4096, shape, generator=g)


def _rope_samples() -> Built:
    for dtype in FLOATS:
        yield dtype_name(dtype), lambda g, d=dtype: (
            activations(g, 3, 4, 32, dtype=d), _places(g, 3), frequencies(32),
        )  # fmt: skip
    yield "batch", lambda g: (
        activations(g, 2, 3, 4, 6), _places(g, 2, 3), frequencies(6, 5e5), 1.1386294,
    )  # fmt: skip
    for pairs, sections in ((32, [11, 11, 10]), (8, [3, 3, 2]), (5, [5, 0, 0]), (6, [4, 2, 0])):
        yield f"sections_{pairs}", lambda g, n=2 * pairs, s=sections: (
            activations(g, 3, 4, n), _places(g, 3, 3), frequencies(n), 1.0, s,
        )  # fmt: skip
    yield "sections_batch", lambda g: (
        activations(g, 2, 3, 4, 16, dtype=BF16), _places(g, 3, 2, 3), frequencies(16), 1.5,
        [4, 2, 2],
    )  # fmt: skip
    yield "one_token", lambda g: (activations(g, 5, 64), torch.tensor(100), frequencies(64), 0.5)
    yield "sections_no_heads", lambda g: (
        activations(g, 3, 0, 16), _places(g, 3, 3), frequencies(16), 1.0, [3, 3, 2],
    )  # fmt: skip
    yield "no_tokens", lambda g: (activations(g, 0, 4, 8), _places(g, 0), frequencies(8))
    yield "no_heads", lambda g: (activations(g, 3, 0, 8), _places(g, 3), frequencies(8))
    yield "view_of_qkv", lambda g: (
        activations(g, 3, 6 * 16)[:, 16:80].reshape(3, 4, 16), torch.arange(9)[::3],
        strided(frequencies(16)),
    )  # fmt: skip


_ROPE_REJECTIONS: Rejections = [
    ({"x": lambda a: a["x"][..., :15]}, "x", "even head dimension from 2 to 65536, got 15"),
    ({"x": lambda a: a["x"][0, 0]}, "x", "at least 2 dimension"),
    ({"x": lambda a: torch.ones(3, 1, 65538)}, "x", "from 2 to 65536, got 65538"),
    ({"positions": to("positions", I32)}, "positions", "of dtype int64, got int32"),
    ({"positions": to("positions", F16)}, "positions", "got float16"),
    ({"positions": narrow("positions", 0)}, "positions", "of shape [3], got [2]"),
    ({"positions": lambda a: a["positions"][:1]}, "positions", "of shape [3], got [1]"),
    ({"inv_freq": to("inv_freq", F64)}, "inv_freq", "of dtype float32, got float64"),
    ({"inv_freq": lambda a: a["inv_freq"][None]}, "inv_freq", "of shape [8], got [1, 8]"),
    ({"inv_freq": narrow("inv_freq")}, "inv_freq", "of shape [8], got [7]"),
    ({"sections": value([3, 3, 2])}, "positions", "of shape [3, 3], got [3]"),
    ({"sections": value([3, 3])}, "sections", "8 together, at most a third of them"),
    ({"sections": value([3, 3, 3])}, "sections", "got [3, 3, 3]"),
    ({"sections": value([4, 4, 0])}, "sections", "got [4, 4, 0]"),
    ({"sections": value([5, 0, 3])}, "sections", "got [5, 0, 3]"),
    ({"sections": value([9, -1, 0])}, "sections", "got [9, -1, 0]"),
    ({"sections": value([2**62, 2**62, 2**62])}, "sections", "8 together"),
    ({"attention_factor": value(0.0)}, "attention_factor", "finite and positive"),
    ({"attention_factor": value(float("nan"))}, "attention_factor", "finite and positive, got nan"),
]  # fmt: skip

spec(
    rope,
    samples=_rope_samples,
    large=[
        lambda g: (activations(g, 61, 9, 126), torch.arange(61) * 37, frequencies(126, 5e5), 1.25)
    ],
    calls={
        "": Call(
            lambda g: {
                "x": activations(g, M, 4, 16), "positions": torch.arange(M),
                "inv_freq": frequencies(16),
            },
            _ROPE_REJECTIONS,
        ),
    },
    rows={
        "": lambda g, dtype: lambda x: (
            x.reshape(-1, 4, 16), torch.full((len(x),), 7), frequencies(16)
        )
    },
    list_lengths={"sections": 3},
    empty={
        "": lambda: (torch.empty(2**20, 0, 8), torch.zeros(2**20, dtype=torch.int64),
                     frequencies(8)),
    },
)  # fmt: skip
