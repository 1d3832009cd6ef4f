"""Inputs large enough that every thread and tile has a share, of sizes that divide by nothing.

One or two per op, in the order of the catalogue; like op_samples.py they know no answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from op_arguments import (
    attention_arguments,
    cache_arguments,
    decode_step_arguments,
    head_arguments,
    mlp_arguments,
)
from op_samples import Sample
from op_values import (
    activations,
    gain,
    int8_values,
    positive,
    private,
    quantized_head,
    random_packed,
)


def _large(op: str, build: Callable[[torch.Generator], tuple[Any, ...]]) -> Sample:
    return Sample(op, "large", build)


LARGE = [
    _large("pack", lambda g: (torch.randint(-1, 2, (301, 517), generator=g, dtype=torch.int8),)),
    _large("unpack", lambda g: (random_packed(g, 301, 517), 517)),
    _large("unprepack", lambda g: (
        private(random_packed(g, 301, 517), 517, "1.6bit"), 301, 517,
    )),
    _large("quantize_weights", lambda g: (torch.randn(301, 517, generator=g),)),
    _large("quantize_activations", lambda g: (activations(g, 61, 1031),)),
    _large("gemv", lambda g: (random_packed(g, 1021, 517), int8_values(g, 517))),
    _large("gemm", lambda g: (
        random_packed(g, 517, 301), int8_values(g, 37, 301), positive(g, 37), positive(g, 517),
    )),
    _large("gemm", lambda g: (
        private(random_packed(g, 517, 301), 301, "2bit"), int8_values(g, 130, 301),
        positive(g, 130), positive(g, 517), 517,
    )),
    _large("linear", lambda g: (
        activations(g, 37, 301), random_packed(g, 517, 301), positive(g, 1),
        torch.randn(517, generator=g),
    )),
    _large("group_linear", lambda g: (
        activations(g, 37, 301), random_packed(g, 517, 301), positive(g, 517, 3),
        torch.randn(517, generator=g),
    )),
    _large("rms_norm", lambda g: (activations(g, 61, 1031), gain(g, 1031), 1e-5)),
    _large("add_rms_norm", lambda g: (
        activations(g, 61, 1031), activations(g, 61, 1031), gain(g, 1031), 1e-5,
    )),
    _large("relu2_mul", lambda g: (activations(g, 61, 1031), activations(g, 61, 1031))),
    _large("silu_and_mul", lambda g: (torch.randn(61, 2062, generator=g) * 20,)),
    _large("rope_table", lambda g: (torch.arange(600), 126, 5e5)),
    _large("rope", lambda g: (activations(g, 61, 9, 126), torch.randn(61, 126, generator=g))),
    _large("qkv_forward", lambda g: (
        activations(g, 13, 301), gain(g, 301), random_packed(g, 260, 301), positive(g, 1),
        random_packed(g, 70, 301), positive(g, 1), random_packed(g, 66, 301), positive(g, 1), 1e-5,
    )),
    _large("mlp_forward", lambda g: mlp_arguments(g, activations(g, 13, 301), "relu2", True, 517)),
    _large("mlp_forward", lambda g: mlp_arguments(g, activations(g, 1, 301), "silu", True, 517)),
    _large("attention", lambda g: attention_arguments(
        g, batch=3, tokens=19, heads=6, kv_heads=2, length=131, head_dim=40,
    )),
    _large("attention", lambda g: attention_arguments(
        g, batch=1, tokens=1, heads=10, kv_heads=5, length=700, head_dim=64,
        cache_dtype=torch.bfloat16,
    )),
    _large("kv_cache_update", lambda g: cache_arguments(
        g, batch=3, tokens=40, kv_heads=4, length=64, head_dim=40, cache_dtype=torch.bfloat16,
    )),
    _large("quantize_head", lambda g: (torch.randn(301, 517, generator=g), "int8")),
    _large("quantize_head", lambda g: (torch.randn(301, 517, generator=g), "int4", 64)),
    _large("decode_step", lambda g: decode_step_arguments(
        g, layers=2, batch=1, hidden=301, heads=6, kv_heads=2, head_dim=40, inner=517, vocab=1021,
        length=300,
    )),
    _large("decode_step", lambda g: decode_step_arguments(
        g, layers=2, batch=3, tokens=2, hidden=301, heads=6, kv_heads=2, head_dim=40, inner=517,
        vocab=1021, length=130, dtype=torch.bfloat16, cache_dtype=torch.bfloat16,
    )),
    _large("lm_head", lambda g: (activations(g, 5, 301), torch.randn(1021, 301, generator=g))),
    _large("lm_head", lambda g: head_arguments(g, activations(g, 7, 4301), 1021, "int8", 128)),
    _large("lm_head", lambda g: head_arguments(g, activations(g, 7, 1301), 1021, "int4", 128)),
    _large("embedding", lambda g: (
        torch.randint(0, 301, (61,), generator=g),
        *quantized_head(g, 301, 517, "int4", 64), 301, 517,
    )),
]  # fmt: skip
