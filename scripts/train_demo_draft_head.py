#!/usr/bin/env python3
"""Train the draft head for the demo model of the package, and measure it.

    apt-get install bible-kjv                       # public-domain text (bible-kjv-text)
    bible -f "Gen1:1-Rev22:21" > kjv.txt            # as for train_demo_model.py
    python scripts/train_demo_draft_head.py --text kjv.txt --out demo-head

Trained on the chapters that the model was trained on, and on texts that the model writes itself;
first on short pieces of them, then on long ones, since attention over more than it has seen fails.
Writes config.json and model.safetensors, which `bitnet-ops convert --draft-from demo-head` reads,
and acceptance.json: on the held-out chapters, and on the model's own answers.
"""

import argparse
import dataclasses
import json
import random
import time
from pathlib import Path

import torch

import bitnet_ops
from bitnet_ops.formats.sglbitnt import Reader, model_file
from bitnet_ops.training.draft_head import measure_acceptance, train_draft_head
from train_demo_model import CONTEXT, EOS, VAL, chapters

# What people type at it, and texts that repeat themselves.
CHAT = [
    "Who was David?",
    "Tell me of the king of Israel.",
    "What shall I do to be saved?",
    "Why do the heathen rage?",
    "What is love?",
    "Speak to me of the sea and of the ships.",
]
REPETITIVE = [
    "The sons of Judah; Er, and Onan, and Shelah. The sons of Pharez; Hezron, and Hamul.",
    "One kid of the goats for a sin offering: One kid of the goats for a sin offering: One kid",
    "And the evening and the morning were the first day. And the evening and the morning were",
    "for his mercy endureth for ever. O give thanks unto the God of gods: for his mercy endureth",
]
LONG = 1000
TEMPERATURES = (0.7, 1.0, 0.4, 0.0)  # of the texts that it is trained on beside the chapters


def own_texts(lm, docs, count, length, seed):
    """Ids of `count` texts that the model writes, `length` tokens behind parts of chapters."""
    rng, found = random.Random(seed), []
    for at in range(0, count, 16):
        prompts = []
        for _ in range(min(16, count - at)):
            ids, given = rng.choice(docs), rng.randrange(4, 24)
            first = rng.randrange(1, max(2, len(ids) - given))
            prompts.append([ids[0], *ids[first : first + given]])
        answers = lm.generate_batch(
            prompts,
            max_new_tokens=length,
            temperature=TEMPERATURES[at // 16 % len(TEMPERATURES)],
            seed=rng.randrange(1 << 30),
            ignore_eos=True,
            speculation="off",
        )
        found += [p + list(a.token_ids) for p, a in zip(prompts, answers, strict=True)]
    return found


def measured(lm, weights, held):
    """Acceptance on the held-out chapters, and on answers to both kinds of prompts."""

    def shares(texts, **options):
        found = measure_acceptance(lm.model, weights, texts, **options)
        return {**dataclasses.asdict(found), "tokens_a_step": found.tokens_a_step}

    result = {"held-out text": shares(held)}
    for kind, prompts in {"chat": CHAT, "repetitive": REPETITIVE}.items():
        ids = [lm.encode(prompt) for prompt in prompts]
        for temperature in (0.0, 0.7):
            answers = lm.generate_batch(
                ids,
                max_new_tokens=256,
                temperature=temperature,
                seed=1,
                ignore_eos=True,
                speculation="off",
            )
            texts = [p + list(a.token_ids) for p, a in zip(ids, answers, strict=True)]
            result[f"{kind}, temperature {temperature:g}"] = shares(
                texts, prompts=list(map(len, ids)), temperature=temperature
            )
    return result


def arguments():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--text", required=True)
    p.add_argument("--out", required=True, type=Path)
    p.add_argument("--steps", type=int, default=2200, help="on pieces of 256 tokens, 8 a step")
    p.add_argument("--long-steps", type=int, default=400, help="on pieces of 1000, 2 a step")
    p.add_argument("--minutes", type=float, default=1e9, help="end each of both by then")
    p.add_argument("--width", type=int, default=512, help="of the MLP")
    p.add_argument("--rate", type=float, default=4e-3)
    p.add_argument("--seed", type=int, default=1611)
    p.add_argument("--compile", action="store_true")
    return p.parse_args()


def main():
    a = arguments()
    lm = bitnet_ops.load()
    text = chapters(a.text)
    docs = [[*lm.encode(body), EOS] for title, body in text if title not in VAL]
    held = [[*lm.encode(body), EOS] for title, body in text if title in VAL]
    assert len(held) == len(VAL), "the text lacks some of the held-out chapters"
    pieces = [ids[at : at + CONTEXT] for ids in docs for at in range(0, len(ids), CONTEXT)]
    start, sums = time.monotonic(), []

    def report(step, losses, head):
        sums.append(losses)
        if step % 100 == 0:
            mean = torch.tensor(sums[-100:]).mean(0).tolist()
            depths = ", ".join(f"{value:.3f}" for value in mean)
            print(f"step {step}: {depths} nats, {time.monotonic() - start:.0f} s", flush=True)
            torch.save(head.state_dict(), f"{a.out}.part")

    options = {
        "minutes": a.minutes,
        "intermediate_size": a.width,
        "compute": torch.bfloat16,
        "compiled": a.compile,
        "seed": a.seed,
        "report": report,
    }
    texts = pieces + 2 * own_texts(lm, docs, 288, 320, a.seed)
    short = train_draft_head(lm.model, texts, steps=a.steps, rate=a.rate, **options)
    weights = train_draft_head(
        lm.model,
        pieces + 2 * own_texts(lm, docs, 64, 1000, a.seed),
        steps=a.long_steps,
        length=LONG,
        batch=2,
        rate=0.4 * a.rate,
        start=short.tensors,
        **options,
    )
    weights.save(a.out, Reader(model_file(bitnet_ops.language_model.DEMO_DIR)).config)
    found = measured(lm, weights, [ids[:CONTEXT] for ids in held])
    for name, shares in found.items():
        depths = ", ".join(f"{share:.3f}" for share in shares["accepted"])
        print(f"{name}: {depths} accepted, {shares['tokens_a_step']:.2f} tokens a step")
    (a.out / "acceptance.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
