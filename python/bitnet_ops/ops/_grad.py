"""The error of an op without a gradient on an input that requires one.

It must not know the ops; ops/gradients.py says which have a gradient.
"""

from __future__ import annotations

from torch import Tensor


def refuse_grad(op: str, **tensors: Tensor | None) -> None:
    """Without this, backward would silently give wrong or no gradients."""
    for name, tensor in tensors.items():
        # Something that is no tensor at all is for torch's own schema check to refuse.
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise RuntimeError(
                f"{op}: expected {name} without gradient (the op is inference only), got "
                "requires_grad=True while grad mode is on; call it under torch.inference_mode() "
                f"or torch.no_grad(), or pass {name}.detach()"
            )
