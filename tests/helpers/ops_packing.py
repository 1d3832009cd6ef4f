"""Specs of the ops that make ternary codes and pack them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitnet_ops import _runtime
from op_changes import (
    BOOL,
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
from op_spec import Call, Rejections, fixed, spec
from op_values import (
    FLOATS,
    FORMATS,
    Built,
    activations,
    dtype_name,
    random_codes,
    random_packed,
    strided,
    transposed,
)

BLOCK = 128  # weights in a block of the packed layout
_FIELD = 32  # bytes in a block; each holds the weights j, j + 32, j + 64, j + 96

# pack ---------------------------------------------------------------------------------------------


def pack(codes: Tensor) -> Tensor:
    """int8 [N, K] of -1, 0, 1 -> uint8 [N, 32 * ceil(K / 128)]."""
    n, k = codes.shape
    blocks = -(-k // BLOCK)
    padded = torch.zeros(n, blocks * BLOCK, dtype=torch.int64)
    padded[:, :k] = codes
    if not bool(((padded >= -1) & (padded <= 1)).all()):
        raise ValueError("pack: a value outside {-1, 0, 1}")
    fields = (padded + 1).reshape(n, blocks, 4, _FIELD)
    weights_of_fields = torch.tensor([64, 16, 4, 1]).reshape(1, 1, 4, 1)
    return (fields * weights_of_fields).sum(dim=2).reshape(n, blocks * _FIELD).to(torch.uint8)


def _pack_samples() -> Built:
    for n, k in ((1, 1), (5, 128), (3, 300), (2, 33)):
        yield f"{n}x{k}", lambda g, n=n, k=k: (random_codes(g, n, k),)
    yield "no_rows", lambda g: (random_codes(g, 0, 64),)
    yield "strided", lambda g: (strided(random_codes(g, 4, 130)),)
    yield "transposed", lambda g: (transposed(random_codes(g, 4, 130)),)


_PACK_REJECTIONS: Rejections = [
    ({"codes": to("codes", torch.uint8)}, "codes", "of dtype int8, got uint8"),
    ({"codes": to("codes", torch.float32)}, "codes", "of dtype int8, got float32"),
    ({"codes": lambda a: a["codes"][0]}, "codes", "with 2 dimensions, got shape [160]"),
    ({"codes": add_dim("codes")}, "codes", "with 2 dimensions, got shape [1, 6, 160]"),
    ({"codes": lambda a: a["codes"][:, :0]}, "codes", "at least one input feature"),
    ({"codes": lambda a: a["codes"] * 2}, "codes", "only -1, 0 and 1, got another value"),
    ({"codes": lambda a: a["codes"] - 127}, "codes", "only -1, 0 and 1"),
]  # fmt: skip

spec(
    pack,
    samples=_pack_samples,
    large=[lambda g: (torch.randint(-1, 2, (301, 517), generator=g, dtype=torch.int8),)],
    calls={"": Call(lambda g: {"codes": random_codes(g, N, K)}, _PACK_REJECTIONS)},
)

# unpack -------------------------------------------------------------------------------------------


def unpack(weight: Tensor, in_features: int) -> Tensor:
    """uint8 [N, 32 * ceil(K / 128)] -> int8 [N, K]."""
    n, row_bytes = weight.shape
    blocks = weight.reshape(n, row_bytes // _FIELD, 1, _FIELD).to(torch.int64)
    shifts = torch.tensor([6, 4, 2, 0]).reshape(1, 1, 4, 1)
    codes = ((blocks >> shifts) & 3).reshape(n, row_bytes * 4)
    if bool((codes == 3).any()) or bool((codes[:, in_features:] != 1).any()):
        raise ValueError("unpack: a code 3, or a padding code other than 1")
    return (codes[:, :in_features] - 1).to(torch.int8)


def _unpack_samples() -> Built:
    for n, k in ((1, 1), (5, 128), (3, 300), (2, 33), (0, 64)):
        yield f"{n}x{k}", lambda g, n=n, k=k: (random_packed(g, n, k), k)


_UNPACK_REJECTIONS: Rejections = [
    ({"weight": to("weight", torch.int8)}, "weight", "of dtype uint8, got int8"),
    ({"weight": lambda a: a["weight"][0]}, "weight", "with 2 dimensions"),
    ({"weight": noncontiguous("weight")}, "weight", "contiguous"),
    ({"weight": narrow("weight")}, "weight", "whole 32-byte blocks"),
    ({"weight": lambda a: a["weight"][:, :0]}, "weight", "whole 32-byte blocks"),
    ({"in_features": value(128)}, "weight", "32 bytes a row), got 64 bytes"),
    ({"in_features": value(257)}, "weight", "96 bytes a row), got 64 bytes"),
    ({"in_features": value(0)}, "weight", "input features, got 0"),
    ({"in_features": value(-3)}, "weight", "input features, got -3"),
    ({"in_features": value(2**62)}, "weight", "input features, got 4611686018427387904"),
    ({"weight": lambda a: a["weight"] | 0xC0}, "weight", "codes 0, 1, 2 only"),
    ({"weight": lambda a: a["weight"] * 0}, "weight", "padding codes 1"),
]  # fmt: skip

spec(
    unpack,
    samples=_unpack_samples,
    large=[lambda g: (random_packed(g, 301, 517), 517)],
    calls={
        "": Call(
            lambda g: {"weight": random_packed(g, N, K), "in_features": K}, _UNPACK_REJECTIONS
        ),
    },
)

# repack ------------------------------------------------------------------------------------------


def repack(weight: Tensor, in_features: int, format: str, group_size: int = 0) -> Tensor:
    """Canonical uint8 [N, R] -> tiles of the lanes in use: [tiles, lines, 4 L] or [.., L, 4]."""
    lanes, fields = _runtime.tile_lanes(), {"2bit": 4, "1.6bit": 5}[format]
    n, steps = weight.shape[0], 16 * -(-in_features // 64)
    tiles = -(-n // (fields * lanes))
    codes = torch.ones(tiles * fields * lanes, 4 * steps, dtype=torch.int64)
    codes[:n, :in_features] = unpack(weight, in_features).to(torch.int64) + 1
    by_field = codes.reshape(tiles, fields, lanes, steps, 4)
    if format == "2bit":
        powers = torch.tensor([1, 4, 16, 64]).reshape(1, 4, 1, 1, 1)
        values = (by_field * powers).sum(dim=1)
    else:
        powers = torch.tensor([81, 27, 9, 3, 1]).reshape(1, 5, 1, 1, 1)
        values = -((by_field * powers).sum(dim=1) * -256 // 243)  # ceil(256 v / 243)
    tiled = values.permute(0, 2, 1, 3).to(torch.uint8)  # [tiles, lines, L, 4]
    return (tiled.flatten(2) if format == "2bit" else tiled).contiguous()


def _repack_samples() -> Built:
    for fmt in FORMATS:
        for n, k in ((1, 1), (5, 64), (33, 300), (81, 129)):
            yield f"{fmt}_{n}x{k}", lambda g, n=n, k=k, f=fmt: (random_packed(g, n, k), k, f)
    yield "no_rows", lambda g: (random_packed(g, 0, 64), 64, "2bit")
    yield "of_groups", lambda g: (random_packed(g, 33, 300), 300, "1.6bit", 128)


_REPACK_REJECTIONS: Rejections = [
    ({"weight": to("weight", torch.int8)}, "weight", "of dtype uint8, got int8"),
    ({"weight": noncontiguous("weight")}, "weight", "contiguous"),
    ({"weight": lambda a: a["weight"] | 3}, "weight", "codes 0, 1, 2 only"),
    ({"in_features": value(257)}, "weight", "packed for the 257 input features"),
    ({"in_features": value(0)}, "weight", "input features, got 0"),
    ({"format": value("3bit")}, "format", "'2bit' or '1.6bit', got"),
    ({"group_size": value(32)}, "group_size", "0, 64 or 128, got 32"),
]  # fmt: skip

# A CPU-specific layout depends on the ISA; unrepack shows that the weights are the same.
spec(
    repack,
    samples=_repack_samples,
    large=[],
    comparable=False,
    calls={
        "": Call(
            lambda g: {"weight": random_packed(g, N, K), "in_features": K, "format": "2bit"},
            _REPACK_REJECTIONS,
        ),
    },
)


def repacked(weight: Tensor, k: int, format: str) -> Tensor:
    """A canonical weight in a CPU-specific layout of the ISA in force when the sample is made."""
    return repack(weight, k, format)


# unrepack ----------------------------------------------------------------------------------------


def unrepack(weight: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of repack: canonical uint8 [N, R] of an N x K matrix."""
    out_features, in_features = shape
    tiles, steps = weight.shape[:2]
    values = weight.reshape(tiles, steps, -1, 4).to(torch.int64)
    if weight.dim() == 3:
        fields = [(values >> (2 * f)) & 3 for f in range(4)]
    else:
        value = values * 243 // 256  # the floor of what ceil(256 v / 243) came from
        fields = [value // 3 ** (4 - g) % 3 for g in range(5)]
    # [tiles, lines, L, 4] each -> rows (tile, field, lane), columns (line, byte)
    codes = torch.stack(fields, dim=1).permute(0, 1, 3, 2, 4).reshape(-1, 4 * steps)
    return pack((codes[:out_features, :in_features] - 1).to(torch.int8))


def _unrepack_samples() -> Built:
    for fmt in FORMATS:
        for n, k in ((1, 1), (5, 64), (33, 300), (81, 129)):
            yield f"{fmt}_{n}x{k}", lambda g, n=n, k=k, f=fmt: (
                repacked(random_packed(g, n, k), k, f), (n, k),
            )  # fmt: skip


_UNREPACK_REJECTIONS: Rejections = [
    ({"weight": to("weight", torch.int8)}, "weight", "of dtype uint8, got int8"),
    ({"weight": lambda a: torch.zeros(N, 64).byte()}, "weight", "in a CPU-specific layout"),
    ({"weight": lambda a: a["weight"] | 3}, "weight", "codes 0, 1, 2"),
    ({"shape": value((100000, K))}, "weight", "repack again"),
    ({"shape": value((N, 257))}, "weight", "repack again"),
    ({"shape": value((-1, K))}, "shape", "of sizes from 0 to 1099511627776, got -1"),
    ({"shape": value((N,))}, "shape", "with 2 elements, got 1"),
    ({"shape": value(())}, "shape", "with 2 elements, got 0"),
]  # fmt: skip

spec(
    unrepack,
    samples=_unrepack_samples,
    large=[lambda g: (repacked(random_packed(g, 301, 517), 517, "1.6bit"), (301, 517))],
    calls={
        "": Call(
            lambda g: {
                "weight": repacked(random_packed(g, N, K), K, "2bit"),
                "shape": (N, K),
            },
            _UNREPACK_REJECTIONS,
        ),
    },
    list_lengths={"shape": 2},
)  # fmt: skip

# quantize_weights ---------------------------------------------------------------------------------


def quantize_weights(weight: Tensor) -> tuple[Tensor, Tensor]:
    """F [N, K] -> (codes int8 [N, K], scale float32 [1])."""
    mean = weight.to(torch.float64).abs().mean()
    scale = torch.clamp(mean, min=1e-5).to(torch.float32).reshape(1)
    inv_scale = 1.0 / scale
    codes = torch.clamp(torch.round(weight.to(torch.float32) * inv_scale), -1, 1)
    return codes.to(torch.int8), scale


def _quantize_weights_samples() -> Built:
    for dtype in FLOATS:
        yield dtype_name(dtype), lambda g, d=dtype: (torch.randn(7, 37, generator=g).to(d),)
    yield "zeros", lambda g: (torch.zeros(2, 5),)
    yield "small", lambda g: (torch.randn(3, 9, generator=g) * 1e-7,)
    yield "transposed", lambda g: (transposed(torch.randn(6, 130, generator=g)),)


_QUANTIZE_WEIGHTS_REJECTIONS: Rejections = [
    ({"weight": to("weight", F64)}, "weight", FLOATS_TEXT + "float64"),
    ({"weight": to("weight", torch.uint8)}, "weight", FLOATS_TEXT + "uint8"),
    ({"weight": lambda a: a["weight"][0]}, "weight", "with 2 dimensions"),
    ({"weight": lambda a: a["weight"][:0]}, "weight", "at least one element"),
    ({"weight": lambda a: a["weight"] * torch.nan}, "weight", "finite values"),
    ({"weight": lambda a: a["weight"] * torch.inf}, "weight", "finite values"),
]  # fmt: skip

spec(
    quantize_weights,
    samples=_quantize_weights_samples,
    large=[lambda g: (torch.randn(301, 517, generator=g),)],
    calls={
        "": Call(lambda g: {"weight": torch.randn(N, K, generator=g)}, _QUANTIZE_WEIGHTS_REJECTIONS)
    },
)

# quantize_activations -----------------------------------------------------------------------------


def quantize_activations(
    x: Tensor, activation_format: str = "int8", group_size: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """F [..., K] -> (q int8 [..., K], scale float32 [...]); a poisoned row -> 0 and NaN.

    Of groups each is a row of its own.
    """
    x = x.to(torch.float32)
    if activation_format == "int8":
        return _int8_row(x)
    row = _int8_row if activation_format == "int8_group" else int16_row
    groups = [row(group) for group in x.split(group_size, dim=-1)]
    return torch.cat([q for q, _ in groups], dim=-1), torch.stack([s for _, s in groups], dim=-1)


def _int8_row(x: Tensor) -> tuple[Tensor, Tensor]:
    absmax = x.abs().amax(dim=-1)
    s = 127.0 * torch.reciprocal(torch.clamp(absmax, min=1e-5))  # as torch evaluates 127 / t
    q = torch.clamp(torch.round(x * s[..., None]), -128, 127)
    finite = torch.isfinite(x).all(dim=-1)
    q = torch.where(finite[..., None], q, torch.zeros_like(q))
    return q.to(torch.int8), torch.where(finite, 1.0 / s, torch.full_like(s, torch.nan))


def int16_row(x: Tensor) -> tuple[Tensor, Tensor]:
    maximum = x.abs().amax(dim=-1, keepdim=True)
    bad = ~x.isfinite().all(dim=-1, keepdim=True)
    maximum = maximum.clamp(min=1e-30)
    q = (x * (torch.tensor(32512.0) / maximum)).round().where(~bad, 0).to(torch.int16)
    return q, (maximum / 32512.0).where(~bad, torch.nan).squeeze(-1)


def _quantize_activations_samples() -> Built:
    for dtype in FLOATS:
        yield dtype_name(dtype), lambda g, d=dtype: (activations(g, 3, 70, dtype=d),)
    yield "vector", lambda g: (activations(g, 33),)
    yield "leading_dims", lambda g: (activations(g, 2, 3, 2, 17),)
    yield "no_tokens", lambda g: (activations(g, 0, 64),)
    yield "strided", lambda g: (strided(activations(g, 4, 65)),)
    yield "transposed", lambda g: (transposed(activations(g, 4, 65)),)
    yield "zeros", lambda g: (torch.zeros(2, 40),)
    yield "one_value", lambda g: (torch.tensor([[3.0]]),)
    yield "not_finite", lambda g: (
        activations(g, 3, 20).index_put_((torch.tensor([0, 2]), torch.tensor([3, 19])),
                                         torch.tensor([torch.nan, -torch.inf])),
    )  # fmt: skip
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


_QUANTIZE_ACTIVATIONS_REJECTIONS: Rejections = [
    ({"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
    ({"x": to("x", I32)}, "x", FLOATS_TEXT + "int32"),
    ({"x": to("x", BOOL)}, "x", FLOATS_TEXT + "bool"),
    ({"x": to("x", torch.complex64)}, "x", FLOATS_TEXT + "complex64"),
    ({"x": lambda a: a["x"][0, 0]}, "x", "at least 1 dimension"),
    ({"x": lambda a: a["x"][:, :0]}, "x", "at least one feature"),
    ({"activation_format": value("q8")}, "activation_format", "or int16_group, got q8"),
    ({"group_size": value(32)}, "group_size", "128 or 64, got 32"),
]  # fmt: skip

spec(
    quantize_activations,
    samples=_quantize_activations_samples,
    large=[
        lambda g: (activations(g, 61, 1031),),
        lambda g: (activations(g, 131, 517), "int8_group"),
    ],
    calls={"": Call(lambda g: {"x": activations(g, M, K)}, _QUANTIZE_ACTIVATIONS_REJECTIONS)},
    rows={"": lambda g, dtype: fixed(), "groups": lambda g, dtype: fixed("int8_group")},
)
