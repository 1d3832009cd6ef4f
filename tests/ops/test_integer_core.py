"""The exact integer core: packing, gemv and gemm against int64 numpy, over sizes and extremes.

Every length at which a block, a vector or an accumulator could go wrong, worst-case inputs, every
ISA and thread count. Integers are compared exactly. Nothing of the reference module is used.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bitnet_ops import ops
from bounds import assert_equal
from isa_control import every_configuration, forced_isa, torch_threads
from op_values import int8_values, pack_codes, random_codes

# Around the sizes of a field, a block and two blocks; then the widths of real models; then the
# largest promised, and 8192 and beyond, where an earlier kernel changed layout and overflowed.
SMALL_K = (1, 3, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 255, 256, 257)
MODEL_K = (192, 576, 640, 2560, 3200, 6912, 8064, 8192, 8640, 11008, 14336, 23040, 27648, 32768)
TOKENS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33)


def exact(codes: Tensor, x: Tensor) -> Tensor:
    """int64 product in numpy, checked to fit int32."""
    sums = x.numpy().astype(np.int64) @ codes.numpy().astype(np.int64).T
    assert np.abs(sums).max(initial=0) < 2**31
    return torch.from_numpy(sums.astype(np.int32))


def extreme_rows(k: int) -> Tensor:
    """Activations that accumulate as far as they can: constant, alternating, in runs of a field."""
    index = torch.arange(k)
    rows = [
        torch.full((k,), 127),
        torch.full((k,), -127),
        torch.full((k,), -128),
        torch.where(index % 2 == 0, 127, -128),
        torch.where(index // 32 % 2 == 0, 127, -128),
        torch.where(index // 128 % 2 == 0, -128, 127),
    ]
    return torch.stack(rows).to(torch.int8)


def extreme_codes(k: int) -> Tensor:
    """Weights to match: all ones, all minus ones, zeros, alternating as the activations do."""
    index = torch.arange(k)
    ones = torch.ones(k, dtype=torch.int64)
    rows = [
        ones,
        -ones,
        0 * ones,
        torch.where(index % 2 == 0, 1, -1),
        torch.where(index // 32 % 2 == 0, 1, -1),
        torch.where(index // 128 % 2 == 0, -1, 1),
    ]
    return torch.stack(rows).to(torch.int8)


@pytest.mark.parametrize("k", SMALL_K + MODEL_K)
def test_worst_case_inputs_are_exact_on_every_isa(k: int) -> None:
    codes, x = extreme_codes(k), extreme_rows(k)
    weight, expected = ops.pack(codes), exact(codes, x)
    assert expected.abs().max() == 128 * k
    for configuration in every_configuration():
        assert_equal(ops.gemm(weight, x), expected, configuration)
        for row in range(len(x)):
            assert_equal(ops.gemv(weight, x[row]), expected[row], configuration)


@pytest.mark.parametrize("k", SMALL_K + MODEL_K)
def test_random_inputs_are_exact_on_every_isa(k: int, rng: torch.Generator) -> None:
    codes, x = random_codes(rng, 11, k), int8_values(rng, 5, k)
    weight, expected = ops.pack(codes), exact(codes, x)
    for configuration in every_configuration():
        assert_equal(ops.gemm(weight, x), expected, configuration)
        assert_equal(ops.gemv(weight, x[0]), expected[0], configuration)


@pytest.mark.parametrize("tokens", TOKENS)
def test_every_number_of_tokens(tokens: int, rng: torch.Generator) -> None:
    codes, x = random_codes(rng, 21, 200), int8_values(rng, tokens, 200)
    weight, expected = ops.pack(codes), exact(codes, x)
    for configuration in every_configuration():
        assert_equal(ops.gemm(weight, x), expected, configuration)


def test_every_number_of_rows(rng: torch.Generator) -> None:
    codes, x = random_codes(rng, 80, 160), int8_values(rng, 3, 160)
    weight, expected = ops.pack(codes), exact(codes, x)
    for configuration in every_configuration():
        for n in [*range(1, 36), 48, 63, 64, 65, 79, 80]:
            label = f"N={n} {configuration}"
            assert_equal(ops.gemm(weight[:n], x), expected[:, :n], label)
            assert_equal(ops.gemv(weight[:n], x[1]), expected[1, :n], label)


def test_no_rows_and_no_tokens() -> None:
    weight = torch.zeros(0, 32, dtype=torch.uint8)
    assert ops.gemm(weight, torch.ones(3, 128, dtype=torch.int8)).shape == (3, 0)
    assert ops.gemv(weight, torch.ones(128, dtype=torch.int8)).shape == (0,)
    packed = ops.pack(torch.ones(5, 128, dtype=torch.int8))
    assert ops.gemm(packed, torch.ones(0, 128, dtype=torch.int8)).shape == (0, 5)


def test_tall_and_wide_matrices_split_over_threads(rng: torch.Generator) -> None:
    for n, k, m in ((3001, 130, 2), (6, 8640, 9), (515, 640, 33)):
        codes, x = random_codes(rng, n, k), int8_values(rng, m, k)
        weight, expected = ops.pack(codes), exact(codes, x)
        for configuration in every_configuration():
            assert_equal(ops.gemm(weight, x), expected, f"{n}x{k}x{m} {configuration}")


@pytest.mark.parametrize("k", SMALL_K)
def test_pack_writes_the_documented_bits(k: int, rng: torch.Generator, isa: str) -> None:
    codes = random_codes(rng, 9, k)
    packed = ops.pack(codes)
    assert_equal(packed, pack_codes(codes), f"K={k}")
    assert_equal(ops.unpack(packed, k), codes, f"K={k}")


def test_pack_and_unpack_do_not_depend_on_threads(rng: torch.Generator) -> None:
    codes = random_codes(rng, 777, 333)
    with forced_isa("scalar"), torch_threads(1):
        packed = ops.pack(codes)
    for configuration in every_configuration():
        assert_equal(ops.pack(codes), packed, configuration)
        assert_equal(ops.unpack(packed, 333), codes, configuration)


def test_scaled_product_is_the_documented_float_expression(isa: str, rng: torch.Generator) -> None:
    codes, x = random_codes(rng, 30, 8640), int8_values(rng, 4, 8640)
    x[0] = 127
    codes[0] = 1  # the largest sum there is at this K, 1097280
    sums = exact(codes, x)
    w_scale, x_scale = torch.rand(30, generator=rng) + 0.1, torch.rand(4, generator=rng) * 0.01
    weight = ops.pack(codes)
    for scale in (w_scale, w_scale[:1]):
        expected = sums.float() * (scale[None] * x_scale[:, None])
        assert_equal(ops.gemm(weight, x, x_scale, scale), expected)


def test_sums_beyond_24_bits_are_exact_and_then_rounded_half_to_even(isa: str) -> None:
    # Longer than any model's rows: 127 * 262145 = 33292415 needs 25 bits.
    k = 262145
    x = torch.full((1, k), 127, dtype=torch.int8)
    weight = ops.pack(torch.ones(1, k, dtype=torch.int8))
    assert ops.gemm(weight, x).item() == 127 * k
    rounded = ops.gemm(weight, x, torch.ones(1), torch.ones(1)).item()
    assert rounded == float(np.float32(127 * k)) != 127 * k
