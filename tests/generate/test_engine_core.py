"""The engine's loop on a model that reads back what it wrote: its cases, one by one.

Random schedules are test_engine_schedules.py's.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bitnet_ops.generate.engine import Limits
from bitnet_ops.generate.engine_core import EngineCore
from bitnet_ops.generate.prompts import PromptError
from bitnet_ops.generate.request import Event, Failed, Finished, Inbox, NewToken
from bitnet_ops.generate.sampling import SamplingError, SamplingParams
from bitnet_ops.generate.scheduler import SchedulerOptions
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.kv_pool import KVPool
from isa_control import torch_threads
from paged_fake import (
    VOCAB,
    FakePool,
    FakeRunner,
    PoisoningAllocator,
    alone,
    next_logits,
)
from tiny_models import SMALL, config_of


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


# Cases -----------------------------------------------------------------------------------------


def engine(
    blocks: int = 50,
    block_size: int = 4,
    runner: Callable[[StepBatch], Tensor] | None = None,
    **options: Any,
) -> tuple[EngineCore, FakePool, FakeRunner]:
    pool = FakePool(blocks, block_size)
    fake = FakeRunner(pool)
    core = EngineCore(
        runner or fake,
        pool,
        max_positions=1000,
        vocab_size=VOCAB,
        options=SchedulerOptions(**options),
        allocator=PoisoningAllocator(pool),
    )
    return core, pool, fake


def counting(pool: FakePool) -> Callable[[StepBatch], Tensor]:
    """A model whose best next token is the last one plus 1."""
    fake = FakeRunner(pool)

    def run(batch: StepBatch) -> Tensor:
        fake(batch)
        ids = batch.token_ids[batch.logit_rows]
        return torch.nn.functional.one_hot((ids + 1) % VOCAB, VOCAB).float()

    return run


def answers(events: list[Event]) -> dict[int, tuple[list[int], str]]:
    tokens: dict[int, list[int]] = {}
    endings: dict[int, str] = {}
    for event in events:
        if isinstance(event, NewToken):
            tokens.setdefault(event.request_id, []).append(event.token_id)
        else:
            ending = event.reason if isinstance(event, Finished) else str(event.error)
            endings[event.request_id] = ending
    return {id: (tokens.get(id, []), ending) for id, ending in endings.items()}


GREEDY = SamplingParams()


def expected(prompt: Sequence[int], limits: Limits) -> tuple[list[int], str]:
    answer = alone(prompt, GREEDY, limits, max_positions=1000, pool_positions=10**6)
    return answer.tokens, answer.ending


# Prompts whose answers do not run into the model's NaN.
GOOD = [p for p in ([i, i // 3 % VOCAB, 2, 7] for i in range(VOCAB))
        if expected(p, Limits(20))[1] == "length"]  # fmt: skip


def test_there_are_good_prompts() -> None:
    assert len(GOOD) >= 7


def test_a_nan_ends_its_own_request_alone() -> None:
    """One among seven healthy ones, which go on to their ends."""
    pool = FakePool(100, 4)
    fake = FakeRunner(pool)
    bad, broken = 3, [-1]  # the blocks of the bad one, once it has some

    def run(batch: StepBatch) -> Tensor:
        logits = fake(batch)
        begins = batch.query_start_loc[:-1].tolist()
        for row, token in enumerate(batch.logit_rows.tolist()):
            owner = max(i for i, begin in enumerate(begins) if begin <= token)
            if batch.block_table[owner, 0] == broken[0] and batch.seq_lens[owner] == 8:
                logits[row, 5] = float("nan")
        return logits

    core = EngineCore(run, pool, max_positions=1000, vocab_size=VOCAB)
    prompts = [*GOOD[:bad], [9, 9, 9, 9], *GOOD[bad:7]]
    ids = [core.add(prompt, GREEDY, Limits(20)) for prompt in prompts]
    events = core.step()
    broken[:] = core.request(ids[bad]).blocks
    events += core.run()
    got = answers(events)
    for i, prompt in enumerate(prompts):
        if i == bad:
            tokens, error = got[ids[i]]
            assert tokens == expected(prompt, Limits(4))[0] and "got a NaN" in error
        else:
            assert got[ids[i]] == expected(prompt, Limits(20))
    failed = [e for e in events if isinstance(e, Failed)]
    assert len(failed) == 1 and isinstance(failed[0].error, SamplingError)
    assert core.stats().used_blocks == 0


def test_blocks_of_a_failed_request_are_not_found_again() -> None:
    core, pool, _ = engine()
    failing = True

    def run(batch: StepBatch) -> Tensor:
        logits = FakeRunner(pool)(batch)
        return logits * float("nan") if failing else logits

    core._runner = run
    first = core.add([*[1, 2, 3, 4] * 3, 5], GREEDY, Limits(1))
    assert isinstance(core.run()[0], Failed) and core.stats().cached_blocks == 0
    failing = False
    core.add([*[1, 2, 3, 4] * 3, 5], GREEDY, Limits(1))
    core.step()
    assert first == 0 and core.stats().cached_blocks == 4


def test_a_full_pool_fails_the_one_that_cannot_fit() -> None:
    core, _, _ = engine(blocks=6)
    long = core.add([1] * 25, GREEDY, Limits(5))
    grows = core.add(GOOD[0], GREEDY, Limits(50))
    fits = core.add(GOOD[1], GREEDY, Limits(12))
    got = answers(core.run())
    assert got[long] == ([], "KV pool: expected 7 free blocks, got 6 of 6; wait until other "
                         "sequences end, shorten this one or make the pool larger")  # fmt: skip
    assert got[fits] == expected(GOOD[1], Limits(12))
    tokens, error = got[grows]
    assert tokens == expected(GOOD[0], Limits(21))[0], "24 positions hold 4 + 20 tokens"
    assert error.startswith("KV pool: expected 1 free blocks, got 0 of 6")


def test_a_grown_pool_has_room() -> None:
    core, _, _ = engine(blocks=6)
    core.grow(1)
    id = core.add([1] * 25, GREEDY, Limits(1))
    assert answers(core.run())[id] == expected([1] * 25, Limits(1))


def test_abort_in_the_middle_of_a_prompt_frees_its_blocks_at_once() -> None:
    core, _, fake = engine(token_budget=8, max_sequences=4)
    healthy = core.add(GOOD[0], GREEDY, Limits(10))
    long = core.add([1, 2] * 30, GREEDY, Limits(5))
    events = core.step() + core.step()
    assert 0 < core.request(long).computed < 60 and core.stats().used_blocks >= 15
    assert core.abort(long)
    assert core.stats().used_blocks == 2 and not core.abort(long)
    events += core.run()
    assert answers(events) == {healthy: expected(GOOD[0], Limits(10)), long: ([], "abort")}
    assert core.stats().used_blocks == 0


def test_abort_while_the_model_runs_keeps_the_blocks_until_it_has_run() -> None:
    core, pool, _ = engine()
    held: list[int] = []

    def run(batch: StepBatch) -> Tensor:
        assert core.abort(0) and not core.abort(0)
        held.append(core.stats().used_blocks)
        return FakeRunner(pool)(batch)

    core._runner = run
    core.add(GOOD[0], GREEDY, Limits(10))
    assert core.step() == [Finished(0, "abort")]
    assert held == [1] and core.stats().used_blocks == 0 and not core.has_work


def test_nothing_asked_nothing_run() -> None:
    core, _, fake = engine()
    assert core.step() == [] and not core.has_work
    id = core.add([1], GREEDY, Limits(0))
    assert core.has_work and core.step() == [Finished(id, "length")]
    assert fake.batches == [] and not core.has_work


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "expected a prompt of at least one token"),
        ([3, VOCAB], "expected prompt ids from 0 to 10, got 3 to 11"),
        ([-1], "expected prompt ids from 0 to 10, got -1 to -1"),
        ([1] * 1001, r"expected a prompt of at most 1000 tokens .*, got 1001"),
    ],
)
def test_a_bad_prompt_is_rejected_at_once(prompt: list[int], message: str) -> None:
    core, _, _ = engine()
    with pytest.raises(PromptError, match=message):
        core.add(prompt, GREEDY, Limits(1))
    assert not core.has_work


def test_a_broken_runner_leaves_everything_as_it_was() -> None:
    core, pool, fake = engine()
    calls = 0

    def run(batch: StepBatch) -> Tensor:
        nonlocal calls
        calls += 1
        fake(batch)
        if calls in (1, 3):
            raise MemoryError
        return FakeRunner(pool)(batch)

    core._runner = run
    id = core.add(GOOD[0], GREEDY, Limits(6))
    events: list[Event] = []
    for _ in range(8):
        try:
            events += core.step()
        except MemoryError:
            pass
    assert answers(events)[id] == expected(GOOD[0], Limits(6)) and calls == 8


# Prefixes and forks ------------------------------------------------------------------------------


def test_a_repeated_prompt_is_computed_once() -> None:
    core, _, fake = engine()
    prompt = [1, 2, 3] * 8  # six whole blocks
    for turn, new in enumerate([24, 1, 1]):
        core.add(prompt, GREEDY, Limits(1))
        core.step()
        assert len(fake.batches[turn].token_ids) == new, "the last token is always computed"
    core.add([*prompt, 5, 6], GREEDY, Limits(1))
    core.step()
    assert fake.batches[-1].token_ids.tolist() == [5, 6]
    core.add(prompt, GREEDY, Limits(1), adapter="a")
    core.step()
    assert len(fake.batches[-1].token_ids) == 24, "an adapter has keys and values of its own"
    core.forget_prefixes()
    core.add(prompt, GREEDY, Limits(1))
    core.step()
    assert len(fake.batches[-1].token_ids) == 24


def test_answers_are_found_again_too() -> None:
    """The next turn of a conversation begins with the tokens of the one before."""
    core, _, fake = engine()
    core.add(GOOD[0], GREEDY, Limits(20))
    answer = answers(core.run())[0][0]
    core.add([*GOOD[0], *answer, 1, 2], GREEDY, Limits(1))
    core.step()
    assert len(fake.batches[-1].token_ids) == 3, "the last one, which led to no other, and two more"
    core.add([*GOOD[0], *answer[:9], 0], GREEDY, Limits(1))
    core.step()
    assert fake.batches[-1].token_ids.tolist() == [0], "it begins as the block does: copied"
    core.add([*GOOD[0], *answer, 1, 2], GREEDY, Limits(1))
    core.step()
    assert len(fake.batches[-1].token_ids) == 1, "the original is still there"


def test_without_prefix_cache_nothing_is_found() -> None:
    core, _, fake = engine(prefix_cache=False)
    for _ in range(2):
        core.add([1, 2, 3] * 8, GREEDY, Limits(1))
        core.step()
        assert len(fake.batches[-1].token_ids) == 24 and core.stats().cached_blocks == 0


def test_forks_share_until_they_write() -> None:
    core, pool, fake = engine()
    parent = core.add([*GOOD[0], *GOOD[1], 3], GREEDY, Limits(20))
    core.step()
    assert core.stats().used_blocks == 3
    params = SamplingParams(temperature=0.1, seed=1)
    children = [core.fork(parent, params, Limits(20)) for _ in range(3)]
    assert core.stats().used_blocks == 3
    core.step()
    assert core.stats().used_blocks == 6 and pool.copies == 3
    assert [len(batch.token_ids) for batch in fake.batches] == [9, 4]
    before = core.request(parent).output_ids[:1]
    events = core.run()
    assert pool.copies == 3
    assert core.stats().used_blocks == 0
    got = answers(events)
    assert got[children[0]] == got[children[1]] == got[children[2]]
    want = alone([*GOOD[0], *GOOD[1], 3, *before], params, Limits(20), max_positions=99,
                 pool_positions=999, before=1)  # fmt: skip
    assert got[children[0]][0] == want.tokens[1:], "the first came with the step before"


def test_memory_of_free_blocks_is_given_back() -> None:
    core, pool, _ = engine()
    core.add([1, 2, 3] * 8, GREEDY, Limits(2))
    core.run()
    released: list[int] = []
    pool.release = released.extend  # type: ignore[method-assign]
    core.trim(keep_cached=True)
    assert released == [] and core.stats().cached_blocks == 7
    core.trim()
    assert len(released) == 7 and core.stats().cached_blocks == 0


# Drafts ----------------------------------------------------------------------------------------


def test_right_drafts_save_steps() -> None:
    pool = FakePool(50, 4)
    core = EngineCore(counting(pool), pool, max_positions=1000, vocab_size=VOCAB)
    prompt = list(range(VOCAB)) * 2
    plain = core.add(prompt, GREEDY, Limits(30))
    steps = 0
    events: list[Event] = []
    while core.has_work:
        events += core.step()
        steps += 1
    drafted = core.add(prompt, GREEDY, Limits(30), max_drafts=4)
    while core.has_work:
        events += core.step()
        steps -= 1
    got = answers(events)
    assert got[plain] == got[drafted] == ([i % VOCAB for i in range(30)], "length")
    assert steps == 30 - 7, "1 + 4 tokens in every step after the first, the last in one of 4"
    stats = core.stats()
    assert stats.drafted_tokens == stats.accepted_drafts == 5 * 4 + 3
    assert stats.reused_tokens == 21


def test_a_stop_id_among_right_drafts_ends_the_text() -> None:
    pool = FakePool(50, 4)
    core = EngineCore(counting(pool), pool, max_positions=1000, vocab_size=VOCAB)
    core.add(list(range(VOCAB)) * 2, GREEDY, Limits(30, frozenset({3})), max_drafts=8)
    assert answers(core.run()) == {0: ([0, 1, 2], "stop")}


# Threads ---------------------------------------------------------------------------------------


def test_threads_may_add_and_abort_while_one_steps() -> None:
    core, _, _ = engine(blocks=40)
    mine: list[dict[int, list[int]]] = [{} for _ in range(4)]
    aborted: set[int] = set()

    def client(number: int) -> None:
        for i in range(40):
            prompt = [number, i % VOCAB, i // VOCAB, 2]
            id = core.add(prompt, GREEDY, Limits(8), max_drafts=i % 3)
            mine[number][id] = prompt
            if i % 5 == 0 and core.abort(id):
                aborted.add(id)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    events: list[Event] = []
    while any(t.is_alive() for t in threads) or core.has_work:
        events += core.step()
    for thread in threads:
        thread.join()
    prompts = {id: prompt for part in mine for id, prompt in part.items()}
    got: dict[int, list[int]] = {id: [] for id in prompts}
    ended = Counter(e.request_id for e in events if not isinstance(e, NewToken))
    for event in events:
        if isinstance(event, NewToken):
            got[event.request_id].append(event.token_id)
    assert len(prompts) == 160 and ended == Counter(prompts.keys()) and aborted
    for id, prompt in prompts.items():
        want = expected(prompt, Limits(8))[0]
        assert got[id] == (want[: len(got[id])] if id in aborted else want)
    assert core.stats().used_blocks == 0


def test_threads_share_the_steps_and_each_has_its_inbox() -> None:
    core, _, _ = engine(blocks=40)
    got: dict[int, tuple[list[int], str]] = {}

    def client(number: int) -> None:
        for i in range(20):
            inbox = Inbox()
            prompt = [number, i % VOCAB, 3, 2]
            id = core.add(prompt, GREEDY, Limits(8), inbox=inbox)
            heard: list[Event] = []
            while not heard or isinstance(heard[-1], NewToken):
                while not inbox:
                    assert core.step() == []
                heard.append(inbox.popleft())
            if isinstance(heard[-1], Finished):
                assert answers(heard)[id] == expected(prompt, Limits(8))
            got[id] = answers(heard)[id]

    threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got.keys() == set(range(80)) and not core.has_work


def test_a_fork_has_an_inbox_of_its_own() -> None:
    core, _, _ = engine()
    inboxes = [Inbox(), Inbox()]
    parent = core.add(GOOD[0], GREEDY, Limits(5), inbox=inboxes[0])
    core.step()
    child = core.fork(parent, GREEDY, Limits(5), inbox=inboxes[1])
    assert core.run() == []
    want = expected(GOOD[0], Limits(5))
    assert answers(list(inboxes[0])) == {parent: want}
    assert answers(list(inboxes[1])) == {child: (want[0][1:], "length")}


# The memory of the package ---------------------------------------------------------------------


def test_on_the_pool_of_the_package() -> None:
    """Token ids in KVPool's memory: forks, found prefixes, growth, and memory given back."""
    config = dataclasses.replace(
        config_of(SMALL["bitnet-offline"]), num_hidden_layers=2, num_key_value_heads=1, head_dim=16
    )
    pool = KVPool(config, 6, 64, torch.float32, max_blocks=20)
    limits, prompt = Limits(20), GOOD[0] * 40
    other = next(p for i in range(VOCAB) if expected(p := [*prompt, i], limits)[1] == "length")

    def run(batch: StepBatch) -> Tensor:
        blocks, offsets = batch.slot_mapping // 64, batch.slot_mapping % 64
        for rows in (pool.key_pool, pool.value_pool):
            rows[:, blocks, offsets, 0, :] = batch.token_ids.float()[:, None]
        logits = []
        for row in batch.logit_rows.tolist():
            owner = int((batch.query_start_loc <= row).sum()) - 1
            table, n = batch.block_table[owner], int(batch.positions[row]) + 1
            read = pool.key_pool[:, table], pool.value_pool[:, table]
            flat = torch.stack([r.reshape(2, -1, 16)[:, :n] for r in read])
            assert bool((flat == flat[:1, :1, :, :1]).all())
            ids = flat[0, 0, :, 0].long().tolist()
            logits.append(next_logits(ids)[None])
        return torch.cat(logits)

    core = EngineCore(run, pool, max_positions=1000, vocab_size=VOCAB)
    core.grow(14)
    first = core.add(prompt, GREEDY, limits)
    events = core.step() + core.step()
    second = core.fork(first, GREEDY, limits)
    third = core.add(other, GREEDY, limits)
    events += core.step()
    assert core.request(third).reused_tokens == len(prompt)
    events += core.run()
    got = answers(events)
    assert got[first] == expected(prompt, limits)
    assert got[second][0] == got[first][0][2:] and got[third] == expected(other, limits)
    assert bool(pool.key_pool.any())
    core.trim()
    assert not pool.key_pool.any() and not pool.value_pool.any(), "the system gives zeros"


def test_the_fake_model_depends_on_every_token() -> None:
    ids = [1, 2, 3, 4, 5]
    same = torch.stack([next_logits(ids)] * 5)
    other = torch.stack([next_logits([*ids[:i], 9, *ids[i + 1 :]]) for i in range(5)])
    assert bool((same != other).any(-1).all())
    assert not torch.equal(next_logits(ids), next_logits(ids, "a"))
