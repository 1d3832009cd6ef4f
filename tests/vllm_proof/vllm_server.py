"""Rung L4, HTTP: `bitnet-ops vllm` and the openai client; tokens of a completion are transformers'.

The command and the programs are those of docs/guide/vllm.md, with another model and port.
Usage: vllm_server.py CHECKPOINT ORACLE.json RESULT.json
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

READY_S = 400
PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "vllm.md"
PAGE_MODEL, PAGE_PORT = "microsoft/bitnet-b1.58-2B-4T", "8000"
# for tokens equal to transformers'; what comes last counts
EXACT = ("--dtype", "float32", "--max-model-len", "256")
EXACT += ("--additional-config", '{"bitnet_head_format": "stored"}')


def page_blocks(language):
    """The page's code blocks of a language, in order."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def page_command(block, model, port, more=()):
    """The page's command for the server, as a list."""
    words = shlex.split(block.replace(PAGE_MODEL, str(model)).replace(PAGE_PORT, str(port)))
    return [str(Path(sys.executable).parent / words[0]), *words[1:], *more]


def page_program(block, model, port=PAGE_PORT):
    """What a program of the page prints."""
    code = block.replace(PAGE_MODEL, str(model)).replace(PAGE_PORT, str(port))
    file = Path(os.environ.get("BITNET_PROOF_WORK", ".")) / "page_program.py"
    file.write_text(code)
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}  # vLLM logs to where programs print
    run = {"capture_output": True, "text": True, "timeout": 900, "env": env}
    done = subprocess.run([sys.executable, file], **run)
    if done.returncode:
        sys.exit(f"a program of {PAGE.name} failed:\n{code}\n{done.stderr[-4000:]}")
    return done.stdout.splitlines()[-1]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_until_ready(process, port):
    """Seconds until /health answers; the server's own end is an error."""
    start = time.monotonic()
    while time.monotonic() - start < READY_S:
        if process.poll() is not None:
            sys.exit(f"the server ended with status {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return time.monotonic() - start
        except OSError:
            time.sleep(0.5)
    sys.exit(f"the server was not ready after {READY_S} s")


def probe(client, checkpoint, oracle):
    """What the client got: models, a whole and a streamed completion, an error."""
    import openai

    case = oracle["cases"][0]
    count = len(case["tokens"])
    ask = {"model": checkpoint, "prompt": case["prompt"], "max_tokens": count, "temperature": 0}
    extra = {"extra_body": {"ignore_eos": True, "return_token_ids": True}}
    whole = client.completions.create(**ask, **extra)
    stream = client.completions.create(
        **ask, extra_body={"ignore_eos": True}, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    try:
        client.completions.create(model="no-such-model", prompt="x")
        wrong = None
    except openai.NotFoundError as error:
        wrong = error.status_code
    return {
        "models": [model.id for model in client.models.list()],
        "tokens": whole.choices[0].token_ids,
        "text": whole.choices[0].text,
        "streamed": "".join(c.choices[0].text for c in chunks if c.choices),
        "chunks": len(chunks),
        "usage": chunks[-1].usage.completion_tokens,
        "unknown_model_status": wrong,
        "expected_tokens": case["tokens"],
    }


def main():
    import openai

    checkpoint, oracle_path, result = sys.argv[1:]
    oracle, port = json.loads(Path(oracle_path).read_text()), free_port()
    (_, serve), (client_code, program) = page_blocks("bash"), page_blocks("python")
    os.environ["BITNET_PROOF_WORK"] = str(Path(result).resolve().parent)
    process = subprocess.Popen(page_command(serve, checkpoint, port, EXACT), start_new_session=True)
    try:
        ready = wait_until_ready(process, port)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        report = {"ready_s": round(ready, 1), **probe(client, checkpoint, oracle)}
        report["page_client"] = page_program(client_code, checkpoint, port)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    report["page_program"] = page_program(program, checkpoint)
    Path(result).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
