"""Runs that share one engine: threads, interleaved streams, closing, memory, changed weights.

On a model that counts, or on tiny ones; what a run alone gives is test_engine.py's matter.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bitnet_ops.generate.engine import Engine, Limits, Run
from bitnet_ops.generate.engine_core import EngineCore, InterruptedStepError
from bitnet_ops.generate.request import Failed, Inbox, NewToken
from bitnet_ops.generate.sampling import SamplingError, SamplingParams
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.nn.kv_types import bytes_of_block
from isa_control import torch_threads
from tiny_models import SMALL, config_of, tiny_model

CONFIG = config_of(SMALL["bitnet-offline"])
VOCAB = CONFIG.vocab_size


class Counting:
    """A model whose best next token is the last one plus 1; `steps` counts."""

    config = CONFIG

    def __init__(self) -> None:
        self.steps = 0

    def step(self, batch: StepBatch, pool: KVPool) -> Tensor:
        self.steps += 1
        last = batch.token_ids[batch.logit_rows]
        return torch.nn.functional.one_hot((last + 1) % VOCAB, VOCAB).float() * 9


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def used(engine: Engine) -> int:
    return engine.stats().used_blocks


# Sharing steps -----------------------------------------------------------------------------------


def test_interleaved_runs_share_their_steps() -> None:
    engine = Engine(model := Counting())
    runs = [engine.start([[start]], limits=Limits(20)) for start in (3, 60)]
    tokens = [[token for (_, token) in pair] for pair in zip(*runs, strict=True)]
    assert tokens == [[4 + i, 61 + i] for i in range(20)]
    assert model.steps == 21, "the first of one before the other began, then all together"
    for run in runs:
        assert run.timing.decoded_tokens == 19 and run.timing.decode_s > 0
        assert run.generations[0].finish_reason == "length" and not run.active


def test_a_run_leaves_the_events_of_added_requests_to_whoever_steps() -> None:
    engine = Engine(Counting())
    id = engine.add([3], limits=Limits(4))
    assert engine.generate([[9]], limits=Limits(6))[0].token_ids == [10, 11, 12, 13, 14, 15]
    events = engine.step()
    assert [e.token_id for e in events if isinstance(e, NewToken)] == [4, 5, 6, 7]
    assert {e.request_id for e in events} == {id} and not engine.has_work


def test_threads_with_runs_of_their_own_lose_nothing_and_never_wait_for_ever() -> None:
    """Some drive the engine, some have runs to their ends, break off, cancel or batch."""
    engine = Engine(Counting(), kv_cache_mb=2, block_size=16)
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
                expected = [(start + 1 + i) % VOCAB for i in range(n)], [6 + i for i in range(n)]
                assert all(g == e[: len(g)] for g, e in zip(got, expected, strict=True))
                if leave >= 2 * n - 1 or not run.active:
                    assert got == expected
                wanted[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(n,)) for n in wanted]
    driver_stops = threading.Event()

    def drive() -> None:
        while not driver_stops.is_set():
            engine.step()
            time.sleep(0.001)

    driver = threading.Thread(target=drive)
    for thread in (*threads, driver):
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    driver_stops.set()
    driver.join(timeout=120)
    assert not any(t.is_alive() for t in (*threads, driver)) and failures == []
    assert set(wanted.values()) == {30}
    gc.collect()
    assert used(engine) == 0 and not engine.has_work


def test_a_thread_is_not_kept_from_tokens_that_it_has() -> None:
    """One that steps without a pause must not hold the turn while the other's tokens lie there."""

    class Slow(Counting):
        def step(self, batch: StepBatch, pool: KVPool) -> Tensor:
            time.sleep(0.002)
            return super().step(batch, pool)

    engine = Engine(Slow())
    ends: dict[int, float] = {}

    def client(n: int) -> None:
        engine.generate([[n]], limits=Limits(n))
        ends[n] = time.perf_counter()

    threads = [threading.Thread(target=client, args=(n,)) for n in (5, 250)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends[5] < ends[250] - 0.2


# Ends --------------------------------------------------------------------------------------------


def test_a_dropped_or_closed_run_ends_its_requests() -> None:
    engine = Engine(Counting())
    for end in ("drop", "close"):
        run: Run | None = engine.start([[1], [5]], limits=Limits(50))
        assert run is not None
        next(iter(run))
        assert used(engine) == 2
        if end == "close":
            run.close()
            assert not run.active and run.step() == []
            assert run.generations[0].finish_reason == ""
        run = None
        assert used(engine) == 0 and not engine.has_work
        assert engine.generate([[1]], limits=Limits(2))[0].token_ids == [2, 3]


def test_a_run_that_goes_on_after_a_break() -> None:
    run = Engine(Counting()).start([[1]], limits=Limits(5))
    assert next(iter(run)) == (0, 2)
    assert [token for _, token in run] == [3, 4, 5, 6]


def test_an_exception_ends_all_rows_of_its_run_and_no_other() -> None:
    class Broken(Counting):
        def step(self, batch: StepBatch, pool: KVPool) -> Tensor:
            logits = super().step(batch, pool)
            logits[batch.token_ids[batch.logit_rows] == 42] = float("nan")
            return logits

    engine = Engine(Broken())
    healthy = engine.start([[1]], limits=Limits(30))
    healthy.step()
    broken = engine.start([[3], [38]], limits=Limits(30))
    with pytest.raises(SamplingError, match="got a NaN"):
        list(broken)
    assert not broken.active and broken.step() == []
    assert [token for _, token in healthy] == list(range(3, 32))
    assert used(engine) == 0


def test_a_failing_model_ends_the_run_of_whoever_stepped() -> None:
    class Failing(Counting):
        def step(self, batch: StepBatch, pool: KVPool) -> Tensor:
            if self.steps == 2:
                self.steps += 1
                raise MemoryError("no memory")
            return super().step(batch, pool)

    engine = Engine(Failing())
    other = engine.start([[7]], limits=Limits(4))
    other.step()
    with pytest.raises(MemoryError):
        engine.generate([[1]], limits=Limits(30))
    assert [token for _, token in other] == [9, 10, 11]
    assert used(engine) == 0


# Interrupts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["schedule", "computed", "remove", "_register_last", "_free"])
def test_an_interrupt_in_the_books_costs_the_requests_not_the_engine(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(Counting())
    other = engine.start([[30]], limits=Limits(50))
    other.step()

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._core._scheduler, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1]], limits=Limits(3))
    with pytest.raises(InterruptedStepError, match="ask again"):
        list(other)
    assert engine.generate([[1]], limits=Limits(3))[0].token_ids == [2, 3, 4]
    assert used(engine) == 0 and not engine.has_work


def test_an_interrupt_between_draws_and_their_entry_is_one_too() -> None:
    model = Counting()
    pool = KVPool(CONFIG, 20)
    interrupted = [False]

    def sample(samplers: Any, logits: Tensor) -> Any:
        from bitnet_ops.generate.sampling import sample_rows

        found = sample_rows(samplers, logits)
        if interrupted == [False]:
            interrupted[0] = True
            raise KeyboardInterrupt
        return found

    core = EngineCore(
        lambda batch: model.step(batch, pool),
        pool,
        max_positions=100,
        vocab_size=VOCAB,
        sample_rows=sample,
    )
    inbox = Inbox()
    core.add([1], SamplingParams(temperature=1.0, seed=1), Limits(4), inbox=inbox)
    with pytest.raises(KeyboardInterrupt):
        core.wait(inbox)
    core.step()
    assert isinstance(inbox.popleft(), Failed) and not core.has_work
    assert core.stats().used_blocks == 0


# Memory ------------------------------------------------------------------------------------------


def test_many_prompts_one_after_the_other_keep_a_bounded_prefix_cache() -> None:
    block = bytes_of_block(CONFIG, 64, torch.bfloat16) / 2**20
    longest = -(-CONFIG.max_position_embeddings // 64)
    cases: list[tuple[dict[str, Any], int]] = [
        ({"prefix_cache_mb": 5 * block}, 5),
        ({"prefix_cache_mb": 0}, 0),
        ({"kv_cache_mb": 30 * block}, 30),
        ({"kv_cache_mb": 30 * block, "prefix_cache_mb": 7 * block}, 7),
        ({}, max(longest, int(256 / block))),
    ]
    for options, most in cases:
        engine = Engine(Counting(), **options)
        for number in range(2 * 40):
            prompt = [number, 1] * 40  # of two blocks
            engine.generate([prompt], limits=Limits(1))
            assert engine.stats().cached_blocks <= most
        stats = engine.stats()
        assert stats.cached_blocks == min(most, 160), "as much as it may"
        taken = len(engine._core._allocator._references)  # blocks that have got memory
        assert taken <= max(2, most + 2)


def test_an_unused_engine_has_no_memory_and_a_large_limit_costs_nothing() -> None:
    engine = Engine(Counting(), kv_cache_mb=2**20)  # a TiB of address space
    assert engine._made is None
    began = time.perf_counter()
    engine.generate([[1]], limits=Limits(1))
    assert time.perf_counter() - began < 1
    assert engine.stats().blocks > 10**6 and len(engine._core._allocator._references) == 1


# Weights -----------------------------------------------------------------------------------------


def test_changed_weights_find_nothing_of_the_old_ones() -> None:
    """In place, replaced, and while a run that is dropped later still holds blocks."""
    model = tiny_model(SMALL["bitnet-offline-untied"])
    engine = Engine(model)
    prompt, limits = list(range(2, 80)), Limits(6)
    other = tiny_model(SMALL["bitnet-offline-untied"])
    changes = [
        lambda: model.model.norm.weight.mul_(1.5),
        lambda: model.model.embed_tokens.weight[3].neg_(),
        lambda: model.load_state_dict(other.state_dict()),
        lambda: model.to(torch.bfloat16),
    ]
    for change in changes:
        paused = engine.start([prompt], limits=limits)
        paused.step()
        change()
        del paused
        (found,) = engine.generate([prompt], limits=limits)
        run = engine.start([prompt], limits=limits)
        list(run)
        assert run.timing.reused_tokens == len(prompt) - 1
        (expected,) = Engine(model).generate([prompt], limits=limits)
        assert found == expected == run.generations[0]


def test_a_model_without_step_is_rejected_at_once() -> None:
    class Callable:
        config = CONFIG

        def __call__(self, ids: Tensor, cache: Any, keep: int = 0) -> Tensor:
            return torch.zeros(1, 1, VOCAB)

    with pytest.raises(TypeError, match=r"engine: expected a model with config and step\(batch"):
        Engine(Callable())  # type: ignore[arg-type]


def test_a_patient_batch_takes_whole_budgets_of_prompts() -> None:
    class Slow(Counting):
        def step(self, batch: StepBatch, pool: KVPool) -> Tensor:
            time.sleep(1e-4 * len(batch.token_ids))
            return super().step(batch, pool)

    steps = []
    for patient in (True, False):
        run = Engine(model := Slow()).start(
            [[i] * 100 for i in range(8)], None, Limits(8), patient=patient
        )
        list(run)
        steps.append(model.steps)
    assert steps[0] == 4 + 7, "800 prompt tokens in budgets of 256, and the last one's tokens"
    assert steps[1] > 2 * steps[0], "the first streams do not wait for whole budgets"
