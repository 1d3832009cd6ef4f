"""OpenAI: /v1/responses, stateless, whole and as a stream of named events.

Source of the forms: OpenAI's API reference. Codex speaks this alone; kinds of tools and items that
run elsewhere (web_search, image_generation, ...) are left out, not rejected.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from bitnet_ops.generate.pictures import PictureMarks
from bitnet_ops.server.dialects.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Body,
    Positive,
    Sampling,
    format_of,
    tool_choice_of,
    tools_of,
)
from bitnet_ops.server.dialects.history import Reader, call_of, thoughts_of
from bitnet_ops.server.dialects.openai import chat_logprobs, is_background
from bitnet_ops.server.exchange import (
    Ask,
    AskError,
    CallArguments,
    CallBegin,
    Delta,
    End,
    Reasoning,
    Text,
)
from bitnet_ops.server.http import (
    PING,
    EventStream,
    client_of,
    service_of,
    sse,
    unless_gone,
)
from bitnet_ops.server.service import Answer

router = APIRouter()


class TextOptions(Body):
    format: dict[str, Any] | None = None


class ReasoningOptions(Body):
    effort: Annotated[str, Field(max_length=64)] | None = None


class ResponseRequest(Sampling):
    model: str = ""
    input: str | Annotated[list[Any], Field(max_length=MAX_MESSAGES)] = ""
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Positive | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None

    def messages(self) -> tuple[list[dict[str, Any]], PictureMarks]:
        given = self.input
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        found, pictures = messages_of(items if given else [])
        if self.instructions:
            found.insert(0, {"role": "system", "content": self.instructions})
        return found, pictures

    def ask(self, messages: Sequence[dict[str, Any]], pictures: PictureMarks) -> Ask:
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise AskError(
                    f"server: expected the whole conversation in input, got {name}; responses are "
                    "not kept here",
                    field=name,
                )
        tools = tools_of(self.tools)
        sampling = self.sampling()
        if self.top_logprobs or "message.output_text.logprobs" in (self.include or ()):
            sampling["logprobs"] = self.top_logprobs or 0
        effort = self.reasoning.effort if self.reasoning else None
        return Ask(
            model=self.model,
            messages=messages,
            pictures=pictures,
            tools=tools,
            tool_choice=tool_choice_of(self.tool_choice if tools else None, tools),
            parallel_tools=self.parallel_tool_calls is not False,
            format=format_of(self.text.format if self.text else None),
            sampling=sampling,
            max_tokens=self.max_output_tokens,
            thinking=None if effort is None else effort != "none",
            effort=effort,
            background=is_background(messages),
        )


# Items to messages -------------------------------------------------------------------------------


def messages_of(items: Sequence[Any]) -> tuple[list[dict[str, Any]], PictureMarks]:
    """A conversation in the form of chat completions: calls and thoughts join the message of their
    turn."""
    found: list[dict[str, Any]] = []
    thoughts: list[str] = []
    reader = Reader("input")
    for message in reader.read(items, _item, _of_an_answer):
        if message["role"] != "assistant":
            found.append(message)
            continue
        thoughts += [message.pop("thoughts")] if "thoughts" in message else []
        if "content" not in message:
            continue
        calls = message.get("tool_calls")
        if calls and found and found[-1]["role"] == "assistant":
            message = found.pop()
            message["tool_calls"] = [*message.get("tool_calls", ()), *calls]
        if text := "\n".join(filter(None, [message.get("reasoning_content"), *thoughts])):
            message["reasoning_content"] = text
        thoughts = []
        found.append(message)
    return found, reader.marks


def _of_an_answer(item: Mapping[str, Any]) -> bool:
    kind = item.get("type", "message")
    if kind == "message":
        return item.get("role") == "assistant"
    return not str(kind).endswith("_output")


def _item(reader: Reader, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The message of an item, or a part of one: thoughts without a content, a call."""
    kind, id = str(item.get("type", "message")), item.get("call_id") or item.get("id")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or not 0 < len(role) <= 64:
            reader.reject(f"a role in every message of input, got {role!r:.80}")
            role = "user"
        content = reader.text(item.get("content"))
        yield {"role": "system" if role == "developer" else role, "content": content}
    elif kind == "reasoning":
        yield {"role": "assistant", "thoughts": thoughts_of({"reasoning": item})}
    elif kind.endswith("_output"):
        content = reader.result(item.get("output"), "output")
        yield {"role": "tool", "content": content, "tool_call_id": id}
    elif kind.endswith("_call") and ("call_id" in item or "output" in item):
        name = item.get("name") or kind.removesuffix("_call")
        said = ("arguments", "action", "operation", "input")
        key = next((one for one in said if item.get(one) is not None), None)
        arguments = {key: item[key]} if key == "input" else item.get(key or "")
        call = call_of(id, reader.name(name), arguments)
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
        if "output" in item:  # it ran at OpenAI
            content = reader.result(item["output"], "output")
            yield {"role": "tool", "content": content, "tool_call_id": id}
    else:
        reader.left_out(kind)


# Deltas to items and events ----------------------------------------------------------------------


class _Response:
    """The response as it grows: each delta becomes events, and a part of `output`."""

    def __init__(self, body: ResponseRequest, answer: Answer | None, model: str) -> None:
        self._body, self._answer, self._model = body, answer, model
        self.id, self.output = f"resp_{secrets.token_hex(16)}", list[dict[str, Any]]()
        self.status, self.reason = "in_progress", ""
        self._created = answer.created if answer else 0
        self._number = 0
        self._end: End | None = None
        self._open = ""  # the kind of the last item while it grows

    def object(self) -> dict[str, Any]:
        body, incomplete = self._body, {"reason": self.reason} if self.reason else None
        effort = body.reasoning.effort if body.reasoning else None
        form = body.text.format if body.text else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": self.status,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "model": self._model,
            "output": self.output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": form or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if self._end or not self._answer else None,
        }

    def _usage(self) -> dict[str, Any]:
        answer, end = self._answer, self._end
        prompt, tokens = len(answer.ids) if answer else 0, end.tokens if end else 0
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens if answer else 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens if end else 0},
            "total_tokens": prompt + tokens,
        }

    def event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        number = self._number - 1
        return sse({"type": kind, "sequence_number": number, **fields}, event=kind)

    def began(self) -> Iterator[bytes]:
        for kind in ("created", "in_progress"):
            yield self.event(f"response.{kind}", response=self.object())

    def add(self, delta: Delta) -> Iterator[bytes]:
        if isinstance(delta, Text | Reasoning):
            kind = "message" if isinstance(delta, Text) else "reasoning"
            if not delta.text and self._open != kind:
                return
            if self._open != kind:
                yield from self._close()
                yield from self._begin(kind)
            yield from self._say(delta)
        elif isinstance(delta, CallBegin):
            yield from self._close()
            yield from self._begin("function_call", call_id=delta.id, name=delta.name)
        elif isinstance(delta, CallArguments):
            self.output[-1]["arguments"] += delta.text
            kind = "response.function_call_arguments.delta"
            yield self.event(kind, **self._place(), delta=delta.text)
        else:
            self._end = delta
            cut = delta.reason == "length"
            yield from self._close("incomplete" if cut else "completed")
            self.status = "incomplete" if cut else "completed"
            self.reason = "max_output_tokens" if cut else ""

    def ended(self) -> bytes:
        return self.event(f"response.{self.status}", response=self.object())

    def failed(self, error: AskError) -> bytes:
        said = {"code": error.code, "message": str(error)}
        response = {**self.object(), "status": "failed", "error": said}
        return self.event("response.failed", response=response)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _begin(self, kind: str, **fields: Any) -> Iterator[bytes]:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item = {"id": f"{prefix}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress"}
        if kind == "message":
            item |= {"role": "assistant", "content": []}  # type: ignore[dict-item]
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}  # type: ignore[dict-item]
        else:
            item |= {**fields, "arguments": ""}
        self.output.append(item)
        self._open = kind
        place = len(self.output) - 1
        yield self.event("response.output_item.added", output_index=place, item=item)
        if kind != "function_call":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
            if kind == "reasoning":
                part = {"type": "reasoning_text", "text": ""}
            added = self.event(
                "response.content_part.added", **self._place(), content_index=0, part=part
            )
            self.output[-1]["content"] = [part]
            yield added

    def _say(self, delta: Text | Reasoning) -> Iterator[bytes]:
        part = self.output[-1]["content"][0]
        part["text"] += delta.text
        kind, more = "reasoning_text", dict[str, Any]()
        if isinstance(delta, Text):
            found = []
            if delta.logprobs and self._answer is not None:
                found = chat_logprobs(self._answer.served.lm.tokenizer, delta.logprobs)
                part.setdefault("logprobs", []).extend(found)
            kind, more = "output_text", {"logprobs": found}
        yield self.event(
            f"response.{kind}.delta", **self._place(), content_index=0, delta=delta.text, **more
        )

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        if not self._open:
            return
        item, kind, self._open = self.output[-1], self._open, ""
        item["status"] = status
        if kind == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self.event("response.function_call_arguments.done", **self._place(), **done)
        else:
            part = item["content"][0]
            place = {**self._place(), "content_index": 0}
            word = "output_text" if kind == "message" else "reasoning_text"
            more = {"logprobs": part.get("logprobs", [])} if kind == "message" else {}
            yield self.event(f"response.{word}.done", **place, text=part["text"], **more)
            yield self.event("response.content_part.done", **place, part=part)
        place_of = len(self.output) - 1
        yield self.event("response.output_item.done", output_index=place_of, item=item)


@router.post("/v1/responses")
@router.post("/responses", include_in_schema=False)
async def responses(body: ResponseRequest, request: Request) -> Any:
    service = service_of(request)
    messages, pictures = body.messages()
    ask = body.ask(messages, pictures)
    served = service.catalog.find(body.model)
    if not messages:  # how Codex finds out whether anybody is there
        response = _Response(body, None, served.name)
        response.status = "completed"
        return EventStream(_nothing(response)) if body.stream else response.object()
    answer = await service.answer(ask, client_of(request))
    response = _Response(body, answer, served.name)
    if body.stream:
        return EventStream(_stream(response, answer))
    return await unless_gone(request, _whole(response, answer))


async def _nothing(response: _Response) -> AsyncIterator[bytes]:
    for event in response.began():
        yield event
    yield response.ended()


async def _stream(response: _Response, answer: Answer) -> AsyncIterator[bytes]:
    try:
        for event in response.began():
            yield event
        async for deltas in answer.batches():
            if not deltas:
                yield PING
            for delta in deltas:
                for event in response.add(delta):
                    yield event
        yield response.ended()
    except AskError as error:
        yield response.failed(error)
    finally:
        answer.close()


async def _whole(response: _Response, answer: Answer) -> dict[str, Any]:
    for delta in (await answer.whole())[0]:
        for _ in response.add(delta):
            pass
    return response.object()
