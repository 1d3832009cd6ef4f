"""The modules that stand in for transformers' own: ternary linear, RMSNorm, MLP, output head.

Names of submodules, parameters and buffers are those of the modules that they replace, so that
hooks, `named_modules` and adapters find what they look for. It must not know how models are loaded
or saved.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.integrations.bitnet import AutoBitLinear
from transformers.integrations.bitnet import BitLinear as HFBitLinear

from bitnet_ops import ops
from bitnet_ops.config.scheme import ScaleRule
from bitnet_ops.convert.ternary import from_ternary, looks_ternary
from bitnet_ops.integrations.checkpoint import CheckpointError, logical_codes, stored_scale
from bitnet_ops.nn.head import HeadWeight
from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.nn.packing import pack_hf, pack_ternary


class TernaryLinear(BitLinear):
    """BitLinear, with the norm of its inputs where the checkpoint has one (`use_rms_norm`).

    `reciprocal`: the scale as its checkpoint stores it, if it divides there. `unpacked`: the dtype
    of the floating matrix that it was, which is what is saved again; None for packed ones.
    """

    rms_norm: nn.Module | None
    reciprocal: Tensor | None = None
    unpacked: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.rms_norm is None else self.rms_norm(x))

    def for_checkpoint(self, divides: bool) -> dict[str, Tensor]:
        """Weight, scale and bias as transformers' BitLinear or, if not `divides`, AutoBitLinear
        stores them: quarters of the outputs side by side. A matrix that was unpacked is so again.
        """
        if self.unpacked is not None:
            saved = {"weight": self.packed.dequantize().to(self.unpacked)}
            return saved if self.bias is None else {**saved, "bias": self.bias}
        if self.out_features % 4:
            raise ValueError(
                "TernaryLinear: expected a multiple of 4 outputs, which transformers' packing "
                f"takes, got {self.out_features}"
            )
        saved = {"weight": pack_hf(self.packed.codes()), "weight_scale": self.weight_scale}
        bias = self.bias
        if divides:
            given = self.reciprocal
            kept = given is not None and torch.equal(1.0 / given.float(), self.weight_scale)
            saved["weight_scale"] = cast(Tensor, given) if kept else 1.0 / self.weight_scale
        elif bias is not None:
            bias = bias / self.weight_scale.to(bias.dtype)  # y = (x W + bias) * weight_scale there
        return saved if bias is None else {**saved, "bias": bias}


def _has_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


class RMSNorm(nn.Module):
    """`ops.rms_norm` with the parameter of the norm that it replaces, shared.

    Where a gradient is asked for, the same maths in torch's own operators.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        if _has_gradient(x, self.weight):
            wide = x.float()
            root = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * (wide * root).to(x.dtype)
        return ops.rms_norm(x, self.weight, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class GatedMLP(nn.Module):
    """down(norm(act(gate(x), up(x)))): activation and product in one pass, the norm where it is.

    `activation` is "relu2" or "silu".
    """

    def __init__(self, source: Any, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.ffn_sub_norm: nn.Module | None
        self.gate_proj, self.up_proj = source.gate_proj, source.up_proj
        self.down_proj, self.act_fn = source.down_proj, source.act_fn
        self.ffn_sub_norm = getattr(source, "ffn_sub_norm", None)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if _has_gradient(gate, up):
            z = self.act_fn(gate) * up
        elif self.activation == "relu2":
            z = ops.relu2_mul(gate, up)
        else:
            z = ops.silu_and_mul(torch.cat([gate, up], dim=-1))
        return self.down_proj(z if self.ffn_sub_norm is None else self.ffn_sub_norm(z))


class QuantizedHead(nn.Module):
    """Logits of a head in int8 or int4, in the dtype of its inputs; `dtype` is what it was."""

    def __init__(self, weight: Tensor, head_format: str) -> None:
        super().__init__()
        self.head = HeadWeight.from_dense(weight.detach(), head_format)
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype

    def for_checkpoint(self) -> Tensor:
        """A floating head again, F [V, K], rounded as the codes are."""
        return self.head.embed(torch.arange(self.out_features)).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).to(x.dtype)


_AUTO = (ScaleRule.MULTIPLY, ScaleRule.ONLINE)


def rule_of(module: nn.Module) -> ScaleRule | None:
    """How transformers' module holds its weight; None for any other module."""
    if isinstance(module, AutoBitLinear):
        return _AUTO[bool(module.online_quant)]
    return ScaleRule.DIVIDE if isinstance(module, HFBitLinear) else None


def ternary_linear(
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    rms_norm: nn.Module | None,
    rule: ScaleRule,
    shape: tuple[int, int],
    name: str,
    weight_format: str,
) -> TernaryLinear:
    """The layer for what transformers' linear of `shape` (N, K) holds.

    `weight` is packed uint8 [N / 4, K], codes as floating numbers [N, K] (an offline autobitlinear
    after loading), or masters [N, K], as `rule` says. Raises CheckpointError where it is neither.
    """
    if rule is ScaleRule.MULTIPLY and tuple(weight.shape) == shape:
        codes, scale = _codes(weight, name), None
    else:
        codes, scale = logical_codes(weight.detach(), rule, *shape, name)
    if scale is None:
        if weight_scale is None:
            raise CheckpointError(f"bitnet: expected a weight_scale, got none in {name}")
        scale = stored_scale(weight_scale.detach(), rule, name)
    if bias is not None and rule is ScaleRule.MULTIPLY:
        bias = bias.detach() * scale.to(bias.dtype)  # there y = (x W + bias) * weight_scale
    layer = TernaryLinear.from_packed(
        pack_ternary(codes, scale), None if bias is None else bias.detach()
    )
    layer.repack(weight_format)
    layer.register_module("rms_norm", rms_norm)
    if rule is ScaleRule.DIVIDE and weight_scale is not None:
        layer.reciprocal = weight_scale.detach().reshape(1)
    return layer


def unpacked_linear(source: nn.Linear, name: str, weight_format: str) -> TernaryLinear | None:
    """The layer for a floating matrix that holds -s, 0 and s alone; None for any other values.

    s is one a matrix, a row, or a group of 128 or 64 weights of a row: what packages of unpacked
    ternary models hold.
    """
    weight = source.weight.detach()
    if not looks_ternary(weight):
        return None
    codes, scales, group_size, _ = from_ternary(name, weight)
    bias = None if source.bias is None else source.bias.detach()
    layer = TernaryLinear.from_packed(pack_ternary(codes, scales, group_size), bias)
    layer.repack(weight_format)
    layer.register_module("rms_norm", None)
    layer.unpacked = weight.dtype
    return layer


def _codes(weight: Tensor, name: str) -> Tensor:
    """int8 codes of what an offline AutoBitLinear holds: -1, 0 and 1, as floating numbers.

    Up to transformers 5.12 as uint8, where -1 is 255 and the module cannot run.
    """
    weight = weight.detach()
    given = weight.view(torch.int8) if weight.dtype == torch.uint8 else weight
    codes = given.to(torch.int8)
    if not torch.equal(codes.to(given.dtype), given) or int(codes.abs().amax()) > 1:
        raise CheckpointError(
            f"bitnet: expected weights -1, 0 and 1 beside a weight_scale, got others in {name}; "
            "the checkpoint and its quantization_config disagree"
        )
    return codes


def replacement(module: nn.Module, name: str, weight_format: str) -> TernaryLinear | None:
    """Our layer for one of transformers' ternary linears; None for any other module."""
    rule = rule_of(module)
    if rule is None:
        return None
    source = cast(Any, module)
    shape = int(source.out_features), int(source.in_features)
    return ternary_linear(
        source.weight,
        getattr(source, "weight_scale", None),
        source.bias,
        source.rms_norm,
        rule,
        shape,
        name,
        weight_format,
    )


_ACTIVATIONS = {"relu2": "relu2", "silu": "silu", "swish": "silu"}
_PROVED: set[type] = set()  # classes of transformers' that ours compute the same as


def faster_norm(module: nn.Module) -> RMSNorm | None:
    """Our norm over the parameter of an RMSNorm that computes the same; None for anything else."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not type(module).__name__.endswith("RMSNorm") or weight is None or eps is None:
        return None
    ours = RMSNorm(weight, eps)
    return ours if _same(module, ours, weight.shape[0]) else None


def faster_mlp(module: nn.Module) -> GatedMLP | None:
    """Our MLP over the linears of a gated one that computes the same; None for anything else."""
    activation = _ACTIVATIONS.get(getattr(getattr(module, "config", None), "hidden_act", ""))
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    if activation is None or not all(hasattr(module, part) for part in parts):
        return None
    if activation == "relu2" and _dtype_of(module) == torch.float16:
        raise CheckpointError(
            "bitnet: expected the model dtype bfloat16 or float32, got torch.float16; load it with "
            "dtype=torch.bfloat16 (float16 overflows in squared-ReLU models)"
        )
    ours = GatedMLP(module, activation)
    return ours if _same(module, ours, int(cast(Any, module).gate_proj.in_features)) else None


def _same(theirs: nn.Module, ours: nn.Module, features: int) -> bool:
    """Whether both agree on three random tokens, tried until a class has agreed once.

    Some norms scale by 1 + weight, some MLPs clamp: what a name promises does not show that.
    """
    kind = type(theirs)
    if kind not in _PROVED:
        x = torch.randn(3, features, generator=torch.Generator().manual_seed(1))
        x = x.to(_dtype_of(theirs))
        with torch.inference_mode():
            expected, got = theirs(x).float(), ours(x).float()
        error = (got - expected).abs().max()
        if bool(error <= 0.02 * expected.abs().max()):
            _PROVED.add(kind)
    return kind in _PROVED


def _dtype_of(module: nn.Module) -> torch.dtype:
    """What a module computes in: its first floating parameter's dtype."""
    floating = (p.dtype for p in module.parameters() if p.is_floating_point())
    return next(floating, torch.float32)
