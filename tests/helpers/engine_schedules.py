"""Random schedules of an engine: the same tokens whatever runs beside, whatever is kept.

Every schedule mixes prompts that share beginnings, drafts (right and wrong ones), small pools,
checkpoints and trims, and every other one a prefix cache on disk with a restart in between; the
tokens of each request must be those of an engine of its own without any of it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from bitnet_ops.generate import draft_planner
from bitnet_ops.generate.draft_choice import MAX_DRAFTS
from bitnet_ops.generate.engine import Engine
from bitnet_ops.generate.prompt import PromptRows, split_prompt
from bitnet_ops.generate.request import Failed, Limits, NewToken
from bitnet_ops.generate.sampling import SamplingParams
from bitnet_ops.generate.scheduler import SchedulerOptions
from bitnet_ops.models import Decoder
from bitnet_ops.nn.blocks import PoolFullError

Prompt: TypeAlias = "list[int | PromptRows]"


@dataclass(frozen=True)
class Form:
    """longest: of what prompts share, longest_answer, both in tokens; positions: of a pool.

    rows: that may stand among the tokens of prompts.
    """

    vocab: int
    longest: int
    block_sizes: tuple[int, ...]
    positions: tuple[int, ...]
    longest_answer: int = 40
    watermark: float = SchedulerOptions.watermark
    rows: tuple[PromptRows, ...] = ()


def alone(
    model: Decoder, prompt: Prompt, params: SamplingParams, limits: Limits, **options: Any
) -> list[int]:
    engine = Engine(model, scheduling=SchedulerOptions(prefix_cache=False), **options)
    return list(engine.generate([prompt], params, limits)[0].token_ids)


class Drafter:
    """Proposes what will come, with mistakes: of texts whose continuation is known."""

    def __init__(self, rng: random.Random, vocab: int) -> None:
        self.rng, self.vocab, self.texts = rng, vocab, list[list[int]]()

    def __call__(self, ids: Sequence[int], maximum: int) -> list[int]:
        begin = list(ids)
        for text in self.texts:
            if text[: len(begin)] == begin:
                drafts = text[len(begin) : len(begin) + self.rng.randint(0, maximum)]
                return [d if self.rng.random() < 0.8 else (d + 1) % self.vocab for d in drafts]
        return []


def prompts_of(rng: random.Random, form: Form) -> list[Prompt]:
    def some(minimum: int, maximum: int) -> Prompt:
        found: Prompt = [rng.randrange(form.vocab) for _ in range(rng.randint(minimum, maximum))]
        while form.rows and rng.random() < 0.5:
            found.insert(rng.randint(0, len(found)), rng.choice(form.rows))
        return found

    base = some(1, form.longest)
    found: list[Prompt] = []
    for _ in range(rng.randint(2, 8)):
        kind = rng.random()
        if kind < 0.5:
            begin = base[: rng.randint((len(base) + 1) // 2, len(base))]
            found.append(begin + some(0, 12))
        elif kind < 0.7 and found:
            found.append(found[-1] + some(0, 3))
        else:
            found.append(some(1, form.longest * 3 // 2))
    return found


def engine_of(model: Decoder, form: Form, rng: random.Random, **more: Any) -> Engine:
    options = SchedulerOptions(
        token_budget=rng.choice([8, 16, 64]),
        max_sequences=rng.choice([1, 4, 8, 8]),
        prefill_beside_decode=rng.choice([None, 4]),
        checkpoint_tokens=rng.choice([4, 16, 64]),
        prefix_cache=rng.random() < 0.8,
        watermark=form.watermark,
    )
    engine = Engine(model, scheduling=options, kv_cache_mb=40, **more)
    blocks = rng.choice(form.positions) // engine.block_size
    sizes = engine._plan.sizes._replace(blocks=blocks, slots=rng.choice([1, 2, 8, 40, 40]))
    engine._plan.sizes = sizes
    return engine


def run_schedule(
    model: Decoder,
    form: Form,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    texts: list[list[int]] | None = None,
) -> Counter[str]:
    """What happened in it: how many tokens of drafts were accepted, and so on.

    texts: gets the whole text of every prompt, before any is run.
    """
    rng = random.Random(seed)
    drafter = Drafter(rng, form.vocab)
    monkeypatch.setattr(draft_planner, "propose", drafter)
    jobs, wanted = [], []
    for prompt in prompts_of(rng, form):
        params = SamplingParams(temperature=rng.choice([0, 0, 1.0]), seed=rng.randrange(3))
        stops = frozenset(rng.sample(range(form.vocab), rng.choice([0, 20])))
        limits = Limits(rng.randint(1, form.longest_answer), stops)
        wanted.append(alone(model, prompt, params, limits))
        ids, runs = split_prompt(prompt, model.config.hidden_size)
        drafter.texts.append(list(ids if runs is None else runs.content(ids)) + wanted[-1])
        if texts is not None:
            texts.append(drafter.texts[-1])
        kinds = [0, 3, MAX_DRAFTS] if texts is None else [0, 3, MAX_DRAFTS, "auto", "head"]
        jobs.append((prompt, params, limits, rng.choice(kinds)))
    options: dict[str, Any] = {"block_size": rng.choice(form.block_sizes)}
    if seed // 2 % 2 == 0:
        return run_jobs(engine_of(model, form, rng, **options), rng, jobs, wanted, seed)
    seen, options["prefix_dir"] = Counter[str](), directory / str(seed)
    for at in (slice(len(jobs) // 2), slice(len(jobs))):
        engine = engine_of(model, form, rng, **options)
        seen += run_jobs(engine, rng, jobs[at], wanted[at], seed)
        engine.close()
    return seen


def run_jobs(
    engine: Engine, rng: random.Random, jobs: list[Any], wanted: list[list[int]], seed: int
) -> Counter[str]:
    events: dict[int, list[Any]] = {}
    waiting, ids = list(jobs), list[int]()
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.4:
            prompt, params, limits, drafts = waiting.pop(0)
            ids.append(
                engine.add(
                    prompt,
                    params,
                    limits,
                    max_drafts=drafts,
                    keep_prefix=rng.random() < 0.8,
                    consumer=lambda event: events.setdefault(event.request_id, []).append(event),
                )
            )
        if ids and rng.random() < 0.03:
            engine.trim()
        engine.step()
    stats = engine.stats()
    for id, tokens in zip(ids, wanted, strict=True):
        if isinstance(last := events[id][-1], Failed):
            assert isinstance(last.error, PoolFullError)  # a pool too small for it alone
            continue
        assert [e.token_id for e in events[id] if isinstance(e, NewToken)] == tokens, seed
    head = stats.drafts.head
    by_head = {"head right": head.accepted, "head wrong": head.drafted - head.accepted}
    return Counter(
        by_head if head.drafted else {},
        accepted=stats.accepted_drafts,
        rejected=stats.drafted_tokens - stats.accepted_drafts,
        reused=stats.reused_tokens,
        preempted=stats.preemptions,
        disk=stats.disk_tokens,
    )
