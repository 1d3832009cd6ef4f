"""The mistakes of earlier ternary implementations, each with the test that would have caught it.

R1-R8 made models print gibberish; K1-K10 were found beside them. Each test names its mistake.
R2, R3, K7 and K8 concern whole models and are in test_model.py. Oracles share no code with the
ops: golden bytes, transformers' functions, int64 numpy.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.integrations import bitnet as hf

from bitnet_ops import ops
from bitnet_ops.nn import packing
from bitnet_ops.nn.kv_pool import attend_rectangular, update_rectangular
from bounds import assert_equal
from golden import (
    DOT_PRODUCT,
    HF_DOC_BYTES,
    HF_DOC_ROWS,
    HF_DOC_ROWS_INTERLEAVED,
    HF_HEX,
    I2S_A_HEX,
    golden_activations,
    golden_codes,
)
from isa_control import every_configuration
from op_catalogue import composed, reference
from op_values import activations, int8_values, positive, random_codes
from ops_fused import mlp_arguments


def bytes_of(text: str, *shape: int) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8).reshape(shape)


# ---- R1: rows read interleaved instead of in contiguous quarters ---------------------------------


def test_R1_hf_rows_are_contiguous_quarters() -> None:
    packed = torch.tensor(HF_DOC_BYTES, dtype=torch.uint8)
    assert packing.unpack_hf(packed, 8).tolist() == HF_DOC_ROWS
    assert packing.unpack_hf(packed, 8).tolist() != HF_DOC_ROWS_INTERLEAVED
    assert_equal(packing.pack_hf(torch.tensor(HF_DOC_ROWS, dtype=torch.int8)), packed)


def test_R1_golden_hf_bytes_reach_the_kernels_in_the_right_rows() -> None:
    codes = packing.unpack_hf(bytes_of(HF_HEX, 4, 16), 16)
    assert_equal(codes, golden_codes().reshape(16, 16))
    x = int8_values(torch.Generator().manual_seed(1), 16)
    expected = golden_codes().reshape(16, 16).numpy().astype(np.int64) @ x.numpy().astype(np.int64)
    assert ops.gemv(ops.pack(codes), x).tolist() == expected.tolist()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 37, 128])
def test_R1_unpack_hf_inverts_transformers_own_pack(rows: int, rng: torch.Generator) -> None:
    codes = random_codes(rng, rows, 24)
    packed = hf.pack_weights(codes.clone())
    assert_equal(packing.unpack_hf(packed, rows), codes)
    assert_equal(packing.pack_hf(codes), packed)


def test_R1_the_interleaved_reading_gives_another_product(rng: torch.Generator) -> None:
    """The negative test: the wrong rows are finite and of the same size, and they are wrong."""
    codes = random_codes(rng, 64, 128)
    packed = hf.pack_weights(codes.clone())
    interleaved = torch.empty_like(codes)
    for lane in range(4):
        interleaved[lane::4] = ((packed >> (2 * lane)) & 3).to(torch.int8) - 1
    x = activations(rng, 3, 128)
    right, wrong = (ops.linear(x, ops.pack(c), torch.ones(1)) for c in (codes, interleaved))
    assert_equal(right, ops.linear(x, ops.pack(packing.unpack_hf(packed, 64)), torch.ones(1)))
    assert abs(wrong.norm() / right.norm() - 1) < 1e-6  # a permutation: every weak check passes
    cosine = torch.nn.functional.cosine_similarity(right.flatten(), wrong.flatten(), dim=0)
    assert cosine < 0.5


# ---- R4: one activation scale for the whole batch -----------------------------------------------


def test_R4_every_token_has_its_own_activation_scale(rng: torch.Generator) -> None:
    x = activations(rng, 7, 128)
    x[2] *= 1e4  # an outlier token
    q, scale = ops.quantize_activations(x)
    assert (q.int().abs().amax(-1) == 127).all()
    assert_equal(scale, torch.stack([ops.quantize_activations(row)[1] for row in x]))
    weight, w_scale = ops.pack(random_codes(rng, 20, 128)), positive(rng, 1)
    whole = ops.linear(x, weight, w_scale)
    for row in range(7):
        assert_equal(ops.linear(x[row], weight, w_scale), whole[row], f"row {row}")


# ---- R5, K1: fused ops subtract the activation sum twice, or drop a weight scale ----------------


def _biased_tokens(rng: torch.Generator, tokens: int, k: int) -> Tensor:
    x = activations(rng, tokens, k) + 3.0
    assert ops.quantize_activations(x)[0].sum() > 1000 * tokens  # the sum that must not be lost
    return x


@pytest.mark.parametrize("tokens", [1, 5])
def test_R5_K1_fused_qkv_neither_loses_nor_repeats_the_activation_sum(
    tokens: int, rng: torch.Generator
) -> None:
    x = _biased_tokens(rng, tokens, 200)
    qkv = [part for n in (20, 8, 8) for part in (ops.pack(random_codes(rng, n, 200)),
                                                 positive(rng, 1) + 2)]  # fmt: skip
    norm = torch.ones(200)
    fused = ops.qkv_forward(x, norm, *qkv, 1e-5)
    for i, ours in enumerate(fused):
        assert_equal(ours, composed(ops, "qkv_forward", x, norm, *qkv, 1e-5)[i])
        # Against float64 with the same codes: the relative error of the mistake was 10 to 46.
        q, scale = reference.quantize_activations(ops.rms_norm(x, norm, 1e-5))
        exact = q.double() @ reference.unpack(qkv[2 * i], 200).double().T
        exact *= scale.double()[:, None] * qkv[2 * i + 1].double()
        assert torch.allclose(ours.double(), exact, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("tokens", [1, 5])
def test_R5_K1_fused_mlp_applies_every_weight_scale_once(tokens: int, rng: torch.Generator) -> None:
    args = list(mlp_arguments(rng, _biased_tokens(rng, tokens, 200), "relu2", sub_norm=False))
    assert_equal(ops.mlp_forward(*args), composed(ops, "mlp_forward", *args))
    base = ops.mlp_forward(*args)
    for index, power in ((3, 2), (5, 1), (8, 1)):  # gate is squared; up and down are linear
        changed = list(args)
        changed[index] = args[index] * 2  # a power of two: exact in every step
        assert_equal(ops.mlp_forward(*changed), base * 2**power, f"argument {index}")


# ---- R6: not a bug: squared ReLU is large in a healthy model ------------------------------------


def test_R6_squared_relu_of_1e8_stays_finite_and_exact(isa: str) -> None:
    gate, up = torch.tensor([[1e4, -1e4, 0.0, 3e3]]), torch.tensor([[1.0, 1e9, 7.0, -11.0]])
    assert ops.relu2_mul(gate, up).tolist() == [[1e8, 0.0, 0.0, -9.9e7]]
    half = ops.relu2_mul(gate.bfloat16(), up.bfloat16())
    assert bool(half.isfinite().all()) and half.max() > 65504
    assert bool(ops.rms_norm(ops.relu2_mul(gate, up), torch.ones(4), 1e-5).isfinite().all())


# ---- R7: masters taken for ternary weights, or packed weights taken for masters ------------------


def test_R7_online_weights_give_transformers_formula(rng: torch.Generator) -> None:
    master = torch.randn(96, 256, generator=rng) * 0.02
    x = activations(rng, 4, 256)
    codes, scale = ops.quantize_weights(master)
    y = ops.linear(x, ops.pack(codes), scale)
    expected = hf.ActQuant.apply(x) @ hf.WeightQuant.apply(master).T
    # 256 float32 products summed in any order, on both sides of a scale each
    bound = (x.abs().sum(-1, keepdim=True) * 1.01 * scale).double() * 2 * 256 * 2.0**-24
    assert bool(((y - expected).abs() <= bound).all())


def test_R7_gaussian_masters_have_31_percent_zeros(rng: torch.Generator) -> None:
    # P(|w| < 0.5 E|w|) for a normal w: erf(0.5 sqrt(2 / pi) / sqrt 2) = 0.3101.
    codes, _ = ops.quantize_weights(torch.randn(400, 500, generator=rng))
    share = (codes == 0).double().mean().item()
    assert abs(share - 0.3101) < 4 * (0.31 * 0.69 / 200_000) ** 0.5  # four standard deviations


def test_R7_packed_bytes_are_rejected_as_masters(rng: torch.Generator) -> None:
    packed = hf.pack_weights(random_codes(rng, 16, 32))
    with pytest.raises(RuntimeError, match="expected weight of dtype .*got uint8"):
        ops.quantize_weights(packed)


# ---- R8, K2: long rows: another layout, reads beyond the row, int16 overflow --------------------


class GuardedBytes:
    """Memory that ends exactly at an inaccessible page: one byte read past it is a crash."""

    def __init__(self, n_bytes: int) -> None:
        page = mmap.PAGESIZE
        pages = -(-max(n_bytes, 1) // page)
        self._map = mmap.mmap(-1, (pages + 1) * page)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(address + pages * page), page, 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
        self._start = pages * page - n_bytes

    def copy_of(self, tensor: Tensor) -> Tensor:
        whole = torch.frombuffer(self._map, dtype=torch.uint8, count=tensor.nbytes,
                                 offset=self._start)  # fmt: skip
        guarded = whole.view(tensor.dtype).view(tensor.shape)
        guarded.copy_(tensor)
        return guarded


def guarded(tensor: Tensor) -> Tensor:
    return GuardedBytes(tensor.nbytes).copy_of(tensor)


LATTICE = (1, 31, 33, 127, 128, 129, 256, 576, 3200, 6912, 8064, 8192, 8640, 14336, 23040, 27648)


@pytest.mark.parametrize("k", LATTICE)
def test_R8_K2_no_read_past_weights_or_activations_and_no_overflow(k: int) -> None:
    ones = guarded(ops.pack(torch.ones(5, k, dtype=torch.int8)))
    for configuration in every_configuration():
        for value in (127, -127, -128):
            x = guarded(torch.full((3, k), value, dtype=torch.int8))
            assert ops.gemm(ones, x).unique().tolist() == [value * k], configuration
            assert ops.gemv(ones[4:], x[2]).tolist() == [value * k], configuration


@pytest.mark.parametrize("k", [1, 15, 17, 33, 129, 576, 8640])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_R8_float_ops_do_not_read_past_their_inputs(
    k: int, dtype: torch.dtype, rng: torch.Generator
) -> None:
    x, gain = guarded(activations(rng, 2, k, dtype=dtype)), guarded(torch.ones(k, dtype=dtype))
    weight = guarded(ops.pack(random_codes(rng, 3, k)))
    scale = guarded(positive(rng, 3))
    head = guarded(torch.randn(3, k, generator=rng).to(dtype))
    for configuration in every_configuration():
        y, _ = ops.add_rms_norm(x, x, gain, 1e-5)
        assert y.shape == (2, k), configuration
        assert ops.linear(guarded(y), weight, scale).shape == (2, 3)
        assert ops.lm_head(x, head).shape == (2, 3)
        ops.quantize_weights(head)
        if dtype != torch.float16:
            ops.relu2_mul(x, x)
        if k % 2 == 0:
            ops.silu_and_mul(x)


@pytest.mark.parametrize("head_dim", [1, 6, 17, 64, 100])
def test_R8_attention_stays_inside_its_cache(head_dim: int, rng: torch.Generator) -> None:
    shape = (1, 2, 5, head_dim)
    for dtype in (torch.float32, torch.bfloat16):
        keys, values = (guarded(torch.randn(shape, generator=rng).to(dtype)) for _ in "kv")
        new = guarded(torch.randn(1, 2, 2, head_dim, generator=rng))
        for _ in every_configuration():
            update_rectangular(keys, values, new, new, torch.tensor([3]))
            out = attend_rectangular(new, keys, values, torch.tensor([3]), 0.3)
            assert bool(out.isfinite().all())


# ---- K3, K6: ties rounded differently in the vector body and in the tail; truncation ------------


@pytest.mark.parametrize("length", range(2, 2 + 64))
def test_K3_K6_ties_go_to_even_at_every_length(length: int) -> None:
    """absmax 127 makes the scale exactly 1, so k + 0.5 is a tie wherever it stands in the row."""
    ties = torch.arange(-126, 126, dtype=torch.float32) + 0.5
    rows = -(-len(ties) // (length - 1))
    x = torch.full((rows, length), 0.5)
    for row, values in enumerate(ties.split(length - 1)):
        x[row, : len(values)] = values
    x[:, -1] = 127.0
    expected = np.rint(x.numpy()).astype(np.int8)  # IEEE: half to even
    for configuration in every_configuration():
        q, scale = ops.quantize_activations(x)
        assert_equal(q, torch.from_numpy(expected), configuration)
        assert (scale == 1.0).all()


@pytest.mark.parametrize("length", range(1, 2 + 64))
def test_K3_weight_ties_go_to_even_at_every_length(length: int, isa: str) -> None:
    # Half the weights 0.5, half 1.5: their mean is 1, so 0.5 is a tie and rounds to 0.
    x = torch.full((2, length), 0.5)
    x[1] = 1.5
    codes, scale = ops.quantize_weights(x)
    assert scale.item() == 1.0
    assert codes.tolist() == [[0] * length, [1] * length]
    assert ops.quantize_weights(-x)[0].tolist() == [[0] * length, [-1] * length]


def test_K6_values_are_rounded_not_truncated(isa: str) -> None:
    q, _ = ops.quantize_activations(torch.tensor([127.0, 0.6, -0.6, 1.4, 126.6, -126.7]))
    assert q.tolist() == [127, 1, -1, 1, 127, -127]


# ---- K4: a vector path that writes lanes twice, or an ISA never finished ------------------------


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 63, 64, 65, 130])
def test_K4_every_lane_of_the_quantiser_is_written_on_every_isa(length: int) -> None:
    x = torch.arange(1, length + 1, dtype=torch.float32)
    x = torch.stack([x, -x])
    expected = reference.quantize_activations(x)
    for configuration in every_configuration():
        for ours, theirs in zip(ops.quantize_activations(x), expected, strict=True):
            assert_equal(ours, theirs, configuration)


# ---- K5: a fallback with a layout and a scale of its own ----------------------------------------


def test_K5_golden_bytes_on_every_isa() -> None:
    codes, packed = golden_codes().reshape(1, 256), bytes_of(I2S_A_HEX, 1, 64)
    for configuration in every_configuration():
        assert_equal(ops.pack(codes), packed, configuration)
        assert_equal(ops.unpack(packed, 256), codes, configuration)
        assert ops.gemv(packed, golden_activations()).tolist() == [DOT_PRODUCT], configuration


def test_K5_weight_scale_is_the_mean_not_the_maximum() -> None:
    weight = torch.tensor([[1.0, 1.0, 1.0, 5.0]])
    assert ops.quantize_weights(weight)[1].item() == 2.0
    assert packing.absmean_scale(weight).item() == 2.0


# ---- K9: nested parallel regions, serial halves, a lost batch dimension -------------------------


@pytest.mark.parametrize("leading", [(), (1,), (4,), (1, 1), (2, 3)], ids=str)
def test_K9_fused_ops_keep_every_leading_dimension(
    leading: tuple[int, ...], threads: int, rng: torch.Generator
) -> None:
    x = activations(rng, *leading, 160)
    assert ops.mlp_forward(*mlp_arguments(rng, x, "relu2")).shape == (*leading, 160)
    qkv = [part for n in (8, 4, 2) for part in (ops.pack(random_codes(rng, n, 160)),
                                                torch.ones(1))]  # fmt: skip
    shapes = [y.shape for y in ops.qkv_forward(x, torch.ones(160), *qkv, 1e-5)]
    assert shapes == [(*leading, 8), (*leading, 4), (*leading, 2)]


# ---- K10: an independent path from masters to packed bytes that is known to be right ------------


def test_K10_offline_packing_of_online_masters_round_trips(rng: torch.Generator) -> None:
    """Masters -> absmean codes -> contiguous quarters -> our rows: the same codes and scale."""
    master = torch.randn(64, 160, generator=rng) * 0.03
    ternary = hf.WeightQuant.apply(master)  # codes times scale, by transformers
    stored = hf.pack_weights(ternary.sign().to(torch.int8))  # changes its own copy
    stored_scale = ternary.abs().max().reshape(1)  # autobitlinear: the absmean itself
    codes = packing.unpack_hf(stored, 64)
    expected_codes, expected_scale = packing.ternarize(master)
    assert_equal(codes, expected_codes)
    scale = packing.multiplying_scale(stored_scale, "autobitlinear")
    assert abs(scale.item() / expected_scale.item() - 1) < 160 * 2.0**-24
    assert_equal(ops.unpack(ops.pack(codes), 160), expected_codes)
