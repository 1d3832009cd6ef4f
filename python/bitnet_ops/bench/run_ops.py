"""`bench ops`: which cases run at which settings, in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bitnet_ops import machine
from bitnet_ops.bench import cases_ops, report
from bitnet_ops.bench.cases import Case
from bitnet_ops.bench.harness import Budget
from bitnet_ops.bench.limits import MachineLimits
from bitnet_ops.bench.measure import Row, measure
from bitnet_ops.bench.memory import Workspace
from bitnet_ops.bench.session import Progress, measured
from bitnet_ops.bench.shapes import HEAD_FORMATS, KV_DTYPES, USUAL, ModelShape, parse_shapes


@dataclass(frozen=True)
class OpsSettings:
    """What to run. tokens: the M of the products; seconds: for one row, baselines not counted."""

    shapes: str = "2b-4t"
    tokens: tuple[int, ...] = (1, 4, 32)
    threads: tuple[int, ...] = (1,)
    quick: bool = False
    formats: tuple[str, ...] = (USUAL,)
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


def model_cases(ws: Workspace, model: ModelShape, settings: OpsSettings) -> Iterator[Case]:
    """Everything of a decoder layer and the head."""
    few_and_many = sorted({1, max(settings.tokens)})
    for m in few_and_many:
        for hot in memories(m, quick=True):
            for weights in settings.formats:
                chosen: Any = {"hot": hot, "weight_format": weights}
                hidden, q = model.hidden_size, model.q_features
                yield cases_ops.linear_case(ws, hidden, q, m, **chosen)
                yield cases_ops.qkv_case(ws, model, m, **chosen)
                yield cases_ops.mlp_case(ws, model, m, **chosen)
    for m in few_and_many:
        yield from cases_ops.row_cases(ws, model, m)
    for context in (512,) if settings.quick else (128, 512, 2048, 8192):
        for kv_dtype in KV_DTYPES:
            yield cases_ops.attention_case(ws, model, context, kv_dtype)
            if cases_ops.pool_layout(model, kv_dtype) == "panels":
                yield cases_ops.paged_attention_case(ws, model, context, kv_dtype)
    for head_format in HEAD_FORMATS:
        yield cases_ops.head_case(ws, model, head_format)


def all_cases(ws: Workspace, settings: OpsSettings) -> Iterator[Case]:
    """The cases of `settings`, made one at a time."""
    shapes = parse_shapes(settings.shapes)
    matrices = [m for model in shapes.models.values() for m in model.linears(quick=settings.quick)]
    for n, k in dict.fromkeys([*matrices, *shapes.matrices]):
        for m in settings.tokens:
            for hot in memories(m, quick=settings.quick):
                for weights in settings.formats:
                    yield cases_ops.matmul_case(ws, n, k, m, hot=hot, weight_format=weights)
    for model in shapes.models.values():
        yield from model_cases(ws, model, settings)


def make_workspace(settings: OpsSettings) -> Workspace:
    """Cold memory of both kinds; rejected with the remedy when memory is short."""
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


def run(
    settings: OpsSettings,
    progress: Progress = lambda _: None,
    prepare: Callable[[Case], Case] = lambda case: case,
) -> report.Report:
    """Measure everything and return the report. Threads are put back as they were.

    `prepare` is given every case before it is measured, and may add baselines to it.
    """
    budget, baseline_budget = Budget(settings.seconds), Budget(settings.seconds / 2, min_rounds=1)

    def rows(ws: Workspace, limits: list[MachineLimits]) -> dict[str, Any]:
        found: list[Row] = []
        for case in map(prepare, all_cases(ws, settings)):
            progress(f"{case.name} {report.shape_text(case.shape)} {case.memory}")
            found += [measure(case, one, budget, baseline_budget) for one in limits]
        return {"ok": not any("wrong_result" in row["flags"] for row in found), "rows": found}

    return measured("ops", settings, lambda: make_workspace(settings), rows, progress)
