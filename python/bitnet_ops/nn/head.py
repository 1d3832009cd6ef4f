"""HeadWeight: one matrix as output head and as embedding, dense, int8, int4 or ternary.

A tied model holds it once: logits and embedding rows come from the same storage. Activations meet
a quantised head as 16-bit integers. It must not know models or files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.nn.packing import Cast, PackedWeight, blocked_scales, dtype_after, same_dtype
from bitnet_ops.nn.storage import (
    BLOCK,
    DEFAULT_HEAD_FORMAT,
    HEAD_FORMATS,
    find_head_format,
)
from bitnet_ops.nn.tracked import Tracked

_DENSE = {h.name: getattr(torch, h.dtype) for h in HEAD_FORMATS.values() if h.dtype}
_NAMES = {dtype: name for name, dtype in _DENSE.items()} | {torch.float16: "float16"}


class HeadWeight(Tracked):
    """A matrix [V, K]; calling it gives logits, `embed` gives rows.

    Buffers: `weight` F [V, K], or int8 or int4 codes as `ops.quantize_head` returns them, or a
    ternary matrix in any layout, these with their `scale`, else None. The row of id n is the weight
    itself, or code * scale. `signs`: of a matrix that is rotated along K, as BitLinear has them.
    """

    weight: Tensor
    scale: Tensor | None
    signs: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor | None,
        out_features: int,
        in_features: int,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("signs", None, persistent=False)
        self.out_features, self.in_features = out_features, in_features

    @classmethod
    def from_dense(
        cls, tensor: Tensor, head_format: str = DEFAULT_HEAD_FORMAT, group_size: int = 128
    ) -> HeadWeight:
        """The head of a matrix F [V, K] in one of HEAD_FORMATS; group_size is int4's, 64 or 128.

        Raises ValueError for another format, RuntimeError for a matrix that cannot be quantised.
        """
        row = find_head_format(head_format)
        scale: Tensor | None = None
        rows, features = tensor.shape
        if row.quantized:
            tensor, scale = ops.quantize_head(tensor.detach(), row.name, group_size)
        elif row.name in _DENSE:
            tensor = tensor.to(_DENSE[row.name])
        return cls(tensor, scale, rows, features)

    @classmethod
    def from_packed(cls, packed: PackedWeight) -> HeadWeight:
        """The head of a ternary matrix [V, K], in the layout that it has; its weight is shared."""
        groups = -(-packed.in_features // BLOCK)
        if not packed.group_size:
            scale = packed.scale.reshape(-1, 1).expand(packed.out_features, groups).contiguous()
            parts = packed.weight, scale, packed.out_features, packed.in_features, packed.format
            packed = PackedWeight.unchecked(*parts, BLOCK)
        return cls(packed.weight, blocked_scales(packed), packed.out_features, packed.in_features)

    @property
    def head_format(self) -> str:
        """What it is now: one of HEAD_FORMATS but for "stored", "ternary" or "float16"."""
        if self.scale is None:
            return _NAMES[self.weight.dtype]
        if self.weight.dtype == torch.int8:
            return "int8"
        return "int4" if self.scale.dtype == torch.bfloat16 else "ternary"

    def forward(self, x: Tensor) -> Tensor:
        """Logits f32 [..., V] of x F [..., K]."""
        shape = self.out_features, self.in_features
        if self.signs is not None:
            x = ops.hadamard(x, self.signs)
        return ops.lm_head(x, self.weight, self.scale, shape)

    def embed(self, ids: Tensor) -> Tensor:
        """Rows f32 [..., K] of ids int64 [...]. Raises RuntimeError for an id out of range."""
        shape = self.out_features, self.in_features
        rows = ops.embedding(ids, self.weight, self.scale, shape)
        return rows if self.signs is None else ops.hadamard(rows, self.signs, inverse=True)

    def _apply(self, fn: Cast, recurse: bool = True) -> HeadWeight:
        # Codes and scales are the format's: casting the model casts a dense head alone.
        dtype_after(fn, torch.float32, tuple(_NAMES), "HeadWeight")
        weight, scale, signs = self.weight, self.scale, self.signs
        super()._apply(fn, recurse)
        if signs is not None and self.signs is not None:
            self.signs = same_dtype(signs, self.signs)
        if scale is not None and self.scale is not None:
            self.weight = same_dtype(weight, self.weight)
            self.scale = same_dtype(scale, self.scale)
        return self

    def extra_repr(self) -> str:
        return (
            f"out_features={self.out_features}, in_features={self.in_features}, "
            f"head_format={self.head_format}"
        )
