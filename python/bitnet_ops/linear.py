"""BitLinear: a ternary linear layer as an nn.Module, for models and for use on its own.

Forward is one op: quantise each token to int8, integer product, scales, bias. Inference only.
It must not know models, files or packing conventions other than the canonical layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bitnet_ops import ops
from bitnet_ops.packing import PackedWeight, pack_ternary, packed_row_bytes

_ALL_ZERO_CODES = 0b01010101  # four times code 1, the weight 0


class BitLinear(nn.Module):
    """y = int8(x) @ (codes * weight_scale)^T + bias; x F [..., K] -> [..., N] in x's dtype.

    Buffers: `weight` uint8 [N, 32 * ceil(K / 128)], `weight_scale` f32 [1] (multiplies), `bias` F
    [N] or None. A layer that nobody has loaded has the scale NaN, so that its outputs cannot pass
    for results. Source: "The Era of 1-bit LLMs", arXiv 2402.17764.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise ValueError(
                "BitLinear: expected in_features and out_features above 0, got "
                f"{in_features} and {out_features}"
            )
        self.in_features, self.out_features = in_features, out_features
        shape = (out_features, packed_row_bytes(in_features))
        self.register_buffer("weight", torch.full(shape, _ALL_ZERO_CODES, dtype=torch.uint8))
        self.register_buffer("weight_scale", torch.full((1,), float("nan")))
        self.register_buffer("bias", torch.zeros(out_features) if bias else None)

    @classmethod
    def from_packed(cls, packed: PackedWeight, bias: Tensor | None = None) -> BitLinear:
        """A layer over `packed`, whose tensors are shared, not copied."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = packed.in_features, packed.out_features
        layer.register_buffer("weight", packed.weight)
        layer.register_buffer("weight_scale", packed.scale.reshape(1))
        if bias is not None and tuple(bias.shape) != (packed.out_features,):
            raise ValueError(
                f"BitLinear: expected bias [{packed.out_features}], got {list(bias.shape)}"
            )
        layer.register_buffer("bias", bias)
        return layer

    @classmethod
    def from_float(cls, weight: Tensor, bias: Tensor | None = None) -> BitLinear:
        """Ternarise a master weight F [N, K] by absmean, one scale for the matrix."""
        codes, scale = ops.quantize_weights(weight.detach())
        return cls.from_packed(pack_ternary(codes, scale), None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.weight_scale, self.bias)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # copy_ would convert a float weight to uint8 without a word.
        given = state_dict.get(prefix + "weight")
        if given is not None and given.dtype != torch.uint8:
            raise RuntimeError(
                f"BitLinear: expected {prefix}weight packed as uint8, got {given.dtype}; "
                "use BitLinear.from_float for a master weight"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )
