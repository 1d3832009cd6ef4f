#!/usr/bin/env python3
"""KV cache types against a float32 cache: top-1 agreement, KL divergence, loss and greedy text.

    python scripts/compare_kv.py tests/data/demo-model/val.txt [--model DIR] [--json]

Every type runs the whole model over every chapter; the figures are those of compare_heads.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

import bitnet_ops
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.kv_types import KV_DTYPES
from compare_heads import PROMPTS, Figures, chapters


@torch.inference_mode()
def logits_of(lm: bitnet_ops.LanguageModel, ids: list[int], dtype: torch.dtype) -> Tensor:
    cache = KVCache(lm.config, 1, len(ids), dtype)
    return lm.model(torch.tensor([ids]), cache)[0]


def compare(lm: bitnet_ops.LanguageModel, text: str) -> dict[str, dict[str, float]]:
    figures = {name: Figures() for name in KV_DTYPES}
    largest = dict.fromkeys(KV_DTYPES, 0.0)
    for ids in chapters(lm, text):
        exact = logits_of(lm, ids, torch.float32)
        for name, dtype in KV_DTYPES.items():
            got = logits_of(lm, ids, dtype)
            figures[name].add(exact, got, ids)
            largest[name] = max(largest[name], float((got - exact).abs().max()))
    return {
        name: {**figures[name].as_dict(), "largest_logit_difference": largest[name]}
        for name in KV_DTYPES
    }


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
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for name, row in rows.items():
        print(name, *(f"{key} {value:.6g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
