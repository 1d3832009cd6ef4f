"""`bench model`: which measurements of a whole model are taken, and what they say.

Prefill against the int8 peak, decode against reading the same bytes, both alternating with their
limit in this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitnet_ops.bench import report
from bitnet_ops.bench.harness import Budget, Timed, digits, interleave, paired_ratios, summarize
from bitnet_ops.bench.images import image_rows
from bitnet_ops.bench.limits import (
    ATTEMPTS,
    PLAUSIBLE,
    MachineLimits,
    ping_pong_ns,
    read_slots,
)
from bitnet_ops.bench.memory import Workspace
from bitnet_ops.bench.model import BenchModel
from bitnet_ops.bench.pinning import use_threads
from bitnet_ops.bench.report import Report, Row
from bitnet_ops.bench.session import Progress, Tell, measured
from bitnet_ops.dummy import model as dummy
from bitnet_ops.loading.weight_choice import WeightChoice, choose, choose_for_file
from bitnet_ops.loading.weight_probe import SMALL_FORMAT
from bitnet_ops.nn.storage import USUAL_FORMAT

DECODED = 64  # tokens behind a context, as in the tg64 of other engines
_READ_BYTES = 1 << 26
_READ_A_SECOND, _MACS_A_SECOND = 20e9, 120e9  # of a small machine


@dataclass(frozen=True)
class ModelSettings:
    """What to measure.

    dummy: which synthetic model; model: a model file instead, None for none.
    formats: pairs of weight format and head format; the first one gets every measurement, the
        others the decode step at context 0. "auto" is what a load for one text chooses on the most
        threads; where a probe decided, the layout that lost is measured as well, as one of the
        others.
    attention: which positions tokens attend to (config/attention.py), None: all.
    kv_dtypes: of the caches, of KV_TYPES; the first one gets every measurement, the others one
        sequence behind every context, and the prompts.
    images: sides of pictures in pixels, for a model that reads them.
    """

    dummy: str = "2b-4t"
    formats: tuple[tuple[str, str], ...] = (("2bit", "int8"),)
    prompts: tuple[int, ...] = (128, 512, 2048)
    contexts: tuple[int, ...] = (0, 2048, 8192)
    batches: tuple[int, ...] = (1, 2, 4, 8)
    threads: tuple[int, ...] = (1,)
    kv_dtypes: tuple[str, ...] = ("bfloat16",)
    cold_mib: int = 512
    quick: bool = False
    model: str | None = None
    attention: str | None = None
    images: tuple[int, ...] = ()


@dataclass
class ModelBench:
    """What the measurements share: cold memory to read beside them, the model, the settings."""

    ws: Workspace
    model: BenchModel
    settings: ModelSettings

    def attempts(self) -> int:
        """How often a figure that cannot be is taken; quick: once."""
        return 1 if self.settings.quick else ATTEMPTS

    def budget(self) -> Budget:
        """Of a decode figure: at least the 64 tokens of tg64, once; quick: 8."""
        minimum = 8 if self.settings.quick else DECODED
        return Budget(0.2 if self.settings.quick else 1.5, minimum, 512)


def read_run(bench: ModelBench, limits: MachineLimits) -> tuple[Timed, int]:
    """A run that reads far more than a cache, in the machine's best form, and its bytes."""
    size = min(_READ_BYTES, bench.ws.ternary.bytes.numel() // 2)
    return read_slots(bench.ws.ternary.slots(size), limits.form), size


def decode_row(bench: ModelBench, limits: MachineLimits, batch: int, context: int) -> Row:
    """A decode step; taken again while it is faster than reading its bytes."""
    for _ in range(bench.attempts()):
        row = _decode_once(bench, limits, batch, context)
        if not row["impossible"]:
            break
    return row


def _decode_once(bench: ModelBench, limits: MachineLimits, batch: int, context: int) -> Row:
    """A decode step beside reading as many bytes as it has to."""
    use_threads(limits.threads)
    read, read_bytes = read_run(bench, limits)
    step = bench.model.decode_run(batch, context, DECODED)
    rounds = interleave([step, read], bench.budget(), probe=limits.peak.speed)
    step_s, read_s = rounds.usable()
    # the mean length over the 64 tokens of a run
    needed = bench.model.bytes().step(batch, context + DECODED // 2)
    allowed = [s * needed / read_bytes for s in read_s]
    seconds, share = summarize(step_s), summarize(paired_ratios(allowed, step_s))
    return {
        "kind": "decode",
        **bench.model.formats,
        "threads": limits.threads,
        "batch": batch,
        "context": context,
        "tokens_per_s": digits(batch / seconds.median),
        "step_ms": seconds.to_dict(1e3),
        "bytes_per_step": needed,
        "limit_tokens_per_s": digits(batch / summarize(allowed).median),
        "share": share.to_dict(),
        # a model that a cache holds is read faster than memory: no share, but nothing wrong
        "impossible": share.median > PLAUSIBLE,
        "steps": seconds.count,
        "disturbed": rounds.disturbed,
        "ping_pong_ns": ping_pong_ns(),
    }


def prefill_row(bench: ModelBench, limits: MachineLimits, tokens: int, repeats: int) -> Row:
    """A prompt beside the int8 peak: the peak loop runs for 20 ms before and after each.

    The share is the median of all repeats, the time that of the shortest: a neighbour only ever
    adds to it.
    """
    use_threads(limits.threads)
    prefill = bench.model.prefill_run(tokens)
    macs = bench.model.macs_per_token() * tokens
    peak, peak_macs = limits.peak.run(macs)
    if tokens <= 128:
        prefill.call(0)
    seconds, allowed = [], []
    for _ in range(repeats):
        before = time_once(peak)
        seconds.append(time_once(prefill))
        allowed.append(0.5 * (before + time_once(peak)) * macs / peak_macs)
    shortest = min(seconds)
    return {
        "kind": "prefill",
        **bench.model.formats,
        "threads": limits.threads,
        "tokens": tokens,
        "tokens_per_s": digits(tokens / shortest),
        "seconds": digits(shortest),
        "gmac_s": digits(macs / shortest / 1e9),
        "share": digits(summarize(paired_ratios(allowed, seconds)).median),
        "repeats": repeats,
        "ping_pong_ns": ping_pong_ns(),
    }


def time_once(run: Timed) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run.call(0)
    return time.perf_counter() - start


def _rows(bench: ModelBench, all_limits: list[MachineLimits], *, first: bool) -> Iterator[Row]:
    s = bench.settings
    if not first:
        yield from (decode_row(bench, limits, 1, 0) for limits in all_limits)
        return
    for limits in all_limits:
        for kv_dtype in s.kv_dtypes:
            bench.model.use_kv_dtype(kv_dtype)
            yield from (decode_row(bench, limits, 1, context) for context in s.contexts)
            if kv_dtype == s.kv_dtypes[0]:
                yield from (decode_row(bench, limits, b, 0) for b in s.batches if b > 1)
            for tokens in _prompts(s, limits.threads):
                yield prefill_row(bench, limits, tokens, _repeats(tokens))
        bench.model.use_kv_dtype(s.kv_dtypes[0])
        yield from image_rows(bench.model, s.images, limits.threads)


def _prompts(settings: ModelSettings, threads: int) -> list[int]:
    """The prompts that are timed on so many threads: the longest on the most alone."""
    return [n for n in settings.prompts if n <= 512 or threads == max(settings.threads)]


def _repeats(tokens: int) -> int:
    return 3 if tokens <= 128 else 1


def about_minutes(settings: ModelSettings) -> int:
    """How long a synthetic model may take, from its sizes and the speed of a small machine."""
    weights = sum(n * k for n, k in dummy.matrices(settings.dummy).shapes)
    config = dummy.config(settings.dummy)
    step_s = (weights / 4 + config.vocab_size * config.hidden_size) / _READ_A_SECOND
    token_s = weights / _MACS_A_SECOND
    seconds = 20.0 * len(settings.formats)  # making the model
    for threads in settings.threads:
        rows = [1] * len(settings.contexts) + [batch for batch in settings.batches if batch > 1]
        min_s, steps = (0.2, 8) if settings.quick else (1.5, DECODED)
        row_s = [max(min_s, steps * max(step_s, batch * token_s)) for batch in rows]
        prompts = _prompts(settings, threads)
        tokens = sum(n * (_repeats(n) + (n <= 128)) for n in prompts)  # a short one goes before
        seconds += 10 + sum(row_s) + tokens * token_s
    return max(1, round(1.5 * len(settings.kv_dtypes) * seconds / 60))  # some rows are taken again


More = Callable[[ModelBench, list[MachineLimits]], list[Row]]


def run(
    settings: ModelSettings,
    progress: Progress = lambda _: None,
    more: More = lambda bench, limits: [],
    tell: Tell = lambda lines: None,
) -> Report:
    """Measure everything and return the report. Threads are put back as they were.

    `more` measures further rows of the model in the first pair of formats. `tell` takes the lines
    of the report as they come, all but `report.closing_lines`.
    """

    def rows(ws: Workspace, limits: list[MachineLimits]) -> dict[str, Any]:
        found: list[Row] = []
        models: list[dict[str, Any]] = []
        pairs, choices = _chosen(settings, progress)
        tell(["", *report.choice_lines(choices)])
        for number, (weights, head) in enumerate(pairs):
            progress(f"making {settings.model or settings.dummy}, {weights} + {head} head")
            made = BenchModel(
                settings.dummy,
                weights,
                head,
                settings.kv_dtypes[0],
                file=settings.model,
                attention=settings.attention,
            )
            models.append(_describe(made))
            tell([report.weights_line(settings.model or settings.dummy, models[-1])])
            progress(f"timing {made.label}")
            bench = ModelBench(ws, made, settings)
            for row in _rows(bench, limits, first=number == 0):
                tell(report.row_lines(row, found[-1] if found else None))
                found.append(row)
            found += more(bench, limits) if number == 0 else []
            del bench, made  # before the next one is made
        return {"models": models, "rows": found, "weight_choices": choices}

    return measured(
        "model", settings, lambda: Workspace(settings.cold_mib << 20, 0), rows, progress, tell
    )


def _chosen(
    settings: ModelSettings, progress: Progress
) -> tuple[list[tuple[str, str]], list[dict[str, Any]]]:
    """The pairs of formats, "auto" replaced, and what it means on each number of threads."""
    if all(weights != "auto" for weights, _ in settings.formats):
        return list(settings.formats), []
    progress("choosing the weight format")
    found = {threads: _choice(settings, threads) for threads in sorted(settings.threads)}
    best = found[max(found)]
    pairs = []
    for weights, head in settings.formats:
        pairs.append((best.weight_format if weights == "auto" else weights, head))
    if best.probe is not None:
        head = next(head for weights, head in settings.formats if weights == "auto")
        pairs += [(weights, head) for weights in (USUAL_FORMAT, SMALL_FORMAT)]
    rows = [
        {"threads": threads, "weights": choice.weight_format, "reason": choice.reason}
        for threads, choice in found.items()
    ]
    return list(dict.fromkeys(pairs)), rows


def _choice(settings: ModelSettings, threads: int) -> WeightChoice:
    use_threads(threads)
    if settings.model is not None:
        return choose_for_file(Path(settings.model))
    return choose(dummy.matrices(settings.dummy))


def _describe(model: BenchModel) -> dict[str, Any]:
    size = model.bytes()
    return {
        **model.formats,
        "body": size.body,
        "head_bytes": size.head,
        "per_position": size.per_position,
        "per_sequence": size.per_sequence,
        "macs_per_token": model.macs_per_token(),
    }
