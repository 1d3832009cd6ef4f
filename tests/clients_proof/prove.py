"""Clients against a server of the demo model: each says what it got, and whether that is right.

Run by scripts/prove_clients. What is right is what `generate` gives in this process; what a client
makes of it (a stream, a call, a parsed schema) is its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import bitnet_ops

CHECKS: dict[str, Callable[[Path, str], None]] = {}
QUESTION = "And God said"


def check(function: Callable[[Path, str], None]) -> Callable[[Path, str], None]:
    CHECKS[function.__name__] = function
    return function


@contextlib.contextmanager
def server() -> Iterator[str]:
    command = [sys.executable, "-m", "bitnet_ops", "serve", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"ready after .*(http://\S+)/", line):
                yield found[1]
                return
        raise SystemExit("the server does not start")
    finally:
        process.terminate()
        process.wait()


def run(python: Path, program: str, **environment: str) -> dict[str, object]:
    """What a program of a client's environment prints, as JSON in its last line."""
    given = {**os.environ, "OPENAI_API_KEY": "any", **environment}
    command = [str(python), "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{python}: {done.stderr[-2000:]}")
    found: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def said(name: str, what: str, same: bool) -> None:
    print(f"{name:10} {what:28} {'right' if same else 'WRONG'}", flush=True)
    if not same:
        raise SystemExit(1)


def wanted(messages: list[dict[str, str]] | None = None, tokens: int = 12) -> str:
    lm = bitnet_ops.load()
    ids = lm.tokenizer.encode_chat(messages or [{"role": "user", "content": QUESTION}])
    return str(lm.generate(ids, max_new_tokens=tokens))


SCHEMA = {
    "type": "object",
    "properties": {"book": {"enum": ["Job", "Ruth"]}, "verse": {"enum": [1, 2]}},
    "required": ["book", "verse"],
    "additionalProperties": False,
}


@check
def litellm(clients: Path, address: str) -> None:
    found = run(
        clients / "common/bin/python",
        f"""
        import json, litellm
        ask = dict(model="openai/demo", api_base="{address}/v1", temperature=0,
                   messages=[{{"role": "user", "content": {QUESTION!r}}}])
        whole = litellm.completion(**ask, max_tokens=12).choices[0].message.content
        stream = "".join(c.choices[0].delta.content or ""
                         for c in litellm.completion(**ask, max_tokens=12, stream=True))
        tool = dict(type="function", function=dict(name="read", parameters={SCHEMA!r}))
        call = litellm.completion(**ask, max_tokens=400, tools=[tool], tool_choice="required")
        form = dict(type="json_schema", json_schema=dict(name="s", schema={SCHEMA!r}))
        schema = litellm.completion(**ask, max_tokens=300, response_format=form)
        vectors = litellm.embedding("openai/demo", input=["a", "b"], api_base="{address}/v1")
        print(json.dumps(dict(whole=whole, stream=stream,
            call=json.loads(call.choices[0].message.tool_calls[0].function.arguments),
            schema=json.loads(schema.choices[0].message.content),
            vectors=[len(d["embedding"]) for d in vectors.data])))
        """,
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )
    said("litellm", "chat", found["whole"] == wanted())
    said("litellm", "stream", found["stream"] == wanted())
    for name in ("call", "schema"):
        value = found[name]
        assert isinstance(value, dict)
        said("litellm", name, value["book"] in ("Job", "Ruth") and value["verse"] in (1, 2))
    said("litellm", "embeddings", found["vectors"] == [256, 256])


@check
def langchain(clients: Path, address: str) -> None:
    found = run(
        clients / "common/bin/python",
        f"""
        import json
        from langchain_openai import ChatOpenAI, OpenAIEmbeddings
        model = ChatOpenAI(model="demo", base_url="{address}/v1", temperature=0, max_tokens=12)
        long = ChatOpenAI(model="demo", base_url="{address}/v1", temperature=0, max_tokens=400)
        schema = dict({SCHEMA!r}, title="read", description="Read a verse.")
        structured = long.with_structured_output(schema, method="json_schema")
        call = long.bind_tools([schema], tool_choice="read").invoke({QUESTION!r})
        vectors = OpenAIEmbeddings(model="demo", base_url="{address}/v1",
                                   check_embedding_ctx_length=False).embed_documents(["a", "b"])
        print(json.dumps(dict(whole=model.invoke({QUESTION!r}).content,
            stream="".join(c.content for c in model.stream({QUESTION!r})),
            structured=structured.invoke({QUESTION!r}), call=call.tool_calls[0]["args"],
            vectors=[len(v) for v in vectors])))
        """,
    )
    said("langchain", "chat", found["whole"] == wanted())
    said("langchain", "stream", found["stream"] == wanted())
    for name in ("call", "structured"):
        value = found[name]
        assert isinstance(value, dict)
        said("langchain", name, value["book"] in ("Job", "Ruth") and value["verse"] in (1, 2))
    said("langchain", "embeddings", found["vectors"] == [256, 256])


@check
def llm(clients: Path, address: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        entry = {"model_id": "demo", "model_name": "demo", "api_base": f"{address}/v1"}
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps([entry]))
        given = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "any"}
        words = ["-m", "demo", QUESTION, "-o", "max_tokens", "12", "-o", "temperature", "0"]
        for name, more in (("stream", []), ("chat", ["--no-stream"])):
            command = [str(clients / "common/bin/llm"), *words, *more]
            done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=120)
            said("llm", name, done.stdout.strip() == wanted().strip())


@check
def aider(clients: Path, address: str) -> None:
    """The demo model edits no code; its answer to what aider sent is the one that was due."""
    with tempfile.TemporaryDirectory() as folder:
        given = {**os.environ, "OPENAI_API_BASE": f"{address}/v1", "OPENAI_API_KEY": "any"}
        given |= {"HOME": folder, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        settings, history = Path(folder) / "settings.yml", Path(folder) / "history"
        extra = "{max_tokens: 16, temperature: 0}"
        settings.write_text(f"- name: openai/demo\n  edit_format: ask\n  extra_params: {extra}\n")
        words = "--model openai/demo --no-git --yes-always --no-check-update --analytics-disable"
        words += " --no-show-model-warnings --no-pretty --map-tokens 0 --message Hello"
        command = [str(clients / "aider/bin/aider"), *words.split()]
        command += ["--model-settings-file", str(settings), "--llm-history-file", str(history)]
        subprocess.run(command, cwd=folder, env=given, capture_output=True, timeout=300)
        sent, answer = re.split(r"^LLM RESPONSE .*\n", history.read_text(), flags=re.M)[:2]
        messages = [aider_message(part) for part in sent.split("-------\n")[1:]]
        found = aider_message(answer)["content"].strip()
        said("aider", "chat, streamed", found == wanted(messages, 16).strip())


def aider_message(part: str) -> dict[str, str]:
    """A message of its history: lines begin with the role, a last line feed of several is gone."""
    lines = [line.partition(" ") for line in part.strip("\n").splitlines()]
    content = "\n".join(text for _, _, text in lines) + "\n" * (len(lines) > 1)
    return {"role": lines[0][0].lower(), "content": content}


@check
def lm_eval(clients: Path, address: str) -> None:
    """Choices between two continuations: the same accuracy by HTTP as in this process."""
    pairs = [
        ("In the beginning God created the", " heaven", " engine"),
        ("And the LORD said unto", " Moses", " window"),
        ("The children of", " Israel", " copper"),
        ("And it came to", " pass", " juice"),
        ("King of", " Babylon", " Saturday"),
        ("Thus saith the", " LORD", " spoon"),
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [
            {"text": text, "choices": [a, b] if i % 2 else [b, a], "label": 0 if i % 2 else 1}
            for i, (text, a, b) in enumerate(pairs)
        ]
        (folder / "verses.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / "verses.yaml").write_text(
            "task: verses\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
            f"    test: {folder}/verses.jsonl\ntest_split: test\noutput_type: multiple_choice\n"
            'doc_to_text: "{{text}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: label\n'
            'target_delimiter: ""\nmetric_list:\n  - metric: acc\n'
        )
        demo = Path(bitnet_ops.__file__).parent / "data/demo"
        remote = f"model=demo,base_url={address}/v1/completions,tokenizer={demo}"
        shown = {}
        for model, arguments in (
            ("local-completions", f"{remote},tokenized_requests=False,num_concurrent=4"),
            ("bitnet_ops", f"path={demo}"),
        ):
            out = folder / model
            command = [
                sys.executable,
                "-c",
                "import bitnet_ops.evaluation, lm_eval.__main__ as m; ",
            ]
            command[-1] += "m.cli_evaluate()"
            command += ["--model", model, "--tasks", "verses"]
            command += ["--model_args", arguments, "--include_path", str(folder)]
            command += ["--output_path", str(out)]
            given = {**os.environ, "OPENAI_API_KEY": "any", "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=300)
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            (file,) = out.rglob("results*.json")
            shown[model] = json.loads(file.read_text())["results"]["verses"]["acc,none"]
        same = shown["local-completions"] == shown["bitnet_ops"]
        said("lm_eval", f"accuracy {shown['local-completions']:.2f}", same)


def main() -> None:
    clients, wished = Path(sys.argv[1]), sys.argv[2:] or list(CHECKS)
    with server() as address:
        for name in wished:
            CHECKS[name](clients, address)


if __name__ == "__main__":
    main()
