"""A model that was trained to find a fact, and which attention policies let it."""

from __future__ import annotations

import pytest

import bitnet_ops
from benchmarks.needle import COUNT, MODEL, recall
from bitnet_ops.models import Decoder


@pytest.fixture(scope="module")
def model() -> Decoder:
    return bitnet_ops.load(MODEL).model


@pytest.mark.parametrize(
    "policy",
    [
        None,
        "top_k:0.25,sinks=4,dense_below=0",
        "top_k:0.01,sinks=4,dense_below=0",  # one page beside the first and its own
        "dynamic:min_ratio=0.1,max_ratio=0.5,sinks=4,dense_below=0",
        "threshold:0.1,sinks=4,dense_below=0",
    ],
)
def test_pages_that_are_chosen_hold_the_fact(model: Decoder, policy: str | None) -> None:
    found, read = recall(model, policy, 1024, 30)
    assert found == 1
    assert (read < 0.9) == (policy is not None)


def test_a_window_loses_what_stands_before_it(model: Decoder) -> None:
    """But for what it guesses."""
    found, read = recall(model, "window:256,sinks=4", 1024, 60)
    assert 256 / 1024 - 0.15 < found < 256 / 1024 + 1 / COUNT + 0.15
    assert read < 0.7
