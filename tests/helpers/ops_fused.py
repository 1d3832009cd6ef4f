"""Specs of the fused projections, each composed of the ops it fuses: those of `o`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bounds import EXP_ERROR, U, rms_norm_error, smallest, storing_error
from op_changes import F64, FLOATS_TEXT, K, M, narrow, noncontiguous, to, value
from op_schema import named
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
    strided,
)
from ops_linear import blocked
from ops_packing import repacked


def _fused_bound(args: Arguments, expected: Tensor) -> Tensor:
    """A fused op whose int8 codes are those of the reference, which fixed samples make certain.

    Then the integer sums agree and only the scales differ, by the error of the norms before them.
    """
    norms = sum(2 * rms_norm_error(arg.shape[-1]) for arg in args if _is_gain(arg))
    # Squared ReLU triples a relative error of gate and up; each linear adds three roundings.
    relative = 4 * (norms + EXP_ERROR + 12 * U) + storing_error(expected.dtype)
    return expected.double().abs() * relative + smallest(expected.dtype)


def _is_gain(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.is_floating_point() and arg.dim() == 1 and len(arg) > 1


# qkv_forward --------------------------------------------------------------------------------------


def _shapes(shape: Sequence[int] | None) -> list[Sequence[int]]:
    """N and K of each of the three weights."""
    return [(shape or ())[i : i + 2] for i in (0, 2, 4)]


def qkv_forward(o: Any, a: Any) -> tuple[Tensor, ...]:
    """rms_norm, then three linears."""
    hidden, form = o.rms_norm(a.x, a.norm_weight, a.eps), a.activation_format
    shards = (a.q_weight, a.q_scale), (a.k_weight, a.k_scale), (a.v_weight, a.v_scale)
    shapes = _shapes(a.shape)
    return tuple(
        o.linear(hidden, *shard, None, shape, form)
        for shard, shape in zip(shards, shapes, strict=True)
    )


def qkv_arguments(g: torch.Generator, x: Tensor, k: int, gain_dtype: torch.dtype) -> Arguments:
    shards = [part for n in (12, 4, 6) for part in (random_packed(g, n, k), positive(g, 1))]
    return (x, gain(g, k, gain_dtype), *shards, 1e-5)


def repacked_qkv_arguments(g: torch.Generator, k: int, fmt: str) -> Arguments:
    args = list(qkv_arguments(g, activations(g, 3, k), k, torch.float32))
    shapes = [size for index in (2, 4, 6) for size in (args[index].shape[0], k)]
    for index in (2, 4, 6):
        args[index] = repacked(args[index], k, fmt)
    return (*args, shapes)


def grouped_arguments(op: str, g: torch.Generator, form: str, fmt: str) -> Arguments:
    """Of qkv_forward or mlp_forward with scales of groups, blocked beside tiles."""
    k, inner = 300, 200
    rows = (12, 4, 6) if op == "qkv_forward" else (inner, inner, k)
    widths = (k, k, k) if op == "qkv_forward" else (k, k, inner)
    shards = []
    for n, width in zip(rows, widths, strict=True):
        weight, groups = random_packed(g, n, width), -(-width // 128)
        scale = positive(g, n, groups)
        if fmt != "canonical":
            weight = repacked(weight, width, fmt)
            scale = blocked(g, weight, groups, n, torch.float16)
        shards.append((weight, scale))
    x, norm = activations(g, 3, k), gain(g, k)
    (q, qs), (kw, ks), (v, vs) = shards
    shapes = [size for shape in zip(rows, widths, strict=True) for size in shape]
    if op == "qkv_forward":
        return x, norm, q, qs, kw, ks, v, vs, 1e-5, shapes, form
    sub = gain(g, inner)
    return x, norm, q, qs, kw, ks, sub, v, vs, 1e-5, "silu", shapes, form


def _rng() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _qkv_forward_samples() -> Built:
    for dtype in FLOATS:
        yield (
            dtype_name(dtype),
            lambda g, d=dtype: qkv_arguments(g, activations(g, 3, 140, dtype=d), 140, d),
        )
    yield "vector", lambda g: qkv_arguments(g, activations(g, 64), 64, torch.float32)
    yield (
        "leading_dims",
        lambda g: qkv_arguments(
            g, activations(g, 2, 2, 64, dtype=torch.bfloat16), 64, torch.float32
        ),
    )
    yield "no_tokens", lambda g: qkv_arguments(g, activations(g, 0, 64), 64, torch.float32)
    yield "strided", lambda g: qkv_arguments(g, strided(activations(g, 2, 64)), 64, torch.float32)
    for fmt in FORMATS:
        yield f"repacked_{fmt}", lambda g, f=fmt: repacked_qkv_arguments(g, 140, f)


_QKV_FORWARD_REJECTIONS: Rejections = [
    ({"shape": value([8, K, 4, K, 5, K])}, "shape", "the 4 rows of v_weight"),
    ({"shape": value([8, K, 4, 161, 4, K])}, "x", "with the 161 input features of the weight"),
    ({"shape": value([8, K])}, "shape", "empty or with 6 elements, got 2"),
    ({"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
    ({"norm_weight": narrow("norm_weight")}, "norm_weight", "of shape [160]"),
    ({"k_weight": narrow("k_weight")}, "k_weight", "whole 32-byte blocks"),
    ({"v_weight": to("v_weight", torch.int8)}, "v_weight", "got int8"),
    ({"q_weight": noncontiguous("q_weight")}, "q_weight", "contiguous"),
    ({"k_scale": value(torch.ones(3))}, "k_scale", "per output row (4), got 3"),
    ({"q_scale": value(torch.ones(3))}, "q_scale", "per output row (8), got 3"),
    ({"v_scale": to("v_scale", F64)}, "v_scale", "of dtype float32, got float64"),
    ({"k_scale": lambda a: positive(_rng(), 4, 2)}, "k_scale", "like q_scale, or neither, got gro"),
    ({"v_scale": lambda a: torch.ones(4, 1)}, "v_scale", "of shape [4, 2], got [4, 1]"),
    ({"activation_format": value("int8_group")}, "activation_format", "int8 for weights without"),
    ({"activation_format": value("fp8")}, "activation_format", "or int16_group, got fp8"),
    ({"eps": value(float("nan"))}, "eps", "finite and not negative, got nan"),
]  # fmt: skip


def _qkv_call(g: torch.Generator) -> Named:
    qkv = [part for n in (8, 4, 4) for part in (random_packed(g, n, K), positive(g, 1))]
    return named("qkv_forward", (activations(g, M, K), gain(g, K), *qkv, 1e-5))


spec(
    qkv_forward,
    composed=True,
    samples=_qkv_forward_samples,
    large=[
        lambda g: (
            activations(g, 13, 301), gain(g, 301), random_packed(g, 260, 301), positive(g, 1),
            random_packed(g, 70, 301), positive(g, 1), random_packed(g, 66, 301), positive(g, 1),
            1e-5,
        ),
    ],
    calls={"": Call(_qkv_call, _QKV_FORWARD_REJECTIONS)},
    bound=_fused_bound,
    rows={
        "": lambda g, dtype: fixed(*qkv_arguments(g, torch.zeros(1, 64), 64, dtype)[1:]),
    },
    poison_spreads=True,
    list_lengths={"shape": 6},
)  # fmt: skip

# mlp_forward --------------------------------------------------------------------------------------


def mlp_forward(o: Any, a: Any) -> Tensor:
    """rms_norm, gate and up, activation, sub-norm, down; float32 after the norm if x is float16."""
    gate_shape, up_shape, down_shape = _shapes(a.shape)
    hidden = o.rms_norm(a.x, a.norm_weight, a.eps)
    if a.x.dtype == torch.float16:
        hidden = hidden.float()  # squared ReLU overflows float16: the op keeps float32 from here
    form = a.activation_format
    gate = o.linear(hidden, a.gate_weight, a.gate_scale, None, gate_shape, form)
    up = o.linear(hidden, a.up_weight, a.up_scale, None, up_shape, form)
    if a.activation == "relu2":
        product = o.relu2_mul(gate, up)
    else:
        product = o.silu_and_mul(torch.cat([gate, up], dim=-1))
    if a.sub_norm_weight is not None:
        product = o.rms_norm(product, a.sub_norm_weight, a.eps)
    y: Tensor = o.linear(product, a.down_weight, a.down_scale, None, down_shape, form)
    return y.to(a.x.dtype)


def mlp_arguments(
    g: torch.Generator, x: Tensor, activation: str, sub_norm: bool = True, intermediate: int = 150
) -> Arguments:
    k, dtype = x.shape[-1], x.dtype
    return (
        x, gain(g, k, dtype),
        random_packed(g, intermediate, k), positive(g, 1),
        random_packed(g, intermediate, k), positive(g, 1),
        gain(g, intermediate, dtype) if sub_norm else None,
        random_packed(g, k, intermediate), positive(g, 1),
        1e-5, activation,
    )  # fmt: skip


def repacked_mlp_arguments(g: torch.Generator, k: int, inner: int, fmt: str) -> Arguments:
    args = list(mlp_arguments(g, activations(g, 3, k), "relu2", intermediate=inner))
    for index, width in ((2, k), (4, k), (7, inner)):
        args[index] = repacked(args[index], width, fmt)
    return (*args, [inner, k, inner, k, k, inner])


def _mlp_forward_samples() -> Built:
    for dtype in FLOATS:
        for activation in ("relu2", "silu"):
            yield (
                f"{dtype_name(dtype)}_{activation}",
                lambda g, d=dtype, a=activation: mlp_arguments(
                    g, activations(g, 3, 140, dtype=d), a
                ),
            )
    yield "no_sub_norm", lambda g: mlp_arguments(g, activations(g, 2, 64), "silu", False)
    yield "vector", lambda g: mlp_arguments(g, activations(g, 64), "relu2")
    yield "leading_dims", lambda g: mlp_arguments(g, activations(g, 2, 2, 64), "relu2", False)
    yield "no_tokens", lambda g: mlp_arguments(g, activations(g, 0, 64), "relu2")
    yield "strided", lambda g: mlp_arguments(g, strided(activations(g, 2, 64)), "relu2")
    for fmt in FORMATS:
        yield f"repacked_{fmt}", lambda g, f=fmt: repacked_mlp_arguments(g, 140, 150, f)


_MLP_FORWARD_REJECTIONS: Rejections = [
    ({"shape": value([150, K, 150, K, 161, 150])}, "shape", "the 160 rows of down_weight"),
    ({"shape": value([150, 161, 150, K, K, 150])}, "x", "the 161 input features of"),
    ({"shape": value([150, K, 150, K, K, 149])}, "gate_weight", "features of down_weight (shape)"),
    ({"gate_scale": value(torch.ones(3))}, "gate_scale", "per output row (150), got 3"),
    ({"up_scale": value(torch.ones(3))}, "up_scale", "per output row (150), got 3"),
    ({"up_scale": lambda a: positive(_rng(), 150, 2)}, "up_scale", "like gate_scale, or neither"),
    ({"activation_format": value("int16_group")}, "activation_format", "without scales of groups"),
    ({"activation_format": value("q8")}, "activation_format", "or int16_group, got q8"),
    ({"activation": value("gelu")}, "activation", "'relu2', 'silu' or 'gelu_pytorch_tanh', got"),
    ({"activation": value("")}, "activation", "'relu2', 'silu' or 'gelu_pytorch_tanh', got ''"),
    ({"up_weight": narrow("up_weight", 0)}, "up_weight", "rows of gate_weight"),
    ({"gate_weight": narrow("gate_weight")}, "gate_weight", "32-byte blocks"),
    (
        {"down_weight": lambda a: a["down_weight"][:, :32].contiguous()},
        "down_weight", "packed for the 150 input features",
    ),
    ({"down_scale": value(torch.ones(9))}, "down_scale", "per output row (160)"),
    (
        {"sub_norm_weight": narrow("sub_norm_weight")},
        "sub_norm_weight", "of shape [150], got [149]",
    ),
    ({"norm_weight": to("norm_weight", F64)}, "norm_weight", FLOATS_TEXT),
    ({"eps": value(-0.5)}, "eps", "finite and not negative"),
    ({"x": to("x", torch.int8)}, "x", FLOATS_TEXT + "int8"),
]  # fmt: skip

spec(
    mlp_forward,
    composed=True,
    samples=_mlp_forward_samples,
    large=[
        lambda g: mlp_arguments(g, activations(g, 13, 301), "relu2", True, 517),
        lambda g: mlp_arguments(g, activations(g, 1, 301), "silu", True, 517),
    ],
    calls={
        "": Call(
            lambda g: named("mlp_forward", mlp_arguments(g, activations(g, M, K), "relu2")),
            _MLP_FORWARD_REJECTIONS,
        ),
    },
    bound=_fused_bound,
    rows={
        "": lambda g, dtype: fixed(*mlp_arguments(g, torch.zeros(1, 64, dtype=dtype), "relu2")[1:]),
        "silu": lambda g, dtype: fixed(
            *mlp_arguments(g, torch.zeros(1, 64, dtype=dtype), "silu", False)[1:]
        ),
    },
    poison_spreads=True,
    list_lengths={"shape": 6},
)
