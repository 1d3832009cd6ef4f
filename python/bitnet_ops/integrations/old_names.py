"""The operators of earlier BitNet kernels under their old names, `torch.ops.sgl_kernel.bitnet_*`.

    import bitnet_ops.integrations.old_names

defines those of NAMES that the process does not have yet. Arguments, shapes and scales are the old
ones; the results are right where the old ones were not (docs/guide/old-names.md). New code calls
`torch.ops.bitnet.*`: a call here costs some microseconds of Python more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.nn.packing import packed_row_bytes

NAMESPACE = "sgl_kernel"


def _scale(scale: float) -> Tensor:
    return torch.tensor([scale], dtype=torch.float32)


def _rows(weight: Tensor, in_features: int, op: str, argument: str) -> int:
    """How many outputs a packed matrix has; ValueError unless its rows hold `in_features`."""
    wide = packed_row_bytes(in_features)
    if weight.dtype != torch.uint8 or weight.dim() != 2 or weight.shape[1] != wide:
        raise ValueError(
            f"{op}: expected {argument} packed as uint8 [outputs, {wide}] for {in_features} inputs "
            f"(blocks of 128, interleaved: docs/reference/layouts.md), got {weight.dtype} "
            f"{list(weight.shape)}"
        )
    return weight.shape[0]


def bitnet_gemv_cpu(packed: Tensor, activations: Tensor, scale: float) -> Tensor:
    """scale * sum(w * a), float32 [M], of a packed matrix [M, K / 4] and int8 activations [K]."""
    _rows(packed, activations.shape[-1], "bitnet_gemv_cpu", "packed")
    return ops.gemv(packed, activations) * scale


def bitnet_gemm_cpu(packed: Tensor, activations: Tensor, scale: float) -> Tensor:
    """The same of int8 activations [B, K]: shape [B, M] over MEMORY [M, B], as it always was.

    Callers say `.view(M, B).t()`.
    """
    rows = _rows(packed, activations.shape[-1], "bitnet_gemm_cpu", "packed")
    product = ops.gemm(packed, activations) * scale
    return product.t().contiguous().view(activations.shape[0], rows)


def bitnet_quantize_activations_cpu(x: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 of x's shape, float32 [1]): one scale for all, absmax / 127, which multiplies."""
    largest = x.abs().amax().float()
    scale = torch.where(largest < 1e-6, torch.ones((), dtype=torch.float32), largest / 127)
    codes = (x.float() / scale).round().clamp(-127, 127).to(torch.int8)
    return codes, scale.reshape(1)


def bitnet_qkv_forward_cpu(
    x: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    q_scale: float,
    k_scale: float,
    v_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) float32 of one token x [K]."""
    x = x.float()
    parts = ((q_weight, q_scale, "q"), (k_weight, k_scale, "k"), (v_weight, v_scale, "v"))
    q, k, v = (_linear(x, w, s, "bitnet_qkv_forward_cpu", f"{name}_weight") for w, s, name in parts)
    return q, k, v


def bitnet_mlp_forward_cpu(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_scale: float,
    up_scale: float,
    down_scale: float,
    ffn_sub_norm: Tensor,
    eps: float,
) -> Tensor:
    """down(rms_norm(relu(gate(x))^2 * up(x))), float32 [hidden], of one token x [hidden]."""
    op, x = "bitnet_mlp_forward_cpu", x.float()
    gate = _linear(x, gate_weight, gate_scale, op, "gate_weight")
    up = _linear(x, up_weight, up_scale, op, "up_weight")
    z = ops.rms_norm(ops.relu2_mul(gate, up), ffn_sub_norm.float(), eps)
    return _linear(z, down_weight, down_scale, op, "down_weight")


def _linear(x: Tensor, weight: Tensor, scale: float, op: str, argument: str) -> Tensor:
    rows = _rows(weight, x.shape[-1], op, argument)
    return ops.linear(x, weight, _scale(scale), None, (rows, x.shape[-1]))


def rmsnorm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`ops.rms_norm`."""
    return ops.rms_norm(x, weight, eps)


def silu_and_mul_cpu(x: Tensor) -> Tensor:
    """`ops.silu_and_mul`."""
    return ops.silu_and_mul(x)


_PRODUCT = "(Tensor packed, Tensor activations, float scale) -> Tensor"
NAMES: dict[str, tuple[str, Callable[..., object]]] = {
    "bitnet_gemv_cpu": (_PRODUCT, bitnet_gemv_cpu),
    "bitnet_gemm_cpu": (_PRODUCT, bitnet_gemm_cpu),
    "bitnet_quantize_activations_cpu": (
        "(Tensor x) -> (Tensor, Tensor)", bitnet_quantize_activations_cpu,
    ),
    "bitnet_qkv_forward_cpu": (
        "(Tensor x, Tensor q_weight, Tensor k_weight, Tensor v_weight, float q_scale, "
        "float k_scale, float v_scale) -> (Tensor, Tensor, Tensor)",
        bitnet_qkv_forward_cpu,
    ),
    "bitnet_mlp_forward_cpu": (
        "(Tensor x, Tensor gate_weight, Tensor up_weight, Tensor down_weight, float gate_scale, "
        "float up_scale, float down_scale, Tensor ffn_sub_norm, float eps) -> Tensor",
        bitnet_mlp_forward_cpu,
    ),
    "rmsnorm_cpu": ("(Tensor x, Tensor weight, float eps) -> Tensor", rmsnorm_cpu),
    "silu_and_mul_cpu": ("(Tensor x) -> Tensor", silu_and_mul_cpu),
}  # fmt: skip


def _define(library: torch.library.Library) -> list[str]:
    """Define what is not there yet; the names that this process had already, of another library."""
    there = []
    for name, (schema, function) in NAMES.items():
        if hasattr(getattr(torch.ops, NAMESPACE), name):
            there.append(name)
            continue
        library.define(name + schema)
        library.impl(name, function, "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", function, lib=library)
    return there


# Kept for as long as the process runs: the definitions end with it. `KEPT` are others'.
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
KEPT = _define(_LIBRARY)
