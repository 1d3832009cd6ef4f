"""`python -m benchmarks.mask_cost MODEL [TOKENIZER.json]`: what a JSON schema costs a step.

Requests with and without a schema run by turns in one process, as many at once as each row says;
a step's time is the median. Beside it: what a mask and its token take alone, on one thread.
TOKENIZER.json: of a real vocabulary, for a model whose own has only bytes; ids of its own that the
model lacks are left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer as Backend

import bitnet_ops
from bitnet_ops import _runtime, machine
from bitnet_ops.generate.grammar import Grammar, Grammars
from bitnet_ops.generate.request import Limits
from bitnet_ops.generate.sampling import SamplingParams
from bitnet_ops.generate.tokenizer import Tokenizer
from bitnet_ops.language_model import LanguageModel

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["city", "river", "mountain"]},
        "people": {"type": "integer"},
        "near": {"type": "array", "items": {"type": "string"}, "minItems": 64},
    },
    "required": ["name", "kind", "people", "near"],
    "additionalProperties": False,
}
STEPS = 48


def steps_of(lm: LanguageModel, grammar: Grammar | None, rows: int) -> list[float]:
    """Seconds of each decode step of `rows` requests."""
    engine, times = lm.engine, list[float]()
    limits = Limits(STEPS + 8)
    for seed in range(rows):
        constraint = None if grammar is None else grammar.start()
        engine.add(
            [1 + seed, 7, 9],
            SamplingParams(temperature=1.0, seed=seed),
            limits,
            constraint=constraint,
        )
    while engine.has_work:
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return times[4:STEPS]


def alone(grammar: Grammar, steps: int = 400) -> list[float]:
    """Seconds of a mask and of the token that follows, along random answers."""
    rng, times = np.random.default_rng(0), list[float]()
    constraint = grammar.start()
    while len(times) < steps:
        if constraint.over:
            constraint = grammar.start()
        start = time.perf_counter()
        mask = constraint.mask()
        took = time.perf_counter() - start
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        token = int(rng.choice(allowed))
        start = time.perf_counter()
        constraint.add(token)
        times.append(took + time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mask_cost", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("tokenizer", nargs="?", type=Path)
    parser.add_argument("--rows", default="1,4,16", help="requests at once")
    options = parser.parse_args()
    lm = bitnet_ops.load(options.model)
    tokenizer, vocab_size = lm.tokenizer, lm.model.config.vocab_size
    if options.tokenizer is not None:
        tokenizer = Tokenizer(Backend.from_file(str(options.tokenizer)))
    start = time.perf_counter()
    grammars = Grammars(tokenizer, vocab_size, [1])
    ready = time.perf_counter()
    grammar = grammars.schema(SCHEMA)
    compiled = time.perf_counter()
    threads, load = torch.get_num_threads(), machine.load_average()
    print(f"{machine.cpu_model()}, {_runtime.isa()}, {threads} threads, load {load}")
    print(f"vocabulary {vocab_size}, of texts {tokenizer.vocab_size}; prepared in ", end="")
    print(f"{(ready - start) * 1e3:.0f} ms, schema compiled in {(compiled - ready) * 1e3:.1f} ms")
    own = [1e6 * s for s in alone(grammar)]
    print(f"a mask and its token alone: median {statistics.median(own):.0f} us, ", end="")
    print(f"p99 {statistics.quantiles(own, n=100)[98]:.0f} us")
    for rows in map(int, options.rows.split(",")):
        plain, masked = [], []
        for _ in range(3):
            plain += steps_of(lm, None, rows)
            masked += steps_of(lm, grammar, rows)
        a, b = statistics.median(plain), statistics.median(masked)
        print(
            f"{rows:3} rows: a step {a * 1e3:.2f} ms, with schemas {b * 1e3:.2f} "
            f"(+{b / a - 1:.1%}; {1e6 * (b - a) / rows:.0f} us a row)"
        )


if __name__ == "__main__":
    main()
