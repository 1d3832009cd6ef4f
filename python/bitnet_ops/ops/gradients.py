"""Gradients of the ops: straight-through for `linear`, rejected for everything else.

`linear` hands the gradient of its output on to x and to the bias, so that what trains before or
beside a frozen ternary layer gets its own. Every other op that takes floats would cut the graph in
silence, so it rejects. Importing the module registers both with torch, for torch.ops.bitnet.* as
for the wrappers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitnet_ops import _runtime

_ops = torch.ops.bitnet
_CANONICAL = _runtime.layouts()["canonical"]  # of its dimensions the other layouts have more


def _reject_grad(op: str, name: str, tensor: Any) -> None:
    """Without this, backward would silently give wrong or no gradients."""
    # Something that is no tensor at all is for torch's own schema check to reject.
    if isinstance(tensor, Tensor) and tensor.requires_grad:
        raise RuntimeError(
            f"{op}: expected {name} without gradient (the op is inference only), got "
            "requires_grad=True while grad mode is on; call it under torch.inference_mode() "
            f"or torch.no_grad(), or pass {name}.detach()"
        )


# Straight-through ---------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, weight_scale, bias, *_ = inputs
    if ctx.needs_input_grad[2]:
        _reject_grad("linear", "weight_scale", weight_scale)
    ctx.save_for_backward(weight, weight_scale)
    ctx.sizes = output.shape[-1], x.shape[-1]
    ctx.dtypes = x.dtype, None if bias is None else bias.dtype
    ctx.arguments = len(inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """x.grad = gradient @ (codes * scale) in float32, rounded once; bias.grad its sum over tokens.

    The rounding of x to int8 passes the gradient unchanged (arXiv 1308.3432; as ActQuant does).
    """
    weight, scale = ctx.saved_tensors
    (n, k), (x_dtype, bias_dtype) = ctx.sizes, ctx.dtypes
    x_grad = bias_grad = None
    g, wanted = gradient.float(), ctx.needs_input_grad  # without a bias left at its default
    if wanted[0]:
        rows = weight if weight.dim() == _CANONICAL["dimensions"] else _ops.unrepack(weight, (n, k))
        codes = _ops.unpack(rows, k).float()
        if scale.dim() == 3:  # beside row blocks: nn.packing.blocked_scales
            scale = scale.transpose(1, 2).flatten(0, 1)[:n].float()
        if scale.dim() == 2 and scale.numel() > n:  # or one group, which is a row's
            block = _CANONICAL["k_step"]
            size = block if scale.shape[1] == -(-k // block) else block // 2
            codes = codes * scale.repeat_interleave(size, dim=1)[:, :k]
        else:
            g = g * scale.reshape(-1)
        x_grad = (g @ codes).to(x_dtype)
    if len(wanted) > 3 and wanted[3]:
        bias_grad = gradient.float().reshape(-1, n).sum(0).to(bias_dtype)
    return (x_grad, None, None, bias_grad, *[None] * (ctx.arguments - 4))


torch.library.register_autograd("bitnet::linear", _backward, setup_context=_setup)

# Rejected ----------------------------------------------------------------------------------------

# A kernel in Python costs 3 us a call, but only outside of inference mode.
_library = torch.library.Library("bitnet", "FRAGMENT")


def _reject(name: str) -> None:
    overload = getattr(_ops, name).default
    names = [argument.name for argument in overload._schema.arguments]

    def reject(keys: Any, *args: Any) -> Any:
        if torch.is_grad_enabled():
            for argument, value in zip(names, args, strict=False):
                _reject_grad(name, argument, value)
        return overload.redispatch(keys & torch._C._after_autograd_keyset, *args)

    _library.impl(name, reject, "Autograd", with_keyset=True)


# The gradient of one is above, and nothing of the others could require one. Every other op rejects,
# a new one too.
_ACCEPTING = {"linear", "pack", "unpack", "repack", "unrepack"}

for _registered in sorted(torch._C._dispatch_get_all_op_names()):
    _namespace, _, _name = _registered.partition("::")
    if _namespace == "bitnet" and _name not in _ACCEPTING:
        _reject(_name)
