"""The modules of one decoder layer: where its tensors lie, under Hugging Face's names.

What a layer computes is a matter of programs (bitnet_ops.blocks); these modules only hold. It must
not know caches, embeddings or heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bitnet_ops.nn.head import HeadWeight
from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.nn.packing import Cast, PackedWeight, same_dtype
from bitnet_ops.nn.tracked import Tracked

_Stored: TypeAlias = Tensor | PackedWeight | HeadWeight
Tensors = Mapping[str, _Stored]
ACTIVATION_DTYPES = (torch.float32, torch.bfloat16)  # relu2 overflows float16


class _Dense(Tracked):
    """A module whose own buffers are dense float32 tensors, whatever the activations are."""

    def _apply(self, fn: Cast, recurse: bool = True) -> Any:
        before = {name: self.get_buffer(name) for name in self._buffers}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            self._buffers[name] = same_dtype(tensor, self.get_buffer(name))
        return self


class Weight(_Dense):
    """A module that is nothing but one dense tensor, so that names are those of Hugging Face."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}, dtype={self.weight.dtype}"


def norm_weight(tensor: _Stored) -> Weight:
    """A norm's weight as a module; float32, in which every stored dtype is exact."""
    return Weight(_dense(tensor))


def _dense(tensor: _Stored) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"model: expected a dense tensor, got a {type(tensor).__name__}")
    return tensor.float()


class DecoderLayer(Tracked):
    """The modules of one layer: what mixes tokens (`self_attn` or `linear_attn`), `mlp`, norms.

    Args:
        tensors: those of the layer by their names in it; a module comes before what lies inside it.
        scales: what the results of projections are multiplied by, by their names; 1 unless given.
    """

    def __init__(self, tensors: Tensors, scales: Mapping[str, float]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            module, _, kind = name.rpartition(".")
            if kind == "bias":
                continue  # it belongs to the projection of the same name
            if kind != "weight":
                self._part(module).register_buffer(kind, _dense(tensor))
                continue
            parent, _, child = module.rpartition(".")
            leaf = _leaf(tensor, tensors.get(f"{module}.bias"), scales.get(module, 1.0))
            self._part(parent).add_module(child, leaf)

    def _part(self, name: str) -> nn.Module:
        """The module of that name; one that holds nothing but others and vectors is made here."""
        if name and "." not in name and name not in self._modules:
            self.add_module(name, _Dense())
        part: nn.Module = self.get_submodule(name)
        return part


def _leaf(tensor: _Stored, bias: _Stored | None, scale: float) -> nn.Module:
    """The module over its tensors; what a projection gives is multiplied by `scale`."""
    if isinstance(tensor, PackedWeight):
        if scale != 1:
            tensor = replace(tensor, scale=tensor.scale * scale)
        return BitLinear.from_packed(tensor, None if bias is None else _dense(bias))
    return norm_weight(tensor)
