"""How far an op may lie from the float64 reference: the parts of the bounds of the specs.

u = 2^-24 is the float32 unit roundoff. A sum in 16 lanes plus a tree of four levels passes at most
ceil(K / 16) + 4 roundings (`sum_error`); everything else is counted rounding by rounding. Results
of ops without a float reduction must be equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

U = 2.0**-24
# Below this magnitude float32 loses relative precision; far below every value the tests use.
TINY = 2.0**-126
# exp in float32 by range reduction and a polynomial: 2 ulp is the usual promise of such a function.
EXP_ERROR = 4 * U


def sum_error(k: int) -> float:
    """Relative to the sum of magnitudes: the error of a float32 sum of k products."""
    return (-(-k // 16) + 4) * U


def storing_error(dtype: torch.dtype) -> float:
    """Relative difference of two values that were one rounding apart before being stored."""
    return 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps


def rms_norm_error(k: int) -> float:
    # Half the sum's error survives the square root; then / K, + eps, sqrt, 1 / x, * x, * gain.
    return sum_error(k) / 2 + 6 * U


def smallest(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps + TINY


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor, message: str = "") -> None:
    """Every element within its own bound; dtype and shape equal."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, message
    excess = (actual.double() - expected.double()).abs() - bound
    worst = excess.max().item() if excess.numel() else 0.0
    assert worst <= 0, f"{message}: an element is {worst:.3e} beyond its bound"


def assert_equal(actual: Tensor, expected: Tensor, message: str = "") -> None:
    """Bit equality but for the payload of NaNs."""
    assert actual.dtype == expected.dtype, f"{message}: {actual.dtype}, not {expected.dtype}"
    assert actual.shape == expected.shape, f"{message}: {actual.shape}, not {expected.shape}"
    if actual.is_floating_point():
        if actual.dtype.itemsize == 1:  # torch compares none of them
            actual, expected = actual.float(), expected.float()
        same = (actual == expected) | (actual.isnan() & expected.isnan())
        same &= actual.signbit() == expected.signbit()
        same |= actual.isnan() & expected.isnan()
    else:
        same = actual == expected
    if not bool(same.all()):
        index = tuple((~same).nonzero()[0].tolist())
        raise AssertionError(
            f"{message}: {int((~same).sum())} of {same.numel()} elements differ, first at {index}: "
            f"{actual[index].item()!r}, not {expected[index].item()!r}"
        )
