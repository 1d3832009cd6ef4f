"""Builders of samples for the ops on activations, caches and heads; op_samples.py collects them.

One builder per op, in the order of the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from op_arguments import (
    attention_arguments,
    cache_arguments,
    decode_step_arguments,
    head_arguments,
    mlp_arguments,
    private_mlp_arguments,
    private_qkv_arguments,
    qkv_arguments,
    with_gaps,
)
from op_values import (
    ACTIVATIONS,
    CACHE_DTYPES,
    FLOATS,
    FORMATS,
    HEAD_FORMATS,
    KV_DTYPES,
    SCALED_KV_DTYPES,
    Arguments,
    Built,
    activations,
    dtype_name,
    gain,
    quantized_head,
    strided,
    transposed,
)


def _rms_norm() -> Built:
    for dtype in FLOATS:
        yield dtype_name(dtype), lambda g, d=dtype: (
            activations(g, 3, 70, dtype=d), gain(g, 70, d), 1e-5,
        )  # fmt: skip
    yield "bfloat16_float32_gain", lambda g: (
        activations(g, 3, 70, dtype=torch.bfloat16), gain(g, 70), 1e-5,
    )  # fmt: skip
    yield "vector", lambda g: (activations(g, 5), gain(g, 5), 1e-6)
    yield "leading_dims", lambda g: (activations(g, 2, 3, 64), gain(g, 64), 1e-5)
    yield "no_tokens", lambda g: (activations(g, 0, 64), gain(g, 64), 1e-5)
    yield "strided", lambda g: (strided(activations(g, 3, 64)), strided(gain(g, 64)), 1e-5)
    yield "zeros", lambda g: (torch.zeros(2, 20), gain(g, 20), 1e-5)


def _add_rms_norm() -> Built:
    for name, norm_arguments in _rms_norm():

        def arguments(
            g: torch.Generator, build: Callable[[torch.Generator], Arguments] = norm_arguments
        ) -> Arguments:
            x, weight, eps = build(g)
            return x, activations(g, *x.shape, dtype=x.dtype), weight, eps

        yield name, arguments


def _relu2_mul() -> Built:
    for dtype in ACTIVATIONS:
        yield dtype_name(dtype), lambda g, d=dtype: (
            activations(g, 3, 37, dtype=d) * 20, activations(g, 3, 37, dtype=d) * 30,
        )  # fmt: skip
    yield "vector", lambda g: (activations(g, 5), activations(g, 5))
    yield "leading_dims", lambda g: (activations(g, 2, 2, 9), activations(g, 2, 2, 9))
    yield "no_tokens", lambda g: (activations(g, 0, 8), activations(g, 0, 8))
    yield "strided", lambda g: (strided(activations(g, 3, 16)), transposed(activations(g, 3, 16)))


def _silu_and_mul() -> Built:
    for dtype in FLOATS:
        yield dtype_name(dtype), lambda g, d=dtype: (activations(g, 3, 74, dtype=d),)
    yield "vector", lambda g: (activations(g, 2),)
    yield "leading_dims", lambda g: (activations(g, 2, 3, 34),)
    yield "no_tokens", lambda g: (activations(g, 0, 8),)
    yield "strided", lambda g: (strided(activations(g, 3, 16)),)
    yield "wide_range", lambda g: (torch.randn(4, 66, generator=g) * 40,)


def _rope_table() -> Built:
    yield "vector", lambda g: (torch.arange(7), 16, 10000.0)
    yield "batch", lambda g: (torch.randint(0, 4096, (2, 5), generator=g), 128, 500000.0)
    yield "scalar", lambda g: (torch.tensor(100), 6, 10000.0)
    yield "none", lambda g: (torch.zeros(0, dtype=torch.int64), 8, 10000.0)
    yield "strided", lambda g: (torch.arange(20)[::3], 2, 1000042.0)


def _unit_table(g: torch.Generator, *shape: int) -> Tensor:
    angle = torch.rand(*shape[:-1], shape[-1] // 2, generator=g) * 6.28
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def _rope() -> Built:
    for dtype in FLOATS:
        yield dtype_name(dtype), lambda g, d=dtype: (
            activations(g, 3, 4, 32, dtype=d), _unit_table(g, 3, 32),
        )  # fmt: skip
    yield "batch", lambda g: (activations(g, 2, 3, 4, 6), _unit_table(g, 2, 3, 6))
    yield "one_token", lambda g: (activations(g, 5, 64), _unit_table(g, 64))
    yield "no_tokens", lambda g: (activations(g, 0, 4, 8), _unit_table(g, 0, 8))
    yield "view_of_qkv", lambda g: (
        activations(g, 3, 6 * 16)[:, 16:80].reshape(3, 4, 16), strided(_unit_table(g, 3, 16)),
    )  # fmt: skip


def _qkv_forward() -> Built:
    for dtype in FLOATS:
        yield (
            dtype_name(dtype),
            lambda g, d=dtype: qkv_arguments(g, activations(g, 3, 140, dtype=d), 140, d),
        )
    yield "vector", lambda g: qkv_arguments(g, activations(g, 64), 64, torch.float32)
    yield (
        "leading_dims",
        lambda g: qkv_arguments(
            g, activations(g, 2, 2, 64, dtype=torch.bfloat16), 64, torch.float32
        ),
    )
    yield "no_tokens", lambda g: qkv_arguments(g, activations(g, 0, 64), 64, torch.float32)
    yield "strided", lambda g: qkv_arguments(g, strided(activations(g, 2, 64)), 64, torch.float32)
    for fmt in FORMATS:
        yield f"private_{fmt}", lambda g, f=fmt: private_qkv_arguments(g, 140, f)


def _mlp_forward() -> Built:
    for dtype in FLOATS:
        for activation in ("relu2", "silu"):
            yield (
                f"{dtype_name(dtype)}_{activation}",
                lambda g, d=dtype, a=activation: mlp_arguments(
                    g, activations(g, 3, 140, dtype=d), a
                ),
            )
    yield "no_sub_norm", lambda g: mlp_arguments(g, activations(g, 2, 64), "silu", False)
    yield "vector", lambda g: mlp_arguments(g, activations(g, 64), "relu2")
    yield "leading_dims", lambda g: mlp_arguments(g, activations(g, 2, 2, 64), "relu2", False)
    yield "no_tokens", lambda g: mlp_arguments(g, activations(g, 0, 64), "relu2")
    yield "strided", lambda g: mlp_arguments(g, strided(activations(g, 2, 64)), "relu2")
    for fmt in FORMATS:
        yield f"private_{fmt}", lambda g, f=fmt: private_mlp_arguments(g, 140, 150, f)


def _attention() -> Built:
    for query in FLOATS:
        for cache in KV_DTYPES:
            yield (
                f"{dtype_name(query)}_over_{dtype_name(cache)}",
                lambda g, q=query, c=cache: attention_arguments(g, query_dtype=q, cache_dtype=c),
            )
    yield "decode", lambda g: attention_arguments(g, tokens=1)
    yield "decode_int8", lambda g: attention_arguments(
        g, batch=1, tokens=1, heads=8, length=150, head_dim=50, cache_dtype=torch.int8
    )  # fmt: skip
    yield "one_head", lambda g: attention_arguments(g, heads=1, kv_heads=1, head_dim=5)
    yield "group_of_four", lambda g: attention_arguments(g, heads=8, kv_heads=2, batch=1)
    yield "long", lambda g: attention_arguments(g, length=70, tokens=2, batch=1)
    yield "no_tokens", lambda g: attention_arguments(g, tokens=0)
    yield "no_batch", lambda g: attention_arguments(g, batch=0)
    yield "strided_query", lambda g: (
        lambda q, *rest: (strided(q), *rest)
    )(*attention_arguments(g))  # fmt: skip


def _kv_cache_update() -> Built:
    for dtype in FLOATS:
        for cache in CACHE_DTYPES:
            yield (
                f"{dtype_name(dtype)}_into_{dtype_name(cache)}",
                lambda g, d=dtype, c=cache: cache_arguments(g, dtype=d, cache_dtype=c),
            )
        for cache in SCALED_KV_DTYPES:
            yield (
                f"{dtype_name(dtype)}_into_{dtype_name(cache)}",
                lambda g, d=dtype, c=cache: cache_arguments(g, dtype=d, cache_dtype=c, head_dim=37),
            )
    yield "decode", lambda g: cache_arguments(g, tokens=1)
    yield "whole_cache", lambda g: cache_arguments(g, tokens=9)
    yield "no_tokens", lambda g: cache_arguments(g, tokens=0)
    yield "strided", lambda g: (
        lambda kc, vc, k, v, s: (kc, vc, strided(k), transposed(v), s)
    )(*cache_arguments(g))  # fmt: skip


def _quantize_head() -> Built:
    for dtype in FLOATS:
        for form, group in HEAD_FORMATS:
            yield f"{dtype_name(dtype)}_{form}_{group}", lambda g, d=dtype, f=form, n=group: (
                (torch.randn(37, 300, generator=g) * 0.1).to(d), f, n,
            )  # fmt: skip
    yield "default_group", lambda g: (torch.randn(3, 1, generator=g), "int4")
    yield "no_rows", lambda g: (torch.zeros(0, 9), "int8")
    yield "zeros", lambda g: (torch.zeros(2, 130), "int4", 64)
    yield "transposed", lambda g: (transposed(torch.randn(6, 130, generator=g)), "int8")


def _lm_head() -> Built:
    for x in FLOATS:
        for weight in FLOATS:
            yield f"{dtype_name(x)}_{dtype_name(weight)}", lambda g, x=x, w=weight: (
                activations(g, 2, 70, dtype=x), torch.randn(19, 70, generator=g).to(w),
            )  # fmt: skip
    yield "vector", lambda g: (activations(g, 33), torch.randn(5, 33, generator=g))
    yield "leading_dims", lambda g: (activations(g, 2, 3, 16), torch.randn(5, 16, generator=g))
    yield "no_tokens", lambda g: (activations(g, 0, 16), torch.randn(5, 16, generator=g))
    yield "strided", lambda g: (strided(activations(g, 2, 16)), torch.randn(5, 16, generator=g))

    for x in FLOATS:
        for form, group in HEAD_FORMATS:
            yield (
                f"{dtype_name(x)}_{form}_{group}",
                lambda g, x=x, f=form, n=group: head_arguments(
                    g, activations(g, 3, 300, dtype=x), 37, f, n
                ),
            )
    for form, group in HEAD_FORMATS:
        yield (
            f"no_tokens_{form}_{group}",
            lambda g, f=form, n=group: head_arguments(g, activations(g, 0, 16), 16, f, n),
        )
        yield (
            f"leading_dims_{form}_{group}",
            lambda g, f=form, n=group: head_arguments(
                g, strided(activations(g, 2, 3, 33)), 5, f, n
            ),
        )
    yield "no_out_features", lambda g: (
        activations(g, 2, 64), *quantized_head(g, 32, 64, "int4", 64),
    )  # fmt: skip


def _embedding() -> Built:
    for weight in FLOATS:
        yield dtype_name(weight), lambda g, w=weight: (
            torch.tensor([[3, 0], [18, 3]]), torch.randn(19, 70, generator=g).to(w),
        )  # fmt: skip
    for form, group in HEAD_FORMATS:
        yield f"{form}_{group}", lambda g, f=form, n=group: (
            torch.tensor([36, 0, 17, 36]), *quantized_head(g, 37, 300, f, n), 37, 300,
        )  # fmt: skip
    yield "scalar", lambda g: (torch.tensor(2), torch.randn(5, 7, generator=g))
    yield "no_ids", lambda g: (
        torch.zeros(2, 0, dtype=torch.int64), *quantized_head(g, 16, 64, "int4", 64),
    )  # fmt: skip
    yield "strided", lambda g: (torch.arange(6)[::2], *quantized_head(g, 7, 9, "int8", 128))


def _decode_step() -> Built:
    for dtype in ACTIVATIONS:
        for cache in KV_DTYPES:
            yield (
                f"{dtype_name(dtype)}_over_{dtype_name(cache)}",
                lambda g, d=dtype, c=cache: decode_step_arguments(g, dtype=d, cache_dtype=c),
            )
    yield "layers", lambda g: decode_step_arguments(g, layers=2, head=torch.bfloat16)
    for form, group in HEAD_FORMATS:
        yield (
            f"head_{form}_{group}",
            lambda g, f=form, n=group: decode_step_arguments(g, head=(f, n), tokens=2),
        )
    for form in FORMATS:
        yield form, lambda g, f=form: decode_step_arguments(g, weight_format=f)
    yield "silu", lambda g: decode_step_arguments(g, sub_norms=False, activation="silu")
    yield "several_tokens", lambda g: decode_step_arguments(g, tokens=3, batch=1)
    yield "last_logits", lambda g: decode_step_arguments(g, tokens=4, batch=2, logits_to_keep=2)
    yield "many_sequences", lambda g: decode_step_arguments(g, batch=5, heads=3, kv_heads=3)
    yield "no_layers", lambda g: decode_step_arguments(g, layers=0)
    yield "no_batch", lambda g: decode_step_arguments(g, batch=0)
    yield "gaps", lambda g: with_gaps(decode_step_arguments(g, layers=2))
    yield "strided", lambda g: (
        lambda x, *rest: (strided(x), *rest)
    )(*decode_step_arguments(g))  # fmt: skip


def _probe_read() -> Built:
    for n in (1, 4096, 10000):
        yield str(n), lambda g, n=n: (
            torch.randint(0, 256, (n,), generator=g, dtype=torch.uint8),
        )  # fmt: skip


def _probe_int8_peak() -> Built:
    yield "short", lambda g: (torch.ones(1, dtype=torch.uint8), 10)


BUILDERS: dict[str, Callable[[], Built]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "relu2_mul": _relu2_mul,
    "silu_and_mul": _silu_and_mul,
    "rope_table": _rope_table,
    "rope": _rope,
    "qkv_forward": _qkv_forward,
    "mlp_forward": _mlp_forward,
    "attention": _attention,
    "kv_cache_update": _kv_cache_update,
    "quantize_head": _quantize_head,
    "lm_head": _lm_head,
    "embedding": _embedding,
    "decode_step": _decode_step,
    "_probe_read": _probe_read,
    "_probe_int8_peak": _probe_int8_peak,
}
