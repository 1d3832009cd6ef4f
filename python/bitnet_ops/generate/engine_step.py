"""One step of the model: planned tokens of requests in, their next tokens out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from bitnet_ops import _runtime
from bitnet_ops.generate.causal_model import CausalModel
from bitnet_ops.generate.engine_memory import EngineMemory
from bitnet_ops.generate.sampling import Sampled, draws_of, sample_steps
from bitnet_ops.generate.scheduler import Scheduler
from bitnet_ops.generate.step_plan import PlannedStep
from bitnet_ops.models.step_batch import StepBatch


@torch.inference_mode()
def run_model(
    model: CausalModel, memory: EngineMemory, steps: Sequence[PlannedStep]
) -> Sequence[tuple[list[Sampled], Exception | None]]:
    """The model over the tokens of `steps`; then the next tokens of each request, or its error."""
    wanted = [step.logits for step in steps]
    samplers, drafts = [s.request.sampler for s in steps], [s.drafts for s in steps]
    batch = StepBatch.of(
        [step.sequence(logits) for step, logits in zip(steps, wanted, strict=True)],
        memory.pool.block_size,
        _largest(sampler.largest for sampler in samplers),
        draws_of(samplers, wanted),
    )
    logits = model.step(batch, memory.pool)
    _count_what_was_read(model, memory.scheduler, steps)
    return sample_steps(samplers, drafts, wanted, logits)


def _count_what_was_read(
    model: CausalModel, scheduler: Scheduler, steps: Sequence[PlannedStep]
) -> None:
    """Pages that policies let attention read, and inputs that sparsity lets products read."""
    if getattr(model.config, "policies", ()):
        for step, (read, pages) in zip(steps, _runtime.attention_pages(), strict=False):
            step.request.attention.add(read, pages)
            scheduler.attention.add(read, pages)
    if getattr(model.config, "sparsity", None) is not None:
        skipped, inputs = _runtime.activation_zeros()
        scheduler.inputs.add(inputs - skipped, inputs)


def _largest(wanted: Iterable[int]) -> int:
    """How many largest logits of a row decide the next token of every request; 0: all."""
    counts = set(wanted)
    return 0 if 0 in counts else max(counts)
