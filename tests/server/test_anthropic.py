"""Anthropic's dialect: the official client is the oracle of forms, `generate` that of texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import pytest
from anthropic._streaming import SSEDecoder

from bitnet_ops.language_model import LanguageModel
from bitnet_ops.server.dialects.anthropic import MessagesRequest, _Message, _stream
from bitnet_ops.server.exchange import (
    AskError,
    CallArguments,
    CallBegin,
    Delta,
    End,
    Format,
    Reasoning,
    Text,
    ToolChoice,
)
from served import app_of, greedy_demo, scripted_lm, serving

CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
ANSWERS = {
    "think": "<think>\nLet me see.\n</think>\n\nIt is noon.",
    "clock": CALL,
    "both": f"I look.\n{CALL}\n{CALL}",
    "cut off": CALL[:60],
    "many words": "one two three four five six seven",
}
SCHEMA = {
    "type": "object",
    "properties": {"zone": {"type": "string"}},
    "required": ["zone"],
}
TOOLS: list[Any] = [
    {"name": "now", "description": "The time.", "input_schema": SCHEMA},
    {"type": "web_search_20250305", "name": "web_search"},  # runs at Anthropic
]


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return greedy_demo()


@pytest.fixture(scope="module")
def broken() -> LanguageModel:
    found: Any = scripted_lm(ANSWERS)
    found.model.broken = True
    return found


@pytest.fixture(scope="module")
def address(lm: LanguageModel, broken: LanguageModel) -> Iterator[str]:
    models = {"demo": lm, "scripted": scripted_lm(ANSWERS), "broken": broken}
    with serving(app_of(models)) as found:
        yield found


@pytest.fixture
def client(address: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=address, api_key="any", max_retries=0)


def said(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


def contents(message: anthropic.types.Message) -> list[tuple[str, Any]]:
    """What an answer says, without ids."""
    found: list[tuple[str, Any]] = []
    for block in message.content:
        if block.type == "tool_use":
            assert block.id.startswith("toolu_")
            found.append((block.name, block.input))
        else:
            found.append((block.type, getattr(block, block.type)))
    return found


# Texts -------------------------------------------------------------------------------------------

OPTIONS = [
    {"temperature": 0},
    {"temperature": 1, "seed": 7},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 40},
    {"temperature": 0, "stop": ("LORD", "land", "the")},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_text_is_what_generate_gives(client, address, lm, options) -> None:
    messages = [*said("Who art thou?"), {"role": "assistant", "content": "I am."}, *said("Who?")]
    ids = lm.tokenizer.encode_chat([{"role": "system", "content": "Speak."}, *messages])
    wanted = lm.generate(ids, max_new_tokens=24, **options)
    extra = {k: v for k, v in options.items() if k != "stop"}
    ask: dict[str, Any] = {"model": "demo", "max_tokens": 24, "messages": messages}
    ask |= {"system": "Speak.", "extra_body": extra}
    if "stop" in options:
        ask["stop_sequences"] = list(options["stop"])
    whole = client.messages.create(**ask)
    assert contents(whole) == [("text", wanted)]
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == len(ids)
    assert whole.usage.output_tokens == len(wanted.token_ids)
    if wanted.finish_reason == "length":
        assert (whole.stop_reason, whole.stop_sequence) == ("max_tokens", None)
    else:
        assert whole.stop_reason == "stop_sequence" and whole.stop_sequence in options["stop"]
    with client.messages.stream(**ask) as stream:
        assert "".join(stream.text_stream) == wanted
        final = stream.get_final_message()
    assert contents(final) == [("text", wanted)]
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == len(ids)
    assert final.usage.output_tokens == whole.usage.output_tokens

    async def both() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=address, api_key="any") as other:
            message = await other.messages.create(**ask)
            async with other.messages.stream(**ask) as stream:
                return [message.content[0].text, await stream.get_final_text()]

    assert asyncio.run(both()) == [wanted, wanted]


def test_the_events_come_in_their_order(client) -> None:
    ask = {"model": "scripted", "max_tokens": 90, "messages": said("both"), "tools": TOOLS}
    events = list(client.messages.create(**ask, stream=True))
    assert events[0].message.usage.input_tokens > 0 and events[0].message.content == []
    types = [event.type.removeprefix("content_block_") for event in events]
    block = ["start", "delta", "stop"]
    assert [t for i, t in enumerate(types) if types[i - 1 : i] != [t]] == [
        *("message_start", *block, *block, *block, "message_delta", "message_stop")
    ]
    kinds = [e.content_block.type for e in events if e.type == "content_block_start"]
    assert kinds == ["text", "tool_use", "tool_use"]
    assert [e.index for e in events if e.type == "content_block_stop"] == [0, 1, 2]
    assert events[-2].delta.stop_reason == "tool_use" and events[-2].usage.output_tokens > 10


# Thoughts, tools, formats ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "wanted", "reason"),
    [
        ("think", [("thinking", "Let me see."), ("text", "It is noon.")], "end_turn"),
        ("clock", [("now", {"zone": "UTC"})], "tool_use"),
        ("both", [("text", "I look."), *[("now", {"zone": "UTC"})] * 2], "tool_use"),
        ("many words", [("text", "one two three four five six seven")], "end_turn"),
        ("nothing", [], "end_turn"),
    ],
)
def test_thoughts_and_calls(client, content, wanted, reason) -> None:
    ask = {"model": "scripted", "max_tokens": 90, "messages": said(content), "tools": TOOLS}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        final = stream.get_final_message()
    for message in (whole, final):
        assert contents(message) == wanted and message.stop_reason == reason
        assert message.role == "assistant" and message.type == "message"
    thinking = whole.usage.output_tokens_details
    assert (thinking is not None) == (content == "think")
    assert final.usage.output_tokens_details == thinking


def test_a_conversation_with_tools_goes_on(client) -> None:
    """What the client makes of an answer is understood as it is."""
    ask = {"model": "scripted", "max_tokens": 90, "tools": TOOLS}
    first = client.messages.create(**ask, messages=said("both"))
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "noon"}
        for block in first.content
        if block.type == "tool_use"
    ]
    messages = [*said("both"), first.to_param(), *said([*results, {"type": "text", "text": "?"}])]
    again = client.messages.create(**ask, messages=messages)
    assert again.usage.input_tokens > first.usage.input_tokens + 20


def test_tool_choices(client) -> None:
    ask: dict[str, Any] = {"model": "scripted", "max_tokens": 60, "tools": TOOLS}
    none = client.messages.create(**ask, messages=said("clock"), tool_choice={"type": "none"})
    assert contents(none) == [("text", CALL)]
    for choice in ({"type": "any"}, {"type": "tool", "name": "now"}):
        forced = client.messages.create(**ask, messages=said("many words"), tool_choice=choice)
        assert [block.type for block in forced.content][:1] == ["tool_use"]
    one = {"type": "auto", "disable_parallel_tool_use": True}
    single = client.messages.create(**ask, messages=said("both"), tool_choice=one)
    assert contents(single)[:2] == [("text", "I look."), ("now", {"zone": "UTC"})]
    assert [block.type for block in single.content].count("tool_use") == 1
    with pytest.raises(anthropic.BadRequestError, match="among the tools"):
        choice = {"type": "tool", "name": "web_search"}
        client.messages.create(**ask, messages=said("x"), tool_choice=choice)


def test_schemas(client) -> None:
    schema = {
        "type": "object",
        "properties": {"book": {"enum": ["Job", "Ruth"]}},
        "required": ["book"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "schema": schema}
    ask: dict[str, Any] = {"model": "demo", "max_tokens": 300, "messages": said("Which?")}
    for form in ({"output_config": {"format": wanted}}, {"extra_body": {"output_format": wanted}}):
        text = client.messages.create(**ask, **form).content[0].text
        assert json.loads(text) in ({"book": "Job"}, {"book": "Ruth"})
    for bad in ({"type": "json_object"}, {**wanted, "schema": {"type": "nothing"}}):
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(**ask, output_config={"format": bad})


# What is read ------------------------------------------------------------------------------------


def read(**fields: Any) -> Any:
    base = {"max_tokens": 5, "messages": said("Hello")}
    return MessagesRequest.model_validate({**base, **fields}).ask()


def test_turns_become_messages() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "now", "input": {"zone": "UTC"}}
    image = {"type": "text", "text": "seen"}
    ask = read(
        system=[{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "one"},
            {"role": "user", "content": [{"type": "text", "text": "two"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    use,
                    {**use, "id": "t2", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [image, image]},
                    {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": "no"},
                    {"type": "text", "text": "so?"},
                ],
            },
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
        ],
    )

    def call(id: str, **arguments: str) -> dict[str, Any]:
        return {
            "id": id,
            "type": "function",
            "function": {"name": "now", "arguments": arguments},
        }

    assert ask.messages == [
        {"role": "system", "content": "A"},
        {"role": "user", "content": "one\ntwo"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [call("t1", zone="UTC"), call("t2")],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "seen\nseen"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
        {"role": "user", "content": "so?"},
        {"role": "assistant", "content": None, "tool_calls": [call("t1", zone="UTC")]},
        {"role": "tool", "tool_call_id": "t1", "content": ""},
    ]


def test_what_else_is_read() -> None:
    assert read(thinking={"type": "enabled", "budget_tokens": 2000}).thinking_budget == 2000
    kinds = ("enabled", "disabled", "adaptive")
    assert [read(thinking={"type": kind}).thinking for kind in kinds] == [True, False, None]
    ask = read(
        tools=TOOLS,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
        stop_sequences=["a", ""],
        top_k=5,
        temperature=0.5,
    )
    assert [tool.name for tool in ask.tools] == ["now"] and ask.tools[0].parameters == SCHEMA
    assert (ask.tool_choice, ask.parallel_tools) == (ToolChoice("required"), False)
    assert (ask.format, ask.effort, ask.stop) == (Format("schema", SCHEMA), "high", ("a",))
    assert ask.sampling == {"top_k": 5, "temperature": 0.5} and ask.max_tokens == 5


def test_what_nobody_waits_for() -> None:
    titles = [
        {"max_tokens": 1, "messages": said("quota")},
        {"messages": said("### Task:\nA title.")},
        {"system": "Write a concise, sentence-case title for this session."},
        {"messages": said("Please write a 5-10 word title for the following conversation: ...")},
    ]
    assert [read(**fields).background for fields in titles] == [True] * 4
    others = [{"messages": said("quota")}, {"max_tokens": 1}, {**titles[2], "tools": TOOLS}]
    assert [read(**fields).background for fields in others] == [False] * 3


def test_the_line_that_changes_is_dropped(client, lm) -> None:
    """So that the next request finds its prefix."""
    line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"}
    system = [{"type": "text", "text": "Speak."}, {"type": "text", "text": "Well."}]
    wanted = read(system="Speak.\nWell.").messages
    assert read(system=[line, *system]).messages == read(system=system).messages == wanted
    assert read(system=f"{line['text']}\nSpeak.\nWell.").messages == wanted
    assert read(system=[line]).messages == read().messages
    reused = []
    for number in range(2):
        block = {**line, "text": f"{line['text']} {number}"}
        client.messages.create(
            model="demo", max_tokens=1, system=[block, *system], messages=said("And now? " * 40)
        )
        reused.append(lm.engine.stats().reused_tokens)
    assert reused[1] - reused[0] > 100


def test_tokens_are_counted(client, lm) -> None:
    ask: dict[str, Any] = {"model": "scripted", "messages": said("many words"), "tools": TOOLS}
    counted = client.messages.count_tokens(**ask).input_tokens
    assert counted == client.messages.create(**ask, max_tokens=1).usage.input_tokens
    assert client.messages.count_tokens(**{**ask, "tools": []}).input_tokens < counted
    long = said("word " * 3000)
    assert client.messages.count_tokens(model="demo", messages=long).input_tokens == len(
        lm.tokenizer.encode_chat(long)
    )


def test_models(client) -> None:
    """At the address of OpenAI's, in Anthropic's form."""
    page = client.models.list(limit=20)
    names = ["demo", "scripted", "broken"]
    assert [one.id for one in page] == [one.display_name for one in page] == names
    assert (page.first_id, page.last_id, page.has_more) == ("demo", "broken", False)
    one = client.models.retrieve("demo")
    assert (one.id, one.type, one.created_at) == ("demo", "model", page.data[0].created_at)
    with pytest.raises(anthropic.NotFoundError, match="demo, scripted"):
        client.models.retrieve("claude")


# Errors ------------------------------------------------------------------------------------------


def test_errors_are_the_clients_own(client) -> None:
    ask: dict[str, Any] = {"model": "demo", "max_tokens": 2, "messages": said("x")}
    with pytest.raises(anthropic.NotFoundError, match="demo, scripted") as missing:
        client.messages.create(**{**ask, "model": "claude"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    for fields, words in (
        ({"messages": said([{"type": "image", "source": source}])}, "the model has no tower"),
        ({"messages": said([{"type": "document", "source": source}])}, "got 'document'"),
        ({"messages": said([{"type": "tool_use", "id": "t", "name": "f"}])}, "got 'tool_use'"),
        ({"messages": said([{"type": "text"}])}, "with a text text"),
        ({"messages": [*said("x"), {"role": "critic", "content": "no"}]}, "got 'critic'"),
        ({"messages": said("word " * 3000)}, "context of 1024 tokens"),
        ({"messages": []}, "messages"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2**40}}, "budget_tokens"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"tools": [{"name": "f", "input_schema": "x"}]}, "as a JSON schema"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=words) as error:
            client.messages.create(**{**ask, **fields})
        assert error.value.body["type"] == "error"
        assert error.value.body["error"]["type"] == "invalid_request_error"


def test_a_failure_is_told_whole_or_in_the_stream(client) -> None:
    ask: dict[str, Any] = {"model": "broken", "max_tokens": 2, "messages": said("x")}
    with pytest.raises(anthropic.InternalServerError, match="the model failed"):
        client.messages.create(**ask)
    with pytest.raises(anthropic.APIStatusError, match="the model failed") as error:
        list(client.messages.create(**ask, stream=True))
    assert error.value.body["error"]["type"] == "api_error"


def test_unknown_fields_are_ignored_and_null_is_absent(address) -> None:
    body = {
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "In", "cache_control": None, "id": "x"}],
        "metadata": {"user_id": "x"},
        "service_tier": "auto",
        "container": None,
        "context_management": {"edits": []},
        "mcp_servers": [],
        "temperature": 1,
    }
    absent = "model system tools tool_choice thinking output_config output_format stream"
    body |= dict.fromkeys((*absent.split(), "stop_sequences", "top_k", "top_p"))
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,x-1"}
    for sent in ({}, headers):
        found = httpx.post(f"{address}/v1/messages?beta=true", json=body, headers=sent)
        assert found.status_code == 200 and found.json()["model"] == "demo"


# Deltas made by hand -----------------------------------------------------------------------------


class FakeAnswer:
    """An answer whose deltas are given."""

    def __init__(self, batches: Sequence[list[Delta] | AskError]) -> None:
        self.given, self.closed = batches, False
        self.ids, self.cached_tokens = [1, 2, 3], 2
        self.served = SimpleNamespace(name="demo")

    async def batches(self) -> AsyncIterator[list[Delta]]:
        for one in self.given:
            if isinstance(one, AskError):
                raise one
            yield one

    def close(self) -> None:
        self.closed = True


def events_of(batches: Sequence[list[Delta] | AskError], maximum: int = 99) -> list[Any]:
    """(event, data) of a stream, of which so many are read."""
    answer: Any = FakeAnswer(batches)

    async def all_of_them() -> list[bytes]:
        stream, found = _stream(_Message(answer)), []
        async for chunk in stream:
            found.append(chunk)
            if len(found) == maximum:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        return found

    chunks = asyncio.run(all_of_them())
    assert answer.closed
    return [(one.event, one.json()) for one in SSEDecoder().iter_bytes(iter(chunks))]


def test_blocks_by_hand() -> None:
    end = End(0, "stop", "x", tokens=9, reasoning_tokens=2)
    events = events_of(
        [
            [],
            [Reasoning(0, "a")],
            [Reasoning(0, "b"), Text(0, ""), Text(0, "c")],
            [CallBegin(0, 0, "call_1", "f"), CallArguments(0, 0, '{"a"')],
            [CallArguments(0, 0, ": 1}"), CallBegin(0, 1, "call_2", "g"), Text(0, "d"), end],
        ]
    )
    assert all(name == data["type"] for name, data in events)
    text, thinking = {"type": "text", "text": ""}, {"type": "thinking", "thinking": ""}
    use = {"type": "tool_use", "input": {}}
    assert [e.get("content_block", e.get("delta")) for _, e in events[2:-1]] == [
        {**thinking, "signature": ""},
        {"type": "thinking_delta", "thinking": "a"},
        {"type": "thinking_delta", "thinking": "b"},
        {"type": "signature_delta", "signature": ""},
        None,
        text,
        {"type": "text_delta", "text": "c"},
        None,
        {**use, "id": "toolu_1", "name": "f"},
        {"type": "input_json_delta", "partial_json": '{"a"'},
        {"type": "input_json_delta", "partial_json": ": 1}"},
        None,
        {**use, "id": "toolu_2", "name": "g"},
        None,
        text,
        {"type": "text_delta", "text": "d"},
        None,
        {"stop_reason": "stop_sequence", "stop_sequence": "x"},
    ]
    assert [e["index"] for _, e in events if "index" in e] == [0] * 5 + [1] * 3 + [2] * 4 + [
        *(3, 3, 4, 4, 4)
    ]
    assert [name for name, _ in events[:2]] == ["message_start", "ping"]
    assert events[-2][1]["usage"] == {
        "input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 9,
        "output_tokens_details": {"thinking_tokens": 2},
    }
    assert events[-1] == ("message_stop", {"type": "message_stop"})


def test_a_stream_that_fails_or_is_left_closes_its_answer() -> None:
    failed = events_of([[Text(0, "a")], AskError("server: no", status=503)])
    assert failed[-1] == (
        "error",
        {"type": "error", "error": {"type": "overloaded_error", "message": "server: no"}},
    )
    assert [name for name, _ in events_of([[Text(0, "a")], [Text(0, "b")]], maximum=2)] == [
        *("message_start", "content_block_start")
    ]
