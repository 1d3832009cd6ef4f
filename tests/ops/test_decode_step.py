"""decode_step, the whole step in one call: equal to the composed ops bit for bit, in every setting.

The composition itself is checked against transformers and float64 elsewhere (test_model.py).
"""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bitnet_ops
from bitnet_ops import ops
from bitnet_ops.models import Decoder
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.storage import CPU_SPECIFIC, KV_TYPES
from bounds import assert_equal
from isa_control import every_configuration, torch_threads
from op_catalogue import composed
from op_catalogue import results as produced
from op_schema import named
from op_values import ACTIVATIONS, KV_DTYPES
from ops_model import decode_step_arguments
from tiny_models import NAMES, SMALL, random_ids, tiny_model

FUNCTIONS = ops.decode_step, functools.partial(composed, ops, "decode_step")


# Against the composed ops -----------------------------------------------------------------------


@torch.inference_mode()
def decode(model: Decoder, ids: Tensor, kv_dtype: torch.dtype, fused: bool) -> list[Tensor]:
    """Logits of every position of ids [B, T] after a prefill of 3; all that the cache holds."""
    model.fused_step = fused
    cache = KVCache(model.config, ids.shape[0], ids.shape[1] + 1, kv_dtype)
    logits = [model(ids[:, :3], cache)]
    logits += [model(ids[:, t : t + 1], cache) for t in range(3, ids.shape[1])]
    caches = [t for b in cache.blocks for t in cache.pool.stored(b, ids.shape[1]).values()]
    return [torch.cat(logits, 1), *caches]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_composed_ops(name: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    model = tiny_model(SMALL[name], dtype=dtype)
    for batch in (1, 2, 5):
        ids = random_ids(batch, batch, 11)
        expected = decode(model, ids, kv_dtype, fused=False)
        for ours, theirs in zip(decode(model, ids, kv_dtype, fused=True), expected, strict=True):
            assert_equal(ours, theirs, f"{name} batch {batch}")


# Large enough that every thread has work in every stage; sizes that divide by nothing.
LARGE: dict[str, Any] = {
    "layers": 2, "hidden": 331, "heads": 6, "kv_heads": 2, "head_dim": 46, "inner": 645,
    "vocab": 1021, "length": 300,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "one_token": {"batch": 1},
    "two_sequences": {"batch": 2, "dtype": torch.bfloat16, "cache_dtype": torch.bfloat16},
    "nine_sequences": {"batch": 9, "cache_dtype": torch.bfloat16},
    "a_draft_of_four": {"batch": 1, "tokens": 4, "dtype": torch.bfloat16},
    "two_drafts": {"batch": 2, "tokens": 9},
    "prompt": {"batch": 1, "tokens": 150, "weight_format": "2bit"},
    "prompt_last": {"batch": 1, "tokens": 65, "logits_to_keep": 1, "dtype": torch.bfloat16},
    "two_prompts_last": {"batch": 2, "tokens": 70, "logits_to_keep": 3},
    "keep_more_than_there_are": {"batch": 2, "tokens": 2, "logits_to_keep": 5},
    "silu": {"batch": 1, "sub_norms": False, "activation": "silu", "dtype": torch.bfloat16},
    "head_int8": {"batch": 3, "head": ("int8", 128)},
    "head_int4": {"batch": 1, "head": ("int4", 64)},
}
for name in CPU_SPECIFIC:
    SETTINGS[name] = {"batch": 1, "weight_format": name}
    SETTINGS[f"{name}_batch"] = {"batch": 6, "weight_format": name, "dtype": torch.bfloat16}
    SETTINGS[f"{name}_prompt"] = {"batch": 2, "tokens": 70, "weight_format": name}
for name in KV_TYPES:
    dtype = getattr(torch, name)
    SETTINGS[f"{name}_cache"] = {"batch": 1, "cache_dtype": dtype, "dtype": torch.bfloat16}
    SETTINGS[f"{name}_cache_batch"] = {"batch": 5, "cache_dtype": dtype}
    SETTINGS[f"{name}_cache_prompt"] = {"batch": 2, "tokens": 70, "cache_dtype": dtype}


@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_the_composed_ops_on_every_isa_and_thread_count(setting: str) -> None:
    for configuration in every_configuration():
        results = []
        for function in FUNCTIONS:
            g = torch.Generator().manual_seed(11)
            arguments = decode_step_arguments(g, **LARGE, **SETTINGS[setting])
            results.append(produced(function(*arguments), arguments, "decode_step"))
        for ours, theirs in zip(*results, strict=True):
            assert_equal(ours, theirs, f"{setting} {configuration}")


def test_a_prompt_too_long_for_the_kept_memory() -> None:
    """Some 80 MB of activations, which a thread does not keep: it allocates them for the step."""
    sizes: dict[str, Any] = {"hidden": 64, "heads": 2, "kv_heads": 1, "inner": 2400}
    results = []
    for function in FUNCTIONS:
        g = torch.Generator().manual_seed(12)
        arguments = decode_step_arguments(
            g, **sizes, batch=1, tokens=4000, length=4000, logits_to_keep=2
        )
        results.append(produced(function(*arguments), arguments, "decode_step"))
    for ours, theirs in zip(*results, strict=True):
        assert_equal(ours, theirs)


def test_a_sequence_alone_equals_the_sequence_in_a_batch() -> None:
    g = torch.Generator().manual_seed(5)
    arguments = decode_step_arguments(g, **LARGE, batch=5)
    given = named("decode_step", arguments)
    caches = {name: given.pop(name) for name in ("key_cache", "value_cache")}
    copies = {name: cache.clone() for name, cache in caches.items()}
    whole = ops.decode_step(**given, **copies)
    for b in range(5):
        row = slice(b, b + 1)
        own = {name: cache[:, row].clone() for name, cache in caches.items()}
        own |= {name: given[name][row] for name in ("x", "start_positions")}
        alone = ops.decode_step(**{**given, **own})
        assert_equal(alone[0], whole[b], f"sequence {b}")


def test_a_poisoned_sequence_stays_in_its_sequence() -> None:
    def run(poison: float) -> Tensor:
        g = torch.Generator().manual_seed(6)
        arguments = decode_step_arguments(g, **LARGE, batch=4)
        arguments[0][2, 0, 7] = poison
        return ops.decode_step(*arguments)

    clean = run(0.5)
    for poison in (torch.nan, torch.inf):
        for _ in every_configuration():
            dirty = run(poison)
            assert_equal(dirty[[0, 1, 3]], clean[[0, 1, 3]])
            assert bool(dirty[2].isnan().all())


# In the model -----------------------------------------------------------------------------------


def step_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every call of model_step, which is decode_step over pools of blocks."""
    calls: list[int] = []
    real = ops.model_step

    def counted(**arguments: Any) -> Tensor:
        calls.append(arguments["x"].shape[0])
        return real(**arguments)

    monkeypatch.setattr(ops, "model_step", counted)
    return calls


def test_the_model_prefills_and_decodes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = step_calls(monkeypatch)
    model = tiny_model(SMALL["bitnet-offline"])
    decode(model, random_ids(0, 2, 8), torch.float32, fused=True)
    assert calls == [6, *[2] * 5]
    decode(model, random_ids(0, 2, 8), torch.float32, fused=False)
    assert len(calls) == 6


def test_what_the_step_cannot_express_is_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale for every row, as a fused shard has it, is for the composed ops."""
    calls = step_calls(monkeypatch)
    model = tiny_model(SMALL["bitnet-offline"])
    ids = random_ids(1, 1, 6)
    expected = decode(model, ids, torch.float32, fused=True)
    assert calls
    calls.clear()
    projection = model.model.layers[0].mlp.up_proj
    projection.weight_scale = projection.weight_scale.repeat(projection.out_features)
    model.model.layers[0]._bind()
    for ours, theirs in zip(decode(model, ids, torch.float32, fused=True), expected, strict=True):
        assert_equal(ours, theirs)
    assert not calls


CHANGES: dict[str, Callable[[Decoder], Any]] = {
    "a_gain_in_place": lambda m: m.model.layers[1].mlp.ffn_sub_norm.weight.mul_(2.0),
    "the_last_norm_in_place": lambda m: m.model.norm.weight.mul_(0.5),
    "a_scale_in_place": lambda m: m.model.layers[0].self_attn.q_proj.weight_scale.mul_(2.0),
    "loaded": lambda m: m.load_state_dict(tiny_model(SMALL["bitnet-offline"]).state_dict()),
    "assigned": lambda m: m.load_state_dict(
        tiny_model(SMALL["bitnet-offline"]).state_dict(), assign=True
    ),
    "moved": lambda m: m._apply(torch.clone),
    "a_layer_moved": lambda m: m.model.layers[0]._apply(torch.clone),
    "cast": lambda m: m.bfloat16().float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_seen(change: str) -> None:
    model = copy.deepcopy(tiny_model(SMALL["bitnet-offline"]))
    ids = random_ids(2, 1, 7)
    decode(model, ids, torch.float32, fused=True)
    with torch.no_grad():
        CHANGES[change](model)
    expected = decode(model, ids, torch.float32, fused=False)
    for ours, theirs in zip(decode(model, ids, torch.float32, fused=True), expected, strict=True):
        assert_equal(ours, theirs, change)


def test_a_copy_of_a_model_has_weights_of_its_own() -> None:
    model = tiny_model(SMALL["bitnet-offline"])
    ids = random_ids(3, 1, 7)
    before = decode(model, ids, torch.float32, fused=True)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.norm.weight.zero_()
    after = decode(model, ids, torch.float32, fused=True)
    assert_equal(after[0], before[0])
    assert not decode(twin, ids, torch.float32, fused=True)[0].any()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_a_row_of_a_batch_decodes_on(kv_dtype: torch.dtype) -> None:
    """KVCache.row leaves gaps between the layers of its view."""
    model = bitnet_ops.load().model
    ids = random_ids(4, 3, 9, below=model.config.vocab_size)
    with torch.inference_mode():
        results = []
        for fused in (False, True):
            model.fused_step = fused
            cache = KVCache(model.config, 3, 12, kv_dtype)
            model(ids[:, :4], cache)
            row = cache.row(1)
            results.append(torch.cat([model(ids[1:2, t : t + 1], row) for t in range(4, 9)]))
        model.fused_step = True
    assert_equal(results[1], results[0])


# Memory -----------------------------------------------------------------------------------------


def test_a_step_allocates_its_logits_and_nothing_else(tmp_path: Path) -> None:
    """Heap blocks of 4 KiB and more in a step after the first: one, the result.

    Smaller ones are how torch hands arguments over: their number must not grow with the context.
    """
    here = Path(__file__).resolve().parents[1] / "helpers"
    library = tmp_path / "malloc_counter.so"
    build = ["gcc", "-shared", "-fPIC", "-O1", str(here / "malloc_counter.c"), "-o", str(library)]
    subprocess.run(build, check=True)
    code = """
import ctypes, sys, torch
sys.path.insert(0, sys.argv[1])
from stack_of_layers import make_stack
counter = ctypes.CDLL(sys.argv[2])
torch.set_num_threads(2)
for batch in (1, 3):
    stack = make_stack(batch=batch, vocab=5000, length=512)
    stack.step(0)
    counts = []
    for position in (1, 63, 64, 65, 200, 511):
        stack.step(position)  # torch's own caches of one shape
        counter.count_start(ctypes.c_size_t(4096))
        stack.step(position)
        counter.count_stop()
        counts.append((counter.count_large(), counter.count_small()))
    print(*{large for large, _ in counts}, len({small for _, small in counts}))
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(here), str(library)],
        env={**os.environ, "LD_PRELOAD": str(library)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.split("\n")[:2] == ["1 1", "1 1"], run.stdout


@torch.inference_mode()
def test_more_threads_than_units() -> None:
    """More threads than some stages have units of work."""
    with torch_threads(13):
        results = []
        for function in FUNCTIONS:
            g = torch.Generator().manual_seed(1)
            arguments = decode_step_arguments(g, hidden=2000, inner=2000, batch=1, kv_heads=1)
            results.append(function(*arguments))
    assert_equal(results[0], results[1])
