"""The fine-tune example, run short: the loss falls, and what is deployed is what was trained.

The text is written here; the model is the demo checkpoint of the tests' data (masters) or the one
in the package (packed). How the layer trains is in test_training.py.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bitnet_ops.convert.comparison import (
    MAX_LOSS_DIFFERENCE,
    MAX_RELATIVE_DIFFERENCE,
    LogitComparison,
)
from bitnet_ops.language_model import load
from bitnet_ops.nn.kv_cache import KVCache
from isa_control import torch_threads

ROOT = Path(__file__).resolve().parents[2]
DEMO = Path(__file__).resolve().parents[1] / "data" / "demo-model"
TEXT = "The miller counts his sacks of barley: one, two, three, and the wheel goes round. "


def example():
    spec = importlib.util.spec_from_file_location("finetune", ROOT / "examples/finetune_demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("source", [DEMO, None], ids=["masters", "packed"])
def test_loss_falls_and_the_deployed_model_is_the_trained_one(source, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT * 40)
    argv = [str(tmp_path / "text.txt"), str(tmp_path / "out"), "--steps", "8", "--batch", "2"]
    argv += ["--length", "64", "--lr", "2e-3"]
    with torch_threads(1):
        before, after, model = example().main(
            argv if source is None else [*argv, "--model", str(source)]
        )
        assert after < before - 1.0  # nats per token; measured 5.5 and 1.8
        printed = capsys.readouterr().out
        assert f"loss before: {before:.4f}" in printed and f"loss after: {after:.4f}" in printed
        deployed = load(tmp_path / "out", head_format="stored")
        ids = deployed.encode(TEXT * 4)
        ours = deployed.model(
            torch.tensor([ids]), KVCache(deployed.config, 1, len(ids), torch.float32)
        )[0]
        with torch.no_grad():
            trained = model.eval()(torch.tensor([ids])).logits[0]
    comparison = LogitComparison()
    comparison.add(ids, trained, ours)
    assert comparison.relative < MAX_RELATIVE_DIFFERENCE
    assert comparison.loss_difference < MAX_LOSS_DIFFERENCE
    assert comparison.top1 > 0.95


def test_a_text_too_short_is_rejected(tmp_path):
    (tmp_path / "text.txt").write_text("too short")
    with pytest.raises(SystemExit, match="expected a text of some hundred words, got"):
        example().main([str(tmp_path / "text.txt"), str(tmp_path / "out")])


def test_without_transformers_the_example_ends_in_one_line(tmp_path):
    """A package index knows transformers, a fresh environment does not have it."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT * 40)
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'transformers' else find(name, *a)\n"
    )
    done = subprocess.run(
        [sys.executable, ROOT / "examples/finetune_demo.py", text, out],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "finetune_demo: expected transformers to be installed, which builds the model to train, "
        "got none; run: pip install 'transformers>=5.12' accelerate"
    ]
    assert not out.exists()
