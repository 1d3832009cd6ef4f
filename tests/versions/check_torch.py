"""The operators and the demo model beside one torch: exact products, and transformers' tokens."""

import json
import sys
from pathlib import Path

import torch

import bitnet_ops

codes = torch.randint(-1, 2, (64, 256), dtype=torch.int8)
weight, q = torch.ops.bitnet.pack(codes), torch.randint(-128, 128, (3, 256), dtype=torch.int8)
assert torch.equal(torch.ops.bitnet.gemm(weight, q), q.int() @ codes.int().T)

x, one = torch.randn(2, 256), torch.tensor([1.0])
traced = torch.compile(bitnet_ops.ops.linear, backend="eager", fullgraph=True)
assert torch.equal(traced(x, weight, one), bitnet_ops.ops.linear(x, weight, one))

lm = bitnet_ops.load(kv_dtype="float32", head_format="stored")
for case in json.loads((Path(sys.argv[1]) / "expected.json").read_text())["cases"]:
    limits = bitnet_ops.Limits(len(case["greedy_ids"]))
    (found,) = lm.engine.generate([case["prompt_ids"]], limits=limits)
    assert found.token_ids == case["greedy_ids"], case["prompt"]
