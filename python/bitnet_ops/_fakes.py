"""Fake kernels of torch.ops.bitnet.*: the shape, dtype and layout of every op's outputs.

They make the ops usable under torch.compile and torch.export. They see no data and check nothing
but what shapes their output: the C++ kernels check everything. Importing the module registers them,
in the order of the catalogue (csrc/ops.cpp). Every output is a fresh contiguous tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from bitnet_ops import _runtime

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _fake(name: str) -> Callable[[_Function], _Function]:
    """Register the decorated function as the fake kernel of bitnet::<name>."""

    def register(function: _Function) -> _Function:
        @functools.wraps(function)
        def checked(*args: Any) -> Any:
            _require_one_device(name, args)
            return function(*args)

        torch.library.register_fake(f"bitnet::{name}", checked)
        return function

    return register


def _require_one_device(name: str, args: tuple[Any, ...]) -> None:
    """A meta tensor among CPU tensors is dispatched here, where it would pass for a result."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    for tensor in tensors[1:]:
        if tensor.device != tensors[0].device:
            raise RuntimeError(
                f"{name}: expected every tensor on one device, got {tensors[0].device} and "
                f"{tensor.device}; move them to the CPU"
            )


def _rows(weight: Tensor, out_features: int | None) -> int:
    """N of a canonical weight [N, R], or of a private layout, which is padded."""
    return weight.shape[0] if out_features is None else out_features


def _features(x: Tensor, weight: Tensor, out_features: int | None = None) -> list[int]:
    """The shape [..., N] of a projection of x [..., K]."""
    return [*x.shape[:-1], _rows(weight, out_features)]


def _at(out_features: Sequence[int], index: int) -> int | None:
    return out_features[index] if out_features else None


@_fake("pack")
def _pack(codes: Tensor) -> Tensor:
    n, k = codes.shape
    return codes.new_empty((n, (k + 127) // 128 * 32), dtype=torch.uint8)


@_fake("unpack")
def _unpack(weight: Tensor, in_features: int) -> Tensor:
    return weight.new_empty((weight.shape[0], in_features), dtype=torch.int8)


@_fake("prepack")
def _prepack(weight: Tensor, in_features: int, format: str) -> Tensor:
    lanes, lines = _runtime.tile_lanes(), (in_features + 63) // 64 * 16
    fields = 5 if format == "1.6bit" else 4
    tiles = (weight.shape[0] + fields * lanes - 1) // (fields * lanes)
    shape = (tiles, lines, lanes, 4) if fields == 5 else (tiles, lines, 4 * lanes)
    return weight.new_empty(shape)


@_fake("unprepack")
def _unprepack(weight: Tensor, out_features: int, in_features: int) -> Tensor:
    return weight.new_empty((out_features, (in_features + 127) // 128 * 32))


@_fake("quantize_weights")
def _quantize_weights(weight: Tensor) -> tuple[Tensor, Tensor]:
    codes = weight.new_empty(weight.shape, dtype=torch.int8)
    return codes, weight.new_empty((1,), dtype=torch.float32)


@_fake("quantize_activations")
def _quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    q = x.new_empty(x.shape, dtype=torch.int8)
    return q, x.new_empty(x.shape[:-1], dtype=torch.float32)


def _product_dtype(x_scale: Tensor | None) -> torch.dtype:
    return torch.int32 if x_scale is None else torch.float32


@_fake("gemv")
def _gemv(
    weight: Tensor,
    x: Tensor,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    return x.new_empty((_rows(weight, out_features),), dtype=_product_dtype(x_scale))


@_fake("gemm")
def _gemm(
    weight: Tensor,
    x: Tensor,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    return x.new_empty((x.shape[0], _rows(weight, out_features)), dtype=_product_dtype(x_scale))


@_fake("linear")
def _linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    return x.new_empty(_features(x, weight, out_features))


@_fake("group_linear")
def _group_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    return x.new_empty(_features(x, weight, out_features))


@_fake("rms_norm")
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@_fake("add_rms_norm")
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@_fake("relu2_mul")
def _relu2_mul(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@_fake("silu_and_mul")
def _silu_and_mul(x: Tensor) -> Tensor:
    return x.new_empty([*x.shape[:-1], x.shape[-1] // 2])


@_fake("rope_table")
def _rope_table(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    return positions.new_empty([*positions.shape, head_dim], dtype=torch.float32)


@_fake("rope")
def _rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_fake("qkv_forward")
def _qkv_forward(
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
    in_features: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(_features(x, q_weight, _at(out_features, 0))),
        x.new_empty(_features(x, k_weight, _at(out_features, 1))),
        x.new_empty(_features(x, v_weight, _at(out_features, 2))),
    )


@_fake("mlp_forward")
def _mlp_forward(
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
    in_features: Sequence[int] = (),
) -> Tensor:
    return x.new_empty(_features(x, down_weight, _at(out_features, 1)))


@_fake("attention")
def _attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    start_positions: Tensor,
    scale: float,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    return query.new_empty(query.shape)


@_fake("kv_cache_update")
def _kv_cache_update(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    start_positions: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    return None


@_fake("quantize_head")
def _quantize_head(weight: Tensor, format: str, group_size: int = 128) -> tuple[Tensor, Tensor]:
    n, k = weight.shape
    if format == "int8":
        return (
            weight.new_empty((n, k), dtype=torch.int8),
            weight.new_empty((n,), dtype=torch.float32),
        )
    tiles, groups = (n + 15) // 16, (k + group_size - 1) // group_size
    return (
        weight.new_empty((tiles, groups * group_size // 8, 64), dtype=torch.uint8),
        weight.new_empty((tiles, groups, 16), dtype=torch.bfloat16),
    )


def _head_rows(weight: Tensor, out_features: int | None) -> int:
    if out_features is not None:
        return out_features
    return weight.shape[0] * 16 if weight.dtype == torch.uint8 else weight.shape[0]


@_fake("lm_head")
def _lm_head(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    return x.new_empty([*x.shape[:-1], _head_rows(weight, out_features)], dtype=torch.float32)


@_fake("embedding")
def _embedding(
    ids: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    if in_features is None:
        in_features = weight.shape[1] * 8 if weight.dtype == torch.uint8 else weight.shape[1]
    return ids.new_empty([*ids.shape, in_features], dtype=torch.float32)


@_fake("decode_step")
def _decode_step(
    x: Tensor,
    weights: list[Tensor],
    scales: Tensor,
    norm_weights: Tensor,
    head_weight: Tensor,
    head_scale: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    start_positions: Tensor,
    dtype: torch.dtype,
    num_heads: int,
    intermediate_size: int,
    vocab_size: int,
    sub_norms: bool,
    activation: str,
    eps: float,
    rope_theta: float,
    scale: float,
    logits_to_keep: int = 0,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    batch, tokens, _ = x.shape
    kept = min(logits_to_keep, tokens) if logits_to_keep else tokens
    return x.new_empty([batch, kept, vocab_size], dtype=torch.float32)


@_fake("_probe_read")
def _probe_read(buffer: Tensor, streams: int = 1, distance: int = 0) -> Tensor:
    return buffer.new_empty((1,), dtype=torch.int64)


@_fake("_probe_int8_peak")
def _probe_int8_peak(seed: Tensor, iterations: int) -> Tensor:
    return seed.new_empty((1,), dtype=torch.int64)
