"""`bitnet-ops generate`: which is the model and which the text, why it ended, broken bytes."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bitnet_ops import language_model, machine
from bitnet_ops.cli import _parse, main, serve
from bitnet_ops.cli.generate import looks_like_a_model, open_model
from bitnet_ops.cli.terminal import TextError, checked
from bitnet_ops.convert import convert
from bitnet_ops.generate.draft_choice import DraftHeadError
from bitnet_ops.generate.engine_core import EngineCore
from bitnet_ops.language_model import DEMO_DIR
from isa_control import torch_threads

PROMPT, CONTINUED = "And God said unto", " him, Thou"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """`my-demo`, a converted model in the working directory."""
    shutil.copytree(DEMO_DIR, tmp_path / "my-demo")
    monkeypatch.chdir(tmp_path)
    return "my-demo"


def test_a_model_without_a_prompt_is_noticed(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", model, "-n", "5"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "generate: expected a prompt, got only the model my-demo" in err
    assert 'bitnet-ops generate my-demo "..."' in err


@pytest.mark.parametrize("text", [PROMPT, PROMPT + "\n", PROMPT + "\r\n", PROMPT + "\n\n"])
def test_one_line_end_of_stdin_is_no_part_of_the_prompt(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["generate", "-", "-n", "1", "--json"]) == 0
    expected = PROMPT + "\n" if text.endswith("\n\n") else PROMPT
    assert json.loads(capsys.readouterr().out)["prompt"] == expected


@pytest.mark.parametrize(
    "words",
    [["--", "-5 degrees"], ["my-demo", "--", "-5 degrees"], ["--", "my-demo", "-5 degrees"]],
)
def test_two_dashes_end_the_options(
    model: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-n", "1", "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "-5 degrees"


@pytest.mark.parametrize(
    ("option", "words"),
    [("-ngl", "there is no GPU"), ("-temp", "did you mean --temp?"), ("-top-k", "--top-k?")],
)
def test_letters_are_no_number_of_an_option(
    option: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", option, "0", "hi"]) == 2
    err = capsys.readouterr().err
    assert f"expected an option of this command, got {option}; " in err and words in err


def test_a_bos_that_the_tokenizer_adds_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "<s>In the", "-n", "1"]) == 0
    assert "note: the prompt begins with <s> twice" in capsys.readouterr().err
    assert main(["generate", "In the", "-n", "1"]) == 0
    assert "twice" not in capsys.readouterr().err


def test_a_text_that_is_a_path_can_be_said(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", model, "-n", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("my-demo") and err.startswith("the embedded demo | ")


@pytest.mark.parametrize(
    "words",
    [
        ["my-demo", PROMPT],
        ["-m", "my-demo", PROMPT],
        ["-m", "my-demo", "-p", PROMPT],
        ["--model", "my-demo", "--prompt", PROMPT],
        ["my-demo", "-p", PROMPT],
        ["my-demo/model.bin", "--threads", "1", PROMPT],
    ],
    ids=" ".join,
)
def test_every_way_to_say_model_and_prompt(
    model: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-n", "3", *words]) == 0
    out, err = capsys.readouterr()
    assert out == PROMPT + CONTINUED + "\n" and "demo" not in err


def test_an_empty_prompt_is_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    """Behind the model's bos token; it is not the folder at hand, which Path("") is."""
    assert main(["generate", "", "-n", "3"]) == 0
    assert "prompt 1 token |" in capsys.readouterr().err


def test_aliases_do_what_they_stand_for(capsys: pytest.CaptureFixture[str]) -> None:
    def report(*words: str) -> dict[str, object]:
        assert main(["generate", "-p", PROMPT, "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    new = report("--max-tokens", "6", "--temp", "0.8", "--seed", "3", "-t", "1")
    old = report("-n", "6", "--temperature", "0.8", "--seed", "3", "--threads", "1")
    assert new["sampling"] == old["sampling"] and new["token_ids"] == old["token_ids"]
    assert new["new_tokens"] == 6 and new["threads"] == 1


def test_more_threads_than_cpus_are_remarked(capsys: pytest.CaptureFixture[str]) -> None:
    maximum = machine.cpus_available()
    assert main(["generate", PROMPT, "-n", "1", "-t", str(maximum + 1)]) == 0
    assert f"note: {maximum + 1} threads on {maximum} CPUs" in capsys.readouterr().err


def test_model_and_prompt_exchanged(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPT, model]) == 2
    assert "expected MODEL before PROMPT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("my-demo", True),
        ("./nothing-here", True),
        ("~/models/x", True),
        ("/nowhere/x", True),
        ("some.gguf", True),
        ("model.bin", True),
        ("microsoft/bitnet-b1.58-2B-4T", True),
        ("hello", False),
        ("In the beginning", False),
        ("and/or", False),
        ("1/2", False),
        ("a text about model.bin", False),
        ("/ is a slash", False),
        ("x" * 5000, False),
        ("nul\0", False),
        ("~nobody-of-this-name", False),
        ("", False),
    ],
)
def test_what_looks_like_a_model(model: str, word: str, expected: bool) -> None:
    assert looks_like_a_model(word) is expected


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["-n", "5", "--ignore-eos"], "ended: the limit of 5 tokens (-n)"),
        (["-n", "100000", "--ignore-eos"], "ended: the model's context of 1024 tokens is full"),
        (["--stop", "Thou"], "ended: the stop text 'Thou'"),
    ],
)
def test_why_it_ended_is_said(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", PROMPT, *words]) == 0
    err = capsys.readouterr().err
    assert err.endswith(f" | {reason}\n") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"\xff", "0xff at offset 0"),
        (b"ab\xc3", "0xc3 at offset 2"),
        ("é".encode() + b"\xe9", "0xe9 at offset 2"),
    ],
)
def test_a_byte_that_is_no_utf8_is_named(
    data: bytes, found: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["generate", "-"], ["generate", os.fsdecode(data)], ["embed", "model", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert main(words) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert f"expected UTF-8 text, got the byte {found};" in err


def test_half_a_character_is_named() -> None:
    with pytest.raises(TextError, match=r"--stop: expected UTF-8 text, got .*U\+D800"):
        checked("a\ud800", "--stop")
    assert checked("é\U0001f600", "prompt") == "é\U0001f600"


# Logprobs, penalties, speculation ---------------------------------------------------------------


def test_logprobs_are_lines_of_json_behind_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPT, "-n", "3", "--logprobs", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == PROMPT + CONTINUED + "\n"
    *lines, remark = err.splitlines()
    tokens = [json.loads(line) for line in lines]
    assert "".join(t["token"] for t in tokens) == CONTINUED and "ended:" in remark
    for token in tokens:
        assert set(token) == {"token_id", "token", "logprob", "top_logprobs"}
        best, second = token["top_logprobs"]
        assert best == {k: v for k, v in token.items() if k != "top_logprobs"}, "greedy"
        assert second["logprob"] <= best["logprob"] <= 0


def test_logprobs_in_the_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPT, "-n", "4", "--logprobs", "0", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == "" and report["sampling"]["logprobs"] == 0
    assert [t["token_id"] for t in report["logprobs"]] == report["token_ids"]
    assert all(t["top_logprobs"] == [] and t["logprob"] <= 0 for t in report["logprobs"])
    assert main(["generate", PROMPT, "-n", "4", "--json"]) == 0
    assert "logprobs" not in json.loads(capsys.readouterr().out)


def test_penalties_and_biases_reach_the_sampler(capsys: pytest.CaptureFixture[str]) -> None:
    def ids(*words: str) -> list[int]:
        assert main(["generate", PROMPT, "-n", "30", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)["token_ids"]

    plain = ids()
    assert ids("--logit-bias", f"{plain[0]}=-100")[0] != plain[0]
    assert set(ids("--logit-bias", "7=100", "--logit-bias", "9=-1", "--ignore-eos")) == {7}
    assert len(set(ids("--frequency-penalty", "2"))) > len(set(plain))
    assert len(set(ids("--presence-penalty", "2"))) > len(set(plain))


@pytest.mark.parametrize("how", ["auto", "ngram", "5"])
def test_speculation_leaves_the_text_alone(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "-p", "so " * 40, "-n", "40", "--ignore-eos", "--json"]
    texts = []
    for more in ("off", how):
        assert main([*words, "--speculation", more, "--temp", "0.7", "--seed", "2"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]


def test_the_last_line_and_json_say_how_many_drafts_were_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["generate", "-p", "so " * 40, "-n", "40", "--ignore-eos", "--speculation"]
    assert main([*words, "4", "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)["drafts"]["ngram"]
    assert 0 < counts["accepted"] <= counts["drafted"]
    assert main([*words, "4"]) == 0
    right = f"{counts['accepted']} of {counts['drafted']} drafts right | "
    assert re.search(rf" tokens/s, {right}", capsys.readouterr().err)
    assert main([*words, "off", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["drafts"] == {}
    assert main([*words, "off"]) == 0
    assert "draft" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "read"),
    [
        (["generate", "x", "y"], True),
        (["chat", "x", "--speculation", "head"], True),
        (["serve", "x", "--speculation", "3"], True),
        (["serve", "x", "--no-draft"], False),
        (["generate", "x", "y", "--no-draft"], False),
        (["generate", "x", "y", "--speculation", "ngram"], False),
        (["chat", "x", "--speculation", "off"], False),
        (["chat", "x", "--speculation", "0"], False),
        (["embed", "x", "y"], False),
    ],
    ids=str,
)
def test_a_draft_head_is_read_where_it_may_be_used(
    words: list[str], read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loaded(Exception):
        pass

    def load(*_: object, draft: bool, **__: object) -> None:
        assert draft is read
        raise Loaded

    monkeypatch.setattr(language_model, "load", load)
    args = _parse(words)
    with pytest.raises(Loaded):
        open_model("x", args)


def test_a_server_of_a_model_without_a_draft_head_does_not_begin_with_one(model: str) -> None:
    head = Path(__file__).parents[1] / "data" / "demo_head"
    convert(model, "drafting", draft_from=head)
    args = _parse(["serve", "drafting", "--model", f"b={model}", "--speculation", "head"])
    expected = r'^serve: b: expected --speculation "head" only .* got one without; load it'
    with pytest.raises(DraftHeadError, match=expected):
        serve._load(args)


# Every draft is a head's, and wrong.
WRONG_HEAD = """
import sys
from bitnet_ops.cli import main
from bitnet_ops.generate import draft_report
from bitnet_ops.generate.draft_planner import DraftPlanner

verified, draft_report._ENOUGH = DraftPlanner.verified, 3

def wrong(self, step, accepted):
    step.source = "head"
    return verified(self, step, 0)

DraftPlanner.verified = wrong
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", [["generate"], ["generate", "--json"], ["chat", "--plain"]])
def test_the_remark_on_a_draft_head_stands_behind_the_text_once(words: list[str]) -> None:
    """Python would print the engine's warning where it comes, amid the text."""
    command, *more = words
    options = ["--speculation", "4", "-n", "30", *more]
    text = "so " * 40
    if command == "generate":
        options = ["-p", text, *options]
    done = subprocess.run(
        [sys.executable, "-c", WRONG_HEAD, command, *options],
        input=f"{text}\n{text}\n",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    remarks = [line for line in lines if "draft head" in line]
    assert len(remarks) == 1 and re.match(r"note: draft head: expected .* got 0 %", remarks[0])
    if command == "generate":
        assert lines[-1] == remarks[0]


def test_a_limit_of_the_address_space_makes_the_cache_smaller() -> None:
    """By default; one that is asked for by name and refused says so."""
    words = "ulimit -v 3000000; exec $0 -m bitnet_ops generate"
    command = ["bash", "-c", f'{words} "$@"', sys.executable, PROMPT, "-n", "4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(PROMPT + CONTINUED), done.stderr
    done = subprocess.run([*command, "--kv-cache-mb", "9000"], capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "got less; give a smaller kv_cache_mb (--kv-cache-mb)" in done.stderr


@pytest.mark.parametrize("binding", [{}, {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"},
                                     {"GOMP_CPU_AFFINITY": "0-999"}])  # fmt: skip
@pytest.mark.parametrize("asked", [None, "1", "2"])
@pytest.mark.sampled(2)
def test_bound_threads_are_not_fewer(binding: dict[str, str], asked: str | None) -> None:
    """Binding pins the main thread when torch is imported, which is not all there is to run on."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *machine.thread_environment())
    env = {k: v for k, v in os.environ.items() if k not in names} | binding
    env |= {} if asked is None else {"OMP_NUM_THREADS": asked}
    command = [sys.executable, "-m", "bitnet_ops", "generate", PROMPT, "-n", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    order = "import bitnet_ops, sys; print(*sys.modules)"  # the kernels' library reads the mask too
    names = subprocess.run([sys.executable, "-c", order], capture_output=True, text=True, env=env)
    found = names.stdout.split()
    assert (found.index("bitnet_ops._runtime") < found.index("torch")) == bool(binding)
    assert json.loads(done.stdout)["threads"] == int(asked or machine.default_threads())


def test_a_number_that_torch_could_not_find_out_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL takes one thread where sched_setaffinity is refused, whatever OMP_NUM_THREADS says."""
    for name in ("MKL_NUM_THREADS", "OMP_THREAD_LIMIT"):
        monkeypatch.delenv(name, raising=False)
    cases = (
        ("3", None, 3),
        ("3,2", None, 3),
        ("5", "2", 2),
        ("x", None, machine.default_threads()),
    )
    for asked, limit, count in cases:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        if limit is not None:
            monkeypatch.setenv("OMP_THREAD_LIMIT", limit)
        assert machine.wanted_threads() == count
        monkeypatch.delenv("OMP_THREAD_LIMIT", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    assert machine.wanted_threads() is None, "which torch follows"


@pytest.mark.parametrize("command", [["generate", PROMPT], ["chat", "--plain"]])
def test_an_answer_that_breaks_off_ends_its_line_in_a_file(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = EngineCore.step
    steps = iter([True, True])

    def broken(engine: EngineCore) -> None:
        if not next(steps, False):
            raise ValueError("engine: expected a step, got none")
        whole(engine)

    monkeypatch.setattr(EngineCore, "step", broken)
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert main([*command, "-n", "8", "--temp", "0", "--speculation", "off"]) == 1
    out, err = capsys.readouterr()
    shown = PROMPT if command[0] == "generate" else ""
    assert out == f"{shown} him,\n" and "expected a step" in err.splitlines()[-1]


@pytest.mark.parametrize("count", [1, 2])
def test_a_count_of_one_is_no_plural(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    with torch_threads(torch.get_num_threads()):
        assert main(["generate", PROMPT, "-n", str(count), "-t", str(count)]) == 0
    figures = capsys.readouterr().err
    s = "" if count == 1 else "s"
    assert f" | {count} token{s}" in figures and f"{count} thread{s} | " in figures
    assert figures.endswith(f"the limit of {count} token{s} (-n)\n")
