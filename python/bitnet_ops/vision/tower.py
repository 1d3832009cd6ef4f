"""The tower: patches of an image -> rows of the text model (Qwen3-VL's vision model, no DeepStack).

Patches come in merge order: the 2 x 2 that become one row stand together. Every image is computed
by itself, so that its rows do not depend on its neighbours, not even in their last bits. Source of
the maths: transformers 5.12 `modeling_qwen3_5.py`; the names of parameters are its names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitnet_ops.errors import BitNetError
from bitnet_ops.vision.config import EPSILON, VisionConfig

ROPE_BASE = 10_000.0
DTYPES = (torch.float32, torch.bfloat16)


class VisionError(BitNetError, ValueError):
    """Pixels or weights that a tower cannot take."""


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(width)) v of one image, without a mask; [patches, heads, width] each.

    A head's rows are laid side by side first: rows 4 or 12 KB apart share lines of the cache, and
    the products of a large image pay more for that than for the copy.
    """
    q, k, v = (rows.transpose(0, 1).contiguous().unsqueeze(0) for rows in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)


class VisionTower(nn.Module):
    """The tower of `config`; its products and attention run in `dtype`, float32 or bfloat16.

    Norms, positions, the residual and the product of the pixels are float32 in both. Parameters
    have no values until they are loaded; they need no gradients.
    """

    def __init__(self, config: VisionConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise VisionError(f"vision: expected dtype float32 or bfloat16, got {dtype}")
        self.config, self.dtype = config, dtype
        h, merged = config.hidden_size, config.hidden_size * config.spatial_merge_size**2
        self.patch_embed = _PatchEmbed(config)
        self.pos_embed = _Weight(config.num_position_embeddings, h)
        self.blocks = nn.ModuleList(_Block(config, dtype) for _ in range(config.depth))
        self.merger = _Merger(h, merged, config.out_hidden_size, dtype)

    @torch.inference_mode()
    def forward(self, pixels: Tensor, grids: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Rows of each image.

        Args:
            pixels: [patches, 768] of all images, patches in merge order, a patch as (colour, row,
                column); or [patches, 1536], as (colour, time, row, column).
            grids: rows and columns of patches of each image, both even.

        Returns for each image float32 [rows * columns / 4, out_hidden_size].
        Raises VisionError.
        """
        counts = [_check_grid(grid) for grid in grids]
        values = pixels.shape[-1] // self.config.patch_features if pixels.ndim == 2 else 0
        size = self.config.patch_features
        if pixels.ndim != 2 or values not in (1, 2) or pixels.shape[1] != values * size:
            expected = f"pixels [patches, {size}] or [patches, {2 * size}]"
            raise VisionError(f"vision: expected {expected}, got {list(pixels.shape)}")
        if sum(counts) != len(pixels):
            found = f"{len(pixels)} patches for grids {[tuple(grid) for grid in grids]}"
            raise VisionError(f"vision: expected {sum(counts)} patches, got {found}")
        images = zip(pixels.float().split(counts), grids, strict=True)
        return [self._image(image, *grid) for image, grid in images]

    def _image(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        at = merge_order(rows, columns)
        x = self.patch_embed(pixels)
        x = x + grid_positions(self.pos_embed.weight.float(), rows, columns)[at[0], at[1]]
        turns = rotary_angles(at, self.config.head_dim)
        for block in self.blocks:
            x = block(x, turns)
        found: Tensor = self.merger(x)
        return found


# Where patches stand ------------------------------------------------------------------------------


def merge_order(rows: int, columns: int) -> Tensor:
    """Row and column of every patch, int64 [2, patches]: 2 x 2 blocks, raster order in each."""
    row = torch.arange(rows).view(rows // 2, 1, 2, 1).expand(-1, columns // 2, -1, 2)
    column = torch.arange(columns).view(1, columns // 2, 1, 2).expand(rows // 2, -1, 2, -1)
    return torch.stack([row.flatten(), column.flatten()])


def grid_positions(table: Tensor, rows: int, columns: int) -> Tensor:
    """The learned grid [side * side, hidden] resized to [rows, columns, hidden].

    Bilinear with aligned corners: the first and the last row stay the first and the last.
    """
    side = round(len(table) ** 0.5)
    grid = table.view(side, side, -1)
    for axis, count in enumerate((rows, columns)):
        at = torch.arange(count, dtype=torch.float64) * ((side - 1) / max(count - 1, 1))
        low = at.floor().long()
        high = (low + 1).clamp(max=side - 1)
        part = (at - low).float().view(-1, 1, 1) if axis == 0 else (at - low).float().view(1, -1, 1)
        grid = grid.index_select(axis, low) * (1 - part) + grid.index_select(axis, high) * part
    return grid


def rotary_angles(at: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [patches, 1, width]: a quarter of the pairs turns with each axis, twice."""
    steps = torch.arange(0, width // 2, 2, dtype=torch.float32) / (width // 2)
    frequencies = 1.0 / ROPE_BASE**steps
    angles = torch.cat([axis.float().unsqueeze(1) * frequencies for axis in at], dim=1)
    both = torch.cat([angles, angles], dim=1).unsqueeze(1)
    return both.cos(), both.sin()


def _rotate(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Pairs (i, i + width / 2) of float32 [patches, heads, width], turned."""
    first, second = x.chunk(2, dim=-1)
    return x * turns[0] + torch.cat([-second, first], dim=-1) * turns[1]


def _check_grid(grid: tuple[int, int]) -> int:
    rows, columns = grid
    if rows < 2 or columns < 2 or rows % 2 or columns % 2:
        raise VisionError(f"vision: expected an even number of patches a side, got {list(grid)}")
    return rows * columns


# Parts --------------------------------------------------------------------------------------------


class _Weight(nn.Module):
    """A float32 weight."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class _Affine(_Weight):
    """x W^T + b in `dtype`."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__(outputs, inputs, dtype=dtype)
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class _Norm(_Weight):
    """LayerNorm with weight and bias, in float32."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.bias = nn.Parameter(torch.empty(features), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.bias.shape, self.weight, self.bias, EPSILON)


class _Filter(_Weight):
    """The weight and bias of a convolution, float32."""

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape)
        self.bias = nn.Parameter(torch.empty(shape[0]), requires_grad=False)


class _PatchEmbed(nn.Module):
    """The product of a patch: a convolution whose stride is its kernel."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.patch_size
        self.proj = _Filter(config.hidden_size, 3, config.temporal_patch_size, size, size)

    def forward(self, pixels: Tensor) -> Tensor:
        weight: Tensor = self.proj.weight
        if pixels.shape[1] * 2 == weight[0].numel():
            weight = weight.sum(2)  # a still image stands at both times
        return F.linear(pixels, weight.flatten(1), self.proj.bias)


class _Attention(nn.Module):
    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        h = config.hidden_size
        self.heads = config.num_heads
        self.qkv, self.proj = _Affine(h, 3 * h, dtype), _Affine(h, h, dtype)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        rows = self.qkv(x).view(len(x), 3, self.heads, -1)
        q, k = (_rotate(part.float(), turns).to(rows.dtype) for part in rows[:, :2].unbind(1))
        found: Tensor = self.proj(attention(q, k, rows[:, 2]).reshape(len(x), -1))
        return found


class _Mlp(nn.Module):
    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        h, inner = config.hidden_size, config.intermediate_size
        self.linear_fc1, self.linear_fc2 = _Affine(h, inner, dtype), _Affine(inner, h, dtype)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.linear_fc1(x)
        # in place: of a large image a second tensor of this size costs as much time as the GELU
        torch.ops.aten.gelu_(inner, approximate="tanh")
        found: Tensor = self.linear_fc2(inner)
        return found


class _Block(nn.Module):
    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1, self.norm2 = _Norm(config.hidden_size), _Norm(config.hidden_size)
        self.attn, self.mlp = _Attention(config, dtype), _Mlp(config, dtype)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attn(self.norm1(x), turns)
        found: Tensor = x + self.mlp(self.norm2(x))
        return found


class _Merger(nn.Module):
    """A norm of every patch, then four patches as one row through an MLP with the exact GELU."""

    def __init__(self, h: int, merged: int, out: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = _Norm(h)
        self.linear_fc1, self.linear_fc2 = (
            _Affine(merged, merged, dtype),
            _Affine(merged, out, dtype),
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).view(-1, self.linear_fc1.weight.shape[1])
        found: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(rows)))
        return found.float()
