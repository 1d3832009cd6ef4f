"""Drafts by prompt lookup: what followed the last time that the text went as it goes now.

A draft is a guess at the next tokens, verified by the model in one step; it costs no model of its
own and pays where text repeats itself: code, quotations, tables.
Source: Saxena, prompt lookup decoding (2023), an n-gram form of arXiv 2304.04487.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_ITEM = array("q").itemsize


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
