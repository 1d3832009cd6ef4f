"""`bitnet-ops sglang`: what it starts, what it says where it cannot, and the folder it serves.

sglang itself is not needed: the words, the environment and the folder are looked at.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import itertools
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

import bitnet_ops.integrations.sglang as plugin
import hf_writer
import hybrids
from bitnet_ops.cli import main
from bitnet_ops.convert import convert
from bitnet_ops.integrations import model_folder
from bitnet_ops.integrations.plugin import Plugin
from bitnet_ops.integrations.sglang import launch, serving
from bitnet_ops.language_model import DEMO_DIR
from bitnet_ops.loading import hub
from bitnet_ops.loading.weights import load_model

TESTED = plugin.PLUGIN.tested[0]
PLUGIN_ERROR = plugin.PLUGIN.unsupported("a table", "none")


@pytest.fixture
def installed(monkeypatch):
    """sglang of a tested version is installed, nothing restricts its plug-ins."""
    monkeypatch.setattr(Plugin, "version", lambda self: TESTED)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)


def test_without_sglang_one_line_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(Plugin, "version", lambda self: "unknown")
    assert main(["sglang", str(DEMO_DIR)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"expected sglang {TESTED}" in line and "got none" in line
    assert "docs/guide/sglang.md" in line


def test_another_version_is_an_error_that_can_be_waived(monkeypatch, installed):
    monkeypatch.setattr(Plugin, "version", lambda self: "0.4.99")
    with pytest.raises(launch.LaunchError, match="which were tested, got 0.4.99; .*--untested"):
        launch.check_version()
    assert launch.check_version(allow_untested=True) == "0.4.99"


def test_a_newer_version_is_tried_where_it_has_what_the_plug_in_needs(
    monkeypatch, installed, caplog
):
    monkeypatch.setattr(Plugin, "version", lambda self: "0.10.1")
    done = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(launch.subprocess, "run", lambda *_, **__: done)
    assert launch.check_version() == "0.10.1"
    assert caplog.messages[-1].endswith(", not with 0.10.1; going on")
    done = subprocess.CompletedProcess([], 1, "", f"Traceback ...\n{PLUGIN_ERROR}\n")
    with pytest.raises(launch.LaunchError, match="got 0.10.1, where bitnet: expected a table, got"):
        launch.check_version()


def test_a_plug_in_that_would_not_be_loaded_is_an_error(monkeypatch, installed):
    assert launch.check_version() == TESTED
    monkeypatch.setenv("SGLANG_PLUGINS", "others")
    with pytest.raises(launch.LaunchError, match="SGLANG_PLUGINS=others without bitnet"):
        launch.check_version()
    monkeypatch.setattr(Plugin, "has_entry_point", lambda self: False)
    with pytest.raises(launch.LaunchError, match="no entry point"):
        launch.check_version()


def test_the_command_and_its_environment(installed, monkeypatch, capsys):
    for name in ("HF_HUB_OFFLINE", "SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    words = ["sglang", str(DEMO_DIR), "--port", "8123", "--threads", "2", "--print"]
    assert main([*words, "--", "--max-total-tokens", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "SGLANG_USE_CPU_ENGINE=1" in lines and "OMP_NUM_THREADS=2" in lines
    assert "HF_HUB_OFFLINE=1" in lines
    started = lines[lines.index("-m") - 1 :]
    assert started[:3] == [sys.executable, "-m", "sglang.launch_server"]
    options = dict(itertools.pairwise(started[3:]))
    assert options["--device"] == "cpu" and options["--port"] == "8123"
    assert options["--served-model-name"] == DEMO_DIR.name
    assert options["--max-total-tokens"] == "64"  # the last one, as argparse takes it


@pytest.mark.parametrize(("mib", "tokens"), [(1, 1 << 20), (1 << 20, None)])
def test_the_cache_has_as_many_tokens_as_memory_allows(tmp_path, monkeypatch, mib, tokens):
    config = {
        "model_type": "bitnet", "vocab_size": 64, "hidden_size": 256, "intermediate_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    monkeypatch.setattr(launch.machine, "cache_budget", lambda: mib << 20)
    words = launch.command(tmp_path, "m")
    assert words[words.index("--max-total-tokens") + 1] == "32768", "no config.json"
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = launch.command(tmp_path, "m")
    expected = tokens // (4 * 2 * 2 * 64 * 2) if tokens else 32768
    assert words[words.index("--max-total-tokens") + 1] == str(expected)


def test_only_what_is_missing_has_a_stand_in(monkeypatch):
    monkeypatch.setattr(launch, "_imports", lambda module: module == "sgl_kernel")
    assert launch.stub_paths() == [str(launch.STUBS / "vision")]
    env = launch.environment({"PYTHONPATH": "theirs"}, [])
    assert env["PYTHONPATH"].split(":") == [str(launch.STUBS / "vision"), "theirs"]
    monkeypatch.setattr(launch, "_imports", lambda module: True)
    assert "PYTHONPATH" not in launch.environment({}, [])


def test_sglangs_other_models_are_left_out(tmp_path, monkeypatch):
    models = tmp_path / "srt" / "models"
    models.mkdir(parents=True)
    (models / "__init__.py").touch()
    (models / "a.py").write_text("class AForCausalLM(Base):\n    pass\nEntryClass = AForCausalLM\n")
    (models / "b.py").write_text("from a import AForCausalLM\nclass B(AForCausalLM):\n    pass\n")
    (models / "transformers.py").touch()
    found = importlib.machinery.ModuleSpec("sglang", None, is_package=True)
    found.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(launch, "_imports", lambda module: True)
    left_out = {
        name: launch.environment({}, [name])["SGLANG_DISABLED_MODEL_ARCHS"]
        for name in ("AForCausalLM", serving.ARCHITECTURE)
    }
    assert left_out == {"AForCausalLM": "b", serving.ARCHITECTURE: "a,b"}
    chosen = {"SGLANG_DISABLED_MODEL_ARCHS": "c"}
    assert launch.environment(chosen, [])["SGLANG_DISABLED_MODEL_ARCHS"] == "c"


PARSERS = 'parser.add_argument("--tool-call-parser", choices=["auto"] + tool_call_parser_choices)\n'
COMPACT = "--constrained-json-disable-any-whitespace"
TOOLS = "{% for tool in tools %}{{ tool }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "options", "expected"),
    [
        (TOOLS, [], [COMPACT, "--tool-call-parser", "auto"]),
        ("{{ messages }}", [], [COMPACT]),
        (None, [], [COMPACT]),
        (TOOLS, ["--tool-call-parser=llama3"], [COMPACT]),
        (TOOLS, [COMPACT], ["--tool-call-parser", "auto"]),
        (TOOLS, ["--constrained-json-whitespace-pattern", " "], ["--tool-call-parser", "auto"]),
    ],
)
def test_what_json_and_tools_need_is_set(tmp_path, monkeypatch, template, options, expected):
    shutil.copy(DEMO_DIR / "tokenizer.json", tmp_path)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    sources = tmp_path / "srt"
    (sources / "arg_groups" / "fields").mkdir(parents=True)
    (sources / "server_args.py").write_text("")
    monkeypatch.setattr(launch, "_sources", lambda: sources)

    def added():
        words = launch.command(tmp_path, "m", options)
        return words[words.index("--max-total-tokens") + 2 : len(words) - len(options)]

    assert added() == [], "not what this SGLang lacks"
    (sources / "server_args.py").write_text(PARSERS)
    field = "    constrained_json_disable_any_whitespace: bool = False\n"
    (sources / "arg_groups" / "fields" / "serving.py").write_text(field)
    assert added() == expected


def write_config(folder, **changes):
    """The config.json of a checkpoint that two ranks can serve, but for `changes`."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "intermediate_size": 6912,
        "quantization_config": {"quant_method": "bitnet", "linear_class": "bitlinear"},
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        # BitNet 2B-4T: sub-norms, and five KV heads
        (
            {
                "model_type": "bitnet",
                "architectures": ["BitNetForCausalLM"],
                "num_key_value_heads": 5,
            },
            2,
            "expected --tp 1 for BitNetForCausalLM, got 2; its sub-norms are means over all heads",
        ),
        ({"num_key_value_heads": 5}, 2, "num_key_value_heads to divide evenly over --tp 2, got 5"),
        ({"num_attention_heads": 18}, 4, "num_attention_heads to divide evenly over --tp 4"),
        ({"intermediate_size": 6911}, 2, "intermediate_size to divide evenly over --tp 2"),
        ({"quantization_config": None}, 1, "quant_method 'bitnet' in .* got None; leave out --per"),
        ({"quantization_config": {"quant_method": "awq"}}, 2, "got 'awq'"),
        (
            {"quantization_config": {"quant_method": "bitnet", "use_rms_norm": True}},
            1,
            "use_rms_norm false .* leave out --per-layer",
        ),
        ({}, 0, "--tp of at least 1, got 0"),
    ],
)
def test_checkpoints_that_cannot_be_served_per_layer(
    installed, tmp_path, capsys, changes, ranks, message
):
    words = ["sglang", write_config(tmp_path, **changes), "--per-layer", "--print", "--"]
    assert main([*words, "--tp", str(ranks)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


@pytest.mark.parametrize("words", [[], ["--tp", "2"], ["--tp-size=4"], ["--tp", "8"]])
def test_ranks_that_hold_equal_parts_are_started(installed, tmp_path, capsys, words):
    folder = write_config(tmp_path, num_attention_heads=24)
    assert main(["sglang", folder, "--per-layer", "--print", "--", *words]) == 0
    assert folder in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cpus", "count", "bound", "threads"),
    [({4, 5, 6, 7, 9}, 2, "4,5|6,7", "2"), ({0, 1}, 2, "0|1", "1"), ({3}, 2, "3|3", "1")],
)
def test_ranks_share_the_processors(monkeypatch, cpus, count, bound, threads):
    monkeypatch.setattr(launch, "_imports", lambda module: True)
    monkeypatch.setattr(launch.machine, "affinity", lambda: cpus)
    env = launch.environment({}, [], count)
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == bound and env["OMP_NUM_THREADS"] == threads
    assert "OMP_NUM_THREADS" not in launch.environment({}, [])
    chosen = {"SGLANG_CPU_OMP_THREADS_BIND": "1|2", "OMP_NUM_THREADS": "7"}
    assert chosen.items() <= launch.environment(chosen, [], count).items()


def test_an_id_of_the_hub_is_the_folder_where_it_lies(installed, tmp_path, capsys, monkeypatch):
    folder = write_config(tmp_path)
    monkeypatch.setattr(hub, "local_path", lambda path: {"org/name": tmp_path}[path])
    assert main(["sglang", "org/name", "--per-layer", "--print"]) == 0
    assert folder in capsys.readouterr().out.splitlines()


def test_a_folder_without_config_json_is_not_served_per_layer(installed, tmp_path, capsys):
    assert main(["sglang", str(tmp_path), "--per-layer", "--print"]) == 1
    assert "expected config.json in" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--tp", "2"], ["--tensor-parallel-size", "2"], ["--tp-size=2"]])
def test_a_converted_model_is_one_rank(installed, capsys, words):
    assert main(["sglang", str(DEMO_DIR), "--print", "--", *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected --tp 1 for a converted model, got 2; for a Llama" in line


@pytest.fixture(scope="module")
def hybrid_file(tmp_path_factory):
    """A converted hybrid with its tokenizer."""
    folder = tmp_path_factory.mktemp("hybrid")
    made = hybrids.write_mlx(folder / "source", hybrids.make("rotated"))
    hf_writer.write_tokenizer(made, 321)
    convert(made, folder / "converted")
    return folder / "converted" / "model.bin"


def test_a_hybrids_folder_says_which_layers_keep_states(hybrid_file, tmp_path):
    folder = serving.write_folder(hybrid_file, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [plugin.HYBRID]
    assert config["model_type"] == serving.MODEL_TYPE
    assert config["full_attention_layer_ids"] == [3, 7]
    made = serving.model_of(config)
    assert made.delta_net.layers == (0, 1, 2, 4, 5, 6) and made.delta_net.value_heads == 6
    assert (config["head_dim"], config["num_key_value_heads"]) == (64, 2)


# Of a slot: 6 layers of 6 heads of 64 x 64, and of 3 inputs of 640 channels, in float32.
SLOT_BYTES = 4 * 6 * (6 * 64 * 64 + 3 * 640)


@pytest.mark.parametrize(("slots", "expected"), [(40, 20), (2, 5), (10**6, 320)])
def test_states_take_half_of_what_caches_may(hybrid_file, tmp_path, monkeypatch, slots, expected):
    folder = serving.write_folder(hybrid_file, tmp_path)
    monkeypatch.setattr(launch.machine, "cache_budget", lambda: slots * SLOT_BYTES)
    words = launch.command(folder, "m")
    assert words[words.index("--max-mamba-cache-size") + 1] == str(expected)
    left = (slots - expected) * SLOT_BYTES // (2 * 2 * 2 * 64 * 2)  # 2 layers of 2 heads of 64
    assert words[words.index("--max-total-tokens") + 1] == str(max(1, min(32768, left)))


@pytest.mark.parametrize(
    ("check", "options", "asked"),
    [
        (f"def {plugin.PLATFORM_CHECK}():", [], True),
        ("def validate():", [], False),  # an older version, which asks elsewhere
        (f"def {plugin.PLATFORM_CHECK}():", ["--mamba-radix-cache-strategy=no_buffer"], False),
        (f"def {plugin.PLATFORM_CHECK}():", ["--disable-radix-cache"], False),
    ],
)
def test_states_inside_of_prompts_are_asked_for_where_sglang_can(
    hybrid_file, tmp_path, monkeypatch, check, options, asked
):
    hook = tmp_path / "srt" / "arg_groups" / "mamba_hook.py"
    hook.parent.mkdir(parents=True)
    hook.write_text(check)
    (tmp_path / "srt" / "server_args.py").write_text("")
    monkeypatch.setattr(launch, "_sources", lambda: tmp_path / "srt")
    (tmp_path / "folder").mkdir()
    folder = serving.write_folder(hybrid_file, tmp_path / "folder")
    words = launch.command(folder, "m", options)
    assert ("extra_buffer" in words) == asked
    assert "extra_buffer" not in launch.command(DEMO_DIR, "m", options)


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_a_hybrid_is_no_checkpoint_for_sglangs_own_code(installed, tmp_path, capsys, form):
    made = hybrids.make("rotated")
    config = hybrids.nested_config(made) if form == "nested" else hybrids.text_config(made)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["sglang", str(tmp_path), "--print", "--per-layer", "--", "--tp", "2"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected a model whose layers all have attention (--per-layer), got 'qwen3_5" in line
    assert "Leave out --per-layer" in line and "--dp 2" in line


@pytest.mark.parametrize(
    ("name", "parts"), [("tiny-images", "tower for pictures"), ("tiny-draft", "draft head")]
)
def test_what_sglang_leaves_alone_is_said(installed, tmp_path, capsys, name, parts):
    assert main(["dummy", name, str(tmp_path / name)]) == 0
    capsys.readouterr()
    assert main(["sglang", str(tmp_path / name), "--print"]) == 0
    err = capsys.readouterr().err
    assert f"the model's {parts} stays unused; bitnet-ops serve uses it" in err


def test_drafts_are_another_servers(installed, capsys):
    words = ["sglang", str(DEMO_DIR), "--print", "--", "--speculative-algorithm", "NGRAM"]
    assert main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no speculative decoding of a converted model, got --speculative-algorithm" in line
    assert "bitnet-ops serve" in line


def test_copies_of_a_model_share_the_processors(installed, monkeypatch, capsys):
    monkeypatch.setattr(launch.machine, "affinity", lambda: {0, 1, 2, 3})
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    assert main(["sglang", str(DEMO_DIR), "--print", "--", "--dp", "2"]) == 0
    assert "SGLANG_CPU_OMP_THREADS_BIND=0,1|2,3" in capsys.readouterr().out.splitlines()
    assert main(["sglang", str(DEMO_DIR), "--print", "--", "--data-parallel-size", "0"]) == 1
    assert "expected --dp of at least 1, got 0" in capsys.readouterr().err


def test_ranks_are_the_last_ones_named():
    assert launch.ranks(["--tp", "2", "--max-total-tokens", "64", "--tp-size", "4"]) == 4
    assert launch.ranks(["--tp", "two"]) == 1  # SGLang says it


@pytest.mark.parametrize(
    "use",
    [
        "from torchvision.io import decode_jpeg as f",
        "from torchvision.transforms.v2 import Resize as f",
        "from torchvision.transforms.functional import resize as f",
        "from sgl_kernel import copy_all_layer_kv_cache_cpu as f",
        "from sgl_kernel.mamba import causal_conv1d_fn_cpu as f",
        "import sgl_kernel.mamba, torch; f = torch.ops.sgl_kernel.fused_gdn_gating_cpu",
    ],
)
def test_stand_ins_can_be_imported_and_say_so_when_called(use):
    paths = [str(launch.STUBS / folder) for folder in ("vision", "kernels")]
    code = f"import sys; sys.path[:0] = {paths!r}\n{use}\nf(1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "was called, but" in done.stderr and "import-only stub" in done.stderr


def test_the_folder_has_what_sglang_reads_and_nothing_that_misleads_it(tmp_path):
    folder = serving.write_folder(DEMO_DIR / "model.bin", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [serving.ARCHITECTURE]
    assert "quantization_config" not in config
    assert config["model_type"] == "bitnet"

    class Config:  # as transformers gives it to the model
        def __init__(self, entries):
            self.__dict__.update(entries)

    read = Config(config)
    model = load_model(serving.model_file(read), head_format=serving.head_format(read))
    assert model.config == load_model(DEMO_DIR / "model.bin").config
    assert model.head.head_format == "int8" and model.dtype == torch.float32
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (DEMO_DIR / name).read_bytes()


def test_folders_that_cannot_be_served(tmp_path, monkeypatch):
    (tmp_path / "served").mkdir()
    shutil.copy(DEMO_DIR / "model.bin", tmp_path)
    with pytest.raises(model_folder.ServingError, match="expected tokenizer.json beside"):
        serving.write_folder(tmp_path / "model.bin", tmp_path / "served")
    with pytest.raises(model_folder.ServingError, match="expected bitnet_ops_model in config.json"):
        serving.model_file(object())
    real = load_model(DEMO_DIR / "model.bin").config
    headless = dataclasses.replace(real, embedding_only=True)
    monkeypatch.setattr(model_folder, "model_config", lambda reader: headless)
    with pytest.raises(model_folder.ServingError, match="with an output head"):
        serving.write_folder(DEMO_DIR / "model.bin", tmp_path / "served")
