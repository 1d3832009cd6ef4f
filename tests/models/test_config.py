"""ModelConfig.from_hf: what is read, in every spelling, and what is rejected, each with its reason.

The oracle for defaults and for the spellings of rope_theta is transformers' own config classes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from bitnet_ops.config import ModelConfig, Rotation, UnsupportedModelError
from bitnet_ops.config.families import BY_MODEL_TYPE
from bitnet_ops.config.hybrid import written_rotation
from hf_families import CASES
from hf_writer import class_of

DEMO = Path(__file__).resolve().parents[1] / "data" / "demo-model" / "config.json"

BITNET_2B = {
    "architectures": ["BitNetForCausalLM"],
    "model_type": "bitnet",
    "vocab_size": 128256,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 30,
    "num_attention_heads": 20,
    "num_key_value_heads": 5,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "quantization_config": {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "offline",
    },
}
FALCON3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 131072,
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000042,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]},
}


def read(base: dict[str, Any], **changes: Any) -> ModelConfig:
    """from_hf of `base` with `changes`; the value `...` removes a key."""
    merged = {**base, **changes}
    return ModelConfig.from_hf({k: v for k, v in merged.items() if v is not ...})


def test_reads_the_demo_config() -> None:
    c = ModelConfig.from_hf(json.loads(DEMO.read_text()))
    assert c == ModelConfig(
        family=BY_MODEL_TYPE["bitnet"],
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        hidden_act="relu2",
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        sub_norms=True,
        bos_token_id=0,
        eos_token_ids=(1,),
    )
    assert c.notes == ()


def test_reads_the_published_families() -> None:
    c = read(BITNET_2B)
    assert (c.head_dim, c.sub_norms, c.tie_word_embeddings) == (128, True, True)
    c = read(FALCON3)
    assert (c.head_dim, c.sub_norms, c.hidden_act, c.rope_theta) == (256, False, "silu", 1000042.0)
    assert c.eos_token_ids == () and c.bos_token_id is None


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_rope_theta_in_every_spelling(name: str) -> None:
    assert read(BITNET_2B, rope_theta=10000).rope_theta == 10000.0
    nested = {name: {"rope_theta": 12345.0, "rope_type": "default"}}
    assert read(BITNET_2B, rope_theta=..., **nested).rope_theta == 12345.0
    assert read(BITNET_2B, rope_theta=12345, **nested).rope_theta == 12345.0
    with pytest.raises(UnsupportedModelError, match="rope_theta to be the same in every spelling"):
        read(BITNET_2B, rope_theta=500000.0, **nested)


@pytest.mark.parametrize(
    "name", sorted({case.family.model_type for case in CASES.values()} - {"minicpm"})
)
def test_defaults_are_those_of_transformers(name: str) -> None:
    """Where config.json is silent, transformers' class decides what the numbers are."""
    base = {**QWEN3, "model_type": name, "architectures": [class_of(name)]}
    silent = ("rope_theta", "rms_norm_eps", "hidden_act", "tie_word_embeddings")
    c = read(base, max_position_embeddings=..., **dict.fromkeys(silent, ...))
    sizes = {key: base[key] for key in ("hidden_size", "num_attention_heads")}
    theirs = transformers.AutoConfig.for_model(name, **sizes)
    rope = theirs.rope_parameters
    assert c.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    assert c.rms_norm_eps == theirs.rms_norm_eps
    activation = "hidden_activation" if name == "gemma3_text" else "hidden_act"
    assert c.hidden_act == getattr(theirs, activation)
    assert c.tie_word_embeddings == theirs.tie_word_embeddings
    assert c.max_position_embeddings == theirs.max_position_embeddings
    own = getattr(theirs, "head_dim", None)
    assert c.head_dim == (own or theirs.hidden_size // theirs.num_attention_heads)


def test_reads_what_transformers_saves(tmp_path: Path) -> None:
    """A config saved by transformers 5 (rope_parameters, dtype) reads as the original does."""
    for base, name in ((BITNET_2B, "BitNetConfig"), (FALCON3, "LlamaConfig")):
        plain = {k: v for k, v in base.items() if k not in ("rope_scaling", "quantization_config")}
        getattr(transformers, name)(**plain).save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        ours = ModelConfig.from_hf(saved)
        assert ours.notes == ()
        ids = {"bos_token_id": ours.bos_token_id, "eos_token_id": list(ours.eos_token_ids)}
        assert ours == read(base, **ids)


def test_eos_may_be_a_list_or_missing() -> None:
    assert read(BITNET_2B, eos_token_id=[128001, 128009, 128001]).eos_token_ids == (128001, 128009)
    assert read(BITNET_2B, eos_token_id=None).eos_token_ids == ()


def test_absent_kv_heads_mean_one_for_each_head() -> None:
    assert read(FALCON3, num_key_value_heads=...).num_key_value_heads == 12


def test_private_block_and_harmless_keys_leave_no_note() -> None:
    c = read(
        BITNET_2B, bitnet_ops={"format_version": 1}, transformers_version="4.57", use_cache=True
    )
    assert c.notes == ()


@pytest.mark.parametrize(
    "change",
    [
        {"wondrous_new_option": 3},
        {"use_sub_norms": False},
        {"hadamard_block": 0},
        {"hidden_activation": "relu2"},
        {"is_causal": False},
        {"quantization_config": {"quant_method": "bitnet", "activation_bits": 4}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_unknown_keys_are_rejected_by_name(change: dict[str, Any]) -> None:
    """Each may change the maths; null says nothing, and known remarks stay remarks."""
    name = "activation_bits" if "quantization_config" in change else next(iter(change))
    with pytest.raises(UnsupportedModelError, match=rf"expected (\w+\.)?{name} to be absent"):
        read(BITNET_2B, **change)
    assert read(BITNET_2B, other=None, auto_map={"AutoModel": "m.M"}).notes != ()


def test_every_key_that_transformers_writes_is_known() -> None:
    for name in ("BitNet", "Llama", "Qwen2", "Qwen3", "Gemma3Text"):
        written = getattr(transformers, f"{name}Config")().to_dict()
        silent = {"quantization_config": None, "sliding_window": None, "layer_types": None}
        classes = {"architectures": [class_of(written["model_type"])]}
        ModelConfig.from_hf({**written, **classes, **silent})


def test_block_diffusion_bitnet_is_noted() -> None:
    c = read(BITNET_2B, architectures=["BitnetForCausalLM"], bd_size=32, vocab_size=128257)
    assert any("block-diffusion" in note for note in c.notes)


REJECTED = {
    "another model_type": ({"model_type": "mamba"}, "model_type one of bitnet, gemma3_text, llama"),
    "model_type of another": ({"model_type": "qwen3"}, "architectures ['Qwen3ForCausalLM']"),
    "no model_type": ({"model_type": ...}, "model_type"),
    "an unhashable model_type": ({"model_type": ["bitnet"]}, "model_type"),
    "another architecture": ({"architectures": ["BitNetForSequenceClassification"]}, "architect"),
    "two architectures": ({"architectures": ["BitNetForCausalLM", "X"]}, "architectures"),
    "biases": ({"attention_bias": True}, "attention_bias to be absent or False"),
    "mlp biases": ({"mlp_bias": True}, "mlp_bias"),
    "norms in linears": ({"use_rms_norm": True}, "use_rms_norm"),
    "sliding window": ({"sliding_window": 4096}, "sliding_window to be absent, got 4096"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "dynamic rope": ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "length of the text"),
    "llama3 rope": ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters.factor"),
    "partial rope, nested": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary"),
    "rope not an object": ({"rope_parameters": 3}, "rope_parameters to be an object"),
    "soft cap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "scaled embeddings": ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
    "experts": ({"num_local_experts": 8}, "num_local_experts"),
    "layer types": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "qk norm": ({"use_qk_norm": True}, "use_qk_norm"),
    "group scales": ({"group_size": 128}, "group_size"),
    "gelu": ({"hidden_act": "gelu"}, "hidden_act one of relu2, silu"),
    "an unhashable activation": ({"hidden_act": ["relu2"]}, "hidden_act"),
    "another quantisation": ({"quantization_config": {"quant_method": "gptq"}}, "quant_method"),
    "quantisation not an object": ({"quantization_config": "bitnet"}, "quantization_config"),
    "another linear": (
        {"quantization_config": {"quant_method": "bitnet", "linear_class": "x"}},
        'linear_class "bitlinear" or "autobitlinear"',
    ),
    "per-linear norms, maybe": (
        {"quantization_config": {"quant_method": "bitnet", "use_rms_norm": "yes"}},
        "quantization_config.use_rms_norm",
    ),
    "their eps": (
        {
            "quantization_config": {
                "quant_method": "bitnet",
                "use_rms_norm": True,
                "rms_norm_eps": 0,
            }
        },
        "rms_norm_eps to be finite and above 0",
    ),
    "bits of 1bitLLM": ({"weight_bits": 1}, "weight_bits to be absent"),
    "window switched on": ({"use_sliding_window": True}, "use_sliding_window"),
    "private block no object": ({"bitnet_ops": [1]}, "bitnet_ops to be an object"),
    "left-out neurons": (
        {"bitnet_ops": {"dropped_neurons": [3, 7]}},
        "bitnet_ops.dropped_neurons to be absent, got '[3, 7]'",
    ),
    "private sub-norms": ({"bitnet_ops": {"sub_norms": 1}}, "sub_norms to be true or false"),
    "missing hidden_size": ({"hidden_size": ...}, "hidden_size to be a positive integer"),
    "a float size": ({"hidden_size": 2560.0}, "hidden_size to be a positive integer"),
    "a bool size": ({"num_hidden_layers": True}, "num_hidden_layers"),
    "a zero size": ({"vocab_size": 0}, "vocab_size"),
    "a huge size": ({"intermediate_size": 2**31}, "intermediate_size"),
    "NaN eps": ({"rms_norm_eps": float("nan")}, "rms_norm_eps to be finite"),
    "zero eps": ({"rms_norm_eps": 0}, "rms_norm_eps"),
    "null eps": ({"rms_norm_eps": None}, "rms_norm_eps to be a number"),
    "text theta": ({"rope_theta": "5e5"}, "rope_theta to be a number"),
    "text flag": ({"tie_word_embeddings": "true"}, "tie_word_embeddings to be true or false"),
    "odd heads": ({"num_key_value_heads": 3}, "multiple of num_key_value_heads 3"),
    "head_dim against sub-norm": ({"head_dim": 64}, "head_dim to be hidden_size"),
    "no whole head_dim": ({"num_attention_heads": 21, "num_key_value_heads": 7}, "hidden_size"),
    "eos outside": ({"eos_token_id": 128256}, "below vocab_size 128256"),
    "eos of another type": ({"eos_token_id": "</s>"}, "eos_token_id to be a token id"),
    "negative bos": ({"bos_token_id": -1}, "bos_token_id"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejects(name: str) -> None:
    changes, message = REJECTED[name]
    with pytest.raises(UnsupportedModelError) as caught:
        read(BITNET_2B, **changes)
    text = str(caught.value)
    assert message in text
    assert "expected" in text and "got" in text and "\n" not in text


ONEBIT = {
    "architectures": ["BitnetForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32002,
    "hidden_size": 3200,
    "intermediate_size": 8640,
    "num_hidden_layers": 26,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "weight_bits": 1,
    "input_bits": 8,
}


def test_reads_1bitllm() -> None:
    """Row 4: Llama's config with sub-norms; 3200 / 32 heads is head_dim 100."""
    c = read(ONEBIT)
    assert (c.sub_norms, c.hidden_act, c.head_dim, c.rms_norm_eps) == (True, "silu", 100, 1e-5)
    assert c.sub_norm_eps is None and c.notes == ()


@pytest.mark.parametrize("change", [{"weight_bits": 2}, {"input_bits": 4}, {"weight_bits": ...}])
def test_rejects_other_widths_of_1bitllm(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="_bits [18] for BitnetForCausalLM"):
        read(ONEBIT, **change)
    with pytest.raises(UnsupportedModelError, match="weight_bits"):
        read(FALCON3, weight_bits=1, input_bits=8)


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "attention_bias": False,
}


def test_reads_qwen() -> None:
    c = read(QWEN3)
    assert (c.head_dim, c.qk_norm, c.biases, c.linear_norms) == (128, True, (), False)
    assert c.notes == () and not c.embedding_only
    quantization = {"quant_method": "bitnet", "use_rms_norm": True, "rms_norm_eps": 1e-5}
    c = read(QWEN3, quantization_config=quantization)
    assert (c.linear_norms, c.linear_norm_eps) == (True, 1e-5)
    c = read(QWEN3, architectures=["Qwen3Model"])
    assert c.embedding_only and c.tie_word_embeddings
    qwen2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 32768}
    c = read(QWEN3, **qwen2)
    assert c.biases == tuple(f"self_attn.{p}_proj" for p in "qkv")
    assert (c.head_dim, c.qk_norm) == (64, False)
    with pytest.raises(UnsupportedModelError, match="num_key_value_heads"):
        read(QWEN3, num_key_value_heads=...)


def test_the_private_block_says_what_a_converter_found() -> None:
    """Norms that only the names of tensors showed."""
    c = read(FALCON3, bitnet_ops={"sub_norms": True, "sub_norm_eps": 1e-6})
    assert (c.sub_norms, c.sub_norm_eps) == (True, 1e-6)
    c = read(FALCON3, bitnet_ops={"linear_norms": True, "linear_norm_eps": 1e-5})
    assert (c.linear_norms, c.linear_norm_eps, c.sub_norms) == (True, 1e-5, False)


def test_rejects_what_is_no_object() -> None:
    with pytest.raises(UnsupportedModelError, match="expected a JSON object, got list"):
        ModelConfig.from_hf([])  # type: ignore[arg-type]


def test_odd_head_dim_is_rejected() -> None:
    with pytest.raises(UnsupportedModelError, match="head_dim to be even"):
        read(FALCON3, head_dim=255)


def test_k7_k8_fields_are_not_ignored() -> None:
    """K7, K8: rope_theta, head_dim, hidden_act, tie and eps come from the file."""
    c = read(
        FALCON3,
        rope_theta=7.0,
        head_dim=32,
        hidden_act="relu2",
        tie_word_embeddings=True,
        rms_norm_eps=3e-4,
        max_position_embeddings=77,
        eos_token_id=[5, 6],
    )
    assert (c.rope_theta, c.head_dim, c.hidden_act) == (7.0, 32, "relu2")
    assert (c.tie_word_embeddings, c.rms_norm_eps) == (True, 3e-4)
    assert (c.max_position_embeddings, c.eos_token_ids) == (77, (5, 6))


# Hybrids ------------------------------------------------------------------------------------------

QWEN35_TEXT = {
    "model_type": "qwen3_5_text",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "mtp_num_hidden_layers": 1,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
}
QWEN35 = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": QWEN35_TEXT,
    "vision_config": {"model_type": "qwen3_5", "depth": 27},
    "image_token_id": 9,
    "tie_word_embeddings": True,
}


def test_a_hybrid_is_the_same_nested_and_flat() -> None:
    nested = ModelConfig.from_hf(QWEN35)
    flat = ModelConfig.from_hf({**QWEN35_TEXT, "tie_word_embeddings": True})
    assert nested == flat and nested.model_type == "qwen3_5_text"
    d = nested.delta_net
    assert d is not None and d.layers == (0, 1, 2, 4, 5, 6)
    assert (d.key_heads, d.value_heads, d.key_dim, d.value_dim, d.kernel) == (2, 6, 128, 128, 4)
    assert d.channels == 2 * 256 + 768
    assert nested.output_gate and nested.rotary_dim == 16 and nested.rope_theta == 1e7
    assert nested.family.norm_offset == 1 and nested.rotation is None


@pytest.mark.parametrize(
    ("change", "sections"),
    [
        ({}, None),  # 11 + 11 + 10 pairs, where a head of 64 turns 8
        ({"mrope_section": [3, 3, 2]}, (3, 3, 2)),
        ({"mrope_section": [8, 0, 0]}, (8, 0, 0)),
        ({"mrope_section": [3, 3, 2], "mrope_interleaved": False}, None),
        ({"mrope_section": [3, 3, 2], "mrope_interleaved": None}, None),
        ({"mrope_section": [2, 2, 4]}, None),
        ({"mrope_section": [3, 3, 2, 0]}, None),
        ({"mrope_section": "3,3,2"}, None),
        ({"mrope_section": [3.0, 3, 2]}, None),
    ],
)
def test_sections_of_the_rope_are_read_or_the_model_reads_texts(
    change: dict[str, Any], sections: tuple[int, ...] | None
) -> None:
    rope = {**QWEN35_TEXT["rope_parameters"], **change}  # type: ignore[dict-item]
    assert ModelConfig.from_hf({**QWEN35_TEXT, "rope_parameters": rope}).rope_sections == sections


def test_layer_types_win_over_the_interval() -> None:
    kinds = ["full_attention", "linear_attention"] * 4
    found = ModelConfig.from_hf({**QWEN35_TEXT, "layer_types": kinds}).delta_net
    assert found is not None and found.layers == (1, 3, 5, 7)
    assert ModelConfig.from_hf({**QWEN35_TEXT, "full_attention_interval": 1}).delta_net is None


def test_a_rotation_is_read_as_it_is_written() -> None:
    rotation = Rotation(((256, 128), (768, 256)), frozenset({"lm_head"}))
    block = {"bitnet_ops": {"rotation": written_rotation(rotation)}}
    assert ModelConfig.from_hf({**QWEN35_TEXT, **block}).rotation == rotation
    assert rotation.rotates("model.layers.0.mlp.up_proj", 256) and rotation.block(768) == 256
    assert not rotation.rotates("lm_head", 256) and not rotation.rotates("x", 512)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"text_config": None}, "text_config to be an object"),
        ({"text_config": {"model_type": "qwen3"}}, "text_config to be an object of model_type"),
        ({"architectures": ["Qwen3_5MoeForConditionalGeneration"]}, "architectures"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"mtp_num_hidden_layers": -1}, "mtp_num_hidden_layers"),
        ({"full_attention_interval": 9}, "full_attention_interval to be at most num_hidden_layers"),
        ({"layer_types": ["linear_attention"] * 8}, "layer_types to be 8 of"),
        ({"layer_types": ["full_attention"] * 7}, "layer_types to be 8 of"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types to be 8 of"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads to be a multiple"),
        ({"linear_key_head_dim": 48}, "linear_key_head_dim to be a multiple of 32"),
        ({"linear_value_head_dim": 512}, "linear_value_head_dim to be a multiple of 32 up to 256"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim to be from 2 to 8"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor to be the same"),
        ({"rope_parameters": {"partial_rotary_factor": 0}}, "partial_rotary_factor to leave"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"num_experts": 4}, "num_experts"),
        ({"hidden_gate": 1}, "hidden_gate to be absent"),
    ],
)
def test_hybrids_that_are_rejected(changed: dict[str, Any], named: str) -> None:
    outer = changed if changed.keys() & QWEN35.keys() else {}
    text = {**QWEN35_TEXT, **({} if outer else changed)}
    with pytest.raises(UnsupportedModelError, match=re.escape(named)):
        ModelConfig.from_hf({**QWEN35, "text_config": text, **outer})


@pytest.mark.parametrize(
    "block",
    [
        7,
        {"blocks": 5},
        {"blocks": {"256": 48}},
        {"blocks": {"256": 512}},
        {"blocks": {"x": 16}},
        {"blocks": {"256": 16384}},
        {"blocks": {"256": True}},
        {"blocks": {}, "plain": "lm_head"},
    ],
)
def test_rotations_that_are_rejected(block: object) -> None:
    with pytest.raises(UnsupportedModelError, match=r"bitnet_ops\.rotation"):
        ModelConfig.from_hf({**QWEN35_TEXT, "bitnet_ops": {"rotation": block}})
