"""Random towers for images, as transformers builds them: the oracle, and pictures for it.

Weights are large enough that every part of the maths moves the features (transformers' own start
values would hide most mistakes).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

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


def oracle(sizes: Sizes, seed: int = 0) -> Any:
    """transformers' tower with random weights, float32."""
    from transformers.models.qwen3_5 import modeling_qwen3_5
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig

    generator = torch.Generator().manual_seed(seed)
    values = {k: v for k, v in sizes.config().items() if k != "deepstack_visual_indexes"}
    config = Qwen3_5VisionConfig(**values)
    config._attn_implementation = "eager"
    model = modeling_qwen3_5.Qwen3_5VisionModel(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name == "pos_embed.weight":
                weight.copy_(0.5 * noise)
            elif weight.ndim == 1:
                weight.copy_(0.3 * noise + float(name.endswith("weight")))
            else:
                weight.copy_(noise * 1.3 / weight[0].numel() ** 0.5)
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
