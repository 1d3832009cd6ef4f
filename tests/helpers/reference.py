"""Every op of the catalogue in plain torch, slow and obvious: the oracle of tests and benchmarks.

Same names and arguments as bitnet_ops.ops. Sums run in int64 or float64; what the contract rounds
to float32 is rounded to float32 at the same place, so that integer and elementwise ops must agree
exactly and reductions within a bound that the tests derive. Imported by tests and benchmarks only;
it must not know the op library (of _runtime it asks how many lanes the private layouts have), and
it checks only what it needs itself.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from bitnet_ops import _runtime
from composed import composed

_BLOCK = 128  # weights in a block of the packed layout
_FIELD = 32  # bytes in a block; each holds the weights j, j + 32, j + 64, j + 96


def pack(codes: Tensor) -> Tensor:
    """int8 [N, K] of -1, 0, 1 -> uint8 [N, 32 * ceil(K / 128)]."""
    n, k = codes.shape
    blocks = -(-k // _BLOCK)
    padded = torch.zeros(n, blocks * _BLOCK, dtype=torch.int64)
    padded[:, :k] = codes
    if not bool(((padded >= -1) & (padded <= 1)).all()):
        raise ValueError("pack: a value outside {-1, 0, 1}")
    fields = (padded + 1).reshape(n, blocks, 4, _FIELD)
    weights_of_fields = torch.tensor([64, 16, 4, 1]).reshape(1, 1, 4, 1)
    return (fields * weights_of_fields).sum(dim=2).reshape(n, blocks * _FIELD).to(torch.uint8)


def unpack(weight: Tensor, in_features: int) -> Tensor:
    """uint8 [N, 32 * ceil(K / 128)] -> int8 [N, K]."""
    n, row_bytes = weight.shape
    blocks = weight.reshape(n, row_bytes // _FIELD, 1, _FIELD).to(torch.int64)
    shifts = torch.tensor([6, 4, 2, 0]).reshape(1, 1, 4, 1)
    codes = ((blocks >> shifts) & 3).reshape(n, row_bytes * 4)
    if bool((codes == 3).any()) or bool((codes[:, in_features:] != 1).any()):
        raise ValueError("unpack: a code 3, or a padding code other than 1")
    return (codes[:, :in_features] - 1).to(torch.int8)


def prepack(weight: Tensor, in_features: int, format: str) -> Tensor:
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


def unprepack(weight: Tensor, out_features: int, in_features: int) -> Tensor:
    """The inverse of prepack: canonical uint8 [out_features, R]."""
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


def _codes_of(weight: Tensor, in_features: int, out_features: int | None) -> Tensor:
    """int8 [N, K] of a canonical or private weight."""
    if weight.dim() > 2:
        assert out_features is not None
        weight = unprepack(weight, out_features, in_features)
    return unpack(weight, in_features)


def _check_in_features(x: Tensor, in_features: int | None) -> None:
    if in_features not in (None, x.shape[-1]):
        raise ValueError(f"expected x [..., {in_features}], got {list(x.shape)}")


def quantize_weights(weight: Tensor) -> tuple[Tensor, Tensor]:
    """F [N, K] -> (codes int8 [N, K], scale float32 [1])."""
    mean = weight.to(torch.float64).abs().mean()
    scale = torch.clamp(mean, min=1e-5).to(torch.float32).reshape(1)
    inv_scale = 1.0 / scale
    codes = torch.clamp(torch.round(weight.to(torch.float32) * inv_scale), -1, 1)
    return codes.to(torch.int8), scale


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """F [..., K] -> (q int8 [..., K], scale float32 [...]); a poisoned row -> 0 and NaN."""
    x = x.to(torch.float32)
    absmax = x.abs().amax(dim=-1)
    s = 127.0 * torch.reciprocal(torch.clamp(absmax, min=1e-5))  # as torch evaluates 127 / t
    q = torch.clamp(torch.round(x * s[..., None]), -128, 127)
    finite = torch.isfinite(x).all(dim=-1)
    q = torch.where(finite[..., None], q, torch.zeros_like(q))
    return q.to(torch.int8), torch.where(finite, 1.0 / s, torch.full_like(s, torch.nan))


def gemv(
    weight: Tensor,
    x: Tensor,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    """packed [N, R] times int8 [K] -> int32 [N], or float32 [N] with both scales."""
    _check_in_features(x, in_features)
    x_scale = None if x_scale is None else x_scale.reshape(1)
    return gemm(weight, x[None], x_scale, weight_scale, out_features)[0]


def gemm(
    weight: Tensor,
    x: Tensor,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    """packed [N, R] times int8 [M, K] -> int32 [M, N], or float32 [M, N] with both scales."""
    _check_in_features(x, in_features)
    codes = _codes_of(weight, x.shape[-1], out_features)
    sums = (x.to(torch.int64) @ codes.to(torch.int64).T).to(torch.int32)
    if x_scale is None or weight_scale is None:
        return sums
    return sums.to(torch.float32) * (weight_scale.reshape(1, -1) * x_scale.reshape(-1, 1))


def linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    """F [..., K] -> x.dtype [..., N]."""
    _check_in_features(x, in_features)
    q, scale = quantize_activations(x)
    y = gemm(weight, q.reshape(-1, x.shape[-1]), scale.reshape(-1), weight_scale, out_features)
    if bias is not None:
        y = y + bias.to(torch.float32)
    return y.to(x.dtype).reshape(*x.shape[:-1], y.shape[-1])


def group_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    """F [..., K], scales float32 [N, ceil(K / 128)] -> x.dtype [..., N]; groups ascending."""
    _check_in_features(x, in_features)
    q, scale = quantize_activations(x)
    k = x.shape[-1]
    codes = _codes_of(weight, k, out_features).to(torch.int64)
    q = q.reshape(-1, k).to(torch.int64)
    y = torch.zeros(len(q), len(codes))
    for group, begin in enumerate(range(0, k, _BLOCK)):
        sums = q[:, begin : begin + _BLOCK] @ codes[:, begin : begin + _BLOCK].T
        product = sums.to(torch.float32) * weight_scale[:, group]
        y = product if group == 0 else y + product
    y = y * scale.reshape(-1, 1)
    if bias is not None:
        y = y + bias.to(torch.float32)
    return y.to(x.dtype).reshape(*x.shape[:-1], len(codes))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """F [..., K] -> x.dtype [..., K]; the normalised value is rounded before the gain."""
    exact = x.to(torch.float64)
    inv_rms = 1.0 / torch.sqrt((exact * exact).mean(dim=-1, keepdim=True) + eps)
    normalised = (exact * inv_rms).to(torch.float32).to(x.dtype)
    return (normalised.to(torch.float32) * weight.to(torch.float32)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """F [..., K] twice -> (y, residual_out)."""
    residual_out = (x.to(torch.float32) + residual.to(torch.float32)).to(x.dtype)
    return rms_norm(residual_out, weight, eps), residual_out


def relu2_mul(gate: Tensor, up: Tensor) -> Tensor:
    """max(gate, 0)^2 * up in float32."""
    positive = torch.relu(gate.to(torch.float32))
    return (positive * positive * up.to(torch.float32)).to(gate.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """[..., 2d] -> [..., d]: silu(first half) * second half."""
    gate, up = x.to(torch.float64).chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(torch.float32).to(x.dtype)


def rope_table(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """int64 [...] -> float32 [..., head_dim]: cosines, then sines."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angle = positions.to(torch.float64)[..., None] / theta**exponent
    return torch.cat([angle.cos(), angle.sin()], dim=-1).to(torch.float32)


def rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """F [..., H, D] rotated by float32 [..., D]; half-split; products and sum in float32."""
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    cos, sin = cos_sin[..., None, :].chunk(2, dim=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(rotated, dim=-1).to(x.dtype)


def qkv_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """rms_norm, then three linears."""
    return composed(sys.modules[__name__], "qkv_forward", *args, **kwargs)


def mlp_forward(*args: Any, **kwargs: Any) -> Tensor:
    """rms_norm, gate and up, activation, sub-norm, down; float32 after the norm if x is float16."""
    return composed(sys.modules[__name__], "mlp_forward", *args, **kwargs)


def _dequantized(cache: Tensor, scale: Tensor | None) -> Tensor:
    wide = cache.to(torch.float64)
    return wide if scale is None else wide * scale.to(torch.float64)[..., None]


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    start_positions: Tensor,
    scale: float,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """F [B, T, H, D] over caches [B, KV, L, D] -> query.dtype [B, T, H, D]."""
    key_cache, value_cache = (
        _dequantized(key_cache, key_scale),
        _dequantized(value_cache, value_scale),
    )
    out = torch.empty_like(query, dtype=torch.float64, memory_format=torch.contiguous_format)
    heads_per_kv = query.shape[2] // key_cache.shape[1]
    for b, start in enumerate(start_positions.tolist()):
        for t in range(query.shape[1]):
            for h in range(query.shape[2]):
                visible = slice(0, start + t + 1)
                keys = key_cache[b, h // heads_per_kv, visible]
                values = value_cache[b, h // heads_per_kv, visible]
                scores = keys @ query[b, t, h].to(torch.float64) * scale
                out[b, t, h] = torch.softmax(scores, dim=0) @ values
    return out.to(torch.float32).to(query.dtype)


def kv_cache_update(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    start_positions: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write key, value [B, T, KV, D] into the caches [B, KV, L, D] at start .. start + T - 1."""
    new = (key_cache, key, key_scale), (value_cache, value, value_scale)
    for b, start in enumerate(start_positions.tolist()):
        at = slice(start, start + key.shape[1])
        for cache, rows, scales in new:
            moved = rows[b].transpose(0, 1)
            if scales is not None:
                moved, scales[b, :, at] = _quantized_rows(moved)
            cache[b, :, at] = moved.to(cache.dtype)


def _quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """F [..., D] -> int8 codes and float32 scales [...]."""
    x = x.to(torch.float32)
    finite = torch.isfinite(x).all(dim=-1)
    absmax = x.abs().amax(dim=-1).clamp(min=1e-30)
    codes = torch.round(x * (torch.tensor(127.0) / absmax)[..., None])
    codes = torch.where(finite[..., None], codes, torch.zeros_like(codes))
    return codes.to(torch.int8), torch.where(finite, absmax / 127.0, torch.nan)


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


def _head_codes(weight: Tensor, scale: Tensor) -> Tensor:
    """The codes -8..7 of an int4 head as int64 [padded V, groups, group size]."""
    tiles, lines, _ = weight.shape
    pieces = weight.reshape(tiles, lines, 16, 1, 4).transpose(1, 2)
    codes = torch.cat([pieces & 15, pieces >> 4], dim=3)
    return codes.to(torch.int64).reshape(tiles * 16, scale.shape[1], -1) - 8


def _head_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """F [M, K] -> 16-bit integers as int64 [M, K] and float32 scales [M, 1]."""
    x = x.to(torch.float32)
    absmax = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
    finite = torch.isfinite(x).all(dim=-1, keepdim=True)
    wide = torch.where(
        finite, torch.round(x * (torch.tensor(32512.0) / absmax)), torch.zeros_like(x)
    )
    return wide.to(torch.int64), torch.where(finite, absmax / 32512.0, torch.nan)


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


def lm_head(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    """F [..., K] times a head in any format -> float32 [..., V]."""
    _check_in_features(x, in_features)
    if scale is None:
        return (x.to(torch.float64) @ weight.to(torch.float64).T).to(torch.float32)
    wide, x_scale = _head_activations(x.reshape(-1, x.shape[-1]))
    if weight.dtype == torch.int8:
        sums = (wide @ weight.to(torch.int64).T).to(torch.float64).to(torch.float32)
        y = sums * (scale[None, :] * x_scale)
    else:
        y = _int4_logits(wide, weight, scale) * x_scale
    y = y[:, :out_features]
    return y.reshape(*x.shape[:-1], y.shape[-1])


def embedding(
    ids: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    """Rows of a head in any format, int64 [...] -> float32 [..., K]."""
    if scale is None:
        rows = weight.to(torch.float32)
    elif weight.dtype == torch.int8:
        rows = weight.to(torch.float32) * scale[:, None]
    else:
        scales = scale.transpose(1, 2).reshape(-1, scale.shape[1], 1).to(torch.float32)
        rows = (_head_codes(weight, scale).to(torch.float32) * scales).flatten(1)
    return rows[:out_features, :in_features][ids]


def decode_step(*args: Any, **kwargs: Any) -> Tensor:
    """float32 [B, T, K] through every layer and the head -> float32 [B, T, vocab]."""
    return composed(sys.modules[__name__], "decode_step", *args, **kwargs)


def _probe_read(buffer: Tensor, streams: int = 1, distance: int = 0) -> Tensor:
    """A checksum of the whole pages; its value is the kernel's own affair."""
    pages = buffer.flatten()[: buffer.numel() // 4096 * 4096]
    return pages.to(torch.int64).sum().reshape(1)


def _probe_int8_peak(seed: Tensor, iterations: int) -> Tensor:
    """The number of multiply-adds depends on the ISA and the threads; 0 stands for 'unknown'."""
    return torch.zeros(1, dtype=torch.int64)
