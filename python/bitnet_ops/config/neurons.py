"""Neurons of an MLP that a model file leaves out, because their gate and up rows are all zero.

Such a neuron is zero whatever the token, so its weights need not be read; but the norms in front of
down take a mean over all neurons, so the file goes on saying how many there are and which of them
have no weights. It must not know tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bitnet_ops.config.values import reject

KEY = "dropped_neurons"  # of the private block: a list, of each layer one where they differ
WHOLE_DOWN = "whole_down"  # likewise: whether down has columns for them all the same
Dropped = tuple[tuple[int, ...], ...]


def read_dropped(found: Mapping[str, Any], layers: int, width: int) -> Dropped:
    """Of each layer the ascending places of its dropped neurons among `width`; () for none."""
    value = found.get(KEY)
    if value is None:
        return ()
    lists = value if isinstance(value, list) else [value]
    if not lists or not isinstance(lists[0], list):
        lists = [lists] * layers
    if len(lists) != layers or len({len(one) for one in lists if isinstance(one, list)}) != 1:
        raise _wrong(value, f"{layers} lists of one length, one a layer, or one list for all")
    checked: dict[int, tuple[int, ...]] = {}  # one list may stand for all layers
    return tuple(checked.setdefault(id(one), _places(one, value, width)) for one in lists)


def read_whole_down(found: Mapping[str, Any]) -> bool:
    """Whether down has columns for the dropped neurons."""
    value = found.get(WHOLE_DOWN, False)
    if type(value) is not bool or (value and not found.get(KEY)):
        expected = f"to be true or false, and true beside {KEY} alone"
        raise reject(f"bitnet_ops.{WHOLE_DOWN}", str(value)[:60], expected, "convert it again")
    return value


def _places(one: object, value: object, width: int) -> tuple[int, ...]:
    expected = f"ascending numbers below intermediate_size {width}, fewer than that"
    if not isinstance(one, list) or not all(type(place) is int for place in one):
        raise _wrong(value, expected)
    ascending = all(a < b for a, b in zip([-1, *one], [*one, width], strict=True))
    if not one or not ascending or len(one) >= width:
        raise _wrong(value, expected)
    return tuple(one)


def _wrong(value: object, expected: str) -> Exception:
    return reject(f"bitnet_ops.{KEY}", str(value)[:60], f"to be {expected}", "convert it again")


def as_json(dropped: Dropped) -> list[Any]:
    """What the private block says: one list where all layers drop the same neurons."""
    if len(set(dropped)) == 1:
        return list(dropped[0])
    return [list(one) for one in dropped]


def kept(dropped: Sequence[int], width: int) -> list[int]:
    """The places of the neurons that have weights, ascending."""
    gone = set(dropped)
    return [place for place in range(width) if place not in gone]
