"""The same bits on every ISA, for every number of threads, alone or in a batch, beside NaN or not.

Compares runs of the ops with each other only; whether they are right is for other tests.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.nn.kv_pool import attend_rectangular as attend
from bounds import assert_equal
from isa_control import every_configuration, forced_isa, torch_threads
from op_catalogue import COMPARABLE_SAMPLES, LARGE, SPECS, Sample, results
from op_values import activations, positive, random_packed
from ops_attention import attention_arguments


def _run(sample: Sample) -> list[Tensor]:
    args = sample.args()
    return results(getattr(ops, sample.op)(*args), args, sample.op)


@pytest.mark.parametrize("sample", COMPARABLE_SAMPLES + LARGE, ids=lambda sample: sample.id)
def test_every_isa_and_thread_count_gives_the_same_bits(sample: Sample) -> None:
    with forced_isa("scalar"), torch_threads(1):
        expected = _run(sample)
    for configuration in every_configuration():
        for ours, theirs in zip(_run(sample), expected, strict=True):
            assert_equal(ours, theirs, f"{sample.id} {configuration}")


def test_large_samples_cover_every_op() -> None:
    assert {sample.op for sample in LARGE} == {sample.op for sample in COMPARABLE_SAMPLES}


def _row_op(name: str, dtype: torch.dtype) -> Callable[[Tensor], Any]:
    """An op as a function of x [M, 64] alone, every other argument fixed."""
    op, variant = ROW_OPS[name]
    arguments = SPECS[op].rows[variant](torch.Generator().manual_seed(7), dtype)
    return lambda x: getattr(ops, op)(*arguments(x))


ROW_OPS = {
    f"{op} {variant}".strip().replace(" ", "_"): (op, variant)
    for op, spec in SPECS.items()
    for variant in spec.rows
}
ROW_OPS_AND_DTYPES = [
    (name, dtype) for name, (op, _) in ROW_OPS.items() for dtype in SPECS[op].row_dtypes
]


def _tensors(returned: Any) -> list[Tensor]:
    return [returned] if isinstance(returned, Tensor) else list(returned)


@pytest.mark.parametrize(("name", "dtype"), ROW_OPS_AND_DTYPES)
def test_a_row_alone_equals_the_row_in_a_batch(
    name: str, dtype: torch.dtype, rng: torch.Generator
) -> None:
    op = _row_op(name, dtype)
    x = activations(rng, 19, 64, dtype=dtype)
    x[3] *= 1000  # an outlier token must not touch its neighbours' scales
    whole = _tensors(op(x))
    for row in range(len(x)):
        for alone, batch in zip(_tensors(op(x[row : row + 1])), whole, strict=True):
            assert_equal(alone[0], batch[row], f"{name} row {row}")


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ROW_OPS)
def test_a_poisoned_row_stays_in_its_row(name: str, poison: float, rng: torch.Generator) -> None:
    op = _row_op(name, torch.float32)
    clean = activations(rng, 9, 64)
    x = clean.clone()
    x[4, 40] = poison
    for configuration in every_configuration():
        for healthy, poisoned in zip(_tensors(op(clean)), _tensors(op(x)), strict=True):
            others = [0, 1, 2, 3, 5, 6, 7, 8]
            assert_equal(poisoned[others], healthy[others], f"{name} {configuration}")


@pytest.mark.parametrize("name", [n for n, (op, _) in ROW_OPS.items() if SPECS[op].poison_spreads])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_poisoned_row_is_nan_throughout_never_a_number(
    name: str, poison: float, isa: str
) -> None:
    x = activations(torch.Generator().manual_seed(1), 3, 64)
    x[1, 63] = poison
    for result in _tensors(_row_op(name, torch.float32)(x)):
        assert result.isnan().any(-1).tolist() == [False, True, False]
        assert bool(result[1].isnan().all())


def test_attention_prefill_equals_decode_token_by_token(rng: torch.Generator) -> None:
    args = attention_arguments(rng, batch=3, tokens=17, heads=6, kv_heads=3, length=40, head_dim=24)
    query, keys, values, starts, scale = args
    whole = attend(*args)
    for t in range(17):
        one = attend(query[:, t : t + 1], keys, values, starts + t, scale)
        assert_equal(one[:, 0], whole[:, t], f"token {t}")
    for b in range(3):
        alone = attend(
            query[b : b + 1], keys[b : b + 1], values[b : b + 1], starts[b : b + 1], scale
        )
        assert_equal(alone[0], whole[b], f"sequence {b}")


def test_attention_does_not_read_past_its_position(rng: torch.Generator) -> None:
    query, keys, values, _, scale = attention_arguments(rng, batch=1, tokens=4, length=20)
    starts = torch.tensor([6])
    for configuration in every_configuration():
        clean = attend(query, keys, values, starts, scale)
        for poison in (torch.nan, torch.inf):
            dirty_keys, dirty_values = keys.clone(), values.clone()
            dirty_keys[:, :, 10:] = poison
            dirty_values[:, :, 10:] = poison
            assert_equal(
                attend(query, dirty_keys, dirty_values, starts, scale),
                clean,
                configuration,
            )
        dirty_values = values.clone()
        dirty_values[:, :, 8] = torch.nan  # seen by tokens 2 and 3 only
        dirty = attend(query, keys, dirty_values, starts, scale)
        assert_equal(dirty[:, :2], clean[:, :2], configuration)
        assert bool(dirty[:, 2:].isnan().all())


def test_memory_layout_of_an_argument_does_not_matter(rng: torch.Generator) -> None:
    weight, scale = random_packed(rng, 33, 160), positive(rng, 1)
    x = activations(rng, 12, 160)
    expected = ops.linear(x, weight, scale)
    wide = torch.full((12, 480), torch.nan)
    for start, step in ((0, 1), (1, 1), (3, 2), (0, 3)):
        wide[:, start : start + 160 * step : step] = x
        view = wide[:, start : start + 160 * step : step]
        assert_equal(ops.linear(view, weight, scale), expected, f"start {start} step {step}")
    assert_equal(ops.linear(x.T.contiguous().T, weight, scale), expected)
    assert_equal(ops.linear(x[:1].expand(4, -1), weight, scale), expected[:1].expand(4, -1))
    backwards = torch.flip(x, [0])
    assert_equal(ops.linear(backwards, weight, scale), expected.flip(0))


def test_python_threads_calling_at_once_get_the_same_bits(rng: torch.Generator) -> None:
    weight, scale = random_packed(rng, 300, 640), positive(rng, 1)
    x = activations(rng, 9, 640)
    expected = ops.linear(x, weight, scale)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: ops.linear(x, weight, scale), range(40)):
            assert_equal(result, expected)
