"""`python -m benchmarks.compare_bonsai --xllamacpp PYTHON`: Bonsai's sizes beside llama.cpp.

Ours by groups of 128 with int8 activations by groups (`bench model --dummy bonsai-1.7b`), theirs on
a file of the same dimensions in Q2_0, groups of 64; both in turns. PYTHON is the interpreter of an
environment with xllamacpp.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.bonsai_gguf import write_random
from benchmarks.process import Process
from bitnet_ops.bench import report, run_model
from bitnet_ops.bench.limits import MachineLimits
from bitnet_ops.bench.pinning import pinned, unpinned, use_threads
from bitnet_ops.bench.report import Row
from bitnet_ops.bench.run_model import ModelBench, ModelSettings, time_once
from bitnet_ops.bench.shapes import USUAL
from bitnet_ops.cli.terminal import progress_line
from bitnet_ops.dummy import model as dummy
from bitnet_ops.dummy.configs import GROUPED

_ROUNDS = 2
# llama.cpp's kernel of Q2_0 is plain C on x86: more tokens would take minutes
_PROMPT, _DECODED, _OURS = 16, 6, 32


def rows_of(bench: ModelBench, limits: Sequence[MachineLimits], theirs: Process) -> list[Row]:
    """Decoding behind nothing and one prompt, ours and theirs in turns; medians."""
    most = max(limits, key=lambda one: one.threads)
    use_threads(most.threads)
    prompt = bench.settings.prompts[0]
    decode, prefill = bench.model.decode_run(1, 0, 64), bench.model.prefill_run(prompt)
    figures: dict[str, list[float]] = {}
    peak = 0
    with unpinned():
        for _ in range(_ROUNDS):
            begin = time.perf_counter()
            for i in range(_OURS):
                decode.call(i)
            rate = _OURS / (time.perf_counter() - begin)
            figures.setdefault("decode", []).append(rate)
            figures.setdefault("prefill", []).append(prompt / time_once(prefill))
            time.sleep(0.05)  # threads of ours that still spin
            answer = theirs.ask(_PROMPT, _DECODED)
            figures.setdefault("llama.cpp decode", []).append(answer["predicted_per_second"])
            figures.setdefault("llama.cpp prefill", []).append(answer["prompt_per_second"])
            peak = answer["peak_kib"]
            time.sleep(0.05)
    found = {name: statistics.median(values) for name, values in figures.items()}
    return [
        {"kind": "bonsai", "prompts": [prompt, _PROMPT], **found, "llama.cpp peak MiB": peak / 1024}
    ]


def main(argv: Sequence[str] | None = None) -> int:
    name = "python -m benchmarks.compare_bonsai"
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    parser.add_argument("--dummy", choices=GROUPED, default=GROUPED[0])
    parser.add_argument("--xllamacpp", required=True, metavar="PYTHON")
    parser.add_argument("--prompt", type=int, default=128, help="tokens (default: 128)")
    parser.add_argument("-t", "--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--file", type=Path, help="keep the GGUF file here, and take it if there")
    args = parser.parse_args(argv)
    settings = ModelSettings(
        dummy=args.dummy, formats=((USUAL, "int8"),), prompts=(args.prompt,), contexts=(0,),
        batches=(1,), threads=(args.threads,), cold_mib=256, quick=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bitnet-ops-bonsai-") as folder:
        path = args.file or Path(folder) / "random.gguf"
        if not path.exists():
            write_random(dummy.config(args.dummy), path)
        worker = str(Path(__file__).with_name("xllamacpp_worker.py"))
        command = [args.xllamacpp, worker, str(path), str(args.threads)]
        with (
            Process("llama.cpp", command) as theirs,
            progress_line() as progress,
            pinned(),
        ):
            result = run_model.run(
                settings, progress, lambda bench, limits: rows_of(bench, limits, theirs)
            )
    row = next(row for row in result["rows"] if row["kind"] == "bonsai")
    print("\n".join([*report.lines(result), "", json.dumps(row)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
