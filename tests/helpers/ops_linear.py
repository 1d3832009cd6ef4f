"""Specs of the products with ternary weights."""

from __future__ import annotations

import torch
from torch import Tensor

from op_changes import (
    BF16,
    F16,
    F64,
    FLOATS_TEXT,
    I32,
    K,
    M,
    N,
    add_dim,
    narrow,
    noncontiguous,
    to,
    value,
)
from op_spec import Call, Named, Rejections, fixed, spec
from op_values import (
    FLOATS,
    FORMATS,
    Built,
    activations,
    dtype_name,
    gain,
    int8_values,
    positive,
    random_packed,
    strided,
    transposed,
)
from ops_packing import quantize_activations, repacked, unpack, unrepack


def codes_of(weight: Tensor, in_features: int, out_features: int | None) -> Tensor:
    """int8 [N, K] of a canonical or repacked weight."""
    if weight.dim() > 2:
        assert out_features is not None
        weight = unrepack(weight, out_features, in_features)
    return unpack(weight, in_features)


def check_in_features(x: Tensor, in_features: int | None) -> None:
    if in_features not in (None, x.shape[-1]):
        raise ValueError(f"expected x [..., {in_features}], got {list(x.shape)}")


# gemv ---------------------------------------------------------------------------------------------


def gemv(
    weight: Tensor,
    x: Tensor,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    """packed [N, R] times int8 [K] -> int32 [N], or float32 [N] with both scales."""
    check_in_features(x, in_features)
    x_scale = None if x_scale is None else x_scale.reshape(1)
    return gemm(weight, x[None], x_scale, weight_scale, out_features)[0]


def _gemv_samples() -> Built:
    for n, k in ((1, 1), (5, 128), (17, 300), (66, 257)):
        yield f"{n}x{k}", lambda g, n=n, k=k: (random_packed(g, n, k), int8_values(g, k))
    yield "scaled", lambda g: (
        random_packed(g, 9, 200), int8_values(g, 200), positive(g, 1), positive(g, 1),
    )  # fmt: skip
    yield "scaled_per_row", lambda g: (
        random_packed(g, 9, 200), int8_values(g, 200), positive(g), positive(g, 9),
    )  # fmt: skip
    yield "strided", lambda g: (random_packed(g, 9, 200), strided(int8_values(g, 200)))
    for fmt in FORMATS:
        yield f"private_{fmt}", lambda g, f=fmt: (
            repacked(random_packed(g, 83, 200), 200, f), int8_values(g, 200), None, None, 83,
        )  # fmt: skip


_GEMV_REJECTIONS: Rejections = [
    ({"out_features": value(7)}, "out_features", "the 6 rows of weight, or nothing, got 7"),
    ({"in_features": value(161)}, "x", "with the 161 input features of the weight"),
    ({"x": to("x", torch.float32)}, "x", "of dtype int8, got float32"),
    ({"x": to("x", torch.uint8)}, "x", "of dtype int8, got uint8"),
    ({"x": add_dim("x")}, "x", "with 1 dimensions, got shape [1, 160]"),
    ({"x": lambda a: a["x"][:100]}, "weight", "packed for the 100 input features"),
    ({"x": lambda a: a["x"][:0]}, "weight", "input features, got 0"),
    ({"weight": to("weight", torch.int8)}, "weight", "of dtype uint8, got int8"),
    ({"weight": lambda a: a["weight"][0]}, "weight", "with 2 dimensions"),
    ({"weight": noncontiguous("weight")}, "weight", "contiguous"),
    ({"weight": lambda a: a["weight"][:, :32]}, "weight", "contiguous"),
    ({"weight_scale": value(None)}, "x_scale and weight_scale", "got only x_scale"),
    ({"x_scale": value(None)}, "x_scale and weight_scale", "got only weight_scale"),
    ({"x_scale": value(torch.ones(2))}, "x_scale", "one element per token (1), got 2"),
    ({"x_scale": to("x_scale", F64)}, "x_scale", "of dtype float32, got float64"),
    ({"weight_scale": value(torch.ones(5))}, "weight_scale", "per output row (6), got 5"),
    ({"weight_scale": value(torch.ones(0))}, "weight_scale", "per output row (6), got 0"),
]  # fmt: skip

spec(
    gemv,
    samples=_gemv_samples,
    large=[lambda g: (random_packed(g, 1021, 517), int8_values(g, 517))],
    calls={
        "": Call(
            lambda g: {
                "weight": random_packed(g, N, K), "x": int8_values(g, K),
                "x_scale": positive(g, 1), "weight_scale": positive(g, 1),
            },
            _GEMV_REJECTIONS,
        ),
    },
)  # fmt: skip

# gemm ---------------------------------------------------------------------------------------------


def gemm(
    weight: Tensor,
    x: Tensor,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    """packed [N, R] times int8 [M, K] -> int32 [M, N], or float32 [M, N] with both scales."""
    check_in_features(x, in_features)
    codes = codes_of(weight, x.shape[-1], out_features)
    sums = (x.to(torch.int64) @ codes.to(torch.int64).T).to(torch.int32)
    if x_scale is None or weight_scale is None:
        return sums
    return sums.to(torch.float32) * (weight_scale.reshape(1, -1) * x_scale.reshape(-1, 1))


def _gemm_samples() -> Built:
    for m, n, k in ((0, 3, 64), (1, 5, 128), (4, 17, 300), (9, 1, 33)):
        yield f"{m}x{n}x{k}", lambda g, m=m, n=n, k=k: (
            random_packed(g, n, k), int8_values(g, m, k),
        )  # fmt: skip
    yield "scaled", lambda g: (
        random_packed(g, 9, 200), int8_values(g, 5, 200), positive(g, 5), positive(g, 1),
    )  # fmt: skip
    yield "scaled_per_row", lambda g: (
        random_packed(g, 9, 200), int8_values(g, 5, 200), positive(g, 5), positive(g, 9),
    )  # fmt: skip
    yield "transposed", lambda g: (random_packed(g, 9, 200), transposed(int8_values(g, 5, 200)))
    for fmt in FORMATS:
        for m in (2, 3, 7, 70):
            yield f"private_{fmt}_{m}", lambda g, f=fmt, m=m: (
                repacked(random_packed(g, 83, 200), 200, f), int8_values(g, m, 200),
                positive(g, m), positive(g, 83), 83,
            )  # fmt: skip


_GEMM_REJECTIONS: Rejections = [
    ({"out_features": value(7)}, "out_features", "the 6 rows of weight, or nothing, got 7"),
    ({"in_features": value(161)}, "x", "with the 161 input features of the weight"),
    ({"x": lambda a: a["x"][0]}, "x", "with 2 dimensions, got shape [160]"),
    ({"x": to("x", I32)}, "x", "of dtype int8, got int32"),
    ({"x": lambda a: a["x"][:, :128]}, "weight", "(32 bytes a row), got 64"),
    ({"x_scale": narrow("x_scale")}, "x_scale", "one element per token (3), got 2"),
    ({"x_scale": noncontiguous("x_scale")}, "x_scale", "contiguous"),
    ({"weight_scale": to("weight_scale", BF16)}, "weight_scale", "got bfloat16"),
    ({"weight": narrow("weight")}, "weight", "whole 32-byte blocks"),
]  # fmt: skip

spec(
    gemm,
    samples=_gemm_samples,
    large=[
        lambda g: (
            random_packed(g, 517, 301), int8_values(g, 37, 301), positive(g, 37), positive(g, 517),
        ),
        lambda g: (
            repacked(random_packed(g, 517, 301), 301, "2bit"), int8_values(g, 130, 301),
            positive(g, 130), positive(g, 517), 517,
        ),
    ],
    calls={
        "": Call(
            lambda g: {
                "weight": random_packed(g, N, K), "x": int8_values(g, M, K),
                "x_scale": positive(g, M), "weight_scale": positive(g, 1),
            },
            _GEMM_REJECTIONS,
        ),
    },
    empty={
        "scratch": lambda: (
            random_packed(torch.Generator(), 4, 1), torch.zeros(2**26, 1, dtype=torch.int8),
        ),
    },
)  # fmt: skip

# linear -------------------------------------------------------------------------------------------


def linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    """F [..., K] -> x.dtype [..., N]."""
    check_in_features(x, in_features)
    q, scale = quantize_activations(x)
    y = gemm(weight, q.reshape(-1, x.shape[-1]), scale.reshape(-1), weight_scale, out_features)
    if bias is not None:
        y = y + bias.to(torch.float32)
    return y.to(x.dtype).reshape(*x.shape[:-1], y.shape[-1])


def _linear_samples() -> Built:
    for dtype in FLOATS:
        yield dtype_name(dtype), lambda g, d=dtype: (
            activations(g, 3, 300, dtype=d), random_packed(g, 17, 300), positive(g, 1),
        )  # fmt: skip
        yield f"{dtype_name(dtype)}_bias", lambda g, d=dtype: (
            activations(g, 2, 33, dtype=d), random_packed(g, 5, 33), positive(g, 5),
            torch.randn(5, generator=g).to(d),
        )  # fmt: skip
    yield "vector", lambda g: (activations(g, 128), random_packed(g, 6, 128), positive(g, 1))
    yield "leading_dims", lambda g: (
        activations(g, 2, 1, 3, 64), random_packed(g, 6, 64), positive(g, 1),
    )  # fmt: skip
    yield "no_tokens", lambda g: (
        activations(g, 2, 0, 64), random_packed(g, 6, 64), positive(g, 1),
    )  # fmt: skip
    yield "transposed", lambda g: (
        transposed(activations(g, 4, 140)), random_packed(g, 6, 140), positive(g, 1),
    )  # fmt: skip
    for fmt in FORMATS:
        yield f"private_{fmt}", lambda g, f=fmt: (
            activations(g, 3, 300), repacked(random_packed(g, 17, 300), 300, f), positive(g, 1),
            torch.randn(17, generator=g), 17,
        )  # fmt: skip


_LINEAR_REJECTIONS: Rejections = [
    ({"out_features": value(7)}, "out_features", "the 6 rows of weight, or nothing, got 7"),
    ({"in_features": value(161)}, "x", "with the 161 input features of the weight"),
    ({"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
    ({"x": to("x", torch.int8)}, "x", FLOATS_TEXT + "int8"),
    ({"x": lambda a: a["x"][0, 0]}, "x", "at least 1 dimension"),
    ({"x": lambda a: a["x"][:, :0]}, "weight", "input features, got 0"),
    ({"x": lambda a: a["x"][:, :100]}, "weight", "packed for the 100 input features"),
    ({"weight": to("weight", torch.float32)}, "weight", "of dtype uint8, got float32"),
    ({"weight": lambda a: a["weight"][0]}, "weight", "with 2 dimensions"),
    ({"weight": lambda a: a["weight"].T.contiguous().T}, "weight", "contiguous"),
    ({"weight_scale": to("weight_scale", F16)}, "weight_scale", "got float16"),
    ({"weight_scale": value(torch.ones(7))}, "weight_scale", "per output row (6), got 7"),
    ({"bias": narrow("bias")}, "bias", "of shape [6], got [5]"),
    ({"bias": to("bias", I32)}, "bias", FLOATS_TEXT + "int32"),
    ({"bias": add_dim("bias")}, "bias", "of shape [6], got [1, 6]"),
]  # fmt: skip


def _tiles(g: torch.Generator) -> Named:
    weight = repacked(random_packed(g, N, K), K, "2bit")
    scale = torch.ones(1)
    return {"x": torch.ones(1, K), "weight": weight, "weight_scale": scale, "out_features": N}


spec(
    linear,
    samples=_linear_samples,
    large=[
        lambda g: (
            activations(g, 37, 301), random_packed(g, 517, 301), positive(g, 1),
            torch.randn(517, generator=g),
        ),
    ],
    calls={
        "": Call(
            lambda g: {
                "x": activations(g, M, K), "weight": random_packed(g, N, K),
                "weight_scale": positive(g, 1), "bias": gain(g, N),
            },
            _LINEAR_REJECTIONS,
        ),
    },
    rows={"": lambda g, dtype: fixed(random_packed(g, 21, 64), positive(g, 1))},
    poison_spreads=True,
    passes_gradient=frozenset({"x", "bias"}),
    huge={
        "tiles": _tiles,
        "no tiles": lambda g: {**_tiles(g), "weight": _tiles(g)["weight"][:0], "out_features": 0},
    },
    empty={
        "": lambda: (
            torch.empty(2**40, 0), random_packed(torch.Generator(), 4, 1), torch.ones(1),
        ),
        "strides": lambda: (
            torch.ones(1).expand(2**40, 128), random_packed(torch.Generator(), 4, 1), torch.ones(1),
        ),
    },
)  # fmt: skip
