"""BitNetLinearMethod on bare layers that look as engines make them, against transformers' modules.

Every rule of storage, every way in which ranks share a layer, weight updates before and after the
weight is repacked, and what is rejected. Engines' own linear classes: tests/engines.
"""

from __future__ import annotations

import gc
import types
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.utils import counters

from bitnet_ops import _runtime, ops
from bitnet_ops.integrations import BitNetLinearMethod, CheckpointError, ScaleRule
from bitnet_ops.integrations.linear_method import canonical_rows
from hf_flavours import checkpoint, hf_bound, hf_linear, hf_packed, random_codes
from hf_writer import unpack_strided

RULES = list(ScaleRule)
MULTIPLY = ScaleRule.MULTIPLY
X = torch.randn(1, 5, 192, generator=torch.Generator().manual_seed(11))


class Linear(nn.Module):
    """A linear as an engine makes it, of the attributes that the method reads.

    `sizes`: rows of each logical matrix in the whole model. `axis`: what the ranks share, "rows" or
    "columns". `replicas`: how many ranks hold the same k and v head; only a fused qkv has it.
    """

    def __init__(
        self, columns, sizes, rule=MULTIPLY, *, rank=0, ranks=1, axis="rows", replicas=None,
        bias=False, bias_name="with_bias", dtype=torch.float32, name="layer", groups=False,
        **attributes,
    ):  # fmt: skip
        super().__init__()
        if groups:
            self.tp_group = types.SimpleNamespace(rank_in_group=rank, world_size=ranks)
        else:
            self.tp_rank, self.tp_size = rank, ranks
        setattr(self, bias_name, bias)
        if replicas is not None:
            self.num_kv_head_replicas = replicas
        for key, value in attributes.items():
            setattr(self, key, value)
        self.quant_method = BitNetLinearMethod(rule, name)
        parts = [ranks] + [ranks // (replicas or 1)] * (len(sizes) - 1)
        local = [s // p if axis == "rows" else s for s, p in zip(sizes, parts, strict=True)]
        self.local = local
        self.quant_method.create_weights(
            layer=self,
            input_size_per_partition=columns // ranks if axis == "columns" else columns,
            output_partition_sizes=local,
            input_size=columns,
            output_size=sum(local) * ranks if axis == "rows" else sum(local),
            params_dtype=dtype,
            skip_block_quant_check=False,
            weight_loader=lambda *_: pytest.fail("the engine's own loader clips"),
        )
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.zeros(sum(local), dtype=dtype), requires_grad=False)
            self.bias.weight_loader = self.weight_loader

    def load(self, part, shard_id=None):
        """Load one logical matrix, a row of `checkpoint`, as engines call the loaders."""
        extra = () if shard_id is None else (shard_id,)
        self.weight.weight_loader(self.weight, part[0], *extra)
        if part[1] is not None:
            self.weight_scale.weight_loader(self.weight_scale, part[1], *extra)
        return self

    def finish(self):
        self.quant_method.process_weights_after_loading(self)
        return self

    def codes(self):
        return ops.unpack(canonical_rows(self), self.bitnet.in_features)

    def forward(self, x):
        return self.quant_method.apply(self, x, self.bias)


def loaded(columns, rows, rule=MULTIPLY, seed=0, **options):
    """(layer with one matrix, its row of `checkpoint`)"""
    part = checkpoint(rule, rows, columns, seed)
    return Linear(columns, [rows], rule, **options).load(part), part


def inputs(tokens, columns, seed=7):
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))


def assert_equals_transformers(rule, y, x, part, bias=None):
    weight, stored, codes, scale = part
    theirs = hf_linear(rule, weight, stored, *codes.shape, bias)(x)
    assert ((y - theirs).abs() <= hf_bound(x, scale) + 2**-23 * theirs.abs()).all()


# Packing and scales -------------------------------------------------------------------------------


def test_golden_vector_of_the_transformers_docstring():
    layer = Linear(2, [8])
    packed = torch.tensor([[0xA1, 0x18], [0x90, 0x0A]], dtype=torch.uint8)
    layer.weight.weight_loader(layer.weight, packed)
    rows = [[0, -1], [-1, 1], [-1, 1], [-1, 1], [1, 0], [0, -1], [1, -1], [1, -1]]
    assert layer.codes().tolist() == rows


@pytest.mark.parametrize(("rows", "columns"), [(64, 256), (12, 100), (10, 576), (3, 129)])
def test_the_layer_holds_the_rows_that_transformers_packed(rows, columns):
    codes = random_codes(rows, columns)
    layer = Linear(columns, [rows])
    layer.weight.weight_loader(layer.weight, hf_packed(codes))
    assert torch.equal(layer.codes(), codes)


def test_interleaved_reading_would_give_other_rows():
    codes = random_codes(64, 128)
    layer, packed = Linear(128, [64]), hf_packed(codes)
    layer.weight.weight_loader(layer.weight, packed)
    wrong = torch.from_numpy(unpack_strided(packed.numpy().astype(np.uint8)))
    assert (layer.codes() == wrong).all(dim=1).sum() <= 4  # rows 0 and 63 stay, by construction


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_online_scale_is_the_mean_over_the_whole_matrix_not_over_a_rank(dtype):
    masters = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    masters[16:] *= 8
    for rank in range(2):
        layer = Linear(64, [32], ScaleRule.ONLINE, rank=rank, ranks=2)
        layer.weight.weight_loader(layer.weight, masters)
        mean = masters.double().abs().mean()
        assert float(layer.weight_scale) == pytest.approx(float(mean), rel=2**-23)
        codes = (masters.float() / mean.float()).round().clamp(-1, 1).to(torch.int8)
        assert torch.equal(layer.codes(), codes[16 * rank : 16 * rank + 16])


@pytest.mark.parametrize(
    ("rule", "stored", "scale"),
    [
        # inverted in float32, not in bfloat16
        (ScaleRule.DIVIDE, torch.tensor([35.25]).bfloat16(), np.float32(1) / np.float32(35.25)),
        (MULTIPLY, torch.tensor(0.5), 0.5),  # without a shape
    ],
)
def test_scales_become_one_multiplying_float32(rule, stored, scale):
    layer = Linear(128, [4], rule)
    layer.weight_scale.weight_loader(layer.weight_scale, stored)
    assert layer.weight_scale.dtype == torch.float32 and layer.weight_scale.tolist() == [scale]


# Layers and ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("rows", "columns"), [(64, 256), (24, 200), (200, 130)])
def test_repacking_changes_no_bit_and_the_output_is_transformers(rule, rows, columns):
    layer, part = loaded(columns, rows, rule)
    for tokens in (1, 5, 40):
        x = inputs(tokens, columns)
        before = torch.ops.bitnet.linear(x, ops.pack(part[2]), layer.weight_scale)
        after = layer.finish()(x)
        assert torch.equal(after, before)
        assert_equals_transformers(rule, after, x, part)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gate_and_up_of_all_ranks(rule, ranks):
    parts = [checkpoint(rule, 32, 192, seed) for seed in (2, 3)]
    halves = []
    for rank in range(ranks):
        layer = Linear(192, [32, 32], rule, rank=rank, ranks=ranks)
        for shard, part in enumerate(parts):
            layer.load(part, shard)
        halves.append(layer.finish()(X).chunk(2, -1))
    for i, part in enumerate(parts):
        assert_equals_transformers(rule, torch.cat([rank[i] for rank in halves], -1), X, part)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 2), (2, 2), (2, 1), (4, 2), (4, 1)])
@pytest.mark.parametrize("named", ["kv_tp_rank", "kv_tp_group", "tp_rank", "tp_group"])
def test_qkv_of_all_ranks_with_kv_heads_split_or_replicated(rule, ranks, kv_heads, named):
    """SGLang names the ranks of the k and v heads, from 0.5.22 on by a group; vLLM does not."""
    rows, replicas = (32, 8 * kv_heads, 8 * kv_heads), max(1, ranks // kv_heads)
    parts = [checkpoint(rule, size, 192, seed) for seed, size in enumerate(rows, 4)]
    pieces = []
    for rank in range(ranks):
        names = {}
        if named == "kv_tp_rank":
            names = {"kv_tp_rank": rank, "kv_tp_size": ranks}
        elif named == "kv_tp_group":
            group = types.SimpleNamespace(rank_in_group=rank, world_size=ranks)
            names = {"kv_tp_group": group, "groups": True}
        elif named == "tp_group":
            names = {"groups": True}
        options = {"rank": rank, "ranks": ranks, "replicas": replicas, **names}
        layer = Linear(192, rows, rule, **options)
        for shard, part in zip("qkv", parts, strict=True):
            layer.load(part, shard)
        pieces.append(layer.finish()(X).split(layer.local, -1))
        assert len(set(layer.weight_scale.tolist())) == 3
    for i, part in enumerate(parts):
        every = 1 if i == 0 else replicas
        assert_equals_transformers(rule, torch.cat([p[i] for p in pieces[::every]], -1), X, part)
        for rank in range(ranks):  # replicas hold the same head
            assert torch.equal(pieces[rank][i], pieces[rank // every * every][i])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_row_parallel_ranks_add_up_to_what_one_computes(rule, ranks, monkeypatch):
    """Each holds its columns, and rounds its inputs with the absmax of the whole token."""
    absmax = X.abs().amax(-1).view(-1, 1)
    monkeypatch.setattr(
        BitNetLinearMethod, "max_over_ranks", lambda self, x: torch.maximum(x, absmax)
    )
    part = checkpoint(rule, 24, 192, 7)
    codes, total = [], torch.zeros(1, 5, 24)
    for rank in range(ranks):
        layer = Linear(192, [24], rule, rank=rank, ranks=ranks, axis="columns")
        layer.load(part).finish()
        codes.append(layer.codes())
        total += layer(X.chunk(ranks, -1)[rank].contiguous())
    assert torch.equal(torch.cat(codes, 1), part[2])
    assert_equals_transformers(rule, total, X, part)


@given(
    st.integers(1, 4), st.integers(1, 9), st.integers(1, 50), st.sampled_from(["rows", "columns"])
)
def test_any_even_split_reassembles(ranks, rows, columns, axis):
    rows, columns = (rows * ranks, columns) if axis == "rows" else (rows, columns * ranks)
    part = checkpoint(MULTIPLY, rows, columns)
    blocks = [
        Linear(columns, [rows], rank=rank, ranks=ranks, axis=axis).load(part).codes()
        for rank in range(ranks)
    ]
    assert torch.equal(torch.cat(blocks, dim=0 if axis == "rows" else 1), part[2])


@pytest.mark.parametrize("bias_name", ["with_bias", "has_bias"])
def test_a_bias_goes_through_our_loader_and_must_arrive(bias_name):
    rule = ScaleRule.DIVIDE
    part, bias = checkpoint(rule, 64, 192, 1), torch.randn(64)
    layer = Linear(192, [64], rule, bias=True, bias_name=bias_name, rank=1, ranks=2).load(part)
    with pytest.raises(CheckpointError, match=r"bias floating-point \[64\], got .* \[32\]"):
        layer.bias.weight_loader(layer.bias, bias[:32])
    with pytest.raises(CheckpointError, match="got none for bias of shard None"):
        layer.finish()
    layer.bias.weight_loader(layer.bias, bias)
    theirs = hf_linear(rule, part[0], part[1], 64, 192, bias)(X)[..., 32:]
    y = layer.finish()(X)
    assert ((y - theirs).abs() <= hf_bound(X, part[3]) + 2**-23 * theirs.abs()).all()
    with pytest.raises(CheckpointError, match="expected no bias.*in layer"):
        Linear(64, [8], MULTIPLY, bias=True, bias_name=bias_name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(96,), (4, 96), (1, 4, 96), (0, 96)])
def test_apply_takes_any_leading_dimensions_and_keeps_the_dtype(dtype, shape):
    layer, _ = loaded(96, 12)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    y = layer(x)
    assert y.shape == (*shape[:-1], 12) and y.dtype == dtype
    assert torch.equal(y.reshape(-1, 12), layer(x.reshape(-1, 96)))


def test_apply_rejects_float16_and_another_width():
    layer = Linear(96, [12])
    with pytest.raises(CheckpointError, match="bfloat16 or float32, got torch.float16 in layer"):
        layer(torch.ones(2, 96, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"expected x \[..., 96\], got \[2, 100\]"):
        layer(torch.ones(2, 100))  # the same padded row width as 96
    with pytest.raises(ValueError, match=r"expected x \[..., 96\], got \[1, 5, 192\]"):
        Linear(192, [24], ranks=2, axis="columns")(X)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["apply", "apply_layer"])
@pytest.mark.parametrize("repacked", [False, True], ids=["rows", "repacked"])
def test_the_call_compiles_as_one_graph(form, repacked, monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # conftest.py sets it for the oracles
    torch._dynamo.reset()
    counters.clear()
    layer, _ = loaded(256, 40)
    if repacked:
        layer.finish()
    call, x = getattr(layer.quant_method, form), inputs(3, 256)
    with torch.no_grad():
        compiled = torch.compile(lambda x: call(layer, x), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), layer(x))
    assert counters["stats"]["unique_graphs"] == 1  # else eager was compared with eager
    torch._dynamo.reset()


# The repacked weight ------------------------------------------------------------------------------


def test_the_weight_is_what_repack_makes_and_the_rows_are_freed():
    layer, part = loaded(256, 96)
    parameter, rows = layer.weight, weakref.ref(layer.weight.untyped_storage())
    layer.finish()
    gc.collect()
    assert rows() is None, "the canonical copy is still held"
    assert layer.weight is parameter and callable(parameter.weight_loader)
    assert torch.equal(layer.weight, ops.repack(ops.pack(part[2]), 256, "2bit"))
    assert dict(layer.named_parameters()).keys() == {"weight", "weight_scale"}
    before, place = layer.weight.clone(), layer.weight.data_ptr()
    layer.finish()  # engines may, after a weight update
    assert torch.equal(layer.weight, before) and layer.weight.data_ptr() == place


def test_more_inputs_than_the_layout_takes_stay_rows():
    columns = (1 << 15) + 128
    layer, part = loaded(columns, 4)
    assert layer.finish().weight.shape == (4, columns // 4)
    x = inputs(2, columns)
    assert torch.equal(layer(x), torch.ops.bitnet.linear(x, ops.pack(part[2]), layer.weight_scale))
    assert torch.equal(layer.codes(), part[2])


@pytest.mark.parametrize("rule", RULES)
def test_an_incomplete_layer_is_rejected_and_stays_rows(rule):
    layer = Linear(128, [8, 8], rule, name="gate_up_proj")
    with pytest.raises(CheckpointError, match="weight of shard 0.*in gate_up_proj"):
        layer.finish()
    layer.load(checkpoint(rule, 8, 128), 0)
    with pytest.raises(CheckpointError, match="got none for weight of shard 1"):
        layer.finish()
    assert layer.weight.shape == (16, 32)
    layer.load(checkpoint(rule, 8, 128), 1).finish()
    single = Linear(128, [8])
    single.weight.weight_loader(single.weight, hf_packed(random_codes(8, 128)))
    with pytest.raises(CheckpointError, match="got none for weight_scale of shard None"):
        single.finish()


def test_dummy_weights_are_repacked_zeros(monkeypatch):
    """Engines' initialisers fill floating parameters alone, before the post-load hook or after."""
    layer = Linear(192, [5, 3])
    assert torch.equal(layer.codes(), torch.zeros(8, 192, dtype=torch.int8))
    assert not layer.weight.requires_grad and not layer.weight_scale.requires_grad
    monkeypatch.setattr(BitNetLinearMethod, "load_format", lambda self: "dummy")
    assert layer.finish().weight.dim() == 3
    layer.weight_scale.data.fill_(1e-3)
    assert torch.equal(layer(X), torch.zeros(1, 5, 8))
    layer.load(checkpoint(MULTIPLY, 5, 192), 0)
    with pytest.raises(CheckpointError, match="got none for weight of shard 1"):
        layer.finish()


def tile_rows():
    return 4 * _runtime.tile_lanes()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("unit", [1, 2], ids=["whole tiles", "parts of tiles"])
@pytest.mark.parametrize("hook", [True, False], ids=["hook called", "hook not called"])
def test_an_update_after_repacking_reads_as_a_fresh_load(rule, unit, hook):
    sizes, columns = [tile_rows() // unit] * 3, 200
    layer = Linear(columns, sizes, rule)
    for shard, size in enumerate(sizes):
        layer.load(checkpoint(rule, size, columns, shard), shard)
    shape = layer.finish().weight.shape
    parts = [checkpoint(rule, sizes[i], columns, i + (10 if i == 1 else 0)) for i in range(3)]
    layer.load(parts[1], 1)
    if hook:
        layer.finish()
    assert layer.weight.shape == shape
    assert torch.equal(layer.codes(), torch.cat([part[2] for part in parts]))
    x = inputs(3, columns)
    for part, y in zip(parts, layer(x).split(sizes, -1), strict=True):
        assert_equals_transformers(rule, y, x, part)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=3), st.integers(1, 300), st.data())
def test_updates_in_any_order_end_as_a_fresh_load_does(sizes, columns, data):
    ids = [None] if len(sizes) == 1 else range(len(sizes))

    def filled(seeds):
        layer = Linear(columns, sizes)
        for i in range(len(sizes)):
            layer.load(checkpoint(MULTIPLY, sizes[i], columns, seeds[i]), ids[i])
        return layer.finish()

    seeds = list(range(len(sizes)))
    layer = filled(seeds)
    for i in data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=4)):
        seeds[i] += 10
        layer.load(checkpoint(MULTIPLY, sizes[i], columns, seeds[i]), ids[i])
    fresh = filled(seeds)
    assert torch.equal(layer.weight, fresh.weight)
    assert torch.equal(layer.weight_scale, fresh.weight_scale)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_of_one_rank_takes_its_slice(rank):
    layer, _ = loaded(130, 80, rank=rank, ranks=2)
    part = checkpoint(MULTIPLY, 80, 130, 5)
    layer.finish().load(part)
    assert torch.equal(layer.codes(), part[2][40 * rank : 40 * rank + 40])


def test_an_update_that_does_not_fit_changes_nothing():
    """Through our loader, or as engines copy into a parameter without one."""
    layer, part = loaded(256, 100)
    before = layer.finish().weight.clone()
    for shape, byte in (((8, 256), 0), ((25, 256), 3)):
        with pytest.raises(CheckpointError):
            layer.weight.weight_loader(layer.weight, torch.full(shape, byte, dtype=torch.uint8))
    with pytest.raises(RuntimeError):
        layer.weight.data.copy_(ops.pack(part[2]))
    assert torch.equal(layer.weight, before)


def test_state_dict_is_the_live_weight_and_parameters_may_be_swapped():
    """Sharded loaders write into the tensors of state_dict(); offloading engines call
    torch.func.functional_call.
    """
    layer, other = loaded(256, 64)[0].finish(), loaded(256, 64, seed=9)[0].finish()
    assert layer.state_dict()["weight"].data_ptr() == layer.weight.data_ptr()
    for name, tensor in other.state_dict().items():
        tensor.copy_(layer.state_dict()[name])
    x = inputs(2, 256)
    assert torch.equal(other(x), layer(x))
    doubled = {"weight": layer.weight.data, "weight_scale": 2 * layer.weight_scale.data}
    assert torch.equal(torch.func.functional_call(layer, doubled, (x,)), 2 * layer(x))


# Rejections ---------------------------------------------------------------------------------------


U8 = torch.uint8
WEIGHTS = {
    "a short shard": (MULTIPLY, torch.zeros(8, 128, dtype=U8), r"weight \[16, 128\] for 64 out"),
    "a long shard": (MULTIPLY, torch.zeros(17, 128, dtype=U8), r"got \[17, 128\]"),
    "few columns": (MULTIPLY, torch.zeros(16, 64, dtype=U8), r"got \[16, 64\]"),
    "three dimensions": (MULTIPLY, torch.zeros(16, 128, 1, dtype=U8), "got"),
    "the other order": (
        MULTIPLY, torch.zeros(64, 32, dtype=U8), "along the inputs, not in transformers' order",
    ),
    "code 3": (MULTIPLY, torch.full((16, 128), 3, dtype=U8), "code 3 at row 0"),
    "masters where packed": (ScaleRule.DIVIDE, torch.zeros(64, 128), "packed uint8 weights"),
    "int8 codes": (ScaleRule.DIVIDE, torch.zeros(16, 128, dtype=torch.int8), "torch.int8"),
    "packed where masters": (ScaleRule.ONLINE, torch.zeros(16, 128, dtype=U8), "masters"),
    "short masters": (ScaleRule.ONLINE, torch.zeros(32, 128), r"weight \[64, 128\]"),
}  # fmt: skip
SCALES = {
    "of masters": (ScaleRule.ONLINE, torch.ones(1), "expected no weight_scale"),
    "two": (MULTIPLY, torch.ones(2), "one element"),
    "0": (MULTIPLY, torch.zeros(1), "above zero"),
    "reciprocal 0": (ScaleRule.DIVIDE, torch.zeros(1), "above zero"),
    "NaN": (MULTIPLY, torch.tensor([float("nan")]), "finite"),
    "-1": (MULTIPLY, -torch.ones(1), "above zero"),
    "integer": (MULTIPLY, torch.ones(1, dtype=torch.int32), "floating-point"),
}
REJECTED = [("weight", case) for case in WEIGHTS] + [("weight_scale", case) for case in SCALES]


@pytest.mark.parametrize(("name", "case"), REJECTED)
def test_a_tensor_is_rejected_with_a_message_and_nothing_changed(name, case):
    rule, tensor, message = (WEIGHTS if name == "weight" else SCALES)[case]
    layer = Linear(128, [64], rule, name="model.layers.0.mlp.up_proj")
    before = layer.weight.clone(), layer.weight_scale.clone()
    param = getattr(layer, name)
    with pytest.raises(CheckpointError, match=message) as caught:
        param.weight_loader(param, tensor)
    assert "model.layers.0.mlp.up_proj" in str(caught.value)
    assert torch.equal(layer.weight, before[0]) and torch.equal(layer.weight_scale, before[1])
    assert not layer.bitnet.loaded


@pytest.mark.parametrize(("sizes", "shard"), [([64], "q"), ([64], (0, 1)), ([32, 32], None)])
def test_a_shard_that_is_none_of_the_layers_is_rejected(sizes, shard):
    layer = Linear(128, sizes)
    known = "None" if len(sizes) == 1 else "0, 1"
    with pytest.raises(CheckpointError, match=rf"id among {known}, got .*fused in the checkpoint"):
        layer.weight.weight_loader(layer.weight, None, shard)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float16}, "bfloat16 or float32, got torch.float16 in layer"),
        ({"use_presharded_weights": True}, "already split by rank in layer"),
    ],
)
def test_layers_that_cannot_be_served_are_rejected_when_made(options, message):
    with pytest.raises(CheckpointError, match=message):
        Linear(192, [64], **options)


@pytest.mark.parametrize(("local", "total"), [((64, 21), (64, 64)), ((32, 64), (65, 64))])
def test_sizes_that_do_not_divide_by_the_ranks_are_rejected(local, total):
    layer = nn.Module()
    layer.tp_rank, layer.tp_size = 1, 2
    what = "output size 65" if total[0] == 65 else "input size 64"
    with pytest.raises(CheckpointError, match=f"expected {what} to divide evenly over 2"):
        BitNetLinearMethod().create_weights(
            layer, local[1], [local[0]], total[1], total[0], torch.float32
        )
