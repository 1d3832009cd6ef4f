"""What a picture's file is, and whether reading it is bounded: looked at before a decoder sees it.

A decoder's work follows from the number of pixels, which is limited, but for what stands here: a
file of a few megabytes can hold a million chunks, segments that are joined one by one, or a hundred
thousand passes over all pixels. Files that programs write have a hundredth of these limits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bitnet_ops.vision.errors import ImageError

_PNG = b"\x89PNG\r\n\x1a\n"
_MAX_CHUNKS = 20_000  # of a PNG; writers make chunks of 8 KiB
_MAX_SEGMENTS = 2_000  # of a JPEG, each of at most 64 KiB
_MAX_SCANS = 100  # of a JPEG; progressive files have about ten
_MAX_JUNK = 1 << 16  # bytes between the segments of a JPEG
_MAX_BLOCKS = 20_000  # of a GIF's extensions before its first picture, each of at most 255 bytes
_MAX_DATA_BLOCKS = 200_000  # of that picture, looked through for another one behind it
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # of a JPEG, inside its compressed data too
_SAVE_AGAIN = "save the picture again as PNG or JPEG"


@dataclass(frozen=True)
class Container:
    """What the structure of a file says.

    format: as Pillow calls it. size: (width, height) of a WEBP, which has to be known before its
    decoder takes memory. several: a GIF with a second picture. late_exif: what a PNG has of EXIF
    behind its pixels.
    """

    format: str
    size: tuple[int, int] | None = None
    several: bool = False
    late_exif: bytes = b""


def container_of(data: bytes, formats: tuple[str, ...]) -> Container:
    """What kind of file `data` is; ImageError unless it is one of `formats`, and bounded."""
    found = _format_of(data)
    if found not in formats:
        allowed = " or ".join(filter(None, [", ".join(formats[:-1]), formats[-1]]))
        raise ImageError(f"a picture as {allowed}", found or "a file of no known kind", _SAVE_AGAIN)
    if found == "PNG":
        return Container(found, late_exif=_walk_png(data))
    if found == "JPEG":
        _walk_jpeg(data)
    elif found == "WEBP":
        return Container(found, size=_webp_size(data))
    elif found == "GIF":
        return Container(found, several=_walk_gif(data))
    elif found == "BMP" and data[30:34] in (b"\1\0\0\0", b"\2\0\0\0"):
        _refuse("a BMP without run lengths", "one with")
    return Container(found)


# Kinds --------------------------------------------------------------------------------------------

_MAGIC = (
    (_PNG, "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    # known in order to be named
    (b"%!PS", "EPS"),
    (b"\xc5\xd0\xd3\xc6", "EPS"),
    (b"%PDF", "PDF"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"8BPS", "PSD"),
    (b"\0\0\1\0", "ICO"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
)
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIC"}


def _format_of(data: bytes) -> str:
    """Pillow's name of the format, or a name for people; empty if it is not known."""
    for magic, name in _MAGIC:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp":
        brands = [data[8:12], *(data[at : at + 4] for at in range(16, 48, 4))]
        kinds = [_BRANDS[brand] for brand in brands if brand in _BRANDS]
        return "AVIF" if "AVIF" in kinds else kinds[0] if kinds else "a video"
    text = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"<"):
        return "SVG" if b"<svg" in text else "a page (HTML or XML)"
    return "" if data else "an empty file"


def _refuse(expected: str, got: str) -> None:
    raise ImageError(expected, got, _SAVE_AGAIN)


# Walks --------------------------------------------------------------------------------------------


def _walk_png(data: bytes) -> bytes:
    """Count the chunks; the EXIF chunk behind the pixels, if there is one."""
    at, pixels, exif = len(_PNG), False, b""
    for _ in range(_MAX_CHUNKS):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if len(kind) < 4 or kind == b"IEND":
            return exif
        pixels = pixels or kind == b"IDAT"
        if kind == b"eXIf" and pixels:
            exif = data[at + 8 : at + 8 + length]
        at += 12 + length
    _refuse(f"a PNG of at most {_MAX_CHUNKS} chunks", "more")
    return exif


def _walk_jpeg(data: bytes) -> None:
    """Count segments and scans up to the end of the first picture."""
    at, junk, scans = 2, 0, 0
    for _ in range(_MAX_SEGMENTS):
        found = _MARKER.search(data, at)
        if found is None:
            return
        if not scans:
            junk += found.start() - at
            if junk > _MAX_JUNK:
                _refuse("a JPEG of segments", "other bytes between them")
        marker, at = data[found.end() - 1], found.end()
        if marker == 0xD9:
            return
        if marker == 0xDA:
            scans += 1
            if scans > _MAX_SCANS:
                _refuse(f"a JPEG of at most {_MAX_SCANS} scans", "more")
        if marker not in (0x01, 0xD8):  # which have no length
            at += int.from_bytes(data[at : at + 2], "big")
    _refuse(f"a JPEG of at most {_MAX_SEGMENTS} segments", "more")


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """(width, height) as the header has them; None where it is no header."""
    kind = data[12:16]
    if len(data) < 30:
        return None
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
        return width + 1, height + 1
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, ((bits >> 14) & 0x3FFF) + 1
    width, height = (int.from_bytes(data[at : at + 2], "little") for at in (26, 28))
    return width & 0x3FFF, height & 0x3FFF


def _walk_gif(data: bytes) -> bool:
    """Count the blocks before the first picture; whether there is a second one."""
    at, blocks, pictures = 13, 0, 0
    if len(data) > at and data[10] & 0x80:
        at += 3 << (data[10] & 7) + 1
    inside = False  # a row of blocks, which an empty one ends
    while at < len(data):
        blocks += 1
        if blocks > (_MAX_DATA_BLOCKS if pictures else _MAX_BLOCKS):
            if not pictures:
                _refuse(f"a GIF of at most {_MAX_BLOCKS} blocks before its picture", "more")
            return False
        kind = data[at]
        if inside:
            inside = kind > 0
            at += 1 + kind
        elif kind == 0x2C:
            pictures += 1
            if pictures == 2:
                return True
            flags = data[at + 9] if at + 9 < len(data) else 0
            at += 11 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
            inside = True
        elif kind == 0x21:
            at, inside = at + 2, True
        elif kind == 0x3B:
            return False
        else:
            at += 1
    return False
