"""BitLinear: a ternary linear layer as an nn.Module, for models and for use on its own.

Forward is one op: quantise each token to int8, integer product, scales, bias. Inference only.
The weight lies in the layout that the kernels read fastest unless another is asked for; a
state_dict holds canonical rows whatever the layout.
It must not know models or files.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bitnet_ops import ops
from bitnet_ops.nn.packing import (
    Cast,
    PackedWeight,
    check_group_size,
    dtype_after,
    pack_ternary,
    packed_row_bytes,
    same_dtype,
)
from bitnet_ops.nn.storage import GROUP_ACTIVATION_FORMAT, check_activation_format
from bitnet_ops.nn.tracked import Tracked

_ALL_ZERO_CODES = 0b01010101  # four times code 1, the weight 0
_Layer = TypeVar("_Layer", bound="BitLinear")
_ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)


class BitLinear(Tracked):
    """y = int8(x) @ (codes * weight_scale)^T + bias; x F [..., K] -> [..., N] in x's dtype.

    Args:
        in_features, out_features: K and N, above 0.
        bias: whether there is one; zeros until it is loaded.
        group_size: 0 for one scale a matrix or row, 128 or 64 for one a group of so many weights.
        weight_format: "auto", "2bit", "1.6bit" or "canonical".
    Raises ValueError for any other size or format.

    F is float32, bfloat16 or float16. Buffers: `weight` uint8, [N, 32 * ceil(K / 128)] where
    `weight_format` is "canonical", else as `PackedWeight.repack` makes it ("auto", the default, is
    "2bit" and up to several times faster for more than one token),
    `weight_scale` f32 (multiplies), [1], [N], or [N, ceil(K / G)] where `group_size` G is 128 or
    64; then `activation_format` says what x becomes, as of `ops.linear`,
    `bias` F [N] or None; `.to(dtype)` casts the bias alone, for the output has x's dtype. Gradients
    reach x and the bias (see ops.linear), never the packed weight. `state_dict` gives canonical
    rows (a copy for another layout) and `load_state_dict` takes them, so that a checkpoint fits
    every CPU and every format. A layer that nobody has loaded has the scale NaN, so that its
    outputs cannot pass for results.
    Source: "The Era of 1-bit LLMs", arXiv 2402.17764.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    activation_format: str = "int8"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        group_size: int = 0,
        weight_format: str = "auto",
    ) -> None:
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise ValueError(
                "BitLinear: expected in_features and out_features above 0, got "
                f"{in_features} and {out_features}"
            )
        self.in_features, self.out_features = in_features, out_features
        check_group_size("BitLinear", group_size)
        self.weight_format, self.group_size = "canonical", group_size
        self.set_activation_format("auto")
        shape = (out_features, packed_row_bytes(in_features))
        self.register_buffer("weight", torch.full(shape, _ALL_ZERO_CODES, dtype=torch.uint8))
        scales = (out_features, -(-in_features // group_size)) if group_size else (1,)
        self.register_buffer("weight_scale", torch.full(scales, float("nan"), dtype=torch.float32))
        self.register_buffer(
            "bias", torch.zeros(out_features, dtype=torch.float32) if bias else None
        )
        self.register_buffer("signs", None, persistent=False)
        self.repack(weight_format)

    @classmethod
    def from_packed(cls: type[_Layer], packed: PackedWeight, bias: Tensor | None = None) -> _Layer:
        """A layer over `packed`, whose tensors are shared, not copied, in the layout they have.

        Rows as `pack_ternary` makes them are the slow layout: `.repack()` once, where they are
        used more than once. `bias` F [N]. Raises ValueError for a bias of another shape.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = packed.in_features, packed.out_features
        layer.weight_format, layer.group_size = packed.format, packed.group_size
        layer.set_activation_format("auto")
        layer.register_buffer("weight", packed.weight)
        layer.register_buffer(
            "weight_scale", packed.scale if packed.group_size else packed.scale.reshape(-1)
        )
        if bias is not None and tuple(bias.shape) != (packed.out_features,):
            raise ValueError(
                f"BitLinear: expected bias [{packed.out_features}], got {list(bias.shape)}"
            )
        layer.register_buffer("bias", bias)
        layer.register_buffer("signs", None, persistent=False)
        return layer

    def rotate(self, signs: Tensor | None) -> None:
        """Turn the input by a Hadamard transform before the product, for weights that are rotated.

        signs: float32 [K / block, block] of +-1, as `ops.hadamard` takes them; shared, and no part
        of a state_dict. None: leave the input as it is.
        """
        self.signs = signs

    @classmethod
    def from_float(
        cls, weight: Tensor | nn.Linear, bias: Tensor | None = None, weight_format: str = "auto"
    ) -> BitLinear:
        """Ternarise a full-precision weight F [N, K] by absmean, one scale for the matrix.

        Beside it a bias F [N]; or both as an nn.Linear has them. Raises RuntimeError for values
        that are not finite, ValueError as `from_packed`.
        """
        if isinstance(weight, nn.Linear):
            bias = weight.bias if bias is None else bias
            weight = weight.weight
        codes, scale = ops.quantize_weights(weight.detach())
        packed = pack_ternary(codes, scale)
        layer = cls.from_packed(packed, None if bias is None else bias.detach())
        return layer.repack(weight_format)

    def set_activation_format(self, activation_format: str) -> None:
        """What x becomes, one of ACTIVATION_FORMATS, or "auto": the best that is as fast as int8.

        Raises ValueError for another, and without groups for any but "auto" and "int8".
        """
        check_activation_format(activation_format)
        if activation_format == "auto":
            activation_format = GROUP_ACTIVATION_FORMAT if self.group_size else "int8"
        if activation_format != "int8" and not self.group_size:
            raise ValueError(
                "BitLinear: expected activation_format 'int8' or 'auto' for weights without "
                f"scales of groups, got {activation_format!r}"
            )
        self.activation_format = activation_format

    @property
    def packed(self) -> PackedWeight:
        """The layer's weight and scales, shared."""
        shape = self.out_features, self.in_features
        return PackedWeight.unchecked(
            self.weight, self.weight_scale, *shape, self.weight_format, self.group_size
        )

    def repack(self, weight_format: str = "auto") -> BitLinear:
        """Bring the weight into the layout `weight_format`; returns self.

        One of `packing.WEIGHT_FORMATS`, as `PackedWeight.repack` has them.
        """
        packed = self.packed.repack(weight_format)
        self.weight, self.weight_format = packed.weight, packed.format
        return self

    def forward(self, x: Tensor) -> Tensor:
        """x F [..., K] -> [..., N] in x's dtype.

        Raises RuntimeError for another dtype or width, or a layer that is packed for other kernels.
        """
        shape = self.out_features, self.in_features
        weight, scale = self.weight, self.weight_scale
        if self.signs is not None:
            x = ops.hadamard(x, self.signs)
        return ops.linear(x, weight, scale, self.bias, shape, self.activation_format)

    def _apply(self, fn: Cast, recurse: bool = True) -> BitLinear:
        # Codes and scales are the format's: casting the layer casts its bias alone.
        dtype_after(fn, torch.float32, _ACTIVATIONS, "BitLinear")
        weight, scale, signs = self.weight, self.weight_scale, self.signs
        super()._apply(fn, recurse)
        if signs is not None and self.signs is not None:
            self.signs = same_dtype(signs, self.signs)
        self.weight = same_dtype(weight, self.weight)
        self.weight_scale = same_dtype(scale, self.weight_scale)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.weight_format != "canonical":
            destination[prefix + "weight"] = self.packed.to_canonical().weight

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        key = prefix + "weight"
        given = state_dict.get(key)
        # copy_ would convert a float weight to uint8 without a word.
        if given is not None and given.dtype != torch.uint8:
            raise RuntimeError(
                f"BitLinear: expected {key} packed as uint8, got {given.dtype}; "
                "use BitLinear.from_float for a master weight"
            )
        if given is None or self.weight_format == "canonical":
            super()._load_from_state_dict(state_dict, prefix, *args)
            return
        shape = self.out_features, packed_row_bytes(self.in_features)
        if tuple(given.shape) != shape:
            raise RuntimeError(
                f"BitLinear: expected {key} as canonical rows {list(shape)}, got "
                f"{list(given.shape)}; a state_dict holds no CPU-specific layout"
            )
        rows = self.packed.with_weight(given.contiguous(), "canonical")
        weight = rows.repack(self.weight_format).weight
        super()._load_from_state_dict({**state_dict, key: weight}, prefix, *args)

    def extra_repr(self) -> str:
        """What stands in the brackets of repr()."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, weight_format={self.weight_format}"
            + (f", group_size={self.group_size}" if self.group_size else "")
        )
