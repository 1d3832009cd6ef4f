"""Files to pixels: turns, transparency, depths, animations; what is refused, and in which words."""

from __future__ import annotations

import builtins
import io
import pickle
import threading
import time
import warnings
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps, features

from bitnet_ops.errors import install
from bitnet_ops.vision import decode
from bitnet_ops.vision.decode import ImageLimits, decode_image, image_size, to_rgb
from bitnet_ops.vision.errors import ImageError
from pictures import exif, file_of, photograph, png, png_chunk


def pixels(data: bytes, limits: ImageLimits = decode.LIMITS) -> np.ndarray:
    image = decode_image(data, limits)
    assert image.mode == "RGB" and image_size(data, limits) == (image.height, image.width)
    return np.asarray(image)


def of_pillow(data: bytes) -> np.ndarray:
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats(kind: str) -> None:
    data = file_of(photograph(70, 90), kind)
    assert np.array_equal(pixels(data), of_pillow(data))
    assert "remark" not in decode_image(data).info


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
def test_avif_is_read_where_it_is_allowed() -> None:
    data = file_of(photograph(70, 90), "AVIF")
    with pytest.raises(ImageError, match="as PNG, JPEG, WEBP, GIF or BMP, got AVIF; save"):
        decode_image(data)
    limits = ImageLimits(formats=(*decode.FORMATS, "AVIF"))
    assert np.array_equal(pixels(data, limits), of_pillow(data))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_a_camera_is_turned(turn: int, kind: str) -> None:
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    data = file_of(photograph(40, 72), kind, exif=b"Exif\0\0" + exif(turn), **options)
    found = pixels(data)
    assert np.array_equal(found, of_pillow(data))
    assert found.shape == ((72, 40, 3) if turn > 4 else (40, 72, 3))
    if kind == "PNG":
        assert np.array_equal(found, turned(np.asarray(photograph(40, 72)), turn))


def turned(a: np.ndarray, turn: int) -> np.ndarray:
    """By EXIF's own words: where row 0 and column 0 of what is stored are seen."""
    seen = {1: a, 2: a[:, ::-1], 3: a[::-1, ::-1], 4: a[::-1]}
    flipped = a.transpose(1, 0, 2)
    seen |= {5: flipped, 6: flipped[:, ::-1], 7: flipped[::-1, ::-1], 8: flipped[::-1]}
    return seen[turn]


def test_a_turn_that_stands_behind_the_pixels() -> None:
    plain = np.asarray(photograph(4, 6))
    rows = b"".join(b"\0" + row.tobytes() for row in plain)
    data = png(6, 4, rows, behind=(png_chunk(b"eXIf", exif(6)),))
    assert image_size(data) == (6, 4)
    assert np.array_equal(pixels(data), of_pillow(data))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # Pillow's words
@pytest.mark.parametrize(
    "broken",
    [b"", b"MM\0*", b"MM\0*\0\0\0\x08\0\x09" + b"\xff" * 30, exif(9), exif(0)],
    ids=["empty", "short", "noise", "9", "0"],
)
def test_a_turn_that_cannot_be_read_is_none(broken: bytes) -> None:
    rows = b"".join(b"\0" + row.tobytes() for row in np.asarray(photograph(4, 6)))
    data = png(6, 4, rows, before=(png_chunk(b"eXIf", broken),))
    assert np.array_equal(pixels(data), np.asarray(photograph(4, 6)))


# Transparency -------------------------------------------------------------------------------------


def on_white(colour: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    a = alpha[..., None].astype(np.float64) / 255
    return colour * a + 255 * (1 - a)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_alpha_becomes_white(kind: str) -> None:
    colour = np.asarray(photograph(32, 40))
    alpha = np.linspace(0, 255, 32 * 40).astype(np.uint8).reshape(32, 40)
    image = Image.fromarray(np.dstack([colour, alpha]))
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    found = pixels(file_of(image, kind, **options))
    assert np.abs(found - on_white(colour, alpha)).max() < 1
    assert (found[0, 0] == 255).all()  # a hidden colour does not appear


def test_grey_with_alpha() -> None:
    grey = np.full((8, 8), 40, np.uint8)
    alpha = np.zeros((8, 8), np.uint8)
    alpha[:, 4:] = 255
    found = pixels(file_of(Image.fromarray(np.dstack([grey, alpha]), "LA")))
    assert (found[:, :4] == 255).all() and (found[:, 4:] == 40).all()


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_a_palette_with_a_clear_colour(kind: str) -> None:
    image = Image.new("P", (6, 2))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putdata([0, 1, 0, 1, 0, 1] * 2)
    found = pixels(file_of(image, kind, transparency=1))
    assert found[0].tolist() == [[10, 20, 30], [255, 255, 255]] * 3


def test_a_palette_with_alpha() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putdata([0, 1])
    found = pixels(file_of(image, transparency=bytes([255, 51])))
    assert found[0].tolist() == [[10, 20, 30], [244, 224, 214]]


@pytest.mark.parametrize("mode, clear", [("L", 9), ("RGB", (9, 9, 9)), ("1", 0)])
def test_one_clear_colour(mode: str, clear: Any) -> None:
    image = Image.new(mode, (2, 1), clear)
    image.putpixel((1, 0), 255 if mode in "L1" else (90, 80, 70))
    found = pixels(file_of(image, transparency=clear))
    assert found[0, 0].tolist() == [255] * 3
    assert found[0, 1].tolist() == ([255] * 3 if mode in "L1" else [90, 80, 70])


# Depths and colours -------------------------------------------------------------------------------


def test_grey_of_16_bits_keeps_its_brightness() -> None:
    values = np.array([0, 128, 129, 257, 300, 32_896, 40_000, 65_407, 65_535], ">u2")
    found = pixels(png(9, 1, b"\0" + values.tobytes(), depth=16, colour=0))
    expected = np.rint(values.astype(float) / 257)
    assert found[0, :, 0].tolist() == expected.tolist() and (found == found[..., :1]).all()
    clear = png_chunk(b"tRNS", b"\x9c\x40")
    again = png(9, 1, b"\0" + values.tobytes(), depth=16, colour=0, before=(clear,))
    assert pixels(again)[0, 6].tolist() == [255] * 3 and pixels(again)[0, 4, 0] == 1


@pytest.mark.parametrize("colour, channels", [(2, 3), (6, 4), (4, 2)])
def test_other_pictures_of_16_bits(colour: int, channels: int) -> None:
    row = np.full((2, channels), 0x8040, ">u2")
    row[:, -1] = 0xFFFF if channels % 2 == 0 else 0x8040
    found = pixels(png(2, 1, b"\0" + row.tobytes(), depth=16, colour=colour))
    assert found[0, 0].tolist() == [128] * 3


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK"])
def test_other_modes(mode: str) -> None:
    image = photograph(30, 40).convert(mode)
    data = file_of(image, "JPEG" if mode == "CMYK" else "PNG")
    assert np.array_equal(pixels(data), of_pillow(data))


def test_a_cmyk_of_adobe_is_not_inverted() -> None:
    data = file_of(Image.new("CMYK", (32, 32), (0, 200, 200, 0)), "JPEG", quality=95)
    red, green, blue = pixels(data)[16, 16].astype(int)
    assert red > 245 and abs(green - 55) < 8 and abs(blue - 55) < 8


@pytest.mark.parametrize("mode", ["F", "LAB", "HSV"])
def test_modes_without_a_known_white(mode: str) -> None:
    with pytest.raises(ImageError, match=f"got mode {mode}; convert it to RGB"):
        to_rgb(Image.new(mode, (4, 4)))


def test_numbers_of_32_bits() -> None:
    image = Image.new("I", (2, 1), 40_000)
    assert np.asarray(to_rgb(image))[0, 0].tolist() == [156] * 3
    image.putpixel((0, 0), 70_000)
    with pytest.raises(ImageError, match="grey values of 16 bits, got values beyond"):
        to_rgb(image)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_first_frame(kind: str) -> None:
    frames = [photograph(20, 30, seed=seed) for seed in range(3)]
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    data = file_of(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    image = decode_image(data)
    assert image.info["remark"] == f"only the first picture of this {kind} was read"
    assert np.array_equal(np.asarray(image), of_pillow(data))
    if kind != "GIF":
        assert np.array_equal(np.asarray(image), np.asarray(frames[0]))


# Limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("part", [0.97, 0.5, 0.1])
def test_a_file_that_is_cut_off(kind: str, part: float) -> None:
    data = file_of(photograph(120, 160), kind)
    with pytest.raises(ImageError, match="image: expected a whole picture, got one that cannot"):
        decode_image(data[: int(len(data) * part)])


def test_the_most_pixels_and_bytes() -> None:
    data = file_of(photograph(20, 30))
    assert image_size(data, ImageLimits(max_pixels=600, max_bytes=len(data))) == (20, 30)
    with pytest.raises(ImageError, match="at most 599 pixels, got 30 x 20; send a sm"):
        decode_image(data, ImageLimits(max_pixels=599))
    with pytest.raises(ImageError, match=r"at most [\d.]+ MB, got [\d.]+ MB; send a smaller"):
        image_size(data, ImageLimits(max_bytes=len(data) - 1))


def test_aspects() -> None:
    assert image_size(file_of(Image.new("RGB", (400, 2)))) == (2, 400)
    with pytest.raises(ImageError, match="one side at most 200 times the other, got 401 x 2"):
        image_size(file_of(Image.new("RGB", (401, 2))))


def test_settings_of_pillow_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program's limit neither hinders nor is changed; nothing warns."""
    data = file_of(photograph(20, 30))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode_image(data).size == (30, 20)
    assert Image.MAX_IMAGE_PIXELS == 10


@pytest.mark.parametrize(
    "values, message",
    [
        ({"max_pixels": 0}, "expected max_pixels as an integer from 1 to"),
        ({"max_tokens": 20_000}, "expected max_tokens as an integer from 1 to 16384, got 20000"),
        ({"max_bytes": True}, "expected max_bytes as an integer above 0, got True"),
        ({"formats": ("PNG", "EPS")}, "expected formats out of PNG, .*AVIF, got"),
        ({"formats": ()}, "expected formats out of"),
    ],
)
def test_limits_that_make_no_sense(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageLimits(**values)


def test_limits_of_a_request() -> None:
    limits = ImageLimits(max_images=2, max_total_tokens=100)
    limits.check_count(2)
    limits.check_total(100)
    with pytest.raises(ImageError, match="images: expected at most 2 in a request, got 3; send"):
        limits.check_count(3)
    with pytest.raises(ImageError, match="at most 100 tokens of pictures in a request, got 101"):
        limits.check_total(101)


def test_two_decode_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_of(photograph(20, 30))
    running, most = 0, 0
    lock = threading.Lock()
    convert = decode.to_rgb

    def slowly(image: Image.Image) -> Image.Image:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return convert(image)

    monkeypatch.setattr(decode, "to_rgb", slowly)
    threads = [threading.Thread(target=decode_image, args=(data,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 2 and running == 0


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_of(photograph(20, 30))
    given = builtins.__import__

    def missing(name: str, *args: Any, **more: Any) -> Any:
        if name == "PIL" or name.startswith("PIL."):
            raise ImportError(name)
        return given(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    for call in (decode_image, image_size):
        with pytest.raises(ImageError) as caught:
            call(data)
        expected = (
            f"image: expected Pillow to read pictures with, got none; run: {install('vision')}"
        )
        assert str(caught.value) == expected


def test_an_error_says_where() -> None:
    error = ImageError("a picture", "none", "send one").at("messages[0].content[1]")
    assert str(error) == "messages[0].content[1]: expected a picture, got none; send one"
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.at("x").remedy == "send one"
