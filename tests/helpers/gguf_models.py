"""Whole GGUF models of hf_writer's networks, by an independent writer: names, keys, permutation.

Bytes come from gguf_bytes.py (I2_S, Q2_0) and from the official gguf package's quantiser (the
other types). Written from llama.cpp's converter; must not import bitnet_ops.
"""

from __future__ import annotations

from typing import Any

import gguf as official
import numpy as np

from gguf_bytes import gguf, i2s, key, q2_0
from hf_writer import Family

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
}


def tensor_name(name: str) -> str:
    if name in NAMES:
        return f"{NAMES[name]}.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's LlamaModel.permute: what its converter does to q and k."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def scale_of(family: Family, projection: dict[str, Any]) -> float:
    stored = projection["stored_scale"]
    return float(np.float32(1.0) / np.float32(stored)) if family.reciprocal else stored


def stored(kind: str, codes: np.ndarray, scale: float, layout: str = "a") -> tuple[int, bytes]:
    """(type number, bytes) of a ternary matrix."""
    if kind == "I2_S":
        return 36, i2s(codes, scale, layout)
    if kind == "Q2_0":
        return 42, q2_0(codes, np.full((len(codes), codes.shape[1] // 64), scale))
    values = codes.astype(np.float32) * np.float32(scale)
    return dense(values, kind)


def dense(values: np.ndarray, kind: str) -> tuple[int, bytes]:
    number = official.GGMLQuantizationType[kind]
    return int(number), official.quants.quantize(values.astype(np.float32), number).tobytes()


def metadata(family: Family, architecture: str) -> list[bytes]:
    a = architecture
    return [
        key("general.architecture", "str", a),
        key("general.name", "str", family.name),
        key(f"{a}.block_count", "u32", family.layers),
        key(f"{a}.context_length", "u32", 512),
        key(f"{a}.embedding_length", "u32", family.hidden),
        key(f"{a}.feed_forward_length", "u32", family.inter),
        key(f"{a}.attention.head_count", "u32", family.heads),
        key(f"{a}.attention.head_count_kv", "u32", family.kv_heads),
        key(f"{a}.attention.key_length", "u32", family.head_dim),
        key(f"{a}.attention.value_length", "u32", family.head_dim),
        key(f"{a}.attention.layer_norm_rms_epsilon", "f32", family.eps),
        key(f"{a}.rope.freq_base", "f32", family.theta),
        key(f"{a}.rope.dimension_count", "u32", family.head_dim),
    ]


def byte_tokenizer(vocab: int) -> list[bytes]:
    """The tokenizer of hf_writer.write_tokenizer: <s>, </s> and the 256 bytes, then filling."""
    from tokenizers import pre_tokenizers

    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), vocab)]
    types = [3, 3, *[1] * 256, *[5] * (vocab - 258)]
    return [
        key("tokenizer.ggml.model", "str", "gpt2"),
        key("tokenizer.ggml.pre", "str", "gpt-2"),
        key("tokenizer.ggml.tokens", "[str]", tokens),
        key("tokenizer.ggml.token_type", "[i32]", types),
        key("tokenizer.ggml.merges", "[str]", []),
        key("tokenizer.ggml.bos_token_id", "u32", 0),
        key("tokenizer.ggml.eos_token_id", "u32", 1),
        key("tokenizer.ggml.add_bos_token", "bool", True),
    ]


def tensors(
    family: Family,
    network: dict[str, Any],
    architecture: str,
    kind: str,
    *,
    layout: str = "a",
    embedding: str = "F16",
) -> list[tuple[str, tuple[int, ...], int, bytes]]:
    out = []
    for name, value in network.items():
        if not isinstance(value, dict):
            form = embedding if value.ndim == 2 else "F32"
            out.append((tensor_name(name), value.shape, *dense(value, form)))
            continue
        codes = value["codes"]
        if architecture in ("llama", "minicpm") and name.endswith(("q_proj", "k_proj")):
            heads = family.heads if name.endswith("q_proj") else family.kv_heads
            codes = permute(codes, heads)
        form = stored(kind, codes, scale_of(family, value), layout)
        out.append((tensor_name(name), codes.shape, *form))
    return out


def model_file(
    family: Family,
    network: dict[str, Any],
    architecture: str,
    kind: str,
    *,
    layout: str = "a",
    embedding: str = "F16",
    keys: list[bytes] | None = None,
) -> bytes:
    keys = byte_tokenizer(family.vocab) if keys is None else keys
    parts = tensors(family, network, architecture, kind, layout=layout, embedding=embedding)
    return gguf([*metadata(family, architecture), *keys], parts)
