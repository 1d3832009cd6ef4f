"""A picture's file to RGB pixels, with Pillow, as Qwen's models were trained on them.

The camera's turn is applied, what is transparent becomes white, 16 bits become 8, colour profiles
are ignored, an animation is its first frame. Nothing here changes a setting of Pillow: programs
that use Pillow beside this package keep theirs.
"""

from __future__ import annotations

import importlib
import io
import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bitnet_ops.arguments import check_integer
from bitnet_ops.errors import install
from bitnet_ops.vision.containers import Container, container_of
from bitnet_ops.vision.errors import ImageError

if TYPE_CHECKING:
    from PIL import Image

# Those that cameras, screens and browsers make. AVIF: not every Pillow reads it, and its decoders
# are larger than all others together; an operator may add it.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_ASPECT = 200  # of the longer side to the shorter one: the models' own limit
_ORIENTATION = 0x0112  # EXIF
_READERS = {  # modules of Pillow, and what opens a file there
    "PNG": ("PngImagePlugin", "PngImageFile"),
    "JPEG": ("JpegImagePlugin", "jpeg_factory"),
    "WEBP": ("WebPImagePlugin", "WebPImageFile"),
    "GIF": ("GifImagePlugin", "GifImageFile"),
    "BMP": ("BmpImagePlugin", "BmpImageFile"),
    "AVIF": ("AvifImagePlugin", "AvifImageFile"),
}
_WHITE = (255, 255, 255)
_GREY16 = ("I;16", "I;16B", "I;16L", "I;16N")
_PLAIN = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK")
_MEGA = 1_000_000
_STRIP = 256  # rows
# A decode may take half a gigabyte: two at a time, whoever asks.
_DECODES = threading.BoundedSemaphore(2)


@dataclass(frozen=True)
class ImageLimits:
    """What pictures may cost.

    max_bytes: of a file. max_pixels: of a picture before it is resized. formats: those that are
    read; "AVIF" may be added. max_images: of a request. max_tokens: of a picture, which is resized
    to have no more. max_total_tokens: of all pictures of a request.

    Raises ValueError for values that make no sense.
    """

    max_bytes: int = 16 << 20
    max_pixels: int = 64 * _MEGA
    formats: tuple[str, ...] = FORMATS
    max_images: int = 16
    max_tokens: int = 1024
    max_total_tokens: int = 16_384

    def __post_init__(self) -> None:
        most = {"max_pixels": 256 * _MEGA, "max_tokens": 16_384}
        for name in ("max_bytes", "max_pixels", "max_images", "max_tokens", "max_total_tokens"):
            check_integer(f"images: expected {name} as", getattr(self, name), 1, most.get(name))
        unknown = [name for name in self.formats if name not in _READERS]
        if unknown or not self.formats or not isinstance(self.formats, tuple):
            known = ", ".join(_READERS)
            raise ValueError(f"images: expected formats out of {known}, got {self.formats}")

    def check_count(self, count: int) -> None:
        """Raise ImageError if a request has more than so many pictures."""
        if count > self.max_images:
            got = str(count)
            raise ImageError(f"at most {self.max_images} in a request", got, "send fewer", "images")

    def check_total(self, tokens: int) -> None:
        """Raise ImageError if the pictures of a request have more tokens than they may have."""
        if tokens > self.max_total_tokens:
            expected = f"at most {self.max_total_tokens} tokens of pictures in a request"
            raise ImageError(expected, str(tokens), "send fewer or smaller pictures", "images")


LIMITS = ImageLimits()


def image_size(data: bytes, limits: ImageLimits = LIMITS) -> tuple[int, int]:
    """(height, width) in pixels of the picture that `decode_image` would give, from its header.

    Raises ImageError as `decode_image` does, but for what only its pixels show.
    """
    container, image = _open(data, limits)
    with image:
        width, height = image.size
        return (width, height) if _turn(image, container) > 4 else (height, width)


def decode_image(data: bytes, limits: ImageLimits = LIMITS) -> Image.Image:
    """The picture in a file's bytes as RGB, 8 bits, turned as the camera was held.

    `.info["remark"]` of the result is there if something was left out: the frames of an animation
    but for the first. Two pictures are decoded at the same time; more calls wait.

    Raises ImageError: for files of other kinds, too many bytes or pixels, one side more than 200
    times the other, files that are cut off or broken; and where Pillow is not installed.
    """
    with _DECODES:
        container, result, several = _decoded(data, limits)
    remark = f"only the first picture of this {container.format} was read"
    result.info = {"remark": remark} if several else {}
    return result


def _decoded(data: bytes, limits: ImageLimits) -> tuple[Container, Image.Image, bool]:
    """The picture, turned; whether its file holds more."""
    container, image = _open(data, limits)
    with image:
        turn = _turn(image, container)
        several = container.several or bool(
            container.format != "GIF" and getattr(image, "is_animated", False)
        )
        try:
            image.load()
            result = to_rgb(image)
            if result is not image:
                image.close()  # before another copy is made
            result = _turned(result, turn)
        except ImageError:
            raise
        except Exception as error:
            raise _unreadable(error) from None
    return container, result, several


def to_rgb(image: Image.Image) -> Image.Image:
    """A Pillow image as RGB: what is transparent becomes white, 16 bits become 8.

    Raises ImageError for modes whose white is not known: floating point, 32 bits, LAB.
    """
    pillow = _pillow()
    if image.mode in (*_GREY16, "I"):
        return _from_grey16(image)
    if image.mode not in _PLAIN:
        expected = "a picture of 8 or 16 bits in grey, RGB, CMYK or a palette"
        raise ImageError(expected, f"mode {image.mode}", "convert it to RGB")
    clear = "transparency" in image.info or image.mode in ("LA", "La", "PA", "RGBA", "RGBa")
    if not clear or image.mode == "CMYK":
        return image if image.mode == "RGB" else image.convert("RGB")
    result = pillow.new("RGB", image.size, _WHITE)
    for top in range(0, image.height, _STRIP):  # a large one would be in memory once more
        box = (0, top, image.width, min(top + _STRIP, image.height))
        strip = image.crop(box).convert("RGBA")
        result.paste(strip, box, strip.getchannel("A"))
    return result


def _from_grey16(image: Image.Image) -> Image.Image:
    import numpy as np

    pixels = np.asarray(image)
    if image.mode == "I" and (int(pixels.min()) < 0 or int(pixels.max()) > 0xFFFF):
        expected = "grey values of 16 bits"
        raise ImageError(expected, "values beyond", "convert it to RGB")
    table = ((np.arange(1 << 16) + 128) // 257).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int) and 0 <= clear < len(table):
        table[clear] = 255
    return _pillow().fromarray(table[pixels]).convert("RGB")


# Opening ------------------------------------------------------------------------------------------


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ImageError(
            "Pillow to read pictures with", "none", f"run: {install('vision')}"
        ) from None
    return Image


def _reader(name: str) -> Any:
    """What opens files of a format: its class, for `Image.open` has limits that are global."""
    module = importlib.import_module(f"PIL.{_READERS[name][0]}")
    return getattr(module, _READERS[name][1])


def _open(data: bytes, limits: ImageLimits) -> tuple[Container, Any]:
    """The structure and Pillow's view of a file, nothing decoded yet; its size is checked."""
    if len(data) > limits.max_bytes:
        expected = f"at most {_mega(limits.max_bytes)} MB"
        raise ImageError(expected, f"{_mega(len(data))} MB", "send a smaller picture")
    container = container_of(data, limits.formats)
    _pillow()
    if container.size is not None:
        _check_size(container.size, limits)
    try:
        image = _reader(container.format)(io.BytesIO(data), "")
    except Exception as error:
        raise _unreadable(error) from None
    try:
        _check_size(image.size, limits)
    except ImageError:
        image.close()
        raise
    return container, image


def _mega(count: int) -> str:
    """Millions of `count`, rounded up in the third digit so that a limit is seen to be passed."""
    return f"{math.ceil(count / 10_000) / 100:g}"


def _check_size(size: tuple[int, int], limits: ImageLimits) -> None:
    width, height = size
    found = f"{width} x {height}"
    if width < 1 or height < 1:
        raise ImageError("a picture of one pixel at least", found, "send another one")
    if width * height > limits.max_pixels:
        expected = f"at most {limits.max_pixels:,} pixels"
        raise ImageError(expected, found, "send a smaller picture")
    if max(width, height) > MAX_ASPECT * min(width, height):
        expected = f"one side at most {MAX_ASPECT} times the other"
        raise ImageError(expected, found, "crop the picture")


def _unreadable(error: Exception) -> ImageError:
    words = "no memory for it" if isinstance(error, MemoryError) else str(error)[:200]
    got = f"one that cannot be read ({words or type(error).__name__})"
    return ImageError("a whole picture", got, "save it again as PNG or JPEG")


# Turning ------------------------------------------------------------------------------------------


def _turn(image: Any, container: Container) -> int:
    """The EXIF orientation, 1 to 8; 1 where there is none, or none that can be read."""
    from PIL import Image

    try:
        if container.late_exif and "exif" not in image.info:
            image.info["exif"] = b"Exif\0\0" + container.late_exif
        # not PngImageFile.getexif, which decodes the pixels first
        found = Image.Image.getexif(image).get(_ORIENTATION, 1)
    except Exception:
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _turned(image: Image.Image, turn: int) -> Image.Image:
    from PIL.Image import Transpose

    steps = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(steps[turn]) if turn in steps else image
