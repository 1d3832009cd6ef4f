"""What a value of `speculation` asks for: which sources draft, and how much.

It imports nothing heavy, for commands read it before they load anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bitnet_ops.arguments import shown
from bitnet_ops.errors import BitNetError

Source = Literal["ngram", "head"]  # what drafts: the text's repetitions, or the model's draft head
# Of a request: as many drafts as pay, of either source or of one; at most so many; or none.
Speculation = int | Literal["auto", "ngram", "head", "off"] | None
DEFAULT_SPECULATION: Speculation = "auto"  # of texts; an engine's requests have none unless told
MAX_DRAFTS = 8  # of a step, for one request


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
            "without draft=False (--no-draft), or convert it again with --draft-from BASE, a "
            'checkpoint that has mtp.* tensors; "auto" and "ngram" need none'
        )
