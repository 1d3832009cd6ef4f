"""`quantize`: which masters it takes, on what grounds, and what it writes.

Statistics are checked against numpy on distributions with known answers, the decision on the demo
model's masters and on models trained here with and without the rounding; written bytes against
hf_writer. The layer's mathematics are in test_training.py.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import BitNetConfig, BitNetForCausalLM

import hf_writer
from bitnet_ops import training
from bitnet_ops.cli import main
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.convert.quantize import MastersStatistics, measure_tensor, quantize
from bitnet_ops.formats.safetensors_stream import write_safetensors
from bitnet_ops.formats.sglbitnt import Reader
from hf_writer import FAMILIES
from isa_control import torch_threads

DEMO = Path(__file__).resolve().parents[1] / "data" / "demo-model"
TEXT = "The miller counts his sacks of barley: one, two, three, and the wheel goes round. "
# Dense weights of other shapes than the bell: what the statistic must not take for training.
DENSE = {
    "normal": lambda shape: torch.randn(shape),
    "uniform": lambda shape: torch.rand(shape) - 0.5,
    "laplace": lambda shape: torch.distributions.Laplace(0.0, 1.0).sample(shape),
    "student-t": lambda shape: torch.distributions.StudentT(3.0).sample(shape),
    "rows-of-many-scales": lambda shape: torch.randn(shape) * torch.randn(shape[0], 1).exp(),
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.manual_seed(7)
    with torch_threads(1):
        yield


def without_quantization(source, target):
    """A copy of a checkpoint whose config says nothing about quantisation."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


def random_masters(tmp_path, name="bitnet-online", **changes):
    family = dataclasses.replace(FAMILIES[name], **changes)
    source = hf_writer.write_checkpoint(tmp_path / "declared", family)
    return without_quantization(source, tmp_path / "source")


# The statistic -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", DENSE)
def test_ordinary_weights_have_no_excess(kind, dtype):
    drawn = [measure_tensor(kind, DENSE[kind]((300, 500)).to(dtype)) for _ in range(20)]
    statistics = MastersStatistics(drawn)
    assert abs(statistics.excess - 1) < 5 * statistics.standard_error + 0.015
    assert not statistics.trained


def test_statistics_are_those_of_numpy():
    masters = torch.randn(200, 300) * 0.03
    found = measure_tensor("w", masters)
    w = masters.double().numpy()
    absmean = np.abs(w).mean()
    u = np.abs(w) / absmean
    ternary = np.clip(np.rint(w / absmean), -1, 1) * absmean
    assert found.weights == 60000 and found.scale == pytest.approx(absmean, rel=1e-6)
    assert found.zero_share == pytest.approx((ternary == 0).mean(), abs=1e-4)
    assert found.kurtosis == pytest.approx((w**4).mean() / (w**2).mean() ** 2, rel=1e-6)
    assert found.distance == pytest.approx(((w - ternary) ** 2).sum() / (w**2).sum(), rel=1e-4)
    assert abs(found.near - ((u > 0.45) & (u < 0.55)).sum()) <= 1
    beside = ((u > 0.4) & (u <= 0.45)) | ((u >= 0.55) & (u < 0.6))
    assert abs(found.beside - beside.sum()) <= 2


def test_a_pile_at_the_threshold_is_seen():
    masters = torch.randn(400, 500)
    threshold = float(masters.abs().mean()) / 2
    masters.view(-1)[:2000] = threshold * (1 + 0.02 * torch.randn(2000))
    assert MastersStatistics([measure_tensor("w", masters)]).trained


def test_few_weights_prove_nothing():
    masters = torch.full((4, 4), 1.0)
    masters[0, 0] = masters.abs().mean() / 2
    assert not MastersStatistics([measure_tensor("w", masters)]).trained


# The decision ------------------------------------------------------------------------------------


def test_masters_of_the_demo_model_pass_without_quantization_config(tmp_path):
    source = without_quantization(DEMO, tmp_path / "source")
    with pytest.raises(ConvertError, match="no-quantization-config"):
        convert(source, tmp_path / "out")
    report = quantize(source, tmp_path / "out")
    assert report.trained and not report.declared and 1.1 < report.statistics.excess < 1.15
    convert(DEMO, tmp_path / "declared")
    with Reader(tmp_path / "out/model.bin") as ours, Reader(tmp_path / "declared/model.bin") as his:
        assert list(ours.tensors) == list(his.tensors)
        assert all(bytes(ours.memory(n)) == bytes(his.memory(n)) for n in ours.tensors)
    stored = json.loads((tmp_path / "out" / "report.json").read_text())["masters"]
    assert stored["trained"] and len(stored["statistics"]["tensors"]) == 42


@pytest.mark.parametrize("form", ["bin", "packed"])
def test_random_masters_are_rejected_and_can_be_forced(form, tmp_path):
    source = random_masters(tmp_path)
    with pytest.raises(ConvertError) as caught:
        quantize(source, tmp_path / "out", form=form)
    assert caught.value.code == "not-trained"
    assert "excess at the threshold" in str(caught.value) and "kurtosis 3.0" in str(caught.value)
    assert not (tmp_path / "out").exists()
    report = quantize(source, tmp_path / "out", form=form, assume_trained=True)
    assert report.forced and not report.trained and (tmp_path / "out").is_dir()
    assert any("nothing shows" in line for line in report.lines())


def trained_model(folder, ternary):
    """A small model that knows TEXT, trained with or without the rounding; its masters."""
    family = dataclasses.replace(FAMILIES["bitnet-online"], hidden=64, inter=128, vocab=258)
    config = hf_writer.config_dict(dataclasses.replace(family, head_dim=16))
    del config["quantization_config"]
    model = BitNetForCausalLM(BitNetConfig.from_dict(config)).float()
    if ternary:
        training.replace_linears(model)
    folder.mkdir()
    hf_writer.write_tokenizer(folder, 258)
    (folder / "config.json").write_text(json.dumps(config))
    ids = torch.tensor(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT * 2).ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        loss = model(ids[None], labels=ids[None]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 1.5
    tensors = {n: p.detach().contiguous() for n, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("ternary", [True, False])
def test_a_text_decides_what_statistics_cannot(ternary, tmp_path):
    # So short a training leaves no pile-up, but the loss knows which rounding it was for.
    source = trained_model(tmp_path / "source", ternary)
    (tmp_path / "text.txt").write_text(TEXT * 3)
    with pytest.raises(ConvertError, match="--text FILE measures the loss instead"):
        quantize(source, tmp_path / "out")
    if not ternary:
        with pytest.raises(ConvertError, match="expected a model that is no worse with its weig"):
            quantize(source, tmp_path / "out", text=tmp_path / "text.txt")
        return
    report = quantize(source, tmp_path / "out", text=tmp_path / "text.txt")
    assert report.trained and report.text.loss_ternary < report.text.loss_unrounded - 0.1
    assert not report.statistics.trained


def test_packed_sources_are_for_convert(tmp_path):
    source = hf_writer.write_checkpoint(tmp_path / "source", FAMILIES["bitnet-offline"])
    with pytest.raises(ConvertError, match="ternary already; `bitnet-ops convert` is for these"):
        quantize(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "expected some words in"), (b"\xff\xfe", "expected a UTF-8 text file")],
)
def test_bad_texts(content, message, tmp_path):
    source = random_masters(tmp_path)
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(ConvertError, match=message):
        quantize(source, tmp_path / "out", text=tmp_path / "text.txt")
    with pytest.raises(ConvertError, match="text-file"):
        quantize(source, tmp_path / "out", text=tmp_path / "absent.txt")


def test_a_text_needs_a_tokenizer(tmp_path):
    source = random_masters(tmp_path)
    (source / "tokenizer.json").unlink()
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(ConvertError, match="a text needs a tokenizer"):
        quantize(source, tmp_path / "out", text=tmp_path / "text.txt")


# What is written ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bitnet-online", "llama-online", "bitnet-online-untied-fp32"])
def test_packed_folder_holds_the_writers_bytes(name, tmp_path):
    network = hf_writer.make_network(FAMILIES[name])
    source = hf_writer.write_checkpoint(tmp_path / "source", FAMILIES[name], network=network)
    quantize(source, tmp_path / "out", form="packed")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    original = load_file(source / "model.safetensors")
    for tensor, value in network.items():
        if not isinstance(value, dict):
            assert torch.equal(stored[f"{tensor}.weight"], original[f"{tensor}.weight"])
            continue
        absmean = np.abs(value["masters"]).mean()
        codes = np.clip(np.rint(value["masters"] / absmean), -1, 1).astype(np.int8)
        packed = stored[f"{tensor}.weight"].numpy().tobytes()
        assert packed == hf_writer.pack_quarters(codes).tobytes()
        assert float(stored[f"{tensor}.weight_scale"]) == pytest.approx(absmean, rel=1e-6)
    # and it means the same as the masters
    convert(source, tmp_path / "a")
    convert(tmp_path / "out", tmp_path / "b", verify=True)
    with Reader(tmp_path / "a/model.bin") as a, Reader(tmp_path / "b/model.bin") as b:
        assert all(bytes(a.memory(n)) == bytes(b.memory(n)) for n in a.tensors)
        assert [a.tensors[n].scale for n in a.tensors] == [b.tensors[n].scale for n in a.tensors]


def test_packed_folders_are_replaced_by_force_if_they_are_ours(tmp_path):
    source = hf_writer.write_checkpoint(tmp_path / "source", FAMILIES["bitnet-online"])
    quantize(source, tmp_path / "out", form="packed", assume_trained=True)
    with pytest.raises(ConvertError, match="destination-exists"):
        quantize(source, tmp_path / "out", form="packed", assume_trained=True)
    quantize(source, tmp_path / "out", form="packed", assume_trained=True, force=True)
    other = hf_writer.write_checkpoint(tmp_path / "other", FAMILIES["bitnet-offline"])
    before = sorted(path.name for path in other.iterdir())
    with pytest.raises(ConvertError, match="destination-foreign"):
        quantize(source, other, form="packed", assume_trained=True, force=True)
    assert sorted(path.name for path in other.iterdir()) == before


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    source = hf_writer.write_checkpoint(tmp_path / "source", FAMILIES["bitnet-online"])

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bitnet_ops.convert.quantize.write_safetensors", full)
    with pytest.raises(ConvertError, match="No space left.*nothing was kept.*write-failed"):
        quantize(source, tmp_path / "out", form="packed", assume_trained=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_ring_of_links_is_no_destination(tmp_path):
    source = hf_writer.write_checkpoint(tmp_path / "source", FAMILIES["bitnet-online"])
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for work, options in ((convert, {}), (quantize, {"assume_trained": True})):
        with pytest.raises(ConvertError, match="destination-foreign"):
            work(source, tmp_path / "a", force=True, **options)
        with pytest.raises(ConvertError, match="destination-"):
            work(source, tmp_path / "a" / "x", **options)


def test_streamed_safetensors_reject_what_was_not_announced(tmp_path):
    forms = {"a": (torch.float32, (2,)), "b": (torch.uint8, (3, 2))}
    a, b = torch.ones(2), torch.ones(3, 2, dtype=torch.uint8)
    file = tmp_path / "x.safetensors"
    for wrong in ([("a", a)], [("a", a), ("b", a)], [("b", b)], [("a", a), ("b", b), ("c", a)]):
        with pytest.raises(ValueError, match="safetensors: expected"):
            write_safetensors(file, forms, wrong, written_by="x")
    assert not file.exists()
    write_safetensors(file, forms, [("a", a), ("b", b)], written_by="x")
    assert torch.equal(load_file(file)["b"], b)


def test_command_line(tmp_path, capsys):
    source = random_masters(tmp_path)
    assert main(["quantize", str(source), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "[not-trained]" in error and "--assume-trained" in error
    assert main(["quantize", str(source), str(tmp_path / "out"), "--assume-trained", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["forced"] and not report["trained"]
    assert report["conversion"]["ternary"]["projections"] == 14
    again = ["quantize", str(source), str(tmp_path / "out"), "--assume-trained"]
    assert main(again) == 1 and "--force replaces it" in capsys.readouterr().err
    assert main([*again, "--force"]) == 0
    assert "wrote" in capsys.readouterr().out
