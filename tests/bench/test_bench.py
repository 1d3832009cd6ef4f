"""The benchmark harness on synthetic timings: statistics, interleaving, rows and their flags.

A synthetic clock stands for the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bitnet_ops.bench import cases, harness, limits, measure, stats
from bitnet_ops.bench.harness import Budget, Timed

ROOT = Path(__file__).resolve().parents[2]


# --- statistics ----------------------------------------------------------------------------------


def test_percentiles_are_linear_between_samples() -> None:
    samples = [40.0, 10.0, 30.0, 20.0, 50.0]
    summary = stats.summarize(samples)
    assert summary.median == 30 and summary.count == 5
    assert (summary.p10, summary.p90) == pytest.approx((14, 46))
    assert stats.summarize([7.0]) == stats.Summary(7, 7, 7, 1)
    assert stats.summarize([1.0, 2.0]).median == 1.5


def test_summary_ignores_a_time_slice() -> None:
    summary = stats.summarize([1.0] * 99 + [4000.0])
    assert (summary.median, summary.p10, summary.p90, summary.count) == (1, 1, 1, 100)
    assert summary.to_dict(1e6) == dict.fromkeys(("median", "p10", "p90"), 1e6)


def test_paired_ratio_survives_a_change_of_state() -> None:
    # Halfway the machine becomes twice as slow for both: pairs agree, medians of all do not.
    limit, kernel = [8.0] * 5 + [16.0] * 5, [10.0] * 5 + [20.0] * 5
    assert stats.summarize(stats.paired_ratios(limit, kernel)) == stats.Summary(0.8, 0.8, 0.8, 10)


def test_statistics_reject_what_has_no_answer() -> None:
    with pytest.raises(IndexError):
        stats.summarize([])
    with pytest.raises(ValueError, match="shorter"):
        stats.paired_ratios([1.0, 2.0], [1.0])


# --- timing on a synthetic clock -----------------------------------------------------------------


class SyntheticMachine:
    """A clock that only calls advance, and a log of them."""

    def __init__(self) -> None:
        self.now, self.waiting, self.log = 0, 0, []

    def clock(self) -> int:
        return self.now

    def waited(self) -> int:
        return self.waiting

    def interleave(
        self, runs: list[Timed], budget: Budget, probe: harness.SpeedProbe | None = None
    ) -> harness.Rounds:
        return harness.interleave(runs, budget, self.clock, self.waited, probe)

    def probe(self, ns: Callable[[], int]) -> harness.SpeedProbe:
        def loop() -> None:
            self.now += ns()

        return harness.SpeedProbe(loop, self.clock)

    def run(
        self, name: str, ns: Callable[[int], int], *, warm: bool = False, cold: bool = False
    ) -> Timed:
        def call(i: int) -> None:
            self.now += ns(i)
            self.log.append((name, i))

        return Timed(call, warm, cold)


def test_interleave_alternates_and_measures_each_run() -> None:
    synthetic = SyntheticMachine()
    kernel = synthetic.run("kernel", lambda i: 100_000 + i)
    limit = synthetic.run("limit", lambda i: 50_000)
    budget = Budget(seconds=1.0, min_rounds=1, max_rounds=4)
    kernel_s, limit_s = synthetic.interleave([kernel, limit], budget).samples
    # two calls each to calibrate, then kernel, limit, kernel, limit, ...
    assert synthetic.log[4:] == [(n, i) for i in range(2, 6) for n in ("kernel", "limit")]
    assert kernel_s == pytest.approx([(100_000 + i) * 1e-9 for i in range(2, 6)])
    assert limit_s == pytest.approx([50e-6] * 4)


def test_short_calls_are_timed_in_groups() -> None:
    synthetic = SyntheticMachine()
    run = synthetic.run("short", lambda i: 1000)
    (seconds,) = synthetic.interleave([run], Budget(1.0, 1, 3)).samples
    assert seconds == pytest.approx([1e-6] * 3)
    assert len(synthetic.log) == 2 + 3 * 20  # samples of 20 us
    assert [i for _, i in synthetic.log] == list(range(62))  # each call has its own number


def test_cold_calls_are_timed_in_a_row_and_keep_pace() -> None:
    """As many of each cold run as the slowest makes in a millisecond, whatever else alternates."""
    synthetic = SyntheticMachine()

    def kernel_ns(i: int) -> int:  # the first call after another run costs more
        again = bool(synthetic.log) and synthetic.log[-1][0] == "kernel"
        return 100_000 if again else 150_000

    kernel = synthetic.run("kernel", kernel_ns, cold=True)
    limit = synthetic.run("limit", lambda i: 30_000, cold=True)
    loop = synthetic.run("loop", lambda i: 200_000)
    budget = Budget(1.0, 1, 3)
    kernel_s, limit_s, loop_s = synthetic.interleave([kernel, limit, loop], budget).samples
    assert kernel_s == pytest.approx([105e-6] * 3)  # of 10 calls one was the first
    assert (limit_s, loop_s) == (pytest.approx([30e-6] * 3), pytest.approx([200e-6] * 3))
    for name, calls in (("kernel", 2 + 30), ("limit", 2 + 30), ("loop", 2 + 3)):
        assert [i for n, i in synthetic.log if n == name] == list(range(calls))


def test_long_and_short_cold_calls() -> None:
    synthetic = SyntheticMachine()
    slow = synthetic.run("slow", lambda i: 3_000_000, cold=True)
    quick = synthetic.run("quick", lambda i: 5_000, cold=True)
    synthetic.interleave([slow, quick], Budget(0.0, 1, 1))
    # a sample of the quick run has to be measurable, and both keep pace
    assert [n for n, _ in synthetic.log[4:]] == ["slow"] * 4 + ["quick"] * 4


def test_warm_call_is_not_timed() -> None:
    synthetic = SyntheticMachine()
    # every first touch of a number costs ten times as much, as cold memory would
    seen: set[int] = set()

    def cost(i: int) -> int:
        touched, _ = i in seen, seen.add(i)
        return 30_000 if touched else 300_000

    cold, hot = synthetic.run("cold", cost), synthetic.run("hot", cost, warm=True)
    budget = Budget(1.0, max_rounds=5)
    assert synthetic.interleave([cold], budget).samples[0] == pytest.approx([300e-6] * 5)
    seen.clear()
    assert synthetic.interleave([hot], budget).samples[0] == pytest.approx([30e-6] * 5)


def test_budget_bounds_rounds() -> None:
    synthetic = SyntheticMachine()
    slow = synthetic.run("slow", lambda i: 1_000_000_000)
    assert len(synthetic.interleave([slow], Budget(0.5, 3)).quiet) == 3
    quick = synthetic.run("quick", lambda i: 1_000_000)
    assert len(synthetic.interleave([quick], Budget(0.5)).quiet) == 500
    assert len(synthetic.interleave([quick], Budget(0.5, 1, 7)).quiet) == 7


def neighbour(synthetic: SyntheticMachine, busy: Callable[[int], bool]) -> Timed:
    """A run of 1 ms; in calls that `busy` names, a neighbour's time slice of 4 ms comes first."""

    def cost(i: int) -> int:
        slice_ns = 4_000_000 if busy(i) else 0
        synthetic.waiting += slice_ns
        return 1_000_000 + slice_ns

    return synthetic.run("shared", cost)


def test_rounds_with_a_neighbour_are_left_out() -> None:
    synthetic = SyntheticMachine()
    rounds = synthetic.interleave([neighbour(synthetic, lambda i: i % 3 > 0)], Budget(0.3))
    assert rounds.usable()[0] == pytest.approx([1e-3] * len(rounds.usable()[0]))
    assert len(rounds.usable()[0]) == sum(rounds.quiet) > 20 and not rounds.disturbed
    assert stats.summarize(rounds.samples[0]).median == pytest.approx(5e-3)


def test_rounds_of_slow_cpus_are_left_out() -> None:
    # from the 40th millisecond on, a neighbour on the same core halves all speed for 60 ms
    synthetic = SyntheticMachine()

    def ns(work: int) -> int:
        return work * (2 if 40 <= synthetic.now // 1_000_000 % 200 < 100 else 1)

    run = synthetic.run("kernel", lambda i: ns(1_000_000))
    probe = synthetic.probe(lambda: ns(200_000))
    rounds = synthetic.interleave([run], Budget(0.4), probe)
    assert not rounds.disturbed and len(rounds.speeds) == len(rounds.quiet) + 1
    assert rounds.usable()[0] == pytest.approx([1e-3] * sum(rounds.quiet))
    assert 0.5 < sum(rounds.quiet) / len(rounds.quiet) < 0.9
    # what was taken for full speed is judged again when the probe gets to know better
    halved = synthetic.run("kernel", lambda i: 2_000_000)
    late = synthetic.probe(lambda: 400_000)
    rounds = synthetic.interleave([halved], Budget(0.1), late)
    assert all(rounds.quiet)
    synthetic.interleave([synthetic.run("x", lambda i: 1_000)], Budget(0.0), probe)
    rounds.probe = probe
    assert not any(rounds.quiet) and rounds.disturbed


def test_a_neighbour_in_every_round_is_reported_after_three_times_the_budget() -> None:
    synthetic = SyntheticMachine()
    rounds = synthetic.interleave([neighbour(synthetic, lambda i: True)], Budget(0.3))
    assert rounds.disturbed and not any(rounds.quiet)
    assert rounds.usable() == rounds.samples and len(rounds.quiet) == 180
    synthetic = SyntheticMachine()
    # quiet rounds come late: the time is extended until there are enough
    rounds = synthetic.interleave([neighbour(synthetic, lambda i: i < 100)], Budget(0.3))
    assert not rounds.disturbed and sum(rounds.quiet) == 5


# --- rows from synthetic timings -----------------------------------------------------------------


def synthetic_case(**changes: Any) -> cases.Case:
    nothing = Timed(lambda _: None)
    values: dict[str, Any] = {
        "name": "gemv",
        "shape": {"M": 1, "N": 1000, "K": 4000},
        "dtype": "int8",
        "bytes": 1_000_000,
        "macs": 4_000_000,
        "integer": True,
        "run": nothing,
        "read": limits.ReadLimit([torch.zeros(2_000_000, dtype=torch.uint8)] * 2, warm=False),
        "check": lambda: True,
        "baselines": {"torch_bf16": nothing},
    }
    return cases.Case(**values | changes)


class SyntheticPeak:
    """Stands for PeakLimit: a million multiply-adds a call."""

    def __init__(self) -> None:
        self.speed = harness.SpeedProbe(lambda: None)

    def run(self, macs: int = 0) -> tuple[Timed, int]:
        return Timed(lambda _: None), 1_000_000


CALL_S = 3e-6


def measure_synthetic(
    monkeypatch: pytest.MonkeyPatch, case: cases.Case, *samples: Sequence[float], quiet: bool = True
) -> measure.Row:
    """measure.measure with these samples of kernel, read pass, peak loop; kernel, baseline.

    Every op's samples are taken 3 us longer than given: the time of a call.
    """
    kernel, read, peak = ([s + CALL_S for s in taken] for taken in samples[:3])
    call = [CALL_S] * len(kernel)
    first = [kernel, call, read, peak] if case.integer else [kernel, call, read]
    baseline = list(samples[3:])

    def interleave(
        runs: Sequence[Timed], budget: Budget, probe: harness.SpeedProbe
    ) -> harness.Rounds:
        chosen = baseline if len(runs) == 2 else first
        assert len(chosen) == len(runs) and probe is peak_loop.speed
        return harness.Rounds([list(s) for s in chosen], [0.0 if quiet else 0.5] * len(chosen[0]))

    monkeypatch.setattr(measure, "interleave", interleave)
    peak_loop = SyntheticPeak()
    found = limits.MachineLimits(torch.get_num_threads(), 20.0, 100.0, peak_loop)  # type: ignore[arg-type]
    return measure.measure(case, found, Budget(1), Budget(1))


def test_row_of_a_memory_bound_case(monkeypatch: pytest.MonkeyPatch) -> None:
    # The read pass takes 100 us for 2 MB: 20 GB/s, so 50 us for the kernel's 1 MB; the kernel needs
    # 62.5 us. The peak loop does 100 GMAC/s, so 40 us would do for the multiplications.
    row = measure_synthetic(
        monkeypatch, synthetic_case(), [62.5e-6] * 3, [100e-6] * 3, [10e-6] * 3, [62.5e-6], [5e-4]
    )
    assert row["time_us"] == {"median": 65.5, "p10": 65.5, "p90": 65.5}
    assert row["call_us"] == 3
    assert (row["limit"], row["limit_value"], row["limit_unit"]) == ("read", 20, "GB/s")
    assert row["ratio"] == {"median": 0.8, "p10": 0.8, "p90": 0.8}
    assert (row["gb_s"], row["gmac_s"]) == (15.267, 61.069)
    assert row["limits"]["int8_peak"]["value"] == 100
    assert row["limits"]["int8_peak"]["allowed_us"]["median"] == 40
    assert row["limits"]["int8_peak"]["ratio"]["median"] == 0.64
    assert row["baselines"]["torch_bf16"]["time_us"]["median"] == 500
    assert row["baselines"]["torch_bf16"]["speedup"]["median"] == 8
    assert row["flags"] == []


def test_row_of_a_compute_bound_case(monkeypatch: pytest.MonkeyPatch) -> None:
    case = synthetic_case(macs=8_000_000)
    row = measure_synthetic(
        monkeypatch, case, [100e-6] * 3, [100e-6] * 3, [10e-6] * 3, [1e-4], [1e-4]
    )
    assert (row["limit"], row["limit_value"], row["limit_unit"]) == ("int8_peak", 100, "GMAC/s")
    assert row["ratio"]["median"] == 0.8


def test_row_of_float_work_has_the_read_limit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    case = synthetic_case(integer=False, macs=10**9)
    row = measure_synthetic(monkeypatch, case, [62.5e-6], [100e-6], [1.0], [1e-4], [1e-4])
    assert set(row["limits"]) == {"read"}
    assert row["ratio"]["median"] == 0.8


def test_rows_flag_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    # 1 MB in 40 us is 25 GB/s where reading gives 20
    impossible = [40e-6] * 3, [100e-6] * 3, [1e-6] * 3, [1.0], [1.0]
    row = measure_synthetic(monkeypatch, synthetic_case(), *impossible)
    assert row["flags"] == ["above_limit", "above_bandwidth"]
    row = measure_synthetic(
        monkeypatch, synthetic_case(run=Timed(lambda _: None, warm=True)), *impossible
    )
    assert row["flags"] == ["above_limit"]
    fine = [62.5e-6] * 3, [100e-6] * 3, [1e-6] * 3, [1.0], [1.0]
    row = measure_synthetic(monkeypatch, synthetic_case(check=lambda: False), *fine)
    assert row["flags"] == ["wrong_result"]
    row = measure_synthetic(monkeypatch, synthetic_case(), *fine, quiet=False)
    assert row["flags"] == ["disturbed"] and row["baselines"]["torch_bf16"]["disturbed"]


def test_cache_that_holds_a_matrix() -> None:
    caches = {"L3": 1 << 25, "L1": 1 << 15, "L2": 1 << 19}
    sizes = (1 << 15, (1 << 15) + 1, 1 << 20, 1 << 26)
    assert [measure.fits_in(s, caches) for s in sizes] == ["L1", "L2", "L3", "memory"]
    assert measure.fits_in(1, {}) == "memory"
