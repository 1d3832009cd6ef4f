"""What lies beside a model and is not needed: it converts, to the same bytes as without it.

The files and keys are those of the programs that write models (helpers/beside.py); what could
change the maths stays rejected.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import beside
import bonsai
import hybrids
from bitnet_ops.config import ModelConfig, UnsupportedModelError
from bitnet_ops.conversions import resolve
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.convert.report import ConvertReport
from bitnet_ops.generate.tokenizer import Tokenizer
from hf_writer import FAMILIES, write_checkpoint

FAMILY = FAMILIES["llama-online"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", FAMILY)


def made(source: Path, **options: Any) -> tuple[bytes, ConvertReport]:
    """model.bin, and the report."""
    out = source.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    report = convert(source, out, **options)
    return (out / "model.bin").read_bytes(), report


# Files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", beside.FILES)
def test_files_of_every_writer(source: Path, tmp_path: Path, writer: str) -> None:
    plain, before = made(source)
    beside.write(source, writer)
    same, after = made(source)
    assert same == plain and after.files == before.files and after.remarks == before.remarks
    found = resolve(source, cache=tmp_path / "cache")  # a folder that is loaded
    assert found.source == source and found.file.read_bytes() == plain


def index(contents: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        text = contents if isinstance(contents, str) else json.dumps(contents)
        (folder / "model.safetensors.index.json").write_text(text)

    return write


def total(size: int | None) -> Callable[[Path], None]:
    """The index with another `total_size`, or without its metadata."""

    def write(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        stated = json.loads(path.read_text())
        stated["metadata"]["total_size"] = size
        if size is None:
            del stated["metadata"]
        path.write_text(json.dumps(stated))

    return write


SHARD = "model-00001-of-00002.safetensors"
INDICES: dict[str, tuple[int, Callable[[Path], None]]] = {
    "of mlx-lm": (1, lambda folder: beside.write_index(folder, total_parameters=7)),
    "of shards that are gone": (1, index({"weight_map": {"model.norm.weight": SHARD}})),
    "of other tensors": (1, index({"weight_map": {"a": "model.safetensors"}})),
    "of no JSON": (1, index("{")),
    "a pointer": (1, index("version https://git-lfs.github.com/spec/v1\n")),
    "without metadata": (2, total(None)),
    "with another size": (2, total(1)),
    "without a size": (2, total(0)),
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_says_where_tensors_are_and_nothing_else(tmp_path: Path, name: str) -> None:
    shards, change = INDICES[name]
    source = write_checkpoint(tmp_path / "source", FAMILY, shards=shards)
    plain, _ = made(source)
    change(source)
    assert made(source)[0] == plain


def test_pickles_may_have_their_index_too(source: Path) -> None:
    plain, _ = made(source)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin")
    map_ = dict.fromkeys(tensors, "pytorch_model.bin")
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": map_}))
    assert made(source, allow_pickle=True)[0] == plain


def test_weights_that_a_manifest_says_are_rotated_are_rejected(source: Path) -> None:
    (source / "hadamard_packing.json").write_text('{"kind": "hadamard-weight-fold"}')
    with pytest.raises(ConvertError, match="matrices are rotated; convert the GGUF") as error:
        made(source)
    assert error.value.code == "folded"


def test_a_tower_in_other_bits_is_left_out(tmp_path: Path) -> None:
    """mlx-vlm quantises it by options of its own."""
    model = hybrids.make("plain", layers=4)
    plain, _ = made(hybrids.write_mlx(tmp_path / "plain", model))
    name = "vision_tower.blocks.0.attn.qkv"
    options = {"bits": 2, "group_size": 128, "mode": "affine",
               name: {"bits": 8, "group_size": 64}, "vision_tower.merger": False}  # fmt: skip
    parts = {f"{name}.weight": torch.zeros(8, 16, dtype=torch.uint32).numpy(),
             f"{name}.scales": torch.ones(8, 1).half().numpy(),
             f"{name}.biases": torch.ones(8, 1).half().numpy()}  # fmt: skip
    source = hybrids.write_mlx(
        tmp_path / "mixed", model, quantization=options, quantization_config=options, **parts
    )
    assert made(source)[0] == plain


# Keys of config.json ------------------------------------------------------------------------------

SAMPLING = {"do_sample": True, "eos_token_id": [319, 300], "top_k": 20, "temperature": 1.0}
PASSED: dict[str, dict[str, Any]] = {
    "a tower that is there": {"language_model_only": False},
    "a tower that is not": {"language_model_only": True},
    "sampling": {"generation_config": SAMPLING},
    "parts of a package": {"components": {"text": True, "vision": True, "mtp": False}},
    "somebody's notes": {"custom_prism_metadata": {"must": "survive"}, "quantized_by": "them"},
}


@pytest.mark.parametrize("name", PASSED)
def test_keys_beside_a_decoders_config(tmp_path: Path, name: str) -> None:
    source = hybrids.write_unpacked(
        tmp_path / "source", hybrids.make("plain-tied", layers=4), nested=True
    )
    plain, before = made(source)
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | PASSED[name]))
    same, after = made(source)
    assert same == plain
    new = [remark for remark in after.remarks if remark not in before.remarks]
    known = {"language_model_only", "generation_config"}
    named = ", ".join(sorted(PASSED[name].keys() - known))
    assert new == ([f"keys of config.json beside text_config not read: {named}"] if named else [])


HYBRID = hybrids.make("plain", layers=4)
STATED = hybrids.text_config(HYBRID)
OUTER: dict[str, tuple[dict[str, Any], str | None]] = {
    "what mlx-lm has put there": ({**SAMPLING, "transformers_version": "5.8.0.dev0"}, None),
    "what the decoder has too": ({"hidden_size": 256, "head_dim": 64, "vocab_size": 321}, None),
    "what says nothing": ({"attention_bias": False, "use_cache": False, "mtp_depth": None}, None),
    "another base": ({"rope_theta": 5.0}, "rope_theta to stand in text_config"),
    "a cap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping to stand in text_config"),
    "biases": ({"qkv_bias": True}, "qkv_bias to stand in text_config"),
    "windows": ({"sliding_window": 64}, "sliding_window to stand in text_config"),
}


@pytest.mark.parametrize("name", OUTER)
def test_keys_that_would_mean_something_must_stand_inside(name: str) -> None:
    keys, message = OUTER[name]
    nested = hybrids.nested_config(HYBRID)
    if message is None:
        found = ModelConfig.from_hf(nested | keys)
        assert found == ModelConfig.from_hf(nested)
    else:
        with pytest.raises(UnsupportedModelError, match=message):
            ModelConfig.from_hf(nested | keys)


@pytest.mark.parametrize("where", ["text_config", "flat"])
def test_a_decoders_own_keys_are_all_known(where: str) -> None:
    """An unknown one may change the maths."""
    config = STATED | {"residual_in_fp16": True}
    if where == "text_config":
        config = hybrids.nested_config(HYBRID) | {"text_config": config}
    with pytest.raises(UnsupportedModelError, match="residual_in_fp16 to be absent"):
        ModelConfig.from_hf(config)


def test_every_key_of_transformers_own_classes_is_known() -> None:
    import transformers

    keys = transformers.GenerationConfig().to_dict() | {"generation_config": SAMPLING}
    config = {k: v for k, v in keys.items() if k not in STATED} | STATED
    assert ModelConfig.from_hf(config) == ModelConfig.from_hf(STATED)


# Chat templates -----------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"


def templates(folder: Path, **files: Any) -> None:
    """jinja, config, json: the template in one of three files."""
    if "jinja" in files:
        (folder / "chat_template.jinja").write_text(files["jinja"])
    if "config" in files:
        path = folder / "tokenizer_config.json"
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"chat_template": files["config"]})
        )
    if "json" in files:
        (folder / "chat_template.json").write_text(files["json"])


OLD = json.dumps({"chat_template": TEMPLATE})
SPELLINGS: dict[str, tuple[dict[str, Any], str | None]] = {
    "in chat_template.json": ({"json": OLD}, TEMPLATE),
    "in chat_template.jinja": ({"json": OLD, "jinja": "new"}, "new"),
    "in tokenizer_config.json": ({"json": OLD, "config": "own"}, "own"),
    "several, named": (
        {"config": [{"name": "default", "template": "own"}, {"name": "tool_use", "template": "t"}]},
        "own",
    ),
    "in both": ({"config": "own", "jinja": "new"}, "new"),
    "no JSON": ({"json": "{"}, None),
    "no text": ({"json": '{"chat_template": 1}'}, None),
}


@pytest.mark.parametrize(
    "name, kind", [*((name, "folder") for name in SPELLINGS), ("in chat_template.json", "gguf")]
)
def test_the_chat_template_is_found_where_it_lies(
    source: Path, tmp_path: Path, name: str, kind: str
) -> None:
    files, expected = SPELLINGS[name]
    templates(source, **files)
    if kind == "folder":
        _, report = made(source)
    else:
        file = tmp_path / "model.gguf"
        file.write_bytes(bonsai.gguf_file(bonsai.make(True), "PQ2_0"))
        _, report = made(file, tokenizer=source)
    assert Tokenizer.from_dir(tmp_path / "out").chat_template == expected
    told = any("chat_template.json" in remark for remark in report.remarks)
    assert told == (set(files) == {"json"})


def test_further_templates_are_named(source: Path) -> None:
    templates(source, jinja=TEMPLATE)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    _, report = made(source)
    assert any("additional_chat_templates is not read" in remark for remark in report.remarks)


# GGUF ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["mmproj-F16.gguf", "model-mmproj-Q8_0.gguf", "imatrix.gguf", "mtp-model.gguf", "._model.gguf",
     "model-00002-of-00002.gguf"],
)  # fmt: skip
def test_the_model_among_gguf_files(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model-00001-of-00002.gguf").write_bytes(bonsai.gguf_file(bonsai.make(True), "PQ2_0"))
    (folder / name).write_bytes(b"GGUF")
    found = resolve(folder, cache=tmp_path / "cache")
    assert found.source == folder / "model-00001-of-00002.gguf"
