"""What transformers computes for a checkpoint: greedy tokens with the lead of each, as JSON.

Knows neither bitnet_ops nor an engine and runs in a process without stubs. transformers 5.9 to
5.12 leave an offline AutoBitLinear weight in uint8 after loading (-1 reads 255); that is repaired
here, and every ternary weight is checked before it is believed.
Usage: oracle.py CHECKPOINT PROMPTS.json RESULT.json DTYPE NEW_TOKENS
PROMPTS.json: [{"prompt": text, "draft": token ids that the continuation may well be}, ...]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # transformers compiles these functions otherwise

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.bitnet import AutoBitLinear


def load(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    linears = [m for m in model.modules() if isinstance(m, AutoBitLinear)]
    repaired = 0
    for linear in linears:
        if linear.online_quant:
            continue
        if linear.weight.dtype == torch.uint8:
            codes = linear.weight.data.view(torch.int8).to(dtype)
            linear.weight = torch.nn.Parameter(codes, requires_grad=False)
            repaired += 1
        values = set(linear.weight.unique().tolist())
        if not linear.weight.is_floating_point() or not values <= {-1.0, 0.0, 1.0}:
            sys.exit(
                f"oracle: expected ternary floats, got {linear.weight.dtype} {sorted(values)[:5]}"
            )
    if len(linears) != 7 * model.config.num_hidden_layers:
        sys.exit(f"oracle: expected 7 AutoBitLinear a layer, got {len(linears)}")
    return model, repaired


@torch.no_grad()
def greedy(model, ids, draft, count):
    """(token ids, lead of each over the second best) of `count` greedy steps after `ids`.

    A draft is checked in one forward and accepted as far as it is what the model itself chooses;
    from there on one token a step. So the result is greedy whatever the draft, only sooner.
    """
    tokens, leads = [], []
    while len(tokens) < count:
        guess = draft[len(tokens) : count - 1] if tokens == draft[: len(tokens)] else []
        logits = model(torch.tensor([ids + tokens + guess])).logits[0].float()
        best = logits[-1 - len(guess) :].topk(2)
        for i, (token, _) in enumerate(best.indices.tolist()):
            tokens.append(token)
            leads.append(round(float(best.values[i, 0] - best.values[i, 1]), 4))
            if i < len(guess) and token != guess[i]:
                break
    return tokens, leads


def main():
    folder, prompts, result, dtype, count = sys.argv[1:]
    model, repaired = load(folder, getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    cases = []
    for case in json.loads(Path(prompts).read_text()):
        ids = tokenizer(case["prompt"]).input_ids
        tokens, leads = greedy(model, ids, case["draft"], int(count))
        result_of = {"prompt": case["prompt"], "prompt_ids": ids, "tokens": tokens, "leads": leads}
        cases.append(result_of)
    text = json.dumps({"transformers": transformers.__version__, "dtype": dtype, "cases": cases})
    Path(result).write_text(text)
    version = transformers.__version__
    print(f"transformers {version} {dtype}: {len(cases)} prompts, {repaired} weights repaired")


if __name__ == "__main__":
    main()
