"""Gradients of the ops: straight-through for `linear`, rejected for everything else.

`linear` hands the gradient of its output on to x and to the bias, so that what trains before or
beside a frozen ternary layer gets its own. Every other op that takes floats would cut the graph in
silence, so it rejects; and every op rejects tangents, which forward-mode differentiation carries.
Importing the module registers all that with torch, for torch.ops.bitnet.* as for the wrappers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bitnet_ops import _runtime
from bitnet_ops.ops._operator import in_forward_ad

_ops = torch.ops.bitnet
_CANONICAL = _runtime.layouts()["canonical"]  # of its dimensions the other layouts have more


def _reject_grad(op: str, name: str, value: Any) -> None:
    """Without this, backward would silently give wrong or no gradients."""
    if any(tensor.requires_grad for tensor in _tensors(value)):
        raise RuntimeError(
            f"{op}: expected {name} without gradient (the op is inference only), got "
            "requires_grad=True while grad mode is on; call it under torch.inference_mode() "
            f"or torch.no_grad(), or pass {name}.detach()"
        )


def _reject_tangents(op: str, names: list[str], args: tuple[Any, ...]) -> None:
    """Without this, torch.func.jvp would silently give derivatives of 0."""
    if not in_forward_ad():
        return
    for name, value in zip(names, args, strict=False):
        if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in _tensors(value)):
            raise RuntimeError(
                f"{op}: expected {name} without a tangent, got a dual number of forward-mode "
                "differentiation (torch.func.jvp, jacfwd), which no op of bitnet supports"
                + ("; use backward(), which linear supports" if op == "linear" else "")
            )


def _tensors(value: Any) -> list[Tensor]:
    """Of one argument; what is no tensor at all is for torch's own schema check to reject."""
    return [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, Tensor)]


# Straight-through ---------------------------------------------------------------------------------


class _StraightThrough(torch.autograd.Function):
    """The rounding of x to int8 passes the gradient unchanged (arXiv 1308.3432; as ActQuant does).

    x.grad = gradient @ (codes * scale) in float32, rounded once; bias.grad its sum over tokens.
    """

    @staticmethod
    def forward(ctx: Any, keys: Any, *args: Any) -> Tensor:
        x, weight, weight_scale, *rest = args  # torch leaves out what has its default
        bias = rest[0] if rest else None
        _reject_grad("linear", "weight_scale", weight_scale)
        y: Tensor = _below("linear", keys, args)
        ctx.save_for_backward(weight, weight_scale)
        ctx.sizes = y.shape[-1], x.shape[-1]
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale = ctx.saved_tensors
        (n, k), (x_dtype, bias_dtype) = ctx.sizes, ctx.dtypes
        x_grad = bias_grad = None
        g, wanted = gradients[0].float(), ctx.needs_input_grad[1:]
        if wanted[0]:
            canonical = weight.dim() == _CANONICAL["dimensions"]
            rows = weight if canonical else _ops.unrepack(weight, (n, k))
            codes, scaled = _ops.unpack(rows, k).float(), g
            if scale.dim() == 3:  # beside row blocks: nn.packing.blocked_scales
                scale = scale.transpose(1, 2).flatten(0, 1)[:n].float()
            if scale.dim() == 2 and scale.numel() > n:  # or one group, which is a row's
                block = _CANONICAL["k_step"]
                size = block if scale.shape[1] == -(-k // block) else block // 2
                codes = codes * scale.repeat_interleave(size, dim=1)[:, :k]
            else:
                scaled = g * scale.reshape(-1)
            x_grad = (scaled @ codes).to(x_dtype)
        if bias_dtype is not None and wanted[3]:
            bias_grad = g.reshape(-1, n).sum(0).to(bias_dtype)
        return (None, x_grad, None, None, bias_grad, *[None] * len(wanted))[: 1 + len(wanted)]


# Registered --------------------------------------------------------------------------------------

# A kernel in Python costs 3 us a call, but only outside of inference mode.
_library = torch.library.Library("bitnet", "FRAGMENT")


def _below(op: str, keys: Any, args: tuple[Any, ...]) -> Any:
    overload = getattr(_ops, op).default
    return overload.redispatch(keys & torch._C._after_autograd_keyset, *args)


def _register(op: str) -> None:
    names = [argument.name for argument in getattr(_ops, op).default._schema.arguments]

    def autograd(keys: Any, *args: Any) -> Any:
        _reject_tangents(op, names, args)
        if torch.is_grad_enabled() and any(t.requires_grad for a in args for t in _tensors(a)):
            if op == "linear":
                return _StraightThrough.apply(keys, *args)
            for name, value in zip(names, args, strict=False):
                _reject_grad(op, name, value)
        return _below(op, keys, args)

    _library.impl(op, autograd, "Autograd", with_keyset=True)


# Every op, a new one too, but those of which nothing could require a gradient.
_OF_INTEGERS = {"pack", "unpack", "repack", "unrepack"}

for _registered in sorted(torch._C._dispatch_get_all_op_names()):
    _namespace, _, _name = _registered.partition("::")
    if _namespace == "bitnet" and _name not in _OF_INTEGERS:
        _register(_name)
