"""Typed wrappers of torch.ops.bitnet.*, the operators of the catalogue (csrc/ops.cpp).

These docstrings are the reference of the ops. N = output features, K = input features, M = tokens,
F = float32, bfloat16 or float16. A scale always MULTIPLIES. All tensors live on the CPU. Every
result is the same bit for bit on every ISA, for every number of threads and for a row alone or in
a batch; float sums run in 16 lanes (lane = index mod 16, fused multiply-add) that are added as a
tree. A bad argument raises RuntimeError: `<op>: expected <argument> <constraint>, got <value>`.
`linear` and `group_linear` pass gradients on to x and bias (straight-through, gradients.py); the
other ops have none, so with grad mode on an input that requires grad is refused.
The wrappers are grouped by what they work on; all names are to be had from here.
This package knows no files and no models.
"""

from __future__ import annotations

from bitnet_ops.ops import _library as _library  # isort: skip  (first: it makes torch.ops.bitnet)
from bitnet_ops.ops import fakes as fakes  # registers the fake kernels
from bitnet_ops.ops import gradients as gradients  # registers what autograd does with the ops
from bitnet_ops.ops.blocks import (
    attention,
    kv_cache_update,
    mlp_forward,
    qkv_forward,
)
from bitnet_ops.ops.head import (
    embedding,
    lm_head,
    quantize_head,
)
from bitnet_ops.ops.model import (
    decode_step,
)
from bitnet_ops.ops.probes import (
    _probe_int8_peak,
    _probe_read,
)
from bitnet_ops.ops.rowwise import (
    add_rms_norm,
    relu2_mul,
    rms_norm,
    rope,
    rope_table,
    silu_and_mul,
)
from bitnet_ops.ops.ternary import (
    gemm,
    gemv,
    group_linear,
    linear,
    pack,
    prepack,
    quantize_activations,
    quantize_weights,
    unpack,
    unprepack,
)

__all__ = [  # in the order of the catalogue
    "pack",
    "unpack",
    "prepack",
    "unprepack",
    "quantize_weights",
    "quantize_activations",
    "gemv",
    "gemm",
    "linear",
    "group_linear",
    "rms_norm",
    "add_rms_norm",
    "relu2_mul",
    "silu_and_mul",
    "rope_table",
    "rope",
    "qkv_forward",
    "mlp_forward",
    "attention",
    "kv_cache_update",
    "quantize_head",
    "lm_head",
    "embedding",
    "decode_step",
    "_probe_read",
    "_probe_int8_peak",
]
