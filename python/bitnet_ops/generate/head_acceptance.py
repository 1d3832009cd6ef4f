"""HeadAcceptance: how often the drafts of an MTP head are right for one text, by depth."""

from __future__ import annotations

import math

MAX_DEPTH = 3  # drafts of a head one behind the other: what follows is seldom right
SAVED = 2.0  # steps that a text's drafts have saved and that may be spent on finding out
_PRIOR = (0.6, 0.5, 0.4)  # chances of drafts to be right if those before are, before any was tried
_PRIOR_WEIGHT, _MAX_WEIGHT, _KEPT = 2.0, 32.0, 0.97
_SHARED_WEIGHT = 8.0  # of what other requests have shown, for a new one


class HeadAcceptance:
    """How often the drafts of a head are right for one text: by depth, if those before are."""

    def __init__(self, shared: HeadAcceptance | None = None) -> None:
        if shared is None:
            self._right = [_PRIOR_WEIGHT * p for p in _PRIOR]
            self._wrong = [_PRIOR_WEIGHT * (1 - p) for p in _PRIOR]
        else:
            pairs = [*zip(shared._right, shared._wrong, strict=True)]
            scales = [min(1.0, _SHARED_WEIGHT / (r + w)) for r, w in pairs]
            self._right = [s * r for s, (r, _) in zip(scales, pairs, strict=True)]
            self._wrong = [s * w for s, (_, w) in zip(scales, pairs, strict=True)]
        # what may be spent on finding out whether drafts pay, and has been saved by them; what the
        # drafts of a step cost; and what a token is worth: in steps
        self.credit = self.price = self.token = 0.0

    def __repr__(self) -> str:
        rates = ", ".join(f"{self.rate(depth):.2f}" for depth in range(MAX_DEPTH))
        return f"HeadAcceptance({rates})"

    def rate(self, depth: int) -> float:
        """The chance of draft `depth`, from 0 on, to be right if those before are."""
        return self._right[depth] / (self._right[depth] + self._wrong[depth])

    @property
    def tried(self) -> float:
        """How many drafts that stands on."""
        return self._right[0] + self._wrong[0] - _PRIOR_WEIGHT

    def gain(self, drafts: int) -> float:
        """How many of so many drafts are right, on average."""
        chances = [math.prod(self.rate(i) for i in range(d + 1)) for d in range(drafts)]
        return math.fsum(chances)

    def learn(self, drafts: int, right: int) -> None:
        """Enter that the first `right` of the drafts of a step were right."""
        self.credit = min(max(self.credit + right * self.token - self.price, -SAVED), SAVED)
        for depth in range(min(drafts, right + 1, MAX_DEPTH)):
            was_right = depth < right
            self._right[depth] = _KEPT * self._right[depth] + was_right
            self._wrong[depth] = _KEPT * self._wrong[depth] + (not was_right)
            share = min(1.0, _MAX_WEIGHT / (self._right[depth] + self._wrong[depth]))
            self._right[depth] *= share
            self._wrong[depth] *= share
