"""Timing on synthetic clocks: what may be passed off as a figure and what may not.

A synthetic clock stands for the machine; only pinning touches it. Nothing here asserts a speed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bitnet_ops import _runtime, machine
from bitnet_ops.bench import cases, harness, limits, ops, pinning, session
from bitnet_ops.bench.harness import Budget, Timed
from bitnet_ops.bench.memory import Workspace

# --- figures of samples --------------------------------------------------------------------------


def test_figures_are_medians_and_ratios_are_paired() -> None:
    summary = harness.summarize([40.0, 10.0, 30.0, 20.0, 50.0])
    assert (summary.median, summary.count) == (30, 5)
    assert (summary.p10, summary.p90) == pytest.approx((14, 46))
    # a time slice of another process is no figure
    assert harness.summarize([1.0] * 99 + [4000.0]) == harness.Summary(1, 1, 1, 100)
    # halfway the machine becomes twice as slow for both: pairs agree, medians of all do not
    limit, kernel = [8.0] * 5 + [16.0] * 5, [10.0] * 5 + [20.0] * 5
    assert set(harness.paired_ratios(limit, kernel)) == {0.8}


# --- timing --------------------------------------------------------------------------------------


class SyntheticMachine:
    """A clock that only calls advance, and a log of them."""

    def __init__(self) -> None:
        self.now, self.waiting, self.log = 0, 0, []

    def interleave(
        self, runs: list[Timed], budget: Budget, probe: harness.SpeedProbe | None = None
    ) -> harness.Rounds:
        return harness.interleave(runs, budget, lambda: self.now, lambda: self.waiting, probe)

    def run(self, name: str, ns: Callable[[int], int], **kind: bool) -> Timed:
        def call(i: int) -> None:
            self.now += ns(i)
            self.log.append((name, i))

        return Timed(call, **kind)

    def shared(self, busy: Callable[[int], bool]) -> Timed:
        """A run of 1 ms; before calls that `busy` names comes a neighbour's time slice of 4 ms."""

        def cost(i: int) -> int:
            slice_ns = 4_000_000 if busy(i) else 0
            self.waiting += slice_ns
            return 1_000_000 + slice_ns

        return self.run("shared", cost)


def test_runs_alternate_and_short_calls_are_timed_in_groups() -> None:
    synthetic = SyntheticMachine()
    kernel = synthetic.run("kernel", lambda i: 100_000 + i)
    limit = synthetic.run("limit", lambda i: 50_000)
    kernel_s, limit_s = synthetic.interleave([kernel, limit], Budget(1.0, 1, 4)).samples
    # two calls each to calibrate, then kernel, limit, kernel, limit, ...
    assert synthetic.log[4:] == [(n, i) for i in range(2, 6) for n in ("kernel", "limit")]
    assert kernel_s == pytest.approx([(100_000 + i) * 1e-9 for i in range(2, 6)])
    assert limit_s == pytest.approx([50e-6] * 4)
    synthetic = SyntheticMachine()
    (seconds,) = synthetic.interleave(
        [synthetic.run("short", lambda i: 1000)], Budget(1, 1, 3)
    ).samples
    assert seconds == pytest.approx([1e-6] * 3)
    assert [i for _, i in synthetic.log] == list(range(2 + 3 * 20))  # samples of 20 us


def test_cold_calls_are_timed_in_a_row_and_keep_pace() -> None:
    """As many of each cold run as the slowest makes in a millisecond, whatever else alternates."""
    synthetic = SyntheticMachine()

    def kernel_ns(i: int) -> int:  # the first call after another run costs more
        again = bool(synthetic.log) and synthetic.log[-1][0] == "kernel"
        return 100_000 if again else 150_000

    kernel = synthetic.run("kernel", kernel_ns, cold=True)
    limit = synthetic.run("limit", lambda i: 30_000, cold=True)
    loop = synthetic.run("loop", lambda i: 200_000)
    samples = synthetic.interleave([kernel, limit, loop], Budget(1.0, 1, 3)).samples
    for found, expected in zip(samples, (105e-6, 30e-6, 200e-6), strict=True):
        assert found == pytest.approx([expected] * 3)  # of 10 calls one was the first
    for name, calls in (("kernel", 2 + 30), ("limit", 2 + 30), ("loop", 2 + 3)):
        assert [i for n, i in synthetic.log if n == name] == list(range(calls))


def test_the_call_that_warms_is_not_timed() -> None:
    synthetic = SyntheticMachine()
    seen: set[int] = set()

    def cost(i: int) -> int:  # a first touch costs ten times as much, as cold memory would
        touched, _ = i in seen, seen.add(i)
        return 30_000 if touched else 300_000

    hot = synthetic.run("hot", cost, warm=True)
    budget = Budget(1.0, max_rounds=5)
    assert synthetic.interleave([hot], budget).samples[0] == pytest.approx([30e-6] * 5)


def test_rounds_with_a_neighbour_are_left_out() -> None:
    synthetic = SyntheticMachine()
    rounds = synthetic.interleave([synthetic.shared(lambda i: i % 3 > 0)], Budget(0.3))
    assert rounds.usable()[0] == pytest.approx([1e-3] * sum(rounds.quiet))
    assert sum(rounds.quiet) > 20 and not rounds.disturbed
    # in every round: all count, after three times the budget, and the figure says so
    rounds = synthetic.interleave([synthetic.shared(lambda i: True)], Budget(0.3))
    assert rounds.disturbed and rounds.usable() == rounds.samples and len(rounds.quiet) == 180
    # quiet rounds come late: the time is extended until there are enough
    rounds = synthetic.interleave([synthetic.shared(lambda i: i < 100)], Budget(0.3))
    assert not rounds.disturbed and sum(rounds.quiet) == 5


def test_rounds_of_slow_cpus_are_left_out() -> None:
    synthetic = SyntheticMachine()

    def ns(work: int) -> int:  # from the 40th millisecond on a neighbour halves all speed
        return work * (2 if 40 <= synthetic.now // 1_000_000 % 200 < 100 else 1)

    def loop() -> None:
        synthetic.now += ns(200_000)

    run = synthetic.run("kernel", lambda i: ns(1_000_000))
    probe = harness.SpeedProbe(loop, lambda: synthetic.now)
    rounds = synthetic.interleave([run], Budget(0.4), probe)
    assert not rounds.disturbed and 0.5 < sum(rounds.quiet) / len(rounds.quiet) < 0.9
    assert rounds.usable()[0] == pytest.approx([1e-3] * sum(rounds.quiet))


# --- rows ----------------------------------------------------------------------------------------

CALL_S = 3e-6


class SyntheticPeak:
    """Stands for PeakLimit: a million multiply-adds a call."""

    speed = harness.SpeedProbe(lambda: None)

    def run(self, macs: int = 0) -> tuple[Timed, int]:
        return Timed(lambda _: None), 1_000_000


def measured(
    monkeypatch: pytest.MonkeyPatch,
    kernel: float,
    read: float = 100e-6,
    peak: float = 10e-6,
    *,
    quiet: bool = True,
    **changes: Any,
) -> dict[str, Any]:
    """The row of a product that reads 1 MB and whose samples take `kernel` and a call.

    The read pass takes 100 us for 2 MB: 20 GB/s. The peak loop does 100 GMAC/s.
    """
    nothing = Timed(lambda _: None)
    slots = [torch.zeros(2_000_000, dtype=torch.uint8)] * 2
    values: dict[str, Any] = dict(
        name="gemv", shape={"M": 1, "N": 1000, "K": 4000}, bytes=1_000_000, macs=4_000_000,
        integer=True, run=nothing, read=limits.ReadLimit(slots, warm=False), check=lambda: True,
        baselines={"torch_bf16": nothing},
    )  # fmt: skip
    case = cases.Case(**values | changes)

    def interleave(runs: Sequence[Timed], *_: Any, probe: harness.SpeedProbe) -> harness.Rounds:
        times = [kernel + CALL_S, CALL_S, read, peak]
        times = [62.5e-6, 500e-6] if len(runs) == 2 else times[: len(runs)]
        return harness.Rounds([[s] * 3 for s in times], [0.0 if quiet else 0.5] * 3)

    monkeypatch.setattr(ops, "interleave", interleave)
    found = limits.MachineLimits(torch.get_num_threads(), 20.0, 100.0, SyntheticPeak())  # type: ignore[arg-type]
    return ops.measure(case, found, Budget(1), Budget(1))


def test_a_row_names_the_limit_that_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measured(monkeypatch, 62.5e-6)
    assert row["time_us"] == {"median": 65.5, "p10": 65.5, "p90": 65.5} and row["call_us"] == 3
    assert (row["limit"], row["limit_value"], row["limit_unit"]) == ("read", 20, "GB/s")
    assert row["ratio"] == {"median": 0.8, "p10": 0.8, "p90": 0.8}
    assert (row["gb_s"], row["gmac_s"]) == (15.267, 61.069)
    peak = row["limits"]["int8_peak"]
    assert (peak["value"], peak["allowed_us"]["median"], peak["ratio"]["median"]) == (100, 40, 0.64)
    assert row["baselines"]["torch_bf16"]["speedup"]["median"] == 8 and row["flags"] == []
    row = measured(monkeypatch, 100e-6, macs=8_000_000)
    assert (row["limit"], row["limit_unit"], row["ratio"]["median"]) == ("int8_peak", "GMAC/s", 0.8)
    row = measured(monkeypatch, 62.5e-6, integer=False, macs=10**9)
    assert set(row["limits"]) == {"read"} and row["ratio"]["median"] == 0.8


def test_a_row_flags_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    # 1 MB in 40 us is 25 GB/s where reading gives 20: taken again, then flagged
    row = measured(monkeypatch, 40e-6, peak=1e-6)
    assert row["flags"] == ["above_limit", "above_bandwidth"] and row["attempts"] == limits.ATTEMPTS
    row = measured(monkeypatch, 40e-6, peak=1e-6, run=Timed(lambda _: None, warm=True))
    assert row["flags"] == ["above_limit"]
    assert measured(monkeypatch, 62.5e-6, check=lambda: False)["flags"] == ["wrong_result"]
    row = measured(monkeypatch, 62.5e-6, quiet=False)
    assert row["flags"] == ["disturbed"] and row["baselines"]["torch_bf16"]["disturbed"]


# --- limits --------------------------------------------------------------------------------------


def test_unstable_limits_are_taken_again_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = [0.9, 0.9, 0.0]
    taken: list[float] = []

    def interleave(runs: list[Timed], budget: Budget, probe: Any) -> harness.Rounds:
        taken.append(waits[len(taken) % 3])
        return harness.Rounds([[1e-3] * 3 for _ in runs], [taken[-1]] * 3)

    monkeypatch.setattr(limits, "interleave", interleave)
    monkeypatch.setattr(limits, "PeakLimit", SyntheticPeak)
    memory, threads = Workspace(32 << 20, 0).ternary, torch.get_num_threads()
    assert not limits.measure_limits(memory, threads, Budget(0.001)).unstable and len(taken) == 3
    waits[2] = 0.9
    found = limits.measure_limits(memory, threads, Budget(0.001))
    assert found.unstable and len(taken) == 6
    shown = found.to_dict()
    assert shown["read_gb_s"] is shown["int8_peak_gmac_s"] is None and not shown["read_forms_gb_s"]
    assert dataclasses.replace(found, unstable=False).to_dict()["read_gb_s"] > 0


def test_limits_of_threads_that_wait_for_one_cpu_are_unstable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two threads that read 2 GB/s where one reads 20: no process could be blamed for it."""
    rates = {1: 20.0, 2: 2.0, 4: 15.0}

    def measure_limits(memory: Any, threads: int, budget: Budget) -> limits.MachineLimits:
        return limits.MachineLimits(threads, rates[threads], 100.0, None)  # type: ignore[arg-type]

    monkeypatch.setattr(limits, "measure_limits", measure_limits)
    found = limits.measure_all_limits(None, [1, 2, 4], Budget(0.0))  # type: ignore[arg-type]
    assert [one.unstable for one in found] == [False, True, False]


def test_warnings_name_what_spoils_results() -> None:
    quiet = {
        "load_average": [0.2, 0, 0], "cpus_available": 2, "threads": [1, 2],
        "cache_bytes": {"L3": 32 << 20}, "cold_bytes": [512 << 20, 512 << 20],
    }  # fmt: skip
    even = [{"threads": t, "unstable": False} for t in (1, 2)]
    waiting = [even[0], even[1] | {"unstable": True}]
    assert session.warnings(quiet, even) == []
    for change, found_limits, words in (
        ({"load_average": [1.1, 0, 0]}, even, "other processes run; use the ratios only"),
        ({"cold_bytes": [64 << 20, 0]}, even, "cold rows may be warm"),
        ({"threads": [4]}, even, "4 threads on 2 CPUs"),
        ({}, waiting, "no limits for 2 threads"),
    ):
        (warning,) = session.warnings(quiet | change, found_limits)
        assert words in warning


def test_the_peak_is_that_of_the_widest_unit_and_of_every_thread() -> None:
    """amx_int8: 4 steps of 2 x 2 tiles an iteration, not the loop of the vector unit."""
    before, threads = _runtime.isa(), torch.get_num_threads()
    probe = _runtime.probe_int8_peak
    try:
        for isa in _runtime.available_isas():
            _runtime.force_isa(isa)
            torch.set_num_threads(1)
            one = probe(1)
            assert (one == 4 * 4 * 16 * 16 * 64) == (isa == "amx_int8"), isa
            torch.set_num_threads(3)
            assert probe(1) == 3 * one
        peak = limits.PeakLimit()
        assert torch.get_num_threads() == 3
        minimum = peak.run()[1]  # as long as the work beside it, within bounds
        assert peak.run(1)[1] == minimum > 0 and peak.run(10**18)[1] == 100 * minimum
    finally:
        _runtime.force_isa(before)
        torch.set_num_threads(threads)


@pytest.mark.skipif(len(machine.affinity()) < 2, reason="a round trip needs two CPUs")
def test_ping_pong_is_a_latency() -> None:
    cpus = machine.affinity()
    # on a busy machine the two threads may miss each other for a while
    attempts = (_runtime.ping_pong_ns(cpus[0], cpus[-1], 10, 100, 0.5) for _ in range(20))
    batches = next(filter(None, attempts))
    assert len(batches) <= 10 and all(5 < ns < 1e8 for ns in batches)
    assert machine.affinity() == cpus  # the pinning does not reach the caller
    with pytest.raises(ValueError, match="two different CPUs"):
        _runtime.ping_pong_ns(cpus[0], cpus[0])
    with pytest.raises(ValueError, match=f"affinity mask, got {cpus[0]} and -1"):
        _runtime.ping_pong_ns(cpus[0], -1, 1, 1, 0.01)


# --- pinning -------------------------------------------------------------------------------------


def masks() -> dict[int, set[int]]:
    return {int(tid): os.sched_getaffinity(int(tid)) for tid in os.listdir("/proc/self/task")}


@pytest.mark.skipif(len(machine.affinity()) < 2, reason="one CPU: nothing to tell apart")
def test_threads_get_cpus_of_their_own_and_a_host_process_none() -> None:
    before, threads = masks(), torch.get_num_threads()
    own = before[os.getpid()]
    try:
        pinning.use_threads(2)  # outside of the commands' `pinned`
        assert all(masks().get(tid, mask) == mask for tid, mask in before.items())
        with pinning.pinned():
            for count in (2, 1, 2):
                pinning.use_threads(count)
                assert torch.get_num_threads() == count
                found = [os.sched_getaffinity(tid) for tid in pinning.team()]
                assert len(found) == count and all(len(mask) == 1 for mask in found)
                assert len(set.union(*found)) == count
            assert pinning.cpus() == sorted(own)  # what the round trip between cores asks for
            with pinning.unpinned():
                assert machine.affinity() == sorted(own)
        assert all(mask == own for mask in masks().values())
    finally:
        torch.set_num_threads(threads)


def test_one_cpu_of_each_core_comes_first(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    for cpus, first in (([0, 1, 2, 3], [0, 1, 2, 3]), ([0, 2, 1, 3], [0, 1, 2, 3]), ([0, 9],) * 2):
        assert machine.one_of_each_core_first(cpus, tmp_path) == first
