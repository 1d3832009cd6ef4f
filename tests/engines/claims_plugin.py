"""The plug-in in the engine's tables, as the installed entry point puts it there."""

from __future__ import annotations

import importlib
import types

import pytest
import torch

import engine_surfaces

pytestmark = pytest.mark.plugin


def ours(engine, name=""):
    return importlib.import_module(f"bitnet_ops.integrations.{engine.name}{name}")


def test_the_entry_point_alone_registers(engine):
    assert not engine.known_before
    config_class = ours(engine, ".quantization").BitNetConfig
    assert engine.config_class() is config_class
    assert torch.float16 not in config_class().get_supported_act_dtypes()
    report = ours(engine).doctor()
    assert report["problems"] == [] and report["active"], report


def test_registering_again_changes_nothing(engine):
    ours(engine).register()
    assert engine.config_class() is ours(engine, ".quantization").BitNetConfig


@pytest.mark.parametrize("method", ["awq", "fp8", "compressed-tensors", "bitnet"])
def test_foreign_checkpoints_are_left_alone(engine, method):
    """Engines poll every class for every checkpoint; the first truthy answer wins."""
    config_class = engine.config_class()
    assert config_class.override_quantization_method({"quant_method": method}, None) is None


def test_what_the_ordinary_suite_stands_in_for_exists(engine):
    """helpers/engine_surfaces.py names no module or member that is not real."""
    records = {"CHOICES", "CLASSES", "SPECS"}  # of the stand-ins alone
    if ours(engine).PLUGIN.version() in ("0.5.20", "0.5.21"):
        records.add("_platform_supports_mamba_cache_extra_buffer")  # of later versions
    for name, members in getattr(engine_surfaces, engine.name)().items():
        module = importlib.import_module(name)
        missing = [m for m in members if m not in records and not hasattr(module, m)]
        assert not missing, (name, missing)


@pytest.mark.of("sglang")
def test_both_tables_know_us_with_and_without_amx(monkeypatch):
    """SGLang asks another table where it sees AMX."""
    quantization = importlib.import_module("sglang.srt.layers.quantization")
    config_class = quantization.QUANTIZATION_METHODS["bitnet"]
    monkeypatch.setattr(quantization, "cpu_has_amx_support", lambda: True)
    assert quantization.get_quantization_config("bitnet") is config_class
    monkeypatch.delitem(quantization.CPU_QUANTIZATION_METHODS, "bitnet")
    with pytest.raises(ValueError, match="on CPU"):  # else AMX was not faked
        quantization.get_quantization_config("bitnet")


@pytest.mark.of("sglang")
def test_the_flag_knows_the_method_once():
    args = importlib.import_module("sglang.srt.server_args")
    assert args.add_quantization_method_choices.__self__.count("bitnet") == 1


def test_the_engine_resolves_our_model_classes(engine):
    if engine.name == "vllm":
        models = importlib.import_module("vllm.model_executor.models")
        known = models.ModelRegistry.get_supported_archs()
        assert {*ours(engine).MODELS} <= set(known)
        asks = importlib.import_module("vllm.model_executor.models.interfaces")
        converted = ours(engine, ".converted")
        for name in ("is_hybrid", "has_inner_state", "supports_mamba_prefix_caching"):
            assert getattr(asks, name)(converted.HybridForCausalLM), name
            assert not getattr(asks, name)(converted.ConvertedForCausalLM), name
        return
    registry = importlib.import_module("sglang.srt.models.registry").ModelRegistry
    for name in ("BitNetForCausalLM", "BitnetOpsForCausalLM"):
        model_class, _ = registry.resolve_model_cls([name])
        assert model_class.__module__.startswith("bitnet_ops."), model_class


@pytest.mark.of("sglang")
@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [
        ("bitnet", "BitNetForCausalLM", "the sub-norms span all heads"),
        ("whole", "BitnetOpsForCausalLM", "a converted model runs on one rank"),
    ],
)
def test_several_ranks_are_rejected_where_one_computes(engine, monkeypatch, module, name, reason):
    """By the model classes themselves too, for who starts SGLang without our launcher."""
    from bitnet_ops.integrations import CheckpointError

    models = ours(engine, f".models.{module}")
    two = types.SimpleNamespace(tp_size=2, pp_size=1)
    monkeypatch.setattr(models, "get_parallel", lambda: two)
    with pytest.raises(CheckpointError, match=reason):
        getattr(models, name)(None)


@pytest.mark.of("sglang")
def test_sglangs_model_loads_strictly(engine):
    """A tensor without a place and a parameter without a tensor are rejected."""
    from bitnet_ops.integrations import CheckpointError

    bitnet = ours(engine, ".models.bitnet")
    model_class = bitnet.BitNetForCausalLM
    model = model_class.__new__(model_class)  # load_weights without the engine that __init__ needs
    torch.nn.Module.__init__(model)
    model.config, model._loaded = types.SimpleNamespace(tie_word_embeddings=True), set()
    model.norm = bitnet.Norm(4)
    gains = torch.tensor([1.0, 2.0, 3.0, 4.0])
    with pytest.raises(CheckpointError, match=r"got none for \['norm.weight'\]"):
        model.load_weights([])
    for name in ("layers.0.self_attn.q_proj.bias", "layers.0.bogus.weight"):
        with pytest.raises(CheckpointError, match=f"got '{name}'"):
            model.load_weights([(name, gains)])
    model.load_weights([("norm.weight", gains), ("lm_head.weight", gains)])
    assert torch.equal(model.norm.weight.data, gains)
