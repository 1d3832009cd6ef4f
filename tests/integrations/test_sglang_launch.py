"""`bitnet-ops sglang`: what it starts, what it says where it cannot, and the folder it serves.

sglang itself is not needed: the words, the environment and the folder are looked at.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bitnet_ops.integrations.sglang as plugin
from bitnet_ops.cli import main
from bitnet_ops.integrations.sglang import launch, serving
from bitnet_ops.language_model import DEMO_DIR
from bitnet_ops.loading.weights import load_model

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "sglang_proof"))
import environment  # noqa: E402  (lives beside the proof, which is no package)

TESTED = plugin.TESTED_VERSIONS[0]


@pytest.fixture
def installed(monkeypatch):
    """sglang of a tested version is installed, nothing restricts its plug-ins."""
    monkeypatch.setattr(plugin, "sglang_version", lambda: TESTED)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)


def test_without_sglang_one_line_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(plugin, "sglang_version", lambda: "unknown")
    assert main(["sglang", str(DEMO_DIR)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"expected sglang {TESTED}" in line and "got none" in line and "docs/sglang.md" in line


def test_another_version_is_an_error_that_can_be_waived(monkeypatch, installed):
    monkeypatch.setattr(plugin, "sglang_version", lambda: "9.9.9")
    with pytest.raises(launch.LaunchError, match="which were tested, got 9.9.9; .*--untested"):
        launch.check_version()
    assert launch.check_version(allow_untested=True) == "9.9.9"


def test_a_plug_in_that_would_not_be_loaded_is_an_error(monkeypatch, installed):
    assert launch.check_version() == TESTED
    monkeypatch.setenv("SGLANG_PLUGINS", "others")
    with pytest.raises(launch.LaunchError, match="SGLANG_PLUGINS=others without bitnet"):
        launch.check_version()
    monkeypatch.setattr(plugin, "_entry_point_installed", lambda: False)
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


def test_only_what_is_missing_has_a_stand_in(monkeypatch):
    monkeypatch.setattr(launch, "_imports", lambda module: module == "sgl_kernel")
    assert launch.stub_paths() == [str(launch.STUBS / "vision")]
    env = launch.environment({"PYTHONPATH": "theirs"}, whole=False)
    assert env["PYTHONPATH"].split(":") == [str(launch.STUBS / "vision"), "theirs"]
    monkeypatch.setattr(launch, "_imports", lambda module: True)
    assert "PYTHONPATH" not in launch.environment({}, whole=True)


@pytest.mark.parametrize(
    "use",
    [
        "from torchvision.io import decode_jpeg as f",
        "from torchvision.transforms.v2 import Resize as f",
        "from torchvision.transforms.functional import resize as f",
        "from sgl_kernel import copy_all_layer_kv_cache_cpu as f",
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
    with pytest.raises(serving.ServingError, match="expected tokenizer.json beside"):
        serving.write_folder(tmp_path / "model.bin", tmp_path / "served")
    with pytest.raises(serving.ServingError, match="expected bitnet_ops_model in config.json"):
        serving.model_file(object())
    real = load_model(DEMO_DIR / "model.bin").config
    headless = dataclasses.replace(real, embedding_only=True)
    monkeypatch.setattr(serving, "model_config", lambda reader: headless)
    with pytest.raises(serving.ServingError, match="with an output head"):
        serving.write_folder(DEMO_DIR / "model.bin", tmp_path / "served")


def test_the_page_installs_what_the_proof_installs_and_starts_what_the_launcher_starts(
    installed, capsys
):
    """Its client is run by the proof (l5_server.py)."""
    page = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")
    install, start = re.findall(r"^```bash\n(.*?)^```", page, re.S | re.M)
    assert install.splitlines() == [
        f"pip install {environment.TORCH}",
        f"pip install --no-deps {environment.SGLANG}",
        "pip install -r tests/sglang_proof/requirements.txt",
        "pip install .",
    ]
    assert f"Tested with SGLang {' and '.join(plugin.TESTED_VERSIONS)};" in page
    behind = re.findall(r"`bitnet-ops (sglang my-model --.*?)`", page)
    for text in (start.removeprefix("bitnet-ops "), *behind):
        words = text.replace("my-model", str(DEMO_DIR)).split()
        words.insert(words.index("--") if "--" in words else len(words), "--print")
        assert main(words) == 0
        assert "sglang.launch_server" in capsys.readouterr().out
