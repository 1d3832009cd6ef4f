#!/usr/bin/env python3
"""Write expected.json: what transformers (not this project) computes for a checkpoint, in fp32.

    pip install torch transformers==5.12.1 accelerate
    OMP_NUM_THREADS=1 python make_expected.py demo-model

For each prompt: token ids, the five largest logits after it, the greedy continuation (48 tokens,
end of text not treated as a stop) and, step by step, the best logit and its lead over the second.
Of all prompts those with the largest smallest lead are kept, because two right fp32 implementations
differ by some 1e-2 in the logits. Held-out text: val.txt holds chapters separated by a blank line;
each is read alone as <s> + tokens + </s>, and every token after <s> counts. It must not import
bitnet_ops.
"""

import argparse
import json
import math
import os
import re
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 48
PROMPTS = (
    "In the beginning|And God said unto|The LORD is my shepherd;|"
    "Then Jesus answered and said unto them,|Psalm 151\n|"
    "And it came to pass, when the king of Israel heard|The proverbs of Solomon|"
    "Blessed are they that|And I saw a great|Now therefore hear the word of the LORD,|"
    "Let us therefore|And David said to|Woe unto|These are the generations of|Exodus 41\n|"
    "He that walketh in wisdom|And Moses went up into the mount,|Paul, an apostle of|"
    "What is man, that|And there came an angel|And Samuel|Verily, verily, I say|"
    "The burden of Babylon|1 Kings 23\n|And the priest shall|O give thanks unto|"
    "Thus saith the LORD of hosts,|And the children of Israel did|My son, keep|Ezekiel 49\n"
).split("|")


def continuation(model, tok, prompt):
    """The case of one prompt, as expected.json has it."""
    ids = tok(prompt).input_ids
    out = model(torch.tensor([ids]), use_cache=True)
    first, done, best, leads = None, [], [], []
    for _ in range(STEPS):
        top = out.logits[0, -1].topk(5)
        logits = top.values.tolist()
        first = first or {"ids": top.indices.tolist(), "logits": [round(v, 5) for v in logits]}
        best.append(round(logits[0], 4))
        leads.append(round((top.values[0] - top.values[1]).item(), 4))
        done.append(top.indices[0].item())
        past = out.past_key_values
        out = model(torch.tensor([done[-1:]]), past_key_values=past, use_cache=True)
    return {
        "prompt": prompt,
        "prompt_ids": ids,
        "first_top5": first,
        "smallest_lead": min(leads),
        "greedy_ids": done,
        "greedy_text": tok.decode(done),
        "best_logits": best,
        "leads": leads,
    }


def held_out(model, tok, path):
    """The loss of every chapter of val.txt, and their sum."""
    chapters, total, count, size = [], 0.0, 0, 0
    for text in path.read_text().rstrip("\n").split("\n\n"):
        ids = [*tok(text).input_ids, tok.eos_token_id]
        log_p = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        nats = -log_p.gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
        title = text.split("\n")[0]
        chapters.append({"title": title, "tokens": len(ids) - 1, "nats": round(nats, 3)})
        total, count, size = total + nats, count + len(ids) - 1, size + len(text.encode())
    protocol = (
        "val.txt split at blank lines; each chapter alone as <s> + tokens + </s>; "
        "every token after <s> counts"
    )
    return {
        "protocol": protocol,
        "nats_per_token": round(total / count, 6),
        "bits_per_byte": round(total / math.log(2) / size, 6),
        "tokens": count,
        "bytes": size,
        "chapters": chapters,
    }


def load(folder):
    """The model in fp32, the kind of its linears checked."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    kinds = {type(m).__name__ for n, m in model.named_modules() if n.endswith("_proj")}
    assert kinds in ({"AutoBitLinear"}, {"BitLinear"}), kinds
    dtypes = {q.dtype for q in model.state_dict().values()}
    assert dtypes <= {torch.float32, torch.uint8}, dtypes
    return model, kinds.pop()


@torch.no_grad()
def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("folder", type=Path)
    p.add_argument("--count", type=int, default=8, help="prompts to keep")
    p.add_argument("--note", default="")
    a = p.parse_args()
    tok = AutoTokenizer.from_pretrained(a.folder)
    model, kind = load(a.folder)
    cases = [continuation(model, tok, prompt) for prompt in PROMPTS]
    cases = sorted(cases, key=lambda c: -c["smallest_lead"])[: a.count]
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    result = {
        "oracle": f"{versions}, fp32, CPU, {kind}",
        "note": a.note,
        "dtype": "float32",
        "cases": cases,
        "val": held_out(model, tok, a.folder / "val.txt"),
    }
    text = json.dumps(result, indent=1, ensure_ascii=False)
    # a list of numbers on one line
    numbers = r"\[\n\s+([-\d.,\s]+?)\s+\]"
    text = re.sub(numbers, lambda m: "[" + re.sub(r"\s+", " ", m.group(1)) + "]", text)
    (a.folder / "expected.json").write_text(text + "\n")
    print({k: v for k, v in result["val"].items() if k != "chapters"})


if __name__ == "__main__":
    main()
