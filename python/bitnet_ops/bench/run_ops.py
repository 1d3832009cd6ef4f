"""`bench ops`: which cases run at which settings, in which order.

It must not know the command line, nor how a case is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bitnet_ops import machine
from bitnet_ops.bench import cases_linear, cases_other, environment, report
from bitnet_ops.bench.cases import Case
from bitnet_ops.bench.harness import Budget
from bitnet_ops.bench.rows import Row, measure, measure_bulk
from bitnet_ops.bench.shapes import ModelShape, parse_shapes
from bitnet_ops.bench.workspace import Workspace

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What to run. tokens: the M of the products; seconds: time for one row, rivals not counted."""

    shapes: str = "2b-4t"
    tokens: tuple[int, ...] = (1, 4, 32)
    threads: tuple[int, ...] = (1,)
    quick: bool = False
    formats: tuple[str, ...] = ("canonical",)
    cold_mib: int = 512
    seconds: float = 0.5


def memories(m: int, *, quick: bool) -> list[bool]:
    """Cold (False) and hot (True). Quick: one of them for M > 1, hot where there are many.

    From 128 tokens on only hot: reading the weights is a small part of the time.
    """
    if m >= 128:
        return [True]
    if not quick or m == 1:
        return [False, True]
    return [m >= 16]


def model_cases(ws: Workspace, model: ModelShape, settings: Settings) -> Iterator[Case]:
    """Everything of a decoder layer and the head."""
    most = max(settings.tokens)
    few_or_many = sorted({1, most})
    hidden, heads = model.hidden_size, model.q_features
    for m in few_or_many:
        for hot in memories(m, quick=True):
            for weights in settings.formats:
                chosen: Any = {"hot": hot, "weight_format": weights}
                yield cases_linear.linear_case(ws, hidden, heads, m, **chosen)
                yield cases_linear.qkv_case(ws, model, m, **chosen)
                yield cases_linear.mlp_case(ws, model, m, **chosen)
    for m in few_or_many:
        yield from cases_other.row_cases(ws, model, m)
    for context in (512,) if settings.quick else (128, 512, 2048, 8192):
        for cache in cases_other.CACHES:
            yield cases_other.attention_case(ws, model, context, cache)
    for head_format in cases_other.HEAD_FORMATS:
        yield cases_other.head_case(ws, model, head_format)


def all_cases(ws: Workspace, settings: Settings) -> Iterator[Case]:
    """The cases of `settings`, made one at a time."""
    shapes = parse_shapes(settings.shapes)
    matrices = [m for model in shapes.models.values() for m in model.linears(quick=settings.quick)]
    for n, k in dict.fromkeys([*matrices, *shapes.matrices]):
        for m in settings.tokens:
            for hot in memories(m, quick=settings.quick):
                for weights in settings.formats:
                    yield cases_linear.matmul_case(ws, n, k, m, hot=hot, weight_format=weights)
    for model in shapes.models.values():
        yield from model_cases(ws, model, settings)


def make_workspace(settings: Settings) -> Workspace:
    """Both arenas; refused with the remedy when memory is short."""
    models = parse_shapes(settings.shapes).models.values()
    head = max((2 * model.vocab_size * model.hidden_size for model in models), default=0)
    cold = settings.cold_mib << 20
    memory = machine.memory_bytes()
    room = [r for r in (memory["available"], memory["limit"]) if r is not None]
    needed = cold + max(cold, head) + (1 << 29)
    if room and min(room) < needed:
        raise ValueError(
            f"bench: expected {needed >> 20} MiB of free memory, got {min(room) >> 20} MiB; "
            "lower --cold-mib, or choose --shapes demo"
        )
    return Workspace(cold, head)


def run(settings: Settings, progress: Progress = lambda _: None) -> report.Report:
    """Measure everything and return the report. Threads are put back as they were."""
    before, start = torch.get_num_threads(), time.perf_counter()
    progress("filling memory")
    ws = make_workspace(settings)
    env = environment.describe(ws, list(settings.threads))
    budget, rival_budget = Budget(settings.seconds), Budget(settings.seconds / 2, min_rounds=1)
    rows: list[Row] = []
    try:
        with torch.inference_mode():
            progress("limits")
            bulks = [measure_bulk(ws.ternary, t, Budget(0.5)) for t in settings.threads]
            for case in all_cases(ws, settings):
                progress(f"{case.name} {report.shape_text(case.shape)} {case.memory}")
                rows += [measure(case, bulk, budget, rival_budget) for bulk in bulks]
    finally:
        torch.set_num_threads(before)
    limits = [bulk.to_dict() for bulk in bulks]
    return report.build(
        env,
        asdict(settings),
        limits,
        rows,
        environment.warnings(env, limits),
        time.perf_counter() - start,
    )
