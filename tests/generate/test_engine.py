"""The engine: what requests, runs, threads and consumers get, on models that count and real ones.

Random schedules are test_schedules.py's, threads and Ctrl-C test_engine_threads.py's; who computes
how much in which step, test_scheduler.py's.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import bitnet_ops
import bitnet_ops.generate.engine_memory as engine_memory
from bitnet_ops import _runtime, machine
from bitnet_ops.generate.draft_choice import DraftHeadError
from bitnet_ops.generate.engine import (
    Engine,
    Event,
    Failed,
    Finished,
    Generation,
    Limits,
    PromptError,
    SamplingParams,
    SchedulerOptions,
)
from bitnet_ops.generate.sampling import SamplingError
from bitnet_ops.models import Decoder
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.kv_config import KV_DTYPES, bytes_of_block
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.nn.lora import LoraError
from counting_model import LONG, Counting, answers, drain, used
from isa_control import ISAS, forced_isa, torch_threads
from paged_fake import VOCAB as FAKE_VOCAB
from paged_fake import FakeEngine, FakeModel
from tiny_models import SMALL, tiny_model


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


# Answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "limits", "expected"),
    [
        ([3, 7], Limits(5), Generation([8, 9, 10, 11, 12], "length")),
        ([3, 7], Limits(1), Generation([8], "length")),
        ([1], Limits(0), Generation([], "length")),
        ([7], Limits(5, frozenset({10, 49})), Generation([8, 9], "stop", stop_reason=10)),
        ([9], Limits(5, frozenset({10, 49})), Generation([], "stop", stop_reason=10)),
        ([3], Limits(4, frozenset({10, 49})), Generation([4, 5, 6, 7], "length")),
        ([0] * 37, Limits(100), Generation([1, 2, 3, 4], "context")),
        ([5] * 40, Limits(100), Generation([6], "context")),  # a full prompt has a next token
    ],
)
def test_answers(prompt: list[int], limits: Limits, expected: Generation) -> None:
    assert Engine(Counting()).generate([prompt], None, limits) == [expected]


def test_nothing_asked_nothing_run() -> None:
    engine = Engine(model := Counting())
    assert engine.step() == [] and not engine.has_work
    id = engine.add([1], limits=Limits(0))
    assert engine.has_work and engine.step() == [Finished(id, "length")]
    assert model.calls == [] and not engine.has_work


def test_calls_are_one_prefill_in_chunks_and_single_steps() -> None:
    engine = Engine(model := Counting(), prefill_chunk=4)
    engine.generate([list(range(6))], None, Limits(3))
    assert model.calls == [([[0, 1, 2, 3]], [0]), ([[4, 5]], [4]), ([[6]], [6]), ([[7]], [7])]


def test_a_batch_retires_rows_one_by_one() -> None:
    engine = Engine(model := Counting())
    limits = Limits(4, frozenset({12, 30}))
    generations = engine.generate([[9], [1, 2], [29], [20]], None, limits)
    assert [g.token_ids for g in generations] == [[10, 11], [3, 4, 5, 6], [], [21, 22, 23, 24]]
    assert [g.finish_reason for g in generations] == ["stop", "length", "stop", "length"]
    assert model.calls[1:] == [
        ([[10], [3], [21]], [1, 2, 1]),
        ([[11], [4], [22]], [2, 3, 2]),
        ([[5], [23]], [4, 3]),
    ]


def test_params_per_prompt_and_seeds() -> None:
    params = [SamplingParams(), SamplingParams(temperature=3.0, seed=4)]
    engine = Engine(Counting())
    both = engine.generate([[1], [1]], params, Limits(6))
    assert both[0] == Generation([2, 3, 4, 5, 6, 7], "length", None)
    assert both[1] == engine.generate([[1]], params[1], Limits(6))[0] and both[1].seed == 4
    (fresh,) = engine.generate([[1]], SamplingParams(temperature=3.0), Limits(6))
    again = SamplingParams(temperature=3.0, seed=fresh.seed)
    assert engine.generate([[1]], again, Limits(6)) == [fresh], "the seed chosen repeats the run"


def test_a_consumer_may_step_cancel_and_leave() -> None:
    run = Engine(model := Counting()).start([[1], [5]], None, Limits(10))
    assert model.calls == [], "nothing is computed before the first step"
    assert run.step() == [(0, 2), (1, 6)] and len(model.calls) == 1
    run.cancel(0, "enough")
    assert run.step() == [(1, 7)]
    assert run.generations[0] == Generation([2], "enough")
    assert next(iter(run)) == (1, 8) and next(iter(run)) == (1, 9), "after a break it goes on"
    run.close()
    assert run.step() == [] and not run.active and run.generations[1].finish_reason == ""


def test_timing_counts_tokens() -> None:
    run = Engine(Counting()).start([[1, 2, 3], [5]], None, Limits(3, frozenset({8})))
    for _ in run:
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    t = run.timing
    assert (t.prompt_tokens, t.new_tokens, t.reused_tokens) == (4, 5, 0)
    assert t.decoded_tokens == 4, "two decode steps of two rows, the stop id among them"
    assert t.first_token_s > 0 and t.decode_s > 0
    assert t.decode_tokens_per_s == pytest.approx(4 / t.decode_s)


# What is refused --------------------------------------------------------------------------------

NAN = float("nan")
# The arguments of add, the exception and its text: nothing of these reaches a step of others.
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"prompt": []}, PromptError, "at least one token, got an empty one"),
    ({"prompt": [1, 50]}, PromptError, "ids from 0 to 49, got 1 to 50"),
    ({"prompt": [-1, 3]}, PromptError, "got -1 to 3"),
    ({"prompt": [2**70]}, PromptError, "ids from 0 to 49"),
    ({"prompt": [1] * 41}, PromptError, "at most 40 tokens .*got 41"),
    ({"prompt": "text"}, TypeError, "token ids as a list of integers, got 'text'"),
    ({"prompt": [1, 2.5]}, TypeError, "got 2.5 .float. at 1"),
    ({"prompt": [True]}, TypeError, "got True .bool. at 0"),
    ({"prompt": [[1], [2]]}, TypeError, "list of integers"),
    ({"prompt": torch.tensor([1.5])}, TypeError, "list of integers"),
    ({"prompt": None}, TypeError, "got None"),
    ({"params": {"temperature": 1.0}}, TypeError, "params as SamplingParams"),
    ({"params": SamplingParams(logit_bias={50: 1.0})}, SamplingError, "ids below 50, got 50"),
    ({"limits": 5}, TypeError, "limits as Limits, got 5"),
    ({"adapter": "x"}, LoraError, "a model with adapters"),
    ({"consumer": []}, TypeError, "consumer as a function"),
    ({"constraint": {1, 2}}, TypeError, r"constraint with mask\(\) and add\(token\), got"),
    ({"max_drafts": -1}, ValueError, "max_drafts .* None or an integer at least 0, got -1"),
    ({"max_drafts": 1.5}, ValueError, "max_drafts"),
    ({"max_drafts": "many"}, ValueError, "max_drafts"),
    ({"max_drafts": True}, ValueError, "max_drafts"),
    ({"max_drafts": "head"}, DraftHeadError, "expected max_drafts .* draft head.* --draft-from"),
    ({"keep_prefix": 1}, TypeError, "keep_prefix as bool"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), REFUSED, ids=str)
def test_what_cannot_be_run_is_refused_when_it_comes(
    wrong: dict[str, Any], kind: type[Exception], message: str
) -> None:
    engine = Engine(Counting())
    running = engine.add([1], limits=Limits(3))
    with pytest.raises(kind, match=message) as caught:
        engine.add(**{"prompt": [1], **wrong})
    assert "\n" not in str(caught.value)
    assert answers(drain(engine)) == {running: ([2, 3, 4], "length")}


# As far as an option may go: together in the steps of a request that has none of them.
EXTREMES: list[SamplingParams] = [
    SamplingParams(temperature=10**300, seed=1),
    SamplingParams(temperature=5e-324, seed=1),
    SamplingParams(temperature=1, top_k=2**31 - 1, top_p=5e-324, min_p=1, seed=2**63 - 1),
    SamplingParams(temperature=1, repetition_penalty=2.0**-126, seed=0),
    SamplingParams(repetition_penalty=2.0**127),
    SamplingParams(frequency_penalty=2, presence_penalty=-2, logit_bias={0: 100, 49: -100}),
    SamplingParams(logit_bias=dict.fromkeys(range(50), 100), logprobs=20),
    SamplingParams(logit_bias={}, logprobs=0),
]


def test_values_at_the_edge_of_their_ranges_disturb_nobody() -> None:
    engine = Engine(Counting())
    plain = engine.add([1], limits=Limits(6))
    others = [engine.add([7], p, Limits(6), max_drafts=10**30) for p in EXTREMES]
    found = answers(drain(engine))
    assert found[plain] == ([2, 3, 4, 5, 6, 7], "length")
    for id in others:  # a request's logits may overflow by its own penalty: it ends alone
        assert found[id][1] == "length" or isinstance(found[id][1], SamplingError)


def test_every_argument_has_rows_of_its_own() -> None:
    rows = {
        Engine.add: {name for wrong, _, _ in REFUSED for name in wrong},
        Limits: {name for wrong in BAD_LIMITS for name in wrong},
    }
    for holder, names in rows.items():
        assert names == set(inspect.signature(holder).parameters) - {"self"}
    extremes = {f.name for p in EXTREMES for f in fields(p) if getattr(p, f.name) != f.default}
    assert extremes == {field.name for field in fields(SamplingParams)}


BAD_LIMITS: list[dict[str, Any]] = [
    *({"max_new_tokens": bad} for bad in (-1, 1.5, True, "3", None)),
    *({"stop_ids": bad} for bad in (3, "ab", [1.5], None)),
]


@pytest.mark.parametrize("wrong", BAD_LIMITS, ids=str)
def test_limits_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=f"engine: expected {next(iter(wrong))} "):
        Limits(**wrong)


def test_lists_of_prompts_and_params_are_checked() -> None:
    engine = Engine(Counting())
    for wrong, kind, message in (
        ((([[1]] * 3), [SamplingParams()] * 2), ValueError, "params for 3 prompts, got 2"),
        (([[1]], [3]), TypeError, "params as SamplingParams"),
        (("text",), TypeError, "prompts as lists of token ids"),
        (([],), PromptError, "at least one prompt"),
        (([[1], []],), PromptError, "an empty one"),
    ):
        with pytest.raises(kind, match=message):  # type: ignore[arg-type]
            engine.start(*wrong)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_chunk": 0}, "prefill_chunk an integer above 0"),
        ({"kv_cache_mb": 0}, "kv_cache_mb above 0"),
        ({"kv_cache_mb": 1e-9}, "kv_cache_mb of at least a block's"),
        ({"kv_cache_mb": NAN}, "kv_cache_mb above 0 and .*, got nan"),
        ({"prefix_cache_mb": -1}, "prefix_cache_mb at least 0"),
        ({"kv_dtype": torch.int16}, "engine: expected kv_dtype"),
        ({"prefix_dir_mb": 0}, "prefix_dir_mb above 0"),
        ({"prefix_dir_mb": NAN}, "prefix_dir_mb above 0 and .*, got nan"),
    ],
)
def test_options_of_an_engine_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(Counting(), **options)


def test_a_model_without_step_is_refused() -> None:
    for wrong in (object(), Counting):  # a class instead of one of its models
        with pytest.raises(TypeError, match=r"expected a model with config and step\(batch"):
            Engine(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a model with identity.* leave out prefix_dir"):
        Engine(Counting(), prefix_dir="x")


# What fails -------------------------------------------------------------------------------------


def test_broken_logits_end_their_request_alone() -> None:
    engine = Engine(Counting(broken=42))
    healthy = engine.start([[1]], limits=Limits(30))
    healthy.step()
    broken = engine.start([[3], [38]], limits=Limits(30))
    with pytest.raises(SamplingError, match="expected finite logits, got a NaN"):
        list(broken)
    assert not broken.active and broken.step() == []
    assert broken.generations[1].token_ids == [39, 40, 41, 42], "those before are good"
    assert [token for _, token in healthy] == list(range(3, 32))
    assert used(engine) == 0


def test_a_failed_step_fails_the_requests_in_it_and_the_engine_goes_on() -> None:
    def fail(batch: StepBatch) -> None:
        if len(model.calls) in (2, 5):
            raise MemoryError("no memory")

    options = SchedulerOptions(max_sequences=2)
    engine = Engine(model := Counting(before=fail), scheduling=options)
    ids = [engine.add([i], limits=Limits(4)) for i in (1, 11, 21)]
    found = answers(drain(engine))
    for id, first in ((ids[0], 2), (ids[1], 12)):
        tokens, error = found[id]
        assert tokens == [first] and isinstance(error, MemoryError)
    tokens, error = found[ids[2]]
    assert tokens == [22, 23] and isinstance(error, MemoryError), "it waited, and met the next one"
    assert used(engine) == 0 and engine.stats().cached_blocks == 0, "nothing of it is found again"
    with pytest.raises(MemoryError):
        model.calls.clear()
        engine.generate([[1]], limits=Limits(5))
    model.before = None
    assert engine.generate([[1]], limits=Limits(3))[0].token_ids == [2, 3, 4]


def test_a_request_whose_adapter_is_removed_ends_alone() -> None:
    class Forgetting:
        names = {"a", "b"}

        def check(self, name: str) -> None:
            if name not in self.names:
                raise LoraError(f"lora: expected the name of a loaded adapter, got {name!r}")

    model = FakeModel(logits=periodic)
    model.adapters = Forgetting()  # type: ignore[assignment]
    engine = FakeEngine(model=model)
    ids = [engine.add([1, 2], limits=Limits(4), adapter=name) for name in ("a", "b", "a")]
    events = engine.step()
    model.adapters.names.remove("a")
    found = answers(events + drain(engine))
    assert found[ids[1]] == ([3, 4, 5, 6], "length")
    for id in (ids[0], ids[2]):
        assert found[id][0] == [3] and isinstance(found[id][1], LoraError)


def test_a_defect_of_the_engine_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Counting())
    events: list[Event] = []
    ids = [engine.add([i], consumer=events.append) for i in (1, 2)]
    engine.step()
    assert engine._core.memory is not None
    with monkeypatch.context() as patch:
        patch.setattr(engine._core.memory.scheduler, "computed", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert {id for id, (_, e) in answers(events).items() if type(e) is ZeroDivisionError} == {*ids}
    assert engine.generate([[1]], limits=Limits(3))[0].token_ids == [2, 3, 4]
    assert used(engine) == 0 and not engine.has_work


def test_a_full_pool_fails_the_one_that_cannot_fit() -> None:
    engine = FakeEngine(blocks=6, model=FakeModel(logits=periodic))
    long = engine.add([1] * 25, limits=Limits(5))
    grows = engine.add([1, 2, 3, 4], limits=Limits(50))
    fits = engine.add([4, 5, 6, 7], limits=Limits(12))
    found = answers(drain(engine))
    assert str(found[long][1]) == (
        "KV pool: expected 7 free blocks, got 6 of 6; wait until other sequences end, shorten this "
        "one or make the pool larger (kv_cache_mb, --kv-cache-mb)"
    )
    assert found[fits] == ([i % FAKE_VOCAB for i in range(8, 20)], "length")
    assert len(found[grows][0]) == 21, "24 positions hold 4 + 20 tokens"
    assert str(found[grows][1]).startswith("KV pool: expected 1 free blocks, got 0 of 6")


def periodic(ids: Tensor) -> Tensor:
    return torch.nn.functional.one_hot((ids + 1) % FAKE_VOCAB, FAKE_VOCAB).float() * 9


# Prefixes, memory, weights ----------------------------------------------------------------------


def new_tokens(engine: FakeEngine, prompt: list[int], n: int = 1, **options: Any) -> list[int]:
    """What the model was given of a prompt that runs alone."""
    at = len(engine.fake.batches)
    engine.add(prompt, limits=Limits(n), **options)
    drain(engine)
    return engine.fake.batches[at].token_ids.tolist()


def test_what_is_known_is_not_computed_again() -> None:
    engine = FakeEngine()
    prompt = [1, 2, 3] * 8  # six whole blocks
    assert [len(new_tokens(engine, prompt)) for _ in range(3)] == [24, 1, 1]
    assert new_tokens(engine, [*prompt, 5, 6]) == [5, 6]
    assert len(new_tokens(engine, prompt, adapter="a")) == 24, "keys and values of its own"
    fresh = FakeEngine(prefix_cache=False)
    assert [len(new_tokens(fresh, prompt)) for _ in range(2)] == [24, 24]
    assert fresh.stats().cached_blocks == 0


def test_answers_are_found_again_too() -> None:
    """The next turn of a conversation begins with the tokens of the one before."""
    engine = FakeEngine(model=FakeModel(logits=periodic))
    prompt, answer = [1, 2, 3, 4], [i % FAKE_VOCAB for i in range(5, 25)]
    new_tokens(engine, prompt, 20)
    assert new_tokens(engine, [*prompt, *answer, 1, 2]) == [answer[-1], 1, 2]
    assert new_tokens(engine, [*prompt, *answer[:9], 0]) == [0], "a copied block begins alike"
    assert new_tokens(engine, [*prompt, *answer, 1, 2]) == [2], "the original is still there"


def test_many_prompts_one_after_the_other_keep_a_bounded_prefix_cache() -> None:
    block = bytes_of_block(LONG, 64, torch.bfloat16) / 2**20
    longest = -(-LONG.max_position_embeddings // 64)
    cases: list[tuple[dict[str, Any], int]] = [
        ({"prefix_cache_mb": 5 * block}, 5),
        ({"prefix_cache_mb": 0}, 0),
        ({"kv_cache_mb": 30 * block}, 30),
        ({"kv_cache_mb": 30 * block, "prefix_cache_mb": 7 * block}, 7),
        ({}, max(longest, int(256 / block))),
    ]
    for options, maximum in cases:
        engine = Engine(Counting(LONG), **options)
        for number in range(40):
            engine.generate([[number, 1] * 40], limits=Limits(1))  # of two blocks
            assert engine.stats().cached_blocks <= maximum
        assert engine.stats().cached_blocks == min(maximum, 80), "as much as it may"


@pytest.mark.parametrize(
    ("budget", "available", "blocks"),
    [
        (1000, 4000, 1000),  # a quarter of what there is
        (1, 4000, None),  # one sequence of the whole context, where there is room
        (1, 8, 6),  # and what there is room for, where there is not
        (0, 0, 1),
    ],
)
def test_the_pool_keeps_within_the_memory_there_is(
    monkeypatch: pytest.MonkeyPatch, budget: int, available: int, blocks: int | None
) -> None:
    block = bytes_of_block(LONG, 64, torch.bfloat16)
    memory = {"total": None, "limit": None, "available": available * block}
    monkeypatch.setattr(machine, "memory_bytes", lambda: memory)
    monkeypatch.setattr(machine, "cache_budget", lambda: budget * block)
    longest = -(-LONG.max_position_embeddings // 64)
    assert Engine(Counting(LONG)).stats().blocks == (blocks or longest)


def test_a_pool_whose_addresses_are_refused_is_smaller_or_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refusing(config: Any, blocks: int, *form: Any, **options: Any) -> KVPool:
        if blocks > 8:
            raise MemoryError("refused")
        return KVPool(config, blocks, *form, **options)

    monkeypatch.setattr(engine_memory, "KVPool", refusing)
    engine = Engine(Counting(LONG))
    engine.generate([[1]], limits=Limits(1))
    assert 4 < engine.stats().blocks <= 8
    engine = Engine(Counting(LONG), kv_cache_mb=64)
    with pytest.raises(MemoryError, match=r"expected 6\d MiB of address space .*--kv-cache-mb"):
        engine.generate([[1]], limits=Limits(1))


def test_memory_is_taken_with_the_first_request_and_given_back() -> None:
    engine = Engine(Counting(), kv_cache_mb=2**20)  # a TiB of address space
    assert engine.stats().blocks > 10**6 and engine._core.memory is None
    aborted = engine.add([1])
    engine.abort(aborted)
    engine.trim()
    assert engine.step() == [Finished(aborted, "abort")]
    engine = Engine(Counting(), kv_cache_mb=2**20)
    began = time.perf_counter()
    engine.generate([[1]], limits=Limits(1))
    assert time.perf_counter() - began < 1
    assert engine._core.memory is not None
    pool, _, _ = engine._core.memory
    pool.key_pool[:, 0] = 1.0
    engine.trim()
    assert not pool.key_pool[:, 0].any(), "the system gives zeros"
    assert engine.stats().cached_blocks == 0


def test_a_copy_has_neither_requests_nor_memory() -> None:
    engine = Engine(Counting())
    engine.add([1, 2, 3])
    for twin in (copy.copy(engine), copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        assert engine.has_work and not twin.has_work
        assert twin.generate([[1]], limits=Limits(1))[0].token_ids == [2]


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


def test_a_change_that_torch_does_not_count_is_seen_after_trim() -> None:
    """As the class's documentation says of `.data`."""
    model = tiny_model(SMALL["bitnet-offline-untied"])
    engine = Engine(model)
    prompt, limits = list(range(2, 80)), Limits(6)
    engine.generate([prompt], limits=limits)
    before = model.weights_version()
    model.model.embed_tokens.weight.data.neg_()
    assert model.weights_version() == before, "torch counts it now: correct the pages"
    engine.trim()
    (found,) = engine.generate([prompt], limits=limits)
    (expected,) = Engine(model).generate([prompt], limits=limits)
    assert found == expected


# On real models -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["bitnet-odd-k", "falcon3-like", "demo"])
def model(request: pytest.FixtureRequest) -> Decoder:
    if request.param == "demo":
        return bitnet_ops.load().model
    return tiny_model(SMALL[request.param])


PROMPTS = [[0, 17, 30], [0, 99], [5], [0, 17, 30, 4, 8, 100, 200, 3, 250], list(range(60))]
MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.3, seed=3),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(temperature=1.2, top_k=20, min_p=0.02, seed=8),
]


def fresh(model: Any, kv_dtype: torch.dtype = torch.bfloat16) -> Engine:
    """An engine that finds nothing of earlier runs."""
    return Engine(model, kv_dtype=kv_dtype, scheduling=SchedulerOptions(prefix_cache=False))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES.values())
def test_a_row_is_what_it_is_alone(model: Decoder, kv_dtype: torch.dtype) -> None:
    """Batched == single, token for token, for every way of sampling and rows that end early."""
    engine, single = Engine(model, kv_dtype=kv_dtype), fresh(model, kv_dtype)
    limits = Limits(12, frozenset({13, 15}))
    together = engine.generate(PROMPTS, MIXED, limits)
    alone = [single.generate([p], m, limits)[0] for p, m in zip(PROMPTS, MIXED, strict=True)]
    assert together == alone
    assert engine.generate(PROMPTS[::-1], MIXED[::-1], limits)[::-1] == alone


@pytest.fixture
def bounding_kernels() -> Iterator[None]:
    """Those that bound logits, where the machine has them; its best ones may do without."""
    with forced_isa("avx512_vnni" if "avx512_vnni" in ISAS else _runtime.isa()):
        yield


@pytest.mark.usefixtures("bounding_kernels")
@pytest.mark.parametrize("drafts", [0, 3])
def test_bounds_of_logits_change_no_draw(drafts: int) -> None:
    """A text alone, among others, with drafts, and from the whole head."""
    model = bitnet_ops.load().model
    ways = [
        *(SamplingParams(temperature=t, seed=9) for t in (0.3, 0.7, 1.0, 1.5)),
        SamplingParams(),
        SamplingParams(temperature=0.9, top_k=20, seed=4),
    ]
    prompts = [[0, 17, 30, 17, 30, 17, 30, 5 + i % 3] for i in range(2 * len(ways))]
    bounded, step = [], model.step

    def texts(indices: Iterable[int]) -> list[Any]:
        engine = fresh(model)
        ids = [
            engine.add(prompts[i], ways[i % len(ways)], Limits(16), max_drafts=drafts)
            for i in indices
        ]
        found = answers(drain(engine))
        return [found[id] for id in ids]

    def watched(batch: StepBatch, pool: Any) -> torch.Tensor:
        logits = step(batch, pool)
        bounded.append(batch.draws is not None and bool((logits == -torch.inf).any()))
        return logits

    model.step = watched  # type: ignore[method-assign]
    everything = range(len(prompts))
    together, alone = texts(everything), [texts([i])[0] for i in everything]
    assert any(bounded) or "avx512_vnni" not in ISAS

    def whole(batch: StepBatch, pool: Any) -> torch.Tensor:
        return step(replace(batch, largest=0), pool)

    model.step = whole  # type: ignore[method-assign]
    expected = texts(everything)
    assert together == expected and alone == expected


@pytest.mark.parametrize("chunk", [1, 7, 59, 60, 1000])
def test_the_prefill_chunk_changes_nothing(model: Decoder, chunk: int) -> None:
    expected = Engine(model).generate([PROMPTS[-1]], None, Limits(4))
    assert Engine(model, prefill_chunk=chunk).generate([PROMPTS[-1]], None, Limits(4)) == expected


def test_turns_of_a_conversation_are_fresh_runs_that_compute_what_is_new(model: Decoder) -> None:
    """Going on, editing what was said, and breaking off."""
    engine, single = Engine(model), fresh(model)
    history, known = [0, 40, 41], 0
    for turn in range(4):
        run = engine.start([history], None, Limits(5))
        answer = [token for _, token in run]
        assert answer == single.generate([history], None, Limits(5))[0].token_ids
        assert run.timing.reused_tokens == known
        known = len(history) + 4  # the answer's last token has not been fed
        history = [*history, *answer, 60 + turn, 70]
    edited = [*history[:3], 9, 4]
    run = engine.start([edited], None, Limits(6))
    run.step()
    assert run.timing.reused_tokens == 3
    for prompt in (edited, [0, 1], [7, 7, 7]):
        assert engine.generate([prompt], None, Limits(6)) == single.generate(
            [prompt], None, Limits(6)
        )


def test_a_broken_request_of_a_real_model_ends_alone() -> None:
    """NaN logits of one among eight, in whose steps it takes part."""
    model = tiny_model(SMALL["bitnet-offline-untied"])
    bad = 250
    model.model.embed_tokens.weight[bad] = NAN
    engine = Engine(model)
    prompts = [[5, 6, 7, bad] if i == 3 else [i + 1, 5, 9] for i in range(8)]
    ids = [engine.add(prompt, limits=Limits(6)) for prompt in prompts]
    found = answers(drain(engine))
    assert isinstance(found[ids[3]][1], SamplingError) and found[ids[3]][0] == []
    for i in (0, 1, 2, 4, 5, 6, 7):
        (expected,) = Engine(model).generate([prompts[i]], limits=Limits(6))
        assert found[ids[i]] == (expected.token_ids, "length")
    assert used(engine) == 0


def test_what_fails_is_told_by_a_failed_event() -> None:
    engine = Engine(Counting(broken=3))
    id = engine.add([3])
    (event,) = engine.step()
    assert isinstance(event, Failed) and event.request_id == id
    assert isinstance(event.error, SamplingError)


def test_names_of_the_package() -> None:
    for kind in (Engine, Limits, Failed, SamplingParams, SchedulerOptions):
        assert getattr(bitnet_ops, kind.__name__) is kind
