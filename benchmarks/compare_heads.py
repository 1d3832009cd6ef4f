"""Head formats against the stored head: top-1 agreement, KL divergence, loss and greedy text.

    python -m benchmarks.compare_heads tests/data/demo-model/val.txt [--model DIR] [--json]

Every format runs the whole model over every chapter (parts between blank lines, each with bos and
eos), so that a tied embedding counts too; "head alone" is the quantised head over the hidden states
of the stored model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bitnet_ops
from bitnet_ops.nn.head import HeadWeight
from bitnet_ops.nn.kv_cache import KVCache

# (name, head_format, group size of int4)
FORMATS = (
    ("bf16", "bf16", 128),
    ("int8", "int8", 128),
    ("int4, groups of 64", "int4", 64),
    ("int4, groups of 128", "int4", 128),
)
PROMPTS = ("And God said unto", "And it came to pass, when", "The LORD is my", "Blessed are the")


def chapters(lm: bitnet_ops.LanguageModel, text: str) -> list[list[int]]:
    eos = min(lm.stop_ids)
    return [[*lm.encode(part), eos] for part in text.rstrip("\n").split("\n\n")]


class Figures:
    """Sums over all tokens of all chapters; KL and loss in nats per token."""

    def __init__(self) -> None:
        self.tokens = self.agree = self.predicted = 0
        self.kl = self.max_kl = self.nats = 0.0

    def add(self, stored: Tensor, logits: Tensor, ids: list[int]) -> None:
        p, q = stored.double().log_softmax(-1), logits.double().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        self.tokens += len(ids)
        self.agree += int((stored.argmax(-1) == logits.argmax(-1)).sum())
        self.kl += float(kl.sum())
        self.max_kl = max(self.max_kl, float(kl.max()))
        target = torch.tensor(ids[1:])
        self.nats -= float(q[:-1].gather(1, target[:, None]).sum())
        self.predicted += len(target)

    def as_dict(self) -> dict[str, float]:
        return {
            "tokens": self.tokens,
            "top1_agreement": self.agree / self.tokens,
            "mean_kl_nats": self.kl / self.tokens,
            "max_kl_nats": self.max_kl,
            "loss_nats": self.nats / self.predicted,
        }


def with_head(path: str | None, form: str, group: int) -> bitnet_ops.LanguageModel:
    """The model with its head (and a tied embedding) in `form`."""
    lm = bitnet_ops.load(path, head_format="stored")
    packed = HeadWeight.from_dense(lm.model.head.weight, form, group)
    if lm.config.tie_word_embeddings:
        lm.model.model.embed_tokens = packed
    else:
        lm.model.lm_head = packed
    return lm


@torch.inference_mode()
def hidden_and_logits(lm: bitnet_ops.LanguageModel, ids: list[int]) -> tuple[Tensor, Tensor]:
    seen: list[Tensor] = []
    hook = lm.model.head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    cache = KVCache(lm.config, 1, len(ids), torch.float32)
    logits = lm.model(torch.tensor([ids]), cache)[0]
    hook.remove()
    return seen[0][0], logits


@torch.inference_mode()
def compare(path: str | None, text: str) -> dict[str, dict[str, Any]]:
    stored = bitnet_ops.load(path, head_format="stored")
    sequences = chapters(stored, text)
    answers = [hidden_and_logits(stored, ids) for ids in sequences]
    greedy = [stored.generate(p, max_new_tokens=48) for p in PROMPTS]
    report: dict[str, dict[str, Any]] = {}
    for name, form, group in FORMATS:
        lm = with_head(path, form, group)
        whole, alone = Figures(), Figures()
        for ids, (hidden, logits) in zip(sequences, answers, strict=True):
            whole.add(logits, hidden_and_logits(lm, ids)[1], ids)
            alone.add(logits, lm.model.head(hidden), ids)
        same = sum(
            lm.generate(p, max_new_tokens=48) == g for p, g in zip(PROMPTS, greedy, strict=True)
        )
        report[name] = {
            **whole.as_dict(),
            "head_alone": alone.as_dict(),
            "greedy_texts_equal": f"{same} of {len(PROMPTS)}",
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", help="a converted model; default the embedded demo model")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = compare(args.model, args.text.read_text(encoding="utf-8"))
    if args.json:
        print(json.dumps(report, indent=1))
        return
    print("| head | top-1 | mean KL | max KL | loss | head alone: top-1 | mean KL | greedy |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in report.items():
        alone = row["head_alone"]
        print(
            f"| {name} | {row['top1_agreement']:.4f} | {row['mean_kl_nats']:.2e} "
            f"| {row['max_kl_nats']:.2e} | {row['loss_nats']:.4f} | {alone['top1_agreement']:.4f} "
            f"| {alone['mean_kl_nats']:.2e} | {row['greedy_texts_equal']} |"
        )


if __name__ == "__main__":
    main()
