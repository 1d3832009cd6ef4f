"""Tiny checkpoints of the kinds that SGLang is to serve, and what our own engine says to them.

Per kind: the Hugging Face folder NAME, the converted NAME-bin, and NAME.json in the form of
oracle.py: greedy tokens with the lead of each, of float32 activations over a bfloat16 cache. The
prompts are those whose smallest lead is largest: two programs round differently.
Usage: own_tokens.py FOLDER TOKENS
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "helpers"))

import bitnet_ops
import bonsai
import hf_writer
from bitnet_ops.convert import convert

CANDIDATES = [f"{text} {i}" for text in ("What is", "two ranks", "fox") for i in range(20)]
PROMPTS = 4
LLAMA = hf_writer.FAMILIES["llama-autobitlinear"]
QWEN3 = {"model_type": "qwen3", "qk_norm": True, "eps": 1e-6, "theta": 1e6, "heads": 4}
KINDS = {
    "bitnet": hf_writer.FAMILIES["bitnet-offline"],
    "llama": LLAMA,
    "qwen3": dataclasses.replace(LLAMA, name="qwen3-autobitlinear", **QWEN3),
    "bonsai": None,  # groups of 128 weights, YaRN, ternary embedding and head
}


def write(folder, name, family):
    if family is not None:
        hf_writer.write_checkpoint(folder / name, family)
        return
    bonsai.write_unpacked(folder / name, bonsai.make(tied=False))
    hf_writer.write_tokenizer(folder / name, bonsai.VOCAB)


def cases(model, count):
    """As oracle.py writes them."""
    done = model.generate_batch(CANDIDATES, max_new_tokens=count, ignore_eos=True, logprobs=2)
    found = []
    for prompt, answer in zip(CANDIDATES, done, strict=True):
        tops = [one.top_logprobs for one in answer.logprobs]
        leads = [round(first[1] - second[1], 4) for first, second in tops]
        case = {"prompt": prompt, "prompt_ids": model.tokenizer.encode(prompt)}
        found.append({**case, "tokens": list(answer.token_ids), "leads": leads})
    return sorted(found, key=lambda case: -min(case["leads"]))[:PROMPTS]


def main():
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, family in KINDS.items():
        write(folder, name, family)
        convert(folder / name, folder / f"{name}-bin")
        model = bitnet_ops.load(folder / f"{name}-bin", head_format="stored")
        found = cases(model, count)
        (folder / f"{name}.json").write_text(json.dumps({"cases": found}))
        print(name, min(min(case["leads"]) for case in found))


if __name__ == "__main__":
    main()
