"""The vLLM plug-in against a hand-written stand-in of vLLM's surface: registration, config, layers.

No engine is installed here; helpers/vllm_surface.py behaves as vLLM does where a plug-in can
notice, and scripts/prove_vllm holds both against the real package. Oracle: transformers.
"""

from __future__ import annotations

import importlib.metadata
import logging
import types

import pytest
import torch

import bitnet_ops.integrations.vllm as plugin
import vllm_surface
from bitnet_ops import ops
from bitnet_ops.integrations import CheckpointError, ScaleRule
from bitnet_ops.integrations._core import canonical_rows
from hf_flavours import checkpoint, hf_bound, hf_linear

QUANTIZATION = "vllm.model_executor.layers.quantization"
SETTINGS = {
    ScaleRule.DIVIDE: {},
    ScaleRule.MULTIPLY: {"linear_class": "autobitlinear"},
    ScaleRule.ONLINE: {"linear_class": "autobitlinear", "quantization_mode": "online"},
}
X = torch.randn(1, 5, 192, generator=torch.Generator().manual_seed(11))


@pytest.fixture
def surface(monkeypatch):
    monkeypatch.setattr(plugin, "vllm_version", lambda: plugin.TESTED_VERSIONS[-1])
    modules = vllm_surface.install(monkeypatch)
    plugin.register()
    return modules


@pytest.fixture
def config_class(surface):
    return surface[QUANTIZATION].CLASSES["bitnet"]


# Registration -------------------------------------------------------------------------------------


def test_register_enters_the_method_and_the_models_and_leaves_others_alone(surface):
    from bitnet_ops.integrations.vllm.config import BitNetConfig

    assert surface[QUANTIZATION].CLASSES == {"bitnet": BitNetConfig}
    assert surface["vllm.model_executor.models"].ModelRegistry.models == {
        "LlamaForCausalLM": "vllm's own",
        "BitNetForCausalLM": plugin.MODEL,
        "BitnetOpsForCausalLM": plugin.MODEL,
    }


def test_register_twice_changes_nothing(surface):
    plugin.register()
    assert surface[QUANTIZATION].QUANTIZATION_METHODS == ["awq", "fp8", "bitnet"]


def test_register_asks_for_amx_in_every_process_that_calls_it(surface, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(1) or True)
    plugin.register()
    assert asked == [1] and plugin.request_amx() is True
    monkeypatch.delattr(torch.cpu, "_init_amx")
    assert plugin.request_amx() is False  # a torch without it has no tiles to offer


def test_a_vllm_of_another_surface_is_named_with_its_version(monkeypatch, caplog):
    modules = vllm_surface.install(monkeypatch)
    del modules[QUANTIZATION].register_quantization_config
    monkeypatch.setattr(plugin, "vllm_version", lambda: "9.9.9")
    with caplog.at_level(logging.WARNING), pytest.raises(plugin.RegistrationError) as caught:
        plugin.register()
    assert "register_quantization_config' in vllm 9.9.9; tested with vllm 0.32.0" in str(
        caught.value
    )
    assert "tested with vllm 0.32.0, not with 9.9.9" in caplog.text
    assert "Unknown quantization method" in caplog.text  # what vLLM will say instead


def test_entry_point_of_the_installed_distribution_is_register():
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    ours = [point for point in points if point.name == "bitnet"]
    assert len(ours) == 1 and ours[0].load() is plugin.register


def test_doctor_is_content_with_a_good_set_up(surface, monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    report = plugin.doctor()
    assert report["problems"] == [] and report["registered"] and report["active"]


def test_doctor_names_what_is_wrong_and_never_raises(monkeypatch):
    modules = vllm_surface.install(monkeypatch)
    del modules[QUANTIZATION].register_quantization_config
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.32.0")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    text = "\n".join(plugin.doctor()["problems"])
    assert "registration failed: RegistrationError" in text
    assert "VLLM_PLUGINS=other leaves 'bitnet' out" in text
    monkeypatch.setattr(plugin, "ENTRY_POINT_GROUP", "no.such.group")
    assert "no entry point of group no.such.group" in "\n".join(plugin.doctor()["problems"])


@pytest.mark.parametrize(
    ("listed", "active"),
    [(None, True), ("bitnet", True), ("other,bitnet", True), ("other", False), ("", False)],
)
def test_a_list_of_plug_ins_is_obeyed_as_vllm_obeys_it(surface, monkeypatch, listed, active):
    if listed is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", listed)
    assert plugin.status()["active"] is active


# Configuration ------------------------------------------------------------------------------------


def test_config_can_be_made_without_arguments_and_answers_as_vllm_asks(config_class):
    config = config_class()
    assert config.get_name() == "bitnet" and config.settings.rule is ScaleRule.DIVIDE
    assert config.get_supported_act_dtypes() == [torch.bfloat16, torch.float32]
    assert config_class.get_min_capability() < 0 and config_class.get_config_filenames() == []
    assert "bitlinear" in repr(config)


@pytest.mark.parametrize("method", ["awq", "fp8", "bitnet"])
def test_config_never_takes_over_a_checkpoint(config_class, method):
    assert config_class.override_quantization_method({"quant_method": method}, None) is None


def test_config_warns_of_keys_it_does_not_know(config_class, caplog):
    config_class.from_config({"quant_method": "bitnet", "modules_to_not_convert": None})
    assert not caplog.records
    config_class.from_config({"quant_method": "bitnet", "colour": 64})
    assert "colour" in caplog.text


def test_untied_ternary_head_is_rejected(config_class):
    untied = types.SimpleNamespace(tie_word_embeddings=False)
    config = config_class.from_config({"modules_to_not_convert": ["model.layers.0"]})
    with pytest.raises(CheckpointError, match="modules_to_not_convert to list lm_head"):
        config.maybe_update_config("m", untied)
    config.maybe_update_config("m", types.SimpleNamespace(tie_word_embeddings=True))
    config_class.from_config({"modules_to_not_convert": ["lm_head"]}).maybe_update_config(
        "m", untied
    )


@pytest.mark.parametrize(
    ("listed", "prefix", "skipped"),
    [
        (["lm_head"], "lm_head", True),
        (["lm_head"], "model.layers.0.mlp.down_proj", False),
        (["model.layers.1"], "model.layers.1.mlp.down_proj", True),
        (["down_proj"], "model.layers.1.mlp.down_proj", True),
        (["q_proj", "k_proj", "v_proj"], "model.layers.0.self_attn.qkv_proj", True),
        (["o_proj"], "model.layers.0.self_attn.qkv_proj", False),
    ],
)
def test_skipped_linears_are_unquantised_never_none(config_class, listed, prefix, skipped):
    config = config_class({"modules_to_not_convert": listed})
    layer = vllm_surface.ReplicatedLinear(64, 32, bias=False, quant_config=config, prefix=prefix)
    wanted = "UnquantizedLinearMethod" if skipped else "BitNetLinearMethod"
    assert type(layer.quant_method).__name__ == wanted


def test_a_fused_layer_skipped_in_part_is_rejected(config_class):
    config = config_class({"modules_to_not_convert": ["k_proj"]})
    with pytest.raises(CheckpointError, match="all or none of .*k_proj"):
        config.is_skipped("model.layers.0.self_attn.qkv_proj")


def test_what_is_no_linear_gets_no_method_and_an_unknown_linear_is_rejected(config_class):
    assert config_class().get_quant_method(torch.nn.Embedding(4, 4), "model.embed_tokens") is None
    with pytest.raises(CheckpointError, match="got OddLinear at odd"):
        vllm_surface.OddLinear(64, 32, quant_config=config_class(), prefix="odd")


def test_sub_norms_over_several_ranks_are_rejected_with_the_reason(config_class):
    config = config_class()
    config.maybe_update_config("m", types.SimpleNamespace(model_type="bitnet"))
    make = vllm_surface.RowParallelLinear
    make(192, 24, bias=False, quant_config=config)
    with pytest.raises(CheckpointError, match="parallel size 1, got 2 at o.*sub-norms span"):
        make(192, 24, bias=False, quant_config=config, prefix="o", tp_size=2)


# Layers -------------------------------------------------------------------------------------------


def make(config_class, rule, cls, *args, **options):
    options = {"bias": False, "params_dtype": torch.float32, "prefix": "layer", **options}
    return cls(*args, quant_config=config_class(SETTINGS[rule]), **options)


def fill(layer, parts, ids):
    for (weight, stored, *_), shard_id in zip(parts, ids, strict=True):
        extra = () if shard_id is None else (shard_id,)
        layer.weight.weight_loader(layer.weight, weight, *extra)
        if stored is not None:
            layer.weight_scale.weight_loader(layer.weight_scale, stored, *extra)
    layer.quant_method.process_weights_after_loading(layer)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def assert_equals_transformers(rule, y, x, part):
    weight, stored, codes, scale = part
    theirs = hf_linear(rule, weight, stored, *codes.shape)(x)
    assert ((y - theirs).abs() <= hf_bound(x, scale)).all()


@pytest.mark.parametrize("rule", list(ScaleRule))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_replicated_merged_and_column_linears_on_every_rank(config_class, rule, ranks):
    parts = [checkpoint(rule, 32, 192, seed) for seed in (2, 3)]
    columns, halves = [], []
    for rank in range(ranks):
        options = {"tp_rank": rank, "tp_size": ranks}
        cls = vllm_surface.MergedColumnParallelLinear
        layer = fill(make(config_class, rule, cls, 192, [32, 32], **options), parts, (0, 1))
        halves.append(layer(X)[0].chunk(2, -1))
        cls = vllm_surface.ColumnParallelLinear
        layer = fill(make(config_class, rule, cls, 192, 32, **options), parts[:1], [None])
        columns.append(layer(X)[0])
        whole = make(config_class, rule, vllm_surface.ReplicatedLinear, 192, 32)
        assert_equals_transformers(rule, fill(whole, parts[:1], [None])(X)[0], X, parts[0])
    for i, part in enumerate(parts):
        assert_equals_transformers(rule, torch.cat([rank[i] for rank in halves], -1), X, part)
    assert_equals_transformers(rule, torch.cat(columns, -1), X, parts[0])


@pytest.mark.parametrize("rule", list(ScaleRule))
@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 2), (2, 2), (2, 1), (4, 2), (4, 1)])
def test_qkv_on_every_rank_with_kv_heads_split_or_replicated(config_class, rule, ranks, kv_heads):
    heads, dim = 4, 8
    rows = (heads * dim, kv_heads * dim, kv_heads * dim)
    parts = [checkpoint(rule, size, 192, seed) for seed, size in enumerate(rows, 4)]
    replicas, pieces = max(1, ranks // kv_heads), []
    for rank in range(ranks):
        cls = vllm_surface.QKVParallelLinear
        options = {"tp_rank": rank, "tp_size": ranks}
        layer = make(config_class, rule, cls, 192, dim, heads, kv_heads, **options)
        y = fill(layer, parts, ("q", "k", "v"))(X)[0]
        pieces.append(y.split(layer.output_partition_sizes, -1))
    for i, part in enumerate(parts):
        every = 1 if i == 0 else replicas
        assert_equals_transformers(rule, torch.cat([p[i] for p in pieces[::every]], -1), X, part)


@pytest.mark.parametrize("rule", list(ScaleRule))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_row_parallel_linears_of_all_ranks_add_up_to_what_one_computes(
    config_class, rule, ranks, monkeypatch
):
    from bitnet_ops.integrations.vllm import linear

    absmax = X.abs().amax(-1).view(-1, 1)
    monkeypatch.setattr(
        linear.BitNetLinearMethod, "max_over_ranks", lambda self, x: torch.maximum(x, absmax)
    )
    part = checkpoint(rule, 24, 192, 7)
    codes, total = [], torch.zeros(1, 5, 24)
    for rank in range(ranks):
        cls = vllm_surface.RowParallelLinear
        layer = make(config_class, rule, cls, 192, 24, tp_rank=rank, tp_size=ranks)
        fill(layer, [part], [None])
        codes.append(ops.unpack(canonical_rows(layer), 192 // ranks))
        total += layer(X.chunk(ranks, -1)[rank].contiguous())[0]
    assert torch.equal(torch.cat(codes, 1), part[2])
    assert_equals_transformers(rule, total, X, part)


def test_a_layer_of_some_columns_rejects_an_input_of_all(config_class):
    rule = ScaleRule.MULTIPLY
    cls = vllm_surface.RowParallelLinear
    layer = make(config_class, rule, cls, 192, 24, tp_rank=0, tp_size=2)
    fill(layer, [checkpoint(rule, 24, 192, 7)], [None])
    with pytest.raises(ValueError, match=r"expected x \[..., 96\], got \[1, 5, 192\]"):
        layer(X)


def test_column_split_bias_goes_through_our_loader(config_class):
    rule = ScaleRule.DIVIDE
    part, bias = checkpoint(rule, 64, 192, 1), torch.randn(64)
    cls = vllm_surface.ColumnParallelLinear
    layer = make(config_class, rule, cls, 192, 64, bias=True, tp_rank=1, tp_size=2)
    with pytest.raises(CheckpointError, match=r"bias floating-point \[64\]"):
        layer.bias.weight_loader(layer.bias, bias[:32])
    layer.bias.weight_loader(layer.bias, bias)
    fill(layer, [part], [None])
    theirs = hf_linear(rule, part[0], part[1], 64, 192, bias)(X)[..., 32:]
    assert ((layer(X)[0] - theirs).abs() <= hf_bound(X, part[3]) + 2**-23 * theirs.abs()).all()


# What cannot be served ----------------------------------------------------------------------------


def test_bias_that_transformers_would_scale_is_rejected(config_class):
    with pytest.raises(CheckpointError, match="expected no bias.*in layer"):
        make(config_class, ScaleRule.MULTIPLY, vllm_surface.ReplicatedLinear, 64, 8, bias=True)


def test_float16_is_rejected_when_a_layer_is_made_and_when_it_runs(config_class):
    rule = ScaleRule.MULTIPLY
    message = "bfloat16 or float32, got torch.float16 in layer; start the engine with dtype bfl"
    with pytest.raises(CheckpointError, match=message):
        cls = vllm_surface.ReplicatedLinear
        make(config_class, rule, cls, 192, 24, params_dtype=torch.float16)
    part = checkpoint(rule, 24, 192, 7)
    layer = fill(make(config_class, rule, vllm_surface.ReplicatedLinear, 192, 24), [part], [None])
    with pytest.raises(CheckpointError, match=message):
        layer(X.half())


def test_misshapen_shards_and_bytes_of_the_other_order_are_rejected(config_class):
    rule = ScaleRule.MULTIPLY
    layer = make(config_class, rule, vllm_surface.MergedColumnParallelLinear, 192, [128, 128])
    weight = checkpoint(rule, 128, 192, 1)[0]
    for wrong, message in (
        (weight[:8], r"expected weight \[32, 192\] for 128 outputs.*got \[8, 192\].*is short"),
        (torch.zeros(128, 48, dtype=torch.uint8), r"got \[128, 48\] in layer; .*packed along"),
        (torch.zeros(128, 64, dtype=torch.uint8), r"got \[128, 64\] in layer; .*packed along"),
        (weight | 3, "3"),
        (weight.float(), "expected packed uint8 weights"),
    ):
        with pytest.raises(CheckpointError, match=message):
            layer.weight.weight_loader(layer.weight, wrong, 0)
    with pytest.raises(CheckpointError, match="shard id among 0, 1, got None"):
        layer.weight.weight_loader(layer.weight, weight)


def test_incomplete_layer_is_rejected_after_loading_but_dummy_weights_are_not(
    surface, config_class
):
    layer = make(config_class, ScaleRule.MULTIPLY, vllm_surface.ReplicatedLinear, 192, 8)
    with pytest.raises(CheckpointError, match="got none for weight of shard None"):
        layer.quant_method.process_weights_after_loading(layer)
    load = types.SimpleNamespace(load_format="dummy")
    current = types.SimpleNamespace(load_config=load)
    surface["vllm.config"].get_current_vllm_config = lambda: current
    layer.quant_method.process_weights_after_loading(layer)
    load.load_format = "auto"
    with pytest.raises(CheckpointError, match="got none for weight of shard None"):
        layer.quant_method.process_weights_after_loading(layer)
