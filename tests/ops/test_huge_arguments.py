"""Huge, negative and overflowing integers, and empty tensors of huge shapes, for every op.

Each call answers at once, with a result or with one error in the house's words, within 2 GiB of
address space. One process of its own does it all, so that a crash or a hang is seen as one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# Prints one line of JSON before and after each call.
CHILD = r"""
import json, resource, sys, time
sys.path.insert(0, sys.argv[1])
import torch
from bitnet_ops import ops
from op_catalogue import SPECS

torch.set_num_threads(1)
calls = {}
for op, spec in SPECS.items():
    for variant, call in spec.calls.items():
        calls[f"{op} {variant}".strip()] = call.arguments()
    for variant, build in spec.huge.items():
        calls[f"{op} {variant}"] = build(torch.Generator().manual_seed(1))

pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * 4096 + (2 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
LISTS = "List[int]", "Optional[List[int]]"
VALUES = (2**31, 2**31 - 1, 2**32 + 1, 2**61 + 1, 2**62, 2**63 - 1, 2**63 - 15, -1, -16, -(2**63))

def report(label, call):
    print(json.dumps([label]), flush=True)
    start = time.perf_counter()
    try:
        call()
        outcome = ""
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    print(json.dumps([label, outcome, time.perf_counter() - start]), flush=True)

for key in sorted(calls):
    op = key.split()[0]
    for argument in getattr(torch.ops.bitnet, op).default._schema.arguments:
        type_name = str(argument.type)
        if type_name not in ("int", "Optional[int]", *LISTS) or argument.name == "dtype":
            continue
        for value in VALUES:
            if type_name in LISTS:
                count = SPECS[op].list_lengths[argument.name]
                good = list(calls[key].get(argument.name) or [160] * count)
                wrongs = [good[:i] + [value] + good[i + 1:] for i in range(count)]
            else:
                wrongs = [value]
            for wrong in wrongs:
                arguments = {**calls[key], argument.name: wrong}
                label = f"{key} {argument.name}={wrong}"
                report(label, lambda: getattr(ops, op)(**arguments))

for op, spec in SPECS.items():
    for variant, build in spec.empty.items():
        report(f"empty {op} {variant}".strip(), lambda: getattr(ops, op)(*build()))
print(json.dumps(["done"]))
"""
SLOWEST_S = 20  # of one call, on a loaded machine: a loop over 2^31 anything takes longer


def test_no_integer_and_no_empty_shape_crashes_hangs_or_takes_all_memory() -> None:
    command = [sys.executable, "-c", CHILD, str(Path(__file__).resolve().parents[1] / "helpers")]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=240)
        out, state = run.stdout, f"status {run.returncode}: {run.stderr[-500:]}"
    except subprocess.TimeoutExpired as late:
        out, state = (late.stdout or b"").decode(), "out of time"
    rows = [json.loads(line) for line in out.splitlines()]
    assert rows and rows[-1] == ["done"], f"{state}; the last call was {rows[-1:]}"
    finished = [row for row in rows if len(row) == 3]
    assert len(finished) > 300
    for label, outcome, seconds in finished:
        assert seconds < SLOWEST_S, (label, seconds)
        op = label.removeprefix("empty ").split()[0]
        ours = f"RuntimeError: {op}: expected ", "RuntimeError: bitnet: expected "
        fine = outcome == "" or outcome.startswith(ours)
        assert fine and "\n" not in outcome and ".cpp" not in outcome, (label, outcome)
