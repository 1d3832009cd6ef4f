"""Typed wrappers of torch.ops.bitnet.*, the operators of the catalogue (csrc/ops.cpp).

These docstrings are the reference of the ops.

- N = output features, K = input features, M = tokens; F = float32, bfloat16 or float16; C, of KV
  caches, = F, float8_e4m3fn, float8_e5m2 or int8. A scale always MULTIPLIES. All tensors live on
  the CPU.
- Every result is the same bit for bit on every ISA, for every number of threads and for a row alone
  or in a batch; float sums run in 16 lanes (lane = index mod 16, fused multiply-add) that are added
  as a tree; `paged_attention` says what differs over bfloat16 caches.
- A bad argument raises RuntimeError: `<op>: expected <argument> <constraint>, got <value>`.
- Inputs come first, then weights, in every op but `gemv` and `gemm`, which begin with the weight.
  `shape` is the (N, K) of a packed weight, which its padded bytes do not record.
- `linear` passes gradients on to x and bias (straight-through, gradients.py); the other ops have
  none, so with grad mode on an input that requires grad is rejected.

The wrappers are grouped by what they work on; all names are to be had from here. An op is one
function in the file of its group: signature, documentation and fake kernel. This package knows no
files and no models.
"""

from __future__ import annotations

from bitnet_ops.ops import head, model, rowwise, sampling, ternary
from bitnet_ops.ops.head import *  # noqa: F403
from bitnet_ops.ops.model import *  # noqa: F403
from bitnet_ops.ops.rowwise import *  # noqa: F403
from bitnet_ops.ops.sampling import *  # noqa: F403
from bitnet_ops.ops.ternary import *  # noqa: F403

from bitnet_ops.ops import gradients as gradients  # isort: skip  (last: it reads what is registered)

__all__ = []
__all__ += ternary.__all__
__all__ += rowwise.__all__
__all__ += head.__all__
__all__ += model.__all__
__all__ += sampling.__all__
