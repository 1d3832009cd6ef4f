"""Engine.add, step and abort on real models: every request's tokens are those it has alone.

The scheduler itself is tested with a pool of integers (test_engine_core.py); here the pool holds
keys and values of every type, and the models are those that run fused and those that are composed.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_ops.generate.engine import Engine, Limits
from bitnet_ops.generate.request import Failed, Finished, NewToken
from bitnet_ops.generate.sampling import SamplingParams
from bitnet_ops.generate.scheduler import SchedulerOptions
from bitnet_ops.nn.kv_types import KV_DTYPES, bytes_of_block
from tiny_models import SMALL, random_ids, tiny_model

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
        model.fused_step = False
    return model


SUBJECTS = {name: make_model(name) for name in MODELS}
# Beginnings in common, a text that repeats itself, one token, more than a block.
_BASE = random_ids(3, 40).tolist()
PROMPTS = (_BASE[:20], _BASE[:33], _BASE[:18] + [7, 7], [5, 6, 7, 8] * 6, [11], _BASE)
ALONE: dict[tuple[str, str, int, int], list[int]] = {}


def alone(name: str, kv_dtype: torch.dtype, prompt: int, params: int) -> list[int]:
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
def schedules(draw: st.DrawFn) -> dict[str, Any]:
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
@settings(max_examples=60)
@given(schedule=schedules())
def test_tokens_do_not_depend_on_the_schedule(
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
        expected, found = alone(name, kv_dtype, prompt, params), tokens[ids[job]]
        if endings[ids[job]] == "abort":
            assert found == expected[: len(found)]
        else:
            assert found == expected, job
    assert engine.stats().used_blocks == 0


def test_a_broken_request_ends_alone() -> None:
    """NaN logits of one among eight, in whose steps it takes part."""
    model = tiny_model(SMALL["bitnet-offline-untied"])
    bad = 250
    model.model.embed_tokens.weight[bad] = float("nan")
    engine = Engine(model)
    prompts = [[5, 6, 7, bad] if i == 3 else [i + 1, 5, 9] for i in range(8)]
    ids = [engine.add(prompt, limits=Limits(6)) for prompt in prompts]
    tokens: dict[int, list[int]] = {i: [] for i in ids}
    failures = []
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, NewToken):
                tokens[event.request_id].append(event.token_id)
            elif isinstance(event, Failed):
                failures.append(event)
    assert [event.request_id for event in failures] == [ids[3]]
    assert "expected finite logits, got a NaN" in str(failures[0].error)
    assert tokens[ids[3]] == []
    for i in (0, 1, 2, 4, 5, 6, 7):
        (expected,) = Engine(model).generate([prompts[i]], limits=Limits(6))
        assert tokens[ids[i]] == expected.token_ids
    assert engine.stats().used_blocks == 0


def test_a_prompt_larger_than_the_pool_fails_with_the_blocks_it_needs() -> None:
    model = SUBJECTS[MODELS[0]]
    engine = Engine(
        model, block_size=16, kv_cache_mb=pool_of(model, torch.bfloat16, 16, 32)
    )  # of 2 blocks
    long, short = engine.add(_BASE, limits=Limits(2)), engine.add([1, 2], limits=Limits(2))
    events = []
    while engine.has_work:
        events += engine.step()
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert failed.request_id == long
    assert "expected 3 free blocks, got 2 of 2" in str(failed.error)
    assert Finished(short, "length") in events


def test_the_prefix_cache_spares_what_is_known() -> None:
    model = SUBJECTS[MODELS[0]]
    engine = Engine(model, block_size=16)
    for expected in (0, 39):  # all but the last of the 40 tokens
        id = engine.add(_BASE, limits=Limits(2))
        engine.step()
        assert engine._core.request(id).reused_tokens == expected
        while engine.has_work:
            engine.step()


def test_an_engine_with_requests_is_copied_without_them() -> None:
    engine = Engine(SUBJECTS[MODELS[0]])
    engine.add([1, 2, 3])
    twin = copy.copy(engine)
    assert engine.has_work
    assert not twin.has_work
