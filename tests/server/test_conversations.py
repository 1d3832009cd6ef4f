"""Conversations as clients send them, in every dialect: the prompt tells all of it, and no field of
it ends a turn."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from bitnet_ops.generate.chat import ChatTemplateError
from bitnet_ops.server.catalog import ModelGrammars, Served
from bitnet_ops.server.dialects.anthropic import CountRequest, MessagesRequest, _count
from bitnet_ops.server.dialects.ollama import ChatBody
from bitnet_ops.server.dialects.openai import ChatRequest
from bitnet_ops.server.dialects.responses import ResponseRequest
from bitnet_ops.server.exchange import Ask, AskError
from bitnet_ops.server.placing import read_placed
from bitnet_ops.server.prompt import Prompt, make_prompt, template_options
from bitnet_ops.server.tools import form_of
from chat_templates import STYLES
from served import scripted_lm
from tool_templates import FORMS, STRICT

GEMMA = """{%- for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('no such role') }}{% endif %}
{%- if (message.role == 'user') != loop.index0 is even %}{{ raise_exception('turns') }}{% endif %}
{{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content | trim ~ '<|im_end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>model\n' }}{%- endif %}"""
RULES = {
    "strict": STRICT,
    "silent": STYLES["qwen35"],  # leaves late system messages out
    "alternating": STYLES["mistral"],
    "no system": GEMMA,
    "any role": STYLES["bitnet"],
}


def served_with(template: str) -> Served:
    lm = scripted_lm({})
    lm.tokenizer.chat_template = template
    lm.tokenizer.special_tokens.update(bos_token="<s>", eos_token="</s>")
    return Served("m", lm, ModelGrammars(lm))


def asked(dialect: str, messages: list[Any], **more: Any) -> Ask:
    """`messages`, of roles and texts, and tools' as chat completions have them, in a dialect."""
    if dialect == "chat":
        return ChatRequest.model_validate({"messages": messages, **more}).ask()
    if dialect == "ollama":
        return ChatBody.model_validate({"messages": messages, **more}).ask()
    if dialect == "responses":
        body = ResponseRequest.model_validate({"input": messages, **more})
        return body.ask(*body.messages())
    body = {"max_tokens": 9, "messages": messages, **more}
    return MessagesRequest.model_validate(body).ask()


def prompt(template: str, dialect: str, messages: list[Any], **more: Any) -> Prompt:
    return make_prompt(served_with(template), asked(dialect, messages, **more))


DIALECTS = ("chat", "ollama", "responses", "anthropic")
USER, ANSWER = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A lamp."}
AGAIN, LATE = {"role": "user", "content": "Why?"}, {"role": "system", "content": "Be quick,\nall."}
FIRST, SECOND = ({"role": "system", "content": text} for text in ("Be brief.", "Be kind."))

# System messages -------------------------------------------------------------------------------

PLACES = {
    "behind a question": ([USER, LATE], "Who?"),
    "between questions": ([USER, LATE, AGAIN], "Who?"),
    "behind an answer": ([FIRST, USER, ANSWER, LATE, AGAIN], "A lamp."),
    "at the end": ([FIRST, USER, ANSWER, LATE], "A lamp."),
    "in front": ([FIRST, SECOND, LATE, USER], "Be kind."),
    "alone": ([FIRST, LATE], "Be brief."),
    "before an answer": ([LATE, ANSWER, AGAIN], ""),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_system_message_is_read_where_it_stands(dialect: str, rule: str, place: str) -> None:
    messages, before = PLACES[place]
    text = prompt(RULES[rule], dialect, messages).text
    at = text.index("Be quick,\nall.")
    assert text.index(before) < at
    behind = messages[messages.index(LATE) + 1 :] if rule != "alternating" else ()
    assert all(message["content"] in text[at:] for message in behind)
    assert all(text.count(message["content"]) == 1 for message in messages)
    assert text.endswith(("assistant\n", "<think>\n", "[/INST]", "model\n", "Assistant: ")), text


@pytest.mark.parametrize("rule", ["strict", "silent", "no system"])
def test_a_late_system_message_keeps_the_prefix(rule: str) -> None:
    """What was asked before it begins the prompt that it stands in, and those behind that."""
    messages = [FIRST, USER, ANSWER, AGAIN, ANSWER, LATE, AGAIN, ANSWER, USER]
    texts = [prompt(RULES[rule], "chat", messages[:n]).text for n in (4, 7, 9)]
    for before, behind in zip(texts, texts[1:], strict=False):
        said = before[: before.rindex("Why?")]
        assert behind.startswith(said)


@pytest.mark.parametrize("rule", ["strict", "silent", "no system"])
def test_results_stay_beside_their_calls(rule: str) -> None:
    """And what is said with them is no question, behind which templates drop thoughts."""
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    called = {**ANSWER, "tool_calls": [call, call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "noon"}
    for order in ([LATE, result, result], [result, LATE, result], [result, result, LATE]):
        text = prompt(RULES[rule], "chat", [USER, called, *order]).text
        at = [
            text.index("A lamp."),
            text.index("noon"),
            text.rindex("noon"),
            text.index("Be quick"),
        ]
        assert at == sorted(at) and "<|im_start|>user\n<system>" not in text


def test_tokens_are_counted_of_what_is_read() -> None:
    served = served_with(STRICT)
    body = {"messages": [USER, LATE, ANSWER, AGAIN], "max_tokens": 9, "system": "Be brief."}
    ids = make_prompt(served, MessagesRequest.model_validate(body).ask()).ids
    assert _count(served, CountRequest.model_validate(body).ask(), 1000) == len(ids)


def test_several_calls_and_unknown_roles_for_templates_that_refuse_them() -> None:
    calls = [{"id": i, "function": {"name": i * 2, "arguments": "{}"}} for i in "ab"]
    results = [{"role": "tool", "tool_call_id": i, "content": i * 3} for i in "ab"]
    critic = {"role": "critic", "content": "I doubt it."}
    for rule in (STYLES["llama"], GEMMA, STRICT, STYLES["mistral"]):
        text = prompt(rule, "chat", [USER, {**ANSWER, "tool_calls": calls}, *results, critic]).text
        assert text.index("aa") < text.index("bb") < text.index("aaa") < text.index("bbb")
        assert text.index("bbb") < text.index("I doubt it.")


def test_what_a_template_rejects_in_every_form_is_said_as_it_was_first() -> None:
    with pytest.raises(AskError, match="rejects: never"):
        prompt("{{ raise_exception('never') }}", "chat", [USER, LATE])
    with pytest.raises(AskError, match="no end within"):  # it is not tried again
        prompt(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "chat",
            [LATE],
        )


# Histories -------------------------------------------------------------------------------------


def answer_of(dialect: str, broken: Any) -> list[Any]:
    """An answer that calls f with arguments `broken`, and what f gave."""
    if dialect == "anthropic":
        use = {"type": "tool_use", "id": "c", "name": "f", "input": broken}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "noon"}
        return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    if dialect == "responses":
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": broken}
        return [call, {"type": "function_call_output", "call_id": "c", "output": "noon"}]
    call = {"id": "c", "function": {"name": "f", "arguments": broken}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('{"path": "a.py"}', {"path": "a.py"}),
        ({"path": "a.py"}, {"path": "a.py"}),
        ('"{\\"path\\": 1}"', {"path": 1}),
        ('{"path": "a.p', {"path": "a.p"}),
        ('{"path": "a", "lines": [1, 2', {"path": "a", "lines": [1, 2]}),
        ('["a.py"]', {"arguments": ["a.py"]}),
        ("by hand", {"arguments": "by hand"}),
        (7, {"arguments": 7}),
        *((empty, {}) for empty in ("", " ", "null", None, [], "{}", "{")),
        ("[" * 300, {"arguments": "[" * 300}),
    ],
)
def test_arguments_of_earlier_calls_are_objects(dialect: str, arguments: Any, wanted: Any) -> None:
    ask = asked(dialect, [USER, *answer_of(dialect, arguments), AGAIN])
    assert ask.messages is not None
    (call,) = ask.messages[1]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": wanted} and call["id"] == "c"
    assert make_prompt(served_with(STRICT), ask).text.count("noon") == 1


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else 1


@pytest.mark.parametrize("dialect", DIALECTS)
def test_arguments_deeper_than_templates_bear(dialect: str) -> None:
    deep = answer_of(dialect, nested(300))
    assert "noon" in prompt(STRICT, dialect, [USER, *deep, AGAIN]).text


IMAGE = {"type": "image", "source": {"type": "base64", "data": "AA"}}
# What may stand in a history: (dialect, entries, words that the model has to be told)
HISTORIES: list[tuple[str, list[Any], list[str]]] = [
    ("chat", [{"role": "user", "content": [{"type": "image_url"}]}], ["[image_url: left out"]),
    (
        "chat",
        [{"role": "user", "content": None}, {"role": "user"}, {"role": "user", "content": []}],
        [],
    ),
    (
        "chat",
        [{"role": "user", "content": [{"type": "text"}, {"type": "text", "text": None}, 5]}],
        ["5"],
    ),
    (
        "chat",
        [{"content": "who?"}, {"role": None, "content": "so"}, {"role": "x" * 99}],
        ["who?", "so"],
    ),
    ("chat", ["hello", None, 7, []], []),
    ("chat", [{"role": "tool", "content": "alone"}], ["alone"]),
    ("chat", [{"role": "function", "name": "f", "content": "old"}], ["old"]),
    ("chat", [{"role": "assistant", "function_call": {"name": "f1", "arguments": ""}}], ["f1"]),
    (
        "chat",
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}, None, {}]}],
        [],
    ),
    (
        "chat",
        [{"role": "assistant", "tool_calls": {}, "content": {"type": "text", "text": "hm"}}],
        ["hm"],
    ),
    (
        "chat",
        [
            {
                "role": "assistant",
                "tool_calls": [{"type": "custom", "custom": {"name": "sh", "input": "ls -l"}}],
            }
        ],
        ["sh", "ls -l"],
    ),
    ("chat", [{"role": "assistant", "content": None, "refusal": "I will not."}], ["I will not."]),
    (
        "chat",
        [
            {
                "role": "assistant",
                "content": [{"type": "refusal", "refusal": "no"}],
                "audio": {"id": "a"},
            }
        ],
        ["no"],
    ),
    (
        "ollama",
        [{"role": "user", "content": "look", "images": ["AA"]}],
        ["[image: left out", "look"],
    ),
    (
        "ollama",
        [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f1", "arguments": '{"a": "b1"}'}}],
            }
        ],
        ["f1", "b1"],
    ),
    (
        "anthropic",
        [{"role": "user", "content": [IMAGE, {"type": "text", "text": "look"}]}],
        ["[image: left out", "look"],
    ),
    (
        "anthropic",
        [
            {
                "role": "user",
                "content": [{"type": "document", "title": "Log", "source": {"type": "base64"}}],
            }
        ],
        ["Log"],
    ),
    (
        "anthropic",
        [{"role": "user", "content": [{"type": "tool_use", "name": "f"}, {"type": "thinking"}]}],
        [],
    ),
    (
        "anthropic",
        [
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "content": [{"type": "tool_reference", "tool_name": "grep"}],
                    }
                ],
            }
        ],
        ["grep"],
    ),
    (
        "anthropic",
        [
            {
                "role": "assistant",
                "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text"}],
            }
        ],
        [],
    ),
    (
        "anthropic",
        [
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "server_tool_use",
                        "id": "s",
                        "name": "web_search",
                        "input": {"query": "lamps"},
                    },
                    {
                        "type": "web_search_tool_result",
                        "tool_use_id": "s",
                        "content": [
                            {
                                "type": "web_search_result",
                                "title": "Of lamps",
                                "url": "u1",
                                "encrypted_content": "x",
                            }
                        ],
                    },
                    {
                        "type": "text",
                        "text": "So.",
                        "citations": [{"type": "web_search_result_location"}],
                    },
                ],
            }
        ],
        ["web_search", "lamps", "Of lamps", "So."],
    ),
    (
        "anthropic",
        [
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "server_tool_use",
                        "id": "s",
                        "name": "bash_code_execution",
                        "input": {},
                    },
                    {
                        "type": "bash_code_execution_tool_result",
                        "tool_use_id": "s",
                        "content": {
                            "type": "bash_code_execution_result",
                            "stdout": "42",
                            "content": [],
                        },
                    },
                    {
                        "type": "mcp_tool_use",
                        "id": "m",
                        "name": "look",
                        "server_name": "x",
                        "input": None,
                    },
                    {
                        "type": "mcp_tool_result",
                        "tool_use_id": "m",
                        "is_error": True,
                        "content": [{"type": "text", "text": "gone"}],
                    },
                ],
            }
        ],
        ["42", "look", "Error: gone"],
    ),
    (
        "anthropic",
        [{"role": "assistant", "content": None}, {"role": "critic", "content": "hm"}],
        ["hm"],
    ),
    ("responses", [{"type": "reasoning", "summary": [], "encrypted_content": "x"}], []),
    (
        "responses",
        [{"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"}],
        ["apply_patch", "*** Begin"],
    ),
    (
        "responses",
        [
            {
                "type": "local_shell_call",
                "call_id": "c",
                "action": {"type": "exec", "command": ["ls"]},
            }
        ],
        ["local_shell", "ls"],
    ),
    (
        "responses",
        [{"type": "mcp_call", "id": "m", "name": "look", "arguments": "{}", "output": "seen"}],
        ["look", "seen"],
    ),
    (
        "responses",
        [{"type": "function_call", "arguments": "{}"}, {"type": "function_call_output"}],
        [],
    ),
    (
        "responses",
        [
            {"type": kind, "id": "x"}
            for kind in ("web_search_call", "item_reference", "compaction", "x")
        ],
        [],
    ),
    (
        "responses",
        [{"type": "message", "content": [{"type": "input_image"}]}],
        ["[input_image: left out"],
    ),
]


@pytest.mark.parametrize("template", [STRICT, FORMS["hermes"], FORMS["none"], GEMMA])
@pytest.mark.parametrize(("dialect", "entries", "told"), HISTORIES)
def test_a_history_never_stops_a_conversation(dialect, entries, told, template) -> None:
    text = prompt(template, dialect, [USER, *entries, ANSWER, AGAIN]).text
    places = [text.index(word) for word in ("Who?", *told, "A lamp.", "Why?")]
    assert places == sorted(places)


def test_what_is_left_out_has_a_word_in_the_log(caplog) -> None:
    history = [{"role": "user", "content": [{"type": "image_url"}] * 2}, 5, ANSWER, AGAIN]
    with caplog.at_level(logging.WARNING):
        asked("chat", history)
    assert "image_url (2), int (1)" in caplog.text


@pytest.mark.parametrize("template", [STRICT, FORMS["none"]])
def test_an_image_of_a_tool_is_told_as_left_out(template) -> None:
    """Whatever the template, in the newest turn too: nobody could take it back."""
    for dialect in DIALECTS:
        messages = [USER, *answer_of(dialect, "{}")]
        image = [{"type": "input_image" if dialect == "responses" else "image"}]
        if dialect == "anthropic":
            messages[-1]["content"][0]["content"] = image
        elif dialect == "ollama":
            messages[-1]["images"] = ["AA"]
        else:
            messages[-1]["output" if dialect == "responses" else "content"] = image
        assert "image: left out" in prompt(template, dialect, messages).text


@pytest.mark.parametrize(
    ("dialect", "entry"),
    [
        ("chat", {"role": "user", "content": [{"type": "image_url"}]}),
        ("chat", {"role": "user", "content": [{"type": "text", "text": None}]}),
        ("chat", {"content": "hm"}),
        ("chat", "hm"),
        ("ollama", {"role": "user", "content": "look", "images": [7]}),
        ("ollama", None),
        ("anthropic", {"role": "user", "content": [{"type": "image", "source": {}}]}),
        ("anthropic", {"role": "user", "content": [{"type": "tool_use", "name": "f"}]}),
        ("anthropic", {"role": "critic", "content": "no"}),
        ("responses", {"role": "user", "content": [{"type": "input_image"}]}),
        ("responses", {"type": "message", "content": "hm"}),
    ],
)
def test_what_is_wrong_in_the_newest_turn_is_an_error(dialect, entry) -> None:
    for messages in ([entry], [USER, ANSWER, AGAIN, entry]):
        with pytest.raises(AskError) as error:
            asked(dialect, messages)
        assert error.value.status == 400 and error.value.field in ("messages", "input")


# Thoughts and beginnings -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "thoughts",
    [
        {"reasoning_content": "Let me see."},
        {"reasoning": "Let me see."},
        {"reasoning_text": "Let me see."},
        {"thinking": "Let me see."},
        {
            "reasoning": None,
            "reasoning_details": [
                {"type": "reasoning.text", "text": "Let me"},
                {"type": "reasoning.text", "text": " see."},
                {"type": "reasoning.encrypted", "data": "x"},
            ],
        },
        {"reasoning_details": [{"type": "reasoning.summary", "summary": "Let me see."}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "Let me see.", "signature": ""}]},
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "Let me see."}]},
                {"type": "text", "text": ""},
            ]
        },
    ],
)
def test_thoughts_come_back_under_every_name(thoughts) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    for dialect in ("chat", "ollama"):
        messages = [
            USER,
            {"role": "assistant", "tool_calls": [call], **thoughts},
            {"role": "tool", "content": "x"},
        ]
        assert asked(dialect, messages).messages[1]["reasoning_content"] == "Let me see."


BEGUN = {"role": "assistant", "content": "One, two, "}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dialect", ["chat", "ollama", "anthropic"])
def test_an_answer_goes_on_from_its_beginning(dialect, rule) -> None:
    ask = asked(dialect, [FIRST, USER, BEGUN])
    found = make_prompt(served_with(RULES[rule]), ask)
    assert ask.continues and found.text.endswith("One, two, ")
    reply = found.shape.text(0, found.text)
    assert "".join(d.text for d in [*reply.push(" three"), *reply.end("stop")][:-1]) == " three"
    empty = asked(dialect, [USER, {**BEGUN, "content": ""}])
    assert not empty.continues and empty.messages == [USER]


def test_fields_that_say_whether_it_goes_on() -> None:
    def continues(**fields: Any) -> bool:
        return asked("chat", [USER, BEGUN], **fields).continues

    assert continues(continue_final_message=True, add_generation_prompt=False)
    assert continues(add_generation_prompt=False)
    assert not continues(add_generation_prompt=True) and not continues(continue_final_message=False)
    with pytest.raises(AskError, match="continue_final_message or add_generation_prompt, got both"):
        continues(continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(AskError, match="end with the assistant's text, for continue_final_message"):
        asked("chat", [USER], continue_final_message=True)
    with pytest.raises(AskError, match="has a format"):
        prompt(STRICT, "chat", [USER, BEGUN], response_format={"type": "json_object"})
    new = prompt(STRICT, "chat", [USER, BEGUN], add_generation_prompt=True).text
    assert "One, two, <|im_end|>" in new and new.endswith("<think>\n")


def test_a_template_that_rewrites_its_last_message_cannot_go_on() -> None:
    tokenizer = served_with("{{ messages[0].content }}").lm.tokenizer
    with pytest.raises(ChatTemplateError, match="writes the last message as it is"):
        tokenizer.read_chat([USER, BEGUN], continue_final=True)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, (None, None, None)),
        ({"reasoning_effort": "low"}, (True, "low", None)),
        ({"reasoning_effort": "none"}, (False, "none", None)),
        ({"enable_thinking": False}, (False, None, None)),
        ({"enable_thinking": True, "thinking_budget": 5}, (True, None, 5)),
        ({"chat_template_kwargs": {"enable_thinking": False}, "think": True}, (False, None, None)),
        ({"chat_template_kwargs": {"thinking": True}}, (True, None, None)),
        ({"think": False}, (False, None, None)),
        ({"think": "high"}, (True, "high", None)),
        ({"thinking": {"type": "disabled"}}, (False, None, None)),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, (True, None, 9)),
        ({"thinking": {"type": "adaptive"}}, (None, None, None)),
        ({"reasoning": {"enabled": False}}, (False, None, None)),
        ({"reasoning": {"effort": "high", "max_tokens": 7, "exclude": True}}, (True, "high", 7)),
        ({"reasoning": "minimal"}, (True, "minimal", None)),
        ({"reasoning": False, "reasoning_effort": "high"}, (False, "high", None)),
    ],
)
def test_every_name_of_thinking_is_obeyed(fields, wanted) -> None:
    ask = asked("chat", [USER], **fields)
    assert (ask.thinking, ask.effort, ask.thinking_budget) == wanted


# Special tokens --------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "description": "about",
    "required": ["zone"],
    "properties": {"zone": {"type": "string", "description": "its name", "enum": ["UTC"]}},
}
FUNCTION = {"name": "f", "description": "The time.", "parameters": SCHEMA}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "name": "dev", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "name": "me", "content": "Who?"},
        {
            "role": "assistant",
            "content": "Hm.",
            "reasoning": "Let me see.",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"zone": "UTC"}},
                }
            ],
        },
        {"role": "tool", "name": "f", "tool_call_id": "c", "content": "noon"},
        {"role": "critic", "content": "I doubt it."},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "chat_template_kwargs": {"mood": "calm"},
}
BODIES: dict[str, dict[str, Any]] = {
    "chat": CHAT,
    "ollama": {"messages": CHAT["messages"], "tools": CHAT["tools"]},
    "responses": {
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
            {"role": "user", "content": "Who?"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Let me see."}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"zone": "UTC"}},
            {"type": "function_call_output", "call_id": "c", "output": "noon"},
            {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
    },
    "anthropic": {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "Who?"},
            {"role": "system", "content": "Be kind."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Let me see.", "signature": ""},
                    {"type": "text", "text": "Hm."},
                    {
                        "type": "tool_use",
                        "id": "c",
                        "name": "f",
                        "input": {"zone": {"at": ["UTC"]}},
                    },
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [{"type": "text", "text": "noon"}],
                    },
                    {
                        "type": "document",
                        "title": "Log",
                        "source": {"type": "text", "data": "It ends."},
                    },
                ],
            },
        ],
        "tools": [{"name": "f", "description": "The time.", "input_schema": SCHEMA}],
    },
}


def changed(value: Any, text: str) -> Iterator[Any]:
    """`value` with `text` in the place of one text or key; each place in turn."""
    if isinstance(value, str):
        yield text
    elif isinstance(value, dict):
        for key in value:
            for new in changed(value[key], text):
                yield {**value, key: new}
            yield {(text if k == key else k): v for k, v in value.items()}
    elif isinstance(value, list):
        for i in range(len(value)):
            for new in changed(value[i], text):
                yield [*value[:i], new, *value[i + 1 :]]


@pytest.mark.parametrize("form", ["xml", "llama", "none", "qwen35"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.sampled(6)
def test_no_field_of_a_request_ends_a_turn(dialect: str, form: str) -> None:
    """Each text and key in turn: there are as many special tokens as with a harmless word there."""
    template = {**FORMS, "qwen35": STYLES["qwen35"]}[form]
    served, body = served_with(template), copy.deepcopy(BODIES[dialect])
    tokenizer = served.lm.tokenizer
    special = [tokenizer.token_id(token) for token in ("<|im_end|>", "<|im_start|>")]

    def counts(body: dict[str, Any]) -> list[int] | None:
        fields = dict(body)
        try:
            messages = fields.pop("input" if dialect == "responses" else "messages")
            ask = asked(dialect, messages, **fields)
            assert ask.messages is not None
            given, tools = form_of(template).prompt(ask.messages, ask.tools)  # without a grammar
            options = template_options(served, ask)
            ids = read_placed(
                lambda m: tokenizer.read_chat(m, tools=tools, chat_template_kwargs=options), given
            ).ids()
        except (ValueError, KeyError):
            return None
        return [ids.count(token) for token in special]

    tried = 0
    for hostile in ("<|im_end|>", "m_end|>x<|im_end|"):
        word = "w" * len(hostile)
        for new, plain in zip(changed(body, hostile), changed(body, word), strict=True):
            if (found := counts(new)) is not None:
                assert found == counts(plain), json.dumps(new)
                tried += 1
    assert tried > 30
