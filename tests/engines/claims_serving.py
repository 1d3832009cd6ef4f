"""The real engine serves: its greedy tokens are transformers' and our own engine's, and ours is
the code that ran, in the processes that it spawned; over HTTP too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import openai
import pytest
from environment import HERE, ROOT, child_environment, run_logged
from verdicts import assert_calls, assert_tokens

from engines import ENGINES, chosen, free_port

DEMO = ROOT / "tests" / "data" / "demo-model"
CONVERTED = ROOT / "python" / "bitnet_ops" / "data" / "demo"  # the same model as a model.bin
OWN_TOKENS = 24
READY_S = 600
ENGINE = chosen()


def expected_cases(count):
    return json.loads((DEMO / "expected.json").read_text())["cases"][:count]


def layers_of(folder):
    return json.loads((folder / "config.json").read_text())["num_hidden_layers"]


def script(work, name, log, *arguments, env=None):
    """Run a script of this folder, by default without import stubs."""
    command = [sys.executable, HERE / name, *arguments]
    return run_logged(command, work / f"{log}.log", 1500, env or child_environment())


@pytest.fixture(scope="session")
def checkpoint(work):
    """name -> folder"""
    made = {"online": DEMO}

    def make(name):
        if name not in made and name == "packed":
            made[name] = work / "packed"
            script(work, "checkpoints.py", "pack", "pack", DEMO, made[name])
        if name not in made and name == "converted":
            made[name] = served_folder(work, CONVERTED)
        return made[name]

    return make


def served_folder(work, model):
    """The folder that SGLang's launcher would make of a converted model."""
    folder = work / f"serving-{model.name}"
    script(work, "checkpoints.py", folder.name, "folder", model, folder, "stored")
    return folder


@pytest.fixture(scope="session")
def kinds(work):
    """The folder of tiny checkpoints, with what our own engine says to them."""
    folder = work / "kinds"
    names = {"llama", *(name.removesuffix("-bin") for name in ENGINE.families)}
    arguments = folder, OWN_TOKENS, ENGINE.kinds_kv_dtype, *sorted(names)
    script(work, "checkpoints.py", "kinds", "kinds", *arguments)
    return folder


def transformers_cases(work, name, folder, dtype, cases, count):
    """The cases with transformers' greedy tokens; "draft": what they may be."""
    prompts, result = work / f"prompts-{name}.json", work / f"oracle-{name}.json"
    prompts.write_text(json.dumps(cases))
    script(work, "oracle.py", f"oracle-{name}", folder, prompts, result, dtype, count)
    return json.loads(result.read_text())["cases"]


def generate(work, name, folder, cases, options):
    """The report of serve.py."""
    asked, result = work / f"cases-{name}.json", work / f"served-{name}.json"
    asked.write_text(json.dumps({"cases": cases}))
    result.unlink(missing_ok=True)
    env = {**os.environ, **ENGINE.environment(options.get(ENGINE.ranks_option, 1))}
    env.pop("TORCHDYNAMO_DISABLE", None)  # is there for the claims about layers
    arguments = folder, asked, result, work / f"calls-{name}", json.dumps(options)
    seconds = script(work, "serve.py", f"served-{name}", *arguments, env=env)
    print(f"\n  {name}: {seconds:.0f} s in the engine", end="")
    return json.loads(result.read_text())


@pytest.mark.tokens
@pytest.mark.parametrize("name", ENGINE.runs)
def test_tokens_are_transformers_and_the_calls_are_ours(work, checkpoint, name):
    run = ENGINE.runs[name]
    label, dtype = name.replace(" ", "-"), run.options["dtype"]
    folder = checkpoint(run.checkpoint)
    truth = DEMO if run.checkpoint == "converted" else folder
    recorded = expected_cases(run.prompts)
    drafts = [{"prompt": c["prompt"], "draft": c["greedy_ids"]} for c in recorded]
    cases = transformers_cases(work, label, truth, dtype, drafts, run.tokens)
    if dtype == "float32":
        assert [c["tokens"] for c in cases] == [c["greedy_ids"][: run.tokens] for c in recorded]
    report = generate(work, label, folder, cases, run.options)
    assert_tokens(report, cases, dtype)
    calls = run.calls * (layers_of(folder) if run.counted == "apply" else 1)
    assert_calls(report, run.counted, calls)
    assert any(kind.startswith(run.kinds) for kind in report["kinds"])


@pytest.mark.ranks
def test_two_ranks_give_the_tokens_of_one_and_of_our_engine(work, kinds):
    """Of a Llama-type checkpoint, in the engine's own Llama class; and of transformers, where the
    cache can have float32.
    """
    cases, found = json.loads((kinds / "llama.json").read_text())["cases"], []
    if ENGINE.kinds_kv_dtype == "float32":
        drafts = [{"prompt": case["prompt"], "draft": case["tokens"]} for case in cases]
        theirs = transformers_cases(work, "llama", kinds / "llama", "float32", drafts, OWN_TOKENS)
        assert [case["tokens"] for case in theirs] == [case["tokens"] for case in cases]
    for ranks in (1, 2):
        options = {**ENGINE.kinds_options, ENGINE.ranks_option: ranks}
        report = generate(work, f"llama-{ranks}", kinds / "llama", cases, options)
        assert_tokens(report, cases, "float32")
        assert_calls(report, "apply", 4 * layers_of(kinds / "llama"), ranks)
        found.append(report["answers"])
    assert found[0] == found[1]


@pytest.mark.families
@pytest.mark.of("sglang")
@pytest.mark.parametrize("name", ENGINE.families)
def test_every_kind_gives_our_own_engines_tokens(work, kinds, name):
    cases = json.loads((kinds / f"{name.removesuffix('-bin')}.json").read_text())["cases"]
    linears, folder = ENGINE.families[name], kinds / name
    if not linears:
        folder = served_folder(work, folder)
    report = generate(work, name, folder, cases, ENGINE.kinds_options)
    assert_tokens(report, cases, "float32")
    assert_calls(report, *(("apply", linears * layers_of(folder)) if linears else ("step", 1)))


@pytest.mark.families
@pytest.mark.of("sglang")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--per-layer"], "leave out --per-layer, which converts the model"),
        (["--", "--tp", "2"], "expected --tp 1 for a converted model, got 2"),
    ],
)
def test_what_sglang_cannot_serve_as_it_is_the_launcher_rejects(kinds, words, reason):
    words = ["sglang", str(kinds / "bonsai"), "--print", *words]
    command = [sys.executable, "-m", "bitnet_ops", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment())
    assert done.returncode == 1 and reason in done.stderr


# The server ---------------------------------------------------------------------------------------


PAGE = ROOT / "docs" / "guide" / f"{ENGINE.name}.md"
PAGE_MODEL = {"sglang": "my-model", "vllm": "microsoft/bitnet-b1.58-2B-4T"}[ENGINE.name]
PAGE_PORT = {"sglang": "30000", "vllm": "8000"}[ENGINE.name]
EXACT = {  # for tokens equal to transformers'; what comes last counts
    "sglang": ["--head-format", "stored"],
    "vllm": [*("--dtype", "float32", "--max-model-len", "256"),
             *("--additional-config", '{"bitnet_head_format": "stored"}')],
}[ENGINE.name]  # fmt: skip


def page_blocks(language):
    """The page's code blocks of a language, in order."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def page_program(work, block, model, port):
    """The last line that a program of the page prints."""
    file = work / "page_program.py"
    file.write_text(block.replace(PAGE_MODEL, str(model)).replace(PAGE_PORT, str(port)))
    env = child_environment(VLLM_LOGGING_LEVEL="ERROR", **ENGINE.environment(1))
    run = {"capture_output": True, "text": True, "timeout": 900, "env": env}
    done = subprocess.run([sys.executable, file], **run)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]


@contextlib.contextmanager
def server(work, model):
    """(client, port) of the page's command, with nothing on PYTHONPATH: the launcher itself
    supplies what the engine needs on a CPU.
    """
    port, serve = free_port(), page_blocks("bash")[1]
    words = shlex.split(serve.replace(PAGE_MODEL, str(model)).replace(PAGE_PORT, str(port)))
    command = [sys.executable, "-m", "bitnet_ops", *words[1:], *EXACT]
    env = child_environment(VLLM_CPU_KVCACHE_SPACE="1")
    with (work / "server.log").open("wb") as log:
        output = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(command, env=env, **output)
    try:
        url = f"http://127.0.0.1:{port}/v1"
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        start = time.monotonic()
        while True:
            log = (work / "server.log").read_text(errors="replace")[-4000:]
            assert process.poll() is None and time.monotonic() < start + READY_S, log
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                time.sleep(0.5)
        print(f"\n  server ready after {time.monotonic() - start:.0f} s")
        yield client, port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.server
def test_the_server_answers_the_openai_client_as_the_page_says(work, checkpoint):
    model = CONVERTED if ENGINE.name == "sglang" else checkpoint("packed")
    case, count = expected_cases(1)[0], 16
    with server(work, model) as (client, port):
        (served,) = client.models.list().data
        ask = {"model": served.id, "max_tokens": count, "temperature": 0}
        prompt = case["prompt"]
        text = client.completions.create(prompt=prompt, **ask).choices[0].text
        assert text and case["greedy_text"].startswith(text)
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.completions.create(prompt=prompt, **usage, **ask))
        pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
        assert "".join(pieces) == text and len(pieces) > 1
        assert chunks[-1].usage.completion_tokens == count
        several = client.completions.create(prompt=[prompt, prompt, "In the beginning"], **ask)
        assert [choice.text for choice in several.choices][:2] == [text, text]
        echoed = client.completions.create(prompt=prompt, logprobs=2, echo=True, **ask).choices[0]
        values = [value for value in echoed.logprobs.token_logprobs if value is not None]
        assert echoed.text.startswith(prompt) and len(values) >= count and max(values) <= 0
        SPECIFIC[ENGINE.name](client, ask, case)
        assert page_program(work, page_blocks("python")[0], served.id, port).strip()
    for program in page_blocks("python")[1:]:  # what needs no server
        assert page_program(work, program, model, port).strip()


def only_sglang(client, ask, case):
    message = {"role": "user", "content": "Who was Moses?"}
    assert client.chat.completions.create(messages=[message], **ask).usage.completion_tokens >= 1


def only_vllm(client, ask, case):
    extra = {"ignore_eos": True, "return_token_ids": True}
    whole = client.completions.create(prompt=case["prompt"], extra_body=extra, **ask)
    assert whole.choices[0].token_ids == case["greedy_ids"][: ask["max_tokens"]]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-model", prompt="x")


SPECIFIC = {"sglang": only_sglang, "vllm": only_vllm}
assert SPECIFIC.keys() == ENGINES.keys()
