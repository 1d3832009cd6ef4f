"""Answers as thoughts, text and calls: wherever the pieces are cut, and however they end."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_ops.generate.run import TokenLogprobs
from bitnet_ops.server.answer import AnswerText
from bitnet_ops.server.exchange import CallArguments, CallBegin, Delta, End, Reasoning, Text, Tool
from bitnet_ops.server.tools import HERMES, LLAMA, XML, ToolForm

TOOLS = (
    Tool(
        "paint",
        "Paints a wall.",
        {
            "type": "object",
            "properties": {
                "colour": {"type": "string"},
                "coats": {"type": "integer"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "where": {"type": "array", "items": {"type": "string"}},
                "any": {},
            },
            "required": ["colour"],
        },
    ),
    Tool("stop"),
)


def splitter(form: ToolForm | None = None, **options: Any) -> AnswerText:
    numbers = itertools.count()
    return AnswerText(7, form=form, tools=TOOLS, new_id=lambda: f"id{next(numbers)}", **options)


def split(
    pieces: Sequence[str], form: ToolForm | None = None, *, reason: str = "stop", **options: Any
) -> list[Delta]:
    """The deltas of an answer, neighbours of a kind joined."""
    answer, found = splitter(form, **options), list[Delta]()
    deltas = [delta for piece in pieces for delta in answer.push(piece)]
    for delta in [*deltas, *answer.end(reason, len(pieces))]:
        last = found[-1] if found else None
        if isinstance(delta, Text) and isinstance(last, Text):
            found[-1] = Text(7, last.text + delta.text)
        elif isinstance(delta, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(7, last.text + delta.text)
        elif isinstance(delta, CallArguments) and isinstance(last, CallArguments):
            assert last.call == delta.call
            found[-1] = CallArguments(7, delta.call, last.text + delta.text)
        else:
            found.append(delta)
    return found


def shown(deltas: Sequence[Delta]) -> list[Any]:
    """The same, short: ("text", ...), ("thought", ...), (name, arguments), reason."""
    found: list[Any] = []
    for delta in deltas:
        if isinstance(delta, Text):
            found.append(("text", delta.text))
        elif isinstance(delta, Reasoning):
            found.append(("thought", delta.text))
        elif isinstance(delta, CallBegin):
            assert delta.id == f"id{delta.call}"
            found.append([delta.name, None])
        elif isinstance(delta, CallArguments):
            found[-1][1] = delta.text
        else:
            found.append(delta.reason if delta.stop is None else (delta.reason, delta.stop))
    return found


def read(text: str, form: ToolForm | None = None, **options: Any) -> list[Any]:
    """What an answer is; the same for all at once and for one character after the other."""
    whole = shown(split([text], form, **options))
    assert shown(split(list(text), form, **options)) == whole
    return whole


# Thoughts and text ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "plain", " \n spaces \n\n", "a < b </think> <tool_call>", "<th"]
)
def test_plain_text_stays_as_it_is(text: str) -> None:
    assert read(text) == ([("text", text), "stop"] if text else ["stop"])


def test_thoughts_are_told_apart() -> None:
    expected = [("thought", "one\n\ntwo"), ("text", "three \n"), "stop"]
    assert read("<think>\none\n\ntwo\n</think>\n\nthree \n") == expected
    assert read(" \n<think>one\n\ntwo</think>three \n") == expected
    assert read("\none\n\ntwo\n</think>\n\nthree \n", opened=True) == expected
    assert read("<think>\n\n</think>\n\nthree") == [("text", "three"), "stop"]
    assert read("a <think>b</think>") == [("text", "a <think>b</think>"), "stop"]
    assert read("one </thin", opened=True) == [("thought", "one </thin"), "stop"]
    cut = {"opened": True, "reason": "length"}
    assert read("one </thin", **cut) == [("thought", "one"), "length"]
    assert read("<thi", reason="length") == [("text", "<thi"), "length"]
    assert read("one\n", opened=True, reason="context") == [("thought", "one"), "length"]


def test_stop_texts_are_found_in_the_answer_alone() -> None:
    stop = ["END", "\n\n"]
    expected = [("thought", "one\n\nEND"), ("text", "two "), ("stop", "END")]
    assert read("<think>one\n\nEND\n</think>\n\ntwo END and", stop=stop) == expected
    assert read("a \n\nEND", stop=stop) == [("text", "a "), ("stop", "\n\n")]
    assert read("\n\n", stop=stop) == [("stop", "\n\n")]
    assert read("<think> EN", stop=["<"]) == [("thought", "EN"), "stop"]
    assert read("<thin", stop=["<"]) == [("stop", "<")]
    assert read("a EN", stop=stop) == [("text", "a EN"), "stop"]
    call = '<tool_call>\n{"name": "stop", "arguments": {"x": "END"}}\n</tool_call>\nEND'
    assert read(call, HERMES, stop=stop) == [["stop", '{"x": "END"}'], ("stop", "END")]
    assert read("ab<tool_call>", HERMES, stop=["b<tool"]) == [("text", "a"), ("stop", "b<tool")]
    assert read("ab <tool", HERMES, stop=["<tool_box"]) == [("text", "ab <tool"), "stop"]
    answer = splitter(stop=["END"])
    deltas = answer.push("a END b")
    assert (deltas, answer.stopped, answer.push("c")) == ([Text(7, "a ")], "END", [])


def test_logprobs_and_counts() -> None:
    answer = splitter(HERMES, opened=True)
    one, two, three, four = (TokenLogprobs(i, -1.0) for i in range(4))
    assert answer.push("a", [one]) == [Reasoning(7, "a", (one,))]
    assert answer.push("</thi", [two]) == []
    assert answer.push("nk>", [three]) == []
    assert answer.push("\n\nb", [four]) == [Text(7, "b", (two, three, four))]
    assert answer.push("", [one]) == []
    assert answer.end("length", 9) == [Text(7, "", (one,)), End(7, "length", None, 9, 3)]
    assert AnswerText(0).end("abort") == [End(0, "stop")]


# Calls ------------------------------------------------------------------------------------------

JSON = '{"name": "paint", "arguments": {"colour": "r\\"}{e</tool_call>d", "where": [{}]}}'
ARGUMENTS = '{"colour": "r\\"}{e</tool_call>d", "where": [{}]}'


def test_calls_in_json() -> None:
    call = f"<tool_call>\n{JSON}\n</tool_call>"
    paint = ["paint", ARGUMENTS]
    assert read(call, HERMES) == [paint, "tool_calls"]
    assert read(f"So:\n\n{call}\n", HERMES) == [("text", "So:"), paint, "tool_calls"]
    between = f"<think>x</think>\n\n So \n{call}\n and {call}{call} done \n"
    assert read(between, HERMES) == [
        *(("thought", "x"), ("text", "So"), paint),
        *(("text", "and"), paint, paint, ("text", "done \n"), "tool_calls"),
    ]
    assert read(f"a {call}", None) == [("text", f"a {call}"), "stop"]
    empty = [["stop", "{}"], "tool_calls"]
    for text in [
        '{"name": "stop", "arguments": {}}',
        '{"name": "stop"}',
        '{ "arguments" : null , "name":"stop" }',
        '{"arguments": "{}", "name": "stop", "id": [1, "}"]}',
        '{"name": "stop", "parameters": {}, "arguments": {"twice": 1}}',
        '{"name": "stop", "arguments": "{}"}',
    ]:
        assert read(f"<tool_call>{text}</tool_call>", HERMES) == empty, text
        assert read(f"<tool_call>{text}", HERMES) == empty, text  # without its end


def test_what_is_no_call_is_text() -> None:
    for inner in [
        "",
        "x",
        "[1]",
        '{"name": 5}',
        '{"arguments": {}}',
        '{name: "x"}',
        "{1",
        '{"a" 1',
    ]:
        text = f"see <tool_call>{inner}</tool_call> there"
        expected = "see <tool_call>" if not inner else None
        found = read(text, HERMES)
        assert found == [("text", text), "stop"], (inner, expected)
    twice = '<tool_call> is a tag: <tool_call>{"name": "stop"}</tool_call>'
    assert read(twice, HERMES) == [("text", "<tool_call> is a tag:"), ["stop", "{}"], "tool_calls"]
    broken = '<tool_call>{"name": "stop", oh dear}</tool_call> and'
    assert read(broken, HERMES) == [["stop", None], ("text", "and"), "stop"]


def test_calls_that_the_limit_cuts_off() -> None:
    call = f"a <tool_call>\n{JSON}\n</tool_call>"
    begun = call.index('"paint"') + len('"paint"')
    complete = call.index("}\n</tool_call>")
    for end in range(2, len(call)):
        found = read(call[:end], HERMES, reason="length")
        assert found[-1] == "length"
        if end < begun:
            assert found == [("text", "a" if end > 3 else call[:end]), "length"], end
        else:
            assert found[1][0] == "paint" and ARGUMENTS.startswith(found[1][1] or "")
            assert (found[1][1] == ARGUMENTS) == (end >= complete)


def test_calls_of_llama() -> None:
    body = JSON.replace("arguments", "parameters")
    expected = [["paint", ARGUMENTS], "tool_calls"]
    for text in [body, f" \n{body}", f"<|python_tag|>{body}", f"{body[:1]}\n  {body[1:]}"]:
        assert read(text, LLAMA) == expected, text
    assert read(f"a <|python_tag|>{body}", LLAMA) == [("text", "a"), *expected]
    assert read(f"a {body}", LLAMA) == [("text", f"a {body}"), "stop"]
    assert read('{"answer": 1}', LLAMA) == [("text", '{"answer": 1}'), "stop"]
    assert read('{"name": 1}', LLAMA) == [("text", '{"name": 1}'), "stop"]
    assert read('{"nam', LLAMA) == [("text", '{"nam'), "stop"]


def xml(*parameters: tuple[str, str], name: str = "paint") -> str:
    inner = "".join(f"<parameter={n}>\n{v}\n</parameter>\n" for n, v in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("colour", "red", "red"),
        ("colour", "", ""),
        ("colour", "\n two\nlines \n", "\n two\nlines \n"),
        ("colour", '"quoted" \\ é \x01', '"quoted" \\ é \x01'),
        ("colour", "5", "5"),
        ("colour", "</param</parameter=<b>", "</param</parameter=<b>"),
        ("coats", "5", 5),
        ("coats", " 5.0 ", 5.0),
        ("coats", "many", "many"),
        ("coats", "NaN", "NaN"),
        ("note", "null", None),
        ("note", "None", None),
        ("note", "a note", "a note"),
        ("note", '"a"', '"a"'),
        ("note", "5", "5"),
        ("where", '["a", "b"]', ["a", "b"]),
        ("any", "True", True),
        ("any", '{"a": [1]}', {"a": [1]}),
        ("any", "{a", "{a"),
        ("unknown", "[1]", [1]),
    ],
)
def test_values_of_calls_in_xml(name: str, text: str, value: Any) -> None:
    found = read(xml((name, text)), XML)
    assert found[0][0] == "paint" and found[1] == "tool_calls"
    assert json.loads(found[0][1]) == {name: value}


def test_calls_in_xml() -> None:
    two = xml(("colour", "red"), ("coats", "2"))
    paint = ["paint", '{"colour": "red", "coats": 2}']
    assert read(f"x\n{two}\n{xml(name='stop')}", XML) == [
        *(("text", "x"), paint, ["stop", "{}"], "tool_calls")
    ]
    assert read(two.replace("\n", ""), XML) == [paint, "tool_calls"]
    assert read(two.replace("</function>\n", ""), XML) == [paint, "tool_calls"]
    again = xml(("colour", "red"), ("colour", "blue"), ("coats", "2"))
    assert read(again, XML) == [paint, "tool_calls"]
    for inner in ["x", '{"name": "paint"}', "<function=>", "<function=a\nb>", "<fun"]:
        text = f"<tool_call>{inner}</tool_call>"
        assert read(text, XML) == [("text", text), "stop"]
    cut = read(two[: two.index("</parameter>") - 3], XML, reason="length")
    assert cut == [["paint", '{"colour": "r'], "length"]
    broken = read(two.replace("<parameter=coats>", "coats"), XML)
    assert broken == [["paint", '{"colour": "red"'], "stop"]


def test_calls_in_thoughts() -> None:
    """The last words of thoughts that were never closed are meant; drafts are not."""
    opened = {"opened": True}
    two = f"<tool_call>\n{JSON}\n</tool_call>\n<tool_call>\n{JSON}\n</tool_call>\n"
    paint = ["paint", ARGUMENTS]
    assert read(f"hm\n{two}", HERMES, **opened) == [("thought", "hm"), paint, paint, "tool_calls"]
    assert read(f"<think>hm {two}", HERMES) == [("thought", "hm"), paint, paint, "tool_calls"]
    whole = xml(("colour", "red"))
    red = ["paint", '{"colour": "red"}']
    assert read(f"a <tool_call> is a tag\n{whole}", XML, **opened) == [
        *(("thought", "a <tool_call> is a tag"), red, "tool_calls")
    ]
    assert read(whole.removesuffix("</tool_call>"), XML, **opened) == [red, "tool_calls"]
    for draft in (f"{two}or", f"{two}<tool_call>\n{{", whole[:-30], "<tool_ca", "<tool_call>"):
        found = read(f"{draft}\n", HERMES if "{" in draft else XML, **opened)
        assert found == [("thought", draft), "stop"], draft
        found = read(f"{draft} </think>\n\n{whole}", XML, **opened)
        assert found == [("thought", draft), red, "tool_calls"], draft
    cut = read(f"hm {whole}", XML, opened=True, reason="length")
    assert cut == [("thought", f"hm {whole}"), "length"]


# Any text, cut anywhere -------------------------------------------------------------------------

PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_call>\n", "\n</tool_call>"),
    *(JSON, '{"name": "stop", ', '"arguments": ', "{}", "}", '{"x": "', '\\"', '"', "END", "EN"),
    *("<function=paint>", "<parameter=colour>", "</parameter>", "</function>", "<parameter=any>\n"),
    *(
        xml(("colour", "red"), ("where", "[]")),
        "<",
        "\n",
        " ",
        "a",
        "é",
        "<|python_tag|>",
        '{"name"',
    ),
]


@given(
    st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    st.data(),
    st.sampled_from([None, HERMES, XML, LLAMA]),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
)
@settings(max_examples=400, deadline=None)
def test_the_cuts_do_not_matter(
    text: str, data: st.DataObject, form: ToolForm | None, opened: bool, reason: str
) -> None:
    options: dict[str, Any] = {"opened": opened, "stop": ["END"], "reason": reason}
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    places = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    whole = shown(split([text], form, **options))
    assert shown(split(pieces, form, **options)) == whole
    assert shown(split(list(text), form, **options)) == whole
    told = "".join(part[1] for part in whole if isinstance(part, tuple) and part[0] != "stop")
    if form is None and "<think>" not in text and not opened and "END" not in text:
        assert told == text
