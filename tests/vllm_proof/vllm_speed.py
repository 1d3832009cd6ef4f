"""Decode tokens/s of one engine on one checkpoint, for the table of scripts/prove_vllm.

Usage: vllm_speed.py ENGINE CHECKPOINT RESULT.json BATCHES TOKENS [OPTIONS of vllm.LLM as JSON]
ENGINE: "vllm", or "own" for bitnet_ops' own. A rate is that of the tokens after the first: the
time for TOKENS less the time for one, so that prompts do not count; the best of three.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

PROMPT_TOKENS, REPEATS = 32, 3


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


def own_engine(checkpoint, options):
    """run(prompts, tokens) of bitnet_ops.load; the conversion is kept beside the result."""
    import torch

    import bitnet_ops

    model = bitnet_ops.load(checkpoint, dtype=torch.bfloat16, cache=options["cache"])

    def run(prompts, tokens):
        # a seed changes nothing of greedy tokens; other prompts' prefixes are not kept
        answers = model.generate_batch(prompts, max_new_tokens=tokens, ignore_eos=True)
        return [len(answer.token_ids) for answer in answers]

    return run


def rate(run, batch, tokens):
    """Tokens/s of all sequences together."""
    prompts, best = prompts_for(batch), {}
    for count in (1, tokens):
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            assert run(prompts, count) == [count] * batch
            seconds.append(time.perf_counter() - start)
        best[count] = min(seconds)
    return batch * (tokens - 1) / (best[tokens] - best[1])


def main():
    engine, checkpoint, result, batches, tokens = sys.argv[1:6]
    options = json.loads(sys.argv[6]) if len(sys.argv) > 6 else {}
    make = vllm_engine if engine == "vllm" else own_engine
    start = time.monotonic()
    run = make(checkpoint, options)
    report = {"start_s": round(time.monotonic() - start, 1), "tokens_per_s": {}}
    for batch in map(int, batches.split(",")):
        report["tokens_per_s"][batch] = round(rate(run, batch, int(tokens)), 1)
    Path(result).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":  # vLLM spawns: children import this module again
    main()
