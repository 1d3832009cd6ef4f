"""`bench model --image`: a picture through the tower, and its tokens as a prompt, twice.

The second time rows and prompt come from caches, as in the next turn of a conversation.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from bitnet_ops.bench.harness import digits
from bitnet_ops.bench.model import BenchModel
from bitnet_ops.bench.pinning import use_threads
from bitnet_ops.generate.engine import Engine, Limits
from bitnet_ops.generate.images import Images
from bitnet_ops.generate.pictures import Picture

if TYPE_CHECKING:
    from bitnet_ops.bench.report import Row

MAX_SIDE = 4096  # pixels
QUESTION = 16  # tokens behind a picture


def noise(side: int, seed: int = 1) -> Picture:
    """A square picture of random pixels, as a BMP, whose reading takes no time worth a figure."""
    generator = torch.Generator().manual_seed(seed)
    row = -(-3 * side // 4) * 4  # filled up to whole words
    pixels = torch.randint(0, 256, (side, row), generator=generator, dtype=torch.uint8)
    head = struct.pack("<2sIHHI", b"BM", 54 + pixels.numel(), 0, 0, 54)
    about = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, 0, pixels.numel(), 2835, 2835, 0, 0)
    return Picture(head + about + pixels.numpy().tobytes(), where=f"{side} x {side} pixels")


def tokens_of(images: Images, side: int) -> int:
    """Of a whole prompt with such a picture. Raises ImageError without Pillow."""
    rows, columns = images.grid(noise(side))
    return rows * columns + 2 + QUESTION


def image_rows(model: BenchModel, sides: tuple[int, ...], threads: int) -> Iterator[Row]:
    """A row for each size: the tower, the prompt without it, and both once more."""
    if not sides or model.images is None:
        return
    use_threads(threads)
    engine = Engine(model.model, kv_dtype=model.kv_dtype)
    images, generator = model.images, torch.Generator().manual_seed(2)
    question = torch.randint(0, 256, (QUESTION,), generator=generator).tolist()
    images.prompt_of(noise(64, seed=threads))  # loads the tower
    engine.generate([question], limits=Limits(1))
    for side in sides:
        picture = noise(side, seed=1000 * threads + side)  # on other threads another one
        began = time.perf_counter()
        prompt: list[Any] = [*images.prompt_of(picture), *question]
        seen = time.perf_counter()
        engine.generate([prompt], limits=Limits(1))
        first = time.perf_counter()
        engine.generate([[*images.prompt_of(picture), *question]], limits=Limits(1))
        second = time.perf_counter()
        tokens = tokens_of(images, side)
        yield {
            "kind": "image",
            **model.formats,
            "threads": threads,
            "side": side,
            "tokens": tokens,
            "tower_s": digits(seen - began),
            "prompt_s": digits(first - seen),
            "tokens_per_s": digits(tokens / (first - seen)),
            "again_s": digits(second - first),
        }
