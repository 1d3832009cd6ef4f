"""What became of drafts: counts by their source, and a remark where a head's are mostly wrong."""

from __future__ import annotations

import logging
from typing import NamedTuple

from bitnet_ops.generate.draft_choice import Source

LOG = logging.getLogger(__name__)  # of the remark; a command that prints it itself disables this
_ENOUGH = 200  # drafts of a head, before anything is said of it, and between two looks
_LEAST = 0.2  # share of them that has to be right


class Verified(NamedTuple):
    """So many drafts were verified, and so many of these were right."""

    drafted: int = 0
    accepted: int = 0


class DraftCounts(NamedTuple):
    """Drafts by their source: n-grams of the text, and the model's draft head."""

    ngram: Verified = Verified()
    head: Verified = Verified()

    @property
    def drafted(self) -> int:
        """Of both sources."""
        return self.ngram.drafted + self.head.drafted

    @property
    def accepted(self) -> int:
        """Of both sources."""
        return self.ngram.accepted + self.head.accepted

    def plus(self, source: Source, drafted: int, accepted: int) -> DraftCounts:
        """These, and so many more of `source`."""
        before: Verified = getattr(self, source)
        more = Verified(before.drafted + drafted, before.accepted + accepted)
        return self._replace(ngram=more) if source == "ngram" else self._replace(head=more)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """For JSON: source -> "drafted" and "accepted", of the sources that have drafted."""
        return {
            source: count._asdict() for source, count in self._asdict().items() if count.drafted
        }


NO_DRAFTS = DraftCounts()


class HeadReport:
    """Says once that a draft head is mostly wrong, and what the usual reasons are.

    Drafts that are mostly wrong cost time where they are insisted on, and are not made where they
    are to pay; they never change a token, so nobody would notice otherwise. A draft behind a wrong
    one says nothing of the head and is not counted.

    Attributes: `remark`, once it was said; None before.
    """

    def __init__(self) -> None:
        self.remark: str | None = None
        self._drafted = self._accepted = 0
        self._look_at = _ENOUGH

    def add(self, drafted: int, accepted: int) -> str | None:
        """Enter drafts of one step, of any request; the remark, if it is due now."""
        self._drafted += accepted + (accepted < drafted)
        self._accepted += accepted
        if self.remark is not None or self._drafted < self._look_at:
            return None
        self._look_at = self._drafted + _ENOUGH  # at every draft, chance would have it sometime
        if self._accepted >= _LEAST * self._drafted:
            return None
        self.remark = (
            f"draft head: expected at least {100 * _LEAST:.0f} % of its drafts to be right, got "
            f"{100 * self._accepted // self._drafted} % of {self._drafted}; tokens are the "
            "same, but drafts save little: the head belongs to another model, or it was trained "
            "for the unrotated model (its tap or rotation is wrong), or the temperature is above 1 "
            'or the text outside its list of words; speculation="ngram" drafts without it'
        )
        return self.remark
