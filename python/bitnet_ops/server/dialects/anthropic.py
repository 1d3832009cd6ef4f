"""Anthropic: /v1/messages and /v1/messages/count_tokens.

Source of the forms: Anthropic's API reference. What is said about Claude Code was seen in its
requests: the headers and features that it asks for are accepted, those that are not known ignored.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from bitnet_ops.generate.pictures import PictureMarks
from bitnet_ops.server.catalog import Served
from bitnet_ops.server.dialects.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Body,
    Count,
    Sampling,
    Stop,
    check_schema,
    parsed_arguments,
    stop_texts,
    tool_choice_of,
    tools_of,
)
from bitnet_ops.server.dialects.history import Reader, call_of, thoughts_of
from bitnet_ops.server.dialects.openai import begins_answer, is_background
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
)
from bitnet_ops.server.http import (
    EventStream,
    client_of,
    error_body,
    service_of,
    sse,
    unless_gone,
)
from bitnet_ops.server.prompt import padded_ids, read_chat
from bitnet_ops.server.service import Answer
from bitnet_ops.server.shape import AnswerShape

router = APIRouter()
_PATH = "/v1/messages"
# A line of Claude Code's that differs from request to request: no prefix would ever be found again.
_BILLING = "x-anthropic-billing-header:"
# What stands in Claude Code's requests for titles and topics, which have no tools.
_ASIDES = (
    "Analyze if this message indicates a new conversation topic",
    "Summarize this coding conversation",
    "word title for the following conversation",
    "sentence-case title",
)
_KINDS: dict[type, str] = {Text: "text", Reasoning: "thinking"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

# What is asked -----------------------------------------------------------------------------------


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class ToolChoiceParam(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Body):
    effort: Annotated[str, Field(max_length=64)] | None = None
    format: dict[str, Any] | None = None


class CountRequest(Sampling):
    model: str | None = None
    messages: Annotated[list[Any], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # as beta versions had it

    def ask(self) -> Ask:
        tools, choice, thinking = _tools(self.tools), self.tool_choice, self.thinking
        output = self.output_config or OutputConfig()
        messages, pictures = _messages(self.system, self.messages)
        return Ask(
            model=self.model or "",
            messages=messages,
            pictures=pictures,
            tools=tools,
            tool_choice=tool_choice_of(choice and choice.model_dump(), tools),
            parallel_tools=not (choice and choice.disable_parallel_tool_use),
            format=_format(output.format or self.output_format),
            sampling=self.sampling(),
            # "adaptive": as the model does
            thinking={"enabled": True, "disabled": False}.get(thinking.type) if thinking else None,
            thinking_budget=thinking.budget_tokens if thinking else None,
            effort=output.effort,
            continues=begins_answer(messages),
        )


class MessagesRequest(CountRequest):
    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Stop = None

    def ask(self) -> Ask:
        ask = super().ask()
        assert ask.messages is not None
        return Ask(
            **{
                **vars(ask),
                "max_tokens": self.max_tokens,
                "stop": stop_texts(self.stop_sequences),
                "background": self._is_background(ask.messages),
            }
        )

    def _is_background(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a program asks, of which its user sees nothing come: for a title, or whether it
        may ask at all."""
        said = str(messages[-1]["content"])
        if (self.max_tokens == 1 and said == "quota") or is_background(messages):
            return True
        first = str(messages[0]["content"])
        return not self.tools and any(words in text for text in (first, said) for words in _ASIDES)


def _tools(entries: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """Those that the client runs; kinds that run at Anthropic (web_search_...) are left out."""
    return tools_of(
        {
            "name": entry.get("name"),
            "description": entry.get("description"),
            "parameters": entry.get("input_schema"),
        }
        for entry in entries or ()
        if entry.get("type") in (None, "custom")
    )


def _format(value: Mapping[str, Any] | None) -> Format:
    if value is None:
        return Format()
    schema = value.get("schema")
    if value.get("type") != "json_schema" or not isinstance(schema, Mapping):
        raise AskError(
            "server: expected output_config.format of type json_schema, with a schema, got "
            f"{str(value)[:80]}",
            field="output_config",
        )
    check_schema(schema, "output_config")
    return Format("schema", schema)


def _messages(
    system: str | list[Any] | None, turns: Sequence[Any]
) -> tuple[list[dict[str, Any]], PictureMarks]:
    """As templates read them; turns of one side that follow each other are one, as Anthropic has
    it."""
    reader = Reader("messages")
    found: list[dict[str, Any]] = []
    blocks = [system] if isinstance(system, str) else system or [""]
    first, *rest = [reader.part(one, f"system[{i}]") or "" for i, one in enumerate(blocks)]
    if first.startswith(_BILLING):
        first = first.partition("\n")[2]
    if texts := [text for text in (first, *rest) if text]:
        found.append({"role": "system", "content": "\n".join(texts)})
    for message in reader.read(turns, _turn, lambda turn: turn.get("role") == "assistant"):
        plain = {"role", "content"} == message.keys() == (found[-1].keys() if found else ())
        if plain and message["role"] == found[-1]["role"]:
            found[-1]["content"] = reader.marks.joined([found[-1]["content"], message["content"]])
        else:
            found.append(message)
    return found, reader.marks


def _turn(reader: Reader, turn: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One turn, whose results of tools are messages of their own."""
    role, content = turn.get("role"), turn.get("content")
    if role not in ("user", "assistant", "system"):
        reader.reject(f"messages of role user, assistant or system, got {role!r:.80}")
        role = "user"
    said = _Said(role, reader.marks)
    for at, part in enumerate(content if isinstance(content, list) else [content]):
        block = part if isinstance(part, Mapping) else {}
        kind = str(block.get("type"))
        # of tools that ran at Anthropic, results stand in an answer, beside their calls
        if kind.endswith("tool_result") and role != "system":
            yield from said.take()
            yield _result(reader, block, f"content[{at}].content")
        elif kind.endswith("tool_use") and role == "assistant":
            name = reader.name(block.get("name"))
            said.calls.append(call_of(block.get("id"), name, block.get("input")))
        elif role == "assistant" and (thought := thoughts_of({"content": [part]})):
            said.thoughts.append(thought)
        else:
            said.texts.append(reader.part(part, f"content[{at}]") or "")
    yield from said.take(last=True)


class _Said:
    """What one side says until a result of a tool comes."""

    def __init__(self, role: str, marks: PictureMarks) -> None:
        self.role, self.sent, self._marks = role, False, marks
        self.texts, self.thoughts, self.calls = list[str](), list[str](), list[dict[str, Any]]()

    def take(self, last: bool = False) -> Iterator[dict[str, Any]]:
        """The message, if there is one; of a turn that says nothing at all an empty one."""
        text = self._marks.joined(filter(None, self.texts))
        thoughts = "\n".join(filter(None, self.thoughts))
        if self.texts or self.calls or (last and not self.sent):
            message: dict[str, Any] = {"role": self.role, "content": text}
            if thoughts:
                message["reasoning_content"] = thoughts
            if self.calls:
                message |= {"content": text or None, "tool_calls": self.calls}
            yield message
        self.sent = True
        self.texts, self.thoughts, self.calls = [], [], []


def _result(reader: Reader, block: Mapping[str, Any], path: str) -> dict[str, Any]:
    text = reader.result(block.get("content"), path)
    if block.get("is_error"):  # templates have no other place for it
        text = f"Error: {text}"
    message = {"role": "tool", "content": text}
    id = block.get("tool_use_id")
    return {**message, "tool_call_id": id} if isinstance(id, str) else message


# What is returned --------------------------------------------------------------------------------


@router.post(_PATH)
async def messages(body: MessagesRequest, request: Request) -> Any:
    message = _Message(await service_of(request).answer(body.ask(), client_of(request)))
    if body.stream:
        return EventStream(_stream(message))
    return await unless_gone(request, _whole(message))


@router.post(f"{_PATH}/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> Any:
    """Of a prompt that may be longer than the context: clients ask in order to know that."""
    ask, client = body.ask(), client_of(request)

    def count(served: Served, maximum: int) -> int:
        return _count(served, ask, maximum)

    found = service_of(request).count(ask.model, client, count)
    return {"input_tokens": await unless_gone(request, found)}


def _count(served: Served, ask: Ask, maximum: int) -> int:
    shape = AnswerShape(ask, served.lm.tokenizer, served.grammars)
    chat = read_chat(served, ask, shape, maximum, decode=False)
    return len(padded_ids(served, chat.ids(), chat.pictures))


class _Message:
    """What is returned of one answer."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self._id = answer, f"msg_{secrets.token_hex(12)}"

    def head(self, end: End | None = None) -> dict[str, Any]:
        """All but the content; `end`: None before there is one."""
        reason = None
        if end is not None:
            reason = _REASONS[end.reason] if end.stop is None else "stop_sequence"
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.answer.served.name,
            "content": [],
            "stop_reason": reason,
            "stop_sequence": end.stop if end else None,
            "usage": self._usage(end),
        }

    def _usage(self, end: End | None) -> dict[str, Any]:
        cached = self.answer.cached_tokens
        usage: dict[str, Any] = {
            "input_tokens": len(self.answer.ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": end.tokens if end else 0,
        }
        if end and end.reasoning_tokens:
            usage["output_tokens_details"] = {"thinking_tokens": end.reasoning_tokens}
        return usage


async def _whole(message: _Message) -> dict[str, Any]:
    (deltas,) = await message.answer.whole()
    end = deltas[-1]
    assert isinstance(end, End)
    return {**message.head(end), "content": _content(deltas)}


def _content(deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    """The blocks of a whole answer."""
    blocks: list[dict[str, Any]] = []
    for delta in deltas:
        if isinstance(delta, CallArguments):
            blocks[-1]["input"] += delta.text
        elif isinstance(delta, CallBegin):
            blocks.append({**_begun(delta), "input": ""})
        elif isinstance(delta, Text | Reasoning) and delta.text:
            if not blocks or blocks[-1]["type"] != _KINDS[type(delta)]:
                blocks.append(_begun(delta))
            blocks[-1][_KINDS[type(delta)]] += delta.text
    for block in blocks:
        if block["type"] == "tool_use":  # what the end of the answer has cut off is no object
            block["input"] = parsed_arguments(block["input"]) or {}
    return blocks


def _begun(delta: Text | Reasoning | CallBegin) -> dict[str, Any]:
    """The block that a delta begins, still empty."""
    if isinstance(delta, Text):
        return {"type": "text", "text": ""}
    if isinstance(delta, Reasoning):  # there is nothing that a signature would have to prove
        return {"type": "thinking", "thinking": "", "signature": ""}
    id = f"toolu_{delta.id.removeprefix('call_')}"
    return {"type": "tool_use", "id": id, "name": delta.name, "input": {}}


async def _stream(message: _Message) -> AsyncIterator[bytes]:
    answer, begun, blocks = message.answer, False, _Blocks()
    try:
        async for deltas in answer.batches():
            if not begun:  # not earlier: by now it is known how much of the prompt was cached
                begun = True
                yield _event("message_start", message=message.head())
            if not deltas:
                yield _event("ping")
            for delta in deltas:
                for event in blocks.events(delta):
                    yield event
                if isinstance(delta, End):
                    head = message.head(delta)
                    change = {name: head[name] for name in ("stop_reason", "stop_sequence")}
                    yield _event("message_delta", delta=change, usage=head["usage"])
        yield _event("message_stop")
    except AskError as error:
        yield sse(error_body(_PATH, error), "error")
    finally:
        answer.close()


def _event(name: str, **fields: Any) -> bytes:
    return sse({"type": name, **fields}, name)


class _Blocks:
    """The blocks of an answer as events: each begins, goes on and ends before the next one."""

    def __init__(self) -> None:
        self._index, self._open = -1, ""  # the type of the block that has not ended

    def events(self, delta: Delta) -> Iterator[bytes]:
        if isinstance(delta, End):
            yield from self._end()
        elif isinstance(delta, CallBegin):
            yield from self._begin(delta)
        elif isinstance(delta, CallArguments):
            yield self._more("input_json_delta", partial_json=delta.text)
        elif delta.text:
            kind = _KINDS[type(delta)]
            if self._open != kind:
                yield from self._begin(delta)
            yield self._more(f"{kind}_delta", **{kind: delta.text})

    def _begin(self, delta: Text | Reasoning | CallBegin) -> Iterator[bytes]:
        yield from self._end()
        block = _begun(delta)
        self._index, self._open = self._index + 1, block["type"]
        yield _event("content_block_start", index=self._index, content_block=block)

    def _more(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _end(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._more("signature_delta", signature="")
        if self._open:
            self._open = ""
            yield _event("content_block_stop", index=self._index)
