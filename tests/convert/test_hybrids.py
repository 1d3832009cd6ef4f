"""Qwen3.5 hybrids as published: every form of their files against transformers and the fixture.

The fixture is helpers/hybrids.py. Oracle of logits: transformers' Qwen3_5ForCausalLM in float32 on
the matrices that the stored ones stand for, (W' H) diag(s) where they are rotated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import hybrids
from bitnet_ops import ops
from bitnet_ops.config import ModelConfig
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.formats.sglbitnt import Reader
from bitnet_ops.language_model import load
from bitnet_ops.models import expected_tensors
from hybrids import Hybrid

EVERY = pytest.mark.parametrize("name", hybrids.CASES)


@EVERY
def test_names_and_shapes_follow_from_the_config(name: str) -> None:
    made = hybrids.make(name)
    specs = expected_tensors(ModelConfig.from_hf(hybrids.converted_config(made)))
    found = {
        n: (v[0] if isinstance(v, tuple) else v).shape
        for n, v in hybrids.converted(made).items()
    }  # fmt: skip
    assert {n: tuple(spec.shape) for n, spec in specs.items()} == found
    nested = ModelConfig.from_hf(hybrids.nested_config(made))
    assert nested == ModelConfig.from_hf(hybrids.text_config(made))


# Forms -------------------------------------------------------------------------------------------

# form -> (what writes it, the models that it can hold)
FORMS: dict[str, tuple[Callable[[Path, Hybrid], Path], tuple[str, ...]]] = {
    "nested": (partial(hybrids.write_unpacked, nested=True), ("plain", "plain-tied")),
    "flat-f32": (partial(hybrids.write_unpacked, dtype=torch.float32), ("plain",)),
    "mlx": (hybrids.write_mlx, tuple(hybrids.CASES)),
    "mlx-1": (partial(hybrids.write_mlx, schema=1), ("rotated",)),
}
MODELS = [(form, name) for form, (_, names) in FORMS.items() for name in names]


@pytest.mark.parametrize("form, name", MODELS)
def test_every_tensor_is_as_published(tmp_path: Path, form: str, name: str) -> None:
    """Codes and scales exactly, all else too but for the rounding of the form; and it loads."""
    made = hybrids.make(name, layers=4)
    source = FORMS[form][0](tmp_path / "source", made)
    report = convert(source, tmp_path / "out")
    compare(tmp_path / "out", made, 2.0**-10 if form == "nested" else 0)
    beside = [remark for remark in report.remarks if "left out" in remark]
    assert bool(beside) == (form in ("nested", "mlx"))
    if form == "nested":
        assert "2 of a tower for images, 3 of layers that draft tokens" in beside[0]
    model = load(tmp_path / "out").model
    assert model.config == ModelConfig.from_hf(hybrids.converted_config(made))


def compare(folder: Path, made: Hybrid, rounding: float) -> None:
    with Reader(folder / "model.bin") as reader:
        expected = hybrids.converted(made)
        assert set(reader.tensors) == set(expected)
        for name, value in expected.items():
            tensor = reader.tensor(name)
            if isinstance(value, tuple):
                codes, scales = value
                assert np.array_equal(ops.unpack(tensor, codes.shape[1]).numpy(), codes), name
                assert np.array_equal(reader.scales(name).numpy(), scales), name
                continue
            error = np.abs(tensor.float().numpy() - value).max()
            assert error <= rounding * np.abs(value).max(), name
            if name.endswith(("in_proj_a.weight", "conv1d.weight", "A_log", "dt_bias")):
                assert tensor.dtype == torch.float32
        config = json.loads(json.dumps(reader.config))
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert "text_config" not in config and "vision_config" not in config


# Rejections of packages: (change, what the message names)
SIGNS = "language_model.model.layers.0.mlp.up_proj.signs"
BAD_PACKAGES = {
    "schema": ({"schema_version": 3}, "schema 3"),
    "layout": ({"gdn_activation_layout": "tiled"}, "gdn_activation_layout"),
    "quantisation": ({"quantization": {"bits": 2, "group_size": 64}}, "quantization"),
    "no modules": ({"modules": []}, "modules"),
    "a module twice": ({"modules": [{"path": "lm_head", "block": 0, "embedding": False,
                                     "dtype": "float16"}] * 2}, "modules of one path"),
    "a module missing": ({"modules": [{"path": "lm_head", "block": 0, "embedding": False,
                                       "dtype": "float16"}]}, "a disagreement about"),
    "no signs": ({SIGNS: None}, f"{SIGNS} F32"),
    "signs that differ": ({SIGNS: np.ones(256, np.float32)}, "one vector of signs"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_PACKAGES)
def test_packages_that_are_rejected(tmp_path: Path, case: str) -> None:
    change, message = BAD_PACKAGES[case]
    source = hybrids.write_mlx(tmp_path / "source", hybrids.make("rotated", layers=4), **change)
    with pytest.raises(ConvertError, match=re.escape(message)) as error:
        convert(source, tmp_path / "out")
    assert error.value.code == "mlx-rotation"
    assert not (tmp_path / "out").exists()


def test_signs_are_signs_and_widths_have_one_block(tmp_path: Path) -> None:
    made = hybrids.make("rotated", layers=4)
    made.signs[256] = made.signs[256] * np.float32(0.5)
    with pytest.raises(ConvertError, match=r"signs -1 and \+1.*got -?0\.5") as error:
        convert(hybrids.write_mlx(tmp_path / "half", made), tmp_path / "out")
    assert error.value.code == "rotation-signs"
    made = hybrids.make("rotated", layers=4)
    folder = hybrids.write_mlx(tmp_path / "blocks", made)
    about = json.loads((folder / "config.json").read_text())
    about["modules"][5]["block"] = 64
    (folder / "config.json").write_text(json.dumps(about))
    with pytest.raises(ConvertError, match="one block for each width"):
        convert(folder, tmp_path / "out")


def test_matrices_of_block_0_are_plain(tmp_path: Path) -> None:
    folder = hybrids.write_mlx(tmp_path / "source", hybrids.make("rotated", layers=4))
    about = json.loads((folder / "config.json").read_text())
    for row in about["modules"]:
        row["block"] *= row["path"] != "lm_head"
    (folder / "config.json").write_text(json.dumps(about))
    convert(folder, tmp_path / "out")
    rotation = load(tmp_path / "out").model.config.rotation
    assert rotation is not None and rotation.plain == {"lm_head"}
    assert rotation.blocks == ((256, 128), (384, 128))


def test_a_rotated_matrix_must_be_ternary(tmp_path: Path) -> None:
    """Of an embedding without zeros nothing shows that it is."""
    made = hybrids.make("rotated", layers=4)
    made.codes["model.embed_tokens"][:] = 1
    with pytest.raises(ConvertError, match="rotated model.embed_tokens") as error:
        convert(hybrids.write_mlx(tmp_path / "source", made), tmp_path / "out")
    assert error.value.code == "rotated-dense"
