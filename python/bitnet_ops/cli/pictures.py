"""Pictures on the command line: the options of generate, chat and serve, and files that are named.

Pictures of the machine's own user need no limits but those of one picture: the model's context
limits how many there are.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet_ops.cli.arguments import UsageError, integer, non_empty
from bitnet_ops.cli.terminal import say
from bitnet_ops.errors import install

if TYPE_CHECKING:
    from bitnet_ops.generate.pictures import Picture
    from bitnet_ops.language_model import LanguageModel
    from bitnet_ops.vision.decode import ImageLimits

_TOKENS, _MAX_TOKENS = 1024, 16_384  # of one picture
_MANY = 100_000  # pictures and their tokens, where the user's own are read


def add_picture_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """--mmproj, --no-vision and --image-max-tokens; the group, for what a command adds."""
    group = parser.add_argument_group("pictures")
    add_vision_arguments(group)
    return group


def add_image(group: argparse._ArgumentGroup, help: str) -> None:
    group.add_argument(
        "--image", action="append", default=[], type=non_empty, metavar="FILE", help=help
    )


def add_vision_arguments(group: argparse._ArgumentGroup) -> None:
    add: Any = group.add_argument
    add("--no-vision", dest="vision", action="store_false", help="read texts alone")
    add(
        "--image-max-tokens",
        type=integer(1, _MAX_TOKENS),
        default=_TOKENS,
        metavar="N",
        help=f"a larger picture is made smaller (default {_TOKENS}; text in it wants 2048)",
    )
    add(
        "--mmproj",
        type=non_empty,
        metavar="FILE",
        help="the tower of a model that is converted now (default: its own, or beside it)",
    )


def check_picture_arguments(args: argparse.Namespace) -> None:
    """Reject options that contradict each other."""
    if args.vision:
        return
    for option, given in (("--image", getattr(args, "image", ())), ("--mmproj", args.mmproj)):
        if given:
            raise UsageError(
                f"{args.command}: expected {option} or --no-vision, got both; choose one of them"
            )


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `load` is given; nothing for a command without pictures."""
    if not hasattr(args, "vision"):
        return {}
    return {"vision": args.vision, "image_limits": image_limits(args), "mmproj": args.mmproj}


def image_limits(args: argparse.Namespace) -> ImageLimits:
    """Of one picture the usual ones; of a request's what serve was told."""
    from bitnet_ops.vision.decode import ImageLimits

    images = getattr(args, "images_per_request", _MANY)
    if images is None:
        return ImageLimits(max_tokens=args.image_max_tokens)
    return ImageLimits(
        max_tokens=args.image_max_tokens,
        max_images=images,
        max_total_tokens=images * args.image_max_tokens,
    )


def read_pictures(args: argparse.Namespace) -> list[Picture]:
    """The files of --image, before a model is loaded; raises ImageError, which names the file."""
    return [read_picture(file, image_limits(args)) for file in args.image]


def read_picture(file: str, limits: ImageLimits) -> Picture:
    """A whole picture, for what is wrong with it is better said at once.

    A remark on what is left out of it goes to stderr.
    """
    from bitnet_ops.generate.images import picture_file
    from bitnet_ops.vision.decode import decode_image
    from bitnet_ops.vision.errors import ImageError

    picture = picture_file(Path(file).expanduser(), limits)
    try:
        remark = decode_image(picture.data, limits).info.get("remark")
    except ImageError as error:
        raise error.at(file) from None
    if remark:
        say(f"note: {file}: {remark}")
    return picture


def require_tower(lm: LanguageModel) -> None:
    """Raises ImageError for a model that reads texts alone."""
    from bitnet_ops.generate.images import NO_TOWER
    from bitnet_ops.vision.errors import ImageError

    if lm.images is None:
        raise ImageError(*NO_TOWER)


def about(lm: LanguageModel, picture: Picture) -> dict[str, Any]:
    """Its file, its size in pixels, and how many tokens it takes, those around it included."""
    from bitnet_ops.vision.decode import image_size

    assert lm.images is not None
    height, width = image_size(picture.data, lm.images.limits)
    rows, columns = lm.images.grid(picture)
    tokens = rows * columns + len(lm.images.token_ids) - 1
    return {"file": picture.where, "width": width, "height": height, "tokens": tokens}


def told(found: dict[str, Any]) -> str:
    """`about` for people."""
    name = Path(found["file"]).name
    return f"{name}: {found['width']} x {found['height']} pixels, {found['tokens']} tokens"


# Contents of messages ----------------------------------------------------------------------------


def pictures_of(content: Any) -> list[Picture]:
    """Those of a message's content, which is a text or a list of parts."""
    parts = content if isinstance(content, list) else []
    return [part["image"] for part in parts if part["type"] == "image"]


def text_of(content: Any) -> str:
    """The text of a content, with `[picture: cat.png, 640 x 480]` in the place of pictures."""
    if isinstance(content, str):
        return content
    return "\n".join(
        _label(part["image"]) if part["type"] == "image" else part["text"] for part in content
    )


def _label(picture: Picture) -> str:
    from bitnet_ops.vision.decode import image_size
    from bitnet_ops.vision.errors import ImageError

    name = Path(picture.where).name
    try:
        height, width = image_size(picture.data)
    except ImageError:  # it was read under other limits
        return f"[picture: {name}]"
    return f"[picture: {name}, {width} x {height}]"


def to_json(content: Any) -> Any:
    """A content as /v1/chat/completions reads it: pictures in base64, and their files' names."""
    if isinstance(content, str):
        return content
    return [_part_to_json(part) for part in content]


def _part_to_json(part: Mapping[str, Any]) -> dict[str, Any]:
    from bitnet_ops.vision.containers import container_of
    from bitnet_ops.vision.decode import FORMATS

    if part["type"] != "image":
        return {"type": "text", "text": part["text"]}
    picture: Picture = part["image"]
    kind = container_of(picture.data, FORMATS).format.lower()
    data = base64.b64encode(picture.data).decode()
    url = f"data:image/{kind};base64,{data}"
    return {
        "type": "image_url", "image_url": {"url": url}, "name": Path(picture.where).name,
    }  # fmt: skip


def from_json(content: Any, pictures: bool, limits: ImageLimits, where: str) -> Any:
    """A content that `to_json` gave; None for another. `pictures`: whether it may have some.

    Raises ImageError for a picture that cannot be read; addresses are not read.
    """
    if isinstance(content, str):
        return content
    if not pictures or not isinstance(content, list) or not content:
        return None
    found = [
        _part_from_json(part, limits, f"{where}.content[{i}]") for i, part in enumerate(content)
    ]
    return None if None in found else found


def _part_from_json(part: Any, limits: ImageLimits, where: str) -> dict[str, Any] | None:
    from bitnet_ops.generate.pictures import Picture
    from bitnet_ops.vision.decode import image_size
    from bitnet_ops.vision.errors import ImageError
    from bitnet_ops.vision.sources import image_bytes

    if not isinstance(part, dict):
        return None
    if part.get("type") == "text":
        text = part.get("text")
        return {"type": "text", "text": text} if isinstance(text, str) else None
    image = part.get("image_url") if part.get("type") == "image_url" else None
    url = image.get("url") if isinstance(image, dict) else None
    if not isinstance(url, str):
        return None
    try:
        data = image_bytes(url, limits=limits)
        image_size(data, limits)
    except ImageError as error:
        raise error.at(where) from None
    name = part.get("name")
    return {
        "type": "image",
        "image": Picture(data, where=name if isinstance(name, str) else "picture"),
    }


# Startup ------------------------------------------------------------------------------------------


def note_missing_pillow(lm: LanguageModel) -> None:
    """Say before the first request what would be missing then."""
    if lm.images is not None and importlib.util.find_spec("PIL") is None:
        say(
            f"note: the model reads pictures, but Pillow is not installed; run: {install('vision')}"
        )
