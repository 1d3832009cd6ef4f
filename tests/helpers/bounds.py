"""How far an op may lie from the float64 reference: bounds derived from K and epsilon, per element.

u = 2^-24 is the float32 unit roundoff. A sum in 16 lanes plus a tree of four levels passes at most
ceil(K / 16) + 4 roundings (`sum_error`); everything else is counted rounding by rounding. Results
of ops without a float reduction must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from op_schema import bound

U = 2.0**-24
# Below this magnitude float32 loses relative precision; far below every value the tests use.
TINY = 2.0**-126
# exp in float32 by range reduction and a polynomial: 2 ulp is the usual promise of such a function.
EXP_ERROR = 4 * U

EXACT = frozenset(
    """pack unpack quantize_weights quantize_activations gemv gemm linear group_linear relu2_mul
    rope kv_cache_update quantize_head embedding""".split()
)


def sum_error(k: int) -> float:
    """Relative to the sum of magnitudes: the error of a float32 sum of k products."""
    return (-(-k // 16) + 4) * U


def storing_error(dtype: torch.dtype) -> float:
    """Relative difference of two values that were one rounding apart before being stored."""
    return 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps


def rms_norm_error(k: int) -> float:
    # Half the sum's error survives the square root; then / K, + eps, sqrt, 1 / x, * x, * gain.
    return sum_error(k) / 2 + 6 * U


def _rms_norm(args: tuple[Any, ...], expected: Tensor) -> Tensor:
    x, dtype = args[0], expected.dtype
    # A 16-bit result is rounded twice, before and after the gain.
    relative = rms_norm_error(x.shape[-1]) + 2 * storing_error(dtype)
    return expected.double().abs() * relative + _smallest(dtype)


def _add_rms_norm(args: tuple[Any, ...], expected: Tensor) -> Tensor:
    return _rms_norm(args, expected)


def _silu_and_mul(args: tuple[Any, ...], expected: Tensor) -> Tensor:
    gate, up = args[0].double().abs().chunk(2, dim=-1)
    # exp, + 1, /, * up; where exp(-gate) overflows float32 the exact result is below TINY * gate.
    relative = EXP_ERROR + 3 * U + storing_error(expected.dtype)
    return expected.double().abs() * relative + TINY * gate * up + _smallest(expected.dtype)


def _rope_table(args: tuple[Any, ...], expected: Tensor) -> Tensor:
    positions, head_dim, theta = args
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angle = positions.double()[..., None] / theta**exponent
    # The exponent is rounded to float32 first (where head_dim is no power of two), and theta^e has
    # the relative derivative ln theta; then the power, its reciprocal and the angle are rounded.
    # cos and sin have slope 1 at most and are rounded themselves.
    error = angle.abs() * (exponent * abs(math.log(theta)) + 4) * U + 2 * U
    return torch.cat([error, error], dim=-1)


def attention_bound(args: tuple[Any, ...], expected: Tensor) -> Tensor:
    if expected.numel() == 0:
        return torch.zeros(expected.shape, dtype=torch.float64)
    if len(args) > 5:
        return int8_attention_bound(args, expected)
    query, key_cache, value_cache, starts, scale = args
    tokens, heads, head_dim = query.shape[1:]
    group = heads // key_cache.shape[1]
    keys = key_cache.double().repeat_interleave(group, dim=1)
    values = value_cache.double().repeat_interleave(group, dim=1)
    magnitude = torch.einsum("bthd,bhld->bthl", query.double().abs(), keys.abs()) * abs(scale)
    visible = starts[:, None] + torch.arange(tokens) + 1
    length = int(visible.max())
    # Error of a score: the dot product, then * scale and - max; exp turns it into a relative error
    # of a weight, numerator and denominator both.
    score = magnitude[..., :length].amax(dim=-1) * (sum_error(head_dim) + 3 * U)
    relative = 2 * (score + EXP_ERROR) + 2 * sum_error(length) + 4 * U
    largest = values[:, :, :length].abs().amax(dim=2)
    bound = relative[..., None] * largest[:, None]
    stored = storing_error(expected.dtype) * expected.double().abs()
    return bound + stored + _smallest(expected.dtype)


def int8_attention_bound(args: tuple[Any, ...], expected: Tensor) -> Tensor:
    """Queries and weights rounded to 16 bits, everything else as with float caches.

    A weight times the scale of its value is off by half a step of the largest of its chunk, and a
    step is that / 32512; the factors' own roundings move a code by less than 0.004.
    """
    half_step = 0.504 / 32512
    query, keys, values, starts, scale, key_scale, value_scale = args
    plain = keys.double() * key_scale.double()[..., None]
    floats = (query, plain, values.double() * value_scale.double()[..., None], starts, scale)
    group, length = query.shape[2] // keys.shape[1], int((starts + query.shape[1]).max())
    steps = half_step * query.double().abs().amax(-1) * abs(scale)  # of a score, for every feature
    largest_key = plain[:, :, :length].abs().sum(-1).amax(-1).repeat_interleave(group, dim=1)
    score = (
        steps * largest_key[:, None]
        + 6
        * U
        * query.double().norm(dim=-1)
        * abs(scale)
        * (plain[:, :, :length].norm(dim=-1).amax(-1).repeat_interleave(group, dim=1)[:, None])
    )
    size = floats[2][:, :, :length].abs().amax(dim=2).repeat_interleave(group, dim=1)[:, None]
    # A weight is at most 1, and so is the sum of all.
    codes = values[:, :, :length].double().abs().sum(2).repeat_interleave(group, dim=1)
    largest_scale = value_scale[:, :, :length].double().amax(-1).repeat_interleave(group, dim=1)
    lost = half_step * (largest_scale[..., None] * codes)[:, None]
    return attention_bound(floats, expected) + 2.02 * score[..., None] * size + 1.01 * lost


def _lm_head(args: tuple[Any, ...], expected: Tensor) -> Tensor:
    x, weight, scale = (*args, None)[:3]
    if scale is not None:  # integer sums, and float steps in an order the contract fixes
        return torch.zeros(expected.shape, dtype=torch.float64)
    magnitude = x.double().abs() @ weight.double().abs().T
    return magnitude * (sum_error(x.shape[-1]) + U)


def _fused(args: tuple[Any, ...], expected: Tensor) -> Tensor:
    """A fused op whose int8 codes are those of the reference, which fixed samples make certain.

    Then the integer sums agree and only the scales differ, by the error of the norms before them.
    """
    norms = sum(2 * rms_norm_error(arg.shape[-1]) for arg in args if _is_gain(arg))
    # Squared ReLU triples a relative error of gate and up; each linear adds three roundings.
    relative = 4 * (norms + EXP_ERROR + 12 * U) + storing_error(expected.dtype)
    return expected.double().abs() * relative + _smallest(expected.dtype)


def _decode_step(args: tuple[Any, ...], expected: Tensor) -> Tensor:
    """As _fused; only scales of the int8 codes, which are the reference's, carry errors on.

    The largest element of x * gain, which sets the scale, is within a factor 3 of the largest of x
    (gains are 0.5 to 1.5), and squared ReLU triples an error: what a sublayer adds is off by at
    most 9 times its input's error, and the sum by 10 times, two sublayers a layer. Where the caches
    are compared, their values came through one layer less.
    """
    a = bound("decode_step", args, {})
    head, head_scale = a.head_weight, a.head_scale
    (layers, _, _, length, _), hidden = a.key_cache.shape, a.x.shape[-1]
    steps = 4 * rms_norm_error(hidden + a.inner) + 2 * sum_error(length) + 40 * U
    relative = steps * 10.0 ** (2 * layers)
    if expected.dim() == 5:  # a cache; a rotation mixes two elements
        size = expected.double().abs()
        largest = size.amax(dim=-1, keepdim=True) if expected.numel() else size
        return 2 * relative * largest + storing_error(expected.dtype) * size
    norm = float(a.gains.abs().max()) * hidden**0.5  # of a normalised row, at most
    if head_scale is None:
        return (relative * norm * head.double().norm(dim=-1)).expand(expected.shape)
    # A quantised head: no code is above 127 (8), nor a row's length above that of such codes; its
    # own 16-bit codes of the activations, finer than the error, may differ by one.
    code = 127.0 if head.dtype == torch.int8 else 8.0
    longest = float(head_scale.double().max()) * code * hidden**0.5
    return torch.full(expected.shape, (relative + 2.0**-15) * norm * longest * 2)


def _is_gain(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.is_floating_point() and arg.dim() == 1 and len(arg) > 1


def _smallest(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps + TINY


_BOUNDS: dict[str, Callable[[tuple[Any, ...], Tensor], Tensor]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "silu_and_mul": _silu_and_mul,
    "rope_table": _rope_table,
    "attention": attention_bound,
    "lm_head": _lm_head,
    "qkv_forward": _fused,
    "mlp_forward": _fused,
    "decode_step": _decode_step,
}


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


def assert_agrees(op: str, args: tuple[Any, ...], actual: Tensor, expected: Tensor) -> None:
    """Compare one result of `op` on `args` with the reference, exactly or within its bound."""
    if op in EXACT or not expected.is_floating_point():
        assert_equal(actual, expected, op)
    else:
        assert_within(actual, expected, _BOUNDS[op](args, expected), op)
