"""Drafts against a search written plainly."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import strategies as st

from bitnet_ops.generate.drafts import propose


def plainly(ids: Sequence[int], most: int, max_ngram: int, min_ngram: int) -> list[int]:
    ids = list(ids)
    for n in range(max_ngram, min_ngram - 1, -1):
        for at in range(len(ids) - n - 1, -1, -1):
            if n < len(ids) and ids[at : at + n] == ids[-n:]:
                return ids[at + n : at + n + most]
    return []


# Ids whose bytes look like each other's, shifted: a search in bytes must not be fooled.
IDS = st.sampled_from([0, 1, 256, 257, 65536, 1 << 24, (1 << 31) - 1, 7])


@hypothesis.settings(max_examples=2000)
@hypothesis.given(
    st.lists(IDS, max_size=24), st.integers(0, 6), st.integers(1, 4), st.integers(1, 3)
)
def test_the_longest_latest_repetition_is_continued(
    ids: list[int], most: int, max_ngram: int, min_ngram: int
) -> None:
    want = plainly(ids, most, max_ngram, min_ngram) if most else []
    assert propose(ids, most, max_ngram, min_ngram) == want
    assert propose(array("q", ids), most, max_ngram, min_ngram) == want


@pytest.mark.parametrize(
    ("ids", "draft"),
    [
        ([], []),
        ([4], []),
        ([4, 5], []),
        ([4, 4], [4]),
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [9, 2, 3]),
        ([2, 3, 5, 2, 3, 6, 2, 3], [6, 2, 3]),
    ],
)
def test_cases(ids: list[int], draft: list[int]) -> None:
    assert propose(ids, 3) == draft
