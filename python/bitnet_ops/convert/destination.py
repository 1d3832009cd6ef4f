"""The folder a conversion is built in: under a temporary name beside the target, then renamed.

So a reader sees the old result, or the whole new one, never a half. It must not know what is
written.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bitnet_ops.convert.errors import listed, refuse

MODEL_FILE = "model.bin"
REPORT_FILE = "report.json"
SUMMARY_FILE = "report.txt"
# Files of the source that travel with the model; everything a result folder can hold.
TRAVELLERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)
_OURS = {MODEL_FILE, REPORT_FILE, SUMMARY_FILE, *TRAVELLERS}


def check_destination(source: Path, target: Path, *, force: bool, option: str = "--force") -> None:
    """Refuse a target that exists (unless forced and one of ours) or that lies in the source.

    `option` is the name that the caller's command line has for `force`.
    """
    if target.resolve().is_relative_to(source.resolve()):
        refuse("destination-in-source", f"a destination outside {source}", str(target))
    if not target.parent.is_dir():
        refuse("destination-parent", f"an existing folder {target.parent}", "none", "create it")
    if not os.path.lexists(target):
        return
    if not force:
        refuse("destination-exists", "a new destination", f"{target}", f"{option} replaces it")
    if target.is_symlink() or not target.is_dir():
        refuse(
            "destination-foreign", "a folder to replace", f"{target}, which is none", "remove it"
        )
    foreign = sorted(path.name for path in target.iterdir() if path.name not in _OURS)
    if foreign:
        refuse(
            "destination-foreign",
            "a folder with nothing but an earlier result to replace",
            f"{listed(foreign)} in {target}",
            "choose another destination or remove it yourself",
        )


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` on success and vanishes on any failure."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        refuse("destination-parent", f"a writable folder {target.parent}", str(error))
    try:
        yield folder
        folder.chmod(0o777 & ~_umask())  # mkdtemp makes private folders
        _publish(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def _publish(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`; an earlier result is put back if that fails."""
    if not os.path.lexists(target):
        os.rename(folder, target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)) / "previous"
    try:
        os.rename(target, aside)
        try:
            os.rename(folder, target)
        except OSError:
            os.rename(aside, target)
            raise
    finally:
        shutil.rmtree(aside.parent, ignore_errors=True)
