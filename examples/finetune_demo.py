#!/usr/bin/env python3
"""Fine-tune a ternary model on a text file, convert the result and let it speak.

    pip install '.[train]'
    python examples/finetune_demo.py my.txt out --steps 100

Training runs in torch with the ternary forward in the loop; the result in `out` runs on the integer
kernels. --model takes any checkpoint `bitnet-ops convert` takes (masters are best), or a converted
model; the default is the demo model in the package, whose masters are gone, so that training starts
from masters made of its codes and scales.
"""

import argparse
import importlib.util
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer

import bitnet_ops
from bitnet_ops import training
from bitnet_ops.errors import install
from bitnet_ops.language_model import DEMO_DIR

HELD_OUT = 0.1  # the last tenth of the text is never trained on


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="UTF-8 text to learn")
    parser.add_argument("out", type=Path, help="folder to create: model.bin and tokenizer")
    parser.add_argument("--model", type=Path, default=DEMO_DIR, help="checkpoint or model folder")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step")
    parser.add_argument("--length", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--prompt", help="default: the first words of the held-out text")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


@torch.no_grad()
def loss_of(model, ids, length):
    """Nats per token over `ids`, read in pieces of `length`."""
    model.eval()
    total = count = 0
    for piece in ids.split(length):
        if len(piece) > 1:
            total += model(piece[None], labels=piece[None]).loss.item() * (len(piece) - 1)
            count += len(piece) - 1
    model.train()
    return total / count


def train(model, ids, a):
    """AdamW, short warm-up, cosine to zero; decay on the masters alone pulls them to thresholds."""
    masters = [p for n, p in model.named_parameters() if p.dim() == 2 and "proj" in n]
    rest = [p for n, p in model.named_parameters() if not (p.dim() == 2 and "proj" in n)]
    groups = [{"params": masters, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=a.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / 10, 0.5 + 0.5 * math.cos(math.pi * step / a.steps)),
    )
    length = min(a.length, len(ids) - 1)
    for step in range(a.steps):
        starts = torch.randint(0, len(ids) - length, (a.batch,))
        batch = torch.stack([ids[start : start + length] for start in starts])
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 20 == 0 or step == a.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.4f}")


def main(argv=None):
    a = arguments(argv)
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit(
            "finetune_demo: expected transformers to be installed, which builds the model to "
            f"train, got none; run: {install('train')}"
        )
    torch.manual_seed(a.seed)
    tokenizer = Tokenizer.from_file(str(a.model / "tokenizer.json"))
    text = a.text.read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)
    cut = int(len(ids) * (1 - HELD_OUT))
    if cut < 32:
        raise SystemExit(f"expected a text of some hundred words, got {len(ids)} tokens")

    model = training.load_for_training(a.model)
    before = loss_of(model, ids[cut:], a.length)
    print(f"{len(ids)} tokens; held-out loss before: {before:.4f} nats per token")
    train(model, ids[:cut], a)
    after = loss_of(model, ids[cut:], a.length)
    print(f"held-out loss after: {after:.4f} nats per token")

    training.export(model, a.out, form="bin", tokenizer=a.model, verify=True)
    deployed = bitnet_ops.load(a.out)
    prompt = a.prompt or tokenizer.decode(ids[cut : cut + 8].tolist())
    answer = deployed.generate(prompt, max_new_tokens=60, repetition_penalty=1.1)
    print(f"wrote {a.out} (verified against the masters)\n\n{prompt}{answer}")
    return before, after, model


if __name__ == "__main__":
    main()
