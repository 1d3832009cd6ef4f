"""Specs of the products with ternary weights."""

from __future__ import annotations

from collections.abc import Sequence

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
    Arguments,
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
from ops_packing import BLOCK, quantize_activations, repacked, unpack, unrepack


def codes_of(weight: Tensor, in_features: int, shape: Sequence[int]) -> Tensor:
    """int8 [N, K] of a canonical or repacked weight."""
    if shape and shape[1] != in_features:
        raise ValueError(f"expected x [..., {shape[1]}], got {in_features} features")
    if weight.dim() > 2:
        weight = unrepack(weight, shape)
    return unpack(weight, in_features)


# gemv ---------------------------------------------------------------------------------------------


def gemv(
    weight: Tensor,
    x: Tensor,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """packed [N, R] times int8 [K] -> int32 [N], or float32 [N] with both scales."""
    x_scale = None if x_scale is None else x_scale.reshape(1)
    return gemm(weight, x[None], x_scale, weight_scale, shape)[0]


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
            repacked(random_packed(g, 83, 200), 200, f), int8_values(g, 200), None, None, (83, 200),
        )  # fmt: skip


_GEMV_REJECTIONS: Rejections = [
    ({"shape": value((7, K))}, "shape", "the 6 rows of weight, or empty, got 7"),
    ({"shape": value((N, 161))}, "x", "with the 161 input features of the weight"),
    ({"shape": value((N, K, 1))}, "shape", "empty or with 2 elements, got 3"),
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
    list_lengths={"shape": 2},
)  # fmt: skip

# gemm ---------------------------------------------------------------------------------------------


def gemm(
    weight: Tensor,
    x: Tensor,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """packed [N, R] times int8 [M, K] -> int32 [M, N], or float32 [M, N] with both scales."""
    codes = codes_of(weight, x.shape[-1], shape)
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
                positive(g, m), positive(g, 83), (83, 200),
            )  # fmt: skip


_GEMM_REJECTIONS: Rejections = [
    ({"shape": value((7, K))}, "shape", "the 6 rows of weight, or empty, got 7"),
    ({"shape": value((N, 161))}, "x", "with the 161 input features of the weight"),
    ({"shape": value((N, K, 1))}, "shape", "empty or with 2 elements, got 3"),
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
            positive(g, 130), positive(g, 517), (517, 301),
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
    list_lengths={"shape": 2},
    empty={
        "scratch": lambda: (
            random_packed(torch.Generator(), 4, 1), torch.zeros(2**26, 1, dtype=torch.int8),
        ),
    },
)  # fmt: skip

# linear -------------------------------------------------------------------------------------------


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32, rounded once: exact in float64, then a sum rounded to odd."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    bend = total - product
    error = (product - (total - bend)) + (c - bend)  # two-sum: exact
    even = total.view(torch.int64) & 1 == 0
    away = torch.nextafter(total, torch.where(error > 0, torch.inf, -torch.inf).double())
    return torch.where((error != 0) & even & total.isfinite(), away, total).float()


def linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    shape: Sequence[int] | None = None,
    activation_format: str = "int8",
) -> Tensor:
    """F [..., K] -> x.dtype [..., N]."""
    rows = x.reshape(-1, x.shape[-1])
    if weight_scale.dim() > 1:
        y = _sum_of_groups(rows, weight, weight_scale, shape, activation_format)
    else:
        q, scale = quantize_activations(rows)
        y = gemm(weight, q, scale, weight_scale, shape)
    if bias is not None:
        y = y + bias.to(torch.float32)
    return y.to(x.dtype).reshape(*x.shape[:-1], y.shape[-1])


def _sum_of_groups(
    x: Tensor, weight: Tensor, weight_scale: Tensor, shape: Sequence[int], activation_format: str
) -> Tensor:
    """float32 [M, N] with scales of groups; groups ascending, one fma each."""
    k, whole = x.shape[-1], activation_format == "int8"
    codes = codes_of(weight, k, shape).to(torch.int64)
    if weight_scale.dim() == 3:  # [blocks, groups, rows of a block]
        weight_scale = torch.cat([*weight_scale.float()], dim=1).T[: len(codes)]
    size = BLOCK if weight_scale.shape[1] == -(-k // BLOCK) else BLOCK // 2
    q, scale = quantize_activations(x, activation_format, size)
    q = q.to(torch.int64)
    y = torch.zeros(len(q), len(codes))
    for group, begin in enumerate(range(0, k, size)):
        sums = q[:, begin : begin + size] @ codes[:, begin : begin + size].T
        factor = weight_scale[:, group].expand(y.shape)
        if not whole:
            factor = factor * scale[:, group, None]
        y = fma(sums.float(), factor, y)
    return y * scale.reshape(-1, 1) if whole else y


def blocked(g: torch.Generator, weight: Tensor, groups: int, n: int, dtype: torch.dtype) -> Tensor:
    """Random scales beside the tiles `weight`, zeros behind row n; equal whatever their size."""
    fields = 5 if weight.dim() == 4 else 4
    rows = weight[0, 0].numel() // 4 * fields
    scales = torch.zeros(weight.shape[0] * rows, groups)
    scales[:n] = positive(g, n, groups)
    return scales.view(-1, rows, groups).transpose(1, 2).to(dtype).contiguous()


def _tiled(
    g: torch.Generator, fmt: str, k: int, dtype: torch.dtype, form: str, size: int = BLOCK
) -> Arguments:
    weight = repacked(random_packed(g, 85, k), k, fmt)
    scales = blocked(g, weight, -(-k // size), 85, dtype)
    return activations(g, 3, k), weight, scales, None, (85, k), form


def _group_samples() -> Built:
    for dtype in FLOATS:
        yield dtype_name(dtype), lambda g, d=dtype: (
            activations(g, 3, 300, dtype=d), random_packed(g, 17, 300), positive(g, 17, 3),
        )  # fmt: skip
        yield f"{dtype_name(dtype)}_bias", lambda g, d=dtype: (
            activations(g, 2, 33, dtype=d), random_packed(g, 5, 33), positive(g, 5, 1),
            torch.randn(5, generator=g).to(d),
        )  # fmt: skip
    yield "vector", lambda g: (activations(g, 256), random_packed(g, 6, 256), positive(g, 6, 2))
    yield "leading_dims", lambda g: (
        activations(g, 2, 1, 3, 64), random_packed(g, 6, 64), positive(g, 6, 1),
    )  # fmt: skip
    yield "no_tokens", lambda g: (
        activations(g, 2, 0, 130), random_packed(g, 6, 130), positive(g, 6, 2),
    )  # fmt: skip
    yield "zero_groups", lambda g: (
        activations(g, 3, 300), random_packed(g, 17, 300), positive(g, 17, 3).round(),
    )  # fmt: skip
    for form in ("int8_group", "int16_group"):
        yield form, lambda g, f=form: (
            activations(g, 3, 300), random_packed(g, 17, 300), positive(g, 17, 3), None, (), f,
        )  # fmt: skip
    for form in ("int8", "int8_group", "int16_group"):
        yield f"64_{form}", lambda g, f=form: (
            activations(g, 3, 300), random_packed(g, 17, 300), positive(g, 17, 5), None, (), f,
        )  # fmt: skip
    for fmt in FORMATS:
        for form in ("int8", "int8_group", "int16_group"):
            yield f"64_blocked_{fmt}_{form}", lambda g, f=fmt, a=form: _tiled(g, f, 200, F16, a, 64)
            for dtype in (torch.float32, F16):
                yield (
                    f"blocked_{fmt}_{form}_{dtype_name(dtype)}",
                    (lambda g, f=fmt, a=form, d=dtype: _tiled(g, f, 300, d, a)),
                )
        for k in (64, 129, 200, 300):  # a last group of one line's worth, of half, of all lines
            yield f"private_{fmt}_{k}", lambda g, f=fmt, k=k: (
                activations(g, 3, k), repacked(random_packed(g, 85, k), k, f),
                positive(g, 85, -(-k // 128)), torch.randn(85, generator=g), (85, k),
            )  # fmt: skip


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
            torch.randn(17, generator=g), (17, 300),
        )  # fmt: skip
    for name, build in _group_samples():
        yield f"groups_{name}", build


_LINEAR_REJECTIONS: Rejections = [
    ({"shape": value((7, K))}, "shape", "the 6 rows of weight, or empty, got 7"),
    ({"shape": value((N, 161))}, "x", "with the 161 input features of the weight"),
    ({"shape": value((N, K, 1))}, "shape", "empty or with 2 elements, got 3"),
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
    (
        {"activation_format": value("int8_group")},
        "activation_format", "int8 for weights without scales of groups",
    ),
]  # fmt: skip
_GROUP_REJECTIONS: Rejections = [
    ({"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
    ({"weight": to("weight", torch.int8)}, "weight", "of dtype uint8, got int8"),
    ({"weight_scale": to("weight_scale", F16)}, "weight_scale", "got float16"),
    ({"weight_scale": value(torch.ones(1, 1))}, "weight_scale", "[6, 2], got [1, 1]"),
    ({"weight_scale": narrow("weight_scale")}, "weight_scale", "got [6, 1]"),
    ({"weight_scale": noncontiguous("weight_scale")}, "weight_scale", "contiguous"),
    ({"weight_scale": value(torch.ones(1, 2, 6))}, "weight_scale", "beside canonical rows, got 3"),
    ({"bias": narrow("bias")}, "bias", "of shape [6], got [5]"),
    ({"activation_format": value("int4")}, "activation_format", "or int16_group, got int4"),
]  # fmt: skip


def _tiles(g: torch.Generator) -> Named:
    weight = repacked(random_packed(g, N, K), K, "2bit")
    scale = torch.ones(1)
    return {"x": torch.ones(1, K), "weight": weight, "weight_scale": scale, "shape": [N, K]}


def _blocked_call(g: torch.Generator) -> Named:
    x, weight, scale, _, shape, form = _tiled(g, "2bit", K, F16, "int8_group")
    return {
        "x": x, "weight": weight, "weight_scale": scale, "shape": shape, "activation_format": form,
    }  # fmt: skip


spec(
    linear,
    samples=_linear_samples,
    large=[
        lambda g: (
            activations(g, 37, 301), random_packed(g, 517, 301), positive(g, 1),
            torch.randn(517, generator=g),
        ),
        lambda g: (
            activations(g, 37, 301), random_packed(g, 517, 301), positive(g, 517, 3),
            torch.randn(517, generator=g),
        ),
    ],
    list_lengths={"shape": 2},
    calls={
        "": Call(
            lambda g: {
                "x": activations(g, M, K), "weight": random_packed(g, N, K),
                "weight_scale": positive(g, 1), "bias": gain(g, N),
            },
            _LINEAR_REJECTIONS,
        ),
        "groups": Call(
            lambda g: {
                "x": activations(g, M, K), "weight": random_packed(g, N, K),
                "weight_scale": positive(g, N, 2), "bias": gain(g, N),
            },
            _GROUP_REJECTIONS,
        ),
        "blocked": Call(
            _blocked_call,
            [
                ({"weight_scale": narrow("weight_scale")}, "weight_scale", "of shape ["),
                ({"weight_scale": to("weight_scale", F64)}, "weight_scale", "got float64"),
                ({"weight_scale": noncontiguous("weight_scale")}, "weight_scale", "contiguous"),
                ({"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
                ({"weight": to("weight", torch.int8)}, "weight", "of dtype uint8, got int8"),
                ({"shape": value((0, K))}, "weight", "of shape [0, "),
                ({"shape": value((85, 161))}, "x", "with the 161 input features of the weight"),
                ({"shape": value(())}, "shape", "weight is in a CPU-specific layout, got none"),
                ({"activation_format": value("int4")}, "activation_format", "or int16_group, got"),
            ],
        ),
    },
    rows={
        "": lambda g, dtype: fixed(random_packed(g, 21, 64), positive(g, 1)),
        "groups": lambda g, dtype: fixed(random_packed(g, 21, 64), positive(g, 21, 1)),
    },
    poison_spreads=True,
    passes_gradient=frozenset({"x", "bias"}),
    huge={
        "tiles": _tiles,
        "no tiles": lambda g: {**_tiles(g), "weight": _tiles(g)["weight"][:0], "shape": [0, K]},
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
