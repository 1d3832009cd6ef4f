"""Typed wrappers of torch.ops.bitnet.*, in the order of the catalogue (csrc/ops.cpp).

These docstrings are the reference of the ops. N = output features, K = input features, M = tokens,
F = float32, bfloat16 or float16. A scale always MULTIPLIES. All tensors live on the CPU. Every
result is the same bit for bit on every ISA, for every number of threads and for a row alone or in
a batch; float sums run in 16 lanes (lane = index mod 16, fused multiply-add) that are added as a
tree. A bad argument raises RuntimeError: `<op>: expected <argument> <constraint>, got <value>`.
The ops have no gradient, so with grad mode on an input that requires grad is refused.
This module knows no files and no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from bitnet_ops import _fakes as _fakes  # registers the fake kernels
from bitnet_ops._grad import refuse_grad as _refuse_grad
from bitnet_ops._model_ops import decode_step as decode_step

_ops = torch.ops.bitnet

# Bound once: looking an overload up on each call costs a quarter of a microsecond.
_PACK = _ops.pack.default
_UNPACK = _ops.unpack.default
_PREPACK = _ops.prepack.default
_UNPREPACK = _ops.unprepack.default
_QUANTIZE_WEIGHTS = _ops.quantize_weights.default
_QUANTIZE_ACTIVATIONS = _ops.quantize_activations.default
_GEMV = _ops.gemv.default
_GEMM = _ops.gemm.default
_LINEAR = _ops.linear.default
_GROUP_LINEAR = _ops.group_linear.default
_RMS_NORM = _ops.rms_norm.default
_ADD_RMS_NORM = _ops.add_rms_norm.default
_RELU2_MUL = _ops.relu2_mul.default
_SILU_AND_MUL = _ops.silu_and_mul.default
_ROPE_TABLE = _ops.rope_table.default
_ROPE = _ops.rope.default
_QKV_FORWARD = _ops.qkv_forward.default
_MLP_FORWARD = _ops.mlp_forward.default
_ATTENTION = _ops.attention.default
_KV_CACHE_UPDATE = _ops.kv_cache_update.default
_QUANTIZE_HEAD = _ops.quantize_head.default
_LM_HEAD = _ops.lm_head.default
_EMBEDDING = _ops.embedding.default
_PROBE_READ = _ops._probe_read.default
_PROBE_INT8_PEAK = _ops._probe_int8_peak.default


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
    Source: FORMAT.md, "packed layouts"; microsoft/BitNet src/ggml-bitnet-mad.cpp (I2_S).
    """
    return cast(Tensor, _PACK(codes))


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
    return cast(Tensor, _UNPACK(weight, in_features))


def prepack(weight: Tensor, in_features: int, format: str) -> Tensor:
    """Bring canonical weights into a private layout of the kernels that run now.

    A private layout is what this CPU reads fastest. It is made when a model is loaded and never
    stored in a model file; it depends on the instruction set in use (`_runtime.tile_lanes()` lanes
    L) and fits no other: prepack again after forcing another one. gemv, gemm, linear, qkv_forward
    and mlp_forward take it with `out_features`; their results do not change.

    Args:
        weight: uint8 [N, 32 * ceil(K / 128)], contiguous, codes 0, 1, 2.
        in_features: K, at most 32768.
        format: "2bit", 4 weights a byte, or "1.6bit", 5 weights a byte (more arithmetic for fewer
            bytes: for CPUs whose memory is slow against their cores).
    Returns:
        uint8 [ceil(N / 4L), lines, 4L] for "2bit", [ceil(N / 5L), lines, L, 4] for "1.6bit", with
        lines = 16 * ceil(K / 64).
    Raises:
        RuntimeError: as `unpack`; another format; K above 32768.
    Source: FORMAT.md, "Private layouts".
    """
    return cast(Tensor, _PREPACK(weight, in_features, format))


def unprepack(weight: Tensor, out_features: int, in_features: int) -> Tensor:
    """Bring a private layout back to the canonical one: the inverse of `prepack`.

    Args:
        weight: as `prepack` returns it, for the kernels that run now.
        out_features, in_features: N and K, which the padded form does not record.
    Returns:
        uint8 [N, 32 * ceil(K / 128)].
    Raises:
        RuntimeError: a shape that does not fit N, K or the instruction set; a code 3.
    Source: as `prepack`.
    """
    return cast(Tensor, _UNPREPACK(weight, out_features, in_features))


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
    if torch.is_grad_enabled():
        _refuse_grad("quantize_weights", weight=weight)
    return cast("tuple[Tensor, Tensor]", _QUANTIZE_WEIGHTS(weight))


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise activations to int8 with one scale per token (absmax over the last dimension).

    In float32: `s = 127 * (1 / max(absmax(x), 1e-5))` (two roundings, as torch evaluates 127 / t),
    `q = clamp(round_half_even(x * s), -128, 127)`, `scale = 1 / s`. A row with a NaN or an infinity
    gives q = 0 and scale = NaN, so that the poison reaches its own results and no others.

    Args:
        x: F [..., K], any strides.
    Returns:
        (q int8 [..., K], scale float32 [...]); q * scale approximates x.
    Raises:
        RuntimeError: another dtype, no dimension, K = 0.
    Source: arXiv 2402.17764; transformers ActQuant.
    """
    if torch.is_grad_enabled():
        _refuse_grad("quantize_activations", x=x)
    return cast("tuple[Tensor, Tensor]", _QUANTIZE_ACTIVATIONS(x))


def gemv(
    weight: Tensor,
    x: Tensor,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_features: int | None = None,
) -> Tensor:
    """Ternary matrix times one int8 vector (M = 1): `y[n] = sum_k w[n, k] * x[k]`.

    The sum is exact in int32. With both scales `y = float32(sum) * (weight_scale * x_scale)`.

    Args:
        weight: packed uint8 [N, 32 * ceil(K / 128)], contiguous, or a private layout (`prepack`).
        x: int8 [K].
        x_scale: float32 [] or [1], the token's scale; given together with weight_scale or not.
        weight_scale: float32 [1], or [N] for one scale per row (fused projections).
        out_features: N; needed with a private layout, whose rows are padded.
    Returns:
        int32 [N] without scales, float32 [N] with them.
    Raises:
        RuntimeError: a wrong dtype, shape or stride, exactly one scale.
    Source: arXiv 2402.17764, section 2 (W1.58A8).
    """
    return cast(Tensor, _GEMV(weight, x, x_scale, weight_scale, out_features))


def gemm(
    weight: Tensor,
    x: Tensor,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_features: int | None = None,
) -> Tensor:
    """Ternary matrix times M int8 vectors: `y[m, n] = sum_k w[n, k] * x[m, k]`.

    Row m equals `gemv` of that row, bit for bit.

    Args:
        weight, out_features: as `gemv`.
        x: int8 [M, K], M >= 0.
        x_scale: float32 [M], one scale per token; given together with weight_scale or not.
        weight_scale: float32 [1] or [N].
    Returns:
        int32 [M, N] without scales, float32 [M, N] with them.
    Raises:
        RuntimeError: a wrong dtype, shape or stride, exactly one scale.
    Source: as `gemv`.
    """
    return cast(Tensor, _GEMM(weight, x, x_scale, weight_scale, out_features))


def linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_features: int | None = None,
) -> Tensor:
    """A BitNet linear: `quantize_activations`, `gemm` with both scales, plus bias, rounded once.

    `y = round_F(float32(sum_k w * q) * (weight_scale * scale) + bias)`.

    Args:
        x: F [..., K], any strides and any number of leading dimensions.
        weight, out_features: as `gemv`.
        weight_scale: float32 [1] or [N].
        bias: F [N], added in float32, or None.
    Returns:
        x.dtype [..., N]. A row of x with a NaN or an infinity gives a row of NaN.
    Raises:
        RuntimeError: a wrong dtype, shape or stride.
    Source: arXiv 2402.17764; transformers BitLinear / AutoBitLinear.
    """
    if torch.is_grad_enabled():
        _refuse_grad("linear", x=x, weight_scale=weight_scale, bias=bias)
    return cast(Tensor, _LINEAR(x, weight, weight_scale, bias, out_features))


def group_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_features: int | None = None,
) -> Tensor:
    """A ternary linear with one scale for every 128 weights of a row (a group along K).

    `y = round_F(sum_g(float32(sum over group g of w * q) * weight_scale[:, g]) * scale + bias)`:
    the sum of a group is an exact integer, the groups are multiplied and added in float32 in
    ascending order, each operation rounded.

    Args:
        x: F [..., K], any strides and any number of leading dimensions.
        weight, out_features: as `gemv`.
        weight_scale: float32 [N, ceil(K / 128)], contiguous.
        bias: F [N], added in float32, or None.
    Returns:
        x.dtype [..., N]. A row of x with a NaN or an infinity gives a row of NaN.
    Raises:
        RuntimeError: a wrong dtype, shape or stride.
    Source: Q2_0 of GGUF and its models (PrismML Ternary-Bonsai), which have 16-bit activations;
        the 8-bit ones here are those of arXiv 2402.17764.
    """
    if torch.is_grad_enabled():
        _refuse_grad("group_linear", x=x, weight_scale=weight_scale, bias=bias)
    return cast(Tensor, _GROUP_LINEAR(x, weight, weight_scale, bias, out_features))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm: `round(x * (1 / sqrt(mean(x^2) + eps))) * weight`.

    The normalised value is computed in float32, rounded to x.dtype, THEN multiplied by the gain.

    Args:
        x: F [..., K].
        weight: F [K], the gain.
        eps: added to the mean square.
    Returns:
        x.dtype [..., K].
    Raises:
        RuntimeError: a wrong dtype or shape, K = 0, a negative or non-finite eps.
    Source: Zhang and Sennrich 2019 (arXiv 1910.07467); transformers BitNetRMSNorm.
    """
    if torch.is_grad_enabled():
        _refuse_grad("rms_norm", x=x, weight=weight)
    return cast(Tensor, _RMS_NORM(x, weight, eps))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add the residual stream, then normalise the sum.

    `residual_out = round(x + residual)`, `y = rms_norm(residual_out, weight, eps)`.

    Args:
        x, residual: F [..., K], of one dtype and shape.
        weight: F [K], the gain.
        eps: as `rms_norm`.
    Returns:
        (y, residual_out), both x.dtype [..., K], both fresh tensors.
    Raises:
        RuntimeError: as `rms_norm`; x and residual that differ in dtype or shape.
    Source: as `rms_norm`.
    """
    if torch.is_grad_enabled():
        _refuse_grad("add_rms_norm", x=x, residual=residual, weight=weight)
    return cast("tuple[Tensor, Tensor]", _ADD_RMS_NORM(x, residual, weight, eps))


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
    if torch.is_grad_enabled():
        _refuse_grad("relu2_mul", gate=gate, up=up)
    return cast(Tensor, _RELU2_MUL(gate, up))


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
    if torch.is_grad_enabled():
        _refuse_grad("silu_and_mul", x=x)
    return cast(Tensor, _SILU_AND_MUL(x))


def rope_table(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """Cosines and sines of rotary embeddings: angle `positions * theta^(-2i / head_dim)`.

    Args:
        positions: int64 [...], absolute token positions.
        head_dim: D, even.
        theta: base of the frequencies (config field rope_theta), > 0.
    Returns:
        float32 [..., D]: D/2 cosines, then D/2 sines. The angle is rounded to float32, as
        transformers does.
    Raises:
        RuntimeError: another dtype, an odd head_dim, a theta that is not positive and finite.
    Source: Su et al. 2021 (arXiv 2104.09864); transformers BitNetRotaryEmbedding.
    """
    return cast(Tensor, _ROPE_TABLE(positions, head_dim, theta))


def rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate heads by position, half-split ("NeoX"): `x * cos + (-x[D/2:], x[:D/2]) * sin`.

    In float32 without fused multiply-add, rounded once.

    Args:
        x: F [..., H, D], queries or keys.
        cos_sin: float32 [..., D] from `rope_table`, one row per token.
    Returns:
        x.dtype [..., H, D].
    Raises:
        RuntimeError: a wrong dtype, odd D, leading dimensions that differ.
    Source: arXiv 2104.09864; transformers apply_rotary_pos_emb.
    """
    if torch.is_grad_enabled():
        _refuse_grad("rope", x=x, cos_sin=cos_sin)
    return cast(Tensor, _ROPE(x, cos_sin))


def qkv_forward(
    x: Tensor,
    norm_weight: Tensor,
    q_weight: Tensor,
    q_scale: Tensor,
    k_weight: Tensor,
    k_scale: Tensor,
    v_weight: Tensor,
    v_scale: Tensor,
    eps: float,
    out_features: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, quantisation and the three attention projections in one op.

    `h = rms_norm(x, norm_weight, eps)`, then `linear(h, w, scale)` for q, k and v: equal to that
    composition bit for bit. Every projection keeps its own scale.

    Args:
        x: F [..., K].
        norm_weight: F [K].
        q_weight, k_weight, v_weight: packed uint8 [N_i, 32 * ceil(K / 128)], or private layouts.
        q_scale, k_scale, v_scale: float32 [1] or [N_i].
        eps: as `rms_norm`.
        out_features: the three N_i; needed with private layouts, else it may be empty.
    Returns:
        (q, k, v), x.dtype [..., N_i].
    Raises:
        RuntimeError: as `rms_norm` and `linear`.
    Source: transformers BitNetAttention.
    """
    if torch.is_grad_enabled():
        _refuse_grad("qkv_forward", x=x, norm_weight=norm_weight, q_scale=q_scale)
        _refuse_grad("qkv_forward", k_scale=k_scale, v_scale=v_scale)
    return cast(
        "tuple[Tensor, Tensor, Tensor]",
        _QKV_FORWARD(
            x,
            norm_weight,
            q_weight,
            q_scale,
            k_weight,
            k_scale,
            v_weight,
            v_scale,
            eps,
            out_features,
        ),
    )


def mlp_forward(
    x: Tensor,
    norm_weight: Tensor,
    gate_weight: Tensor,
    gate_scale: Tensor,
    up_weight: Tensor,
    up_scale: Tensor,
    sub_norm_weight: Tensor | None,
    down_weight: Tensor,
    down_scale: Tensor,
    eps: float,
    activation: str,
    out_features: Sequence[int] = (),
) -> Tensor:
    """Norm, gate and up, activation, sub-norm and down projection in one op; no residual inside.

    `h = rms_norm(x)`, `z = act(linear(h, gate), linear(h, up))`, `y = linear(rms_norm(z), down)`,
    where act is `relu2_mul` or `silu_and_mul`; without sub_norm_weight the second norm is left
    out. Equal to that composition bit for bit for float32 and bfloat16. For float16 everything
    between the first norm and y stays float32, because squared ReLU overflows float16.

    Args:
        x: F [..., K].
        norm_weight: F [K].
        gate_weight, up_weight: packed uint8 [I, 32 * ceil(K / 128)], or private layouts.
        sub_norm_weight: F [I] or None.
        down_weight: packed uint8 [N, 32 * ceil(I / 128)], or a private layout.
        gate_scale, up_scale, down_scale: float32 [1] or one per row.
        eps: as `rms_norm`, for both norms.
        activation: "relu2" or "silu".
        out_features: (I, N); needed with private layouts, else it may be empty.
    Returns:
        x.dtype [..., N].
    Raises:
        RuntimeError: as `rms_norm` and `linear`; another activation.
    Source: transformers BitNetMLP, LlamaMLP.
    """
    if torch.is_grad_enabled():
        _refuse_grad("mlp_forward", x=x, norm_weight=norm_weight, gate_scale=gate_scale)
        _refuse_grad("mlp_forward", up_scale=up_scale, down_scale=down_scale)
        _refuse_grad("mlp_forward", sub_norm_weight=sub_norm_weight)
    return cast(
        Tensor,
        _MLP_FORWARD(
            x,
            norm_weight,
            gate_weight,
            gate_scale,
            up_weight,
            up_scale,
            sub_norm_weight,
            down_weight,
            down_scale,
            eps,
            activation,
            out_features,
        ),
    )


def attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, start_positions: Tensor, scale: float
) -> Tensor:
    """Causal grouped-query attention over a KV cache, prefill and decode alike.

    `softmax(scale * q k^T) v` in float32; token t of sequence b sees the cache positions
    0 .. start_positions[b] + t; query head h reads key/value head h // (H / KV).
    Positions are taken in chunks of 64, whose softmaxes are merged in ascending order, so a token's
    result does not depend on how prefill was split. Positions that score -inf weigh nothing.

    Args:
        query: F [B, T, H, D], already rotated.
        key_cache, value_cache: float32 or bfloat16 [B, KV, L, D], contiguous, holding the keys
            and values of these T tokens too (`kv_cache_update` first).
        start_positions: int64 [B], how many tokens of each sequence came before.
        scale: multiplies the scores, usually 1 / sqrt(D).
    Returns:
        query.dtype [B, T, H, D].
    Raises:
        RuntimeError: a wrong dtype or shape, H not a multiple of KV, a position beyond L.
    Source: Vaswani et al. 2017; GQA, arXiv 2305.13245.
    """
    if torch.is_grad_enabled():
        _refuse_grad("attention", query=query, key_cache=key_cache, value_cache=value_cache)
    return cast(Tensor, _ATTENTION(query, key_cache, value_cache, start_positions, scale))


def kv_cache_update(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, start_positions: Tensor
) -> None:
    """Write the keys and values of T new tokens into the caches, in place.

    `key_cache[b, h, start_positions[b] + t] = key[b, t, h]`, likewise value, rounded to the
    cache's dtype. A position out of range is an error before anything is written.

    Args:
        key_cache, value_cache: float32 or bfloat16 [B, KV, L, D], contiguous; both are mutated.
        key, value: F [B, T, KV, D], of one dtype.
        start_positions: int64 [B].
    Raises:
        RuntimeError: a wrong dtype or shape, a position outside the cache, overlapping tensors.
    Source: the usual KV cache of decoder inference.
    """
    if torch.is_grad_enabled():
        _refuse_grad("kv_cache_update", key_cache=key_cache, value_cache=value_cache)
        _refuse_grad("kv_cache_update", key=key, value=value)
    _KV_CACHE_UPDATE(key_cache, value_cache, key, value, start_positions)


def quantize_head(weight: Tensor, format: str, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """Quantise the rows of an output head (or a tied embedding) for `lm_head` and `embedding`.

    "int8": one scale a row, `scale = absmax / 127`, `code = round_half_even(w * (127 / absmax))`.
    "int4": one scale per `group_size` features of a row, `scale = bfloat16(absmax / 7)`, `code =
    clamp(round_half_even(w * (1 / scale)), -8, 7)`, in tiles of 16 rows (FORMAT.md, "Head formats
    in memory"); rows and features are padded with code 0. absmax is at least 1e-30.

    Args:
        weight: F [V, K], finite, 1 <= K <= 65536.
        format: "int8" or "int4".
        group_size: of int4, 64 or 128; int8 has one group, the row.
    Returns:
        (packed, scale): int8 [V, K] and float32 [V], or, with G groups of group_size features,
        uint8 [ceil(V / 16), G * group_size / 8, 64] and bfloat16 [ceil(V / 16), G, 16].
    Raises:
        RuntimeError: another dtype, rank, format or group size, a NaN or an infinity.
    Source: absmax quantisation as in arXiv 2208.07339 (rows) and GGUF's Q4_0 (groups).
    """
    if torch.is_grad_enabled():
        _refuse_grad("quantize_head", weight=weight)
    return cast("tuple[Tensor, Tensor]", _QUANTIZE_HEAD(weight, format, group_size))


def lm_head(
    x: Tensor, weight: Tensor, scale: Tensor | None = None, out_features: int | None = None
) -> Tensor:
    """Logits of an output head: `x @ weight.T`, the weight dense, int8 or int4.

    A dense head sums in float32. For int8 and int4 a token becomes 16-bit integers `w = round(x *
    32512 / absmax)` with `x_scale = absmax / 32512`, and integer sums are exact. int8:
    `float32(sum) * (scale * x_scale)`. int4: from 0, `acc = fma(float32(sum of a group), its scale,
    acc)`, groups ascending; then `acc * x_scale`. A token with a NaN or an infinity has NaN as
    every logit of an int8 or int4 head.

    Args:
        x: F [..., K].
        weight: F [V, K], or what `quantize_head` returned; contiguous. The embedding matrix where
            the head is tied.
        scale: what `quantize_head` returned beside an int8 or int4 weight, else None.
        out_features: V, which an int4 weight does not record; None means its padded rows.
    Returns:
        float32 [..., V].
    Raises:
        RuntimeError: a wrong dtype or shape, a scale that does not belong to the weight.
    Source: transformers BitNetForCausalLM.
    """
    if torch.is_grad_enabled():
        _refuse_grad("lm_head", x=x, weight=weight, scale=scale)
    return cast(Tensor, _LM_HEAD(x, weight, scale, out_features))


def embedding(
    ids: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    """Rows of an embedding matrix stored like a head: the weight itself, or `code * scale`.

    Args:
        ids: int64 [...], from 0 to V - 1.
        weight, scale: as for `lm_head`.
        out_features: V, which an int4 weight does not record; None means its padded rows.
        in_features: K, likewise; None means the padded features.
    Returns:
        float32 [..., K].
    Raises:
        RuntimeError: a wrong dtype or shape, an id out of range.
    Source: torch.nn.functional.embedding.
    """
    if torch.is_grad_enabled():
        _refuse_grad("embedding", weight=weight, scale=scale)
    return cast(Tensor, _EMBEDDING(ids, weight, scale, out_features, in_features))


def _probe_read(buffer: Tensor, streams: int = 1, distance: int = 0) -> Tensor:
    """Read a uint8 buffer once: the bandwidth limit of benchmarks.

    Whole pages of 4096 bytes are read, by every thread as 1, 2 or 4 sequential streams, each
    prefetched by software `distance` bytes ahead (0: not at all). Which form is the fastest differs
    between CPUs. Returns int64 [1], a checksum that depends on every byte read, so that no compiler
    may leave one out.
    """
    return cast(Tensor, _PROBE_READ(buffer, streams, distance))


def _probe_int8_peak(seed: Tensor, iterations: int) -> Tensor:
    """Run the ISA's int8 dot product out of registers: the compute limit of benchmarks.

    seed is a uint8 tensor that only carries the device. Returns int64 [1], the multiply-adds
    executed by all threads.
    """
    return cast(Tensor, _PROBE_INT8_PEAK(seed, iterations))
