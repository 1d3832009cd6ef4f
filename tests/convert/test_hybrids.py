"""Qwen3.5 hybrids as published: every form of their files against transformers and the fixture.

The fixture is helpers/hybrids.py. Oracle of logits: transformers' Qwen3_5ForCausalLM in float32 on
the matrices that the stored ones stand for, (W' H) diag(s) where they are rotated.
"""

from __future__ import annotations

import pytest

import hybrids
from bitnet_ops.config import ModelConfig
from bitnet_ops.models import expected_tensors

EVERY = pytest.mark.parametrize("name", hybrids.CASES)


@EVERY
def test_names_and_shapes_follow_from_the_config(name: str) -> None:
    made = hybrids.make(name)
    specs = expected_tensors(ModelConfig.from_hf(hybrids.converted_config(made)))
    found = {
        n: (v[0] if isinstance(v, tuple) else v).shape
        for n, v in hybrids.converted(made).items()
    }  # fmt: skip
    assert {n: tuple(spec.shape) for n, spec in specs.items()} == found
    nested = ModelConfig.from_hf(hybrids.nested_config(made))
    assert nested == ModelConfig.from_hf(hybrids.text_config(made))
