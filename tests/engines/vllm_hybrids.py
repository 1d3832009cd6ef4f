"""A hybrid in the real vLLM beside our own `generate`, for claims_vllm_hybrids.py; report is JSON.

vLLM's engine runs in this process, so that a fault can be planted into what it keeps.
Usage: vllm_hybrids.py MODEL FOLDER PLAN.json RESULT.json
MODEL: a converted model's folder. FOLDER: is made what vLLM is given. PLAN: {"options": of vLLM,
"rounds": [{"prompts": lists of ids, "tokens": how many more, "sampling": of both, "alone": one at a
time, "fresh": without what is cached, "fault": one of FAULTS}]}.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def a_state_of_another_request():
    """In every second step each sequence goes on from, and into, another one's page."""
    from bitnet_ops.integrations.vllm.states import StateMetadata, StateMetadataBuilder

    build, steps = StateMetadataBuilder.build, itertools.count()
    return mock.patch.object(
        StateMetadataBuilder,
        "build",
        lambda *a, **k: StateMetadata(build(*a, **k).slots.roll(next(steps) % 2)),
    )


def no_copies_of_states():
    """The page in which a sequence goes on does not get the state of the one before."""
    from vllm.v1.worker import mamba_utils

    return mock.patch.object(mamba_utils, "do_mamba_copy_block", lambda *_: None)


def checkpoints_that_go_on():
    """A kept state is that of some tokens later: its sequence goes on writing into the page."""
    from vllm.v1.worker import gpu_model_runner

    return mock.patch.object(gpu_model_runner, "copy_kv_cache_blocks_inplace", lambda *_: None)


FAULTS = {
    fault.__name__: fault
    for fault in (a_state_of_another_request, no_copies_of_states, checkpoints_that_go_on)
}


def run(llm, asked):
    """(tokens, cached tokens) of each prompt."""
    import vllm

    given = asked.get("sampling") or {"temperature": 0}
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    sampling = [
        vllm.SamplingParams(max_tokens=asked["tokens"], ignore_eos=True, **given)
        if "seed" not in given
        else vllm.SamplingParams(
            max_tokens=asked["tokens"], ignore_eos=True, **{**given, "seed": given["seed"] + i}
        )
        for i in range(len(prompts))
    ]
    if asked.get("fresh"):
        assert llm.reset_prefix_cache()
    fault = FAULTS[asked["fault"]]() if asked.get("fault") else contextlib.nullcontext()
    with fault:
        if asked.get("alone"):
            pairs = zip(prompts, sampling, strict=True)
            done = [llm.generate([p], s, use_tqdm=False)[0] for p, s in pairs]
        else:
            done = llm.generate(prompts, sampling, use_tqdm=False)
    return [list(d.outputs[0].token_ids) for d in done], [d.num_cached_tokens for d in done]


def main():
    model, folder, plan, result = map(Path, sys.argv[1:])
    plan = json.loads(plan.read_text())
    import bitnet_ops
    from bitnet_ops.integrations.vllm.serving import write_folder

    own = bitnet_ops.load(model, head_format="stored")
    expected = [
        [list(done.token_ids) for done in own.generate_batch(
            asked["prompts"], max_new_tokens=asked["tokens"], ignore_eos=True)]
        if asked.get("sampling") is None else None
        for asked in plan["rounds"]
    ]  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_folder(model / "model.bin", folder)
    import vllm

    options = {"dtype": "float32", "kv_cache_dtype": "bfloat16", "max_num_seqs": 16}
    options |= {"additional_config": {"bitnet_head_format": "stored"}, "disable_log_stats": False}
    llm = vllm.LLM(str(folder), enforce_eager=True, **options, **plan["options"])
    cache = llm.llm_engine.vllm_config.cache_config
    rounds = []
    for asked, own_tokens in zip(plan["rounds"], expected, strict=True):
        tokens, cached = run(llm, asked)
        rounds.append({"tokens": tokens, "cached": cached, "own": own_tokens})
    counts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    report = {"rounds": rounds, "block": cache.block_size, "mode": cache.mamba_cache_mode}
    report["preemptions"] = counts["vllm:num_preemptions"]
    result.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
