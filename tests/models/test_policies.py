"""Attention policies of whole models: what their text means, the same tokens whatever the way."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import bitnet_ops
import hybrids
from bitnet_ops.config import ModelConfig
from bitnet_ops.config.attention import PRESETS, AttentionPolicyError
from bitnet_ops.generate.engine import Engine, Limits
from bitnet_ops.models import Decoder
from bitnet_ops.nn.kv_cache import KVCache
from tiny_models import SMALL, config_of, random_ids, tiny_model

TEXT = random_ids(3, 1, 330)


def model_with(policy: str) -> Decoder:
    model = tiny_model(SMALL["bitnet-offline"])
    model.set_attention(policy)
    return model


@pytest.fixture(scope="module", params=["window:70,sinks=4", "window:20,sinks=3@1"])
def model(request: pytest.FixtureRequest) -> Decoder:
    return model_with(request.param)


def in_chunks(model: Decoder, kv_dtype: torch.dtype, *sizes: int) -> Tensor:
    cache = KVCache(model.config, 1, TEXT.shape[1], kv_dtype)
    return torch.cat([model(part, cache) for part in TEXT.split(list(sizes), dim=1)], dim=1)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@torch.inference_mode()
def test_every_way_of_running_it_is_the_same_bit_for_bit(
    model: Decoder, kv_dtype: torch.dtype
) -> None:
    """At once, in chunks, token by token; the one step, and the ops one by one."""
    whole = in_chunks(model, kv_dtype, 330)
    assert torch.equal(in_chunks(model, kv_dtype, 3, 64, 1, 100, 162), whole)
    assert torch.equal(in_chunks(model, kv_dtype, *[1] * 330), whole)
    model.fused_step = False
    try:
        assert torch.equal(in_chunks(model, kv_dtype, 200, *[1] * 6, 124), whole)
    finally:
        model.fused_step = True
    plain = in_chunks(tiny_model(SMALL["bitnet-offline"]), kv_dtype, 330)
    assert torch.equal(whole[:, :20], plain[:, :20])
    assert not torch.equal(whole[:, -1], plain[:, -1])


@torch.inference_mode()
def alone(model: Decoder, prompt: list[int], count: int) -> list[int]:
    cache = KVCache(model.config, 1, len(prompt) + count, torch.bfloat16)
    tokens = [int(model(torch.tensor([prompt]), cache, 1)[0, -1].argmax())]
    while len(tokens) < count:
        tokens.append(int(model(torch.tensor([tokens[-1:]]), cache)[0, -1].argmax()))
    return tokens


def test_the_engine_gives_the_tokens_of_each_text_alone(model: Decoder) -> None:
    ids = TEXT[0].tolist()
    prompts = [ids[:250], ids[:250], ids[:80], [*ids[:144], 7], ids[100:104]]
    engine = Engine(model, prefill_chunk=37)
    expected = [alone(model, prompt, 9) for prompt in prompts]
    for _ in range(2):  # the second time from the prefix cache
        found = engine.generate(prompts, limits=Limits(9))
        assert [generation.token_ids for generation in found] == expected


# What a policy says ----------------------------------------------------------------------------


def policies(text: str, **changes: Any) -> list[str | None]:
    config = dataclasses.replace(config_of(SMALL["bitnet-offline"]), **changes).with_attention(text)
    return [str(p) if (p := config.policy(i)) else None for i in range(config.num_hidden_layers)]


def test_what_policies_mean() -> None:
    layers = config_of(SMALL["bitnet-offline"]).num_hidden_layers
    assert policies("window:256") == ["window=256"] * layers
    assert policies("window:256,sinks=4,stride=8") == ["window=256 sinks=4 stride=8"] * layers
    assert policies("window:256,sinks=0") == ["window=256"] * layers
    assert policies("window:9@1") == [None, "window=9", *[None] * (layers - 2)]
    assert policies(" window:9@0;window:8@1 ")[:2] == ["window=9", "window=8"]
    for preset, text in PRESETS.items():
        assert policies(preset) == policies(text)
    own = (5, *[0] * (layers - 1))
    assert policies("window:3", windows=own) == [None, *["window=3"] * (layers - 1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("window:-1", "window an integer of at least 1, got '-1'"),
        ("window:0", "window an integer of at least 1, got '0'"),
        ("window:4.5", "window an integer of at least 1, got '4.5'"),
        ("window:", "window an integer of at least 1, got ''"),
        ("window:4,sinks=-2", "sinks an integer of at least 0, got '-2'"),
        ("window:4,sinks=1,sinks=2", "each once, got 'sinks'"),
        ("window:4,ratio=1", "keys of window, sinks, stride, each once, got 'ratio'"),
        ("windows:4", "one of window:... .*got 'windows:4'"),
        ("", "one of window:... .*got ''"),
        ("window:4@", "layers as 0-3,7, got ''"),
        ("window:4@1-", "layers as 0-3,7, got '1-'"),
        ("window:4@99", "layers from 0 to 1, got '99'"),
        ("window:4@1-0", "layers from 0 to 1, got '1-0'"),
        ("window:4@1;window:5", "one policy a layer, got two for layer 1"),
    ],
)
def test_what_is_not_clear_is_refused(text: str, words: str) -> None:
    with pytest.raises(AttentionPolicyError, match=f"^attention: expected .*{words}"):
        policies(text, num_hidden_layers=2)


def test_layers_that_no_policy_changes_are_named() -> None:
    with pytest.raises(AttentionPolicyError, match="got 0, which has a window of its own .5 pos"):
        policies("window:3@0", windows=(5, 0), num_hidden_layers=2)
    with pytest.raises(AttentionPolicyError, match="got has a window of its own"):
        policies("window:3", windows=(5, 5), num_hidden_layers=2)
    config = ModelConfig.from_hf(hybrids.nested_config(hybrids.make()))
    layer = config.delta_net.layers[0] if config.delta_net else -1
    with pytest.raises(AttentionPolicyError, match=f"got {layer}, which has no attention"):
        config.with_attention(f"window:3@{layer}")
    assert config.with_attention("window:3").policy(layer) is None


def test_load_takes_a_policy() -> None:
    lm = bitnet_ops.load(attention="window:256,sinks=4@0")
    assert "window=256 sinks=4" in str(lm.model.listing)
    assert lm.config.policy(1) is None
    with pytest.raises(AttentionPolicyError):
        bitnet_ops.load(attention="window")
