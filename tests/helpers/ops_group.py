"""Specs of the products whose weights have a scale for every group of 128 or 64 features."""

from __future__ import annotations

import torch
from torch import Tensor

from op_changes import F16, F64, FLOATS_TEXT, K, M, N, narrow, noncontiguous, to, value
from op_spec import Call, Named, Rejections, fixed, spec
from op_values import (
    FLOATS,
    FORMATS,
    Arguments,
    Built,
    activations,
    dtype_name,
    gain,
    positive,
    random_packed,
    transposed,
)
from ops_linear import check_in_features, codes_of
from ops_packing import BLOCK, quantize_activations, repacked


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32, rounded once: exact in float64, then a sum rounded to odd."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    bend = total - product
    error = (product - (total - bend)) + (c - bend)  # two-sum: exact
    even = total.view(torch.int64) & 1 == 0
    away = torch.nextafter(total, torch.where(error > 0, torch.inf, -torch.inf).double())
    return torch.where((error != 0) & even & total.isfinite(), away, total).float()


# quantize_activation_groups -----------------------------------------------------------------------


def quantize_activation_groups(
    x: Tensor, activation_format: str = "int8_group", group_size: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """Each group as a row of its own."""
    codes, scales = [], []
    for group in x.float().split(group_size, dim=-1):
        if activation_format == "int8_group":
            q, scale = quantize_activations(group)
        else:
            most = group.abs().amax(dim=-1, keepdim=True)
            bad = ~group.isfinite().all(dim=-1, keepdim=True)
            most = most.clamp(min=1e-30)
            q = (group * (torch.tensor(32512.0) / most)).round().where(~bad, 0).to(torch.int16)
            scale = (most / 32512.0).where(~bad, torch.nan).squeeze(-1)
        codes.append(q)
        scales.append(scale)
    return torch.cat(codes, dim=-1), torch.stack(scales, dim=-1)


def _quantize_samples() -> Built:
    for form in ("int8_group", "int16_group"):
        for dtype in FLOATS:
            yield f"{form}_{dtype_name(dtype)}", lambda g, f=form, d=dtype: (
                activations(g, 3, 300, dtype=d), f,
            )  # fmt: skip
        yield f"{form}_leading", lambda g, f=form: (activations(g, 2, 1, 3, 128), f)
        yield f"{form}_short", lambda g, f=form: (transposed(activations(g, 4, 5)), f)
        yield f"{form}_zeros", lambda g, f=form: (torch.zeros(2, 257), f)
        yield f"{form}_no_tokens", lambda g, f=form: (torch.zeros(0, 130), f)
        for k in (64, 65, 320):
            yield f"{form}_64_{k}", lambda g, f=form, k=k: (activations(g, 3, k), f, 64)


spec(
    quantize_activation_groups,
    samples=_quantize_samples,
    large=[lambda g: (activations(g, 131, 517), "int8_group")],
    calls={
        "": Call(
            lambda g: {"x": activations(g, M, K), "activation_format": "int8_group"},
            [
                ({"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
                ({"x": lambda a: a["x"][0, 0]}, "x", "at least 1 dimension"),
                ({"x": lambda a: a["x"][:, :0]}, "x", "at least one feature"),
                ({"activation_format": value("int8")}, "activation_format", "(quantize_activat"),
                ({"activation_format": value("q8")}, "activation_format", "or int16_group, got q8"),
                ({"group_size": value(32)}, "group_size", "128 or 64, got 32"),
            ],
        ),
    },
    rows={"": lambda g, dtype: lambda x: (x, "int8_group")},
)

# group_linear -------------------------------------------------------------------------------------


def group_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
    activation_format: str = "int8",
) -> Tensor:
    """F [..., K], scales of groups -> x.dtype [..., N]; groups ascending, one fma each."""
    check_in_features(x, in_features)
    k, whole = x.shape[-1], activation_format == "int8"
    codes = codes_of(weight, k, out_features).to(torch.int64)
    if weight_scale.dim() == 3:  # [blocks, groups, rows of a block]
        weight_scale = torch.cat([*weight_scale.float()], dim=1).T[: len(codes)]
    size = BLOCK if weight_scale.shape[1] == -(-k // BLOCK) else BLOCK // 2
    x_rows = x.reshape(-1, k)
    q, scale = (
        quantize_activations(x_rows)
        if whole
        else quantize_activation_groups(x_rows, activation_format, size)
    )
    q = q.to(torch.int64)
    y = torch.zeros(len(q), len(codes))
    for group, begin in enumerate(range(0, k, size)):
        sums = q[:, begin : begin + size] @ codes[:, begin : begin + size].T
        factor = weight_scale[:, group].expand(y.shape)
        if not whole:
            factor = factor * scale[:, group, None]
        y = fma(sums.float(), factor, y)
    if whole:
        y = y * scale.reshape(-1, 1)
    if bias is not None:
        y = y + bias.to(torch.float32)
    return y.to(x.dtype).reshape(*x.shape[:-1], len(codes))


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
    return activations(g, 3, k), weight, scales, None, 85, k, form


def _group_linear_samples() -> Built:
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
            activations(g, 3, 300), random_packed(g, 17, 300), positive(g, 17, 3), None, None, None,
            f,
        )  # fmt: skip
    for form in ("int8", "int8_group", "int16_group"):
        yield f"64_{form}", lambda g, f=form: (
            activations(g, 3, 300), random_packed(g, 17, 300), positive(g, 17, 5), None, None, None,
            f,
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
                positive(g, 85, -(-k // 128)), torch.randn(85, generator=g), 85,
            )  # fmt: skip


_GROUP_LINEAR_REJECTIONS: Rejections = [
    ({"out_features": value(7)}, "out_features", "the 6 rows of weight, or nothing, got 7"),
    ({"in_features": value(161)}, "x", "with the 161 input features of the weight"),
    ({"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
    ({"x": lambda a: a["x"][:, :0]}, "weight", "input features, got 0"),
    ({"weight": to("weight", torch.int8)}, "weight", "of dtype uint8, got int8"),
    ({"weight_scale": to("weight_scale", F16)}, "weight_scale", "got float16"),
    ({"weight_scale": value(torch.ones(1))}, "weight_scale", "[6, 2], got [1]"),
    ({"weight_scale": narrow("weight_scale")}, "weight_scale", "got [6, 1]"),
    ({"weight_scale": noncontiguous("weight_scale")}, "weight_scale", "contiguous"),
    ({"weight_scale": value(torch.ones(1, 2, 6))}, "weight_scale", "beside canonical rows, got 3"),
    ({"bias": narrow("bias")}, "bias", "of shape [6], got [5]"),
    ({"activation_format": value("int4")}, "activation_format", "or int16_group, got int4"),
]  # fmt: skip


def _blocked_call(g: torch.Generator) -> Named:
    x, weight, scale, _, rows, features, form = _tiled(g, "2bit", K, F16, "int8_group")
    return {
        "x": x, "weight": weight, "weight_scale": scale, "out_features": rows,
        "in_features": features, "activation_format": form,
    }  # fmt: skip


spec(
    group_linear,
    samples=_group_linear_samples,
    large=[
        lambda g: (
            activations(g, 37, 301), random_packed(g, 517, 301), positive(g, 517, 3),
            torch.randn(517, generator=g),
        ),
    ],
    calls={
        "": Call(
            lambda g: {
                "x": activations(g, M, K), "weight": random_packed(g, N, K),
                "weight_scale": positive(g, N, 2), "bias": gain(g, N),
            },
            _GROUP_LINEAR_REJECTIONS,
        ),
        "blocked": Call(
            _blocked_call,
            [
                ({"weight_scale": narrow("weight_scale")}, "weight_scale", "of shape ["),
                ({"weight_scale": to("weight_scale", F64)}, "weight_scale", "got float64"),
                ({"weight_scale": noncontiguous("weight_scale")}, "weight_scale", "contiguous"),
                ({"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
                ({"weight": to("weight", torch.int8)}, "weight", "of dtype uint8, got int8"),
                ({"out_features": value(0)}, "weight", "of shape [0, "),
                ({"in_features": value(161)}, "x", "with the 161 input features of the weight"),
                ({"activation_format": value("int4")}, "activation_format", "or int16_group, got"),
            ],
        ),
    },
    rows={"": lambda g, dtype: fixed(random_packed(g, 21, 64), positive(g, 21, 1))},
    poison_spreads=True,
    passes_gradient=frozenset({"x", "bias"}),
)  # fmt: skip
