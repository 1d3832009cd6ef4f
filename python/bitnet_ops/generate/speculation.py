"""Speculation: drafts of the next tokens from the text itself, and how many are worth their cost.

A draft is a guess that the model verifies in one step with the newest token. It is looked up in the
text (`propose`), so it costs no model of its own and pays where text repeats itself: code,
quotations, tables. A right draft saves a step, a wrong one has cost its share of one. What tokens
cost is learnt from the steps of this machine (`StepCosts`), how many drafts are right from each
request's own text (`Acceptance`). That decides how many tokens are drafted, never which come.
Source: Saxena, prompt lookup decoding (2023), an n-gram form of arXiv 2304.04487.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from bitnet_ops.arguments import shown
from bitnet_ops.errors import BitNetError

Source = Literal["ngram", "head"]  # what drafted: the text's repetitions, or the model's draft head
# Of a request: as many drafts as pay, of either source or of one; at most so many; or none.
Speculation = int | Literal["auto", "ngram", "head", "off"] | None
DEFAULT_SPECULATION: Speculation = "auto"  # of texts; an engine's requests have none unless told
MAX_DRAFTS = 8  # of a step, for one request

_LAST = 8  # steps of one size that are remembered
_UNKNOWN = 0.3  # share of a token's step that one more costs, until that has been measured
_GAIN = 1.03  # drafts promise at least so much; costs are not known more exactly
_PROBING = 0.02  # share of the time so far that finding out whether drafts pay may have cost
_PROBE = 1  # drafts of a probe: what comes behind a wrong one tells nothing
_READ, _READ_WEIGHT = 16, 0.5  # tokens of a text looked up before the first draft, and their weight
_KEPT, _MAX_WEIGHT = 0.93, 16.0  # of what is known of a text, which may change its ways

_ITEM = array("q").itemsize

# Drafts --------------------------------------------------------------------------------------


def propose(
    ids: Sequence[int], max_tokens: int, max_ngram: int = 3, min_ngram: int = 1
) -> list[int]:
    """At most `max_tokens` ids that may follow `ids`; none where nothing is repeated.

    The longest n-gram at the end, of max_ngram down to min_ngram ids, that has stood in `ids`
    before is looked up at its latest place, and what followed there is the draft.
    """
    if max_tokens < 1 or len(ids) < 2:
        return []
    text = ids if isinstance(ids, array) and ids.typecode == "q" else array("q", ids)
    data = text.tobytes()
    for n in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        at = _last_before(data, data[-n * _ITEM :])
        if at >= 0:
            return text[at + n : at + n + max_tokens].tolist()
    return []


def _last_before(data: bytes, tail: bytes) -> int:
    """The index of the last id from which on `data` holds `tail`, its own end apart; or -1.

    A search in bytes is a hundred times as fast as one in Python over ids; what it finds across
    the borders of ids is passed over.
    """
    end = len(data) - _ITEM  # so that at least one id follows
    while True:
        at = data.rfind(tail, 0, end)
        if at < 0 or at % _ITEM == 0:
            return at // _ITEM if at >= 0 else -1
        end = at + len(tail) - 1


# How many ------------------------------------------------------------------------------------


class StepCosts:
    """Learns the seconds of a step without prompt tokens by its tokens.

    Of the last few steps it takes one of the quicker ones: a step in which memory is written for
    the first time, in which ways to multiply are measured, or which a neighbour disturbs takes
    several times as long, and must not keep drafts away for the rest of a text.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._last: dict[int, deque[float]] = {}

    def learn(self, tokens: int, seconds: float) -> None:
        last = self._last.setdefault(tokens, deque(maxlen=_LAST))
        last.append(seconds)
        self._seconds[tokens] = sorted(last)[len(last) // 3]

    @property
    def known(self) -> bool:
        """Whether any has been measured."""
        return bool(self._seconds)

    def of(self, tokens: int) -> float:
        """Seconds of a step, between two known ones on the line through them."""
        known = self._seconds
        if tokens in known or not known:
            return known.get(tokens, _guess(tokens))
        fewer = max((t for t in known if t < tokens), default=None)
        more = min((t for t in known if t > tokens), default=None)
        if fewer is None:
            assert more is not None
            return known[more] * _guess(tokens) / _guess(more)
        if more is not None:
            share = (tokens - fewer) / (more - fewer)
            return known[fewer] + share * (known[more] - known[fewer])
        minimum = min(known)
        each = (
            (known[fewer] - known[minimum]) / (fewer - minimum)
            if minimum < fewer
            else _UNKNOWN * known[fewer] / fewer
        )
        return known[fewer] + max(0.0, each) * (tokens - fewer)


def _guess(tokens: int) -> float:
    return 1 + _UNKNOWN * (tokens - 1)


class Acceptance:
    """Learns how often the drafts of one request are right, and says how many to ask for.

    Drafts that promise nothing are tried all the same, one at a time, as soon as their cost is
    within a small share of the time so far; what drafts have lost counts, so that texts that do not
    repeat themselves are never much slower, however short.

    `rate`: the chance of a draft to be right if those before it are.
    """

    def __init__(self) -> None:
        self._right, self._wrong = 0.1, 1.9  # little is promised: the text itself tells
        self._credit = 0.0  # saved up for probes, in steps
        self._extra: Callable[[int], float] = lambda drafts: 0.0  # of the last choice, in steps
        self._has_read = False

    def __repr__(self) -> str:
        return f"Acceptance(rate={self.rate:.2f})"

    def read(self, ids: Sequence[int]) -> None:
        """Learn from the text before the first draft: would drafts of its last tokens be right?

        That costs no step. Only the first call does anything.
        """
        if self._has_read:
            return
        self._has_read = True
        for i in range(max(1, len(ids) - _READ), len(ids)):
            if draft := propose(ids[:i], 1):
                right = draft[0] == ids[i]
                self._right += _READ_WEIGHT * right
                self._wrong += _READ_WEIGHT * (not right)

    @property
    def rate(self) -> float:
        return self._right / (self._right + self._wrong)

    def tokens(self, drafts: int) -> float:
        """How many tokens a step with so many drafts gives, on average."""
        rate = self.rate
        return math.fsum(rate**i for i in range(drafts + 1))

    def choose(self, costs: StepCosts, tokens: int, expected: float, streams: int) -> int:
        """How many drafts to add to a step of so many tokens.

        `expected`: how many tokens the step will give to its `streams` without them.
        """
        without = costs.of(tokens)

        def speed(drafts: int) -> float:
            seconds = max(without, costs.of(tokens + drafts))
            return (expected - 1 + self.tokens(drafts)) / seconds

        def extra(drafts: int) -> float:
            return max(without, costs.of(tokens + drafts)) / without - 1

        self._extra = extra
        maximum = extra(_PROBE) + _PROBING  # no more than one probe is saved up
        self._credit = min(self._credit + _PROBING / streams, maximum)
        best = max(range(1, MAX_DRAFTS + 1), key=speed)
        if speed(best) > _GAIN * expected / without:
            return best
        return _PROBE if self._credit > extra(_PROBE) else 0

    def learn(self, drafts: int, right: int) -> None:
        """Enter that the first `right` of the drafts of a step were."""
        self._right = _KEPT * self._right + right
        self._wrong = _KEPT * self._wrong + (right < drafts)
        share = min(1.0, _MAX_WEIGHT / (self._right + self._wrong))
        self._right, self._wrong = share * self._right, share * self._wrong
        lost = self._extra(drafts) - right
        if right == drafts:
            self._credit = math.inf  # what was right is tried again
        elif lost > 0:
            self._credit -= lost


# What is asked for --------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftChoice:
    """What a value of `speculation` means.

    maximum: drafts of a step. adaptive: only as many of them as make the request faster here.
    sources: what may draft.
    """

    maximum: int
    adaptive: bool
    sources: frozenset[Source]


_BOTH: frozenset[Source] = frozenset(("ngram", "head"))
_WORDS = {
    "auto": DraftChoice(MAX_DRAFTS, True, _BOTH),
    "ngram": DraftChoice(MAX_DRAFTS, True, frozenset({"ngram"})),
    "head": DraftChoice(MAX_DRAFTS, True, frozenset({"head"})),
    "off": DraftChoice(0, False, frozenset()),
}
SPECULATION_WORDS = tuple(_WORDS)


def read_speculation(value: Speculation | object, expected: str) -> DraftChoice:
    """What `value` asks for; `expected` begins the text of the ValueError that it may be."""
    if value is None:
        return _WORDS["off"]
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return DraftChoice(value, False, _BOTH) if value else _WORDS["off"]
    words = ", ".join(f'"{word}"' for word in _WORDS)
    raise ValueError(f"{expected} {words}, None or an integer at least 0, got {shown(value)}")


class DraftHeadError(BitNetError, ValueError):
    """A draft head was asked for that the model does not have."""


def check_draft_head(value: Speculation, model: object, expected: str) -> None:
    """Raise DraftHeadError where "head" is asked for and `model` has no draft head."""
    if isinstance(value, str) and value == "head" and getattr(model, "draft_head", None) is None:
        raise DraftHeadError(
            f'{expected} "head" only for a model with a draft head, got one without; load it '
            "without draft=False, or convert it again with --draft-from BASE, a checkpoint that "
            'has mtp.* tensors; "auto" and "ngram" need none'
        )
