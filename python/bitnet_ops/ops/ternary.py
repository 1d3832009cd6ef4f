"""The ops on ternary weights: packing, quantisation, products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitnet_ops import _runtime
from bitnet_ops.ops._operator import differentiable, operator

__all__ = [
    "pack",
    "unpack",
    "repack",
    "unrepack",
    "quantize_weights",
    "quantize_activations",
    "gemv",
    "gemm",
    "linear",
]


def _rows(weight: Tensor, shape: Sequence[int] | None) -> int:
    """N of a canonical weight [N, R], or of a CPU-specific layout, which is padded."""
    return shape[0] if shape else weight.shape[0]


def projection_shape(x: Tensor, weight: Tensor, shape: Sequence[int] | None) -> list[int]:
    """The shape [..., N] of a projection of x [..., K]."""
    return [*x.shape[:-1], _rows(weight, shape)]


def _product_dtype(x_scale: Tensor | None) -> torch.dtype:
    return torch.int32 if x_scale is None else torch.float32


@operator
def pack(codes: Tensor) -> Tensor:
    """Pack ternary weights into the canonical 2-bit layout (an SGLBITNT row, I2_S layout a).

    Each row is cut into blocks of 128 weights, a block into 32 bytes; byte j of a block holds
    `w[j] << 6 | w[j+32] << 4 | w[j+64] << 2 | w[j+96]` with w + 1 as the 2-bit code. Where K is
    not a multiple of 128 the last block is padded with weight 0 (code 1).

    Args:
        codes: int8 [N, K], every value -1, 0 or 1.
    Returns:
        uint8 [N, 32 * ceil(K / 128)].
    Raises:
        RuntimeError: another dtype or rank, K = 0, a value outside {-1, 0, 1}.
    Source: FORMAT.md, "Packed rows"; microsoft/BitNet src/ggml-bitnet-mad.cpp (I2_S).
    """
    return codes.new_empty(_runtime.packed_shape("canonical", *codes.shape), dtype=torch.uint8)


@operator
def unpack(weight: Tensor, in_features: int) -> Tensor:
    """Unpack the canonical layout: the inverse of `pack`.

    Args:
        weight: uint8 [N, 32 * ceil(K / 128)], contiguous.
        in_features: K, which the packed form does not record.
    Returns:
        int8 [N, K] of -1, 0, 1.
    Raises:
        RuntimeError: a width that does not fit K, a code 3, a padding code other than 1.
    Source: as `pack`.
    """
    return weight.new_empty((weight.shape[0], in_features), dtype=torch.int8)


@operator
def repack(weight: Tensor, in_features: int, format: str, group_size: int = 0) -> Tensor:
    """Bring canonical weights into a layout of the kernels that run now.

    A CPU-specific layout is what this CPU reads fastest. It is made when a model is loaded and not
    stored in a model file; it depends on the instruction set in use (`_runtime.tile_lanes()` lanes
    L) and fits no other: repack after forcing another one. The products take it with
    `shape`; their results do not change.

    Args:
        weight: uint8 [N, 32 * ceil(K / 128)], contiguous, codes 0, 1, 2.
        in_features: K, at most 32768, or 65536 beside scales of groups.
        format: "2bit", 4 weights a byte, or "1.6bit", 5 weights a byte (more arithmetic for fewer
            bytes: for CPUs whose memory is slow against their cores).
        group_size: of the scales that it will have, 64 or 128; 0: one a matrix or a row.
    Returns:
        uint8 [ceil(N / 4L), lines, 4L] for "2bit", [ceil(N / 5L), lines, L, 4] for "1.6bit", with
        lines = 16 * ceil(K / 64).
    Raises:
        RuntimeError: as `unpack`; another format; another group_size; a K above what it allows.
    Source: docs/reference/layouts.md.
    """
    return weight.new_empty(_runtime.packed_shape(format, weight.shape[0], in_features))


@operator
def unrepack(weight: Tensor, shape: Sequence[int]) -> Tensor:
    """Bring a CPU-specific layout back to the canonical one: the inverse of `repack`.

    Args:
        weight: as `repack` returns it, for the kernels that run now.
        shape: (N, K), which the padded form does not record.
    Returns:
        uint8 [N, 32 * ceil(K / 128)].
    Raises:
        RuntimeError: a shape that does not fit N, K or the instruction set; a code 3.
    Source: as `repack`.
    """
    return weight.new_empty(_runtime.packed_shape("canonical", *shape))


@operator
def quantize_weights(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Ternarise master weights by their mean magnitude (absmean), one scale per matrix.

    `scale = max(mean(|W|), 1e-5)`, the mean accumulated in float64;
    `codes = clamp(round_half_even(W * (1 / scale)), -1, 1)` in float32.

    Args:
        weight: F [N, K], finite.
    Returns:
        (codes int8 [N, K], scale float32 [1]); codes * scale approximates weight.
    Raises:
        RuntimeError: another dtype or rank, an empty matrix, a NaN or an infinity.
    Source: "The Era of 1-bit LLMs" (arXiv 2402.17764); transformers WeightQuant.
    """
    codes = weight.new_empty(weight.shape, dtype=torch.int8)
    return codes, weight.new_empty((1,), dtype=torch.float32)


@operator
def quantize_activations(
    x: Tensor, activation_format: str = "int8", group_size: int = 128
) -> tuple[Tensor, Tensor]:
    """Quantise activations to int8 with one scale per token (absmax over the last dimension).

    In float32: `s = 127 * (1 / max(absmax(x), 1e-5))` (two roundings, as torch evaluates 127 / t),
    `q = clamp(round_half_even(x * s), -128, 127)`, `scale = 1 / s`. A row with a NaN or an infinity
    gives q = 0 and scale = NaN, so that the poison reaches its own results and no others.
    "int8_group" does the same to every group of a token's features, and "int16_group" makes 16-bit
    integers of a group: `a = max(absmax, 1e-30)`, `q = round_half_even(x * (32512 / a))`,
    `scale = a / 32512`; |q| <= 32512 so that two int8 planes hold it, `q = 256 * high + low`.

    Args:
        x: F [..., K], any strides, K >= 1; the last group may be shorter.
        activation_format: "int8", "int8_group" or "int16_group".
        group_size: 128 or 64 features; "int8" has no groups.
    Returns:
        (q, scale): int8 or int16 [..., K] and float32 [...], or of groups
        [..., ceil(K / group_size)]; q * scale approximates x.
    Raises:
        RuntimeError: another dtype, no dimension, K = 0; another format or size.
    Source: arXiv 2402.17764; transformers ActQuant. Groups: GGUF's Q8_0, with larger groups and
        float32 scales.
    """
    dtype = torch.int16 if activation_format == "int16_group" else torch.int8
    groups = () if activation_format == "int8" else ((x.shape[-1] + group_size - 1) // group_size,)
    scale = x.new_empty([*x.shape[:-1], *groups], dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), scale


@operator
def gemv(
    weight: Tensor,
    x: Tensor,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Ternary matrix times one int8 vector (M = 1): `y[n] = sum_k w[n, k] * x[k]`.

    The sum is exact in int32. With both scales `y = float32(sum) * (weight_scale * x_scale)`.
    The weight comes first, as this op was published; other ops take their input first.

    Args:
        weight: packed uint8 [N, 32 * ceil(K / 128)], contiguous, or `repack`'s.
        x: int8 [K].
        x_scale: float32 [] or [1], the token's scale; given together with weight_scale or not.
        weight_scale: float32 [1], or [N] for one scale per row (fused projections).
        shape: (N, K) of the weight, whose packed bytes are padded and do not record it; needed with
            a CPU-specific layout. Where it is left out, any x of a K that fills as many blocks of
            128 passes.
    Returns:
        int32 [N] without scales, float32 [N] with them.
    Raises:
        RuntimeError: a wrong dtype, shape or stride, exactly one scale, a K other than the shape's.
    Source: arXiv 2402.17764, section 2 (W1.58A8).
    """
    return x.new_empty((_rows(weight, shape),), dtype=_product_dtype(x_scale))


@operator
def gemm(
    weight: Tensor,
    x: Tensor,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Ternary matrix times M int8 vectors: `y[m, n] = sum_k w[n, k] * x[m, k]`.

    Row m equals `gemv` of that row, bit for bit. The weight comes first, as there.

    Args:
        weight, shape: as `gemv`.
        x: int8 [M, K], M >= 0.
        x_scale: float32 [M], one scale per token; given together with weight_scale or not.
        weight_scale: float32 [1] or [N].
    Returns:
        int32 [M, N] without scales, float32 [M, N] with them.
    Raises:
        RuntimeError: a wrong dtype, shape or stride, exactly one scale, a K other than the shape's.
    Source: as `gemv`.
    """
    return x.new_empty((x.shape[0], _rows(weight, shape)), dtype=_product_dtype(x_scale))


@differentiable
def linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    shape: Sequence[int] | None = None,
    activation_format: str = "int8",
) -> Tensor:
    """A BitNet linear: `quantize_activations`, `gemm` with both scales, plus bias, rounded once.

    `y = round_F(float32(sum_k w * q) * (weight_scale * scale) + bias)`.

    With a weight_scale for every G = 128 or 64 weights of a row (a group along K) the sum of a
    group, s_g, is an exact integer; groups are added in ascending order by one fused multiply-add
    in float32 each, `acc = fma(float32(s_g), f_g, acc)` from 0, where f_g is `weight_scale[:, g]`
    and at last `y = round_F(acc * scale + bias)`, with one scale a token; or, with a scale for
    every group of x too, `f_g = weight_scale[:, g] * scale[g]` and `y = round_F(acc + bias)`.

    Args:
        x: F [..., K], any strides and any number of leading dimensions.
        weight, shape: as `gemv`.
        weight_scale: float32 [1] or [N]; or of groups [N, ceil(K / G)], contiguous, whose shape
            tells G; or, beside a CPU-specific layout, float32 or float16 as
            `nn.packing.blocked_scales` makes them, which is faster.
        bias: F [N], added in float32, or None.
        activation_format: what x becomes, as of `quantize_activations`: "int8", or with scales of
            groups "int8_group" or "int16_group" too, in groups of G.
    Returns:
        x.dtype [..., N]. A row of x with a NaN or an infinity gives a row of NaN.
    Gradients, straight-through (rounding x to int8 counts as doing nothing; the weight is frozen):
        `x.grad = y.grad @ (codes * weight_scale)`, computed in float32, rounded to x.dtype once;
        `bias.grad` is the sum of y.grad over the tokens.
    Raises:
        RuntimeError: a wrong dtype, shape or stride; a K other than the shape's; a weight_scale
            that requires grad; another activation_format.
    Source: arXiv 2402.17764; transformers BitLinear / AutoBitLinear. Groups: Q2_0 of GGUF and its
        models (PrismML Ternary-Bonsai), which have 16-bit activations.
    """
    return x.new_empty(projection_shape(x, weight, shape))
