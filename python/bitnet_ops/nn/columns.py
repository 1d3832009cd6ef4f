"""A ternary matrix a second time, as columns: what products read that leave zeros out.

A matrix that is a program's gets them when the program is bound, once. It must not know programs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from bitnet_ops.memory.arena import Arena
from bitnet_ops.nn.copies import Copies
from bitnet_ops.nn.packing import PackedWeight

ROWS, LINE = 256, 64  # of a panel, bytes of a column in it: csrc/format/layout.h
_FIELDS = ROWS // LINE
_COPIES = Copies()


def columns_of(packed: PackedWeight) -> Tensor:
    """uint8 [ceil(N / 256), K, 64] of a weight [N, K]; the one made before, if it is unchanged.

    Byte r of a line holds the codes of rows r, 64 + r, 128 + r and 192 + r of the panel, from the
    low bits up.
    """
    return _COPIES.get(packed.weight, lambda: _columns(packed))


def forget_columns(weight: Tensor) -> None:
    """Free those of a weight, once no program reads them."""
    _COPIES.forget(weight)


def _columns(packed: PackedWeight) -> Tensor:
    rows, k = packed.out_features, packed.in_features
    panels = -(-rows // ROWS)
    columns: Tensor = Arena(panels * k * LINE).take((panels, k, LINE))
    codes = F.pad(packed.codes() + 1, (0, 0, 0, panels * ROWS - rows), value=1).view(torch.uint8)
    fields = codes.view(panels, _FIELDS, LINE, k)
    lines = fields[:, 0]
    for field in range(1, _FIELDS):
        lines = lines | fields[:, field] << 2 * field
    return columns.copy_(lines.transpose(1, 2))
