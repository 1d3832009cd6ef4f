"""L0 of the SGLang integration: the engine-free core against transformers.integrations.bitnet.

Oracle: transformers' own packing and its BitLinear / AutoBitLinear modules, in fp32. Layers here
are bare nn.Modules; engines' linears come in test_sglang_contract.py (stand-in) and
scripts/prove_sglang (the real one).
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bitnet_ops import ops
from bitnet_ops.integrations import BitNetLinearMethod, CheckpointError, ScaleRule, scale_rule
from bitnet_ops.integrations._core import (
    Split,
    check_complete,
    layer_state,
    make_params,
    split_axis,
)
from hf_flavours import checkpoint, hf_bound, hf_linear, hf_packed, random_codes
from hf_writer import unpack_strided

RULES = list(ScaleRule)
PACKED_RULES = [ScaleRule.DIVIDE, ScaleRule.MULTIPLY]


def load(layer, rule, rows, columns, seed=0, shard_id=None):
    """Load one random logical matrix; returns its (weight, stored scale, codes, scale)."""
    weight, stored, codes, scale = checkpoint(rule, rows, columns, seed)
    layer.weight.weight_loader(layer.weight, weight, shard_id)
    if stored is not None:
        layer.weight_scale.weight_loader(layer.weight_scale, stored, shard_id)
    return weight, stored, codes, scale


def make_layer(columns, sizes, rule=ScaleRule.MULTIPLY, **options):
    layer = nn.Module()
    make_params(layer, columns, sizes, rule=rule, **options)
    return layer


# Packing and scales ---------------------------------------------------------------------------


def test_golden_vector_of_the_transformers_docstring():
    layer = make_layer(2, [8])
    packed = torch.tensor([[0xA1, 0x18], [0x90, 0x0A]], dtype=torch.uint8)
    layer.weight.weight_loader(layer.weight, packed)
    rows = [[0, -1], [-1, 1], [-1, 1], [-1, 1], [1, 0], [0, -1], [1, -1], [1, -1]]
    assert ops.unpack(layer.weight, 2).tolist() == rows


@pytest.mark.parametrize(("rows", "columns"), [(8, 128), (64, 256), (12, 100), (10, 576), (3, 129)])
def test_repacked_weight_holds_the_rows_that_transformers_packed(rows, columns):
    layer = make_layer(columns, [rows])
    codes = random_codes(rows, columns)
    layer.weight.weight_loader(layer.weight, hf_packed(codes))
    assert torch.equal(ops.unpack(layer.weight, columns), codes)


def test_interleaved_reading_would_give_other_rows():
    codes = random_codes(64, 128)
    layer = make_layer(128, [64])
    packed = hf_packed(codes)
    layer.weight.weight_loader(layer.weight, packed)
    wrong = torch.from_numpy(unpack_strided(packed.numpy().astype(np.uint8)))
    ours = ops.unpack(layer.weight, 128)
    assert (ours == wrong).all(dim=1).sum() <= 4  # rows 0 and 63 stay in place, by construction
    assert torch.equal(ours, codes)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("rows", "columns"), [(64, 256), (24, 200)])
def test_layer_output_equals_the_transformers_module(rule, rows, columns):
    layer = make_layer(columns, [rows], rule)
    weight, stored, _, scale = load(layer, rule, rows, columns)
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(7))
    ours = BitNetLinearMethod(rule).apply(layer, x)
    theirs = hf_linear(rule, weight, stored, rows, columns)(x)
    assert ((ours - theirs).abs() <= hf_bound(x, scale)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_online_scale_is_the_mean_over_the_whole_matrix_not_over_a_rank(dtype):
    masters = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    masters[16:] *= 8
    for rank in range(2):
        layer = make_layer(64, [16], ScaleRule.ONLINE, row_splits=[Split(2, rank)])
        layer.weight.weight_loader(layer.weight, masters)
        mean = masters.double().abs().mean()
        assert float(layer.weight_scale) == pytest.approx(float(mean), rel=2**-23)
        codes = (masters.float() / mean.float()).round().clamp(-1, 1).to(torch.int8)
        assert torch.equal(ops.unpack(layer.weight, 64), codes[16 * rank : 16 * rank + 16])


def test_reciprocal_is_inverted_in_float32_not_in_bfloat16():
    layer = make_layer(128, [4], ScaleRule.DIVIDE)
    stored = torch.tensor([35.25], dtype=torch.bfloat16)
    layer.weight_scale.weight_loader(layer.weight_scale, stored)
    assert layer.weight_scale.tolist() == [np.float32(1) / np.float32(35.25)]


def test_scalar_scale_without_a_shape_is_taken():
    layer = make_layer(128, [4])
    layer.weight_scale.weight_loader(layer.weight_scale, torch.tensor(0.5))
    assert layer.weight_scale.tolist() == [0.5]


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
        (
            {"quantization_mode": "online"},
            "with linear_class .bitlinear. .packed",
        ),
        ({"use_rms_norm": True}, "use_rms_norm"),
    ],
)
def test_scale_rule_rejects_what_is_not_served(config, message):
    with pytest.raises(CheckpointError, match=message):
        scale_rule(config)


# Fused layers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_fused_qkv_is_one_call_with_each_matrix_its_own_scale(rule):
    columns, sizes, ids = 192, [24, 8, 8], ["q", "k", "v"]
    layer = make_layer(columns, sizes, rule, ids=ids)
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(3))
    parts, bounds = [], []
    for seed, (size, shard_id) in enumerate(zip(sizes, ids, strict=True)):
        weight, stored, _, scale = load(layer, rule, size, columns, seed, shard_id)
        parts.append(hf_linear(rule, weight, stored, size, columns)(x))
        bounds.append(hf_bound(x, scale).expand(3, size))
    ours = BitNetLinearMethod(rule).apply(layer, x)
    assert ((ours - torch.cat(parts, -1)).abs() <= torch.cat(bounds, -1)).all()
    assert len(set(layer.weight_scale.tolist())) == 3


def test_shards_may_arrive_in_any_order_and_again():
    layer = make_layer(128, [8, 8])
    load(layer, ScaleRule.MULTIPLY, 8, 128, 5, 1)
    _, _, first, _ = load(layer, ScaleRule.MULTIPLY, 8, 128, 6, 0)
    _, _, second, scale = load(layer, ScaleRule.MULTIPLY, 8, 128, 7, 1)
    check_complete(layer)
    assert torch.equal(ops.unpack(layer.weight, 128), torch.cat([first, second]))
    assert layer.weight_scale[8:].tolist() == [float(scale)] * 8


# Tensor parallelism -----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_column_parallel_ranks_reassemble(rule, ranks):
    rows, columns = 32, 160
    blocks = []
    for rank in range(ranks):
        layer = make_layer(columns, [rows // ranks], rule, row_splits=[Split(ranks, rank)])
        _, _, codes, scale = load(layer, rule, rows, columns)
        blocks.append(ops.unpack(layer.weight, columns))
        assert float(layer.weight_scale) == pytest.approx(float(scale), rel=2**-22)
    assert torch.equal(torch.cat(blocks), codes)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_row_parallel_ranks_reassemble_though_the_width_is_no_multiple_of_128(rule, ranks):
    rows, columns = 16, 300
    blocks = []
    for rank in range(ranks):
        layer = make_layer(columns // ranks, [rows], rule, column_split=Split(ranks, rank))
        _, _, codes, _ = load(layer, rule, rows, columns)
        blocks.append(ops.unpack(layer.weight, columns // ranks))
    assert torch.equal(torch.cat(blocks, dim=1), codes)


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 200), st.sampled_from(PACKED_RULES))
def test_any_even_split_of_rows_reassembles(ranks, local, columns, rule):
    blocks = []
    for rank in range(ranks):
        layer = make_layer(columns, [local], rule, row_splits=[Split(ranks, rank)])
        _, _, codes, _ = load(layer, rule, local * ranks, columns)
        blocks.append(ops.unpack(layer.weight, columns))
    assert torch.equal(torch.cat(blocks), codes)


def test_split_axis_knows_whole_even_and_uneven():
    assert split_axis(64, 64, 1, 2, "rows") == Split(1, 0)
    assert split_axis(64, 32, 1, 2, "rows") == Split(2, 1)
    with pytest.raises(CheckpointError, match="expected rows 65 to divide evenly over 2"):
        split_axis(65, 32, 1, 2, "rows")
    with pytest.raises(CheckpointError, match="rank below the number of parts 2, got 2"):
        Split(2, 2)


# Rejections ---------------------------------------------------------------------------------------


def _weight(layer, tensor, shard_id=None):
    layer.weight.weight_loader(layer.weight, tensor, shard_id)


def _scale(layer, tensor, shard_id=None):
    layer.weight_scale.weight_loader(layer.weight_scale, tensor, shard_id)


U8 = torch.uint8
REJECTED = {
    "short shard": (
        ScaleRule.MULTIPLY,
        _weight,
        torch.zeros(8, 128, dtype=U8),
        r"weight \[16, 128\]",
    ),
    "long shard": (ScaleRule.MULTIPLY, _weight, torch.zeros(17, 128, dtype=U8), r"got \[17, 128\]"),
    "too few columns": (
        ScaleRule.MULTIPLY,
        _weight,
        torch.zeros(16, 64, dtype=U8),
        r"got \[16, 64\]",
    ),
    "three dimensions": (ScaleRule.MULTIPLY, _weight, torch.zeros(16, 128, 1, dtype=U8), "got"),
    "the other order": (
        ScaleRule.MULTIPLY,
        _weight,
        torch.zeros(64, 32, dtype=U8),
        "packed along the inputs, not in transformers' order",
    ),
    "code 3": (ScaleRule.MULTIPLY, _weight, torch.full((16, 128), 3, dtype=U8), "code 3 at row 0"),
    "masters where packed": (
        ScaleRule.DIVIDE,
        _weight,
        torch.zeros(64, 128),
        "packed uint8 weights",
    ),
    "int8 codes": (ScaleRule.DIVIDE, _weight, torch.zeros(16, 128, dtype=torch.int8), "torch.int8"),
    "packed where masters": (ScaleRule.ONLINE, _weight, torch.zeros(16, 128, dtype=U8), "masters"),
    "short masters": (ScaleRule.ONLINE, _weight, torch.zeros(32, 128), r"weight \[64, 128\]"),
    "unknown shard": (ScaleRule.MULTIPLY, lambda la, t: _weight(la, t, "q"), None, "got 'q'"),
    "fused on disk": (
        ScaleRule.MULTIPLY,
        lambda la, t: _weight(la, t, (0, 1)),
        None,
        "fused in the",
    ),
    "scale of masters": (ScaleRule.ONLINE, _scale, torch.ones(1), "expected no weight_scale"),
    "two scales": (ScaleRule.MULTIPLY, _scale, torch.ones(2), "one element"),
    "scale 0": (ScaleRule.MULTIPLY, _scale, torch.zeros(1), "above zero"),
    "reciprocal 0": (ScaleRule.DIVIDE, _scale, torch.zeros(1), "above zero"),
    "scale NaN": (ScaleRule.MULTIPLY, _scale, torch.tensor([float("nan")]), "finite"),
    "scale -1": (ScaleRule.MULTIPLY, _scale, -torch.ones(1), "above zero"),
    "integer scale": (
        ScaleRule.MULTIPLY,
        _scale,
        torch.ones(1, dtype=torch.int32),
        "floating-point",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_rejected_with_a_message_and_nothing_changed(case):
    rule, loader, tensor, message = REJECTED[case]
    layer = make_layer(128, [64], rule, name="model.layers.0.mlp.up_proj")
    before = layer.weight.clone(), layer.weight_scale.clone()
    with pytest.raises(CheckpointError, match=message) as caught:
        loader(layer, tensor)
    assert "model.layers.0.mlp.up_proj" in str(caught.value)
    assert torch.equal(layer.weight, before[0]) and torch.equal(layer.weight_scale, before[1])
    assert not layer_state(layer).loaded


@pytest.mark.parametrize("rule", RULES)
def test_incomplete_layer_is_rejected_by_name(rule):
    layer = make_layer(128, [8, 8], rule, name="gate_up_proj")
    with pytest.raises(CheckpointError, match="weight of shard 0.*in gate_up_proj"):
        check_complete(layer)
    check_complete(layer, allow_unloaded=True)
    load(layer, rule, 8, 128, shard_id=0)
    with pytest.raises(CheckpointError, match="got none for weight of shard 1"):
        check_complete(layer, allow_unloaded=True)
    load(layer, rule, 8, 128, shard_id=1)
    check_complete(layer)


def test_packed_weight_whose_scale_never_came_is_rejected():
    layer = make_layer(128, [8])
    layer.weight.weight_loader(layer.weight, hf_packed(random_codes(8, 128)))
    with pytest.raises(CheckpointError, match="got none for weight_scale of shard None"):
        check_complete(layer)


def test_unloaded_parameters_are_valid_codes_of_weight_zero():
    layer = make_layer(130, [5, 3])
    assert torch.equal(ops.unpack(layer.weight, 130), torch.zeros(8, 130, dtype=torch.int8))
    assert not layer.weight.requires_grad and not layer.weight_scale.requires_grad
    assert layer.weight_scale.shape == (8,) and layer.weight_scale.dtype == torch.float32


# The method -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(96,), (4, 96), (1, 4, 96), (0, 96)])
def test_apply_takes_any_leading_dimensions_and_keeps_the_dtype(dtype, shape):
    layer = make_layer(96, [12])
    load(layer, ScaleRule.MULTIPLY, 12, 96)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    y = BitNetLinearMethod().apply(layer, x)
    assert y.shape == (*shape[:-1], 12) and y.dtype == dtype
    flat = BitNetLinearMethod().apply(layer, x.reshape(-1, 96))
    assert torch.equal(y.reshape(-1, 12), flat)


def test_apply_rejects_float16_and_another_width():
    layer = make_layer(96, [12])
    with pytest.raises(CheckpointError, match="bfloat16 or float32, got torch.float16"):
        BitNetLinearMethod().apply(layer, torch.ones(2, 96, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"expected x \[..., 96\], got \[2, 100\]"):
        BitNetLinearMethod().apply(layer, torch.ones(2, 100))  # the same padded row width as 96


@pytest.mark.parametrize("rule", [ScaleRule.DIVIDE, ScaleRule.ONLINE])
def test_bias_is_added_as_transformers_adds_it(rule):
    layer = make_layer(128, [16], rule)
    weight, stored, _, scale = load(layer, rule, 16, 128)
    bias = torch.randn(16, generator=torch.Generator().manual_seed(4))
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(5))
    ours = BitNetLinearMethod(rule).apply(layer, x, bias)
    theirs = hf_linear(rule, weight, stored, 16, 128, bias)(x)
    assert ((ours - theirs).abs() <= hf_bound(x, scale) + 2**-23 * theirs.abs()).all()


# Imports ----------------------------------------------------------------------------------------


def test_importing_the_package_never_imports_an_engine():
    code = (
        "import sys, bitnet_ops, bitnet_ops.integrations, bitnet_ops.integrations.sglang as s;"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('sglang', 'vllm', 'transformers')];"
        "assert callable(s.register) and not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
