"""Decode tokens/s of vLLM and of our own engine, in turn in one process, for scripts/prove_vllm.

Usage: vllm_speed.py CHECKPOINT OWN_CHECKPOINT RESULT.json BATCHES TOKENS CACHE [OPTIONS]
OPTIONS: of vllm.LLM, as JSON. Both engines run in this process and take turns, so that what else
runs on the machine meets both. A rate is that of the tokens after the first: the time for TOKENS
less the time for one, so that prompts do not count.
"""

from __future__ import annotations

import json
import os
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
    """[by the clock, of processor time] of `tokens` tokens a prompt."""
    start = time.perf_counter(), time.process_time()
    assert run(prompts, tokens) == [tokens] * len(prompts)
    return [time.perf_counter() - start[0], time.process_time() - start[1]]


def rates(theirs, own, batch, tokens):
    """Tokens/s of both, all sequences together, and their quotients, by the clock and by processor.

    Each is the best of the rounds. Processor times hold on a machine that others use, where a
    barrier of threads waits for whoever is on their cores.
    """
    prompts, taken = prompts_for(batch), {}
    for turn in range(-1, ROUNDS):  # one to warm up
        for run in (theirs, own) if turn % 2 else (own, theirs):
            for count in (1, tokens):
                seconds = seconds_of(run, prompts, count)
                if turn >= 0:
                    taken.setdefault((run, count), []).append(seconds)
    best = {key: [min(column) for column in zip(*rows, strict=True)] for key, rows in taken.items()}
    their_s, own_s = (
        [long - short for short, long in zip(best[run, 1], best[run, tokens], strict=True)]
        for run in (theirs, own)
    )
    new = batch * (tokens - 1)
    return {
        "vllm": new / their_s[0],
        "own": new / own_s[0],
        "share": own_s[0] / their_s[0],
        "cpu_share": own_s[1] / their_s[1],
        "cpu_ms_a_step": 1000 * their_s[1] / (tokens - 1),
        "own_cpu_ms_a_step": 1000 * own_s[1] / (tokens - 1),
    }


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
