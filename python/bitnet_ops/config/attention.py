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
from typing import NoReturn

from bitnet_ops.config.policy_words import Key, Number, count, keys_of, share
from bitnet_ops.errors import BitNetError


class AttentionPolicyError(BitNetError, ValueError):
    """A policy that is none, or that a model cannot follow; the message says which part."""


# what all have that choose pages; dense_below: positions up to which tokens read all
_PAGES = {"sinks": count(0), "dense_below": count(0)}

# kind -> its keys; the value behind the colon is the key of the kind's name
KINDS: dict[str, dict[str, Key]] = {
    "window": {"window": count(1, required=True), "sinks": count(0), "stride": count(0)},
    "top_k": {"top_k": share(), **_PAGES},
    "threshold": {"threshold": share(), **_PAGES},
    "dynamic": {"min_ratio": share(), "max_ratio": share(), **_PAGES},
}
# Of the earlier systems, by the names that they had.
PRESETS = {
    "window_256": "window:256,sinks=4",
    "top_k_128": "top_k:0.25,sinks=4",
    "dynamic": "dynamic:min_ratio=0.1,max_ratio=0.5,sinks=4",
}
POLICY_KEYS = tuple(dict.fromkeys(key for keys in KINDS.values() for key in keys))
PAGE_KEYS = frozenset({"top_k", "threshold", "max_ratio"})  # of those that choose pages


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
        _fail("a policy as text", f"a {type(text).__name__}")
    found: list[AttentionPolicy | None] = [None] * layers
    taken = [False] * layers
    for part in PRESETS.get(text.strip(), text).split(";"):
        words, at, where = part.strip().partition("@")
        policy = _policy(words)
        named = [*_numbers(where, layers)] if at else [i for i in range(layers) if own(i) is None]
        if not named:
            expected = "a model with a layer that attends to all positions"
            _fail(expected, f"one whose layer 0 {own(0)}")
        for layer in named:
            if (reason := own(layer)) is not None:
                _fail("layers that attend to all positions", f"{layer}, which {reason}")
            if taken[layer]:
                _fail("one policy a layer", f"two for layer {layer}")
            found[layer], taken[layer] = policy, True
    return tuple(found)


def _policy(text: str) -> AttentionPolicy:
    kind, colon, rest = text.partition(":")
    keys = KINDS.get(kind)
    if keys is None or not colon:
        known = ", ".join(f"{name}:..." for name in KINDS)
        _fail(f"one of {known} or a preset ({', '.join(PRESETS)})", repr(text))
    given = dict(keys_of(kind, rest, keys, _fail))
    zero = ("dense_below",)  # means something
    kept = [name for name in keys if given.get(name) or (name in given and name in zero)]
    return AttentionPolicy(kind, tuple((name, given[name]) for name in kept))


def _numbers(text: str, layers: int) -> Iterator[int]:
    """The layers that `0-3,7` names."""
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            _fail("layers as 0-3,7", repr(text))
        end = int(last if dash else first)
        if not int(first) <= end < layers:
            _fail(f"layers from 0 to {layers - 1}", repr(word))
        yield from range(int(first), end + 1)


def _fail(expected: str, got: object) -> NoReturn:
    raise AttentionPolicyError(
        f"attention: expected {expected}, got {got}; a policy is such as window:256,sinks=4"
    )
