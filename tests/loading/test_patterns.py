"""Regular expressions of strangers: what `re.match` says, or an error of one line, soon."""

from __future__ import annotations

import re
import time

import pytest
from tokenizers import Regex
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split

from bitnet_ops.convert.gguf_tokenizer import PRE_TOKENIZERS
from bitnet_ops.untrusted.patterns import MAX_CHARACTERS, PatternError, check_limits, matches

NAMES = ["lm_head", "model.layers.0.self_attn.q_proj", "model.layers.10.mlp.down_proj", ""]
PATTERNS = ["lm_head", "model.layers.1", r"model\.layers\.1", "^model", "head$", "", "q_proj"]
PATTERNS += [
    r"\w",
    r"model\.layers\.(0|1)\.",
    ".*q_proj",
    "[a-z]+",
    "(lm)?_?",
    r".*\.\d{2}\.",
    "a|l",
]
# as tools write them: several places, then one of several projections, in two alternatives
PATTERNS += [
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp).*?(?:q_proj|k_proj|down_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|down_proj)))",
    "a*?b+?c{2,}?[*+?{|(]*",
]


@pytest.mark.parametrize("within", ["%s", r"(.*\.)?(%s)$"])
def test_what_is_matched_is_what_re_matches(within: str) -> None:
    expected = [[re.match(within % p, name) is not None for name in NAMES] for p in PATTERNS]
    assert matches(PATTERNS, NAMES, within=within) == expected and matches([], NAMES) == []


# Most of these would take longer than the age of the machine.
BEYOND = {
    r"(\w+\.?)+!": "a repeated group",
    r"(.+)+(.+)+!": "a repeated group",
    r"(.|\w)*!": "a repeated group",
    r"(?:.*)*!": "a repeated group",
    r"(?:(?:a?)){9}": "a repeated group",
    r"([(]a+)+[)]": "a repeated group",
    r"([]()]a+)+": "a repeated group",
    r"(a[[])+(b+)+[]]": "a repeated group",
    r"(a\(+)+\)": "a repeated group",
    "m?" * 60 + "m" * 60: "9 repetitions",
    ".*" * 5 + "!": "5 repetitions",
    "(a|.)" * 60 + "!": "9 repetitions",
    r"(a+(?#\))+)": "comments",
    "(?x)(a+ # )\n)+": "comments",
    "a" * (MAX_CHARACTERS + 1): "4001 characters",
}


@pytest.mark.parametrize("pattern", BEYOND)
def test_one_that_may_not_end_is_an_error_soon(pattern: str) -> None:
    began = time.process_time()
    with pytest.raises(PatternError, match=r"^regular expressions that end soon, got ") as caught:
        matches(["lm_head", pattern], ["m" * 60, "model.layers.0.self_attn.q_proj" * 4])
    assert BEYOND[pattern] in str(caught.value) and len(str(caught.value)) < 200
    assert time.process_time() - began < 1


def test_the_longest_that_is_allowed_takes_no_time() -> None:
    began = time.process_time()
    assert matches([".*" * 4 + "!"], ["m" * 60]) == [[False]]
    assert time.process_time() - began < 5


@pytest.mark.parametrize("pattern", ["(lm_head", "*", "a)", "a+)+(b", r"\1", "[z", "(?P<a", "\\"])
def test_one_that_is_none_is_an_error(pattern: str) -> None:
    with pytest.raises(PatternError, match="^valid regular expressions, got "):
        matches([pattern], NAMES, within="(%s)$")


# For names of forty letters they would do; in a text of thousands they take minutes and years.
SLOW_IN_TEXTS = {
    r"a+a+c": "behind two repetitions",
    r"a*a*a*[bc]": "behind two repetitions",
    r"a*a*b+": "behind two repetitions",
    r"(?=a*a*b)a": "behind two repetitions",
    r"a*(a*b)": "behind two repetitions",
    r"(a*(x|a*b))": "behind two repetitions",
    r"a*?a*?$": "behind two repetitions",
    r"x|[^b]*[^b]*(?!c)": "behind two repetitions",
    r"a{2,}a{0,300}b": "behind two repetitions",
    r"(?:a*a*)b": "behind two repetitions",
    r"a?a?a?a?a?b": "more than 16 outcomes",
    r"(a|.)(a|.)(a|.)(a|.)(a|.)b": "more than 16 outcomes",
    r"a{1,4}a{1,4}a{1,4}a*b": "more than 16 outcomes",
    r"a{9000}": "more than 256 repetitions",
    r"a{3}{3}{3}": "a repeated repetition",
    r"(a|b\g<1>\g<1>)c": "a call of a group",
    r"(?~a*b)": "an unusual group",
    "(" * 9 + "a" + ")" * 9: "groups more than 8 deep",
}


@pytest.mark.parametrize("pattern", SLOW_IN_TEXTS)
def test_one_of_a_tokenizer_has_closer_limits(pattern: str) -> None:
    with pytest.raises(PatternError, match=SLOW_IN_TEXTS[pattern]):
        check_limits(pattern, of_tokenizer=True)


@pytest.mark.parametrize(
    "pattern",
    [r"a+c", r" ?a+(?!\S)", r"(?:a|b|c|d)a+c", r"a*a*", r"a+(?:a+c)?", r"(a{1,3})a+[bc]"],
)
def test_the_slowest_that_are_allowed_take_the_square_of_a_text(pattern: str) -> None:
    check_limits(pattern, of_tokenizer=True)
    backend = Backend(BPE({"a": 0, "b": 1}, []))
    backend.pre_tokenizer = Split(Regex(pattern), "isolated")
    began = time.process_time()
    assert len(backend.encode("a" * 4000).ids) == 4000
    assert time.process_time() - began < 20  # 0.3 s; without limits an hour


PUBLISHED = [
    # o200k
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # DeepSeek, whose class holds every sign of the syntax
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[a-z&&[^aeiou)]]+|(?:\s\d)+",
    *(pattern for pre in PRE_TOKENIZERS.values() for pattern in pre.patterns),
]


def test_what_published_tokenizers_have_is_within_the_limits() -> None:
    for pattern in PUBLISHED:
        check_limits(pattern, of_tokenizer=True)
