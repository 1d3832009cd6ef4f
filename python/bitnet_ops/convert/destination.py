"""Where a conversion goes: the rule of formats/destination.py in the converter's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bitnet_ops.convert.errors import reject
from bitnet_ops.formats import destination
from bitnet_ops.formats.destination import MODEL_FOLDER, DestinationError, Kind


def check_destination(source: Path, target: Path, *, force: bool, option: str = "--force") -> None:
    """Reject a target that exists (unless forced and one of ours) or that lies in the source.

    `option` is the name that the caller's command line has for `force`.
    """
    with _rejections():
        destination.check_name(target)
        if target.resolve().is_relative_to(source.resolve()):
            reject("destination-in-source", f"a destination outside {source}", str(target))
        destination.check(target, MODEL_FOLDER, replace=force, option=option)


@contextmanager
def building(target: Path, *, force: bool, option: str = "--force") -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` on success and vanishes on any failure."""
    with (
        _rejections(),
        destination.new_folder(target, replace=force, option=option) as folder,
    ):
        yield folder


@contextmanager
def building_file(target: Path, kind: Kind, *, force: bool) -> Iterator[Path]:
    """Yield a temporary path that becomes the file `target` on success."""
    with _rejections(), destination.new_file(target, kind, replace=force) as file:
        yield file


@contextmanager
def _rejections() -> Iterator[None]:
    try:
        yield
    except DestinationError as error:
        reject(error.code, error.expected, error.found, error.remedy)
