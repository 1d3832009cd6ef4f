"""The real engine generates from a checkpoint, for claims_serving.py; its report is JSON.

The engine spawns its workers; our calls are counted inside them (counter.py).
Usage: serve.py CHECKPOINT CASES.json RESULT.json CALLS_FOLDER OPTIONS
CASES: {"cases": [{"prompt", "tokens", ...}]}; OPTIONS: of the engine, as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import counter

import engines


def main():
    checkpoint, cases, result, calls, given = sys.argv[1:]
    engine, options = engines.chosen(), json.loads(given)
    asked = json.loads(Path(cases).read_text())["cases"]
    plugin = importlib.import_module(f"bitnet_ops.integrations.{engine.name}").PLUGIN
    counter.announce(Path(calls), plugin.group)
    served = engine.open(checkpoint, **options)
    try:
        prompts = [case["prompt"] for case in asked]
        answers = engine.generate(served, prompts, len(asked[0]["tokens"]))
    finally:
        engine.close(served)
    report = {
        "answers": answers,
        "own_pid": os.getpid(),
        "calls": {
            kind: {pid: n for pid, (n, _) in counter.read(calls, kind).items() if n}
            for kind in counter.COUNTED
        },
        "kinds": counter.read_kinds(calls),
    }
    Path(result).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":  # the engine spawns: children import this module again
    main()
