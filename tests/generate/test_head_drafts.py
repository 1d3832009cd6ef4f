"""Drafts of an MTP head in the engine: the same tokens whatever runs beside, whatever is kept.

The head of a test is random, so almost none of its drafts is right; where it matters, guesses of
what will come take their place.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import bitnet_ops
from bitnet_ops import LanguageModel
from bitnet_ops.convert import convert
from bitnet_ops.generate import draft_planner, drafting
from bitnet_ops.generate.engine import Engine, Limits, SamplingParams, SchedulerOptions
from bitnet_ops.generate.request import Request
from bitnet_ops.generate.sampling import Sampler
from bitnet_ops.language_model import DEMO_DIR
from bitnet_ops.models import Decoder
from bitnet_ops.models.draft_words import DraftWords
from bitnet_ops.nn.lora import Adapter, LoraError, LoraWeight
from draft_oracle import RandomHead
from engine_schedules import Form, alone, run_schedule
from hybrid_models import hybrid
from tiny_models import SMALL, tiny_model

SCHEDULES = 2500 if os.environ.get("BITNET_CI_ALL") == "1" else 40
FORMS = {
    "hybrid": Form(321, longest=60, block_sizes=(4, 16), positions=(132, 132, 180, 6400)),
    "plain": Form(260, longest=60, block_sizes=(4, 16), positions=(100, 132, 132, 6400)),
    "windows": Form(260, 150, (16, 64), (256, 384, 6400), longest_answer=80, watermark=0),
    "pages": Form(260, 220, (64, 128), (256, 384, 6400), longest_answer=80, watermark=0),
}
POLICIES = {"windows": "window:70,sinks=4", "pages": "top_k:0.4,sinks=4,dense_below=0"}


def with_head(kind: str, seed: int = 1) -> Decoder:
    model = hybrid("rotated", layers=4) if kind == "hybrid" else tiny_model(SMALL["bitnet-offline"])
    if kind in POLICIES:
        model.set_attention(POLICIES[kind])
    head = RandomHead.of(model.config, seed, rotated=kind == "hybrid")
    model.set_draft_head(head.draft, head.tensors())
    return model


@pytest.fixture(scope="module", params=FORMS)
def case(request: pytest.FixtureRequest) -> tuple[Decoder, Form]:
    return with_head(request.param), FORMS[request.param]


class Guesses:
    """In the place of a head's choice: what will come, but for mistakes."""

    def __init__(self, rng: Random, vocab: int, right: float = 0.7) -> None:
        self.rng, self.vocab, self.right, self.texts = rng, vocab, right, list[list[int]]()

    def __call__(self, requests: Sequence[Request], depth: int) -> list[int]:
        return [self._of(list(request.content), depth) for request in requests]

    def _of(self, known: list[int], depth: int) -> int:
        for text in self.texts:
            if text[: len(known)] == known and len(text) > len(known) + depth:
                token = text[len(known) + depth]
                return token if self.rng.random() < self.right else (token + 1) % self.vocab
        return self.rng.randrange(-1, self.vocab)


def guess(patch: pytest.MonkeyPatch, guesses: Guesses) -> None:
    choose = drafting.HeadDrafter._choose

    def chosen(
        self: Any, requests: Sequence[Request], depth: int, logits: Tensor
    ) -> tuple[list[int], list[float]]:
        return guesses(requests, depth), choose(self, requests, depth, logits)[1]

    patch.setattr(drafting.HeadDrafter, "_choose", chosen)


@pytest.mark.timeout(7200)  # all of them, at night
def test_schedules_with_a_head(
    case: tuple[Decoder, Form], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, form = case
    total: Counter[str] = Counter()
    for seed in range(SCHEDULES // (4 if model.config.policies else 1)):
        guesses = Guesses(Random(seed), form.vocab)
        guess(monkeypatch, guesses)
        total += run_schedule(model, form, seed, monkeypatch, tmp_path, texts=guesses.texts)
        monkeypatch.undo()
    assert min(total[name] for name in ("reused", "preempted", "disk")) > 0, total
    assert min(total[name] for name in ("head right", "head wrong")) > 0, total


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_a_head_changes_no_token(case: tuple[Decoder, Form], temperature: float) -> None:
    model, form = case
    engine = Engine(model, block_size=form.block_sizes[1])
    rng = Random(3)
    prompts = [[rng.randrange(form.vocab) for _ in range(n)] for n in (1, 2, 30, 70)]
    params = SamplingParams(temperature=temperature, seed=7, top_k=40)
    expected = [alone(model, prompt, params, Limits(40)) for prompt in prompts]
    for drafts in ("head", "auto", 1, 3):
        run = engine.start(prompts, params, Limits(40), max_drafts=drafts)
        for _ in run:
            pass
        assert [list(g.token_ids) for g in run.generations] == expected
    assert engine.stats().drafts.head.drafted > 100


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.5, seed=2, top_p=0.9),
        SamplingParams(temperature=0.8, seed=3, top_k=20, min_p=0.01),
        SamplingParams(temperature=1.0, seed=4, presence_penalty=1.0),
        SamplingParams(repetition_penalty=1.3),
    ],
    ids=["plain", "top-p", "top-k", "presence", "repetition"],
)
def test_drafts_are_drawn_as_their_tokens(params: SamplingParams) -> None:
    """A head that gave the model's own logits would be right at every temperature."""
    model = tiny_model(SMALL["bitnet-offline"])
    prompt = [Random(5).randrange(260) for _ in range(20)]
    answer = alone(model, prompt, params, Limits(12), kv_dtype=torch.float32)
    logits = model(torch.tensor([[*prompt, *answer]]))[0]
    sampler = Sampler(params, prompt)
    for at, token in enumerate(answer):
        row = logits[len(prompt) - 1 + at][None]
        assert drafting.draw_ahead([sampler], 0, row.clone()) == [token]
        sampler.uniform()
        sampler.add(token)
    if not params.presence_penalty and params.repetition_penalty == 1:  # later noise, too
        sampler = Sampler(params, prompt)
        rows = logits[len(prompt) - 1 :]
        found = [drafting.draw_ahead([sampler], at, rows[at][None])[0] for at in range(3)]
        assert found == answer[:3]


def test_right_guesses_save_steps(
    case: tuple[Decoder, Form], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, form = case
    prompt = [5, 6, 7, 8]
    expected = alone(model, prompt, SamplingParams(), Limits(40))
    guesses = Guesses(Random(1), form.vocab, right=1.0)
    guesses.texts.append([*prompt, *expected])
    guess(monkeypatch, guesses)
    monkeypatch.setattr(draft_planner, "propose", lambda ids, maximum: [])
    engine, steps = Engine(model, block_size=form.block_sizes[1]), 0
    run = engine.start([prompt], SamplingParams(), Limits(40), max_drafts=3)
    while run.active:
        steps += bool(run.step())
    assert list(run.generations[0].token_ids) == expected
    assert steps <= 12  # the first token alone, then four a step
    counts = engine.stats().drafts.head
    assert counts.accepted == counts.drafted > 25


def test_few_words_draft_only_these(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_head("plain")
    engine = Engine(model, block_size=16)
    made: list[int] = []
    propose = drafting.HeadDrafter.propose

    def watched(self: Any, *asked: Any) -> tuple[list[list[int]], int]:
        if len(self.words.ids) > 100:
            self.words = DraftWords(model.head, 64)
        found, depth = propose(self, *asked)
        made.extend(token for drafts in found for token in drafts)
        return found, depth

    monkeypatch.setattr(drafting.HeadDrafter, "propose", watched)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=3)
        expected = alone(model, [9] * 5, params, Limits(30))
        run = engine.start([[9] * 5], params, Limits(30), max_drafts=2)
        for _ in run:
            pass
        assert list(run.generations[0].token_ids) == expected
    assert len(made) > 40 and max(made) < 260


def test_a_model_without_recurrent_layers_needs_no_checkpoints() -> None:
    """What is found of a prefix is that without a head: whole blocks, and parts of them."""
    model = with_head("plain")
    engine = Engine(model, block_size=16, scheduling=SchedulerOptions())
    prompt = list(range(1, 101))
    engine.generate([prompt], SamplingParams(), Limits(1))
    for shared in (99, 70, 33, 5):
        before = engine.stats().reused_tokens
        engine.generate([[*prompt[:shared], 200, 201, 202]], SamplingParams(), Limits(2))
        assert engine.stats().reused_tokens - before == shared
    assert engine.stats().checkpoints == engine.stats().state_slots == 0


# The demo model with a head that was distilled from it --------------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("demo") / "with-head"
    head = Path(__file__).parents[1] / "data" / "demo_head"
    convert(DEMO_DIR, folder, draft_from=head)
    return bitnet_ops.load(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"json_schema": {"type": "object", "properties": {"name": {"enum": ["Moses", "Aaron"]}}}},
        {"stop": ["the LORD"], "temperature": 0.0},
        {"temperature": 0.6, "seed": 3, "top_p": 0.9},
        {"temperature": 1.0, "seed": 4, "frequency_penalty": 0.5},
        {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "min_p": 0.05},
    ],
    ids=["schema", "stop", "top-p", "frequency", "repetition"],
)
def test_texts_of_the_demo_are_those_without_drafts(
    demo: LanguageModel, options: dict[str, Any]
) -> None:
    for prompt in ("And the LORD said unto Moses", "In the beginning", "Psalm 1\n"):
        texts = [
            str(demo.generate(prompt, max_new_tokens=48, speculation=how, **options))
            for how in ("off", "head", "auto", 3)
        ]
        assert len(set(texts)) == 1, texts


def test_the_head_of_the_demo_is_often_right(demo: LanguageModel) -> None:
    """Of text that it was not trained on, more than half of the first drafts are right."""
    before = demo.engine.stats().drafts.head
    for seed, prompt in enumerate(("Genesis 1\n", "And he said", "The children of")):
        demo.generate(prompt, max_new_tokens=100, speculation=1, temperature=0.7, seed=seed)
    after = demo.engine.stats().drafts.head
    drafted, right = after.drafted - before.drafted, after.accepted - before.accepted
    assert drafted > 60 and right > 0.5 * drafted


def adapter_of(model: Decoder, name: str) -> Adapter:
    layer = model.get_submodule(name)
    a = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(1))
    b = torch.randn(layer.out_features, 3, generator=torch.Generator().manual_seed(2))
    return Adapter(Path("made"), 3, {name: LoraWeight(0.4 * a, 0.4 * b, 0.4)})


def test_adapters_draft_with_the_head_too(demo: LanguageModel) -> None:
    model = copy.deepcopy(demo.model)
    model.add_adapter(adapter_of(model, "model.layers.2.mlp.up_proj"), "mine")
    with pytest.raises(LoraError, match="got one of its draft head"):
        model.add_adapter(adapter_of(model, "mtp.layers.0.mlp.up_proj"), "other")
    prompts = [[0, 17, 30, 17, 30, 5], [0, 40, 41, 42]]
    params = SamplingParams(temperature=0.7, seed=2)
    for adapter in (None, "mine"):
        found = []
        for drafts in (0, 3):
            run = Engine(model).start(
                prompts, params, Limits(30), max_drafts=drafts, adapter=adapter
            )
            for _ in run:
                pass
            found.append([list(g.token_ids) for g in run.generations])
        assert found[0] == found[1]


def test_logprobs_are_those_without_drafts(demo: LanguageModel) -> None:
    params, found = SamplingParams(temperature=0.7, seed=2, logprobs=3), []
    for drafts in (0, 3):
        run = Engine(demo.model).start([[0, 17, 30]], params, Limits(30), max_drafts=drafts)
        for _ in run:
            pass
        found.append(run.generations[0].logprobs)
    assert found[0] == found[1] and len(found[0]) == 30
