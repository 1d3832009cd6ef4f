"""Tiny Qwen3.5 hybrids (Gated DeltaNet and attention, ternary, rotated or not) in every form.

    made = make("rotated")             one of CASES or Sizes; `layers=` makes it shorter
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
    gguf_file(made, "PQ2_0")           bytes of a file of the architecture qwen35

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

import beside
import towers
from gguf_bytes import gguf, key, ptq1_0, q2_0

GROUP = 128
EPS, THETA, KERNEL = 1e-6, 10000000.0, 4


@dataclass(frozen=True)
class Sizes:
    """block: of the rotation, 0: none. Head sizes: of attention, of keys and of values.

    faint: queries and keys are nearly nothing, so that the eps beside their lengths counts.
    interval: every such layer has attention; 1: all of them.
    """

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
    faint: bool = False
    interval: int = 4

    @property
    def keys(self) -> int:
        return self.key_heads * self.dim

    @property
    def values(self) -> int:
        return self.value_heads * self.dim

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.interval == 0


CASES = {
    "plain": Sizes(dim=128),  # the first generation: no rotation
    "plain-tied": Sizes(dim=128, value_heads=4, tied=True),
    "rotated": Sizes(block=128),
    "square": Sizes(block=256, inter=512, key_heads=4, value_heads=4, tied=True),
}
FAINT = Sizes(dim=128, faint=True)
WIDE = {  # mlx-lm reads no block below 512
    "untied": Sizes(512, 1024, 8, 2, 64, 2, 4, 128, 4, block=512),
    "tied": Sizes(512, 1024, 8, 2, 64, 4, 4, 128, 4, tied=True, block=512),
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


def make(name: str | Sizes = "rotated", layers: int = 0, seed: int = 35) -> Hybrid:
    s = CASES[name] if isinstance(name, str) else name
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
            if s.faint:
                made.dense[inside + "conv1d.weight"][: 2 * s.keys] *= np.float32(1e-4)
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
    assert s.head_dim == 64  # of whose pairs 8 are turned
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "eos_token_id": s.vocab - 2,
        "full_attention_interval": s.interval,
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
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": 0.25,
            "rope_theta": THETA,
            "rope_type": "default",
        },
        "tie_word_embeddings": s.tied,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": s.vocab,
    }


def nested_config(made: Hybrid, tower: towers.Sizes | None = None) -> dict[str, Any]:
    """config.json as published: the decoder under text_config, a tower for images beside it."""
    stub = {"depth": 1, "hidden_size": 32, "model_type": "qwen3_5"}
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
        "vision_config": stub if tower is None else tower.config(),
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


def tower_sizes(made: Hybrid) -> towers.Sizes:
    """Of a tower that fits the model."""
    return towers.Sizes(out_hidden_size=made.sizes.hidden)


def write_unpacked(
    folder: Path,
    made: Hybrid,
    *,
    nested: bool = False,
    dtype: torch.dtype = torch.float16,
    tower: towers.Sizes | None = None,
) -> Path:
    """Safetensors of an unrotated model; `nested`: as published, with MTP layers, and a tower.

    A rotated one has no such form: what its matrices stand for is not ternary.
    """
    folder.mkdir(parents=True)
    config = nested_config(made, tower) if nested else text_config(made)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: tensor.to(dtype) for name, tensor in state_dict(made).items()}
    if nested:
        inner = "model.language_model."
        tensors = {n.replace("model.", inner, 1): tensor for n, tensor in tensors.items()}
        tensors |= {name: torch.ones(4, dtype=dtype) for name in BESIDE}
    if tower is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(towers.PREPROCESSOR))
        values = towers.tensors(tower).items()
        tensors |= {f"model.visual.{name}": value.to(dtype) for name, value in values}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# tensors beside the decoder's: layers that predict further tokens
BESIDE = ("mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.up_proj.weight")


def write_mlx(
    folder: Path,
    made: Hybrid,
    *,
    schema: int = 2,
    tower: towers.Sizes | None = None,
    **change: Any,
) -> Path:
    """An MLX package: of a rotated model prism_hadamard_qwen35, else mlx-lm's plain form.

    Norms hold 1 + w, convolutions are [channels, kernel, 1]. `change`: of tensors by their name,
    None to leave one out, or of keys of config.json.
    """
    folder.mkdir(parents=True)
    options = {"bits": 2, "group_size": GROUP, "mode": "affine"}
    about = {**nested_config(made, tower), "quantization": options}
    if made.signs:
        modules = [
            {"path": n, "block": made.sizes.block, "embedding": "embed" in n, "dtype": "float16"}
            for n in made.codes
        ]
        namespace = {1: "mlx-lm-text", 2: "mlx-vlm-qwen3_5"}[schema]
        about |= {
            "components": {"text": True, "vision": True, "mtp": False},
            "model_type": "prism_hadamard_qwen35", "base_model_type": "qwen3_5",
            "schema_version": schema, "tensor_namespace": namespace, "modules": modules,
            "gdn_activation_layout": "grouped", "requires_runtime": "runtime/artifact.py",
            "hadamard_config": "hadamard.json",
        }  # fmt: skip
        del about["architectures"]
    else:  # save_config of mlx-lm
        if tower is None:
            del about["vision_config"]
        about["quantization_config"] = options
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
    if tower is not None:
        values = towers.mlx(towers.tensors(tower)).items()
        tensors |= {f"vision_tower.{name}": value.numpy() for name, value in values}
    for name, changed in change.items():
        (about if name in about else tensors)[name] = changed
    found = {n: np.ascontiguousarray(v) for n, v in tensors.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(about, indent=2))
    save_numpy(found, folder / "model.safetensors", metadata={"format": "mlx"})
    beside.write_index(folder, total_parameters=1)  # whatever the number of files
    return folder


def mlx_words(codes: np.ndarray) -> np.ndarray:
    """int8 codes [N, K] -> uint32 [N, K / 16]: weight j in bits 2 (j mod 16) of word j / 16."""
    fields = (codes + 1).astype(np.uint32).reshape(len(codes), -1, 16)
    return (fields << np.arange(0, 32, 2, dtype=np.uint32)).sum(axis=2, dtype=np.uint32)


# GGUF ---------------------------------------------------------------------------------------------

# type -> (number, weights that share a scale); 0: plain values
TYPES = {"PQ2_0": (142, 128), "PTQ1_0": (143, 128), "Q2_0": (42, 64), "Q2_0_128": (42, 128),
         "F16": (1, 0), "BF16": (30, 0), "F32": (0, 0)}  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """Of a module or of a whole tensor."""
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    whole = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
    return f"blk.{layer}.{whole.get(rest) or NAMES[rest] + '.weight'}"


def tiled(sizes: Sizes, name: str, value: np.ndarray) -> np.ndarray:
    """Rows as llama.cpp's converter moves them: value heads go round the key heads."""
    parts = ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias", "in_proj_qkv", "conv1d")
    if not any(part in name for part in parts):
        return value
    keep = 2 * sizes.keys if "qkv" in name or "conv1d" in name else 0
    heads = value[keep:].reshape(sizes.key_heads, -1, (len(value) - keep) // sizes.value_heads,
                                 *value.shape[1:])  # fmt: skip
    moved = heads.swapaxes(0, 1).reshape(value[keep:].shape)
    return np.concatenate([value[:keep], moved])


def packed(kind: str, codes: np.ndarray, scales: np.ndarray) -> bytes:
    block = TYPES[kind][1]
    if kind == "PTQ1_0":
        return ptq1_0(codes, scales)
    if block:
        return q2_0(codes, np.repeat(scales, GROUP // block, axis=1), block)
    return plain(kind, codes * np.repeat(scales.astype(np.float32), GROUP, axis=1))


def plain(kind: str, values: np.ndarray) -> bytes:
    if kind == "BF16":
        return torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy().tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2"}[kind]).tobytes()


Tensors = list[tuple[str, tuple[int, ...], int, bytes]]


def gguf_tensors(made: Hybrid, kind: str, gates: str = "F32") -> Tensors:
    """Ternary matrices as `kind`, alpha and beta as `gates`, all else as F32."""
    found: Tensors = []
    for module, codes in made.codes.items():
        codes, scales = (tiled(made.sizes, module, part) for part in (codes, made.scales[module]))
        if module.endswith("out_proj") and not made.signs:  # whole groups: a head has 128 columns
            heads = (made.sizes.key_heads, -1, made.sizes.dim)
            codes = codes.reshape(len(codes), *heads).swapaxes(1, 2).reshape(codes.shape)
            groups = scales.reshape(len(codes), made.sizes.key_heads, -1).swapaxes(1, 2)
            scales = groups.reshape(scales.shape)
        content = packed(kind, codes, scales)
        found.append((gguf_name(module), codes.shape, TYPES[kind][0], content))
    for name, value in made.dense.items():
        value = tiled(made.sizes, name, multiplies(name, value))
        if name.endswith("conv1d.weight"):
            value = value[:, 0]
        if name.endswith("A_log"):
            value = -torch.exp(torch.from_numpy(value)).numpy()  # as convert_hf_to_gguf.py does
        form = gates if "in_proj" in name else "F32"
        content = plain(form, value)
        found.append((gguf_name(name), value.shape, TYPES[form][0], content))
    return found


def gguf_metadata(made: Hybrid) -> dict[str, tuple[str, Any]]:
    """key -> (type, value), as PrismML's fork writes them."""
    s, sections = made.sizes, text_config(made)["rope_parameters"]["mrope_section"]
    own: dict[str, tuple[str, Any]] = {
        "block_count": ("u32", s.layers), "context_length": ("u32", 4096),
        "embedding_length": ("u32", s.hidden), "feed_forward_length": ("u32", s.inter),
        "attention.head_count": ("u32", s.heads), "attention.head_count_kv": ("u32", s.kv_heads),
        "attention.key_length": ("u32", s.head_dim), "attention.value_length": ("u32", s.head_dim),
        "attention.layer_norm_rms_epsilon": ("f32", EPS), "rope.freq_base": ("f32", THETA),
        "rope.dimension_count": ("u32", s.head_dim // 4),
        "rope.dimension_sections": ("[i32]", [*sections, 0]), "ssm.conv_kernel": ("u32", KERNEL),
        "ssm.state_size": ("u32", s.dim), "ssm.group_count": ("u32", s.key_heads),
        "ssm.time_step_rank": ("u32", s.value_heads), "ssm.inner_size": ("u32", s.values),
        "full_attention_interval": ("u32", s.interval),
    }  # fmt: skip
    found = {"general.architecture": ("str", "qwen35"), "general.file_type": ("u32", 41)}
    found["tokenizer.ggml.eos_token_id"] = ("u32", s.vocab - 2)
    found |= {f"qwen35.{name}": value for name, value in own.items()}
    if made.signs:
        widths = list(made.signs)
        values = [int(sign) for signs in made.signs.values() for sign in signs]
        names = [gguf_name(n) for n in made.codes if n != "model.embed_tokens"]
        rotation: dict[str, tuple[str, Any]] = {
            "version": ("u32", 2 if s.tied else 1), "block_size": ("u32", s.block),
            "transform": ("str", "normalized-sylvester-walsh-hadamard"),
            "axis": ("str", "input-last-dimension"), "sign_mode": ("str", "explicit"),
            "sign_widths": ("[i32]", widths), "sign_values": ("[i32]", values),
            "weight_names": ("[str]", names),
            "inverse_weight_names": ("[str]", ["token_embd.weight"]),
            "gdn_v_grouped": ("bool", True),
        }  # fmt: skip
        if s.tied:
            rotation["tied_output"] = ("bool", True)
        found |= {f"prism.hadamard.{name}": value for name, value in rotation.items()}
    return found


def gguf_file(
    made: Hybrid,
    kind: str = "PQ2_0",
    *,
    gates: str = "F32",
    drafts: bool = False,
    more: list[bytes] | None = None,
    **change: Any,
) -> bytes:
    """`drafts`: with a block that drafts tokens, its matrices Q8_0, and a tower's tensors.

    `more`: keys as bytes. `change`: of keys, (type, value) or None, under names with "__" for dots.
    """
    keys, tensors = gguf_metadata(made), gguf_tensors(made, kind, gates)
    if drafts:
        layers = made.sizes.layers
        keys["qwen35.block_count"] = ("u32", layers + 1)
        keys["qwen35.nextn_predict_layers"] = ("u32", 1)
        keys["qwen35.vision.block_count"] = ("u32", 2)
        for name in ("nextn.eh_proj", "attn_q"):
            tensors.append((f"blk.{layers}.{name}.weight", (2, 64), 8, bytes(2 * 2 * 34)))
        if made.signs:  # a bundle may hold its layer rotated too
            _, names = keys["prism.hadamard.weight_names"]
            keys["prism.hadamard.weight_names"] = "[str]", [*names, f"blk.{layers}.attn_q.weight"]
        tensors.append(("v.patch_embd.weight", (4,), 0, bytes(16)))
    keys |= {name.replace("__", "."): value for name, value in change.items()}
    listed = [key(name, *v) for name, v in keys.items() if v is not None]
    return gguf([*listed, *(more or [])], tensors)


def write_gguf(folder: Path, made: Hybrid, kind: str = "PQ2_0", **options: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / f"{kind}.gguf").write_bytes(gguf_file(made, kind, **options))
    return folder / f"{kind}.gguf"
