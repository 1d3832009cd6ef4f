"""OpenAI: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models.

Source of the forms: OpenAI's API reference; `reasoning_content` is DeepSeek's, `min_p`, `top_k`,
`repetition_penalty`, `chat_template_kwargs` and `timings` are those of vLLM and llama.cpp.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import struct
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field
from torch import Tensor

from bitnet_ops.generate.pictures import PictureMarks
from bitnet_ops.generate.run import TokenLogprobs
from bitnet_ops.generate.tokenizer import Tokenizer
from bitnet_ops.server.dialects.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Body,
    Count,
    Positive,
    Sampling,
    Stop,
    ThinkingFields,
    format_of,
    stop_texts,
    tool_choice_of,
    tools_of,
)
from bitnet_ops.server.dialects.history import Reader, call_of, thoughts_of
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
from bitnet_ops.server.gate import Client
from bitnet_ops.server.http import (
    PING,
    EventStream,
    client_of,
    error_body,
    json_of,
    service_of,
    sse,
    unless_gone,
)
from bitnet_ops.server.service import Answer, Service

router = APIRouter()
_DONE = b"data: [DONE]\n\n"
# how Open WebUI and others begin what nobody waits for: titles, tags, follow-ups
_BACKGROUND = ("### Task:\n", "### Task:\r\n")


# Chat --------------------------------------------------------------------------------------------


class StreamOptions(Body):
    include_usage: bool | None = None


class ChatRequest(Sampling, ThinkingFields):
    model: str = ""
    messages: Annotated[list[Any], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | Literal[-1] | None = None
    max_completion_tokens: Positive | None = None
    n: Positive | None = None
    stop: Stop = None
    logit_bias: dict[int, float] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    ignore_eos: bool | None = None
    background: bool | None = None

    def ask(self) -> Ask:
        tools = tools_of(self.tools)
        options = dict(self.chat_template_kwargs or {})
        sampling = self.sampling()
        if self.logprobs:
            sampling["logprobs"] = self.top_logprobs or 0
        if self.logit_bias:
            sampling["logit_bias"] = self.logit_bias
        limit = self.max_completion_tokens or self.max_tokens
        messages, pictures = read_messages(self.messages)
        return Ask(
            model=self.model,
            messages=messages,
            pictures=pictures,
            tools=tools,
            tool_choice=tool_choice_of(self.tool_choice, tools),
            parallel_tools=self.parallel_tool_calls is not False,
            format=format_of(self.response_format),
            sampling=sampling,
            max_tokens=None if limit == -1 else limit,
            stop=stop_texts(self.stop),
            ignore_eos=bool(self.ignore_eos),
            n=self.n or 1,
            **self.thoughts(options),
            template_options=options,
            continues=self._continues(messages),
            background=bool(self.background) or is_background(messages),
        )

    def _continues(self, messages: list[dict[str, Any]]) -> bool:
        """Whether the last message is the answer's beginning; as llama.cpp has it, it is where
        nothing else is said."""
        wanted = self.continue_final_message
        if wanted and self.add_generation_prompt:
            raise AskError(
                "server: expected continue_final_message or add_generation_prompt, got both; leave "
                "one out",
                field="continue_final_message",
            )
        if wanted is None:
            wanted = not self.add_generation_prompt
        begun = begins_answer(messages)
        if self.continue_final_message and not begun:
            raise AskError(
                "server: expected messages that end with the assistant's text, for "
                f"continue_final_message, got the {messages[-1]['role']}'s",
                field="continue_final_message",
            )
        return wanted and begun


def begins_answer(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message is an answer to go on with; one that is empty is taken away."""
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        return False
    begun = bool((last["content"] or "").strip())  # some clients write a blank for nothing
    if not begun and len(messages) > 1:
        messages.pop()
    return begun


def read_messages(
    entries: Sequence[Any], message: Callable[[Reader, Any], Iterable[dict[str, Any]]] | None = None
) -> tuple[list[dict[str, Any]], PictureMarks]:
    """A conversation in the form of chat completions, as templates read it, and its pictures.

    message: reads an entry; None: `message_of`.
    """
    reader = Reader("messages")
    read = message or message_of
    found = reader.read(entries, read, lambda one: one.get("role") == "assistant")
    return found, reader.marks


_ROLES = {"developer": "system", "function": "tool"}


def message_of(reader: Reader, entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The message of an entry."""
    role = entry.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= 64:
        reader.reject(f"a role for every message, got {role!r:.80}")
        role = "user"
    message: dict[str, Any] = {"role": _ROLES.get(role, role)}
    content = entry.get("content")
    if message["role"] == "tool":
        message["content"] = reader.result(content)
    else:
        message["content"] = reader.text(content if content is not None else entry.get("refusal"))
    if role == "assistant":
        if thoughts := thoughts_of(entry):
            message["reasoning_content"] = thoughts
        if calls := _calls(reader, entry):
            message["tool_calls"] = calls
            message["content"] = message["content"] if content is not None else None
    for name in ("name", "tool_call_id"):
        if isinstance(entry.get(name), str):
            message[name] = entry[name]
    yield message


def _calls(reader: Reader, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of an answer; `function_call` is what calls were before there were several."""
    found = entry.get("tool_calls")
    given = [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
    if not given and isinstance(entry.get("function_call"), Mapping):
        given = [{"function": entry["function_call"]}]
    calls = []
    for call in given:
        function = call.get("function", call.get("custom"))
        function = function if isinstance(function, Mapping) else {}
        arguments = function.get("arguments")
        if "input" in function:  # of a custom tool: a text
            arguments = {"input": function["input"]}
        calls.append(call_of(call.get("id"), reader.name(function.get("name")), arguments))
    return calls


def is_background(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a program asks for a title or tags, of which its user sees nothing come."""
    content = messages[-1].get("content") if messages else None
    return isinstance(content, str) and content.startswith(_BACKGROUND)


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)
async def chat_completions(body: ChatRequest, request: Request) -> Any:
    service = service_of(request)
    answer = await service.answer(body.ask(), client_of(request))
    form = _Form(answer, f"chatcmpl-{secrets.token_hex(12)}", "chat.completion")
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return EventStream(_chat_stream(form, usage))
    return await unless_gone(request, _chat_whole(form))


class _Form:
    """What all objects of one answer have alike."""

    def __init__(self, answer: Answer, id: str, kind: str) -> None:
        self.answer, self.tokenizer = answer, answer.served.lm.tokenizer
        self.id, self.kind = id, kind
        # A chunk has few words of its own: the rest is written once.
        head = self.head(f"{kind}.chunk" if kind == "chat.completion" else kind)
        self._prefix = json.dumps(head, ensure_ascii=False, separators=(",", ":"))[:-1]

    def head(self, kind: str) -> dict[str, Any]:
        answer = self.answer
        return {
            "id": self.id,
            "object": kind,
            "created": answer.created,
            "model": answer.served.name,
        }

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        rest = json.dumps({"choices": choices, **more}, ensure_ascii=False, separators=(",", ":"))
        return f"data: {self._prefix},{rest[1:]}\n\n".encode()

    def usage(self, tokens: int, reasoning: int = 0) -> dict[str, Any]:
        prompt = len(self.answer.ids)
        found: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "prompt_tokens_details": {"cached_tokens": self.answer.cached_tokens},
        }
        if reasoning:
            found["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return found

    def timings(self) -> dict[str, float]:
        timing = self.answer.timing
        found: dict[str, float] = {
            "prompt_ms": round(timing.prompt_ms, 3),
            "predicted_per_second": round(timing.tokens_per_s, 3),
        }
        if drafted := timing.drafted:  # as llama-server: only where something was drafted
            found |= {"draft_n": drafted, "draft_n_accepted": timing.accepted_drafts}
        return found


async def _chat_stream(form: _Form, include_usage: bool) -> AsyncIterator[bytes]:
    answer = form.answer
    tokens = reasoning = 0
    try:
        for index in range(answer.ask.n):
            yield form.chunk([_choice(index, {"role": "assistant", "content": ""})])
        async for deltas in answer.batches():
            if not deltas:
                yield PING
            for delta in deltas:
                yield form.chunk([_chat_chunk(form.tokenizer, delta)])
                if isinstance(delta, End):
                    tokens += delta.tokens
                    reasoning += delta.reasoning_tokens
        if include_usage:
            yield form.chunk([], usage=form.usage(tokens, reasoning), timings=form.timings())
        yield _DONE
    except AskError as error:
        yield sse(error_body("", error))
    finally:
        answer.close()


def _choice(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _chat_chunk(tokenizer: Tokenizer, delta: Delta) -> dict[str, Any]:
    if isinstance(delta, Text | Reasoning):
        name = "content" if isinstance(delta, Text) else "reasoning_content"
        choice = _choice(delta.index, {name: delta.text})
        if delta.logprobs:
            choice["logprobs"] = {"content": chat_logprobs(tokenizer, delta.logprobs)}
        return choice
    if isinstance(delta, CallBegin):
        function = {"name": delta.name, "arguments": ""}
        call = {"index": delta.call, "id": delta.id, "type": "function", "function": function}
        return _choice(delta.index, {"tool_calls": [call]})
    if isinstance(delta, CallArguments):
        call = {"index": delta.call, "function": {"arguments": delta.text}}
        return _choice(delta.index, {"tool_calls": [call]})
    return _choice(delta.index, {}, delta.reason)


async def _chat_whole(form: _Form) -> dict[str, Any]:
    answers = await form.answer.whole()
    ends = [end for deltas in answers for end in deltas if isinstance(end, End)]
    usage = form.usage(sum(e.tokens for e in ends), sum(e.reasoning_tokens for e in ends))
    choices = [_chat_message(form.tokenizer, deltas) for deltas in answers]
    return {
        **form.head(form.kind),
        "choices": choices,
        "usage": usage,
        "timings": form.timings(),
    }


def _chat_message(tokenizer: Tokenizer, deltas: Sequence[Delta]) -> dict[str, Any]:
    text, thoughts, calls = joined(deltas)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["content"] = text or None
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in calls
        ]
    logprobs = [one for d in deltas if isinstance(d, Text | Reasoning) for one in d.logprobs]
    end = deltas[-1]
    assert isinstance(end, End)
    return {
        "index": end.index,
        "message": message,
        "logprobs": {"content": chat_logprobs(tokenizer, logprobs)} if logprobs else None,
        "finish_reason": end.reason,
    }


def joined(deltas: Sequence[Delta]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """The text, the thoughts, and of each call (id, name, arguments)."""
    text = "".join(d.text for d in deltas if isinstance(d, Text))
    thoughts = "".join(d.text for d in deltas if isinstance(d, Reasoning))
    calls = [
        (
            begin.id,
            begin.name,
            "".join(
                d.text for d in deltas if isinstance(d, CallArguments) and d.call == begin.call
            ),
        )
        for begin in deltas
        if isinstance(begin, CallBegin)
    ]
    return text, thoughts, calls


def chat_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """`logprobs.content` of a choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    return [
        {
            **entry(one.token_id, one.logprob),
            "top_logprobs": [entry(*pair) for pair in one.top_logprobs],
        }
        for one in found
    ]


# Completions -------------------------------------------------------------------------------------

_Ids = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1)]


class CompletionRequest(Sampling):
    model: str = ""
    prompt: (
        str
        | _Ids
        | Annotated[list[str], Field(min_length=1, max_length=128)]
        | Annotated[list[_Ids], Field(min_length=1, max_length=128)]
    ) = ""
    suffix: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | Literal[-1] | None = None
    n: Positive | None = None
    best_of: Positive | None = None
    echo: bool | None = None
    stop: Stop = None
    logit_bias: dict[int, float] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    ignore_eos: bool | None = None
    background: bool | None = None

    def asks(self) -> list[Ask]:
        prompts: Sequence[Any] = [self.prompt]
        if isinstance(self.prompt, list) and not isinstance(self.prompt[0], int):
            prompts = self.prompt
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise AskError(
                f"server: expected best_of equal to n, got {self.best_of}; ask for n answers and "
                "choose one",
                field="best_of",
            )
        if len(prompts) > 1 and self.stream:
            raise AskError(
                f"server: expected one prompt in a stream, got {len(prompts)}", field="prompt"
            )
        sampling = self.sampling()
        if self.logprobs is not None:
            sampling["logprobs"] = self.logprobs
        if self.logit_bias:
            sampling["logit_bias"] = self.logit_bias
        limit = 16 if self.max_tokens is None else self.max_tokens
        return [
            Ask(
                model=self.model,
                prompt=prompt,
                suffix=self.suffix,
                format=format_of(self.response_format),
                sampling=sampling,
                max_tokens=None if limit == -1 else limit,
                stop=stop_texts(self.stop),
                ignore_eos=bool(self.ignore_eos),
                n=self.n or 1,
                echo=bool(self.echo),
                background=bool(self.background),
            )
            for prompt in prompts
        ]


@router.post("/v1/completions")
@router.post("/completions", include_in_schema=False)
async def completions(body: CompletionRequest, request: Request) -> Any:
    service, client = service_of(request), client_of(request)
    id = f"cmpl-{secrets.token_hex(12)}"
    if body.stream:
        (ask,) = body.asks()
        form = _Form(await service.answer(ask, client), id, "text_completion")
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return EventStream(_completion_stream(form, service, usage))
    return await unless_gone(request, _completions_whole(service, client, id, body.asks()))


async def _completions_whole(
    service: Service, client: Client, id: str, asks: list[Ask]
) -> dict[str, Any]:
    """The answers to all prompts, which run side by side as far as there is room."""
    forms: list[_Form] = []
    try:
        for ask in asks:
            answer = await service.answer(ask, client)
            forms.append(_Form(answer, id, "text_completion"))
        works = [asyncio.ensure_future(_completion_choices(form, service)) for form in forms]
        try:
            choices = [choice for found in await asyncio.gather(*works) for choice in found]
        finally:
            for work in works:
                work.cancel()
    finally:
        for form in forms:
            form.answer.close()
    prompt = sum(len(form.answer.ids) for form in forms)
    tokens = sum(form.answer.timing.completion_tokens for form in forms)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(form.answer.cached_tokens for form in forms)
        },
    }
    for index, choice in enumerate(choices):
        choice["index"] = index
    return {**forms[0].head("text_completion"), "choices": choices, "usage": usage}


async def _completion_choices(form: _Form, service: Service) -> list[dict[str, Any]]:
    """The answers to one prompt."""
    ask, choices = form.answer.ask, []
    before = await _echoed(form, service)
    for deltas in await form.answer.whole():
        end = deltas[-1]
        assert isinstance(end, End)
        text, found = "", list[TokenLogprobs]()
        for delta in deltas:
            if isinstance(delta, Text | Reasoning):
                text += delta.text
                found += delta.logprobs
        choices.append(
            {
                "index": end.index,
                "text": before.text + text,
                "logprobs": _columns(form.tokenizer, before, found, ask),
                "finish_reason": end.reason,
            }
        )
    return choices


class _Echo:
    """The prompt as it comes before an answer: its text, and its tokens with their logprobs."""

    def __init__(self, text: str = "", first: Sequence[int] = ()) -> None:
        self.text, self.first = text, first
        self.logprobs: list[TokenLogprobs] = []


async def _echoed(form: _Form, service: Service) -> _Echo:
    answer, ask = form.answer, form.answer.ask
    if not ask.echo:
        return _Echo()
    shown = form.tokenizer.decode(answer.ids, skip_special_tokens=False)
    echo = _Echo(ask.prompt if isinstance(ask.prompt, str) else shown, answer.ids[:1])
    top = ask.sampling.get("logprobs")
    if top is not None:
        echo.logprobs = await service.prompt_logprobs(answer, top)
    return echo


def _columns(
    tokenizer: Tokenizer, before: _Echo, found: Sequence[TokenLogprobs], ask: Ask
) -> dict[str, Any] | None:
    """`logprobs` of a completion: a list for each kind of figure.

    A token that is a part of a character is told by its bytes, as OpenAI had it, "bytes:\\xf0"; its
    offset is that of the character.
    """
    if ask.sampling.get("logprobs") is None:
        return None

    def text(token: int) -> str:
        data = tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    first, all = [text(token) for token in before.first], [*before.logprobs, *found]
    ids = [*before.first, *(one.token_id for one in all)]
    offsets, at, characters = [], 0, getincrementaldecoder("utf-8")("replace")
    for token in ids:
        offsets.append(at)
        at += len(characters.decode(tokenizer.token_bytes(token)))
    return {
        "tokens": [text(token) for token in ids],
        "token_logprobs": [*(None for _ in first), *(one.logprob for one in all)],
        "top_logprobs": [
            *(None for _ in first),
            *({text(t): logprob for t, logprob in one.top_logprobs} for one in all),
        ],
        "text_offset": offsets,
    }


async def _completion_stream(
    form: _Form, service: Service, include_usage: bool
) -> AsyncIterator[bytes]:
    answer, ask, tokens = form.answer, form.answer.ask, 0
    try:
        if ask.echo:
            echo = await _echoed(form, service)
            columns = _columns(form.tokenizer, echo, (), ask)
            for index in range(ask.n):
                yield form.chunk([_completion_chunk(index, echo.text, columns)])
        async for deltas in answer.batches():
            if not deltas:
                yield PING
            for delta in deltas:
                if isinstance(delta, Text | Reasoning):
                    columns = None
                    if delta.logprobs:
                        columns = _columns(form.tokenizer, _Echo(), delta.logprobs, ask)
                    yield form.chunk([_completion_chunk(delta.index, delta.text, columns)])
                elif isinstance(delta, End):
                    tokens += delta.tokens
                    yield form.chunk([_completion_chunk(delta.index, "", None, delta.reason)])
        if include_usage:
            yield form.chunk([], usage=form.usage(tokens), timings=form.timings())
        yield _DONE
    except AskError as error:
        yield sse(error_body("", error))
    finally:
        answer.close()


def _completion_chunk(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


# Embeddings --------------------------------------------------------------------------------------


class EmbeddingRequest(Body):
    model: str = ""
    input: (
        str
        | _Ids
        | Annotated[list[str], Field(min_length=1, max_length=2048)]
        | Annotated[list[_Ids], Field(min_length=1, max_length=2048)]
    )
    dimensions: Positive | None = None
    encoding_format: Literal["float", "base64"] | None = None


@router.post("/v1/embeddings")
@router.post("/embeddings", include_in_schema=False)
async def embeddings(body: EmbeddingRequest, request: Request) -> Any:
    service = service_of(request)
    texts: Sequence[Any] = [body.input]
    if isinstance(body.input, list) and not isinstance(body.input[0], int):
        texts = body.input
    return await unless_gone(request, _embedded(service, client_of(request), body, texts))


async def _embedded(
    service: Service, client: Client, body: EmbeddingRequest, texts: Sequence[Any]
) -> Response:
    vectors, tokens = await service.embed(body.model, texts, body.dimensions, client)
    head = {
        "object": "list",
        "model": service.catalog.find(body.model).name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    data = (
        {"object": "embedding", "index": i, "embedding": _encoded(v, body.encoding_format)}
        for i, v in enumerate(vectors)
    )
    return await service.read(client, lambda: json_of(head, "data", data))


def _encoded(vector: Tensor, form: str | None) -> list[float] | str:
    numbers = vector.tolist()
    if form != "base64":
        return numbers
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


# Models ------------------------------------------------------------------------------------------


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def models(request: Request) -> Any:
    """With `models` beside `data`: Codex reads that, and Zed the capabilities; those who know
    OpenRouter's list read `architecture`."""
    entries = [_model(request, one.name) for one in service_of(request).catalog]
    if _asks_anthropic(request):
        ends = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"]}
        return {"data": entries, "has_more": False, **ends}
    return {"object": "list", "data": entries, "models": entries}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Any:
    return _model(request, service_of(request).catalog.find(name).name)


def _asks_anthropic(request: Request) -> bool:
    """Its clients ask at the same address, and say so."""
    return "anthropic-version" in request.headers


def _model(request: Request, name: str) -> dict[str, Any]:
    service = service_of(request)
    served = service.catalog.find(name)
    if _asks_anthropic(request):
        since = datetime.fromtimestamp(int(service.metrics.started), timezone.utc)
        return {
            "type": "model",
            "id": served.name,
            "display_name": served.name,
            "created_at": since.isoformat().replace("+00:00", "Z"),
            "max_input_tokens": served.context_length,
        }
    sees = "vision" in served.capabilities
    return {
        "id": served.name,
        "object": "model",
        "created": int(service.metrics.started),
        "owned_by": "bitnet-ops",
        "name": served.name,
        "model": served.name,
        "display_name": served.name,
        "context_length": served.context_length,
        "max_model_len": served.context_length,
        "capabilities": served.capabilities,
        "architecture": {
            "input_modalities": ["text", *(["image"] if sees else [])],
            "output_modalities": ["text"],
        },
    }
