"""A GGUF file of random weights for llama.cpp: qwen3 or qwen35, all matrices in Q2_0 of 64.

Every value is valid; no engine's speed depends on them. The vocabulary is filling behind 256 bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bitnet_ops.config import ModelConfig
from bitnet_ops.formats.gguf import Writer

_BLOCK, _BYTES = 64, 18  # weights and bytes: a float16 scale, 16 of codes
_BODY = {
    "attn_q": "query", "attn_k": "kv", "attn_v": "kv", "attn_output": "out", "ffn_gate": "inner",
    "ffn_up": "inner", "ffn_down": "down",
}  # fmt: skip


def write_random(config: ModelConfig, path: Path) -> None:
    """Write a model of the dimensions of `config`."""
    shapes = _shapes(config)
    random = np.random.default_rng(0)
    with Writer(path, _metadata(config), shapes) as writer:
        for name, (kind, shape) in shapes.items():
            plain = np.full(shape, -0.1 if name.endswith("ssm_a") else 1.0, np.float32)
            writer.add(name, plain if kind == "F32" else _q2_0(random, *shape))


def _q2_0(random: Any, n: int, k: int) -> Any:
    blocks = random.integers(0, 256, (n, k // _BLOCK, _BYTES), dtype=np.uint8)
    blocks &= 0b10101010  # every field 0 or 2: valid codes
    blocks[..., :2] = np.frombuffer(np.float16(0.02).tobytes(), dtype=np.uint8)
    return blocks


def _shapes(c: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    query, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    hidden, inner = c.hidden_size, c.intermediate_size
    sizes = {
        "query": (query, hidden), "kv": (kv, hidden), "out": (hidden, query),
        "inner": (inner, hidden), "down": (hidden, inner),
    }  # fmt: skip
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("Q2_0", (c.vocab_size, hidden)),
        "output_norm.weight": ("F32", (hidden,)),
    }
    if not c.tie_word_embeddings:
        found["output.weight"] = ("Q2_0", (c.vocab_size, hidden))
    if c.output_gate:
        sizes["query"] = (2 * query, hidden)
    second = "ffn_norm" if c.delta_net is None else "post_attention_norm"
    for i in range(c.num_hidden_layers):
        block = f"blk.{i}."
        for name in ("attn_norm", second):
            found[f"{block}{name}.weight"] = ("F32", (hidden,))
        linear = c.is_delta_net(i)
        for name, size in _BODY.items():
            if not (linear and name.startswith("attn")):
                found[f"{block}{name}.weight"] = ("Q2_0", sizes[size])
        if linear:
            found |= {block + name: spec for name, spec in _delta_net(c).items()}
            continue
        for name in ("attn_q_norm", "attn_k_norm"):
            found[f"{block}{name}.weight"] = ("F32", (c.head_dim,))
    return found


def _delta_net(c: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    d = c.delta_net
    assert d is not None
    return {
        "attn_qkv.weight": ("Q2_0", (d.channels, c.hidden_size)),
        "attn_gate.weight": ("Q2_0", (d.values, c.hidden_size)),
        "ssm_out.weight": ("Q2_0", (c.hidden_size, d.values)),
        "ssm_alpha.weight": ("F32", (d.value_heads, c.hidden_size)),
        "ssm_beta.weight": ("F32", (d.value_heads, c.hidden_size)),
        "ssm_conv1d.weight": ("F32", (d.channels, d.kernel)),
        "ssm_norm.weight": ("F32", (d.value_dim,)),
        "ssm_a": ("F32", (d.value_heads,)),
        "ssm_dt.bias": ("F32", (d.value_heads,)),
    }


def _metadata(c: ModelConfig) -> dict[str, tuple[str, Any]]:
    from tokenizers import pre_tokenizers

    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), c.vocab_size)]
    numbers = {
        "block_count": c.num_hidden_layers,
        "context_length": 4096,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
    }
    name, sections = "qwen3", {}
    if (d := c.delta_net) is not None:
        name = "qwen35"
        interval = next(i for i in range(c.num_hidden_layers) if not c.is_delta_net(i)) + 1
        numbers |= {
            "rope.dimension_count": c.rotary_dim,
            "full_attention_interval": interval,
            "ssm.conv_kernel": d.kernel,
            "ssm.state_size": d.key_dim,
            "ssm.group_count": d.key_heads,
            "ssm.time_step_rank": d.value_heads,
            "ssm.inner_size": d.values,
        }
        sections = {"qwen35.rope.dimension_sections": ("[int32]", [11, 11, 10, 0])}
    return {
        "general.architecture": ("string", name),
        **{f"{name}.{key}": ("uint32", value) for key, value in numbers.items()},
        **sections,
        f"{name}.attention.layer_norm_rms_epsilon": ("float32", c.rms_norm_eps),
        f"{name}.rope.freq_base": ("float32", c.rope_theta),
        "tokenizer.ggml.model": ("string", "gpt2"),
        "tokenizer.ggml.pre": ("string", "gpt-2"),
        "tokenizer.ggml.tokens": ("[string]", tokens),
        "tokenizer.ggml.token_type": ("[int32]", [3, 3, *[1] * 256, *[5] * (c.vocab_size - 258)]),
        "tokenizer.ggml.merges": ("[string]", []),
        "tokenizer.ggml.bos_token_id": ("uint32", 0),
        "tokenizer.ggml.eos_token_id": ("uint32", 1),
    }
