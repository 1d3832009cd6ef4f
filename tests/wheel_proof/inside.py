"""What the installed package does in an environment of its own: `inside.py CHECKPOINT [REPORT]`.

CHECKPOINT: tests/data/demo-model, whose expected.json another implementation wrote. REPORT: a JSON
file of what this machine is and of each check, "ok" or what failed. Run with the environment's
Python; needs the package with its extra `server`, and nothing of the tree besides CHECKPOINT.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

# What bitnet-ops writes with its settings as they come: the same on every machine.
PROMPT, LENGTH = "In the beginning", 16
TEXT = "In the beginning of the world.\nFor the world is the light of the world, and"
PATIENCE_S = 1800  # an emulator is slow


def output(*arguments: str | Path) -> str:
    """What bitnet-ops writes; in this process, as importing torch takes an emulator a minute."""
    from bitnet_ops.cli import main

    written, complaint = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(complaint):
        status = main([str(word) for word in arguments])
    assert status == 0, complaint.getvalue()
    return written.getvalue()


def generated(*model: str | Path) -> str:
    return output("generate", *model, PROMPT, "-n", str(LENGTH)).rstrip("\n")


def expect(found: object, expected: object) -> None:
    assert found == expected, f"expected {expected!r}, got {found!r}"


def check_import() -> None:
    import bitnet_ops
    from bitnet_ops import _runtime

    for module in (bitnet_ops, _runtime):
        place = Path(str(module.__file__)).resolve()
        assert place.is_relative_to(Path(sys.prefix).resolve()), f"{place}: not the installed one"


def check_op() -> None:
    """Every layout's product is the integers' own; torch.compile traces through an operator."""
    import torch

    import bitnet_ops

    rng = torch.Generator().manual_seed(3)
    codes = torch.randint(-1, 2, (96, 640), generator=rng, dtype=torch.int8)
    q = torch.randint(-128, 128, (5, 640), generator=rng, dtype=torch.int8)
    expected = torch.tensor(q.numpy().astype("int64") @ codes.numpy().astype("int64").T)
    packed = bitnet_ops.ops.pack(codes)
    for layout in ("canonical", "2bit", "1.6bit"):
        weight = packed if layout == "canonical" else bitnet_ops.ops.repack(packed, 640, layout)
        found = torch.ops.bitnet.gemm(weight, q, None, None, (96, 640))
        assert torch.equal(found.long(), expected), f"{layout}: expected the products of integers"
    x, one = torch.randn(2, 640), torch.tensor([1.0])
    traced = torch.compile(bitnet_ops.ops.linear, backend="eager", fullgraph=True)
    assert torch.equal(traced(x, packed, one), bitnet_ops.ops.linear(x, packed, one))


def check_tokens(model: str | None, checkpoint: Path) -> None:
    import bitnet_ops

    lm = bitnet_ops.load(model, kv_dtype="float32", head_format="stored")
    for case in json.loads((checkpoint / "expected.json").read_text())["cases"]:
        limits = bitnet_ops.Limits(len(case["greedy_ids"]))
        (found,) = lm.engine.generate([case["prompt_ids"]], limits=limits)
        expect(found.token_ids, case["greedy_ids"])


def check_text(checkpoint: Path) -> None:
    expect(generated(), TEXT)
    check_tokens(None, checkpoint)


def check_convert(checkpoint: Path, folder: Path) -> None:
    output("convert", checkpoint, folder)
    expect(generated("--model", folder), TEXT)
    check_tokens(str(folder), checkpoint)


def asked(address: str, body: object = None) -> tuple[int, dict]:
    """(status, JSON) of a request; a POST where there is a `body`."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@contextlib.contextmanager
def served(model: Path) -> Iterator[str]:
    """The address of a server that has loaded `model`; afterwards it ends cleanly."""
    with tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, "-m", "bitnet_ops", "serve", model, "--port", "0"]
        server = subprocess.Popen(command, stderr=said)
        try:
            until = time.monotonic() + PATIENCE_S
            while time.monotonic() < until and server.poll() is None:
                said.seek(0)
                lines = [line for line in said.read().splitlines() if line.startswith("ready ")]
                if lines:
                    break
                time.sleep(0.2)
            said.seek(0)
            assert lines, said.read()
            yield lines[0].split()[-1].rstrip("/")
            server.send_signal(signal.SIGTERM)
            expect(server.wait(PATIENCE_S), 0)
        finally:
            server.kill()


def check_serve(model: Path) -> None:
    """A chat, whose template a process of its own renders, and the grammar of an answer."""
    message = {"role": "user", "content": PROMPT}
    body = {"messages": [message], "max_tokens": LENGTH, "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [["a", "b"]]}}}
    with served(model) as address:
        expect(asked(f"{address}/health"), (200, {"status": "ok"}))
        status, answer = asked(f"{address}/v1/chat/completions", body)
        expect(status, 200)
        expect(PROMPT + answer["choices"][0]["message"]["content"], TEXT)
        status, answer = asked(f"{address}/v1/chat/completions", {**body, "response_format": form})
        expect(status, 200)
        expect(json.loads(answer["choices"][0]["message"]["content"]), ["a", "b"])


def about() -> dict[str, str]:
    import torch

    from bitnet_ops import _runtime

    free = "" if getattr(sys, "_is_gil_enabled", lambda: True)() else "t"
    return {
        "python": platform.python_version() + free,
        "torch": torch.__version__,
        "glibc": os.confstr("CS_GNU_LIBC_VERSION").split()[-1],
        "machine": platform.machine(),
        "isa": _runtime.isa(),
    }


def result_of(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {(lines or [''])[-1]}"
    return "ok"


def main() -> int:
    checkpoint = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        converted = Path(folder) / "converted"
        checks = {
            "import": check_import,
            "op": check_op,
            "text": lambda: check_text(checkpoint),
            "convert": lambda: check_convert(checkpoint, converted),
            "serve": lambda: check_serve(converted),
        }
        results = {name: result_of(check) for name, check in checks.items()}
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps({**about(), **results}))
    failed = [f"{name}: {result}" for name, result in results.items() if result != "ok"]
    print("\n".join(failed), file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
