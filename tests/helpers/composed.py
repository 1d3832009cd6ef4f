"""The fused ops composed of the ops they fuse: what fused results must equal, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitnet_ops import ops


def composed_qkv(x: Tensor, norm: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *shards, eps = rest
    hidden = ops.rms_norm(x, norm, eps)
    return tuple(ops.linear(hidden, shards[i], shards[i + 1]) for i in (0, 2, 4))


def composed_mlp(x: Tensor, norm: Tensor, *rest: Any) -> Tensor:
    gate_w, gate_s, up_w, up_s, sub_norm, down_w, down_s, eps, activation = rest
    dtype = x.dtype
    hidden = ops.rms_norm(x, norm, eps)
    if dtype == torch.float16:
        hidden = hidden.float()  # squared ReLU overflows float16: the op keeps float32 from here
    gate, up = ops.linear(hidden, gate_w, gate_s), ops.linear(hidden, up_w, up_s)
    if activation == "relu2":
        product = ops.relu2_mul(gate, up)
    else:
        product = ops.silu_and_mul(torch.cat([gate, up], dim=-1))
    if sub_norm is not None:
        product = ops.rms_norm(product, sub_norm, eps)
    return ops.linear(product, down_w, down_s).to(dtype)
