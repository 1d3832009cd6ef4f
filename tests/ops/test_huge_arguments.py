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
from op_arguments import decode_step_arguments
from op_error_cases import good_calls
from op_schema import named

torch.set_num_threads(1)
g = torch.Generator().manual_seed(1)
canonical = torch.full((6, 64), 0x55, dtype=torch.uint8)
calls = good_calls()
calls["prepack"] = {"weight": canonical, "in_features": 160, "format": "2bit"}
tiles = ops.prepack(canonical, 160, "2bit")
calls["unprepack"] = {"weight": tiles, "out_features": 6, "in_features": 160}
calls["linear tiles"] = {
    "x": torch.ones(1, 160), "weight": tiles, "weight_scale": torch.ones(1), "out_features": 6,
}
calls["linear no tiles"] = {**calls["linear tiles"], "weight": tiles[:0], "out_features": 0}
for name, head in (("", torch.float32), (" int4", ("int4", 64))):
    args = decode_step_arguments(g, head=head)
    calls["decode_step" + name] = named("decode_step", args)
    none = {**calls["decode_step" + name], "weights": [], "scales": torch.ones(0, 7)}
    none["gains"] = torch.ones(70)  # no layer: nothing to hold the sizes against
    none["key_cache"], none["value_cache"] = (none[k][:0] for k in ("key_cache", "value_cache"))
    calls["decode_step no layers" + name] = none

pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * 4096 + (2 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
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
        if type_name not in ("int", "Optional[int]", "List[int]") or argument.name == "dtype":
            continue
        for value in VALUES:
            if type_name == "List[int]":
                count = 3 if op == "qkv_forward" else 2
                good = list(calls[key].get(argument.name, ())) or [160] * count
                wrongs = [good[:i] + [value] + good[i + 1:] for i in range(count)]
            else:
                wrongs = [value]
            for wrong in wrongs:
                arguments = {**calls[key], argument.name: wrong}
                label = f"{key} {argument.name}={wrong}"
                report(label, lambda: getattr(ops, op)(**arguments))

huge, i64 = 2**40, torch.int64
empty = torch.empty
packed = torch.full((4, 32), 0x55, dtype=torch.uint8)
EMPTY = {
    "rope_table": lambda: ops.rope_table(empty(0, dtype=i64), 2**31, 1e4),
    "rope_table rows": lambda: ops.rope_table(empty(huge, 0, dtype=i64), 64, 1e4),
    "rope_table out": lambda: ops.rope_table(torch.zeros(2**20, dtype=i64), 65536, 1e4),
    "relu2_mul": lambda: ops.relu2_mul(empty(huge, 0), empty(huge, 0)),
    "silu_and_mul": lambda: ops.silu_and_mul(empty(huge, 0)),
    "rms_norm": lambda: ops.rms_norm(empty(huge, 0), empty(0), 0.0),
    "rope": lambda: ops.rope(empty(huge, 0, 8), empty(0, 8)),
    "lm_head no rows": lambda: ops.lm_head(empty(huge, 0), empty(0, 0)),
    "lm_head": lambda: ops.lm_head(empty(huge, 0), empty(5, 0)),
    "embedding": lambda: ops.embedding(empty(0, dtype=i64), empty(0, 2**62)),
    "linear": lambda: ops.linear(empty(huge, 0), packed, torch.ones(1)),
    "linear strides": lambda: ops.linear(torch.ones(1).expand(huge, 128), packed, torch.ones(1)),
    "gemm scratch": lambda: ops.gemm(packed, torch.zeros(2**26, 1, dtype=torch.int8)),
    "attention": lambda: ops.attention(
        empty(1, 0, 1, 8), *(empty(1, 1, 0, 8) for _ in "kv"), torch.zeros(1, dtype=i64), 1.0
    ),
    "kv_cache_update": lambda: ops.kv_cache_update(
        *(empty(1, 1, huge, 0) for _ in "kv"), *(empty(1, huge, 1, 0) for _ in "kv"),
        torch.zeros(1, dtype=i64),
    ),
    "decode_step layers": lambda: ops.decode_step(
        empty(0, 1, 8), [packed], torch.ones(1, 7), torch.ones(8), torch.ones(5, 8), None,
        *(empty(7905747460161236407, 0, 1, 0, 8) for _ in "kv"), empty(0, dtype=i64),
        torch.float32, 1, 8, 5, False, "silu", 0.0, 1e4, 1.0,
    ),
}
for name, call in EMPTY.items():
    report(f"empty {name}", call)
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
