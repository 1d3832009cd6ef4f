"""Rung L6: tokens per second of one model in SGLang and in this project's own engine, by turns.

Runs in the proof's environment, one process a row of the table. Prompts are random ids, so that no
prefix is found again. A prompt alone gives the speed of prompts; what more tokens take beyond it,
that of decoding. The engines take turns and the fastest round counts, for the machine may have
other work. Our calls in SGLang's scheduler are counted and timed there (apply_counter.py).
Usage: speed_engine.py RESULT.json FOLDER OPTIONS WORK [OWN_MODEL]
OPTIONS: of sgl.Engine, as JSON. OWN_MODEL: what our own engine runs beside it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

from l4_engine import install_counter, set_environment

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

    def __init__(self, folder, work, options):
        import sglang

        start = time.monotonic()
        self.engine, self.work = sglang.Engine(model_path=folder, **{**SETTINGS, **options}), work
        self.start_s = time.monotonic() - start

    def __call__(self, prompts, new):
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        answers = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        return [list(answer["output_ids"]) for answer in answers]

    def calls(self):
        """(calls, seconds) of ours so far, of all processes but this one."""
        import apply_counter

        times = apply_counter.read_times(self.work)
        rows = [row for pid, row in times.items() if pid != os.getpid()]
        return sum(row[0] for row in rows), sum(row[1] for row in rows) / 1e9


class Own:
    """This project's engine, in this process."""

    def __init__(self, model):
        import bitnet_ops

        start = time.monotonic()
        self.lm = bitnet_ops.load(model)
        self.start_s = time.monotonic() - start

    def __call__(self, prompts, new):
        done = self.lm.generate_batch(prompts, max_new_tokens=new, ignore_eos=True)
        return [list(one.token_ids) for one in done]

    def calls(self):
        return 0, 0.0


def seconds(engines, draw, count, length, new):
    """{name: [seconds, calls of ours, seconds in them] of the fastest round} of `count` prompts of
    `length` ids with `new` tokens each; and whether all engines gave the same tokens.
    """
    best, same = {}, True
    for _ in range(ROUNDS):
        asked = [[draw(1000) for _ in range(length)] for _ in range(count)]
        answers = {}
        for name, generate in engines.items():
            before, start = generate.calls(), time.perf_counter()
            answers[name] = generate(asked, new)
            taken = time.perf_counter() - start
            ours = [b - a for a, b in zip(before, generate.calls(), strict=True)]
            best[name] = min(best.get(name, [float("inf")]), [taken, *ours])
        same &= len({json.dumps(tokens) for tokens in answers.values()}) == 1
    return best, same


def measure(engines):
    """{engine: {what: {rate, ms a forward, ms of it in our calls, calls a forward}}}"""
    draw = random.Random(1).randrange
    result = {name: {"start_s": round(engine.start_s, 1)} for name, engine in engines.items()}
    _, same = seconds(engines, draw, 1, SHORT, 2)

    def put(name, what, tokens, forwards, taken):
        s, calls, inside = taken
        row = {"rate": tokens / s, "ms": 1e3 * s / forwards, "ours_ms": 1e3 * inside / forwards}
        row["calls"] = calls / forwards
        result[name][what] = {key: round(value, 2) for key, value in row.items()}

    for length in PROMPTS:
        best, alike = seconds(engines, draw, 1, length, 1)
        same &= alike
        for name, taken in best.items():
            put(name, f"prompt {length}", length, 1, taken)
    for batch in BATCHES:
        (long, one), (short, two) = (seconds(engines, draw, batch, SHORT, n) for n in (NEW + 1, 1))
        same &= one and two
        for name in engines:
            taken = [a - b for a, b in zip(long[name], short[name], strict=True)]
            put(name, f"batch {batch}", batch * NEW, NEW, taken)
    return {"engines": result, "same_tokens": same}


def main():
    result, folder, given, work, *own = sys.argv[1:]
    set_environment(Path(folder))
    install_counter(Path(work))
    # The model's own threads decide here too: SGLang's schedulers take their number from torch.
    engines = {"SGLang": Served(folder, work, json.loads(given))}
    try:
        if own:
            engines["own"] = Own(own[0])
        report = measure(engines)
    finally:
        engines["SGLang"].engine.shutdown()
    Path(result).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":  # the engine spawns: children import this module again
    main()
