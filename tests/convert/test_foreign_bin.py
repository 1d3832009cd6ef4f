"""Files of other writers of SGLBITNT: read as they are, rejected where they contradict themselves.

`convert` writes them anew in version 2, bit for bit. The other writer is foreign_bin.py; what the
numbers should be comes from the checkpoint of the same network, converted.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sglbitnt_bytes
from bitnet_ops import load
from bitnet_ops.cli import main
from bitnet_ops.config import UnsupportedModelError
from bitnet_ops.convert import ConvertError, convert, export_gguf
from bitnet_ops.convert.inspect import inspect
from bitnet_ops.formats.sglbitnt import Reader, Writer
from bitnet_ops.loading.model_contents import completed_config
from bitnet_ops.models import TensorError
from bitnet_ops.nn.kv_cache import KVCache
from foreign_bin import KINDS, f32, records, write
from hf_families import CASES
from hf_writer import FAMILIES, config_dict, make_network, write_checkpoint
from isa_control import torch_threads

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The same networks, converted from Hugging Face checkpoints."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp("ours")
            convert(write_checkpoint(folder / "hf", FAMILIES[kind]), folder / "out")
            made[kind] = folder / "out"
        return made[kind]

    return get


def logits(folder: Path) -> torch.Tensor:
    lm = load(folder, head_format="stored")
    return lm.model(TOKENS, KVCache(lm.config, 1, 16, torch.float32))


def answer(folder: Path) -> str:
    return load(folder).generate([3, 1, 4], max_new_tokens=24, ignore_eos=True)


def same_model(one: Path, other: Path) -> None:
    """Equal up to the summation order of bfloat16 and float32 heads."""
    expected, found = logits(one), logits(other)
    assert (expected - found).abs().max() < 1e-5 * expected.abs().max()
    assert answer(one) == answer(other)


# --- loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_such_a_file_loads(
    tmp_path: Path, ours: Callable[[str], Path], kind: str, copies: bool
) -> None:
    folder = write(tmp_path / "theirs", kind, copies=copies)
    with Reader(folder / "model.bin") as reader:
        assert "bitnet_ops" not in reader.config
        extra = [name for name in reader.tensors if name.endswith("_scale")]
        assert len(extra) == (14 if copies else 0)
    same_model(ours(kind), folder)


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        ("bitnet-offline", ("model_type",)),
        ("bitnet-offline", ("model_type", "architectures")),
        ("llama-bitlinear", ("model_type",)),
        ("llama-bitlinear", ("model_type", "architectures")),
    ],
)
def test_a_config_without_model_type(
    tmp_path: Path, ours: Callable[[str], Path], kind: str, without: tuple[str, ...]
) -> None:
    folder = write(tmp_path / "theirs", kind, without=without)
    assert load(folder).config.model_type == FAMILIES[kind].model_type
    same_model(ours(kind), folder)


@pytest.mark.parametrize(
    ("kind", "without", "config"),
    [
        ("bitnet-offline", ("model_type",), {"architectures": ["BitnetForCausalLM"]}),
        ("bitnet-offline", ("model_type",), {"architectures": ["GemmaForCausalLM"]}),
        ("bitnet-offline", ("model_type",), {"architectures": ["BitNetForCausalLM", "X"]}),
        ("bitnet-offline", ("model_type", "architectures", "hidden_act"), {}),
        ("bitnet-offline", ("model_type", "architectures", "rope_theta"), {}),
        ("bitnet-offline", ("model_type", "architectures", "rms_norm_eps"), {}),
        ("bitnet-offline", ("model_type", "architectures"), {"hidden_act": "silu"}),
        ("llama-bitlinear", ("model_type", "architectures"), {"hidden_act": "relu2"}),
    ],
)
def test_no_model_type_is_guessed(
    tmp_path: Path, kind: str, without: tuple[str, ...], config: dict[str, Any]
) -> None:
    folder = write(tmp_path / "theirs", kind, without=without, config=config)
    with pytest.raises(UnsupportedModelError, match="expected model_type one of"):
        load(folder)


def test_each_architecture_is_told_by_its_tensors() -> None:
    layer = "model.layers.0.self_attn."
    rows: list[tuple[list[str], str, str | None]] = [
        ([f"{layer}q_norm.weight"], "silu", None),
        ([f"{layer}q_proj.rms_norm.weight"], "silu", None),
        ([f"{layer}attn_sub_norm.weight", f"{layer[:-10]}mlp.ffn_sub_norm.weight"], "silu", None),
    ]
    for family in (case.family for case in CASES.values()):
        plain = dataclasses.replace(family, spelling="", inner_norms="", architecture=None)
        names = [n if n.endswith(".bias") else f"{n}.weight" for n in make_network(plain)]
        rows.append((names, plain.activation, plain.model_type))
    for spelling in ({"rope_theta": 1e4}, {"rope_parameters": {"rope_theta": 1e4}}):
        for names, act, expected in rows:
            stated: dict[str, Any] = {"hidden_act": act, "rms_norm_eps": 1e-6}
            if expected == "minicpm":  # a Llama by its tensors
                stated["scale_emb"] = 12
            found = completed_config({**stated, **spelling}, names)
            assert found.get("model_type") == expected, names
    kept = {"model_type": "llama", "architectures": ["Qwen3ForCausalLM"]}
    assert completed_config(kept, []) == kept


# --- copies that are none -------------------------------------------------------------------------


def test_a_head_with_other_values(tmp_path: Path) -> None:
    values = make_network(FAMILIES["bitnet-offline"])["model.embed_tokens"].copy()
    values[299, 255] += 1e-3
    other = {"lm_head.weight": f32("lm_head.weight", values)}
    folder = write(tmp_path / "theirs", "bitnet-offline", other=other)
    with pytest.raises(TensorError, match="lm_head.weight to repeat .*tie_word_embeddings false"):
        load(folder)
    with pytest.raises(ConvertError, match="to repeat") as caught:
        convert(folder, tmp_path / "out")
    assert caught.value.code == "bin-tensors" and not (tmp_path / "out").exists()


def test_a_head_of_another_shape(tmp_path: Path) -> None:
    other = {"lm_head.weight": f32("lm_head.weight", np.zeros((300, 128)))}
    with pytest.raises(TensorError, match="lm_head.weight to repeat"):
        load(write(tmp_path / "theirs", "bitnet-offline", other=other))


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("bitnet-offline", lambda s: [1.02 * s], "to repeat the scale of .*q_proj.weight, .* got"),
        ("bitnet-offline", lambda s: [1 / s], "its reciprocal"),
        ("bitnet-offline", lambda s: [s, s], "1 of them, got 2 values"),
        ("bitnet-offline", lambda s: [np.nan], "got nan"),
        ("llama-bitlinear", lambda s: [1.02 * s], "to repeat the scale"),
    ],
)
def test_scales_that_differ(
    tmp_path: Path, kind: str, value: Callable[[float], list[float]], text: str
) -> None:
    stored = make_network(FAMILIES[kind])[Q.removesuffix(".weight")]["stored_scale"]
    other = {f"{Q}_scale": f32(f"{Q}_scale", value(stored))}
    with pytest.raises(TensorError, match=text):
        load(write(tmp_path / "theirs", kind, other=other))


def test_a_copy_rounded_to_bfloat16_is_one(tmp_path: Path) -> None:
    stored = make_network(FAMILIES["bitnet-offline"])[Q.removesuffix(".weight")]["stored_scale"]
    other = {f"{Q}_scale": f32(f"{Q}_scale", [stored * (1 + 2.0**-9)])}
    load(write(tmp_path / "theirs", "bitnet-offline", other=other))


@pytest.mark.parametrize("name", ["model.norm.weight_scale", "lm_head.weight_scale", "odd.weight"])
def test_other_tensors_are_unknown(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "theirs", "bitnet-offline", other={name: f32(name, [1.0])})
    with pytest.raises(TensorError, match=f"unknown: {name}"):
        load(folder)


# --- everything else that reads model files -------------------------------------------------------


def test_inspect_and_export_take_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "theirs", "bitnet-offline", without=("model_type",))
    report = inspect(folder)
    assert report["remarks"] == [] and report["totals"]["packed_tensors"] == 14
    report = export_gguf(folder, tmp_path / "x.gguf")
    assert report.architecture == "bitnet-b1.58"


def test_it_can_be_trained(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from bitnet_ops.training.model import load_for_training

    folder = write(tmp_path / "theirs", "llama-bitlinear", without=("model_type",))
    assert load_for_training(folder).config.model_type == "llama"


# --- convert --------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", [(), ("model_type", "architectures")])
@pytest.mark.parametrize("kind", KINDS)
def test_convert_writes_version_2(
    tmp_path: Path, ours: Callable[[str], Path], kind: str, without: tuple[str, ...]
) -> None:
    folder = write(tmp_path / "theirs", kind, without=without)
    assert main(["convert", str(folder / "model.bin"), str(tmp_path / "out")]) == 0
    family = FAMILIES[kind]
    with Reader(tmp_path / "out" / "model.bin") as reader:
        assert reader.version == 2
        expected = {n for n in records(kind) if not n.endswith("_scale")}
        assert set(reader.tensors) == expected - ({"lm_head.weight"} if family.tied else set())
        made = sglbitnt_bytes.read((folder / "model.bin").read_bytes())
        for name, dtype, _, scale, body in made["tensors"]:
            if name in reader.tensors:
                assert bytes(reader.memory(name)) == body
                found = reader.scales(name).numpy().tobytes() if dtype == 0 else b""
                assert found == scale
        config = dict(reader.config)
    block = config.pop("bitnet_ops")
    assert block["source_mode"] == "version 1" and config["model_type"] == family.model_type
    assert {k: v for k, v in config.items() if k not in without} == {
        k: v for k, v in config_dict(family).items() if k not in without
    }
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["tensors"] == len(expected) - family.tied
    assert any("left out" in remark for remark in report["remarks"])
    same_model(ours(kind), tmp_path / "out")
    assert answer(folder) == answer(tmp_path / "out")


def test_there_and_back_is_the_same_file(tmp_path: Path, ours: Callable[[str], Path]) -> None:
    """Version 2 -> 1 -> 2: the private block, which says where a model comes from, stays."""
    original = ours("llama-bitlinear")
    convert(original, tmp_path / "v1", format_version=1)
    convert(tmp_path / "v1" / "model.bin", tmp_path / "v2")
    with Reader(tmp_path / "v1" / "model.bin") as reader:
        assert reader.version == 1
    made, expected = (f / "model.bin" for f in (tmp_path / "v2", original))
    assert made.read_bytes() == expected.read_bytes()


def test_scales_of_rows_and_groups_are_kept(tmp_path: Path) -> None:
    family = FAMILIES["bitnet-offline"]
    scales: dict[str, torch.Tensor] = {}
    with (
        Reader(write(tmp_path / "a", "bitnet-offline", copies=False) / "model.bin") as reader,
        Writer(tmp_path / "model.bin", config_dict(family), len(reader.tensors)) as writer,
    ):
        for i, (name, info) in enumerate(reader.tensors.items()):
            if not info.packed:
                writer.add_dense(name, reader.tensor(name))
                continue
            n, row = info.shape
            shape = [(n,), (n, row // 32)][i % 2]
            dtype = [torch.float16, torch.float32][i // 2 % 2]
            scales[name] = torch.rand(shape).to(dtype) + 0.5
            group = 128 if len(shape) == 2 else 0
            writer.add_packed(name, reader.tensor(name), scales[name], group_size=group)
    convert(tmp_path / "model.bin", tmp_path / "out")
    with Reader(tmp_path / "out" / "model.bin") as made:
        for name, expected in scales.items():
            assert made.tensors[name].scale_dtype == expected.dtype
            assert torch.equal(made.scales(name), expected.float()), name
    with pytest.raises(ConvertError) as caught:
        convert(tmp_path / "model.bin", tmp_path / "v1", format_version=1)
    assert caught.value.code == "bin-scale_kind" and not (tmp_path / "v1").exists()


def test_a_file_that_leaves_out_neurons_is_to_be_made_again(
    tmp_path: Path, ours: Callable[[str], Path]
) -> None:
    """Earlier converters left out MLP neurons that are always zero, and listed them."""
    with Reader(ours("llama-bitlinear") / "model.bin") as reader:
        block = {**reader.config["bitnet_ops"], "dropped_neurons": [0, 5]}
        config = {**reader.config, "bitnet_ops": block}
        with Writer(tmp_path / "model.bin", config, len(reader.tensors), reader.tensors) as writer:
            for name, info in reader.tensors.items():
                if info.packed:
                    k = info.in_features
                    writer.add_packed(name, reader.tensor(name), reader.scales(name), k)
                else:
                    writer.add_dense(name, reader.tensor(name))
    for read in (load, partial(convert, destination=tmp_path / "out")):
        with pytest.raises(ValueError, match="convert the source again"):
            read(tmp_path / "model.bin")
    assert not (tmp_path / "out").exists()


def test_rejections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "theirs", "llama-bitlinear")
    file, out = folder / "model.bin", tmp_path / "out"
    for option in (["--verify"], ["--assume-online"], ["--lora", "x"], ["--i2s-layout", "b"]):
        assert main(["convert", str(file), str(out), *option]) == 1
        assert "bin-option" in capsys.readouterr().err
    large = {Q: sglbitnt_bytes.tensor(Q.encode(), 0, (256, 64), scale=50.0)}
    suspect = write(tmp_path / "suspect", "bitnet-offline", other=large, copies=False)
    shape = {Q: sglbitnt_bytes.tensor(Q.encode(), 0, (128, 64))}
    wrong = write(tmp_path / "wrong", "bitnet-offline", other=shape, copies=False)
    code_3 = {Q: sglbitnt_bytes.tensor(Q.encode(), 0, (256, 64), b"\xff" * 256 * 64)}
    damaged = write(tmp_path / "damaged", "bitnet-offline", other=code_3, copies=False)
    unknown = write(tmp_path / "odd", "bitnet-offline", config={"model_type": "gemma3"})
    for path, code in (
        (suspect, "scale-sense"),
        (wrong, "shape"),
        (damaged, "bin-invalid_code"),
        (unknown, "unsupported-model"),
        (tmp_path / "none.bin", "source-missing"),
    ):
        with pytest.raises(ConvertError) as caught:
            convert(path, out)
        assert caught.value.code == code and "\n" not in str(caught.value)
        assert not out.exists()
    convert(suspect, out, trust_scales=True)
    with pytest.raises(ConvertError) as caught:
        convert(suspect, out, trust_scales=True)
    assert caught.value.code == "destination-exists"
    convert(file, out, force=True)
    same_model(folder, out)


def test_a_result_that_differs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "theirs", "llama-bitlinear")
    add_dense = Writer.add_dense

    def lossy(self: Writer, name: str, tensor: torch.Tensor) -> None:
        add_dense(self, name, tensor + (1 if name == "model.norm.weight" else 0))

    monkeypatch.setattr(Writer, "add_dense", lossy)
    with pytest.raises(ConvertError, match=r"other bytes in model\.norm\.weight") as caught:
        convert(folder, tmp_path / "out")
    assert caught.value.code == "verification-failed" and not (tmp_path / "out").exists()
