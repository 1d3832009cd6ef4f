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
from programs import Sample, of

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
            for written, _ in tensors(args):
                if written[0] not in mutated(op):
                    continue
                for place, _ in tensors(args):
                    # the number that a handle is has been read before anything is written
                    if place != written and schema_of(op).arguments[place[0]].name != "program":
                        name = f"{op}-{str(dtype)[6:]}-{written}-{place}"
                        yield pytest.param(op, dtype, written, place, id=name)


@pytest.mark.parametrize(("op", "dtype", "written", "place"), list(pairs()))
@pytest.mark.sampled(60)
def test_a_mutated_argument_shares_memory_with_no_other(
    op: str, dtype: torch.dtype, written: Place, place: Place
) -> None:
    args = list(arguments_of(op, dtype))
    one = dict(tensors(tuple(args)))[written]
    other = dict(tensors(tuple(args)))[place]
    call = getattr(ops, op)
    apart = 64 * -(-max(one.nbytes, other.nbytes) // 64)

    memory = torch.zeros(2 * apart, dtype=torch.uint8)
    put(args, written, view_at(memory, 0, one))
    put(args, place, view_at(memory, one.nbytes // 2 // 64 * 64, other))
    before = memory.clone()
    with pytest.raises(RuntimeError, match=rf"^{op}: expected .*memory.*, got memory") as error:
        call(*args)
    assert torch.equal(memory, before), "written before the rejection"
    names = [argument.name for argument in schema_of(op).arguments]
    blamed = {names[written[0]], names[place[0]]}
    if "caches" in blamed:
        blamed |= {"key_pool", "value_pool", "key_scale", "value_scale"}
        blamed |= {"recurrent", "inputs", "kept"}
    assert re.search(rf"\b({'|'.join(blamed)}|a cache)\b", str(error.value))

    # Back to back is fine: no byte is shared.
    memory = torch.zeros(2 * apart, dtype=torch.uint8)
    end = one.nbytes if one.nbytes % 8 == 0 else apart
    put(args, written, view_at(memory, 0, one))
    put(args, place, view_at(memory, end, other))
    call(*args)


INDICES = {
    "start_positions", "positions", "slot_mapping", "query_start_loc", "seq_lens", "block_table",
    "logit_rows", "adapters", "state_steps",
}  # fmt: skip
INDICES_OF_OPS = [
    (op, argument.name)
    for op in MUTATING
    for argument in schema_of(op).arguments
    if argument.name in INDICES
]
NAMED_INDICES = ("positions", "slot_mapping", "query_start_loc", "seq_lens", "block_table")
INDICES_OF_OPS += [("run_program", name) for name in (*NAMED_INDICES, "logit_rows")]


@pytest.mark.parametrize(("op", "index"), INDICES_OF_OPS)
def test_positions_inside_a_cache_move_no_write(op: str, index: str) -> None:
    """The key that is written there is the bits of another, valid or wild, position."""
    args = list(arguments_of(op, torch.float32))
    names = [argument.name for argument in schema_of(op).arguments]
    caches = [t for (i, _), t in tensors(tuple(args)) if i in mutated(op)][:2]
    place: Place = (names.index(index), None) if index in names else named(args, names, index)
    given = dict(tensors(tuple(args)))[place]
    flat = caches[0].view(-1)[: 2 * given.numel()]
    caches[0].zero_()
    inside = flat.view(torch.int64).view(given.shape)
    inside.copy_(given)
    put(args, place, inside)
    before = [cache.clone() for cache in caches]
    with pytest.raises(RuntimeError, match=f"^{op}: expected {index} in its own memory"):
        getattr(ops, op)(*args)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache.view(torch.int32), old.view(torch.int32))  # -1 has the bits of NaN


def named(args: list[Any], names: list[str], index: str) -> Place:
    """The place of what `step_names` calls so in `step`."""
    return names.index("step"), args[names.index("step_names")].split("\n").index(index)


def test_every_mutating_op_has_indices() -> None:
    assert {op for op, _ in INDICES_OF_OPS} == set(MUTATING)


def test_what_a_program_reads_lies_outside_of_what_a_step_writes() -> None:
    memory = torch.zeros(2, 8, 4, 2, 16)
    arguments = list(arguments_of("model_step", torch.float32))
    sample = of(arguments[1])
    inside = memory[0].flatten()[:70].copy_(sample.tensors["L0.in.weight"])
    arguments[1] = Sample(sample.text, {**sample.tensors, "L0.in.weight": inside}).bind()
    arguments[2] = [memory[:1], memory[1:], *arguments[2][2:]]
    with pytest.raises(RuntimeError, match="expected L0.in.weight in its own memory, got memory"):
        ops.model_step(*arguments)


def test_heads_that_overflow_a_product_are_rejected() -> None:
    """heads * D = 8 modulo 2^64: the weights would fit, and the loops would not."""
    arguments = arguments_of("model_step", torch.float32)
    sample = of(arguments[1])
    text = sample.text.replace("heads=4", f"heads={2**61 + 1}").replace("kv_heads=2", "kv_heads=1")
    with pytest.raises(RuntimeError, match=r"^bind_program: expected key heads of line 3 .* got 2"):
        Sample(text, sample.tensors).bind()
