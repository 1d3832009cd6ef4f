"""Rung L4: the real sgl.Engine serves a BitNet checkpoint; are its greedy tokens the oracle's?

Runs in the proof's environment with the import stubs on PYTHONPATH. The engine spawns its
schedulers; `apply()` is counted inside them by a second plug-in (apply_counter.py).
Usage: l4_engine.py CHECKPOINT ORACLE.json RESULT.json WORK_FOLDER OPTIONS
OPTIONS: of sgl.Engine, as JSON. model_impl "auto" takes our fused model file, "transformers"
transformers' model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SETTINGS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.1,
    "max_total_tokens": 2048,
    "max_running_requests": 4,
    "context_length": 256,
    "skip_server_warmup": True,
    "log_level": "warning",
}


def install_counter(folder):
    """Make apply_counter an installed distribution as far as importlib.metadata can see."""
    info = folder / "bitnet_ops_proof-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bitnet-ops-proof\nVersion: 0\n")
    points = "[sglang.srt.plugins]\nbitnet_proof = apply_counter:install\n"
    (info / "entry_points.txt").write_text(points)
    for old in [*folder.glob("apply-*"), *folder.glob("layers-*")]:
        old.unlink()
    path = [str(folder), str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    sys.path[:0] = path[:2]
    os.environ["BITNET_PROOF_DIR"] = str(folder)


def set_environment(folder, ranks=1):
    """As the launcher does: SGLang's other models left out, whose import takes half of a start, and
    the processors shared out."""
    from bitnet_ops.integrations.sglang import launch

    wanted = launch.environment(os.environ, launch.architectures(folder), ranks)
    names = ("SGLANG_DISABLED_MODEL_ARCHS", "SGLANG_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
    os.environ.update({name: wanted[name] for name in names if name in wanted})


def first_difference(ours, theirs):
    """The index of the first differing token, or the common length."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(ours))


def generate(checkpoint, oracle, options):
    """(engine start seconds, generation seconds, the engine's answers) for the oracle's prompts."""
    import sglang

    count = len(oracle["cases"][0]["tokens"])
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    start = time.monotonic()
    engine = sglang.Engine(model_path=checkpoint, **SETTINGS, **options)
    ready = time.monotonic()
    try:
        answers = engine.generate([case["prompt"] for case in oracle["cases"]], sampling)
    finally:
        engine.shutdown()
    return ready - start, time.monotonic() - ready, answers


def compare(oracle, answers):
    """Per prompt: how many tokens agree, and the oracle's lead at the first that differs."""
    rows = []
    for case, answer in zip(oracle["cases"], answers, strict=True):
        ours = list(answer["output_ids"])
        same = first_difference(ours, case["tokens"])
        read = answer["meta_info"]["prompt_tokens"]
        rows.append(
            {
                "prompt": case["prompt"],
                "prompt_ids_equal": read == len(case["prompt_ids"]),
                "same": same,
                "of": len(ours),
                "lead_at_difference": case["leads"][same] if same < len(ours) else None,
                "smallest_lead": min(case["leads"]),
                "text": answer["text"],
                "tokens": ours,
            }
        )
    return rows


def main():
    checkpoint, oracle_path, result, work, given = sys.argv[1:]
    oracle, options = json.loads(Path(oracle_path).read_text()), json.loads(given)
    set_environment(Path(checkpoint), options.get("tp_size", 1))
    install_counter(Path(work))
    import apply_counter

    started, seconds, answers = generate(checkpoint, oracle, options)
    counts = apply_counter.read_counts(work)
    report = {
        **options,
        "engine_start_s": round(started, 1),
        "generate_s": round(seconds, 1),
        "prompts": compare(oracle, answers),
        "own_pid": os.getpid(),
        "apply_calls": counts,
        "kinds": apply_counter.read_kinds(work),
    }
    Path(result).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":  # the engine spawns: children import this module again
    main()
