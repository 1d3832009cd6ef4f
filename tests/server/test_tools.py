"""Forms of tool calls: what models are told, and grammars whose answers are read as valid calls.

Random choices among the allowed tokens stand for a model, jsonschema says what is valid.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

import bitnet_ops
from bitnet_ops.generate.engine import Engine, Finished, Limits, NewToken
from bitnet_ops.generate.grammar import Grammars
from bitnet_ops.generate.sampling import SamplingParams
from bitnet_ops.generate.tokenizer import Tokenizer
from bitnet_ops.server.exchange import (
    Ask,
    AskError,
    CallArguments,
    CallBegin,
    Delta,
    End,
    Format,
    Reasoning,
    Text,
    Tool,
    ToolChoice,
)
from bitnet_ops.server.shape import AnswerShape
from bitnet_ops.server.tools import HERMES, IN_WORDS, LLAMA, XML, form_of
from chat_templates import STYLES
from tool_templates import FORMS
from tool_tokenizers import allowed, grammars_of, random_answer, tokenizer_of

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
WEATHER = Tool(
    "get-weather.v1",
    'The weather, as "text".',
    {
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "unit": {"type": "string", "enum": ["°C", "F", "two words"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2},
            "level": {"enum": [1, "two", None]},
            "near": {"$ref": "#/$defs/point"},
            "exact": {"type": "boolean"},
        },
        "required": ["place", "days", "near"],
        "$defs": {"point": POINT},
    },
)
EMPTY = Tool("now", "", {})
FREE = Tool("free", "", {"type": "object", "properties": {"a": {}, "b": {"type": ["number"]}}})
TOOLS = (WEATHER, EMPTY, FREE)
SCHEMAS = {
    "get-weather.v1": {**WEATHER.parameters, "additionalProperties": False},
    "now": {"type": "object", "maxProperties": 0},
    "free": FREE.parameters,
}
TEMPLATE_FORMS = {"hermes": HERMES, "xml": XML, "llama": LLAMA, "none": IN_WORDS}
KINDS: dict[str, dict[str, Any]] = {
    "words": {},
    "bytes": {"words": False},
    "special tags": {"tags": True},
    "no tags": {"tags": None},
}


def tokenizer_for(form: str, kind: str = "words") -> Tokenizer:
    return tokenizer_of(template=FORMS[form], **KINDS[kind])


GRAMMARS: dict[tuple[str, str], Grammars] = {}


def shape_of(form: str, kind: str = "words", **asked: Any) -> tuple[AnswerShape, Grammars]:
    tokenizer = tokenizer_for(form, kind)
    if (form, kind) not in GRAMMARS:
        GRAMMARS[form, kind] = grammars_of(tokenizer)
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **asked}
    grammars = GRAMMARS[form, kind]
    return AnswerShape(Ask(**asked), tokenizer, lambda: grammars), grammars


def deltas_of(shape: AnswerShape, prompt: str, ids: Sequence[int], reason: str) -> list[Delta]:
    text, decoder = shape.text(0, prompt), shape.decoder()
    found = [delta for token in ids for delta in text.push(decoder.push(token))]
    return [*found, *text.push(decoder.finish()), *text.end(reason, len(ids))]


def joined(deltas: Sequence[Delta]) -> tuple[str, str, list[tuple[str, str]], str]:
    """Thoughts, text, calls and why it ended."""
    calls: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, CallBegin):
            assert re.fullmatch("call_[0-9a-f]{24}", delta.id) and delta.call == len(calls)
            calls.append([delta.name, ""])
        elif isinstance(delta, CallArguments):
            assert delta.call == len(calls) - 1
            calls[-1][1] += delta.text
    thoughts = "".join(d.text for d in deltas if isinstance(d, Reasoning))
    text = "".join(d.text for d in deltas if isinstance(d, Text))
    assert isinstance(deltas[-1], End)
    return thoughts, text, [(n, a) for n, a in calls], deltas[-1].reason


def check_calls(calls: Sequence[tuple[str, str]], schemas: dict[str, Any] = SCHEMAS) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), schemas[name])


# Which form ------------------------------------------------------------------------------------


def test_the_form_is_read_from_the_template() -> None:
    for name, template in FORMS.items():
        assert form_of(template) is TEMPLATE_FORMS[name]
    assert form_of(None) is IN_WORDS and form_of("{{ tools }}") is IN_WORDS
    assert form_of(STYLES["llama"]) is LLAMA
    assert form_of(STYLES["bitnet"]) is IN_WORDS and form_of(STYLES["mistral"]) is IN_WORDS


CALL = {"type": "function", "function": {"name": "now", "arguments": {"a": 'é "'}}}
HISTORY = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "user", "content": "time?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "12:00"},
    {"role": "tool", "content": [{"type": "text", "text": "12:01"}]},
    {"role": "assistant", "content": "noon"},
]


@pytest.mark.parametrize("form", FORMS)
def test_what_a_model_is_told_of_tools(form: str) -> None:
    history = [m if form != "llama" or m["role"] != "assistant" else {**m} for m in HISTORY]
    shape, _ = shape_of(form, messages=history)
    text = tokenizer_for(form).render_chat(shape.messages, tools=shape.tools)
    assert "get-weather.v1" in text and '"12:00' not in text
    assert text.index("12:00") < text.index("12:01") < text.index("noon")
    assert "Be brief." in text and (shape.tools is None) == (form == "none")
    if form == "none":
        assert [m["role"] for m in shape.messages] == ["system", "user", "assistant"] * 0 + [
            *("system", "user", "assistant", "user", "assistant")
        ]
        assert not any("tool_calls" in m or "results" in m for m in shape.messages)
        example = re.search(r"<tool_call>\n(.*)\n</tool_call>", text)
        assert example and json.loads(example[1]).keys() == {"name", "arguments"}
    # the calls of the history stand there as the model is to write its own
    told = text[text.index("time?") :]
    begins = {"llama": '{"name"'}.get(form, "<tool_call>")
    calls = told[told.index(begins) : told.index("<|im_end|>", told.index(begins))]
    reader = shape.text(0, "")
    _, rest, found, reason = joined([*reader.push(calls), *reader.end("stop")])
    assert found == [("now", '{"a": "é \\""}')] * (1 if form == "llama" else 2)
    assert (rest, reason) == ("", "tool_calls")


def test_without_tools_nothing_is_told() -> None:
    for choice in (ToolChoice("none"), ToolChoice()):
        tools = TOOLS if choice.mode == "none" else ()
        for form in FORMS:
            shape, _ = shape_of(form, tools=tools, tool_choice=choice)
            assert shape.messages == [{"role": "user", "content": "hi"}] and shape.tools is None
            assert shape.constraint("") is None
            text = '<tool_call>{"name": "now"}</tool_call>'
            reader = shape.text(0, "")
            assert joined([*reader.push(text), *reader.end("stop")])[1] == text


# Grammars --------------------------------------------------------------------------------------


NIGHTLY = 2 if os.environ.get("BITNET_CI_ALL") == "1" else 1  # times as many seeds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_required_answer_is_read_as_valid_calls(form: str, kind: str) -> None:
    """Parallel calls or one, any tool or the one that is named."""
    names, maximum = set(), 0
    asked: list[dict[str, Any]] = [
        {},
        {"parallel_tools": False},
        {"tool_choice": ToolChoice("required", "now")},
        {"tool_choice": ToolChoice("required", "get-weather.v1")},
        {"tool_choice": ToolChoice("required", "free")},
    ]
    for options in asked:
        options = {"tool_choice": ToolChoice("required"), **options}
        shape, grammars = shape_of(form, kind, **options)
        for seed in range((3 if len(options) > 1 else 12) * NIGHTLY):
            constraint = shape.constraint("</think>\n\n")
            assert constraint is not None
            ids, whole = random_answer(grammars, constraint, seed)
            deltas = deltas_of(shape, "", ids, "stop" if whole else "length")
            thoughts, text, calls, reason = joined(deltas)
            assert not thoughts and not text and reason == ("tool_calls" if whole else "length")
            check_calls(calls if whole else calls[:-1])
            names |= {name for name, _ in calls}
            if len(options) > 1 or options["tool_choice"].name or form == "llama":
                assert len(calls) <= 1
            if options["tool_choice"].name:
                assert {name for name, _ in calls} <= {options["tool_choice"].name}
            maximum = max(maximum, len(calls))
    assert names == set(SCHEMAS)
    assert (maximum > 1) == (form != "llama")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_an_answer_is_free_until_it_calls(form: str, kind: str) -> None:
    shape, grammars = shape_of(form, kind)
    tokenizer = grammars.texts.tokenizer
    opening = {"llama": '{"name"'}.get(form, "Well <tool_call>")
    for seed in range(8):
        constraint = shape.constraint("")
        assert constraint is not None
        ids = tokenizer.encode(opening, add_special_tokens=False)
        for token in ids:
            may = allowed(constraint)
            assert may is None or token in may
            constraint.add(token)
        assert allowed(constraint) is not None
        more, whole = random_answer(grammars, constraint, seed)
        _, text, calls, reason = joined(deltas_of(shape, "", [*ids, *more], "stop"))
        if whole:
            assert (
                calls
                and reason == "tool_calls"
                and text.startswith("" if form == "llama" else "Well")
            )
            check_calls(calls)
    plain = shape.constraint("")
    assert plain is not None
    for token in tokenizer.encode("just { text", add_special_tokens=False):
        assert allowed(plain) is None
        plain.add(token)


def test_one_call_where_only_one_is_wanted() -> None:
    shape, grammars = shape_of("hermes", parallel_tools=False)
    constraint = shape.constraint("")
    assert constraint is not None
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for token in grammars.texts.encode(text):
        constraint.add(token)
    assert allowed(constraint) == grammars.stop_ids


@pytest.mark.parametrize("form", FORMS)
def test_thoughts_come_before_required_calls(form: str) -> None:
    shape, grammars = shape_of(form, tool_choice=ToolChoice("required", "now"), thinking_budget=3)
    prompt = "<|im_start|>assistant\n<think>\n"
    constraint = shape.constraint(prompt)
    assert constraint is not None
    ids = grammars.texts.encode("In <tool_call> the beginning")[:3]
    for token in ids:
        assert not set(allowed(constraint) or []) & set(grammars.stop_ids)
        constraint.add(token)
    more, whole = random_answer(grammars, constraint, 1)
    thoughts, text, calls, reason = joined(deltas_of(shape, prompt, [*ids, *more], "stop"))
    assert whole and thoughts.startswith("In") and not text
    assert [(n, json.loads(a)) for n, a in calls] == [("now", {})] and reason == "tool_calls"


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_in_a_format_or_a_call(form: str) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 3}
    shape, grammars = shape_of(form, format=Format("schema", schema))
    seen = set()
    for seed in range(30):
        constraint = shape.constraint("</think>\n\n")
        assert constraint is not None
        ids, whole = random_answer(grammars, constraint, seed)
        _, text, calls, _ = joined(deltas_of(shape, "", ids, "stop"))
        if whole and calls:
            check_calls(calls)
            assert not text
        elif whole:
            jsonschema.validate(json.loads(text), schema)
        seen.add(bool(calls))
    assert seen == {True, False}


@pytest.mark.parametrize("kind", ["json", "schema"])
def test_formats_without_tools(kind: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    shape, grammars = shape_of("xml", tools=(), format=Format(kind, schema))
    for prompt in ("", "<think>\n", "</think>\n\n"):
        constraint = shape.constraint(prompt)
        assert constraint is not None
        begin = "hm\n</think>\n\n" if prompt == "<think>\n" else ""
        ids = grammars.texts.encode(begin + '{"a":')
        for token in ids:
            may = allowed(constraint)
            assert may is None or token in may
            constraint.add(token)
        more, whole = random_answer(grammars, constraint, 5)
        thoughts, text, calls, reason = joined(deltas_of(shape, prompt, [*ids, *more], "stop"))
        assert (thoughts == "hm") == bool(begin) and not calls
        if whole:
            jsonschema.validate(json.loads(text), schema if kind == "schema" else {})


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        ({"tools": (Tool("a b"),)}, "tools[0].function.name", "letters, digits and"),
        ({"tools": (EMPTY, EMPTY)}, "tools", "names that differ"),
        (
            {"tool_choice": ToolChoice("required", "gone")},
            "tool_choice",
            "one of the tools, got 'g",
        ),
        ({"tools": (), "tool_choice": ToolChoice("required")}, "tool_choice", "got none"),
        ({"tools": (Tool("a", "", 5),)}, "tools[0].function.parameters", "a JSON schema, got 5"),
        (
            {"tools": (EMPTY, Tool("a", "", {"type": "array"}))},
            "tools[1].function.parameters",
            "of an object, got 'array'",
        ),
        (
            {"tools": (EMPTY, Tool("a", "", {"properties": {"x": {"type": "word"}}}))},
            "tools[1].function.parameters",
            "Invalid type: word",
        ),
        (
            {"tools": (EMPTY, Tool("a", "", {"properties": [1]}))},
            "tools[1].function.parameters",
            "properties by their names",
        ),
        (
            {"tools": (EMPTY, Tool("a", "", {"properties": {"x": {"$ref": "#/$defs/gone"}}}))},
            "tools[1].function.parameters",
            "gone",
        ),
        ({"tools": (), "format": Format("schema", {"type": 5})}, "format", "followed"),
        ({"format": Format("schema", [])}, "format", "a JSON schema, got a list"),
    ],
)
@pytest.mark.parametrize("form", ["hermes", "xml"])
def test_what_cannot_be_followed_is_named(
    form: str, asked: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(AskError) as caught:
        shape_of(form, **asked)
    assert caught.value.field == field and caught.value.status == 400
    assert words in str(caught.value) and "\n" not in str(caught.value)


GRAMMARS_WORDS = grammars_of(tokenizer_of())


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
MAIL = r"^(?!.*@.*@)[\w.+-]+@[\w-]+\.[a-z]{2,}$"
DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
NODE = {"v": WHOLE, "next": {"$ref": "#/$defs/n%6fde"}}


def objects(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


# A schema, arguments that it allows, and arguments that no form may write.
ARGUMENTS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "order": (
        objects({"limit": WHOLE, "path": TEXT, "text": TEXT}, "path", "text"),
        [{"text": "t", "path": "p", "limit": 1}, {"path": "p", "text": "<b>\nt"}],
        [{"path": "p"}, {"path": "p", "text": "t", "more": 1}],
    ),
    "order within": (
        objects({"a": {"type": "array", "items": objects({"x": WHOLE, "y": TEXT}, "y")}}),
        [{"a": [{"y": "s", "x": 1}, {"y": ""}]}, {"a": []}],
        [{"a": [{"x": 1}]}, {"a": [{"y": "s", "z": 1}]}],
    ),
    "seventy": (
        objects({f"p{i}": WHOLE for i in range(70)}, "p69", "p0"),
        [{"p5": 1, "p69": 2, "p0": 3}],
        [{"p69": 1}, {"p5": 1, "p7": 2}],
    ),
    "patterns": (
        objects({"mail": {**TEXT, "pattern": MAIL}, "year": {**TEXT, "pattern": r"\d{4}"}}),
        [{"mail": "a@b.de", "year": "in 1999, then"}],
        [{"year": "199"}],
    ),
    "anchors": (
        objects({"a": {**TEXT, "pattern": "^/a|b$"}, "b": {**TEXT, "pattern": "^(a|b$)"}}),
        [{"a": "/ab c"}, {"a": "x b"}, {"b": "ab"}, {"b": "b"}],
        [{"a": "x/a"}],
    ),
    "classes of other dialects": (
        objects({"a": {**TEXT, "pattern": r"^[a&\&b]$|^[x-z&&b]$"}}),
        [{"a": "&"}, {"a": "x"}],
        [],
    ),
    "back-reference": (
        objects({"a": {**TEXT, "pattern": r"^(['\"]).*\1$", "minLength": 2}}),
        [{"a": "'x'"}],
        [],
    ),
    "lengths": (
        objects({"a": {**TEXT, "minLength": 2, "maxLength": 4}}),
        [{"a": "é\né"}],
        [{"a": "x"}, {"a": "12345"}],
    ),
    "huge bounds": (
        objects({"a": {**TEXT, "maxLength": 10**12}, "b": {"type": "array", "maxItems": 10**9}}),
        [{"a": "x", "b": [1, None]}],
        [],
    ),
    "formats": (
        objects({"a": {**TEXT, "format": "date-time"}, "b": {**TEXT, "format": "any"}}),
        [{"a": "2026-01-01T10:00:00", "b": "x"}],
        [],
    ),
    "conditions": (
        objects({"a": TEXT}, **{"if": {"required": ["a"]}, "then": {"properties": {"b": WHOLE}}}),
        [{"a": "x", "b": 1}],
        [],
    ),
    "keywords that nothing holds": (
        objects(
            {"a": {"not": TEXT}, "b": {"type": "array", "uniqueItems": True, "contains": TEXT}},
            dependentSchemas={"a": {"properties": {"c": WHOLE}}},
            minProperties=1,
            propertyNames=TEXT,
        ),
        [{"b": ["x"], "a": 1, "c": 2}],
        [{"b": 1}],
    ),
    "alternatives of required ones": (
        objects({"a": TEXT, "b": TEXT}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
        [{"b": "x"}, {"b": "x", "a": "y"}],
        [{"c": 1}],
    ),
    "all of several": (
        {
            "allOf": [objects({"a": WHOLE}, "a"), {"$ref": "#/$defs/b"}],
            "$defs": {"b": objects({"b": WHOLE})},
        },
        [{"b": 1, "a": 2}, {"a": 1}],
        [{"b": 1}, {"a": 1, "c": 1}],
    ),
    "recursion": (
        {"$ref": "#/$defs/node", "$defs": {"node": objects(NODE, "v")}},
        [{"next": {"next": {"v": 3}, "v": 2}, "v": 1}],
        [{"v": 1, "next": {}}],
    ),
    "a schema elsewhere": (
        objects({"a": {"$ref": "https://example.com/schema"}}),
        [{"a": {"b": 1}}],
        [],
    ),
    "names by patterns": (
        objects({"a": WHOLE}, patternProperties={"^x-": WHOLE, "^x-y": {}}),
        [{"x-b": 1, "a": 2}, {"a": 1}],
        [{"a": [2]}],
    ),
    "names by patterns alone": (
        objects({}, patternProperties={"^x-": WHOLE}, additionalProperties=False),
        [{"x-b": 1}, {}],
        [{"x-b": [1]}],
    ),
    "other names": (
        objects({"a": WHOLE}, additionalProperties=WHOLE),
        [{"b": 1, "a": 2}],
        [{"b": 1, "a": [2]}, {"b": [1]}],
    ),
    "no names": ({"type": "object"}, [{"a": [1, {"b": None}]}, {}], []),
    "bools": (
        objects({"a": True, "b": False}),
        [{"a": [1]}, {}],
        [{"b": 1}],
    ),
    "types": (
        objects({"a": {"type": ["integer", "array"], "items": WHOLE}, "b": {"type": ["null"]}}),
        [{"b": None, "a": [1]}, {"a": 1}],
        [{"b": 1}, {"a": [[1]]}],
    ),
    "values": (
        objects(
            {
                "a": {"anyOf": [{"enum": ["on", "two words", ""]}, {"type": "null"}]},
                "b": {"const": {"p": 1, "q": [2]}},
                "c": {"enum": []},
            }
        ),
        [{"a": "two words", "b": {"q": [2], "p": 1}}, {"a": None}, {"a": ""}],
        [{"a": "off"}, {"b": {"p": 1}}, {"c": 1}],
    ),
    "draft 4": (
        objects({"a": {"type": "number", "minimum": 0, "exclusiveMinimum": True}}, "a", **DRAFT_4),
        [{"a": 0.5}],
        [{"a": -1}],
    ),
    "tuples": (
        objects({"a": {"type": "array", "prefixItems": [WHOLE, TEXT], "items": False}}),
        [{"a": []}, {"a": [1, "x"]}],
        [{"a": ["x"]}, {"a": [1, "x", 2]}],
    ),
    "words for numbers": (objects({"a": {**WHOLE, "minimum": "1"}}), [], [{"a": "x"}]),
}


def written(form: str, arguments: dict[str, Any]) -> str:
    """A call as models write it."""
    if form == "xml":
        values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
        return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
    key, separators = ("parameters", (",", ":")) if form == "llama" else ("arguments", None)
    call = json.dumps({"name": "f", key: arguments}, separators=separators, ensure_ascii=False)
    return call if form == "llama" else f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize("form", ["hermes", "xml", "llama"])
@pytest.mark.parametrize("which", ARGUMENTS)
def test_all_that_a_schema_allows_may_be_written(which: str, form: str) -> None:
    """In any order, and read as it was meant; and what is held is held."""
    schema, good, bad = ARGUMENTS[which]
    shape, grammars = shape_of(form, tools=(Tool("f", "", schema), EMPTY))
    for arguments in [*good, *bad]:
        text = written(form, arguments)
        constraint, reader, taken = shape.constraint(""), shape.text(0, ""), True
        assert constraint is not None
        for token in grammars.tokens_of(text.encode()):
            may = allowed(constraint)
            taken = taken and (may is None or token in may)
            constraint.add(token)
        assert taken == (arguments in good), (arguments, taken)
        if taken:
            _, _, calls, reason = joined([*reader.push(text), *reader.end("stop")])
            assert [(n, json.loads(a)) for n, a in calls] == [("f", arguments)]
            assert list(json.loads(calls[0][1])) == list(arguments) and reason == "tool_calls"


def test_the_arguments_of_the_table_are_what_their_schemas_say() -> None:
    for which, (schema, good, _) in ARGUMENTS.items():
        for arguments in good:
            if "elsewhere" not in which:
                jsonschema.validate(arguments, schema)


NESTED = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(15)}
GROWING = {
    "a": objects({"c": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}}),
    "b": objects({"c": {"$ref": "#/$defs/b"}, "d": TEXT}),
}


@pytest.mark.parametrize(
    "schema",
    [
        objects({"a": {"$ref": "#/$defs/d0"}}, **{"$defs": {**NESTED, "d15": False}}),
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": GROWING},
    ],
    ids=["a million of a million", "without an end"],
)
@pytest.mark.parametrize("form", ["hermes", "xml"])
def test_small_schemas_that_stand_for_large_ones(
    form: str, schema: Any, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{form}-{len(str(schema))}"  # it is said once a name
    shape, _ = shape_of(form, tools=(Tool(name, "", schema),))
    text = written(form, {"a": 5}).replace('"f"', f'"{name}"').replace("=f>", f"={name}>")
    _, _, calls, _ = joined([*(reader := shape.text(0, "")).push(text), *reader.end("stop")])
    assert calls == [(name, '{"a": 5}')] and "too many others" in caplog.text


def test_what_is_not_held_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    odd = objects({"x>": TEXT, "a": {**TEXT, "pattern": "(?=a)"}})
    for _ in range(2):
        for form in (HERMES, XML):
            assert form.grammar(GRAMMARS_WORDS, [Tool("odd", "", odd)], ToolChoice())
    assert [record.message.partition(": its calls")[0] for record in caplog.records] == [
        "tool odd"
    ] * 2
    assert "pattern" in caplog.text and "the name 'x>'" in caplog.text


@pytest.mark.parametrize("form", [HERMES, XML, LLAMA])
def test_many_tools(form: Any) -> None:
    """As agents have them; and more than a grammar can hold."""
    long = "mcp__a-server.of/tools:" + "n" * 220
    tools = [Tool(f"{long}_{i}", "", WEATHER.parameters) for i in range(300)]
    assert random_answer(
        GRAMMARS_WORDS, form.grammar(GRAMMARS_WORDS, tools, ToolChoice("required")).start(), 2
    )[0]
    many = [Tool(f"tool_{i}", "", {}) for i in range(2500)]
    constraint = form.grammar(GRAMMARS_WORDS, many, ToolChoice("required")).start()
    text = written({HERMES: "hermes", XML: "xml", LLAMA: "llama"}[form], {})
    for token in GRAMMARS_WORDS.tokens_of(re.sub(r"\bf\b", "tool_2499", text).encode()):
        assert token in (allowed(constraint) or [])
        constraint.add(token)


# The engine ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["hermes", "xml"])
def test_a_nonsense_model_calls_tools_beside_others(form: str) -> None:
    lm = bitnet_ops.load()
    lm.tokenizer.chat_template = FORMS[form].replace("<|im_end|>", "</s>")
    grammars = Grammars(lm.tokenizer, lm.config.vocab_size, lm.stop_ids)
    ask = Ask(
        messages=[{"role": "user", "content": "In the beginning"}],
        tools=(Tool("point", "", POINT), EMPTY),
        tool_choice=ToolChoice("required"),
        thinking_budget=5,
        parallel_tools=False,
    )
    shape = AnswerShape(ask, lm.tokenizer, lambda: grammars)
    read = lm.tokenizer.read_chat(shape.messages, tools=shape.tools)
    ways = [SamplingParams(temperature=t, seed=s) for t, s in itertools.product((0, 1.0), (1, 2))]

    def run(ways: Sequence[SamplingParams]) -> list[list[int]]:
        engine, found = Engine(lm.model), dict[int, list[int]]()
        for way in ways:
            constraint = shape.constraint(read.text)
            id = engine.add(read.ids(), way, Limits(300, lm.stop_ids), constraint=constraint)
            found[id] = []
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, NewToken):
                    found[event.request_id].append(event.token_id)
                else:
                    assert isinstance(event, Finished) and event.reason == "stop"
        return list(found.values())

    together = run(ways)
    assert together == [ids for way in ways for ids in run([way])]
    for ids in together:
        thoughts, text, calls, reason = joined(deltas_of(shape, read.text, ids, "stop"))
        assert calls and reason == "tool_calls" and not text
        assert bool(thoughts) == (form == "xml")
        check_calls(calls, {**SCHEMAS, "point": POINT})
