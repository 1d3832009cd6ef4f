"""Ollama's dialect: its own client is the oracle of forms, `generate` that of texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import ollama
import pytest

from bitnet_ops.language_model import LanguageModel
from bitnet_ops.server.dialects.ollama import ChatBody, GenerateBody, _Form, _short, _stream
from bitnet_ops.server.exchange import (
    AskError,
    CallArguments,
    CallBegin,
    Delta,
    End,
    Format,
    Reasoning,
    Text,
)
from served import app_of, greedy_demo, scripted_lm, serving

CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
ANSWERS = {
    "think": "<think>\nLet me see.\n</think>\n\nIt is noon.",
    "clock": CALL,
    "both": f"I look.\n{CALL}\n{CALL}",
    "many words": "one two three four five six seven",
}


def now(zone: str) -> str:
    """The time.

    Args:
        zone: its name.
    """
    return f"noon, {zone}"


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
    models = {"demo": lm, "scripted": scripted_lm(ANSWERS), "org/broken:1b": broken}
    with serving(app_of(models)) as found:
        yield found


@pytest.fixture
def client(address: str) -> ollama.Client:
    return ollama.Client(host=address)


def said(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


# Texts -------------------------------------------------------------------------------------------

OPTIONS = [
    {"temperature": 0},
    {"temperature": 1, "seed": 7},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 1.5},
    {"temperature": 0, "repeat_penalty": 1.3, "stop": ["LORD", "the"]},
]


def as_ours(options: dict[str, Any]) -> dict[str, Any]:
    names = {"repeat_penalty": "repetition_penalty"}
    return {names.get(name, name): value for name, value in options.items()}


def check_end(end: Any, ids: Sequence[int], wanted: Any) -> None:
    """The figures of a last line."""
    assert end.done and end.done_reason == wanted.finish_reason
    assert end.prompt_eval_count == len(ids) and end.eval_count == len(wanted.token_ids)
    assert end.load_duration == 0 and min(end.prompt_eval_duration, end.eval_duration) >= 0
    parts = end.prompt_eval_duration + end.eval_duration
    assert 0 < end.total_duration < 60e9 and abs(end.total_duration - parts) < 10


@pytest.mark.parametrize("options", OPTIONS)
def test_a_chat_is_what_generate_gives(client, address, lm, options) -> None:
    messages = [{"role": "system", "content": "Speak."}, *said("Who art thou?")]
    ids = lm.tokenizer.encode_chat(messages)
    wanted = lm.generate(ids, max_new_tokens=24, **as_ours(options))
    given = {**options, "num_predict": 24, "num_ctx": 512, "mirostat": 0}
    ask: dict[str, Any] = {"model": "demo", "messages": messages, "options": given}
    whole = client.chat(**ask)
    assert whole.message.content == wanted and whole.message.role == "assistant"
    assert whole.model == "demo" and whole.created_at.endswith("Z")
    check_end(whole, ids, wanted)
    parts = list(client.chat(**ask, stream=True))
    assert "".join(part.message.content for part in parts) == wanted
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    check_end(parts[-1], ids, wanted)

    async def both() -> list[str]:
        other = ollama.AsyncClient(host=address)
        message = (await other.chat(**ask)).message
        stream = await other.chat(**ask, stream=True)
        return [message.content, "".join([part.message.content async for part in stream])]

    assert asyncio.run(both()) == [wanted, wanted]


def test_a_text_raw_or_through_the_template(client, lm) -> None:
    options = {"num_predict": 12, "temperature": 0}
    raw = lm.generate("In the beginning", max_new_tokens=12)
    ask: dict[str, Any] = {"model": "demo:latest", "prompt": "In the beginning"}
    whole = client.generate(**ask, raw=True, options=options)
    assert whole.response == raw and whole.model == "demo:latest"
    check_end(whole, lm.encode("In the beginning"), raw)
    parts = list(client.generate(**ask, raw=True, options=options, stream=True))
    assert "".join(part.response for part in parts) == raw
    check_end(parts[-1], lm.encode("In the beginning"), raw)
    messages = [{"role": "system", "content": "Speak."}, *said("In the beginning")]
    ids = lm.tokenizer.encode_chat(messages)
    chat = lm.generate(ids, max_new_tokens=12)
    ignored: dict[str, Any] = {"context": [1, 2, 3], "keep_alive": "5m"}
    found = client.generate(**ask, system="Speak.", options=options, **ignored)
    assert found.response == chat and found.prompt_eval_count == len(ids)


def test_logprobs(client, lm) -> None:
    ask: dict[str, Any] = {"model": "demo", "prompt": "In", "raw": True, "logprobs": True}
    ask |= {"options": {"num_predict": 4, "temperature": 0}, "top_logprobs": 2}
    wanted = lm.generate("In", max_new_tokens=4, logprobs=2)
    whole = client.generate(**ask)
    assert [one.logprob for one in whole.logprobs] == [one.logprob for one in wanted.logprobs]
    assert [len(one.top_logprobs) for one in whole.logprobs] == [2] * 4
    parts = [one for part in client.generate(**ask, stream=True) for one in part.logprobs or ()]
    assert parts == list(whole.logprobs)


# Thoughts, tools, formats ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "text", "thoughts", "calls"),
    [
        ("think", "It is noon.", "Let me see.", 0),
        ("clock", "", None, 1),
        ("both", "I look.", None, 2),
        ("nothing", "", None, 0),
    ],
)
def test_thoughts_and_calls(client, content, text, thoughts, calls) -> None:
    ask: dict[str, Any] = {"model": "scripted", "messages": said(content), "tools": [now]}
    whole = client.chat(**ask).message
    assert (whole.content, whole.thinking) == (text, thoughts)
    wanted = [("now", {"zone": "UTC"})] * calls
    found = [(c.function.name, c.function.arguments) for c in whole.tool_calls or ()]
    assert found == wanted
    parts = list(client.chat(**ask, stream=True))
    messages = [part.message for part in parts]
    assert "".join(m.content for m in messages) == text
    assert ("".join(m.thinking or "" for m in messages) or None) == thoughts
    calls_found = [c.function for m in messages for c in m.tool_calls or ()]
    assert [(f.name, f.arguments) for f in calls_found] == wanted
    assert parts[-1].done_reason == "stop" and parts[-1].message.content == ""
    cut = client.chat(**ask, options={"num_predict": 1})
    assert cut.done_reason == ("stop" if content == "nothing" else "length")
    assert not cut.message.tool_calls


def test_a_conversation_with_tools_goes_on(client) -> None:
    """What the client makes of an answer is understood as it is."""
    ask: dict[str, Any] = {"model": "scripted", "tools": [now]}
    first = client.chat(**ask, messages=said("both"))
    results = [
        {"role": "tool", "tool_name": call.function.name, "content": now(**call.function.arguments)}
        for call in first.message.tool_calls
    ]
    again = client.chat(**ask, messages=[*said("both"), first.message, *results])
    assert again.prompt_eval_count > first.prompt_eval_count + 20


def test_formats(client) -> None:
    schema = {
        "type": "object",
        "properties": {"book": {"enum": ["Job", "Ruth"]}},
        "required": ["book"],
        "additionalProperties": False,
    }
    ask: dict[str, Any] = {"model": "demo", "options": {"num_predict": 300, "temperature": 0}}
    chat = client.chat(**ask, messages=said("Which?"), format=schema)
    text = client.generate(**ask, prompt="Which?", raw=True, format=schema)
    for found in (chat.message.content, text.response):
        assert json.loads(found) in ({"book": "Job"}, {"book": "Ruth"})
    loose = client.chat(**ask, messages=said("Which?"), format="json").message.content
    assert loose.lstrip().startswith("{")
    for bad in ("yaml", {"type": "nothing"}):
        body = {**ask, "messages": said("Which?"), "format": bad}
        found = client._client.post("/api/chat", json=body)
        assert found.status_code == 400 and "format" in found.json()["error"]


# What is read ------------------------------------------------------------------------------------


def chat(**fields: Any) -> Any:
    return ChatBody.model_validate({"messages": said("Hello"), **fields}).ask()


def test_turns_become_messages() -> None:
    call = {"function": {"name": "now", "arguments": {"zone": "UTC"}}}
    messages = [
        {"role": "user", "content": "one", "images": None},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_name": "now"},
    ]
    assert chat(messages=messages).messages == [
        {"role": "user", "content": "one"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"type": "function", **call}],
        },
        {"role": "tool", "content": "noon", "name": "now"},
    ]


def test_what_else_is_read() -> None:
    limits = [chat(options={"num_predict": n}).max_tokens for n in (-2, -1, 0, 1, 9)]
    assert limits == [None, None, None, 1, 9]
    thinks = [(a.thinking, a.effort) for a in (chat(think=t) for t in (True, False, "low", None))]
    assert thinks == [(True, None), (False, None), (True, "low"), (None, None)]
    formats = [chat(format=value).format for value in (None, "", "json", {"type": "object"})]
    wanted = [Format(), Format(), Format("json"), Format("schema", {"type": "object"})]
    assert formats == wanted
    assert chat(options={"stop": "x", "seed": -1}).stop == ("x",)
    assert chat(messages=said("### Task:\nA title.")).background and not chat().background
    served: Any = SimpleNamespace(chat_template="x")
    fields = {"prompt": "def f(", "suffix": "return x"}
    found = GenerateBody.model_validate(fields).ask(served)
    assert (found.prompt, found.suffix, found.messages) == ("def f(", "return x", None)
    task = GenerateBody.model_validate({"prompt": "### Task:\nA title."})
    assert task.ask(served).background
    served.chat_template = None
    assert task.ask(served).messages is None


def test_unknown_fields_are_ignored_and_null_is_absent(address) -> None:
    body: dict[str, Any] = {"messages": said("In"), "stream": False, "truncate": True, "x": {}}
    body |= dict.fromkeys(("model", "tools", "format", "think", "keep_alive", "logprobs"))
    body["options"] = {"num_predict": 1, "top_k": None, "stop": None, "num_gpu": 99, "tfs_z": 1}
    found = httpx.post(f"{address}/api/chat", json=body)
    assert found.status_code == 200 and found.json()["model"] == "demo"


def test_a_body_is_read_whatever_its_type_says(address) -> None:
    """curl -d says that it is a form."""
    for kind in ("application/x-www-form-urlencoded", "text/plain", ""):
        data = json.dumps({"model": "demo", "prompt": "In", "options": {"num_predict": 1}})
        found = httpx.post(f"{address}/api/generate", content=data, headers={"content-type": kind})
        assert found.status_code == 200
        assert found.headers["content-type"] == "application/x-ndjson"
        assert [json.loads(line)["done"] for line in found.text.splitlines()][-1]


# Models and embeddings ---------------------------------------------------------------------------


def test_models(client, address, lm) -> None:
    assert [m.model for m in client.list().models] == [
        *("demo:latest", "scripted:latest", "org/broken:1b")
    ]
    first = client.list().models[0]
    assert first.size == lm.path.stat().st_size and len(first.digest) == 64
    assert first.modified_at.timestamp() == pytest.approx(lm.path.stat().st_mtime)
    for name in ("demo", "demo:latest"):
        shown = client.show(name)
        kind = shown.modelinfo["general.architecture"]
        assert shown.modelinfo[f"{kind}.context_length"] == 1024
        assert shown.template == lm.tokenizer.chat_template and "completion" in shown.capabilities
        assert shown.details.family == kind and shown.modelinfo["general.basename"] == "demo"
    assert "tools" in client.show("scripted").capabilities
    old = httpx.post(f"{address}/api/show", json={"name": "demo"}).json()
    assert old["model_info"] == client.show("demo").modelinfo
    running = client.ps().models
    assert [m.name for m in running] == [m.model for m in client.list().models]
    assert running[0].context_length == 1024 and running[0].size_vram == 0
    version = httpx.get(f"{address}/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4), "the least that Copilot takes"


def test_the_size_of_a_model(client, lm) -> None:
    """The demo's by its config: an embedding that is the head too, layers and norms."""
    c = lm.config
    kv = c.num_key_value_heads * c.head_dim
    layer = 2 * c.hidden_size * (c.hidden_size + kv) + 3 * c.hidden_size * c.intermediate_size
    layer += 3 * c.hidden_size + c.intermediate_size
    count = c.vocab_size * c.hidden_size + c.num_hidden_layers * layer + c.hidden_size
    shown = client.show("demo")
    assert shown.modelinfo["general.parameter_count"] == count
    sizes = [client.list().models[0].details, client.ps().models[0].details, shown.details]
    assert {one.parameter_size for one in sizes} == {f"{count / 1e6:.2f}M"}
    assert [_short(n) for n in (2_412_820_480, 751_632_384, 45_000)] == ["2.4B", "751.63M", "45K"]


def test_a_pull_of_what_is_served(client) -> None:
    assert client.pull("demo").status == "success"
    assert [one.status for one in client.pull("demo:latest", stream=True)][-1] == "success"
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError, match="demo, scripted") as error:
            list(client.pull("llama3", stream=stream))
        assert error.value.status_code == 404


def test_a_model_without_thoughts(client) -> None:
    """As Ollama: it cannot be asked for them, but for none."""
    ask: dict[str, Any] = {"model": "demo", "options": {"num_predict": 1}}
    for call in (client.chat, client.generate):
        given = {"messages": said("x")} if call == client.chat else {"prompt": "x"}
        assert call(**ask, **given, think=False).done and call(**ask, **given).done
        for think in (True, "high"):
            with pytest.raises(ollama.ResponseError, match='"demo" does not support thinking'):
                call(**ask, **given, think=think)


def test_the_first_look(address) -> None:
    """HEAD / is asked by Ollama's own programs; GET / stays the page."""
    head = httpx.head(f"{address}/")
    assert head.status_code == 200 and head.text == ""
    assert "text/html" in httpx.get(f"{address}/").headers["content-type"]


def test_a_model_is_loaded_already(client) -> None:
    empty = client.generate(model="demo", prompt="")
    assert empty.done and empty.done_reason == "load" and empty.response == ""
    assert client.chat(model="demo", messages=[]).done_reason == "load"
    for ask in (client.generate, client.chat):
        with pytest.raises(ollama.ResponseError) as error:
            ask(model="other")
        assert error.value.status_code == 404


def test_embeddings(client, lm) -> None:
    texts = ["In the beginning", "The end"]
    wanted = [pytest.approx(row.tolist()) for row in lm.embed(texts, dimensions=16)]
    found = client.embed(model="demo", input=texts, dimensions=16)
    assert found.embeddings == wanted and found.model == "demo"
    assert found.prompt_eval_count == sum(len(lm.encode(text)) for text in texts)
    assert client.embed(model="demo", input=texts[0], dimensions=16).embeddings == wanted[:1]
    old = client.embeddings(model="demo", prompt=texts[0])
    assert old.embedding == pytest.approx(lm.embed(texts[:1])[0].tolist())
    assert client.embed(model="demo", input=[]).embeddings == []
    assert client.embeddings(model="demo", prompt="").embedding == []
    long = "word " * 3000
    ids = lm.encode(long)
    (cut,) = client.embed(model="demo", input=long).embeddings
    assert cut == pytest.approx(lm.embed([[*ids[:1023], ids[-1]]])[0].tolist())
    with pytest.raises(ollama.ResponseError, match="1024"):
        client.embed(model="demo", input=long, truncate=False)


# Errors ------------------------------------------------------------------------------------------


def test_errors_are_the_clients_own(client) -> None:
    ask: dict[str, Any] = {"model": "demo", "messages": said("x")}
    with pytest.raises(ollama.ResponseError, match="demo, scripted") as missing:
        client.chat(model="other", messages=said("x"))
    assert missing.value.status_code == 404
    image = [{**said("x")[0], "images": ["AAAA"]}]
    for fields, words in (
        ({"messages": image}, "the model has no tower"),
        ({"messages": said("word " * 3000)}, "context of 1024 tokens"),
        ({"options": {"temperature": -1}}, "temperature"),
        ({"options": {"num_predict": -3}}, "num_predict"),
        ({"options": {"seed": 2**70}}, "seed"),
        ({"options": {"stop": ["x"] * 99}}, "stop"),
        ({"think": "very"}, "think"),
    ):
        for stream in (False, True):
            with pytest.raises(ollama.ResponseError, match=words) as error:
                list(client.chat(**{**ask, **fields}, stream=stream))
            assert error.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="suffix"):
        client.generate(model="demo", prompt="x", suffix="y")


def test_a_failure_is_told_whole_or_in_the_stream(client) -> None:
    ask: dict[str, Any] = {"model": "org/broken:1b", "messages": said("x")}
    with pytest.raises(ollama.ResponseError, match="the model failed") as error:
        client.chat(**ask)
    assert error.value.status_code == 500
    with pytest.raises(ollama.ResponseError, match="the model failed"):
        list(client.chat(**ask, stream=True))


# Deltas made by hand -----------------------------------------------------------------------------


class FakeAnswer:
    """An answer whose deltas are given; it takes 1 s for the prompt, and 2 s more."""

    def __init__(self, batches: Sequence[list[Delta] | AskError]) -> None:
        self.given, self.closed, self.ids = batches, False, [1, 2, 3]
        self.timing = SimpleNamespace(asked_s=10.0, first_s=11.0, last_s=13.0)

    async def batches(self) -> AsyncIterator[list[Delta]]:
        for one in self.given:
            if isinstance(one, AskError):
                raise one
            yield one

    def close(self) -> None:
        self.closed = True


def lines_of(answer: Any, maximum: int = 99) -> list[Any]:
    """The lines of a stream of a chat, of which so many are read."""

    async def all_of_them() -> list[Any]:
        form = _Form(answer, ChatBody(model="m"), "message")
        stream, found = _stream(form), []
        async for line in stream:
            assert line.endswith(b"\n") and line.count(b"\n") == 1
            found.append(json.loads(line))
            if len(found) == maximum:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        return found

    lines = asyncio.run(all_of_them())
    assert answer.closed
    return lines


def test_lines_by_hand() -> None:
    """A call is told when it is whole; one that the end has cut off is not."""
    end = End(0, "length", tokens=9)
    lines = lines_of(
        FakeAnswer(
            [
                [],
                [Reasoning(0, "a"), Text(0, "b\n")],
                [CallBegin(0, 0, "call_1", "f"), CallArguments(0, 0, '{"a"')],
                [CallArguments(0, 0, ": 1}"), CallBegin(0, 1, "call_2", "g")],
                [CallArguments(0, 1, "{}")],
                [CallBegin(0, 2, "call_3", "h"), CallArguments(0, 2, '{"a'), end],
            ]
        )
    )
    assert {line["model"] for line in lines} == {"m"}
    head = {"role": "assistant", "content": ""}
    first = {"index": 0, "name": "f", "arguments": {"a": 1}}
    second = {"index": 1, "name": "g", "arguments": {}}
    assert [line["message"] for line in lines] == [
        head,
        {**head, "thinking": "a"},
        {**head, "content": "b\n"},
        {**head, "tool_calls": [{"id": "call_1", "function": first}]},
        {**head, "tool_calls": [{"id": "call_2", "function": second}]},
        head,
    ]
    assert [line["done"] for line in lines] == [False] * 5 + [True]
    figures = {k: v for k, v in lines[-1].items() if k.endswith(("duration", "count", "reason"))}
    assert figures == {
        "done_reason": "length",
        "total_duration": 3_000_000_000,
        "load_duration": 0,
        "prompt_eval_count": 3,
        "prompt_eval_duration": 1_000_000_000,
        "eval_count": 9,
        "eval_duration": 2_000_000_000,
    }


def test_an_answer_without_a_token_has_figures_too() -> None:
    answer = FakeAnswer([[End(0, "stop", tokens=1)]])
    answer.timing.first_s = 0.0
    (line,) = lines_of(answer)
    assert (line["prompt_eval_duration"], line["eval_duration"]) == (3_000_000_000, 0)


def test_a_stream_that_fails_or_is_left_closes_its_answer() -> None:
    failed = lines_of(FakeAnswer([[Text(0, "a")], AskError("server: no", status=503)]))
    assert failed[-1] == {"error": "server: no"}
    assert len(lines_of(FakeAnswer([[Text(0, "a")], [Text(0, "b")]]), maximum=1)) == 1
