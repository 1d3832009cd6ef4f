"""What training starts from, and what comes out of it, of every family that the package reads.

A family of hf_writer, hf_families, hybrids or bonsai either computes at step 0 what its checkpoint
does, or is in REJECTED by the reason that is given. The rounding of activations is left out on both
sides, since one tie of it would hide all else; test_training.py has it. Oracles: the float64
forward, transformers on the matrices that the fixture stands for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bonsai
import forward_fp64
import hf_writer
import hybrids
from bitnet_ops import training
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.convert.quantize import quantize
from bitnet_ops.language_model import load
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.training import TrainableBitLinear, TrainingError, linear
from hf_families import CASES
from isa_control import torch_threads

EXACT = 2e-5  # of the largest logit
DEPLOYED = 0.15  # activations rounded to int8, in networks with random weights and states

FAMILIES = hf_writer.FAMILIES | {name: case.family for name, case in CASES.items()}
# family -> why it cannot be trained, in words of the error
REJECTED = {
    "1bitllm-large-fp16": "other norms than llama has",
    "1bitllm-3b": "other norms than llama has",
    "subln-smollm2": "other norms than llama has",
    "qwen3-embedding": "other norms than qwen3 has",
    "qwen3-rms-norm": "other norms than qwen3 has",
    "qwen2-rms-norm-mul": "other norms than qwen2 has",
    "qwen2-rms-norm-div": "other norms than qwen2 has",
    "llama-rms-norm": "other norms than llama has",
    "bitnet-embedding-270m": "other norms than gemma3_text has",
    "gemma3": "the norms and factors of gemma3_text",
    "bitcpm-minicpm": "the norms and factors of minicpm",
    "trilm-blocks": "expected one scale in model.layers.0.self_attn.o_proj.weight, got 2",
    "bonsai": "expected one scale in model.layers.0.self_attn.q_proj.weight, got 3",
    "rotated": "rotated matrices",
    "square": "rotated matrices",
}
SEVERAL = "expected one scale in .*weight, got [0-9]+, one for a row or a group of weights"
SUPPORTED = "bitnet, llama, qwen2, qwen3 or qwen3_5_text"
IDS = torch.randint(0, 300, (1, 20), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def one_thread():
    with torch_threads(1):
        yield


@pytest.fixture
def floating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "quantize_activations_ste", lambda x: x)


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    return model.eval()(IDS).logits[0].double()


def logits_of_bin(folder: Path) -> Tensor:
    model = load(folder, head_format="stored").model
    return model(IDS, KVCache(model.config, 1, IDS.shape[1], torch.float32))[0].double()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def check(reason: str | None, source: Path, expected: Callable[[], Tensor], folder: Path) -> None:
    """What is loaded of `source` and of its conversion; what each form of it holds and gives."""
    if reason is not None:
        with pytest.raises(TrainingError, match=reason) as caught:
            training.load_for_training(source)
        said = str(caught.value)
        assert "\n" not in said and said.startswith("load_for_training: expected")
        assert SUPPORTED in said or "one for its matrix" in said
        return
    model = training.load_for_training(source)
    assert relative(logits_of(model), expected()) < EXACT
    convert(source, folder / "out")
    for form in ("packed", "masters", "bin"):
        training.export(model, folder / form, form=form)
        if form != "bin":
            convert(folder / form, folder / f"{form}-bin")
    for name in ("out", "packed", "masters", "bin"):
        again = training.load_for_training(folder / name)
        assert relative(logits_of(again), expected()) < EXACT, name
    deployed = logits_of_bin(folder / "bin")
    assert relative(deployed, expected()) < DEPLOYED
    for name in ("packed-bin", "masters-bin"):
        assert relative(logits_of_bin(folder / name), deployed) < EXACT, name


@pytest.mark.usefixtures("floating")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(8)
def test_every_family(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    source = hf_writer.write_checkpoint(tmp_path / "source", family)

    def expected() -> Tensor:
        network = forward_fp64.Network(family, hf_writer.make_network(family), int8=False)
        return network.forward(IDS[0].tolist(), forward_fp64.Margins())

    check(REJECTED.get(name), source, expected, tmp_path)


WRITERS: dict[str, Callable[..., Path]] = {
    "flat": functools.partial(hybrids.write_unpacked, dtype=torch.float32),
    "nested": functools.partial(hybrids.write_unpacked, dtype=torch.float32, nested=True),
    "mlx": hybrids.write_mlx,
}


@pytest.mark.usefixtures("floating")
@pytest.mark.parametrize("scales", ["one", "groups"])
@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("name", hybrids.CASES)
@pytest.mark.sampled(8)
def test_every_hybrid(name: str, form: str, scales: str, tmp_path: Path) -> None:
    """Rotated ones have no unpacked form: what their matrices stand for is not ternary."""
    made = hybrids.make(name, layers=4)
    reason = REJECTED.get(name, SEVERAL if scales == "groups" else None)
    if scales == "one":
        for module, found in made.scales.items():
            if "_proj" in module:  # the vocabulary keeps those of its groups
                made.scales[module] = np.full_like(found, found.flat[0])
    if made.signs and form != "mlx":
        with pytest.raises(ConvertError, match="ternary in their packed files alone"):
            training.load_for_training(WRITERS[form](tmp_path / "source", made))
        return
    source = WRITERS[form](tmp_path / "source", made)

    def expected() -> Tensor:
        return logits_of(hybrids.transformers_model(made))

    check(reason, source, expected, tmp_path)
    if reason is None:
        model = training.load_for_training(source)
        ternary = {n for n, m in model.named_modules() if isinstance(m, TrainableBitLinear)}
        assert ternary == {module for module in made.codes if "_proj" in module}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("write", [bonsai.write_unpacked, bonsai.write_mlx])
def test_bonsai_has_scales_of_groups(
    write: Callable[..., Path], tied: bool, tmp_path: Path
) -> None:
    source = write(tmp_path / "source", bonsai.make(tied))
    check(SEVERAL, source, lambda: torch.empty(0), tmp_path)
    convert(source, tmp_path / "out")
    check(SEVERAL, tmp_path / "out", lambda: torch.empty(0), tmp_path)


# Masters that nothing declares --------------------------------------------------------------------


def changed(folder: Path, change: Callable[[str, Tensor], Tensor]) -> Path:
    """A checkpoint without quantization_config whose projections are `change` of a Llama's."""
    family = dataclasses.replace(FAMILIES["llama-online"], quantized=False, dtype="float32")
    source = hf_writer.write_checkpoint(folder / "source", family)
    stored = load_file(source / "model.safetensors")
    new = {n: change(n, t).contiguous() if "_proj" in n else t for n, t in stored.items()}
    save_file(new, source / "model.safetensors", metadata={"format": "pt"})
    return source


@pytest.mark.parametrize("size", [0, 1, 128, 64])
@pytest.mark.parametrize("bits", ["one", "ternary"])
def test_weights_with_scales_are_no_masters(bits: str, size: int, tmp_path: Path) -> None:
    """-s and s, or -s, 0 and s, in a matrix, rows or groups: their absmean is another scale."""

    def change(name: str, masters: Tensor) -> Tensor:
        rows, columns = masters.shape
        scales = torch.rand(rows if size else 1, columns // size if size > 1 else 1) + 0.5
        codes = masters.sign() * (masters.abs() > (0.01 if bits == "ternary" else -1))
        return codes * scales.repeat_interleave(size if size > 1 else columns, 1)

    source = changed(tmp_path, change)
    if bits == "ternary" and not size:
        assert isinstance(training.load_for_training(source), nn.Module)
    elif bits == "ternary":
        with pytest.raises(TrainingError, match=SEVERAL):
            training.load_for_training(source)
    else:
        with pytest.raises(ConvertError, match="real-valued masters .*already-ternary"):
            training.load_for_training(source)
    for write in (functools.partial(convert, assume_online=True),
                  functools.partial(quantize, assume_trained=True)):  # fmt: skip
        with pytest.raises(ConvertError, match="real-valued masters .*already-ternary"):
            write(source, tmp_path / "out")


def test_masters_that_nothing_declares_are_taken_as_they_are(tmp_path: Path) -> None:
    source = changed(tmp_path, lambda name, masters: masters)
    stored = load_file(source / "model.safetensors")
    model = training.load_for_training(source)
    assert all(torch.equal(p, stored[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("value", [float("nan"), 1e-6])
def test_what_no_layer_computes_is_rejected(value: float, tmp_path: Path) -> None:
    """A NaN; a scale below the least that the rounding knows."""
    family = dataclasses.replace(FAMILIES["trilm"], dtype="float32")
    source = hf_writer.write_checkpoint(tmp_path / "source", family)
    stored = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    stored[name] = stored[name].sign() * value
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((ConvertError, TrainingError), match=f"{name}, got"):
        training.load_for_training(source)


# Models of transformers' own ----------------------------------------------------------------------


def test_gates_of_a_hybrid_stay_floating(tmp_path: Path) -> None:
    model = hybrids.transformers_model(hybrids.make("plain", layers=4))
    gate = "model.layers.0.linear_attn.in_proj_b"
    replaced = training.replace_linears(model)
    assert len(replaced) == 3 * 6 + 7 and gate not in replaced
    assert type(model.get_submodule(gate)) is nn.Linear
    training.replace_linears(model, skip=["lm_head"])  # gates too, as is asked for
    for form in ("packed", "masters", "bin"):
        with pytest.raises(TrainingError, match=f"export: expected floating weights in {gate}"):
            training.export(model, tmp_path / form, form=form)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("floating")
@pytest.mark.parametrize("linear_class", ["autobitlinear", "bitlinear"])
def test_biases_go_along(linear_class: str, tmp_path: Path) -> None:
    """The offline AutoBitLinear multiplies them by the scale of its weight."""
    family = dataclasses.replace(
        FAMILIES["llama-autobitlinear"], name="qwen2", model_type="qwen2", qkv_bias=True, eps=1e-6,
        linear_class=linear_class, dtype="float32",
    )  # fmt: skip
    source = hf_writer.write_checkpoint(tmp_path / "source", family)

    def expected() -> Tensor:
        network = forward_fp64.Network(family, hf_writer.make_network(family), int8=False)
        return network.forward(IDS[0].tolist(), forward_fp64.Margins())

    check(None, source, expected, tmp_path)
