"""The ops on rows of activations: norms, gated products, rotary embedding."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bitnet_ops.ops._operator import operator

__all__ = [
    "rms_norm",
    "add_rms_norm",
    "relu2_mul",
    "silu_and_mul",
    "gelu_tanh_and_mul",
    "gated",
    "hadamard",
    "rope",
]


@operator
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm: `round(x * (1 / sqrt(mean(x^2) + eps))) * weight`.

    The normalised value is computed in float32, rounded to x.dtype, THEN multiplied by the weight.

    Args:
        x: F [..., K].
        weight: F [K], the norm weight.
        eps: added to the mean square.
    Returns:
        x.dtype [..., K].
    Raises:
        RuntimeError: a wrong dtype or shape, K = 0, a negative or non-finite eps.
    Source: Zhang and Sennrich 2019 (arXiv 1910.07467); transformers BitNetRMSNorm.
    """
    return x.new_empty(x.shape)


@operator
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add the residual stream, then normalise the sum.

    `residual_out = round(x + residual)`, `y = rms_norm(residual_out, weight, eps)`.

    Args:
        x, residual: F [..., K], of one dtype and shape.
        weight: F [K], the norm weight.
        eps: as `rms_norm`.
    Returns:
        (y, residual_out), both x.dtype [..., K], both fresh tensors.
    Raises:
        RuntimeError: as `rms_norm`; x and residual that differ in dtype or shape.
    Source: as `rms_norm`.
    """
    return x.new_empty(x.shape), x.new_empty(x.shape)


@operator
def relu2_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Squared ReLU of the gate times up: `max(gate, 0)^2 * up`, in float32, rounded once.

    Args:
        gate, up: float32 or bfloat16 [..., K], of one dtype and shape.
    Returns:
        gate.dtype [..., K].
    Raises:
        RuntimeError: shapes or dtypes that differ; float16, because a healthy model reaches 1e7
            here and float16 ends at 65504.
    Source: So et al. 2021 "Primer" (arXiv 2109.08668); transformers BitNetMLP.
    """
    return gate.new_empty(gate.shape)


@operator
def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU product of a fused projection: `silu(x[..., :d]) * x[..., d:]`, in float32.

    `silu(a) = a / (1 + exp(-a))`.

    Args:
        x: F [..., 2d].
    Returns:
        x.dtype [..., d].
    Raises:
        RuntimeError: a wrong dtype, no dimension, an odd last one.
    Source: Shazeer 2020 (arXiv 2002.05202).
    """
    return x.new_empty([*x.shape[:-1], x.shape[-1] // 2])


@operator
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """GEGLU product of a fused projection: `gelu(x[..., :d]) * x[..., d:]`, in float32.

    `gelu(a) = a / 2 * (1 + tanh(sqrt(2 / pi) * (a + 0.044715 a^3)))`, torch's approximate="tanh".

    Args:
        x: F [..., 2d].
    Returns:
        x.dtype [..., d].
    Raises:
        RuntimeError: a wrong dtype, no dimension, an odd last one.
    Source: Hendrycks and Gimpel (arXiv 1606.08415); Shazeer 2020 (arXiv 2002.05202); transformers
        Gemma3MLP.
    """
    return x.new_empty([*x.shape[:-1], x.shape[-1] // 2])


@operator
def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """A gated product: `activation(gate) * up`, in float32, rounded once.

    Args:
        gate, up: F [..., K], of one dtype and shape; of relu2 not float16, as of `relu2_mul`.
        activation: "relu2", "silu", "gelu_pytorch_tanh" or "sigmoid" (`1 / (1 + exp(-gate))`).
    Returns:
        gate.dtype [..., K].
    Raises:
        RuntimeError: shapes or dtypes that differ, another activation, float16 for relu2.
    Source: as `relu2_mul`, `silu_and_mul`, `gelu_tanh_and_mul`; the output gate of attention in
        Qwen3.5.
    """
    return gate.new_empty(gate.shape)


@operator
def hadamard(x: Tensor, signs: Tensor, inverse: bool = False) -> Tensor:
    """Turn each block of features by a Walsh-Hadamard matrix and signs, in float32, rounded once.

    `H (signs * x)`, or with `inverse`, which undoes it, `signs * (H x)`. H is normalised, in
    Sylvester's order: `H[i, j] = (-1)^popcount(i & j) / sqrt(B)`.

    Args:
        x: F [..., K].
        signs: float32 [K / B, B] of +-1; B a power of two, at least 16, that divides K.
        inverse: undo it.
    Returns:
        x.dtype [..., K].
    Raises:
        RuntimeError: a wrong dtype or shape, another block.
    Source: QuIP#, arXiv 2402.04396; QuaRot, arXiv 2404.00456; the order of Bonsai 2's files.
    """
    return x.new_empty(x.shape)


@operator
def rope(
    x: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    attention_factor: float = 1.0,
    sections: Sequence[int] | None = None,
) -> Tensor:
    """Rotate heads by position, half-split ("NeoX"): `x * cos + (-x[D/2:], x[:D/2]) * sin`.

    `cos` and `sin` are those of the angle `positions * inv_freq`, which is rounded to float32 as
    transformers does, times attention_factor. The rotation is in float32 without fused
    multiply-add, rounded once.

    Args:
        x: F [..., H, D], queries or keys.
        positions: int64 [...], the absolute position of each token; with `sections` [3, ...], its
            positions in time, height and width.
        inv_freq: float32 [D/2]; a plain model's are `theta^(-2i / D)`.
        attention_factor: multiplies cosines and sines, > 0; scalings of the context ask for it.
        sections: of models that read images, how many of the D/2 pairs turn by time, height and
            width. They are interleaved: pairs 1, 4, 7, ... turn by height, 2, 5, 8, ... by width,
            as many as there are; the others turn by time.
    Returns:
        x.dtype [..., H, D].
    Raises:
        RuntimeError: a wrong dtype, odd D, leading dimensions or frequencies that do not fit x, a
            factor that is not positive and finite, sections that do not fit D.
    Source: Su et al. 2021 (arXiv 2104.09864); transformers BitNetRotaryEmbedding and
        apply_rotary_pos_emb; of sections transformers Qwen3_5TextRotaryEmbedding.
    """
    return x.new_empty(x.shape)
