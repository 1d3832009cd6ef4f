"""Zeros of a squared-ReLU MLP on held-out text, for docs/notes/sparsity.md.

    python -m benchmarks.sparsity_counts [CHECKPOINT TEXT]    (default: the demo model, its val.txt)

transformers' own model runs; hooks see what gate_proj gives and what down_proj reads. Per layer,
and their mean:
- gates: share of gates that are not positive: their row of UP is not needed.
- down: zeros of what DOWN reads, and those of its int8 codes (a scale a token).
- both of 2 and of 4 consecutive tokens at once, as drafts see them.
- runs of 4, 16, 64 consecutive neurons that are all zero: codes, then gates; as neurons lie, and
  in an order that puts together what fires together, learnt on one half, counted on the other.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEMO = Path("tests/data/demo-model")
LENGTH = 512  # of the texts that the tokens are cut into
GROUP = 16  # neurons that the order puts together
COLUMNS = (
    *("gates", "down", "int8"),
    *("gates of 2", "gates of 4", "int8 of 2", "int8 of 4"),
    *("int8 4", "16", "64", "ordered 4", "16", "64"),
    *("gates 4", "16", "ordered 4", "16"),
)


def observed(checkpoint: Path, text: Path, tokens: int) -> tuple[list[Tensor], list[Tensor]]:
    """Of each layer: gates and what DOWN reads, float32 [tokens, neurons]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    gates: dict[int, list[Tensor]] = defaultdict(list)
    inputs: dict[int, list[Tensor]] = defaultdict(list)

    def keep_gate(layer: int, module: Any, args: Any, out: Tensor) -> None:
        gates[layer].append(out[0].detach())

    def keep_input(layer: int, module: Any, args: tuple[Tensor]) -> None:
        inputs[layer].append(args[0][0].detach())

    for i, layer in enumerate(model.model.layers):
        layer.mlp.gate_proj.register_forward_hook(partial(keep_gate, i))
        layer.mlp.down_proj.register_forward_pre_hook(partial(keep_input, i))
    ids = torch.tensor(tokenizer(text.read_text())["input_ids"][:tokens])
    with torch.inference_mode():
        for piece in ids[: len(ids) // LENGTH * LENGTH].view(-1, 1, LENGTH):
            model(piece)
    layers = range(len(inputs))
    return [torch.cat(gates[i]) for i in layers], [torch.cat(inputs[i]) for i in layers]


def order(zero: Tensor) -> Tensor:
    """A permutation of neurons: groups grow from the busiest, by how often they fire together."""
    fires = (~zero).float()[::4]
    norm = fires.norm(dim=0).clamp(min=1e-6)
    likeness = (fires.T @ fires) / norm[:, None] / norm
    busy, left = fires.mean(0), torch.ones(len(norm), dtype=torch.bool)
    found: list[int] = []
    while left.any():
        together = torch.where(left, busy, -1)
        for _ in range(min(GROUP, int(left.sum()))):
            i = int(torch.where(left, together, -1).argmax())
            together = likeness[i].clone() if len(found) % GROUP == 0 else together + likeness[i]
            left[i] = False
            found.append(i)
    return torch.tensor(found)


def runs(zero: Tensor, width: int) -> float:
    return zero.view(len(zero), -1, width).all(-1).float().mean().item()


def at_once(zero: Tensor, tokens: int) -> float:
    return zero.view(-1, tokens, zero.shape[1]).all(1).float().mean().item()


def shares(gate: Tensor, read: Tensor) -> list[float]:
    off = gate <= 0
    code = (read * (127 / read.abs().amax(-1, keepdim=True).clamp(min=1e-5))).round() == 0
    half = len(code) // 2
    row = [z.float().mean().item() for z in (off, read == 0, code)]
    row += [at_once(z, n) for z in (off, code) for n in (2, 4)]
    for zero, widths in ((code, (4, 16, 64)), (off, (4, 16))):
        ordered = zero[half:][:, order(zero[:half])]
        row += [runs(z, w) for z in (zero[half:], ordered) for w in widths]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, nargs="?", default=DEMO)
    parser.add_argument("text", type=Path, nargs="?", default=DEMO / "val.txt")
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    gates, inputs = observed(args.checkpoint, args.text, args.tokens)
    rows = [shares(gate, read) for gate, read in zip(gates, inputs, strict=True)]
    print("layer | " + " | ".join(COLUMNS))
    for name, row in [*enumerate(rows), ("mean", torch.tensor(rows).mean(0).tolist())]:
        print(f"{name} | " + " | ".join(f"{share:.3f}" for share in row))


if __name__ == "__main__":
    main()
