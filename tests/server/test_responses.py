"""/v1/responses: the official client reads every event; its own accumulation is the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from bitnet_ops.language_model import LanguageModel
from served import app_of, greedy_demo, scripted_lm, serving

CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
ANSWERS = {
    "think": "<think>\nLet me see.\n</think>\n\nIt is noon.",
    "clock": f"I look.\n{CALL}\n{CALL}",
    "plain": "one two three",
}
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "now",
    "description": "The time.",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return greedy_demo()


@pytest.fixture(scope="module")
def address(lm: LanguageModel) -> Iterator[str]:
    with serving(app_of({"demo": lm, "scripted": scripted_lm(ANSWERS)})) as found:
        yield found


@pytest.fixture
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


def shape(response: Any) -> list[Any]:
    """What an answer says, without ids."""
    found = []
    for item in response.output:
        if item.type == "message":
            found.append(("message", "".join(part.text for part in item.content)))
        elif item.type == "reasoning":
            found.append(("reasoning", "".join(part.text for part in item.content)))
        else:
            found.append((item.name, item.arguments))
    return found


def test_a_text_is_what_generate_gives(client, lm) -> None:
    messages = [{"role": "system", "content": "Speak."}, {"role": "user", "content": "Who?"}]
    wanted = lm.generate(lm.tokenizer.encode_chat(messages), max_new_tokens=12)
    ask = {"model": "demo", "instructions": "Speak.", "max_output_tokens": 12}
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Who?"}]}]
    for given in ("Who?", parts, [{"type": "message", **parts[0]}]):
        whole = client.responses.create(**ask, input=given)
        assert whole.output_text == wanted
        assert (
            whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
        )
        assert whole.usage.output_tokens == 12
        assert whole.usage.total_tokens == whole.usage.input_tokens + 12
    events = list(client.responses.create(**ask, input="Who?", stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == wanted
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == wanted


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("think", [("reasoning", "Let me see."), ("message", "It is noon.")]),
        ("clock", [("message", "I look."), *[("now", '{"zone": "UTC"}')] * 2]),
        ("plain", [("message", "one two three")]),
    ],
)
def test_items_and_events(client, content, wanted) -> None:
    ask = {"model": "scripted", "input": content, "tools": [TOOL]}
    whole = client.responses.create(**ask)
    assert shape(whole) == wanted and whole.status == "completed"
    with client.responses.stream(**ask) as stream:
        events = list(stream)
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert shape(events[-1].response) == wanted
    opened = [e for e in events if e.type == "response.output_item.added"]
    closed = [e for e in events if e.type == "response.output_item.done"]
    assert [e.output_index for e in opened] == [e.output_index for e in closed]
    assert [e.item.id for e in opened] == [i.id for i in events[-1].response.output]
    assert all(event.item.status == "completed" for event in closed)
    texts: dict[int, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
        elif event.type.endswith("_text.done"):
            assert texts[event.output_index] == event.text
        elif event.type == "response.function_call_arguments.done":
            assert texts[event.output_index] == event.arguments


def test_a_conversation_goes_on_with_items(client, address) -> None:
    first = client.responses.create(model="scripted", input="clock", tools=[TOOL])
    call = first.output[1]
    items = [
        {"role": "user", "content": "What is it?"},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "plain"},
        {"type": "web_search_call", "id": "x", "status": "completed"},
    ]
    again = client.responses.create(model="scripted", input=items, tools=[TOOL])
    assert shape(again)


def test_what_codex_sends(address) -> None:
    """Fields and kinds of tools that mean nothing here, and its probe."""
    body = {
        "model": "scripted",
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
            for role, text in (("developer", "x"), ("user", "plain"))
        ],
        "tools": [
            TOOL,
            {"type": "web_search"},
            {"type": "image_generation"},
            {"type": "namespace", "name": "mcp", "tools": []},
            {"type": "custom", "name": "c"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
    }  # fmt: skip
    text = httpx.post(f"{address}/v1/responses", json=body).text
    assert "event: response.completed\n" in text and "one two three" in text
    for stream in (False, True):
        probe = httpx.post(f"{address}/v1/responses", json={"input": [], "stream": stream})
        assert probe.status_code == 200 and '"completed"' in probe.text


def test_errors(client) -> None:
    with pytest.raises(openai.BadRequestError, match="whole conversation in input"):
        client.responses.create(model="demo", input="x", previous_response_id="resp_1")
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
    with pytest.raises(openai.BadRequestError, match="texts alone") as error:
        client.responses.create(model="demo", input=image)
    assert error.value.param == "input[0].content[0]"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="x")


def test_a_schema(client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "name": "s", "schema": schema, "strict": True}
    found = client.responses.create(
        model="demo", input="x", max_output_tokens=200, text={"format": form}
    )
    assert "".join(found.output_text.split()) in ('{"a":"x"}', '{"a":"y"}')
