"""Sliding windows in GGUF files: read where a file says which layers they are of, else refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import forward_fp64
from bitnet_ops.convert import ConvertError, convert, export_gguf
from bitnet_ops.language_model import load
from bitnet_ops.nn.kv_cache import KVCache
from gguf_bytes import gguf, key
from gguf_models import byte_tokenizer, metadata, tensors
from hf_writer import FAMILIES, Family, make_network

FP32_ROUNDING = 5e-6
PLAIN = dataclasses.replace(
    FAMILIES["llama-autobitlinear"], name="gguf-windows", model_type="qwen3", qk_norm=True,
    eps=1e-6, heads=4, head_dim=64,
)  # fmt: skip
QWEN3 = dataclasses.replace(
    PLAIN, config_extra={
        "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
    },
)  # fmt: skip


def write(folder: Path, family: Family, architecture: str, *windows: tuple[str, str, Any]) -> Path:
    """The keys' names without the architecture and `attention.`"""
    keys = [key(f"{architecture}.attention.{name}", kind, what) for name, kind, what in windows]
    parts = tensors(family, make_network(family), architecture, "TQ2_0", embedding="F32")
    about = [*metadata(family, architecture), *keys, *byte_tokenizer(family.vocab)]
    (folder / "m.gguf").write_bytes(gguf(about, parts))
    return folder / "m.gguf"


WINDOW = "sliding_window", "u32", 6
FLAGS = "sliding_window_pattern", "[bool]", [True, False]


def test_a_flag_for_each_layer_says_which_have_one(tmp_path: Path) -> None:
    """As llama.cpp has them: a token sees itself and 5 before it. There is no way back to GGUF."""
    file = write(tmp_path, QWEN3, "qwen3", WINDOW, FLAGS)
    report = convert(file, tmp_path / "out", verify=True)
    assert report.verification is not None and report.verification["passed"]
    model = load(tmp_path / "out", head_format="stored").model
    assert model.config.windows == (6, 0)
    network = make_network(QWEN3)
    for value in network.values():
        if isinstance(value, dict):  # what TQ2_0 stores
            value["stored_scale"] = float(torch.tensor(value["stored_scale"]).half())
    ids, _ = forward_fp64.clear_prompt_of(QWEN3.name, QWEN3, 24)
    exact, margin = forward_fp64.forward(QWEN3, network, ids)
    full, _ = forward_fp64.forward(PLAIN, network, ids)
    assert margin > 2e-5 and (full[-1] - exact[-1]).abs().max() > 1e-2 * exact.abs().max()
    with torch.inference_mode():
        found = model(torch.tensor([ids]), KVCache(model.config, 1, len(ids), torch.float32))[0]
    assert (found - exact).abs().max() < FP32_ROUNDING * exact.abs().max()
    with pytest.raises(ConvertError, match="sliding windows"):
        export_gguf(tmp_path / "out", tmp_path / "again.gguf", type="tq2_0")


@pytest.mark.parametrize(
    "keys",
    [
        [("sliding_window", "u32", 0), FLAGS],
        [("sliding_window", "u32", 512)],
        [WINDOW, ("sliding_window_pattern", "[bool]", [False, False])],
        [FLAGS],
    ],
)
def test_windows_that_change_nothing(tmp_path: Path, keys: list[Any]) -> None:
    """None, one as long as the context, or one of no layer."""
    convert(write(tmp_path, PLAIN, "qwen3", *keys), tmp_path / "out")
    assert load(tmp_path / "out").config.windows == ()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([WINDOW], "sliding_window_pattern as a flag for each of 2 layers, got None"),
        ([WINDOW, ("sliding_window_pattern", "u32", 2)], "a flag for each of 2 layers, got 2"),
        ([WINDOW, ("sliding_window_pattern", "[bool]", [True] * 3)], "a flag for each of 2 layers"),
        ([WINDOW, ("sliding_window_pattern", "[i32]", [1, 0])], "a flag for each of 2 layers"),
        ([("sliding_window", "i32", -1), FLAGS], "sliding_window as an integer, got -1"),
        ([("sliding_window", "f32", 6.0), FLAGS], "sliding_window as an integer, got 6.0"),
    ],
)
def test_what_is_not_clear_is_refused(tmp_path: Path, keys: list[Any], words: str) -> None:
    with pytest.raises(ConvertError, match=words):
        convert(write(tmp_path, PLAIN, "qwen3", *keys), tmp_path / "out")


def test_architectures_without_windows(tmp_path: Path) -> None:
    """A window that texts outgrow is refused there, flags or not; another one is none."""
    llama = dataclasses.replace(FAMILIES["llama-autobitlinear"], name="gguf-windows-llama")
    long = ("sliding_window", "u32", 4096)
    convert(write(tmp_path, llama, "llama", long), tmp_path / "out")
    words = "llama.attention.sliding_window to be absent, 0 or at least the context of 512, got 6"
    with pytest.raises(ConvertError, match=words):
        convert(write(tmp_path, llama, "llama", WINDOW, FLAGS), tmp_path / "again")
