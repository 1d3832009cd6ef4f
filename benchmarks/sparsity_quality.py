"""Activation sparsity on the demo model's held-out text: what it drops, and what that costs.

    python -m benchmarks.sparsity_quality tests/data/demo-model/val.txt [--plot FILE.png] [--json]

Whole contexts of 1,024 tokens. zeros: share of the codes of down_proj's input that are 0; cosine:
of what down_proj gives with what it gives for all codes, of the same input, the mean over layers
and tokens; loss: nats a token behind the first half of a context, the policy in every layer.

--plot measures each kind of policy from little that is dropped to much, and draws both against the
share of zeros.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import bitnet_ops
from benchmarks import plots
from bitnet_ops import ops
from bitnet_ops.blocks.block import Line
from bitnet_ops.blocks.mlp import kept_inputs
from bitnet_ops.cli.terminal import print_result
from bitnet_ops.config.sparsity import read_sparsity
from bitnet_ops.models.composed import Composed
from bitnet_ops.nn.kv_cache import KVCache

POLICIES = (
    "auto", "threshold:0.02", "threshold:0.05", "threshold:0.1", "top_k:0.7", "top_k:0.5",
    "top_k:0.1", "top_k:0.05", "top_k:0.03", "adaptive:min_ratio=0.02,max_ratio=0.1",
)  # fmt: skip
_RATIOS = ((0.05, 0.2), (0.02, 0.1), (0.02, 0.05), (0.01, 0.04), (0.01, 0.03))
CURVES = {
    "auto": ["auto"],
    "threshold": [f"threshold:{t}" for t in (0.01, 0.02, 0.03, 0.05, 0.075, 0.1)],
    "top_k": [f"top_k:{r}" for r in (0.1, 0.07, 0.05, 0.04, 0.03, 0.025)],
    "adaptive": [f"adaptive:min_ratio={a},max_ratio={b}" for a, b in _RATIOS],
}
CONTEXT = 1024
Row = dict[str, float]


@torch.inference_mode()
def loss(lm: bitnet_ops.LanguageModel, texts: torch.Tensor, policy: str | None) -> float:
    """Nats a token behind the first half of texts int64 [n, CONTEXT]."""
    lm.model.set_activation_sparsity(policy)
    found = []
    for ids in texts:
        logits = lm.model(ids[None], KVCache(lm.config, 1, CONTEXT))[0]
        found.append(F.cross_entropy(logits[CONTEXT // 2 - 1 : -1], ids[CONTEXT // 2 :]))
    return float(torch.stack(found).mean())


@torch.inference_mode()
def effects(
    lm: bitnet_ops.LanguageModel, texts: torch.Tensor, policies: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Of every policy (share of zeros, cosine)."""
    model, plain = lm.model, Composed.project
    lines = {policy: Line("mlp", dict(read_sparsity(policy).keys)) for policy in policies}
    sums = {policy: [0.0, 0.0, 0] for policy in policies}

    def project(self: Composed, line: Line, key: str, x: torch.Tensor) -> torch.Tensor:
        dense = plain(self, line, key, x)
        for policy, words in lines.items() if key == "down" else ():
            kept = kept_inputs(words, x)
            cosine = F.cosine_similarity(dense, plain(self, line, key, kept), dim=-1)
            zeros = (ops.quantize_activations(kept)[0] == 0).float().mean(-1)
            for i, value in enumerate((zeros.sum().item(), cosine.sum().item(), cosine.numel())):
                sums[policy][i] += value
        return dense

    model.run_as = "ops"
    patched: Any = Composed
    patched.project = project
    try:
        for ids in texts:
            model(ids[None], KVCache(model.config, 1, CONTEXT))
    finally:
        patched.project = plain
        model.run_as = "program"
    return {policy: (zeros / n, cosine / n) for policy, (zeros, cosine, n) in sums.items()}


def draw(rows: Mapping[str, Row], file: Path) -> Path:
    """Cosine and loss against the zeros, a line for each kind of policy."""

    def field(label: str, key: str) -> plots.Field:
        lines = {
            kind: [(100 * rows[name]["zeros"], rows[name][key]) for name in names]
            for kind, names in CURVES.items()
        }
        whole = ("all codes", rows["auto"][key])  # auto drops none
        return plots.Field("codes of down's input that are 0, %", label, lines, whole)

    fields = [field("cosine of down's output", "cosine"), field("loss, nats a token", "loss")]
    return plots.draw_quality(fields, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="quality against zeros")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.plot:
        plots.require(parser)
    lm = bitnet_ops.load()
    ids = torch.tensor(lm.encode(args.text.read_text(encoding="utf-8")))
    texts = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    policies = [one for kind in CURVES.values() for one in kind] if args.plot else POLICIES
    rows = {
        policy: {"zeros": zeros, "cosine": cosine, "loss": loss(lm, texts, policy)}
        for policy, (zeros, cosine) in effects(lm, texts, policies).items()
    }
    if args.plot:
        draw(rows, args.plot)
    shown = [f"{len(texts)} texts of {CONTEXT} tokens", "| policy | zeros | cosine | loss |"]
    shown += ["|---|---|---|---|"]
    shown += [
        f"| `{name}` | {row['zeros']:.1%} | {row['cosine']:.3f} | {row['loss']:.3f} |"
        for name, row in rows.items()
    ]
    print_result({"rows": rows}, shown, as_json=args.json)


if __name__ == "__main__":
    main()
