"""Tiny checkpoints of the Ternary-Bonsai family with all that is odd about the published ones.

Keys and values of config.json are those of the published 1.7B but for the sizes; groups of weights
are all zero, half zero, of two magnitudes 0.5 % apart or with a scale that float16 holds as a
subnormal, in projections, embedding and head. Written as the unpacked folder, as an MLX package and
as GGUF of every type. It must never import bitnet_ops.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import beside
from gguf_bytes import gguf, key, ptq1_0, q2_0
from gguf_models import tensor_name

HIDDEN, INTER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 384, 2, 4, 2, 128, 517
ORIGINAL, FACTOR, THETA, EPS = 8192, 4.0, 1000000.0, 1e-6
SUBNORMAL = 1.1e-5  # as in a published embedding; the smallest normal float16 is 6.1e-5
GROUP = 128
TYPES = {"Q2_0": (42, 64), "Q2_0_128": (42, 128), "PQ2_0": (142, 128), "PTQ1_0": (143, 128)}


def config(tied: bool) -> dict[str, Any]:
    """config.json; there is no quantization_config."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": VOCAB - 2,
        "pad_token_id": VOCAB - 4,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTER,
        "max_position_embeddings": int(ORIGINAL * FACTOR),
        "max_window_layers": LAYERS,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": EPS,
        "rope_scaling": {
            "type": "yarn",
            "factor": FACTOR,
            "original_max_position_embeddings": ORIGINAL,
        },
        "rope_theta": THETA,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": "float16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }


@dataclass(frozen=True)
class Grouped:
    """A ternary matrix: codes int8 [N, K], the float16 scale of every half group [N, K / 64]."""

    codes: np.ndarray
    halves: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """float16 [N, K], what the unpacked checkpoint stores."""
        return (self.codes * np.repeat(self.halves, 64, axis=1)).astype(np.float16)

    @property
    def scales(self) -> np.ndarray:
        """float16 [N, K / 128]: the larger of both halves, as the packers take it."""
        return self.halves.reshape(len(self.halves), -1, 2).max(2)

    @property
    def merged(self) -> np.ndarray:
        """float16 [N, K], what remains where a group has one scale."""
        return (self.codes * np.repeat(self.scales, GROUP, axis=1)).astype(np.float16)


@dataclass
class Bonsai:
    """One checkpoint: ternary matrices and norms by the names of modules."""

    tied: bool
    matrices: dict[str, Grouped] = field(default_factory=dict)
    norms: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def uneven_groups(self) -> int:
        """Groups of the projections with two magnitudes."""
        found = [m for name, m in self.matrices.items() if "_proj" in name]
        return sum(int(_uneven(matrix).sum()) for matrix in found)


def _uneven(matrix: Grouped) -> np.ndarray:
    first, second = matrix.halves[:, ::2], matrix.halves[:, 1::2]
    return (first != second) & (first > 0) & (second > 0)


def _matrix(rng: np.random.Generator, rows: int, columns: int, size: float) -> Grouped:
    codes = rng.choice(np.array([-1, 0, 1], dtype=np.int8), (rows, columns), p=[0.35, 0.31, 0.34])
    scales = (size * rng.uniform(0.5, 1.5, (rows, columns // GROUP))).astype(np.float16)
    halves = np.repeat(scales, 2, axis=1)
    codes[::9, :GROUP], halves[::9, :2] = 0, 0  # an all-zero group, whose scale is 0
    codes[1::9, 64:GROUP], halves[1::9, 1] = 0, 0  # a half-zero group
    halves[2::9, :2] = np.float16(SUBNORMAL)
    halves[3::9, 1] = (halves[3::9, 1].astype(np.float64) * 0.995).astype(np.float16)
    return Grouped(codes, halves)


def make(tied: bool) -> Bonsai:
    rng = np.random.default_rng(1700 + tied)
    made = Bonsai(tied)
    made.matrices["model.embed_tokens"] = _matrix(rng, VOCAB, HIDDEN, 0.03)
    query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (query, HIDDEN), "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN), "self_attn.o_proj": (HIDDEN, query),
        "mlp.gate_proj": (INTER, HIDDEN), "mlp.up_proj": (INTER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTER),
    }  # fmt: skip
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            made.matrices[prefix + name] = _matrix(rng, *shape, 0.04)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made.norms[prefix + name] = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float16)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            made.norms[prefix + name] = rng.uniform(0.5, 1.5, HEAD_DIM).astype(np.float16)
    made.norms["model.norm"] = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float16)
    if not tied:
        made.matrices["lm_head"] = _matrix(rng, VOCAB, HIDDEN, 0.05)
    return made


# Files ------------------------------------------------------------------------------------------


def write_unpacked(folder: Path, bonsai: Bonsai, *, merged: bool = False) -> Path:
    """float16 safetensors; `merged`: with one magnitude in every group."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(bonsai.tied), indent=2))
    tensors = {
        f"{name}.weight": torch.from_numpy(m.merged if merged else m.values)
        for name, m in bonsai.matrices.items()
    }
    tensors |= {f"{name}.weight": torch.from_numpy(v) for name, v in bonsai.norms.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def mlx_words(codes: np.ndarray) -> np.ndarray:
    """int8 codes [N, K] -> uint32 [N, K / 16]: weight j in bits 2 (j mod 16) of word j / 16."""
    words = np.zeros((len(codes), codes.shape[1] // 16), dtype=np.uint32)
    for j in range(codes.shape[1]):
        words[:, j // 16] |= (codes[:, j] + 1).astype(np.uint32) << np.uint32(2 * (j % 16))
    return words


def write_mlx(folder: Path, bonsai: Bonsai, **change: Any) -> Path:
    """An MLX package: affine, 2 bits, groups of 128. `change`: of tensors, or `quantization`."""
    folder.mkdir(parents=True)
    block = change.pop("quantization", {"group_size": GROUP, "bits": 2, "mode": "affine"})
    about = {**config(bonsai.tied), "quantization": block, "quantization_config": block}
    (folder / "config.json").write_text(json.dumps(about, indent=2))
    tensors = {f"{name}.weight": torch.from_numpy(v) for name, v in bonsai.norms.items()}
    for name, matrix in bonsai.matrices.items():
        scales = torch.from_numpy(matrix.scales)
        tensors |= {
            f"{name}.weight": torch.from_numpy(mlx_words(matrix.codes)),
            f"{name}.scales": scales,
            f"{name}.biases": -scales,
        }
    for name, changed in change.items():
        tensors[name] = changed(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    beside.write_index(folder, total_parameters=1)  # whatever the number of files
    return folder


def packed(kind: str, matrix: Grouped) -> bytes:
    block = TYPES[kind][1]
    scales = matrix.halves if block == 64 else matrix.scales
    return ptq1_0(matrix.codes, scales) if kind == "PTQ1_0" else q2_0(matrix.codes, scales, block)


def gguf_keys(extra: list[bytes] | None = None) -> list[bytes]:
    def own(name: str, kind: str, value: Any) -> bytes:
        return key(f"qwen3.{name}", kind, value)

    return [
        key("general.architecture", "str", "qwen3"),
        key("general.file_type", "u32", 41),
        own("block_count", "u32", LAYERS),
        own("context_length", "u32", int(ORIGINAL * FACTOR)),
        own("embedding_length", "u32", HIDDEN),
        own("feed_forward_length", "u32", INTER),
        own("attention.head_count", "u32", HEADS),
        own("attention.head_count_kv", "u32", KV_HEADS),
        own("attention.key_length", "u32", HEAD_DIM),
        own("attention.value_length", "u32", HEAD_DIM),
        own("attention.layer_norm_rms_epsilon", "f32", EPS),
        own("rope.freq_base", "f32", THETA),
        own("rope.scaling.type", "str", "yarn"),
        own("rope.scaling.factor", "f32", FACTOR),
        own("rope.scaling.original_context_length", "u32", ORIGINAL),
        *(extra or []),
    ]


def gguf_tensors(bonsai: Bonsai, kind: str) -> list[tuple[str, tuple[int, ...], int, bytes]]:
    """All matrices in one type, norms as F32, as the published files have it."""
    number = TYPES[kind][0]
    parts: list[tuple[str, tuple[int, ...], int, bytes]] = [
        (tensor_name(name), matrix.codes.shape, number, packed(kind, matrix))
        for name, matrix in bonsai.matrices.items()
    ]
    for name, value in bonsai.norms.items():
        parts.append((tensor_name(name), value.shape, 0, value.astype("<f4").tobytes()))
    return parts


def gguf_file(bonsai: Bonsai, kind: str, extra: list[bytes] | None = None) -> bytes:
    return gguf(gguf_keys(extra), gguf_tensors(bonsai, kind))
