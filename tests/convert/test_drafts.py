"""Draft heads: every form of their files against the fixture of helpers/mtp.py."""

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
from safetensors.torch import save_file

import hybrids
import mtp
from bitnet_ops import ops
from bitnet_ops.config.draft import DraftConfig
from bitnet_ops.config.draft_shapes import draft_shapes
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.convert.report import ConvertReport
from bitnet_ops.dummy import model as dummy
from bitnet_ops.dummy.configs import CONFIGS
from bitnet_ops.formats.sglbitnt import Reader
from bitnet_ops.language_model import load
from bitnet_ops.loading.draft import read_draft_head
from hybrids import Hybrid
from mtp import LAYER, Head


@functools.cache
def trunk(name: str) -> Hybrid:
    return hybrids.make(name, layers=4)


@functools.cache
def head_of(name: str) -> Head:
    return mtp.make(trunk(name))


# form -> (what writes it, the trunk, what its tensors stand for)
Values = Callable[[Hybrid, Head], dict[str, np.ndarray]]


def stored(dtype: torch.dtype) -> Values:
    """Of matrices and norms in a dtype; norms are raised by 1 behind it."""

    def values(made: Hybrid, head: Head) -> dict[str, np.ndarray]:
        found = {
            n: torch.from_numpy(v).to(dtype).double().numpy() for n, v in head.matrices.items()
        }
        found |= {n: torch.from_numpy(v).to(dtype).double().numpy() + 1
                  for n, v in head.norms.items()}  # fmt: skip
        return {f"{name}.weight": value for name, value in found.items()}

    return values


def mlx(bits: int) -> Values:
    def values(made: Hybrid, head: Head) -> dict[str, np.ndarray]:
        found = mtp.plain(head)
        for name, matrix in head.matrices.items():
            plain = matrix.astype(np.float16).astype(np.float64)
            quantised = bits and name != "mtp.fc"
            found[f"{name}.weight"] = mtp.mlx_values(matrix, bits) if quantised else plain
        return found

    return values


SIDECAR = "mtp/weights.safetensors"
FORMS: dict[str, tuple[Callable[..., Path], str, Values]] = {
    "nested": (mtp.write_hf, "plain", stored(torch.float32)),
    "nested-bf16": (partial(mtp.write_hf, dtype=torch.bfloat16), "plain-tied",
                    stored(torch.bfloat16)),
    "flat": (partial(mtp.write_hf, nested=False), "plain", stored(torch.float32)),
    "model.mtp": (partial(mtp.write_hf, nested=False, prefix="model."), "plain-tied",
                  stored(torch.float32)),
    "language_model.mtp": (partial(mtp.write_hf, prefix="model.language_model."), "plain",
                           stored(torch.float32)),
    "bundle": (mtp.write_bundle, "rotated", mtp.gguf_values),
    "bundle-rotated": (partial(mtp.write_bundle, rotated=True), "rotated",
                       partial(mtp.gguf_values, rotated=True)),
    "bundle-square": (partial(mtp.write_bundle, rotated=True, kind="PTQ1_0"), "square",
                      partial(mtp.gguf_values, rotated=True)),
    "bundle-plain": (partial(mtp.write_bundle, kind="Q2_0"), "plain-tied", mtp.gguf_values),
    "mlx": (mtp.write_mlx, "rotated", mlx(0)),
    "mlx-4": (partial(mtp.write_mlx, bits=4), "plain", mlx(4)),
    "mlx-8": (partial(mtp.write_mlx, bits=8, place=SIDECAR), "square", mlx(8)),
    "mlx-moved": (partial(mtp.write_mlx, place=SIDECAR), "rotated", mlx(0)),
    "mlx-raw": (partial(mtp.write_mlx, raw_norms=True), "plain", mlx(0)),
}  # fmt: skip


def run(source: Path, out: Path, **options: Any) -> ConvertReport:
    if source.suffix == ".gguf":
        options = {"tokenizer": "none", **options}
    return convert(source, out, **options)


def drafted(folder: Path) -> tuple[DraftConfig, dict[str, np.ndarray]]:
    """What the head in a model file stands for, float64."""
    found = read_draft_head(folder)
    assert found is not None
    values = {}
    for name, value in found[1].items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == torch.float32
            values[name] = value.double().numpy()
            continue
        rows, columns = value.out_features, value.in_features
        codes = ops.unpack(value.weight, columns).double().numpy()
        size = 128 if columns % 384 == 0 else 64
        assert value.group_size == size and value.scale.dtype == torch.float32
        digits = codes * np.repeat(value.scale.double().numpy(), size, axis=1)
        values[name] = digits.reshape(rows, 3, -1).sum(axis=1)
    return found[0], values


def compare(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Norms to the last bit of float32, matrices as 27 levels of their groups."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        if value.ndim == 1:
            assert np.array_equal(found[name].astype(np.float32), value.astype(np.float32)), name
            continue
        size = 128 if value.shape[1] % 128 == 0 else 64
        steps = np.abs(value).reshape(len(value), -1, size).max(axis=2) / 13
        step = np.repeat(steps, size, axis=1)
        off = np.abs(found[name] - value)
        assert (off <= step * (0.5 + 1e-4)).all(), name  # to the nearest level, ties to any
        level = found[name] / step
        assert (np.abs(level - np.rint(level)) < 1e-4).all() and (np.abs(level) < 13.5).all(), name


def compare_but(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], zeros: str) -> None:
    """The same, but for one matrix of zeros, whose groups have no step."""
    assert not found.pop(zeros).any() and not expected.pop(zeros).any()
    compare(found, expected)


def trunk_bytes(folder: Path) -> dict[str, bytes]:
    with Reader(folder / "model.bin") as reader:
        return {n: bytes(reader.memory(n)) for n in reader.tensors if not n.startswith("mtp.")}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(6)
def test_a_head_is_taken_without_asking(tmp_path: Path, form: str) -> None:
    write, name, values = FORMS[form]
    made, head = trunk(name), head_of(name)
    source = write(tmp_path / "source", made, head)
    report = run(source, tmp_path / "out")
    config, found = drafted(tmp_path / "out")
    compare(found, values(made, head))
    rotated = mtp.rotated_names(made, head) if form in ("bundle-rotated", "bundle-square") else []
    origin = "the file" if source.suffix == ".gguf" else "the checkpoint"
    assert config == DraftConfig(made.sizes.inter, rotated=tuple(rotated), origin=origin)
    said = [remark for remark in report.remarks if "draft" in remark]
    assert len(said) == (2 if form == "mlx-raw" else 1)
    assert said[-1].startswith(f"a draft head, from {origin}: ")
    assert report.tensors == len(hybrids.converted(made)) + 15
    # the text model is the same one without the head, to the bit, and loads as ever
    run(source, tmp_path / "without", draft=False)
    assert trunk_bytes(tmp_path / "out") == trunk_bytes(tmp_path / "without")
    assert read_draft_head(tmp_path / "without") is None
    loaded, plain = (load(tmp_path / folder).model for folder in ("out", "without"))
    assert loaded.config == plain.config


# Heads of base models -----------------------------------------------------------------------------

# base -> what writes it over the trunk "plain", and what its tensors stand for
BASES: dict[str, tuple[Callable[..., Path], Values]] = {
    "folder": (mtp.write_base, stored(torch.bfloat16)),
    "mlx": (mtp.write_mlx, mlx(0)),
    "bundle": (mtp.write_bundle, mtp.gguf_values),
    "head alone": (partial(mtp.write_bundle, alone=True), mtp.gguf_values),
}


@pytest.mark.parametrize("base", BASES)
def test_a_head_is_taken_from_a_base_model(tmp_path: Path, base: str) -> None:
    """Over a source that has none of its own: an MLX package, as its writers leave it."""
    made, head, (write, values) = trunk("plain"), head_of("plain"), BASES[base]
    source = mtp.write_mlx(tmp_path / "source", made, None)
    given = write(tmp_path / "base", made, head)
    report = run(source, tmp_path / "out", draft_from=given)
    config, found = drafted(tmp_path / "out")
    compare(found, values(made, head))
    assert config == DraftConfig(made.sizes.inter, origin=given.name)
    (said,) = [remark for remark in report.remarks if "draft" in remark]
    assert said.startswith(f"a draft head, from {given.name}: ")


def test_of_a_base_in_shards_those_of_the_head_are_enough(tmp_path: Path) -> None:
    made, head = trunk("plain"), head_of("plain")
    base = mtp.write_base(tmp_path / "base", made, head)
    (base / "model-00001-of-00002.safetensors").unlink()
    source = mtp.write_mlx(tmp_path / "source", made, None)
    run(source, tmp_path / "out", draft_from=base)
    compare(drafted(tmp_path / "out")[1], stored(torch.bfloat16)(made, head))
    with pytest.raises(ConvertError, match="shard-missing"):
        run(base, tmp_path / "never")
    (base / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConvertError, match="shard-missing"):
        run(source, tmp_path / "never", draft_from=base)


def test_a_rotated_model_takes_a_head_that_is_not_rotated(tmp_path: Path) -> None:
    """As grafts of the community are: the bundle's own list says nothing of such a head."""
    made = trunk("rotated")
    plain = dataclasses.replace(made, sizes=dataclasses.replace(made.sizes, block=0), signs={})
    base = mtp.write_base(tmp_path / "base", plain, head_of("rotated"))
    source = hybrids.write_gguf(tmp_path / "source", made)
    run(source, tmp_path / "out", draft_from=base)
    config, found = drafted(tmp_path / "out")
    compare(found, stored(torch.bfloat16)(made, head_of("rotated")))
    assert config.rotated == ()


def test_a_rotated_head_joins_a_model_of_the_same_rotation_alone(tmp_path: Path) -> None:
    made, head = trunk("rotated"), head_of("rotated")
    base = mtp.write_bundle(tmp_path / "base", made, head, rotated=True)
    package = hybrids.write_mlx(tmp_path / "package", made)
    run(package, tmp_path / "out", draft_from=base)
    config, found = drafted(tmp_path / "out")
    compare(found, mtp.gguf_values(made, head, rotated=True))
    assert config.rotated == tuple(mtp.rotated_names(made, head))
    others = dataclasses.replace(made, signs={w: -s for w, s in made.signs.items()})
    other = hybrids.write_mlx(tmp_path / "other", others)
    with pytest.raises(
        ConvertError, match="rotated with the model's signs of width 256, got others"
    ):
        run(other, tmp_path / "never", draft_from=base)
    unrotated = hybrids.write_mlx(tmp_path / "unrotated", hybrids.make(ALIKE, layers=4))
    with pytest.raises(ConvertError, match="beside a model that does not rotate them"):
        run(unrotated, tmp_path / "never", draft_from=base)
    assert not (tmp_path / "never").exists()


ALIKE = dataclasses.replace(hybrids.CASES["rotated"], block=0)  # but for the rotation


def test_a_model_file_gives_and_takes_heads_bit_for_bit(tmp_path: Path) -> None:
    made, head = trunk("plain"), head_of("plain")
    run(mtp.write_hf(tmp_path / "source", made, head), tmp_path / "out", draft_feed="before")
    run(tmp_path / "out", tmp_path / "copy")
    run(tmp_path / "out", tmp_path / "bare", draft=False)
    run(tmp_path / "bare", tmp_path / "again", draft_from=tmp_path / "out")
    run(tmp_path / "out", tmp_path / "fed", draft_feed="after")
    held = [read_draft_head(tmp_path / name) for name in ("out", "copy", "again", "fed")]
    first, *others = [found for found in held if found is not None]
    assert first[0].feed == "before" and len(others) == 3
    for (config, tensors), feed, origin in zip(
        others, ("before", "before", "after"), ("the checkpoint", "out", "the checkpoint"),
        strict=True,
    ):  # fmt: skip
        assert config == dataclasses.replace(first[0], feed=feed, origin=origin)
        for name, value in tensors.items():
            expected = first[1][name]
            for part in ("weight", "scale") if not isinstance(value, torch.Tensor) else ():
                assert torch.equal(getattr(value, part), getattr(expected, part)), name
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, expected), name
    assert read_draft_head(tmp_path / "bare") is None


@pytest.mark.parametrize("write", [mtp.write_base, mtp.write_bundle])
def test_a_base_of_another_model_is_rejected(tmp_path: Path, write: Callable[..., Path]) -> None:
    made = trunk("plain")
    source = mtp.write_mlx(tmp_path / "source", made, None)

    def rejected(base: Path, message: str, code: str = "draft-pair") -> None:
        with pytest.raises(ConvertError, match=re.escape(message)) as raised:
            run(source, tmp_path / "out", draft_from=base)
        assert raised.value.code == code and "\n" not in str(raised.value)
        assert not (tmp_path / "out").exists()

    for number, (change, message) in enumerate({
        "hidden": "expected hidden_size 256 in {}, as this model's, got 512",
        "heads": "expected num_attention_heads 4 in {}, as this model's, got 2",
        "vocab": "expected vocab_size 321 in {}, as this model's, got 322",
    }.items()):  # fmt: skip
        value = {"hidden": 512, "heads": 2, "vocab": 322}[change]
        other = hybrids.make(dataclasses.replace(made.sizes, **{change: value}), layers=4)
        base = write(tmp_path / f"base{number}", other, mtp.make(other))
        rejected(base, message.format(base.name))
    head = mtp.make(made)
    del head.norms["mtp.norm"], head.matrices["mtp.fc"]
    if write is mtp.write_base:
        rejected(write(tmp_path / "part", made, head), "got no mtp.fc.weight, mtp.norm.weight",
                 "draft-tensors")  # fmt: skip


def test_a_base_without_a_head_is_rejected(tmp_path: Path) -> None:
    made = trunk("plain")
    source = mtp.write_mlx(tmp_path / "source", made, None)
    plain = hybrids.write_unpacked(tmp_path / "flat", made)
    bases = [plain, hybrids.write_gguf(tmp_path / "g", made), tmp_path / "nowhere"]
    run(bases[0], tmp_path / "converted")
    codes = ["draft-none", "draft-none", "draft-base", "draft-none"]
    for base, code in zip([*bases, tmp_path / "converted"], codes, strict=True):
        with pytest.raises(ConvertError, match="expected a (layer that|base model)") as raised:
            run(source, tmp_path / "out", draft_from=base)
        assert raised.value.code == code
    assert not (tmp_path / "out").exists()


def write_tokens(folder: Path, texts: list[str]) -> None:
    from tokenizers import Tokenizer, models

    vocabulary = {text: number for number, text in enumerate(texts)}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(folder / "tokenizer.json"))


def test_tokens_are_compared_one_by_one(tmp_path: Path) -> None:
    made, head = trunk("plain"), head_of("plain")
    source = mtp.write_mlx(tmp_path / "source", made, None)
    base = mtp.write_base(tmp_path / "base", made, head)
    texts = [chr(0x4E00 + i) for i in range(40)]
    write_tokens(source, texts)
    run(source, tmp_path / "one", draft_from=base)  # where one has none, nothing is known
    write_tokens(base, texts[:30])  # rows that nobody names are no difference
    run(source, tmp_path / "two", draft_from=base)
    write_tokens(base, [*texts[:7], "x", *texts[8:30]])
    with pytest.raises(ConvertError, match="draft-vocabulary") as raised:
        run(source, tmp_path / "three", draft_from=base)
    assert re.search("as 7.*got 'x', and 1 tokens that differ", str(raised.value))
    listed = {"tokenizer__ggml__tokens": ("[str]", [*texts[:9], "y", *texts[10:]])}
    bundle = mtp.write_bundle(tmp_path / "bundle", made, head, **listed)
    with pytest.raises(ConvertError, match="as 9.*got 'y'"):
        run(source, tmp_path / "three", draft_from=bundle)
    # types of GGUF: 5 is a row that no token has
    kinds = {"tokenizer__ggml__token_type": ("[i32]", [1] * 9 + [5] + [1] * 30)}
    unused = mtp.write_bundle(tmp_path / "unused", made, head, **listed, **kinds)
    run(source, tmp_path / "four", draft_from=unused)
    assert read_draft_head(tmp_path / "four") is not None


def test_a_head_that_was_trained_ternary_keeps_its_values_in_one_digit(tmp_path: Path) -> None:
    made, head = trunk("plain"), head_of("plain")
    ternary = Head({}, head.norms)
    for name, matrix in head.matrices.items():
        groups = matrix.reshape(len(matrix), -1, 128)
        size = np.abs(groups).mean(axis=2, keepdims=True)
        ternary.matrices[name] = (np.clip(np.rint(groups / size), -1, 1) * size).reshape(
            matrix.shape
        )
    run(mtp.write_hf(tmp_path / "source", made, ternary), tmp_path / "out", verify=True)
    found = read_draft_head(tmp_path / "out")
    assert found is not None and found[0].digits == 1
    for name, matrix in ternary.matrices.items():
        stored_matrix = found[1][f"{name}.weight"]
        assert not isinstance(stored_matrix, torch.Tensor)
        assert np.array_equal(stored_matrix.dequantize().numpy(), matrix)
    run(tmp_path / "out", tmp_path / "copy")
    copied = read_draft_head(tmp_path / "copy")
    assert copied is not None and copied[0].digits == 1
    ternary.matrices["mtp.fc"] = head.matrices["mtp.fc"]  # one that is not
    run(mtp.write_hf(tmp_path / "mixed", made, ternary), tmp_path / "three")
    compare(drafted(tmp_path / "three")[1], mtp.plain(ternary))


def test_a_head_of_a_model_with_sub_norms_has_them(tmp_path: Path) -> None:
    """Distilled ones; a model without norms that multiply by 1 + w takes them as they lie."""
    file = dummy.write("tiny-draft", tmp_path / "trunk")
    model = dummy.config("tiny-draft")
    base = tmp_path / "base"
    base.mkdir()
    shapes = draft_shapes(model, 448)
    assert f"{LAYER}self_attn.attn_sub_norm.weight" in shapes
    generator = torch.Generator().manual_seed(3)
    tensors = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    save_file(tensors, base / "model.safetensors")
    config = {k: v for k, v in CONFIGS["tiny"].items() if k != "bitnet_ops"}
    (base / "config.json").write_text(json.dumps(config))
    run(file.parent, tmp_path / "out", draft_from=base)
    config_found, found = drafted(tmp_path / "out")
    compare(found, {name: tensor.double().numpy() for name, tensor in tensors.items()})
    assert config_found == DraftConfig(448, origin="base")


# Heads that stay behind ---------------------------------------------------------------------------

Edit = Callable[[Path, Hybrid, Head], Path]


def hf_with(head: Callable[[Head], None] | None = None, **options: Any) -> Edit:
    def write(folder: Path, made: Hybrid, given: Head) -> Path:
        changed = Head(dict(given.matrices), dict(given.norms))
        if head is not None:
            head(changed)
        return mtp.write_hf(folder, made, changed, **options)

    return write


def bundle_with(**options: Any) -> Edit:
    def write(folder: Path, made: Hybrid, given: Head) -> Path:
        return mtp.write_bundle(folder, made, given, **options)

    return write


def narrow(head: Head) -> None:
    for name in ("gate_proj", "up_proj"):
        head.matrices[f"{LAYER}mlp.{name}"] = head.matrices[f"{LAYER}mlp.{name}"][:100]
    head.matrices[f"{LAYER}mlp.down_proj"] = head.matrices[f"{LAYER}mlp.down_proj"][:, :100].copy()


def turn_fc(head: Head) -> None:
    head.matrices["mtp.fc"] = head.matrices["mtp.fc"].T.copy()


def lose_norm(head: Head) -> None:
    del head.norms[f"{LAYER}self_attn.q_norm"]


EMPTY = torch.zeros(4)
LEFT: dict[str, tuple[Edit, str]] = {
    "half a head": (hf_with(lose_norm), f"got no {LAYER}self_attn.q_norm.weight"),
    "another shape": (hf_with(turn_fc), "mtp.fc.weight of shape [256, 512], got [512, 256]"),
    "odd columns": (hf_with(narrow), f"multiple of 64, got 100 in {LAYER}mlp.down_proj.weight"),
    "two layers": (hf_with(more={"mtp.layers.1.input_layernorm.weight": EMPTY}),
                   "expected one layer that drafts tokens, got 2"),
    "two layers stated": (hf_with(mtp_num_hidden_layers=2), "got 2 by config.json"),
    "an embedding": (hf_with(more={"mtp.embed_tokens.weight": EMPTY}), "an embedding of its own"),
    "an embedding stated": (hf_with(mtp_use_dedicated_embeddings=True),
                            "mtp_use_dedicated_embeddings true in config.json"),
    "experts": (hf_with(more={"mtp.layers.0.mlp.experts.0.up_proj.weight": EMPTY}),
                "a mixture of experts"),
    "whole numbers": (hf_with(more={"mtp.norm.weight": torch.zeros(256, dtype=torch.int32)}),
                      "expected mtp.norm.weight as F32, BF16 or F16, got I32"),
    "GGUF embedding": (bundle_with(more=[("blk.4.nextn.embed_tokens.weight", (4,), 0, bytes(16))]),
                       "an embedding of its own: mtp.nextn.embed_tokens.weight"),
    "GGUF head": (bundle_with(more=[("blk.4.nextn.shared_head_head.weight", (4,), 0, bytes(16))]),
                  "an output head of its own"),
    "GGUF layers": (bundle_with(qwen35__block_count=("u32", 6),
                                qwen35__nextn_predict_layers=("u32", 2)), "got 2"),
    "GGUF norm": (bundle_with(without=("blk.4.attn_q_norm.weight",)),
                  f"got no {LAYER}self_attn.q_norm.weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_a_head_of_another_kind_stays_behind(tmp_path: Path, case: str) -> None:
    """With one remark that says why; who asks for it by name gets an error."""
    write, reason = LEFT[case]
    made = trunk("plain")
    source = write(tmp_path / "source", made, head_of("plain"))
    report = run(source, tmp_path / "out")
    (said,) = [remark for remark in report.remarks if remark.startswith("no draft head")]
    assert reason in said and "\n" not in said
    assert any("left out" in r and "of layers that draft tokens" in r for r in report.remarks)
    assert read_draft_head(tmp_path / "out") is None
    assert load(tmp_path / "out").model.config.vocab_size == 321
    with pytest.raises(ConvertError, match=re.escape(reason)) as raised:
        run(source, tmp_path / "never", draft_from=source)
    assert raised.value.code.startswith("draft-") and not (tmp_path / "never").exists()
    with pytest.raises(ConvertError, match="a draft head for --draft-feed") as raised:
        run(source, tmp_path / "never", draft_feed="before")
    assert raised.value.code == "draft-feed"


def test_an_mlp_of_another_width_is_the_head_s_own(tmp_path: Path) -> None:
    made = trunk("rotated")
    head = mtp.make(made, inter=512)
    run(mtp.write_bundle(tmp_path / "source", made, head), tmp_path / "out")
    config, found = drafted(tmp_path / "out")
    assert config == DraftConfig(512, origin="the file") and made.sizes.inter == 384
    compare(found, mtp.gguf_values(made, head))


def test_a_rotation_that_the_model_does_not_have_stays_behind(tmp_path: Path) -> None:
    """Of a width without signs, of fc, of unrotated models' bundles there is none."""
    made, head = trunk("rotated"), head_of("rotated")
    _, names = hybrids.gguf_metadata(made)["prism.hadamard.weight_names"]

    def listing(*inner: str) -> dict[str, Any]:
        own = [f"blk.4.{name}.weight" for name in inner]
        return {"prism__hadamard__weight_names": ("[str]", [*names, *own])}

    sources = {
        "names of matrices of the file that may be rotated": mtp.write_bundle(
            tmp_path / "fc", made, head, **listing("nextn.eh_proj")
        ),
        "with the width 512 of a listed matrix": mtp.write_bundle(
            tmp_path / "width", made, mtp.make(made, inter=512), **listing("ffn_down")
        ),
    }
    for number, (reason, source) in enumerate(sources.items()):
        report = run(source, tmp_path / f"out{number}")
        (said,) = [remark for remark in report.remarks if remark.startswith("no draft head")]
        assert reason in said and "prism.hadamard." in said
        assert load(tmp_path / f"out{number}").model.config.rotation is not None


def test_a_type_that_another_package_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is missing the model converts all the same, and says what to install."""
    made, head = trunk("plain"), head_of("plain")
    other = ("blk.4.ffn_up.weight", (384, 256), 2, bytes(384 * 256 // 32 * 18))  # Q4_0
    source = mtp.write_bundle(
        tmp_path / "source", made, head, without=("blk.4.ffn_up.weight",), last=[other]
    )
    run(source, tmp_path / "out")
    expected = mtp.gguf_values(made, head)
    expected[f"{LAYER}mlp.up_proj.weight"] *= 0
    compare_but(drafted(tmp_path / "out")[1], expected, f"{LAYER}mlp.up_proj.weight")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report = run(source, tmp_path / "bare")
    (said,) = [remark for remark in report.remarks if remark.startswith("no draft head")]
    assert "got Q4_0, which the gguf package reads (pip install" in said


def test_a_norm_that_a_file_lacks_is_that_of_the_output(tmp_path: Path) -> None:
    """As llama.cpp reads a block without nextn.shared_head_norm."""
    made, head = trunk("plain"), head_of("plain")
    source = mtp.write_bundle(
        tmp_path / "source", made, head, without=("blk.4.nextn.shared_head_norm.weight",)
    )
    run(source, tmp_path / "out")
    expected = mtp.gguf_values(made, head)
    expected["mtp.norm.weight"] = made.dense["model.norm.weight"].astype(np.float64) + 1
    compare(drafted(tmp_path / "out")[1], expected)


def test_a_package_without_its_head_says_where_one_is(tmp_path: Path) -> None:
    source = mtp.write_mlx(tmp_path / "source", trunk("rotated"), None)
    report = run(source, tmp_path / "out")
    (said,) = [remark for remark in report.remarks if "draft" in remark]
    assert (
        "config.json speaks of a layer that drafts tokens" in said and "--draft-from BASE" in said
    )
    assert not any("draft" in r for r in run(source, tmp_path / "no", draft=False).remarks)


def test_damaged_values_are_rejected_and_leave_nothing(tmp_path: Path) -> None:
    made, head = trunk("plain"), head_of("plain")
    for name in ("mtp.fc", "mtp.norm"):
        broken = Head(dict(head.matrices), dict(head.norms))
        kind = broken.matrices if name in broken.matrices else broken.norms
        kind[name] = kind[name].copy()
        kind[name].flat[5] = np.nan
        source = mtp.write_hf(tmp_path / name, made, broken)
        with pytest.raises(ConvertError, match="non-finite") as raised:
            run(source, tmp_path / "out")
        assert name in str(raised.value) and not (tmp_path / "out").exists()
        run(source, tmp_path / f"{name}-without", draft=False)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"draft": False, "draft_feed": "after"}, "expected a draft head, or none"),
        ({"draft": False, "draft_from": "base"}, "expected a draft head, or none"),
        ({"draft_feed": "between"}, "expected draft_feed after or before, got 'between'"),
        ({"draft_from": "base", "format_version": 1}, "expected version 2 of model.bin"),
    ],
)
def test_options_of_heads_that_contradict(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    source = mtp.write_hf(tmp_path / "source", trunk("plain"), head_of("plain"))
    with pytest.raises(ConvertError, match=message):
        run(source, tmp_path / "out", **options)
