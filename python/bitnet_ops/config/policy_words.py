"""Policies as one word: a kind, a colon, and keys with numbers, as in top_k:0.25,sinks=4.

It must not know what a policy is of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn, TypeAlias

MAX_INTEGER = 2**31 - 1
Number: TypeAlias = "int | float"


class Key(NamedTuple):
    """How a key's number is read, and which are good."""

    read: Callable[[str], Number]
    good: Callable[[Number], bool]
    expected: str
    required: bool = False


def share() -> Key:
    return Key(float, lambda x: 0 < x <= 1, "above 0 and at most 1", required=True)


def count(minimum: int, *, required: bool = False) -> Key:
    expected = f"an integer of at least {minimum}"
    return Key(int, lambda n: minimum <= n <= MAX_INTEGER, expected, required)


def keys_of(
    kind: str, rest: str, keys: Mapping[str, Key], fail: Callable[[str, object], NoReturn]
) -> tuple[tuple[str, Number], ...]:
    """The keys behind a kind's colon, ordered as `keys`; a bare first number is that of `kind`.

    `fail(expected, got)` raises.
    """
    first, *others = rest.split(",")
    words = [] if "=" in first else [(kind, first)]
    for word in others if "=" not in first else [first, *others]:
        name, _, value = word.partition("=")
        words.append((name.strip(), value))
    given: dict[str, Number] = {}
    for name, value in words:
        if name not in keys or name in given:
            fail(f"keys of {', '.join(keys)}, each once", repr(name))
        key = keys[name]
        try:
            number = key.read(value)
        except ValueError:
            number = -1
        if not key.good(number):
            fail(f"{name} {key.expected}", repr(value))
        given[name] = number
    for name, key in keys.items():
        if key.required and name not in given:
            fail(name, "nothing")
    if given.get("min_ratio", 0) > given.get("max_ratio", 0):
        fail("min_ratio at most max_ratio", given["min_ratio"])
    return tuple((name, given[name]) for name in keys if name in given)
