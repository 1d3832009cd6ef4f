"""Regular expressions of strangers: what `re.match` says, or an error of one line, soon."""

from __future__ import annotations

import re
import time

import pytest

from bitnet_ops.untrusted import patterns
from bitnet_ops.untrusted.patterns import PatternError, matches

NAMES = ["lm_head", "model.layers.0.self_attn.q_proj", "model.layers.10.mlp.down_proj", ""]
HARMLESS = [
    "lm_head",
    "model.layers.1",
    r"model\.layers\.1",
    "^model",
    "head$",
    "",
    "q_proj",
    r"\w",
]
WILD = [r"model\.layers\.(0|1)\.", ".*q_proj", "[a-z]+", "(lm)?_?", r".*\.\d{2}\.", "a|l"]


@pytest.mark.parametrize("within", ["%s", r"(.*\.)?(%s)$"])
def test_what_is_matched_is_what_re_matches(within: str) -> None:
    given = [*HARMLESS, *WILD]
    expected = [[re.match(within % p, name) is not None for name in NAMES] for p in given]
    assert matches(given, NAMES, within=within) == expected


def test_harmless_ones_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(patterns._process, "call", call)
    assert len(matches(HARMLESS, NAMES)) == len(HARMLESS) and matches([], NAMES) == []


# each would take longer than the age of the machine
ENDLESS = [r"(\w+\.?)+!", r"(.+)+(.+)+!", "m?" * 60 + "m" * 60, r"(.|\w)*!", "(?:.*)*!"]


@pytest.mark.parametrize("pattern", ENDLESS)
def test_one_that_does_not_end_is_an_error_soon(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "_CPU_S", 0.1)
    began = time.process_time()
    with pytest.raises(PatternError, match=r"^regular expressions that end, got no end within 0.1"):
        matches(["lm_head", pattern], ["m" * 60, "model.layers.0.self_attn.q_proj" * 4])
    assert time.process_time() - began < 1
    assert matches([".*head"], NAMES)[0] == [True, False, False, False]  # another child


@pytest.mark.parametrize("pattern", ["(lm_head", "*", "a)", r"\1", "[z", "(?P<a", "\\"])
def test_one_that_is_none_is_an_error(pattern: str) -> None:
    with pytest.raises(PatternError, match="^valid regular expressions, got "):
        matches([pattern], NAMES)
