"""L1 of the SGLang integration: the plug-in against a hand-written stand-in of SGLang's surface.

No engine is installed here; helpers/sglang_surface.py behaves as SGLang does where a plug-in can
notice, and scripts/prove_sglang holds both against the real package. Oracle of the numbers:
transformers.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import sys
import types
from collections.abc import Mapping

import pytest
import torch

import bitnet_ops.integrations.sglang as plugin
import sglang_surface
from bitnet_ops import ops
from bitnet_ops.integrations import CheckpointError, ScaleRule
from bitnet_ops.integrations._core import canonical_rows
from hf_flavours import checkpoint, hf_bound, hf_linear

QUANTIZATION = "sglang.srt.layers.quantization"
TABLES = ("QUANTIZATION_METHODS", "CPU_QUANTIZATION_METHODS")
EXTERNAL = "SGLANG_EXTERNAL_MODEL_PACKAGE"
SETTINGS = {
    ScaleRule.DIVIDE: {},
    ScaleRule.MULTIPLY: {"linear_class": "autobitlinear"},
    ScaleRule.ONLINE: {"linear_class": "autobitlinear", "quantization_mode": "online"},
}


class LazyTable(Mapping):
    """A read-only registry of "module:Class" strings, as SGLang plans it."""

    def __init__(self):
        self.specs = {"awq": "somewhere:AWQConfig"}

    def __getitem__(self, key):
        module, name = self.specs[key].split(":")
        return getattr(importlib.import_module(module), name)

    def __iter__(self):
        return iter(self.specs)

    def __len__(self):
        return len(self.specs)


class FrozenTable(Mapping):
    """A read-only registry of a kind that nobody foresaw."""

    def __getitem__(self, key):
        raise KeyError(key)

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


@pytest.fixture
def no_variable(monkeypatch):
    monkeypatch.setenv(EXTERNAL, "")  # so that undoing removes what register() leaves
    monkeypatch.delenv(EXTERNAL)


@pytest.fixture
def surface(monkeypatch, no_variable):
    modules = sglang_surface.install(monkeypatch)
    plugin.register()
    return modules


@pytest.fixture
def config_class(surface):
    return surface[QUANTIZATION].QUANTIZATION_METHODS["bitnet"]


# Registration -------------------------------------------------------------------------------------


def test_register_enters_both_tables_the_choices_and_the_model(surface):
    from bitnet_ops.integrations.sglang.config import BitNetConfig

    for name in TABLES:
        assert getattr(surface[QUANTIZATION], name) == {"bitnet": BitNetConfig}
    assert surface["sglang.srt.server_args"].CHOICES == ["awq", "fp8", "bitnet"]
    assert os.environ[EXTERNAL] == "bitnet_ops.integrations.sglang.models"
    assert "sglang.srt.models.registry" not in sys.modules  # importing it imports every model


def test_torch_natives_attention_is_replaced_only_where_asked_for(monkeypatch, no_variable):
    name = "sglang.srt.layers.attention.attention_registry"
    monkeypatch.delenv(plugin.ATTENTION_VARIABLE, raising=False)
    backends = sglang_surface.install(monkeypatch)[name].ATTENTION_BACKENDS
    plugin.register()
    assert backends == {"torch_native": None}
    monkeypatch.setenv(plugin.ATTENTION_VARIABLE, "1")
    plugin.register()
    assert backends == {"torch_native": plugin._attention_backend}


def test_register_twice_changes_nothing(surface):
    plugin.register()
    assert surface["sglang.srt.server_args"].CHOICES == ["awq", "fp8", "bitnet"]
    assert len(surface[QUANTIZATION].QUANTIZATION_METHODS) == 1


def test_register_enters_a_lazy_registry_by_name(monkeypatch, no_variable):
    modules = sglang_surface.install(monkeypatch, LazyTable)
    plugin.register()
    from bitnet_ops.integrations.sglang.config import BitNetConfig

    for name in TABLES:
        assert getattr(modules[QUANTIZATION], name)["bitnet"] is BitNetConfig


def test_unknown_kind_of_table_is_a_named_error_in_the_log_too(monkeypatch, no_variable, caplog):
    sglang_surface.install(monkeypatch, FrozenTable)
    monkeypatch.setattr(plugin, "sglang_version", lambda: "9.9.9")
    with caplog.at_level(logging.ERROR), pytest.raises(plugin.RegistrationError) as caught:
        plugin.register()
    assert "QUANTIZATION_METHODS to be a mutable mapping" in str(caught.value)
    assert "FrozenTable in sglang 9.9.9; tested with sglang 0.5.20" in str(caught.value)
    assert "Unknown quantization method" in caplog.text  # what SGLang will say instead


def test_missing_table_is_a_named_error(monkeypatch, no_variable):
    modules = sglang_surface.install(monkeypatch)
    del modules[QUANTIZATION].CPU_QUANTIZATION_METHODS
    with pytest.raises(plugin.RegistrationError, match="the table CPU_QUANTIZATION_METHODS"):
        plugin.register()


def test_a_package_set_by_the_user_is_kept_and_ours_registered_beside_it(monkeypatch):
    modules = sglang_surface.install(monkeypatch, registry_imported=True)
    monkeypatch.setenv(EXTERNAL, "theirs")
    plugin.register()
    assert os.environ[EXTERNAL] == "theirs"
    registry = modules["sglang.srt.models.registry"].ModelRegistry
    assert registry.packages == [(plugin.MODEL_PACKAGE, True)]


def test_a_registry_imported_before_us_is_told(monkeypatch, no_variable):
    modules = sglang_surface.install(monkeypatch, registry_imported=True)
    plugin.register()
    registry = modules["sglang.srt.models.registry"].ModelRegistry
    assert registry.packages == [(plugin.MODEL_PACKAGE, True)]


def test_entry_point_of_the_installed_distribution_is_register():
    points = importlib.metadata.entry_points(group="sglang.srt.plugins")
    ours = [point for point in points if point.name == "bitnet"]
    assert len(ours) == 1 and ours[0].load() is plugin.register


def test_doctor_is_content_with_a_good_set_up(surface, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    report = plugin.doctor()
    assert report["problems"] == []
    assert report["entry_point"] and report["registered"] == dict.fromkeys(TABLES, True)


def test_doctor_names_what_is_wrong_and_never_raises(monkeypatch, no_variable):
    sglang_surface.install(monkeypatch, FrozenTable)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(plugin, "ENTRY_POINT_GROUP", "no.such.group")
    text = "\n".join(plugin.doctor()["problems"])
    assert "registration failed: RegistrationError" in text
    assert "no entry point of group no.such.group" in text
    assert "SGLANG_USE_CPU_ENGINE is not 1" in text


# Configuration ------------------------------------------------------------------------------------


def test_config_can_be_made_without_arguments_and_answers_as_sglang_asks(config_class):
    config = config_class()
    assert config.get_name() == "bitnet" and config.settings.rule is ScaleRule.DIVIDE
    assert config.get_supported_act_dtypes() == [torch.bfloat16, torch.float32]
    assert config_class.get_min_capability() == 0 and config_class.get_config_filenames() == []
    assert config.get_scaled_act_names() == []
    assert "bitlinear" in repr(config)


@pytest.mark.parametrize("method", ["awq", "fp8", "bitnet"])
def test_config_never_takes_over_a_checkpoint(config_class, method):
    assert config_class.override_quantization_method({"quant_method": method}, None) is None


def test_config_warns_of_keys_it_does_not_know_and_knows_sglangs_own(config_class, caplog):
    config_class.from_config({"quant_method": "bitnet", "packed_modules_mapping": {}})
    assert not caplog.records
    config_class.from_config({"quant_method": "bitnet", "group_size": 64})
    assert "group_size" in caplog.text


def test_untied_ternary_head_is_rejected(config_class):
    settings = {"modules_to_not_convert": ["model.layers.0"]}
    untied = types.SimpleNamespace(tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="modules_to_not_convert to list lm_head"):
        config_class.from_config({**settings, "hf_config": untied})
    tied = types.SimpleNamespace(tie_word_embeddings=True)
    config_class.from_config({**settings, "hf_config": tied})
    config_class.from_config({"modules_to_not_convert": ["lm_head"], "hf_config": untied})
    config_class.from_config({"modules_to_not_convert": None, "hf_config": untied})


@pytest.mark.parametrize(
    ("listed", "prefix", "skipped"),
    [
        (["lm_head"], "lm_head", True),
        (["lm_head"], "model.layers.0.mlp.down_proj", False),
        (["model.layers.1"], "model.layers.1.mlp.down_proj", True),
        (["down_proj"], "model.layers.1.mlp.down_proj", True),
        (["q_proj", "k_proj", "v_proj"], "model.layers.0.self_attn.qkv_proj", True),
        (["model.layers.0.self_attn"], "model.layers.0.self_attn.qkv_proj", True),
        (["o_proj"], "model.layers.0.self_attn.qkv_proj", False),
    ],
)
def test_skipped_linears_are_unquantised_never_none(surface, config_class, listed, prefix, skipped):
    config = config_class({"modules_to_not_convert": listed})
    layer = sglang_surface.ReplicatedLinear(64, 32, bias=False, quant_config=config, prefix=prefix)
    wanted = "UnquantizedLinearMethod" if skipped else "BitNetLinearMethod"
    assert type(layer.quant_method).__name__ == wanted


def test_a_fused_layer_skipped_in_part_is_rejected(config_class):
    config = config_class({"modules_to_not_convert": ["k_proj"]})
    with pytest.raises(CheckpointError, match="all or none of .*k_proj"):
        config.is_skipped("model.layers.0.self_attn.qkv_proj")


def test_what_is_no_linear_gets_no_method_and_an_unknown_linear_is_rejected(surface, config_class):
    assert config_class().get_quant_method(torch.nn.Embedding(4, 4), "model.embed_tokens") is None
    with pytest.raises(CheckpointError, match="got OddLinear at odd"):
        sglang_surface.OddLinear(64, 32, quant_config=config_class(), prefix="odd")


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


X = torch.randn(1, 5, 192, generator=torch.Generator().manual_seed(11))


@pytest.mark.parametrize("rule", list(ScaleRule))
def test_replicated_linear_serves_what_transformers_computes(config_class, rule):
    part = checkpoint(rule, 48, 192, 1)
    layer = make(config_class, rule, sglang_surface.ReplicatedLinear, 192, 48)
    y, output_bias = fill(layer, [part], [None])(X)
    assert output_bias is None and y.shape == (1, 5, 48)
    assert_equals_transformers(rule, y, X, part)


@pytest.mark.parametrize("rule", list(ScaleRule))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_merged_and_column_parallel_linears_on_every_rank(config_class, rule, ranks):
    parts = [checkpoint(rule, 32, 192, seed) for seed in (2, 3)]
    columns, halves = [], []
    for rank in range(ranks):
        options = {"tp_rank": rank, "tp_size": ranks}
        cls = sglang_surface.MergedColumnParallelLinear
        layer = fill(make(config_class, rule, cls, 192, [32, 32], **options), parts, (0, 1))
        halves.append(layer(X)[0].chunk(2, -1))
        cls = sglang_surface.ColumnParallelLinear
        layer = fill(make(config_class, rule, cls, 192, 32, **options), parts[:1], [None])
        columns.append(layer(X)[0])
    for i, part in enumerate(parts):
        assert_equals_transformers(rule, torch.cat([rank[i] for rank in halves], -1), X, part)
    assert_equals_transformers(rule, torch.cat(columns, -1), X, parts[0])


@pytest.mark.parametrize("rule", list(ScaleRule))
@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 2), (2, 2), (2, 1), (4, 2)])
def test_qkv_on_every_rank_with_kv_heads_split_or_replicated(config_class, rule, ranks, kv_heads):
    heads, dim = 4, 8
    rows = (heads * dim, kv_heads * dim, kv_heads * dim)
    parts = [checkpoint(rule, size, 192, seed) for seed, size in enumerate(rows, 4)]
    replicas = max(1, ranks // kv_heads)
    pieces = []
    for rank in range(ranks):
        layer = make(
            config_class,
            rule,
            sglang_surface.QKVParallelLinear,
            192,
            dim,
            heads,
            kv_heads,
            tp_rank=rank,
            tp_size=ranks,
        )
        y = fill(layer, parts, ("q", "k", "v"))(X)[0]
        pieces.append(y.split(layer.output_partition_sizes, -1))
    for i, part in enumerate(parts):
        every = 1 if i == 0 else replicas
        assert_equals_transformers(rule, torch.cat([p[i] for p in pieces[::every]], -1), X, part)
        for rank in range(ranks):  # replicas hold the same head
            assert torch.equal(pieces[rank][i], pieces[rank // every * every][i])


@pytest.mark.parametrize("rule", list(ScaleRule))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_row_parallel_linears_of_all_ranks_add_up_to_what_one_computes(
    config_class, rule, ranks, monkeypatch
):
    """Each holds its columns, and rounds its inputs with the absmax of the whole token."""
    from bitnet_ops.integrations.sglang import linear

    absmax = X.abs().amax(-1).view(-1, 1)
    monkeypatch.setattr(
        linear.BitNetLinearMethod, "max_over_ranks", lambda self, x: torch.maximum(x, absmax)
    )
    part = checkpoint(rule, 24, 192, 7)
    codes, total = [], torch.zeros(1, 5, 24)
    for rank in range(ranks):
        cls = sglang_surface.RowParallelLinear
        layer = make(config_class, rule, cls, 192, 24, tp_rank=rank, tp_size=ranks)
        fill(layer, [part], [None])
        codes.append(ops.unpack(canonical_rows(layer), 192 // ranks))
        total += layer(X.chunk(ranks, -1)[rank].contiguous())[0]
    assert torch.equal(torch.cat(codes, 1), part[2])
    assert_equals_transformers(rule, total, X, part)


def test_a_layer_of_some_columns_rejects_an_input_of_all(config_class):
    cls, rule = sglang_surface.RowParallelLinear, ScaleRule.MULTIPLY
    layer = make(config_class, rule, cls, 192, 24, tp_rank=0, tp_size=2)
    fill(layer, [checkpoint(rule, 24, 192, 7)], [None])
    with pytest.raises(ValueError, match=r"expected x \[..., 96\], got \[1, 5, 192\]"):
        layer(X)


def test_parameters_do_not_carry_the_engines_clipping_loader(config_class):
    rule = ScaleRule.MULTIPLY
    short = checkpoint(rule, 32, 192, 1)[0]
    plain = sglang_surface.ColumnParallelLinear(192, 128, bias=False)
    plain.weight_loader(plain.weight, torch.ones(32, 192))
    assert int(plain.weight.abs().sum(1).ne(0).sum()) == 32  # taken in silence: the trap
    layer = make(config_class, rule, sglang_surface.ColumnParallelLinear, 192, 128)
    with pytest.raises(CheckpointError, match=r"expected weight \[32, 192\] for 128 outputs"):
        layer.weight.weight_loader(layer.weight, short)


def test_bias_goes_through_our_loader_and_must_arrive(config_class):
    rule = ScaleRule.DIVIDE
    part, bias = checkpoint(rule, 64, 192, 1), torch.randn(64)
    cls = sglang_surface.ColumnParallelLinear
    layer = make(config_class, rule, cls, 192, 64, bias=True, tp_rank=1, tp_size=2)
    with pytest.raises(
        CheckpointError, match=r"bias floating-point \[64\], got torch.float32 \[32\]"
    ):
        layer.bias.weight_loader(layer.bias, bias[:32])
    with pytest.raises(CheckpointError, match="got none for bias of shard None"):
        fill(layer, [part], [None])
    layer.bias.weight_loader(layer.bias, bias)
    layer.quant_method.process_weights_after_loading(layer)
    theirs = hf_linear(rule, part[0], part[1], 64, 192, bias)(X)[..., 32:]
    assert ((layer(X)[0] - theirs).abs() <= hf_bound(X, part[3]) + 2**-23 * theirs.abs()).all()
    layer.skip_bias_add = True
    y, returned = layer(X)
    assert returned is layer.bias and not torch.equal(y, theirs)


def test_bias_that_transformers_would_scale_is_rejected(config_class):
    with pytest.raises(CheckpointError, match="expected no bias.*in layer"):
        make(config_class, ScaleRule.MULTIPLY, sglang_surface.ReplicatedLinear, 64, 8, bias=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params_dtype": torch.float16}, "bfloat16 or float32, got torch.float16 in layer"),
        ({"use_presharded_weights": True}, "already split by rank"),
        ({"tp_rank": 0, "tp_size": 3}, "expected output size 64 to divide evenly over 3"),
    ],
)
def test_layers_that_cannot_be_served_are_rejected_when_made(config_class, options, message):
    with pytest.raises(CheckpointError, match=message):
        make(
            config_class,
            ScaleRule.MULTIPLY,
            sglang_surface.ColumnParallelLinear,
            192,
            64,
            **options,
        )


def test_incomplete_layer_is_rejected_after_loading_but_dummy_weights_are_not(
    config_class, monkeypatch
):
    layer = make(config_class, ScaleRule.MULTIPLY, sglang_surface.ReplicatedLinear, 192, 8)
    with pytest.raises(CheckpointError, match="got none for weight of shard None"):
        layer.quant_method.process_weights_after_loading(layer)
    context = types.ModuleType("sglang.srt.runtime_context")
    context.get_model = lambda: types.SimpleNamespace(load_format="dummy")
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.isfinite(layer(X)[0]).all()
    context.get_model = lambda: types.SimpleNamespace(load_format="auto")
    with pytest.raises(CheckpointError, match="got none for weight of shard None"):
        layer.quant_method.process_weights_after_loading(layer)
    del context.get_model
    with pytest.raises(CheckpointError, match="got none for weight of shard None"):
        layer.quant_method.process_weights_after_loading(layer)
