"""Qwen3.5 hybrids as published: every form of their files against transformers and the fixture.

The fixture is helpers/hybrids.py. Oracle of logits: transformers' Qwen3_5ForCausalLM in float32 on
the matrices that the stored ones stand for, (W' H) diag(s) where they are rotated.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import bonsai
import hybrids
from bitnet_ops import ops
from bitnet_ops.cli import main
from bitnet_ops.config import ModelConfig, UnsupportedModelError
from bitnet_ops.convert import ConvertError, convert, forward
from bitnet_ops.convert.checkpoint import Checkpoint
from bitnet_ops.convert.diff import diff
from bitnet_ops.convert.forward import DeltaNet, Forward, Maths
from bitnet_ops.convert.gguf_export import export_gguf
from bitnet_ops.convert.gguf_source import GgufSource
from bitnet_ops.convert.hf_source import HfSource
from bitnet_ops.convert.hybrid import gguf_keys
from bitnet_ops.convert.inspect import inspect
from bitnet_ops.convert.oracles import GgufOracle, PlainOracle
from bitnet_ops.convert.quantize import quantize
from bitnet_ops.convert.report import ConvertReport
from bitnet_ops.formats.gguf import Reader as GgufReader
from bitnet_ops.formats.sglbitnt import Reader
from bitnet_ops.language_model import load
from bitnet_ops.models import expected_tensors
from gguf_bytes import key
from hybrids import FAINT, Hybrid, Sizes

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


STATED = hybrids.text_config(hybrids.make("plain", layers=4))
BAD_CONFIGS: dict[str, dict[str, Any]] = {
    "hidden_act to be absent or 'silu'": {"hidden_act": "relu2"},
    "partial_rotary_factor to leave an even number": {"partial_rotary_factor": 1e308},
    "partial_rotary_factor to be the same": {"partial_rotary_factor": 0.5},
    "bitnet_ops to be an object": {"bitnet_ops": [1]},
    "bitnet_ops.rotation": {"bitnet_ops": {"rotation": [1]}},
}


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_configs_that_are_rejected(message: str) -> None:
    rope = STATED["rope_parameters"]
    if "even" in message:
        rope = {key: v for key, v in rope.items() if key != "partial_rotary_factor"}
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        ModelConfig.from_hf({**STATED, "rope_parameters": rope, **BAD_CONFIGS[message]})


def test_a_base_that_is_not_stated_is_that_of_transformers() -> None:
    import transformers

    silent = {key: v for key, v in STATED.items() if key != "rope_parameters"}
    theirs = transformers.AutoConfig.for_model(**silent).rope_parameters["rope_theta"]
    assert ModelConfig.from_hf(silent).rope_theta == theirs


@pytest.mark.parametrize("entries", [["lm_head"], None, ["lm_head", "in_proj_a"]])
def test_gates_of_online_checkpoints_must_be_left_out(tmp_path: Path, entries: Any) -> None:
    """transformers ternarises whatever matrix the list does not name."""
    made = hybrids.make("plain", layers=4)
    source = hybrids.write_unpacked(tmp_path / "source", made, dtype=torch.float32)
    path, block = source / "config.json", {"quant_method": "bitnet", "quantization_mode": "online",
                                           "linear_class": "autobitlinear"}  # fmt: skip

    def state(names: Any) -> None:
        about = {**block, "modules_to_not_convert": names}
        path.write_text(json.dumps({**STATED, "quantization_config": about}))

    state(entries)
    with pytest.raises(ConvertError, match="gates in_proj_a and in_proj_b left unquantised"):
        run(source, tmp_path / "out")
    state(["lm_head", "in_proj_a", "in_proj_b"])
    run(source, tmp_path / "out")


# Forms -------------------------------------------------------------------------------------------

# form -> (what writes it, the models that it can hold)
FORMS: dict[str, tuple[Callable[[Path, Hybrid], Path], tuple[str, ...]]] = {
    "nested": (partial(hybrids.write_unpacked, nested=True), ("plain", "plain-tied")),
    "flat-f32": (partial(hybrids.write_unpacked, dtype=torch.float32), ("plain",)),
    "mlx": (hybrids.write_mlx, tuple(hybrids.CASES)),
    "mlx-1": (partial(hybrids.write_mlx, schema=1), ("rotated",)),
    "PQ2_0": (partial(hybrids.write_gguf, drafts=True), tuple(hybrids.CASES)),
    "PTQ1_0": (partial(hybrids.write_gguf, kind="PTQ1_0", gates="BF16"), ("rotated",)),
    "Q2_0": (partial(hybrids.write_gguf, kind="Q2_0"), ("plain", "square")),
    "Q2_0_128": (partial(hybrids.write_gguf, kind="Q2_0_128"), ("plain-tied",)),
    "F16": (partial(hybrids.write_gguf, kind="F16", gates="F16"), ("plain", "rotated")),
    "F32": (partial(hybrids.write_gguf, kind="F32"), ("plain",)),
}
# what the gates of a form are rounded by
ROUNDING = {"nested": 2.0**-10, "PTQ1_0": 2.0**-8, "F16": 2.0**-10}
MODELS = [(form, name) for form, (_, names) in FORMS.items() for name in names]


BESIDE = {
    "nested": ["tensors left out: 3 of layers that draft tokens"],
    "PQ2_0": [
        "tensors left out: 1 of a tower for images",
        "tensors left out: 2 of layers that draft tokens",
    ],
}


def run(source: Path, out: Path, **options: Any) -> ConvertReport:
    if source.suffix == ".gguf":
        options["tokenizer"] = "none"
    return convert(source, out, **options)


@pytest.mark.parametrize("form, name", MODELS)
def test_every_tensor_is_as_published(tmp_path: Path, form: str, name: str) -> None:
    """Codes and scales exactly, all else too but for the rounding of the form; and it loads."""
    made = hybrids.make(name, layers=4)
    source = FORMS[form][0](tmp_path / "source", made)
    report = run(source, tmp_path / "out")
    compare(tmp_path / "out", made, ROUNDING.get(form, 2.0**-20))
    beside = [remark for remark in report.remarks if "left out" in remark]
    assert beside == BESIDE.get(form, [])
    model = load(tmp_path / "out").model
    assert model.config == ModelConfig.from_hf(hybrids.converted_config(made))
    found = diff(source, tmp_path / "out")
    assert found["tensors"] == found["only_a"] == found["only_b"] == []
    assert found["same"] == len(hybrids.converted(made))


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
            error = np.abs(tensor.float().numpy() - value)
            assert (error <= rounding * np.maximum(np.abs(value), 0.1)).all(), name
            if name.endswith(("in_proj_a.weight", "conv1d.weight", "A_log", "dt_bias")):
                assert tensor.dtype == torch.float32
        config = json.loads(json.dumps(reader.config))
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert "text_config" not in config and "vision_config" not in config


def test_one_model_has_the_same_bits_from_every_source(tmp_path: Path) -> None:
    """A GGUF file holds -exp(A_log), of which A_log is not to be had again exactly."""
    made = hybrids.make("plain", layers=4)
    found = []
    for form in ("flat-f32", "mlx", "PQ2_0", "F32"):
        run(FORMS[form][0](tmp_path / form, made), tmp_path / f"{form}-out")
        with Reader(tmp_path / f"{form}-out" / "model.bin") as reader:
            found.append({name: bytes(reader.memory(name)) for name in reader.tensors})
    assert all(one == found[0] for one in found[1:])


UNPACKED: dict[str, Callable[[Path, Hybrid], Path]] = {
    "safetensors": partial(hybrids.write_unpacked, nested=True, dtype=torch.bfloat16),
    "gguf": partial(hybrids.write_gguf, kind="BF16", gates="BF16"),
}


@pytest.mark.parametrize("form, name", [("safetensors", "plain"), ("safetensors", "plain-tied"),
                                        ("gguf", "plain"), ("gguf", "rotated")])  # fmt: skip
def test_ternary_values_in_bfloat16_convert_exactly(tmp_path: Path, form: str, name: str) -> None:
    made = hybrids.make(name, layers=4)
    for module, scales in made.scales.items():  # 8 bits, which float16 holds
        made.scales[module] = torch.from_numpy(scales).bfloat16().half().numpy()
    run(UNPACKED[form](tmp_path / "source", made), tmp_path / "out")
    compare(tmp_path / "out", made, 2.0**-8)


@pytest.mark.parametrize("form", UNPACKED)
def test_a_rotated_model_whose_matrices_are_turned_back_is_rejected(
    tmp_path: Path, form: str
) -> None:
    """What they stand for is not ternary; their mean magnitude would give noise."""
    made = hybrids.make(Sizes(dim=128, block=128), layers=4)
    if form == "gguf":
        made = turned_back(made)
    source = UNPACKED[form](tmp_path / "source", made)
    with pytest.raises(ConvertError, match="the GGUF or the MLX package; .bitnet-ops quantize"):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def turned_back(made: Hybrid) -> Hybrid:
    """With the values that the matrices stand for as codes, all scales 1, and no rotation."""
    codes = {module: made.values(module).astype(np.float32) for module in made.codes}
    scales = {module: np.ones_like(scale) for module, scale in made.scales.items()}
    return Hybrid(dataclasses.replace(made.sizes, block=0), codes, scales, made.dense)


def test_a_hybrid_has_no_packed_form_of_transformers(tmp_path: Path) -> None:
    source = hybrids.write_unpacked(tmp_path / "source", hybrids.make("rotated", layers=4))
    with pytest.raises(ConvertError, match="layers of attention alone, got .*use --form bin"):
        quantize(source, tmp_path / "out", form="packed", assume_trained=True)


# Logits: the plain forward of --verify, and mistakes that it must be able to see ------------------


@functools.cache
def expected_logits(name: str | Sizes, layers: int = 8) -> torch.Tensor:
    with torch.inference_mode():
        logits = hybrids.transformers_model(hybrids.make(name, layers=layers))(IDS[None]).logits[0]
    return logits.double()


IDS = torch.randint(0, 300, (150,), generator=torch.Generator().manual_seed(1))
EXACT = 2e-5  # of the largest logit: what float32 leaves of transformers' products


@pytest.mark.parametrize("form, name", MODELS)
@pytest.mark.sampled(8)
def test_the_plain_forward_is_that_of_transformers(tmp_path: Path, form: str, name: str) -> None:
    """Over every form, read a second time; forms that round their gates to 16 bits less exactly."""
    source = FORMS[form][0](tmp_path / "source", hybrids.make(name))
    if source.suffix == ".gguf":
        with GgufSource.opened(source) as opened:
            (found,) = GgufOracle(opened, int8_activations=False).logits([IDS.tolist()])
    else:
        plain = PlainOracle(HfSource(Checkpoint(source)), int8_activations=False)
        (found,) = plain.logits([IDS.tolist()])
    expected = expected_logits(name)
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error < max(EXACT, 4 * ROUNDING.get(form, 0)), error


@pytest.mark.parametrize(
    "form, name", [("PQ2_0", "rotated"), ("mlx", "square"), ("nested", "plain")]
)
def test_verify_compares_with_it(tmp_path: Path, form: str, name: str) -> None:
    source = FORMS[form][0](tmp_path / "source", hybrids.make(name, layers=4))
    found = run(source, tmp_path / "out", verify=True).verification
    assert found["failures"] == [] and found["weights_different"] == 0
    assert found["projections"] == 3 * 6 + 7


def pairs(features: int) -> torch.Tensor:
    """Frequencies of the rotary embedding of so many features."""
    return hybrids.THETA ** -(torch.arange(features // 2).double() * 2 / features)


def forward_of(made: Hybrid, **change: Any) -> torch.Tensor:
    """Logits of the plain forward over a fixture's own tensors. `change`: of Maths."""
    s = made.sizes
    tensors = {f"{n}.weight": made.stored(n) for n in made.codes}
    tensors |= {name: hybrids.multiplies(name, value) for name, value in made.dense.items()}
    tensors |= {f"model.rotation.{width}.weight": signs for width, signs in made.signs.items()}
    frequencies = pairs(s.head_dim // 4)
    layers = [layer for layer in range(s.layers) if not s.is_full(layer)]
    maths = Maths(
        layers=s.layers, heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim,
        activation="silu", eps=hybrids.EPS, rope=[(frequencies, 1.0)] * s.layers,
        attention=s.head_dim**-0.5, qk_norm=True, tied=s.tied, output_gate=True,
        delta_net=DeltaNet(layers, s.key_heads, s.value_heads, s.dim, s.dim),
        blocks=dict.fromkeys(made.signs, s.block),
    )  # fmt: skip
    maths = dataclasses.replace(maths, **change)
    read = {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in tensors.items()}
    return Forward(maths, read.__getitem__, int8=False).logits([IDS.tolist()])[0]


def changed(part: str, by: Callable[[np.ndarray], np.ndarray]) -> Callable[[Hybrid], None]:
    """Of every tensor whose name contains `part`, a matrix's codes and scales alike."""

    def change(made: Hybrid) -> None:
        for kind in (made.codes, made.scales, made.dense):
            for name in [name for name in kind if part in name]:
                kind[name] = by(kind[name])

    return change


def tiled_heads(made: Hybrid) -> None:
    """A file's rows taken as they lie."""
    for kind in (made.codes, made.scales, made.dense):
        for name in kind:
            kind[name] = hybrids.tiled(made.sizes, name, kind[name])


def tiled_outputs(made: Hybrid) -> None:
    for name in [name for name in made.codes if name.endswith("out_proj")]:
        codes = made.codes[name]
        heads = codes.reshape(len(codes), -1, made.sizes.key_heads, made.sizes.dim)
        made.codes[name] = heads.swapaxes(1, 2).reshape(codes.shape)


def gates_last(rows: np.ndarray) -> np.ndarray:
    """All queries, then all gates, where each head's query and gate are expected."""
    return rows.reshape(4, 2, -1, rows.shape[1]).swapaxes(0, 1).reshape(rows.shape)


def gate_first(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(4, 2, -1, rows.shape[1])[:, ::-1].reshape(rows.shape)


def no_signs(made: Hybrid) -> None:
    made.signs = {width: np.ones_like(signs) for width, signs in made.signs.items()}


def signs_last(made: Hybrid) -> None:
    """W' s H x in place of W' H s x."""
    for name, codes in made.codes.items():
        made.codes[name] = codes * made.signs[codes.shape[1]].astype(np.int8)
    no_signs(made)


# mistake -> what it does to the tensors, or to what is computed of them
MISTAKES: dict[str, Callable[[Hybrid], None] | dict[str, Any]] = {
    "taps reversed": changed("conv1d", lambda taps: taps[..., ::-1]),
    "value heads tiled": tiled_heads,
    "columns of out_proj tiled": tiled_outputs,
    "gates behind all queries": changed("q_proj", gates_last),
    "gates before queries": changed("q_proj", gate_first),
    "norms without the 1": changed("layernorm", lambda w: w - 1),
    "norms of heads without the 1": changed("self_attn.q_norm", lambda w: w - 1),
    "gated norm with 1 + w": changed("linear_attn.norm", lambda w: w + 1),
    "-exp(A_log) as A_log": changed("A_log", lambda a: -np.exp(a)),
    "no dt_bias": changed("dt_bias", np.zeros_like),
    "no signs": no_signs,
    "signs after the transform": signs_last,
    "embedding not turned back": {"plain": ["model.embed_tokens"]},
    "head not turned": {"plain": ["lm_head"]},
    "no rotation": {"blocks": {}},
    "rope on the whole head": {"rope": [(pairs(64), 1.0)] * 8},
}
# of what is computed by a function: its name, and another one
FUNCTIONS: dict[str, tuple[str, Any]] = {
    "gate before the gated norm": (
        "_gated_norm", lambda x, z, gain, eps: forward._rms_norm(x * F.silu(z), gain, eps)),
    "sigmoid in the gated norm": (
        "_gated_norm", lambda x, z, gain, eps: forward._rms_norm(x, gain, eps) * z.sigmoid()),
    "lengths of at least eps": (
        "_unit", lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6)),
}  # fmt: skip


ALL_ATTENTION = {
    "nested": ("nested", Sizes(dim=128, layers=2, interval=1)),
    "mlx": ("mlx", Sizes(dim=128, layers=2, interval=1)),
    "rotated mlx": ("mlx", Sizes(block=128, layers=2, interval=1)),
    "PQ2_0": ("PQ2_0", Sizes(block=128, layers=2, interval=1)),
}


@pytest.mark.parametrize("case", ALL_ATTENTION)
def test_without_convolutions_a_package_holds_what_norms_multiply_by(
    tmp_path: Path, case: str
) -> None:
    """--verify goes by what the safetensors say of their writer."""
    form, sizes = ALL_ATTENTION[case]
    made = hybrids.make(sizes)
    source = FORMS[form][0](tmp_path / "source", made)
    found = run(source, tmp_path / "out", verify=True).verification
    compare(tmp_path / "out", made, ROUNDING.get(form, 2.0**-20))
    assert found["failures"] == [] and diff(source, tmp_path / "out")["tensors"] == []


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_the_fixture_sees_mistakes(mistake: str | None) -> None:
    made, expected = hybrids.make("rotated"), expected_logits("rotated")
    change = MISTAKES[mistake] if mistake else {}
    if not isinstance(change, dict):
        change(made)
        change = {}
    error = float((forward_of(made, **change) - expected).abs().max() / expected.abs().max())
    assert error < EXACT if mistake is None else error > 1000 * EXACT, error


@pytest.mark.parametrize("mistake", [None, *FUNCTIONS])
def test_the_fixture_sees_other_functions(
    mistake: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mistake:
        monkeypatch.setattr(forward, *FUNCTIONS[mistake])
    expected = expected_logits(FAINT)
    error = float((forward_of(hybrids.make(FAINT)) - expected).abs().max() / expected.abs().max())
    assert error < EXACT if mistake is None else error > 1000 * EXACT, error


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


# Rejections of GGUF files -------------------------------------------------------------------------

H, Q = "prism__hadamard__", "qwen35__"
NAMES_WITH = ("[str]", ["output.weight", "blk.0.ssm_alpha.weight"])
BAD_FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "prism.hadamard.version": ("gguf-rotation", {f"{H}version": ("u32", 2)}),
    "prism.hadamard.transform": ("gguf-rotation", {f"{H}transform": ("str", "walsh")}),
    "prism.hadamard.axis": ("gguf-rotation", {f"{H}axis": None}),
    "prism.hadamard.sign_mode": ("gguf-rotation", {f"{H}sign_mode": ("str", "random")}),
    "block_size a power of two": ("gguf-rotation", {f"{H}block_size": ("u32", 96)}),
    "block_size a divisor": ("gguf-rotation", {f"{H}block_size": ("u32", 256)}),
    "sign_widths with the width": ("gguf-rotation", {f"{H}sign_widths": ("[i32]", [384])}),
    "sign_widths widths, each": ("gguf-rotation", {f"{H}sign_widths": ("[i32]", [256, 384, 384])}),
    "sign_values of 640": ("gguf-rotation", {f"{H}sign_values": ("[i32]", [1] * 639)}),
    "sign_values -1 and": ("gguf-rotation", {f"{H}sign_values": ("[i32]", [0] * 640)}),
    "sign_values +1 alone": ("gguf-rotation", {f"{H}sign_mode": ("str", "identity")}),
    "weight_names a list": ("gguf-rotation", {f"{H}weight_names": ("[str]", ["a", "a"])}),
    "weight_names names": ("gguf-rotation", {f"{H}weight_names": NAMES_WITH}),
    "inverse_weight_names names": (
        "gguf-rotation", {f"{H}inverse_weight_names": ("[str]", ["output.weight"])}),
    "gdn_v_grouped True": ("gguf-rotation", {f"{H}gdn_v_grouped": None}),
    "version 1, or 2 with tied_output": ("gguf-rotation", {f"{H}version": ("u32", 2)}),
    "tied_output False but": (
        "gguf-rotation", {f"{H}version": ("u32", 2), f"{H}tied_output": ("bool", True)}),
    "tied_output True or False": ("gguf-rotation", {f"{H}tied_output": ("u32", 1)}),
    "metadata keys that are known": ("gguf-key", {f"{H}scale": ("f32", 1.0)}),
    "nextn_predict_layers": ("gguf-metadata", {f"{Q}nextn_predict_layers": ("u32", 9)}),
    "nextn tensors in blk.3": ("gguf-metadata", {f"{Q}nextn_predict_layers": ("u32", 1)}),
    "ssm.inner_size": ("gguf-metadata", {f"{Q}ssm__inner_size": ("u32", 385)}),
    "recurrent_layers": ("gguf-metadata", {f"{Q}attention__recurrent_layers": ("[i32]", [1])}),
    "dimension_sections that": (
        "gguf-maths", {f"{Q}rope__dimension_sections": ("[i32]", [11, 11, 10])}),
    "dimension_sections as": ("gguf-metadata", {f"{Q}rope__dimension_sections": ("str", "3")}),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_FILES)
def test_files_that_are_rejected(tmp_path: Path, message: str) -> None:
    code, change = BAD_FILES[message]
    source = hybrids.write_gguf(tmp_path / "source", hybrids.make("rotated", layers=4), **change)
    with pytest.raises(ConvertError, match=re.escape(message)) as error:
        run(source, tmp_path / "out")
    assert error.value.code == code


@pytest.mark.parametrize(
    "blocks, drafts, code",
    [(4, 0, "unknown-tensor"), (8, 1, "gguf-metadata"), (5, 1, "gguf-metadata")],
)
def test_no_layer_is_lost_by_a_count(tmp_path: Path, blocks: int, drafts: int, code: str) -> None:
    """Of eight layers and one that drafts, where keys count fewer."""
    change = {f"{Q}block_count": ("u32", blocks), f"{Q}nextn_predict_layers": ("u32", drafts)}
    file = hybrids.gguf_file(hybrids.make("plain"), kind="Q2_0", drafts=True, **change)
    (tmp_path / "file.gguf").write_bytes(file)
    with pytest.raises(ConvertError, match=r"blk\.[4578]") as error:
        run(tmp_path / "file.gguf", tmp_path / "out")
    assert error.value.code == code


EMBEDDING = ["token_embd.weight"]


@pytest.mark.parametrize("where", ["inverse alone", "both", "weight_names alone"])
def test_a_tied_table_turns_whichever_list_has_it(tmp_path: Path, where: str) -> None:
    """In version 1; version 2 has a key for it."""
    made = hybrids.make("square", layers=4)
    names = hybrids.gguf_metadata(made)["prism.hadamard.weight_names"][1]
    change: dict[str, Any] = {f"{H}version": ("u32", 1), f"{H}tied_output": None}
    if where != "inverse alone":
        change[f"{H}weight_names"] = ("[str]", [*names, *EMBEDDING])
    if where == "weight_names alone":
        change[f"{H}inverse_weight_names"] = ("[str]", [])
    run(hybrids.write_gguf(tmp_path / "source", made, **change), tmp_path / "out")
    rotation = load(tmp_path / "out").model.config.rotation
    assert rotation is not None and rotation.plain == frozenset()


def test_what_is_not_listed_is_plain(tmp_path: Path) -> None:
    made = hybrids.make("rotated", layers=4)
    names = hybrids.gguf_metadata(made)["prism.hadamard.weight_names"][1]
    names = [name for name in names if name not in ("output.weight", "blk.1.attn_qkv.weight")]
    change = {f"{H}weight_names": ("[str]", names), f"{H}inverse_weight_names": ("[str]", [])}
    run(hybrids.write_gguf(tmp_path / "source", made, **change), tmp_path / "out")
    rotation = load(tmp_path / "out").model.config.rotation
    assert rotation is not None and rotation.plain == {
        "model.embed_tokens", "lm_head", "model.layers.1.linear_attn.in_proj_qkv"
    }  # fmt: skip
    assert not rotation.rotates("lm_head", 256)
    assert rotation.rotates("model.layers.1.mlp.up_proj", 256)


def test_signs_of_identity_and_layers_by_flags(tmp_path: Path) -> None:
    made = hybrids.make("rotated", layers=4)
    flags = [True, True, True, False]
    change = {f"{H}sign_mode": ("str", "identity"), f"{H}sign_values": None,
              f"{Q}attention__recurrent_layers": ("[bool]", flags),
              f"{Q}full_attention_interval": ("u32", 2)}  # fmt: skip
    run(hybrids.write_gguf(tmp_path / "source", made, **change), tmp_path / "out")
    with Reader(tmp_path / "out" / "model.bin") as reader:
        assert bool((reader.tensor("model.rotation.256.weight") == 1).all())
    net = load(tmp_path / "out").model.config.delta_net
    assert net is not None and net.layers == (0, 1, 2)


def test_tiled_columns_are_whole_groups(tmp_path: Path) -> None:
    """Heads of 64 columns cannot be put in order where 128 share a scale."""
    made = hybrids.make("rotated", layers=4)
    made.signs = {}
    file = hybrids.gguf_file(dataclasses.replace(made, signs={256: made.codes["lm_head"][0]}))
    stripped = file.replace(b"prism.hadamard.", b"tokenizer.hada.")  # of the same length
    (tmp_path / "file.gguf").write_bytes(stripped)
    with pytest.raises(ConvertError, match="heads of 64") as error:
        run(tmp_path / "file.gguf", tmp_path / "out")
    assert error.value.code == "group-scales"


def test_a_rotation_of_another_architecture_is_rejected(tmp_path: Path) -> None:
    made = bonsai.make(True)
    keys = [key(f"prism.hadamard.{name}", "u32", 1) for name in ("version", "block_size")]
    (tmp_path / "file.gguf").write_bytes(bonsai.gguf_file(made, "PQ2_0", keys))
    with pytest.raises(ConvertError, match="prism.hadamard.version"):
        run(tmp_path / "file.gguf", tmp_path / "out")


@pytest.mark.parametrize("form", ["PQ2_0", "mlx"])
def test_inspect_knows_rotations_and_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    source = FORMS[form][0](tmp_path / "source", hybrids.make("rotated", layers=4))
    run(source, tmp_path / "out")
    rows = {row["name"]: row for row in inspect(source)["tensors"]}
    assert rows["model.rotation.256.weight"]["shape"] == [2, 128]
    assert rows["model.layers.0.linear_attn.conv1d.weight"]["shape"] == [4, 640]
    assert main(["inspect", str(tmp_path / "out"), "--program"]) == 0
    assert "delta_net norm=model.layers.0.input_layernorm" in capsys.readouterr().out


# Export -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", hybrids.CASES)
def test_export_writes_what_the_fork_reads(tmp_path: Path, name: str) -> None:
    """Bytes and keys of the independent writer, but for keys that say nothing of the maths."""
    made = hybrids.make(name, layers=4)
    run(hybrids.write_mlx(tmp_path / "source", made), tmp_path / "out")
    file = tmp_path / "out.gguf"
    export_gguf(tmp_path / "out", file, type="pq2_0", tokenizer=False)
    theirs = hybrids.write_gguf(tmp_path / "theirs", made)
    with GgufReader(file) as a, GgufReader(theirs) as b:
        assert set(a.tensors) == set(b.tensors)
        for tensor, info in b.tensors.items():
            assert (a.tensors[tensor].type, a.tensors[tensor].shape) == (info.type, info.shape)
            left, right = a.data(tensor), b.data(tensor)
            if tensor.endswith("ssm_a"):  # exp of float64 and of float32
                left, right = left.view("<f4"), right.view("<f4")
                assert np.allclose(left, right, rtol=2.0**-22, atol=0)
            else:
                assert np.array_equal(left, right), tensor
        free = {"general.file_type", "tokenizer.ggml.eos_token_id"}
        for key, value in b.metadata.items():
            if key not in free and "names" not in key:
                assert np.array_equal(a.metadata[key], value), key
            elif "names" in key:
                assert sorted(a.metadata[key]) == sorted(value), key
    run(file, tmp_path / "again")
    compare(tmp_path / "again", made, 2.0**-20)


def test_export_of_odd_hybrids(tmp_path: Path) -> None:
    """Layers that no interval gives become flags; blocks of several sizes have no words."""
    made = hybrids.make("rotated", layers=4)
    folder = hybrids.write_mlx(tmp_path / "source", made)
    about = json.loads((folder / "config.json").read_text())
    for row in about["modules"]:
        row["block"] = 64 if "down_proj" in row["path"] or "out_proj" in row["path"] else 128
    (folder / "config.json").write_text(json.dumps(about))
    run(folder, tmp_path / "out")
    with pytest.raises(ConvertError, match="one block for all widths") as error:
        export_gguf(tmp_path / "out", tmp_path / "x.gguf", type="pq2_0", tokenizer=False)
    assert error.value.code == "gguf-rotation"
    config = ModelConfig.from_hf(hybrids.converted_config(made))
    assert config.delta_net is not None
    odd = dataclasses.replace(
        config, delta_net=dataclasses.replace(config.delta_net, layers=(0, 1))
    )
    keys = gguf_keys(odd, "qwen35")
    assert keys["qwen35.attention.recurrent_layers"] == ("[bool]", [True, True, False, False])
    assert keys["qwen35.rope.dimension_sections"][1] == [3, 3, 2, 0]


def test_pq2_0_of_other_families(tmp_path: Path) -> None:
    """Groups of 128 in projections, embedding and head, the subnormal scales too."""
    made = bonsai.make(False)
    run(bonsai.write_mlx(tmp_path / "source", made), tmp_path / "out")
    more = ["--type", "pq2_0", "--no-tokenizer"]
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "x.gguf"), *more]) == 0
    theirs = tmp_path / "theirs.gguf"
    theirs.write_bytes(bonsai.gguf_file(made, "PQ2_0"))
    with GgufReader(tmp_path / "x.gguf") as a, GgufReader(theirs) as b:
        for tensor, info in b.tensors.items():
            assert a.tensors[tensor].type == info.type
            assert np.array_equal(a.data(tensor), b.data(tensor)), tensor


def test_decays_must_be_below_zero(tmp_path: Path) -> None:
    """ssm_a is -exp(A_log)."""
    made = hybrids.make("rotated", layers=4)
    made.dense["model.layers.1.linear_attn.A_log"][2] = -200  # whose exp float32 has as 0
    with pytest.raises(ConvertError, match="below 0") as error:
        run(hybrids.write_gguf(tmp_path / "source", made), tmp_path / "out")
    assert error.value.code == "gguf-values"
    run(hybrids.write_mlx(tmp_path / "folder", made), tmp_path / "out")
    with Reader(tmp_path / "out" / "model.bin") as reader:
        assert reader.tensor("model.layers.1.linear_attn.A_log")[2] == -200
