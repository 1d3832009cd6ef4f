"""One Scheme: converter, model config and serving engines read a quantization_config alike.

What each Scheme computes is tested where it is used (test_families.py, test_sglang_model.py).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from bitnet_ops.config.families import BY_MODEL_TYPE, FAMILIES
from bitnet_ops.config.scheme import (
    ScaleRule,
    SchemeError,
    Storage,
    decide_scheme,
    quantization_options,
    quantized_scheme,
)
from bitnet_ops.integrations import CheckpointError, scale_rule

TABLE = {
    ("bitlinear", "offline"): (Storage.PACKED, ScaleRule.DIVIDE),
    ("autobitlinear", "offline"): (Storage.PACKED, ScaleRule.MULTIPLY),
    ("autobitlinear", "online"): (Storage.MASTERS, ScaleRule.ONLINE),
}
CLASSES = ("absent", None, "bitlinear", "autobitlinear", "fancylinear")
MODES = ("absent", None, "offline", "online", "sometimes")


@pytest.mark.parametrize(("linear_class", "mode"), list(product(CLASSES, MODES)))
def test_a_quantization_config_means_one_thing(linear_class: str | None, mode: str | None) -> None:
    block: dict[str, Any] = {"quant_method": "bitnet"}
    block |= {} if linear_class == "absent" else {"linear_class": linear_class}
    block |= {} if mode == "absent" else {"quantization_mode": mode}
    key = (
        "bitlinear" if linear_class in (None, "absent") else linear_class,
        "offline" if mode in (None, "absent") else mode,
    )
    if key in TABLE:
        scheme = quantized_scheme(block)
        assert (scheme.storage, scheme.rule) == TABLE[key]
        assert decide_scheme({"quantization_config": block}, None) == scheme
        assert scale_rule(block) is scheme.rule
        assert quantization_options(block) == key
        return
    for read in (
        quantized_scheme,
        lambda block: decide_scheme({"quantization_config": block}, None),
    ):
        with pytest.raises(SchemeError):
            read(block)
    with pytest.raises(CheckpointError, match="linear_class|quantization_mode"):
        scale_rule(block)


def test_every_family_is_one_row() -> None:
    assert {family.model_type for family in FAMILIES} == set(BY_MODEL_TYPE)
    names = [name for family in FAMILIES for name in family.gguf]
    assert len(names) == len(set(names)) >= 5
    shown = [(f.hidden_act, frozenset(f.telling_parts), f.scalings) for f in BY_MODEL_TYPE.values()]
    assert len(set(shown)) == len(shown)  # or a file without model_type could be two of them
