"""The engine's REAL linear classes with our method, in one process, without an engine.

For every flavour of checkpoint and every class: codes arrive as transformers packed them, outputs
equal our bare op bit for bit and transformers' modules within fp32's rounding, the parts of two
ranks make the whole.
"""

from __future__ import annotations

import pytest
import torch

from bitnet_ops import ops
from bitnet_ops.integrations import BitNetLinearMethod, CheckpointError, ScaleRule
from bitnet_ops.integrations.linear_method import canonical_rows
from hf_flavours import checkpoint, hf_bound, hf_linear

pytestmark = pytest.mark.layers
SETTINGS = {
    ScaleRule.DIVIDE: {},
    ScaleRule.MULTIPLY: {"linear_class": "autobitlinear"},
    ScaleRule.ONLINE: {"linear_class": "autobitlinear", "quantization_mode": "online"},
}
K, INNER, HEADS, HEAD_DIM = 192, 80, 4, 16
X = torch.randn(5, K, generator=torch.Generator().manual_seed(99))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=ScaleRule, ids=lambda rule: rule.name.lower())
def rule(request):
    return request.param


@pytest.fixture
def build(engine):
    """(rule, class, arguments) -> a linear in fp32 with our config."""

    def build(rule, kind, *args, **options):
        config = engine.config_class().from_config({"quant_method": "bitnet", **SETTINGS[rule]})
        options = {"bias": False, "params_dtype": torch.float32, "prefix": "claim", **options}
        layer = engine.linear(kind, *args, quant_config=config, **options)
        assert isinstance(layer.quant_method, BitNetLinearMethod)
        return layer

    return build


def load(layer, part, *shard_id):
    layer.weight.weight_loader(layer.weight, part[0], *shard_id)
    if part[1] is not None:
        layer.weight_scale.weight_loader(layer.weight_scale, part[1], *shard_id)
    return layer


def finish(layer):
    layer.quant_method.process_weights_after_loading(layer)
    layer.quant_method.process_weights_after_loading(layer)  # engines may, after a weight update
    assert layer.weight.dim() == 3, "the layer still has the file's rows"
    return layer


def codes_of(layer):
    return ops.unpack(canonical_rows(layer), layer.bitnet.in_features)


def output(layer, x):
    """The layer's output, which is that of the bare op on the file's rows, bit for bit."""
    y = layer(x)[0]
    assert torch.equal(y, torch.ops.bitnet.linear(x, canonical_rows(layer), layer.weight_scale))
    return y


def assert_transformers(rule, y, x, part):
    weight, stored, codes, scale = part
    theirs = hf_linear(rule, weight, stored, *codes.shape)(x)
    assert ((y - theirs).abs() <= hf_bound(x, scale)).all()


def test_replicated(build, rule):
    part = checkpoint(rule, INNER, K, 1)
    layer = finish(load(build(rule, "ReplicatedLinear", K, INNER), part))
    assert torch.equal(codes_of(layer), part[2])
    assert_transformers(rule, output(layer, X), X, part)
    assert torch.equal(layer(X[None])[0][0], layer(X)[0])  # as transformers' models hand it over


@pytest.mark.parametrize("ranks", [1, 2])
def test_column_parallel(build, rule, ranks):
    part = checkpoint(rule, INNER, K, 2)
    layers = [
        finish(load(build(rule, "ColumnParallelLinear", K, INNER, rank=r, ranks=ranks), part))
        for r in range(ranks)
    ]
    assert torch.equal(torch.cat([codes_of(layer) for layer in layers]), part[2])
    assert_transformers(rule, torch.cat([output(layer, X) for layer in layers], -1), X, part)


def fused(build, rule, kind, parts, ids, ranks, *args):
    """All ranks of a fused layer, loaded shard by shard."""
    layers = []
    for rank in range(ranks):
        layer = build(rule, kind, *args, rank=rank, ranks=ranks)
        for part, shard_id in zip(parts, ids, strict=True):
            load(layer, part, shard_id)
        layers.append(finish(layer))
    return layers


@pytest.mark.parametrize("ranks", [1, 2])
def test_merged_gate_and_up(build, rule, ranks):
    pair = [checkpoint(rule, INNER, K, seed) for seed in (3, 4)]
    sizes = [INNER, INNER]
    layers = fused(build, rule, "MergedColumnParallelLinear", pair, (0, 1), ranks, K, sizes)
    for i, part in enumerate(pair):
        assert torch.equal(torch.cat([codes_of(la).chunk(2)[i] for la in layers]), part[2])
        y = torch.cat([output(layer, X).chunk(2, -1)[i] for layer in layers], -1)
        assert_transformers(rule, y, X, part)


@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 2), (2, 2), (2, 1)])
def test_fused_qkv(build, rule, ranks, kv_heads):
    """q splits over the ranks; k and v too, or are replicated where heads are fewer than ranks."""
    rows = (HEADS * HEAD_DIM, kv_heads * HEAD_DIM, kv_heads * HEAD_DIM)
    parts = [checkpoint(rule, size, K, 5 + i) for i, size in enumerate(rows)]
    shape = (K, HEAD_DIM, HEADS, kv_heads)
    layers = fused(build, rule, "QKVParallelLinear", parts, "qkv", ranks, *shape)
    for i, part in enumerate(parts):
        codes, ys = [], []
        for layer in layers:
            sizes = layer.output_partition_sizes
            codes.append(codes_of(layer).split(sizes)[i])
            ys.append(output(layer, X).split(sizes, -1)[i])
        if kv_heads < ranks and i > 0:
            assert torch.equal(codes[0], codes[1])
            codes, ys = codes[:1], ys[:1]
        assert torch.equal(torch.cat(codes), part[2])
        assert_transformers(rule, torch.cat(ys, -1), X, part)


@pytest.mark.parametrize("ranks", [1, 2])
def test_row_parallel(build, rule, ranks, monkeypatch):
    """Columns split; the ranks' outputs add up to what one computes."""
    absmax = X.abs().amax(-1, keepdim=True)
    part, total, codes = checkpoint(rule, 64, K, 8), 0, []
    for rank in range(ranks):
        layer = load(build(rule, "RowParallelLinear", K, 64, rank=rank, ranks=ranks), part)
        codes.append(codes_of(finish(layer)))
        method = layer.quant_method
        monkeypatch.setattr(method, "max_over_ranks", lambda x: torch.maximum(x, absmax))
        total = total + method.apply(layer, X.chunk(ranks, -1)[rank].contiguous())
    assert torch.equal(torch.cat(codes, 1), part[2])
    assert_transformers(rule, total, X, part)
    if ranks == 1:
        assert torch.equal(output(layer, X), total)


@pytest.mark.of("sglang")
def test_ranks_ask_the_engines_own_group(build):
    """Here of one rank, so that the largest is its own."""
    layer = build(ScaleRule.MULTIPLY, "RowParallelLinear", K, 64, rank=0, ranks=2)
    assert layer.quant_method.rank_group() is not None
    x = torch.tensor([1.0, 3.0])
    assert torch.equal(layer.quant_method.max_over_ranks(x.clone()), x)


def test_weights_updated_later(build, rule):
    """Updates load shards and call no post-load hook; the layout stays."""
    pair, sizes = [checkpoint(rule, INNER, K, seed) for seed in (3, 4)], [INNER, INNER]
    kind = "MergedColumnParallelLinear"
    (layer,) = fused(build, rule, kind, pair, (0, 1), 1, K, sizes)
    shape, pair[1] = layer.weight.shape, checkpoint(rule, INNER, K, 9)
    load(layer, pair[1], 1)
    assert layer.weight.shape == shape
    for i, part in enumerate(pair):
        assert torch.equal(codes_of(layer).chunk(2)[i], part[2])
        assert_transformers(rule, output(layer, X).chunk(2, -1)[i], X, part)


@pytest.mark.parametrize(
    ("rule", "kind", "ranks"),
    [
        (ScaleRule.MULTIPLY, "ReplicatedLinear", 1),
        (ScaleRule.MULTIPLY, "ColumnParallelLinear", 1),
        (ScaleRule.DIVIDE, "ColumnParallelLinear", 2),
        (ScaleRule.MULTIPLY, "RowParallelLinear", 1),
    ],
)
def test_a_short_shard_is_rejected(build, rule, kind, ranks):
    """Which the engine's own loader may take in silence."""
    layer = build(rule, kind, K, 128, ranks=ranks)
    with pytest.raises(CheckpointError, match=r"expected weight \[32, 192\]"):
        load(layer, checkpoint(rule, 32, K, 1))
    with pytest.raises(CheckpointError, match="got none for weight"):
        finish(layer)


def test_a_missing_shard_is_rejected(build):
    layer = build(ScaleRule.MULTIPLY, "MergedColumnParallelLinear", K, [INNER, INNER])
    load(layer, checkpoint(ScaleRule.MULTIPLY, INNER, K, 1), 0)
    with pytest.raises(CheckpointError, match="weight of shard 1"):
        finish(layer)


@pytest.mark.of("sglang")
def test_the_stock_loader_takes_a_short_shard_in_silence(engine):
    """The trap that our loaders are for; if SGLang closes it, this says so."""
    plain = engine.linear("ColumnParallelLinear", K, 128, bias=False)
    plain.weight.weight_loader(plain.weight, torch.ones(32, K))
    assert int(plain.weight.abs().sum(1).ne(0).sum()) == 32


def test_what_cannot_be_served_is_rejected_when_a_layer_is_made(build):
    with pytest.raises(CheckpointError, match="bfloat16 or float32"):
        build(ScaleRule.MULTIPLY, "ReplicatedLinear", K, 8, params_dtype=torch.float16)
    with pytest.raises(CheckpointError, match="expected no bias"):
        build(ScaleRule.MULTIPLY, "ColumnParallelLinear", K, 128, bias=True)


def test_a_bias_takes_our_loader(build):
    rule, bias = ScaleRule.DIVIDE, torch.randn(64, generator=torch.Generator().manual_seed(1))
    part = checkpoint(rule, 64, K, 1)
    layer = build(rule, "ColumnParallelLinear", K, 64, bias=True, rank=1, ranks=2)
    with pytest.raises(CheckpointError, match=r"expected bias floating-point \[64\]"):
        layer.bias.weight_loader(layer.bias, bias[:32])
    load(layer, part)
    with pytest.raises(CheckpointError, match="bias of shard None"):
        finish(layer)
    layer.bias.weight_loader(layer.bias, bias)
    theirs = hf_linear(rule, part[0], part[1], 64, K, bias)(X)[:, 32:]
    bound = hf_bound(X, part[3]) + 2.0**-23 * theirs.abs()
    assert ((finish(layer)(X)[0] - theirs).abs() <= bound).all()


def test_dummy_weights_are_valid_codes(engine, build):
    """--load-format dummy: the initialiser fills floats only, before the hook or after."""
    layer = build(ScaleRule.DIVIDE, "QKVParallelLinear", K, HEAD_DIM, HEADS, 2)
    with pytest.raises(CheckpointError, match="got none for weight"):
        finish(layer)
    with engine.dummy_weights():
        finish(layer)
        engine.initialize_dummy(layer)
        finish(layer)
    assert torch.isfinite(layer(X)[0]).all()
