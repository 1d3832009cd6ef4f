"""accelerate and BitnetOpsConfig where they cannot serve: messages say what is expected.

Another method's checkpoint, another transformers, tensors of another shape or byte order, float16.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.bitnet import AutoBitLinear, BitLinear
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import bitnet_ops
from bitnet_ops.integrations import CheckpointError
from bitnet_ops.integrations.transformers import TESTED_VERSIONS, BitnetOpsConfig, accelerate
from hf_writer import FAMILIES, write_checkpoint

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", FAMILIES["bitnet-offline"])


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


def test_a_bitnet_checkpoint_stays_transformers_own_unless_ours_is_asked_for(folder: Path) -> None:
    assert AUTO_QUANTIZER_MAPPING["bitnet"].__module__.startswith("transformers.")
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["bitnet"] is transformers.BitNetQuantConfig
    model = load(folder)
    linears = [m for m in model.modules() if isinstance(m, (AutoBitLinear, BitLinear))]
    assert len(linears) == 14
    assert not any(type(m).__module__.startswith("bitnet_ops") for m in model.modules())
    assert isinstance(model.config.quantization_config, transformers.BitNetQuantConfig)


def test_a_checkpoint_of_no_method_is_not_taken_for_a_ternary_one(tmp_path: Path) -> None:
    """Dense weights, read as packed ones: the tensors that are missing are named."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=50,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="expected weight_scale of model.layers.0.* got none"):
        load(tmp_path, quantization_config=BitnetOpsConfig())


def test_another_transformers_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    package = "bitnet_ops.integrations.transformers"
    kept = {name: module for name, module in sys.modules.items() if name.startswith(package)}
    old = types.ModuleType("transformers.integrations.bitnet")
    for name in kept:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers.integrations.bitnet", old)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.51.0")
    with pytest.raises(ImportError) as caught:
        importlib.import_module(package)
    message = str(caught.value)
    assert "BitNet's linear classes, got 4.51.0 (cannot import name" in message
    assert f"pip install transformers=={TESTED_VERSIONS[0]}" in message

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ImportError, match="linear classes, got none"):
        importlib.import_module(package)


def test_the_version_under_test_is_one_of_the_tested() -> None:
    assert transformers.__version__ in TESTED_VERSIONS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[:8], r"expected weight \[\d+, 256\] for .* got \[8, 256\].* short"),
        (lambda w: w.t().contiguous(), r"got \[256, \d+\] in model.layers.1.mlp.up_proj"),
        (lambda w: w.float(), "expected packed uint8 weights .* got torch.float32"),
        (
            lambda w: torch.zeros(4 * len(w), w.shape[1] // 4, dtype=torch.uint8),
            "these bytes are packed along the inputs, not in transformers' order",
        ),
    ],
    ids=["a shard", "transposed", "floating", "bytes of the other order"],
)
def test_tensors_of_another_shape_or_order_are_rejected(
    folder: Path, change: Any, message: str
) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[NAME] = change(tensors[NAME])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load(folder, quantization_config=BitnetOpsConfig())


def test_float16_is_rejected_in_squared_relu_models(folder: Path) -> None:
    message = "bfloat16 or float32, got torch.float16; load it with dtype=torch.bfloat16"
    with pytest.raises(CheckpointError, match=message):
        load(folder, torch.float16, quantization_config=BitnetOpsConfig())
    with pytest.raises(CheckpointError, match=message):
        accelerate(load(folder, torch.float16))
    mlp = load(folder, quantization_config=BitnetOpsConfig()).model.layers[0].mlp
    with pytest.raises(RuntimeError, match=r"gate of dtype float32 or bfloat16 .*got float16"):
        mlp(torch.ones(1, 256, dtype=torch.float16))


def test_float16_runs_where_nothing_is_squared(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", FAMILIES["llama-bitlinear"])
    config = BitnetOpsConfig()
    ids = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        half = load(folder, torch.float16, quantization_config=config)(ids).logits
        exact = load(folder, quantization_config=config)(ids).logits
    assert half.dtype == torch.float16
    assert torch.cosine_similarity(half.float().flatten(), exact.flatten(), dim=0) > 0.99


def test_a_model_elsewhere_than_on_the_cpu_is_rejected(folder: Path) -> None:
    with pytest.raises(ValueError, match="expected a model on the CPU, got meta"):
        bitnet_ops.accelerate(load(folder).to("meta"))
    with pytest.raises(ValueError, match='expected device_map None or "cpu"'):
        load(folder, quantization_config=BitnetOpsConfig(), device_map={"": "meta"})
