"""A GGUF file of random weights for llama.cpp: architecture bitnet, TQ2_0 matrices, Q8_0 head.

Written with the gguf package, without a vocabulary. It must not know our formats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitnet_ops.config import ModelConfig

_TQ2_BLOCK, _TQ2_BYTES = 256, 66  # weights and bytes: 64 of fields, a float16 scale
_Q8_BLOCK, _Q8_BYTES = 32, 34  # a float16 scale, 32 of codes


def write_random(config: ModelConfig, path: Path) -> None:
    """Write a model of the dimensions of `config`; ValueError where a row is no whole block."""
    import gguf
    import numpy as np

    random = np.random.default_rng(0)
    half = np.frombuffer(np.float16(0.02).tobytes(), dtype=np.uint8)

    def ternary(n: int, k: int) -> Any:
        if k % _TQ2_BLOCK:
            raise ValueError(f"TQ2_0: expected rows of a multiple of {_TQ2_BLOCK}, got {k}")
        blocks = random.integers(0, 256, (n, k // _TQ2_BLOCK, _TQ2_BYTES), dtype=np.uint8)
        blocks &= 0b10101010  # every field 0 or 2: valid codes
        blocks[..., -2:] = half
        return blocks.reshape(n, -1)

    def head(n: int, k: int) -> Any:
        blocks = random.integers(0, 256, (n, k // _Q8_BLOCK, _Q8_BYTES), dtype=np.uint8)
        blocks[..., :2] = half
        return blocks.reshape(n, -1)

    c = config
    writer = gguf.GGUFWriter(str(path), "bitnet")
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(4096)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_tokenizer_model("no_vocab")
    tq2, q8 = gguf.GGMLQuantizationType.TQ2_0, gguf.GGMLQuantizationType.Q8_0

    def norm_weight(name: str, n: int) -> None:
        writer.add_tensor(name, np.ones(n, dtype=np.float32))

    hidden, inner = c.hidden_size, c.intermediate_size
    kv = c.num_key_value_heads * c.head_dim
    writer.add_tensor("token_embd.weight", head(c.vocab_size, hidden), raw_dtype=q8)
    norm_weight("output_norm.weight", hidden)
    for i in range(c.num_hidden_layers):
        shapes = {
            "attn_q": (hidden, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, hidden),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
        for name, (n, k) in shapes.items():
            writer.add_tensor(f"blk.{i}.{name}.weight", ternary(n, k), raw_dtype=tq2)
        for name in ("attn_norm", "attn_sub_norm", "ffn_norm"):
            norm_weight(f"blk.{i}.{name}.weight", hidden)
        norm_weight(f"blk.{i}.ffn_sub_norm.weight", inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
