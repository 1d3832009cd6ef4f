"""Pixels to patches: the size that a picture is resized to, and the values that the tower reads.

Source: `Qwen2VLImageProcessorPil` of transformers 5.12; the values are equal to its, bit for
bit. It writes each patch of a still picture twice, one behind the other in time; here it stands
once, and the tower adds the two halves of its weights.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from bitnet_ops.arguments import check_integer
from bitnet_ops.vision.decode import MAX_ASPECT
from bitnet_ops.vision.errors import ImageError

if TYPE_CHECKING:
    from PIL import Image

_VERSION = b"bitnet-ops picture 1"  # of decoding and preprocessing, in what caches go by


class Sizes(Protocol):
    """What is read of `VisionConfig`."""

    @property
    def patch_size(self) -> int: ...
    @property
    def spatial_merge_size(self) -> int: ...
    @property
    def image_mean(self) -> tuple[float, ...]: ...
    @property
    def image_std(self) -> tuple[float, ...]: ...
    @property
    def min_pixels(self) -> int: ...
    @property
    def max_pixels(self) -> int: ...


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """(height, width) that a picture is stretched to: multiples of `factor`, the area in bounds.

    The aspect stays as close as that allows. Halves are rounded to even. Raises ImageError where
    one side is more than 200 times the other.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        expected = f"one side at most {MAX_ASPECT} times the other"
        raise ImageError(expected, f"{width} x {height}", "crop the picture")
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
    elif rows * columns * factor**2 < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / factor) for side in (height, width))
    return rows * factor, columns * factor


def tokens_of(height: int, width: int, config: Sizes, max_tokens: int) -> tuple[int, int]:
    """(rows, columns) of the tokens of a picture of that size in pixels, at most `max_tokens`.

    The bounds are those of `config`, or `max_tokens` where that is less. Below 200 tokens the
    formula of `smart_resize` can pass a bound: the picture is then made smaller than by that.
    Raises ImageError where one side is more than 200 times, or `max_tokens` times, the other.
    """
    check_integer("images: expected max_tokens as", max_tokens, 1)
    factor = config.patch_size * config.spatial_merge_size
    most = min(config.max_pixels, max_tokens * factor**2)
    least = min(config.min_pixels, most)
    high, wide = smart_resize(height, width, factor, least, most)
    rows, columns = high // factor, wide // factor
    if rows * columns > max_tokens:
        shrink = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
    if rows * columns > max_tokens:
        expected = f"one side at most {max_tokens} times the other, for {max_tokens} tokens"
        raise ImageError(expected, f"{width} x {height}", "crop it, or allow more tokens")
    return rows, columns


def patches(
    image: Image.Image, config: Sizes, max_tokens: int
) -> tuple[torch.Tensor, tuple[int, int]]:
    """The patches of an RGB picture, and (rows, columns) of their grid.

    float32 [rows * columns, 3 * patch_size^2] in the order of the tokens they are merged to: those
    of one token stand together; a patch has its channels, their rows, their columns. Raises
    ImageError as `tokens_of` does.
    """
    from PIL.Image import Resampling

    if image.mode != "RGB":
        raise ImageError("an RGB picture", f"mode {image.mode}", "decode it with decode_image")
    size, merge = config.patch_size, config.spatial_merge_size
    rows, columns = tokens_of(image.height, image.width, config, max_tokens)
    side = size * merge
    resized = image.resize((columns * side, rows * side), Resampling.BICUBIC)
    pixels = np.asarray(resized).reshape(rows, merge, size, columns, merge, size, 3)
    pixels = pixels.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, size * size)
    table = _values(config)
    result = np.empty(pixels.shape, np.float32)
    for channel in range(3):
        np.take(table[channel], pixels[:, channel], out=result[:, channel])
    return torch.from_numpy(result.reshape(len(pixels), -1)), (rows * merge, columns * merge)


def _values(config: Sizes) -> np.ndarray:
    """float32 [3, 256]: what each 8-bit value of a channel becomes, rounded as in transformers."""
    unit = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean, std = (np.array(v, np.float32)[:, None] for v in (config.image_mean, config.image_std))
    return np.asarray((unit - mean) / std)


def image_identity(data: bytes, grid: tuple[int, int], config: Sizes) -> bytes:
    """32 bytes that two pictures share only if their patches are the same.

    Made of the file's bytes, (rows, columns) of the patches, which the limits decide, and how
    values are made of pixels. What a tower makes of them depends on the tower too.
    """
    found = hashlib.sha256(_VERSION)
    found.update(hashlib.sha256(data).digest())
    numbers = (*grid, config.patch_size, config.spatial_merge_size)
    found.update(repr((*numbers, *config.image_mean, *config.image_std)).encode())
    return found.digest()
