"""The process of llama.cpp: `PYTHON xllamacpp_worker.py FILE.gguf THREADS`, PYTHON with xllamacpp.

Answers every line "PROMPT TOKENS" on stdin with llama.cpp's own clock of such a request, as JSON.
It runs where this package is not installed.
"""

import json
import resource
import sys

import xllamacpp


def main(file: str, threads: int) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx = 4096
    params.n_parallel = 1
    for pool in (params.cpuparams, params.cpuparams_batch):
        pool.n_threads = threads
    params.n_gpu_layers = 0
    server = xllamacpp.Server(params)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        prompt, tokens = map(int, line.split())
        answer = server.handle_completions(
            {"prompt": [2 + i % 250 for i in range(prompt)], "max_tokens": tokens,
             "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        )  # fmt: skip
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({**answer["timings"], "peak_kib": peak}), flush=True)


main(sys.argv[1], int(sys.argv[2]))
