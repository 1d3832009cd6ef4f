"""Tiny Qwen3.5 hybrids (Gated DeltaNet and attention, ternary, rotated or not) in every form.

    made = make("rotated")             one of CASES; `layers=` makes it shorter
    state_dict(made)                   names of transformers' Qwen3_5ForCausalLM -> float32 tensors,
                                       of a rotated model (W' H) diag(s), which is what it computes
    text_config(made)                  config.json of the flat form; nested_config(made): published
    transformers_model(made)           Qwen3_5ForCausalLM, float32, eager, with those weights
    converted(made)                    what a model.bin holds of it: (codes int8 [N, K], scales
                                       float16 [N, K / 128]) of a ternary matrix, float32 arrays of
                                       all else, signs of the rotation included
    converted_config(made)             the config.json beside them, with the private block
    write_unpacked(folder, made)       safetensors, nested or flat (of unrotated models)
    write_mlx(folder, made)            an MLX package: prism_hadamard_qwen35, or plain qwen3_5

Sizes are small but of the published proportions: every fourth layer has attention, a key head has
three value heads or one. It must never import bitnet_ops.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file

GROUP = 128
EPS, THETA, KERNEL = 1e-6, 10000000.0, 4


@dataclass(frozen=True)
class Sizes:
    """block: of the rotation, 0: none. Head sizes: of attention, of keys and of values."""

    hidden: int = 256
    inter: int = 384
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    key_heads: int = 2
    value_heads: int = 6
    dim: int = 64
    layers: int = 8
    vocab: int = 321
    tied: bool = False
    block: int = 0

    @property
    def keys(self) -> int:
        return self.key_heads * self.dim

    @property
    def values(self) -> int:
        return self.value_heads * self.dim

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % 4 == 0


CASES = {
    "plain": Sizes(dim=128),  # the first generation: no rotation
    "plain-tied": Sizes(dim=128, value_heads=4, tied=True),
    "rotated": Sizes(block=128),
    "square": Sizes(block=256, inter=512, key_heads=4, value_heads=4, tied=True),
}


@dataclass
class Hybrid:
    """codes, scales: what is stored of every ternary matrix, by module. dense: every other tensor
    as transformers names it and holds it. signs: of the rotation, by width of the input."""

    sizes: Sizes
    codes: dict[str, np.ndarray] = field(default_factory=dict)
    scales: dict[str, np.ndarray] = field(default_factory=dict)
    dense: dict[str, np.ndarray] = field(default_factory=dict)
    signs: dict[int, np.ndarray] = field(default_factory=dict)

    def stored(self, module: str) -> np.ndarray:
        """float32 [N, K] of a ternary matrix, code * scale."""
        scales = np.repeat(self.scales[module].astype(np.float32), GROUP, axis=1)
        return self.codes[module] * scales

    def values(self, module: str) -> np.ndarray:
        """float64 [N, K] of the matrix that it stands for: (W' H) diag(s) where it is rotated."""
        found = self.stored(module).astype(np.float64)
        width = found.shape[1]
        return hadamard(found, self.sizes.block) * self.signs[width] if self.signs else found


def hadamard(x: np.ndarray, block: int) -> np.ndarray:
    """Each block of the last axis times the normalised matrix H_ij = (-1)^popcount(i & j)."""
    i = np.arange(block)
    ones = np.vectorize(lambda v: bin(v).count("1"))(i[:, None] & i)
    matrix = (1.0 - 2.0 * (ones % 2)) / np.sqrt(block)
    return (x.reshape(*x.shape[:-1], -1, block) @ matrix).reshape(x.shape)


def make(name: str = "rotated", layers: int = 0, seed: int = 35) -> Hybrid:
    s = CASES[name]
    if layers:
        s = Sizes(**{**vars(s), "layers": layers})
    rng = np.random.default_rng(seed)
    made = Hybrid(s)
    hidden = s.hidden

    def ternary(module: str, rows: int, columns: int, gain: float = 1.0) -> None:
        codes = rng.choice(
            np.array([-1, 0, 1], dtype=np.int8), (rows, columns), p=[0.34, 0.32, 0.34]
        )
        size = gain / np.sqrt(0.68 * columns)
        scales = size * rng.uniform(0.6, 1.4, (rows, columns // GROUP))
        made.codes[module], made.scales[module] = codes, scales.astype(np.float16)

    def floats(name: str, *shape: int, low: float, high: float) -> None:
        made.dense[name] = rng.uniform(low, high, shape).astype(np.float32)

    def norm(module: str, length: int) -> None:
        floats(f"{module}.weight", length, low=-0.4, high=0.6)

    ternary("model.embed_tokens", s.vocab, hidden, gain=2.0)
    for layer in range(s.layers):
        prefix = f"model.layers.{layer}."
        norm(prefix + "input_layernorm", hidden)
        if s.is_full(layer):
            inside = prefix + "self_attn."
            ternary(inside + "q_proj", 2 * s.heads * s.head_dim, hidden, gain=2.0)
            ternary(inside + "k_proj", s.kv_heads * s.head_dim, hidden)
            ternary(inside + "v_proj", s.kv_heads * s.head_dim, hidden)
            ternary(inside + "o_proj", hidden, s.heads * s.head_dim, gain=2.0)
            norm(inside + "q_norm", s.head_dim)
            norm(inside + "k_norm", s.head_dim)
        else:
            inside = prefix + "linear_attn."
            ternary(inside + "in_proj_qkv", 2 * s.keys + s.values, hidden)
            ternary(inside + "in_proj_z", s.values, hidden)
            ternary(inside + "out_proj", hidden, s.values)
            for name_ in ("in_proj_a", "in_proj_b"):
                weight = rng.normal(0, hidden**-0.5, (s.value_heads, hidden))
                made.dense[f"{inside}{name_}.weight"] = weight.astype(np.float32)
            floats(inside + "conv1d.weight", 2 * s.keys + s.values, 1, KERNEL, low=-0.7, high=0.9)
            floats(inside + "A_log", s.value_heads, low=-3.0, high=0.5)
            floats(inside + "dt_bias", s.value_heads, low=-2.0, high=1.0)
            floats(inside + "norm.weight", s.dim, low=0.5, high=1.5)
        norm(prefix + "post_attention_layernorm", hidden)
        ternary(prefix + "mlp.gate_proj", s.inter, hidden)
        ternary(prefix + "mlp.up_proj", s.inter, hidden)
        ternary(prefix + "mlp.down_proj", hidden, s.inter)
    norm("model.norm", hidden)
    if not s.tied:
        ternary("lm_head", s.vocab, hidden)
    if s.block:
        widths = sorted({codes.shape[1] for codes in made.codes.values()})
        made.signs = {w: rng.choice([-1.0, 1.0], w).astype(np.float32) for w in widths}
    return made


# transformers -------------------------------------------------------------------------------------


def text_config(made: Hybrid) -> dict[str, Any]:
    """config.json of Qwen3_5ForCausalLM."""
    s = made.sizes
    kinds = ["full_attention" if s.is_full(i) else "linear_attention" for i in range(s.layers)]
    turned = s.head_dim // 8  # pairs of a head that are turned
    sections = [turned - 2 * (turned // 3), turned // 3, turned // 3]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "eos_token_id": s.vocab - 2,
        "full_attention_interval": 4,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "intermediate_size": s.inter,
        "layer_types": kinds,
        "linear_conv_kernel_dim": KERNEL,
        "linear_key_head_dim": s.dim,
        "linear_num_key_heads": s.key_heads,
        "linear_num_value_heads": s.value_heads,
        "linear_value_head_dim": s.dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "num_attention_heads": s.heads,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.kv_heads,
        "rms_norm_eps": EPS,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": sections,
            "partial_rotary_factor": 0.25,
            "rope_theta": THETA,
            "rope_type": "default",
        },
        "tie_word_embeddings": s.tied,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": s.vocab,
    }


def nested_config(made: Hybrid) -> dict[str, Any]:
    """config.json as published: the decoder under text_config, a tower for images beside it."""
    text = text_config(made)
    del text["architectures"]
    vocab = made.sizes.vocab
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": vocab - 5,
        "model_type": "qwen3_5",
        "text_config": {**text, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
        "tie_word_embeddings": made.sizes.tied,
        "video_token_id": vocab - 6,
        "vision_config": {"depth": 1, "hidden_size": 32, "model_type": "qwen3_5"},
        "vision_end_token_id": vocab - 7,
        "vision_start_token_id": vocab - 8,
    }


def state_dict(made: Hybrid) -> dict[str, torch.Tensor]:
    found = {f"{n}.weight": made.values(n).astype(np.float32) for n in made.codes}
    return {n: torch.from_numpy(v) for n, v in (found | made.dense).items()}


def transformers_model(made: Hybrid) -> Any:
    import transformers

    config = transformers.AutoConfig.for_model(**text_config(made))
    config._attn_implementation = "eager"
    model = transformers.Qwen3_5ForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(state_dict(made), strict=False)
    assert (
        not unexpected and set(missing) <= {"lm_head.weight"} and bool(missing) == made.sizes.tied
    )
    model.tie_weights()
    return model


# What a model.bin holds --------------------------------------------------------------------------


def converted(made: Hybrid) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"{n}.weight": (made.codes[n], made.scales[n]) for n in made.codes
    }  # fmt: skip
    for name, value in made.dense.items():
        found[name] = multiplies(name, value)
        if name.endswith("conv1d.weight"):
            found[name] = np.ascontiguousarray(value[:, 0].T)
    for width, signs in made.signs.items():
        found[f"model.rotation.{width}.weight"] = signs.reshape(-1, made.sizes.block)
    return found


def multiplies(name: str, value: np.ndarray) -> np.ndarray:
    """What a norm multiplies by; any other tensor as it is."""
    plain = name.endswith("linear_attn.norm.weight") or not name.endswith("norm.weight")
    return value if plain else value + np.float32(1)


def converted_config(made: Hybrid) -> dict[str, Any]:
    blocks = {str(width): made.sizes.block for width in made.signs}
    block = {"rotation": {"blocks": blocks, "plain": []}} if blocks else {}
    return {**text_config(made), "bitnet_ops": {"format_version": 1, **block}}


# Files --------------------------------------------------------------------------------------------


def write_unpacked(
    folder: Path, made: Hybrid, *, nested: bool = False, dtype: torch.dtype = torch.float16
) -> Path:
    """Safetensors of an unrotated model; `nested`: as published, with a tower and MTP layers.

    A rotated one has no such form: what its matrices stand for is not ternary.
    """
    folder.mkdir(parents=True)
    config = nested_config(made) if nested else text_config(made)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: tensor.to(dtype) for name, tensor in state_dict(made).items()}
    if nested:
        inner = "model.language_model."
        tensors = {n.replace("model.", inner, 1): tensor for n, tensor in tensors.items()}
        tensors |= {name: torch.ones(4, dtype=dtype) for name in BESIDE}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# tensors beside the decoder's: a tower for images, layers that predict further tokens
BESIDE = ("model.visual.patch_embed.proj.weight", "model.visual.merger.norm.bias",
          "mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.up_proj.weight")  # fmt: skip


def write_mlx(folder: Path, made: Hybrid, *, schema: int = 2, **change: Any) -> Path:
    """An MLX package: of a rotated model prism_hadamard_qwen35, else mlx-lm's plain form.

    Norms hold 1 + w, convolutions are [channels, kernel, 1]. `change`: of tensors by their name,
    None to leave one out, or of keys of config.json.
    """
    folder.mkdir(parents=True)
    options = {"bits": 2, "group_size": GROUP, "mode": "affine"}
    about = {**nested_config(made), "quantization": options}
    if made.signs:
        modules = [
            {"path": n, "block": made.sizes.block, "embedding": "embed" in n, "dtype": "float16"}
            for n in made.codes
        ]
        namespace = {1: "mlx-lm-text", 2: "mlx-vlm-qwen3_5"}[schema]
        about |= {
            "model_type": "prism_hadamard_qwen35", "base_model_type": "qwen3_5",
            "schema_version": schema, "tensor_namespace": namespace, "modules": modules,
            "gdn_activation_layout": "grouped", "requires_runtime": "runtime/artifact.py",
            "hadamard_config": "hadamard.json",
        }  # fmt: skip
        del about["architectures"]
    tensors: dict[str, np.ndarray] = {}
    for module, codes in made.codes.items():
        scales = made.scales[module]
        tensors |= {f"{module}.weight": mlx_words(codes), f"{module}.scales": scales,
                    f"{module}.biases": -scales}  # fmt: skip
        if made.signs:
            tensors[f"{module}.signs"] = made.signs[codes.shape[1]]
    for name, value in made.dense.items():
        turned = value.swapaxes(1, 2) if name.endswith("conv1d.weight") else value
        tensors[name] = multiplies(name, turned)
    if schema == 2:
        tensors = {f"language_model.{name}": value for name, value in tensors.items()}
        tensors["vision_tower.patch_embed.proj.weight"] = np.ones(4, dtype=np.float32)
    for name, changed in change.items():
        (about if name in about else tensors)[name] = changed
    found = {n: np.ascontiguousarray(v) for n, v in tensors.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(about, indent=2))
    save_numpy(found, folder / "model.safetensors", metadata={"format": "mlx"})
    return folder


def mlx_words(codes: np.ndarray) -> np.ndarray:
    """int8 codes [N, K] -> uint32 [N, K / 16]: weight j in bits 2 (j mod 16) of word j / 16."""
    fields = (codes + 1).astype(np.uint32).reshape(len(codes), -1, 16)
    return (fields << np.arange(0, 32, 2, dtype=np.uint32)).sum(axis=2, dtype=np.uint32)
