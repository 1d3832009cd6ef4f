"""Spec of a whole step of a model over pools of blocks: `decode_step` of every sequence alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from op_changes import F32, add_dim, to
from op_schema import bound, named, positional
from op_spec import Call, Named, Rejections, spec
from op_values import ACTIVATIONS, KV_DTYPES, Arguments, Built, dtype_name, strided
from ops_attention import OF_KV_TYPES, cache_memory
from ops_lora import LORA_REJECTIONS
from ops_model import EXTRAS, clear_of_ties, decode_step_arguments, step_bound
from ops_paged import POOLS, batch_of, paged, sequences

_SHARED = (
    "weights",
    "scales",
    "norm_weights",
    "head_weight",
    "head_scale",
    "dtype",
    "num_heads",
    "intermediate_size",
    "vocab_size",
    "sub_norms",
    "activation",
    "eps",
    "inv_freq",
    "attention_factor",
    "scale",
)
_EXTRAS = (
    "biases",
    "biased",
    "scale_sizes",
    "qk_norms",
    "sub_norm_eps",
    "linear_norm_eps",
    "lora_weights",
    "lora_ranks",
    "lora_scalings",
    "lora_indices",
    "grouped",
    "activation_format",
    "dropped_neurons",
    "post_norms",
    "local_inv_freq",
    "local_layers",
    "windows",
)


def model_step_arguments(
    g: torch.Generator,
    *,
    new: tuple[int, ...] = (1, 3, 2),
    lengths: tuple[int, ...] = (7, 3, 12),
    block_size: int = 4,
    logit_rows: tuple[int, ...] | None = (0, 3, 5),
    layers: int = 1,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int = 70,
    cache_dtype: torch.dtype = torch.float32,
    **sizes: Any,
) -> Arguments:
    """logit_rows None: every token."""
    given = named("decode_step", decode_step_arguments(
        g, layers=layers, batch=1, kv_heads=kv_heads, head_dim=head_dim, hidden=hidden, **sizes,
    ))  # fmt: skip
    table, blocks = paged(g, list(lengths), block_size)
    shape = (layers, blocks, block_size, kv_heads, head_dim)
    keys, key_scale = cache_memory(g, shape, cache_dtype)
    values, value_scale = cache_memory(g, shape, cache_dtype, 0.5)
    rows = range(sum(new)) if logit_rows is None else logit_rows
    return positional(
        "model_step",
        x=torch.randn(sum(new), hidden, generator=g),
        **{name: given[name] for name in _SHARED},
        key_pool=keys,
        value_pool=values,
        **batch_of(list(new), list(lengths), table, block_size),
        logit_rows=torch.tensor(list(rows), dtype=torch.int64),
        **dict(zip(("key_scale", "value_scale"), (*key_scale, *value_scale), strict=False)),
        **{name: given[name] for name in _EXTRAS if name in given},
    )


def model_step(o: Any, a: Any) -> Tensor:
    """float32 [r, vocab]: `decode_step` of every sequence on caches made of its blocks."""
    pools = [getattr(a, name) for name in POOLS]
    logits = [torch.empty(0, a.vocab_size)]
    for i, (tokens, length, slots) in enumerate(sequences(a)):
        new = tokens.stop - tokens.start
        if new == 0:
            continue
        caches = [gathered_layers(pool, slots) for pool in pools]
        logits += o.decode_step(
            a.x[tokens][None], a.weights, a.scales, a.norm_weights, a.head_weight, a.head_scale,
            *caches[:2], torch.tensor([length - new]), a.dtype, a.num_heads, a.intermediate_size,
            a.vocab_size, a.sub_norms, a.activation, a.eps, a.inv_freq, a.attention_factor,
            a.scale, 0, *caches[2:], a.biases, a.biased, a.scale_sizes, a.qk_norms, a.sub_norm_eps,
            a.linear_norm_eps, a.lora_weights, a.lora_ranks, a.lora_scalings,
            None if a.lora_indices is None else a.lora_indices[i : i + 1], a.grouped,
            a.activation_format, a.dropped_neurons, a.post_norms, a.local_inv_freq, a.local_layers,
            a.windows,
        )  # fmt: skip
        for pool, cache in zip(pools, caches, strict=True):
            if pool is not None:
                written = a.slot_mapping[tokens].long()
                size = pool.shape[2]
                pool[:, written // size, written % size] = cache[:, 0, :, length - new :].transpose(
                    1, 2
                )
    return torch.cat(logits)[a.logit_rows.long()]


def gathered_layers(pool: Tensor | None, slots: Tensor) -> Tensor | None:
    """[layers, blocks, block_size, KV, ...] -> [layers, 1, KV, slots, ...]."""
    if pool is None:
        return None
    size = pool.shape[2]
    return pool[:, slots // size, slots % size].transpose(1, 2).contiguous()[:, None]


def _model_step_bound(args: Arguments, expected: Tensor) -> Tensor:
    a = bound("model_step", args, {})
    length = int(a.seq_lens.max()) if len(a.seq_lens) else 0
    return step_bound(a, a.key_pool.shape[0], length, expected)


def _other_strides(args: Arguments) -> Arguments:
    """Pools with the memory of our own, heads before positions, behind a gap a layer."""
    given = named("model_step", args)
    for name in ("key_pool", "value_pool"):
        pool = given[name]
        memory = torch.zeros(pool.shape[0], pool.shape[1] + 1, *pool.transpose(2, 3).shape[2:])
        view = memory.to(pool.dtype)[:, :-1].transpose(2, 3)
        view.copy_(pool)
        given[name] = view
    return positional("model_step", **given)


def _model_step_samples() -> Built:
    for dtype in ACTIVATIONS:
        for cache in KV_DTYPES:
            yield (
                f"{dtype_name(dtype)}_over_{dtype_name(cache)}",
                clear_of_ties(
                    "model_step",
                    lambda g, d=dtype, c=cache: model_step_arguments(g, dtype=d, cache_dtype=c),
                    _model_step_bound,
                ),
            )
    yield "layers", lambda g: model_step_arguments(g, layers=2, head=torch.bfloat16)
    yield "head_int8", lambda g: model_step_arguments(g, head=("int8", 128))
    yield "2bit", lambda g: model_step_arguments(g, weight_format="2bit")
    yield "silu", lambda g: model_step_arguments(g, sub_norms=False, activation="silu")
    yield from (
        (name, lambda g, e=extras: model_step_arguments(g, layers=2, **e))
        for name, extras in EXTRAS.items()
    )
    for dtype in ACTIVATIONS:
        yield (
            f"adapters_{dtype_name(dtype)}",
            lambda g, d=dtype: model_step_arguments(
                g, new=(1, 3, 2, 1, 4), lengths=(7, 3, 12, 2, 4), logit_rows=(0, 3, 5, 6, 8),
                layers=2, adapters=(2, 0, -1, 2, 1), dtype=d, linear_norm_eps=1e-5,
            ),
        )  # fmt: skip
    yield "adapters_of_a_long_chunk", lambda g: model_step_arguments(
        g, new=(70, 1, 40), lengths=(130, 66, 40), block_size=16, logit_rows=(69, 70),
        adapters=(1, 0, 1), inner=300,
    )  # fmt: skip
    yield "all_logits", lambda g: model_step_arguments(g, logit_rows=None)
    yield "logits_in_any_order", lambda g: model_step_arguments(g, logit_rows=(5, 0, 1, 3, 2, 4))
    yield "logits_twice", lambda g: model_step_arguments(g, logit_rows=(4, 4))
    yield "no_logits", lambda g: model_step_arguments(g, logit_rows=())
    yield "long_chunk", lambda g: model_step_arguments(
        g, new=(70, 1), lengths=(130, 66), block_size=16, logit_rows=(69, 70)
    )  # fmt: skip
    yield "no_layers", lambda g: model_step_arguments(g, layers=0)
    yield "no_tokens", lambda g: model_step_arguments(g, new=(0,), lengths=(5,), logit_rows=())
    yield "no_sequences", lambda g: model_step_arguments(g, new=(), lengths=(), logit_rows=())
    yield "other_strides", lambda g: _other_strides(model_step_arguments(g, layers=2))
    yield "strided", lambda g: (
        lambda x, *rest: (strided(x), *rest)
    )(*model_step_arguments(g))  # fmt: skip


def _scales(a: Named) -> Tensor:
    return torch.ones(a["key_pool"].shape[:-1])


_INT8 = {
    "key_pool": to("key_pool", torch.int8), "value_pool": to("value_pool", torch.int8),
    "key_scale": _scales, "value_scale": _scales,
}  # fmt: skip
_MODEL_STEP_REJECTIONS: Rejections = [
    ({"x": lambda a: a["x"].double()}, "x", "of dtype float32, got float64"),
    ({"x": add_dim("x")}, "x", "with 2 dimensions"),
    ({"x": lambda a: a["x"][:, :0]}, "x", "at least one feature"),
    ({"x": lambda a: a["x"][:5]}, "positions", "of shape [5]"),
    ({"weights": lambda a: a["weights"][:-1]}, "weights", "each of the cache's 1 layers, got 6"),
    ({"scales": lambda a: a["scales"][:, :6]}, "scales", "of shape [1, 7]"),
    ({"norm_weights": lambda a: a["norm_weights"][1:]}, "norm_weights", "of shape [424]"),
    ({"sub_norms": lambda a: False}, "norm_weights", "of shape [210]"),
    ({"head_weight": lambda a: a["head_weight"].double()}, "head_weight", "float32"),
    ({"head_scale": lambda a: torch.ones(37)}, "head_scale", "left out"),
    ({"vocab_size": lambda a: 36}, "vocab_size", "the 37 rows of head_weight, got 36"),
    ({"key_pool": lambda a: a["key_pool"].double()}, "key_pool", OF_KV_TYPES + "float64"),
    ({"key_pool": lambda a: a["key_pool"][0]}, "key_pool", "with 5 dimensions"),
    ({"value_pool": lambda a: a["key_pool"]}, "value_pool", "in its own memory"),
    ({"value_pool": lambda a: a["value_pool"].bfloat16()}, "value_pool", "of dtype float32"),
    ({"positions": to("positions", F32)}, "positions", "of dtype int64 or int32"),
    ({"positions": lambda a: a["positions"] - 9}, "positions", "at least 0, got -3"),
    ({"slot_mapping": lambda a: a["slot_mapping"] * 0}, "slot_mapping", "got 0 twice"),
    ({"slot_mapping": lambda a: a["slot_mapping"] + 32}, "slot_mapping", "in [0, 32)"),
    ({"query_start_loc": lambda a: a["query_start_loc"] + 1}, "query_start_loc", "from 0 to"),
    ({"seq_lens": lambda a: a["seq_lens"] * 100}, "seq_lens", "the 32 positions of the pool"),
    ({"block_table": lambda a: a["block_table"] + 8}, "block_table", "of blocks in [0, 8)"),
    ({"logit_rows": lambda a: torch.tensor([0, 6])}, "logit_rows", "rows in [0, 6), got 6"),
    ({"logit_rows": lambda a: torch.tensor([-1, 3])}, "logit_rows", "rows in [0, 6), got -1"),
    ({"logit_rows": lambda a: torch.tensor([[3]])}, "logit_rows", "with 1 dimension"),
    ({"logit_rows": lambda a: torch.zeros(7).long()}, "logit_rows", "at most the 6 tokens of x"),
    ({"layout": lambda a: "tiles"}, "layout", '"rows" or "panels", got "tiles"'),
    ({"dtype": lambda a: torch.float16}, "dtype", "float32 or bfloat16, got float16"),
    ({"num_heads": lambda a: 3}, "num_heads", "a multiple of the cache's 2 heads, got 3"),
    ({"intermediate_size": lambda a: 149}, "weights (gate)", "149 rows"),
    ({"intermediate_size": lambda a: 0}, "intermediate_size", "positive"),
    ({"activation": lambda a: "gelu"}, "activation", "'relu2', 'silu' or 'gelu_pytorch_tanh', got"),
    ({"eps": lambda a: -1.0}, "eps", "finite and not negative"),
    ({"inv_freq": lambda a: a["inv_freq"][1:]}, "inv_freq", "of shape [8], got [7]"),
    ({"attention_factor": lambda a: -1.0}, "attention_factor", "finite and positive"),
    ({"scale": lambda a: torch.inf}, "scale", "finite"),
    ({"biased": lambda a: [0]}, "biases", "of dtype float32, got none"),
    ({"biased": lambda a: [7]}, "biased", "ascending places from 0 to 6, got 7"),
    ({"biases": lambda a: torch.zeros(1, 64)}, "biases", "left out where biased is empty"),
    ({"scale_sizes": lambda a: [1] * 6}, "scale_sizes", "empty or 7 numbers, got 6"),
    ({"grouped": lambda a: [7]}, "grouped", "ascending places from 0 to 6, got 7"),
    ({"activation_format": lambda a: "int8_group"}, "activation_format", "where grouped is empty"),
    ({"qk_norms": lambda a: True}, "norm_weights", "of shape [456], got [424]"),
    ({"sub_norm_eps": lambda a: -1.0}, "sub_norm_eps", "finite and not negative"),
    ({"linear_norm_eps": lambda a: -1.0}, "linear_norm_eps", "finite and not negative"),
    ({"dropped_neurons": lambda a: torch.zeros(3).long()}, "dropped_neurons", "with 2 dimensions"),
    ({"dropped_neurons": lambda a: torch.ones(1, 2)}, "norm_weights", "of shape [426], got [424]"),
    ({"post_norms": lambda a: True}, "norm_weights", "of shape [564], got [424]"),
    ({"local_layers": lambda a: [0]}, "local_layers", "empty without local_inv_freq, got 1"),
    ({"local_inv_freq": lambda a: torch.ones(8)}, "local_layers", "with local_inv_freq, got 0"),
    ({"windows": lambda a: [4, 4]}, "windows", "of 1 layers, or empty, got 2 windows"),
    ({"windows": lambda a: [-1]}, "windows", "at least 0 (none), got -1"),
    ({**_INT8, "key_scale": lambda a: None}, "key_scale", "with int8 caches, got none"),
    ({**_INT8, "value_scale": lambda a: a["key_scale"]}, "value_scale", "in its own memory"),
    ({**_INT8, "value_scale": lambda a: _scales(a)[:, 1:]}, "value_scale", "shape [1, 8, 4, 2]"),
]  # fmt: skip


def _step_call(g: torch.Generator, **sizes: Any) -> Named:
    return named("model_step", model_step_arguments(g, **sizes))


spec(
    model_step,
    composed=True,
    samples=_model_step_samples,
    large=[
        lambda g: model_step_arguments(
            g, new=(1, 40, 1), lengths=(300, 40, 1), block_size=64, layers=2, hidden=301, heads=6,
            kv_heads=2, head_dim=40, inner=517, vocab=1021, logit_rows=(0, 40, 41),
        ),
        lambda g: model_step_arguments(
            g, new=(2, 1, 3), lengths=(70, 200, 3), block_size=16, layers=2, hidden=301, heads=6,
            kv_heads=2, head_dim=40, inner=517, vocab=1021, dtype=torch.bfloat16,
            cache_dtype=torch.bfloat16,
        ),
    ],
    calls={
        "": Call(_step_call, _MODEL_STEP_REJECTIONS),
        "adapters": Call(
            lambda g, **s: _step_call(g, adapters=(0, -1, 2), **s),
            [*_MODEL_STEP_REJECTIONS, *LORA_REJECTIONS],
        ),
    },
    bound=_model_step_bound,
    mutates=frozenset(POOLS),
    overlapping=lambda g, dtype: model_step_arguments(g, cache_dtype=dtype, head=("int8", 128)),
    huge={"int4": lambda g: _step_call(g, head=("int4", 64))},
    list_lengths={"biased": 3, "scale_sizes": 7, "grouped": 3, "local_layers": 1, "windows": 1},
)  # fmt: skip
