"""Pools as other engines keep them in memory are written and read in place, through views.

The shapes are those of the engines' own allocations: SGLang's MHATokenToKVPool, vLLM's CPU backend
and its pools with keys beside values. Each holds what a plain cache holds and gives its result.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.nn.kv_pool import attend_rectangular

KV_HEADS, HEADS, DIM = 2, 6, 32
BLOCKS, BLOCK_SIZE = 40, 16

Pools = tuple[Tensor, Tensor, Tensor]  # memory, and the views of keys and values that ops take


def sglang_pages_of_one(dtype: torch.dtype) -> Pools:
    """Two tensors [slots + page_size, KV, D]; slot 0 is for padding; page_size 1."""
    memory = torch.zeros(2, BLOCKS * BLOCK_SIZE + 1, KV_HEADS, DIM, dtype=dtype)
    return memory, memory[0].unsqueeze(1), memory[1].unsqueeze(1)


def sglang_pages(dtype: torch.dtype) -> Pools:
    """The same with pages of 16."""
    memory = torch.zeros(2, (BLOCKS + 1) * BLOCK_SIZE, KV_HEADS, DIM, dtype=dtype)
    keys, values = (part.unflatten(0, (-1, BLOCK_SIZE)) for part in memory)
    return memory, keys, values


def vllm_cpu(dtype: torch.dtype) -> Pools:
    """[2, blocks, KV, block_size, D]."""
    memory = torch.zeros(2, BLOCKS, KV_HEADS, BLOCK_SIZE, DIM, dtype=dtype)
    return memory, memory[0].transpose(1, 2), memory[1].transpose(1, 2)


def vllm_keys_beside_values(dtype: torch.dtype) -> Pools:
    """[blocks, 2, block_size, KV, D]."""
    memory = torch.zeros(BLOCKS, 2, BLOCK_SIZE, KV_HEADS, DIM, dtype=dtype)
    return memory, memory[:, 0], memory[:, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "layout", [sglang_pages_of_one, sglang_pages, vllm_cpu, vllm_keys_beside_values]
)
def test_pools_of_other_engines_are_used_in_place(
    layout: Callable[[torch.dtype], Pools], dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(2)
    memory, keys, values = layout(dtype)
    size = keys.shape[1]
    lengths, new = [100, 7, 65], [1, 7, 3]
    columns = [-(-n // size) for n in lengths]
    blocks = torch.randperm(keys.shape[0] - 1, generator=g)[: sum(columns)] + 1
    table = torch.zeros(3, max(columns) + 5, dtype=torch.int32)
    for row, ids in zip(table, blocks.split(columns), strict=True):
        row[: len(ids)] = ids
    query = torch.randn(sum(new), HEADS, DIM, generator=g)
    expected, at = [], 0
    for s, (length, n) in enumerate(zip(lengths, new, strict=True)):
        key, value = (torch.randn(length, KV_HEADS, DIM, generator=g) for _ in "kv")
        p = torch.arange(length)
        ops.paged_cache_update(keys, values, key, value, table[s][p // size] * size + p % size)
        caches = [t.to(dtype).transpose(0, 1).contiguous()[None] for t in (key, value)]
        start = torch.tensor([length - n])
        expected.append(attend_rectangular(query[at : at + n][None], *caches, start, DIM**-0.5)[0])
        at += n
    assert memory.count_nonzero() > 2 * sum(lengths) * KV_HEADS * DIM * 0.99  # it lies there
    found = ops.paged_attention(
        query, keys, values, torch.tensor([0, 1, 8, 11]), torch.tensor(lengths), table, DIM**-0.5
    )
    assert torch.equal(found, torch.cat(expected))
