"""Texts as vectors: the hidden state of the last token, after the last norm, at length 1.

That is how decoder-only embedding models (microsoft/BitNet-embedding, Qwen3-Embedding) are trained:
last-token pooling, then L2. It must not know text or files: token ids go in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitnet_ops.models import Decoder
from bitnet_ops.nn.kv_cache import KVCache

_PIECE_TOKENS = 256  # of a forward; bounds the memory of a long text, not its result


@torch.inference_mode()
def embed(
    model: Decoder, sequences: Sequence[Sequence[int]], dimensions: int | None = None
) -> Tensor:
    """One vector for each sequence of token ids, f32 [len(sequences), hidden], of length 1.

    `dimensions` keeps that many of the first ones (before the length is made 1), for models trained
    so that their beginning serves alone. Each sequence runs by itself, so a vector does not depend
    on its neighbours. Raises ValueError for an empty sequence, and as the model does.
    """
    hidden = model.config.hidden_size
    if dimensions is not None and not 1 <= dimensions <= hidden:
        raise ValueError(f"embed: expected dimensions from 1 to {hidden}, got {dimensions}")
    rows = torch.empty(len(sequences), hidden)
    for row, ids in zip(rows, sequences, strict=True):
        if not ids:
            raise ValueError("embed: expected at least one token in every text, got none")
        row.copy_(_last_state(model, list(ids)))
    rows = rows[:, :dimensions]
    return torch.nn.functional.normalize(rows, dim=-1)


def _last_state(model: Decoder, ids: list[int]) -> Tensor:
    cache = KVCache(model.config, 1, len(ids), torch.float32)
    for piece in torch.tensor([ids]).split(_PIECE_TOKENS, dim=1):
        states = model.hidden(piece, cache)
    return states[0, -1]
