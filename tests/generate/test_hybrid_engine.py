"""Engines over recurrent states: the same tokens whatever runs beside, whatever is kept.

Schedules are those of engine_schedules.py, with few slots and checkpoints.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bitnet_ops.generate.draft_choice import MAX_DRAFTS
from bitnet_ops.generate.engine import Engine
from bitnet_ops.generate.request import Limits
from bitnet_ops.generate.sampling import SamplingParams
from bitnet_ops.generate.scheduler import SchedulerOptions
from bitnet_ops.models import Decoder
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.kv_config import CacheCapacityError, kept_of
from bitnet_ops.nn.state_pool import MAX_KEPT_DRAFTS, slot_bytes
from engine_schedules import Form, alone, run_schedule
from hybrid_models import hybrid

SCHEDULES = 2000 if os.environ.get("BITNET_CI_ALL") == "1" else 60
VOCAB = 321
FORM = Form(VOCAB, longest=60, block_sizes=(4, 16), positions=(132, 132, 180, 6400))


@pytest.fixture(scope="module")
def model() -> Decoder:
    return hybrid("rotated", layers=4)


@pytest.mark.parametrize("part", range(2))
def test_schedules(
    model: Decoder, part: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    total = dict.fromkeys(("accepted", "rejected", "reused", "preempted", "disk"), 0)
    for seed in range(part, SCHEDULES, 2):
        for name, count in run_schedule(model, FORM, seed, monkeypatch, tmp_path).items():
            total[name] += count
    assert min(total.values()) > 0, total  # or the schedules say nothing about it


def test_drafts_fit_what_a_slot_keeps() -> None:
    assert MAX_DRAFTS <= MAX_KEPT_DRAFTS


# Checkpoints --------------------------------------------------------------------------------------


def reused(engine: Engine, prompt: list[int], new_tokens: int = 4) -> tuple[int, list[int]]:
    """How many of a prompt's tokens were not computed anew, and what came."""
    before = engine.stats().reused_tokens
    tokens = engine.generate([prompt], SamplingParams(temperature=0), Limits(new_tokens))
    return engine.stats().reused_tokens - before, list(tokens[0].token_ids)


def options(every: int = 64) -> SchedulerOptions:
    return SchedulerOptions(checkpoint_tokens=every)


def test_a_conversation_goes_on_where_its_answer_ended(model: Decoder) -> None:
    engine = Engine(model, scheduling=options(), block_size=16)
    prompt = list(range(1, 101))
    _, answer = reused(engine, prompt)
    again, _ = reused(engine, [*prompt, *answer, 7, 8, 9])
    assert again == len(prompt) + len(answer) - 1  # the last token of an answer is not computed


def test_the_same_prompt_begins_at_its_last_block(model: Decoder) -> None:
    engine = Engine(model, scheduling=options(), block_size=16)
    prompt = list(range(1, 101))
    first = reused(engine, prompt)
    assert first[0] == 0 and reused(engine, prompt) == (96, first[1])


def test_where_texts_part_the_third_one_continues(model: Decoder) -> None:
    engine = Engine(model, scheduling=options(every=1000), block_size=16)
    shared = list(range(1, 91))
    texts = [shared + [300 + i] * 10 for i in range(3)]
    found = [reused(engine, text)[0] for text in texts]
    # the first one leaves a state behind its last block, which the second one does not share
    assert found == [0, 0, len(shared)]


def test_every_so_many_tokens_there_is_a_checkpoint(model: Decoder) -> None:
    engine = Engine(model, scheduling=options(every=32), block_size=16)
    prompt = [i % VOCAB for i in range(100)]
    reused(engine, prompt)
    for parted, expected in ((99, 96), (70, 64), (33, 32), (31, 0)):
        other = [*prompt[:parted], 320, 319, 318]
        assert reused(engine, other)[0] == expected
        engine.trim()
        reused(engine, prompt)


def test_checkpoints_are_bounded_and_the_least_used_goes(model: Decoder) -> None:
    two = 2 * slot_bytes(kept_of(model.config)) / 2**20
    engine = Engine(model, block_size=16, kv_cache_mb=40, prefix_cache_mb=two + 0.01)
    for i in range(5):
        reused(engine, [i + 1] * 50)
        assert engine.stats().checkpoints <= 2
    assert reused(engine, [5] * 50)[0] == 48 and reused(engine, [1] * 50)[0] == 0


@pytest.mark.parametrize("asked", range(2))
def test_requests_in_the_background_take_no_state_of_others(model: Decoder, asked: int) -> None:
    two = 2 * slot_bytes(kept_of(model.config)) / 2**20
    engine = Engine(model, block_size=16, kv_cache_mb=40, prefix_cache_mb=two + 0.01)
    turns = [[i + 1] * 10 for i in range(2)]  # shorter than a block: one state each
    for turn in turns:
        reused(engine, turn, 1)
    for i in range(5):
        engine.add([i + 9] * 10, limits=Limits(1), keep_prefix=False)
        while engine.has_work:
            engine.step()
    # one of them alone, for its new state takes the place of the other
    assert reused(engine, [*turns[asked], 99], 1)[0] == 10


def test_other_weights_find_no_states(model: Decoder) -> None:
    engine = Engine(model, scheduling=options(), block_size=16)
    prompt = list(range(1, 60))
    reused(engine, prompt)
    model.model.norm.weight.mul_(1.0)  # counts as a change
    assert reused(engine, prompt)[0] == 0


def test_more_requests_than_slots_wait(model: Decoder) -> None:
    engine = Engine(model, block_size=16, kv_cache_mb=40)
    engine._plan.sizes = engine._plan.sizes._replace(slots=2)
    prompts = [[i + 1] * 20 for i in range(6)]
    params, limits = SamplingParams(temperature=0), Limits(5)
    wanted = [alone(model, prompt, params, limits) for prompt in prompts]
    assert [list(g.token_ids) for g in engine.generate(prompts, params, limits)] == wanted


def test_a_budget_without_room_for_a_state_is_named(model: Decoder) -> None:
    with pytest.raises(ValueError, match=r"at least a block's .* and a state's .* MiB, got 0.1"):
        Engine(model, kv_cache_mb=0.1)


# Caches without an engine -------------------------------------------------------------------------


def test_a_cache_forks_but_does_not_go_back(model: Decoder) -> None:
    ids = torch.arange(1, 31).view(1, -1)
    cache = KVCache(model.config, 1, 64, torch.float32)
    model(ids[:, :20], cache)
    twin = cache.fork()
    whole = model(ids[:, 20:], cache)
    assert torch.equal(model(ids[:, 20:], twin), whole)
    with pytest.raises(CacheCapacityError, match="cannot go back: fork the cache"):
        cache.truncate(10)
    cache.clear()
    assert torch.equal(model(ids, cache), model(ids))


def test_a_saved_cache_has_its_states(model: Decoder, tmp_path: Any) -> None:
    ids = torch.arange(1, 31).view(1, -1)
    cache, other = (KVCache(model.config, 1, 64, torch.float32) for _ in range(2))
    model(ids[:, :20], cache)
    cache.save(tmp_path / "cache.safetensors")
    other.restore(tmp_path / "cache.safetensors")
    assert torch.equal(model(ids[:, 20:], cache), model(ids[:, 20:], other))
