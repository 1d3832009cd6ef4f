"""What benchmarks measure: cold and hot memory, the limits, and the check of every case's result.

Nothing here asserts a speed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitnet_ops import _runtime, machine, ops
from bitnet_ops.bench import (
    cases,
    cases_ops,
    limits,
    memory,
    run_ops,
    shapes,
)
from bitnet_ops.nn.packing import packed_row_bytes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ws() -> memory.Workspace:
    return memory.Workspace(16 << 20, 1 << 20)


# --- memory --------------------------------------------------------------------------------------


def test_slots_are_disjoint_pages_of_valid_weights(ws: memory.Workspace) -> None:
    slots = ws.ternary.slots(5000)
    starts = [slot.data_ptr() for slot in slots]
    assert len(slots) == (16 << 20) // 8192 and all(slot.numel() == 5000 for slot in slots)
    assert all(start % 4096 == 0 for start in starts)
    assert all(b - a == 8192 for a, b in zip(starts, starts[1:], strict=False))
    for shift in (0, 2, 4, 6):
        assert int((ws.ternary.bytes >> shift & 3).max()) == 2
    assert torch.isfinite(ws.dense.bytes.view(torch.bfloat16)).all()


def test_share_of_huge_pages_is_a_share(ws: memory.Workspace) -> None:
    share = ws.ternary.huge_share()
    assert share is not None and 0 <= share <= 1
    if machine.transparent_huge_pages() == "always":
        assert share > 0


def test_second_decoder_agrees_with_the_op(ws: memory.Workspace) -> None:
    weight = ws.ternary.bytes[: 64 * 96].view(64, 96)
    assert torch.equal(cases_ops.unpack_fields(weight), ops.unpack(weight, 384))


def test_cold_calls_never_meet_their_memory_again_soon(ws: memory.Workspace) -> None:
    slots = [(slot,) for slot in ws.ternary.slots(1 << 20)]
    seen: list[int] = []
    run = cases.cycle(lambda slot: seen.append(slot.data_ptr()), slots, hot=False)
    probe = limits.read_limit(ws.ternary, 1 << 20, hot=False)
    for i in range(len(slots)):
        run.call(i)
    assert run.cold and not run.warm and len(set(seen)) == len(slots) == 16
    # the probe of the same round reads other memory, half of it away, and keeps pace
    assert probe.run().cold
    assert probe.probed_bytes == 1 << 20 and len(probe.slots) == 16


def test_hot_calls_keep_their_memory(ws: memory.Workspace) -> None:
    slots = [(slot,) for slot in ws.ternary.slots(1 << 20)]
    seen: list[int] = []
    run = cases.cycle(lambda slot: seen.append(slot.data_ptr()), slots, hot=True)
    for i in range(5):
        run.call(i)
    assert run.warm and not run.cold and len(set(seen)) == 1
    assert len(limits.read_limit(ws.ternary, 1 << 20, hot=True).slots) == 1


def test_matrix_too_large_for_cold_memory_is_rejected(ws: memory.Workspace) -> None:
    with pytest.raises(ValueError, match="two copies of 8192x8192, got 1; raise --cold-mib"):
        cases_ops.matmul_case(ws, 8192, 8192, 1, hot=False, weight_format="2bit")


# --- limits --------------------------------------------------------------------------------------


def test_peak_counts_the_work_of_every_thread() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = _runtime.probe_int8_peak(100)
        torch.set_num_threads(3)
        assert _runtime.probe_int8_peak(100) == 3 * one
        peak = limits.PeakLimit()
        assert torch.get_num_threads() == 3
        least = peak.run()[1]
        assert least > 0 and least % (3 * one // 100) == 0
        # as long as the work beside it, within bounds
        assert peak.run(1)[1] == least and peak.run(10**18)[1] == 100 * least
        assert 0 <= 7 * least + 1 - peak.run(7 * least + 1)[1] < 3 * one // 100
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(len(machine.affinity()) < 2, reason="a round trip needs two CPUs")
def test_ping_pong_is_a_latency() -> None:
    cpus = machine.affinity()
    # on a busy machine the two threads may miss each other for a while
    attempts = (_runtime.ping_pong_ns(cpus[0], cpus[-1], 10, 100, 0.5) for _ in range(20))
    batches = next(filter(None, attempts))
    assert len(batches) <= 10
    assert all(5 < ns < 1e8 for ns in batches)
    assert machine.affinity() == cpus  # the pinning does not reach the caller


def test_ping_pong_rejects_bad_cpus() -> None:
    cpu = machine.affinity()[0]
    with pytest.raises(ValueError, match="two different CPUs"):
        _runtime.ping_pong_ns(cpu, cpu)
    with pytest.raises(ValueError, match=f"affinity mask, got {cpu} and -1"):
        _runtime.ping_pong_ns(cpu, -1, 1, 1, 0.01)


# --- checks --------------------------------------------------------------------------------------


def model_case_list(ws: memory.Workspace) -> list[cases.Case]:
    formats = shapes.WEIGHT_FORMATS
    settings = run_ops.OpsSettings(shapes="demo,70x300", tokens=(1, 3), quick=True, formats=formats)
    return list(run_ops.all_cases(ws, settings))


def test_every_case_checks_its_result(ws: memory.Workspace, threads: int) -> None:
    with torch.inference_mode():
        found = model_case_list(ws)
        assert all(case.check() for case in found)
    names = {case.name for case in found}
    assert names == {
        *("gemv", "gemm", "linear", "qkv_forward", "mlp_forward", "quantize_activations"),
        *("rms_norm", "relu2_mul", "attention", "paged_attention", "lm_head"),
    }


def test_attention_reads_the_bytes_of_its_cache(ws: memory.Workspace) -> None:
    model = shapes.MODELS["demo"]
    sizes = [cases_ops.attention_case(ws, model, 512, c).bytes for c in shapes.KV_DTYPES]
    rows, dim = 2 * model.num_key_value_heads * 512, model.head_dim
    expected = {"bfloat16": 2 * dim, "float16": 2 * dim, "int8": dim + 4}
    expected |= {"float8_e4m3fn": dim, "float8_e5m2": dim}
    assert sizes == [rows * expected[c] for c in shapes.KV_DTYPES]
    for cache in ("bfloat16", "int8"):
        case = cases_ops.paged_attention_case(ws, model, 500, cache)
        assert case.bytes == rows * expected[cache]  # whole blocks


def spoiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with 1 added to its first result, on every ISA but scalar."""

    def wrong(*args: Any, **names: Any) -> Any:
        result = function(*args, **names)
        if _runtime.isa() == "scalar":
            return result
        return result + 1 if isinstance(result, Tensor) else (result[0] + 1, *result[1:])

    return wrong


@pytest.mark.skipif(_runtime.available_isas() == ["scalar"], reason="scalar is its own reference")
@pytest.mark.parametrize(
    "name",
    [
        *("gemv", "gemm", "linear", "qkv_forward", "mlp_forward", "quantize_activations"),
        *("rms_norm", "relu2_mul", "attention", "paged_attention", "lm_head"),
    ],
)
def test_every_check_sees_a_wrong_result(
    name: str, ws: memory.Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, name, spoiled(getattr(ops, name)))
    with torch.inference_mode():
        wrong = [case for case in model_case_list(ws) if case.name == name]
        assert wrong and not any(case.check() for case in wrong)


def test_scalar_reference_restores_isa_and_threads(isa: str, threads: int) -> None:
    with cases.scalar_on_one_thread():
        assert (_runtime.isa(), torch.get_num_threads()) == ("scalar", 1)
    assert (_runtime.isa(), torch.get_num_threads()) == (isa, threads)


def test_products_are_exact_at_the_extremes() -> None:
    # all weights +1, all activations 127, K of the largest model: the sum that float32 must hold
    weight = torch.full((5, packed_row_bytes(11008)), 0b10101010, dtype=torch.uint8)
    x = torch.full((2, 11008), 127, dtype=torch.int8)
    assert (cases_ops.exact_product(weight, x) == 127 * 11008).all()
    assert torch.equal(ops.gemm(weight, x), cases_ops.exact_product(weight, x))


@pytest.mark.parametrize(("m", "count"), [(1, 1), (64, 64), (65, 64), (2048, 64)])
def test_check_of_many_tokens_takes_both_ends(m: int, count: int) -> None:
    some = cases_ops.some_tokens(m).tolist()
    assert len(set(some)) == len(some) == count and {0, m - 1} <= set(some)


def test_head_check_covers_a_slice(ws: memory.Workspace) -> None:
    model = shapes.ModelShape(64, 128, 2, 1, 32, 5000)
    with torch.inference_mode():
        case = cases_ops.head_case(ws, model)
        assert case.check() and case.bytes == 2 * 5000 * 64


@pytest.mark.parametrize(("head", "size"), [("int8", 5000 * 68), ("int4", 313 * (1024 + 32))])
def test_quantised_head_is_as_large_as_the_op_makes_it(
    head: str, size: int, ws: memory.Workspace
) -> None:
    model = shapes.ModelShape(64, 128, 2, 1, 32, 5000)
    packed, scale = ops.quantize_head(torch.randn(5000, 64), head)
    with torch.inference_mode():
        case = cases_ops.head_case(ws, model, head)
        assert case.check() and case.format == head
    assert case.bytes == packed.nbytes + scale.nbytes == size
