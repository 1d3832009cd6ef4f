"""Rung L5: `bitnet-ops sglang MODEL` serves the `openai` client.

Started with nothing on PYTHONPATH: the launcher itself supplies what SGLang needs on a CPU.
Usage: l5_server.py MODEL EXPECTED.json RESULT.json
EXPECTED: {"prompt", "greedy_text", ...} as in the demo model's expected.json.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import openai

PATIENCE_S = 600
TOKENS = 16


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ready(client, process):
    """The models that are served, once there are any."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if process.poll() is not None:
            sys.exit(f"l5: expected a server, got exit status {process.returncode}")
        try:
            return [model.id for model in client.models.list()]
        except openai.APIConnectionError:
            time.sleep(0.5)
    sys.exit(f"l5: expected a server within {PATIENCE_S} s, got none")


def check(client, name, expected):
    """Ask in every way; the names of the ways. Exits at the first wrong answer."""
    prompt, ask = expected["prompt"], {"model": name, "max_tokens": TOKENS, "temperature": 0}
    text = client.completions.create(prompt=prompt, **ask).choices[0].text
    if not text or not expected["greedy_text"].startswith(text):
        sys.exit(f"l5: expected the beginning of {expected['text']!r}, got {text!r}")
    stream = client.completions.create(prompt=prompt, stream=True, **ask)
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    if "".join(pieces) != text or len(pieces) < 2:
        sys.exit(f"l5: expected {text!r} in pieces, got {pieces}")
    several = client.completions.create(prompt=[prompt, prompt, "In the beginning"], **ask)
    if [choice.text for choice in several.choices][:2] != [text, text]:
        sys.exit(f"l5: expected {text!r} twice, got {several.choices}")
    with_logprobs = client.completions.create(prompt=prompt, logprobs=2, echo=True, **ask)
    tokens = with_logprobs.choices[0].logprobs.token_logprobs
    if not with_logprobs.choices[0].text.startswith(prompt) or len(tokens) <= TOKENS:
        sys.exit(f"l5: expected the prompt's logprobs too, got {with_logprobs.choices[0]}")
    if any(value is not None and value > 0 for value in tokens):
        sys.exit(f"l5: expected logprobs of at most 0, got {tokens}")
    message = {"role": "user", "content": "Who was Moses?"}
    chat = client.chat.completions.create(messages=[message], **ask)
    if chat.usage.completion_tokens < 1:
        sys.exit(f"l5: expected an answer, got {chat}")
    return ["completion", "stream", "three prompts at once", "prompt logprobs", "chat"]


def run_page(port):
    """What the client of docs/guide/sglang.md prints."""
    page = Path(__file__).resolve().parents[2] / "docs" / "guide" / "sglang.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    if code.count(":30000/") != 1:
        sys.exit(f"l5: expected the client of {page} to name port 30000, got {code}")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code.replace(":30000/", f":{port}/"), str(page), "exec"), {})
    if not printed.getvalue().strip():
        sys.exit(f"l5: expected the client of {page} to print an answer, got nothing")
    return "docs/guide/sglang.md"


def main():
    model, expected, result = sys.argv[1:]
    port = free_port()
    words = [sys.executable, "-m", "bitnet_ops", "sglang", model, "--port", str(port)]
    start = time.monotonic()
    process = subprocess.Popen([*words, "--head-format", "stored"], start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}/v1"
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        names = wait_until_ready(client, process)
        ready = time.monotonic() - start
        checked = check(client, names[0], json.loads(Path(expected).read_text()))
        checked.append(run_page(port))
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    report = {"ready_s": round(ready, 1), "models": names, "checked": ", ".join(checked)}
    Path(result).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
