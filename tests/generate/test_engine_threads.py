"""Who steps an engine and who hears of it: ends from outside, Ctrl-C, threads, consumers."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bitnet_ops.generate.engine import (
    Engine,
    Event,
    Finished,
    Limits,
    NewToken,
    Run,
    SchedulerOptions,
)
from bitnet_ops.generate.engine_thread import EngineThread
from bitnet_ops.models.step_batch import StepBatch
from counting_model import LONG, VOCAB, Counting, answers, drain, used
from isa_control import torch_threads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


# Ends from outside ------------------------------------------------------------------------------


def test_abort_frees_its_blocks_wherever_the_request_is() -> None:
    options = SchedulerOptions(token_budget=8, max_sequences=2)
    engine = Engine(Counting(LONG), block_size=4, scheduling=options)
    healthy = engine.add([1], limits=Limits(10))
    long = engine.add([1, 2] * 30, limits=Limits(5))
    waiting = engine.add([5], limits=Limits(5))
    events = engine.step() + engine.step()
    assert used(engine) >= 15
    assert engine.abort(waiting) and engine.abort(long) and used(engine) == 1
    assert not engine.abort(long) and not engine.abort(10**6)
    found = answers(events + drain(engine))
    assert found == {
        healthy: (list(range(2, 12)), "length"), long: ([], "abort"), waiting: ([], "abort"),
    }  # fmt: skip
    assert used(engine) == 0 and not engine.abort(healthy)


@pytest.mark.parametrize("end", ["drop", "close", "abort while the model runs"])
def test_a_run_that_ends_early_ends_its_requests(end: str) -> None:
    engine = Engine(model := Counting(LONG))
    run: Run | None = engine.start([[1], [5]], limits=Limits(50))
    assert run is not None
    next(iter(run))
    assert used(engine) == 2
    if end == "close":
        run.close()
        assert not run.active and run.generations[0].finish_reason == ""
    elif end == "drop":
        run = None
    else:
        model.before = lambda _: run.close()
        assert engine.step() == [] and len(model.calls) == 2
        model.before = None
    assert used(engine) == 0 and not engine.has_work
    assert engine.generate([[1]], limits=Limits(2))[0].token_ids == [2, 3]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_run_is_not_copied(copied: Callable[[Any], object], begun: bool) -> None:
    """Its engine's copy would have no such request: the copy would wait for ever."""
    run = Engine(Counting(LONG)).start([[1, 2]], limits=Limits(4))
    if begun:
        run.step()
    with pytest.raises(TypeError, match="^run: expected a run that stays what it is, got a copy"):
        copied(run)
    assert len([*run]) + begun == 4, "it goes on"


def test_ctrl_c_is_raised_after_the_step_which_is_whole() -> None:
    def press(batch: StepBatch) -> None:
        if len(model.calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass  # lines at which Python would raise it

    engine = Engine(model := Counting(before=press))
    other = engine.start([[30]], limits=Limits(9))
    other.step()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1]], limits=Limits(9))
    assert len(model.calls) == 3
    assert [token for _, token in other] == list(range(32, 40)), "the others lose nothing"
    assert used(engine) == 0 and not engine.has_work
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        model.calls.clear()
        assert len(engine.generate([[1]], limits=Limits(9))[0].token_ids) == 9, "it was ignored"
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# Sharing an engine ------------------------------------------------------------------------------


def test_interleaved_runs_share_their_steps() -> None:
    engine = Engine(model := Counting(LONG))
    id = engine.add([3], limits=Limits(4))
    runs = [engine.start([[start]], limits=Limits(20)) for start in (3, 20)]
    tokens = [[token for (_, token) in pair] for pair in zip(*runs, strict=True)]
    assert tokens == [[4 + i, 21 + i] for i in range(20)]
    assert len(model.calls) == 21, "the first of one before the other began, then all together"
    for run in runs:
        assert run.timing.decoded_tokens == 19 and run.timing.decode_s > 0
        assert run.generations[0].finish_reason == "length" and not run.active
    assert answers(engine.step()) == {id: ([4, 5, 6, 7], "length")}, "left to whoever steps"


def test_threads_with_runs_of_their_own_lose_nothing_and_never_wait_for_ever() -> None:
    """Some drive the engine, some have runs to their ends, break off, cancel or batch."""
    engine = Engine(Counting(LONG), kv_cache_mb=2, block_size=16)
    failures: list[BaseException] = []
    wanted = dict.fromkeys(range(6), 0)

    def client(number: int) -> None:
        rng = random.Random(number)
        try:
            for _ in range(30):
                start, n = rng.randrange(VOCAB), rng.randrange(1, 30)
                run = engine.start([[start], [start, 5]], limits=Limits(n))
                leave = rng.randrange(2 * n)
                got: tuple[list[int], list[int]] = ([], [])
                for at, (row, token) in enumerate(run):
                    got[row].append(token)
                    if at == leave:
                        break
                expected = [[(first + 1 + i) % VOCAB for i in range(n)] for first in (start, 5)]
                assert all(g == e[: len(g)] for g, e in zip(got, expected, strict=True))
                if leave >= 2 * n - 1 or not run.active:
                    assert list(got) == expected
                wanted[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(n,)) for n in wanted]
    stops = threading.Event()

    def drive() -> None:
        while not stops.is_set():
            engine.step()
            time.sleep(0.001)

    driver = threading.Thread(target=drive)
    for thread in (*threads, driver):
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    stops.set()
    driver.join(timeout=120)
    assert not any(t.is_alive() for t in (*threads, driver)) and failures == []
    assert set(wanted.values()) == {30}
    gc.collect()
    assert used(engine) == 0 and not engine.has_work


def test_a_thread_is_not_kept_from_tokens_that_it_has() -> None:
    """One that steps without a pause must not hold the turn while the other's tokens lie there."""
    engine = Engine(Counting(LONG, seconds=0.002))
    ends: dict[int, float] = {}

    def client(n: int) -> None:
        engine.generate([[n % VOCAB]], limits=Limits(n))
        ends[n] = time.perf_counter()

    threads = [threading.Thread(target=client, args=(n,)) for n in (5, 250)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends[5] < ends[250] - 0.2


def test_ctrl_c_while_another_thread_steps_disturbs_nobody() -> None:
    """It ends the wait of the thread that got it, which then holds no lock that it could let go."""
    engine = Engine(Counting(LONG, seconds=0.002))
    failures: list[BaseException] = []
    ends = threading.Event()

    def client() -> None:
        try:
            while not ends.is_set():
                assert engine.generate([[5]], limits=Limits(4))[0].token_ids == [6, 7, 8, 9]
        except BaseException as error:
            failures.append(error)

    changed: Any = engine._turn._changed
    acquire = changed._acquire_restore

    def press(state: Any) -> None:  # where a waiting thread does not have the lock yet
        if threading.current_thread() is threading.main_thread():
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(100):
                pass
        acquire(state)

    thread = threading.Thread(target=client)
    thread.start()
    try:
        for _ in range(20):
            changed._acquire_restore = press
            with pytest.raises(KeyboardInterrupt):
                while True:
                    engine.generate([[1]], limits=Limits(20))
            changed._acquire_restore = acquire
            assert engine.generate([[1]], limits=Limits(2))[0].token_ids == [2, 3]
    finally:
        ends.set()
        thread.join(timeout=60)
    assert failures == [] and used(engine) == 0 and not engine.has_work


def in_a_fork(body: Callable[[], object]) -> int:
    """What the child ends with: 0 unless `body` raises; 14 where it hangs."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def test_a_fork_while_another_thread_steps() -> None:
    """Its child has half a step and a lock that nobody gives back: it says so."""
    steps, goes_on = threading.Event(), threading.Event()

    def wait(_: StepBatch) -> None:
        steps.set()
        goes_on.wait(60)

    engine = Engine(model := Counting(before=wait))
    idle = Engine(Counting())
    thread = threading.Thread(target=lambda: engine.generate([[3]], limits=Limits(4)))
    thread.start()
    assert steps.wait(60)

    def refused() -> None:
        with pytest.raises(RuntimeError, match="that another thread was stepping; load the model"):
            engine.generate([[1]], limits=Limits(2))
        assert idle.generate([[1]], limits=Limits(2))[0].token_ids == [2, 3]

    assert in_a_fork(refused) == 0
    goes_on.set()
    thread.join()
    model.before = None
    assert in_a_fork(lambda: engine.generate([[1]], limits=Limits(2))) == 0
    assert engine.generate([[1]], limits=Limits(2))[0].token_ids == [2, 3]


# A thread that owns it ---------------------------------------------------------------------------


def test_a_thread_of_its_own_steps_for_all() -> None:
    steppers = set()
    engine = Engine(model := Counting(before=lambda _: steppers.add(threading.get_ident())))
    mine: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with EngineThread(engine):
        with pytest.raises(ValueError, match="expected a consumer for a request"):
            engine.add([1])
        with pytest.raises(RuntimeError, match="an engine without a thread, got one that has"):
            EngineThread(engine)
        first = engine.add([3], limits=Limits(4), consumer=mine.put)
        assert engine.generate([[9]], limits=Limits(6))[0].token_ids == [10, 11, 12, 13, 14, 15]
        events = [mine.get(timeout=60) for _ in range(5)]
        assert answers(events) == {first: ([4, 5, 6, 7], "length")}
        second = engine.add([1], limits=Limits(10**6), consumer=mine.put)
        mine.get(timeout=60)
        engine.abort(second)
        while not isinstance(event := mine.get(timeout=60), Finished):
            pass
        assert event.reason in ("abort", "context")
        assert steppers and threading.get_ident() not in steppers
    count = len(model.calls)
    left = engine.start([[5]], limits=Limits(2))
    assert [t for _, t in left] == [6, 7] and len(model.calls) == count + 2, "who needs it steps"
    assert threading.get_ident() in steppers


def test_a_run_goes_on_by_itself_when_the_thread_is_closed() -> None:
    engine = Engine(Counting(LONG, seconds=0.001))
    owner = EngineThread(engine)
    run = engine.start([[0]], limits=Limits(300))
    next(iter(run))
    owner.close()
    assert len([t for _, t in run]) == 299


def test_asyncio_consumers() -> None:
    engine = Engine(Counting())

    async def ask(start: int) -> list[int]:
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        engine.add(
            [start],
            limits=Limits(5),
            consumer=lambda event: loop.call_soon_threadsafe(events.put_nowait, event),
        )
        tokens = []
        while isinstance(event := await events.get(), NewToken):
            tokens.append(event.token_id)
        return tokens

    async def several() -> list[list[int]]:
        return await asyncio.gather(*(ask(start) for start in range(8)))

    with EngineThread(engine):
        assert asyncio.run(several()) == [list(range(s + 1, s + 6)) for s in range(8)]


def test_a_consumer_that_fails_loses_its_request_alone(caplog: Any) -> None:
    def broken(event: Event) -> None:
        raise ZeroDivisionError

    engine = Engine(Counting())
    lost = engine.add([1], limits=Limits(20), consumer=broken)
    healthy = engine.add([1], limits=Limits(3))
    assert answers(drain(engine)) == {healthy: ([2, 3, 4], "length")}
    assert f"the consumer of request {lost} failed" in caplog.text and used(engine) == 0


def test_a_consumer_must_not_step() -> None:
    engine = Engine(Counting())
    errors: list[Exception] = []

    def steps(event: Event) -> None:
        try:
            engine.step()
        except RuntimeError as error:
            errors.append(error)

    engine.add([1], limits=Limits(1), consumer=steps)
    engine.step()
    assert len(errors) == 2 and "got one that steps" in str(errors[0])
