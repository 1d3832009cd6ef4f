"""Models with a scale for every 64 weights: each form of their files, against transformers.

As llama.cpp's own Q2_0 has them. The fixture is Bonsai's (helpers/bonsai.py) with scales of their
own for both halves of 128 and an intermediate size that is no multiple of 128.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import bonsai
import rounding_ties
from bitnet_ops import ops
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.formats.sglbitnt import Reader
from bitnet_ops.language_model import load
from bitnet_ops.models.step_batch import SequenceStep, StepBatch
from bitnet_ops.nn.head import HeadWeight
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.nn.storage import FORMATS
from isa_control import torch_threads

INTER = 320
FILES = ["unpacked", "mlx", "Q2_0"]
EVERY_64 = {"group_size": 64, "bits": 2, "mode": "affine"}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(bonsai, "INTER", INTER)
    with torch_threads(1):
        yield


class Halves(bonsai.Grouped):
    """A matrix whose groups are the halves."""

    @property
    def scales(self) -> np.ndarray:
        return self.halves


def make(seed: int = 64) -> bonsai.Bonsai:
    rng = np.random.default_rng(seed)

    def matrix(n: int, k: int) -> Halves:
        codes = rng.integers(-1, 2, (n, k)).astype(np.int8)
        halves = (0.04 * rng.uniform(0.5, 1.5, (n, k // 64))).astype(np.float16)
        codes[::9, :64], halves[::9, 0] = 0, 0
        halves[2::9, 1] = np.float16(bonsai.SUBNORMAL)
        return Halves(codes, halves)

    like = bonsai.make(False)
    matrices = {name: matrix(*old.codes.shape) for name, old in like.matrices.items()}
    return dataclasses.replace(like, matrices=matrices)


def write(folder: Path, made: bonsai.Bonsai, form: str) -> Path:
    if form == "unpacked":
        return bonsai.write_unpacked(folder / form, made)
    if form == "mlx":
        return bonsai.write_mlx(folder / form, made, quantization=EVERY_64)
    (folder / "m.gguf").write_bytes(bonsai.gguf_file(made, form))
    return folder / "m.gguf"


def converted(folder: Path, made: bonsai.Bonsai, form: str) -> Path:
    folder.mkdir(exist_ok=True)
    source, out = write(folder, made, form), folder / f"out-{form}"
    if form == "Q2_0":
        convert(source, out, tokenizer="none")
    else:
        convert(source, out)
    return out


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return converted(tmp_path / "model", make(), "Q2_0")


@pytest.mark.parametrize("form", FILES)
def test_every_code_and_scale_survives(tmp_path: Path, form: str) -> None:
    made = make()
    with Reader(converted(tmp_path, made, form) / "model.bin") as reader:
        for name, matrix in made.matrices.items():
            info = reader.tensors[f"{name}.weight"]
            assert (info.scale_kind, info.group_size) == ("group", 64), name
            codes = ops.unpack(reader.tensor(info.name), matrix.codes.shape[1])
            assert np.array_equal(codes.numpy(), matrix.codes), name
            scales, used = reader.scales(info.name).numpy(), matrix.halves > 0
            assert np.array_equal(scales[used], matrix.halves.astype(np.float32)[used]), name


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    pool = KVPool(model.config, 8, 4, torch.float32)
    step = SequenceStep(ids[0].tolist(), 0, list(range(8)), ids.shape[1])
    logits: torch.Tensor = model.step(StepBatch.of([step], 4), pool)
    return logits


def int8_activations(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
    rounded = []
    for part in inputs[0].split(64, dim=-1):
        multiplier = 127.0 / part.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        rounded.append((part * multiplier).round().clamp(-128, 127) / multiplier)
    return (torch.cat(rounded, dim=-1),)


def test_transformers_gives_the_same_logits(tmp_path: Path, model_folder: Path) -> None:
    """Fused and composed, in every layout; transformers with activations rounded by 64."""
    source = bonsai.write_unpacked(tmp_path / "hf", make())
    theirs = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    linears = [m for n, m in theirs.named_modules() if n.endswith("_proj")]
    for linear in linears:
        linear.register_forward_pre_hook(int8_activations)
    model = load(model_folder, head_format="stored").model
    for parent, name in ((model.model, "embed_tokens"), (model, "lm_head")):
        head = getattr(parent, name)  # its 16 bits are held against float64 below
        rows = head.embed(torch.arange(head.out_features))
        setattr(parent, name, HeadWeight.from_dense(rows, "stored"))
    with torch.no_grad():
        rounding_ties.assert_alike(
            lambda ids: logits_of(model, ids),
            lambda ids: theirs(ids).logits[0],
            rounding_ties.TieWatch(linears, group=64),
            rounding_ties.prompts(bonsai.VOCAB, seed=5),
        )


@pytest.mark.parametrize("activation_format", ["int8", "int8_group", "int16_group"])
def test_every_layout_and_path_gives_the_same_bits(
    model_folder: Path, activation_format: str
) -> None:
    ids, found = torch.arange(20)[None] * 13 % bonsai.VOCAB, []
    for weight_format in FORMATS:
        model = load(
            model_folder, weight_format=weight_format, activation_format=activation_format
        ).model
        assert model.run_as == "program"
        found.append(logits_of(model, ids))
        model.run_as = "ops"
        found.append(logits_of(model, ids))
    assert found[0].isfinite().all()
    for logits in found[1:]:
        assert torch.equal(logits, found[0])


def test_embedding_and_head_are_exact_to_16_bits(model_folder: Path) -> None:
    made, model = make(), load(model_folder).model
    for name in ("model.embed_tokens", "lm_head"):
        head, values = model.get_submodule(name), made.matrices[name].values
        assert head.head_format == "ternary" and head.scale.dtype == torch.float16
        rows = head.embed(torch.arange(len(values)))
        assert np.array_equal(rows.numpy(), values.astype(np.float32))
        x = torch.randn(3, values.shape[1], generator=torch.Generator().manual_seed(1))
        weights = torch.from_numpy(values.astype(np.float64))
        maximum = x.abs().max() / 32512 * (0.5 + 32512 * 2.0**-22)
        bound = float(maximum) * weights.abs().sum(dim=1)
        assert bool(((head(x).double() - x.double() @ weights.T).abs() <= bound).all())


def test_a_matrix_of_128_beside_those_of_64(tmp_path: Path) -> None:
    """Projections of the same tokens in other groups run one by one, and right."""
    made, name = make(), "model.layers.0.mlp.up_proj"
    matrix = made.matrices[name]
    pairs = np.repeat(matrix.halves[:, 1::2], 2, axis=1)
    made.matrices[name] = Halves(matrix.codes, pairs)
    folder = converted(tmp_path, made, "Q2_0")
    with Reader(folder / "model.bin") as reader:
        assert reader.tensors[f"{name}.weight"].group_size == 128
    model = load(folder).model
    ids = torch.arange(20)[None] * 13 % bonsai.VOCAB
    layer = model.get_submodule(name)
    assert torch.equal(layer.packed.dequantize(), torch.from_numpy(made.matrices[name].values))
    assert logits_of(model, ids).isfinite().all()


def test_magnitudes_that_differ_within_64_are_rejected(tmp_path: Path) -> None:
    made = make()
    folder = bonsai.write_unpacked(tmp_path / "hf", made)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 70:80] *= 1.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConvertError, match="every group of 64 weights") as caught:
        convert(folder, tmp_path / "out")
    assert caught.value.code == "not-ternary"
