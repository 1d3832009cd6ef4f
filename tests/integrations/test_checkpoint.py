"""What engines' plug-ins read out of quantization_config: the rule, and the layers left alone."""

from __future__ import annotations

import pytest

from bitnet_ops.integrations import CheckpointError, ScaleRule, scale_rule
from bitnet_ops.integrations.checkpoint import FUSED, Settings


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({}, ScaleRule.DIVIDE),
        ({"quant_method": "bitnet"}, ScaleRule.DIVIDE),
        ({"linear_class": None, "quantization_mode": None}, ScaleRule.DIVIDE),
        ({"linear_class": "autobitlinear"}, ScaleRule.MULTIPLY),
        ({"linear_class": "autobitlinear", "quantization_mode": "online"}, ScaleRule.ONLINE),
    ],
)
def test_scale_rule_reads_transformers_settings_and_defaults(config, rule):
    assert scale_rule(config) is rule


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "awq"}, 'expected quant_method "bitnet", got .awq'),
        ({"linear_class": "bitlinear2"}, "got 'bitlinear2'"),
        ({"quantization_mode": "online"}, "with linear_class .bitlinear. .packed"),
        ({"use_rms_norm": True}, "use_rms_norm"),
    ],
)
def test_scale_rule_rejects_what_is_not_served(config, message):
    with pytest.raises(CheckpointError, match=message):
        scale_rule(config)


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
def test_a_layer_is_skipped_by_name_and_a_fused_one_by_all_its_parts(listed, prefix, skipped):
    assert Settings({"modules_to_not_convert": listed}).is_skipped(prefix, FUSED) is skipped


def test_a_fused_layer_skipped_in_part_is_rejected():
    settings = Settings({"modules_to_not_convert": ["k_proj"]})
    with pytest.raises(CheckpointError, match="all or none of .*k_proj"):
        settings.is_skipped("model.layers.0.self_attn.qkv_proj", FUSED)


@pytest.mark.parametrize("listed", ["lm_head", 3, [3]])
def test_a_list_that_is_none_is_rejected(listed):
    """A text alone is not the list of its letters, of which "m" begins every layer's name."""
    with pytest.raises(CheckpointError, match="modules_to_not_convert as a list of names"):
        Settings({"modules_to_not_convert": listed})


@pytest.mark.parametrize("entry", ["(lm_head", r"(\w+\.?)+!"])
def test_an_expression_that_is_none_or_does_not_end_is_rejected(entry):
    settings = Settings({"modules_to_not_convert": [entry]})
    with pytest.raises(CheckpointError, match="expected .*regular expressions.*got"):
        settings.is_skipped("model.layers.0.self_attn.o_proj" * 2, {})
