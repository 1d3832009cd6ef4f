"""TrainableBitLinear: master weights, ternary in the forward, a straight-through gradient.

The forward is that of transformers' AutoBitLinear in "online" mode (WeightQuant, ActQuant) bit for
bit, in any dtype and on any device, so that what trains here is what every other reader of the
checkpoint computes. Plain torch.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitnet_ops import ops
from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.nn.packing import MIN_SCALE, PackedWeight, pack_ternary


class _Ternarize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        w = weight.float()
        inverse = 1.0 / w.abs().mean().clamp_(min=MIN_SCALE)
        return ((w * inverse).round().clamp(-1, 1) / inverse).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _QuantizeActivations(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.float()
        multiplier = 127 / y.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-5)
        return ((y * multiplier).round().clamp(-128, 127) / multiplier).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def ternarize_ste(weight: Tensor) -> Tensor:
    """Master weights F [N, K] as the ternary values they stand for; the gradient passes unchanged.

    `s = 1 / max(mean|W|, 1e-5)`, `clamp(round_half_even(W * s), -1, 1) / s`, computed in float32,
    rounded to weight's dtype. Source: arXiv 2402.17764; transformers WeightQuant.
    """
    return cast(Tensor, _Ternarize.apply(weight))


def quantize_activations_ste(x: Tensor) -> Tensor:
    """Activations F [..., K] as the int8 values a token's absmax gives; gradient unchanged.

    `s = 127 / max(absmax, 1e-5)` per token, `clamp(round_half_even(x * s), -128, 127) / s`,
    computed in float32, rounded to x's dtype. Source: as `ternarize_ste`; transformers ActQuant.
    """
    return cast(Tensor, _QuantizeActivations.apply(x))


def masters_from_codes(codes: Tensor, scale: Tensor | float) -> Tensor:
    """Master weights float32 [N, K] that ternarise to exactly these codes with this scale.

    A packed checkpoint has lost its masters. `code * scale` is not a substitute: its absmean is
    `scale` times the share of non-zeros, so the first forward would already shrink every output.
    Dividing by that share keeps codes and absmean (to float32 rounding): training starts from
    the network that was packed. What is lost stays lost: all ones lie at the same distance
    from their threshold, and all zeros at zero.

    Args:
        codes: int8 [N, K] in {-1, 0, 1}.
        scale: one float32 that multiplies.
    """
    share = float(torch.count_nonzero(codes)) / max(codes.numel(), 1)
    return codes.float() * (float(scale) / max(share, torch.finfo(torch.float32).tiny))


class TrainableBitLinear(nn.Linear):
    """y = q8(x) @ ternary(weight)^T + bias, both roundings skipped by the gradient.

    `weight` F [N, K] holds the masters and is an ordinary Parameter, in float32 or bfloat16; a
    checkpoint of it is one of nn.Linear. Not to be confused with `bitnet_ops.BitLinear`, the packed
    layer for inference, which `to_inference` makes. Source: arXiv 2402.17764; transformers
    AutoBitLinear (online).
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(quantize_activations_ste(input), ternarize_ste(self.weight), self.bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> TrainableBitLinear:
        """A layer over the very Parameters of `linear`, which become masters."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.train(linear.training)
        return layer

    @classmethod
    def from_packed(
        cls, packed: PackedWeight, dtype: torch.dtype = torch.float32
    ) -> TrainableBitLinear:
        """A layer whose masters start from packed weights; see `masters_from_codes`."""
        layer = cls(packed.in_features, packed.out_features, bias=False, device="meta")
        masters = masters_from_codes(packed.codes(), packed.scale)
        layer.weight = nn.Parameter(masters.to(dtype))
        return layer

    @torch.no_grad()
    def ternary(self) -> tuple[Tensor, Tensor]:
        """(codes int8 [N, K], scale float32 [1]) of the masters, on the CPU.

        As every converter here has them: the mean accumulates in float64, where the forward's is
        float32, so a master within rounding of half the scale may fall either way.
        """
        return ops.quantize_weights(self.weight.detach().cpu())

    def to_inference(self) -> BitLinear:
        """The packed layer that computes the same with integers."""
        codes, scale = self.ternary()
        bias = None if self.bias is None else self.bias.detach().cpu()
        return BitLinear.from_packed(pack_ternary(codes, scale), bias).repack()
