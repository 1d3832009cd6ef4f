"""Property tests: shapes, strides, extremes and every bit pattern, drawn by hypothesis.

Derandomised without a deadline (conftest.py), so that a run repeats. Properties hold for every
input; each test restates one sentence of an op's docstring.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.nn.kv_pool import attend_rectangular, update_rectangular
from bounds import assert_equal, assert_within
from isa_control import ISAS, forced_isa, torch_threads
from op_catalogue import reference
from op_values import frequencies, int8_values, pack_codes, positive, random_codes
from ops_attention import attention, attention_arguments, attention_bound, kv_cache_update
from ops_rowwise import cosines_and_sines

FLOATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 2**32 - 1)
ISA_NAMES = st.sampled_from(ISAS)
THREADS = st.integers(1, 4)
# Every float32 that is finite, with the extremes often: subnormals, the largest, signed zeros.
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_view(data: st.DataObject, x: Tensor) -> Tensor:
    """The values of x in other memory: padded, stepped, permuted or repeated."""
    wide = torch.full([s * 2 + 3 for s in x.shape], 99, dtype=x.dtype)
    index: tuple[Any, ...] = ()
    for size in x.shape:
        step, start = data.draw(st.sampled_from([1, 2])), data.draw(st.integers(0, 2))
        index += (slice(start, start + step * size, step),)
    order = data.draw(st.permutations(range(x.dim())))
    inverse = [order.index(i) for i in range(x.dim())]
    stored = wide.permute(order).contiguous().permute(inverse)
    stored[index] = x
    view = stored[index]
    assert torch.equal(view, x)
    return view


@given(st.integers(0, 9), st.integers(1, 400), st.integers(0, 40), SEEDS, ISA_NAMES, THREADS)
@example(1, 128, 1, 0, "scalar", 1)
@settings(max_examples=60)
def test_gemm_is_the_integer_product(
    m: int, k: int, n: int, seed: int, isa: str, threads: int
) -> None:
    g = generator(seed)
    codes, x = random_codes(g, n, k), int8_values(g, m, k)
    expected = x.numpy().astype(np.int64) @ codes.numpy().astype(np.int64).T
    with forced_isa(isa), torch_threads(threads):
        y = ops.gemm(pack_codes(codes), x)
    assert y.dtype == torch.int32 and np.array_equal(y.numpy(), expected)


@given(st.integers(0, 7), st.integers(1, 700), SEEDS)
@settings(max_examples=40)
def test_pack_and_unpack_are_inverse(n: int, k: int, seed: int) -> None:
    codes = random_codes(generator(seed), n, k)
    packed = ops.pack(codes)
    assert packed.shape == (n, 32 * -(-k // 128))
    assert_equal(ops.unpack(packed, k), codes)


@given(st.integers(1, 130), st.integers(0, 255), st.integers(0, 127))
@settings(max_examples=60)
def test_unpack_accepts_exactly_what_pack_writes(k: int, byte: int, position: int) -> None:
    """Any one byte replaced: it decodes to codes that pack to it again, or it is rejected."""
    packed = ops.pack(torch.ones(1, k, dtype=torch.int8))
    packed[0, position % packed.shape[1]] = byte
    try:
        codes = ops.unpack(packed, k)
    except RuntimeError as error:
        assert "codes 0, 1, 2 only and padding codes 1" in str(error)
        with pytest.raises(ValueError):
            reference.unpack(packed, k)
    else:
        assert_equal(ops.pack(codes), packed)


@given(st.lists(FINITE, min_size=1, max_size=70), ISA_NAMES)
@example([0.0], "scalar")
@example([-0.0, 1e-45], "scalar")
@example([3.4028234663852886e38, -3.4028234663852886e38, 1.0], "scalar")
@example([1e-5, 9.999999e-6, 1.0000001e-5], "scalar")
@settings(max_examples=150)
def test_quantisation_of_any_finite_row(values: list[float], isa: str) -> None:
    x = torch.tensor([values], dtype=torch.float32)
    with forced_isa(isa):
        q, scale = ops.quantize_activations(x)
    for ours, theirs in zip((q, scale), reference.quantize_activations(x), strict=True):
        assert_equal(ours, theirs)
    # What the numbers mean: half a step of error, in float64, whatever the row holds.
    error = (q.double() * scale.double()[:, None] - x.double()).abs().max()
    assert error <= scale.double().item() * (0.5 + 127 * 2.0**-22)
    assert bool((q >= -127).all())  # -128 is the lower clamp, out of reach in float32


@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.data())
@settings(max_examples=60)
def test_a_row_is_poisoned_exactly_if_it_holds_a_nan_or_an_infinity(
    values: list[float], data: st.DataObject
) -> None:
    x = torch.tensor([values, [1.0] * len(values)], dtype=torch.float32)
    with forced_isa(data.draw(ISA_NAMES)):
        q, scale = ops.quantize_activations(x)
    finite = bool(x[0].isfinite().all())
    assert bool(scale[0].isfinite()) == finite and (finite or not bool(q[0].any()))
    assert q[1].tolist() == [127] * len(values)


@given(st.data(), FLOATS, SEEDS)
@settings(max_examples=60)
def test_linear_reads_any_view_and_any_leading_dimensions(
    data: st.DataObject, dtype: torch.dtype, seed: int
) -> None:
    leading = data.draw(st.lists(st.integers(0, 3), max_size=3))
    k, n = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 20))
    g = generator(seed)
    x = torch.randn([*leading, k], generator=g).to(dtype)
    codes, scale = random_codes(g, n, k), positive(g, data.draw(st.sampled_from([1, n])))
    bias = torch.randn(n, generator=g).to(dtype) if data.draw(st.booleans()) else None
    expected = reference.linear(x, reference.pack(codes), scale, bias)
    y = ops.linear(random_view(data, x), pack_codes(codes), scale, bias)
    assert_equal(y, expected)


@given(st.data(), SEEDS)
@settings(max_examples=40)
def test_elementwise_ops_read_any_view(data: st.DataObject, seed: int) -> None:
    g = generator(seed)
    shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    gate, up = torch.randn(shape, generator=g) * 50, torch.randn(shape, generator=g)
    expected = reference.relu2_mul(gate, up)
    assert_equal(ops.relu2_mul(random_view(data, gate), random_view(data, up)), expected)
    both = torch.randn([*shape, 6], generator=g)
    assert_equal(ops.silu_and_mul(random_view(data, both)), ops.silu_and_mul(both))
    rope = torch.randint(0, 999, shape[:-1], generator=g), frequencies(6)
    assert_equal(ops.rope(random_view(data, both), *rope), reference.rope(both, *rope))


@given(st.data(), SEEDS, ISA_NAMES)
@settings(max_examples=40)
def test_attention_of_any_shape(data: st.DataObject, seed: int, isa: str) -> None:
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    length = data.draw(st.integers(1, 40))
    args = attention_arguments(
        generator(seed),
        batch=data.draw(st.integers(1, 3)),
        tokens=data.draw(st.integers(1, min(length, 5))),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        length=length,
        head_dim=data.draw(st.integers(1, 80)),
    )
    with forced_isa(isa):
        out = attend_rectangular(*args)
    expected = attention(*args)
    assert_within(out, expected, attention_bound(args, expected))
    assert_equal(attend_rectangular(random_view(data, args[0]), *args[1:]), out)


@given(st.data(), SEEDS)
@settings(max_examples=40)
def test_a_cache_holds_exactly_what_was_written(data: st.DataObject, seed: int) -> None:
    batch, kv, dim = (data.draw(st.integers(1, 3)) for _ in range(3))
    length = data.draw(st.integers(1, 12))
    tokens = data.draw(st.integers(0, length))
    g = generator(seed)
    caches = [torch.randn(batch, kv, length, dim, generator=g) for _ in "kv"]
    expected = [cache.clone() for cache in caches]
    new = [torch.randn(batch, tokens, kv, dim, generator=g) for _ in "kv"]
    starts = torch.randint(0, length - tokens + 1, (batch,), generator=g)
    update_rectangular(*caches, *(random_view(data, part) for part in new), starts)
    kv_cache_update(*expected, *new, starts)
    for cache, truth in zip(caches, expected, strict=True):
        assert_equal(cache, truth)


def _float32_patterns() -> Tensor:
    """float32 values whose rounding to 16 bits is delicate: every upper half, ties around it."""
    upper = torch.arange(65536, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF, 0x1001])
    bits = (upper[:, None] | lower[None]).flatten()
    return bits.to(torch.uint32).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_storing_in_a_cache_rounds_every_pattern_from_2_to_the_minus_55_on_as_torch_does(
    dtype: torch.dtype, isa: str
) -> None:
    values = _float32_patterns().reshape(1, 1, 1, -1)
    caches = [torch.zeros(values.shape, dtype=dtype) for _ in "kv"]
    update_rectangular(*caches, values, values, torch.tensor([0]))
    values = torch.where(values.abs() < 2.0**-55, torch.zeros_like(values), values)  # by definition
    assert_equal(caches[0], values.to(dtype), str(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_rounded_to_16_bits_as_torch_does(dtype: torch.dtype, isa: str) -> None:
    """rope with cos 1, sin 0 and a float32 bias through linear: conversions and nothing else."""
    bias = _float32_patterns()
    bias = bias[bias.isfinite()]
    weight = torch.full((len(bias), 32), 0x55, dtype=torch.uint8)  # weights 0: y = bias
    y = ops.linear(torch.ones(1, 1, dtype=dtype), weight, torch.ones(1), bias)
    assert_equal(y[0], (bias + 0.0).to(dtype), str(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_is_loaded_exactly(dtype: torch.dtype, isa: str) -> None:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    x = torch.stack([patterns, torch.zeros_like(patterns)], -1)  # heads of two: (x, 0)
    rope = torch.zeros(65536, dtype=torch.int64), torch.ones(1)  # cos 1, sin 0
    expected = reference.rope(x[:, None], *rope)
    assert_equal(ops.rope(x[:, None], *rope), expected, str(dtype))


@given(st.integers(0, 2**31), st.sampled_from([2, 6, 64, 128]), st.floats(1.5, 1e7))
@settings(max_examples=60)
def test_angles_of_rope_are_points_of_the_unit_circle(
    position: int, head_dim: int, theta: float
) -> None:
    positions = torch.tensor([position, 0])
    table = cosines_and_sines(ops, positions, frequencies(head_dim, theta))
    cos, sin = table.double().chunk(2, -1)
    assert bool(((cos**2 + sin**2 - 1).abs() < 4 * 2.0**-23).all())
    assert table[1].tolist() == [1.0] * (head_dim // 2) + [0.0] * (head_dim // 2)
