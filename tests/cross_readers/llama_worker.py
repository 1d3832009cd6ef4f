"""Runs in an environment with xllamacpp: log-probabilities of the next token, to a JSON file.

Of each prompt and each of its lengths from the second on, over the whole vocabulary; null where the
text would end.
"""

import json
import sys
from pathlib import Path

import xllamacpp

file, prompts, out = map(Path, sys.argv[1:])
params = xllamacpp.CommonParams()
params.model.path = str(file)
params.n_ctx = 512
params.cpuparams.n_threads = 1
params.n_gpu_layers = 0
params.warmup = False
server = xllamacpp.Server(params)
found = []
for ids in json.loads(prompts.read_text()):
    rows = []
    for length in range(2, len(ids) + 1):
        answer = server.handle_completions(
            {"prompt": ids[:length], "max_tokens": 1, "temperature": 0.0, "logprobs": 1 << 16,
             "cache_prompt": False}
        )  # fmt: skip
        chosen = (answer["choices"][0]["logprobs"] or {}).get("content")
        if not chosen:  # it was the end of the text, of which nothing is said
            rows.append(None)
            continue
        best = chosen[0]["top_logprobs"]
        row = {entry["id"]: entry["logprob"] for entry in best}
        rows.append([row[i] for i in range(len(row))])
    found.append(rows)
out.write_text(json.dumps(found))
