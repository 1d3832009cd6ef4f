"""Sliding windows in whole models: transformers' results, on texts well beyond the windows, and the
same bits whatever the chunks, the blocks, the way the step runs, and what came before.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import forward_fp64
import hf_writer
from bitnet_ops.config import ModelConfig, UnsupportedModelError
from bitnet_ops.convert import convert
from bitnet_ops.convert.comparison import MIN_TOP1
from bitnet_ops.generate.engine import Engine, Limits
from bitnet_ops.generate.sampling import SamplingParams
from bitnet_ops.language_model import load
from bitnet_ops.models import Decoder
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.kv_config import KV_DTYPES
from hf_families import CASES
from tiny_models import random_ids, tiny_model

FP32_ROUNDING = 5e-6
WINDOW = 5
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def family(base: str, name: str, **extra: Any) -> hf_writer.Family:
    """A published Qwen with three layers, one scale a matrix, and windows."""
    return dataclasses.replace(
        CASES[base].family, name=f"windows-{name}", layers=3, vocab=260, dtype="float32",
        dense_ternary=False, quantized=True, scale_groups=False,
        config_extra={"use_sliding_window": True, "sliding_window": WINDOW, **extra},
    )  # fmt: skip


FAMILIES = {
    "behind a full layer": family("bonsai", "behind", max_window_layers=1),
    "by layer_types": family("bonsai", "types", layer_types=KINDS, max_window_layers=3),
    "everywhere": family("qwen2-rms-norm-div", "everywhere", max_window_layers=0),
}
WINDOWS = {
    "behind a full layer": (0, WINDOW, WINDOW),
    "by layer_types": (WINDOW, 0, WINDOW),
    "everywhere": (WINDOW,) * 3,
}


# Against transformers --------------------------------------------------------------------------


@torch.inference_mode()
def logits_of_transformers(folder: Path, texts: list[list[int]]) -> list[Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    return [model(torch.tensor([ids])).logits[0] for ids in texts]


@torch.inference_mode()
def logits(model: Decoder, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids]), KVCache(model.config, 1, len(ids), torch.float32))[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """On a prompt that keeps clear of rounding ties; and of a float64 forward."""
    network = hf_writer.make_network(FAMILIES[name])
    source = hf_writer.write_checkpoint(tmp_path / "source", FAMILIES[name], network=network)
    report = convert(source, tmp_path / "out", verify=True)
    assert report.verification is not None and report.verification["passed"]
    ours = load(tmp_path / "out", head_format="stored").model
    assert ours.config.windows == WINDOWS[name] and ours.program is not None
    ids, margin = forward_fp64.clear_prompt_of(FAMILIES[name].name, FAMILIES[name], 24)
    assert margin > 2e-5, "no prompt can tell a wrong model from a tie"
    long = torch.randint(0, 260, (256,), generator=torch.Generator().manual_seed(1)).tolist()
    theirs, theirs_long = logits_of_transformers(source, [ids, long])
    exact, _ = forward_fp64.forward(FAMILIES[name], network, ids)
    found, size = logits(ours, ids), float(exact.abs().max())
    assert (found - theirs).abs().max() < FP32_ROUNDING * size
    assert (found.double() - exact).abs().max() < FP32_ROUNDING * size
    full = dataclasses.replace(FAMILIES[name], config_extra={})
    everything, _ = forward_fp64.forward(full, network, ids)
    assert torch.equal(everything[:WINDOW], exact[:WINDOW])
    assert (everything[-1] - exact[-1]).abs().max() > 1e-2 * size, "the windows change nothing"
    same = theirs_long.argmax(-1) == logits(ours, long).argmax(-1)
    assert same.double().mean() >= MIN_TOP1


# Every way of running them ---------------------------------------------------------------------

TEXT = random_ids(3, 1, 200)


@pytest.fixture(scope="module", params=[5, 70])
def model(request: pytest.FixtureRequest) -> Decoder:
    """Layers with a window of less than a chunk of attention, or of more, and one without."""
    return tiny_model(family("bonsai", "tiny", layer_types=KINDS, sliding_window=request.param))


def in_chunks(model: Decoder, kv_dtype: torch.dtype, *sizes: int) -> Tensor:
    cache = KVCache(model.config, 1, TEXT.shape[1], kv_dtype)
    return torch.cat([model(part, cache) for part in TEXT.split(list(sizes), dim=1)], dim=1)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES.values(), ids=str)
@torch.inference_mode()
def test_every_way_of_running_it_is_the_same_bit_for_bit(
    model: Decoder, kv_dtype: torch.dtype
) -> None:
    """At once, in chunks, token by token; the one step, and the ops one by one."""
    whole = in_chunks(model, kv_dtype, 200)
    assert torch.equal(in_chunks(model, kv_dtype, 3, 64, 1, 100, 32), whole)
    assert torch.equal(in_chunks(model, kv_dtype, *[1] * 200), whole)
    model.run_as = "ops"
    try:
        assert torch.equal(in_chunks(model, kv_dtype, 130, *[1] * 6, 64), whole)
    finally:
        model.run_as = "program"


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_the_engine_gives_the_tokens_of_each_text_alone(
    model: Decoder, kv_dtype: torch.dtype
) -> None:
    """Many at once, in small steps, with prefixes found again: what greedy decoding gives alone."""
    ids = TEXT[0].tolist()
    prompts = [ids[:150], ids[:150], ids[:80], [*ids[:144], 7], ids[100:104]]
    limits = Limits(9)
    engine = Engine(model, kv_dtype=kv_dtype, prefill_chunk=37)
    expected = [alone(model, kv_dtype, prompt, 9) for prompt in prompts]
    for _ in range(2):  # the second time from the prefix cache
        found = engine.generate(prompts, SamplingParams(), limits)
        assert [generation.token_ids for generation in found] == expected


@torch.inference_mode()
def alone(model: Decoder, kv_dtype: torch.dtype, prompt: list[int], count: int) -> list[int]:
    cache = KVCache(model.config, 1, len(prompt) + count, kv_dtype)
    tokens = [int(model(torch.tensor([prompt]), cache, 1)[0, -1].argmax())]
    while len(tokens) < count:
        tokens.append(int(model(torch.tensor([tokens[-1:]]), cache)[0, -1].argmax()))
    return tokens


# What a config says ----------------------------------------------------------------------------


def windows(name: str, **changes: Any) -> tuple[int, ...]:
    stated = {**hf_writer.config_dict(FAMILIES[name]), **changes}
    return ModelConfig.from_hf({k: v for k, v in stated.items() if v is not ...}).windows


def test_what_qwen_configs_mean() -> None:
    """As transformers' Qwen3Config reads them; one that is off may state a window."""
    off = {"use_sliding_window": False}
    assert windows("everywhere", **off) == windows("everywhere", use_sliding_window=...) == ()
    assert windows("everywhere", sliding_window=None) == ()
    assert windows("everywhere", sliding_window=...) == (4096,) * 3
    assert windows("everywhere", max_window_layers=...) == ()  # 28 layers in front have none
    assert windows("everywhere", max_window_layers=2) == (0, 0, WINDOW)
    assert windows("by layer_types", layer_types=["full_attention"] * 3) == ()
    assert windows("by layer_types", layer_types=["full_attention"] * 3, **off) == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_sliding_window": False}, "only 'full_attention' where use_sliding_window is off"),
        ({"sliding_window": None}, "only 'full_attention' where use_sliding_window is off"),
        ({"sliding_window": 0}, "sliding_window to be a positive integer, got 0"),
        ({"sliding_window": "5"}, "sliding_window to be a positive integer, got '5'"),
        ({"use_sliding_window": 1}, "use_sliding_window to be true or false"),
        ({"layer_types": KINDS[:2]}, "layer_types to be 3 of 'full_attention' and 'sliding"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types to be 3 of"),
        ({"layer_types": [["full_attention"]] * 3}, "layer_types to be 3 of"),
        ({"layer_types": ..., "max_window_layers": -1}, "max_window_layers to be a positive"),
        ({"layer_types": ..., "max_window_layers": False}, "max_window_layers to be a positive"),
        ({"layer_types": ..., "num_hidden_layers": 10**9}, "of at most 4096, got 1000000000"),
    ],
)  # fmt: skip
def test_what_is_not_clear_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        windows("by layer_types", **changes)
