"""Packed ternary weights: PackedWeight in the layouts in memory, and the Hugging Face packing.

Canonical (in memory, in .bin files, I2_S layout a): uint8 [N, R], R = 32 * ceil(K / 128); FORMAT.md
has the bits. Hugging Face: uint8 [ceil(N / 4), K], each bit pair one CONTIGUOUS QUARTER of the
outputs. Codes everywhere: -1, 0, +1 -> 0, 1, 2; code 3 is rejected. A weight is `code *
scale`: the scale multiplies, is float32, and there is one per original projection (or row, or
group). Checkpoints differ (one family stores the reciprocal); what they hold is brought to that
convention here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitnet_ops import _runtime, ops
from bitnet_ops.nn.storage import BLOCK as BLOCK
from bitnet_ops.nn.storage import (
    FORMATS,
    GROUP_ACTIVATION_FORMAT,
    GROUP_SIZES,
    LAYOUTS,
    USUAL_FORMAT,
    check_weight_format,
)

_BLOCK_BYTES = BLOCK // LAYOUTS["canonical"]["fields"]


def packed_row_bytes(in_features: int) -> int:
    """Bytes R of a canonical row of `in_features` weights: 32 per started block of 128."""
    return -(-in_features // BLOCK) * _BLOCK_BYTES  # no C++ call: torch.compile traces this


def packed_shape(
    out_features: int, in_features: int, format: str, lanes: int = 0
) -> tuple[int, ...]:
    """The shape that an N x K matrix has in `format`, one of FORMATS; lanes 0: of this CPU."""
    return _runtime.packed_shape(format, out_features, in_features, lanes)


@dataclass(frozen=True)
class PackedWeight:
    """A ternary matrix that knows its own shape: `weight` uint8 and `scale` f32.

    Entry (n, k) has the value code(n, k) * scale, and `scale` is [1], [N] (one a row), or, with
    `group_size` G, 128 or 64, [N, ceil(K / G)] (one for G weights of a row). `weight` has the shape
    of its `format`, one of FORMATS: canonical rows uint8 [N, 32 * ceil(K / 128)], or what `repack`
    makes. Raises ValueError where the parts disagree.
    """

    weight: Tensor
    scale: Tensor
    out_features: int
    in_features: int
    format: str = "canonical"
    group_size: int = 0

    def __post_init__(self) -> None:
        shape = self._expected_shape()
        if self.weight.dtype != torch.uint8 or tuple(self.weight.shape) != shape:
            raise ValueError(
                f"PackedWeight: expected weight uint8 {list(shape)} for {self.out_features} x "
                f"{self.in_features}, got {self.weight.dtype} {list(self.weight.shape)}"
            )
        self._check_scale()

    @classmethod
    def unchecked(cls, *parts: Any) -> PackedWeight:
        """Of parts that are known to agree, in their order; nothing reads the values.

        The scale of a layer may be NaN, which says that nobody has loaded it, or on no device.
        """
        packed = cls.__new__(cls)
        packed.__dict__.update(zip(cls.__dataclass_fields__, parts, strict=True))
        return packed

    def __repr__(self) -> str:
        group = f", group_size={self.group_size}" if self.group_size else ""
        return (
            f"PackedWeight({self.out_features} x {self.in_features}, {self.format}, weight uint8 "
            f"{list(self.weight.shape)}, scale float32 {list(self.scale.shape)}{group})"
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), as the ops take it beside `weight`."""
        return self.out_features, self.in_features

    @property
    def nbytes(self) -> int:
        """Bytes of weight and scales."""
        return self.weight.nbytes + self.scale.nbytes

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x F [..., K] -> x.dtype [..., N], as `ops.linear`."""
        activations = GROUP_ACTIVATION_FORMAT if self.group_size else "int8"
        return ops.linear(x, self.weight, self.scale, bias, self.shape, activations)

    def repack(self, weight_format: str = "auto") -> PackedWeight:
        """The same matrix in the layout that `weight_format` means; self where it has it already.

        A CPU-specific layout fits the kernels in use when it is made and no others: after
        `force_isa` (BITNET_OPS_ISA) to kernels of other lanes, the ops reject it; repack. Raises
        RuntimeError on a code 3, on such a layout for K above 32768 (65536 with scales of groups),
        and as `choose_format`.
        """
        format = choose_format(weight_format, self.in_features, self.group_size)
        if format == self.format:
            return self
        rows = self.weight
        if self.format != "canonical":
            rows = ops.unrepack(rows, self.shape)
        if format != "canonical":
            rows = ops.repack(rows, self.in_features, format, self.group_size)
        return self.with_weight(rows, format)

    def to_canonical(self) -> PackedWeight:
        """The same matrix in the layout of files; self where it has it already."""
        return self.repack("canonical")

    def with_weight(self, weight: Tensor, format: str) -> PackedWeight:
        """The same scales and sizes over the bytes `weight` of the layout `format`, unchecked."""
        parts = {**self.__dict__, "weight": weight, "format": format}
        return self.unchecked(*parts.values())

    def codes(self) -> Tensor:
        """int8 [N, K] of -1, 0, 1. Raises RuntimeError on a code 3."""
        return ops.unpack(self.to_canonical().weight, self.in_features)

    def dequantize(self) -> Tensor:
        """The weights float32 [N, K]: codes times scales. Raises RuntimeError on a code 3."""
        if not self.group_size:
            return self.codes().float() * self.scale.reshape(-1, 1)
        return self.codes().float() * spread_scales(self.scale, self.group_size, self.in_features)

    def _check_scale(self) -> None:
        check_group_size("PackedWeight", self.group_size)
        shape, rows = list(self.scale.shape), self.out_features
        groups = -(-self.in_features // self.group_size) if self.group_size else 1
        if self.group_size:
            fits = shape == [rows, groups]
        else:
            fits = self.scale.numel() == 1 or shape == [rows]
        if self.scale.dtype != torch.float32 or not fits:
            expected = f"[{rows}, {groups}]" if self.group_size else f"[1] or [{rows}]"
            raise ValueError(
                f"PackedWeight: expected scale float32 {expected}, got {self.scale.dtype} {shape}"
            )
        if not torch.isfinite(self.scale).all():
            raise ValueError(
                f"PackedWeight: expected finite scales, got {self.scale.tolist()!r:.80}"
            )

    def _expected_shape(self) -> tuple[int, ...]:
        if self.format not in FORMATS:
            raise ValueError(
                f"PackedWeight: expected format among {', '.join(FORMATS)}, got {self.format!r}"
            )
        # the kernels it was made for decide the lanes, and only the tensor says which those were
        lanes = math.prod(self.weight.shape[2:]) // LAYOUTS[self.format]["k_step"]
        return packed_shape(self.out_features, self.in_features, self.format, min(lanes, 16) or 1)


def check_group_size(where: str, group_size: int) -> None:
    """Raise ValueError unless it is 0 (no groups) or one of GROUP_SIZES."""
    if group_size not in (0, *GROUP_SIZES):
        sizes = " or ".join(map(str, (0, *GROUP_SIZES)))
        raise ValueError(f"{where}: expected group_size {sizes}, got {group_size}")


def spread_scales(scale: Tensor, group_size: int, in_features: int) -> Tensor:
    """[N, groups] -> [N, K], every weight's own."""
    return scale.repeat_interleave(group_size, dim=1)[:, :in_features]


def blocked_shape(packed: PackedWeight) -> tuple[int, ...]:
    """Of `blocked_scales`."""
    if packed.format == "canonical":
        return tuple(packed.scale.shape)
    layout, weight = LAYOUTS[packed.format], packed.weight
    lanes = math.prod(weight.shape[2:]) // layout["k_step"]
    return len(weight), packed.scale.shape[1], layout["fields"] * lanes


def blocked_scales(packed: PackedWeight) -> Tensor:
    """The scales of groups as the kernels read them beside `packed`'s weight.

    [N, groups] as they are for canonical rows; else [tiles, groups, rows of a tile], zeros behind
    the last row, float16 where that holds every scale exactly, or else float32.
    """
    scale = packed.scale
    if packed.format == "canonical":
        return scale
    tiles, groups, rows = blocked_shape(packed)
    padded = scale.new_zeros(tiles * rows, groups)
    padded[: packed.out_features] = scale
    blocked = padded.view(tiles, rows, groups).transpose(1, 2).contiguous()
    half = blocked.to(torch.float16)
    return half if torch.equal(half.float(), blocked) else blocked


def row_scales(blocked: Tensor, out_features: int) -> Tensor:
    """float32 [N, groups] of what `blocked_scales` has made."""
    if blocked.dim() == 2:
        return blocked
    return blocked.transpose(1, 2).flatten(0, 1)[:out_features].float()


def choose_format(weight_format: str, in_features: int, group_size: int = 0) -> str:
    """The layout that `weight_format`, one of WEIGHT_FORMATS, means for a matrix of K columns.

    "auto" is "2bit", and "canonical" for a K that is too large for it. group_size: of its scales,
    0 for one a matrix or a row. Raises ValueError.
    """
    check_weight_format(weight_format)
    if weight_format != "auto":
        return weight_format
    layout = LAYOUTS[USUAL_FORMAT]
    most = layout["max_grouped_in_features" if group_size else "max_in_features"]
    return USUAL_FORMAT if in_features <= most else "canonical"


def pack_ternary(codes: Tensor, scale: Tensor | float = 1.0, group_size: int = 0) -> PackedWeight:
    """Pack codes int8 [N, K] in {-1, 0, 1}, with the multiplicative `scale`, to a PackedWeight.

    `scale`: a number, or f32 [1], [N], or with `group_size` G [N, ceil(K / G)].
    Raises RuntimeError if a code lies outside {-1, 0, 1}.
    """
    packed = ops.pack(codes)
    scales = torch.as_tensor(scale, dtype=torch.float32)
    if group_size == 0:
        scales = scales.reshape(-1)
    return PackedWeight(packed, scales, codes.shape[0], codes.shape[1], group_size=group_size)


def from_consecutive(packed: Tensor, in_features: int, first: str = "low") -> Tensor:
    """Canonical rows uint8 [N, 32 * ceil(K / 128)] of rows with four CONSECUTIVE weights a byte.

    Args:
        packed: uint8 [N, ceil(K / 4)]; byte j of a row holds the codes w + 1 of w[4j], w[4j + 1],
            w[4j + 2] and w[4j + 3], two bits each; what stands past K is ignored.
        in_features: K.
        first: where w[4j] stands, in the "low" bits (1..0) or in the "high" ones (7..6).
    Raises:
        ValueError: another shape, dtype or `first`; a code 3.
    """
    width = -(-in_features // 4)
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] != width:
        raise ValueError(
            f"from_consecutive: expected packed uint8 [N, {width}] for {in_features} inputs, got "
            f"{packed.dtype} {list(packed.shape)}"
        )
    if first not in ("low", "high"):
        raise ValueError(f"from_consecutive: expected first 'low' or 'high', got {first!r}")
    lanes = torch.empty((*packed.shape, 4), dtype=torch.uint8)
    for i in range(4):
        shift = 2 * i if first == "low" else 6 - 2 * i
        lanes[..., i] = packed >> shift & 3
    codes = lanes.flatten(1)[:, :in_features].view(torch.int8) - 1
    try:
        return ops.pack(codes)
    except RuntimeError:
        wrong = (codes > 1).nonzero().tolist()
        if not wrong:
            raise
        raise ValueError(
            f"from_consecutive: expected codes 0, 1, 2, got code 3 at row {wrong[0][0]}, column "
            f"{wrong[0][1]}; these are not codes w + 1 of ternary weights"
        ) from None


def pack_hf(codes: Tensor) -> Tensor:
    """Pack codes int8 [N, K] the Hugging Face way: uint8 [ceil(N / 4), K]; `codes` is left alone.

    Row i * R + r stands in bits 2i+1..2i of byte row r, R = ceil(N / 4).
    Source: transformers `integrations/bitnet.py`, pack_weights.
    """
    if codes.dtype != torch.int8 or codes.dim() != 2:
        raise ValueError(
            f"pack_hf: expected codes int8 [N, K], got {codes.dtype} {list(codes.shape)}"
        )
    if codes.numel() and (int(codes.min()) < -1 or int(codes.max()) > 1):
        raise ValueError(
            "pack_hf: expected codes in {-1, 0, 1}, got values from "
            f"{int(codes.min())} to {int(codes.max())}"
        )
    rows = -(-codes.shape[0] // 4)
    packed = torch.zeros((rows, codes.shape[1]), dtype=torch.uint8)
    for i in range(4):
        quarter = (codes[i * rows : (i + 1) * rows] + 1).to(torch.uint8)
        packed[: quarter.shape[0]] |= quarter << (2 * i)
    return packed


def unpack_hf(packed: Tensor, out_features: int) -> Tensor:
    """The codes int8 [out_features, K] of a Hugging Face tensor uint8 [ceil(out_features / 4), K].

    Each 2-bit lane is one contiguous quarter of the outputs; reading it interleaved gives a wrong
    model that looks healthy. Raises ValueError on another shape or dtype, and on a code 3.
    """
    rows = -(-out_features // 4)
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[0] != rows:
        raise ValueError(
            f"unpack_hf: expected packed uint8 [{rows}, K] for {out_features} outputs, got "
            f"{packed.dtype} {list(packed.shape)}"
        )
    # Written in place, lane by lane: temporaries of the whole matrix would cost more than the work.
    codes = torch.empty((out_features, packed.shape[1]), dtype=torch.uint8)
    for i in range(4):
        lane = codes[i * rows : (i + 1) * rows]
        torch.bitwise_right_shift(packed[: len(lane)], 2 * i, out=lane)
        lane.bitwise_and_(3)
    if bool(((packed & (packed >> 1)) & 0x55).any()) and bool((codes == 3).any()):
        row, column = (codes == 3).nonzero()[0].tolist()
        raise ValueError(
            f"unpack_hf: expected codes 0, 1, 2, got code 3 at row {row}, column {column}; "
            "this is not a ternary tensor packed by transformers"
        )
    return codes.view(torch.int8).sub_(1)


# Absmean ternarisation and conventions of scales --------------------------------------------------


# Lower bound of the mean magnitude, as in transformers: an all-zero matrix stays finite.
MIN_SCALE = 1e-5

# transformers' quantization_config.linear_class -> whether the stored weight_scale is a reciprocal.
STORES_RECIPROCAL = {"bitlinear": True, "autobitlinear": False}


def absmean_scale(weight: Tensor) -> Tensor:
    """The scale of master weights: `max(mean(|W|), 1e-5)`, float32 [1].

    Args:
        weight: float32, bfloat16 or float16 of any shape, at least one element.
    Raises:
        ValueError: no elements, or a mean that is not finite.
    Source: arXiv 2402.17764; transformers WeightQuant. The mean is accumulated in float64, so that
        it does not depend on the order of summation.
    """
    if weight.numel() == 0:
        raise ValueError(f"absmean_scale: expected a non-empty weight, got {tuple(weight.shape)}")
    mean = weight.detach().abs().sum(dtype=torch.float64) / weight.numel()
    if not torch.isfinite(mean):
        raise ValueError(
            f"absmean_scale: expected finite weights, got a mean magnitude of {mean.item()}"
        )
    return mean.clamp(min=MIN_SCALE).to(torch.float32).reshape(1)


def ternarize(weight: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round master weights to -1, 0, 1: `codes = clamp(round_half_even(W * (1 / scale)), -1, 1)`.

    Args:
        weight: float32, bfloat16 or float16, any shape.
        scale: float32 [1]; None computes `absmean_scale(weight)`.
    Returns:
        (codes int8 of weight's shape, scale float32 [1]).
    Raises:
        ValueError: as `absmean_scale`.
    """
    if scale is None:
        scale = absmean_scale(weight)
    inv_scale = 1.0 / scale
    codes = (weight.detach().to(torch.float32) * inv_scale).round().clamp(-1, 1)
    return codes.to(torch.int8), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """The weights that codes and scale stand for: `codes * scale`, float32.

    Args:
        codes: int8 [N, K] of -1, 0, 1.
        scale: float32 [1], or [N] for one scale per row.
    """
    return codes.to(torch.float32) * scale.reshape(-1, 1)


def multiplying_scale(weight_scale: Tensor, linear_class: str) -> Tensor:
    """Bring a checkpoint's weight_scale to the multiplying convention, float32 [1].

    "bitlinear" (transformers' default) stores 1 / absmean and divides; "autobitlinear" stores the
    absmean and multiplies. A reciprocal is inverted in float32, whatever dtype it was stored in.

    Args:
        weight_scale: one element of any float dtype.
        linear_class: "bitlinear" or "autobitlinear".
    Raises:
        ValueError: another class, more than one element, a value that is not finite and positive.
    """
    if linear_class not in STORES_RECIPROCAL:
        known = " or ".join(map(repr, STORES_RECIPROCAL))
        raise ValueError(f"multiplying_scale: expected linear_class {known}, got {linear_class!r}")
    if weight_scale.numel() != 1:
        raise ValueError(
            "multiplying_scale: expected a weight_scale of one element, got shape "
            f"{tuple(weight_scale.shape)}"
        )
    scale = weight_scale.detach().to(torch.float32).reshape(1)
    if STORES_RECIPROCAL[linear_class]:
        scale = 1.0 / scale
    if not (torch.isfinite(scale).item() and scale.item() > 0):
        raise ValueError(
            "multiplying_scale: expected a finite weight_scale above zero, got "
            f"{weight_scale.item()}"
        )
    return scale


# What `module.to(dtype)` means for packed numbers -------------------------------------------------


Cast = Callable[[Tensor], Tensor]

_HOME = ("cpu", "meta")


def dtype_after(
    fn: Cast, dtype: torch.dtype, allowed: Sequence[torch.dtype], who: str
) -> torch.dtype:
    """The dtype that `fn`, as nn.Module._apply gets it, makes of `dtype`.

    Raises ValueError, before anything is changed, where the result is none of `allowed` or would
    leave the CPU.
    """
    probe = fn(torch.empty(0, dtype=dtype))
    if probe.device.type not in _HOME:
        raise ValueError(
            f"{who}: expected the device cpu, got {probe.device}; the ops run there only"
        )
    if probe.dtype not in allowed:
        names = [str(t).removeprefix("torch.") for t in allowed]
        choice = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        got = str(probe.dtype).removeprefix("torch.")
        why = "; relu2 overflows float16" if probe.dtype == torch.float16 else ""
        raise ValueError(
            f"{who}: expected dtype {choice}, got {got}{why}; "
            f"use .to(torch.{names[-1]}) or leave it as it is"
        )
    return probe.dtype


def same_dtype(old: Tensor, new: Tensor) -> Tensor:
    """`new`, which a function made of `old`, unless the dtype changed: then `old`, moved along."""
    return new if new.dtype == old.dtype else old.to(new.device)
