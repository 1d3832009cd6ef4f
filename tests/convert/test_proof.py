"""What a verified conversion says of itself, checked against hashlib, numpy and transformers.

The comparison of logits and weights is tested in test_convert.py and test_oracle_hf.py; here are
the figures, hashes and tables made of it, the file's own config, and `bitnet-ops verify`.
"""

import dataclasses
import hashlib
import json
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import bonsai
import forward_fp64
import hf_writer
from bitnet_ops.cli import main
from bitnet_ops.convert import ConvertError, comparison, convert
from bitnet_ops.convert.report import table_lines
from bitnet_ops.convert.ternary import implausible, implausible_dense
from bitnet_ops.convert.verify import tensor_table, verify
from bitnet_ops.formats.sglbitnt import Reader, SglbitntError, Writer, replace_config
from gguf_models import model_file
from hf_families import CASES
from hf_writer import FAMILIES
from isa_control import torch_threads

FAMILY = FAMILIES["bitnet-online-untied-fp32"]
TEXT = "Two ships passed before noon; the third one turned back.\n" * 4


@pytest.fixture(autouse=True)
def one_thread():
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def proved(tmp_path_factory):
    """(source folder, converted folder, text file, report): converted with --verify --text."""
    folder = tmp_path_factory.mktemp("proved")
    source = hf_writer.write_checkpoint(folder / "source", FAMILY)
    (folder / "text.txt").write_text(TEXT)
    with torch_threads(1):
        report = convert(source, folder / "out", verify=True, text=folder / "text.txt")
    return source, folder / "out", folder / "text.txt", report


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_hashes_are_those_of_hashlib(proved):
    source, out, _, report = proved
    stored = json.loads((out / "report.json").read_text())
    assert stored["sha256"] == sha256(out / "model.bin")
    assert stored["output_bytes"] == (out / "model.bin").stat().st_size
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert stored["source_sha256"] == {name: sha256(source / name) for name in names}
    lines = "".join(f"{sha256(source / name)}  {name}\n" for name in names)
    with Reader(out / "model.bin") as reader:
        figures = reader.config["bitnet_ops"]["verified"]
    assert figures["source_sha256"] == hashlib.sha256(lines.encode()).hexdigest()


def test_perplexity_and_top1_are_those_of_transformers(proved):
    source, out, _, report = proved
    ids = Tokenizer.from_file(str(source / "tokenizer.json")).encode(TEXT).ids
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().numpy()
    shifted = logits[:-1] - logits[:-1].max(-1, keepdims=True)
    picked = shifted[np.arange(len(ids) - 1), ids[1:]]
    loss = float((np.log(np.exp(shifted).sum(-1)) - picked).mean())
    figures = report.verification["logits"]
    assert figures["tokens"] == len(ids) and report.verification["text"] == "text text.txt"
    assert figures["perplexity_reference"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert figures["perplexity_ours"] == pytest.approx(math.exp(loss), rel=2e-2)
    assert figures["top1_agreement"] >= 0.95


def test_every_tensor_has_its_zeros_scale_and_hash(proved):
    _, out, _, report = proved
    network = hf_writer.make_network(FAMILY)
    assert [row["name"] for row in report.per_tensor] == list(Reader(out / "model.bin").tensors)
    with Reader(out / "model.bin") as reader:
        for row in report.per_tensor:
            assert row["sha256"] == hashlib.sha256(bytes(reader.memory(row["name"]))).hexdigest()
            value = network[row["name"].removesuffix(".weight")]
            if not isinstance(value, dict):
                assert "zero_share" not in row and row["scale"] is None
                assert row["shape"] == list(value.shape)
                continue
            codes, scale = forward_fp64.ternary(value, False)
            assert row["zero_share"] == pytest.approx((codes == 0).double().mean().item())
            assert row["scale"] == pytest.approx(scale, rel=1e-6)


def test_several_scales_show_their_range(tmp_path):
    weight = torch.full((3, 64), 0b01100001, dtype=torch.uint8)
    scales = torch.tensor([[0.5, 1.0], [2.0, 0.25], [1.0, 1.0]])
    with Writer(tmp_path / "a.bin", {"k": 1}, 1) as writer:
        writer.add_packed("w", weight, scales, in_features=256, group_size=128)
    (row,) = tensor_table(tmp_path / "a.bin")
    assert row["scale"] is None
    assert row["scales"] == {"shape": [3, 2], "min": 0.25, "max": 2.0}
    assert "0.25..2" in table_lines([row])[1]


def test_figures_lie_in_the_file_and_inspect_shows_them(proved, capsys):
    _, out, _, report = proved
    with Reader(out / "model.bin") as reader:
        figures = reader.config["bitnet_ops"]["verified"]
    assert figures["top1_agreement"] == report.verification["logits"]["top1_agreement"]
    assert figures["oracle"].startswith("transformers") and figures["weights_different"] == 0
    assert main(["inspect", str(out)]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("verified: "))
    assert "perplexity_ours" in line and figures["source_sha256"] in line
    assert main(["inspect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bitnet_ops"]["verified"] == figures


def test_summary_is_there_to_read(proved):
    source, out, _, report = proved
    text = (out / "report.txt").read_text()
    assert "perplexity" in text and "top-1" in text and sha256(source / "config.json") in text
    row = next(x for x in text.splitlines() if "layers.1.mlp.up_proj" in x)
    assert "ternary" in row and "%" in row
    assert "report.txt" in report.files


def test_without_verify_nothing_is_claimed(tmp_path):
    source = hf_writer.write_checkpoint(tmp_path / "source", FAMILIES["bitnet-offline"])
    report = convert(source, tmp_path / "out")
    assert report.source_sha256 is None and report.per_tensor is None
    assert not (tmp_path / "out" / "report.txt").exists()
    with Reader(tmp_path / "out" / "model.bin") as reader:
        assert "verified" not in reader.config["bitnet_ops"]


def test_version_1_files_carry_the_figures_too(tmp_path):
    source = hf_writer.write_checkpoint(tmp_path / "source", FAMILIES["llama-bitlinear"])
    convert(source, tmp_path / "out", verify=True, format_version=1)
    with Reader(tmp_path / "out" / "model.bin") as reader:
        assert reader.version == 1 and reader.config["bitnet_ops"]["verified"]["tokens"] == 256
    convert(source, tmp_path / "again", verify=True, force=True)
    convert(source, tmp_path / "again", force=True)  # report.txt is one of ours
    assert not (tmp_path / "again" / "report.txt").exists()


@pytest.mark.parametrize("name", ["falcon3-like", "bitnet-odd-k"])
def test_forms_of_source_are_all_provable(name, tmp_path):
    source = hf_writer.write_checkpoint(tmp_path / "source", FAMILIES[name], shards=3)
    report = convert(source, tmp_path / "out", verify=True)
    assert len(report.source_sha256) == 2 + 3
    assert verify(tmp_path / "out", source)["verification"]["passed"]


# A config exchanged -------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("extra", [{}, {"note": "x" * 5000}])
def test_replacing_a_config_leaves_data_alone(version, extra, tmp_path):
    file = tmp_path / "a.bin"
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(7.0)}
    with Writer(file, {"k": 1, "long": "y" * 300}, 2, version=version) as writer:
        for name, tensor in tensors.items():
            writer.add_dense(name, tensor)
    replace_config(file, {"k": 2, **extra})
    with Reader(file) as reader:
        assert reader.config == {"k": 2, **extra} and reader.version == version
        for name, tensor in tensors.items():
            assert torch.equal(reader.tensor(name), tensor)
            reader.check_sum(name)
    before = file.read_bytes()
    with pytest.raises(SglbitntError, match="strict JSON"):
        replace_config(file, {"k": float("nan")})
    assert file.read_bytes() == before
    with Writer(tmp_path / "direct.bin", {"k": 2, **extra}, 2, version=version) as writer:
        for name, tensor in tensors.items():
            writer.add_dense(name, tensor)
    assert before == (tmp_path / "direct.bin").read_bytes()  # one form for a content


# bitnet-ops verify --------------------------------------------------------------------------------


def test_verify_later_on(proved, capsys):
    source, out, text, report = proved
    before = sha256(out / "model.bin")
    result = verify(out / "model.bin", source, text=text)
    again = result["verification"]
    assert again.keys() == report.verification.keys()
    for name, figure in report.verification.items():
        if isinstance(figure, float):  # the oracle's own sums depend on where its operands lie
            assert again[name] == pytest.approx(figure, rel=1e-3, abs=1e-5), name
        else:
            assert again[name] == figure, name
    assert result["sha256"] == before == sha256(out / "model.bin")
    assert main(["verify", str(out), str(source), "--text", str(text)]) == 0
    printed = capsys.readouterr().out
    assert "perplexity" in printed and before in printed
    assert main(["verify", str(out), str(source), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verification"]["failures"] == []


def tampered(out, folder, change):
    """A copy of the file in which `change(name, tensor, scale)` has had its way."""
    folder.mkdir()
    with Reader(out / "model.bin") as reader:
        with Writer(folder / "model.bin", reader.config, len(reader.tensors)) as writer:
            for name, info in reader.tensors.items():
                tensor, scale = change(name, reader.tensor(name).clone(), info.scale)
                if info.packed:
                    writer.add_packed(name, tensor, scale, info.in_features)
                else:
                    writer.add_dense(name, tensor)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(out / name, folder / name)
    return folder


def test_verify_finds_a_changed_weight(proved, tmp_path, capsys):
    source, out, _, _ = proved

    def flip(name, tensor, scale):
        if name.endswith("1.mlp.down_proj.weight"):
            tensor[:8] = tensor[:8].flip(0)
        return tensor, scale

    assert main(["verify", str(tampered(out, tmp_path / "bad", flip)), str(source)]) == 1
    error = capsys.readouterr().err
    assert "verification-failed" in error and "1.mlp.down_proj.weight differ" in error


def test_verify_finds_a_changed_scale(proved, tmp_path, capsys):
    source, out, _, _ = proved

    def turn(name, tensor, scale):
        return tensor, 1 / scale if name.endswith("0.self_attn.v_proj.weight") else scale

    assert main(["verify", str(tampered(out, tmp_path / "bad", turn)), str(source)]) == 1
    assert "the scale of model.layers.0.self_attn.v_proj" in capsys.readouterr().err


def test_verify_rejects_another_checkpoint(proved, tmp_path):
    _, out, _, _ = proved
    family = dataclasses.replace(FAMILY, theta=10000.0)
    other = hf_writer.write_checkpoint(tmp_path / "other", family)
    with pytest.raises(ConvertError, match="rope_theta differ.*other-source"):
        verify(out, other)
    (tmp_path / "broken.bin").write_bytes((out / "model.bin").read_bytes()[:-5])
    with pytest.raises(ConvertError, match="broken.bin"):
        verify(tmp_path / "broken.bin", other)


def test_text_needs_verify(proved, tmp_path, capsys):
    source, _, text, _ = proved
    assert main(["convert", str(source), str(tmp_path / "x"), "--text", str(text)]) == 2
    assert "expected --text only with --verify" in capsys.readouterr().err


# Damage, and what looks like it ---------------------------------------------------------------


def _zeroed(file: Path, share: float) -> None:
    """The end of a file as a download leaves it that has broken off: of the right length."""
    data = bytearray(file.read_bytes())
    begin = int(len(data) * (1 - share))
    data[begin:] = bytes(len(data) - begin)
    file.write_bytes(data)


def _packed_source(folder: Path, form: str) -> Path:
    if form == "safetensors":
        return hf_writer.write_checkpoint(folder, FAMILIES["bitnet-offline"]) / "model.safetensors"
    if form == "mlx":
        return bonsai.write_mlx(folder, bonsai.make(True)) / "model.safetensors"
    file = folder / "m.gguf"
    folder.mkdir()
    if form in bonsai.TYPES:
        file.write_bytes(bonsai.gguf_file(bonsai.make(True), form))
    else:
        family = FAMILIES["bitnet-offline"]
        network = hf_writer.make_network(family)
        file.write_bytes(model_file(family, network, "bitnet-b1.58", form))
    return file


@pytest.mark.parametrize(
    "form", ["safetensors", "mlx", "TQ1_0", "TQ2_0", "Q2_0", "PQ2_0", "PTQ1_0"]
)
def test_an_end_of_zeros_is_said_and_is_no_proof(tmp_path, form):
    file = _packed_source(tmp_path / "in", form)
    source = file if file.suffix == ".gguf" else file.parent
    options = {"tokenizer": "none"} if file.suffix == ".gguf" else {}
    whole = convert(source, tmp_path / "whole", **options)
    assert not [remark for remark in whole.remarks if "damaged" in remark]
    _zeroed(file, 0.2)
    report = convert(source, tmp_path / "out", **options)
    words = r"rows of (one value|zero bytes).*the source is damaged"
    assert [remark for remark in report.remarks if re.search(words, remark)], report.remarks
    with pytest.raises(ConvertError, match=words) as caught:
        convert(source, tmp_path / "proved", verify=True, **options)
    assert caught.value.code == "verification-failed"
    found = verify(tmp_path / "out", source)["verification"]
    assert [failure for failure in found["failures"] if re.search(words, failure)]


NORM, HALF = "model.layers.1.input_layernorm.weight", 150  # of 300 rows of the embedding
DENSE = {
    "a norm": (NORM, lambda t: t.zero_(), "256 zeros among 256 weights of a norm"),
    "most of a norm": (NORM, lambda t: t[100:].zero_(), "156 zeros among 256 weights of a norm"),
    "a few of a norm": (NORM, lambda t: t[-20:].zero_(), None),
    "rows": ("model.embed_tokens.weight", lambda t: t[HALF:].zero_(), "150 of 300 rows of zeros"),
    "filled up": ("model.embed_tokens.weight", lambda t: t[-40:].zero_(), None),
}


@pytest.mark.parametrize("case", DENSE)
def test_norms_and_embeddings_of_zeros_are_damage_too(tmp_path, case):
    name, change, words = DENSE[case]
    family = FAMILIES["bitnet-offline"]
    source = hf_writer.write_checkpoint(tmp_path / "in", family)
    tensors = hf_writer.state_dict(family, hf_writer.make_network(family))
    change(tensors[name])
    hf_writer.write_tensors(source, tensors)
    said = [r for r in convert(source, tmp_path / "out").remarks if "the source is damaged" in r]
    if words is None:
        assert said == [] and convert(source, tmp_path / "again", verify=True)
        return
    assert len(said) == 1 and words in said[0]
    with pytest.raises(ConvertError, match=f"{words}.*get the source again") as caught:
        convert(source, tmp_path / "again", verify=True)
    assert "report" not in str(caught.value)


def test_zeros_are_usual_where_a_norm_multiplies_by_one_more():
    assert implausible_dense("model.norm.weight", torch.zeros(8), norm_offset=1.0) is None
    assert implausible_dense("model.layers.0.self_attn.q_proj.bias", torch.zeros(8), 0.0) is None


def test_a_source_without_finite_logits_is_not_our_error(tmp_path):
    family = FAMILIES["llama-bitlinear"]
    source = hf_writer.write_checkpoint(tmp_path / "in", family)
    tensors = hf_writer.state_dict(family, hf_writer.make_network(family))
    tensors["model.norm.weight"].fill_(3e38)
    hf_writer.write_tensors(source, tensors)
    with pytest.raises(ConvertError, match="own logits are not finite.*get the source again"):
        convert(source, tmp_path / "out", verify=True)


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        (lambda c: c.fill_(-1), "256 of 256 rows of one value"),
        (lambda c: c[7].fill_(1), "1 of 256 rows of one value"),
        (lambda c: torch.where(torch.rand(c.shape) < 0.04, 0, -1), "weights of -1"),
        (lambda c: torch.where(torch.rand(c.shape) < 0.92, 1, c), "of [+]1"),
        (lambda c: c, None),
        (lambda c: c.zero_(), None),
    ],
)
def test_what_no_training_gives(codes, words):
    given = torch.randint(-1, 2, (256, 256), dtype=torch.int8)
    changed = codes(given)
    found = implausible("w", (given if changed.dim() == 1 else changed).to(torch.int8), 0)
    assert found is None if words is None else re.search(words, found)


@pytest.mark.parametrize(
    "family",
    [FAMILIES["bitnet-online"], CASES["trilm"].family],
    ids=lambda family: family.name,
)
@pytest.mark.parametrize("installed", [True, False])
def test_a_matrix_of_zeros_is_sound_whatever_is_installed(tmp_path, monkeypatch, family, installed):
    source = hf_writer.write_checkpoint(tmp_path / "in", family)
    tensors = hf_writer.state_dict(family, hf_writer.make_network(family))
    down = "model.layers.1.mlp.down_proj.weight"
    hf_writer.write_tensors(source, {**tensors, down: torch.zeros_like(tensors[down])})
    if not installed:
        monkeypatch.setitem(sys.modules, "transformers", None)
    report = convert(source, tmp_path / "out", verify=True)
    assert report.verification["passed"]
    assert any("zeros alone" in remark for remark in report.remarks)


def test_a_model_is_judged_beside_its_own_noise(tmp_path, monkeypatch):
    """Many random layers: flat logits, which two right forwards order differently."""
    family = dataclasses.replace(FAMILIES["bitnet-offline"], name="bitnet-offline240", layers=24)
    network = hf_writer.make_network(family)
    source = hf_writer.write_checkpoint(tmp_path / "in", family, network=network)
    result = convert(source, tmp_path / "out", verify=True).verification
    assert result["passed"] and result["weights_different"] == 0
    assert result["logits"]["top1_agreement"] < comparison.MIN_TOP1  # once condemned
    assert result["noise"]["top1_agreement"] < 0.97
    # one wrong row order is still off by all there is
    rolled = "model.layers.20.mlp.down_proj"
    network[rolled] = {**network[rolled], "codes": np.roll(network[rolled]["codes"], 1, axis=0)}
    other = hf_writer.write_checkpoint(tmp_path / "rolled", family, network=network)
    convert(other, tmp_path / "wrong")
    ours = comparison.our_logits
    monkeypatch.setattr(
        comparison, "our_logits", lambda _, ids: ours(tmp_path / "wrong" / "model.bin", ids)
    )
    with pytest.raises(ConvertError, match="top-1 agreement"):
        convert(source, tmp_path / "again", verify=True)
