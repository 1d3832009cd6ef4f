"""Tiny draft heads (multi-token prediction) over the hybrids of hybrids.py, in files.

    head = make(made)                  for a hybrids.Hybrid: float32 matrices, norms as w of 1 + w
    plain(head)                        name -> float64: the matrices, and what norms multiply by
    write_hf(folder, made, head)       safetensors with `mtp.*`, flat, nested or with `model.mtp.*`
    write_base(folder, made, head)     the model that one is grafted from: sharded, bfloat16, tower
    write_bundle(folder, made, head)   GGUF with the layer as its last block, matrices Q8_0
    write_gguf_head(folder, made, head)  GGUF with that block alone, as llama.cpp's `--mtp` has it
    write_mlx(folder, made, head)      an MLX package, the head in a file beside it or left out

Names and forms are those of transformers' checkpoints of Qwen3.5 (`mtp.*` beside `model.*`),
llama.cpp `conversion.qwen` (a block behind the decoder's, norms 1 + w, nextn keys), PrismML's
fork (which lists rotated matrices in prism.hadamard.weight_names) and of vllm-mlx
`add_mtp_weights_qwen35` (norms 1 + w, matrices plain or by MLX's `quantize`, named in the
index). It must never import bitnet_ops.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file

import hybrids
from gguf_bytes import gguf, key
from hybrids import Hybrid, hadamard

LAYER = "mtp.layers.0."
# name here -> name inside the block of a GGUF file
GGUF_NAMES = {
    "mtp.fc": "nextn.eh_proj", "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm", "mtp.norm": "nextn.shared_head_norm",
    f"{LAYER}input_layernorm": "attn_norm",
    f"{LAYER}post_attention_layernorm": "post_attention_norm",
    f"{LAYER}self_attn.q_proj": "attn_q", f"{LAYER}self_attn.k_proj": "attn_k",
    f"{LAYER}self_attn.v_proj": "attn_v", f"{LAYER}self_attn.o_proj": "attn_output",
    f"{LAYER}self_attn.q_norm": "attn_q_norm", f"{LAYER}self_attn.k_norm": "attn_k_norm",
    f"{LAYER}mlp.gate_proj": "ffn_gate", f"{LAYER}mlp.up_proj": "ffn_up",
    f"{LAYER}mlp.down_proj": "ffn_down",
}  # fmt: skip


@dataclass
class Head:
    """matrices: float32 [N, K] by module; norms: float32 w, which multiplies as 1 + w."""

    matrices: dict[str, np.ndarray]
    norms: dict[str, np.ndarray]


def make(made: Hybrid, inter: int = 0, seed: int = 47) -> Head:
    """inter: of its MLP, 0: the trunk's."""
    s, rng = made.sizes, np.random.default_rng(seed)
    inter, queries = inter or s.inter, s.heads * s.head_dim
    shapes = {
        "mtp.fc": (s.hidden, 2 * s.hidden), f"{LAYER}self_attn.q_proj": (2 * queries, s.hidden),
        f"{LAYER}self_attn.k_proj": (s.kv_heads * s.head_dim, s.hidden),
        f"{LAYER}self_attn.v_proj": (s.kv_heads * s.head_dim, s.hidden),
        f"{LAYER}self_attn.o_proj": (s.hidden, queries), f"{LAYER}mlp.gate_proj": (inter, s.hidden),
        f"{LAYER}mlp.up_proj": (inter, s.hidden), f"{LAYER}mlp.down_proj": (s.hidden, inter),
    }  # fmt: skip
    matrices = {n: rng.normal(0, shape[1] ** -0.5, shape) for n, shape in shapes.items()}
    matrices[f"{LAYER}self_attn.q_proj"] *= 3  # scores that tell positions apart
    widths = {name: s.hidden for name in GGUF_NAMES if name not in shapes}
    widths |= {f"{LAYER}self_attn.{n}_norm": s.head_dim for n in "qk"}
    norms = {name: rng.uniform(-0.4, 0.6, width) for name, width in widths.items()}
    return Head(
        {name: value.astype(np.float32) for name, value in matrices.items()},
        {name: value.astype(np.float32) for name, value in norms.items()},
    )


def plain(head: Head) -> dict[str, np.ndarray]:
    """float64, under the names of a model file."""
    found = {name: value.astype(np.float64) for name, value in head.matrices.items()}
    found |= {name: value.astype(np.float64) + 1 for name, value in head.norms.items()}
    return {f"{name}.weight": value for name, value in found.items()}


# Hugging Face -------------------------------------------------------------------------------------


def hf_tensors(head: Head, prefix: str = "") -> dict[str, torch.Tensor]:
    both = head.matrices | head.norms
    return {f"{prefix}{n}.weight": torch.from_numpy(v.copy()) for n, v in both.items()}


def write_hf(
    folder: Path,
    made: Hybrid,
    head: Head | None,
    *,
    nested: bool = True,
    prefix: str = "",
    dtype: torch.dtype = torch.float32,
    more: dict[str, torch.Tensor] | None = None,
    **change: Any,
) -> Path:
    """`prefix`: before `mtp.`. `more`: further tensors. `change`: of the decoder's config."""
    hybrids.write_unpacked(folder, made, nested=nested)
    file = folder / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if n not in hybrids.BESIDE}
    if head is not None:
        tensors |= {name: t.to(dtype) for name, t in hf_tensors(head, prefix).items()}
    save_file(tensors | (more or {}), file, metadata={"format": "pt"})
    _change(folder, {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, **change})
    return folder


def _change(folder: Path, change: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config).update(change)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def write_base(folder: Path, made: Hybrid, head: Head, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A base model as published: trunk and head in one dtype, in shards. No matrix is ternary."""
    folder.mkdir(parents=True)
    config = hybrids.nested_config(made)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    rng = np.random.default_rng(3)
    trunk = {
        name.replace("model.", "model.language_model.", 1): torch.from_numpy(
            rng.normal(0, 0.05, tensor.shape)
        ).to(dtype)
        for name, tensor in hybrids.state_dict(made).items()
    }
    head_tensors = {name: tensor.to(dtype) for name, tensor in hf_tensors(head).items()}
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {}
    for name, tensors in zip(names, (trunk, head_tensors), strict=True):
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# GGUF ---------------------------------------------------------------------------------------------


def q8_0(values: np.ndarray) -> tuple[bytes, np.ndarray]:
    """(blocks of 32 with a float16 scale, the values that they stand for as float64)."""
    blocks = values.astype(np.float64).reshape(-1, 32)
    scale = (np.abs(blocks).max(axis=1) / 127).astype("<f2")
    wide = scale.astype(np.float64)[:, None]
    codes = np.clip(np.rint(blocks / np.where(wide == 0, 1, wide)), -127, 127).astype(np.int8)
    rows = np.concatenate([scale[:, None].view(np.uint8), codes.view(np.uint8)], axis=1)
    return rows.tobytes(), (codes * wide).reshape(values.shape)


def rotated_names(made: Hybrid, head: Head) -> list[str]:
    """Modules that PrismML's converter can rotate: fc, of twice the width, is none of them."""
    return [n for n, m in head.matrices.items() if m.shape[1] in made.signs and n != "mtp.fc"]


def turned(made: Hybrid, matrix: np.ndarray) -> np.ndarray:
    """W' of which W = (W' H) diag(s), float64."""
    return hadamard(matrix.astype(np.float64) * made.signs[matrix.shape[1]], made.sizes.block)


def turned_back(made: Hybrid, stored: np.ndarray) -> np.ndarray:
    """The contrary: W of the W' that is stored."""
    return hadamard(stored.astype(np.float64), made.sizes.block) * made.signs[stored.shape[1]]


def gguf_values(made: Hybrid, head: Head, *, rotated: bool = False) -> dict[str, np.ndarray]:
    """What a bundle's tensors stand for, as stored: rotated ones are W'."""
    found = plain(head)
    for name in head.matrices:
        matrix = head.matrices[name]
        if rotated and name in rotated_names(made, head):
            matrix = turned(made, matrix)
        found[f"{name}.weight"] = q8_0(matrix)[1]
    return found


def head_tensors(made: Hybrid, head: Head, *, rotated: bool = False) -> hybrids.Tensors:
    """The block behind the decoder's: matrices Q8_0, norms F32."""
    found: hybrids.Tensors = []
    for name, inner in GGUF_NAMES.items():
        full = f"blk.{made.sizes.layers}.{inner}.weight"
        if name in head.norms:
            value = head.norms[name] + np.float32(1)
            found.append((full, value.shape, 0, value.tobytes()))
            continue
        matrix = head.matrices[name]
        if rotated and name in rotated_names(made, head):
            matrix = turned(made, matrix)
        found.append((full, matrix.shape, 8, q8_0(matrix)[0]))
    return found


def bundle(
    made: Hybrid,
    head: Head,
    kind: str = "PQ2_0",
    *,
    rotated: bool = False,
    alone: bool = False,
    more: hybrids.Tensors | None = None,
    without: tuple[str, ...] = (),
    last: hybrids.Tensors | None = None,
    **change: Any,
) -> bytes:
    """`rotated`: and listed among the rotated matrices. `alone`: of the trunk only what the head
    shares. `more`: tensors; `without`: those to leave out; `last`: tensors in their place.
    `change`: of keys, as in hybrids."""
    keys, tensors = hybrids.gguf_metadata(made), hybrids.gguf_tensors(made, kind)
    layers = made.sizes.layers
    if alone:
        tensors = [t for t in tensors if not t[0].startswith("blk.")]
    keys["qwen35.block_count"] = ("u32", layers + 1)
    keys["qwen35.nextn_predict_layers"] = ("u32", 1)
    tensors += head_tensors(made, head, rotated=rotated)
    if rotated:
        _, names = keys["prism.hadamard.weight_names"]
        own = [f"blk.{layers}.{GGUF_NAMES[n]}.weight" for n in rotated_names(made, head)]
        keys["prism.hadamard.weight_names"] = "[str]", [*names, *own]
    keys |= {name.replace("__", "."): value for name, value in change.items()}
    tensors = [t for t in [*tensors, *(more or [])] if t[0] not in without]
    tensors += last or []
    return gguf([key(name, *v) for name, v in keys.items() if v is not None], tensors)


def write_bundle(
    folder: Path, made: Hybrid, head: Head, name: str = "MTP.gguf", **options: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(bundle(made, head, **options))
    return folder / name


# MLX ----------------------------------------------------------------------------------------------


def write_mlx(
    folder: Path,
    made: Hybrid,
    head: Head | None,
    *,
    bits: int = 0,
    place: str = "model-mtp.safetensors",
    raw_norms: bool = False,
    dtype: Any = np.float16,
) -> Path:
    """`head`: None is what MLX's converters leave. `bits`: of its matrices but fc, 0: all plain.

    `place`: of the file, which the index always calls model-mtp.safetensors. `raw_norms`: w.
    """
    hybrids.write_mlx(folder, made)
    if head is None:
        return folder
    _change(folder, {"num_nextn_predict_layers": 1})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    tensors: dict[str, np.ndarray] = {}
    for name, matrix in head.matrices.items():
        if bits and name != "mtp.fc":
            words, scales, biases = mlx_quantised(matrix, bits)
            tensors |= {f"{name}.weight": words, f"{name}.scales": scales, f"{name}.biases": biases}
        else:
            tensors[f"{name}.weight"] = matrix.astype(dtype)
    for name, norm in head.norms.items():
        tensors[f"{name}.weight"] = (norm if raw_norms else norm + np.float32(1)).astype(np.float32)
    (folder / place).parent.mkdir(exist_ok=True)
    save_numpy(tensors, folder / place, metadata={"format": "mlx"})
    index = folder / "model.safetensors.index.json"
    about = json.loads(index.read_text()) if index.is_file() else {"weight_map": {}}
    trunk = load_numpy(folder / "model.safetensors")
    about["weight_map"] |= dict.fromkeys(trunk, "model.safetensors")
    about["weight_map"] |= dict.fromkeys(tensors, "model-mtp.safetensors")
    index.write_text(json.dumps(about))
    return folder


def mlx_quantised(matrix: np.ndarray, bits: int, group: int = 64) -> tuple[np.ndarray, ...]:
    """(uint32 words, the lowest bits first; float16 scales; float16 biases) [N, K / group]."""
    groups = matrix.reshape(len(matrix), -1, group)
    low, high = groups.min(axis=2), groups.max(axis=2)
    scales = ((high - low) / (2**bits - 1)).astype(np.float16)
    biases = low.astype(np.float16)
    wide = scales.astype(np.float32)[..., None]
    codes = np.clip(np.rint((groups - biases.astype(np.float32)[..., None]) / wide), 0, 2**bits - 1)
    fields = codes.astype(np.uint32).reshape(len(matrix), -1, 32 // bits)
    words = (fields << np.arange(0, 32, bits, dtype=np.uint32)).sum(axis=2, dtype=np.uint32)
    return words, scales, biases


def mlx_values(matrix: np.ndarray, bits: int, group: int = 64) -> np.ndarray:
    """What such a module stands for, float64."""
    words, scales, biases = mlx_quantised(matrix, bits, group)
    fields = words[:, :, None] >> np.arange(0, 32, bits, dtype=np.uint32) & (2**bits - 1)
    groups = fields.reshape(len(matrix), -1, group).astype(np.float64)
    values = groups * scales.astype(np.float64)[..., None] + biases.astype(np.float64)[..., None]
    return values.reshape(matrix.shape)
