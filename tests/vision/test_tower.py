"""The tower against transformers in float32, and every mistake of its maths planted once."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import towers
from bitnet_ops.vision import tower as module
from bitnet_ops.vision.config import VisionConfig
from bitnet_ops.vision.tower import VisionError, VisionTower

TOLERANCE = 1e-5  # of the largest feature: float32 sums in another order
BF16 = 0.03  # rounds of 2^-9 in every product of two or three blocks


def config(sizes: towers.Sizes) -> VisionConfig:
    return VisionConfig.from_hf({"vision_config": sizes.config(), **towers.IDS})


@cache
def oracle(size: str) -> Any:
    return towers.oracle(towers.SIZES[size])


def ours(size: str, dtype: torch.dtype = torch.float32) -> VisionTower:
    made = VisionTower(config(towers.SIZES[size]), dtype)
    made.load_state_dict(oracle(size).state_dict())
    return made


@cache
def expected(size: str, count: int) -> list[Tensor]:
    grids = towers.GRIDS[:count]
    return towers.features(oracle(size), towers.doubled(towers.pictures(grids)), grids)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("size", towers.SIZES)
def test_features_are_those_of_transformers(size: str, count: int) -> None:
    grids = towers.GRIDS[:count]
    pixels = towers.pictures(grids)
    tower = ours(size)
    for given in (pixels, towers.doubled(pixels)):
        found = tower(given, grids)
        assert all(rows.dtype == torch.float32 for rows in found)
        assert towers.difference(found, expected(size, count)) < TOLERANCE


@pytest.mark.parametrize("size", towers.SIZES)
def test_an_image_has_the_same_bits_alone_and_beside_others(size: str) -> None:
    tower, pixels = ours(size), towers.pictures(towers.GRIDS)
    together = tower(pixels, towers.GRIDS)
    parts = pixels.split([h * w for h, w in towers.GRIDS])
    for grid, part, rows in zip(towers.GRIDS, parts, together, strict=True):
        assert torch.equal(tower(part, [grid])[0], rows)


@pytest.mark.parametrize("size", towers.SIZES)
def test_bfloat16_stays_within_its_rounding(size: str) -> None:
    tower = ours(size, torch.bfloat16)
    assert tower.blocks[0].mlp.linear_fc1.weight.dtype == torch.bfloat16
    found = tower(towers.pictures(towers.GRIDS), towers.GRIDS)
    assert all(rows.dtype == torch.float32 for rows in found)
    apart = [
        float((f - e).norm() / e.norm()) for f, e in zip(found, expected(size, 5), strict=True)
    ]
    assert 0 < max(apart) < BF16


def test_the_attention_can_be_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shapes.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)

    monkeypatch.setattr(module, "attention", attention)
    found = ours("small")(towers.pictures(towers.GRIDS[:2]), towers.GRIDS[:2])
    assert towers.difference(found, expected("small", 2)) < TOLERANCE
    assert shapes == [((24, 2, 16),) * 3] * 2 + [((16, 2, 16),) * 3] * 2


# Parts that features hardly show ------------------------------------------------------------------


def gelu_tanh(x: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + inner.tanh())


def gelu_erf(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + (x / math.sqrt(2)).erf())


def identity(layer: Any) -> None:
    layer.weight.copy_(torch.eye(*layer.weight.shape))
    layer.bias.zero_()


def test_gelu_is_by_tanh_in_blocks_and_exact_in_the_merger() -> None:
    made = VisionTower(config(towers.Sizes(intermediate_size=32, out_hidden_size=128)))
    x = torch.linspace(-5, 5, 32 * 40).view(40, 32)
    mlp, merger = made.blocks[0].mlp, made.merger
    for layer in (mlp.linear_fc1, mlp.linear_fc2, merger.linear_fc1, merger.linear_fc2):
        identity(layer)
    merger.norm.weight.fill_(3.0)
    merger.norm.bias.zero_()
    torch.testing.assert_close(mlp(x), gelu_tanh(x.double()).float(), atol=2e-6, rtol=0)
    x = 3 * torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    values = x.double() - x.double().mean(-1, keepdim=True)
    normed = 3 * values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    rows = gelu_erf(normed).view(10, 128).float()
    torch.testing.assert_close(merger(x), rows, atol=5e-6, rtol=0)
    assert float((gelu_erf(normed) - gelu_tanh(normed)).abs().max()) > 1e-4


def test_norms_add_a_millionth() -> None:
    norm = VisionTower(config(towers.SMALL)).blocks[0].norm1
    norm.weight.fill_(1.0)
    norm.bias.zero_()
    x = 1e-3 * torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).double()
    values = x - x.mean(-1, keepdim=True)
    expected = values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm(x.float()).double(), expected, atol=1e-5, rtol=0)


def test_a_grid_of_the_learned_size_is_the_learned_grid() -> None:
    table = torch.randn(2304, 8)
    assert torch.equal(module.grid_positions(table, 48, 48).view(-1, 8), table)


# Planted mistakes ---------------------------------------------------------------------------------

ORDER, POSITIONS, ANGLES = module.merge_order, module.grid_positions, module.rotary_angles
ATTENTION, ROTATE = module.attention, module._rotate


def raster(rows: int, columns: int) -> Tensor:
    return torch.stack([torch.arange(rows).repeat_interleave(columns),
                        torch.arange(columns).repeat(rows)])  # fmt: skip


def raster_positions(table: Tensor, rows: int, columns: int) -> Tensor:
    found = torch.empty(rows, columns, table.shape[1])
    found[tuple(ORDER(rows, columns))] = POSITIONS(table, rows, columns).flatten(0, 1)
    return found


def resized(**how: Any) -> Callable[..., Tensor]:
    def positions(table: Tensor, rows: int, columns: int) -> Tensor:
        side = round(len(table) ** 0.5)
        grid = table.view(1, side, side, -1).permute(0, 3, 1, 2)
        return F.interpolate(grid, (rows, columns), **how)[0].permute(1, 2, 0)

    return positions


def cropped(table: Tensor, rows: int, columns: int) -> Tensor:
    side = round(len(table) ** 0.5)
    grid = table.view(side, side, -1)
    return grid[torch.arange(rows).clamp(max=side - 1)][
        :, torch.arange(columns).clamp(max=side - 1)
    ]


def interleaved(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    half = x.shape[-1] // 2
    order = torch.arange(2 * half).view(half, 2).t().flatten()
    return ROTATE(x[..., order], turns)[..., order.argsort()]


def halves(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """The first half of a head turned by the row, the second by the column."""
    half, quarter = x.shape[-1] // 2, x.shape[-1] // 4
    parts = []
    for at, begin in ((0, 0), (quarter, half)):
        turned = tuple(t[..., at : at + quarter].repeat(1, 1, 2) for t in turns)
        parts.append(ROTATE(x[..., begin : begin + half], turned))
    return torch.cat(parts, -1)


def whole_head(at: Tensor, width: int) -> tuple[Tensor, Tensor]:
    frequencies = 1e4 ** (-torch.arange(0, width // 2, 2).float() / width)
    angles = torch.cat([axis.unsqueeze(1) * frequencies for axis in at], 1)
    both = torch.cat([angles, angles], 1).unsqueeze(1)
    return both.cos(), both.sin()


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (rows.transpose(0, 1) for rows in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def per_head(self: Any, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    q, k, v = self.qkv(x).view(len(x), self.heads, 3, -1).unbind(2)
    return self.proj(ATTENTION(ROTATE(q, turns), ROTATE(k, turns), v).reshape(len(x), -1))


def rms(self: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, self.weight.shape, self.weight, 1e-6) + self.bias


def merger(norm: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(norm(self, x).reshape(len(x) // 4, -1))))

    return forward


def over_four(self: Any, x: Tensor) -> Tensor:
    joined = x.view(len(x) // 4, -1)
    return F.layer_norm(joined, joined.shape[-1:], self.norm.weight.repeat(4),
                        self.norm.bias.repeat(4), 1e-6)  # fmt: skip


def transposed(self: Any, x: Tensor) -> Tensor:
    return self.norm(x).view(len(x) // 4, 4, -1)[:, [0, 2, 1, 3]]


def one_time(self: Any, pixels: Tensor) -> Tensor:
    return F.linear(pixels, self.proj.weight[:, :, 0].flatten(1), self.proj.bias)


def times_first(self: Any, pixels: Tensor) -> Tensor:
    weight = self.proj.weight.flatten(1).view(len(self.proj.weight), 2, -1)
    return F.linear(pixels, weight.sum(1), self.proj.bias)


def joined(self: Any, pixels: Tensor, grids: list[tuple[int, int]]) -> list[Tensor]:
    """All patches of a call see each other."""
    counts = [h * w for h, w in grids]
    x, turns = [], []
    for part, (h, w) in zip(pixels.split(counts), grids, strict=True):
        at = ORDER(h, w)
        x.append(self.patch_embed(part) + POSITIONS(self.pos_embed.weight, h, w)[tuple(at)])
        turns.append(ANGLES(at, self.config.head_dim))
    rows, both = torch.cat(x), tuple(torch.cat(t) for t in zip(*turns, strict=True))
    for block in self.blocks:
        rows = block(rows, both)
    return list(self.merger(rows).split([count // 4 for count in counts]))


def without_biases(self: Any, x: Tensor) -> Tensor:
    qkv = self.bias.shape[0] == 3 * self.weight.shape[1]
    return F.linear(x, self.weight, None if qkv else self.bias)


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "all in raster order": (module, "merge_order", raster),
    "positions in raster order": (module, "grid_positions", raster_positions),
    "rotary ids in raster order": (module, "rotary_angles", lambda at, width: ANGLES(
        raster(*(int(axis.max()) + 1 for axis in at)), width)),
    "align_corners false": (module, "grid_positions", resized(mode="bilinear")),
    "antialiased": (module, "grid_positions", resized(mode="bilinear", antialias=True)),
    "bicubic": (module, "grid_positions", resized(mode="bicubic", align_corners=True)),
    "nearest": (module, "grid_positions", resized(mode="nearest")),
    "top left crop": (module, "grid_positions", cropped),
    "rows and columns swapped": (module, "rotary_angles", lambda at, w: ANGLES(at.flip(0), w)),
    "merged coordinates": (module, "rotary_angles", lambda at, width: ANGLES(at // 2, width)),
    "interleaved pairs": (module, "_rotate", interleaved),
    "an axis each half": (module, "_rotate", halves),
    "frequencies over the whole head": (module, "rotary_angles", whole_head),
    "causal": (module, "attention", causal),
    "across images": (VisionTower, "forward", joined),
    "q, k, v per head": (module._Attention, "forward", per_head),
    "no biases of qkv": (module._Affine, "forward", without_biases),
    "rms norm": (module._Norm, "forward", rms),
    "merger's norm over four patches": (module._Merger, "forward", merger(over_four)),
    "no norm in the merger": (module._Merger, "forward", merger(lambda _, x: x)),
    "block of four transposed": (module._Merger, "forward", merger(transposed)),
    "one time slice": (module._PatchEmbed, "forward", one_time),
    "time before colour": (module._PatchEmbed, "forward", times_first),
}  # fmt: skip


@pytest.mark.parametrize("mistake", PLANTED)
@pytest.mark.parametrize("size", towers.SIZES)
def test_a_planted_mistake_is_seen(
    mistake: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a hundred times the tolerance of the comparison above, on the same images."""
    monkeypatch.setattr(*PLANTED[mistake])
    found = ours(size)(towers.pictures(towers.GRIDS[:2]), towers.GRIDS[:2])
    assert towers.difference(found, expected(size, 2)) > 100 * TOLERANCE


def test_every_planted_mistake_has_its_correct_form() -> None:
    """Variants that call the real parts give the real features: what differs is the mistake."""
    pixels = towers.pictures(towers.GRIDS[:1])
    found = joined(ours("small"), pixels, towers.GRIDS[:1])
    assert towers.difference(found, expected("small", 1)) < TOLERANCE
    correct = merger(lambda self, x: self.norm(x))
    x = torch.randn(8, 32)
    made = ours("small")
    assert torch.equal(correct(made.merger, x), made.merger(x))


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "grids", "message"), [
    ((24, 700), [(4, 6)], r"pixels \[patches, 768\] or \[patches, 1536\], got \[24, 700\]"),
    ((24,), [(4, 6)], r"got \[24\]"),
    ((23, 768), [(4, 6)], r"expected 24 patches, got 23 patches for grids \[\(4, 6\)\]"),
    ((15, 768), [(3, 5)], r"an even number of patches a side, got \[3, 5\]"),
    ((0, 768), [(0, 6)], r"an even number of patches a side"),
])  # fmt: skip
def test_pixels_that_fit_no_grid(
    shape: tuple[int, ...], grids: list[tuple[int, int]], message: str
) -> None:
    with pytest.raises(VisionError, match=message):
        ours("small")(torch.zeros(shape), grids)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(VisionError, match="float32 or bfloat16, got torch.float16"):
        VisionTower(config(towers.SMALL), torch.float16)


def test_no_images_are_no_rows() -> None:
    assert ours("small")(torch.empty(0, 768), []) == []
