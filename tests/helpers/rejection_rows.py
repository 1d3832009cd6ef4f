"""Checkpoints that the converter must reject: one row a reason, each with its code and its words.

Every row starts from a checkpoint that converts and spoils one thing. test_convert_rejections.py
converts them.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

import hf_writer
from hf_families import CASES
from hf_writer import FAMILIES

EVERY = {**FAMILIES, **{name: case.family for name, case in CASES.items()}}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.1.mlp.ffn_sub_norm.weight"


@dataclass
class Draft:
    """A checkpoint about to be written: change what you like, then `write`."""

    folder: Path
    family: hf_writer.Family
    shards: int = 1
    config: dict = field(init=False)
    tensors: dict = field(init=False)

    def __post_init__(self):
        self.config = hf_writer.config_dict(self.family)
        self.tensors = hf_writer.state_dict(self.family, hf_writer.make_network(self.family))

    @property
    def quantization(self):
        return self.config["quantization_config"]

    def rename(self, old, new):
        self.tensors[new] = self.tensors.pop(old)

    def write(self):
        self.folder.mkdir()
        (self.folder / "config.json").write_text(json.dumps(self.config))
        hf_writer.write_tensors(self.folder, self.tensors, self.shards)


# Rows: (id, code, family, words of the message, change of the draft) -----------------------------


def config(**values):
    return lambda draft: draft.config.update(values)


def quantization(**values):
    return lambda draft: draft.quantization.update(values)


def tensor(name, make):
    """Replace (or add) one tensor by make(old or None)."""

    def change(draft):
        draft.tensors[name] = make(draft.tensors.get(name))

    return change


def drop(*names):
    def change(draft):
        for name in names:
            del draft.tensors[name]

    return change


def rename(old, new):
    return lambda draft: draft.rename(old, new)


def poke(name, index, value):
    """Set one element of a tensor."""

    def set_element(old):
        new = old.clone()
        new.view(-1)[index] = value
        return new

    return tensor(name, set_element)


def without_quantization(draft):
    del draft.config["quantization_config"]


def floating(shape):
    return lambda old: torch.zeros(shape, dtype=torch.bfloat16)


def published_with(**parts):
    """The first published family with such parts."""
    return next(
        case.family for case in CASES.values()
        if all(getattr(case.family, part) == value for part, value in parts.items())
    )  # fmt: skip


QK_NORM = published_with(qk_norm=True, headless=False)
QKV_BIAS = published_with(qkv_bias=True)
HEADLESS = published_with(headless=True)


def claims(family):
    """config.json says that the tensors are those of `family`."""
    return config(
        model_type=family.model_type, architectures=[hf_writer.class_of(family.model_type)]
    )


def onebitllm(draft):
    draft.rename(
        "model.layers.0.self_attn.attn_sub_norm.weight",
        "model.layers.0.self_attn.inner_attn_ln.weight",
    )


def one_layer_is_plain(draft):
    draft.quantization["modules_to_not_convert"] = ["lm_head", "model.layers.1.mlp.down_proj"]


def ternary_head(draft):
    draft.tensors["lm_head.weight"] = torch.zeros(75, 256, dtype=torch.uint8)


ROWS = [
    # what the config asks for
    ("qwen3.5-without-decoder", "unsupported-model", "llama-online", "text_config",
     config(model_type="qwen3_5")),
    ("qk-norm-missing", "missing-tensor", "llama-online", "k_norm", claims(QK_NORM)),
    ("biases-missing", "missing-tensor", "llama-online", "q_proj.bias", claims(QKV_BIAS)),
    ("sliding-window-on", "unsupported-model", "llama-online", "use_sliding_window",
     config(use_sliding_window=True, sliding_window=64)),
    ("gemma", "unsupported-architecture", "llama-online", "gemma3.*images",
     config(model_type="gemma3")),
    ("unknown-model-type", "unsupported-model", "llama-online", "model_type.*mamba",
     config(model_type="mamba")),
    ("no-model-type", "unsupported-model", "llama-online", "model_type.*None",
     lambda d: d.config.pop("model_type")),
    ("attention-bias", "unsupported-model", "llama-bitlinear", "attention_bias.*True.*biases",
     config(attention_bias=True)),
    ("mlp-bias", "unsupported-model", "llama-bitlinear", "mlp_bias.*True", config(mlp_bias=True)),
    ("rope-llama3", "unsupported-model", "llama3-8b-like", "rope_scaling.low_freq_factor",
     config(rope_scaling={"rope_type": "llama3", "factor": 8.0})),
    ("rope-yarn", "unsupported-model", "llama3-8b-like", "rope_scaling.beta .*yarn",
     config(rope_scaling={"type": "yarn", "factor": 4.0, "beta": 32})),
    ("rope-parameters-dynamic", "unsupported-model", "llama3-8b-like", "rope_parameters.*dynamic",
     config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e5})),
    ("two-thetas", "unsupported-model", "bitnet-offline", "rope_theta.*every spelling",
     config(rope_parameters={"rope_type": "default", "rope_theta": 1e4})),
    ("gelu", "unsupported-model", "bitnet-offline", "hidden_act.*gelu", config(hidden_act="gelu")),
    ("sliding-window", "unsupported-model", "llama-bitlinear", "sliding_window.*4096",
     config(sliding_window=4096)),
    ("experts", "unsupported-model", "llama-bitlinear", "num_local_experts.*8",
     config(num_local_experts=8)),
    ("not-causal", "unsupported-model", HEADLESS.name, "is_causal.*False.*later tokens",
     config(is_causal=False)),
    ("private-block", "private-block", "bitnet-offline", "another checkpoint",
     config(bitnet_ops={"format_version": 1, "sub_norms": True})),
    ("1bitllm-config", "unsupported-model", "llama-online", "weight_bits.*1bitLLM",
     config(weight_bits=1, input_bits=8)),
    ("1bitllm-4-bit-inputs", "unsupported-model", "1bitllm-3b", "input_bits.*8 for BitnetForCaus",
     config(input_bits=4)),
    ("1bitllm-no-bits", "unsupported-model", "1bitllm-3b", "weight_bits.*None",
     lambda d: d.config.pop("weight_bits")),
    ("1bitllm-other-class", "no-quantization-config", "1bitllm-3b", "nothing in the checkpoint",
     config(architectures=["LlamaForCausalLM"])),
    ("head-dim", "unsupported-model", "bitnet-offline", "head_dim.*32", config(head_dim=32)),
    ("eps-string", "unsupported-model", "bitnet-offline", "rms_norm_eps.*'1e-5'",
     config(rms_norm_eps="1e-5")),
    ("vocab-missing", "unsupported-model", "bitnet-offline", "vocab_size.*None",
     lambda d: d.config.pop("vocab_size")),
    ("billions-of-layers", "unsupported-model", "bitnet-offline", "at most 4096, got 2000000000",
     config(num_hidden_layers=2_000_000_000)),
    ("thousands-of-exclusions", "modules-to-not-convert", "bitnet-offline", "at most 4096 of them",
     quantization(modules_to_not_convert=["lm_head", *map(str, range(5000))])),
    # what quantization_config asks for
    ("no-quantization-config", "no-quantization-config", "llama-online",
     "nothing in the checkpoint says.*--assume-online", without_quantization),
    ("no-quantization-config-packed", "no-quantization-config", "llama-bitlinear",
     "quantization_config", without_quantization),
    ("quantization-config-list", "quantization-config", "bitnet-offline", "an object",
     lambda d: d.config.update(quantization_config=["bitnet"])),
    ("gptq", "quant-method", "llama-bitlinear", "'gptq'", quantization(quant_method="gptq")),
    ("linear-class", "linear-class", "bitnet-offline", "'fancylinear'",
     quantization(linear_class="fancylinear")),
    ("quantization-mode", "quantization-mode", "bitnet-offline", "'sometimes'",
     quantization(quantization_mode="sometimes")),
    ("bitlinear-online", "bitlinear-online", "bitnet-bitlinear", "packed weights only",
     quantization(quantization_mode="online")),
    ("use-rms-norm", "use-rms-norm", "llama-bitlinear", "no such tensor",
     quantization(use_rms_norm=True)),
    ("use-rms-norm-off", "use-rms-norm", "llama-rms-norm", "does not say use_rms_norm",
     quantization(use_rms_norm=False)),
    ("use-rms-norm-text", "unsupported-model", "llama-rms-norm", "use_rms_norm",
     quantization(use_rms_norm="true")),
    ("rms-norm-eps", "unsupported-model", "llama-rms-norm", "rms_norm_eps.*-1",
     quantization(rms_norm_eps=-1.0)),
    ("group-size", "group-scales", "llama-bitlinear", "group_size 128",
     quantization(group_size=128)),
    ("head-not-excluded", "quantised-head", "llama-bitlinear", "asks for a ternary head",
     quantization(modules_to_not_convert=[])),
    ("projection-excluded", "modules-to-not-convert", "bitnet-offline",
     "layers.1.mlp.down_proj left out", one_layer_is_plain),
    ("exclusions-no-list", "modules-to-not-convert", "bitnet-offline", "list of names",
     quantization(modules_to_not_convert="lm_head")),
    ("exclusions-no-regex", "modules-to-not-convert", "bitnet-offline", "regular expressions",
     quantization(modules_to_not_convert=["(lm_head"])),
    # config and file disagree
    ("masters-under-offline", "masters-under-offline", "bitnet-offline",
     'floating BF16.*"autobitlinear" and "online"', tensor(Q_PROJ, floating((256, 256)))),
    ("masters-under-bitlinear", "masters-under-offline", "llama-bitlinear", "packed as U8",
     tensor(Q_PROJ, floating((256, 256)))),
    ("packed-under-online", "packed-under-online", "bitnet-online", "already packed",
     tensor(Q_PROJ, lambda old: torch.zeros(64, 256, dtype=torch.uint8))),
    ("scale-under-online", "packed-under-online", "bitnet-online", "without weight_scale",
     tensor(Q_PROJ + "_scale", lambda old: torch.ones(1))),
    ("untied-without-head", "tie-mismatch", "bitnet-offline", "lm_head.weight, since",
     config(tie_word_embeddings=False)),
    ("tied-with-another-head", "tie-mismatch", "bitnet-offline", "different values",
     tensor("lm_head.weight", lambda old: torch.zeros(300, 256, dtype=torch.bfloat16))),
    ("ternary-head", "quantised-head", "llama-bitlinear", "lm_head.weight as U8", ternary_head),
    ("ternary-head-scale", "quantised-head", "llama-bitlinear", "lm_head.weight_scale",
     tensor("lm_head.weight_scale", lambda old: torch.ones(1))),
    # names
    ("missing-norm", "missing-tensor", "bitnet-offline", "ffn_sub_norm", drop(NORM)),
    ("missing-many", "missing-tensor", "bitnet-offline", "and 7 more",
     lambda d: [d.tensors.pop(n) for n in list(d.tensors)
                if n.startswith("model.layers.1") and n.endswith(".weight")]),
    ("missing-embedding", "missing-tensor", "bitnet-offline", "embed_tokens",
     drop("model.embed_tokens.weight")),
    ("sub-norms-in-llama", "unknown-tensor", "llama-bitlinear", "attn_sub_norm.*config.json",
     tensor("model.layers.0.self_attn.attn_sub_norm.weight", lambda old: torch.ones(256))),
    ("extra-layer", "unknown-tensor", "bitnet-offline", "layers.2.mlp",
     tensor("model.layers.2.mlp.up_proj.weight", lambda old: torch.ones(4, 4))),
    ("stray-scale", "unknown-tensor", "bitnet-offline", "belong to no projection",
     tensor("model.norm.weight_scale", lambda old: torch.ones(1))),
    ("bias-tensor", "bias", "llama-bitlinear", "q_proj.bias.*does not have",
     tensor("model.layers.0.self_attn.q_proj.bias", lambda old: torch.ones(256))),
    ("1bitllm-names", "1bitllm-norms", "bitnet-online", "inner_attn_ln", onebitllm),
    ("qk-norm", "qk-norm", "llama-bitlinear", "norms on queries and keys",
     tensor("model.layers.0.self_attn.q_norm.weight", lambda old: torch.ones(64))),
    ("one-linear-norm", "missing-tensor", "llama-online", "k_proj.rms_norm",
     tensor("model.layers.0.self_attn.q_proj.norm.weight", lambda old: torch.ones(256))),
    ("one-subln", "missing-tensor", "llama-online", "ffn_sub_norm",
     tensor("model.layers.0.self_attn.o_proj.0.weight", lambda old: torch.ones(256))),
    ("subln-in-bitnet", "per-linear-norms", "bitnet-online", "has sub-norms already",
     tensor("model.layers.0.self_attn.o_proj.0.weight", lambda old: torch.ones(256))),
    ("subln-twice", "duplicate-tensor", "subln-smollm2", "o_proj.1.weight",
     tensor("model.layers.0.self_attn.o_proj.weight", lambda old: torch.ones(576, 576))),
    ("subln-no-word", "no-quantization-config", "subln-smollm2", "--assume-online",
     lambda d: None),
    ("1bitllm-missing-norm", "missing-tensor", "1bitllm-3b", "layers.1.mlp.ffn_sub_norm",
     drop("model.layers.1.mlp.ffn_layernorm.weight")),
    ("1bitllm-norm-shape", "shape", "1bitllm-3b", "inner_attn_ln.weight.*\\[200\\]",
     tensor("model.layers.1.self_attn.inner_attn_ln.weight", lambda old: torch.ones(100))),
    ("1bitllm-packed", "packed-under-online", "1bitllm-3b", "already packed",
     tensor(Q_PROJ, lambda old: torch.zeros(50, 200, dtype=torch.uint8))),
    ("inner-norm-shape", "shape", "llama-rms-norm", "o_proj.rms_norm.weight.*\\[256\\]",
     tensor("model.layers.1.self_attn.o_proj.rms_norm.weight", lambda old: torch.ones(64))),
    ("inner-norm-missing", "missing-tensor", "llama-rms-norm", "down_proj.rms_norm",
     drop("model.layers.1.mlp.down_proj.rms_norm.weight")),
    ("qk-norm-shape", "shape", QK_NORM.name, "q_norm.weight.*\\[64\\]",
     tensor("model.layers.0.self_attn.q_norm.weight", lambda old: torch.ones(192))),
    ("bias-missing", "missing-tensor", QKV_BIAS.name, "v_proj.bias",
     drop("model.layers.1.self_attn.v_proj.bias")),
    ("bias-shape", "shape", QKV_BIAS.name, "q_proj.bias.*\\[256\\]",
     tensor("model.layers.1.self_attn.q_proj.bias", lambda old: torch.ones(64))),
    ("bias-nan", "non-finite", QKV_BIAS.name, "q_proj.bias.*nan",
     poke("model.layers.1.self_attn.q_proj.bias", 3, float("nan"))),
    ("bias-elsewhere", "bias", QKV_BIAS.name, "o_proj.bias",
     tensor("model.layers.1.self_attn.o_proj.bias", lambda old: torch.ones(192))),
    ("headless-with-head", "unknown-tensor", HEADLESS.name, "an output head",
     tensor("lm_head.weight", lambda old: torch.ones(300, 192))),
    ("lora", "lora-adapter", "llama-online", "lora_A",
     tensor("model.layers.0.self_attn.q_proj.lora_A.weight", lambda old: torch.ones(4, 256))),
    ("experts-list", "experts", "llama-online", "mixture of experts",
     tensor("model.layers.0.mlp.experts.0.up_proj.weight", lambda old: torch.ones(4, 4))),
    ("gptq-tensors", "other-quantisation", "llama-bitlinear", "GPTQ or AWQ",
     tensor("model.layers.0.mlp.up_proj.qweight", lambda old: torch.ones(4, 4))),
    ("group-scale-tensors", "group-scales", "llama-bitlinear", "scales per group",
     tensor("model.layers.0.mlp.up_proj.scales", lambda old: torch.ones(4, 4))),
    ("expert-tensors", "experts", "llama-online", "mixture of experts",
     tensor("model.layers.0.block_sparse_moe.gate.weight", lambda old: torch.ones(4, 4))),
    # shapes and dtypes
    ("norm-shape", "shape", "bitnet-offline", "ffn_sub_norm.*\\[512\\], got BF16 \\[511\\]",
     tensor(NORM, lambda old: old[:511].clone())),
    ("embedding-shape", "shape", "bitnet-offline", "embed_tokens.*\\[300, 256\\]",
     tensor("model.embed_tokens.weight", lambda old: old[:299].clone())),
    *((f"masters-{len(s)}-d", "no-quantization-config", "subln-smollm2", "--assume-online",
       tensor(Q_PROJ, lambda old, s=s: torch.ones(s))) for s in ((), (4,), (2, 2, 2))),
    ("layer-types-nested", "unsupported-model", "llama-online", "layer_types",
     config(layer_types=[["full_attention"]])),
    ("masters-shape", "shape", "bitnet-online", "q_proj.*\\[256, 256\\]",
     tensor(Q_PROJ, lambda old: old[:, :128].clone())),
    ("packed-shape", "shape", "bitnet-offline", "q_proj.*U8 of shape \\[256 / 4, 256\\]",
     tensor(Q_PROJ, lambda old: old[:63].clone())),
    ("unpacked-uint8", "shape", "bitnet-offline", "four output rows share a byte",
     tensor(Q_PROJ, lambda old: torch.ones(256, 256, dtype=torch.uint8))),
    ("packed-int8", "dtype", "bitnet-offline", "q_proj.weight as U8, got I8",
     tensor(Q_PROJ, lambda old: old.view(torch.int8))),
    ("norm-float64", "dtype", "bitnet-offline", "F32, BF16 or F16, got F64",
     tensor(NORM, lambda old: old.double())),
    ("masters-float8", "dtype", "bitnet-online", "got F8_E4M3",
     tensor(Q_PROJ, lambda old: old.float().to(torch.float8_e4m3fn))),
    ("scale-int", "dtype", "bitnet-offline", "weight_scale as F32",
     tensor(Q_PROJ + "_scale", lambda old: torch.ones(1, dtype=torch.int32))),
    ("scale-per-row", "group-scales", "bitnet-offline", "scales per row or per group",
     tensor(Q_PROJ + "_scale", lambda old: torch.ones(256, 1))),
    ("scale-missing", "missing-scale", "bitnet-offline", "q_proj.weight_scale",
     drop(Q_PROJ + "_scale")),
    # values
    ("code-3", "code-3", "bitnet-offline", "byte \\[0, 5\\] = 0x30", poke(Q_PROJ, 5, 0b00110000)),
    ("code-3-last", "code-3", "llama-bitlinear", "byte \\[63, 511\\]", poke(DOWN, -1, 0xC0)),
    ("scale-zero", "bad-scale", "bitnet-offline", "above zero, got 0.0",
     poke(Q_PROJ + "_scale", 0, 0.0)),
    ("scale-negative", "bad-scale", "bitnet-bitlinear", "got -2.0",
     poke(Q_PROJ + "_scale", 0, -2.0)),
    ("scale-nan", "bad-scale", "llama-bitlinear", "got nan",
     poke(Q_PROJ + "_scale", 0, float("nan"))),
    ("scale-infinite", "bad-scale", "bitnet-offline", "got inf",
     poke(Q_PROJ + "_scale", 0, float("inf"))),
    ("scale-not-invertible", "bad-scale", "falcon-e-like", "can be inverted",
     tensor(Q_PROJ + "_scale", lambda old: torch.tensor([1e-40]))),
    ("scale-of-the-other-sense", "scale-sense", "bitnet-bitlinear", "\\+-50:.*autobitlinear",
     tensor(Q_PROJ + "_scale", lambda old: torch.tensor([0.02]))),
    ("reciprocals-that-multiply", "scale-sense", "llama-autobitlinear", "far too large",
     lambda d: [d.tensors.update({n: t * 0 + 40.0}) for n, t in list(d.tensors.items())
                if n.endswith("_scale")]),
    ("one-reciprocal-among-absmeans", "scale-sense", "llama-autobitlinear", "off its neighbours",
     lambda d: [d.tensors.update({n: t * 0 + (9.0 if n == Q_PROJ + "_scale" else 0.03)})
                for n, t in list(d.tensors.items()) if n.endswith("_scale")]),
    ("ternary-but-one", "not-ternary", "trilm", "0.011.* at \\[0, 7\\] beside",
     poke(DOWN, 7, 0.011)),
    ("ternary-by-odd-columns", "not-ternary", "trilm", "every group of 64 weights of a row",
     tensor(DOWN, lambda old: torch.cat([old[:, :200], old[:, 200:] * 2], dim=1))),
    ("ternary-nan", "non-finite", "trilm", "nan at element 7", poke(DOWN, 7, float("nan"))),
    ("ternary-with-scales", "packed-under-online", "trilm", "without weight_scale",
     tensor(Q_PROJ + "_scale", lambda old: torch.ones(1))),
    ("gain-nan", "non-finite", "bitnet-offline", "ffn_sub_norm.*nan at element 7",
     poke(NORM, 7, float("nan"))),
    ("embedding-infinite", "non-finite", "llama-online", "embed_tokens.*inf at element 0",
     poke("model.embed_tokens.weight", 0, float("inf"))),
    ("masters-nan", "non-finite", "bitnet-online", "q_proj.*nan at element 65535",
     poke(Q_PROJ, -1, float("nan"))),
]  # fmt: skip
