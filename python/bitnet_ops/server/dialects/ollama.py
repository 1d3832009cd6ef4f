"""Ollama: /api/chat, /api/generate, /api/embed, /api/tags, /api/show and what else clients look at.

Source of the forms: Ollama's API reference and its Python client. Streams are lines of JSON, and
come unless `stream` is false. A model stays in memory: keep_alive is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import Field

from bitnet_ops.generate.run import TokenLogprobs
from bitnet_ops.server.catalog import Served
from bitnet_ops.server.dialects.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Body,
    Positive,
    Repetition,
    Sampling,
    Stop,
    check_schema,
    parsed_arguments,
    stop_texts,
    tools_of,
)
from bitnet_ops.server.dialects.history import Reader
from bitnet_ops.server.dialects.openai import (
    begins_answer,
    chat_logprobs,
    is_background,
    joined,
    message_of,
    read_messages,
)
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
    remark,
)
from bitnet_ops.server.http import (
    EventStream,
    client_of,
    error_body,
    json_of,
    service_of,
    unless_gone,
)
from bitnet_ops.server.service import Answer

# Clients compare it with versions of Ollama; what is asked for here came with that one.
_VERSION = "0.14.2"
_NEVER = "2100-01-01T00:00:00Z"  # when a model is unloaded
_NDJSON = "application/x-ndjson"


class _AnyType(APIRoute):
    """Reads a body as JSON whatever Content-Type says: Ollama's guides ask by `curl -d`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
            headers.append((b"content-type", b"application/json"))
            return await handle(Request({**request.scope, "headers": headers}, request.receive))

        return read


router = APIRouter(route_class=_AnyType)

# What is asked -----------------------------------------------------------------------------------


class Options(Sampling):
    num_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = None
    repeat_penalty: Repetition | None = None
    stop: Stop = None

    def sampling(self) -> dict[str, Any]:
        found = super().sampling()
        if self.repeat_penalty is not None:
            found["repetition_penalty"] = self.repeat_penalty
        return found


class NamedBody(Body):
    model: str | None = None
    name: str | None = None  # as older clients have it

    @property
    def wanted(self) -> str:
        return self.model or self.name or ""


class AnswerBody(NamedBody):
    stream: bool | None = None
    options: Options | None = None
    format: str | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def stated(self) -> dict[str, Any]:
        """What chats and texts have in common, by the names of Ask."""
        options = self.options or Options()
        sampling = options.sampling()
        if self.logprobs:
            sampling["logprobs"] = self.top_logprobs or 0
        limit = options.num_predict
        return {
            "model": self.wanted,
            "format": _format(self.format),
            "sampling": sampling,
            # 0 and the negative ones: as many as there can be
            "max_tokens": limit if limit is not None and limit > 0 else None,
            "stop": stop_texts(options.stop),
            "thinking": None if self.think is None else bool(self.think),
            "effort": self.think if isinstance(self.think, str) else None,
        }


class ChatBody(AnswerBody):
    messages: Annotated[list[Any], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None

    def ask(self) -> Ask:
        messages, pictures = read_messages(self.messages or (), _turn)
        return Ask(
            **self.stated(),
            messages=messages,
            pictures=pictures,
            tools=tools_of(self.tools),
            continues=bool(messages) and begins_answer(messages),
            background=is_background(messages),
        )


def _turn(reader: Reader, turn: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A message of Ollama's, whose images stand in front of its text."""
    for message in message_of(reader, {**turn, "name": turn.get("tool_name")}):
        of_tool = message["role"] == "tool"
        with reader.leniently() if of_tool else contextlib.nullcontext():
            marks = _images(reader, turn.get("images"))
        if marks:
            message["content"] = reader.marks.joined([*marks, message["content"] or ""])
        yield message


def _images(reader: Reader, images: Any) -> list[str]:
    """Their marks."""
    marks = []
    for i, data in enumerate(images if isinstance(images, list) else ()):
        if isinstance(data, str) and data:
            marks.append(reader.picture(data, f"images[{i}]"))
        else:
            reader.reject(f"images in base64, got {type(data).__name__} at images[{i}]")
            marks.append(remark("image"))
    return marks


class GenerateBody(AnswerBody):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None

    def ask(self, served: Served) -> Ask:
        prompt = self.prompt or ""
        if self.raw or self.suffix or served.chat_template is None:
            if self.images:
                raise AskError(
                    f"server: expected no images beside raw or suffix, got {len(self.images)}; "
                    "leave these out",
                    field="images",
                )
            return Ask(**self.stated(), prompt=prompt, suffix=self.suffix)
        reader = Reader("images")
        reader.new = True
        content = reader.marks.joined([*_images(reader, self.images), prompt])
        messages = [{"role": "user", "content": content}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return Ask(
            **self.stated(),
            messages=messages,
            pictures=reader.marks,
            background=is_background(messages),
        )


def _format(value: Any) -> Format:
    if value in (None, ""):
        return Format()
    if value == "json":
        return Format("json")
    if isinstance(value, dict):
        check_schema(value, "format")
        return Format("schema", value)
    raise AskError(
        f'server: expected format "json" or a JSON schema, got {value[:80]!r}', field="format"
    )


# What is returned --------------------------------------------------------------------------------


@router.post("/api/chat")
async def chat(body: ChatBody, request: Request) -> Any:
    if not body.messages:
        return _loaded(request, body, message={"role": "assistant", "content": ""})
    service = service_of(request)
    _check_thinking(service.catalog.find(body.wanted), body)
    answer = await service.answer(body.ask(), client_of(request))
    return await _respond(request, body, _Form(answer, body, "message"))


@router.post("/api/generate")
async def generate(body: GenerateBody, request: Request) -> Any:
    if not body.prompt and not body.suffix:
        return _loaded(request, body, response="")
    service = service_of(request)
    served = service.catalog.find(body.wanted)
    _check_thinking(served, body)
    ask = body.ask(served)
    answer = await service.answer(ask, client_of(request))
    return await _respond(request, body, _Form(answer, body, "response"))


def _check_thinking(served: Served, body: AnswerBody) -> None:
    """As Ollama has it: a model without thoughts is not asked for them, but they may be off."""
    if body.think and not served.thinks:
        raise AskError(
            f'server: expected think off or left out, got {body.think!r}: "{served.name}" does not '
            "support thinking",
            field="think",
        )


def _loaded(request: Request, body: NamedBody, **empty: Any) -> dict[str, Any]:
    """To a request that only has a model loaded, which here it is."""
    served = service_of(request).catalog.find(body.wanted)
    head = {"model": body.wanted or served.name, "created_at": _now()}
    return {**head, **empty, "done": True, "done_reason": "load"}


async def _respond(request: Request, body: AnswerBody, form: _Form) -> Any:
    if body.stream is False:
        return await unless_gone(request, _whole(form))
    return EventStream(_stream(form), _NDJSON)


class _Form:
    """What is returned of one answer; kind: "message" of chats, "response" of texts."""

    def __init__(self, answer: Answer, body: AnswerBody, kind: str) -> None:
        self.answer, self._kind = answer, kind
        self._model = body.wanted or answer.served.name  # as the client wrote it
        self._call: tuple[CallBegin, list[str]] | None = None  # that has not ended

    def part(
        self,
        text: str = "",
        thoughts: str = "",
        calls: Sequence[dict[str, Any]] = (),
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if thoughts:
            more["thinking"] = thoughts
        if calls:
            more["tool_calls"] = list(calls)
        said = {"response": text, **more}
        if self._kind == "message":
            said = {"message": {"role": "assistant", "content": text, **more}}
        if logprobs:
            said["logprobs"] = chat_logprobs(self.answer.served.lm.tokenizer, logprobs)
        return {"model": self._model, "created_at": _now(), **said, "done": False}

    def parts(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """The lines that a delta completes: a call is returned when all its arguments are there."""
        if isinstance(delta, CallArguments):
            assert self._call is not None
            self._call[1].append(delta.text)
            return
        if self._call is not None:
            (begin, texts), self._call = self._call, None
            if calls := _calls([(begin.id, begin.name, "".join(texts))], begin.call):
                yield self.part(calls=calls)
        if isinstance(delta, CallBegin):
            self._call = (delta, [])
        elif isinstance(delta, Text):
            yield self.part(delta.text, logprobs=delta.logprobs)
        elif isinstance(delta, Reasoning):
            yield self.part(thoughts=delta.text, logprobs=delta.logprobs)
        else:
            yield {**self.part(), **self.end(delta)}

    def end(self, end: End) -> dict[str, Any]:
        """The figures; times in ns."""
        timing = self.answer.timing
        first_s = timing.first_s or timing.last_s  # an answer may have no token
        return {
            "done": True,
            "done_reason": "length" if end.reason == "length" else "stop",
            "total_duration": _ns(timing.last_s - timing.asked_s),
            "load_duration": 0,
            "prompt_eval_count": len(self.answer.ids),
            "prompt_eval_duration": _ns(first_s - timing.asked_s),
            "eval_count": end.tokens,
            "eval_duration": _ns(timing.last_s - first_s),
        }


def _calls(found: Sequence[tuple[str, str, str]], first: int = 0) -> list[dict[str, Any]]:
    """Calls of (id, name, arguments); without those that the end of the answer has cut off."""
    calls = []
    for index, (id, name, text) in enumerate(found, start=first):
        arguments = parsed_arguments(text)
        if arguments is not None:
            function = {"index": index, "name": name, "arguments": arguments}
            calls.append({"id": id, "function": function})
    return calls


async def _whole(form: _Form) -> dict[str, Any]:
    (deltas,) = await form.answer.whole()
    text, thoughts, calls = joined(deltas)
    logprobs = [one for d in deltas if isinstance(d, Text | Reasoning) for one in d.logprobs]
    end = deltas[-1]
    assert isinstance(end, End)
    return {**form.part(text, thoughts, _calls(calls), logprobs), **form.end(end)}


async def _stream(form: _Form) -> AsyncIterator[bytes]:
    try:
        async for deltas in form.answer.batches():
            if not deltas:  # these lines have no comments: an empty part says that it goes on
                yield _line(form.part())
            for delta in deltas:
                for part in form.parts(delta):
                    yield _line(part)
    except AskError as error:
        yield _line(error_body("/api/", error))
    finally:
        form.answer.close()


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _now() -> str:
    return _time(datetime.now(timezone.utc))


def _time(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


# Embeddings --------------------------------------------------------------------------------------


class EmbedBody(NamedBody):
    input: str | Annotated[list[str], Field(max_length=2048)] | None = None
    truncate: bool | None = None
    dimensions: Positive | None = None


class EmbeddingsBody(NamedBody):
    prompt: str | None = None


@router.post("/api/embed")
async def embed(body: EmbedBody, request: Request) -> Any:
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    cut = body.truncate is not False  # those that are too long
    return await unless_gone(request, _embedded(request, body, texts, cut))


async def _embedded(request: Request, body: EmbedBody, texts: Sequence[str], cut: bool) -> Response:
    service, client, began = service_of(request), client_of(request), time.perf_counter()
    service.catalog.find(body.wanted)
    vectors: Iterable[Any] = ()
    tokens = 0
    if texts:
        vectors, tokens = await service.embed(
            body.wanted, texts, body.dimensions, client, truncate=cut
        )
    head = {
        "model": body.wanted,
        "total_duration": _ns(time.perf_counter() - began),
        "load_duration": 0,
        "prompt_eval_count": tokens,
    }
    return await service.read(
        client, lambda: json_of(head, "embeddings", (v.tolist() for v in vectors))
    )


@router.post("/api/embeddings")
async def embeddings(body: EmbeddingsBody, request: Request) -> Any:
    service, texts = service_of(request), [body.prompt] if body.prompt else []
    service.catalog.find(body.wanted)
    if not texts:
        return {"embedding": []}
    work = service.embed(body.wanted, texts, None, client_of(request), truncate=True)
    vectors, _ = await unless_gone(request, work)  # type: ignore[misc]
    return {"embedding": vectors[0].tolist()}


# Models ------------------------------------------------------------------------------------------


@router.get("/api/version")
async def version() -> Any:
    return {"version": _VERSION}


@router.get("/api/tags")
async def tags(request: Request) -> Any:
    return {"models": [_listed(request, served) for served in service_of(request).catalog]}


@router.get("/api/ps")
async def running(request: Request) -> Any:
    """All of them: they are in memory as long as the server runs."""
    return {
        "models": [
            {
                **_listed(request, served),
                "expires_at": _NEVER,
                "size_vram": 0,
                "context_length": served.context_length,
            }
            for served in service_of(request).catalog
        ]
    }


class PullBody(NamedBody):
    stream: bool | None = None


@router.post("/api/pull")
async def pull(body: PullBody, request: Request) -> Any:
    """What a client does before it asks: a model that is served is here; others cannot be had."""
    service_of(request).catalog.find(body.wanted)
    if body.stream is False:
        return {"status": "success"}
    return EventStream(_pulled(), _NDJSON)


async def _pulled() -> AsyncIterator[bytes]:
    for status in ("pulling manifest", "success"):
        yield _line({"status": status})


@router.post("/api/show")
async def show(body: NamedBody, request: Request) -> Any:
    served = service_of(request).catalog.find(body.wanted)
    config, kind = served.lm.config, served.lm.config.model_type
    return {
        "modelfile": f"FROM {served.name}",
        "parameters": "\n".join(f"{k} {v}" for k, v in served.lm.generation.sampling.items()),
        "template": served.chat_template or "{{ .Prompt }}",
        "details": _details(served),
        "model_info": {
            "general.architecture": kind,
            "general.parameter_count": served.parameters,
            "general.basename": served.name,  # the name that Copilot shows
            f"{kind}.context_length": served.context_length,
            f"{kind}.embedding_length": config.hidden_size,
            f"{kind}.block_count": config.num_hidden_layers,
            f"{kind}.attention.head_count": config.num_attention_heads,
            f"{kind}.attention.head_count_kv": config.num_key_value_heads,
            f"{kind}.vocab_size": config.vocab_size,
        },
        "capabilities": served.capabilities,
        "modified_at": _listed(request, served)["modified_at"],
    }


def _listed(request: Request, served: Served) -> dict[str, Any]:
    name = served.name if ":" in served.name.rpartition("/")[2] else f"{served.name}:latest"
    path = served.lm.path
    stat = path.stat() if path is not None and path.exists() else None
    size = stat.st_size if stat else 0
    modified_s = stat.st_mtime if stat else service_of(request).metrics.started
    # The weights are not read for it: it only tells models apart.
    digest = hashlib.sha256(f"{name} {size} {modified_s}".encode()).hexdigest()
    return {
        "name": name,
        "model": name,
        "modified_at": _time(datetime.fromtimestamp(modified_s, timezone.utc)),
        "size": size,
        "digest": digest,
        "details": _details(served),
    }


def _details(served: Served) -> dict[str, Any]:
    family = served.lm.config.model_type
    return {
        "parent_model": "",
        "format": "sglbitnt",
        "family": family,
        "families": [family],
        "parameter_size": _short(served.parameters),
        "quantization_level": "ternary",
    }


def _short(count: int) -> str:
    """As Ollama writes it: 2.4B, 134.52M."""
    if count >= 10**9:
        return f"{count / 10**9:.1f}B"
    return f"{count / 10**6:.2f}M" if count >= 10**6 else f"{count / 10**3:.0f}K"
