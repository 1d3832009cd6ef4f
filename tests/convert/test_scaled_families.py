"""MiniCPM and Gemma 3: what their files say is read, and what they leave open is refused.

That the maths is right is shown for each family in test_families.py; here are GGUF, pickles, other
spellings of a config, windows, adapters, and the senses that no config states.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forward_fp64
import hf_writer
from bitnet_ops.config import ModelConfig, UnsupportedModelError
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.language_model import load
from bitnet_ops.loading.weights import load_model
from bitnet_ops.models import Decoder
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.lora import Adapter, LoraWeight
from bitnet_ops.nn.rotary import local_rotary, rotary
from gguf_bytes import gguf, key
from gguf_models import byte_tokenizer, dense, metadata, tensors
from hf_families import CASES

FP32_ROUNDING = 5e-6
CPM, MINICPM = CASES["bitcpm-llama"].family, CASES["bitcpm-minicpm"].family
EMBEDDING, GEMMA = CASES["bitnet-embedding-270m"].family, CASES["gemma3"].family


def config(family: hf_writer.Family, **changes: Any) -> ModelConfig:
    stated = {**hf_writer.config_dict(family), **changes}
    return ModelConfig.from_hf({k: v for k, v in stated.items() if v is not ...})


def logits(model: Decoder, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids]), KVCache(model.config, 1, len(ids), torch.float32))[0]


# MiniCPM ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scale_emb", "scale_depth", "dim_model_base"])
def test_minicpm_must_state_its_factors(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{name} to be a number for minicpm, got None"):
        config(MINICPM, **{name: ...})


def test_minicpm_options_that_are_not_implemented() -> None:
    assert config(MINICPM, mup_denominator=2).scalings == config(MINICPM).scalings
    for change in ({"mup_denominator": 32}, {"sparse_config": {"dense_len": 8192}}):
        with pytest.raises(UnsupportedModelError, match=next(iter(change))):
            config(MINICPM, **change)


def test_a_llama_that_states_factors_is_refused() -> None:
    """BitCPM's Llama class has none: if a file says otherwise it is another model."""
    with pytest.raises(UnsupportedModelError, match="scale_emb.*scaled embeddings"):
        config(CPM, scale_emb=12)


SCALES = {"embedding_scale": 12.0, "residual_scale": 1.4 / math.sqrt(2), "logit_scale": 4.0}


def minicpm_gguf(leave_out: str = "") -> tuple[hf_writer.Family, dict[str, Any], bytes]:
    """A file as llama.cpp's converter writes it: factors of the rotation in tensors beside."""
    family = dataclasses.replace(
        MINICPM, name="gguf-minicpm", dense_ternary=False, linear_class="autobitlinear",
        dtype="bfloat16",
    )  # fmt: skip
    network = hf_writer.make_network(family)
    for name, value in network.items():  # scales near 1 would drown the factors
        if isinstance(value, dict):
            value["stored_scale"] = 0.03125 if "down" in name else 0.0625
    rope = family.config_extra["rope_scaling"]
    keys = [key(f"minicpm.{k}", "f32", v) for k, v in SCALES.items() if k != leave_out]
    keys += [key("minicpm.rope.scaling.type", "str", "longrope"),
             key("minicpm.rope.scaling.original_context_length", "u32", 32768)]  # fmt: skip
    parts = tensors(family, network, "minicpm", "TQ2_0")
    for name in ("long", "short"):
        values = np.array(rope[f"{name}_factor"], dtype=np.float32)
        parts.append((f"rope_factors_{name}.weight", values.shape, *dense(values, "F32")))
    about = metadata(family, "minicpm")
    return family, network, gguf([*about, *keys, *byte_tokenizer(family.vocab)], parts)


def test_minicpm_from_gguf(tmp_path: Path) -> None:
    family, network, data = minicpm_gguf()
    (tmp_path / "m.gguf").write_bytes(data)
    report = convert(tmp_path / "m.gguf", tmp_path / "out", verify=True)
    assert report.verification is not None and report.verification["passed"]
    model = load(tmp_path / "out", head_format="stored").model
    found = model.config.scalings
    assert (found.embedding, found.logits) == (12.0, 4.0)
    assert abs(found.residual - SCALES["residual_scale"]) < 1e-7
    best: tuple[float, list[int], torch.Tensor] = (0.0, [], torch.empty(0))
    for seed in range(48):
        ids = torch.randint(0, family.vocab, (12,), generator=torch.Generator().manual_seed(seed))
        expected, margin = forward_fp64.forward(family, network, ids.tolist())
        best = max(best, (margin, ids.tolist(), expected), key=lambda found: found[0])
    margin, prompt, exact = best
    assert margin > 2e-5
    assert (logits(model, prompt) - exact).abs().max() < FP32_ROUNDING * exact.abs().max()


@pytest.mark.parametrize("name", SCALES)
def test_minicpm_gguf_without_a_factor_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(minicpm_gguf(leave_out=name)[2])
    with pytest.raises(ConvertError, match=f"minicpm.{name} in the metadata, got no such key"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


def test_adapters_are_scaled_as_what_they_stand_beside(tmp_path: Path) -> None:
    """Beside o and down of MiniCPM: as in a Llama whose weights have the factor."""
    case, g = CASES["bitcpm-minicpm"], torch.Generator().manual_seed(8)
    network = hf_writer.make_network(MINICPM)
    assert case.twin is not None and callable(case.fold)
    hf_writer.write_checkpoint(tmp_path / "a", MINICPM, network=network)
    hf_writer.write_checkpoint(tmp_path / "b", case.twin, network=case.fold(network))
    models = []
    for name in "ab":
        convert(tmp_path / name, tmp_path / f"{name}-out")
        models.append(load_model(tmp_path / f"{name}-out" / "model.bin"))
    residual, weights, folded = 1.4 / math.sqrt(MINICPM.layers), {}, {}
    for name, (n, k) in hf_writer.projection_shapes(MINICPM).items():
        module = f"model.layers.1.{name}"
        a, b = torch.randn(2, k, generator=g) / 8, torch.randn(n, 2, generator=g) / 8
        factor = residual if name.endswith(("o_proj", "down_proj")) else 1.0
        weights[module] = LoraWeight(a, b, 0.5)
        folded[module] = LoraWeight(a, b, 0.5 * factor)
    plain = logits(models[0], [1, 5, 9])
    models[0].add_adapter(Adapter(Path("made"), 2, weights))
    models[1].add_adapter(Adapter(Path("made"), 2, folded))
    found, expected = (logits(model, [1, 5, 9]) for model in models)
    assert (found - plain).abs().max() > 1e-3
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()


def test_bitcpm_comes_as_a_pickle(tmp_path: Path) -> None:
    source = hf_writer.write_checkpoint(tmp_path / "source", CPM)
    convert(source, tmp_path / "expected")
    from safetensors.torch import load_file

    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    with pytest.raises(ConvertError, match="allow-pickle"):
        convert(source, tmp_path / "out")
    convert(source, tmp_path / "out", allow_pickle=True)
    models = [load_model(tmp_path / name / "model.bin") for name in ("expected", "out")]
    assert torch.equal(*(logits(model, [3, 1, 4]) for model in models))


# Gemma 3 ------------------------------------------------------------------------------------------


def test_both_spellings_of_gemma_rotation() -> None:
    """transformers 5 writes one block for each kind of layer."""
    blocks = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    old = config(GEMMA)
    new = config(GEMMA, rope_parameters=blocks, rope_theta=..., rope_local_base_freq=...)
    assert old == new and old.scalings.local == (0,)
    assert torch.equal(rotary(old).inv_freq, rotary(new).inv_freq)
    saved = {**blocks, "rope_theta": None, "rope_type": "default"}  # as save_pretrained leaves it
    assert old == config(GEMMA, rope_parameters=saved, rope_theta=..., rope_local_base_freq=...)
    local = local_rotary(new)
    assert local is not None and not torch.equal(rotary(new).inv_freq, local)


def test_gemma_layers_by_pattern() -> None:
    """Where layer_types is absent every sixth layer sees everything, or as the pattern says."""
    changes = {"layer_types": ..., "num_hidden_layers": 8}
    assert config(GEMMA, **changes).scalings.local == (0, 1, 2, 3, 4, 6, 7)
    assert config(GEMMA, **changes, sliding_window_pattern=2).scalings.local == (0, 2, 4, 6)
    full = config(GEMMA, layer_types=["full_attention"] * 2)
    assert full.windows == () and full.scalings.local == ()


def test_gemma_windows() -> None:
    """Of the layers that turn by the local base; published ones have 512 positions."""
    assert config(GEMMA).windows == (5, 0) and config(GEMMA).max_position_embeddings == 2048
    assert config(GEMMA, sliding_window=512).windows == (512, 0)
    assert config(GEMMA, sliding_window=...).windows == (4096, 0)
    with pytest.raises(UnsupportedModelError, match="sliding_window to be a positive integer"):
        config(GEMMA, sliding_window=0)
    with pytest.raises(UnsupportedModelError, match="of at most 4096, got 1000000000"):
        config(GEMMA, layer_types=..., num_hidden_layers=10**9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_bidirectional_attention": True}, "attention to later tokens"),
        ({"attn_logit_softcapping": 50.0}, "soft-capped attention scores"),
        ({"final_logit_softcapping": 30.0}, "soft-capped logits"),
        ({"layer_types": ["full_attention"]}, "layer_types to be 2 of"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types to be 2 of"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"hidden_activation": ..., "hidden_act": "silu"}, "hidden_act to be absent or 'gelu_py"),
        ({"hidden_activation": "gelu"}, "hidden_act one of relu2, silu, gelu_pytorch_tanh"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.sliding_attention.rope_type 'default'",
        ),
        ({"rope_parameters": {"full_attention": {}, "other": {}}}, "full_attention and sliding"),
    ],
)
def test_gemma_options_that_are_not_implemented(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        config(GEMMA, **changes)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("gemma")
    convert(hf_writer.write_checkpoint(folder / "source", GEMMA), folder / "out")
    return load_model(folder / "out" / "model.bin")


def test_texts_go_on_beyond_the_window(gemma: Decoder) -> None:
    """A token's logits are those of the text before it, whatever the chunks: 600 tokens."""
    ids = torch.randint(0, GEMMA.vocab, (1, 600), generator=torch.Generator().manual_seed(2))
    whole = gemma(ids, KVCache(gemma.config, 1, 600, torch.float32))
    cache = KVCache(gemma.config, 1, 600, torch.float32)
    parts = [gemma(part, cache) for part in ids.split([511, 1, 1, 87], dim=1)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_the_step_is_the_composition_of_ops(gemma: Decoder) -> None:
    ids = list(range(2, 40))
    for dtype in (torch.float32, torch.bfloat16):
        model = gemma.to(dtype)
        model.run_as = "program"
        step = logits(model, ids)
        model.run_as = "ops"
        assert torch.equal(logits(model, ids), step)
    gemma.to(torch.float32).run_as = "program"


def inner_norms(folder: Path, change: Any) -> Path:
    """The embedding model with other weights of the norms inside its projections."""
    network = hf_writer.make_network(EMBEDDING)
    for name, value in network.items():
        if name.endswith("rms_norm"):
            network[name] = change(value)
    return hf_writer.write_checkpoint(folder, EMBEDDING, network=network)


def test_norms_inside_projections_are_what_their_values_say(tmp_path: Path) -> None:
    """Stored near 0 they are 1 + w as Gemma's others, near 1 they are w: the same model."""
    found = []
    for name, change, words in (
        ("w", lambda w: w, "multiply by w, not by 1 + w"),
        ("1 + w", lambda w: w - 1, "multiply by 1 + w"),
    ):
        report = convert(
            inner_norms(tmp_path / name, change), tmp_path / f"{name} out", verify=True
        )
        assert any(words in remark for remark in report.remarks)
        found.append(logits(load_model(tmp_path / f"{name} out" / "model.bin"), [1, 2, 3, 4]))
    assert (found[0] - found[1]).abs().max() < 1e-2 * found[0].abs().max()


@pytest.mark.parametrize("shift", [-0.5, -2.0])
def test_norms_that_could_be_either_are_refused(shift: float, tmp_path: Path) -> None:
    source = inner_norms(tmp_path / "source", lambda w: w + shift)
    with pytest.raises(ConvertError, match="all near 1 .w. or all near 0") as caught:
        convert(source, tmp_path / "out")
    assert caught.value.code == "inner-norms"


def test_gemma_weights_may_be_bfloat16(tmp_path: Path) -> None:
    """1 + w is taken in float32, as transformers does, not in the dtype of the file."""
    family = dataclasses.replace(GEMMA, name="gemma3-bf16", dtype="bfloat16")
    network = hf_writer.make_network(family)
    convert(hf_writer.write_checkpoint(tmp_path / "a", family, network=network), tmp_path / "out")
    model = load_model(tmp_path / "out" / "model.bin")
    stored = torch.from_numpy(network["model.norm"])
    assert torch.equal(model.model.norm.weight, 1 + stored.float())


def test_texts_become_vectors(tmp_path: Path) -> None:
    convert(hf_writer.write_checkpoint(tmp_path / "source", EMBEDDING), tmp_path / "out")
    vectors = load(tmp_path / "out").embed(["a text", "another"])
    assert vectors.shape == (2, EMBEDDING.hidden)
    assert (vectors.norm(dim=1) - 1).abs().max() < 1e-5
