"""What `module.to(dtype)` means for modules whose numbers are packed: rejected, kept, or cast.

torch applies one function to every buffer, whatever it holds. Packed codes and scales are a format,
not a precision, so they keep their dtype. It must not know models, layers or ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Cast = Callable[[Tensor], Tensor]

_HOME = ("cpu", "meta")


def dtype_after(
    fn: Cast, dtype: torch.dtype, allowed: Sequence[torch.dtype], who: str
) -> torch.dtype:
    """The dtype that `fn`, as nn.Module._apply gets it, makes of `dtype`.

    Raises ValueError, before anything is changed, where the result is none of `allowed` or would
    leave the CPU.
    """
    probe = fn(torch.empty(0, dtype=dtype))
    if probe.device.type not in _HOME:
        raise ValueError(
            f"{who}: expected the device cpu, got {probe.device}; the ops run there only"
        )
    if probe.dtype not in allowed:
        names = [str(t).removeprefix("torch.") for t in allowed]
        choice = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        got = str(probe.dtype).removeprefix("torch.")
        why = "; relu2 overflows float16" if probe.dtype == torch.float16 else ""
        raise ValueError(
            f"{who}: expected dtype {choice}, got {got}{why}; "
            f"use .to(torch.{names[-1]}) or leave it as it is"
        )
    return probe.dtype


def same_dtype(old: Tensor, new: Tensor) -> Tensor:
    """`new`, which a function made of `old`, unless the dtype changed: then `old`, moved along."""
    return new if new.dtype == old.dtype else old.to(new.device)
