"""Specs of attention over pools of blocks, and of writing them.

Attention is that over rectangular caches of every sequence alone, gathered from its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cache_panels import PANEL_DTYPES, in_panels, moved, panel_samples, rows_of, window_samples
from op_changes import (
    BF16,
    F32,
    F64,
    FLOATS_TEXT,
    add_dim,
    narrow,
    noncontiguous,
    to,
    value,
)
from op_schema import bound, named, names, positional
from op_spec import Call, Named, Rejections, spec
from op_values import (
    CACHE_DTYPES,
    FLOATS,
    KV_DTYPES,
    SCALED_KV_DTYPES,
    Arguments,
    Built,
    dtype_name,
    strided,
    transposed,
)
from ops_attention import (
    OF_KV_TYPES,
    attention_bound,
    attention_by,
    cache_memory,
    kv_cache_update,
)

POOLS = ("key_pool", "value_pool", "key_scale", "value_scale")


def paged(
    g: torch.Generator, lengths: list[int], block_size: int, spare: int = 2
) -> tuple[Tensor, int]:
    """A table [n, columns] of blocks in random order, each in one place; and how many there are."""
    counts = [-(-length // block_size) for length in lengths]
    blocks = sum(counts) + spare
    order = torch.randperm(blocks, generator=g)
    table = torch.zeros(len(lengths), max(counts, default=0) + 1, dtype=torch.int64)
    for row, ids in zip(table, order.split([*counts, spare]), strict=False):
        row[: len(ids)] = ids
    return table, blocks


def batch_of(new: list[int], lengths: list[int], table: Tensor, block_size: int) -> dict[str, Any]:
    """The tensors that describe `new` tokens at the ends of sequences of these lengths."""
    positions = [torch.arange(n - k, n) for k, n in zip(new, lengths, strict=True)]
    slots = [
        row[p // block_size] * block_size + p % block_size
        for row, p in zip(table, positions, strict=True)
    ]
    empty = torch.zeros(0, dtype=torch.int64)
    return {
        "positions": torch.cat([empty, *positions]),
        "slot_mapping": torch.cat([empty, *slots]),
        "query_start_loc": torch.tensor([0, *new]).cumsum(0),
        "seq_lens": torch.tensor(lengths, dtype=torch.int64),
        "block_table": table,
    }


def sequences(a: SimpleNamespace) -> Iterator[tuple[slice, int, Tensor]]:
    """Per sequence: its tokens, its length, the slots of all its positions."""
    begins = a.query_start_loc.tolist()
    block_size = a.key_pool.shape[-3]
    for s, length in enumerate(a.seq_lens.tolist()):
        at = torch.arange(length)
        slots = a.block_table[s].long()[at // block_size] * block_size + at % block_size
        yield slice(begins[s], begins[s + 1]), length, slots


def gathered(pool: Tensor | None, slots: Tensor) -> Tensor | None:
    """[..., blocks, block_size, KV, D] -> [..., 1, KV, slots, D]; of scales likewise."""
    if pool is None:
        return None
    rows = pool.flatten(0, 1) if pool.dim() in (3, 4) else pool.flatten(1, 2)
    return rows[slots].transpose(0, 1).contiguous()[None]


# paged_attention ----------------------------------------------------------------------------------


def paged_attention_arguments(
    g: torch.Generator,
    *,
    new: tuple[int, ...] = (1, 3, 2),
    lengths: tuple[int, ...] = (7, 3, 12),
    block_size: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    query_dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32,
) -> Arguments:
    table, blocks = paged(g, list(lengths), block_size)
    shape = (blocks, block_size, kv_heads, head_dim)
    keys, key_scale = cache_memory(g, shape, cache_dtype)
    values, value_scale = cache_memory(g, shape, cache_dtype, 0.5)
    batch = batch_of(list(new), list(lengths), table, block_size)
    query = torch.randn(sum(new), heads, head_dim, generator=g).to(query_dtype)
    return (
        query, keys, values, batch["query_start_loc"], batch["seq_lens"], table, head_dim**-0.5,
        *key_scale, *value_scale,
    )  # fmt: skip


def _rectangular(a: SimpleNamespace) -> Iterator[tuple[slice, Arguments]]:
    """The arguments of `attention` for every sequence alone."""
    a = rows_of(a)
    for tokens, length, slots in sequences(a):
        pools = [gathered(getattr(a, name), slots) for name in POOLS]
        query = a.query[tokens][None]
        start = torch.tensor([length - query.shape[1]])
        yield tokens, (query, *pools[:2], start, a.scale, *pools[2:], a.window)


def paged_attention(o: Any, a: Any) -> Tensor:
    """F [tokens, H, D]: `attention` of every sequence."""
    out = torch.empty_like(a.query, memory_format=torch.contiguous_format)
    for tokens, arguments in _rectangular(a):
        out[tokens] = attention_by(o)(*arguments)[0]
    return out


def paged_attention_bound(args: Arguments, expected: Tensor) -> Tensor:
    a = bound("paged_attention", args, {})
    limits = torch.zeros(expected.shape, dtype=torch.float64)
    for tokens, arguments in _rectangular(a):
        if tokens.stop > tokens.start:
            limits[tokens] = attention_bound(arguments, expected[tokens][None])[0]
    return limits


def _in_another_order(args: Arguments, order: tuple[int, ...]) -> Arguments:
    """Pools whose memory has its dimensions in `order`, as other engines keep them."""
    back = sorted(range(4), key=order.__getitem__)
    query, *pools = args[:3]
    return (query, *(p.permute(order).contiguous().permute(back) for p in pools), *args[3:])


def _alternating(args: Arguments) -> Arguments:
    """Keys and values of a block side by side in one tensor [blocks, 2, ...]."""
    query, keys, values, *rest = args
    both = torch.stack([keys, values], dim=1)
    return (query, both[:, 0], both[:, 1], *rest)


def _narrow_indices(args: Arguments) -> Arguments:
    query, keys, values, *indices, scale = args
    return (query, keys, values, *(i.to(torch.int32) for i in indices), scale)


def _paged_attention_samples() -> Built:
    for query in FLOATS:
        for cache in KV_DTYPES:
            yield (
                f"{dtype_name(query)}_over_{dtype_name(cache)}",
                lambda g, q=query, c=cache: paged_attention_arguments(
                    g, query_dtype=q, cache_dtype=c
                ),
            )
    for size in (1, 3, 64, 100):
        yield f"blocks_of_{size}", lambda g, n=size: paged_attention_arguments(
            g, new=(1, 70), lengths=(65, 131), block_size=n
        )  # fmt: skip
        yield f"int8_blocks_of_{size}", lambda g, n=size: paged_attention_arguments(
            g, new=(1, 70), lengths=(65, 131), block_size=n, cache_dtype=torch.int8
        )  # fmt: skip
    yield from panel_samples(
        paged_attention_arguments, 1, (16, 64, 80), (16, 48, 128),
        new=(1, 70, 3), lengths=(65, 131, 30),
    )  # fmt: skip
    yield from window_samples(
        paged_attention_arguments, 1, new=(1, 70, 3), lengths=(165, 131, 30), block_size=16
    )
    yield "slots", lambda g: paged_attention_arguments(g, block_size=1, kv_heads=1, heads=1)
    yield "heads_outermost", lambda g: _in_another_order(
        paged_attention_arguments(g, new=(2, 70), lengths=(90, 71), block_size=64), (0, 2, 1, 3)
    )  # fmt: skip
    yield "positions_outermost", lambda g: _in_another_order(
        paged_attention_arguments(g), (1, 2, 0, 3)
    )  # fmt: skip
    yield "alternating", lambda g: _alternating(paged_attention_arguments(g))
    yield "int32_indices", lambda g: _narrow_indices(paged_attention_arguments(g))
    yield "one_head", lambda g: paged_attention_arguments(g, heads=1, kv_heads=1, head_dim=5)
    yield "group_of_four", lambda g: paged_attention_arguments(g, heads=8)
    yield "nothing_new", lambda g: paged_attention_arguments(g, new=(0, 2), lengths=(5, 9))
    yield "no_tokens", lambda g: paged_attention_arguments(g, new=(0, 0), lengths=(5, 0))
    yield "no_sequences", lambda g: paged_attention_arguments(g, new=(), lengths=())
    yield "strided_query", lambda g: (
        lambda q, *rest: (strided(q), *rest)
    )(*paged_attention_arguments(g))  # fmt: skip


def _overlapping_rows(a: Named) -> Tensor:
    blocks, size, heads, dim = a["key_pool"].shape
    return torch.zeros(blocks * size + heads * dim).as_strided(
        (blocks, size, heads, dim), (size, 1, dim, 1)
    )


_PAGED_ATTENTION_REJECTIONS: Rejections = [
    ({"query": to("query", F64)}, "query", FLOATS_TEXT + "float64"),
    ({"query": add_dim("query")}, "query", "with 3 dimensions"),
    ({"query": lambda a: a["query"][..., :8]}, "query", "of shape [6, 4, 16]"),
    ({"query": narrow("query", 1)}, "query", "multiple of the cache's 2 heads, got 3"),
    ({"key_pool": to("key_pool", F64)}, "key_pool", OF_KV_TYPES + "float64"),
    ({"key_pool": lambda a: a["key_pool"][0]}, "key_pool", "with 4 dimensions"),
    ({"key_pool": noncontiguous("key_pool")}, "key_pool", "contiguous in the last dimension"),
    ({"key_pool": _overlapping_rows}, "key_pool", "memory of its own for every element"),
    ({"key_scale": value(torch.ones(9, 4, 2))}, "key_scale", "to be left out"),
    ({"value_pool": to("value_pool", BF16)}, "value_pool", "of dtype float32"),
    ({"value_pool": narrow("value_pool", 0)}, "value_pool", "shape of key_pool"),
    ({"value_pool": noncontiguous("value_pool")}, "value_pool", "contiguous in the last"),
    ({"value_pool": _overlapping_rows}, "value_pool", "memory of its own for every element"),
    ({"value_pool": lambda a: a["key_pool"]}, "value_pool", "in its own memory"),
    (
        {"query_start_loc": to("query_start_loc", F32)},
        "query_start_loc", "of dtype int64 or int32, got float32",
    ),
    ({"query_start_loc": narrow("query_start_loc")}, "query_start_loc", "of shape [4]"),
    (
        {"query_start_loc": value(torch.tensor([0, 1, 4, 5]))},
        "query_start_loc", "from 0 to the number of tokens 6, got 0 to 5",
    ),
    (
        {"query_start_loc": value(torch.tensor([0, 4, 1, 6]))},
        "query_start_loc", "ascending, got -3 for sequence 1",
    ),
    ({"seq_lens": to("seq_lens", BF16)}, "seq_lens", "of dtype int64 or int32, got bfloat16"),
    ({"seq_lens": add_dim("seq_lens")}, "seq_lens", "with 1 dimension"),
    (
        {"seq_lens": value(torch.tensor([7, 2, 12]))},
        "seq_lens", "at least the 3 new tokens, got 2 for sequence 1",
    ),
    (
        {"seq_lens": value(torch.tensor([7, 3, 2**62]))},
        "block_table", "blocks of 4 positions for sequence 2 of length 4611686018427387904, got 4",
    ),
    (
        {"seq_lens": value(torch.tensor([7, 3, 17]))},
        "block_table", "at least 5 blocks of 4 positions for sequence 2 of length 17, got 4",
    ),
    ({"block_table": to("block_table", F32)}, "block_table", "of dtype int64 or int32"),
    ({"block_table": lambda a: a["block_table"][0]}, "block_table", "with 2 dimensions"),
    ({"block_table": narrow("block_table", 0)}, "block_table", "the 3 sequences of seq_lens"),
    (
        {"block_table": lambda a: a["block_table"] + 8},
        "block_table", "of blocks in [0, 8), got",
    ),
    ({"block_table": lambda a: a["block_table"] - 9}, "block_table", "of blocks in [0, 8), got -"),
    ({"scale": value(float("nan"))}, "scale", "finite, got nan"),
    ({"scale": value(float("inf"))}, "scale", "finite, got inf"),
    ({"layout": value("tiles")}, "layout", '"rows" or "panels", got "tiles"'),
    (
        {"layout": value("panels")},
        "layout", '"rows" unless the pool is bfloat16 or int8, got "panels" of float32',
    ),
    ({"window": value(-7)}, "window", "at least 0 (none), got -7"),
    ({"policy": value("window=-1")}, "policy", "key window of line 1 (policy) from 0"),
    ({"policy": value("top_k=.5")}, "key_bounds", "with a policy that chooses pages, got none"),
    ({"window": value(7), "policy": value("window=7")}, "window", "0 where policy says it, got 7"),
    ({"key_bounds": value(torch.ones(8, 1, 2, 32))}, "key_pool", "a multiple of 64 positions"),
]  # fmt: skip
_PANELS_REJECTIONS: Rejections = [
    (
        {name: lambda a, n=name: a[n][:, :8] for name in ("key_pool", "value_pool")},
        "key_pool", 'a multiple of 16 positions for layout "panels", got 8',
    ),
    (
        {
            **{name: lambda a, n=name: a[n][..., :8] for name in ("key_pool", "value_pool")},
            "query": lambda a: a["query"][..., :8],
        },
        "key_pool", 'a multiple of 16 features for layout "panels", got 8',
    ),
    (
        {"value_pool": lambda a: a["value_pool"].contiguous()},
        "value_pool", 'positions of a block side by side for layout "panels", got stride 32',
    ),
    ({"query_start_loc": narrow("query_start_loc")}, "query_start_loc", "of shape [4]"),
    ({"seq_lens": value(torch.tensor([7, 2, 12]))}, "seq_lens", "at least the 3 new"),
    ({"block_table": lambda a: a["block_table"] + 8}, "block_table", "of blocks in [0, 5)"),
    ({"scale": value(float("nan"))}, "scale", "finite, got nan"),
    ({"layout": value("tiles")}, "layout", '"rows" or "panels", got "tiles"'),
    ({"key_scale": value(torch.ones(8, 16, 2))}, "key_scale", ""),
    ({"value_scale": value(torch.ones(8, 16, 2))}, "value_scale", ""),
]  # fmt: skip
_PAGED_ATTENTION_INT8_REJECTIONS: Rejections = [
    ({"key_scale": value(None)}, "key_scale", "int8 caches, got none"),
    ({"value_scale": value(None)}, "value_scale", "int8 caches, got none"),
    ({"key_scale": to("key_scale", BF16)}, "key_scale", "of dtype float32"),
    ({"key_scale": narrow("key_scale")}, "key_scale", "of shape [8, 4, 2]"),
    ({"value_scale": lambda a: a["key_scale"]}, "value_scale", "in its own memory"),
    (
        {"value_scale": lambda a: torch.ones(1).expand(8, 4, 2)},
        "value_scale", "memory of its own for every element",
    ),
    (
        {
            **{n: lambda a: torch.zeros(8, 4, 2, 513).char() for n in ("key_pool", "value_pool")},
            "query": lambda a: torch.zeros(6, 4, 513),
        },
        "key_pool", "with heads of at most 512 features for int8, got 513",
    ),
    ({"query": to("query", F64)}, "query", FLOATS_TEXT),
    ({"key_pool": to("key_pool", torch.uint8)}, "key_pool", "got uint8"),
    ({"value_pool": to("value_pool", F32)}, "value_pool", "of dtype int8"),
    ({"query_start_loc": narrow("query_start_loc")}, "query_start_loc", "of shape [4]"),
    ({"seq_lens": value(torch.tensor([7, 2, 12]))}, "seq_lens", "at least the 3 new"),
    ({"block_table": lambda a: a["block_table"] + 8}, "block_table", "of blocks in [0, 8)"),
    ({"scale": value(float("nan"))}, "scale", "finite, got nan"),
]  # fmt: skip

spec(
    paged_attention,
    composed=True,
    samples=_paged_attention_samples,
    large=[
        lambda g: paged_attention_arguments(
            g, new=(1, 37, 1, 5), lengths=(700, 37, 1, 300), block_size=16, heads=6, kv_heads=2,
            head_dim=40,
        ),
        lambda g: paged_attention_arguments(
            g, new=(1, 1), lengths=(900, 20), block_size=64, heads=10, kv_heads=5, head_dim=64,
            cache_dtype=torch.bfloat16,
        ),
        lambda g: paged_attention_arguments(
            g, new=(1, 19), lengths=(500, 30), block_size=32, heads=10, kv_heads=5, head_dim=64,
            cache_dtype=torch.int8,
        ),
    ],
    calls={
        "": Call(
            lambda g: named("paged_attention", paged_attention_arguments(g)),
            _PAGED_ATTENTION_REJECTIONS,
        ),
        "panels": Call(
            lambda g: named(
                "paged_attention",
                in_panels(paged_attention_arguments(g, block_size=16, cache_dtype=BF16), 1),
            ),
            _PANELS_REJECTIONS,
        ),
        "int8": Call(
            lambda g: named(
                "paged_attention", paged_attention_arguments(g, cache_dtype=torch.int8)
            ),
            _PAGED_ATTENTION_INT8_REJECTIONS,
        ),
    },
    bound=paged_attention_bound,
    empty={
        "": lambda: (
            torch.empty(0, 1, 8), *(torch.empty(0, 2**40, 1, 8) for _ in "kv"),
            torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64),
            torch.zeros(0, 2**40, dtype=torch.int64), 1.0,
        ),
    },
)  # fmt: skip

# paged_cache_update -------------------------------------------------------------------------------


def paged_cache_arguments(
    g: torch.Generator,
    *,
    tokens: int = 5,
    blocks: int = 3,
    block_size: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32,
) -> Arguments:
    shape = (blocks, block_size, kv_heads, head_dim)
    pools, scales = zip(*(cache_memory(g, shape, cache_dtype) for _ in "kv"), strict=True)
    new = [torch.randn(tokens, kv_heads, head_dim, generator=g).to(dtype) for _ in "kv"]
    slots = torch.randperm(blocks * block_size, generator=g)[:tokens]
    return (*pools, *new, slots, *scales[0], *scales[1])


def paged_cache_update(
    key_pool: Tensor,
    value_pool: Tensor,
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    layout: str = "rows",
    key_bounds: Tensor | None = None,
) -> None:
    """Every slot as a cache of one position, written by `kv_cache_update`; then pages that end."""
    if layout == "panels":
        pools = (key_pool, True), (value_pool, False)
        rows = [moved(pool, keys=keys, into=False) for pool, keys in pools]
        paged_cache_update(*rows, key, value, slot_mapping, key_scale, value_scale)
        for (pool, keys), new in zip(pools, rows, strict=True):
            pool.copy_(moved(new, keys=keys, into=True))
        _bound(rows[0], slot_mapping, key_scale, key_bounds)
        return
    size = key_pool.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        at = slot // size, slot % size
        pools = [p[at][None, :, None] for p in (key_pool, value_pool)]
        scales = [None if s is None else s[at][None, :, None] for s in (key_scale, value_scale)]
        new = [t[token][None, None] for t in (key, value)]
        kv_cache_update(*pools, *new, torch.zeros(1, dtype=torch.int64), *scales)
    _bound(key_pool, slot_mapping, key_scale, key_bounds)


def _bound(keys: Tensor, slots: Tensor, scale: Tensor | None, bounds: Tensor | None) -> None:
    """The bounds of every page of 64 positions whose last one is among the slots."""
    for slot in slots.tolist() if bounds is not None else ():
        if slot % 64 != 63:
            continue
        block, at = slot // keys.shape[1], slot % keys.shape[1] // 64
        page = keys[block, at * 64 : at * 64 + 64].float()
        if scale is not None:
            page = page * scale[block, at * 64 : at * 64 + 64, :, None]
        for i, exact in enumerate((page.amax(0), -page.amin(0))):
            near = exact.bfloat16()
            above = torch.nextafter(near, torch.tensor(torch.inf, dtype=BF16))
            near = torch.where(near.float() < exact, above, near)
            half = bounds[block, at].unflatten(-1, (2, -1))[:, i]
            half.copy_(near if i == 0 else -near)


def _bounded_arguments(g: torch.Generator, cache_dtype: torch.dtype, panels: bool) -> Arguments:
    """Of two blocks of two pages, all of whose positions are written."""
    sizes: dict[str, Any] = {"tokens": 256, "blocks": 2, "block_size": 128, "head_dim": 16}
    args = paged_cache_arguments(g, cache_dtype=cache_dtype, **sizes)
    args = in_panels(args, 0) if panels else args
    more = dict(zip(names("paged_cache_update"), args, strict=False))
    return positional("paged_cache_update", **more, key_bounds=torch.zeros(2, 2, 2, 32, dtype=BF16))


def _paged_cache_samples() -> Built:
    for dtype in FLOATS:
        for cache in (*CACHE_DTYPES, *SCALED_KV_DTYPES):
            yield (
                f"{dtype_name(dtype)}_into_{dtype_name(cache)}",
                lambda g, d=dtype, c=cache: paged_cache_arguments(g, dtype=d, cache_dtype=c),
            )
    yield from panel_samples(paged_cache_arguments, 0, (16, 48), (16, 80, 512), tokens=20)
    yield "whole_pool", lambda g: paged_cache_arguments(g, tokens=12)
    yield "no_tokens", lambda g: paged_cache_arguments(g, tokens=0)
    yield "slots", lambda g: paged_cache_arguments(g, blocks=12, block_size=1)
    yield "int32_slots", lambda g: (
        lambda kc, vc, k, v, s: (kc, vc, k, v, s.to(torch.int32))
    )(*paged_cache_arguments(g))  # fmt: skip
    yield "strided", lambda g: (
        lambda kc, vc, k, v, s: (kc, vc, strided(k), transposed(v), s)
    )(*paged_cache_arguments(g))  # fmt: skip
    for cache in KV_DTYPES:
        yield (
            f"bounds_of_{dtype_name(cache)}",
            lambda g, c=cache: _bounded_arguments(g, c, panels=False),
        )
    for cache in PANEL_DTYPES:
        yield (
            f"bounds_of_panels_of_{dtype_name(cache)}",
            lambda g, c=cache: _bounded_arguments(g, c, panels=True),
        )


_PAGED_CACHE_REJECTIONS: Rejections = [
    ({"layout": value("tiles")}, "layout", '"rows" or "panels", got "tiles"'),
    ({"key": to("key", F64)}, "key", FLOATS_TEXT + "float64"),
    ({"value": to("value", BF16)}, "value", "of dtype float32, got bfloat16"),
    ({"key": narrow("key", 1)}, "key", "[5, 2, 8], got [5, 1, 8]"),
    ({"value": narrow("value", 0)}, "value", "of the shape of key"),
    ({"key": add_dim("key")}, "key", "with 3 dimensions"),
    ({"key_pool": to("key_pool", F64)}, "key_pool", OF_KV_TYPES + "float64"),
    ({"key_pool": lambda a: torch.zeros(3, 0, 2, 8)}, "value_pool", "of the shape of key_pool"),
    (
        {name: lambda a: torch.zeros(3, 0, 2, 8) for name in ("key_pool", "value_pool")},
        "key_pool", "blocks of at least one position",
    ),
    ({"value_pool": lambda a: a["key_pool"]}, "value_pool", "in its own memory"),
    ({"key": lambda a: a["key_pool"].flatten(0, 1)[2:7]}, "key", "in its own memory"),
    ({"slot_mapping": to("slot_mapping", F32)}, "slot_mapping", "of dtype int64 or int32"),
    ({"slot_mapping": narrow("slot_mapping")}, "slot_mapping", "of shape [5]"),
    (
        {"slot_mapping": value(torch.tensor([0, 1, 2, 3, 12]))},
        "slot_mapping", "of slots in [0, 12), got 12",
    ),
    (
        {"slot_mapping": value(torch.tensor([0, 1, 2, 3, -1]))},
        "slot_mapping", "of slots in [0, 12), got -1",
    ),
    (
        {"slot_mapping": value(torch.tensor([0, 7, 2, 7, 1]))},
        "slot_mapping", "of different slots, got 7 twice",
    ),
    ({"key_bounds": value(torch.ones(3, 1, 2, 16))}, "key_pool", "a multiple of 64 positions"),
]  # fmt: skip
_PAGED_CACHE_INT8_REJECTIONS: Rejections = [
    ({"key": to("key", torch.int8)}, "key", FLOATS_TEXT + "int8"),
    ({"value": to("value", BF16)}, "value", "of dtype float32"),
    ({"key_pool": narrow("key_pool", 0)}, "value_pool", "of the shape"),
    ({"key_pool": to("key_pool", F64)}, "key_pool", OF_KV_TYPES + "float64"),
    ({"value_pool": to("value_pool", F32)}, "value_pool", "dtype int8"),
    ({"slot_mapping": value(torch.tensor([0, 7, 2, 7, 1]))}, "slot_mapping", "got 7 twice"),
    ({"value_scale": value(None)}, "value_scale", "caches, got none"),
    ({"key_scale": add_dim("key_scale")}, "key_scale", "shape [3, 4, 2]"),
]  # fmt: skip
spec(
    paged_cache_update,
    samples=_paged_cache_samples,
    large=[
        lambda g: paged_cache_arguments(
            g, tokens=120, blocks=9, block_size=16, kv_heads=4, head_dim=40,
            cache_dtype=torch.bfloat16,
        ),
    ],
    calls={
        "": Call(
            lambda g: named("paged_cache_update", paged_cache_arguments(g)), _PAGED_CACHE_REJECTIONS
        ),
        "int8": Call(
            lambda g: named("paged_cache_update", paged_cache_arguments(g, cache_dtype=torch.int8)),
            _PAGED_CACHE_INT8_REJECTIONS,
        ),
    },
    mutates=frozenset((*POOLS, "key_bounds")),
    overlapping=lambda g, dtype: paged_cache_arguments(g, cache_dtype=dtype),
    empty={
        "": lambda: (
            *(torch.empty(1, 1, 2**40, 0) for _ in "kv"),
            *(torch.empty(1, 2**40, 0) for _ in "kv"), torch.zeros(1, dtype=torch.int64),
        ),
    },
)  # fmt: skip
