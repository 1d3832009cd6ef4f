"""`Settings`: what every engine's plug-in reads out of quantization_config."""

from __future__ import annotations

import pytest

from bitnet_ops.integrations import CheckpointError
from bitnet_ops.integrations._settings import Settings
from bitnet_ops.untrusted import patterns


@pytest.mark.parametrize("listed", ["lm_head", 3, [3]])
def test_a_list_that_is_none_is_rejected(listed):
    """A text alone is not the list of its letters, of which "m" begins every layer's name."""
    with pytest.raises(CheckpointError, match="modules_to_not_convert as a list of names"):
        Settings({"modules_to_not_convert": listed})


@pytest.mark.parametrize("entry", ["(lm_head", r"(\w+\.?)+!"])
def test_an_expression_that_is_none_or_does_not_end_is_rejected(entry, monkeypatch):
    monkeypatch.setattr(patterns, "_CPU_S", 0.2)
    settings = Settings({"modules_to_not_convert": [entry]})
    with pytest.raises(CheckpointError, match="expected .*regular expressions.*got"):
        settings.is_skipped("model.layers.0.self_attn.o_proj" * 2, {})
