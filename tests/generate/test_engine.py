"""The engine on a model that counts (a mock), then on real ones.

What a batch, a chunk or a kept cache must not change. Whether logits are right is test_model.py's
matter; nothing here knows an op.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import bitnet_ops
from bitnet_ops.config import ModelConfig
from bitnet_ops.generate.engine import Engine, Generation, Limits, PromptError, Run
from bitnet_ops.generate.sampling import SamplingError, SamplingParams
from bitnet_ops.generate.scheduler import SchedulerOptions
from bitnet_ops.models import Decoder
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.nn.kv_types import KV_DTYPES
from isa_control import torch_threads
from tiny_models import SMALL, config_of, tiny_model

VOCAB = 50
CONFIG = dataclasses.replace(
    config_of(SMALL["bitnet-offline"]),
    vocab_size=VOCAB,
    max_position_embeddings=40,
    eos_token_ids=(),
)


class Counting:
    """A model whose best next token is the last one plus 1.

    It records every step: the new tokens of its sequences and where they begin.
    """

    config: ModelConfig = CONFIG

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], list[int]]] = []

    def step(self, batch: StepBatch, pool: KVPool) -> Tensor:
        ids = [part.tolist() for part in batch.token_ids.tensor_split(batch.query_start_loc[1:-1])]
        ends = batch.seq_lens.tolist()
        self.calls.append((ids, [end - len(new) for end, new in zip(ends, ids, strict=True)]))
        last = batch.token_ids[batch.logit_rows]
        return torch.nn.functional.one_hot((last + 1) % VOCAB, VOCAB).float() * 9


def generate(prompts: list[list[int]], n: int = 5, **limits: Any) -> list[Generation]:
    return Engine(Counting()).generate(prompts, None, Limits(n, **limits))


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    with torch_threads(1):
        yield


# On the counting model ------------------------------------------------------------------------


def test_counts_on() -> None:
    assert generate([[3, 7]]) == [Generation([8, 9, 10, 11, 12], "length")]
    assert generate([[3, 7]], 1) == [Generation([8], "length")]


def test_nothing_asked_nothing_run() -> None:
    engine = Engine(model := Counting())
    assert engine.generate([[1]], None, Limits(0)) == [Generation([], "length")]
    assert model.calls == []


def test_calls_are_one_prefill_and_single_steps() -> None:
    engine = Engine(model := Counting())
    engine.generate([[3, 7, 9]], None, Limits(3))
    assert model.calls == [([[3, 7, 9]], [0]), ([[10]], [3]), ([[11]], [4])]


def test_prefill_in_chunks() -> None:
    engine = Engine(model := Counting(), prefill_chunk=4)
    engine.generate([list(range(10))], None, Limits(1))
    assert [(len(ids[0]), at) for ids, at in model.calls] == [(4, [0]), (4, [4]), (2, [8])]


def test_stop_ids_end_and_are_left_out() -> None:
    stop = frozenset({10, 49})
    assert generate([[7]], stop_ids=stop) == [Generation([8, 9], "stop", stop_reason=10)]
    assert generate([[9]], stop_ids=stop) == [Generation([], "stop", stop_reason=10)]
    assert generate([[3]], 4, stop_ids=stop) == [Generation([4, 5, 6, 7], "length")]


def test_the_context_is_an_end_not_an_error() -> None:
    prompt = [0] * 37
    (generation,) = generate([prompt], 100)
    assert generation == Generation([1, 2, 3, 4], "context")
    (generation,) = generate([[5] * 40], 100)
    assert generation == Generation([6], "context"), "a full prompt still has a next token"


def test_a_batch_retires_rows_one_by_one() -> None:
    engine = Engine(model := Counting())
    limits = Limits(4, frozenset({12, 30}))
    generations = engine.generate([[9], [1, 2], [29], [20]], None, limits)
    assert [g.token_ids for g in generations] == [[10, 11], [3, 4, 5, 6], [], [21, 22, 23, 24]]
    assert [g.finish_reason for g in generations] == ["stop", "length", "stop", "length"]
    decodes = [(ids, at) for ids, at in model.calls[1:]]
    assert decodes == [
        ([[10], [3], [21]], [1, 2, 1]),
        ([[11], [4], [22]], [2, 3, 2]),
        ([[5], [23]], [4, 3]),
    ]


def test_streaming_gives_tokens_as_they_come() -> None:
    run = Engine(model := Counting()).start([[1], [5]], None, Limits(2))
    assert model.calls == [], "nothing is computed before the first step"
    assert run.step() == [(0, 2), (1, 6)]
    assert len(model.calls) == 1 and run.active
    assert run.step() == [(0, 3), (1, 7)]
    assert not run.active and list(run) == []


def test_a_consumer_may_stop_early_or_cancel_a_row() -> None:
    run = Engine(Counting()).start([[1], [5]], None, Limits(10))
    run.step()
    run.cancel(0, "enough")
    assert run.step() == [(1, 7)]
    assert run.generations[0] == Generation([2], "enough")
    assert run.generations[1].finish_reason == ""


def test_timing_counts_tokens() -> None:
    run = Engine(Counting()).start([[1, 2, 3], [5]], None, Limits(3, frozenset({8})))
    for _ in run:
        pass
    t = run.timing
    assert (t.prompt_tokens, t.new_tokens, t.reused_tokens) == (4, 5, 0)
    assert t.decoded_tokens == 4, "two decode steps of two rows, the stop id among them"
    assert t.first_token_s > 0 and t.decode_s > 0
    assert t.decode_tokens_per_s == pytest.approx(4 / t.decode_s)


def test_params_per_prompt_and_seeds() -> None:
    params = [SamplingParams(), SamplingParams(temperature=3.0, seed=4)]
    engine = Engine(Counting())
    both = engine.generate([[1], [1]], params, Limits(6))
    assert both[0] == Generation([2, 3, 4, 5, 6, 7], "length", None)
    assert both[1] == engine.generate([[1]], params[1], Limits(6))[0]
    assert both[1].seed == 4
    with pytest.raises(ValueError, match="params for 3 prompts, got 2"):
        engine.start([[1]] * 3, params)


BAD_PROMPTS: list[tuple[list[list[int]], str]] = [
    ([], "at least one prompt"),
    ([[]], "at least one token, got an empty one"),
    ([[1], [50]], "from 0 to 49, got 50 to 50"),
    ([[-1, 3]], "got -1 to 3"),
    ([[1] * 41], "at most 40 tokens .*got 41"),
]


@pytest.mark.parametrize(("prompts", "message"), BAD_PROMPTS, ids=str)
def test_bad_prompts(prompts: list[list[int]], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        Engine(Counting()).start(prompts)


def test_bad_limits() -> None:
    for bad in (-1, 1.5, True, "3"):
        with pytest.raises(ValueError, match="max_new_tokens an integer at least 0, got"):
            Limits(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefill_chunk above 0"):
        Engine(Counting(), prefill_chunk=0)


def test_a_broken_model_is_an_error_not_a_token() -> None:
    class Broken(Counting):
        def step(self, batch: StepBatch, pool: KVPool) -> Tensor:
            return super().step(batch, pool) * float("nan")

    with pytest.raises(SamplingError, match="expected finite logits, got a NaN"):
        Engine(Broken()).generate([[1]])


def test_grad_mode_of_the_caller_is_left_alone() -> None:
    for _ in Engine(Counting()).start([[1]]):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


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
    reordered = engine.generate(PROMPTS[::-1], MIXED[::-1], limits)
    assert reordered[::-1] == alone


@pytest.mark.parametrize("chunk", [1, 7, 59, 60, 1000])
def test_the_prefill_chunk_changes_nothing(model: Decoder, chunk: int) -> None:
    expected = Engine(model).generate([PROMPTS[-1]], None, Limits(4))
    assert Engine(model, prefill_chunk=chunk).generate([PROMPTS[-1]], None, Limits(4)) == expected


def finish(run: Run) -> list[int]:
    for _ in run:
        pass
    return run.generations[0].token_ids


def test_a_session_keeps_its_prefix_and_its_tokens(model: Decoder) -> None:
    """Turns over one cache give the tokens of fresh runs, and run only what is new."""
    session, engine = Engine(model).session(), fresh(model)
    history, known = [0, 40, 41], 0
    for turn in range(4):
        run = session.start(history, None, Limits(5))
        answer = finish(run)
        assert answer == engine.generate([history], None, Limits(5))[0].token_ids
        assert run.timing.reused_tokens == known
        known = len(history) + 4  # the answer's last token has not been fed
        history = [*history, *answer, 60 + turn, 70]


def test_a_session_survives_edits_and_breaks(model: Decoder) -> None:
    session, engine = Engine(model).session(), fresh(model)
    finish(session.start([0, 1, 2, 3, 4, 5], None, Limits(6)))
    edited = [0, 1, 2, 9, 4]
    run = session.start(edited, None, Limits(6))
    run.step()
    assert run.timing.reused_tokens == 3
    run.step()  # and the consumer leaves
    for prompt in (edited, [0, 1], [7, 7, 7]):
        answer = finish(session.start(prompt, None, Limits(6)))
        assert answer == engine.generate([prompt], None, Limits(6))[0].token_ids
    with pytest.raises(PromptError):
        session.start([])


def test_a_session_ends_with_the_context() -> None:
    session = Engine(Counting()).session()
    run = session.start([0] * 38, None, Limits(9))
    assert finish(run) == [1, 2, 3] and run.generations[0].finish_reason == "context"
    with pytest.raises(PromptError, match="at most 40"):
        session.start([0] * 41)
    assert finish(session.start([0] * 5, None, Limits(2))) == [1, 2]


def test_a_session_without_a_prefix_cache_computes_everything() -> None:
    engine = fresh(model := Counting())
    session = engine.session()
    for prompt in ([1, 2, 3], [1, 2, 3, 4, 5]):
        run = session.start(prompt, None, Limits(2))
        assert finish(run) == [prompt[-1] + 1, prompt[-1] + 2] and run.timing.reused_tokens == 0
    assert [len(ids[0]) for ids, _ in model.calls] == [3, 1, 5, 1]
