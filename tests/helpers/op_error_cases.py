"""Bad calls of the ops as data: a good call of each, ways to spoil it, a table of what is blamed.

A row is (op, what is changed in the good call, the argument that is blamed, words of the message).
It calls no op: test_op_errors.py does, and knows what every message has in common.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from op_arguments import attention_arguments, cache_arguments, head_arguments, mlp_arguments
from op_schema import named
from op_values import (
    activations,
    gain,
    int8_values,
    positive,
    quantized_head,
    random_codes,
    random_packed,
    strided,
)

Arguments = dict[str, Any]
Change = Callable[[Arguments], Any]
N, K, M = 6, 160, 3


def good_calls() -> dict[str, Arguments]:
    """One call per op that works."""
    g = torch.Generator().manual_seed(3)
    weight, scale, x = random_packed(g, N, K), positive(g, 1), activations(g, M, K)
    qkv = [part for n in (8, 4, 4) for part in (random_packed(g, n, K), positive(g, 1))]
    int8_attention = attention_arguments(g, cache_dtype=torch.int8)
    int8_cache = cache_arguments(g, cache_dtype=torch.int8)
    int4 = quantized_head(g, 11, K, "int4", 64)
    return {
        "pack": {"codes": random_codes(g, N, K)},
        "unpack": {"weight": weight, "in_features": K},
        "quantize_weights": {"weight": torch.randn(N, K, generator=g)},
        "quantize_activations": {"x": x},
        "gemv": {
            "weight": weight, "x": int8_values(g, K),
            "x_scale": positive(g, 1), "weight_scale": scale,
        },
        "gemm": {
            "weight": weight, "x": int8_values(g, M, K),
            "x_scale": positive(g, M), "weight_scale": scale,
        },
        "linear": {"x": x, "weight": weight, "weight_scale": scale, "bias": gain(g, N)},
        "group_linear": {
            "x": x, "weight": weight, "weight_scale": positive(g, N, 2), "bias": gain(g, N),
        },
        "rms_norm": {"x": x, "weight": gain(g, K), "eps": 1e-5},
        "add_rms_norm": {"x": x, "residual": x.clone(), "weight": gain(g, K), "eps": 1e-5},
        "relu2_mul": {"gate": x, "up": x.clone()},
        "silu_and_mul": {"x": x},
        "rope_table": {"positions": torch.arange(5), "head_dim": 16, "theta": 1e4},
        "rope": {"x": activations(g, M, 4, 16), "cos_sin": torch.randn(M, 16, generator=g)},
        "qkv_forward": named("qkv_forward", (x, gain(g, K), *qkv, 1e-5)),
        "mlp_forward": named("mlp_forward", mlp_arguments(g, x, "relu2")),
        "attention": named("attention", attention_arguments(g)),
        "kv_cache_update": named("kv_cache_update", cache_arguments(g)),
        "attention int8": named("attention", int8_attention),
        "kv_cache_update int8": named("kv_cache_update", int8_cache),
        "quantize_head": {
            "weight": torch.randn(11, K, generator=g), "format": "int4", "group_size": 64,
        },
        "lm_head": {"x": x, "weight": torch.randn(11, K, generator=g)},
        "lm_head int8": named("lm_head", head_arguments(g, x, 11, "int8", 128)),
        "lm_head int4": named("lm_head", head_arguments(g, x, 11, "int4", 64)),
        "embedding": {
            "ids": torch.tensor([0, 10]), "weight": torch.randn(11, K, generator=g),
            "out_features": 11, "in_features": K,
        },
        "embedding int4": {
            "ids": torch.tensor([0, 10]), "weight": int4[0], "scale": int4[1],
            "out_features": 11, "in_features": K,
        },
        "_probe_read": {
            "buffer": torch.zeros(5000, dtype=torch.uint8), "streams": 1, "distance": 0,
        },
        "_probe_int8_peak": {"seed": torch.zeros(1, dtype=torch.uint8), "iterations": 1},
    }  # fmt: skip


def to(name: str, dtype: torch.dtype) -> Change:
    return lambda a: a[name].to(dtype)


def narrow(name: str, dim: int = -1) -> Change:
    """One element less along dim, in memory of its own."""
    return lambda a: a[name].narrow(dim, 0, a[name].shape[dim] - 1).contiguous()


def add_dim(name: str) -> Change:
    return lambda a: a[name][None]


def noncontiguous(name: str) -> Change:
    return lambda a: strided(a[name])


def value(v: Any) -> Change:
    return lambda a: v


def overlapping_caches(a: Arguments) -> Tensor:
    """A value cache that begins in the middle of the key cache."""
    key_cache = a["key_cache"]
    memory = torch.zeros(key_cache.numel() * 2)
    a["key_cache"] = memory[: key_cache.numel()].view_as(key_cache)
    start = key_cache.numel() // 2
    return memory[start : start + key_cache.numel()].view_as(key_cache)


def wide_cache(a: Arguments) -> Tensor:
    return torch.zeros(2, 2, 12, 513, dtype=torch.int8)


def wide_query(a: Arguments) -> Tensor:
    return torch.zeros(2, 3, 4, 513)


def key_inside_cache(a: Arguments) -> Tensor:
    """New keys that are a contiguous piece of the very cache they are to be written into."""
    return a["key_cache"].flatten()[8 : 8 + a["key"].numel()].view_as(a["key"])


F64, I32, BOOL, F16, BF16 = torch.float64, torch.int32, torch.bool, torch.float16, torch.bfloat16
F32 = torch.float32
FLOATS_TEXT = "of dtype float32, bfloat16 or float16, got "

# (op, {argument: change}, blamed argument, words that follow)
CASES: list[tuple[str, dict[str, Change], str, str]] = [
    ("pack", {"codes": to("codes", torch.uint8)}, "codes", "of dtype int8, got uint8"),
    ("pack", {"codes": to("codes", torch.float32)}, "codes", "of dtype int8, got float32"),
    ("pack", {"codes": lambda a: a["codes"][0]}, "codes", "with 2 dimensions, got shape [160]"),
    ("pack", {"codes": add_dim("codes")}, "codes", "with 2 dimensions, got shape [1, 6, 160]"),
    ("pack", {"codes": lambda a: a["codes"][:, :0]}, "codes", "at least one input feature"),
    ("pack", {"codes": lambda a: a["codes"] * 2}, "codes", "only -1, 0 and 1, got another value"),
    ("pack", {"codes": lambda a: a["codes"] - 127}, "codes", "only -1, 0 and 1"),
    ("unpack", {"weight": to("weight", torch.int8)}, "weight", "of dtype uint8, got int8"),
    ("unpack", {"weight": lambda a: a["weight"][0]}, "weight", "with 2 dimensions"),
    ("unpack", {"weight": noncontiguous("weight")}, "weight", "contiguous"),
    ("unpack", {"weight": narrow("weight")}, "weight", "whole 32-byte blocks"),
    ("unpack", {"weight": lambda a: a["weight"][:, :0]}, "weight", "whole 32-byte blocks"),
    ("unpack", {"in_features": value(128)}, "weight", "32 bytes a row), got 64 bytes"),
    ("unpack", {"in_features": value(257)}, "weight", "96 bytes a row), got 64 bytes"),
    ("unpack", {"in_features": value(0)}, "weight", "input features, got 0"),
    ("unpack", {"in_features": value(-3)}, "weight", "input features, got -3"),
    ("unpack", {"in_features": value(2**62)}, "weight", "input features, got 4611686018427387904"),
    ("unpack", {"weight": lambda a: a["weight"] | 0xC0}, "weight", "codes 0, 1, 2 only"),
    ("unpack", {"weight": lambda a: a["weight"] * 0}, "weight", "padding codes 1"),
    ("quantize_weights", {"weight": to("weight", F64)}, "weight", FLOATS_TEXT + "float64"),
    ("quantize_weights", {"weight": to("weight", torch.uint8)}, "weight", FLOATS_TEXT + "uint8"),
    ("quantize_weights", {"weight": lambda a: a["weight"][0]}, "weight", "with 2 dimensions"),
    ("quantize_weights", {"weight": lambda a: a["weight"][:0]}, "weight", "at least one element"),
    ("quantize_weights", {"weight": lambda a: a["weight"] * torch.nan}, "weight", "finite values"),
    ("quantize_weights", {"weight": lambda a: a["weight"] * torch.inf}, "weight", "finite values"),
    ("quantize_activations", {"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
    ("quantize_activations", {"x": to("x", I32)}, "x", FLOATS_TEXT + "int32"),
    ("quantize_activations", {"x": to("x", BOOL)}, "x", FLOATS_TEXT + "bool"),
    ("quantize_activations", {"x": to("x", torch.complex64)}, "x", FLOATS_TEXT + "complex64"),
    ("quantize_activations", {"x": lambda a: a["x"][0, 0]}, "x", "at least 1 dimension"),
    ("quantize_activations", {"x": lambda a: a["x"][:, :0]}, "x", "at least one feature"),
    ("gemv", {"x": to("x", torch.float32)}, "x", "of dtype int8, got float32"),
    ("gemv", {"x": to("x", torch.uint8)}, "x", "of dtype int8, got uint8"),
    ("gemv", {"x": add_dim("x")}, "x", "with 1 dimensions, got shape [1, 160]"),
    ("gemv", {"x": lambda a: a["x"][:100]}, "weight", "packed for the 100 input features"),
    ("gemv", {"x": lambda a: a["x"][:0]}, "weight", "input features, got 0"),
    ("gemv", {"weight": to("weight", torch.int8)}, "weight", "of dtype uint8, got int8"),
    ("gemv", {"weight": lambda a: a["weight"][0]}, "weight", "with 2 dimensions"),
    ("gemv", {"weight": noncontiguous("weight")}, "weight", "contiguous"),
    ("gemv", {"weight": lambda a: a["weight"][:, :32]}, "weight", "contiguous"),
    ("gemv", {"weight_scale": value(None)}, "x_scale and weight_scale", "got only x_scale"),
    ("gemv", {"x_scale": value(None)}, "x_scale and weight_scale", "got only weight_scale"),
    ("gemv", {"x_scale": value(torch.ones(2))}, "x_scale", "one element per token (1), got 2"),
    ("gemv", {"x_scale": to("x_scale", F64)}, "x_scale", "of dtype float32, got float64"),
    ("gemv", {"weight_scale": value(torch.ones(5))}, "weight_scale", "per output row (6), got 5"),
    ("gemv", {"weight_scale": value(torch.ones(0))}, "weight_scale", "per output row (6), got 0"),
    ("gemm", {"x": lambda a: a["x"][0]}, "x", "with 2 dimensions, got shape [160]"),
    ("gemm", {"x": to("x", I32)}, "x", "of dtype int8, got int32"),
    ("gemm", {"x": lambda a: a["x"][:, :128]}, "weight", "(32 bytes a row), got 64"),
    ("gemm", {"x_scale": narrow("x_scale")}, "x_scale", "one element per token (3), got 2"),
    ("gemm", {"x_scale": noncontiguous("x_scale")}, "x_scale", "contiguous"),
    ("gemm", {"weight_scale": to("weight_scale", BF16)}, "weight_scale", "got bfloat16"),
    ("gemm", {"weight": narrow("weight")}, "weight", "whole 32-byte blocks"),
    ("linear", {"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
    ("linear", {"x": to("x", torch.int8)}, "x", FLOATS_TEXT + "int8"),
    ("linear", {"x": lambda a: a["x"][0, 0]}, "x", "at least 1 dimension"),
    ("linear", {"x": lambda a: a["x"][:, :0]}, "weight", "input features, got 0"),
    ("linear", {"x": lambda a: a["x"][:, :100]}, "weight", "packed for the 100 input features"),
    ("linear", {"weight": to("weight", torch.float32)}, "weight", "of dtype uint8, got float32"),
    ("linear", {"weight": lambda a: a["weight"][0]}, "weight", "with 2 dimensions"),
    ("linear", {"weight": lambda a: a["weight"].T.contiguous().T}, "weight", "contiguous"),
    ("linear", {"weight_scale": to("weight_scale", F16)}, "weight_scale", "got float16"),
    ("linear", {"weight_scale": value(torch.ones(7))}, "weight_scale", "per output row (6), got 7"),
    ("linear", {"bias": narrow("bias")}, "bias", "of shape [6], got [5]"),
    ("linear", {"bias": to("bias", I32)}, "bias", FLOATS_TEXT + "int32"),
    ("linear", {"bias": add_dim("bias")}, "bias", "of shape [6], got [1, 6]"),
    ("group_linear", {"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
    ("group_linear", {"x": lambda a: a["x"][:, :0]}, "weight", "input features, got 0"),
    ("group_linear", {"weight": to("weight", torch.int8)}, "weight", "of dtype uint8, got int8"),
    ("group_linear", {"weight_scale": to("weight_scale", F16)}, "weight_scale", "got float16"),
    ("group_linear", {"weight_scale": value(torch.ones(1))}, "weight_scale", "[6, 2], got [1]"),
    ("group_linear", {"weight_scale": narrow("weight_scale")}, "weight_scale", "got [6, 1]"),
    ("group_linear", {"weight_scale": noncontiguous("weight_scale")}, "weight_scale", "contiguous"),
    ("group_linear", {"bias": narrow("bias")}, "bias", "of shape [6], got [5]"),
    ("rms_norm", {"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
    ("rms_norm", {"x": lambda a: a["x"][0, 0]}, "x", "at least 1 dimension"),
    ("rms_norm", {"x": lambda a: a["x"][:, :0]}, "x", "at least one feature"),
    ("rms_norm", {"weight": narrow("weight")}, "weight", "of shape [160], got [159]"),
    ("rms_norm", {"weight": to("weight", I32)}, "weight", FLOATS_TEXT + "int32"),
    ("rms_norm", {"eps": value(-1e-5)}, "eps", "finite and not negative"),
    ("rms_norm", {"eps": value(float("nan"))}, "eps", "finite and not negative, got nan"),
    ("rms_norm", {"eps": value(float("inf"))}, "eps", "finite and not negative, got inf"),
    ("add_rms_norm", {"residual": narrow("residual", 0)}, "residual", "of the shape of x [3, 160]"),
    ("add_rms_norm", {"residual": to("residual", BF16)}, "residual", "of dtype float32"),
    ("add_rms_norm", {"weight": narrow("weight")}, "weight", "of shape [160], got [159]"),
    ("add_rms_norm", {"x": to("x", I32)}, "x", FLOATS_TEXT + "int32"),
    ("add_rms_norm", {"eps": value(-1.0)}, "eps", "finite and not negative"),
    (
        "relu2_mul", {"gate": to("gate", F16), "up": to("up", F16)},
        "gate", "65504 in healthy models), got float16",
    ),
    ("relu2_mul", {"gate": to("gate", I32)}, "gate", FLOATS_TEXT + "int32"),
    ("relu2_mul", {"up": to("up", BF16)}, "up", "of dtype float32, got bfloat16"),
    ("relu2_mul", {"up": narrow("up")}, "up", "of the shape of gate [3, 160], got [3, 159]"),
    ("relu2_mul", {"up": lambda a: a["up"][:1]}, "up", "of the shape of gate"),
    ("silu_and_mul", {"x": narrow("x")}, "x", "even last dimension (gate, then up), got 159"),
    ("silu_and_mul", {"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
    ("silu_and_mul", {"x": lambda a: a["x"][0, 0]}, "x", "at least 1 dimension"),
    ("rope_table", {"positions": to("positions", I32)}, "positions", "of dtype int64, got int32"),
    ("rope_table", {"positions": to("positions", F16)}, "positions", "got float16"),
    ("rope_table", {"head_dim": value(15)}, "head_dim", "even and positive, got 15"),
    ("rope_table", {"head_dim": value(0)}, "head_dim", "even and positive, got 0"),
    ("rope_table", {"head_dim": value(-2)}, "head_dim", "even and positive, got -2"),
    ("rope_table", {"theta": value(0.0)}, "theta", "finite and positive"),
    ("rope_table", {"theta": value(float("nan"))}, "theta", "finite and positive, got nan"),
    ("rope", {"x": lambda a: a["x"][..., :15]}, "x", "even head dimension, got 15"),
    ("rope", {"x": lambda a: a["x"][0, 0]}, "x", "at least 2 dimension"),
    ("rope", {"cos_sin": to("cos_sin", BF16)}, "cos_sin", "of dtype float32, got bfloat16"),
    ("rope", {"cos_sin": narrow("cos_sin", 0)}, "cos_sin", "of shape [3, 16], got [2, 16]"),
    ("rope", {"cos_sin": lambda a: a["cos_sin"][:, :8]}, "cos_sin", "of shape [3, 16], got [3, 8]"),
    ("rope", {"cos_sin": lambda a: a["cos_sin"][:1]}, "cos_sin", "of shape [3, 16], got [1, 16]"),
    ("qkv_forward", {"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
    ("qkv_forward", {"norm_weight": narrow("norm_weight")}, "norm_weight", "of shape [160]"),
    ("qkv_forward", {"k_weight": narrow("k_weight")}, "k_weight", "whole 32-byte blocks"),
    ("qkv_forward", {"v_weight": to("v_weight", torch.int8)}, "v_weight", "got int8"),
    ("qkv_forward", {"q_weight": noncontiguous("q_weight")}, "q_weight", "contiguous"),
    ("qkv_forward", {"k_scale": value(torch.ones(3))}, "k_scale", "per output row (4), got 3"),
    ("qkv_forward", {"v_scale": to("v_scale", F64)}, "v_scale", "of dtype float32, got float64"),
    ("qkv_forward", {"eps": value(float("nan"))}, "eps", "finite and not negative, got nan"),
    ("mlp_forward", {"activation": value("gelu")}, "activation", "'relu2' or 'silu', got 'gelu'"),
    ("mlp_forward", {"activation": value("")}, "activation", "'relu2' or 'silu', got ''"),
    ("mlp_forward", {"up_weight": narrow("up_weight", 0)}, "up_weight", "rows of gate_weight"),
    ("mlp_forward", {"gate_weight": narrow("gate_weight")}, "gate_weight", "32-byte blocks"),
    (
        "mlp_forward", {"down_weight": lambda a: a["down_weight"][:, :32].contiguous()},
        "down_weight", "packed for the 150 input features",
    ),
    ("mlp_forward", {"down_scale": value(torch.ones(9))}, "down_scale", "per output row (160)"),
    (
        "mlp_forward", {"sub_norm_weight": narrow("sub_norm_weight")},
        "sub_norm_weight", "of shape [150], got [149]",
    ),
    ("mlp_forward", {"norm_weight": to("norm_weight", F64)}, "norm_weight", FLOATS_TEXT),
    ("mlp_forward", {"eps": value(-0.5)}, "eps", "finite and not negative"),
    ("mlp_forward", {"x": to("x", torch.int8)}, "x", FLOATS_TEXT + "int8"),
    ("attention", {"query": to("query", F64)}, "query", FLOATS_TEXT + "float64"),
    ("attention", {"query": lambda a: a["query"][0]}, "query", "with 4 dimensions"),
    ("attention", {"query": lambda a: a["query"][..., :8]}, "query", "of shape [2, 3, 4, 16]"),
    ("attention", {"query": narrow("query", 0)}, "query", "of shape [2, 3, 4, 16]"),
    ("attention", {"query": narrow("query", 2)}, "query", "multiple of the cache's 2 heads, got 3"),
    ("attention", {"key_cache": to("key_cache", F16)}, "key_cache", "float32, bfloat16 or int8"),
    ("attention", {"key_scale": value(torch.ones(2, 2, 12))}, "key_scale", "to be left out"),
    ("attention int8", {"key_scale": value(None)}, "key_scale", "int8 caches, got none"),
    ("attention int8", {"value_scale": value(None)}, "value_scale", "int8 caches, got none"),
    ("attention int8", {"key_scale": to("key_scale", BF16)}, "key_scale", "of dtype float32"),
    ("attention int8", {"key_scale": narrow("key_scale")}, "key_scale", "of shape [2, 2, 12]"),
    ("attention int8", {"value_scale": noncontiguous("value_scale")}, "value_scale", "contiguous"),
    ("attention int8", {"value_cache": to("value_cache", F32)}, "value_cache", "of dtype int8"),
    ("attention int8", {"key_cache": to("key_cache", torch.uint8)}, "key_cache", "got uint8"),
    (
        "attention int8", {"value_scale": lambda a: a["key_scale"]},
        "value_scale", "in its own memory",
    ),
    (
        "attention int8",
        {"key_cache": wide_cache, "value_cache": wide_cache, "query": wide_query},
        "key_cache", "with heads of at most 512 features for int8, got 513",
    ),
    (
        "attention int8", {"start_positions": to("start_positions", I32)},
        "start_positions", "of dtype int64",
    ),
    ("attention int8", {"scale": value(float("nan"))}, "scale", "finite, got nan"),
    ("attention", {"value_cache": to("value_cache", BF16)}, "value_cache", "of dtype float32"),
    ("attention", {"value_cache": narrow("value_cache", 2)}, "value_cache", "shape of key_cache"),
    ("attention", {"key_cache": noncontiguous("key_cache")}, "key_cache", "contiguous"),
    ("attention", {"value_cache": noncontiguous("value_cache")}, "value_cache", "contiguous"),
    (
        "attention", {"start_positions": to("start_positions", I32)},
        "start_positions", "of dtype int64, got int32",
    ),
    ("attention", {"start_positions": narrow("start_positions")}, "start_positions", "shape [2]"),
    (
        "attention", {"start_positions": value(torch.tensor([0, 10]))},
        "start_positions", "in [0, 9] for 3 token(s) in a cache of length 12, got 10 for sequence",
    ),
    (
        "attention", {"start_positions": value(torch.tensor([-1, 0]))},
        "start_positions", "got -1 for sequence 0",
    ),
    (
        "attention", {"start_positions": value(torch.tensor([2**63 - 1, 0]))},
        "start_positions", "got 9223372036854775807 for sequence 0",
    ),
    ("attention", {"scale": value(float("nan"))}, "scale", "finite, got nan"),
    ("attention", {"scale": value(float("inf"))}, "scale", "finite, got inf"),
    ("kv_cache_update", {"key": to("key", F64)}, "key", FLOATS_TEXT + "float64"),
    ("kv_cache_update", {"value": to("value", BF16)}, "value", "of dtype float32, got bfloat16"),
    ("kv_cache_update", {"key": narrow("key", 2)}, "key", "[2, 3, 2, 8], got [2, 3, 1, 8]"),
    ("kv_cache_update", {"value": narrow("value", 1)}, "value", "of the shape of key"),
    ("kv_cache_update", {"key": lambda a: a["key"][0]}, "key", "with 4 dimensions"),
    ("kv_cache_update", {"key_cache": to("key_cache", F16)}, "key_cache", "bfloat16 or int8"),
    ("kv_cache_update int8", {"key": to("key", torch.int8)}, "key", FLOATS_TEXT + "int8"),
    ("kv_cache_update int8", {"value": to("value", BF16)}, "value", "of dtype float32"),
    ("kv_cache_update int8", {"key_cache": narrow("key_cache")}, "value_cache", "of the shape"),
    ("kv_cache_update int8", {"value_cache": to("value_cache", F32)}, "value_cache", "dtype int8"),
    (
        "kv_cache_update int8", {"start_positions": value(torch.tensor([7, 0]))},
        "start_positions", "in [0, 6]",
    ),
    ("kv_cache_update int8", {"value_scale": value(None)}, "value_scale", "caches, got none"),
    ("kv_cache_update int8", {"key_scale": add_dim("key_scale")}, "key_scale", "shape [2, 2, 9]"),
    ("kv_cache_update", {"key_cache": noncontiguous("key_cache")}, "key_cache", "contiguous"),
    ("kv_cache_update", {"value_cache": noncontiguous("value_cache")}, "value_cache", "contiguous"),
    (
        "kv_cache_update", {"value_cache": lambda a: a["key_cache"]},
        "value_cache", "in its own memory",
    ),
    (
        "kv_cache_update", {"value_cache": overlapping_caches},
        "value_cache", "in its own memory",
    ),
    ("kv_cache_update", {"key": key_inside_cache}, "key", "in its own memory"),
    (
        "kv_cache_update", {"start_positions": value(torch.tensor([7, 0]))},
        "start_positions", "in [0, 6] for 3 token(s) in a cache of length 9, got 7 for sequence 0",
    ),
    (
        "kv_cache_update", {"start_positions": value(torch.tensor([0, -1]))},
        "start_positions", "got -1 for sequence 1",
    ),
    ("lm_head", {"x": to("x", F64)}, "x", FLOATS_TEXT + "float64"),
    ("lm_head", {"x": lambda a: a["x"][0, 0]}, "x", "at least 1 dimension"),
    ("lm_head", {"weight": narrow("weight")}, "weight", "of shape [11, 160], got [11, 159]"),
    ("lm_head", {"weight": to("weight", F64)}, "weight", FLOATS_TEXT + "float64"),
    ("lm_head", {"weight": to("weight", torch.uint8)}, "weight", "with 3 dimensions"),
    ("lm_head", {"weight": to("weight", torch.int8)}, "scale", "with a quantised weight"),
    ("lm_head", {"weight": lambda a: a["weight"][0]}, "weight", "with 2 dimensions"),
    ("lm_head", {"weight": noncontiguous("weight")}, "weight", "contiguous"),
    ("lm_head", {"scale": value(torch.ones(11))}, "scale", "left out for a float weight"),
    ("lm_head", {"out_features": value(12)}, "out_features", "equal to the weight's rows 11"),
    ("lm_head int8", {"weight": narrow("weight")}, "weight", "of shape [11, 160], got [11, 159]"),
    ("lm_head int8", {"weight": add_dim("weight")}, "weight", "with 2 dimensions"),
    ("lm_head int8", {"weight": noncontiguous("weight")}, "weight", "contiguous"),
    ("lm_head int8", {"scale": value(None)}, "scale", "with a quantised weight"),
    ("lm_head int8", {"scale": to("scale", BF16)}, "scale", "of dtype float32, got bfloat16"),
    ("lm_head int8", {"scale": narrow("scale")}, "scale", "of shape [11], got [10]"),
    ("lm_head int8", {"scale": noncontiguous("scale")}, "scale", "contiguous"),
    ("lm_head int8", {"out_features": value(10)}, "out_features", "rows 11, got 10"),
    (
        "lm_head int8",
        {"x": value(torch.ones(1, 65537)), "weight": value(torch.ones(11, 65537).char())},
        "weight", "with 1 to 65536 features for a quantised head, got 65537",
    ),
    ("lm_head int4", {"weight": narrow("weight")}, "weight", "[1, 24, 64], got [1, 24, 63]"),
    ("lm_head int4", {"weight": narrow("weight", 1)}, "scale", "of the weight's 23 lines"),
    ("lm_head int4", {"weight": noncontiguous("weight")}, "weight", "contiguous"),
    ("lm_head int4", {"x": value(torch.ones(2, 128))}, "weight", "2 groups of 64 features for 128"),
    ("lm_head int4", {"x": value(torch.ones(2, 193))}, "weight", "4 groups of 64 features for 193"),
    ("lm_head int4", {"scale": value(None)}, "scale", "with a quantised weight"),
    ("lm_head int4", {"scale": to("scale", F16)}, "scale", "of dtype bfloat16, got float16"),
    ("lm_head int4", {"scale": narrow("scale")}, "scale", "of shape [1, 3, 16], got [1, 3, 15]"),
    ("lm_head int4", {"scale": narrow("scale", 1)}, "scale", "lines, got 2 groups"),
    ("lm_head int4", {"scale": lambda a: a["scale"][0]}, "scale", "with 3 dimensions"),
    ("lm_head int4", {"out_features": value(17)}, "out_features", "to fill 1 tiles of 16 rows"),
    ("lm_head int4", {"out_features": value(-1)}, "out_features", "tiles of 16 rows, got -1"),
    ("quantize_head", {"weight": to("weight", F64)}, "weight", FLOATS_TEXT + "float64"),
    ("quantize_head", {"weight": lambda a: a["weight"][0]}, "weight", "with 2 dimensions"),
    ("quantize_head", {"weight": lambda a: a["weight"][:, :0]}, "weight", "features"),
    ("quantize_head", {"weight": value(torch.ones(1, 65537))}, "weight", "got 65537"),
    ("quantize_head", {"weight": lambda a: a["weight"] / 0.0}, "weight", "finite, got a NaN"),
    (
        "quantize_head", {"weight": lambda a: a["weight"] / 0.0, "format": value("int8")},
        "weight", "finite, got a NaN or an infinity in row",
    ),
    ("quantize_head", {"format": value("int2")}, "format", '"int8" or "int4", got "int2"'),
    ("quantize_head", {"group_size": value(32)}, "group_size", "64 or 128, got 32"),
    ("embedding", {"ids": to("ids", I32)}, "ids", "of dtype int64, got int32"),
    ("embedding", {"ids": value(torch.tensor([0, 11]))}, "ids", "from 0 to 10, got 11"),
    ("embedding", {"ids": value(torch.tensor([-1]))}, "ids", "from 0 to 10, got -1"),
    ("embedding", {"weight": to("weight", F64)}, "weight", FLOATS_TEXT + "float64"),
    ("embedding", {"weight": noncontiguous("weight")}, "weight", "contiguous"),
    ("embedding", {"in_features": value(161)}, "weight", "[11, 161], got [11, 160]"),
    ("embedding", {"in_features": value(-1)}, "in_features", "at least 0, got -1"),
    ("embedding", {"out_features": value(10)}, "out_features", "rows 11, got 10"),
    ("embedding", {"scale": value(torch.ones(11))}, "scale", "left out for a float weight"),
    ("embedding int4", {"ids": value(torch.tensor([11]))}, "ids", "from 0 to 10, got 11"),
    ("embedding int4", {"in_features": value(0)}, "weight", "with 1 to 65536 features"),
    ("embedding int4", {"in_features": value(128)}, "weight", "for 128 features, got 3"),
    ("embedding int4", {"out_features": value(16 + 1)}, "out_features", "to fill 1 tiles"),
    ("embedding int4", {"scale": noncontiguous("scale")}, "scale", "contiguous"),
    ("embedding int4", {"weight": value(torch.ones(1, 24, 64))}, "weight", "with 2 dimensions"),
    ("_probe_read", {"buffer": to("buffer", I32)}, "buffer", "of dtype uint8, got int32"),
    ("_probe_read", {"buffer": lambda a: a["buffer"][::2]}, "buffer", "contiguous"),
    ("_probe_read", {"streams": value(3)}, "streams", "1, 2 or 4, got 3"),
    ("_probe_read", {"distance": value(-1)}, "distance", "from 0 to 65536 bytes, got -1"),
    ("_probe_int8_peak", {"iterations": value(-1)}, "iterations", "0 or more, got -1"),
    ("_probe_int8_peak", {"seed": to("seed", I32)}, "seed", "of dtype uint8, got int32"),
]  # fmt: skip
