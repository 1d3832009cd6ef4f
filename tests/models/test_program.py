"""Programs in the op and in the model: equal to composed ops bit for bit, in every setting.

The composition itself is checked against transformers and float64 elsewhere (test_model.py).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitnet_ops
from bitnet_ops import cli, ops
from bitnet_ops.blocks.listing import listing
from bitnet_ops.config import ModelConfig
from bitnet_ops.models import Decoder
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.nn.storage import CPU_SPECIFIC, KV_TYPES
from bounds import assert_equal
from hf_writer import make_network
from isa_control import ISAS, every_configuration, forced_isa, torch_threads
from op_catalogue import composed
from op_catalogue import results as produced
from op_values import ACTIVATIONS, KV_DTYPES
from ops_model_step import model_step_arguments
from programs import Sample, of
from tiny_models import NAMES, SMALL, config_of, random_ids, tensors_of, tiny_model

FUNCTIONS = ops.model_step, functools.partial(composed, ops, "model_step")


# Against the composed ops -----------------------------------------------------------------------


@torch.inference_mode()
def decode(model: Decoder, ids: Tensor, kv_dtype: torch.dtype, fused: bool) -> list[Tensor]:
    """Logits of every position of ids [B, T] after a prefill of 3; all that the cache holds.

    And the states that the head reads.
    """
    model.run_as = "program" if fused else "ops"
    cache = KVCache(model.config, ids.shape[0], ids.shape[1] + 1, kv_dtype)
    logits = [model(ids[:, :3], cache)]
    logits += [model(ids[:, t : t + 1], cache) for t in range(3, ids.shape[1])]
    caches = [t for b in cache.blocks for t in cache.pool.stored(b, ids.shape[1]).values()]
    return [torch.cat(logits, 1), *caches, model.hidden(ids)]


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
    "vocab": 1021, "block_size": 64,
}  # fmt: skip
PROMPTS: dict[str, Any] = {"new": (70, 70), "lengths": (70, 130), "logit_rows": (69, 138, 139)}
SETTINGS: dict[str, dict[str, Any]] = {
    "one_token": {"new": (1,), "lengths": (300,), "logit_rows": (0,)},
    "two_sequences": {
        "new": (1, 1), "lengths": (250, 7), "logit_rows": None, "dtype": torch.bfloat16,
        "cache_dtype": torch.bfloat16,
    },
    "nine_sequences": {
        "new": (1,) * 9, "lengths": (9, 80, 3, 1, 200, 64, 65, 2, 30), "logit_rows": None,
        "cache_dtype": torch.bfloat16,
    },
    "a_draft_of_four": {
        "new": (4,), "lengths": (90,), "logit_rows": None, "dtype": torch.bfloat16
    },
    "a_prompt_its_last": {
        "new": (65,), "lengths": (65,), "logit_rows": (64,), "dtype": torch.bfloat16
    },
    "prompts": {**PROMPTS, "weight_format": "2bit"},
    "silu": {"sub_norms": False, "activation": "silu", "dtype": torch.bfloat16},
    "head_int8": {"head": ("int8", 128)},
    "head_int4": {"head": ("int4", 64)},
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "hidden": 352, "head_dim": 48, "inner": 640, "block": 32, "rotary_dim": 12, "output_gate": True,
}  # fmt: skip
SETTINGS["hybrid"] = {**HYBRID, "delta_layers": (0,), "dtype": torch.bfloat16}
SETTINGS["hybrid_prompts"] = {**HYBRID, **PROMPTS, "delta_layers": (1,), "weight_format": "2bit"}
SETTINGS["hybrid_adapters"] = {**HYBRID, "delta_layers": (1,), "adapters": (1, -1, 2)}
for name in CPU_SPECIFIC:
    SETTINGS[name] = {"weight_format": name, "dtype": torch.bfloat16}
    SETTINGS[f"{name}_prompts"] = {**PROMPTS, "weight_format": name}
for name in KV_TYPES:
    dtype = getattr(torch, name)
    SETTINGS[f"{name}_cache"] = {"cache_dtype": dtype, "dtype": torch.bfloat16}
    SETTINGS[f"{name}_cache_prompts"] = {**PROMPTS, "cache_dtype": dtype}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.sampled(4)
def test_equals_the_composed_ops_on_every_isa_and_thread_count(setting: str) -> None:
    for configuration in every_configuration():
        results = []
        for function in FUNCTIONS:
            g = torch.Generator().manual_seed(11)
            arguments = model_step_arguments(g, **{**LARGE, **SETTINGS[setting]})
            results.append(produced(function(*arguments), arguments, "model_step"))
        for ours, theirs in zip(*results, strict=True):
            assert_equal(ours, theirs, f"{setting} {configuration}")


def test_a_prompt_too_long_for_the_kept_memory() -> None:
    """Some 80 MB of activations, which a thread does not keep: it allocates them for the step."""
    results = []
    for function in FUNCTIONS:
        arguments = model_step_arguments(
            torch.Generator().manual_seed(12), hidden=64, heads=2, kv_heads=1, inner=2400,
            new=(4000,), lengths=(4000,), block_size=64, logit_rows=(3998, 3999),
        )  # fmt: skip
        results.append(produced(function(*arguments), arguments, "model_step"))
    for ours, theirs in zip(*results, strict=True):
        assert_equal(ours, theirs)


def test_a_poisoned_sequence_stays_in_its_sequence() -> None:
    def run(poison: float) -> Tensor:
        arguments = model_step_arguments(
            torch.Generator().manual_seed(6), **LARGE, new=(1,) * 4, lengths=(5, 70, 9, 1),
            logit_rows=None,
        )  # fmt: skip
        arguments[0][2, 7] = poison
        return ops.model_step(*arguments)

    clean = run(0.5)
    for poison in (torch.nan, torch.inf):
        for _ in every_configuration():
            dirty = run(poison)
            assert_equal(dirty[[0, 1, 3]], clean[[0, 1, 3]])
            assert bool(dirty[2].isnan().all())


# The handle -------------------------------------------------------------------------------------


def test_tensors_that_change_or_move_are_seen() -> None:
    """In place, or by memory that is exchanged below a tensor."""
    arguments = model_step_arguments(torch.Generator().manual_seed(3), layers=2)
    before = ops.model_step(*arguments)
    tensors = of(arguments[1]).tensors
    tensors["L1.post.weight"].mul_(2)
    tensors["L0.q.weight"].data = tensors["L0.q.weight"].roll(1, 0)
    after = ops.model_step(*arguments)
    assert not torch.equal(after, before)
    assert_equal(after, composed(ops, "model_step", *arguments))


def test_memory_of_another_size_below_a_tensor_is_an_error() -> None:
    arguments = model_step_arguments(torch.Generator().manual_seed(3))
    tensors = of(arguments[1]).tensors
    kept = tensors["L0.in.weight"].data
    tensors["L0.in.weight"].data = torch.ones(7)
    with pytest.raises(RuntimeError, match=r"expected L0.in.weight of shape \[70\], got \[7\]"):
        ops.model_step(*arguments)
    tensors["L0.in.weight"].data = kept
    assert torch.isfinite(ops.model_step(*arguments)).all()


def test_a_program_is_bound_anew_for_other_kernels() -> None:
    arguments = model_step_arguments(torch.Generator().manual_seed(3))
    expected = ops.model_step(*arguments)
    for isa in ISAS:
        with forced_isa(isa):
            assert_equal(ops.model_step(*arguments), expected, isa)


def test_a_released_program_is_gone_and_its_tensors_with_it() -> None:
    arguments = list(model_step_arguments(torch.Generator().manual_seed(3)))
    sample = of(arguments[1])
    handle = ops.bind_program(sample.text, "\n".join(sample.tensors), list(sample.tensors.values()))
    arguments[1] = handle
    expected = ops.model_step(*arguments)
    arguments[1] = handle.clone()  # a number, as good as the handle
    assert_equal(ops.model_step(*arguments), expected)
    ops.release_program(handle)
    ops.release_program(handle)
    with pytest.raises(RuntimeError, match="in this process, not yet released, got"):
        ops.model_step(*arguments)


def test_a_model_that_goes_releases_its_program() -> None:
    model = tiny_model(SMALL["bitnet-offline"])
    program = model.program
    assert program is not None
    handle = program._handle
    del program, model
    gc.collect()
    with pytest.raises(RuntimeError, match="not yet released"):
        ops.model_step(torch.ones(1, 1), handle, [], *[handle] * 6, 1)


def test_programs_are_bound_and_run_by_many_threads() -> None:
    made = [model_step_arguments(torch.Generator().manual_seed(i)) for i in range(4)]
    expected = [ops.model_step(*arguments) for arguments in made]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(30):
            sample = of(made[i][1])
            again = Sample(sample.text, sample.tensors).bind()
            arguments = (made[i][0], again, *made[i][2:])
            if not torch.equal(ops.model_step(*arguments), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# In the model -----------------------------------------------------------------------------------


def step_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every call of run_program."""
    calls: list[int] = []
    real = ops.run_program

    def counted(x: Tensor, *arguments: Any) -> Tensor:
        calls.append(x.shape[0])
        return real(x, *arguments)

    monkeypatch.setattr(ops, "run_program", counted)
    return calls


def test_the_model_prefills_and_decodes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = step_calls(monkeypatch)
    model = tiny_model(SMALL["bitnet-offline"])
    decode(model, random_ids(0, 2, 8), torch.float32, fused=True)
    assert calls == [6, *[2] * 5, 16]
    decode(model, random_ids(0, 2, 8), torch.float32, fused=False)
    assert len(calls) == 7


class _Elsewhere(nn.Module):
    """A projection that another library has put in the place of ours."""

    def __init__(self, inside: BitLinear) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


def test_what_the_step_cannot_express_is_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of another class, exchanged behind the first step, and the old one put back."""
    calls = step_calls(monkeypatch)
    model = tiny_model(SMALL["bitnet-offline"])
    ids = random_ids(1, 1, 6)
    expected = decode(model, ids, torch.float32, fused=True)
    assert calls
    calls.clear()
    mlp = model.model.layers[0].mlp
    mlp.up_proj = _Elsewhere(mlp.up_proj)
    for ours, theirs in zip(decode(model, ids, torch.float32, fused=True), expected, strict=True):
        assert_equal(ours, theirs)
    assert not calls
    mlp.up_proj = mlp.up_proj.inside
    decode(model, ids, torch.float32, fused=True)
    assert calls


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
    "a_scale_exchanged": lambda m: setattr(
        m.model.layers[0].mlp.up_proj, "weight_scale", torch.tensor([0.25])
    ),
    "a_scale_a_row": lambda m: setattr(
        m.model.layers[0].mlp.up_proj,
        "weight_scale",
        m.model.layers[0].mlp.up_proj.weight_scale.repeat(
            m.model.layers[0].mlp.up_proj.out_features
        )
        * 3,
    ),
    "a_projection_exchanged": lambda m: setattr(
        m.model.layers[1].self_attn,
        "o_proj",
        BitLinear.from_packed(m.model.layers[0].self_attn.o_proj.packed),
    ),
    "a_norm_exchanged": lambda m: setattr(
        m.model.layers[1], "input_layernorm", m.model.layers[0].post_attention_layernorm
    ),
    "a_layer_exchanged": lambda m: m.model.layers.__setitem__(0, copy.deepcopy(m.model.layers[1])),
    "the_head_exchanged": lambda m: setattr(
        m.model if m.config.tie_word_embeddings else m,
        "embed_tokens" if m.config.tie_word_embeddings else "lm_head",
        copy.deepcopy(m.head).bfloat16(),
    ),
    "memory_below_a_tensor": lambda m: setattr(
        m.model.layers[0].self_attn.q_proj.weight,
        "data",
        m.model.layers[0].self_attn.q_proj.weight.roll(1, 0),
    ),
    "another_layout": lambda m: m.model.layers[1].mlp.down_proj.repack("1.6bit"),
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
            model.run_as = "program" if fused else "ops"
            cache = KVCache(model.config, 3, 12, kv_dtype)
            model(ids[:, :4], cache)
            row = cache.row(1)
            results.append(torch.cat([model(ids[1:2, t : t + 1], row) for t in range(4, 9)]))
        model.run_as = "program"
    assert_equal(results[1], results[0])


def test_scales_of_groups_that_change_in_place_are_seen() -> None:
    """Beside a CPU-specific layout the program has a copy of them in another order."""
    model = tiny_model(SMALL["bitnet-offline"])
    for layer in model.model.layers:
        projections = [p for p in layer.modules() if isinstance(p, BitLinear)]
        for projection in projections:
            groups = -(-projection.in_features // 128)
            projection.weight_scale = projection.weight_scale.repeat(
                projection.out_features, groups
            )
            projection.group_size = 128
            projection.repack("2bit")
    ids = random_ids(5, 1, 7)
    before = decode(model, ids, torch.float32, fused=True)
    assert model.program is not None
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight_scale[3:].mul_(4)
    after = decode(model, ids, torch.float32, fused=True)
    assert not torch.equal(after[0], before[0])
    for ours, theirs in zip(after, decode(model, ids, torch.float32, fused=False), strict=True):
        assert_equal(ours, theirs)


def test_a_program_is_bound_once() -> None:
    model = tiny_model(SMALL["bitnet-offline"])
    program, version = model.program, model.weights_version()
    with torch.inference_mode():
        model(random_ids(6, 1, 7), KVCache(model.config, 1, 7))
    assert model.program is program and model.weights_version() == version
    model.model.norm.weight = model.model.norm.weight.clone()
    assert model.program is not program and model.weights_version() != version


def test_a_listing_can_be_read() -> None:
    config: ModelConfig = config_of(SMALL["bitnet-offline"])
    lines = str(listing(config)).splitlines()
    assert lines[0] == f"model hidden={config.hidden_size} dtype=float32 eps={config.rms_norm_eps}"
    kinds = [line.split()[0] for line in lines]
    layers = ["attention", "mlp"] * config.num_hidden_layers
    assert kinds == ["model", "rope", *layers, "head"]
    model = tiny_model(SMALL["bitnet-offline"])
    assert str(dataclasses.replace(model.listing)) == "\n".join(lines) + "\n"


def test_inspect_prints_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    demo = bitnet_ops.load()
    folder = str(Path(bitnet_ops.__file__).parent / "data" / "demo")
    assert cli.main(["inspect", folder, "--program"]) == 0
    assert capsys.readouterr().out == str(demo.model.listing)
    assert cli.main(["inspect", folder, "--program", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"program": str(demo.model.listing)}


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
        found = []
        for _ in range(3):  # of small ones the fewest: a busy machine adds some now and then
            counter.count_start(ctypes.c_size_t(4096))
            stack.step(position)
            counter.count_stop()
            found.append((counter.count_large(), counter.count_small()))
        counts.append((max(large for large, _ in found), min(small for _, small in found)))
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
            arguments = model_step_arguments(g, hidden=2000, inner=2000, kv_heads=1)
            results.append(function(*arguments))
    assert_equal(results[0], results[1])


def test_how_a_model_runs_has_an_older_spelling() -> None:
    family = SMALL["bitnet-offline"]
    parts = config_of(family), tensors_of(family, make_network(family))
    model, whole = Decoder(*parts, fused_step=False), Decoder(*parts)
    assert model.run_as == "ops" and model.program is None
    assert whole.run_as == "program" and whole.fused_step and whole.program is not None
    model.fused_step = True
    assert model.run_as == "program"
    with pytest.raises(ValueError, match="expected run_as as 'program' or 'ops', got 'step'"):
        Decoder(*parts, run_as="step")  # type: ignore[arg-type]
