"""Constraints: masks, grammars, triggers, thoughts that end, and the engine under them.

jsonschema says what a schema allows; random choices among the allowed tokens stand for a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import pytest
import torch

import bitnet_ops
from bitnet_ops import LanguageModel
from bitnet_ops.generate.constraint import Constraint, Mask, Thoughts, only
from bitnet_ops.generate.engine import Engine, Failed, Limits, NewToken, SchedulerOptions
from bitnet_ops.generate.grammar import Grammar, GrammarError, Grammars
from bitnet_ops.generate.sampling import Sampler, SamplingError, SamplingParams, sample_rows
from bitnet_ops.generate.tokenizer import Tokenizer
from tool_tokenizers import allowed, grammars_of, random_answer, text_of, tokenizer_of

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 200},
        "tags": {"type": "array", "items": {"enum": ["red", "é", 3]}, "maxItems": 3},
        "inner": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
    },
    "required": ["name", "age", "inner"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number", "minimum": -1, "maximum": 1}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
TOKENIZERS = {
    "words": tokenizer_of(),
    "bytes": tokenizer_of(words=False),
    "special tags": tokenizer_of(tags=True),
    "no tags": tokenizer_of(tags=None),
}
GRAMMARS = {name: grammars_of(tokenizer) for name, tokenizer in TOKENIZERS.items()}


# Masks in sampling ------------------------------------------------------------------------------


class Fixed:
    """Allows the same tokens at every place, and notes what came."""

    def __init__(self, size: int, ids: Sequence[int]) -> None:
        self.size, self.ids, self.came = size, list(ids), list[int]()

    def mask(self) -> Mask:
        return only(self.size, self.ids)

    def add(self, token: int) -> None:
        self.came.append(token)


WAYS = {
    "greedy": SamplingParams(),
    "hot": SamplingParams(temperature=1.5, seed=1),
    "top_k": SamplingParams(temperature=1.0, top_k=2, seed=2),
    "top_p": SamplingParams(temperature=1.0, top_p=0.4, seed=3),
    "min_p": SamplingParams(temperature=2.0, min_p=0.9, seed=4),
    "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=1.0, logit_bias={3: 100}),
    "all": SamplingParams(temperature=0.7, top_k=3, top_p=0.9, min_p=0.01, seed=5, logprobs=4),
}


@pytest.mark.parametrize("vocab", [8, 37, 1000])
@pytest.mark.parametrize("way", WAYS)
def test_a_mask_is_the_same_as_a_model_without_the_other_tokens(way: str, vocab: int) -> None:
    torch.manual_seed(0)
    ids = [1, 2, 5, vocab - 1]
    constraint = Fixed(vocab + 40, [*ids, vocab + 3])
    masked, plain = Sampler(WAYS[way], [1], constraint), Sampler(WAYS[way], [1])
    free = Sampler(SamplingParams(temperature=1.0, seed=9, logprobs=2))
    free_alone = Sampler(SamplingParams(temperature=1.0, seed=9, logprobs=2))
    chosen = []
    for _ in range(20):
        logits = torch.randn(2, vocab) * 3
        cut = torch.full((vocab,), -torch.inf)
        cut[ids] = logits[0, ids]
        expected_free = sample_rows([free_alone], logits[1:])[0]
        top = torch.log_softmax(logits[0].double(), 0)
        first, second = sample_rows([masked, free], logits.clone())
        assert second == expected_free
        assert first.token == sample_rows([plain], cut[None])[0].token and first.token in ids
        chosen.append(first.token)
        if first.logprob is not None:  # of the model, before the mask
            assert first.logprob == pytest.approx(float(top[first.token]), abs=1e-4)
            assert first.top_logprobs[0][0] == int(top.argmax())
    assert constraint.came == chosen


@pytest.mark.parametrize(
    ("ids", "size", "words"),
    [([], 9, "that allows a token"), ([1], 8, "of all tokens, got fewer"), (None, 9, "KeyError")],
)
def test_a_broken_constraint_fails_its_row_alone(
    ids: list[int] | None, size: int, words: str
) -> None:
    class Broken(Fixed):
        def mask(self) -> Mask:
            return super().mask() if ids is not None else {}["x"]

    rows = [Sampler(SamplingParams()) for _ in range(3)]
    rows[1] = Sampler(SamplingParams(), constraint=Broken(size, ids or []))
    logits = torch.randn(3, 9)
    first, broken, last = sample_rows(rows, logits.clone())
    assert [first.token, last.token] == [int(logits[0].argmax()), int(logits[2].argmax())]
    assert isinstance(broken.error, SamplingError) and words in str(broken.error)


# Grammars ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_random_answers_satisfy_a_schema(kind: str) -> None:
    grammars = GRAMMARS[kind]
    grammar, ended = grammars.schema(SCHEMA), 0
    for seed in range(25):
        ids, whole = random_answer(grammars, grammar.start(), seed)
        ended += whole
        if whole:
            value = json.loads(text_of(TOKENIZERS[kind], ids))
            jsonschema.validate(value, SCHEMA)
            assert list(value)[:2] == ["name", "age"]
    assert ended >= 20


def test_json_is_an_object_and_ends_with_any_stop_id() -> None:
    grammars, tokenizer = GRAMMARS["words"], TOKENIZERS["words"]
    constraint = grammars.json().start()
    assert {text_of(tokenizer, [i])[0] for i in allowed(constraint) or []} == {"{"}
    for token in tokenizer.encode('{"a": [1, {}]}', add_special_tokens=False):
        assert token in (allowed(constraint) or []) and not constraint.over
        constraint.add(token)
    assert constraint.over and allowed(constraint) == grammars.stop_ids
    constraint.add(grammars.stop_ids[1])
    assert allowed(constraint) == grammars.stop_ids  # with ignore_eos it goes on so


def accepts(grammars: Grammars, constraint: Constraint, text: str) -> bool:
    """Whether all of a text may be written, and the answer may end there."""
    for token in grammars.tokens_of(text.encode()):
        if token not in (allowed(constraint) or []):
            return False
        constraint.add(token)
    return not set(grammars.stop_ids).isdisjoint(allowed(constraint) or [])


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ('{"a":[1,{"b":null}],"c":"x  \\n"}', True),
        ('{"a": [1, {"b": null}], "c": "x"}', True),
        *(
            (text, False)
            for text in ('{ "a":1}', '{"a" :1}', '{"a":  1}', '{"a":1 }', '{"a":[ 1]}')
        ),
        *((text, False) for text in ('{"a":\n1}', '{"a":[1\n]}', ' {"a":1}', '{"a":[1,  2]}')),
    ],
)
def test_blanks_stand_behind_commas_and_colons_alone(text: str, good: bool) -> None:
    """Else a model that likes blanks may write them until the limit."""
    grammars = GRAMMARS["bytes"]
    assert accepts(grammars, grammars.json().start(), text) == good


NAMED = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}


@pytest.mark.parametrize(
    ("schema", "text", "good"),
    [
        (NAMED, '{"a":{"b":1}}', True),
        (NAMED, '{"c":1}', False),
        (NAMED, '{"a":{"c":1}}', False),
        ({**NAMED, "additionalProperties": True}, '{"c":1}', True),
        ({"type": "object"}, '{"c":1}', True),
        ({"type": "array", "items": {"anyOf": [NAMED, {"$ref": "#/$defs/n"}]}}, '[{"c":1}]', True),
        ({"anyOf": [NAMED, {"type": "null"}]}, '{"c":1}', False),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"c": {}}}]}, '{"a":1,"c":1}', True),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["c"]}]}, '{"a":1,"c":1}', True),
    ],
)
def test_properties_that_a_schema_does_not_name(schema: Any, text: str, good: bool) -> None:
    grammars = GRAMMARS["bytes"]
    schema = {**schema, "$defs": {"n": {"type": "object", "additionalProperties": {"const": 1}}}}
    jsonschema.validate(json.loads(text), schema)
    assert accepts(grammars, grammars.schema(schema).start(), text) == good


def test_special_tokens_of_a_schema_are_text() -> None:
    """Not the end of the answer."""
    grammars, tokenizer = GRAMMARS["words"], TOKENIZERS["words"]
    schema = {"enum": ["<|im_end|>"]}
    ids, whole = random_answer(grammars, grammars.schema(schema).start(), 1)
    assert whole and tokenizer.decode(ids) == '"<|im_end|>"'
    free = grammars.lark("start: /(.|\\n)*/").start()
    assert not set(allowed(free) or []) & {0, tokenizer.token_id("<|im_start|>")}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ([1], "a JSON schema, got a list"),
        (None, "a JSON schema, got a NoneType"),
        ({"type": "word"}, "followed, got: Invalid type: word"),
        ({"type": "array", "uniqueItems": True}, "Unimplemented keys"),
        ({"$ref": "http://example.com/schema"}, "not present in a registry"),
        ({"$ref": "#/$defs/gone"}, "gone"),
        ({"$ref": "#"}, "followed, got"),
        (False, "followed, got"),
        ({"enum": []}, "followed, got"),
        (_nested(70), "at most 64 deep, got a deeper one"),
        (_nested(100_000), "at most 64 deep, got a deeper one"),
        ({"const": b"x"}, "a JSON schema, got: Object of type bytes"),
        ({"description": "x" * 300_000}, "at most 256 KiB, got more"),
        ({"enum": [f"v{i}" * 4 for i in range(20_000)]}, "followed, got|KiB"),
        (
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"{i}_{j}": {"const": 1}}} for j in range(8)]}
                    for i in range(8)
                ]
            },
            "schema too large",
        ),
    ],
)
def test_schemas_that_cannot_be_followed(schema: Any, words: str) -> None:
    with pytest.raises(GrammarError, match=rf"^tools\[1\]: expected [^\n]*({words})"):
        GRAMMARS["words"].schema(schema, "tools[1]")


def test_a_schema_has_no_options_of_the_library() -> None:
    grammars, tokenizer = GRAMMARS["bytes"], TOKENIZERS["bytes"]
    schema = {
        "type": "array",
        "minItems": 1,
        "x-guidance": {"item_separator": ";", "lenient": True},
    }
    text = "[1,2]"
    constraint = grammars.schema(schema).start()
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert token in (allowed(constraint) or [])
        constraint.add(token)
    with pytest.raises(GrammarError, match="Unimplemented"):
        grammars.schema({**schema, "uniqueItems": True})


EXPENSIVE = {"type": "string", "pattern": "(.{1,1000}){1,1000}x"}


def test_what_a_schema_costs() -> None:
    """Found at the start, or where a regular expression has become too large."""
    grammars = GRAMMARS["bytes"]
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}
    with pytest.raises(GrammarError, match="row has"):
        grammars.schema(many)
    with pytest.raises(SamplingError, match="constraint: expected an answer that its grammar"):
        random_answer(grammars, grammars.schema(EXPENSIVE).start(), 1)
    soft = grammars.lark(f"start: %json {json.dumps(EXPENSIVE)}", soft=True)
    ids, whole = random_answer(grammars, soft.start(), 1)
    assert ids and whole  # what follows is free


def test_models_without_ends_and_tokenizers_without_bytes() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    with pytest.raises(GrammarError, match="with ids that end a text, got none"):
        Grammars(TOKENIZERS["words"], 4200, [])
    words = Tokenizer(Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")))
    with pytest.raises(GrammarError, match="a tokenizer of bytes, got: "):
        Grammars(words, 2, [0])


# Triggers ---------------------------------------------------------------------------------------


def lazy_grammar(grammars: Grammars) -> Grammar:
    return grammars.lark(f'start: "\\n" /[0-9]{{1,3}}/ "\\n" {grammars.literal("</tool_call>")}')


def say(constraint: Constraint, tokenizer: Tokenizer, text: str) -> list[list[int] | None]:
    """What may come at each place of a text, all of which has to be allowed."""
    found = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        may = allowed(constraint)
        assert may is None or token in may, (text, tokenizer.decode([token]))
        constraint.add(token)
        found.append(may)
    return found


@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_nothing_is_masked_until_a_trigger(kind: str, repeat: bool) -> None:
    grammars, tokenizer = GRAMMARS[kind], TOKENIZERS[kind]
    constraint = lazy_grammar(grammars).lazy(["<tool_call>"], repeat=repeat)
    free = say(constraint, tokenizer, "In the <tool_ca <<tool_call>")
    assert free == [None] * len(free)
    assert text_of(tokenizer, allowed(constraint) or []) == "\n"
    held = say(constraint, tokenizer, "\n123\n</tool_call>")
    assert None not in held
    if repeat:
        assert say(constraint, tokenizer, " and <tool_call>\n7\n</tool_call>")[0] is None
        assert allowed(constraint) is None
    else:
        assert allowed(constraint) == grammars.stop_ids


def test_a_token_that_goes_on_behind_the_trigger() -> None:
    tokenizer = tokenizer_of(tags=None)
    backend = tokenizer.backend
    backend.add_tokens(["call>\n1", "call>\nx"])
    grammars = grammars_of(tokenizer)
    constraint = lazy_grammar(grammars).lazy(["<tool_call>"])
    ids = tokenizer.encode("<tool_", add_special_tokens=False)
    for token in [*ids, tokenizer.token_id("call>\nx")]:
        constraint.add(token)
    assert allowed(constraint) is None  # no call: it is text
    for token in [*ids, tokenizer.token_id("call>\n1")]:
        constraint.add(token)
    may = "".join(sorted({tokenizer.decode([i])[0] for i in allowed(constraint) or []}))
    assert may == "\n0123456789"


def test_openings_hold_at_the_beginning_alone() -> None:
    grammars, tokenizer = GRAMMARS["bytes"], TOKENIZERS["bytes"]
    grammar = grammars.lark('start: "{\\"name\\": 1}"')
    constraint = grammar.lazy(["<|python_tag|>"], ['{"name"'], repeat=False)
    say(constraint, tokenizer, ' \n{"name"')
    assert tokenizer.decode(allowed(constraint) or []) == ":"
    say(constraint, tokenizer, ": 1}")
    assert allowed(constraint) == grammars.stop_ids
    constraint = grammar.lazy(["<|python_tag|>"], ['{"name"'], repeat=False)
    assert set(map(str, say(constraint, tokenizer, ' {"na {"name"'))) == {"None"}
    assert allowed(constraint) is None
    say(constraint, tokenizer, "<|python_tag|>")
    assert tokenizer.decode(allowed(constraint) or []) == "{"


# Thoughts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_thoughts_are_closed_after_their_budget(kind: str, opened: bool) -> None:
    grammars, tokenizer = GRAMMARS[kind], TOKENIZERS[kind]
    constraint = Thoughts(grammars.texts, opened=opened, budget=4)
    if not opened:
        assert set(map(str, say(constraint, tokenizer, "<think>"))) == {"None"}
    say(constraint, tokenizer, "abcd" if kind == "bytes" else "In the beginning God")
    closing = []
    while (may := allowed(constraint)) is not None:
        assert len(may) == 1
        closing += may
        constraint.add(may[0])
    assert text_of(tokenizer, closing) == "\n</think>\n\n"
    say(constraint, tokenizer, "<think> is a word here")
    assert allowed(constraint) is None


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_an_answer_follows_its_grammar_behind_the_thoughts(kind: str) -> None:
    grammars, tokenizer = GRAMMARS[kind], TOKENIZERS[kind]
    for budget in (None, 100):
        constraint = Thoughts(grammars.texts, grammars.json().start(), opened=True, budget=budget)
        for may in say(constraint, tokenizer, '{"a": 1} or\n</think>'):
            assert may is not None and len(may) > 200  # all but the ends
            assert not set(may) & set(grammars.stop_ids)
        assert None not in say(constraint, tokenizer, '\n\n{"b": 2}')
        assert allowed(constraint) == grammars.stop_ids
    spent = Thoughts(grammars.texts, grammars.schema(SCHEMA).start(), opened=True, budget=0)
    ids, whole = random_answer(grammars, spent, 3)
    thought, _, answer = text_of(tokenizer, ids).partition("</think>\n\n")
    assert thought == "\n" and whole
    jsonschema.validate(json.loads(answer), SCHEMA)


def test_the_model_may_think_before_a_grammar_or_not() -> None:
    grammars, tokenizer = GRAMMARS["words"], TOKENIZERS["words"]
    think = tokenizer.token_id("<think>")
    for begin in ("", "<think>hm</think>\n\n"):
        constraint = Thoughts(grammars.texts, grammars.json().start(), opened=False)
        may = allowed(constraint) or []
        assert think in may and {tokenizer.decode([i])[0] for i in may} == {"{", "<"}
        say(constraint, tokenizer, begin + '{"b": 2}')
        assert allowed(constraint) == grammars.stop_ids


def test_no_call_begins_in_thoughts() -> None:
    grammars, tokenizer = GRAMMARS["words"], TOKENIZERS["words"]
    answer = lazy_grammar(grammars).lazy(["<tool_call>"])
    constraint = Thoughts(grammars.texts, answer, opened=False)
    thought = say(constraint, tokenizer, "<think>a <tool_call>\nx</think>\n\ntext <tool_call>")
    assert thought == [None] * len(thought)
    assert text_of(tokenizer, allowed(constraint) or []) == "\n"
    with pytest.raises(ValueError, match="a budget of at least 0 tokens, got -1"):
        Thoughts(grammars.texts, opened=True, budget=-1)


# The engine --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return bitnet_ops.load()


@pytest.fixture(scope="module")
def demo_grammars(lm: LanguageModel) -> Grammars:
    return Grammars(lm.tokenizer, lm.config.vocab_size, lm.stop_ids)


def answers(
    engine: Engine,
    prompts: Sequence[list[int]],
    ways: Sequence[SamplingParams],
    constraints: Sequence[Constraint | None],
    *,
    tokens: int = 400,
    stop: frozenset[int] = frozenset({1}),
    **options: Any,
) -> tuple[list[list[int]], list[str]]:
    ids = [
        engine.add(prompt, way, Limits(tokens, stop), constraint=constraint, **options)
        for prompt, way, constraint in zip(prompts, ways, constraints, strict=True)
    ]
    found: Mapping[int, list[int]] = {i: [] for i in ids}
    endings = dict[int, str]()
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, NewToken):
                found[event.request_id].append(event.token_id)
            elif isinstance(event, Failed):
                endings[event.request_id] = str(event.error)
            else:
                endings[event.request_id] = event.reason
    return [found[i] for i in ids], [endings[i] for i in ids]


SIDE = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1.0, seed=2, logprobs=2),
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=3, top_k=20),
]


def test_a_nonsense_model_satisfies_a_schema_beside_others(
    lm: LanguageModel, demo_grammars: Grammars
) -> None:
    """Also in a pool that is too small for all of them, and with drafts; tokens stay the same."""
    grammar = demo_grammars.schema(SCHEMA)
    texts = ["In the beginning", "And Moses said unto", "Selah", "The waters", "In the beginning"]
    prompts = [lm.tokenizer.encode(text) for text in texts]

    def constraints() -> list[Constraint | None]:
        return [grammar.start(), grammar.start(), grammar.start(), None, None]

    alone: list[list[int]] = []
    for i in range(5):
        engine = Engine(lm.model)
        alone += answers(engine, prompts[i : i + 1], SIDE[i : i + 1], constraints()[i : i + 1])[0]
    together, endings = answers(Engine(lm.model), prompts, SIDE, constraints())
    assert together == alone and endings[:3] == ["stop"] * 3
    for ids in together[:3]:
        jsonschema.validate(json.loads(lm.tokenizer.decode(ids)), SCHEMA)
    drafted = answers(Engine(lm.model), prompts, SIDE, constraints(), max_drafts=4)
    assert drafted == (together, endings)
    tight = Engine(
        lm.model,
        kv_cache_mb=1.3,
        block_size=8,
        scheduling=SchedulerOptions(prefix_cache=False, watermark=0),
    )
    assert answers(tight, prompts, SIDE, constraints()) == (together, endings)
    assert tight.stats().preemptions > 0


def test_a_request_whose_constraint_fails_ends_alone(
    lm: LanguageModel, demo_grammars: Grammars
) -> None:
    bad = demo_grammars.schema(EXPENSIVE).start()
    prompts = [lm.tokenizer.encode("In the beginning")] * 2
    found, endings = answers(Engine(lm.model), prompts, SIDE[:2], [bad, None], tokens=20)
    assert endings == [endings[0], "length"] and endings[0].startswith("constraint: expected")
    assert found[1] == answers(Engine(lm.model), prompts[1:], SIDE[1:2], [None], tokens=20)[0][0]
