"""The layout "panels" of a pool's blocks (`ops.paged_attention`), seen from Python.

Sixteen positions lie together: of keys 4-byte words of neighbouring channels stand side by side for
all sixteen, of values 4-byte words of neighbouring positions for every channel. It must not know
whose memory it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

PANEL = 16  # positions that lie together


def best_layout(dtype: torch.dtype, block_size: int, head_dim: int) -> str:
    """How a pool should lie: in "panels" where possible, or "rows"."""
    possible = dtype in (torch.bfloat16, torch.int8)
    return "panels" if possible and not (block_size % PANEL or head_dim % PANEL) else "rows"


def rows_of_panels(memory: Tensor, *, keys: bool) -> Tensor:
    """The rows [..., positions, D] of such memory in panels; a copy."""
    *outer, positions, dim = memory.shape
    word = 4 // memory.itemsize
    panels = *outer, positions // PANEL
    if keys:
        words = memory.reshape(*panels, dim // word, PANEL, word).transpose(-3, -2)
    else:
        words = memory.reshape(*panels, PANEL // word, dim, word).transpose(-2, -1)
    return words.reshape(memory.shape)


def panels_of_rows(rows: Tensor, *, keys: bool) -> Tensor:
    """What `rows_of_panels` undoes: rows [..., positions, D] as panels of that shape; a copy."""
    *outer, positions, dim = rows.shape
    word = 4 // rows.itemsize
    panels = *outer, positions // PANEL
    if keys:
        words = rows.reshape(*panels, PANEL, dim // word, word).transpose(-3, -2)
    else:
        words = rows.reshape(*panels, PANEL // word, word, dim).transpose(-2, -1)
    return words.reshape(rows.shape)
