"""How the goals that speak of a whole model are measured: step, overhead, regions, prefill.

They need a model in memory, so they run after the others, one model at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.goal_results import Measured
from benchmarks.step_breakdown import parts_row
from bitnet_ops import _runtime
from bitnet_ops.bench import run_model
from bitnet_ops.bench.limits import MachineLimits
from bitnet_ops.bench.memory import Workspace
from bitnet_ops.bench.model import BenchModel
from bitnet_ops.bench.pinning import use_threads
from bitnet_ops.bench.run_model import DECODED, ModelBench
from bitnet_ops.bench.shapes import USUAL


@dataclass
class StepContext:
    """Cold memory, the name of the model, and the model that was made last."""

    ws: Workspace
    settings: run_model.ModelSettings
    limits: Callable[[int], MachineLimits]
    bench: ModelBench | None = None
    asked: tuple[str, str] = ("", "")

    def bench_of(self, weight_format: str, head_format: str) -> ModelBench:
        """The model in these formats; one at a time is kept."""
        if self.asked != (weight_format, head_format):
            self.bench = None  # first, so that both are never there at once
            self.asked = weight_format, head_format
            made = BenchModel(
                self.settings.dummy, weight_format, head_format, self.settings.kv_dtypes[0]
            )
            self.bench = ModelBench(self.ws, made, self.settings)
        assert self.bench is not None
        return self.bench

    def usual(self) -> ModelBench:
        """The model as it is loaded without being asked for anything."""
        return self.bench_of(USUAL, "int8")


def step(c: StepContext, threads: int, weights: str, head: str) -> Measured:
    """Share of reading of a decode step at context 0, over 64 tokens."""
    bench = c.bench_of(weights, head)
    if (bench.model.weight_format, bench.model.head_format) != (weights, head):
        return Measured(None, f"models come with {bench.model.label}", built=False)
    row = run_model.decode_row(bench, c.limits(threads), 1, 0)
    note = f"{row['tokens_per_s']:.1f} of {row['limit_tokens_per_s']:.1f} tokens/s"
    return Measured(row["share"]["median"], note, row["disturbed"])


def overhead(c: StepContext, threads: int) -> Measured:
    """The share of a step that its kernels, called one by one, do not account for."""
    row = parts_row(c.usual(), c.limits(threads), 0)
    note = f"{row['rest_ms']:.2f} of {row['step_ms']:.2f} ms"
    if row["impossible"]:
        note = f"parts called one by one take longer than the step: {note}"
    return Measured(row["overhead"], note, row["disturbed"])


def regions(c: StepContext, threads: int) -> Measured:
    """Parallel regions of a decode step, divided by the layers."""
    bench = c.usual()
    use_threads(max(threads, 2))  # one thread opens none
    run = bench.model.decode_run(1, 0, DECODED)
    run.call(0)
    before = _runtime.region_count()
    run.call(1)
    count = _runtime.region_count() - before
    layers = bench.model.config.num_hidden_layers
    return Measured(count / layers, f"{count} a step, {layers} layers")


def prefill(c: StepContext, threads: int, tokens: tuple[int]) -> Measured:
    """Share of the int8 peak of a prompt's ternary products, everything else counted as loss."""
    row = run_model.prefill_row(c.usual(), c.limits(threads), tokens[0], 3)
    return Measured(row["share"], f"{row['tokens_per_s']:.0f} tokens/s")


QUANTITIES: dict[str, Callable[..., Measured]] = {
    f.__name__: f for f in (step, overhead, regions, prefill)
}
