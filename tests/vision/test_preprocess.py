"""Sizes, tokens and values of patches: those of transformers, bit for bit."""

from __future__ import annotations

import dataclasses
import hashlib
import random

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    smart_resize as resize_of_transformers,
)

from bitnet_ops.vision.errors import ImageError
from bitnet_ops.vision.preprocess import image_identity, patches, smart_resize, tokens_of
from pictures import photograph

MIN, MAX = 65_536, 16_777_216
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclasses.dataclass(frozen=True)
class Sizes:
    patch_size: int = 16
    spatial_merge_size: int = 2
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    min_pixels: int = MIN
    max_pixels: int = MAX


SIZES = Sizes()


@pytest.mark.parametrize(
    "size, max_tokens, resized, tokens",
    [
        ((512, 512), 16_384, (512, 512), 256),
        ((1080, 1920), 16_384, (1088, 1920), 2040),
        ((400, 560), 16_384, (384, 576), 216),
        ((100, 100), 16_384, (256, 256), 64),
        ((3024, 4032), 16_384, (3008, 4032), 11_844),
        ((1080, 1920), 1024, (768, 1344), 1008),
        ((3024, 4032), 1024, (864, 1152), 972),
    ],
)
def test_sizes_and_tokens_of_examples(
    size: tuple[int, int], max_tokens: int, resized: tuple[int, int], tokens: int
) -> None:
    assert smart_resize(*size, 32, MIN, min(MAX, max_tokens * 1024)) == resized
    rows, columns = tokens_of(*size, SIZES, max_tokens)
    assert (rows * 32, columns * 32) == resized and rows * columns == tokens


def test_smart_resize_is_that_of_transformers() -> None:
    draw = random.Random(46)
    outcomes = {"as it is": 0, "grown": 0, "shrunk": 0, "refused": 0}
    for _ in range(2000):
        height, width = (int(2 ** draw.uniform(0, 14)) for _ in range(2))
        factor, most = draw.choice([28, 32]), draw.choice([1 << 18, 1 << 20, MAX])
        least = draw.choice([4 * 28 * 28, MIN])
        try:
            expected = resize_of_transformers(height, width, factor, least, most)
        except ValueError:
            with pytest.raises(ImageError, match="at most 200 times the other"):
                smart_resize(height, width, factor, least, most)
            outcomes["refused"] += 1
            continue
        assert smart_resize(height, width, factor, least, most) == expected
        area = round(height / factor) * round(width / factor) * factor**2
        outcomes["grown" if area < least else "shrunk" if area > most else "as it is"] += 1
    assert min(outcomes.values()) > 100, outcomes


@pytest.mark.parametrize("side", [48, 80, 112, 144, 16, 176])
def test_halves_are_rounded_to_even(side: int) -> None:
    rows = smart_resize(side, 1024, 32, 1, MAX)[0] // 32
    assert rows % 2 == 0 and abs(rows - side / 32) == 0.5 or side == 16 and rows == 1


@pytest.mark.parametrize("max_tokens", [1, 4, 12, 63, 64, 100, 199, 200, 1024])
def test_a_picture_has_at_most_so_many_tokens(max_tokens: int) -> None:
    draw = random.Random(max_tokens)
    for _ in range(500):
        height, width = (int(2 ** draw.uniform(0, 13)) for _ in range(2))
        aspect = max(height, width) / min(height, width)
        if aspect > min(200, max_tokens):
            continue
        try:
            rows, columns = tokens_of(height, width, SIZES, max_tokens)
        except ImageError as error:
            # one row is the least that there is: its length is then more than is allowed
            assert max_tokens < 200 and aspect > max_tokens / 2, error
            continue
        assert rows >= 1 and columns >= 1 and rows * columns <= max_tokens
        least, most = min(MIN, max_tokens * 1024), max_tokens * 1024
        expected = resize_of_transformers(height, width, 32, least, most)
        if expected[0] * expected[1] <= most:
            assert (rows * 32, columns * 32) == expected
        else:
            assert max_tokens < 200


def test_tokens_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="expected max_tokens as an integer above 0, got 0"):
        tokens_of(10, 10, SIZES, 0)
    with pytest.raises(ImageError, match="at most 4 times the other, for 4 tokens, got 500 x 10"):
        tokens_of(10, 500, SIZES, 4)


def processor(sizes: Sizes, max_tokens: int) -> Qwen2VLImageProcessorPil:
    most = min(sizes.max_pixels, max_tokens * 1024)
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": sizes.min_pixels, "longest_edge": most},
        patch_size=16,
        image_mean=list(sizes.image_mean),
        image_std=list(sizes.image_std),
    )


@pytest.mark.parametrize("sizes", [SIZES, Sizes(image_mean=CLIP_MEAN, image_std=CLIP_STD)])
@pytest.mark.parametrize(
    "size",
    [
        (512, 512),  # as it is
        (450, 700),  # one side grows, one shrinks
        (100, 90),  # grows
        (1080, 1920),  # shrinks
        (256, 288),
        (5, 1000),  # the longest that is taken
        (64, 3000),
        (1, 1),
    ],
)
def test_patches_are_those_of_transformers(sizes: Sizes, size: tuple[int, int]) -> None:
    image = photograph(*size)
    found, grid = patches(image, sizes, 1024)
    expected = processor(sizes, 1024)(images=[image], return_tensors="pt")
    assert (1, *grid) == tuple(expected["image_grid_thw"][0].tolist())
    assert found.dtype == torch.float32 and found.is_contiguous()
    # [patches, channel, time, row, column]: the same picture at both times
    values = expected["pixel_values"].view(-1, 3, 2, 16, 16)
    doubled = found.view(-1, 3, 1, 16, 16).expand(-1, -1, 2, -1, -1)
    assert torch.equal(values, doubled)


def test_patches_stand_in_the_order_of_their_tokens() -> None:
    """Said without the oracle: where each pixel of a picture that needs no resizing goes."""
    rows, columns = 8, 12
    where = np.zeros((rows * 16, columns * 16, 3), np.uint8)
    for row in range(rows):
        for column in range(columns):
            where[row * 16 : row * 16 + 16, column * 16 : column * 16 + 16] = (row, column, 7)
    where[0, 15, 0], where[15, 0, 0] = 201, 202
    found, grid = patches(Image.fromarray(where), Sizes(min_pixels=1), 1024)
    assert grid == (rows, columns)
    values = ((found.view(-1, 3, 16, 16) * 0.5 + 0.5) * 255).round().int()
    order = [
        (2 * block_row + row, 2 * block_column + column, 7)
        for block_row in range(rows // 2)
        for block_column in range(columns // 2)
        for row in range(2)
        for column in range(2)
    ]
    assert [tuple(patch.tolist()) for patch in values[:, :, 8, 8]] == order
    assert values[0, 0, 0, 15] == 201 and values[0, 0, 15, 0] == 202


@pytest.mark.parametrize(
    "size, max_tokens, shape, checksum",
    [
        ((72, 48), 1024, (70 * 4, 768), "b48e80d7bf98641f"),
        ((700, 450), 64, (54 * 4, 768), "f32f3308f92c5eeb"),
    ],
)
def test_checksums_of_patches(
    size: tuple[int, int], max_tokens: int, shape: tuple[int, int], checksum: str
) -> None:
    """Made once by transformers 5.12.1 and Pillow 13; of whole numbers, without a generator."""
    height, width = size
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([(x * 7 + y * 3) % 256, (x * y) % 251, (x * x + 5 * y) % 241], -1)
    found, _ = patches(Image.fromarray(pixels.astype(np.uint8)), SIZES, max_tokens)
    assert tuple(found.shape) == shape
    assert hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16] == checksum


def test_identities() -> None:
    data, other = b"one picture", b"another one"
    same = image_identity(data, (4, 6), SIZES)
    assert len(same) == 32 and same == image_identity(bytes(data), (4, 6), Sizes())
    different = [
        image_identity(other, (4, 6), SIZES),
        image_identity(data, (6, 4), SIZES),
        image_identity(data, (4, 60), SIZES),
        image_identity(data, (4, 6), Sizes(image_mean=CLIP_MEAN)),
        image_identity(data, (4, 6), Sizes(image_std=CLIP_STD)),
    ]
    assert len({same, *different}) == 6
