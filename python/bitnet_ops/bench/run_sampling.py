"""Rows of `bench engine` on sampling: what a batch of rows of logits costs, by shape and filter."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.bench.harness import Budget, Timed, interleave
from bitnet_ops.bench.limits import MachineLimits
from bitnet_ops.bench.measure import Row
from bitnet_ops.bench.pinning import use_threads
from bitnet_ops.bench.stats import digits, summarize

_ROWS, _VOCAB = 64, 128_256
_QUICK_ROWS, _QUICK_VOCAB = 4, 10_000

# temperature, top_k, top_p, min_p
_FILTERS: dict[str, tuple[float, int, float, float]] = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "top_k 50": (1.0, 50, 1.0, 0.0),
    "top_p .9": (1.0, 0, 0.9, 0.0),
    "top_p .9, min_p .05": (1.0, 0, 0.9, 0.05),
    "top_k half, top_p .9": (1.0, -1, 0.9, 0.0),
}


def logits(shape: str, rows: int, vocab: int) -> Tensor:
    """float32 [rows, vocab]. What is worst for a filter depends on how the probabilities fall."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, vocab, generator=generator)
    if shape == "language-like":  # 60 tokens have nearly all of the mass
        at = torch.randint(0, vocab, (rows, 60), generator=generator)
        return x.scatter_add(1, at, 12 + torch.arange(60).expand(rows, 60) * 0.05)
    if shape == "heavy-tailed":  # Zipf's law
        ranks = torch.stack([torch.randperm(vocab, generator=generator) + 1 for _ in range(rows)])
        return -1.1 * ranks.log()
    if shape == "equal":
        return torch.zeros(rows, vocab)
    return x  # flat


def sampling_rows(limits: MachineLimits, quick: bool) -> Iterator[Row]:
    """Time of a call for many rows, and for one of them alone, which the cache has then."""
    use_threads(limits.threads)
    count, vocab = (_QUICK_ROWS, _QUICK_VOCAB) if quick else (_ROWS, _VOCAB)
    uniforms = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    budget = Budget(0.02 if quick else 0.4, 3 if quick else 10)
    for shape in ("language-like", "flat", "heavy-tailed", "equal"):
        x = logits(shape, count, vocab)
        for name, (temperature, top_k, top_p, min_p) in _FILTERS.items():
            options = (
                torch.full((count,), temperature, dtype=torch.float64),
                torch.full((count,), top_k if top_k >= 0 else vocab // 2),
                torch.full((count,), top_p, dtype=torch.float64),
                torch.full((count,), min_p, dtype=torch.float64),
            )

            def batch(rows: int, x: Tensor = x, options: tuple[Tensor, ...] = options) -> Timed:
                taken = [tensor[:rows] for tensor in (x, *options, uniforms)]
                return Timed(lambda _: ops.sample_tokens(*taken), warm=rows == 1)

            rounds = interleave([batch(count), batch(1)], budget, probe=limits.peak.speed)
            many, one = (summarize(samples) for samples in rounds.usable())
            yield {
                "kind": "sampling",
                "threads": limits.threads,
                "logits": shape,
                "filter": name,
                "rows": count,
                "vocab": vocab,
                "ms": many.to_dict(1e3),
                "one_row_ms": digits(one.median * 1e3),
                "disturbed": rounds.disturbed,
            }
