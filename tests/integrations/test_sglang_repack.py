"""After loading, an engine's layer holds the layout that the kernels read fastest, and keeps it.

Oracle: transformers' modules and the codes that went in. Engines' ways of changing weights later
(with and without their post-load hook, by shard, by tensor) are walked through here with bare
layers; scripts/prove_sglang does it with the real classes.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bitnet_ops import _runtime, ops
from bitnet_ops.integrations import BitNetLinearMethod, CheckpointError, ScaleRule
from bitnet_ops.integrations._core import Split, canonical_rows, make_params, repack
from hf_flavours import checkpoint, hf_bound, hf_linear

RULES = list(ScaleRule)
METHOD = BitNetLinearMethod()


def make_layer(columns, sizes, rule=ScaleRule.MULTIPLY, **options):
    layer = nn.Module()
    make_params(layer, columns, sizes, rule=rule, **options)
    return layer


def load(layer, rule, rows, columns, seed=0, shard_id=None):
    """Load one random logical matrix; returns its (weight, stored scale, codes, scale)."""
    part = checkpoint(rule, rows, columns, seed)
    layer.weight.weight_loader(layer.weight, part[0], shard_id)
    if part[1] is not None:
        layer.weight_scale.weight_loader(layer.weight_scale, part[1], shard_id)
    return part


def codes_of(layer, columns):
    return ops.unpack(canonical_rows(layer), columns)


def tile_rows():
    return 4 * _runtime.tile_lanes()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("rows", "columns"), [(64, 256), (24, 200), (200, 130)])
def test_the_repacked_layer_computes_what_the_rows_did_and_transformers_does(rule, rows, columns):
    layer = make_layer(columns, [rows], rule)
    weight, stored, codes, scale = load(layer, rule, rows, columns)
    for tokens in (1, 5, 40):
        x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(7))
        before = torch.ops.bitnet.linear(x, ops.pack(codes), layer.weight_scale)
        METHOD.process_weights_after_loading(layer)
        after = METHOD.apply(layer, x)
        assert torch.equal(after, before)
        theirs = hf_linear(rule, weight, stored, rows, columns)(x)
        assert ((after - theirs).abs() <= hf_bound(x, scale)).all()


def test_the_weight_is_what_prepack_makes_and_the_rows_are_freed():
    layer = make_layer(256, [96])
    parameter = layer.weight
    _, _, codes, _ = load(layer, ScaleRule.MULTIPLY, 96, 256)
    rows = weakref.ref(layer.weight.untyped_storage())
    METHOD.process_weights_after_loading(layer)
    gc.collect()
    assert rows() is None, "the canonical copy is still held"
    assert layer.weight is parameter and callable(parameter.weight_loader)
    assert torch.equal(layer.weight, ops.prepack(ops.pack(codes), 256, "2bit"))
    assert dict(layer.named_parameters()).keys() == {"weight", "weight_scale"}


def test_the_hook_may_run_again_and_changes_nothing():
    layer = make_layer(200, [70])
    load(layer, ScaleRule.MULTIPLY, 70, 200)
    METHOD.process_weights_after_loading(layer)
    before, place = layer.weight.clone(), layer.weight.data_ptr()
    METHOD.process_weights_after_loading(layer)
    assert torch.equal(layer.weight, before) and layer.weight.data_ptr() == place


def test_an_incomplete_layer_is_rejected_before_it_is_repacked():
    layer = make_layer(128, [8, 8])
    load(layer, ScaleRule.MULTIPLY, 8, 128, shard_id=0)
    with pytest.raises(CheckpointError, match="weight of shard 1"):
        METHOD.process_weights_after_loading(layer)
    assert layer.weight.shape == (16, 32)


def test_dummy_weights_are_repacked_zeros():
    class Dummy(BitNetLinearMethod):
        def weights_may_be_absent(self):
            return True

    layer = make_layer(192, [48])
    Dummy().process_weights_after_loading(layer)
    layer.weight_scale.data.fill_(1e-3)  # what SGLang's initialiser does to floating parameters
    assert layer.weight.dim() == 3
    assert torch.equal(METHOD.apply(layer, torch.randn(3, 192)), torch.zeros(3, 48))


def test_more_inputs_than_the_layout_takes_stay_rows():
    columns = (1 << 15) + 128
    layer = make_layer(columns, [4])
    _, _, codes, _ = load(layer, ScaleRule.MULTIPLY, 4, columns)
    METHOD.process_weights_after_loading(layer)
    assert layer.weight.shape == (4, columns // 4)
    x = torch.randn(2, columns, generator=torch.Generator().manual_seed(1))
    expected = torch.ops.bitnet.linear(x, ops.pack(codes), layer.weight_scale)
    assert torch.equal(METHOD.apply(layer, x), expected)
    assert torch.equal(codes_of(layer, columns), codes)


# Weight updates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", [True, False], ids=["hook called", "hook not called"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("unit", [1, 2], ids=["whole tiles", "parts of tiles"])
def test_an_update_of_every_shard_or_of_one_keeps_the_layout(rule, unit, hook):
    columns, ids = 192, ["q", "k", "v"]
    size = tile_rows() if unit == 1 else tile_rows() // 2 + 4
    layer = make_layer(columns, [2 * size, size, size], rule, ids=ids)
    parts = [
        load(layer, rule, rows, columns, seed, shard_id)
        for seed, (rows, shard_id) in enumerate(zip((2 * size, size, size), ids, strict=True))
    ]
    METHOD.process_weights_after_loading(layer)
    shape = layer.weight.shape
    parts[1] = load(layer, rule, size, columns, 17, "k")
    if hook:
        METHOD.process_weights_after_loading(layer)
    assert layer.weight.shape == shape
    assert torch.equal(codes_of(layer, columns), torch.cat([part[2] for part in parts]))
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(3))
    y = METHOD.apply(layer, x).split([2 * size, size, size], -1)
    for (weight, stored, codes, scale), ours in zip(parts, y, strict=True):
        theirs = hf_linear(rule, weight, stored, *codes.shape)(x)
        assert ((ours - theirs).abs() <= hf_bound(x, scale)).all()


@settings(deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=3), st.integers(1, 300), st.data())
def test_updates_in_any_order_end_as_a_fresh_load_does(sizes, columns, data):
    rule, count = ScaleRule.MULTIPLY, len(sizes)
    ids = [None] if count == 1 else list(range(count))
    layer = make_layer(columns, sizes)
    for i in range(count):
        load(layer, rule, sizes[i], columns, i, ids[i])
    METHOD.process_weights_after_loading(layer)
    seeds = list(range(count))
    for i in data.draw(st.lists(st.integers(0, count - 1), max_size=4)):
        seeds[i] += 10
        load(layer, rule, sizes[i], columns, seeds[i], ids[i])
    fresh = make_layer(columns, sizes)
    for i in range(count):
        load(fresh, rule, sizes[i], columns, seeds[i], ids[i])
    repack(fresh)
    assert torch.equal(layer.weight, fresh.weight)
    assert torch.equal(layer.weight_scale, fresh.weight_scale)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_of_one_rank_takes_its_slice(rank):
    layer = make_layer(130, [40], row_splits=[Split(2, rank)])
    load(layer, ScaleRule.MULTIPLY, 80, 130)
    METHOD.process_weights_after_loading(layer)
    _, _, codes, _ = load(layer, ScaleRule.MULTIPLY, 80, 130, 5)
    assert torch.equal(codes_of(layer, 130), codes[40 * rank : 40 * rank + 40])


def test_a_rejected_update_leaves_the_repacked_weight_as_it_was():
    layer = make_layer(128, [64])
    load(layer, ScaleRule.MULTIPLY, 64, 128)
    METHOD.process_weights_after_loading(layer)
    before = layer.weight.clone()
    for wrong in (
        torch.zeros(8, 128, dtype=torch.uint8),
        torch.full((16, 128), 3, dtype=torch.uint8),
    ):
        with pytest.raises(CheckpointError):
            layer.weight.weight_loader(layer.weight, wrong)
    assert torch.equal(layer.weight, before)


def test_a_direct_copy_of_rows_over_the_repacked_weight_is_rejected():
    """What engines do to a parameter without a loader: shapes differ, so nothing is overwritten."""
    layer = make_layer(256, [100])
    _, _, codes, _ = load(layer, ScaleRule.MULTIPLY, 100, 256)
    METHOD.process_weights_after_loading(layer)
    with pytest.raises(RuntimeError):
        layer.weight.data.copy_(ops.pack(codes))
    assert torch.equal(codes_of(layer, 256), codes)


def test_state_dict_is_the_live_weight_as_engines_use_it():
    """Sharded and offloading loaders write into the tensors of state_dict(): it must not copy."""
    layer = make_layer(256, [64])
    load(layer, ScaleRule.MULTIPLY, 64, 256)
    METHOD.process_weights_after_loading(layer)
    stored = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    assert layer.state_dict()["weight"].data_ptr() == layer.weight.data_ptr()
    other = make_layer(256, [64])
    load(other, ScaleRule.MULTIPLY, 64, 256, 9)
    METHOD.process_weights_after_loading(other)
    for name, tensor in other.state_dict().items():
        tensor.copy_(stored[name])
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(5))
    assert torch.equal(METHOD.apply(other, x), METHOD.apply(layer, x))


def test_apply_uses_parameters_put_in_their_place():
    """torch.func.functional_call, which offloading engines use, swaps the parameters."""
    layer = make_layer(128, [32])
    load(layer, ScaleRule.MULTIPLY, 32, 128)
    METHOD.process_weights_after_loading(layer)
    layer.forward = lambda x: METHOD.apply(layer, x)
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(5))
    doubled = {"weight": layer.weight.data, "weight_scale": 2 * layer.weight_scale.data}
    y = torch.func.functional_call(layer, doubled, (x,))
    assert torch.equal(y, 2 * layer.forward(x))
