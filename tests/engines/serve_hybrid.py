"""SGLang serves a converted hybrid in every way that claims_hybrids.py claims; a report as JSON.

The truth is this project's own engine, in this process, one prompt at a time. Usage:
serve_hybrid.py CONVERTED SERVING_FOLDER RESULT.json WORK OPTIONS SCENARIO...
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from pathlib import Path

import counter
import faults

import engines

NEW, BATCHES, SHARED = 48, (1, 2, 4, 8, 16), (1, 63, 64, 65, 300)
LENGTHS = (5, 17, 64, 65, 130, 300, 1, 63, 128, 2, 33, 200, 7, 96, 47, 12)


class Truth:
    """Our own engine's greedy tokens of a prompt, alone; asked once each."""

    def __init__(self, folder):
        import torch

        import bitnet_ops

        self.lm = bitnet_ops.load(folder, head_format="stored", kv_dtype=torch.bfloat16)
        self.known = {}

    def __call__(self, prompt, count, ignore_eos=True):
        key = tuple(prompt), count, ignore_eos
        if key not in self.known:
            made = self.lm.generate(list(prompt), max_new_tokens=count, ignore_eos=ignore_eos)
            self.known[key] = list(made.token_ids)
        return self.known[key]

    def logprob(self, prompt, tokens):
        """Of each of `tokens` behind those before it."""
        import torch

        from bitnet_ops.nn.kv_cache import KVCache

        model, ids = self.lm.model, [*prompt, *tokens]
        cache = KVCache(model.config, 1, len(ids), torch.bfloat16)
        rows = model(torch.tensor([ids]), cache)[0].double().log_softmax(-1)
        at = range(len(prompt) - 1, len(ids) - 1)
        return [float(rows[i, ids[i + 1]]) for i in at]


class Scenarios:
    """Each gives what it has seen, and counts equal tokens."""

    def __init__(self, served, truth, fault):
        self.served, self.truth, self.fault = served, truth, fault
        self.random = random.Random(48)
        self.equal = self.total = 0
        self.retractions = 0

    def prompt(self, length):
        return [self.random.randrange(3, 258) for _ in range(length)]

    def ask(self, prompts, count=NEW, *, ignore_eos=True):
        """How many tokens of each prompt were cached; the answers are compared."""
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": ignore_eos}
        answers = self.served.generate(input_ids=prompts, sampling_params=sampling)
        for prompt, answer in zip(prompts, answers, strict=True):
            got, expected = answer["output_ids"], self.truth(prompt, count, ignore_eos)
            if answer["meta_info"]["finish_reason"]["type"] == "stop":
                got = got[:-1]  # we leave the end of text out
            self.equal += sum(a == b for a, b in zip(got, expected, strict=False))
            self.total += max(len(got), len(expected))
            self.retractions += answer["meta_info"]["num_retractions"]
        return [answer["meta_info"]["cached_tokens"] for answer in answers]

    def batches(self):
        """Of 1 to 16 requests at once, then each alone, whose prompt was seen before."""
        prompts = [self.prompt(n) for n in LENGTHS]
        for size in BATCHES:
            self.ask(prompts[:size])
        return {"cached again": sum(sum(self.ask([p])) for p in prompts[:8])}

    def prefixes(self):
        """Others begin as a prompt has begun; the third finds the state where the second parted."""
        found = {}
        for shared in SHARED:
            first = self.prompt(shared + 20)
            self.ask([first])
            others = [[*first[:shared], *self.prompt(11)] for _ in range(3)]
            found[shared] = [self.ask([other], 16)[0] for other in others]
        return found

    def turns(self):
        """Conversations go on behind what was answered."""
        prompts, cached = [self.prompt(n) for n in (40, 90, 130)], []
        for _ in range(3):
            cached.append(self.ask(prompts, 20))
            prompts = [[*p, *self.truth(p, 20), *self.prompt(9)] for p in prompts]
        return cached

    def eviction(self):
        """What was asked first is asked again when others have taken its place."""
        first = [self.prompt(150), self.prompt(70)]
        self.ask(first)
        for _ in range(6):
            self.ask([self.prompt(100) for _ in range(4)], 8)
        return {"cached after others": self.ask(first)}

    def retraction(self):
        """More tokens than the pool holds, so that requests are put back and begin again.

        Of a request that does not end by itself SGLang reserves all tokens beforehand.
        """
        before = self.retractions
        prompts = [self.prompt(n) for n in (40, 50, 60, 70, 80, 45, 55, 65)]
        self.ask(prompts, 120, ignore_eos=False)
        return {"retractions": self.retractions - before}

    def sampled(self):
        """Drawn tokens have the logprobs that our model gives them: of prompts, too."""
        prompts, worst = [self.prompt(n) for n in (70, 130, 9)], 0.0
        sampling = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
        options = {"return_logprob": True, "logprob_start_len": 0}
        answers = self.served.generate(input_ids=prompts, sampling_params=sampling, **options)
        for prompt, answer in zip(prompts, answers, strict=True):
            meta = answer["meta_info"]
            drawn = [one[0] for one in meta["output_token_logprobs"]]
            expected = self.truth.logprob(prompt, answer["output_ids"])
            read = [one[0] for one in meta["input_token_logprobs"]][1:]
            drawn, expected = read + drawn, self.truth.logprob(prompt[:1], prompt[1:]) + expected
            worst = max(worst, *(abs(a - b) for a, b in zip(drawn, expected, strict=True)))
        return {"largest difference": worst}

    def faults(self):
        """Tokens that differ, by the fault; none without one."""
        found = {}
        for name in ("", *faults.HARMLESS, *faults.HARMFUL, ""):
            self.served.flush_cache()
            self.fault.write_text(name)
            before = self.total - self.equal
            first = [self.prompt(n) for n in (150, 90)]
            self.ask(first, 12)
            for _ in range(3):  # the second finds where they part, the third begins there
                self.ask([[*p[:70], *self.prompt(20)] for p in first], 12)
            found[name or f"none {len(found)}"] = self.total - self.equal - before
            self.fault.write_text("")
        self.served.flush_cache()
        self.equal = self.total
        return found


def main():
    converted, folder, result, work, given, *names = sys.argv[1:]
    calls, fault = Path(work) / "calls", Path(work) / "fault"
    calls.mkdir(parents=True, exist_ok=True)
    fault.write_text("")
    os.environ["BITNET_PROOF_FAULT"] = str(fault)
    plugin = importlib.import_module("bitnet_ops.integrations.sglang").PLUGIN
    modules = ("counter", "faults") if "faults" in names else ("counter",)
    counter.announce(calls, plugin.group, modules)
    truth, engine = Truth(converted), engines.chosen()
    options = {"dtype": "float32", "kv_cache_dtype": "bfloat16", "context_length": 1024}
    served = engine.open(folder, **{**options, **json.loads(given)})
    try:
        scenarios, seen = Scenarios(served, truth, fault), {}
        for name in names:
            seen[name] = getattr(scenarios, name)()
    finally:
        engine.close(served)
    kinds = {pid: n for pid, (n, _) in counter.read(calls, "step").items() if n}
    report = {"seen": seen, "equal": scenarios.equal, "total": scenarios.total}
    report |= {"steps": kinds, "own_pid": os.getpid(), "kinds": counter.read_kinds(calls)}
    Path(result).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":  # the engine spawns: children import this module again
    main()
