"""The plain call that earlier BitNet kernels offered: a packed matrix, its scale and an input.

Two packings of the same shape are in use, so a weight of two dimensions never goes without the name
of its own. `repack` makes, once, what this CPU multiplies fastest; it has three dimensions and
needs no name. It must not import an engine, nor know layers.
"""

from __future__ import annotations

import warnings
from typing import cast

import torch
from torch import Tensor

from bitnet_ops.nn import packing
from bitnet_ops.nn.packing import PackedWeight

_LINEAR = torch.ops.bitnet.linear.default
PACKINGS = {
    "interleaved": "bitnet_ops.ops.pack's: in blocks of 128 weights, byte j holds "
    "w[j], w[j + 32], w[j + 64], w[j + 96] from the high bits down",
    "consecutive": "byte j holds w[4j] ... w[4j + 3] from the low bits up",
}


def packed_shape(out_features: int, in_features: int, name: str) -> tuple[int, int]:
    """The shape that an N x K matrix has in the packing `name`, a key of PACKINGS."""
    if name == "interleaved":
        return out_features, packing.packed_row_bytes(in_features)
    return out_features, -(-in_features // 4)


def _check(packed_weight: Tensor, out_features: int, in_features: int, name: str | None) -> str:
    """The packing's name; raises ValueError without one, and where the weight does not fit it."""
    if name not in PACKINGS:
        known = "; ".join(f"{key!r}: {text}" for key, text in PACKINGS.items())
        raise ValueError(
            f"apply: expected packing 'interleaved' or 'consecutive', got {name!r}; the bytes do "
            f"not say which they are ({known})"
        )
    expected = packed_shape(out_features, in_features, name)
    found = tuple(packed_weight.shape)
    if packed_weight.dtype != torch.uint8 or found != expected:
        hint = ""
        (other,) = PACKINGS.keys() - {name}
        if found == packed_shape(out_features, in_features, other):
            hint = f"; this is the shape of packing {other!r}"
        elif found == (-(-out_features // 4), in_features):
            hint = "; this is Hugging Face packing: ops.pack(packing.unpack_hf(w, out_features))"
        raise ValueError(
            f"apply: expected packed_weight uint8 {list(expected)} ({name}), got "
            f"{packed_weight.dtype} {list(packed_weight.shape)}{hint}"
        )
    return name


def canonical(
    packed_weight: Tensor, out_features: int, in_features: int, packing_name: str | None
) -> Tensor:
    """Canonical rows uint8 [out_features, 32 * ceil(in_features / 128)] of a packed weight."""
    name = _check(packed_weight, out_features, in_features, packing_name)
    if name == "interleaved":
        return packed_weight
    return packing.from_consecutive(packed_weight, in_features)


def repack(
    packed_weight: Tensor, out_features: int, in_features: int, packing: str | None = None
) -> Tensor:
    """A packed weight in the layout that the kernels of this CPU read fastest; do it once.

    Args:
        packed_weight, packing: as `apply_packed`.
    Returns:
        uint8 of three dimensions, for `apply_packed` in place of packed_weight; it fits the
        instruction set in use and no other (docs/reference/layouts.md).
    Raises:
        ValueError: as `apply_packed`; RuntimeError on a code 3 and for in_features above 32768.
    """
    rows = canonical(packed_weight, out_features, in_features, packing)
    unit = torch.ones(1, dtype=torch.float32)
    return PackedWeight(rows, unit, out_features, in_features).repack("2bit").weight


def apply_packed(
    packed_weight: Tensor,
    scale: Tensor | float,
    x: Tensor,
    out_features: int,
    in_features: int,
    bias: Tensor | None = None,
    *,
    packing: str | None = None,
) -> Tensor:
    """y = BitLinear(x) from an already packed weight: the call that earlier kernels offered.

    Args:
        packed_weight: what `repack` returned, which is up to several times faster for more than
            one token; or uint8 [out_features, 32 * ceil(in_features / 128)], packing "interleaved"
            (`bitnet_ops.ops.pack(codes)` makes it); or uint8 [out_features,
            ceil(in_features / 4)], packing "consecutive", which is repacked on every call. A
            Hugging Face tensor (uint8 [out_features / 4, in_features]) goes through
            `bitnet_ops.nn.packing.unpack_hf` and `bitnet_ops.ops.pack` first.
        scale: multiplies the codes -1, 0, 1; a number, or float32 [1] or [out_features].
        x: float32, bfloat16 or float16 [..., in_features].
        bias: float [out_features] or None.
        packing: "interleaved" or "consecutive", see PACKINGS; not needed for a repacked weight.
    Returns:
        x.dtype [..., out_features].
    Raises:
        ValueError: no packing, or packed_weight or x of another shape; RuntimeError from the op
            for the rest.
    """
    if x.shape[-1] != in_features:
        raise ValueError(f"apply: expected x [..., {in_features}], got {list(x.shape)}")
    weight = packed_weight
    if weight.dim() != 3:  # the op checks a repacked weight against out_features
        if packing == "consecutive" and not torch.compiler.is_compiling():
            warnings.warn(
                "apply: a consecutive weight is repacked on every call; repack it once: "
                "weight = method.repack(weight, out_features, in_features, packing='consecutive')",
                stacklevel=4,  # the caller of the method
            )
        weight = canonical(weight, out_features, in_features, packing)
    weight_scale = torch.as_tensor(scale, dtype=torch.float32).reshape(-1)
    return cast(Tensor, _LINEAR(x, weight, weight_scale, bias, (out_features, in_features)))
