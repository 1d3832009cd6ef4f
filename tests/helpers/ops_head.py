"""Specs of the language model's head and of the embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bounds import U, sum_error
from op_changes import (
    BF16,
    F16,
    F64,
    FLOATS_TEXT,
    I32,
    K,
    M,
    add_dim,
    narrow,
    noncontiguous,
    to,
    value,
)
from op_schema import named
from op_spec import Call, Rejections, fixed, spec
from op_values import (
    FLOATS,
    FORMATS,
    HEAD_FORMATS,
    Arguments,
    Built,
    activations,
    dtype_name,
    positive,
    quantized_head,
    random_packed,
    strided,
    transposed,
)
from ops_linear import blocked, codes_of, fma
from ops_packing import BLOCK, int16_row, quantize_activations, repacked

# quantize_head ------------------------------------------------------------------------------------


def quantize_head(weight: Tensor, format: str, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """F [V, K] -> int8 [V, K] and float32 [V], or the tiles of int4 codes and bfloat16 scales."""
    w = weight.to(torch.float32)
    if format == "int8":
        absmax = w.abs().amax(dim=-1).clamp(min=1e-30)
        q = torch.clamp(torch.round(w * (torch.tensor(127.0) / absmax)[:, None]), -128, 127)
        return q.to(torch.int8), absmax / 127.0
    tiles, groups = -(-w.shape[0] // 16), -(-w.shape[1] // group_size)
    padded = torch.zeros(tiles * 16, groups * group_size)
    padded[: w.shape[0], : w.shape[1]] = w
    parts = padded.reshape(-1, groups, group_size)
    scale = (parts.abs().amax(dim=-1).clamp(min=1e-30) / 7.0).to(torch.bfloat16)
    scale[w.shape[0] :] = 0.0
    inverse = 1.0 / scale.to(torch.float32)
    q = torch.clamp(torch.round(parts * inverse[..., None]), -8, 7)
    q[w.shape[0] :] = 0.0
    # Line s of a tile: row r's bytes 4r + j hold features 8s + j (low half) and 8s + 4 + j (high).
    codes = (q + 8).to(torch.uint8).reshape(tiles, 16, -1, 2, 4)
    lines = (codes[:, :, :, 0] | codes[:, :, :, 1] << 4).transpose(1, 2)
    return lines.reshape(tiles, -1, 64), scale.reshape(tiles, 16, groups).transpose(1, 2)


def _quantize_head_samples() -> Built:
    for dtype in FLOATS:
        for form, group in HEAD_FORMATS:
            yield f"{dtype_name(dtype)}_{form}_{group}", lambda g, d=dtype, f=form, n=group: (
                (torch.randn(37, 300, generator=g) * 0.1).to(d), f, n,
            )  # fmt: skip
    yield "default_group", lambda g: (torch.randn(3, 1, generator=g), "int4")
    yield "no_rows", lambda g: (torch.zeros(0, 9), "int8")
    yield "zeros", lambda g: (torch.zeros(2, 130), "int4", 64)
    yield "transposed", lambda g: (transposed(torch.randn(6, 130, generator=g)), "int8")


_QUANTIZE_HEAD_REJECTIONS: Rejections = [
    ({"weight": to("weight", F64)}, "weight", FLOATS_TEXT + "float64"),
    ({"weight": lambda a: a["weight"][0]}, "weight", "with 2 dimensions"),
    ({"weight": lambda a: a["weight"][:, :0]}, "weight", "features"),
    ({"weight": value(torch.ones(1, 65537))}, "weight", "got 65537"),
    ({"weight": lambda a: a["weight"] / 0.0}, "weight", "finite, got a NaN"),
    (
        {"weight": lambda a: a["weight"] / 0.0, "format": value("int8")},
        "weight", "finite, got a NaN or an infinity in row",
    ),
    ({"format": value("int2")}, "format", '"int8" or "int4", got "int2"'),
    ({"group_size": value(32)}, "group_size", "64 or 128, got 32"),
]  # fmt: skip

spec(
    quantize_head,
    samples=_quantize_head_samples,
    large=[
        lambda g: (torch.randn(301, 517, generator=g), "int8"),
        lambda g: (torch.randn(301, 517, generator=g), "int4", 64),
    ],
    calls={
        "": Call(
            lambda g: {
                "weight": torch.randn(11, K, generator=g), "format": "int4", "group_size": 64,
            },
            _QUANTIZE_HEAD_REJECTIONS,
        ),
    },
)  # fmt: skip

# lm_head ------------------------------------------------------------------------------------------


def head_arguments(g: torch.Generator, x: Tensor, v: int, form: str, group: int) -> Arguments:
    return (x, *quantized_head(g, v, x.shape[-1], form, group), (v, x.shape[-1]))


def _head_codes(weight: Tensor, scale: Tensor) -> Tensor:
    """The codes -8..7 of an int4 head as int64 [padded V, groups, group size]."""
    tiles, lines, _ = weight.shape
    pieces = weight.reshape(tiles, lines, 16, 1, 4).transpose(1, 2)
    codes = torch.cat([pieces & 15, pieces >> 4], dim=3)
    return codes.to(torch.int64).reshape(tiles * 16, scale.shape[1], -1) - 8


def _int4_logits(wide: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """int64 [M, K] times the codes of an int4 head -> float32 [M, padded V], without x's scale."""
    codes = _head_codes(weight, scale)
    padded = torch.zeros(len(wide), codes.shape[1] * codes.shape[2], dtype=torch.int64)
    padded[:, : wide.shape[1]] = wide
    groups = padded.reshape(len(wide), *codes.shape[1:])
    scales = scale.transpose(1, 2).reshape(len(codes), -1).to(torch.float64)
    total = torch.zeros(len(wide), len(codes))
    for g in range(codes.shape[1]):
        sums = (groups[:, g] @ codes[:, g].T).to(torch.float32).to(torch.float64)
        # The product has 32 bits, so float64 holds it and the sum is an fma's but for a second
        # rounding that matters about once in 2^29 sums.
        total = (sums * scales[:, g] + total.to(torch.float64)).to(torch.float32)
    return total


def ternary_head(
    g: torch.Generator, v: int, k: int, weight_format: str, dtype: torch.dtype = F16
) -> Arguments:
    """weight, scale and shape of a ternary head with scales of groups."""
    weight, groups = random_packed(g, v, k), -(-k // BLOCK)
    if weight_format == "canonical":
        return weight, positive(g, v, groups), (v, k)
    weight = repacked(weight, k, weight_format)
    return weight, blocked(g, weight, groups, v, dtype), (v, k)


def _is_ternary(weight: Tensor, scale: Tensor) -> bool:
    return weight.dtype == torch.uint8 and scale.dtype != BF16


def _row_scales(scale: Tensor, rows: int) -> Tensor:
    """float32 [rows, groups] of scales in either form."""
    return torch.cat([*scale.float()], dim=1).T[:rows] if scale.dim() == 3 else scale


def _ternary_logits(x: Tensor, weight: Tensor, scale: Tensor, shape: Sequence[int]) -> Tensor:
    """float32 [M, K] times ternary codes, every group of x in 16 bits -> float32 [M, V]."""
    codes = codes_of(weight, x.shape[-1], shape).to(torch.int64)
    scales = _row_scales(scale, len(codes))
    q, x_scales = quantize_activations(x, "int16_group")
    total = torch.zeros(len(x), len(codes))
    for group, begin in enumerate(range(0, x.shape[-1], BLOCK)):
        part = slice(begin, begin + BLOCK)
        sums = q[:, part].to(torch.int64) @ codes[:, part].T
        total = fma(sums.float(), scales[:, group] * x_scales[:, group, None], total)
    return total


def lm_head(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """F [..., K] times a head in any format -> float32 [..., V]."""
    if scale is None:
        return (x.to(torch.float64) @ weight.to(torch.float64).T).to(torch.float32)
    if _is_ternary(weight, scale):
        y = _ternary_logits(x.reshape(-1, x.shape[-1]), weight, scale, shape)
        return y.reshape(*x.shape[:-1], y.shape[-1])
    wide, x_scale = int16_row(x.reshape(-1, x.shape[-1]).to(torch.float32))
    wide, x_scale = wide.to(torch.int64), x_scale[:, None]
    if weight.dtype == torch.int8:
        sums = (wide @ weight.to(torch.int64).T).to(torch.float64).to(torch.float32)
        y = sums * (scale[None, :] * x_scale)
    else:
        y = _int4_logits(wide, weight, scale) * x_scale
    y = y[:, : shape[0]] if shape else y
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _lm_head_bound(args: Arguments, expected: Tensor) -> Tensor:
    x, weight, scale = (*args, None)[:3]
    if scale is not None:  # integer sums, and float steps in an order the contract fixes
        return torch.zeros(expected.shape, dtype=torch.float64)
    magnitude = x.double().abs() @ weight.double().abs().T
    return magnitude * (sum_error(x.shape[-1]) + U)


def _lm_head_samples() -> Built:
    for x in FLOATS:
        for weight in FLOATS:
            yield f"{dtype_name(x)}_{dtype_name(weight)}", lambda g, x=x, w=weight: (
                activations(g, 2, 70, dtype=x), torch.randn(19, 70, generator=g).to(w),
            )  # fmt: skip
    yield "vector", lambda g: (activations(g, 33), torch.randn(5, 33, generator=g))
    yield "leading_dims", lambda g: (activations(g, 2, 3, 16), torch.randn(5, 16, generator=g))
    yield "no_tokens", lambda g: (activations(g, 0, 16), torch.randn(5, 16, generator=g))
    yield "strided", lambda g: (strided(activations(g, 2, 16)), torch.randn(5, 16, generator=g))

    for x in FLOATS:
        for form, group in HEAD_FORMATS:
            yield (
                f"{dtype_name(x)}_{form}_{group}",
                lambda g, x=x, f=form, n=group: head_arguments(
                    g, activations(g, 3, 300, dtype=x), 37, f, n
                ),
            )
    for form, group in HEAD_FORMATS:
        yield (
            f"no_tokens_{form}_{group}",
            lambda g, f=form, n=group: head_arguments(g, activations(g, 0, 16), 16, f, n),
        )
        yield (
            f"leading_dims_{form}_{group}",
            lambda g, f=form, n=group: head_arguments(
                g, strided(activations(g, 2, 3, 33)), 5, f, n
            ),
        )
    for x in FLOATS:
        for fmt in ("canonical", *FORMATS):
            yield f"{dtype_name(x)}_ternary_{fmt}", lambda g, x=x, f=fmt: (
                activations(g, 3, 300, dtype=x), *ternary_head(g, 85, 300, f),
            )  # fmt: skip
    for fmt in FORMATS:  # many tokens, whole tiles; one token, scales that are no float16
        yield f"tokens_ternary_{fmt}", lambda g, f=fmt: (
            activations(g, 19, 128), *ternary_head(g, 160, 128, f),
        )  # fmt: skip
        yield f"token_ternary_{fmt}", lambda g, f=fmt: (
            activations(g, 1, 64), *ternary_head(g, 7, 64, f, torch.float32),
        )  # fmt: skip
    yield "no_shape", lambda g: (
        activations(g, 2, 64), *quantized_head(g, 32, 64, "int4", 64),
    )  # fmt: skip


_LM_HEAD_REJECTIONS: Rejections = [
    ({"shape": value((11, 161))}, "x", "with the 161 input features of the weight"),
    ({"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
    ({"x": lambda a: a["x"][0, 0]}, "x", "at least 1 dimension"),
    ({"weight": narrow("weight")}, "weight", "of shape [11, 160], got [11, 159]"),
    ({"weight": to("weight", F64)}, "weight", FLOATS_TEXT + "float64"),
    ({"weight": to("weight", torch.uint8)}, "weight", "with 3 dimensions"),
    ({"weight": to("weight", torch.int8)}, "scale", "with a quantised weight"),
    ({"weight": lambda a: a["weight"][0]}, "weight", "with 2 dimensions"),
    ({"weight": noncontiguous("weight")}, "weight", "contiguous"),
    ({"scale": value(torch.ones(11))}, "scale", "left out for a float weight"),
    ({"shape": value((12, K))}, "shape", "with the weight's rows 11, got 12"),
]  # fmt: skip
_LM_HEAD_INT8_REJECTIONS: Rejections = [
    ({"weight": narrow("weight")}, "weight", "of shape [11, 160], got [11, 159]"),
    ({"weight": add_dim("weight")}, "weight", "with 2 dimensions"),
    ({"weight": noncontiguous("weight")}, "weight", "contiguous"),
    ({"scale": value(None)}, "scale", "with a quantised weight"),
    ({"scale": to("scale", BF16)}, "scale", "of dtype float32, got bfloat16"),
    ({"scale": narrow("scale")}, "scale", "of shape [11], got [10]"),
    ({"scale": noncontiguous("scale")}, "scale", "contiguous"),
    ({"shape": value((10, K))}, "shape", "rows 11, got 10"),
    (
        {
            "x": value(torch.ones(1, 65537)), "weight": value(torch.ones(11, 65537).char()),
            "shape": value(()),
        },
        "weight", "with 1 to 65536 features for a quantised head, got 65537",
    ),
]  # fmt: skip
_LM_HEAD_INT4_REJECTIONS: Rejections = [
    ({"weight": narrow("weight")}, "weight", "[1, 24, 64], got [1, 24, 63]"),
    ({"weight": narrow("weight", 1)}, "scale", "of the weight's 23 lines"),
    ({"weight": noncontiguous("weight")}, "weight", "contiguous"),
    ({"x": lambda a: torch.ones(2, 128), "shape": value(())}, "weight", "2 groups of 64"),
    ({"x": lambda a: torch.ones(2, 193), "shape": value(())}, "weight", "4 groups of 64"),
    ({"scale": value(None)}, "scale", "with a quantised weight"),
    ({"scale": to("scale", F64)}, "scale", "of dtype bfloat16, got float64"),
    ({"scale": narrow("scale")}, "scale", "of shape [1, 3, 16], got [1, 3, 15]"),
    ({"scale": narrow("scale", 1)}, "scale", "lines, got 2 groups"),
    ({"scale": lambda a: a["scale"][0]}, "scale", "with 3 dimensions"),
    ({"shape": value((17, K))}, "shape", "rows that fill 1 tiles of 16, got 17"),
    ({"shape": value((0, K))}, "shape", "tiles of 16, got 0"),
]  # fmt: skip

_LM_HEAD_TERNARY_REJECTIONS: Rejections = [
    ({"x": lambda a: a["x"][:, :64], "shape": value((11, 64))}, "weight", "repacked for"),
    ({"shape": value(())}, "shape", "given, for weight is in a CPU-specific"),
    ({"shape": value((100, K))}, "weight", "100 x 160 repacked for"),
    ({"weight": noncontiguous("weight")}, "weight", "contiguous"),
    ({"scale": narrow("scale")}, "scale", "of shape ["),
    ({"scale": noncontiguous("scale")}, "scale", "contiguous"),
]  # fmt: skip

spec(
    lm_head,
    samples=_lm_head_samples,
    large=[
        lambda g: (activations(g, 5, 301), torch.randn(1021, 301, generator=g)),
        lambda g: head_arguments(g, activations(g, 7, 4301), 1021, "int8", 128),
        lambda g: head_arguments(g, activations(g, 7, 1301), 1021, "int4", 128),
    ],
    calls={
        "": Call(
            lambda g: {"x": activations(g, M, K), "weight": torch.randn(11, K, generator=g)},
            _LM_HEAD_REJECTIONS,
        ),
        "int8": Call(
            lambda g: named("lm_head", head_arguments(g, activations(g, M, K), 11, "int8", 128)),
            _LM_HEAD_INT8_REJECTIONS,
        ),
        "int4": Call(
            lambda g: named("lm_head", head_arguments(g, activations(g, M, K), 11, "int4", 64)),
            _LM_HEAD_INT4_REJECTIONS,
        ),
        "ternary": Call(
            lambda g: named("lm_head", (activations(g, M, K), *ternary_head(g, 11, K, "2bit"))),
            _LM_HEAD_TERNARY_REJECTIONS,
        ),
    },
    bound=_lm_head_bound,
    list_lengths={"shape": 2},
    rows={
        "": lambda g, dtype: fixed(torch.randn(33, 64, generator=g)),
        "int8": lambda g, dtype: fixed(*quantize_head(torch.randn(33, 64, generator=g), "int8")),
        "int4": lambda g, dtype: fixed(
            *quantize_head(torch.randn(33, 64, generator=g), "int4", 64), (33, 64)
        ),
    },
    empty={
        "no rows": lambda: (torch.empty(2**40, 0), torch.empty(0, 0)),
        "": lambda: (torch.empty(2**40, 0), torch.empty(5, 0)),
    },
)

# embedding ----------------------------------------------------------------------------------------


def embedding(
    ids: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Rows of a head in any format, int64 [...] -> float32 [..., K]."""
    if scale is None:
        rows = weight.to(torch.float32)
    elif _is_ternary(weight, scale):
        codes = codes_of(weight, shape[1], shape)
        scales = _row_scales(scale, len(codes)).repeat_interleave(BLOCK, dim=1)
        rows = codes.to(torch.float32) * scales[:, : shape[1]]
    elif weight.dtype == torch.int8:
        rows = weight.to(torch.float32) * scale[:, None]
    else:
        scales = scale.transpose(1, 2).reshape(-1, scale.shape[1], 1).to(torch.float32)
        rows = (_head_codes(weight, scale).to(torch.float32) * scales).flatten(1)
    return (rows[: shape[0], : shape[1]] if shape else rows)[ids]


def _embedding_samples() -> Built:
    for weight in FLOATS:
        yield dtype_name(weight), lambda g, w=weight: (
            torch.tensor([[3, 0], [18, 3]]), torch.randn(19, 70, generator=g).to(w),
        )  # fmt: skip
    for form, group in HEAD_FORMATS:
        yield f"{form}_{group}", lambda g, f=form, n=group: (
            torch.tensor([36, 0, 17, 36]), *quantized_head(g, 37, 300, f, n), (37, 300),
        )  # fmt: skip
    for fmt in ("canonical", *FORMATS):
        yield f"ternary_{fmt}", lambda g, f=fmt: (
            torch.tensor([84, 0, 17, 64, 84]), *ternary_head(g, 85, 300, f),
        )  # fmt: skip
    yield "scalar", lambda g: (torch.tensor(2), torch.randn(5, 7, generator=g))
    yield "no_ids", lambda g: (
        torch.zeros(2, 0, dtype=torch.int64), *quantized_head(g, 16, 64, "int4", 64),
    )  # fmt: skip
    yield "strided", lambda g: (torch.arange(6)[::2], *quantized_head(g, 7, 9, "int8", 128))


_EMBEDDING_REJECTIONS: Rejections = [
    ({"ids": to("ids", I32)}, "ids", "of dtype int64, got int32"),
    ({"ids": value(torch.tensor([0, 11]))}, "ids", "from 0 to 10, got 11"),
    ({"ids": value(torch.tensor([-1]))}, "ids", "from 0 to 10, got -1"),
    ({"weight": to("weight", F64)}, "weight", FLOATS_TEXT + "float64"),
    ({"weight": noncontiguous("weight")}, "weight", "contiguous"),
    ({"shape": value((11, 161))}, "weight", "[11, 161], got [11, 160]"),
    ({"shape": value((11, -1))}, "shape", "of sizes from 0 to 1099511627776, got -1"),
    ({"shape": value((10, K))}, "shape", "rows 11, got 10"),
    ({"scale": value(torch.ones(11))}, "scale", "left out for a float weight"),
]  # fmt: skip
_EMBEDDING_TERNARY_REJECTIONS: Rejections = [
    ({"shape": value(())}, "shape", "given for a ternary weight"),
    ({"ids": value(torch.tensor([11]))}, "ids", "from 0 to 10, got 11"),
    ({"shape": value((100, K))}, "weight", "100 x 160 repacked for"),
    ({"scale": noncontiguous("scale")}, "scale", "contiguous"),
    ({"weight": noncontiguous("weight")}, "weight", "contiguous"),
]  # fmt: skip
_EMBEDDING_INT4_REJECTIONS: Rejections = [
    ({"ids": value(torch.tensor([11]))}, "ids", "from 0 to 10, got 11"),
    ({"shape": value((11, 0))}, "weight", "with 1 to 65536 features"),
    ({"shape": value((11, 128))}, "weight", "for 128 features, got 3"),
    ({"shape": value((17, K))}, "shape", "fill 1 tiles"),
    ({"scale": noncontiguous("scale")}, "scale", "contiguous"),
    ({"weight": value(torch.ones(1, 24, 64))}, "weight", "with 2 dimensions"),
]  # fmt: skip

spec(
    embedding,
    samples=_embedding_samples,
    large=[
        lambda g: (
            torch.randint(0, 301, (61,), generator=g),
            *quantized_head(g, 301, 517, "int4", 64), (301, 517),
        ),
    ],
    calls={
        "": Call(
            lambda g: {
                "ids": torch.tensor([0, 10]), "weight": torch.randn(11, K, generator=g),
                "shape": (11, K),
            },
            _EMBEDDING_REJECTIONS,
        ),
        "int4": Call(
            lambda g: named(
                "embedding",
                (torch.tensor([0, 10]), *quantized_head(g, 11, K, "int4", 64), (11, K)),
            ),
            _EMBEDDING_INT4_REJECTIONS,
        ),
        "ternary": Call(
            lambda g: named(
                "embedding", (torch.tensor([0, 10]), *ternary_head(g, 11, K, "2bit"))
            ),
            _EMBEDDING_TERNARY_REJECTIONS,
        ),
    },
    list_lengths={"shape": 2},
    empty={"": lambda: (torch.empty(0, dtype=torch.int64), torch.empty(0, 2**62))},
)  # fmt: skip
