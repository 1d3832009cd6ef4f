"""Single values of a config.json, each checked as it is read; what a rejection says.

It must not know what a value is for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bitnet_ops.errors import BitNetError


class UnsupportedModelError(BitNetError, ValueError):
    """A model that this package cannot run; the message names field, value and remedy."""


def reject(name: str, value: object, expected: str, remedy: str) -> UnsupportedModelError:
    """The error to raise for field `name`."""
    return UnsupportedModelError(f"config: expected {name} {expected}, got {value!r}; {remedy}")


MAX_LAYERS = 1 << 12  # the deepest published models have some hundred
MAX_HEAD_DIM = 1 << 16


def integer(
    config: Mapping[str, Any], name: str, default: int | None = None, maximum: int = 2**31 - 1
) -> int:
    """A positive integer; `maximum` bounds what is made of a number before a tensor proves it."""
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= maximum:
        limit = "" if maximum == 2**31 - 1 else f" of at most {maximum}"
        raise reject(name, value, f"to be a positive integer{limit}", "repair config.json")
    return value


def factor(config: Mapping[str, Any], name: str, default: float) -> float:
    """What a number is multiplied by or divided by: float32 holds it and its reciprocal."""
    value = positive(config, name, default)
    if not 1e-6 <= value <= 1e6:
        raise reject(name, value, "to be from 1e-6 to 1e6", "repair config.json")
    return value


def base(name: str, value: object) -> float:
    """Of a rotary embedding: its powers from 0 to -1 are numbers in float32."""
    theta = number(name, value)
    if not 1 <= theta <= 1e30:
        raise reject(name, theta, "to be from 1 to 1e30", "repair config.json")
    return theta


def positive(config: Mapping[str, Any], name: str, default: float) -> float:
    """A finite number above 0."""
    value = number(name, config.get(name, default))
    if not value > 0:
        raise reject(name, value, "to be finite and above 0", "repair config.json")
    return value


def number(name: str, value: object) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise reject(name, value, "to be a number", "repair config.json")
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise reject(name, value, "to be finite and above 0", "repair config.json")
    return value


def epsilon(config: Mapping[str, Any], name: str, default: float) -> float:
    """What a norm adds to a mean of squares; published models have 1e-5 and 1e-6."""
    value = positive(config, name, default)
    if not 1e-30 <= value <= 1:  # float32 has it, and it is not more than the squares
        raise reject(name, value, "to be from 1e-30 to 1", "repair config.json")
    return value


def flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """true or false."""
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise reject(name, value, "to be true or false", "repair config.json")
    return value
