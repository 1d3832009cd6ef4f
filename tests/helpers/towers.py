"""Random towers for images, as transformers builds them: the oracle, and pictures for it.

    tensors(SMALL)                     names of transformers' class -> float32
    mlx(tensors), quantised(tensors)   as MLX packages hold them
    write_mmproj(file, SMALL, tensors, "F16")

Weights are large enough that every part of the maths moves the features (transformers' own start
values would hide most mistakes).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gguf_bytes import gguf, key

PREPROCESSOR = {
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536}, "patch_size": 16,
    "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5], "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip
IDS = {"image_token_id": 60, "vision_start_token_id": 61, "vision_end_token_id": 62}
# rows and columns of patches: not square, a side of 2, larger than both grids of positions
GRIDS = [(4, 6), (2, 8), (10, 14), (6, 4), (14, 2)]


@dataclass(frozen=True)
class Sizes:
    """The keys of vision_config."""

    depth: int = 2
    hidden_size: int = 32
    num_heads: int = 2
    intermediate_size: int = 56  # no multiple of 32, as the 4304 of published towers
    out_hidden_size: int = 64
    num_position_embeddings: int = 64
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2

    def config(self) -> dict[str, Any]:
        return {**asdict(self), "model_type": "qwen3_5", "in_channels": 3,
                "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": []}  # fmt: skip


SMALL = Sizes()
WIDE = Sizes(depth=3, hidden_size=72, intermediate_size=96, out_hidden_size=48,
             num_position_embeddings=144)  # heads of 36: no multiple of 8  # fmt: skip
SIZES = {"small": SMALL, "wide": WIDE}


def shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Every tensor of a tower by transformers' name without `model.visual.`."""
    h, m, out = sizes.hidden_size, sizes.intermediate_size, sizes.out_hidden_size
    found: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (h, 3, 2, 16, 16), "patch_embed.proj.bias": (h,),
        "pos_embed.weight": (sizes.num_position_embeddings, h),
    }  # fmt: skip
    matrices = {"attn.qkv": (3 * h, h), "attn.proj": (h, h), "mlp.linear_fc1": (m, h),
                "mlp.linear_fc2": (h, m)}  # fmt: skip
    for block in range(sizes.depth):
        for norm in ("norm1", "norm2"):
            found |= {f"blocks.{block}.{norm}.{kind}": (h,) for kind in ("weight", "bias")}
        for name, shape in matrices.items():
            found[f"blocks.{block}.{name}.weight"] = shape
            found[f"blocks.{block}.{name}.bias"] = shape[:1]
    found |= {f"merger.norm.{kind}": (h,) for kind in ("weight", "bias")}
    for name, shape in {"linear_fc1": (4 * h, 4 * h), "linear_fc2": (out, 4 * h)}.items():
        found[f"merger.{name}.weight"], found[f"merger.{name}.bias"] = shape, shape[:1]
    return found


def tensors(sizes: Sizes, seed: int = 0) -> dict[str, Tensor]:
    """Random values of them, float32."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes(sizes).items():
        noise = torch.randn(shape, generator=generator)
        if name == "pos_embed.weight":
            found[name] = 0.5 * noise
        elif len(shape) == 1:
            found[name] = 0.3 * noise + float(name.endswith("weight"))
        else:
            found[name] = noise * 1.3 / noise[0].numel() ** 0.5
    return found


def oracle(sizes: Sizes, values: dict[str, Tensor] | None = None) -> Any:
    """transformers' tower with the weights `values`, float32."""
    from transformers.models.qwen3_5 import modeling_qwen3_5
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig

    about = {k: v for k, v in sizes.config().items() if k != "deepstack_visual_indexes"}
    config = Qwen3_5VisionConfig(**about)
    config._attn_implementation = "eager"
    model = modeling_qwen3_5.Qwen3_5VisionModel(config).float().eval()
    given = tensors(sizes) if values is None else values
    model.load_state_dict({name: tensor.float() for name, tensor in given.items()})
    return model


def features(model: Any, pixels: Tensor, grids: list[tuple[int, int]]) -> list[Tensor]:
    """The oracle's rows of every image; `pixels` [patches, 1536]."""
    grid = torch.tensor([(1, *g) for g in grids])
    with torch.no_grad():
        rows = model(pixels, grid_thw=grid).pooler_output
    return list(rows.split([h * w // 4 for h, w in grids]))


def pictures(grids: list[tuple[int, int]], seed: int = 1) -> Tensor:
    """[patches, 768] of values from -1 to 1."""
    count = sum(h * w for h, w in grids)
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 768, generator=generator) * 2 - 1


def doubled(pixels: Tensor) -> Tensor:
    """[patches, 1536]: the image at both times, behind each colour."""
    return pixels.view(-1, 3, 1, 256).expand(-1, 3, 2, 256).reshape(len(pixels), -1)


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference as a share of the largest value."""
    assert [f.shape for f in found] == [e.shape for e in expected]
    largest = max(float(e.abs().max()) for e in expected)
    pairs = zip(found, expected, strict=True)
    return max(float((f - e).abs().max()) for f, e in pairs) / largest


# Files --------------------------------------------------------------------------------------------


def mlx(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """As mlx-vlm saves them: colours last in the product of the pixels."""
    pixels = "patch_embed.proj.weight"
    return {**values, pixels: values[pixels].permute(0, 2, 3, 4, 1).contiguous()}


def quantised(
    values: dict[str, Tensor], bits: int, group: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(matrices as MLX's affine `quantize` packs them, the values that they stand for)."""
    packed, meant = {}, {}
    for name, value in values.items():
        packed[name] = meant[name] = value
        if value.ndim != 2 or value.shape[1] % group:
            continue
        groups = value.view(len(value), -1, group)
        low, high = groups.amin(-1).half(), groups.amax(-1).half()
        scales = ((high.float() - low.float()) / (2**bits - 1)).half()
        codes = ((groups - low.float()[..., None]) / scales.float()[..., None]).round()
        codes = codes.clamp(0, 2**bits - 1).long()
        fields = codes.view(len(value), -1, 32 // bits) << torch.arange(0, 32, bits)
        module = name.removesuffix(".weight")
        packed[name] = fields.sum(-1).to(torch.uint32)
        packed[f"{module}.scales"], packed[f"{module}.biases"] = scales, low
        meant[name] = (codes * scales.float()[..., None] + low.float()[..., None]).flatten(1).half()
    return packed, meant


GGUF_NAMES = {
    "norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down", "pos_embed": "v.position_embd",
    "merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2",
    "patch_embed.proj": "v.patch_embd",
}  # fmt: skip
TYPES = {"F32": 0, "F16": 1, "Q8_0": 8, "BF16": 30}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("blocks."):
        return f"{GGUF_NAMES[stem]}.{kind}"
    _, block, inner = stem.split(".", 2)
    return f"v.blk.{block}.{GGUF_NAMES[inner]}.{kind}"


def encoded(value: Tensor, kind: str) -> tuple[str, bytes, Tensor]:
    """(the type that a converter stores, its bytes, the values that they stand for)."""
    if kind == "Q8_0" and value.shape[-1] % 32:
        kind = "F16"  # what llama.cpp's converter falls back to
    if kind == "F32":
        return kind, value.numpy().tobytes(), value
    if kind in ("F16", "BF16"):
        low = value.to(torch.float16 if kind == "F16" else torch.bfloat16)
        return kind, low.view(torch.int16).numpy().tobytes(), low.float()
    blocks = value.reshape(-1, 32).numpy()
    scale = np.abs(blocks).max(1) / 127
    half = scale.astype(np.float16)
    codes = np.round(blocks / np.where(scale == 0, 1, scale)[:, None]).astype(np.int8)
    raw = b"".join(s.tobytes() + c.tobytes() for s, c in zip(half, codes, strict=True))
    meant = codes.astype(np.float32) * half.astype(np.float32)[:, None]
    return kind, raw, torch.from_numpy(meant).view(value.shape)


def mmproj(
    sizes: Sizes, values: dict[str, Tensor], kind: str, **change: Any
) -> tuple[bytes, dict[str, Tensor]]:
    """(an mmproj file as llama.cpp's converter writes it, the values that it stands for).

    `change`: of keys, (type, value) or None, under names with "__" for dots; of tensors by their
    names in the file, None to leave one out.
    """
    side = round(sizes.num_position_embeddings**0.5) * sizes.patch_size
    vision = {
        "image_size": ("u32", side), "patch_size": ("u32", sizes.patch_size),
        "embedding_length": ("u32", sizes.hidden_size),
        "feed_forward_length": ("u32", sizes.intermediate_size),
        "block_count": ("u32", sizes.depth), "projection_dim": ("u32", sizes.out_hidden_size),
        "attention.head_count": ("u32", sizes.num_heads),
        "attention.layer_norm_epsilon": ("f32", 1e-6),
        "spatial_merge_size": ("u32", 2), "image_mean": ("[f32]", [0.5] * 3),
        "image_std": ("[f32]", [0.5] * 3), "is_deepstack_layers": ("[bool]", [False] * sizes.depth),
    }  # fmt: skip
    keys: dict[str, Any] = {
        "general.architecture": ("str", "clip"), "general.type": ("str", "mmproj"),
        "general.file_type": ("u32", TYPES[kind]), "clip.has_vision_encoder": ("bool", True),
        "clip.projector_type": ("str", "qwen3vl_merger"), "clip.use_gelu": ("bool", True),
        **{f"clip.vision.{name}": value for name, value in vision.items()},
    }  # fmt: skip
    keys |= {n: v for name, v in change.items() if (n := name.replace("__", ".")) in keys}
    rows, meant = [], {}
    for name, value in values.items():
        place = gguf_name(name)
        if name == "patch_embed.proj.weight":
            stored = "F16" if kind == "F16" else "F32"
            halves = [encoded(value[:, :, time].contiguous(), stored) for time in range(2)]
            for end, (found, raw, _) in zip(("", ".1"), halves, strict=True):
                rows.append((place + end, tuple(value[:, :, 0].shape), TYPES[found], raw))
            meant[name] = torch.stack([half[2] for half in halves], 2)
            continue
        matrix = value.ndim > 1 and name != "pos_embed.weight"
        found, raw, meant[name] = encoded(value, kind if matrix else "F32")
        rows.append((place, tuple(value.shape), TYPES[found], raw))
    rows = [row for row in rows if change.get(row[0].replace(".", "__"), row) is not None]
    return gguf([key(n, *v) for n, v in keys.items() if v is not None], rows), meant


def write_mmproj(file: Path, sizes: Sizes, kind: str = "F16", **change: Any) -> dict[str, Tensor]:
    """The values that the file stands for."""
    raw, meant = mmproj(sizes, tensors(sizes), kind, **change)
    file.write_bytes(raw)
    return meant
