"""Drafts under constraints: what is forbidden is not verified, and looking changes nothing.

The oracle of a grammar is a list of all its texts; that of other constraints are their own masks,
asked token by token of a twin.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
import pytest

import bitnet_ops
from bitnet_ops import LanguageModel
from bitnet_ops.generate.constraint import Constraint, LooksAhead, Mask, Thoughts, only
from bitnet_ops.generate.engine import Engine, Finished, Limits, NewToken, SamplingParams
from bitnet_ops.generate.request import Request
from bitnet_ops.generate.sampling import SamplingError
from paged_fake import VOCAB, FakeEngine, FakeModel, periodic
from tool_tokenizers import allowed, grammars_of, random_answer, tokenizer_of

TOKENIZERS = {
    "words": tokenizer_of(),
    "bytes": tokenizer_of(words=False),
    "special tags": tokenizer_of(tags=True),
    "no tags": tokenizer_of(tags=None),
}
GRAMMARS = {name: grammars_of(tokenizer) for name, tokenizer in TOKENIZERS.items()}
VALUES = ["red", "reed", "red or green", 3, 37, [1, 2], [1, 22], {"a": "red"}, {"a": None}, "é"]


# Grammars -----------------------------------------------------------------------------------------


def texts_of(values: Sequence[Any]) -> list[bytes]:
    """Every text of the schema of these values: a blank or none behind commas and colons."""
    found = {
        json.dumps(v, ensure_ascii=False, separators=(f",{comma}", f":{colon}")).encode()
        for v in values
        for comma in ("", " ")
        for colon in ("", " ")
    }
    return sorted(found)


def plainly(kind: str, said: bytes, tokens: Sequence[int]) -> int:
    """How many of `tokens` may follow what was said."""
    texts, ends = texts_of(VALUES), GRAMMARS[kind].stop_ids
    for count, token in enumerate(tokens):
        if token in ends:
            return count + (said in texts)
        piece = GRAMMARS[kind].texts[token]
        said += piece
        if not piece or not any(text.startswith(said) for text in texts):
            return count
    return len(tokens)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_grammar_says_how_many_of_some_tokens_may_come(kind: str) -> None:
    grammars, draw = GRAMMARS[kind], random.Random(0)
    grammar = grammars.schema({"enum": VALUES})
    answers = [random_answer(grammars, grammar.start(), seed)[0] for seed in range(20)]
    counts: list[int] = []
    for seed, ids in enumerate(answers):
        constraint, twin, said = grammar.start(), grammar.start(), b""
        for at, token in enumerate(ids):
            for _ in range(4):
                other = draw.choice(answers)
                start = draw.randint(0, at) if draw.random() < 0.3 else at
                drafts = draw.choice([ids, other])[start : start + draw.randint(1, 6)]
                if draw.random() < 0.4:
                    drafts = [*drafts, draw.choice([1, draw.randrange(300)])]
                wanted = plainly(kind, said, drafts)
                assert constraint.allowed_prefix(drafts) == wanted, (said, drafts)
                counts.append(wanted)
            assert allowed(constraint) == allowed(twin), (seed, said)
            constraint.add(token)
            twin.add(token)
            said += grammars.texts[token]
    assert min(counts) == 0 and max(counts) > 3


def test_behind_the_end_of_a_grammar_only_an_end_may_come() -> None:
    grammars = GRAMMARS["words"]
    constraint = grammars.schema({"enum": ["red"]}).start()
    for token in TOKENIZERS["words"].encode('"red"', add_special_tokens=False):
        constraint.add(token)
    end = grammars.stop_ids[0]
    assert constraint.allowed_prefix([end]) == 1
    assert constraint.allowed_prefix([400, end]) == 0
    constraint.add(end)
    assert constraint.allowed_prefix([400]) == 0 and constraint.allowed_prefix([]) == 0


COSTLY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^(a|b)*a(a|b){9}$"},
        "p": {"type": "string", "pattern": "^[a-z]{1,40}x[0-9]{3,9}$"},
    },
    "required": ["name", "p"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("soft", [False, True])
def test_looking_ahead_brings_no_limit_nearer(soft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lexer of few states fails at the same token whether drafts were shown to it or not."""
    grammars, seen = GRAMMARS["words"], set[str]()

    def outcome(states: int, looks: bool) -> tuple[list[int], str]:
        limits = llguidance.LLParserLimits(max_lexer_states=states, verbose_errors=False)
        monkeypatch.setattr(grammars, "_limits", limits)
        draw, wrong = random.Random(1), random.Random(states)
        constraint, ids = grammars.schema(COSTLY).start(), list[int]()
        constraint._grammar.soft = soft
        while len(ids) < 60:
            try:
                may = allowed(constraint)
            except SamplingError as error:
                return ids, str(error)
            assert may
            if looks:
                constraint.allowed_prefix([wrong.choice(may), *wrong.sample(range(4096), 6)])
            ids.append(draw.choice(may))
            constraint.add(ids[-1])
            if ids[-1] in grammars.stop_ids:
                break
        return ids, "free" if constraint.failed else "whole"

    for states in (*range(40, 200, 4), 50_000):
        plain = outcome(states, looks=False)
        assert outcome(states, looks=True) == plain, states
        seen.add(plain[1][:5])
    assert seen == ({"free", "whole"} if soft else {"const", "whole"})


# Triggers and thoughts ----------------------------------------------------------------------------


def walked(make: Callable[[], Constraint], before: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of `tokens` the masks of another constraint let come, one after the other."""
    twin = make()
    for token in before:
        twin.mask()
        twin.add(token)
    for count, token in enumerate(tokens):
        if (may := allowed(twin)) is not None and token not in may:
            return count
        twin.add(token)
    return len(tokens)


def ways(kind: str) -> dict[str, tuple[Callable[[], Any], list[str]]]:
    grammars = GRAMMARS[kind]
    number = grammars.lark(f'start: "\\n" /[0-9]{{1,3}}/ "\\n" {grammars.literal("</tool_call>")}')
    color, texts = grammars.schema({"enum": VALUES}), grammars.texts
    call = "In <tool_call>\n123\n</tool_call> and"
    thought = 'And so it is</think>\n\n"red or green"'
    return {
        "repeated call": (lambda: number.lazy(["<tool_call>"]), [call]),
        "one call": (lambda: number.lazy(["<tool_call>"], repeat=False), [call]),
        "thoughts": (lambda: Thoughts(texts, opened=True), [thought]),
        "schema behind": (lambda: Thoughts(texts, color.start(), opened=True), [thought]),
        "short thoughts": (
            lambda: Thoughts(texts, color.start(), opened=True, budget=4),
            [thought, 'And so it is that\n</think>\n\n"red or green"'],
        ),
        "no thoughts": (lambda: Thoughts(texts, color.start(), opened=False), ['"red or green"']),
        "own thoughts": (
            lambda: Thoughts(texts, color.start(), opened=False),
            ["<think>" + thought],
        ),
    }


@pytest.mark.parametrize("way", ways("words"))
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_others_never_say_too_few_and_do_not_change(kind: str, way: str) -> None:
    make, texts = ways(kind)[way]
    tokenizer, draw, cut = TOKENIZERS[kind], random.Random(3), 0
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        constraint, twin = make(), make()
        assert isinstance(constraint, LooksAhead)
        for at, token in enumerate(ids):
            for _ in range(4):
                drafts = ids[at : at + draw.randint(1, 6)]
                if draw.random() < 0.5:
                    drafts[draw.randrange(len(drafts))] = draw.choice([1, draw.randrange(2, 300)])
                count = constraint.allowed_prefix(drafts)
                assert walked(make, ids[:at], drafts) <= count <= len(drafts), (at, drafts)
                cut += count < len(drafts)
            may = allowed(twin)
            assert allowed(constraint) == may
            if may is not None and token not in may:
                break
            constraint.add(token)
            twin.add(token)
    assert (cut > 0) == (way != "thoughts")


# In a request and an engine -----------------------------------------------------------------------


class Evens:
    """Allows even tokens, and the odd ones below 4."""

    def mask(self) -> Mask:
        return only(VOCAB, [i for i in range(VOCAB) if self.may(i)])

    def may(self, token: int) -> bool:
        return token % 2 == 0 or token < 4

    def add(self, token: int) -> None:
        pass


class Looking(Evens):
    def allowed_prefix(self, tokens: Sequence[int]) -> int:
        return next((i for i, token in enumerate(tokens) if not self.may(token)), len(tokens))


def test_a_request_asks_the_constraint_that_can_tell() -> None:
    drafts = [2, 3, 5, 6]
    assert Request(0, [1]).allowed(drafts) == 4
    assert Request(0, [1], constraint=Evens()).allowed(drafts) == 4
    assert Request(0, [1], constraint=Looking()).allowed(drafts) == 2
    assert Request(0, [1], constraint=Looking()).allowed([]) == 0


@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_forbidden_drafts_are_not_verified(drafts: int) -> None:
    found = []
    for make in (Evens, Looking):
        engine = FakeEngine(model=FakeModel(logits=periodic))
        params = SamplingParams(temperature=2.0, seed=4)
        for _ in range(4):
            prompt = list(range(VOCAB)) * 2
            engine.add(prompt, params, Limits(60), max_drafts=drafts, constraint=make())
        events = []
        while engine.has_work:
            events += engine.step()
        tokens = [(e.request_id, e.token_id) for e in events if isinstance(e, NewToken)]
        found.append((sorted(tokens), engine.stats().drafts.ngram))
    (plain, without), (tokens, looked) = found
    assert tokens == plain
    assert 0 < looked.drafted < without.drafted and looked.accepted == without.accepted


@pytest.fixture(scope="module")
def demo() -> LanguageModel:
    return bitnet_ops.load()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "hot"])
def test_json_of_the_demo_stays_the_same_with_fewer_drafts(
    demo: LanguageModel, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "said": {"enum": ["And God saw", "And God said"]},
                "n": {"enum": [1, 2]},
            },
            "required": ["said", "n"],
            "additionalProperties": False,
        },
        "minItems": 6,
    }
    prompt = demo.encode('And God said, {"said": "And God said", "n": 1, "said": "And Moses"} ' * 3)

    def answer(drafts: Any) -> tuple[list[int], Any]:
        engine, tokens = Engine(demo.model), []
        constraint = demo.grammars.schema(schema).start()
        params, limits = SamplingParams(**sampling), Limits(120, demo.stop_ids)
        engine.add(prompt, params, limits, max_drafts=drafts, constraint=constraint)
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, NewToken):
                    tokens.append(event.token_id)
                else:
                    assert isinstance(event, Finished)
        return tokens, engine.stats().drafts.ngram

    plain, _ = answer("off")
    tokens, looked = answer(6)
    monkeypatch.setattr(Request, "allowed", lambda self, drafts: len(drafts))
    again, without = answer(6)
    assert tokens == again == plain
    assert looked.drafted < without.drafted and looked.accepted == without.accepted > 0
