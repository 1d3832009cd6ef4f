#!/usr/bin/env python3
"""Train a tiny BitNet b1.58 model to find what a text said once: tests/data/needle-model.

    python scripts/train_needle_model.py --out tests/data/needle-model

A text is filler; somewhere in it stands a fact, one id that means "the value of this key is that",
and at its end ASK key, after which the model has to say the value. Trained on many facts in short
texts, then on longer ones. Writes config.json and model.safetensors (bf16 masters); there is no
tokenizer, texts are ids. It takes about ten minutes on one core. It must not know bitnet_ops.
"""

import argparse
import time
from pathlib import Path

import torch

import train_demo_model as demo
from train_demo_model import BitNet, learning_rate, make_optimizer, write_checkpoint

CONTEXT, ASK, COUNT = 4096, 2, 8  # keys, and values
KEYS, VALUES, FACTS, FILLER = 16, 24, 32, 96  # the first ids of each; KEYS + 3, say, is key 3
VOCAB = 192
# Tokens of a text and of a step, steps.
LESSONS = [(64, 2048, 700), (256, 4096, 300), (1024, 8192, 200), (4096, 8192, 150)]
ARCHITECTURE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "relu2",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}


def texts(batch, length, generator):
    """Ids int64 [batch, length], and the places [batch, COUNT] of the keys that are asked for.

    Behind such a key stands its value. The facts stand anywhere before the questions.
    """
    ids = torch.randint(FILLER, VOCAB, (batch, length), generator=generator)
    room = length - 3 * COUNT  # questions: ASK key value
    places = (room + 3 * torch.arange(COUNT) + 1).expand(batch, COUNT)
    for row, place in zip(ids, places, strict=True):
        keys = torch.randperm(COUNT, generator=generator)
        values = torch.randint(COUNT, (COUNT,), generator=generator)
        row[torch.randperm(room, generator=generator)[:COUNT]] = FACTS + COUNT * keys + values
        order = torch.randperm(COUNT, generator=generator)
        row[place - 1], row[place], row[place + 1] = ASK, KEYS + keys[order], VALUES + values[order]
    return ids, places


def answers(model, ids, places):
    """Loss [batch, asked] at the places."""
    losses = model(ids[:, :-1], ids[:, 1:])
    return losses.gather(1, places)


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--out", required=True, type=Path)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--wd", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=7)
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(a.seed)
    generator = torch.Generator().manual_seed(a.seed)
    demo.CONTEXT, demo.COMPUTE = CONTEXT, torch.float32
    model = BitNet(ARCHITECTURE)
    optimizer = make_optimizer(model, a)
    steps, done, start = sum(lesson[-1] for lesson in LESSONS), 0, time.time()
    for length, tokens, count in LESSONS:
        for step in range(count):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(a, done, done / steps)
            ids, places = texts(tokens // length, length, generator)
            loss = answers(model, ids, places).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1
            if step % 50 == 49:
                said = f"{length} tokens, step {done}: loss {loss.item():.4f}"
                print(f"{said} {time.time() - start:.0f} s", flush=True)
    write_checkpoint(a.out, model, ARCHITECTURE)


if __name__ == "__main__":
    main()
