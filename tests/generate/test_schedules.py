"""Random schedules: whatever happens around a request, its tokens are those of the request alone.

First on a model that reads back what it wrote, so that a wrong table, slot or copy shows; then on
real ones with caches of every type, fused and composed.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from bitnet_ops.generate.engine import (
    Engine,
    Event,
    Finished,
    Limits,
    NewToken,
    PromptError,
    SamplingParams,
    SchedulerOptions,
)
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.kv_config import KV_DTYPES, bytes_of_block
from isa_control import torch_threads
from paged_fake import VOCAB, Answer, FakeEngine, FakeModel, alone
from tiny_models import SMALL, random_ids, tiny_model


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


# Random schedules ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A request, when it comes, and what happens to it."""

    prompt: list[int]
    params: SamplingParams
    limits: Limits
    adapter: str | None
    max_drafts: int | Literal["auto"]
    keep_prefix: bool
    arrives: int
    aborted: int | None  # at that many steps after its arrival


@dataclass(frozen=True)
class World:
    """The engine that the requests meet."""

    block_size: int
    blocks: int
    max_positions: int
    options: SchedulerOptions
    while_running: bool  # requests come and go while the model runs, not between steps
    broken_steps: frozenset[int]  # in which the model raises


PREFIXES = [[1, 2, 3, 4] * 10, [5] * 40, [7, 1, 7, 2, 7, 3, 8, 8] * 5]


def random_job(r: Random) -> Job:
    prefix = r.choice(PREFIXES)[: r.choice([0, 1, 4, 9, 16, 33])]
    suffix = [r.randrange(VOCAB) for _ in range(r.randint(0 if prefix else 1, 5))]
    return Job(
        prefix + suffix,
        SamplingParams(
            r.choice([0.0, 0.0, 0.7]),
            repetition_penalty=r.choice([1.0, 1.0, 1.5]),
            seed=r.randrange(4),
        ),
        Limits(r.choice([0, 1, 5, 12, 20, 20]), r.choice([frozenset(), frozenset({6})])),
        adapter=r.choice([None, None, "a"]),
        max_drafts=r.choice([0, 0, 1, 4, "auto"]),
        keep_prefix=r.choice([True, True, False]),
        arrives=r.choice([0, 0, 1, 2, 6]),
        aborted=r.choice([None, None, None, None, r.randrange(12)]),
    )


def random_world(r: Random) -> World:
    block_size = r.choice([1, 4, 4, 16])
    budget = r.choice([1, 3, 8, 24, 24, 256])
    return World(
        block_size,
        blocks=max(1, r.choice([16, 30, 45, 45, 64, 64, 100]) // block_size),
        max_positions=r.choice([40, 1000]),
        options=SchedulerOptions(
            token_budget=budget,
            max_sequences=min(budget, r.choice([1, 3, 16, 16])),
            prefill_beside_decode=r.choice([None, None, 1, 7]),
            watermark=r.choice([0.0, 0.1]),
            prefix_cache=r.choice([True, False]),
        ),
        while_running=r.choice([True, False]),
        broken_steps=r.choice([frozenset(), frozenset(), frozenset(), frozenset({2, 7})]),
    )


class Broken(Exception):
    pass


@dataclass
class Play:
    """One schedule on its way."""

    world: World
    jobs: list[Job]
    prefix_dir: str | None = None
    expected: dict[int, Answer] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    endings: dict[int, str] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        model = FakeModel(self.world.max_positions, calls=self.run_model)
        self.engine = FakeEngine(
            self.world.blocks, self.world.block_size, model, self.world.options, self.prefix_dir
        )
        self.now = 0
        self.acted = True
        self.ids: dict[int, int] = {}  # of the jobs

    def act(self) -> None:
        """What the callers do at this time."""
        self.acted = True
        for i, job in enumerate(self.jobs):
            since = self.now - job.arrives
            if since == 0:
                self.add(i, job)
            if since >= 0 and since == job.aborted and self.engine.abort(self.ids[i]):
                self.aborted.add(self.ids[i])

    def add(self, i: int, job: Job) -> None:
        if len(job.prompt) > self.world.max_positions:
            with pytest.raises(PromptError, match="prompt of at most"):
                self.engine.add(job.prompt, job.params, job.limits)
            job = Job(**{**job.__dict__, "prompt": job.prompt[: self.world.max_positions]})
        self.ids[i] = self.engine.add(
            job.prompt,
            job.params,
            job.limits,
            adapter=job.adapter,
            max_drafts=job.max_drafts,
            keep_prefix=job.keep_prefix,
        )
        self.expected[self.ids[i]] = alone(
            job.prompt,
            job.params,
            job.limits,
            adapter=job.adapter,
            max_positions=self.world.max_positions,
            pool_positions=self.world.blocks * self.world.block_size,
        )

    def run_model(self, batch: StepBatch) -> None:
        if self.world.while_running and not self.acted:
            self.act()
        assert len(batch.token_ids) <= self.world.options.token_budget
        assert batch.positions.max() < self.world.max_positions
        if self.now in self.world.broken_steps:
            raise Broken

    def hear(self, events: list[Event]) -> None:
        for event in events:
            assert event.request_id not in self.endings, "nothing comes after the end"
            if isinstance(event, NewToken):
                self.tokens.setdefault(event.request_id, []).append(event.token_id)
            elif isinstance(event, Finished):
                self.endings[event.request_id] = event.reason
            else:
                self.endings[event.request_id] = type(event.error).__name__

    def play(self) -> None:
        while self.now < 8 or self.engine.has_work:
            self.acted = False
            if not self.world.while_running:
                self.act()
            self.hear(self.engine.step())
            if not self.acted:
                self.act()  # nothing ran
            self.now += 1
            assert self.now < 2000, "the engine stands still"
        self.check()

    def check(self) -> None:
        assert self.endings.keys() == self.expected.keys()
        for id, expected in self.expected.items():
            tokens = self.tokens.get(id, [])
            if self.endings[id] in ("abort", "Broken"):
                assert id in self.aborted or self.endings[id] == "Broken"
                assert tokens == expected.tokens[: len(tokens)]
            else:
                assert (tokens, self.endings[id]) == (expected.tokens, expected.ending)
            self.seen[self.endings[id]] += 1
        stats = self.engine.stats()
        assert (stats.waiting, stats.running, stats.used_blocks) == (0, 0, 0)
        self.seen["preemption"] += stats.preemptions
        self.seen["reused"] += stats.reused_tokens
        self.seen["disk"] += stats.disk_tokens
        self.seen["rejected"] += stats.drafted_tokens - stats.accepted_drafts
        self.seen["accepted"] += stats.accepted_drafts
        self.seen["copy"] += self.engine.pool.copies
        self.seen["tokens"] += sum(map(len, self.tokens.values()))
        self.seen["steps"] += self.now


SEEN: Counter[str] = Counter()
ENDINGS = ("stop", "length", "context", "abort", "SamplingError", "PoolFullError", "Broken")
MUST_HAPPEN = (*ENDINGS, "preemption", "copy", "reused", "rejected", "accepted", "disk")


# True randomness keeps examples rich, which count here; use_true_random=False shrinks a failure.
@hypothesis.settings(max_examples=600 * int(os.environ.get("BITNET_TEST_SCHEDULES", "1")))
@hypothesis.given(st.randoms(use_true_random=True))
def schedules(r: Random) -> None:
    world = random_world(r)
    with tempfile.TemporaryDirectory() as directory:
        for prefix_dir in r.choice([[None], [None], [directory] * 3]):  # restarts
            jobs = [random_job(r) for _ in range(r.randint(2, 8))]
            play = Play(world, jobs, prefix_dir)
            play.play()
            play.engine.close()
            SEEN.update(play.seen)


@pytest.mark.slow
def test_random_schedules_change_no_token() -> None:
    """Joins, aborts, preemptions, prefix hits, drafts, chunks, failures, full pools, restarts."""
    SEEN.clear()
    schedules()
    rare = [what for what in MUST_HAPPEN if SEEN[what] < 40]
    assert not rare, f"hardly any {rare}: {dict(SEEN)}"


# On real models -------------------------------------------------------------------------------

# The first runs fused, the second is composed of single ops.
MODELS = ("bitnet-offline", "llama3-8b-like")
LIMITS = Limits(12)
PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, repetition_penalty=1.2, seed=9),
)


def make_model(name: str) -> Any:
    model = tiny_model(SMALL[name])
    if name == MODELS[1]:
        model.run_as = "ops"
    return model


SUBJECTS = {name: make_model(name) for name in MODELS}
# Beginnings in common, a text that repeats itself, one token, more than a block.
_BASE = random_ids(3, 40).tolist()
PROMPTS = (_BASE[:20], _BASE[:33], _BASE[:18] + [7, 7], [5, 6, 7, 8] * 6, [11], _BASE)
ALONE: dict[tuple[str, str, int, int], list[int]] = {}


def alone_on(name: str, kv_dtype: torch.dtype, prompt: int, params: int) -> list[int]:
    key = name, str(kv_dtype), prompt, params
    if key not in ALONE:
        engine = Engine(SUBJECTS[name], kv_dtype=kv_dtype)
        (generation,) = engine.generate([PROMPTS[prompt]], PARAMS[params], LIMITS)
        ALONE[key] = generation.token_ids
    return ALONE[key]


def pool_of(model: Any, kv_dtype: torch.dtype, block_size: int, positions: int) -> float:
    """MiB of a pool for so many positions, in whole blocks."""
    block = bytes_of_block(model.config, block_size, kv_dtype)
    return -(-positions // block_size) * block / 2**20 * 1.0001


@st.composite
def real_schedules(draw: st.DrawFn) -> dict[str, Any]:
    """When requests come and go, and what they share."""
    jobs = draw(
        st.lists(
            st.tuples(
                st.integers(0, len(PROMPTS) - 1),
                st.integers(0, len(PARAMS) - 1),
                st.integers(0, 8),  # the step before which it comes
                st.one_of(st.none(), st.none(), st.integers(0, 10)),  # ... and is aborted
                st.sampled_from([0, 3, "auto"]),  # drafts
            ),
            min_size=1,
            max_size=7,
        )
    )
    return {
        "jobs": jobs,
        "block_size": draw(st.sampled_from([16, 32, 64, 128])),
        "token_budget": draw(st.sampled_from([8, 32, 256])),
        "prefix_cache": draw(st.booleans()),
        # from a pool that one request fills to one with room for all
        "positions": draw(st.sampled_from([64, 128, 1024])),
    }


@pytest.mark.parametrize("kv_dtype", KV_DTYPES.values(), ids=KV_DTYPES)
@pytest.mark.parametrize("name", MODELS)
@hypothesis.settings(max_examples=60)
@hypothesis.given(schedule=real_schedules())
def test_tokens_of_real_models_do_not_depend_on_the_schedule(
    name: str, kv_dtype: torch.dtype, schedule: dict[str, Any]
) -> None:
    model = SUBJECTS[name]
    size = schedule["block_size"]
    engine = Engine(
        model,
        kv_dtype=kv_dtype,
        block_size=size,
        kv_cache_mb=pool_of(model, kv_dtype, size, schedule["positions"]),
        scheduling=SchedulerOptions(
            token_budget=schedule["token_budget"],
            max_sequences=8,
            prefix_cache=schedule["prefix_cache"],
        ),
    )
    jobs = dict(enumerate(schedule["jobs"]))
    ids: dict[int, int] = {}
    tokens: dict[int, list[int]] = {}
    endings: dict[int, str] = {}
    for step in range(2000):
        for job, (prompt, params, comes, _, drafts) in jobs.items():
            if comes == step:
                ids[job] = engine.add(PROMPTS[prompt], PARAMS[params], LIMITS, max_drafts=drafts)
                tokens[ids[job]] = []
        for job, (_, _, comes, goes, _) in jobs.items():
            if goes is not None and step == comes + goes:
                engine.abort(ids[job])
        for event in engine.step():
            if isinstance(event, NewToken):
                tokens[event.request_id].append(event.token_id)
            elif isinstance(event, Finished):
                endings[event.request_id] = event.reason
            else:
                raise event.error
        if step > 8 and not engine.has_work:
            break
    assert len(endings) == len(jobs)
    for job, (prompt, params, *_) in jobs.items():
        expected, found = alone_on(name, kv_dtype, prompt, params), tokens[ids[job]]
        if endings[ids[job]] == "abort":
            assert found == expected[: len(found)]
        else:
            assert found == expected, job
    assert engine.stats().used_blocks == 0
