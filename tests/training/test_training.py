"""Training modules: forward and gradients against transformers and plain formulas, masters, export.

transformers' AutoBitLinear and numpy are the oracles of the layer, hf_writer's own packing that of
the exported bytes, transformers that of the exported folder. The loop itself is in
test_finetune.py.
"""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.bitnet import AutoBitLinear

import forward_fp64
import hf_writer
from bitnet_ops import training
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.language_model import load
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.packing import pack_ternary
from bitnet_ops.training import TrainableBitLinear, TrainingError, masters_from_codes
from hf_writer import FAMILIES
from isa_control import torch_threads

# Relative to the largest logit: fp32 rounding, on prompts without a rounding tie nearby.
FP32_ROUNDING = 5e-6
CLEAR_OF_TIES = 2e-5  # of a code; fp32 errs by about 1e-5
IDS = torch.randint(0, 300, (1, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def one_thread():
    with torch_threads(1):
        yield


def random(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def checkpoint(tmp_path, name, **changes):
    family = dataclasses.replace(FAMILIES[name], **changes)
    return hf_writer.write_checkpoint(tmp_path / "source", family)


def logits_of(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(ids).logits.float()


def logits_of_bin(folder, ids=IDS):
    model = load(folder, head_format="stored").model
    return model(ids, KVCache(model.config, 1, ids.shape[1], torch.float32))


def relative(a, b):
    return float((a - b).abs().max() / b.abs().max())


# The layer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_forward_and_gradients_are_those_of_transformers_bit_for_bit(dtype, bias):
    oracle = AutoBitLinear(96, 40, bias=bias, online_quant=True).to(dtype)
    layer = TrainableBitLinear(96, 40, bias=bias, dtype=dtype)
    layer.load_state_dict(oracle.state_dict())
    results = []
    for module in (layer, oracle):
        x = random(1, 2, 7, 96, dtype=dtype).requires_grad_()
        y = module(x)
        (y * random(2, *y.shape, dtype=dtype)).sum().backward()
        results.append([y, x.grad, *(p.grad for p in module.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_forward_and_gradients_are_those_of_the_formulas():
    layer, x = TrainableBitLinear(64, 32, bias=False), random(5, 9, 64).requires_grad_()
    g = random(6, 9, 32)
    layer(x).backward(g)
    w, a = layer.weight.detach().double().numpy(), x.detach().double().numpy()
    absmean = np.abs(w).mean()
    ternary = np.clip(np.rint(w / absmean), -1, 1) * absmean
    step = np.abs(a).max(-1, keepdims=True) / 127
    rounded = np.rint(a / step) * step
    bound = 64 * 2.0**-23 * np.abs(rounded).sum(-1).max() * absmean
    assert np.abs(layer(x).detach().numpy() - rounded @ ternary.T).max() < bound
    np.testing.assert_allclose(x.grad.numpy(), g.double().numpy() @ ternary, atol=1e-5)
    np.testing.assert_allclose(
        layer.weight.grad.numpy(), g.double().numpy().T @ rounded, atol=64 * 2.0**-23 * 30
    )


def test_gradient_passes_where_the_true_one_is_zero():
    # The rounding is flat almost everywhere: a true gradient would never move these masters.
    layer = TrainableBitLinear(8, 1, bias=False)
    nn.init.constant_(layer.weight, 0.02)
    before = layer(torch.ones(1, 8)).item()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    assert layer(torch.ones(1, 8)).item() < before
    assert torch.allclose(layer.weight, torch.full((1, 8), 0.02 - 3 * 0.01))


@pytest.mark.parametrize("share", [0.05, 0.31, 1.0])
def test_masters_from_codes_ternarise_to_the_codes_and_the_scale(share):
    generator = torch.Generator().manual_seed(8)
    codes = torch.randint(0, 2, (48, 130), generator=generator) * 2 - 1
    codes = (codes * (torch.rand(48, 130, generator=generator) < share)).to(torch.int8)
    masters = masters_from_codes(codes, 0.7)
    w = masters.double().numpy()
    absmean = np.abs(w).mean()
    assert absmean == pytest.approx(0.7, rel=1e-6)
    assert (np.clip(np.rint(w / absmean), -1, 1) == codes.numpy()).all()
    plain = codes.double().numpy() * 0.7  # what the obvious way would start from
    assert np.abs(plain).mean() == pytest.approx(0.7 * np.abs(codes.numpy()).mean())


def test_masters_of_nothing_but_zeros_are_zeros():
    assert not masters_from_codes(torch.zeros(4, 8, dtype=torch.int8), 1.0).any()


def test_packed_and_trainable_layers_compute_the_same():
    codes = torch.randint(-1, 2, (24, 200), generator=torch.Generator().manual_seed(4))
    packed = pack_ternary(codes.to(torch.int8), 0.25)
    layer = TrainableBitLinear.from_packed(packed)
    x = random(7, 5, 200)
    ours = layer.to_inference()
    assert torch.equal(ours.state_dict()["weight"], packed.weight)
    assert float(ours.weight_scale) == pytest.approx(0.25, rel=1e-6)
    with torch.no_grad():
        assert relative(layer(x), ours(x)) < 2e-6


# Models ------------------------------------------------------------------------------------------


def test_replacing_shares_parameters_and_leaves_the_head():
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    model.add_module("lm_head", nn.Linear(4, 9))
    before = list(model.parameters())
    assert training.replace_linears(model) == ["body.0", "body.2"]
    assert [p is q for p, q in zip(before, model.parameters(), strict=True)] == [True] * 6
    assert type(model.lm_head) is nn.Linear
    assert training.replace_linears(model) == []  # nothing left to do, and nothing to reject


def test_replacing_skips_what_it_is_told():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    assert training.replace_linears(model, skip=["1"]) == ["0", "2"]
    with pytest.raises(TrainingError, match="expected modules of the model in skip, got .'typo'"):
        training.replace_linears(model, skip=["typo"])


def test_replacing_rejects_what_has_no_masters():
    with pytest.raises(TrainingError, match="expected nn.Linear modules outside .'lm_head'., got"):
        training.replace_linears(nn.Sequential(nn.ReLU()))
    packed = nn.Sequential(AutoBitLinear(8, 8, bias=False, online_quant=False))
    with pytest.raises(TrainingError, match="expected master weights in 0, got a packed AutoBit"):
        training.replace_linears(packed)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_computes_what_an_fp64_forward_does(name, tmp_path):
    family = FAMILIES[name]
    ids, distance = forward_fp64.clear_prompt(name)
    assert distance > CLEAR_OF_TIES
    expected, _ = forward_fp64.forward(family, hf_writer.make_network(family), ids)
    source = checkpoint(tmp_path, name)
    model = training.load_for_training(source)
    kinds = [m for m in model.modules() if isinstance(m, TrainableBitLinear)]
    assert model.training and len(kinds) == 7 * family.layers
    assert relative(logits_of(model, torch.tensor([ids]))[0], expected) < FP32_ROUNDING
    convert(source, tmp_path / "out")
    again = training.load_for_training(tmp_path / "out")
    assert relative(logits_of(again, torch.tensor([ids]))[0], expected) < FP32_ROUNDING


def test_the_demo_model_loads_without_a_path():
    ids = torch.tensor([[0, 40, 41, 42, 43, 44]])
    ours = load(head_format="stored").model
    expected = ours(ids, KVCache(ours.config, 1, 6, torch.float32))
    logits = logits_of(training.load_for_training(), ids)
    assert relative(logits, expected) < 0.05 and torch.equal(logits.argmax(-1), expected.argmax(-1))


# Export ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny model whose masters have moved, in fp32, and a folder with its tokenizer."""
    folder = tmp_path_factory.mktemp("trained")
    source = checkpoint(folder, "bitnet-online")
    model = training.load_for_training(source)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    return model.eval(), source


def load_with_transformers(folder):
    """transformers' model in fp32, its offline weights repaired where 5.9 to 5.12 leave uint8."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    modules = [m for m in model.modules() if isinstance(m, AutoBitLinear)]
    assert len(modules) == 14
    for m in modules:
        if not m.online_quant and m.weight.dtype == torch.uint8:
            codes = m.weight.data.view(torch.int8).float()
            m.weight = nn.Parameter(codes, requires_grad=False)
            assert torch.isin(codes, torch.tensor([-1.0, 0.0, 1.0])).all()
    return model


@pytest.mark.parametrize("form", ["packed", "masters"])
def test_exported_folder_is_read_by_transformers(trained, form, tmp_path):
    model, source = trained
    training.export(model, tmp_path / "hf", form=form, tokenizer=source)
    assert relative(logits_of(load_with_transformers(tmp_path / "hf")), logits_of(model)) < 1e-5
    assert (tmp_path / "hf" / "tokenizer.json").is_file()


def test_packed_bytes_are_contiguous_quarters(trained, tmp_path):
    model, _ = trained
    training.export(model, tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert "lm_head.weight" not in stored  # tied
    for name, parameter in model.named_parameters():
        if "_proj" not in name:
            assert torch.equal(stored[name], parameter)
            continue
        w = parameter.detach().double().numpy()
        absmean = np.abs(w).mean()
        codes = np.clip(np.rint(w / absmean), -1, 1).astype(np.int8)
        assert stored[name].numpy().tobytes() == hf_writer.pack_quarters(codes).tobytes()
        assert float(stored[f"{name}_scale"]) == pytest.approx(absmean, rel=1e-6)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "offline",
        "modules_to_not_convert": None,
    }


def test_every_form_becomes_the_same_bin(trained, tmp_path):
    model, source = trained
    training.export(model, tmp_path / "bin", form="bin", tokenizer=source, verify=True)
    for form in ("packed", "masters"):
        training.export(model, tmp_path / form, form=form)
        convert(tmp_path / form, tmp_path / f"{form}-bin")
    expected = logits_of(model)
    for name in ("bin", "packed-bin", "masters-bin"):
        assert relative(logits_of_bin(tmp_path / name), expected) < FP32_ROUNDING, name
    report = json.loads((tmp_path / "bin" / "report.json").read_text())
    assert report["verification"]["passed"] and report["source"] == "trained-model"
    text = load(tmp_path / "bin").generate("a", max_new_tokens=3, ignore_eos=True)
    assert isinstance(text, str)


def test_export_casts_what_is_not_packed(trained, tmp_path):
    training.export(trained[0], tmp_path / "hf", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    kinds = {str(t.dtype) for name, t in stored.items() if not name.endswith("_scale")}
    assert kinds == {"torch.uint8", "torch.bfloat16"}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("form", training.export.__globals__["FORMS"])
def test_export_never_replaces_and_leaves_nothing_half(trained, form, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(ConvertError, match="destination-exists"):
        training.export(trained[0], tmp_path / "there", form=form)
    with pytest.raises(TrainingError, match="expected tokenizer.json in"):
        training.export(trained[0], tmp_path / "new", form=form, tokenizer=tmp_path / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_export_rejections(tmp_path):
    with pytest.raises(TrainingError, match="expected form one of packed, masters, bin"):
        training.export(nn.Linear(2, 2), tmp_path / "x", form="gguf")
    with pytest.raises(TrainingError, match="got none; call training.replace_linears"):
        training.export(nn.Sequential(nn.Linear(2, 2)), tmp_path / "x")
    biased = nn.Sequential(TrainableBitLinear(4, 4))
    with pytest.raises(TrainingError, match="expected projections without bias, got one in 0"):
        training.export(biased, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
