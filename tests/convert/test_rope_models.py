"""Whole Llama models with stretched rotary embedding: transformers beyond the original length.

The table alone is tests/models/test_rope.py's business, YaRN in a Qwen3 test_bonsai.py's.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import rounding_ties
from bitnet_ops.convert import convert
from bitnet_ops.convert.verify import verify
from bitnet_ops.language_model import load
from bitnet_ops.models.step_batch import SequenceStep, StepBatch
from bitnet_ops.nn.kv_pool import KVPool
from hf_writer import FAMILIES, write_checkpoint
from isa_control import torch_threads

HALF = FAMILIES["llama-bitlinear"].head_dim // 2
ORIGINAL, LONGEST = 64, 512
GAPS = [0, 1, 2, 40, 63, 64, 65, 100, 200, 300, 400, 511]
LISTS = {"short_factor": [1 + i / 40 for i in range(HALF)],
         "long_factor": [1 + i / 4 for i in range(HALF)]}  # fmt: skip
BLOCKS: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 8.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "mscale": 1.0,
             "mscale_all_dim": 0.5, "truncate": False},
    "longrope": {"rope_type": "longrope", **LISTS},
    "longrope, one list": {"rope_type": "longrope", "factor": 4.0,
                           "short_factor": LISTS["short_factor"],
                           "long_factor": LISTS["short_factor"]},
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    with torch_threads(1):
        yield


def family(kind: str, positions: int = LONGEST) -> Any:
    block = dict(BLOCKS[kind])
    if kind != "linear":
        block["original_max_position_embeddings"] = ORIGINAL
    extra = {"rope_scaling": block, "max_position_embeddings": positions}
    return dataclasses.replace(
        FAMILIES["llama-bitlinear"], name=f"rope-{kind}", config_extra=extra, layers=1
    )


def transformers_model(source: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for tensor in [*model.parameters(), *model.buffers()]:  # some stay in the file's bfloat16
        tensor.data = tensor.data.float() if tensor.is_floating_point() else tensor.data
    return model


@pytest.mark.parametrize("kind", BLOCKS)
def test_transformers_gives_the_same_logits(tmp_path: Path, kind: str) -> None:
    source = write_checkpoint(tmp_path / "hf", family(kind), tokenizer=False)
    report = convert(source, tmp_path / "out")
    theirs = transformers_model(source)
    model = load(tmp_path / "out", head_format="stored").model
    linears = [m for n, m in theirs.named_modules() if n.endswith("_proj")]

    def at(ids: torch.Tensor) -> torch.Tensor:
        """The last of GAPS: always one beyond the original length."""
        return torch.tensor(GAPS[-ids.shape[1] :])

    def ours(ids: torch.Tensor) -> torch.Tensor:
        tokens = ids[0].tolist()
        batch = StepBatch.of([SequenceStep(tokens, 0, list(range(4)), len(tokens))], 4)
        batch = dataclasses.replace(batch, positions=at(ids))
        logits = model.step(batch, KVPool(model.config, 4, 4, torch.float32))
        model.run_as = "ops"
        composed = model.step(batch, KVPool(model.config, 4, 4, torch.float32))
        model.run_as = "program"
        assert torch.equal(logits, composed)
        return logits

    def oracle(ids: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(ids)  # or gaps between positions would count as other sequences
        return theirs(ids, position_ids=at(ids)[None], attention_mask=mask).logits[0]

    watch = rounding_ties.TieWatch(linears)
    with torch.no_grad():
        rounding_ties.assert_alike(ours, oracle, watch, rounding_ties.prompts(300, seed=7))
    assert any("long_factor is taken" in r for r in report.remarks) == (kind == "longrope")
    proof = verify(tmp_path / "out", source)["verification"]
    assert proof["passed"]
    assert proof["oracle"].startswith("transformers") == (kind != "longrope")


def test_the_short_list_serves_a_context_within_the_original(tmp_path: Path) -> None:
    """With max_position_embeddings at the original length transformers takes the short list too."""
    source = write_checkpoint(tmp_path / "hf", family("longrope", ORIGINAL), tokenizer=False)
    report = convert(source, tmp_path / "out")
    assert any("short_factor is taken" in remark for remark in report.remarks)
    theirs = transformers_model(source)
    watch = rounding_ties.TieWatch([m for n, m in theirs.named_modules() if n.endswith("_proj")])
    model = load(tmp_path / "out", head_format="stored").model
    with torch.no_grad():
        rounding_ties.assert_alike(
            lambda ids: model(ids)[0],
            lambda ids: theirs(ids).logits[0],
            watch,
            rounding_ties.prompts(300, seed=7),
        )
