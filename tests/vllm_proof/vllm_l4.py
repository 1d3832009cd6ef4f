"""Rung L4: the real vLLM serves a BitNet checkpoint; are its greedy tokens transformers'?

Runs in the proof's environment. vLLM spawns its engine and workers; our calls are counted inside
them by a second plug-in (vllm_counter.py).
Usage: vllm_l4.py CHECKPOINT ORACLE.json RESULT.json WORK_FOLDER OPTIONS.json
OPTIONS: further arguments of vllm.LLM.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SETTINGS = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8}


def install_counter(folder):
    """Make vllm_counter an installed distribution as far as importlib.metadata can see."""
    info = folder / "bitnet_ops_proof-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bitnet-ops-proof\nVersion: 0\n")
    points = "[vllm.general_plugins]\nbitnet_proof = vllm_counter:install\n"
    (info / "entry_points.txt").write_text(points)
    for old in [*folder.glob("apply-*"), *folder.glob("step-*")]:
        old.unlink()
    path = [str(folder), str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    sys.path[:0] = path[:2]
    os.environ["BITNET_PROOF_DIR"] = str(folder)


def generate(checkpoint, oracle, options):
    """(engine start seconds, generation seconds, the engine's answers) for the oracle's prompts."""
    import vllm

    count = len(oracle["cases"][0]["tokens"])
    sampling = vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    start = time.monotonic()
    engine = vllm.LLM(model=checkpoint, **SETTINGS, **options)
    ready = time.monotonic()
    answers = engine.generate([case["prompt"] for case in oracle["cases"]], sampling)
    return ready - start, time.monotonic() - ready, answers


def compare(oracle, answers):
    """Per prompt: how many tokens agree, and the oracle's lead at the first that differs."""
    rows = []
    for case, answer in zip(oracle["cases"], answers, strict=True):
        ours = list(answer.outputs[0].token_ids)
        pairs = enumerate(zip(ours, case["tokens"], strict=True))
        same = next((i for i, (a, b) in pairs if a != b), len(ours))
        rows.append(
            {
                "prompt": case["prompt"],
                "prompt_ids_equal": list(answer.prompt_token_ids) == case["prompt_ids"],
                "same": same,
                "of": len(ours),
                "lead_at_difference": case["leads"][same] if same < len(ours) else None,
                "smallest_lead": min(case["leads"]),
                "tokens": ours,
            }
        )
    return rows


def main():
    checkpoint, oracle_path, result, work, options_path = sys.argv[1:]
    oracle = json.loads(Path(oracle_path).read_text())
    options = json.loads(Path(options_path).read_text())
    install_counter(Path(work))
    import vllm_counter

    started, seconds, answers = generate(checkpoint, oracle, options)
    report = {
        "dtype": options["dtype"],
        "engine_start_s": round(started, 1),
        "generate_s": round(seconds, 1),
        "prompts": compare(oracle, answers),
        "own_pid": os.getpid(),
        "apply_calls": vllm_counter.read_counts(work, "apply"),
        "step_calls": vllm_counter.read_counts(work, "step"),
    }
    Path(result).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":  # the engine spawns: children import this module again
    main()
