"""`bench model`: which measurements of a whole model are taken, and what they say.

Prefill against the int8 peak, decode against reading the same bytes, both alternating with their
limit in this process; the parts of a step; other engines in the same run. It must not know the
command line, nor how a report is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bitnet_ops import _runtime, ops
from bitnet_ops.bench import environment
from bitnet_ops.bench.goals import LEAST_OVERHEAD
from bitnet_ops.bench.harness import Budget, Run, interleave
from bitnet_ops.bench.limits import ping_pong_ns
from bitnet_ops.bench.parts import part_runs
from bitnet_ops.bench.pinning import unpinned, use_threads
from bitnet_ops.bench.rivals import Rival, installed_rivals, missing
from bitnet_ops.bench.rows import ATTEMPTS, PLAUSIBLE, Bulk, Row, digits, measure_bulk, summary_dict
from bitnet_ops.bench.stats import paired_ratios, summarize
from bitnet_ops.bench.subject import PARTS, Subject
from bitnet_ops.bench.workspace import Workspace

Progress = Callable[[str], None]
SCHEMA = "bitnet_ops.bench.model"
SCHEMA_VERSION = 1
DECODED = 64  # tokens behind a context, as in the tg64 of other engines
_READ_BYTES = 1 << 26
_PILOT = 16  # tokens of a prompt that no engine takes long over: it predicts the longer ones


@dataclass(frozen=True)
class Settings:
    """What to measure.

    dummy: which synthetic model; model: a model file instead, None for none.
    formats: pairs of weight format and head format; the first one gets every measurement, the
        others the decode step at context 0.
    kv_dtype: of the caches, "bfloat16" or "int8".
    rivals: names of other engines; rival_seconds: what one figure of theirs may take.
    """

    dummy: str = "2b-4t"
    formats: tuple[tuple[str, str], ...] = (("2bit", "int8"),)
    prompts: tuple[int, ...] = (128, 512, 2048)
    contexts: tuple[int, ...] = (0, 2048, 8192)
    batches: tuple[int, ...] = (1, 2, 4, 8)
    threads: tuple[int, ...] = (1,)
    kv_dtype: str = "bfloat16"
    rivals: tuple[str, ...] = ()
    rival_seconds: float = 60.0
    cold_mib: int = 512
    quick: bool = False
    model: str | None = None


@dataclass
class Bench:
    """What the measurements share: cold memory to read beside them, limits, the model."""

    ws: Workspace
    subject: Subject
    settings: Settings

    def attempts(self) -> int:
        """How often a figure that cannot be is taken; quick: once."""
        return 1 if self.settings.quick else ATTEMPTS

    def budget(self) -> Budget:
        """Of a decode figure: at least the 64 tokens of tg64, once; quick: 8."""
        least = 8 if self.settings.quick else DECODED
        return Budget(0.2 if self.settings.quick else 1.5, least, 512)


def read_run(bench: Bench, bulk: Bulk) -> tuple[Run, int]:
    """A run that reads far more than a cache, in the machine's best form, and its bytes."""
    size = min(_READ_BYTES, bench.ws.ternary.bytes.numel() // 2)
    windows, form = bench.ws.ternary.slots(size), bulk.form
    count = len(windows)
    return Run(lambda i: ops._probe_read(windows[i % count], form.streams, form.distance)), size


def decode_row(bench: Bench, bulk: Bulk, batch: int, context: int) -> Row:
    """A decode step; taken again while it is faster than reading its bytes."""
    for _ in range(bench.attempts()):
        row = _decode_once(bench, bulk, batch, context)
        if not row["impossible"]:
            break
    return row


def _decode_once(bench: Bench, bulk: Bulk, batch: int, context: int) -> Row:
    """A decode step beside reading as many bytes as it has to."""
    use_threads(bulk.threads)
    read, read_bytes = read_run(bench, bulk)
    step = bench.subject.decode_run(batch, context, DECODED)
    rounds = interleave([step, read], bench.budget(), probe=bulk.peak.speed)
    step_s, read_s = rounds.usable()
    # the mean length over the 64 tokens of a run
    needed = bench.subject.bytes().step(batch, context + DECODED // 2)
    allowed = [s * needed / read_bytes for s in read_s]
    time, limit = summarize(step_s), summarize(allowed)
    share = summarize(paired_ratios(allowed, step_s))
    return {
        "kind": "decode",
        "weights": bench.subject.weight_format,
        "head": bench.subject.head_format,
        "threads": bulk.threads,
        "batch": batch,
        "context": context,
        "tokens_per_s": digits(batch / time.median),
        "step_ms": summary_dict(time.scaled(1e3)),
        "bytes_per_step": needed,
        "limit_tokens_per_s": digits(batch / limit.median),
        "share": summary_dict(share),
        # a model that a cache holds is read faster than memory: no share, but nothing wrong
        "impossible": share.median > PLAUSIBLE,
        "regions": regions_per_step(bench.subject),
        "steps": time.count,
        "disturbed": rounds.disturbed,
        "ping_pong_ns": ping_pong_ns(),
    }


def regions_per_step(subject: Subject) -> int | None:
    """Parallel regions of one decode step; None where the library does not count them."""
    count = getattr(_runtime, "region_count", None)
    if count is None:
        return None
    run = subject.decode_run(1, 0, DECODED)
    run.call(0)
    before = count()
    run.call(1)
    return int(count() - before)


def prefill_row(bench: Bench, bulk: Bulk, tokens: int, repeats: int) -> Row:
    """A prompt beside the int8 peak: the peak loop runs for 20 ms before and after each.

    The share is the median of all repeats, the time that of the shortest: a neighbour only ever
    adds to it.
    """
    use_threads(bulk.threads)
    subject = bench.subject
    prefill = subject.prefill_run(tokens)
    macs = subject.macs_per_token() * tokens
    peak, peak_macs = bulk.peak.run(macs)
    if tokens <= 128:
        prefill.call(0)
    seconds, allowed = [], []
    for _ in range(repeats):
        before = _seconds(peak)
        seconds.append(_seconds(prefill))
        allowed.append(0.5 * (before + _seconds(peak)) * macs / peak_macs)
    shortest = min(seconds)
    return {
        "kind": "prefill",
        "weights": subject.weight_format,
        "head": subject.head_format,
        "threads": bulk.threads,
        "tokens": tokens,
        "tokens_per_s": digits(tokens / shortest),
        "seconds": digits(shortest),
        "gmac_s": digits(macs / shortest / 1e9),
        "share": digits(summarize(paired_ratios(allowed, seconds)).median),
        "repeats": repeats,
        "ping_pong_ns": ping_pong_ns(),
    }


def _seconds(run: Run) -> float:
    start = time.perf_counter()
    run.call(0)
    return time.perf_counter() - start


def empty_call() -> Run:
    """A call of an op that enters and leaves a parallel region and does next to nothing in it."""
    seed = torch.zeros(1, dtype=torch.uint8)
    return Run(lambda _: ops._probe_int8_peak(seed, 0))


def parts_row(bench: Bench, bulk: Bulk, context: int) -> Row:
    """The time of a step by layer part; taken again while the parts take longer than the step."""
    for _ in range(bench.attempts()):
        row = _parts_once(bench, bulk, context)
        if not row["impossible"]:
            break
    return row


def _parts_once(bench: Bench, bulk: Bulk, context: int) -> Row:
    """The step and its parts, all alternating."""
    use_threads(bulk.threads)
    subject = bench.subject
    parts = part_runs(subject, 1, context)
    read, read_bytes = read_run(bench, bulk)
    runs = [subject.decode_run(1, context, DECODED), read, empty_call()]
    runs += [parts[p][0] for p in PARTS]
    least = 3 if bench.settings.quick else 15
    budget = Budget(0.2 if bench.settings.quick else 2.0, least)
    rounds = interleave(runs, budget, probe=bulk.peak.speed)
    step_s, read_s, empty_s, *part_s = rounds.usable()
    # The usual call: with the shortest one the parts would keep a piece of every call, and the 180
    # of a step would come to more than the step. Rounds in which threads waited are left out.
    empty = summarize(empty_s).median
    medians = {p: summarize(s).median for p, s in zip(PARTS, part_s, strict=True)}
    net = {p: max(0.0, s - parts[p][1] * empty) for p, s in medians.items()}
    step = summarize(step_s).median
    limit = summarize(read_s).median * subject.bytes().step(1, context) / read_bytes
    overhead = (step - sum(net.values())) / step
    return {
        "kind": "parts",
        "weights": subject.weight_format,
        "head": subject.head_format,
        "threads": bulk.threads,
        "context": context,
        "step_ms": digits(step * 1e3),
        "limit_ms": digits(limit * 1e3),
        "parts_ms": {p: digits(s * 1e3) for p, s in net.items()},
        "rest_ms": digits((step - sum(net.values())) * 1e3),
        "overhead": digits(overhead),
        "impossible": overhead < LEAST_OVERHEAD,
        "empty_call_us": digits(empty * 1e6),
        "op_calls": {p: parts[p][1] for p in PARTS},
        "disturbed": rounds.disturbed,
    }


def rival_rows(bench: Bench, bulk: Bulk, rival: Rival) -> list[Row]:
    """The rival's decode step at context 0, alternating with ours, and its prefill."""
    use_threads(bulk.threads)
    rows = []
    ours, theirs = bench.subject.decode_run(1, 0, DECODED), rival.decode_run(bulk.threads)
    # a pause, so that threads of theirs that still spin do not take the CPUs from ours
    pause = Run(lambda _: time.sleep(0.01))
    budget = Budget(bench.settings.rival_seconds / 4, 3, 16)
    rounds = interleave([ours, theirs, pause], budget)
    ours_s, theirs_s, _ = rounds.usable()
    ratio = summarize(paired_ratios(theirs_s, ours_s))
    common = {"kind": "rival", "name": rival.name, "threads": bulk.threads}
    step = summarize(theirs_s)
    rows.append(
        common
        | {
            "what": "decode",
            "tokens": 1,
            "tokens_per_s": digits(1 / step.median),
            "speedup": summary_dict(ratio),
            "disturbed": rounds.disturbed,
        }
    )
    predicted = 0.0
    prompts = sorted({_PILOT, *bench.settings.prompts})
    for tokens in prompts:
        if predicted > bench.settings.rival_seconds:
            note = f"left out: about {predicted:.0f} s"
            rows.append(common | {"what": "prefill", "tokens": tokens, "note": note})
            continue
        seconds = _seconds(rival.prefill_run(tokens, bulk.threads))
        mine = _seconds(bench.subject.prefill_run(tokens))
        rate = digits(tokens / seconds)
        measured = {"tokens_per_s": rate, "speedup": summary_dict(summarize([seconds / mine]))}
        rows.append(common | {"what": "prefill", "tokens": tokens} | measured)
        later = [t for t in prompts if t > tokens]
        predicted = seconds * later[0] / tokens if later else 0.0
    return rows


def _all_rivals(bench: Bench, bulks: list[Bulk], progress: Progress) -> list[Row]:
    rows = []
    for rival in installed_rivals(bench.settings.rivals, bench.settings.dummy):
        progress(f"timing {rival.name}")
        rows += rival_rows(bench, max(bulks, key=lambda bulk: bulk.threads), rival)
        rival.close()
    return rows


def _format_rows(bench: Bench, bulks: list[Bulk], *, first: bool) -> list[Row]:
    s = bench.settings
    if not first:
        return [decode_row(bench, bulk, 1, 0) for bulk in bulks]
    rows = []
    for bulk in bulks:
        rows += [decode_row(bench, bulk, 1, context) for context in s.contexts]
        rows += [decode_row(bench, bulk, b, 0) for b in s.batches if b > 1]
        rows += [parts_row(bench, bulk, context) for context in s.contexts[:2]]
        most = max(bulk.threads for bulk in bulks)
        for tokens in s.prompts:
            if tokens <= 512 or bulk.threads == most:
                rows.append(prefill_row(bench, bulk, tokens, 3 if tokens <= 128 else 1))
    return rows


def run(settings: Settings, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Measure everything and return the report. Threads are put back as they were."""
    before, start = torch.get_num_threads(), time.perf_counter()
    progress("filling memory")
    ws = Workspace(settings.cold_mib << 20, 0)
    env = environment.describe(ws, list(settings.threads))
    rows: list[Row] = []
    subjects = []
    try:
        with torch.inference_mode():
            bulks = [measure_bulk(ws.ternary, t, Budget(0.5)) for t in settings.threads]
            for number, (weights, head) in enumerate(settings.formats):
                progress(f"making {settings.model or settings.dummy}, {weights} + {head} head")
                subject = Subject(
                    settings.dummy, weights, head, settings.kv_dtype, file=settings.model
                )
                bench = Bench(ws, subject, settings)
                size = subject.bytes()
                subjects.append(
                    {
                        "weights": subject.weight_format,
                        "head": subject.head_format,
                        "body": size.body,
                        "head_bytes": size.head,
                        "per_position": size.per_position,
                        "macs_per_token": subject.macs_per_token(),
                    }
                )
                progress(f"timing {subject.label}")
                rows += _format_rows(bench, bulks, first=number == 0)
                if number == 0:
                    with unpinned():
                        rows += _all_rivals(bench, bulks, progress)
                del bench, subject
    finally:
        torch.set_num_threads(before)
    limits = [bulk.to_dict() for bulk in bulks]
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "seconds": round(time.perf_counter() - start, 1),
        "environment": env,
        "settings": asdict(settings),
        "limits": limits,
        "warnings": environment.warnings(env, limits),
        "rivals_missing": missing(settings.rivals),
        "models": subjects,
        "rows": rows,
    }
