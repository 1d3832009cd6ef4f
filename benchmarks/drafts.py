"""What drafts of an MTP head cost and gain: prices in steps, and tokens/s of simulated acceptance.

    python -m benchmarks.drafts MODEL [--threads N] [--tokens N] [--streams 1,2,4,8]

MODEL has a head (`bitnet-ops dummy bonsai2-2b-draft DST`). Every figure is a ratio to steps without
drafts, by turns in this process. A dummy's head is never right, so guesses of what will come, which
is known from a run before, take the place of its choices: right as often, by depth, as a row of
RATES says. The head is computed all the same.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import bitnet_ops
from bitnet_ops import _runtime, ops
from bitnet_ops.generate import drafting
from bitnet_ops.generate.engine import Engine, Limits, SamplingParams
from bitnet_ops.generate.request import Request
from bitnet_ops.models import Decoder
from bitnet_ops.models.draft import DraftPool, kept_states
from bitnet_ops.models.draft_words import DraftWords
from bitnet_ops.models.step_batch import SequenceStep, StepBatch
from bitnet_ops.nn.kv_pool import KVPool

RATES = {"good": (0.75, 0.55, 0.4), "chat": (0.5, 0.25, 0.1), "wrong": (0.0, 0.0, 0.0)}
_CONTEXT = 256


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


@torch.inference_mode()
def prices(model: Decoder, repeats: int) -> None:
    """Steps of 1 to 8 tokens with and without what the head keeps, and the parts of one draft."""
    assert model.mtp is not None
    ids = [7 * i % model.config.vocab_size for i in range(_CONTEXT + 8)]
    pools = {
        "plain": KVPool(model.config, 8, 64, torch.bfloat16, state_slots=2),
        "with head": KVPool(model.cache_config, 8, 64, torch.bfloat16, state_slots=2),
    }

    def step(pool: KVPool, start: int, count: int, drafts: int = 0) -> Tensor:
        state = (1, 0, drafts) if pool.states is not None else None
        sequence = SequenceStep(
            ids[start : start + count], start, [*range(8)], 1 + drafts, None, state
        )
        return model.step(StepBatch.of([sequence], 64, 1), pool)

    for name, pool in pools.items():
        began = time.perf_counter()
        step(pool, 0, _CONTEXT)
        first = time.perf_counter() - began
        again = median_ms(partial(step, pool, 0, _CONTEXT), max(3, repeats // 8))
        print(f"prompt of {_CONTEXT}, {name:10} {again:8.1f} ms (first {1e3 * first:.1f})")
    counts = (1, 2, 3, 4, 6, 8)
    for count in counts:  # measured choices are made
        for pool in pools.values():
            for _ in range(4):
                step(pool, _CONTEXT, count, count - 1)
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(repeats):
        for name, pool in pools.items():
            for count in counts:
                began = time.perf_counter()
                step(pool, _CONTEXT, count, count - 1)
                took = 1e3 * (time.perf_counter() - began)
                found.setdefault((name, count), []).append(took)
    one = statistics.median(found["plain", 1])
    for name in pools:
        each = [statistics.median(found[name, count]) for count in counts]
        print(f"step of {counts} tokens, {name:10}", " ".join(f"{t:7.2f}" for t in each), "ms;",
              " ".join(f"{t / one:.2f}" for t in each))  # fmt: skip
    pool = pools["with head"]
    part = DraftPool(pool).of(kept_states(pool, [1], [0]))
    batch = StepBatch.of([SequenceStep([3], _CONTEXT, [*range(8)], 1, None, (0, 0, 0))], 64)
    words = DraftWords(model.head)
    rows = model.draft_rows(batch, part)
    normed = ops.rms_norm(rows, model.mtp.norm.weight, 1e-6)
    logits = words.head(normed)
    parts: dict[str, Callable[[], Any]] = {
        "fc, layer, keys": lambda: model.draft_rows(batch, part),
        f"head of {len(words.ids)} words": lambda: words.head(normed),
        "whole head": lambda: model.head(normed),
        "choosing": lambda: words.ids[logits.argmax(-1)].tolist(),
        "states, batch": lambda: (
            kept_states(pool, [1], [0]),
            StepBatch.of([SequenceStep([3], _CONTEXT, [*range(8)], 1, None, (0, 0, 0))], 64),
        ),
    }
    for name, call in parts.items():  # behind a step, which has read other weights
        times = []
        for _ in range(repeats):
            step(pool, _CONTEXT, 1)
            times.append(median_ms(call, 1))
        took = statistics.median(times)
        print(f"{name:24} {took:7.3f} ms, {took / one:.3f} of a step")
    bytes_of = sum(b.nbytes for b in model.mtp.buffers())
    print(f"head {bytes_of / 2**20:.0f} MiB, words {words.head.weight.nbytes / 2**20:.0f} MiB")


class Guesses:
    """In the place of the head's choice: what will come, as often as `rates` says, by depth."""

    def __init__(self, texts: Sequence[Sequence[int]], rates: Sequence[float], vocab: int) -> None:
        self.texts, self.rates, self.vocab = [list(text) for text in texts], rates, vocab
        self.rng = random.Random(1)

    def __call__(self, requests: Sequence[Request], depth: int) -> list[int]:
        found = []
        for request in requests:
            text = next(t for t in self.texts if t[:_PROMPT] == list(request.ids[:_PROMPT]))
            at = len(request.ids) + depth
            token = text[at] if at < len(text) else 0
            right = self.rng.random() < self.rates[depth]
            found.append(token if right else (token + 1) % self.vocab)
        return found


_PROMPT = 16


def speeds(
    model: Decoder, rates: str, streams: int, tokens: int, rounds: int
) -> tuple[float, dict[Any, float], float]:
    """Tokens/s without drafts; those of "head" and of always 1, 2, 3 drafts, as ratios to that.

    And tokens a step of a stream with "head". What costs of steps and rates promise is the best of
    the fixed numbers, which meet the same machine at the same time.
    """
    vocab = model.config.vocab_size
    prompts = [[(31 * s + 7 * i) % vocab for i in range(_PROMPT)] for s in range(streams)]
    engine = Engine(model, kv_cache_mb=2048)

    def run(drafts: Any) -> tuple[float, list[list[int]], int]:
        made = engine.start(prompts, SamplingParams(), Limits(tokens), max_drafts=drafts)
        steps = 0
        while made.active:
            steps += bool(made.step())
        return made.timing.decode_tokens_per_s, [list(g.token_ids) for g in made.generations], steps

    _, answers, _ = run(None)
    texts = [p + a for p, a in zip(prompts, answers, strict=True)]
    guesses = Guesses(texts, RATES[rates], vocab)
    choose = drafting.HeadDrafter._choose

    def chosen(
        self: Any, requests: Sequence[Request], depth: int, logits: Tensor
    ) -> tuple[list[int], list[float]]:
        return guesses(requests, depth), choose(self, requests, depth, logits)[1]

    drafting.HeadDrafter._choose = chosen  # type: ignore[method-assign]
    try:
        without, ratios, steps = list[float](), dict[Any, list[float]](), 0
        for _ in range(rounds):
            for how in ("head", 1, 2, 3):
                plain = run(None)[0]
                speed, found, taken = run(how)
                assert found == answers
                steps = taken if how == "head" else steps
                without.append(plain)
                ratios.setdefault(how, []).append(speed / plain)
    finally:
        drafting.HeadDrafter._choose = choose  # type: ignore[method-assign]
    each = {how: statistics.median(found) for how, found in ratios.items()}
    return statistics.median(without), each, (tokens - 1) / (steps - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=24)
    parser.add_argument("--streams", default="1,2,4,8")
    parser.add_argument("--rates", default=",".join(RATES))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lm = bitnet_ops.load(args.model)
    print(f"{lm.model.summary}; {_runtime.isa()}, {args.threads} threads")
    prices(lm.model, args.repeats)
    for streams in map(int, filter(None, args.streams.split(","))):
        for rates in filter(None, args.rates.split(",")):
            plain, found, per_step = speeds(lm.model, rates, streams, args.tokens, args.rounds)
            by_policy = found.pop("head")
            print(f"{streams} streams, {rates}: {plain:.1f} tokens/s; by policy {by_policy:.2f}"
                  f" times that, {per_step:.2f} tokens a step; always",
                  ", ".join(f"{how}: {found[how]:.2f}" for how in found), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
