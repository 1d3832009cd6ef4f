"""KV cache types: a model's text against a float32 cache, and attention over synthetic K and V.

    python -m benchmarks.compare_kv tests/data/demo-model/val.txt [--model DIR] [--json]

Text: every type runs the whole model over every chapter; top-1, KL divergence and loss are those of
compare_heads.py, cosine is that of the logits. Synthetic: one new token of 2B-4T's heads over 2,048
positions, keys and values of root mean square 1 from three distributions; cosine of the outputs
with float64 over the exact numbers, the smallest of a head too, and KL divergence of the weights.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bitnet_ops
from benchmarks.compare_heads import PROMPTS, Figures, chapters
from bitnet_ops.models.step_batch import SequenceStep, StepBatch
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.kv_config import KV_DTYPES, KVCacheConfig

HEADS, KV_HEADS, DIM, POSITIONS = 20, 5, 128, 2048
_SCALE = DIM**-0.5
DISTRIBUTIONS = ("normal", "student-t", "outlier channels")


@torch.inference_mode()
def logits_of(lm: bitnet_ops.LanguageModel, ids: list[int], dtype: torch.dtype) -> Tensor:
    cache = KVCache(lm.config, 1, len(ids), dtype)
    return lm.model(torch.tensor([ids]), cache)[0]


def compare(lm: bitnet_ops.LanguageModel, text: str) -> dict[str, dict[str, float]]:
    figures = {name: Figures() for name in KV_DTYPES}
    largest = dict.fromkeys(KV_DTYPES, 0.0)
    cosines = dict.fromkeys(KV_DTYPES, 0.0)
    for ids in chapters(lm, text):
        exact = logits_of(lm, ids, torch.float32)
        for name, dtype in KV_DTYPES.items():
            got = logits_of(lm, ids, dtype)
            figures[name].add(exact, got, ids)
            largest[name] = max(largest[name], float((got - exact).abs().max()))
            cosines[name] += float(F.cosine_similarity(exact.double(), got.double(), -1).sum())
    rows = {}
    for name, found in figures.items():
        row = found.as_dict()
        rows[name] = {
            **row,
            "perplexity": math.exp(row["loss_nats"]),
            "one_minus_cosine": 1 - cosines[name] / found.tokens,
            "largest_logit_difference": largest[name],
        }
    return rows


def draw(distribution: str, generator: torch.Generator) -> Tensor:
    """Keys, or values, f32 [positions, KV, D] of root mean square 1."""
    x = torch.randn(POSITIONS, KV_HEADS, DIM, generator=generator)
    if distribution == "student-t":  # of 3 degrees of freedom: single numbers far out
        chi = torch.randn(3, *x.shape, generator=generator).square().mean(0)
        x = x / chi.sqrt()
    if distribution == "outlier channels":  # as rotary keys have them: 4 of 128, 20 times as large
        x[..., torch.randperm(DIM, generator=generator)[:4]] *= 20
    return x / x.square().mean().sqrt()


@torch.inference_mode()
def synthetic(distribution: str, rounds: int = 16) -> dict[str, dict[str, float]]:
    """Of each type: 1 - mean and 1 - smallest cosine of a head's output, mean KL of the weights."""
    generator = torch.Generator().manual_seed(7)
    sums = {name: [0.0, 0.0, 0.0] for name in KV_DTYPES}
    for _ in range(rounds):
        query = torch.randn(1, HEADS, DIM, generator=generator)
        key, value = (draw(distribution, generator) for _ in "kv")
        exact = weights_of(query, key)
        want = outputs_of(exact, value)
        for name, total in sums.items():
            got, held = attend(name, query, key, value)
            cosine = F.cosine_similarity(want, got.double(), -1)
            other = weights_of(query, held)
            kl = (exact * (exact.log() - other.log())).sum(-1)
            total[0] += float(1 - cosine.mean()) / rounds
            total[1] = max(total[1], float(1 - cosine.min()))
            total[2] += float(kl.mean()) / rounds
    names = "one_minus_cosine", "one_minus_smallest_cosine", "mean_kl_nats"
    return {name: dict(zip(names, total, strict=True)) for name, total in sums.items()}


def weights_of(query: Tensor, key: Tensor) -> Tensor:
    """Of queries [1, H, D] over keys [positions, KV, D]: float64 [H, positions]."""
    wide = key.double().repeat_interleave(HEADS // KV_HEADS, 1)
    return torch.einsum("hd,lhd->hl", query[0].double() * _SCALE, wide).softmax(-1)


def outputs_of(weights: Tensor, value: Tensor) -> Tensor:
    wide = value.double().repeat_interleave(HEADS // KV_HEADS, 1)
    return torch.einsum("hl,lhd->hd", weights, wide)


def attend(name: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Our attention over a cache of that type, f32 [H, D]; the keys that it holds."""
    cache = KVCache(KVCacheConfig(POSITIONS, 1, KV_HEADS, DIM, name))  # type: ignore[arg-type]
    cache.update(0, key[None], value[None], 0)
    batch = StepBatch.of([SequenceStep([0], POSITIONS - 1, cache.blocks[0])], cache.pool.block_size)
    return cache.pool.attend(0, query, batch, _SCALE)[0], cache.get(0)[0][0].transpose(0, 1)


def greedy(path: str | None, dtype: torch.dtype) -> list[str]:
    lm = bitnet_ops.load(path, kv_dtype=dtype)
    return [lm.generate(prompt, max_new_tokens=48, ignore_eos=True) for prompt in PROMPTS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", help="a converted model; default: the demo model")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = compare(bitnet_ops.load(args.model), args.text.read_text())
    texts = {name: greedy(args.model, dtype) for name, dtype in KV_DTYPES.items()}
    for name, row in rows.items():
        same = [a == b for a, b in zip(texts[name], texts["float32"], strict=True)]
        row["greedy_texts_equal"] = float(sum(same))
    report: dict[str, Any] = {str(args.text): rows}
    report |= {distribution: synthetic(distribution) for distribution in DISTRIBUTIONS}
    if args.json:
        print(json.dumps(report, indent=1))
        return
    for title, found in report.items():
        print(title)
        for name, row in found.items():
            print(f"  {name}", *(f"{key} {value:.6g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
