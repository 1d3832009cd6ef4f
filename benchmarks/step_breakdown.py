"""Where the time of a decode step goes: its kernels called one by one, in the order of the model.

A part's time is that of its kernels over all layers, each reading its own weights from memory, less
what an empty call of an op with a parallel region costs. What is left of the step is not kernels:
norms, quantisation, rotation, dispatch, waiting.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.goal_table import MIN_OVERHEAD
from bitnet_ops import _runtime, ops
from bitnet_ops.bench.harness import Budget, Timed, digits, interleave, summarize
from bitnet_ops.bench.limits import MachineLimits
from bitnet_ops.bench.model import BenchModel
from bitnet_ops.bench.pinning import use_threads
from bitnet_ops.bench.report import Row, Table, number
from bitnet_ops.bench.run_model import DECODED, ModelBench, read_run
from bitnet_ops.bench.session import empty_call
from bitnet_ops.models.step_batch import SequenceStep, StepBatch
from bitnet_ops.nn.kv_cache import KVCache

Call = Callable[[], object]
EMPTY_CALLS = 30  # in a row, as a step makes 200 and more
PARTS = ("qkv", "attention", "o", "gate/up", "down", "head")


def part_runs(model: BenchModel, batch: int, context: int) -> dict[str, tuple[Timed, int]]:
    """Part -> (a run of all its kernels of one step, how many calls of ops those are)."""
    calls: dict[str, list[Call]] = {}
    inputs = _Inputs(batch)
    for part, modules in model.projections():
        calls.setdefault(part, []).extend(_product(module, inputs) for module in modules)
    cache = model.cache(batch, max(context, 1), 0)
    calls["attention"] = _attention_calls(model, cache)
    calls["head"] = [_head_call(model, batch)]
    return {part: (_run(found), len(found)) for part, found in calls.items()}


def _run(calls: list[Call]) -> Timed:
    def run(_: int) -> None:
        for call in calls:
            call()

    return Timed(run)


class _Inputs:
    """Quantised activations of each width, made once."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def get(self, k: int) -> tuple[Tensor, Tensor]:
        if k not in self._made:
            x = torch.randint(-127, 128, (self.batch, k), dtype=torch.int8)
            self._made[k] = (x, torch.full((self.batch,), 0.01))
        return self._made[k]


def _product(module: torch.nn.Module, inputs: _Inputs) -> Call:
    weight, scale = module.get_buffer("weight"), module.get_buffer("weight_scale")
    n, k = int(module.out_features), int(module.in_features)  # type: ignore[arg-type]
    x, x_scale = inputs.get(k)
    if inputs.batch == 1:
        return lambda: ops.gemv(weight, x[0], x_scale, scale, (n, k))
    return lambda: ops.gemm(weight, x, x_scale, scale, (n, k))


def _attention_calls(model: BenchModel, cache: KVCache) -> list[Call]:
    c = model.config
    lengths = cache.lengths.tolist()
    batch = StepBatch.of(
        [
            SequenceStep([0], length - 1, blocks)
            for length, blocks in zip(lengths, cache.blocks, strict=True)
        ],
        cache.pool.block_size,
    )
    query = torch.randn(cache.batch, c.num_attention_heads, c.head_dim).bfloat16()
    scale = c.head_dim**-0.5

    def call(layer: int) -> Call:
        return lambda: cache.pool.attend(layer, query, batch, scale)

    return [call(layer) for layer in range(c.num_hidden_layers)]


def _head_call(model: BenchModel, batch: int) -> Call:
    x = torch.randn(batch, model.config.hidden_size)
    buffers = dict(model.head().named_buffers())
    weight, scale = buffers["weight"], buffers.get("scale")
    shape = model.config.vocab_size, model.config.hidden_size
    return lambda: ops.lm_head(x, weight, scale, shape)


def empty_regions() -> Timed:
    """EMPTY_CALLS calls of an op and a parallel region, with next to no work in any.

    Many, as a step has: one call alone, after a step has driven Python and torch out of all caches,
    takes ten times as long.
    """
    op, region = empty_call().call, _runtime.probe_int8_peak

    def call(i: int) -> None:
        for _ in range(EMPTY_CALLS):
            op(i)
            region(0)

    return Timed(call)


def parts_row(bench: ModelBench, limits: MachineLimits, context: int) -> Row:
    """The time of a step by layer part; taken again while the parts take longer than the step."""
    for _ in range(bench.attempts()):
        row = _parts_once(bench, limits, context)
        if not row["impossible"]:
            break
    return row


def _parts_once(bench: ModelBench, limits: MachineLimits, context: int) -> Row:
    """The step and its parts, all alternating."""
    use_threads(limits.threads)
    parts = part_runs(bench.model, 1, context)
    read, read_bytes = read_run(bench, limits)
    runs = [bench.model.decode_run(1, context, DECODED), read, empty_regions()]
    runs += [parts[p][0] for p in PARTS]
    quick = bench.settings.quick
    rounds = interleave(runs, Budget(0.2, 3) if quick else Budget(2.0, 15), probe=limits.peak.speed)
    step_s, read_s, empty_s, *part_s = rounds.usable()
    # The usual call: with the shortest one the parts would keep a piece of every call, and the 180
    # of a step would come to more than the step. Rounds in which threads waited are left out.
    empty = summarize(empty_s).median / EMPTY_CALLS
    medians = {p: summarize(s).median for p, s in zip(PARTS, part_s, strict=True)}
    net = {p: max(0.0, s - parts[p][1] * empty) for p, s in medians.items()}
    step = summarize(step_s).median
    limit = summarize(read_s).median * bench.model.bytes().step(1, context) / read_bytes
    overhead = (step - sum(net.values())) / step
    return {
        "kind": "parts",
        **bench.model.formats,
        "threads": limits.threads,
        "context": context,
        "step_ms": digits(step * 1e3),
        "limit_ms": digits(limit * 1e3),
        "parts_ms": {p: digits(s * 1e3) for p, s in net.items()},
        "rest_ms": digits((step - sum(net.values())) * 1e3),
        "overhead": digits(overhead),
        "impossible": overhead < MIN_OVERHEAD,
        "empty_call_us": digits(empty * 1e6),
        "op_calls": {p: parts[p][1] for p in PARTS},
        "disturbed": rounds.disturbed,
    }


def parts_rows(bench: ModelBench, all_limits: list[MachineLimits]) -> list[Row]:
    """At every thread count, behind the first two contexts of the settings."""
    return [
        parts_row(bench, limits, c) for limits in all_limits for c in bench.settings.contexts[:2]
    ]


def parts_table(rows: list[Row]) -> Table:
    """One line for each row of the kind "parts"."""
    titles = ["weights", "head", "T", "context", "step", "reading alone", *PARTS]
    titles += ["rest", "rest, share"]
    cells = [
        [
            *(str(row[name]) for name in ("weights", "head", "threads", "context")),
            number(row["step_ms"]),
            number(row["limit_ms"]),
            *(number(value) for value in row["parts_ms"].values()),
            f"{row['rest_ms']:.2f}",
            "parts > step" if row["impossible"] else f"{row['overhead']:.1%}",
        ]
        for row in rows
    ]
    return "Where a decode step goes, ms", titles, cells
