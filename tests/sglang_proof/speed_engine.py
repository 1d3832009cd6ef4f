"""Rung L6: tokens per second of one model, by SGLang or by this project's own engine.

Runs in the proof's environment. Prompts are random ids, so that no prefix is found again. A prompt
alone gives the speed of prompts; what more tokens take beyond it, that of decoding. Minima of
several rounds, for the machine may have other work.
Usage: speed_engine.py own|sglang MODEL RESULT.json [KEY=VALUE ... for sgl.Engine]
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

PROMPTS, BATCHES, NEW, ROUNDS = (128, 512), (1, 16), 32, 3
SHORT = 16  # tokens of a prompt where decoding is measured


def measure(generate, vocab_size, setup):
    """{name: tokens per second}; generate(prompts, new tokens) runs all of them to their ends."""
    draw = random.Random(1)

    def prompts(count, length):
        return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]

    def fastest(count, length, new):
        times = []
        for _ in range(ROUNDS):
            asked = prompts(count, length)
            start = time.perf_counter()
            generate(asked, new)
            times.append(time.perf_counter() - start)
        return min(times)

    generate(prompts(1, SHORT), 4)
    result = dict(setup)
    for length in PROMPTS:
        result[f"prompt {length}"] = round(length / fastest(1, length, 1), 1)
    for batch in BATCHES:
        more = fastest(batch, SHORT, NEW + 1) - fastest(batch, SHORT, 1)
        result[f"batch {batch}"] = round(batch * NEW / more, 2)
    return result


def own(model):
    import bitnet_ops

    start = time.monotonic()
    lm = bitnet_ops.load(model, cache=True)
    ready = time.monotonic() - start

    def generate(prompts, new):
        lm.generate_batch(prompts, max_new_tokens=new, ignore_eos=True)

    return measure(generate, lm.config.vocab_size, {"start_s": round(ready, 1)})


def served(model, overrides):
    import sglang

    start = time.monotonic()
    settings = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "max_total_tokens": 16384,
        "max_running_requests": 16,
        "skip_server_warmup": True,
        "log_level": "warning",
    }
    engine = sglang.Engine(model_path=model, **{**settings, **overrides})
    ready = time.monotonic() - start
    vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]

    def generate(prompts, new):
        engine.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
        )

    try:
        return measure(generate, vocab_size, {"start_s": round(ready, 1)})
    finally:
        engine.shutdown()


def main():
    who, model, result, *settings = sys.argv[1:]
    overrides = dict(setting.split("=", 1) for setting in settings)
    report = own(model) if who == "own" else served(model, overrides)
    Path(result).write_text(json.dumps(report, indent=1))
    print(who, report)


if __name__ == "__main__":  # the engine spawns: children import this module again
    main()
