"""`python -m benchmarks.engine_studies`: what the engine does beside decoding streams.

A prompt that arrives beside streams, a shared prefix, what verifying drafts costs, automatic
speculation, and what a batch of logits costs the sampler, by shape and filter.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.bench import engine as bench_engine
from bitnet_ops.bench import report
from bitnet_ops.bench.engine import ROOM, EngineSettings, Streams, engine_of
from bitnet_ops.bench.harness import Budget, Timed, digits, interleave, percentile, summarize
from bitnet_ops.bench.limits import MachineLimits
from bitnet_ops.bench.model import BenchModel
from bitnet_ops.bench.pinning import pinned, use_threads
from bitnet_ops.bench.report import Row
from bitnet_ops.bench.run_model import ModelBench, time_once
from bitnet_ops.cli.terminal import progress_line
from bitnet_ops.dummy.configs import CONFIGS
from bitnet_ops.generate.engine import Limits, NewToken, SchedulerOptions
from bitnet_ops.models.step_batch import SequenceStep, StepBatch
from bitnet_ops.nn.kv_pool import KVPool

_ROWS, _VOCAB = 64, 128_256
_QUICK_ROWS, _QUICK_VOCAB = 4, 10_000

# temperature, top_k, top_p, min_p
_FILTERS: dict[str, tuple[float, int, float, float]] = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "top_k 50": (1.0, 50, 1.0, 0.0),
    "top_p .9": (1.0, 0, 0.9, 0.0),
    "top_p .9, min_p .05": (1.0, 0, 0.9, 0.05),
    "top_k half, top_p .9": (1.0, -1, 0.9, 0.0),
}


def arrival_row(
    bench: ModelBench, limits: MachineLimits, streams: int, prompt: int, block_size: int
) -> Row:
    """The longest gap of decoding streams while a prompt is prefilled beside them."""
    use_threads(limits.threads)
    run = Streams(bench.model, streams * (128 + ROOM) + prompt + ROOM, streams + 1, block_size)
    decoding = run.decoding(streams, 128)
    alone = summarize([time_once(Timed(lambda _: run.engine.step())) for _ in range(8)]).median
    newcomer = run.add(prompt, 8)
    start, gaps, first = time.perf_counter(), [], 0.0
    while not first:
        began = time.perf_counter()
        events = run.engine.step()
        gaps.append(time.perf_counter() - began)
        if any(isinstance(e, NewToken) and e.request_id == newcomer for e in events):
            first = time.perf_counter() - start
    for i in decoding:
        run.engine.abort(i)
    return {
        "kind": "arrival",
        "threads": limits.threads,
        "streams": streams,
        "prompt": prompt,
        "step_ms": digits(alone * 1e3),
        "gap_ms": digits(summarize(gaps).median * 1e3),
        "gap_p99_ms": digits(percentile(gaps, 99) * 1e3),
        "longest_gap_ms": digits(max(gaps) * 1e3),
        "p99_in_steps": digits(percentile(gaps, 99) / alone),
        "first_token_s": digits(first),
        "prompt_tokens_per_s": digits(prompt / first),
    }


def prefix_row(bench: ModelBench, limits: MachineLimits, prefix: int, block_size: int) -> Row:
    """Time to the first token of a prompt, and of the next one with the same beginning."""
    use_threads(limits.threads)
    model, blocks = bench.model, 4 * (prefix // block_size + 2)
    engine = engine_of(model.model, model, blocks, block_size, SchedulerOptions())
    generator = torch.Generator().manual_seed(5)
    vocab = bench.model.config.vocab_size
    shared = torch.randint(0, vocab, (prefix,), generator=generator).tolist()
    seconds = []
    for question in range(3):
        run = engine.start([[*shared, question + 1, 5, 6, 7]], limits=Limits(1))
        seconds.append(time_once(Timed(lambda _: run.step())))  # noqa: B023  (called at once)
    return {
        "kind": "prefix",
        "threads": limits.threads,
        "prefix": prefix,
        "first_ms": digits(seconds[0] * 1e3),
        "next_ms": digits(min(seconds[1:]) * 1e3),
    }


def drafts_row(bench: ModelBench, limits: MachineLimits, drafts: int, block_size: int) -> Row:
    """What verifying so many drafted tokens costs, over a decode step without them.

    How many are right depends on the text; a dummy's own repeats nothing.
    """
    use_threads(limits.threads)
    blocks = list(range(256 // block_size + 1))
    pool = KVPool(bench.model.config, len(blocks), block_size, bench.model.kv_dtype)

    def step(start: int, tokens: int) -> Callable[[int], Tensor]:
        batch = StepBatch.of([SequenceStep([3] * tokens, start, blocks, tokens)], block_size)
        return lambda _: bench.model.model.step(batch, pool)

    step(0, 128)(0)
    runs = [Timed(step(128, n)) for n in (1, 1 + drafts)]
    one, several = interleave(runs, bench.budget(), probe=limits.peak.speed).usable()
    cost = summarize(several).median / summarize(one).median
    return {
        "kind": "drafts",
        "threads": limits.threads,
        "drafts": drafts,
        "step_ms": digits(summarize(one).median * 1e3),
        "cost": digits(cost),
        "gain_if_right": digits((1 + drafts) / cost),
    }


def _script(text: str, count: int, vocab: int) -> list[int]:
    """A text of so many tokens: one that goes round in a circle, or words by Zipf's law."""
    generator = torch.Generator().manual_seed(11)
    if text == "repetitive":
        circle = torch.randint(0, vocab, (48,), generator=generator).tolist()
        return (circle * (count // 48 + 1))[:count]
    weights = 1 / torch.arange(1, min(vocab, 4096) + 1)
    return torch.multinomial(weights, count, replacement=True, generator=generator).tolist()


class Scripted(Streams):
    """One request whose text is `script`, whatever the model's logits would have said."""

    def __init__(self, model: BenchModel, script: list[int], block_size: int) -> None:
        super().__init__(model, len(script), 1, block_size)
        self._script = script

    def _run(self, batch: StepBatch, pool: KVPool) -> Tensor:
        logits = super()._run(batch, pool)
        if not self.pretends:
            for row, position in zip(logits, batch.positions[batch.logit_rows], strict=True):
                row[self._script[int(position) + 1]] = 1e9
        return logits


def speculation_row(
    bench: ModelBench, limits: MachineLimits, text: str, tokens: int, block_size: int
) -> Row:
    """One stream with and without automatic speculation on the same text, step by step in turn.

    The model computes every step; what its logits should have said, the text says.
    """
    use_threads(limits.threads)
    context = 128
    script = _script(text, context + tokens + 16, bench.model.config.vocab_size)
    runs: list[Scripted] = []
    for drafts in (0, "auto"):
        run = Scripted(bench.model, script, block_size)
        run.pretends = True
        run.engine.add(script[:context], limits=Limits(tokens + 1), max_drafts=drafts)
        run.engine.step()
        run.pretends, run.step_s = False, 0.0
        runs.append(run)
    while any(run.engine.has_work for run in runs):
        for run in runs:
            if run.engine.has_work:
                run.step()
    off, auto = (tokens / run.step_s for run in runs)
    stats = runs[1].engine.stats()
    return {
        "kind": "speculation",
        "threads": limits.threads,
        "text": text,
        "tokens": tokens,
        "off_tokens_per_s": digits(off),
        "auto_tokens_per_s": digits(auto),
        "speedup": digits(auto / off),
        "drafted": stats.drafted_tokens,
        "accepted": stats.accepted_drafts,
    }


def logits(shape: str, rows: int, vocab: int) -> Tensor:
    """float32 [rows, vocab]. What is worst for a filter depends on how the probabilities fall."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, vocab, generator=generator)
    if shape == "language-like":  # 60 tokens have nearly all of the mass
        at = torch.randint(0, vocab, (rows, 60), generator=generator)
        return x.scatter_add(1, at, 12 + torch.arange(60).expand(rows, 60) * 0.05)
    if shape == "heavy-tailed":  # Zipf's law
        ranks = torch.stack([torch.randperm(vocab, generator=generator) + 1 for _ in range(rows)])
        return -1.1 * ranks.log()
    if shape == "equal":
        return torch.zeros(rows, vocab)
    return x  # flat


def sampling_rows(limits: MachineLimits, *, quick: bool) -> Iterator[Row]:
    """Time of a call for many rows, and for one of them alone, which the cache has then."""
    use_threads(limits.threads)
    count, vocab = (_QUICK_ROWS, _QUICK_VOCAB) if quick else (_ROWS, _VOCAB)
    uniforms = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    budget = Budget(0.02 if quick else 0.4, 3 if quick else 10)
    for shape in ("language-like", "flat", "heavy-tailed", "equal"):
        x = logits(shape, count, vocab)
        for name, (temperature, top_k, top_p, min_p) in _FILTERS.items():
            options = (
                torch.full((count,), temperature, dtype=torch.float64),
                torch.full((count,), top_k if top_k >= 0 else vocab // 2),
                torch.full((count,), top_p, dtype=torch.float64),
                torch.full((count,), min_p, dtype=torch.float64),
            )

            def batch(rows: int, x: Tensor = x, options: tuple[Tensor, ...] = options) -> Timed:
                taken = [tensor[:rows] for tensor in (x, *options, uniforms)]
                return Timed(lambda _: ops.sample_tokens(*taken), warm=rows == 1)

            rounds = interleave([batch(count), batch(1)], budget, probe=limits.peak.speed)
            many, one = (summarize(samples) for samples in rounds.usable())
            yield {
                "kind": "sampling",
                "threads": limits.threads,
                "logits": shape,
                "filter": name,
                "rows": count,
                "vocab": vocab,
                "ms": digits(many.median * 1e3),
                "p90_ms": digits(many.p90 * 1e3),
                "one_row_ms": digits(one.median * 1e3),
                "disturbed": rounds.disturbed,
            }


def rows(bench: ModelBench, limits: MachineLimits, settings: EngineSettings) -> list[Row]:
    """Every study at one thread count."""
    size, quick = settings.block_size, settings.quick
    prompt = min(256 if quick else 2048, bench.model.config.max_position_embeddings - 64)
    return [
        arrival_row(bench, limits, 8, prompt, size),
        prefix_row(bench, limits, min(512, prompt), size),
        *(drafts_row(bench, limits, drafts, size) for drafts in (1, 3, 7)),
        *(
            speculation_row(bench, limits, text, 48 if quick else 192, size)
            for text in ("repetitive", "free")
        ),
        *sampling_rows(limits, quick=quick),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    name = "python -m benchmarks.engine_studies"
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    parser.add_argument("--dummy", choices=list(CONFIGS), default="2b-4t")
    parser.add_argument("--kv-dtype", default="bfloat16")
    parser.add_argument("-t", "--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
    args = parser.parse_args(argv)
    settings = EngineSettings(
        dummy=args.dummy,
        kv_dtype=args.kv_dtype,
        streams=(1,),
        contexts=(128,),
        threads=(args.threads,),
        cold_mib=128 if args.quick else 512,
        quick=args.quick,
    )
    with progress_line() as progress, pinned():
        result = bench_engine.run(settings, progress, rows)
    print("\n".join(report.lines(result)))
    for row in result["rows"]:
        if row["kind"] not in ("streams", "queue"):
            print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
