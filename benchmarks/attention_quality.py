"""Attention policies on the demo model's held-out text: what they leave out, and what it costs.

    python -m benchmarks.attention_quality tests/data/demo-model/val.txt [--plot FILE.png] [--json]

Whole contexts of 1,024 tokens, 16 pages. read: share of the pages that all tokens read; cosine: of
the output of attention with that over all positions, of the same queries, keys and values,
the mean over heads, layers and tokens behind the first half; loss: nats a token
behind the first half, the policy in every layer.

--plot measures each kind of policy from few pages to many, looks for needles beside (those of
benchmarks.needle), and draws all three against the share of pages read. That takes minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import bitnet_ops
from benchmarks import plots
from benchmarks.attention_policies import CURVES, POLICIES
from benchmarks.needle import MODEL, recall
from bitnet_ops import _runtime
from bitnet_ops.cli.terminal import print_result
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.kv_pool import PagedPool

CONTEXT = 1024
NEEDLES, NEEDLE_CONTEXT = 100, 4096
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
def cosines(
    lm: bitnet_ops.LanguageModel, texts: torch.Tensor, policies: Mapping[str, str]
) -> dict[str, Row]:
    """Of every policy the mean cosine of a layer's output, and the share of pages read."""
    model, plain = lm.model, PagedPool.attend
    words, sums = {}, {name: [0.0, 0, 0, 0] for name in policies}
    for name, text in policies.items():
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
    model.run_as = "ops"
    PagedPool.attend = attend  # type: ignore[method-assign,assignment]
    try:
        for ids in texts:
            model(ids[None], KVCache(model.config, 1, CONTEXT))
    finally:
        PagedPool.attend = plain  # type: ignore[method-assign]
        model.run_as = "program"
    return {name: {"cosine": c / n, "read": r / p} for name, (c, n, r, p) in sums.items()}


def add_needles(rows: dict[str, Row], policies: Mapping[str, str]) -> None:
    """The share of needles that are found, and of pages that were read, into every row."""
    model = bitnet_ops.load(MODEL).model
    for name, row in rows.items():
        found = recall(model, policies.get(name), NEEDLE_CONTEXT, NEEDLES)
        row["needle"], row["needle_read"] = found


def draw(rows: Mapping[str, Row], file: Path) -> Path:
    """Cosine, loss and needles against the pages read, a line for each kind of policy."""

    def field(label: str, key: str, read: str, context: int) -> plots.Field:
        lines = {
            kind: [(100 * rows[name][read], rows[name][key]) for name in names]
            for kind, names in CURVES.items()
        }
        whole = ("all pages", rows["all"][key])
        return plots.Field(f"pages read of {context:,} tokens, %", label, lines, whole)

    fields = [
        field("cosine of attention's output", "cosine", "read", CONTEXT),
        field("loss, nats a token", "loss", "read", CONTEXT),
        field("share of needles found", "needle", "needle_read", NEEDLE_CONTEXT),
    ]
    return plots.draw_quality(fields, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="quality against pages read")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.plot:
        plots.require(parser)
    lm = bitnet_ops.load()
    ids = torch.tensor(lm.encode(args.text.read_text(encoding="utf-8")))
    texts = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    policies = {one: one for kind in CURVES.values() for one in kind} if args.plot else POLICIES
    rows: dict[str, Row] = {"all": {"read": 1.0, "cosine": 1.0}, **cosines(lm, texts, policies)}
    for name, row in rows.items():
        row["loss"] = losses(lm, texts, policies.get(name))
    if args.plot:
        add_needles(rows, policies)
        draw(rows, args.plot)
    columns = {"read": ".0%", "cosine": ".3f", "loss": ".3f"}
    columns |= {"needle_read": ".0%", "needle": ".2f"} if args.plot else {}
    shown = [
        f"{len(texts)} texts of {CONTEXT} tokens",
        f"| policy | {' | '.join(columns)} |".replace("_", " "),
        f"|{'---|' * (1 + len(columns))}",
    ]
    shown += [
        f"| {name} | {' | '.join(format(row[key], form) for key, form in columns.items())} |"
        for name, row in rows.items()
    ]
    print_result({"rows": rows}, shown, as_json=args.json)


if __name__ == "__main__":
    main()
