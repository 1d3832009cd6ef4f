"""Files of pictures: those that Pillow writes, and those that it does not."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def photograph(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth colours with edges and noise, so that resizing and turning change every part."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (5 + c) + seed) + np.cos(y / (9 - c)) for c in range(3)]
    pixels = 127 + 45 * np.stack(waves, -1) + rng.normal(0, 12, (height, width, 3))
    pixels[height // 3 : height // 2, width // 4 : width // 2] = (250, 20, 60)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of its file as Pillow writes it."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png_chunk(kind: bytes, data: bytes = b"") -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


def png(
    width: int,
    height: int,
    rows: bytes,
    *,
    depth: int = 8,
    colour: int = 2,
    before: tuple[bytes, ...] = (),
    behind: tuple[bytes, ...] = (),
) -> bytes:
    """A PNG of raw `rows`, each with its filter's byte; whole chunks `before` and `behind` them."""
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    pixels = png_chunk(b"IDAT", zlib.compress(rows, 9))
    chunks = [png_chunk(b"IHDR", head), *before, pixels, *behind, png_chunk(b"IEND")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def exif(turn: int) -> bytes:
    """EXIF of an orientation, as a TIFF of one entry."""
    return b"MM\0*\0\0\0\x08" + struct.pack(">HHHIHHI", 1, 0x0112, 3, 1, turn, 0, 0)
