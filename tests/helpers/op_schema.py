"""What torch's registry says of the ops: names, order and defaults of arguments, what is mutated.

Tests and their references take argument lists from here, so that they stand in the schema alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import bitnet_ops.ops  # noqa: F401  (registers torch.ops.bitnet)

SCHEMAS: dict[str, torch.FunctionSchema] = {
    schema.name.removeprefix("bitnet::"): schema
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("bitnet::")
}
MUTATED: dict[str, tuple[int, ...]] = {
    op: tuple(i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write)
    for op, schema in SCHEMAS.items()
}


def names(op: str) -> list[str]:
    return [argument.name for argument in SCHEMAS[op].arguments]


def defaults(op: str) -> dict[str, Any]:
    # A default list cannot be changed by accident where it is written as a tuple.
    found = {a.name: a.default_value for a in SCHEMAS[op].arguments if a.has_default_value()}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}


def named(op: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments that `args` gives, by name."""
    return dict(zip(names(op), args, strict=False))


def positional(op: str, **arguments: Any) -> tuple[Any, ...]:
    """`arguments` in the order of the schema, up to the last one that is given."""
    last = max(names(op).index(name) for name in arguments) + 1
    given = {**defaults(op), **arguments}
    return tuple(given[name] for name in names(op)[:last])


def bound(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SimpleNamespace:
    """Every argument of a call, defaults included."""
    return SimpleNamespace(**{**defaults(op), **named(op, args), **kwargs})
