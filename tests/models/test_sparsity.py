"""Activation sparsity: what leaves zeros out gives the same; what drops more drops what it says.

Reference of the latter: plain numpy over the codes of every token.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bitnet_ops
from bitnet_ops import _runtime, ops
from bitnet_ops.blocks.block import Line
from bitnet_ops.blocks.mlp import kept_inputs
from bitnet_ops.config.sparsity import ALWAYS, ActivationSparsityError, read_sparsity
from bitnet_ops.models import Decoder
from bitnet_ops.nn.columns import columns_of
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.nn.packing import pack_ternary
from bitnet_ops.nn.storage import FORMATS
from isa_control import every_configuration
from tiny_models import NAMES, SMALL, random_ids, tiny_model

DROPPING = ("threshold:0.05", "top_k:0.2", "adaptive:min_ratio=0.05,max_ratio=0.2")
POLICIES = ("always", "auto", *DROPPING)


def follow(model: Decoder, policy: str | None) -> None:
    """As `set_activation_sparsity`; "always": leave zeros out where that does not pay, too."""
    model.set_activation_sparsity("auto" if policy == "always" else policy)
    if policy == "always":
        model.config = dataclasses.replace(model.config, sparsity=ALWAYS)


@torch.inference_mode()
def logits_of(model: Decoder, ids: Tensor, fused: bool = True, first: int = 3) -> Tensor:
    """Of every position: a prompt of `first`, then token by token."""
    model.run_as = "program" if fused else "ops"
    cache = KVCache(model.config, len(ids), ids.shape[1], torch.float32)
    parts = [ids[:, :first], *(ids[:, i : i + 1] for i in range(first, ids.shape[1]))]
    return torch.cat([model(part, cache) for part in parts], 1)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_columns_hold_the_codes(weight_format: str) -> None:
    g = torch.Generator().manual_seed(1)
    for rows, k in ((1, 1), (300, 7), (256, 130), (513, 64)):
        codes = torch.randint(-1, 2, (rows, k), generator=g, dtype=torch.int8)
        columns = columns_of(pack_ternary(codes).repack(weight_format))
        assert columns.shape == (-(-rows // 256), k, 64)
        for row in range(-(-rows // 256) * 256):
            field = columns[row // 256, :, row % 64] >> 2 * (row % 256 // 64) & 3
            expected = codes[row] + 1 if row < rows else torch.ones(k)
            assert torch.equal(field.long(), expected.long()), (rows, k, row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.sampled(4)
def test_equals_the_composed_ops_on_every_isa_and_thread_count(
    policy: str, dtype: torch.dtype
) -> None:
    ids = random_ids(1, 1, 9)
    for configuration in every_configuration():
        model = tiny_model(SMALL["bitnet-offline"], dtype=dtype)
        dense = logits_of(model, ids)
        follow(model, policy)
        ours = logits_of(model, ids)
        skipped, inputs = _runtime.activation_zeros()
        assert inputs == model.config.num_hidden_layers * model.config.intermediate_size or (
            torch.get_num_threads() > 1 and inputs > 0
        )
        assert skipped > 0 or policy != "always"
        assert torch.equal(ours, logits_of(model, ids, fused=False)), configuration
        assert torch.equal(ours, dense) == (policy not in DROPPING), configuration


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_every_family_batch_and_chunk(name: str, policy: str) -> None:
    """A token's result is that of its sequence alone, decoded token by token."""
    model = tiny_model(SMALL[name])
    ids = random_ids(3, 3, 8)
    dense = logits_of(model, ids)
    follow(model, policy)
    alone = torch.cat([logits_of(model, row[None], first=1) for row in ids])
    assert torch.equal(alone, logits_of(model, ids, first=8))
    assert torch.equal(alone, logits_of(model, ids, first=4))
    assert torch.equal(alone, dense) or policy in DROPPING


def kept_codes(codes: np.ndarray, line: dict[str, Any]) -> np.ndarray:
    """Which codes of one token are kept."""
    size, k = np.abs(codes.astype(np.int64)), len(codes)
    if "threshold" in line:
        return size >= math.ceil(np.float32(127) * np.float32(line["threshold"]))
    ratio = float(np.float32(line.get("top_k", line.get("max_ratio"))))
    if "max_ratio" in line:
        low, high = np.float32(line["min_ratio"]), np.float32(line["max_ratio"])
        p = size[size > 0] / size.sum()
        spread = -(p * np.log(p)).sum() / math.log(k)
        ratio = float(low) + float(high - low) * spread
    maximum = math.ceil(ratio * k)
    for cut in range(1, 129):
        if (size >= cut).sum() <= maximum:
            return size >= min(cut, size.max())
    raise AssertionError


@pytest.mark.parametrize("policy", DROPPING + ("top_k:0.001", "top_k:1", "threshold:1"))
def test_what_is_dropped(policy: str) -> None:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(20, 500, generator=g) ** 3
    x[3, 100:] = 0
    x[4] = x[4].sign()  # all alike
    keys = dict(read_sparsity(policy).keys)
    kept = kept_inputs(Line("mlp", keys), x)
    codes, scales = ops.quantize_activations(x)[:2]
    after, scales_after = ops.quantize_activations(kept)[:2]
    assert torch.equal(scales, scales_after)
    for row in range(len(x)):
        mask = torch.from_numpy(kept_codes(codes[row].numpy(), keys))
        assert torch.equal(after[row], codes[row] * mask), row
    assert kept_inputs(Line("mlp", {"sparsity": "auto"}), x) is x


def test_a_token_of_zeros_and_one_that_is_not_finite() -> None:
    model = tiny_model(SMALL["bitnet-offline"])
    ids = random_ids(1, 1, 6)
    for value in (0.0, float("nan"), float("inf")):
        for layer in model.model.layers:
            layer.get_submodule("mlp.ffn_sub_norm").get_buffer("weight").fill_(value)
        for policy in (None, *POLICIES):
            follow(model, policy)
            ours, theirs = logits_of(model, ids), logits_of(model, ids, fused=False)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_matrices_that_columns_do_not_know_are_named() -> None:
    model = tiny_model(SMALL["bitnet-offline"])
    mlp: Any = model.model.layers[1].get_submodule("mlp")
    k, n = mlp.down_proj.in_features, mlp.down_proj.out_features
    mlp.down_proj = BitLinear(k, n, group_size=128)
    with pytest.raises(ActivationSparsityError, match=r"scales of groups in model\.layers\.1\.mlp"):
        model.set_activation_sparsity("auto")
    mlp.down_proj = BitLinear(k, n)
    mlp.down_proj.rotate(torch.ones(k // 128, 128))
    with pytest.raises(ActivationSparsityError, match=r"a rotated input in model\.layers\.1\.mlp"):
        model.set_activation_sparsity("top_k:0.5")
    assert model.config.sparsity is None


def test_weights_that_change_in_place_are_seen() -> None:
    model, other = tiny_model(SMALL["bitnet-offline"]), tiny_model(SMALL["bitnet-offline"])
    ids = random_ids(1, 1, 7)
    follow(model, "always")
    before = logits_of(model, ids)
    state = other.state_dict()
    name = "model.layers.0.mlp.down_proj.weight"
    state[name] = state[name].flip(0)
    model.load_state_dict(state)
    other.load_state_dict(state)
    after = logits_of(model, ids)
    assert not torch.equal(after, before) and torch.equal(after, logits_of(other, ids))


def test_the_engine_gives_the_same_and_says_what_was_left_out() -> None:
    prompts = [[1, 5, 9], [2, 7], [3] * 20]
    tokens: dict[str, Any] = {}
    for policy in (None, "always", "auto"):
        lm = bitnet_ops.load()
        follow(lm.model, policy)
        tokens[str(policy)] = [
            [list(lm.generate(p, max_new_tokens=12, ignore_eos=True).token_ids) for p in prompts],
            [list(c.token_ids) for c in lm.generate_batch(prompts, max_new_tokens=12)],
        ]
        share = lm.engine.stats().inputs_skipped
        assert 0.5 < share < 1 if policy == "always" else 0 <= share < 1
        assert share == 0 or policy is not None
    assert tokens["None"] == tokens["always"] == tokens["auto"]


def test_a_prefix_is_that_of_a_model_whose_results_are_the_same() -> None:
    model = tiny_model(SMALL["bitnet-offline"])
    plain = model.identity()
    for policy in POLICIES:
        follow(model, policy)
        assert (model.identity() == plain) == (policy not in DROPPING), policy


def test_an_earlier_name_is_auto() -> None:
    assert read_sparsity("exact") == read_sparsity("auto")


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("on", "one of auto, threshold:..., top_k:..., adaptive:..., got 'on'"),
        ("exact:1", "got 'exact:1'"),
        ("threshold", "got 'threshold'"),
        ("threshold:", "threshold above 0 and at most 1, got ''"),
        ("threshold:-0.1", "threshold above 0 and at most 1, got '-0.1'"),
        ("top_k:0", "top_k above 0 and at most 1, got '0'"),
        ("top_k:1.1", "top_k above 0 and at most 1, got '1.1'"),
        ("top_k:nan", "top_k above 0 and at most 1, got 'nan'"),
        ("top_k:0.5,top_k=0.4", "keys of top_k, each once, got 'top_k'"),
        ("top_k:0.5,sinks=4", "keys of top_k, each once, got 'sinks'"),
        ("adaptive:0.3", "keys of min_ratio, max_ratio, each once, got 'adaptive'"),
        ("adaptive:min_ratio=0.3", "max_ratio, got nothing"),
        ("adaptive:min_ratio=0,max_ratio=0.3", "min_ratio above 0 and at most 1, got '0'"),
        ("adaptive:min_ratio=0.7,max_ratio=0.3", "min_ratio at most max_ratio, got 0.7"),
        ("", "got ''"),
        (0.5, "a policy as text, got a float"),
    ],
)
def test_what_is_no_policy(policy: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ActivationSparsityError) as caught:
        bitnet_ops.load(tmp_path / "not looked at", activation_sparsity=policy)
    assert str(caught.value).startswith("activation_sparsity: expected ")
    assert message in str(caught.value)
