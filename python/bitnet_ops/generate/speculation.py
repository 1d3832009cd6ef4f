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
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from bitnet_ops.generate.draft_choice import MAX_DRAFTS

_LAST = 8  # steps of one size that are remembered
_STALE = 48  # steps after which a size that did not come has to be measured anew
_DOUBT = 1.5  # times what others say: so much longer, one step alone is not believed
_UNKNOWN = 0.3  # share of a token's step that one more costs, until that has been measured
_GAIN = 1.03  # drafts promise at least so much; costs are not known more exactly
_PROBING = 0.02  # share of the time so far that finding out whether drafts pay may have cost
_PROBE = 1  # drafts of a probe: what comes behind a wrong one tells nothing
_READ, _READ_WEIGHT = 16, 0.5  # tokens of a text looked up before the first draft, and their weight
_KEPT, _MAX_WEIGHT = 0.93, 16.0  # of what is known of a text, which may change its ways

# Drafts --------------------------------------------------------------------------------------


def propose(
    ids: Sequence[int], max_tokens: int, max_ngram: int = 3, min_ngram: int = 1
) -> list[int]:
    """At most `max_tokens` ids that may follow `ids`; none where nothing is repeated.

    The longest n-gram at the end, of max_ngram down to min_ngram ids, that has stood in `ids`
    before is looked up at its latest place, and what followed there is the draft.
    """
    count = len(ids)
    if max_tokens < 1 or count < 2:
        return []
    text = ids if isinstance(ids, array) and ids.typecode == "q" else array("q", ids)
    known = np.frombuffer(text, np.int64)  # no copy; the array cannot grow while it is held
    places, found = (known[:-1] == text[-1]).nonzero()[0], -1  # where n-grams end like the text
    for n in range(1, min(max_ngram, count - 1) + 1):
        if n > 1:
            places = places[places >= n - 1]
            places = places[known[places - n + 1] == text[-n]]
        if not len(places):
            break
        if n >= min_ngram:
            found = int(places[-1])
    return text[found + 1 : found + 1 + max_tokens].tolist() if found >= 0 else []


# How many ------------------------------------------------------------------------------------


class StepCosts:
    """Learns the seconds of a step without prompt tokens by its tokens.

    Of the last few steps it takes one of the quicker ones: a step in which memory is written for
    the first time, in which ways to multiply are measured, or which a neighbour disturbs takes
    several times as long, and must not keep drafts away for the rest of a text. So a size of which
    one step has been measured, much longer than others say, is one that is not known. And what a
    size took long ago, perhaps beside a busy neighbour, is forgotten at its next step.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._last: dict[int, deque[float]] = {}
        self._known: dict[int, float] = {}
        self._count, self._latest = 0, dict[int, int]()  # of steps, and when each size came

    def learn(self, tokens: int, seconds: float) -> None:
        last = self._last.setdefault(tokens, deque(maxlen=_LAST))
        if self._stale(tokens):
            last.clear()
        self._count += 1
        self._latest[tokens] = self._count
        last.append(seconds)
        self._seconds[tokens] = sorted(last)[len(last) // 3]
        once = {t for t, steps in self._last.items() if len(steps) == 1}
        self._known = self._seconds
        if once and (sure := {t: s for t, s in self._seconds.items() if t not in once}):
            believed = (t for t in once if self._seconds[t] < _DOUBT * _line(sure, t))
            self._known = sure | {t: self._seconds[t] for t in believed}

    @property
    def known(self) -> bool:
        """Whether any has been measured."""
        return bool(self._seconds)

    def measured(self, tokens: int) -> int:
        """How many steps of so many tokens are remembered; 0 if they were long ago."""
        return 0 if self._stale(tokens) else len(self._last.get(tokens, ()))

    def _stale(self, tokens: int) -> bool:
        return self._count - self._latest.get(tokens, self._count) > _STALE

    def of(self, tokens: int) -> float:
        """Seconds of a step, between two known ones on the line through them."""
        return _line(self._known, tokens)


def _line(known: Mapping[int, float], tokens: int) -> float:
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


class Rest:
    """Steps without a thought of drafts, after one in which none promised enough.

    Asking what drafts promise takes time as well: a tenth of a step of a small model. So it is
    asked as seldom as that takes a hundredth of the time, on large models in every step. Many steps
    with drafts are followed by a few without, for what these cost may have changed meanwhile.
    """

    _ASKING, _LONGEST = 0.01, 16  # share of the time; steps, so that a text may change its ways
    _MANY, _FEW = 64, 3

    steps: int = 1  # since the last time that was asked

    def __init__(self) -> None:
        self._left, self._of = 0, tuple[int, ...]()
        self._drafted = 0  # steps with drafts since some without were wanted

    def over(self, streams: Iterable[int]) -> bool:
        """Whether to ask in this step, of these requests: others have not been asked yet."""
        if self._left and self._of == tuple(streams):
            self._left -= 1
            self.steps += 1
            return False
        self._left, self._of = 0, tuple(streams)
        return True

    def begin(self, seconds: float, step: float) -> None:
        """Nothing was promised; asking took so many seconds, and a step takes `step`."""
        self.steps, self._drafted = 1, 0
        self._left = min(self._LONGEST, int(seconds / (self._ASKING * step)))

    def drafted(self) -> None:
        """A step has drafts."""
        self.steps, self._drafted = 1, self._drafted + 1
        if self._drafted == self._MANY:
            self._left, self._drafted = self._FEW, 0


class Acceptance:
    """Learns how often the drafts of one request are right, and says how many to ask for.

    Drafts that promise nothing are tried all the same, one at a time, as soon as their cost is
    within a small share of the time so far; what drafts have lost counts, so that texts that do not
    repeat themselves are never much slower, however short.

    `rate`: the chance of a draft to be right if those before it are. `speed`: what the last choice
    promised, in tokens for the time of a step without drafts.
    """

    speed: float = 0.0

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

    def choose(
        self, costs: StepCosts, tokens: int, expected: float, streams: int, elapsed: int = 1
    ) -> int:
        """How many drafts to add to a step of so many tokens.

        `expected`: how many tokens the step will give to its `streams` without them. `elapsed`:
        steps since the last call.
        """
        without = costs.of(tokens)

        def extra(drafts: int) -> float:
            return max(without, costs.of(tokens + drafts)) / without - 1

        self._extra, probe = extra, extra(_PROBE)
        # no more than one probe is saved up
        self._credit = min(self._credit + elapsed * _PROBING / streams, probe + _PROBING)
        best, fastest = 0, _GAIN * expected
        rate, given, chance = self.rate, expected, 1.0
        if rate > (_GAIN - 1) * expected * (1 - rate):  # else not even drafts for nothing pay
            for drafts in range(1, MAX_DRAFTS + 1):
                chance *= rate
                given += chance
                cost = 1 + extra(drafts)
                if (speed := given / cost) > fastest:
                    best, fastest = drafts, speed
                if given * (1 - rate) + chance * rate <= fastest * cost * (1 - rate):
                    break  # all that could come with more drafts would not pay for these
        self.speed = fastest if best else expected
        return best or (_PROBE if self._credit > probe else 0)

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
