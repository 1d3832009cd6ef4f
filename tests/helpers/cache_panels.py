"""Pools of KV caches in panels: from rows and back, number by number."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from op_schema import named, positional
from op_values import KV_DTYPES, SCALED_KV_DTYPES, Arguments, Built, dtype_name

PANEL_DTYPES = (torch.bfloat16, torch.int8)


def panel_places(block_size: int, dim: int, itemsize: int, *, keys: bool) -> Tensor:
    """Where [position, feature] of a block and head lies in panels: [block_size, dim]."""
    word, p, i = 4 // itemsize, torch.arange(block_size)[:, None], torch.arange(dim)[None]
    panel, p = p // 16 * 16 * dim, p % 16
    if keys:
        return panel + (i // word * 16 + p) * word + i % word
    return panel + (p // word * dim + i) * word + p % word


def rows_of(a: SimpleNamespace) -> SimpleNamespace:
    """The same arguments with rows in the pools."""
    a = SimpleNamespace(**vars(a))
    if a.layout == "panels":
        a.key_pool, a.value_pool = (
            moved(pool, keys=k, into=False)
            for pool, k in ((a.key_pool, True), (a.value_pool, False))
        )
    return a


def moved(pool: Tensor, *, keys: bool, into: bool) -> Tensor:
    """[..., block_size, KV, D] between rows and panels; kv_heads before block_size in memory."""
    flat = pool.transpose(-3, -2).contiguous()
    block_size, dim = flat.shape[-2:]
    at = panel_places(block_size, dim, flat.itemsize, keys=keys).flatten()
    numbers = flat.flatten(-2)
    if not into:
        return numbers[..., at].view_as(flat).transpose(-3, -2)
    panels = torch.empty_like(numbers)
    panels[..., at] = numbers
    return panels.view_as(flat).transpose(-3, -2)


def in_panels(args: Arguments, pools: int) -> Arguments:
    """Arguments whose pools, from place `pools` on, hold rows, with the same in panels instead."""
    before, (keys, values), after = args[:pools], args[pools : pools + 2], args[pools + 2 :]
    pair = moved(keys, keys=True, into=True), moved(values, keys=False, into=True)
    scales = () if keys.dtype in SCALED_KV_DTYPES else (None, None)
    return (*before, *pair, *after, *scales, "panels")


def panel_samples(
    make: Callable[..., Arguments],
    pools: int,
    block_sizes: tuple[int, ...],
    head_dims: tuple[int, ...],
    **more: Any,
) -> Built:
    """What `make` gives with pools in panels, for every type and these sizes."""
    for size, dim, dtype in itertools.product(block_sizes, head_dims, PANEL_DTYPES):

        def sample(
            g: torch.Generator, size: int = size, dim: int = dim, dtype: torch.dtype = dtype
        ) -> Arguments:
            rows = make(g, block_size=size, head_dim=dim, cache_dtype=dtype, **more)
            return in_panels(rows, pools)

        yield f"panels_of_{dtype_name(dtype)}_{dim}_in_blocks_of_{size}", sample


def with_window(args: Arguments, window: int) -> Arguments:
    return positional("paged_attention", **{**named("paged_attention", args), "window": window})


def window_samples(make: Callable[..., Arguments], pools: int, **more: Any) -> Built:
    """What `make` gives with a sliding window, over every type in rows and in panels."""
    for dtype in KV_DTYPES:
        name = f"window_over_{dtype_name(dtype)}"
        yield name, lambda g, c=dtype: with_window(make(g, cache_dtype=c, **more), 66)
    for dtype in PANEL_DTYPES:
        name = f"window_over_panels_of_{dtype_name(dtype)}"
        yield name, lambda g, c=dtype: with_window(
            in_panels(make(g, cache_dtype=c, **more), pools), 21
        )  # fmt: skip
