"""`inspect` on every kind of model, and `--diff`: the same model told alike, changes told apart.

Checkpoints are written by hf_writer.py; figures are compared with what that writer was given.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hf_writer
from bitnet_ops.cli import main
from bitnet_ops.convert import ConvertError, convert, inspect
from bitnet_ops.convert import diff as inspect_diff
from bitnet_ops.convert.gguf_export import export_gguf
from bitnet_ops.formats.sglbitnt import Reader, Writer
from bitnet_ops.nn.packing import pack_ternary
from hf_families import CASES
from hf_writer import FAMILIES
from isa_control import torch_threads

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model, offline: hf/, v1/, v2/, and model.gguf of I2_S."""
    folder = tmp_path_factory.mktemp("kinds")
    source = hf_writer.write_checkpoint(folder / "hf", FAMILIES["llama-bitlinear"])
    for version in (1, 2):
        convert(source, folder / f"v{version}", format_version=version)
    return folder


def run(*words: object) -> int:
    return main(["inspect", *map(str, words)])


def test_a_checkpoint_shows_the_figures_of_its_conversion(folder: Path) -> None:
    stored, made = inspect.inspect(folder / "hf"), inspect.inspect(folder / "v2")
    assert stored["kind"] == "Hugging Face checkpoint" and made["kind"] == "SGLBITNT version 2"
    ours = {row["name"]: row for row in made["tensors"]}
    theirs = {row["name"]: row for row in stored["tensors"]}
    assert ours.keys() == theirs.keys()
    for name, row in theirs.items():
        for key in ("format", "shape", "minus", "zero", "plus"):
            assert row[key] == ours[name][key], (name, key)
        assert (row["scale"] is None) == (row["format"] != "ternary")
        if row["scale"] is not None:
            assert row["scale"] == pytest.approx(ours[name]["scale"], rel=1e-6)
    assert stored["totals"]["ternary_weights"] == made["totals"]["ternary_weights"] > 0
    tensors = load_file(folder / "hf" / "model.safetensors")
    assert theirs[NORM]["nbytes"] == tensors[NORM].nbytes
    assert theirs[Q_PROJ]["nbytes"] == tensors[Q_PROJ].nbytes + tensors[f"{Q_PROJ}_scale"].nbytes


def test_versions_and_the_source_are_equal(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(folder / "v1", "--diff", folder / "v2") == 0
    assert "equal: " in capsys.readouterr().out.splitlines()[-1]
    assert run(folder / "hf", "--diff", folder / "v2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] and found["same"] == len(Reader(folder / "v2" / "model.bin").tensors)


def test_an_online_checkpoint_is_ternarised_to_be_compared(tmp_path: Path) -> None:
    source = hf_writer.write_checkpoint(tmp_path / "hf", FAMILIES["bitnet-online"])
    convert(source, tmp_path / "out")
    found = inspect_diff.diff(source, tmp_path / "out")
    assert found["equal"], found
    rows = {row["name"]: row for row in inspect.inspect(source)["tensors"]}
    assert rows[Q_PROJ]["zero"] is None and rows[Q_PROJ]["format"] in ("bfloat16", "float32")


@pytest.mark.parametrize("name", CASES)
def test_every_family_equals_its_conversion(tmp_path: Path, name: str) -> None:
    """Packed, masters, values already ternary, scales in blocks; names of every spelling."""
    case = CASES[name]
    source = hf_writer.write_checkpoint(tmp_path / "hf", case.family)
    convert(source, tmp_path / "out", **case.options)
    found = inspect_diff.diff(source, tmp_path / "out")
    assert not (found["only_a"] or found["only_b"] or found["config"])
    # transformers' offline AutoBitLinear multiplies the bias by the scale; the converter folds it
    folds = case.family.qkv_bias and case.family.linear_class == "autobitlinear"
    folded = [row["name"] for row in found["tensors"]] if folds else []
    assert [row["name"] for row in found["tensors"]] == folded
    assert all(n.endswith(".bias") for n in folded) and found["equal"] == (not folded)


def test_a_gguf_is_listed_under_the_names_of_the_model(tmp_path: Path) -> None:
    bitnet = hf_writer.write_checkpoint(tmp_path / "hf", FAMILIES["bitnet-offline"])
    convert(bitnet, tmp_path / "out")
    export_gguf(tmp_path / "out", tmp_path / "m.gguf", type="i2_s", tokenizer=False)
    report = inspect.inspect(tmp_path / "m.gguf")
    ours = {row["name"]: row for row in inspect.inspect(tmp_path / "out")["tensors"]}
    assert report["kind"] == "GGUF" and {r["name"] for r in report["tensors"]} == ours.keys()
    row = next(row for row in report["tensors"] if row["name"] == Q_PROJ)
    assert row["format"] == "I2_S"
    for key in ("shape", "scale", "minus", "zero", "plus"):
        assert row[key] == ours[Q_PROJ][key]
    found = inspect_diff.diff(tmp_path / "out", tmp_path / "m.gguf")
    assert not (found["only_a"] or found["only_b"] or found["tensors"])


def changed(folder: Path, target: Path, **tensors: torch.Tensor | None) -> Path:
    """The checkpoint with tensors replaced, taken out (None) or added."""
    shutil.copytree(folder / "hf", target)
    stored = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor is None:
            del stored[name]
        else:
            stored[name] = tensor.contiguous()
    save_file(stored, target / "model.safetensors")
    return target


def test_every_kind_of_difference_is_told(folder: Path, tmp_path: Path) -> None:
    stored = load_file(folder / "hf" / "model.safetensors")
    packed, norm = stored[Q_PROJ].clone(), stored[NORM].clone()
    before = int(packed[0, 0])
    packed[0, 0] = before ^ 1 if before & 3 != 2 else before & ~2  # one code of the first quarter
    norm[3] += 0.5
    other = changed(
        folder,
        tmp_path / "b",
        **{
            Q_PROJ: packed,
            f"{Q_PROJ}_scale": stored[f"{Q_PROJ}_scale"] * 2,
            NORM: norm,
            "model.layers.0.input_layernorm.weight": None,
            "extra.weight": torch.ones(3),
            "lm_head.weight": stored["lm_head.weight"][:-1],
        },
    )
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    found = inspect_diff.diff(folder / "hf", other)
    assert found["config"]["rope_theta"][1] == 5.0 and len(found["config"]) == 1
    assert found["only_a"] == ["model.layers.0.input_layernorm.weight"]
    assert found["only_b"] == ["extra.weight"] and not found["equal"]
    rows = {row["name"]: row for row in found["tensors"]}
    assert rows.keys() == {Q_PROJ, NORM, "lm_head.weight"}
    assert rows[Q_PROJ]["codes_differing"] == 1 / (4 * packed.numel())
    # bitlinear stores reciprocals: twice the stored scale is half the multiplier
    assert rows[Q_PROJ]["scale_ratio_min"] == rows[Q_PROJ]["scale_ratio_max"] == 0.5
    assert rows[NORM]["max_difference"] == pytest.approx(0.5, rel=1e-2)
    assert rows[NORM]["values_differing"] == 1 / norm.numel()
    shape = list(stored["lm_head.weight"].shape)
    assert rows["lm_head.weight"]["shapes"] == [shape, [shape[0] - 1, shape[1]]]
    text = "\n".join(inspect_diff.lines(found))
    for part in ("config rope_theta", "only in a: ", "only in b: extra.weight", "scale ratio 0.5",
                 "3 differ, 1 only in a, 1 only in b, 1 difference in"):  # fmt: skip
        assert part in text


def test_group_scales_are_shown_and_compared(tmp_path: Path, capsys) -> None:
    codes = torch.ones(2, 200, dtype=torch.int8)
    for name, scales in (
        ("a", torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
        ("b", torch.full((2, 2), 2.0)),
    ):
        packed = pack_ternary(codes, scales, 128)
        with Writer(tmp_path / name, {}, 1) as writer:
            writer.add_packed("w", packed.weight, packed.scale, 200, 128)
    row = inspect.inspect(tmp_path / "a")["tensors"][0]
    assert row["scale"] is None and row["scales"] == {"shape": [2, 2], "min": 1.0, "max": 4.0}
    assert row["shape"] == [2, 200] and row["plus"] == 400
    assert run(tmp_path / "a") == 0 and "1..4" in capsys.readouterr().out
    assert run(tmp_path / "a", "--diff", tmp_path / "b") == 1
    assert "0 % of codes differ, scale ratio 0.5 to 2" in capsys.readouterr().out


DAMAGED = {  # tensor -> what stands in its place, and whether that is an error
    "no dimension": ("q_proj.weight", lambda t: torch.tensor(0.5), False),
    "one dimension": ("q_proj.weight", lambda t: torch.ones(4), False),
    "no values": ("q_proj.weight", lambda t: torch.ones(0, 256), False),
    "zeros alone": ("q_proj.weight", lambda t: torch.zeros(256, 256), False),
    "no scale": ("q_proj.weight_scale", lambda t: torch.ones(0), False),
    "many scales": ("q_proj.weight_scale", lambda t: torch.ones(3), False),
    "an infinite scale": ("q_proj.weight_scale", lambda t: t * float("inf"), True),
    "code 3": ("q_proj.weight", lambda t: t | 255, True),
    "no rows": ("q_proj.weight", lambda t: t[:0], False),
    "float8": ("norm.weight", lambda t: t.to(torch.float8_e4m3fn), False),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_checkpoints_are_shown_or_are_one_line(name: str, tmp_path: Path, capsys) -> None:
    end, make, is_error = DAMAGED[name]
    plain = hf_writer.write_checkpoint(tmp_path / "plain", FAMILIES["bitnet-offline"])
    source = hf_writer.write_checkpoint(tmp_path / "source", FAMILIES["bitnet-offline"])
    tensors = load_file(source / "model.safetensors")
    tensor = f"model.layers.0.self_attn.{end}" if end.startswith("q") else f"model.{end}"
    tensors[tensor] = make(tensors[tensor]).contiguous()
    save_file(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "bitnet_ops": 1.5}))
    assert main(["inspect", str(source)]) == int(is_error)
    assert main(["inspect", str(source), "--diff", str(plain)]) == 1 + int(is_error)
    for line in capsys.readouterr().err.splitlines():
        assert re.fullmatch(r"bitnet-ops: error: .* \[(bad-scale|code-3)\]", line)


@pytest.mark.parametrize("name", ["m.bin", "m.gguf", "checkpoint"])
def test_damaged_models_are_one_line(tmp_path: Path, name: str, capsys) -> None:
    path = tmp_path / name
    if name == "checkpoint":
        path.mkdir()
        (path / "config.json").write_text("{")
    else:
        path.write_bytes(b"SGLBITNT" if name == "m.bin" else b"GGUF\3\0\0\0")
    for words in ([path], [path, "--diff", path]):
        assert run(*words) == (2 if "--diff" in words else 1)  # 1 of --diff: they differ
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith("bitnet-ops: error: ")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float64", "int16", "bool"])
def test_weights_of_other_dtypes_are_shown_and_not_ternarised(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    source = hf_writer.write_checkpoint(tmp_path / "source", FAMILIES["llama-online"])
    file = source / "model.safetensors"
    tensors = load_file(file)
    for name in (Q_PROJ, NORM):
        tensors[name] = tensors[name].to(getattr(torch, dtype))
    save_file(tensors, file, metadata={"format": "pt"})
    rows = {row["name"]: row for row in inspect.inspect(source)["tensors"]}
    assert rows[Q_PROJ]["zero"] is None and len(rows[NORM]["sha256"]) == 64
    with pytest.raises(ConvertError, match=f"float32, bfloat16 or float16, got {dtype}"):
        inspect_diff.diff(source, folder / "v2")
