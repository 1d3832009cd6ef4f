"""The published families as tiny checkpoints, by the row of docs/reference/families.md.

Each Case has the family as its publishers store it (written by hf_writer) and, where transformers'
classes know the maths but not the spelling, a twin: the same network under transformers' names,
which transformers can run as the oracle. It must never import bitnet_ops.
"""

import dataclasses
from dataclasses import dataclass, field

from hf_writer import FAMILIES, Family


@dataclass(frozen=True)
class Case:
    """`row` and `checkpoints`: of the table. `twin`: None where transformers loads the family.

    `options`: of `convert`. `fold`: changes the network for the twin. `adjust`: changes
    transformers' model after loading.
    """

    row: str
    checkpoints: str
    recognised: str
    family: Family
    twin: Family | None = None
    options: dict = field(default_factory=dict)
    adjust: object = None
    fold: object = None  # changes the network, for the twin


def _family(base, name, **changes):
    return dataclasses.replace(FAMILIES[base], name=name, **changes)


def _sub_norm_eps(eps):
    def adjust(model):
        for layer in model.model.layers:
            layer.self_attn.attn_sub_norm.variance_epsilon = eps
            layer.mlp.ffn_sub_norm.variance_epsilon = eps

    return adjust


_ONEBIT = {
    "model_type": "llama",
    "architecture": "BitnetForCausalLM",
    "spelling": "1bitllm",
    "quantized": False,
    "mode": "online",
    "theta": 10000.0,
    "config_extra": {"weight_bits": 1, "input_bits": 8},
}
# V odd, 16 heads of 96 become 2; K = 4096 stays a multiple of 128.
_LARGE = _family("bitnet-online", "1bitllm-large-fp16", **_ONEBIT, hidden=192, inter=512, heads=2,
                 kv_heads=2, head_dim=96, vocab=302, dtype="float16")  # fmt: skip
# 32 heads of 100 become 2; 8640 % 128 = 64, as 576 % 128.
_3B = _family("bitnet-online", "1bitllm-3b", **_ONEBIT, hidden=200, inter=576, heads=2,
              kv_heads=2, head_dim=100, vocab=302, dtype="float32")  # fmt: skip


def _bitnet_twin(family, **changes):
    """The network as transformers' BitNet architecture with SiLU: same maths, other names."""
    changes = {"architecture": None, "spelling": "", "config_extra": {}, **changes}
    return dataclasses.replace(
        family, model_type="bitnet", act="silu", quantized=True, mode="online",
        linear_class="autobitlinear", **changes,
    )  # fmt: skip


_SUBLN = _family("llama-online", "subln-smollm2", hidden=576, inter=320, heads=9, kv_heads=3,
                 head_dim=64, theta=100000.0, tied=True, spelling="subln", sub_eps=1e-6,
                 quantized=False)  # fmt: skip
_RMS = {"inner_norms": "rms_norm", "linear_class": "autobitlinear", "dtype": "float32"}
_QWEN3 = {"model_type": "qwen3", "qk_norm": True, "eps": 1e-6, "theta": 1000000.0, "hidden": 192,
          "heads": 4, "head_dim": 64}  # fmt: skip
_YARN = {
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    "max_position_embeddings": 32768,
}
_QWEN2 = {"model_type": "qwen2", "qkv_bias": True, "eps": 1e-6, "hidden": 192, "heads": 4}
_EMBEDDING = _family("llama-online", "qwen3-embedding", **_QWEN3, architecture="Qwen3Model",
                     inner_norms="norm", tied=True, quantized=False)  # fmt: skip

# MiniCPM4's two lists are equal; the published ones have 64 numbers from 0.99 to 40.7
_LONG = [round(1.0 + 0.02 * i + 0.01 * i * i, 4) for i in range(32)]
_LONGROPE = {
    "rope_scaling": {"rope_type": "longrope", "long_factor": _LONG, "short_factor": _LONG,
                     "original_max_position_embeddings": 32768},
    "max_position_embeddings": 32768,
}  # fmt: skip
_WEIGHT_ONLY = {"dense_ternary": True, "quantized": False, "theta": 10000.0, "dtype": "float32"}
_CPM = _family("llama-bitlinear", "bitcpm-llama", **_WEIGHT_ONLY, kv_heads=1, hidden=160, heads=4,
               inter=640, vocab=449, config_extra=_LONGROPE)  # fmt: skip
_MINICPM = _family("llama-bitlinear", "bitcpm-minicpm", **_WEIGHT_ONLY, model_type="minicpm",
                   kv_heads=1, tied=True, inter=1024, vocab=449, config_extra={
                       **_LONGROPE, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 64,
                       "auto_map": {"AutoModel": "modeling_minicpm.MiniCPMModel"},
                   })  # fmt: skip


def _folded(network):
    """MiniCPM's factors in the weights of a plain Llama with a head of its own."""
    folded = {}
    for name, value in network.items():
        if name.endswith(("o_proj", "down_proj")):
            scale = value["stored_scale"] * 1.4 / _MINICPM.layers**0.5
            value = {**value, "stored_scale": scale}
        folded[name] = value
    embedding = network["model.embed_tokens"]
    return {**folded, "model.embed_tokens": embedding * 12,
            "lm_head": embedding / (_MINICPM.hidden / 64)}  # fmt: skip


def _gemma(local, theta):  # published windows have 512 positions: 5 are less than any text here
    return {
        "query_pre_attn_scalar": 256, "sliding_window": 5, "rope_local_base_freq": local,
        "layer_types": ["sliding_attention", "full_attention"], "rope_theta": theta,
        "max_position_embeddings": 2048, "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }  # fmt: skip


_GEMMA = {"model_type": "gemma3_text", "qk_norm": True, "eps": 1e-6, "hidden": 160, "heads": 2,
          "kv_heads": 1, "head_dim": 256, "tied": True, "vocab": 451,
          "linear_class": "autobitlinear", "mode": "online", "dtype": "float32"}  # fmt: skip
_GEMMA_EMBEDDING = _family("llama-online", "bitnet-embedding-270m", **_GEMMA, theta=10000.0,
                           architecture="Gemma3TextModel", inner_norms="norm", quantized=False,
                           config_extra=_gemma(10000.0, 10000.0))  # fmt: skip
_LLAMA3 = {
    "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                     "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "max_position_embeddings": 131072,
}  # fmt: skip

CASES = {
    case.family.name: case
    for case in (
        Case("1", "microsoft/bitnet-b1.58-2B-4T", "bitnet, autobitlinear offline",
             FAMILIES["bitnet-offline"]),
        Case("2", "microsoft/bitnet-b1.58-2B-4T-bf16", "bitnet, autobitlinear online",
             FAMILIES["bitnet-online"]),
        Case("4", "1bitLLM/bitnet_b1_58-large", "llama with BitnetForCausalLM, weight_bits 1",
             _LARGE, _bitnet_twin(_LARGE)),
        Case("4", "1bitLLM/bitnet_b1_58-xl, -3B", "llama with BitnetForCausalLM, weight_bits 1",
             _3B, _bitnet_twin(_3B)),
        Case("5", "HF1BitLLM/Llama3-8B-1.58-100B-tokens", "llama, bitnet (bitlinear)",
             FAMILIES["llama3-8b-like"]),
        Case("6", "tiiuae/Falcon3-{1B,3B,7B,10B}-1.58bit", "llama, bitnet (bitlinear)",
             _family("falcon3-like", "falcon3-256", heads=2, kv_heads=1, head_dim=256, vocab=301)),
        Case("7", "tiiuae/Falcon-E-{1B,3B}", "llama, bitnet (bitlinear)",
             FAMILIES["falcon-e-like"]),
        Case("8", "microsoft/BitNet-embedding-0.6B", "Qwen3Model with `<projection>.norm`",
             _EMBEDDING, dataclasses.replace(
                 _EMBEDDING, architecture="Qwen3ForCausalLM", inner_norms="rms_norm",
                 quantized=True)),
        Case("10", "codys12/Qwen3-8B-BitNet", "qwen3, autobitlinear online, use_rms_norm",
             _family("llama-online", "qwen3-rms-norm", **{**_QWEN3, **_RMS})),
        Case("10", "Qwen2.5 with use_rms_norm", "qwen2 (biases), autobitlinear offline",
             _family("llama-autobitlinear", "qwen2-rms-norm-mul", **_RMS, **_QWEN2)),
        Case("10", "Qwen2.5 with use_rms_norm", "qwen2 (biases), bitlinear",
             _family("llama-bitlinear", "qwen2-rms-norm-div", **_QWEN2, dtype="float32",
                     inner_norms="rms_norm", inner_eps=1e-5)),
        Case("10", "Llama with use_rms_norm", "llama, bitlinear, use_rms_norm",
             _family("llama-bitlinear", "llama-rms-norm", inner_norms="rms_norm", tied=True)),
        Case("11", "block-diffusion BitNet (run as a causal net)",
             "bitnet with BitnetForCausalLM, bd_size",
             _family("bitnet-online", "diffusion", architecture="BitnetForCausalLM", vocab=301,
                     config_extra={"bd_size": 32, "mask_token_id": 300})),
        Case("12", "SmolLM2-135M with SubLN", "llama with o_proj.0, o_proj.1; --assume-online",
             _SUBLN, _bitnet_twin(_SUBLN), {"assume_online": True}, _sub_norm_eps(1e-6)),
        Case("13", "SpectraSuite/TriLM_*_Unpacked", "llama whose values are -s, 0, s",
             _family("llama-bitlinear", "trilm", dense_ternary=True, quantized=False,
                     dtype="float16")),
        Case("13", "TriLM with several scales in a matrix", "llama whose values are -s, 0, s",
             _family("llama-bitlinear", "trilm-blocks", dense_ternary=True, quantized=False,
                     dtype="float16", scale_blocks=True)),
        Case("14", "prism-ml/Ternary-Bonsai-{1.7B,4B,8B}-unpacked",
             "qwen3 with YaRN, -s, 0, s in groups of 128",
             _family("llama-bitlinear", "bonsai", **{**_QWEN3, "hidden": 256, "inter": 384},
                     vocab=517, dense_ternary=True, quantized=False, dtype="float16",
                     scale_groups=True, config_extra=_YARN)),
        Case("15", "openbmb/BitCPM-CANN-{1B,3B}", "llama with longrope whose values are -s, 0, s",
             _CPM),
        Case("15", "openbmb/BitCPM-CANN-{0.5B,8B}",
             "minicpm (scale_emb, scale_depth, dim_model_base)", _MINICPM, dataclasses.replace(
                 _MINICPM, model_type="llama", tied=False, config_extra=_LONGROPE),
             fold=_folded),
        Case("16", "microsoft/BitNet-embedding-270M", "Gemma3TextModel with `<projection>.norm`",
             _GEMMA_EMBEDDING, dataclasses.replace(
                 _GEMMA_EMBEDDING, architecture="Gemma3ForCausalLM", inner_norms="rms_norm",
                 quantized=True)),
        Case("16", "Gemma 3 with ternary projections", "gemma3_text, autobitlinear online",
             _family("llama-online", "gemma3", **_GEMMA, theta=1000000.0,
                     config_extra=_gemma(10000.0, 1000000.0))),
        Case("5", "Llama 3.1, 3.2 with rope_type llama3", "llama, bitnet (bitlinear)",
             _family("llama-bitlinear", "llama3-scaled", theta=500000.0, kv_heads=1, tied=True,
                     dtype="float32", config_extra=_LLAMA3)),
    )
}  # fmt: skip
