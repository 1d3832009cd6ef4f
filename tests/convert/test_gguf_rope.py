"""Stretched rotary embedding in GGUF: keys and tensors -> the table of the model, and back."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitnet_ops.config import ModelConfig
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.convert.gguf_export import export_gguf
from bitnet_ops.formats.sglbitnt import Reader
from bitnet_ops.nn.rotary import rotary
from gguf_bytes import gguf, key
from gguf_models import byte_tokenizer, metadata, tensors
from hf_writer import FAMILIES, make_network, write_checkpoint

FAMILY = dataclasses.replace(FAMILIES["llama-autobitlinear"], name="gguf-rope")
HALF = FAMILY.head_dim // 2
PLAIN = 1.0 / FAMILY.theta ** (torch.arange(HALF, dtype=torch.float64) / HALF)
RISING = np.linspace(1, 8, HALF).astype("<f4")


def model(folder: Path, keys: dict[str, tuple[str, Any]], **factors: np.ndarray) -> ModelConfig:
    parts = tensors(FAMILY, make_network(FAMILY), "llama", "Q2_0")
    for name, values in factors.items():
        parts.append((f"{name}.weight", values.shape, 0, values.tobytes()))
    extra = [key(f"llama.rope.scaling.{name}", *value) for name, value in keys.items()]
    everything = [*metadata(FAMILY, "llama"), *byte_tokenizer(FAMILY.vocab), *extra]
    (folder / "m.gguf").write_bytes(gguf(everything, parts))
    convert(folder / "m.gguf", folder / "out")
    with Reader(folder / "out" / "model.bin") as reader:
        return ModelConfig.from_hf(json.loads(json.dumps(reader.config)))


def test_yarn_is_llama_cpps(tmp_path: Path) -> None:
    """The ramp of ggml's rope_yarn in float64, whose cosines carry attn_factor times its own."""
    found = model(tmp_path, {
        "type": ("str", "yarn"), "factor": ("f32", 4.0), "original_context_length": ("u32", 128),
        "yarn_beta_fast": ("f32", 16.0), "yarn_beta_slow": ("f32", 2.0),
        "attn_factor": ("f32", 0.5), "yarn_ext_factor": ("f32", 1.0),
    })  # fmt: skip
    dims, theta = FAMILY.head_dim, FAMILY.theta

    def corr(rotations: float) -> float:
        return dims * math.log(128 / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(0, math.floor(corr(16))), min(dims - 1, math.ceil(corr(2)))
    ramp = 1 - ((torch.arange(HALF) - low) / max(0.001, high - low)).clamp(0, 1)
    expected = PLAIN / 4 * (1 - ramp) + PLAIN * ramp
    table = rotary(found)
    assert ((table.inv_freq / expected - 1).abs() < 4 * 2.0**-23).all()
    assert math.isclose(table.attention_factor, 0.5 * (1 + 0.1 * math.log(4)), rel_tol=1e-6)


@pytest.mark.parametrize("keys", [{"type": ("str", "linear")}, {}])
def test_linear_with_and_without_its_name(tmp_path: Path, keys: dict[str, Any]) -> None:
    table = rotary(model(tmp_path, {**keys, "factor": ("f32", 2.5)}))
    assert ((table.inv_freq / (PLAIN / 2.5) - 1).abs() < 2.0**-22).all()
    assert table.attention_factor == 1


def test_none_is_plain_whatever_the_factor(tmp_path: Path) -> None:
    assert model(tmp_path, {"type": ("str", "none"), "factor": ("f32", 4.0)}).rope_scaling is None


def test_rope_freqs_divide_every_frequency(tmp_path: Path) -> None:
    """What llama.cpp's converter makes of llama3 scaling."""
    table = rotary(model(tmp_path, {}, rope_freqs=RISING))
    assert ((table.inv_freq / (PLAIN / torch.from_numpy(RISING)) - 1).abs() < 2.0**-22).all()
    assert table.attention_factor == 1


@pytest.mark.parametrize(("original", "divisor"), [(128, RISING), (512, RISING / 2)])
def test_longrope_takes_one_list(tmp_path: Path, original: int, divisor: np.ndarray) -> None:
    """The long one for a context beyond the original length, the short one within it."""
    keys = {"type": ("str", "longrope"), "original_context_length": ("u32", original),
            "attn_factor": ("f32", 1.25)}  # fmt: skip
    found = model(tmp_path, keys, rope_factors_long=RISING, rope_factors_short=RISING / 2)
    table = rotary(found)
    assert ((table.inv_freq / (PLAIN / torch.from_numpy(divisor)) - 1).abs() < 2.0**-22).all()
    assert table.attention_factor == 1.25


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 128}  # fmt: skip


@pytest.mark.parametrize("block", [YARN, {"type": "linear", "factor": 2.0}])
def test_exported_and_read_again(tmp_path: Path, block: dict[str, Any]) -> None:
    family = dataclasses.replace(FAMILY, config_extra={"rope_scaling": block})
    convert(write_checkpoint(tmp_path / "hf", family), tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "back")
    tables = []
    for folder in ("model", "back"):
        with Reader(tmp_path / folder / "model.bin") as reader:
            tables.append(rotary(ModelConfig.from_hf(dict(reader.config))))
    assert torch.equal(tables[0].inv_freq, tables[1].inv_freq)
    assert tables[0].attention_factor == tables[1].attention_factor
    assert not torch.equal(tables[0].inv_freq, PLAIN.float())


@pytest.mark.parametrize("block", [LLAMA3, {**YARN, "truncate": False}, {**YARN, "mscale": 0.5}])
def test_what_the_keys_cannot_say_is_not_exported(tmp_path: Path, block: dict[str, Any]) -> None:
    family = dataclasses.replace(FAMILY, config_extra={"rope_scaling": block})
    convert(write_checkpoint(tmp_path / "hf", family), tmp_path / "model")
    with pytest.raises(ConvertError, match="rope_scaling of GGUF's keys") as caught:
        export_gguf(tmp_path / "model", tmp_path / "m.gguf")
    assert caught.value.code == "gguf-rope"
