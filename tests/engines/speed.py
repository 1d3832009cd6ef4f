"""Tokens per second of one model in the engine and in this project's own engine, by turns.

Prompts are random ids, so that no prefix is found again. A prompt alone gives the speed of prompts;
what more tokens take beyond it, that of decoding. The engines take turns and the fastest round
counts, for the machine may have other work. Our calls in the engine's workers are counted and timed
there (counter.py), and must be those that the row promises.
Usage: speed.py LAYERS VOCABULARY [ROW...]; a row runs in a process of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from pathlib import Path

import counter
from environment import HERE, child_environment, run_logged

import engines

HYBRID = "bonsai2-2b"
PROMPTS, BATCHES, ROUNDS = (128, 512), (1, 16), 3
SHORT, NEW = 16, 24  # tokens of a prompt where decoding is measured, and new ones
# Row -> checkpoint, what is counted, calls a layer or a forward, options of the engine.
ROWS = {
    "sglang": {
        # SGLang has no class for BitNet that runs in bfloat16: a Llama of these dimensions
        "bf16": ("llama", "", 0, {"dtype": "bfloat16", "load_format": "dummy"}),
        "method": ("packed", "apply", 4, {"dtype": "float32", "kv_cache_dtype": "bfloat16"}),
        "whole": ("serving", "step", 1, {"dtype": "float32", "kv_cache_dtype": "bfloat16"}),
        # Of Bonsai 2's dimensions, whatever is asked of the others; states inside of prompts
        "hybrid": (
            "serving-hybrid",
            "step",
            1,
            {
                "dtype": "float32",
                "kv_cache_dtype": "bfloat16",
                "max_mamba_cache_size": 80,
                "mamba_radix_cache_strategy": "extra_buffer",
            },
        ),
    },
    "vllm": {
        # vLLM compiles what it can by default
        "bf16": ("plain", "", 0, {"model_impl": "transformers", "enforce_eager": False}),
        "method": ("packed", "apply", 4, {"model_impl": "transformers"}),
        "whole": ("packed", "step", 1, {}),
        "hybrid": (
            "serving-hybrid", "step", 1, {"dtype": "float32", "kv_cache_dtype": "bfloat16"}
        ),
    },
}  # fmt: skip
SETTINGS = {
    "sglang": {
        "max_total_tokens": 4096,
        "max_running_requests": 16,
        "mem_fraction_static": None,
        "context_length": None,
        "skip_tokenizer_init": True,
        "sleep_on_idle": True,
    },
    "vllm": {"dtype": "bfloat16", "max_model_len": 1024},
}


class Served:
    """The engine, in processes of its own."""

    def __init__(self, folder, calls, counted, options):
        self.engine, self.folder, self.counted = engines.chosen(), calls, counted
        module = importlib.import_module(f"bitnet_ops.integrations.{self.engine.name}")
        counter.announce(Path(calls), module.PLUGIN.group)
        start = time.monotonic()
        self.served = self.engine.open(folder, **{**SETTINGS[self.engine.name], **options})
        self.start_s = time.monotonic() - start

    def __call__(self, prompts, new):
        return [tokens for _, tokens in self.engine.generate(self.served, prompts, new)]

    def calls(self):
        """(calls, seconds) of ours so far, of all processes but this one."""
        rows = [
            row
            for kind in counter.COUNTED
            for pid, row in counter.read(self.folder, kind).items()
            if pid != os.getpid()
        ]
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


def seconds(running, draw, count, length, new):
    """{name: [seconds, calls of ours, seconds in them] of the fastest round} of `count` prompts of
    `length` ids with `new` tokens each; and whether all gave the same tokens.
    """
    best, same = {}, True
    for _ in range(ROUNDS):
        asked = [[draw(3, 1000) for _ in range(length)] for _ in range(count)]
        answers = {}
        for name, generate in running.items():
            before, start = generate.calls(), time.perf_counter()
            answers[name] = generate(asked, new)
            taken = time.perf_counter() - start
            ours = [b - a for a, b in zip(before, generate.calls(), strict=True)]
            best[name] = min(best.get(name, [float("inf")]), [taken, *ours])
        same &= len({json.dumps(tokens) for tokens in answers.values()}) == 1
    return best, same


def measure(running):
    """{engine: {what: {rate, ms a forward, ms of it in our calls, calls a forward}}}"""
    draw = random.Random(1).randrange
    result = {name: {"start_s": round(engine.start_s, 1)} for name, engine in running.items()}
    _, same = seconds(running, draw, 1, SHORT, 2)

    def put(name, what, tokens, forwards, taken):
        s, calls, inside = taken
        row = {"rate": tokens / s, "ms": 1e3 * s / forwards, "ours_ms": 1e3 * inside / forwards}
        row["calls"] = calls / forwards
        result[name][what] = {key: round(value, 2) for key, value in row.items()}

    for length in PROMPTS:
        best, alike = seconds(running, draw, 1, length, 1)
        same &= alike
        for name, taken in best.items():
            put(name, f"prompt {length}", length, 1, taken)
    for batch in BATCHES:
        (long, one), (short, two) = (seconds(running, draw, batch, SHORT, n) for n in (NEW + 1, 1))
        same &= one and two
        for name in running:
            taken = [a - b for a, b in zip(long[name], short[name], strict=True)]
            put(name, f"batch {batch}", batch * NEW, NEW, taken)
    return {"engines": result, "same_tokens": same}


def run_row(name, folder, own, calls, result):
    """One row of the table, in this process."""
    _, counted, _, options = ROWS[engines.chosen().name][name]
    # The engine's own choice of threads decides for both.
    running = {"served": Served(folder, calls, counted, options)}
    try:
        if counted:
            running["own"] = Own(own)
        report = measure(running)
    finally:
        running["served"].engine.close(running["served"].served)
    Path(result).write_text(json.dumps(report, indent=1))


def table(engine, found):
    """Tokens per second; the share of our own engine, which took turns with each; and of the
    milliseconds of a forward those that are spent in our calls."""
    columns = [f"prompt {n}" for n in PROMPTS] + [f"batch {n}" for n in BATCHES]
    lines = ["tokens per second".ljust(24) + "".join(c.rjust(30) for c in columns) + "   start"]
    owns = [report["engines"]["own"] for report in found.values() if "own" in report["engines"]]
    for name, report in found.items():
        row, own = report["engines"]["served"], report["engines"].get("own")
        cells = ""
        for what in columns:
            share = f" ({row[what]['rate'] / own[what]['rate']:.2f})" if own else ""
            spent = f"{row[what]['ours_ms']:.1f}/{row[what]['ms']:.1f} ms"
            cells += f"{row[what]['rate']:.1f}{share} {spent}".rjust(30)
        lines.append(f"{engine}, {name}".ljust(24) + cells + f"{row['start_s']:6.1f} s")
    best = [max(own[what]["rate"] for own in owns) for what in columns] if owns else []
    lines.append("own engine".ljust(24) + "".join(f"{rate:.1f}".rjust(30) for rate in best))
    return lines


def problem(engine, name, report, layers):
    """Why what was timed is not what the row says, or None."""
    _, counted, calls, _ = ROWS[engine][name]
    expected = calls * (layers if counted == "apply" else 1)
    row = report["engines"]["served"]
    got = [row[f"batch {batch}"]["calls"] for batch in BATCHES]
    # Of several requests some may arrive a forward later, so that there are more forwards.
    if got[0] != expected or any(bool(n) != bool(expected) for n in got):
        return f"{name}: expected {expected} calls of ours a forward, got {got}"
    exact = name == "hybrid" or (engine, name) == ("sglang", "whole")
    if exact and not report["same_tokens"]:
        return f"{name}: expected the tokens of our own engine, got others"
    return None


def main():
    if sys.argv[1] == "--row":
        return run_row(*sys.argv[2:])
    layers, vocabulary, *rows = sys.argv[1:]
    engine, work = os.environ["BITNET_PROOF_ENGINE"], Path(os.environ["BITNET_PROOF_WORK"])
    models, plain = work / f"dims-{layers}-{vocabulary}", child_environment()

    def script(name, log, *words, env=plain):
        run_logged([sys.executable, HERE / name, *words], work / f"{log}.log", 3000, env)

    rows = rows or [*ROWS[engine]]
    models.mkdir(parents=True, exist_ok=True)
    if rows != ["hybrid"] and not (models / "llama" / "config.json").exists():
        script("dims.py", "dims", models, layers, vocabulary)
    found = {}
    for name in rows:
        checkpoint, own = ROWS[engine][name][0], models / "packed"
        folder, result = models / checkpoint, work / f"speed-{layers}-{name}.json"
        if checkpoint == "serving":
            script("checkpoints.py", "serving", "folder", own, folder, "int8")
        if checkpoint == "serving-hybrid":
            own = work / HYBRID
            if not (own / "model.bin").exists():
                words = ["-m", "bitnet_ops", "dummy", HYBRID, own]
                run_logged([sys.executable, *words], work / "dummy.log", 3000, plain)
            script("checkpoints.py", "serving", "folder", own, folder, "int8")
        attention = "0" if name == "bf16" else "1"
        env = {**os.environ, **engines.chosen().environment(1)}
        env |= {"BITNET_OPS_SGLANG_ATTENTION": attention}
        env.pop("TORCHDYNAMO_DISABLE", None)
        words = ["--row", name, folder, own, work / "calls-speed", result]
        script("speed.py", f"speed-{name}", *words, env=env)
        found[name] = json.loads(result.read_text())
    print(f"{layers} layers of 2B-4T's dimensions, vocabulary {vocabulary}")
    print("\n".join(table(engine, found)))
    problems = [problem(engine, name, report, int(layers)) for name, report in found.items()]
    return "; ".join(filter(None, problems)) or None


if __name__ == "__main__":  # the engine spawns: children import this module again
    sys.exit(main())
