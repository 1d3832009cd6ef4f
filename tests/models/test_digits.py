"""Matrices of digits: values, groups, products, errors."""

import pytest
import torch

from bitnet_ops.nn.digits import digit_group, from_digits, repeated, to_digits


@pytest.mark.parametrize("group_size", [64, 128])
def test_digits_are_the_nearest_of_27_levels(group_size: int) -> None:
    weight = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    packed = to_digits(weight, group_size)
    assert packed.shape == (5, 3 * 256) and packed.group_size == group_size
    groups = weight.double().unflatten(1, (-1, group_size))
    step = groups.abs().amax(-1, keepdim=True) / 13
    error = (from_digits(packed).double().unflatten(1, (-1, group_size)) - groups).abs()
    assert (error <= step * 0.50001).all()
    assert error.max() > step.min() * 0.4


def test_a_product_of_digits_is_that_of_the_matrix() -> None:
    weight = torch.randn(33, 128, generator=torch.Generator().manual_seed(2))
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(3))
    packed = to_digits(weight)
    expected = x.double() @ from_digits(packed).double().T
    for layout in "canonical", "2bit", "1.6bit":
        y = packed.repack(layout).linear(repeated(x)).double()
        assert (y - expected).abs().max() < 0.02 * expected.abs().max()


def test_groups_of_zeros_stay_zeros() -> None:
    weight = torch.zeros(2, 128)
    weight[1, 64:] = torch.linspace(-2, 2, 64)
    found = from_digits(to_digits(weight, 64))
    assert not found[0].any() and not found[1, :64].any() and found[1, 127] == pytest.approx(2)


def test_group_sizes_of_digits() -> None:
    assert digit_group(4096) == 128 and digit_group(192) == 64
    with pytest.raises(ValueError, match="expected columns a multiple of 64 or 128, got 100"):
        digit_group(100)
    with pytest.raises(ValueError, match="that divides 192, got 128"):
        to_digits(torch.zeros(1, 192), 128)
    with pytest.raises(ValueError, match="expected finite weights"):
        to_digits(torch.full((1, 64), torch.nan))
