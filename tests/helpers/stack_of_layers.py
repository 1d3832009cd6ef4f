"""A stack of layers of any size with random weights, for tests of threads, time and memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitnet_ops import ops
from programs import Sample


@dataclass
class Stack:
    """A bound program, a pool with one block a sequence, and a step that takes a position."""

    sample: Sample
    handle: Tensor
    caches: list[Tensor]
    x: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a step reads."""
        tensors = self.sample.tensors.items()
        return sum(t.nbytes for name, t in tensors if name.endswith(".weight") and t.dim() > 1)

    @torch.inference_mode()
    def step(self, position: int = 0) -> Tensor:
        batch = len(self.x)
        rows = torch.arange(batch)
        return ops.model_step(
            self.x,
            self.handle,
            self.caches,
            torch.full((batch,), position),
            rows * self.caches[0].shape[2] + position,
            torch.arange(batch + 1),
            torch.full((batch,), position + 1),
            rows[:, None],
            rows,
            self.sample.out_features,
        )


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
    attention = {"q": (query, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, query)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    tensors = {
        "rope.weight": 5e5 ** (-torch.arange(0, head_dim, 2) / head_dim),
        "final.weight": torch.ones(hidden),
        "embed.weight": torch.randn(vocab, hidden, generator=rng).bfloat16(),
    }
    text = f"model hidden={hidden} dtype=bfloat16 eps=1e-05\n"
    text += f"rope name=rope dim={head_dim} inv_freq=rope.weight\n"

    def block(kind: str, layer: int, projections: dict[str, tuple[int, int]], rest: str) -> str:
        line = kind
        for norm, n in (
            ("norm", hidden),
            ("sub_norm", projections["down" if kind == "mlp" else "o"][1]),
        ):
            tensors[f"{kind}{layer}.{norm}.weight"] = torch.ones(n)
            line += f" {norm}={kind}{layer}.{norm}"
        for name, (n, k) in projections.items():
            line += f" {name}=L{layer}.{name}"
            tensors[f"L{layer}.{name}.weight"] = random_bytes(rng, n, k)
            tensors[f"L{layer}.{name}.weight_scale"] = torch.full((1,), 0.02)
        return f"{line} {rest}\n"

    for i in range(layers):
        sizes = f"heads={heads} kv_heads={kv_heads} head_dim={head_dim} rope=rope"
        text += block("attention", i, attention, sizes)
        text += block("mlp", i, mlp, f"width={inner} activation=relu2")
    text += f"head norm=final weight=embed vocab={vocab}\n"
    sample = Sample(text, tensors)
    pool = layers, batch, length, kv_heads, head_dim
    caches = [torch.zeros(pool, dtype=torch.bfloat16) for _ in "kv"]
    return Stack(sample, sample.bind(), caches, torch.randn(batch, hidden, generator=rng))
