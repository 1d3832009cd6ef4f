"""Attention policies: which of the earlier positions the tokens of a layer attend to.

    window:256,sinks=4              the last 256 positions, and the first 4
    window:256,sinks=4@0-13         layers 0 to 13 alone
    window:256@0-13;window:1024@14-27
    top_k:0.25,sinks=4              of the pages of 64 positions the best quarter
    threshold:0.01                  those that may weigh a hundredth of the best
    dynamic:min_ratio=0.1,max_ratio=0.5     few where few stand out, more where all are alike

A policy is a row of KINDS, and its keys are those of an attention block of a program
(docs/reference/program.md). Without layers it is that of every layer with attention to all
positions. It must not know torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from bitnet_ops.errors import BitNetError

_MOST = 2**31 - 1


class AttentionPolicyError(BitNetError, ValueError):
    """A policy that is none, or that a model cannot follow; the message says which part."""


Number: TypeAlias = "int | float"


class _Key(NamedTuple):
    read: Callable[[str], Number]
    good: Callable[[Number], bool]
    expected: str
    required: bool = False


def _share() -> _Key:
    return _Key(float, lambda x: 0 < x <= 1, "above 0 and at most 1", required=True)


def _count(least: int, *, required: bool = False) -> _Key:
    return _Key(int, lambda n: least <= n <= _MOST, f"an integer of at least {least}", required)


# what all have that choose pages; dense_below: positions up to which tokens read all
_PAGES = {"sinks": _count(0), "dense_below": _count(0)}

# kind -> its keys; the value behind the colon is the key of the kind's name
KINDS: dict[str, dict[str, _Key]] = {
    "window": {"window": _count(1, required=True), "sinks": _count(0), "stride": _count(0)},
    "top_k": {"top_k": _share(), **_PAGES},
    "threshold": {"threshold": _share(), **_PAGES},
    "dynamic": {"min_ratio": _share(), "max_ratio": _share(), **_PAGES},
}
# Of the earlier systems, by the names that they had.
PRESETS = {
    "window_256": "window:256,sinks=4",
    "top_k_128": "top_k:0.25,sinks=4",
    "dynamic": "dynamic:min_ratio=0.1,max_ratio=0.5,sinks=4",
}
POLICY_KEYS = tuple(dict.fromkeys(key for keys in KINDS.values() for key in keys))


@dataclass(frozen=True)
class AttentionPolicy:
    """What the tokens of one layer attend to; `keys`: those of a program's line, in their order."""

    kind: str
    keys: tuple[tuple[str, Number], ...]

    def __str__(self) -> str:
        """As a program's line says it."""
        return " ".join(f"{key}={value}" for key, value in self.keys)

    def get(self, key: str) -> Number:
        return dict(self.keys).get(key, 0)

    @property
    def chooses(self) -> bool:
        """Whether its tokens choose pages by bounds of keys."""
        return self.kind != "window"

    def unread(self, position: int) -> tuple[int, int]:
        """Positions [begin, end) that no token from `position` on reads; begin = end: none."""
        if self.kind != "window" or self.get("stride"):
            return 0, 0
        sinks = int(self.get("sinks"))
        return sinks, max(sinks, position - int(self.get("window")) + 1)


def read_policies(
    text: str, layers: int, own: Callable[[int], str | None]
) -> tuple[AttentionPolicy | None, ...]:
    """The policy of each of `layers` layers; None: all positions.

    `own`: what a layer does that no policy changes ("is Gated DeltaNet"), None: it attends to all
    positions. Raises AttentionPolicyError for anything that is not clear.
    """
    if not isinstance(text, str):
        raise _error("a policy as text", f"a {type(text).__name__}")
    found: list[AttentionPolicy | None] = [None] * layers
    taken = [False] * layers
    for part in PRESETS.get(text.strip(), text).split(";"):
        words, at, where = part.strip().partition("@")
        policy = _policy(words)
        named = [*_numbers(where, layers)] if at else [i for i in range(layers) if own(i) is None]
        if not named:
            raise _error("a model with a layer that attends to all positions", own(0))
        for layer in named:
            if (reason := own(layer)) is not None:
                raise _error("layers that attend to all positions", f"{layer}, which {reason}")
            if taken[layer]:
                raise _error("one policy a layer", f"two for layer {layer}")
            found[layer], taken[layer] = policy, True
    return tuple(found)


def _policy(text: str) -> AttentionPolicy:
    kind, colon, rest = text.partition(":")
    keys = KINDS.get(kind)
    if keys is None or not colon:
        known = ", ".join(f"{name}:..." for name in KINDS)
        raise _error(f"one of {known} or a preset ({', '.join(PRESETS)})", repr(text))
    first, *others = rest.split(",")
    words = [*([] if "=" in first else [(kind, first)])]
    for word in others if "=" not in first else [first, *others]:
        name, _, value = word.partition("=")
        words.append((name.strip(), value))
    given: dict[str, Number] = {}
    for name, value in words:
        if name not in keys or name in given:
            raise _error(f"keys of {', '.join(keys)}, each once", repr(name))
        key = keys[name]
        try:
            number = key.read(value)
        except ValueError:
            number = -1
        if not key.good(number):
            raise _error(f"{name} {key.expected}", repr(value))
        given[name] = number
    for name, key in keys.items():
        if key.required and name not in given:
            raise _error(name, "nothing")
    if given.get("min_ratio", 0) > given.get("max_ratio", 0):
        raise _error("min_ratio at most max_ratio", given["min_ratio"])
    zero = ("dense_below",)  # means something
    kept = [name for name in keys if given.get(name) or (name in given and name in zero)]
    return AttentionPolicy(kind, tuple((name, given[name]) for name in kept))


def _numbers(text: str, layers: int) -> Iterator[int]:
    """The layers that `0-3,7` names."""
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise _error("layers as 0-3,7", repr(text))
        end = int(last if dash else first)
        if not int(first) <= end < layers:
            raise _error(f"layers from 0 to {layers - 1}", repr(word))
        yield from range(int(first), end + 1)


def _error(expected: str, got: object) -> AttentionPolicyError:
    return AttentionPolicyError(
        f"attention: expected {expected}, got {got}; a policy is such as window:256,sinks=4"
    )
