"""bitnet_ops.nn.packing: absmean ternarisation and the two conventions of a checkpoint's scale.

The reference and numbers worked out by hand are the oracles; nothing here knows a checkpoint.
"""

from __future__ import annotations

import pytest
import torch

from bitnet_ops.nn import packing
from bounds import assert_equal
from op_catalogue import reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def test_scale_is_the_mean_magnitude() -> None:
    assert packing.absmean_scale(torch.tensor([[1.0, -2.0], [0.0, 5.0]])).tolist() == [2.0]


def test_scale_of_a_zero_matrix_is_the_lower_bound() -> None:
    codes, scale = packing.ternarize(torch.zeros(3, 4))
    assert scale.item() == torch.tensor(1e-5).item()
    assert not codes.any()


def test_mean_does_not_lose_small_weights_beside_many_large_ones() -> None:
    # A float32 running sum stalls at 2^24 ones; 2^25 halves and one large value would show it.
    weight = torch.full((1, 2**25), 0.5)
    assert packing.absmean_scale(weight).item() == 0.5


def test_ties_go_to_even_and_values_are_clamped() -> None:
    weight = torch.tensor([[0.5, -0.5, 1.5, -7.0, 0.51, 0.0, 0.49]])
    codes, _ = packing.ternarize(weight, torch.ones(1))
    assert codes.tolist() == [[0, 0, 1, -1, 1, 0, 0]]


@pytest.mark.parametrize("dtype", FLOATS)
def test_ternarize_equals_the_reference_op(dtype: torch.dtype, rng: torch.Generator) -> None:
    weight = torch.randn(31, 77, generator=rng).to(dtype)
    codes, scale = packing.ternarize(weight)
    expected_codes, expected_scale = reference.quantize_weights(weight)
    assert_equal(scale, expected_scale)
    assert_equal(codes, expected_codes)


def test_ternarising_ternary_weights_changes_nothing(rng: torch.Generator) -> None:
    codes = torch.randint(-1, 2, (40, 50), generator=rng, dtype=torch.int8)
    again, _ = packing.ternarize(codes.float() * 0.37)
    assert_equal(again, codes)


def test_dequantize_by_one_scale_and_by_row() -> None:
    codes = torch.tensor([[1, 0], [-1, 1]], dtype=torch.int8)
    assert packing.dequantize(codes, torch.tensor([0.5])).tolist() == [[0.5, 0.0], [-0.5, 0.5]]
    by_row = packing.dequantize(codes, torch.tensor([0.5, 2.0]))
    assert by_row.tolist() == [[0.5, 0.0], [-2.0, 2.0]]


def test_scale_conventions_of_the_two_linear_classes() -> None:
    stored = torch.tensor([4.0], dtype=torch.bfloat16)
    assert packing.multiplying_scale(stored, "autobitlinear").item() == 4.0
    assert packing.multiplying_scale(stored, "bitlinear").item() == 0.25


def test_a_reciprocal_is_inverted_in_float32_not_in_its_own_dtype() -> None:
    stored = torch.tensor([3.0], dtype=torch.bfloat16)
    scale = packing.multiplying_scale(stored, "bitlinear")
    assert scale.dtype == torch.float32
    assert scale.item() == (torch.tensor(1.0) / torch.tensor(3.0)).item()
    assert scale.item() != (1 / stored).float().item()


@pytest.mark.parametrize(
    ("stored", "linear_class", "says"),
    [
        (
            torch.ones(1),
            "BitLinear",
            "linear_class 'bitlinear' or 'autobitlinear', got 'BitLinear'",
        ),
        (torch.ones(2), "bitlinear", r"one element, got shape \(2,\)"),
        (torch.zeros(1), "bitlinear", "above zero, got 0"),
        (torch.zeros(1), "autobitlinear", "above zero, got 0"),
        (-torch.ones(1), "autobitlinear", "above zero, got -1"),
        (torch.tensor([torch.nan]), "autobitlinear", "above zero, got nan"),
        (torch.tensor([torch.inf]), "bitlinear", "above zero, got inf"),
    ],
)
def test_bad_scales_are_rejected(stored: torch.Tensor, linear_class: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        packing.multiplying_scale(stored, linear_class)


@pytest.mark.parametrize("weight", [torch.zeros(0, 3), torch.tensor([[1.0, torch.nan]])])
def test_weights_without_a_mean_are_rejected(weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="^absmean_scale: expected"):
        packing.absmean_scale(weight)
