"""Whether a fact that a text states once is found under attention policies.

    python -m benchmarks.needle [--contexts 1024,4096] [--texts 200] [--json]

The model was trained for it (tests/data/needle-model): somewhere in filler stands one id that means
"the value of this key is that", and at the end ASK key; it has to say the value. The policy holds
in every layer, for the whole text. read: share of the pages that all tokens read. Of 200 texts a
recall of .9 has a standard error of .02.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

import bitnet_ops
from benchmarks.attention_policies import POLICIES
from bitnet_ops import _runtime
from bitnet_ops.cli.terminal import print_result
from bitnet_ops.models import Decoder
from bitnet_ops.nn.kv_cache import KVCache

MODEL = Path(__file__).resolve().parent.parent / "tests" / "data" / "needle-model" / "model.bin"
# As scripts/train_needle_model.py has them.
ASK, COUNT = 2, 8  # keys, and values
KEYS, VALUES, FACTS, FILLER, VOCAB = 16, 24, 32, 96, 192  # the first ids of each


def needle(length: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """The ids [length] of a text, and the value that is asked for, stated anywhere before."""
    ids = torch.randint(FILLER, VOCAB, (length,), generator=generator)
    key, value = torch.randint(COUNT, (2,), generator=generator).tolist()
    at = int(torch.randint(length - 2, (1,), generator=generator))
    ids[at] = FACTS + COUNT * key + value
    ids[-2:] = torch.tensor([ASK, KEYS + key])
    return ids, VALUES + value


@torch.inference_mode()
def recall(model: Decoder, policy: str | None, length: int, texts: int) -> tuple[float, float]:
    """The share of so many texts whose value is found, and of pages that were read."""
    model.set_attention(policy)
    generator = torch.Generator().manual_seed(length)
    found = read = pages = 0
    for _ in range(texts):
        ids, value = needle(length, generator)
        logits = model(ids[None], KVCache(model.config, 1, length), 1)
        found += int(logits[0, -1].argmax()) == value
        for some, every in _runtime.attention_pages() or [(1, 1)]:
            read, pages = read + some, pages + every
    return found / texts, read / pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contexts", default="1024,4096")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model = bitnet_ops.load(MODEL).model
    rows, shown = [], ["| policy | context | pages read | needle |", "|---|---|---|---|"]
    for length in map(int, args.contexts.split(",")):
        for name, policy in {"all": None, **POLICIES}.items():
            share, read = recall(model, policy, length, args.texts)
            rows.append({"policy": name, "context": length, "read": read, "recall": share})
            shown.append(f"| {name} | {length:,} | {read:.0%} | {share:.3f} |")
    print_result({"texts": args.texts, "rows": rows}, shown, as_json=args.json)


if __name__ == "__main__":
    main()
