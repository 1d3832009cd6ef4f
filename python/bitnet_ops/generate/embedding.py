"""Texts as vectors: the hidden state of the last token, after the last norm, at length 1.

That is how decoder-only embedding models (microsoft/BitNet-embedding, Qwen3-Embedding) are trained:
last-token pooling, then L2. Texts share the steps of an engine of their own, whose next "token" is
a vector. It must not know text or files: token ids go in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitnet_ops.generate.engine_core import EngineCore
from bitnet_ops.generate.generation import Limits
from bitnet_ops.generate.request import Failed
from bitnet_ops.generate.sampling import Sampled
from bitnet_ops.generate.scheduler import SchedulerOptions
from bitnet_ops.models import Decoder
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.nn.kv_types import DEFAULT_BLOCK_SIZE

_OPTIONS = SchedulerOptions(prefix_cache=False, most_gap=float("inf"))


@torch.inference_mode()
def embed(
    model: Decoder, sequences: Sequence[Sequence[int]], dimensions: int | None = None
) -> Tensor:
    """One vector for each sequence of token ids, f32 [len(sequences), hidden], of length 1.

    `dimensions` keeps that many of the first ones (before the length is made 1), for models trained
    so that their beginning serves alone. A vector does not depend on its neighbours. Raises
    ValueError for an empty sequence, PromptError for one that the model cannot run.
    """
    hidden = model.config.hidden_size
    if dimensions is not None and not 1 <= dimensions <= hidden:
        raise ValueError(f"embed: expected dimensions from 1 to {hidden}, got {dimensions}")
    rows = torch.empty(len(sequences), hidden, dtype=torch.float32)
    for number, ids in enumerate(sequences, start=1):
        if not len(ids):
            raise ValueError(
                f"embed: expected at least one token in every text, got none in text {number} of "
                f"{len(sequences)}"
            )
    if len(sequences):
        _last_states(model, sequences, rows)
    rows = rows[:, :dimensions]
    return torch.nn.functional.normalize(rows, dim=-1)


def _last_states(model: Decoder, sequences: Sequence[Sequence[int]], rows: Tensor) -> None:
    """Write the state of every sequence's last token into its row."""
    longest = -(-max(map(len, sequences)) // DEFAULT_BLOCK_SIZE)
    pool = KVPool(model.config, longest + _OPTIONS.max_sequences, dtype=torch.float32)

    def keep(numbers: Sequence[int], states: Tensor) -> list[Sampled]:
        rows[list(numbers)] = states
        return [Sampled(0)] * len(numbers)

    core = EngineCore(
        lambda batch: model.step_states(batch, pool),
        pool,
        max_positions=model.config.max_position_embeddings,
        vocab_size=model.config.vocab_size,
        options=_OPTIONS,
        make_sampler=lambda number, _: number,  # of the row
        sample_rows=keep,
    )
    for number, ids in enumerate(sequences):
        core.add(ids, number, Limits(1))
    for event in core.run():
        if isinstance(event, Failed):
            raise event.error
