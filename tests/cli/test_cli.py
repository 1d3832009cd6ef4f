"""The command line as users meet it: exit status, one-line errors, streams, JSON, pipes, Ctrl-C.

Most run in a process of their own; what needs only messages calls main() here.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import hf_writer
from bitnet_ops.cli import COMMANDS, main
from bitnet_ops.conversions import resolve
from bitnet_ops.language_model import DEMO_DIR
from bitnet_ops.nn.storage import KV_TYPES
from isa_control import ISAS

EXPECTED = json.loads(
    (Path(__file__).resolve().parents[1] / "data/demo-model/expected.json").read_text()
)
CASE = {case["prompt"]: case for case in EXPECTED["cases"]}["In the beginning"]
LLAMA = next(f for f in hf_writer.FAMILIES.values() if f.model_type == "llama")
COMMAND = [sys.executable, "-m", "bitnet_ops"]


def environment(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("BITNET_OPS_")}
    return {**kept, "OMP_NUM_THREADS": "1", **extra}


def cli(*args: str, text: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args],
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(**env),
        check=False,
    )


def one_line(stderr: str) -> str:
    lines = stderr.strip().splitlines()
    assert len(lines) == 1, stderr
    return lines[0]


# generate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("forced", ["", *reversed(ISAS)])
@pytest.mark.sampled(2)
def test_generate_prints_the_same_text_on_every_isa(forced: str) -> None:
    done = cli("generate", CASE["prompt"], "-n", "48", "--ignore-eos", BITNET_OPS_ISA=forced)
    assert done.returncode == 0, done.stderr
    assert done.stdout == CASE["prompt"] + CASE["greedy_text"] + "\n"
    figures = one_line(done.stderr)
    assert re.match(r"the embedded demo \| load \d+\.\d s \| prompt ", figures)
    assert figures.endswith("48 tokens (-n)")
    assert f"prompt {len(CASE['prompt_ids'])} tokens | first token " in figures
    right = r"48 tokens, \d+\.\d tokens/s(, \d+ of \d+ drafts? right)? \| "
    assert re.search(right, figures)
    assert f"{forced or ISAS[0]}, 1 thread | " in figures


@pytest.mark.parametrize("threads", ["1", "2"])
def test_generate_json(threads: str) -> None:
    done = cli(
        "generate",
        str(DEMO_DIR),
        CASE["prompt"],
        "--json",
        "-n",
        "48",
        "--ignore-eos",
        "--head-format",
        "int8_screened",  # an old name
        "--threads",
        threads,
    )
    assert done.returncode == 0 and done.stderr == ""
    report = json.loads(done.stdout)
    timing = {"load_s", "time_to_first_token_s", "decode_s", "decode_tokens_per_s"}
    assert all(report.pop(name) > 0 for name in timing)
    counts = report.pop("drafts", {})
    assert all(0 <= one["accepted"] <= one["drafted"] for one in counts.values())
    assert report == {
        "model": str(DEMO_DIR / "model.bin"),
        "prompt": CASE["prompt"],
        "text": CASE["greedy_text"],
        "token_ids": CASE["greedy_ids"],
        "finish_reason": "length",
        "stop_reason": None,
        "sampling": {
            "max_new_tokens": 48,
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "seed": None,
            "logit_bias": None,
            "logprobs": None,
            "stop": [],
            "speculation": "auto",
        },
        "lora": None,
        "prompt_tokens": len(CASE["prompt_ids"]),
        "new_tokens": 48,
        "isa": ISAS[0],
        "threads": int(threads),
        "kv_dtype": "bfloat16",
        "attention": None,
        "activation_sparsity": None,
        "weight_format": "2bit",
        "weight_format_reason": "the weights fit in a cache, so the cores decide",
        "head_format": "int8",
    }


def test_options_between_the_positionals_stdin_and_the_bin_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kv_dtype in KV_TYPES:
        monkeypatch.setattr(sys, "stdin", io.StringIO("And God said unto"))
        words = [str(DEMO_DIR / "model.bin"), "-n", "3", "--kv-dtype", kv_dtype, "-"]
        assert main(["generate", *words]) == 0
        assert capsys.readouterr().out == "And God said unto him, Thou\n", kv_dtype


def test_sampling_repeats_with_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    def sampled(*args: str) -> dict[str, Any]:
        assert (
            main(["generate", "Psalm 151\n", "--json", "-n", "12", "--temperature", "1.0", *args])
            == 0
        )
        return json.loads(capsys.readouterr().out)

    first = sampled("--top-k", "40")
    again = sampled("--top-k", "40", "--seed", str(first["sampling"]["seed"]))
    assert first["token_ids"] == again["token_ids"]
    assert sampled("--top-k", "1")["token_ids"] == sampled("--temperature", "0")["token_ids"]


def test_stop_texts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "And God said unto", "--stop", "servant", "--stop", "Thou art"]) == 0
    assert capsys.readouterr().out == "And God said unto him, \n"


# chat -----------------------------------------------------------------------------------------


def test_chat_with_the_demo() -> None:
    done = cli(
        "chat",
        "--temp",
        "0",
        "-n",
        "6",
        "--stats",
        text="And God said unto\n\n/reset\nAnd God said unto\n/exit\n",
    )
    assert done.returncode == 0, done.stderr
    answer = " him, Thou art my servant"
    first, second = done.stdout.splitlines()
    assert first == second and first.startswith(answer[:16])
    assert "it is no assistant" in done.stderr and "/help" in done.stderr
    assert done.stderr.count("first token") == 2


def test_chat_without_template_says_so_and_offers_plain(tmp_path: Path) -> None:
    for name in ("model.bin", "tokenizer.json"):
        shutil.copy(DEMO_DIR / name, tmp_path / name)
    done = cli("chat", str(tmp_path), text="hello\n")
    assert done.returncode == 1 and done.stdout == ""
    assert "got one without" in one_line(done.stderr) and "--plain" in done.stderr
    done = cli("chat", str(tmp_path), "--plain", "-n", "3", text="And God said unto\n")
    assert done.returncode == 0 and done.stdout == " him, Thou\n"


# Errors ---------------------------------------------------------------------------------------


def test_no_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == "" and "commands:" in err


def test_an_unavailable_isa_is_an_error_with_the_list() -> None:
    done = cli("generate", "x", BITNET_OPS_ISA="sse9")
    assert done.returncode == 1 and done.stdout == ""
    line = one_line(done.stderr)
    assert "sse9" in line and "scalar" in line


def test_debug_shows_the_traceback() -> None:
    done = cli("generate", "/nowhere/model", "x", BITNET_OPS_DEBUG="1")
    assert done.returncode == 1 and "Traceback" in done.stderr and "LoadError" in done.stderr


def test_a_warning_is_one_line_without_source_code(tmp_path: Path) -> None:
    source = hf_writer.write_checkpoint(tmp_path / "source", LLAMA)
    (resolve(source, cache=tmp_path).file.parent / "tokenizer.json").unlink()
    done = cli("generate", str(source), "ab", "-n", "2", "--cache", str(tmp_path))
    warning, figures = done.stderr.splitlines()
    assert done.returncode == 0 and warning.startswith("bitnet-ops: warning: cache: expected a con")
    assert ".py" not in warning and figures.startswith("load ")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_json_is_json_in_every_encoding(encoding: str) -> None:
    done = subprocess.run(
        [*COMMAND, "generate", "h\u00e9 \u4e2d \U0001f30d", "-n", "1", "--json"],
        capture_output=True,
        env=environment(PYTHONIOENCODING=encoding),
    )
    assert json.loads(done.stdout.decode(encoding))["prompt"] == "h\u00e9 \u4e2d \U0001f30d"


def test_a_closed_pipe_is_silent() -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", "In the beginning", "-n", "200", "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout and process.stderr
    assert process.stdout.read(3) == b"In "
    process.stdout.close()
    assert process.wait(timeout=120) == 141
    assert process.stderr.read() == b""


@pytest.mark.parametrize("when", ["streaming", "at the prompt"])
def test_ctrl_c_is_clean(when: str) -> None:
    args = ["generate", "In the beginning", "-n", "100000", "--ignore-eos"]
    chat = when == "at the prompt"
    process = subprocess.Popen(
        [*COMMAND, *(["chat"] if chat else args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout and process.stderr
    if chat:
        assert b"no assistant" in process.stderr.readline()
        assert b"/help" in process.stderr.readline()  # now it waits for input
        time.sleep(0.3)
    else:
        process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert chat or b"tokens/s" in err


# Help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as caught:
        main([*([command] if command else []), "--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert len(out.splitlines()) <= 45
    if not command:
        assert all(name in out and text in out for name, (_, text) in COMMANDS.items())


def test_version_and_lazy_imports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("bitnet-ops 0.")
    code = (
        "import sys, bitnet_ops.cli as c\n"
        "c.build_parser('inspect')\n"
        "print([m for m in ('tokenizers', 'jinja2', 'bitnet_ops.generate.engine')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
