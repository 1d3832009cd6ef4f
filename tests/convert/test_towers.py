"""Towers for images in conversions: from every kind of file, paired, kept, copied, left out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import hybrids
import towers
from bitnet_ops.cli import main
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.convert.diff import diff
from bitnet_ops.convert.gguf_export import export_gguf
from bitnet_ops.convert.inspect import inspect
from bitnet_ops.convert.report import ConvertReport
from bitnet_ops.convert.verify import verify
from bitnet_ops.formats.sglbitnt import Reader
from bitnet_ops.generate.prompt import PromptRows, RowRuns
from bitnet_ops.language_model import load
from bitnet_ops.loading.weights import load_model
from bitnet_ops.models import TensorError
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.vision.config import VisionConfig
from bitnet_ops.vision.tower import VisionError
from bitnet_ops.vision.weights import load_tower, vision_config
from gguf_bytes import key
from hf_families import FAMILIES
from hf_writer import write_checkpoint

MADE = hybrids.make("plain", layers=4)
TOWER = hybrids.tower_sizes(MADE)
VOCAB = MADE.sizes.vocab
IDS = {"image_token_id": VOCAB - 5, "vision_start_token_id": VOCAB - 8,
       "vision_end_token_id": VOCAB - 7}  # fmt: skip
TOLERANCE = 1e-5


def tokens() -> bytes:
    """The vocabulary of a GGUF file with the tokens of images where IDS has them."""
    names = {IDS["image_token_id"]: "<|image_pad|>", IDS["vision_start_token_id"]:
             "<|vision_start|>", IDS["vision_end_token_id"]: "<|vision_end|>"}  # fmt: skip
    return key("tokenizer.ggml.tokens", "[str]", [names.get(i, f"t{i}") for i in range(VOCAB)])


def write_gguf(folder: Path, *, kind: str = "F16", **options: Any) -> Path:
    """A model, and beside it the mmproj file of its tower."""
    file = hybrids.write_gguf(folder, MADE, more=[tokens()], **options)
    towers.write_mmproj(folder / f"mmproj-{kind}.gguf", TOWER, kind)
    return file


def run(source: Path, out: Path, **options: Any) -> ConvertReport:
    if source.suffix == ".gguf":
        options.setdefault("tokenizer", "none")
    return convert(source, out, **options)


@cache
def expected() -> list[torch.Tensor]:
    model = towers.oracle(TOWER)
    return towers.features(model, towers.doubled(towers.pictures(towers.GRIDS)), towers.GRIDS)


def difference(out: Path, against: dict[str, torch.Tensor] | None = None) -> float:
    """Of the features of a conversion and those of the weights `against`."""
    tower = load_tower(out)
    assert tower is not None
    pixels = towers.pictures(towers.GRIDS)
    reference = expected()
    if against is not None:
        model = towers.oracle(TOWER, against)
        reference = towers.features(model, towers.doubled(pixels), towers.GRIDS)
    return towers.difference(tower(pixels, towers.GRIDS), reference)


unpacked = partial(hybrids.write_unpacked, made=MADE, nested=True, tower=TOWER)
FORMS: dict[str, tuple[Callable[..., Path], torch.dtype, float]] = {
    # what writes it, how the file's matrices lie in model.bin, what it rounds features by
    "hf-f32": (partial(unpacked, dtype=torch.float32), torch.float32, TOLERANCE),
    "hf-bf16": (partial(unpacked, dtype=torch.bfloat16), torch.bfloat16, 0.05),
    "mlx": (partial(hybrids.write_mlx, made=MADE, tower=TOWER), torch.float32, TOLERANCE),
    "F32": (partial(write_gguf, kind="F32"), torch.float32, TOLERANCE),
    "F16": (partial(write_gguf, kind="F16"), torch.float16, 0.01),
    "BF16": (partial(write_gguf, kind="BF16"), torch.bfloat16, 0.05),
    "Q8_0": (partial(write_gguf, kind="Q8_0"), torch.float16, 0.1),
}


@pytest.mark.parametrize("form", FORMS)
def test_one_tower_from_every_kind_of_file(tmp_path: Path, form: str) -> None:
    write, dtype, rounding = FORMS[form]
    report = run(write(tmp_path / "source"), tmp_path / "out")
    with Reader(tmp_path / "out" / "model.bin") as reader:
        found = vision_config(reader.config)
        assert reader.tensors["model.visual.blocks.0.attn.qkv.weight"].dtype == dtype
    assert found == VisionConfig.from_hf({"vision_config": TOWER.config(), **IDS})
    assert difference(tmp_path / "out") < rounding
    (remark,) = [remark for remark in report.remarks if "tower" in remark]
    assert "2 blocks of 32 features" in remark
    load(tmp_path / "out")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "F32"])
def test_an_mmproj_file_is_read_exactly(tmp_path: Path, kind: str) -> None:
    """Against its own values: what the type rounds is not ours."""
    run(write_gguf(tmp_path / "source", kind=kind), tmp_path / "out")
    meant = towers.write_mmproj(tmp_path / "again.gguf", TOWER, kind)
    assert difference(tmp_path / "out", meant) < (2e-3 if kind == "Q8_0" else TOLERANCE)
    with Reader(tmp_path / "out" / "model.bin") as reader:
        for name, value in meant.items():
            stored = reader.tensor(f"model.visual.{name}").float()
            rounding = 2.0**-11 if kind == "Q8_0" else 0.0  # float16 holds what Q8_0 stands for
            allowed = rounding * value.abs() + (2.0**-25 if rounding else 0.0)
            assert bool(((stored - value).abs() <= allowed).all()), name


def test_a_file_that_reads_texts_alone_has_the_same_bytes_as_before(tmp_path: Path) -> None:
    for name, write in {"with": unpacked, "without": partial(unpacked, tower=None)}.items():
        write(tmp_path / name)
    left = convert(tmp_path / "with", tmp_path / "a", vision=False)
    convert(tmp_path / "without", tmp_path / "b")
    plain = (tmp_path / "b" / "model.bin").read_bytes()
    assert (tmp_path / "a" / "model.bin").read_bytes() == plain and b"visual" not in plain
    count = len(towers.shapes(TOWER))
    assert f"tensors left out: {count} of a tower for images" in left.remarks
    assert load_tower(tmp_path / "a") is None


def test_the_text_model_is_the_same_with_a_tower_and_reads_none_of_it(tmp_path: Path) -> None:
    unpacked(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "plain", vision=False)
    convert(tmp_path / "source", tmp_path / "seeing")
    ids = list(range(5, 40))
    logits = []
    for name in ("plain", "seeing"):
        model = load(tmp_path / name).model
        with torch.inference_mode():
            logits.append(model(torch.tensor([ids]), KVCache(model.config, 1, 64, torch.float32)))
    assert torch.equal(*logits)
    path = tmp_path / "seeing" / "model.bin"
    with Reader(path) as reader:
        places = [info for name, info in reader.tensors.items() if "visual" in name]
        texts = [info for name, info in reader.tensors.items() if "visual" not in name]
    begin = min(info.offset for info in places)
    assert begin > max(info.offset for info in texts)
    data = bytearray(path.read_bytes())
    data[begin + 3] ^= 0x40  # a bit of the tower: whoever reads it sees a wrong checksum
    path.write_bytes(bytes(data))
    load_model(path)
    with pytest.raises(ValueError, match="data_checksum"):
        load_tower(path)


def test_a_tower_of_the_dtype_of_the_file_is_a_view_of_it(tmp_path: Path) -> None:
    unpacked(tmp_path / "source", dtype=torch.bfloat16)
    convert(tmp_path / "source", tmp_path / "out")
    reader = Reader(tmp_path / "out" / "model.bin", check_codes=False)
    tower = load_tower(reader, torch.bfloat16)
    assert tower is not None
    name = "blocks.1.mlp.linear_fc1.weight"
    mapped = reader.tensor(f"model.visual.{name}")
    assert tower.get_parameter(name).data_ptr() == mapped.data_ptr()
    assert tower.get_parameter("pos_embed.weight").dtype == torch.float32


# Which tower --------------------------------------------------------------------------------------


def test_the_mmproj_file_that_is_named_wins(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "source")
    other = tmp_path / "other.gguf"
    values = towers.tensors(TOWER, seed=5)
    other.write_bytes(towers.mmproj(TOWER, values, "F32")[0])
    run(source, tmp_path / "out", mmproj=other)
    assert difference(tmp_path / "out", values) < TOLERANCE


def test_an_mmproj_file_for_a_folder_and_for_a_model_file(tmp_path: Path) -> None:
    hybrids.write_unpacked(tmp_path / "source", MADE)
    towers.write_mmproj(tmp_path / "mmproj.gguf", TOWER, "F32")
    with pytest.raises(ConvertError, match="tokens of images in the vocabulary, got no") as caught:
        convert(tmp_path / "source", tmp_path / "out", mmproj=tmp_path / "mmproj.gguf")
    assert caught.value.code == "vision"
    source = hybrids.write_gguf(tmp_path / "gguf", MADE, more=[tokens()])
    run(source, tmp_path / "plain")
    assert load_tower(tmp_path / "plain") is None


def test_several_mmproj_files_are_named(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "source", kind="F16")
    towers.write_mmproj(tmp_path / "source" / "mmproj-Q8_0.gguf", TOWER, "Q8_0")
    with pytest.raises(ConvertError, match="got mmproj-F16.gguf, mmproj-Q8_0.gguf; name") as caught:
        run(source, tmp_path / "out")
    assert caught.value.code == "several-mmproj"
    run(source, tmp_path / "one", mmproj=tmp_path / "source" / "mmproj-F16.gguf")
    assert load_tower(tmp_path / "one") is not None
    run(source, tmp_path / "none", vision=False)
    assert load_tower(tmp_path / "none") is None


def test_the_mmproj_file_of_another_model_is_left_lying(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "source")
    other = towers.Sizes(out_hidden_size=64)
    towers.write_mmproj(tmp_path / "source" / "mmproj-other.gguf", other, "F16")
    report = run(source, tmp_path / "out")
    assert difference(tmp_path / "out") < 0.01
    (tmp_path / "source" / "mmproj-F16.gguf").unlink()
    report = run(source, tmp_path / "again")
    assert load_tower(tmp_path / "again") is None
    assert "mmproj-other.gguf gives 64 features, not 256: left out" in report.remarks
    with pytest.raises(ConvertError, match="the text model's 256 features, got 64 from") as caught:
        run(source, tmp_path / "no", mmproj=tmp_path / "source" / "mmproj-other.gguf")
    assert caught.value.code == "vision-pair"


def test_a_cached_conversion_follows_its_mmproj_file(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    source = hybrids.write_gguf(folder, MADE, more=[tokens()])
    source = source.rename(folder / "model.gguf")
    first = load(source, cache=tmp_path / "cache").path
    assert first is not None and load_tower(first) is None
    towers.write_mmproj(folder / "mmproj-model.gguf", TOWER, "F16")
    second = load(folder, cache=tmp_path / "cache").path
    assert second is not None and second != first and difference(second) < 0.01


def test_a_model_file_keeps_its_tower_bit_for_bit(tmp_path: Path) -> None:
    unpacked(tmp_path / "source", dtype=torch.bfloat16)
    convert(tmp_path / "source", tmp_path / "first")
    convert(tmp_path / "first" / "model.bin", tmp_path / "second")
    convert(tmp_path / "second" / "model.bin", tmp_path / "third")
    second, third = ((tmp_path / n / "model.bin").read_bytes() for n in ("second", "third"))
    assert second == third
    assert difference(tmp_path / "second") == difference(tmp_path / "first")
    report = convert(tmp_path / "first" / "model.bin", tmp_path / "blind", vision=False)
    assert load_tower(tmp_path / "blind") is None
    assert any("left out" in remark for remark in report.remarks)
    convert(tmp_path / "source", tmp_path / "plain", vision=False)
    convert(tmp_path / "plain" / "model.bin", tmp_path / "again")
    blind, again = ((tmp_path / n / "model.bin").read_bytes() for n in ("blind", "again"))
    assert blind == again


def test_version_1_is_for_readers_that_know_no_towers(tmp_path: Path) -> None:
    one = {name: np.full_like(scales, 0.05) for name, scales in MADE.scales.items()}
    made = dataclasses.replace(MADE, scales=one)  # version 1 has one scale for a matrix
    hybrids.write_unpacked(tmp_path / "source", made, nested=True, tower=TOWER)
    report = convert(tmp_path / "source", tmp_path / "out", format_version=1)
    assert load_tower(tmp_path / "out") is None
    assert any("of a tower for images" in remark for remark in report.remarks)
    load(tmp_path / "out")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_gguf(tmp_path / "source")
    mmproj = str(tmp_path / "source" / "mmproj-F16.gguf")
    common = ["convert", str(source), str(tmp_path / "out"), "--tokenizer", "none"]
    assert main([*common, "--mmproj", mmproj, "--no-vision"]) == 2
    assert "--mmproj or --no-vision, got both" in capsys.readouterr().err
    assert main([*common, "--mmproj", mmproj]) == 0
    assert "a tower for images from mmproj-F16.gguf: 2 blocks" in capsys.readouterr().out
    assert main([*common, "--no-vision", "--force"]) == 0
    assert load_tower(tmp_path / "out") is None


# Beside the conversion ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["hf-bf16", "mlx"])
def test_inspect_lists_a_tower_and_diff_compares_it(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = FORMS[form][0](tmp_path / "source")
    convert(source, tmp_path / "out")
    count = len(towers.shapes(TOWER))
    for place in (source, tmp_path / "out"):
        report = inspect(place)
        rows = [row for row in report["tensors"] if row["name"].startswith("model.visual.")]
        assert len(rows) == report["vision"]["tensors"] == count
        assert report["vision"]["bytes"] == sum(row["nbytes"] for row in rows)
        assert report["vision"]["depth"] == 2 and report["vision"]["intermediate_size"] == 56
        assert main(["inspect", str(place)]) == 0
        assert "65,536 to 16,777,216 pixels, 2 blocks of 32 features" in capsys.readouterr().out
    found = diff(source, tmp_path / "out")
    assert found["only_a"] == found["only_b"] == found["tensors"] == []
    convert(source, tmp_path / "blind", vision=False)
    assert inspect(tmp_path / "blind")["vision"] is None
    assert len(diff(source, tmp_path / "blind")["only_a"]) == count


@pytest.mark.parametrize("form", ["hf-bf16", "Q8_0", "mlx"])
def test_a_proof_compares_the_tower(tmp_path: Path, form: str) -> None:
    source = FORMS[form][0](tmp_path / "source")
    report = run(source, tmp_path / "out", verify=True)
    assert report.verification is not None
    proof = report.verification["tower"]
    assert proof["oracle"].startswith("transformers ") and proof["tensors_different"] == 0
    assert proof["rows"] == 6 + 4 + 35 and 0 < proof["relative_difference"] < TOLERANCE
    assert proof["tensors"] == len(towers.shapes(TOWER))
    assert proof["logits"]["tokens"] == 4 * 12 + 3 * 2 + 45  # words, what frames images, rows
    assert 0 < proof["logits"]["relative_logit_difference"] < 2e-3
    (line,) = [line for line in report.lines() if "tower for images: 0 of" in line]
    assert "45 rows" in line and "99 tokens with images" in line
    found = verify(tmp_path / "out", source)["verification"]
    assert found["tower"] == proof and found["passed"]
    names = [path.name for path in (tmp_path / "source").iterdir() if "mmproj" in path.name]
    assert set(names) <= set(report.source_sha256)


def test_a_proof_sees_a_wrong_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitnet_ops.convert import comparison
    from bitnet_ops.convert.oracles import OracleUnavailable
    from bitnet_ops.vision import tower as module

    source = unpacked(tmp_path / "source")
    convert(source, tmp_path / "out")
    right = module.rotary_angles
    with monkeypatch.context() as patch:
        patch.setattr(module, "rotary_angles", lambda at, width: right(at.flip(0), width))
        with pytest.raises(ConvertError, match="a row of an image off by"):
            convert(source, tmp_path / "wrong", verify=True)
    assert not (tmp_path / "wrong").exists()
    edit(source, lambda tensors: tensors[LAST].add_(1))
    failures = verify(tmp_path / "out", source)["verification"]["failures"]
    assert any(f"1 of {len(towers.shapes(TOWER))} tensors of the tower" in f for f in failures)

    def missing(*_: object) -> None:
        raise OracleUnavailable("transformers is not installed")

    monkeypatch.setattr(comparison, "tower_features", missing)
    proof = verify(tmp_path / "out", source)["verification"]["tower"]
    assert proof["oracle"] is None and "not installed" in proof["why_not_transformers"]


def test_a_proof_sees_images_at_wrong_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = unpacked(tmp_path / "source")
    convert(source, tmp_path / "out")
    wrong: dict[str, tuple[type, str, Any]] = {
        "text goes on behind the last row": (PromptRows, "advance", property(len)),
        "rows stand one behind another": (RowRuns, "positions", lambda *_: None),
        "no rows": (RowRuns, "rows", lambda *_: []),
    }
    for what, mistake in wrong.items():
        with monkeypatch.context() as patch:
            patch.setattr(*mistake)
            failures = verify(tmp_path / "out", source)["verification"]["failures"]
        assert any("a logit of a prompt with images off by" in f for f in failures), what
    assert verify(tmp_path / "out", source)["verification"]["passed"]


def test_inspect_says_why_a_checkpoint_has_no_tower(tmp_path: Path) -> None:
    source = unpacked(tmp_path / "source")
    edit(source, lambda tensors: drop(tensors, LAST))
    report = inspect(source)
    assert report["vision"] is None
    assert any(f"{LAST}, got no such tensor" in remark for remark in report["remarks"])


def test_an_export_has_the_text_model_alone(tmp_path: Path) -> None:
    write_gguf(tmp_path / "source")
    run(tmp_path / "source" / "PQ2_0.gguf", tmp_path / "out")
    report = export_gguf(tmp_path / "out", tmp_path / "a.gguf", type="pq2_0", tokenizer=False)
    assert any("tower for images was left out" in remark for remark in report.remarks)
    run(tmp_path / "source" / "PQ2_0.gguf", tmp_path / "blind", vision=False)
    export_gguf(tmp_path / "blind", tmp_path / "b.gguf", type="pq2_0", tokenizer=False)
    with Reader(tmp_path / "out" / "model.bin") as reader:
        assert "model.visual.pos_embed.weight" in reader.tensors
    first, second = ((tmp_path / f"{name}.gguf").read_bytes() for name in "ab")
    assert len(first) == len(second)


# MLX ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_tower_of_mlx(tmp_path: Path, bits: int) -> None:
    """The position table too, as older writers had it; a width of 56 takes no groups of 32."""
    packed, meant = towers.quantised(towers.tensors(TOWER), bits, 32)
    assert {"pos_embed.scales", "blocks.0.attn.qkv.scales"} <= packed.keys()
    assert "blocks.0.mlp.linear_fc2.scales" not in packed
    module = {"bits": bits, "group_size": 32}
    options: dict[str, Any] = {"bits": 2, "group_size": 128, "mode": "affine"}
    options |= {f"vision_tower.{name.removesuffix('.scales')}": module
                for name in packed if name.endswith(".scales")}  # fmt: skip
    tensors = {f"vision_tower.{n}": v.numpy() for n, v in towers.mlx(packed).items()}
    hybrids.write_mlx(tmp_path / "source", MADE, tower=TOWER, quantization=options,
                      quantization_config=options, **tensors)  # fmt: skip
    convert(tmp_path / "source", tmp_path / "out")
    # values are sums in float32, then float16 as their scales
    assert difference(tmp_path / "out", meant) < 2e-3
    with Reader(tmp_path / "out" / "model.bin") as reader:
        for name, value in meant.items():
            assert torch.equal(reader.tensor(f"model.visual.{name}").float(), value.float()), name


def test_a_package_with_rotations_has_its_tower_as_it_is(tmp_path: Path) -> None:
    made = hybrids.make("rotated", layers=4)
    hybrids.write_mlx(tmp_path / "source", made, tower=TOWER)
    convert(tmp_path / "source", tmp_path / "out")
    assert difference(tmp_path / "out") < TOLERANCE


def test_a_tower_that_nothing_describes_is_left_out(tmp_path: Path) -> None:
    source = hybrids.write_mlx(tmp_path / "source", MADE, tower=TOWER)
    about = json.loads((source / "config.json").read_text())
    del about["vision_config"]
    (source / "config.json").write_text(json.dumps(about))
    report = convert(source, tmp_path / "out")
    count = len(towers.shapes(TOWER))
    assert f"tensors left out: {count} of a tower for images" in report.remarks


def test_ids_of_the_vocabulary_win_over_those_of_a_config(tmp_path: Path) -> None:
    """Packages exist that name the ends of turns as the ends of images."""
    from tokenizers import Tokenizer, models

    source = unpacked(tmp_path / "source")
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(250)}, unk_token="t0"))
    added = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    tokenizer.add_special_tokens(added)
    tokenizer.save(str(source / "tokenizer.json"))
    convert(source, tmp_path / "out")
    with Reader(tmp_path / "out" / "model.bin") as reader:
        found = vision_config(reader.config)
    assert found is not None
    ids = found.vision_start_token_id, found.vision_end_token_id, found.image_token_id
    assert ids == (250, 251, 252)


def test_limits_of_a_folder_come_along(tmp_path: Path) -> None:
    source = unpacked(tmp_path / "source")
    changed = {**towers.PREPROCESSOR, "size": {"shortest_edge": 4096, "longest_edge": 1 << 20}}
    (source / "preprocessor_config.json").unlink()
    (source / "processor_config.json").write_text(json.dumps({"image_processor": changed}))
    convert(source, tmp_path / "out")
    with Reader(tmp_path / "out" / "model.bin") as reader:
        found = vision_config(reader.config)
    assert found is not None and (found.min_pixels, found.max_pixels) == (4096, 1 << 20)


# What is refused ----------------------------------------------------------------------------------


def edit(source: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


def drop(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


LAST = "model.visual.merger.linear_fc2.bias"
WRONG: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], str]] = {
    "one missing": (lambda t: drop(t, LAST), f"expected {LAST}, got no such tensor"),
    "one too many": (lambda t: t.update({"model.visual.deepstack_merger_list.0.norm.weight":
        torch.ones(3)}), "the tensors of the tower alone, got model.visual.deepstack"),
    "another shape": (lambda t: t.update({LAST: torch.ones(3)}), r"linear_fc2.bias \[256\], got"),
    "integers": (lambda t: t.update({LAST: torch.ones(256, dtype=torch.int32)}), "floating values"),
    "not finite": (lambda t: t.update({LAST: torch.full((256,), torch.nan)}), "NaN|finite"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_tower_that_is_not_whole_is_refused(tmp_path: Path, case: str) -> None:
    source = unpacked(tmp_path / "source")
    change, message = WRONG[case]
    edit(source, change)
    with pytest.raises(ConvertError, match=message):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    convert(source, tmp_path / "out", vision=False)


def test_a_tower_for_another_width_or_other_tokens_is_refused(tmp_path: Path) -> None:
    source = hybrids.write_unpacked(tmp_path / "a", MADE, nested=True, tower=towers.Sizes())
    with pytest.raises(ConvertError, match="text model's 256 features, got 64 from the checkpoint"):
        convert(source, tmp_path / "out")
    source = unpacked(tmp_path / "b")
    about = json.loads((source / "config.json").read_text())
    for change in ({"image_token_id": VOCAB}, {"image_token_id": about["vision_end_token_id"]}):
        (source / "config.json").write_text(json.dumps(about | change))
        with pytest.raises(ConvertError, match=f"three ids of image tokens below {VOCAB}") as no:
            convert(source, tmp_path / "out")
        assert no.value.code == "vision-ids"
    deep = {**about["vision_config"], "deepstack_visual_indexes": [0]}
    (source / "config.json").write_text(json.dumps(about | {"vision_config": deep}))
    with pytest.raises(ConvertError, match="without deepstack_visual_indexes.*--no-vision"):
        convert(source, tmp_path / "out")


MMPROJ: dict[str, tuple[dict[str, Any], str]] = {
    "another projector": ({"clip__projector_type": ("str", "mlp")}, "qwen3vl_merger, got mlp"),
    "deepstack": ({"clip__vision__is_deepstack_layers": ("[bool]", [True, False])}, "all false"),
    "one time": ({"v__patch_embd__weight__1": None}, "v.patch_embd.weight.1 of one shape"),
    "no block": ({"v__blk__1__ffn_up__weight": None}, "blocks.1.mlp.linear_fc1.weight, got no"),
    "an adapter": ({"general__type": ("str", "adapter")}, "got clip of type adapter"),
    "another architecture": ({"general__architecture": ("str", "qwen35")}, "got qwen35 of type"),
}


@pytest.mark.parametrize("case", MMPROJ)
def test_other_mmproj_files_are_refused(tmp_path: Path, case: str) -> None:
    source = hybrids.write_gguf(tmp_path / "source", MADE, more=[tokens()])
    change, message = MMPROJ[case]
    towers.write_mmproj(tmp_path / "mmproj.gguf", TOWER, "F16", **change)
    with pytest.raises(ConvertError, match=message):
        run(source, tmp_path / "out", mmproj=tmp_path / "mmproj.gguf")
    assert not (tmp_path / "out").exists()


def test_swapped_feed_forward_matrices_are_refused(tmp_path: Path) -> None:
    """llama.cpp swaps them by their shapes, for files of other families."""
    source = hybrids.write_gguf(tmp_path / "source", MADE, more=[tokens()])
    values = towers.tensors(TOWER)
    for kind in ("weight", "bias"):
        a, b = (f"blocks.0.mlp.linear_fc{i}.{kind}" for i in (1, 2))
        values[a], values[b] = values[b], values[a]
    (tmp_path / "mmproj.gguf").write_bytes(towers.mmproj(TOWER, values, "F32")[0])
    with pytest.raises(ConvertError, match=r"blocks.0.mlp.linear_fc1.*\[56.*got \[32"):
        run(source, tmp_path / "out", mmproj=tmp_path / "mmproj.gguf")


def test_a_cut_mmproj_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "source")
    file = tmp_path / "source" / "mmproj-F16.gguf"
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ConvertError, match="mmproj-F16.gguf"):
        run(source, tmp_path / "out")
    run(source, tmp_path / "out", vision=False)


def test_a_text_model_takes_no_mmproj_file(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", FAMILIES["llama-online"])
    towers.write_mmproj(tmp_path / "mmproj.gguf", TOWER, "F16")
    with pytest.raises(ConvertError, match="a model that reads images"):
        convert(source, tmp_path / "out", mmproj=tmp_path / "mmproj.gguf")


def test_a_model_file_whose_tower_is_not_whole(tmp_path: Path) -> None:
    from bitnet_ops.formats.sglbitnt import Writer

    unpacked(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out")
    with Reader(tmp_path / "out" / "model.bin") as reader:
        kept = [name for name in reader.tensors if name != LAST]
        with Writer(tmp_path / "cut.bin", reader.config, len(kept)) as writer:
            for name in kept:
                info, tensor = reader.tensors[name], reader.tensor(name)
                if info.packed:
                    scales = reader.scales(name).to(info.scale_dtype)
                    writer.add_packed(name, tensor, scales, info.in_features, info.group_size)
                else:
                    writer.add_dense(name, tensor)
    with pytest.raises(TensorError, match=f"model: vision: expected {LAST}, got no such tensor"):
        load(tmp_path / "cut.bin")
    with pytest.raises(VisionError, match="got no such tensor"):
        load_tower(tmp_path / "cut.bin")


def test_the_pixels_of_mlx_lie_colours_last() -> None:
    """The fixture does what its name says."""
    values = towers.tensors(TOWER)
    moved = towers.mlx(values)["patch_embed.proj.weight"]
    assert moved.shape == (32, 2, 16, 16, 3)
    assert np.array_equal(moved[3, 1, 5, 7, 2], values["patch_embed.proj.weight"][3, 2, 1, 5, 7])
