"""The screen of an int8 head: its upper six bits a second time, for steps that want one best token.

Such a step reads the screen, bounds every logit by it, and then reads the rows of the head that can
be the best. A head that is a program's gets its screen when the program is bound, once. It must not
know programs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from bitnet_ops.memory.arena import Arena
from bitnet_ops.nn.copies import Copies

FEATURES, LINE = 256, 64  # of a block, and in a line of it: csrc/format/layout.h
_ROWS = 4096  # made at once
_COPIES = Copies()


def screen_of(weight: Tensor) -> Tensor:
    """int32 [V * (48 * ceil(K / 256) + 1)] of int8 [V, K]; the one made before, if unchanged.

    The bytes of layout "screen" in docs/reference/layouts.md: the rows, then a number for each.
    """
    return _COPIES.get(weight, lambda: _screen(weight))


def _screen(weight: Tensor) -> Tensor:
    rows, k = weight.shape
    blocks = -(-k // FEATURES)
    words = blocks * 3 * LINE // 4
    screen: Tensor = Arena(rows * (words + 1) * 4).take((rows * (words + 1),), torch.int32)
    lines = screen[: rows * words].view(torch.uint8).view(rows, blocks, 3, LINE)
    far = screen[rows * words :]
    for begin in range(0, rows, _ROWS):
        part = slice(begin, min(begin + _ROWS, rows))
        w = weight[part]
        rest = w & 3
        far[part] = ((rest == 0) | (rest == 3)).sum(1)
        codes = F.pad((w >> 2) + 32, (0, blocks * FEATURES - k), value=32).view(torch.uint8)
        fields = codes.view(-1, blocks, 4, LINE)
        for j in range(3):
            upper = fields[:, :, 3] >> (2 * j) & 3
            lines[part, :, j] = fields[:, :, j] | upper << 6
    return screen
