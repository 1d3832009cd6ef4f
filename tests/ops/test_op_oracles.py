"""Ops and reference against Hugging Face's own functions, which share no code with either.

Models of one layer's parts only (linear, norm, rope, MLP, attention), in float32; whole networks
are compared elsewhere. transformers runs as written: conftest.py switches its torch.compile off.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.integrations import bitnet as hf
from transformers.models.bitnet import modeling_bitnet as hf_model
from transformers.models.bitnet.configuration_bitnet import BitNetConfig

from bitnet_ops import ops
from bounds import (
    EXP_ERROR,
    U,
    assert_equal,
    assert_within,
    rms_norm_error,
    sum_error,
)
from op_catalogue import reference
from op_values import activations, frequencies, gain, pack_codes, positive, random_codes
from ops_attention import attention_arguments, attention_bound, attention_by
from ops_rowwise import cosines_and_sines


@pytest.fixture(params=[ops, reference], ids=["ops", "reference"])
def impl(request: pytest.FixtureRequest) -> Any:
    return request.param


def naive_linear_error(k: int) -> float:
    """torch's own float32 sum of k products, in whatever order: at most k roundings."""
    return k * U


def bit_linear(codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> hf.BitLinear:
    """HF's packed linear, which divides by the stored (reciprocal) scale."""
    n, k = codes.shape
    module = hf.BitLinear(k, n, bias is not None, dtype=torch.float32)
    module.weight = hf.pack_weights(codes.clone())
    module.weight_scale = 1.0 / scale
    if bias is not None:
        module.bias = bias
    return module


def test_quantize_activations_equals_bitlinear(impl: Any, rng: torch.Generator) -> None:
    x = activations(rng, 40, 333) * torch.logspace(-7, 7, 40)[:, None]
    q, scale = impl.quantize_activations(x)
    expected, s = bit_linear(random_codes(rng, 4, 333), torch.ones(1)).activation_quant(x)
    assert_equal(q, expected)
    assert_equal(scale, 1.0 / s[:, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantize_activations_equals_actquant(
    impl: Any, dtype: torch.dtype, rng: torch.Generator
) -> None:
    x = activations(rng, 20, 256).to(dtype)
    q, scale = impl.quantize_activations(x)
    rounded = hf.ActQuant.apply(x.float())  # q / s in float32
    assert_equal(q, (rounded / scale[:, None]).round().to(torch.int8))


def test_quantize_weights_equals_weightquant(impl: Any, rng: torch.Generator) -> None:
    weight = torch.randn(200, 100, generator=rng) * 0.03
    codes, scale = impl.quantize_weights(weight)
    ternary = hf.WeightQuant.apply(weight)  # codes / s with one s = 1 / absmean
    expected_scale = ternary[ternary > 0].unique()
    assert len(expected_scale) == 1
    # HF's float32 mean and the float64 mean differ by their summation only, so a code may differ
    # only where |w| / scale lies that close to a tie.
    assert abs(scale.item() / expected_scale.item() - 1) <= naive_linear_error(200)
    near_tie = (weight.abs() / scale - 0.5).abs() < naive_linear_error(200)
    assert bool(((codes == ternary.sign().to(torch.int8)) | near_tie).all())
    assert near_tie.sum() <= 2


@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_bitlinear(impl: Any, with_bias: bool, rng: torch.Generator) -> None:
    codes, scale = random_codes(rng, 64, 320), positive(rng, 1)
    bias = torch.randn(64, generator=rng) if with_bias else None
    x = activations(rng, 5, 320)
    y = impl.linear(x, pack_codes(codes), scale, bias)
    expected = bit_linear(codes, scale, bias)(x)
    # The integer sums stay below 2^24, so HF's float product is exact; then scales and bias.
    product = expected if bias is None else expected - bias
    assert_within(y, expected, product.double().abs() * 6 * U + expected.double().abs() * 2 * U)


def test_linear_equals_offline_autobitlinear(impl: Any, rng: torch.Generator) -> None:
    codes, scale = random_codes(rng, 64, 320), positive(rng, 1)
    x = activations(rng, 5, 320)
    module = hf.AutoBitLinear(320, 64, bias=False, dtype=torch.float32)
    module.weight = torch.nn.Parameter(codes.float(), requires_grad=False)
    module.weight_scale = scale
    y = impl.linear(x, pack_codes(codes), scale)
    magnitude = x.double().abs().sum(-1, keepdim=True) * 1.01 * scale.double()
    assert_within(y, module(x), magnitude.expand(5, 64) * (naive_linear_error(320) + 8 * U))


def test_linear_equals_online_autobitlinear(impl: Any, rng: torch.Generator) -> None:
    master = torch.randn(64, 320, generator=rng) * 0.02
    x = activations(rng, 5, 320)
    module = hf.AutoBitLinear(320, 64, bias=False, dtype=torch.float32, online_quant=True)
    module.weight = torch.nn.Parameter(master.clone(), requires_grad=False)
    codes, scale = impl.quantize_weights(master)
    y = impl.linear(x, impl.pack(codes), scale)
    magnitude = x.double().abs().sum(-1, keepdim=True) * 1.01 * scale.double()
    assert_within(y, module(x), magnitude.expand(5, 64) * (2 * naive_linear_error(320) + 8 * U))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_bitnetrmsnorm(impl: Any, dtype: torch.dtype, rng: torch.Generator) -> None:
    x, weight = activations(rng, 7, 640).to(dtype), gain(rng, 640, dtype)
    module = hf_model.BitNetRMSNorm(640, eps=1e-5)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    expected = module(x)
    one_rounding = 0.0 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    relative = rms_norm_error(640) + naive_linear_error(640) / 2 + 6 * U + one_rounding
    assert_within(impl.rms_norm(x, weight, 1e-5), expected, expected.double().abs() * relative)


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000042.0])
def test_the_angles_of_rope_equal_bitnetrotaryembedding(
    impl: Any, theta: float, rng: torch.Generator
) -> None:
    config = BitNetConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )  # fmt: skip
    positions = torch.randint(0, 8192, (3, 11), generator=rng)
    cos, sin = hf_model.BitNetRotaryEmbedding(config)(torch.zeros(1), positions)
    table = cosines_and_sines(impl, positions, frequencies(128, theta))
    angle = positions.double()[..., None] / theta ** (torch.arange(0, 128, 2).double() / 128)
    # Both round the frequency (power, division) and the angle to float32.
    assert_within(table[..., :64], cos[..., :64], angle * 8 * U + 4 * U)
    assert_within(table[..., 64:], sin[..., :64], angle * 8 * U + 4 * U)


def test_rope_equals_apply_rotary_pos_emb(impl: Any, rng: torch.Generator) -> None:
    x = torch.randn(2, 5, 6, 32, generator=rng)
    positions = torch.randint(0, 4096, (2, 5), generator=rng)
    angle = (positions[..., None].float() * frequencies(32)).double()
    cos, sin = (f(torch.cat([angle, angle], -1)).float() for f in (torch.cos, torch.sin))
    expected, _ = hf_model.apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
    assert_equal(impl.rope(x, positions, frequencies(32)), expected)


def test_squared_relu_and_silu_equal_the_activation_table(impl: Any, rng: torch.Generator) -> None:
    gate, up = torch.randn(2, 9, 50, generator=rng) * 30
    assert_equal(impl.relu2_mul(gate, up), ACT2FN["relu2"](gate) * up)
    expected = ACT2FN["silu"](gate) * up
    bound = expected.double().abs() * (2 * EXP_ERROR + 6 * U) + 1e-30
    assert_within(impl.silu_and_mul(torch.cat([gate, up], -1)), expected, bound)


def test_mlp_forward_equals_bitnetmlp(impl: Any, rng: torch.Generator) -> None:
    hidden, inner = 192, 320
    config = BitNetConfig(hidden_size=hidden, intermediate_size=inner, rms_norm_eps=1e-5)
    mlp = hf_model.BitNetMLP(config)
    shapes = {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    codes = {name: random_codes(rng, *shape) for name, shape in shapes.items()}
    scales = {name: positive(rng, 1) for name in shapes}
    for name in shapes:
        setattr(mlp, name, bit_linear(codes[name], scales[name]))
    norm = hf_model.BitNetRMSNorm(hidden, eps=1e-5)
    norm.weight.data, mlp.ffn_sub_norm.weight.data = gain(rng, hidden), gain(rng, inner)
    x = activations(rng, 6, hidden)
    with torch.no_grad():
        expected = mlp(norm(x))
    packed = [part for n in shapes for part in (pack_codes(codes[n]), scales[n])]
    y = impl.mlp_forward(
        x, norm.weight.detach(), *packed[:4], mlp.ffn_sub_norm.weight.detach(), *packed[4:],
        1e-5, "relu2",
    )  # fmt: skip
    # With equal int8 codes (no value of these inputs lies on a tie) only roundings remain.
    relative = 8 * (rms_norm_error(hidden) + rms_norm_error(inner) + naive_linear_error(inner))
    assert_within(y, expected, expected.double().abs() * relative)


@pytest.mark.parametrize(("tokens", "start"), [(5, 0), (3, 4), (1, 9)])
def test_attention_equals_eager_attention(
    impl: Any, tokens: int, start: int, rng: torch.Generator
) -> None:
    args = list(attention_arguments(rng, batch=2, tokens=tokens, heads=6, kv_heads=2, length=10))
    args[3] = torch.tensor([start, start])
    query, keys, values, starts, scale = args
    visible = start + tokens
    mask = torch.full((tokens, visible), -torch.inf).triu(start + 1)
    module = SimpleNamespace(num_key_value_groups=3, training=False)
    expected, _ = hf_model.eager_attention_forward(
        module, query.transpose(1, 2), keys[:, :, :visible], values[:, :, :visible], mask, scale
    )
    bound = 3 * attention_bound(tuple(args), expected)
    assert_within(attention_by(impl)(*args), expected, bound)


def test_lm_head_equals_a_linear_layer(impl: Any, rng: torch.Generator) -> None:
    x, weight = activations(rng, 4, 96), torch.randn(50, 96, generator=rng)
    expected = torch.nn.functional.linear(x, weight)
    magnitude = x.double().abs() @ weight.double().abs().T
    bound = magnitude * (sum_error(96) + naive_linear_error(96))
    assert_within(impl.lm_head(x, weight), expected, bound)
