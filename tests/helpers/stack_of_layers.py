"""A stack of layers of any size with random weights, for tests of threads, time and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitnet_ops import ops


@dataclass
class Stack:
    """Arguments of ops.decode_step, and a step that takes the next position."""

    arguments: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a step reads."""
        head = self.arguments["head_weight"]
        return sum(w.nbytes for w in self.arguments["weights"]) + head.nbytes

    @torch.inference_mode()
    def step(self, position: int = 0) -> Tensor:
        starts = torch.full((self.arguments["x"].shape[0],), position)
        return ops.decode_step(**{**self.arguments, "start_positions": starts})


def random_bytes(rng: torch.Generator, n: int, k: int) -> Tensor:
    """A packed weight of random codes 0, 1, 2: each bit pair is the product of two random bits."""
    shape = (n, (k + 127) // 128 * 32)
    high, low = (torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8) for _ in "hl")
    return (high & 0xAA) | (low & 0x55 & ~((high & 0xAA) >> 1))


def make_stack(
    *,
    layers: int = 2,
    hidden: int = 512,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    inner: int = 1024,
    vocab: int = 1000,
    batch: int = 1,
    length: int = 64,
    seed: int = 0,
) -> Stack:
    rng = torch.Generator().manual_seed(seed)
    query, kv = heads * head_dim, kv_heads * head_dim
    shapes = [(query, hidden), (kv, hidden), (kv, hidden), (hidden, query)]
    shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    cache = (layers, batch, kv_heads, length, head_dim)
    return Stack(
        {
            "x": torch.randn(batch, 1, hidden, generator=rng),
            "weights": [random_bytes(rng, n, k) for _ in range(layers) for n, k in shapes],
            "scales": torch.full((layers, 7), 0.02),
            "norm_weights": torch.ones(layers * (2 * hidden + query + inner) + hidden),
            "head_weight": torch.randn(vocab, hidden, generator=rng).bfloat16(),
            "head_scale": None,
            "key_cache": torch.zeros(cache, dtype=torch.bfloat16),
            "value_cache": torch.zeros(cache, dtype=torch.bfloat16),
            "dtype": torch.bfloat16,
            "num_heads": heads,
            "intermediate_size": inner,
            "vocab_size": vocab,
            "sub_norms": True,
            "activation": "relu2",
            "eps": 1e-5,
            "inv_freq": 5e5 ** (-torch.arange(0, head_dim, 2) / head_dim),
            "attention_factor": 1.0,
            "scale": head_dim**-0.5,
        }
    )
