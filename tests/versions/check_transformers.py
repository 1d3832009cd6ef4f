"""Both ways into one transformers, accelerate() and BitnetOpsConfig: the tokens it gave before."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import bitnet_ops

folder = Path(sys.argv[1])
accelerated = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
bitnet_ops.accelerate(accelerated)
loaded = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, quantization_config=bitnet_ops.BitnetOpsConfig()
)
for case in json.loads((folder / "expected.json").read_text())["cases"]:
    ids = torch.tensor([case["prompt_ids"]])
    for model in (accelerated, loaded):
        found = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
        assert found.tolist() == case["greedy_ids"][:24], case["prompt"]
