"""Rung L6: tokens per second of one model in SGLang and in this project's own engine, by turns.

Runs in the proof's environment. Prompts are random ids, so that no prefix is found again. A prompt
alone gives the speed of prompts; what more tokens take beyond it, that of decoding. The engines
take turns and the fastest round counts, for the machine may have other work.
Usage: speed_engine.py RESULT.json [SERVING_FOLDER MODEL | BF16_CONFIG_FOLDER]
With one folder: SGLang alone, on a model of random bfloat16 weights of that config.json.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

PROMPTS, BATCHES, ROUNDS = (128, 512), (1, 16), 3
SHORT, NEW = 16, 24  # tokens of a prompt where decoding is measured, and new ones
SETTINGS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,
    "max_total_tokens": 4096,
    "max_running_requests": 16,
    "skip_server_warmup": True,
    "skip_tokenizer_init": True,
    "log_level": "warning",
}


class Served:
    """SGLang's engine, in processes of its own."""

    def __init__(self, folder, **settings):
        import sglang

        start = time.monotonic()
        self.engine = sglang.Engine(model_path=folder, **{**SETTINGS, **settings})
        self.start_s = round(time.monotonic() - start, 1)

    def __call__(self, prompts, new):
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        answers = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        return [list(answer["output_ids"]) for answer in answers]


class Own:
    """This project's engine, in this process."""

    def __init__(self, model):
        import bitnet_ops

        start = time.monotonic()
        self.lm = bitnet_ops.load(model)
        self.start_s = round(time.monotonic() - start, 1)

    def __call__(self, prompts, new):
        done = self.lm.generate_batch(prompts, max_new_tokens=new, ignore_eos=True)
        return [list(one.token_ids) for one in done]


def seconds(engines, draw, count, length, new):
    """{name: fastest seconds} of `count` prompts of `length` ids with `new` tokens each."""
    best = dict.fromkeys(engines, float("inf"))
    for _ in range(ROUNDS):
        asked = [[draw(1000) for _ in range(length)] for _ in range(count)]
        answers = {}
        for name, generate in engines.items():
            start = time.perf_counter()
            answers[name] = generate(asked, new)
            best[name] = min(best[name], time.perf_counter() - start)
        if len({json.dumps(tokens) for tokens in answers.values()}) > 1:
            sys.exit(f"speed: expected the same tokens of all engines, got {answers}")
    return best


def measure(engines):
    """{engine: {what: tokens per second}}"""
    draw = random.Random(1).randrange
    result = {name: {"start_s": engine.start_s} for name, engine in engines.items()}
    seconds(engines, draw, 1, SHORT, 2)
    for length in PROMPTS:
        for name, s in seconds(engines, draw, 1, length, 1).items():
            result[name][f"prompt {length}"] = round(length / s, 1)
    for batch in BATCHES:
        long, short = (seconds(engines, draw, batch, SHORT, new) for new in (NEW + 1, 1))
        for name in engines:
            speed = batch * NEW / (long[name] - short[name])
            result[name][f"batch {batch}"] = round(speed, 2)
    return result


def main():
    result, *folders = sys.argv[1:]
    if len(folders) == 2:
        served = Served(folders[0], dtype="float32", kv_cache_dtype="bfloat16")
        engines = {"SGLang, ours in it": served, "own engine": Own(folders[1])}
    else:
        served = Served(folders[0], dtype="bfloat16", load_format="dummy")
        engines = {"SGLang's bf16": served}
    try:
        report = measure(engines)
    finally:
        served.engine.shutdown()
    Path(result).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":  # the engine spawns: children import this module again
    main()
