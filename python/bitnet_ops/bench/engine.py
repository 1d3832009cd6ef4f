"""`bench engine`: streams that decode together, and a queue of mixed requests.

Decode steps of the engine stand beside their two limits, reading the step's bytes once and the
int8 multiply-adds of its tokens, all alternating in this process.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bitnet_ops.bench.harness import Budget, Timed, digits, interleave, percentile, summarize
from bitnet_ops.bench.limits import MachineLimits
from bitnet_ops.bench.memory import Workspace
from bitnet_ops.bench.model import BenchModel
from bitnet_ops.bench.pinning import use_threads
from bitnet_ops.bench.report import Report, Row
from bitnet_ops.bench.run_model import ModelBench, ModelSettings, read_run
from bitnet_ops.bench.session import Progress, measured
from bitnet_ops.errors import counted
from bitnet_ops.generate.engine import Engine, Event, Limits, NewToken, SchedulerOptions
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.kv_config import bytes_of_block
from bitnet_ops.nn.kv_pool import KVPool

_ENDLESS = 1 << 20
_WARM_STEPS = 3
_MAX_STEPS = 96  # of a figure
ROOM = 2 * _MAX_STEPS  # positions that a stream may grow by meanwhile


@dataclass(frozen=True)
class EngineSettings:
    """What to measure: numbers of streams behind contexts, and the model."""

    dummy: str = "2b-4t"
    formats: tuple[str, str] = ("2bit", "int8")
    kv_dtype: str = "bfloat16"
    streams: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (128, 2048)
    threads: tuple[int, ...] = (1,)
    block_size: int = 64
    cold_mib: int = 512
    quick: bool = False

    def model(self) -> ModelSettings:
        return ModelSettings(
            dummy=self.dummy, formats=(self.formats,), kv_dtypes=(self.kv_dtype,),
            threads=self.threads, cold_mib=self.cold_mib, quick=self.quick,
        )  # fmt: skip


class Streams:
    """An engine whose requests may be given a context without computing it.

    While `pretends` is set a step of the model costs nothing and gives equal logits: prompts are
    admitted at once, and their keys and values are whatever lies in the pool, which is filled with
    plausible numbers. Attributes: `step_s` and `model_s`, seconds of steps and of their model.
    """

    def __init__(
        self,
        model: BenchModel,
        positions: int,
        sequences: int,
        block_size: int,
        token_budget: int = SchedulerOptions.token_budget,
    ) -> None:
        self._model, self._filled = model, False
        self.pretends, self.step_s, self.model_s = False, 0.0, 0.0
        self._generator = torch.Generator().manual_seed(7)
        stand_in: Any = SimpleNamespace(config=model.config, step=self._run)
        blocks = -(-positions // block_size) + sequences + 1
        scheduling = SchedulerOptions(token_budget, prefix_cache=False)
        self.engine = engine_of(stand_in, model, blocks, block_size, scheduling)

    def _fill(self, pool: KVPool) -> None:
        some = torch.randn(pool.block_size, self._model.config.head_dim)
        if not self._model.kv_dtype.is_floating_point:
            some = (some * 30).clamp(-127, 127)
        for layer in (*pool.key_pool, *pool.value_pool):
            layer.transpose(1, 2).copy_(some.to(self._model.kv_dtype))
        for scale in (pool.key_scale, pool.value_scale):
            if scale is not None:
                scale.fill_(1 / 30)
        self._filled = True

    def _run(self, batch: StepBatch, pool: KVPool) -> Tensor:
        if not self._filled:
            self._fill(pool)
        if self.pretends:
            return torch.zeros(len(batch.logit_rows), self._model.config.vocab_size)
        start = time.perf_counter()
        logits: Tensor = self._model.model.step(batch, pool)
        self.model_s += time.perf_counter() - start
        return logits

    def step(self) -> list[Event]:
        start = time.perf_counter()
        events = self.engine.step()
        self.step_s += time.perf_counter() - start
        return events

    def ids(self, count: int) -> list[int]:
        vocab = self._model.config.vocab_size
        return torch.randint(0, vocab, (count,), generator=self._generator).tolist()

    def add(self, context: int, new_tokens: int = _ENDLESS) -> int:
        """A greedy request behind `context` random tokens."""
        return self.engine.add(self.ids(context), limits=Limits(new_tokens))

    def decoding(self, count: int, context: int) -> list[int]:
        """`count` requests that decode from now on."""
        self.pretends = True
        ids = [self.add(context) for _ in range(count)]
        silent = set(ids)
        while silent:
            silent -= {e.request_id for e in self.engine.step() if isinstance(e, NewToken)}
        self.pretends = False
        for _ in range(_WARM_STEPS):
            self.engine.step()
        return ids


def engine_of(
    runs: Any, model: BenchModel, blocks: int, block_size: int, scheduling: SchedulerOptions
) -> Engine:
    """An engine of so many blocks whose steps `runs` computes."""
    mib = blocks * bytes_of_block(model.config, block_size, model.kv_dtype) / 2**20
    return Engine(
        runs,
        kv_dtype=model.kv_dtype,
        kv_cache_mb=mib * (1 + 1e-9),
        block_size=block_size,
        scheduling=scheduling,
    )


def streams_row(
    bench: ModelBench, limits: MachineLimits, streams: int, context: int, block_size: int
) -> Row:
    """Tokens of `streams` requests that decode together."""
    use_threads(limits.threads)
    budget = Budget(bench.budget().seconds, 4 if bench.settings.quick else 16, _MAX_STEPS)
    prompts = streams * context  # all in one step, so that nobody decodes before the last is there
    run = Streams(bench.model, prompts + streams * ROOM, streams, block_size, 64 + prompts)
    run.decoding(streams, context)
    run.model_s, run.step_s, steps = 0.0, 0.0, 0
    read, read_bytes = read_run(bench, limits)
    macs = bench.model.macs_per_token() * streams
    peak, peak_macs = limits.peak.run(macs)

    def step(_: int) -> None:
        nonlocal steps
        steps += 1
        run.step()

    rounds = interleave([Timed(step), read, peak], budget, probe=limits.peak.speed)
    step_s, read_s, peak_s = rounds.usable()
    needed = bench.model.bytes().step(streams, context + steps // 2)
    reading = [s * needed / read_bytes for s in read_s]
    computing = [s * macs / peak_macs for s in peak_s]
    seconds = summarize(step_s)
    shares = [max(a, b) / s for a, b, s in zip(reading, computing, step_s, strict=True)]
    return {
        "kind": "streams",
        "threads": limits.threads,
        "streams": streams,
        "context": context,
        "tokens_per_s": digits(streams / seconds.median),
        "gap_ms": {**seconds.to_dict(1e3), "p99": digits(percentile(step_s, 99) * 1e3)},
        "reading_ms": digits(summarize(reading).median * 1e3),
        "computing_ms": digits(summarize(computing).median * 1e3),
        "share": summarize(shares).to_dict(),
        "outside_model": digits(1 - run.model_s / run.step_s),
        "steps": seconds.count,
        "disturbed": rounds.disturbed,
    }  # fmt: skip


def queue_row(bench: ModelBench, limits: MachineLimits, requests: int, block_size: int) -> Row:
    """Requests of mixed lengths that arrive one every few steps, from nothing to the last token."""
    use_threads(limits.threads)
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(16, 129, (requests,), generator=generator).tolist()
    new = torch.randint(8, 49, (requests,), generator=generator).tolist()
    run = Streams(bench.model, sum(prompts) + sum(new), requests, block_size)
    added: dict[int, float] = {}
    times: dict[int, list[float]] = defaultdict(list)
    start, step = time.perf_counter(), 0
    while len(added) < requests or run.engine.has_work:
        if step % 3 == 0 and len(added) < requests:
            number = len(added)
            added[run.add(prompts[number], new[number])] = time.perf_counter()
        for event in run.engine.step():
            if isinstance(event, NewToken):
                times[event.request_id].append(time.perf_counter())
        step += 1
    total = time.perf_counter() - start
    firsts = [times[i][0] - at for i, at in added.items()]
    gaps = [b - a for one in times.values() for a, b in zip(one, one[1:], strict=False)]
    return {
        "kind": "queue",
        "threads": limits.threads,
        "requests": requests,
        "prompt_tokens": sum(prompts),
        "new_tokens": sum(new),
        "tokens_per_s": digits(sum(new) / total),
        "first_token_ms": _spread(firsts),
        "gap_ms": _spread(gaps),
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    return {
        "p50": digits(percentile(seconds, 50) * 1e3),
        "p99": digits(percentile(seconds, 99) * 1e3),
    }


def _rows(bench: ModelBench, limits: MachineLimits, s: EngineSettings) -> list[Row]:
    size = s.block_size
    maximum = bench.model.config.max_position_embeddings
    rows = [
        streams_row(bench, limits, streams, context, size)
        for context in s.contexts
        for streams in s.streams
        if context + 64 < maximum
    ]
    rows.append(queue_row(bench, limits, 8 if s.quick else 24, size))
    return rows


More = Callable[[ModelBench, MachineLimits, EngineSettings], list[Row]]


def run(
    settings: EngineSettings,
    progress: Progress = lambda _: None,
    more: More = lambda bench, limits, settings: [],
) -> Report:
    """Measure everything and return the report. Threads are put back as they were.

    `more` measures further rows at every thread count.
    """

    def rows(ws: Workspace, limits: list[MachineLimits]) -> dict[str, Any]:
        progress(f"making {settings.dummy}")
        model = BenchModel(settings.dummy, *settings.formats, settings.kv_dtype)
        bench = ModelBench(ws, model, settings.model())
        found: list[Row] = []
        for one in limits:
            progress(f"timing {counted(one.threads, 'thread')}")
            found += _rows(bench, one, settings) + more(bench, one, settings)
        return {"rows": found}

    return measured(
        "engine", settings, lambda: Workspace(settings.cold_mib << 20, 0), rows, progress
    )
