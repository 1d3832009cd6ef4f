"""The simulator of steps on many cores: what can be worked out by hand, on made-up stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.many_cores import Machine, Ranges, Stage, lost, read_plan, simulate, step

STAGE = Stage("down", units=640, least=1, most=8, parts=8, ns=640_000.0, prepare_ns=0.0, bytes=0)


def test_what_bench_step_prints_is_read() -> None:
    text = (
        'ISA, model\nplan "gate/up" 12 1 4 8 3400 100 5000\nplan "none" 0 1 1 8 0 0 0\nthreads 2 90'
    )
    stages, measured = read_plan(text)
    assert stages == [Stage("gate/up", 12, 1, 4, 8, 3400, 100, 5000)]
    assert measured == {2: 90.0}


def test_one_thread_takes_what_was_measured() -> None:
    prepared = replace(STAGE, prepare_ns=500.0)
    assert simulate(prepared, Machine(1)) == (pytest.approx(640_000), pytest.approx(0))


@pytest.mark.parametrize("scheme", ["grouped", "shared"])
def test_work_is_shared_and_bounded_by_the_memory(scheme: str) -> None:
    free = Machine(64, scheme=scheme, barrier=False, claim_ns=0.0)
    assert simulate(STAGE, free)[0] == pytest.approx(10_000)  # ten units each
    reading = replace(STAGE, bytes=6_400_000)  # 640 bytes a ns on 64 threads
    assert simulate(reading, replace(free, bandwidth=320.0))[0] == pytest.approx(20_000)


@pytest.mark.parametrize("scheme", ["grouped", "shared"])
def test_every_unit_is_claimed_once(scheme: str) -> None:
    ranges = Ranges(replace(STAGE, units=77), Machine(20, scheme=scheme))
    assert (min(ranges.left), max(ranges.left), sum(ranges.left)) == (3, 4, 77)
    claimed = 0
    while (found := ranges.victim(13)) is not None:
        claimed += ranges.take(found[0])
    assert claimed == 77


def test_threads_help_their_own_group_first() -> None:
    ranges = Ranges(STAGE, Machine(24))
    ranges.left = [0] * 24
    ranges.left[1], ranges.left[9], ranges.left[15] = 9, 3, 2
    assert [ranges.victim(thread) for thread in (2, 10)] == [
        (1, pytest.approx(25 + 25)),
        (9, pytest.approx(25 + 25)),
    ]
    found = ranges.victim(20)  # behind its own group comes the first one
    assert found is not None and found[0] == 1


def test_arrivals_by_groups_pass_fewer_transfers() -> None:
    """64 threads: 8 in each group and 8 groups, half of them at once; before, 64 on one line."""
    machine = Machine(64)
    assert machine.arrivals_ns() == (8 * 25 + 8 * 60) / 2
    assert replace(machine, scheme="shared").arrivals_ns() == 64 * 60 / 2
    assert Machine(8).arrivals_ns() == replace(Machine(8), scheme="shared").arrivals_ns()


def test_barriers_of_many_threads_cost_less_than_a_tenth() -> None:
    """Stages of 10 us on 64 threads, as decode has."""
    machine = Machine(64)
    assert lost([STAGE] * 3, Machine(1)) == 0
    assert 0 < lost([STAGE] * 3, machine) < 0.1
    assert lost([STAGE] * 3, replace(machine, scheme="shared")) > 0.3
    assert step([STAGE] * 3, machine)[0] == pytest.approx(3 * simulate(STAGE, machine)[0])
