"""Files made to do harm: an error each, in little time and memory, and the process goes on."""

from __future__ import annotations

import base64
import functools
import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pictures import exif, file_of, photograph, png, png_chunk

PHOTO = photograph(60, 80)
MEMORY_MB = 100  # for files of up to 16 MB
CPU_S = 3.0  # on a busy machine; most take a millisecond

CHILD = """
import json, sys, time
from pathlib import Path
from bitnet_ops.vision.decode import decode_image, image_size
from bitnet_ops.vision.errors import ImageError
from bitnet_ops.vision.sources import image_bytes

def memory(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024

def outcome(call):
    try:
        found = call()
        return list(getattr(found, "size", found))
    except ImageError as error:
        return str(error)

good = (Path(sys.argv[1]) / "good").read_bytes()
for path in sorted(Path(sys.argv[1]).iterdir()):
    decode_image(good)
    data = path.read_bytes()
    text = path.name == "a long data URI" and data.decode()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = memory("VmRSS"), time.process_time()
    if text:
        decoded = sized = outcome(lambda: image_bytes(text))
    else:
        sized = outcome(lambda: image_size(data))
        decoded = outcome(lambda: decode_image(data))
    more, spent = memory("VmHWM") - before, time.process_time() - began
    print(json.dumps([path.name, sized, decoded, more, spent]))
    del data, text
"""


@functools.cache
def zeros(count: int = 1 << 28) -> bytes:
    """Compressed zeros of so many bytes: a thousandth of them."""
    return zlib.compress(bytes(count))


def png_before(kind: bytes, data: bytes) -> bytes:
    """A good PNG with one more chunk."""
    return png(80, 60, rows_of(PHOTO), before=(png_chunk(kind, data),))


def flat_png(width: int, height: int, colour: int = 0) -> bytes:
    """A PNG of one grey, its rows of one bit each."""
    row = b"\0" + bytes((width + 7) // 8)
    packer = zlib.compressobj(9)
    pixels = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 1, colour, 0, 0, 0)
    chunks = png_chunk(b"IHDR", head) + png_chunk(b"IDAT", pixels) + png_chunk(b"IEND")
    return b"\x89PNG\r\n\x1a\n" + chunks


def rows_of(image: Image.Image) -> bytes:
    return b"".join(b"\0" + row.tobytes() for row in np.asarray(image))


def jpeg_of_size(width: int, height: int) -> bytes:
    data = bytearray(file_of(PHOTO, "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def jpeg_of_scans(count: int) -> bytes:
    data = file_of(PHOTO, "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * count + data[-2:]


def jpeg_with(segments: bytes) -> bytes:
    data = file_of(PHOTO, "JPEG")
    return data[:2] + segments + data[2:]


def webp_of_size(width: int, height: int) -> bytes:
    data = file_of(PHOTO.convert("RGBA"), "WEBP", exif=b"Exif\0\0" + exif(1))
    assert data[12:16] == b"VP8X"
    size = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    return data[:24] + size + data[30:]


def bmp_of_size(width: int, height: int, compression: int = 0) -> bytes:
    data = bytearray(file_of(PHOTO, "BMP"))
    data[18:26] = struct.pack("<ii", width, height)
    data[30:34] = struct.pack("<I", compression)
    return bytes(data)


def gif_of_size(width: int, height: int) -> bytes:
    data = file_of(PHOTO, "GIF")
    return data[:6] + struct.pack("<HH", width, height) + data[10:]


def gif_with_block(blocks: bytes) -> bytes:
    data = file_of(PHOTO, "GIF")
    start = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    return data[:start] + b"!\xfe" + blocks + b"\0" + data[start:]


def gif_of_frames(count: int) -> bytes:
    data = file_of(Image.new("P", (1, 1)), "GIF")
    start = data.index(b",", 13)
    return data[:start] + data[start:-1] * count + b";"


SVG = b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/>"
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/tmp/pwned) (w) file\n"
NO_READING = "expected a whole picture, got one that cannot be read"
KINDS = "expected a picture as PNG, JPEG, WEBP, GIF or BMP, got "
PIXELS = "expected at most 64,000,000 pixels, got "
ASPECT = "expected one side at most 200 times the other, got "

REFUSED: dict[str, tuple[Any, str]] = {
    "png 20000x20000": (lambda: flat_png(20_000, 20_000), PIXELS + "20000 x 20000; send a small"),
    "png 12000x12000": (lambda: flat_png(12_000, 12_000), PIXELS + "12000 x 12000"),
    "png 2^31-1": (lambda: png(2**31 - 1, 2**31 - 1, b""), PIXELS),
    "png of no width": (lambda: png(0, 5, b""), NO_READING),
    "jpeg 65500x65500": (lambda: jpeg_of_size(65_500, 65_500), PIXELS + "65500 x 65500"),
    "webp 2^24": (lambda: webp_of_size(1 << 24, 1 << 24), PIXELS + "16777216 x 16777216"),
    "webp 15000x15000": (lambda: webp_of_size(15_000, 15_000), PIXELS + "15000 x 15000"),
    "bmp 2^31": (lambda: bmp_of_size(2**31 - 1, -(2**31)), PIXELS),
    "gif 65535x65535": (lambda: gif_of_size(65_535, 65_535), PIXELS + "65535 x 65535"),
    "png 30000x1": (lambda: flat_png(30_000, 1), ASPECT + "30000 x 1; crop the picture"),
    "bmp of run lengths": (
        lambda: bmp_of_size(8000, 8000, 1),
        "expected a BMP without run lengths",
    ),
    "png of many chunks": (
        lambda: png(80, 60, rows_of(PHOTO), before=(png_chunk(b"teXt") * 1_300_000,)),
        "expected a PNG of at most 20000 chunks, got more",
    ),
    "png text bomb": (
        lambda: png(
            80, 60, rows_of(PHOTO), before=(png_chunk(b"zTXt", b"a\0\0" + zeros(1 << 30)),)
        ),
        NO_READING,
    ),
    "jpeg of scans": (lambda: jpeg_of_scans(500), "expected a JPEG of at most 100 scans, got more"),
    "jpeg of many segments": (
        lambda: jpeg_with(b"\xff\xe1\0\x09Exif\0\0x" * 1_000_000),
        "expected a JPEG of at most 2000 segments, got more",
    ),
    "jpeg of noise between": (
        lambda: jpeg_with(b"\xff\xfe\0\2" + bytes(15_000_000)),
        "expected a JPEG of segments, got other bytes between them",
    ),
    "gif of many blocks": (
        lambda: gif_with_block(b"\1a" * 7_000_000),
        "expected a GIF of at most 20000 blocks before its picture, got more",
    ),
    "png cut off": (lambda: file_of(PHOTO)[:-100], NO_READING),
    "jpeg cut off": (lambda: file_of(PHOTO, "JPEG")[:-100], NO_READING),
    "webp cut off": (lambda: file_of(PHOTO, "WEBP")[:-100], NO_READING),
    "gif cut off": (lambda: file_of(PHOTO, "GIF")[:-100], NO_READING),
    "bmp cut off": (lambda: file_of(PHOTO, "BMP")[:-100], NO_READING),
    "webp of another size inside": (lambda: webp_of_size(30, 30), NO_READING),
    "png with a wrong checksum": (
        lambda: file_of(PHOTO).replace(b"IDAT", b"IDAT\x01", 1),
        NO_READING,
    ),
    "a signature alone": (lambda: b"\x89PNG\r\n\x1a\n" + bytes(99), NO_READING),
    "a marker alone": (lambda: b"\xff\xd8\xff", NO_READING),
    "eps": (lambda: EPS, KINDS + "EPS; save the picture again as PNG or JPEG"),
    "svg": (lambda: SVG, KINDS + "SVG"),
    "html": (lambda: b"<!DOCTYPE html><script>1</script>", KINDS + "a page"),
    "pdf": (lambda: b"%PDF-1.7\n", KINDS + "PDF"),
    "tiff": (lambda: file_of(PHOTO, "TIFF"), KINDS + "TIFF"),
    "tiff of floats": (lambda: file_of(PHOTO.convert("F"), "TIFF"), KINDS + "TIFF"),
    "ico": (lambda: file_of(PHOTO, "ICO"), KINDS + "ICO"),
    "heic": (lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", KINDS + "HEIC"),
    "a video": (lambda: b"\0\0\0\x18ftypisom\0\0\0\0isommp42", KINDS + "a video"),
    "psd": (lambda: b"8BPS\0\1" + bytes(99), KINDS + "PSD"),
    "noise": (lambda: np.random.default_rng(0).bytes(1 << 20), KINDS + "a file of no known kind"),
    "nothing": (lambda: b"", KINDS + "an empty file"),
    "too many bytes": (lambda: bytes(17 << 20), "expected at most 16.78 MB, got 17.83 MB; send a"),
    "a long data URI": (
        lambda: b"data:image/png;base64," + base64.b64encode(bytes(17 << 20)),
        "expected at most 16.78 MB of a picture, got more",
    ),
}
TAKEN: dict[str, tuple[Any, list[int]]] = {
    "good": (lambda: file_of(PHOTO), [80, 60]),
    "png 1x1": (lambda: flat_png(1, 1), [1, 1]),
    "cmyk": (lambda: file_of(PHOTO.convert("CMYK"), "JPEG"), [80, 60]),
    "gif of 100000 frames": (lambda: gif_of_frames(100_000), [1, 1]),
    "png with pixels to spare": (
        lambda: (
            png(10, 10, bytes(310)).replace(b"IEND", b"IEND")[:33]
            + png_chunk(b"IDAT", zeros(1 << 30))
            + png_chunk(b"IEND")
        ),
        [10, 10],
    ),
    "png with a long turn": (
        lambda: png_before(b"eXIf", exif(6) + bytes(9 << 20)),
        [60, 80],
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Of every file, in one process one after the other."""
    folder = tmp_path_factory.mktemp("files")
    for name, (make, _) in (REFUSED | TAKEN).items():
        (folder / name).write_bytes(make())
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stderr == ""  # no warnings either
    found = [json.loads(line) for line in run.stdout.splitlines()]
    return {name: rest for name, *rest in found}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, outcomes: dict[str, list[Any]]) -> None:
    sized, decoded, memory, seconds = outcomes[name]
    expected = REFUSED[name][1]
    assert isinstance(decoded, str) and decoded.startswith(f"image: {expected}"), decoded
    assert "; " in decoded and "\n" not in decoded and len(decoded) < 400
    if isinstance(sized, str) and expected != NO_READING:
        assert sized == decoded
    assert memory < MEMORY_MB and seconds < CPU_S, (memory, seconds)


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str, outcomes: dict[str, list[Any]]) -> None:
    sized, decoded, memory, seconds = outcomes[name]
    assert decoded == TAKEN[name][1] and sized == decoded[::-1]
    assert memory < MEMORY_MB and seconds < CPU_S, (memory, seconds)


def test_the_memory_of_the_largest_picture(tmp_path: Path) -> None:
    """64 million pixels, transparent: 4 bytes each of the file's image and of the result."""
    image = Image.new("LA", (8000, 8000), (90, 200))
    (tmp_path / "good").write_bytes(file_of(PHOTO))
    (tmp_path / "large").write_bytes(file_of(image, compress_level=1))
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-900:]
    _, _, decoded, memory, _ = json.loads(run.stdout.splitlines()[1])
    assert decoded == [8000, 8000] and 400 < memory < 600
