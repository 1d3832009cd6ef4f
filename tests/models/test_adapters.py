"""LoRA adapters of a decoder by name: one step for rows of several adapters and of none.

What a step gives is held against the layers composed of single ops, each sequence alone with its
adapter, bit for bit; that these are peft's formula stands in test_lora.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_writer
from bitnet_ops.config import PROJECTIONS
from bitnet_ops.convert import convert
from bitnet_ops.generate.engine import (
    Engine,
    Finished,
    Limits,
    NewToken,
    SamplingParams,
    SchedulerOptions,
)
from bitnet_ops.language_model import load
from bitnet_ops.models import Decoder
from bitnet_ops.models.step_batch import SequenceStep, StepBatch
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.nn.lora import Adapter, LoraError, LoraWeight
from hf_families import CASES
from isa_control import every_configuration, torch_threads
from tiny_models import SMALL, random_ids, tiny_model

NAMES = ("all", "few", "bf16", None)
# Plain and bfloat16; q/k norms and group scales; norms inside projections and biases.
MODELS = ("bitnet-offline", "llama3-8b-like bf16", "bonsai", "qwen2-rms-norm-mul")


def make_adapter(model: Decoder, seed: int, **changes: Any) -> Adapter:
    """Of random rank from 1 to 20, larger than one lane and not a multiple of four."""
    options = {"share": 1.0, "dtype": torch.float32, "ranks": range(1, 21), "size": 0.4} | changes
    g = torch.Generator().manual_seed(seed)
    weights = {}
    for name, layer in model.named_modules():
        if name.startswith("mtp."):  # a draft head, which has no adapters
            continue
        if type(layer) is not BitLinear or torch.rand(1, generator=g) > options["share"]:
            continue
        rank = options["ranks"][int(torch.randint(len(options["ranks"]), (1,), generator=g))]
        a = torch.randn(rank, layer.in_features, generator=g) * options["size"]
        b = torch.randn(layer.out_features, rank, generator=g) * options["size"]
        weights[name] = LoraWeight(a.to(options["dtype"]), b.to(options["dtype"]), 0.37)
    return Adapter(Path("made"), 20, weights)


def with_adapters(model: Decoder) -> Decoder:
    model.add_adapter(make_adapter(model, 1), "all")
    model.add_adapter(make_adapter(model, 2, share=0.3, ranks=[3]), "few")
    model.add_adapter(make_adapter(model, 3, dtype=torch.bfloat16, ranks=[16]), "bf16")
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    made = {
        "bitnet-offline": tiny_model(SMALL["bitnet-offline"]),
        "llama3-8b-like bf16": tiny_model(SMALL["llama3-8b-like"], dtype=torch.bfloat16),
    }
    for name in MODELS[2:]:
        folder = tmp_path_factory.mktemp(name)
        source = hf_writer.write_checkpoint(folder / "source", CASES[name].family)
        convert(source, folder / "out")
        made[name] = load(folder / "out", head_format="stored", weight_format="canonical").model
    return {name: with_adapters(model) for name, model in made.items()}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, models: dict[str, Decoder]) -> Decoder:
    return models[request.param]


def composed(model: Decoder, ids: torch.Tensor, adapter: str | None) -> torch.Tensor:
    """Logits [T, V] of one sequence alone, by single ops on one thread."""
    model.run_as = "ops"
    try:
        with torch_threads(1):
            return model(ids[None], KVCache(model.config, 1, len(ids), torch.float32), 0, adapter)[
                0
            ]
    finally:
        model.run_as = "program"


@torch.inference_mode()
def test_rows_of_several_adapters_in_one_step_are_each_alone(model: Decoder) -> None:
    """On every instruction set and number of threads; the composed step mixes rows as well."""
    below = model.config.vocab_size
    texts = [random_ids(seed, 9, below=below) for seed in range(6)]
    adapters = ["all", None, "few", "all", "bf16", None]
    expected = [composed(model, *row) for row in zip(texts, adapters, strict=True)]
    assert not torch.equal(composed(model, texts[0], None), expected[0])
    assert model.program is not None

    def run(*parts: tuple[int, ...]) -> list[torch.Tensor]:
        """Each part: up to where each of the texts goes."""
        pool = KVPool(model.config, 18, 4, torch.float32)
        found: list[list[torch.Tensor]] = [[] for _ in texts]
        done = [0] * len(texts)
        for ends in parts:
            rows = [i for i, end in enumerate(ends) if end > done[i]]
            steps = [
                SequenceStep(
                    texts[i][done[i] : ends[i]].tolist(),
                    done[i],
                    [3 * i, 3 * i + 1, 3 * i + 2],
                    ends[i] - done[i],
                    adapters[i],
                )
                for i in rows
            ]
            batch = StepBatch.of(steps, 4)
            logits = model.step(batch, pool)
            wanted = [ends[i] - done[i] for i in rows]
            at = iter(logits)
            for k in range(max(wanted)):
                for i, count in zip(rows, wanted, strict=True):
                    if count > k:
                        found[i].append(next(at))
            done = list(ends)
        return [torch.stack(rows) for rows in found]

    def compare(label: str) -> None:
        parts = [(3, 1, 9, 2, 4, 5), (4, 2, 9, 3, 5, 9), (9,) * 6]
        for result, right in zip(run(*parts), expected, strict=True):
            assert torch.equal(result, right), label

    for label in every_configuration():
        compare(label)
    model.run_as = "ops"
    compare("composed")
    model.run_as = "program"


@torch.inference_mode()
def test_one_adapter_over_a_rectangular_cache(model: Decoder) -> None:
    """Prefill, single tokens, last logits only; two sequences."""
    ids = torch.stack([random_ids(seed, 8, below=model.config.vocab_size) for seed in (4, 5)])
    for adapter in NAMES:
        expected = torch.stack([composed(model, row, adapter) for row in ids])
        for threads in (1, 2, 3):
            with torch_threads(threads):
                cache = KVCache(model.config, 2, 8, torch.float32)
                parts = [model(part, cache, 0, adapter) for part in ids.split([4, 1, 1, 2], 1)]
                assert torch.equal(torch.cat(parts, 1), expected)
                cache = KVCache(model.config, 2, 8, torch.float32)
                assert torch.equal(model(ids, cache, 1, adapter), expected[:, -1:])


@torch.inference_mode()
def test_an_adapter_without_a_name_is_for_sequences_that_name_none(models: Any) -> None:
    model = copy.deepcopy(models["bitnet-offline"])
    ids = random_ids(6, 7)
    plain, named = composed(model, ids, None), composed(model, ids, "few")
    model.add_adapter(make_adapter(model, 1))
    default = composed(model, ids, None)
    assert torch.equal(default, composed(model, ids, "all"))  # the same factors
    assert torch.equal(model(ids[None])[0], default) and not torch.equal(default, plain)
    assert torch.equal(model(ids[None], adapter="few")[0], named)
    hidden = model.hidden(ids[None])
    model.remove_adapter()
    assert torch.equal(model(ids[None])[0], plain)
    assert torch.equal(hidden, model.hidden(ids[None], adapter="all"))


@torch.inference_mode()
def test_only_projections_of_the_last_layer_or_the_first(models: Any) -> None:
    """Where some layers have LoRA and others none, and some tokens only in the last."""
    model = copy.deepcopy(models["bitnet-offline"])
    last = model.config.num_hidden_layers - 1
    whole = make_adapter(model, 8)
    for name, layer, projections in (
        ("o last", last, [PROJECTIONS[3]]),
        ("down first", 0, [PROJECTIONS[6]]),
        ("gate last", last, [PROJECTIONS[4]]),
        ("v first", 0, [PROJECTIONS[2]]),
    ):
        kept = {f"model.layers.{layer}.{p}" for p in projections}
        weights = {n: w for n, w in whole.weights.items() if n in kept}
        model.add_adapter(Adapter(whole.folder, 20, weights), name)
    names = ["o last", None, "down first", "gate last", "v first"]
    ids = [random_ids(seed, 5) for seed in range(len(names))]
    expected = [composed(model, *row)[-1] for row in zip(ids, names, strict=True)]
    steps = [
        SequenceStep(t.tolist(), 0, [i], 1, n)
        for i, (t, n) in enumerate(zip(ids, names, strict=True))
    ]
    for threads in (1, 2):
        with torch_threads(threads):
            logits = model.step(StepBatch.of(steps, 8), KVPool(model.config, 5, 8, torch.float32))
            assert torch.equal(logits, torch.stack(expected))


# Requests ----------------------------------------------------------------------------------------

LIMITS = Limits(6)
_BASE = random_ids(3, 40).tolist()
PROMPTS = (_BASE[:20], _BASE[:33], _BASE[:18] + [7, 7], [5, 6, 7, 8] * 6)
PARAMS = (SamplingParams(), SamplingParams(temperature=0.9, seed=5))
ALONE: dict[tuple[int, int, str | None], list[int]] = {}


def alone(model: Decoder, prompt: int, params: int, adapter: str | None) -> list[int]:
    """The tokens of a request that nothing runs beside, by single ops."""
    key = prompt, params, adapter
    if key not in ALONE:
        model.run_as = "ops"
        engine = Engine(model, scheduling=SchedulerOptions(prefix_cache=False))
        engine.add(PROMPTS[prompt], PARAMS[params], LIMITS, adapter=adapter)
        ALONE[key] = tokens_of(engine)[0]
        model.run_as = "program"
    return ALONE[key]


def tokens_of(engine: Engine) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, NewToken):
                found.setdefault(event.request_id, []).append(event.token_id)
            else:
                assert isinstance(event, Finished)
    return found


@given(
    jobs=st.lists(
        st.tuples(
            st.integers(0, len(PROMPTS) - 1),
            st.integers(0, len(PARAMS) - 1),
            st.sampled_from(NAMES),
            st.integers(0, 6),  # steps that run before it comes
        ),
        min_size=1,
        max_size=8,
    ),
    budget=st.sampled_from([7, 40, 512]),
    block_size=st.sampled_from([4, 16]),
)
@settings(max_examples=60, deadline=None)
def test_requests_of_several_adapters_are_each_alone(
    models: Any, jobs: list[tuple[int, int, str | None, int]], budget: int, block_size: int
) -> None:
    """Prefixes in common are shared among requests of one adapter, never beyond."""
    model = models["bitnet-offline"]
    options = SchedulerOptions(token_budget=budget, max_sequences=7)
    engine = Engine(model, block_size=block_size, scheduling=options)
    wanted, found = {}, {}
    for prompt, params, adapter, wait in jobs:
        for _ in range(wait):
            collect(engine, found)
        id = engine.add(PROMPTS[prompt], PARAMS[params], LIMITS, adapter=adapter)
        wanted[id] = alone(model, prompt, params, adapter)
    while engine.has_work:
        collect(engine, found)
    assert found == wanted


def collect(engine: Engine, found: dict[int, list[int]]) -> None:
    for event in engine.step():
        if isinstance(event, NewToken):
            found.setdefault(event.request_id, []).append(event.token_id)
        else:
            assert isinstance(event, Finished)


def test_blocks_of_another_adapter_are_never_shared(models: Any) -> None:
    engine = Engine(models["bitnet-offline"], block_size=4)
    reused = []
    for adapter in ("all", "all", "few", None, "all"):
        before = engine.stats().reused_tokens
        engine.add(PROMPTS[0], None, LIMITS, adapter=adapter)
        tokens_of(engine)
        reused.append(engine.stats().reused_tokens - before)
    assert reused[0] == reused[2] == reused[3] == 0 and reused[1] == reused[4] >= 16


def test_a_name_may_get_another_adapter(models: Any, tmp_path: Path) -> None:
    lm = load()
    lm.model.add_adapter(make_adapter(lm.model, 1), "mine")
    prompt = lm.encode("In the beginning") * 20
    lm.engine.add(prompt, None, LIMITS, adapter="mine")
    first = tokens_of(lm.engine)[0]
    lm.remove_adapter("mine")
    lm.model.add_adapter(make_adapter(lm.model, 2), "mine")
    lm.engine.add(prompt, None, LIMITS, adapter="mine")
    assert lm.engine.stats().reused_tokens == 0
    assert tokens_of(lm.engine)[1] != first


def test_texts_are_generated_with_an_adapter_by_name() -> None:
    lm = load()
    lm.model.add_adapter(make_adapter(lm.model, 1), "mine")
    plain = lm.generate("In the beginning", max_new_tokens=6)
    mine = lm.generate("In the beginning", max_new_tokens=6, adapter="mine")
    assert mine.token_ids != plain.token_ids
    batch = lm.generate_batch(["In the beginning"] * 2, max_new_tokens=6, adapter="mine")
    assert [one.token_ids for one in batch] == [mine.token_ids] * 2
    with pytest.raises(LoraError, match=r"name of a loaded adapter \('mine'\), got 'x'"):
        lm.generate("In the beginning", adapter="x")
    with pytest.raises(TypeError, match=r"^stream: expected adapter as a name or None, got 3"):
        lm.stream("In the beginning", adapter=3)  # type: ignore[typeddict-item]


# Errors ------------------------------------------------------------------------------------------


def test_an_unknown_adapter_is_one_error(models: Any) -> None:
    model = models["bitnet-offline"]
    message = r"^lora: expected the name of a loaded adapter \('all', 'few', 'bf16'\), got 'x'; \w+"
    engine = Engine(model)
    running = engine.add(PROMPTS[0], None, LIMITS, adapter="few")
    with pytest.raises(LoraError, match=message):
        engine.add(PROMPTS[1], None, LIMITS, adapter="x")
    assert tokens_of(engine) == {running: alone(model, 0, 0, "few")}
    cache = KVCache(model.config, 1, 4, torch.float32)
    for model.run_as in ("ops", "program"):
        with pytest.raises(LoraError, match=message):
            model(torch.tensor([[1]]), cache, adapter="x")
    assert int(cache.lengths[0]) == 0
    with pytest.raises(LoraError, match=message):
        model.remove_adapter("x")
    with pytest.raises(LoraError, match=r"a new name, got 'few'; remove that adapter first"):
        model.add_adapter(make_adapter(model, 2), "few")
    with pytest.raises(LoraError, match=r"\(none is loaded\), got 'x'"):
        tiny_model(SMALL["bitnet-offline"])(torch.tensor([[1]]), adapter="x")
    with pytest.raises(LoraError, match=r"a model with adapters, got a _Bare; leave out"):
        Engine(_Bare(model)).add([1], adapter="x")


class _Bare:
    """A model that knows no adapters."""

    def __init__(self, model: Decoder) -> None:
        self.config = model.config

    def step(self, batch: Any, pool: Any) -> Any:
        raise AssertionError("nothing should run")


def test_copies_have_the_adapters_too(models: Any) -> None:
    model = models["bitnet-offline"]
    ids = random_ids(6, 5)[None]
    with torch.inference_mode():
        again = copy.deepcopy(model)
        assert torch.equal(again(ids, adapter="all"), model(ids, adapter="all"))
    assert repr(again.adapters) == "Adapters('all', 'few', 'bf16')"
