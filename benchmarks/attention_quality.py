"""Attention policies on the demo model's held-out text: what they leave out, and what it costs.

    python -m benchmarks.attention_quality tests/data/demo-model/val.txt [--json]

Whole contexts of 1,024 tokens, 16 pages. read: share of the pages that all tokens read; cosine: of
the output of attention with that over all positions, of the same queries, keys and values,
the mean over heads, layers and tokens behind the first half; loss: nats a token
behind the first half, the policy in every layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import bitnet_ops
from bitnet_ops import _runtime
from bitnet_ops.cli.terminal import print_result
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.kv_pool import PagedPool

POLICIES = {
    "window 256 + 4": "window:256,sinks=4",
    "window 256, every 4th page": "window:256,sinks=4,stride=4",
    "top_k 1/4": "top_k:0.25,sinks=4,dense_below=0",
    "top_k 1/2": "top_k:0.5,sinks=4,dense_below=0",
    "threshold 0.1": "threshold:0.1,sinks=4,dense_below=0",
    "dynamic 0.1-0.5": "dynamic:min_ratio=0.1,max_ratio=0.5,sinks=4,dense_below=0",
    "dynamic 0.2-0.8": "dynamic:min_ratio=0.2,max_ratio=0.8,sinks=4,dense_below=0",
}
CONTEXT = 1024
Row = dict[str, float]


@torch.inference_mode()
def losses(lm: bitnet_ops.LanguageModel, texts: torch.Tensor, policy: str | None) -> float:
    """Nats a token behind the first half of texts int64 [n, CONTEXT]."""
    lm.model.set_attention(policy)
    found = []
    for ids in texts:
        logits = lm.model(ids[None], KVCache(lm.config, 1, CONTEXT))[0]
        found.append(F.cross_entropy(logits[CONTEXT // 2 - 1 : -1], ids[CONTEXT // 2 :]))
    return float(torch.stack(found).mean())


@torch.inference_mode()
def cosines(lm: bitnet_ops.LanguageModel, texts: torch.Tensor) -> dict[str, Row]:
    """Of every policy the mean cosine of a layer's output, and the share of pages read."""
    model, plain = lm.model, PagedPool.attend
    words, sums = {}, {name: [0.0, 0, 0, 0] for name in POLICIES}
    for name, text in POLICIES.items():
        policy = lm.config.with_attention(text).policy(0)
        words[name] = str(policy)

    def attend(pool: Any, layer: int, q: Any, batch: Any, scale: float, policy: str = "") -> Any:
        dense = plain(pool, layer, q, batch, scale)
        for name, word in words.items():
            other = plain(pool, layer, q, batch, scale, word)
            ((read, pages),) = _runtime.attention_pages()
            cosine = F.cosine_similarity(dense, other, dim=-1)[CONTEXT // 2 :]
            for i, value in enumerate((float(cosine.sum()), cosine.numel(), read, pages)):
                sums[name][i] += value
        return dense

    model.set_attention("top_k:1")  # caches keep bounds, and all is read
    model.fused_step = False
    PagedPool.attend = attend  # type: ignore[method-assign,assignment]
    try:
        for ids in texts:
            model(ids[None], KVCache(model.config, 1, CONTEXT))
    finally:
        PagedPool.attend = plain  # type: ignore[method-assign]
        model.fused_step = True
    return {name: {"cosine": c / n, "read": r / p} for name, (c, n, r, p) in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    lm = bitnet_ops.load()
    ids = torch.tensor(lm.encode(args.text.read_text(encoding="utf-8")))
    texts = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    rows: dict[str, Row] = {"all": {"read": 1.0, "cosine": 1.0}, **cosines(lm, texts)}
    for name, row in rows.items():
        row["loss"] = losses(lm, texts, POLICIES.get(name))
    shown = [
        f"{len(texts)} texts of {CONTEXT} tokens",
        "| policy | read | cosine | loss |",
    ]
    shown += ["|---|---|---|---|"]
    shown += [
        f"| {name} | {row['read']:.0%} | {row['cosine']:.3f} | {row['loss']:.3f} |"
        for name, row in rows.items()
    ]
    print_result({"rows": rows}, shown, as_json=args.json)


if __name__ == "__main__":
    main()
