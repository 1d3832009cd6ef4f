"""What an op mutates may share memory with nothing else that it is given.

Every pair of a mutated argument and another tensor, from the schemas: overlap is rejected
before a byte is written, neighbouring memory is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bitnet_ops import ops
from op_catalogue import SPECS
from op_values import Arguments

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8)
Place = tuple[int, int | None]  # index of an argument, and in it where it is a list


def arguments_of(op: str, cache_dtype: torch.dtype) -> Arguments:
    overlapping = SPECS[op].overlapping
    assert overlapping, f"the spec of {op}, which mutates, gives no arguments for this"
    return overlapping(torch.Generator().manual_seed(11), cache_dtype)


def schema_of(op: str) -> Any:
    return getattr(torch.ops.bitnet, op).default._schema


MUTATING = [name for name in ops.__all__ if schema_of(name).is_mutable]


def mutated(op: str) -> list[int]:
    return [
        index
        for index, argument in enumerate(schema_of(op).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def tensors(args: Arguments) -> Iterator[tuple[Place, Tensor]]:
    for index, arg in enumerate(args):
        if isinstance(arg, Tensor):
            yield (index, None), arg
        elif isinstance(arg, list):
            yield from (((index, i), part) for i, part in enumerate(arg))


def put(args: list[Any], place: Place, tensor: Tensor) -> None:
    index, part = place
    if part is None:
        args[index] = tensor
    else:
        args[index] = [*args[index][:part], tensor, *args[index][part + 1 :]]


def view_at(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    """`like`'s values in the bytes of `memory` from `offset` on."""
    view = memory[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
    return view.copy_(like)


def pairs() -> Iterator[Any]:
    for op in MUTATING:
        for dtype in DTYPES:
            args = arguments_of(op, dtype)
            for index in mutated(op):
                if index >= len(args) or args[index] is None:
                    continue
                for place, _ in tensors(args):
                    if place != (index, None):
                        name = f"{op}-{str(dtype)[6:]}-{index}-{place[0]}-{place[1]}"
                        yield pytest.param(op, dtype, index, place, id=name)


@pytest.mark.parametrize(("op", "dtype", "index", "place"), list(pairs()))
def test_a_mutated_argument_shares_memory_with_no_other(
    op: str, dtype: torch.dtype, index: int, place: Place
) -> None:
    args = list(arguments_of(op, dtype))
    one = args[index]
    other = dict(tensors(tuple(args)))[place]
    call = getattr(ops, op)
    apart = 64 * -(-max(one.nbytes, other.nbytes) // 64)

    memory = torch.zeros(2 * apart, dtype=torch.uint8)
    put(args, (index, None), view_at(memory, 0, one))
    put(args, place, view_at(memory, one.nbytes // 2 // 64 * 64, other))
    before = memory.clone()
    with pytest.raises(RuntimeError, match=rf"^{op}: expected .*memory.*, got memory") as error:
        call(*args)
    assert torch.equal(memory, before), "written before the rejection"
    names = [argument.name for argument in schema_of(op).arguments]
    assert re.search(rf"\b({names[index]}|{names[place[0]]}|a cache)\b", str(error.value))

    # Back to back is fine: no byte is shared.
    memory = torch.zeros(2 * apart, dtype=torch.uint8)
    end = one.nbytes if one.nbytes % 8 == 0 else apart
    put(args, (index, None), view_at(memory, 0, one))
    put(args, place, view_at(memory, end, other))
    call(*args)


INDICES = {
    "start_positions", "positions", "slot_mapping", "query_start_loc", "seq_lens", "block_table",
    "logit_rows",
}  # fmt: skip
INDICES_OF_OPS = [
    (op, argument.name)
    for op in MUTATING
    for argument in schema_of(op).arguments
    if argument.name in INDICES
]


@pytest.mark.parametrize(("op", "index"), INDICES_OF_OPS)
def test_positions_inside_a_cache_move_no_write(op: str, index: str) -> None:
    """The key that is written there is the bits of another, valid or wild, position."""
    args = list(arguments_of(op, torch.float32))
    names = [argument.name for argument in schema_of(op).arguments]
    cache = next(i for i, name in enumerate(names) if name in ("key_cache", "key_pool"))
    given = args[names.index(index)]
    flat = args[cache].view(-1)[: 2 * given.numel()]
    args[cache].zero_()
    inside = flat.view(torch.int64).view(given.shape)
    inside.copy_(given)
    args[names.index(index)] = inside
    before = args[cache].clone(), args[cache + 1].clone()
    with pytest.raises(RuntimeError, match=f"^{op}: expected {index} in its own memory"):
        getattr(ops, op)(*args)
    assert torch.equal(args[cache], before[0]) and torch.equal(args[cache + 1], before[1])


def test_every_mutating_op_has_indices() -> None:
    assert {op for op, _ in INDICES_OF_OPS} == set(MUTATING)


def test_heads_that_overflow_a_product_are_rejected() -> None:
    """heads * D = 8 modulo 2^64: the weights would fit, and the loops would not."""
    x, weight = torch.zeros(1, 1, 8), torch.full((8, 32), 0x55, dtype=torch.uint8)
    caches = [torch.zeros(1, 1, 1, 4, 8) for _ in "kv"]
    sizes = torch.float32, 2**61 + 1, 8, 5, False, "relu2", 1e-5
    rope = torch.ones(4), 1.0, 1.0
    start = torch.zeros(1, dtype=torch.int64)
    scales, norms = torch.ones(1, 7), torch.ones(24)
    rejected = r"^decode_step: expected num_heads with at most 524288 "
    with pytest.raises(RuntimeError, match=rejected):
        ops.decode_step(
            x, [weight] * 7, scales, norms, torch.zeros(5, 8), None, *caches, start, *sizes, *rope
        )
