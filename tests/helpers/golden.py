"""Golden vectors of the packed layouts: one ternary sequence and its bytes, worked out by hand.

Shares no code with the package: every packer and reader of the tests is checked against these.
"""

from __future__ import annotations

import torch
from torch import Tensor

# w[i] = ((5 i^2 + 3 i + floor(i / 7)) mod 3) - 1, i = 0..255, as one row of 256 weights in the
# canonical layout (SGLBITNT row, I2_S layout a) and as a 16 x 16 matrix as Hugging Face packs it.
I2S_A_HEX = (
    "0998811aa99112211550022660066aa444488554400998811aa9911221155002"
    "811aa99112211550022660066aa444488554400998811aa99112211550022660"
)
HF_HEX = (
    "288aa2280a024010044110449164599665591685a1288aa2280a024010044110"
    "449164599665591685a1288aa2280a024010044110449164599665591685a128"
)
# sum_i w[i] a[i] with a[i] = ((37 i) mod 255) - 127.
DOT_PRODUCT = 1302

# The example in the docstring of transformers' unpack_weights: bytes, and the rows they stand for.
HF_DOC_BYTES = [[0xA1, 0x18], [0x90, 0x0A]]
HF_DOC_ROWS = [[0, -1], [-1, 1], [-1, 1], [-1, 1], [1, 0], [0, -1], [1, -1], [1, -1]]
# What an interleaved reading of those bytes gives: a classic mistake, finite and plausible.
HF_DOC_ROWS_INTERLEAVED = [
    [0, -1], [-1, 1], [1, 0], [1, -1], [-1, 1], [-1, 1], [0, -1], [1, -1],
]  # fmt: skip


def golden_codes() -> Tensor:
    """int8 [256] of -1, 0, 1."""
    i = torch.arange(256)
    return ((5 * i * i + 3 * i + i // 7) % 3 - 1).to(torch.int8)


def golden_activations() -> Tensor:
    """int8 [256]."""
    return ((37 * torch.arange(256)) % 255 - 127).to(torch.int8)


# The same 256 weights in the layouts of GGUF files; the last two with the scale 1.5.
I2S_B_HEX = (
    "1094a01598842528056621094a01598894a01598842528056621094a01598842"
    "a01598842528056621094a01598842521598842528056621094a015988425280"
)
TQ2_HEX = (
    "602642a46a468448540580980990a91a1121521501602642a46a468448540580"
    "42a46a468448540580980990a91a1121521501602642a46a4684485405809809003e"
)
TQ1_HEX = (
    "19dbb038facb233e2a7208499012a9ef616ab97c5819dbb038facb233e2a7208"
    "058bbf5d7bac83951fd3e42cddb5464c5f36497c003e"
)
