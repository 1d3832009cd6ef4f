"""Decode tokens/s of vLLM and of our own engine, in turn in one process, for scripts/prove_vllm.

Usage: vllm_speed.py CHECKPOINT OWN_CHECKPOINT RESULT.json BATCHES TOKENS CACHE [OPTIONS]
OPTIONS: of vllm.LLM, as JSON. Both engines run in this process and take turns, so that what else
runs on the machine meets both. A rate is that of the tokens after the first: the time for TOKENS
less the time for one, so that prompts do not count.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
PROMPT_TOKENS, ROUNDS = 32, 5


def prompts_for(batch):
    """Different prompts, so that nothing is shared between sequences."""
    return [[(7 * i + 13 * j) % 250 + 2 for j in range(PROMPT_TOKENS)] for i in range(batch)]


def vllm_engine(checkpoint, options):
    """run(prompts, tokens) of vLLM."""
    import vllm

    settings = {"dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 16, **options}
    # the same prompts come again: they are to be computed again, too
    engine = vllm.LLM(model=checkpoint, enable_prefix_caching=False, **settings)

    def run(prompts, tokens):
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        ids = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = engine.generate(ids, sampling, use_tqdm=False)
        return [len(answer.outputs[0].token_ids) for answer in answers]

    return run


def own_engine(checkpoint, cache):
    """run(prompts, tokens) of bitnet_ops.load; the conversion is kept in `cache`."""
    import torch

    import bitnet_ops

    model = bitnet_ops.load(checkpoint, dtype=torch.bfloat16, cache=cache)

    def run(prompts, tokens):
        answers = model.generate_batch(prompts, max_new_tokens=tokens, ignore_eos=True)
        return [len(answer.token_ids) for answer in answers]

    return run


def seconds_of(run, prompts, tokens):
    """How long `tokens` tokens a prompt take, less the time for one."""
    times = []
    for count in (1, tokens):
        start = time.perf_counter()
        assert run(prompts, count) == [count] * len(prompts)
        times.append(time.perf_counter() - start)
    return times[1] - times[0]


def rates(theirs, own, batch, tokens):
    """Best tokens/s of both, all sequences together, and the median of the rounds' quotients."""
    prompts, new = prompts_for(batch), batch * (tokens - 1)
    seconds_of(theirs, prompts, tokens)  # warm
    rounds = []
    for turn in range(ROUNDS):
        order = (theirs, own) if turn % 2 else (own, theirs)
        taken = {run: seconds_of(run, prompts, tokens) for run in order}
        rounds.append((taken[theirs], taken[own]))
    share = statistics.median(own_s / their_s for their_s, own_s in rounds)
    best = [min(column) for column in zip(*rounds, strict=True)]
    return {"vllm": new / best[0], "own": new / best[1], "share": share}


def main():
    checkpoint, own_checkpoint, result, batches, tokens, cache = sys.argv[1:7]
    options = json.loads(sys.argv[7]) if len(sys.argv) > 7 else {}
    start = time.monotonic()
    theirs = vllm_engine(checkpoint, options)
    report = {"start_s": round(time.monotonic() - start, 1), "batches": {}}
    own = own_engine(own_checkpoint, cache)
    for batch in map(int, batches.split(",")):
        found = rates(theirs, own, batch, int(tokens))
        report["batches"][batch] = {key: round(value, 2) for key, value in found.items()}
        Path(result).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
