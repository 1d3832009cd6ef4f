"""Files and folders that appear whole or not at all: built beside their place, then renamed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_SWEEP_AFTER_SECONDS = 60  # a younger folder may not be locked yet


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes `path` when the block ends without an exception.

    The temporary file lies in the same directory, since a rename cannot cross file systems. Any
    exception, KeyboardInterrupt included, removes it and leaves an older file at `path` as it was.
    Only a killed process (SIGKILL, power) leaves one behind: `.bitnet-ops-*.tmp`.
    Raises OSError (no such directory, disk full, no permission).
    """
    final = Path(path)
    if final.is_dir():
        raise IsADirectoryError(f"{final} is a directory")
    if is_mount(final):
        raise OSError(f"{final} is a mount point: mount its folder instead")
    temporary = final.with_name(f".bitnet-ops-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(final.parent)


def is_mount(path: Path, table: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether something is mounted at `path`, a folder or a single file, so that it keeps its name.

    `os.path.ismount` does not see what is bound from the same file system.
    """
    place = os.path.join(os.path.realpath(path.parent), path.name)
    try:
        lines = table.read_bytes().splitlines()
    except OSError:
        return os.path.ismount(place)
    # blanks and the like are written in octal
    points = (re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), line.split(b" ")[4])
              for line in lines if line.count(b" ") >= 4)  # fmt: skip
    return os.fsencode(place) in points


def rename_new(source: Path, target: Path) -> None:
    """Rename `source` to `target`; FileExistsError, and nothing changed, if there is something.

    An empty folder at the place of a folder counts as nothing.
    """
    if stat.S_ISDIR(source.lstat().st_mode):
        try:
            os.rename(source, target)  # which never replaces more than an empty folder
        except OSError as error:
            if os.path.lexists(target):
                raise FileExistsError(f"{target} exists") from error
            raise
        return
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: an empty file claims the name
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.replace(source, target)
    else:
        source.unlink()


def sync(path: Path) -> None:
    """Make a file, or a folder and the files in it, survive a power cut."""
    if path.is_dir() and not path.is_symlink():
        with contextlib.suppress(OSError):  # some file systems cannot sync folders
            _sync_one(path)
    else:
        _sync_one(path)


def sync_tree(folder: Path) -> None:
    """`sync` of the files in `folder`, and of itself."""
    for inner in folder.iterdir():
        if inner.is_file() and not inner.is_symlink():
            _sync_one(inner)
    sync(folder)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def beside(target: Path) -> Iterator[Path]:
    """Yield a private folder beside `target`, on its file system, for as long as the block lasts.

    What a killed process has left there is removed: it is no longer locked.
    """
    name = target.name
    if len(os.fsencode(name)) > 150:  # the prefix has to fit, too
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    prefix = f".{name}.bitnet-ops-"
    _sweep(target.parent, prefix)
    place = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: nothing is swept there
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(descriptor)


def _sweep(parent: Path, prefix: str) -> None:
    """Remove this user's folders whose process is gone, which left them unlocked."""
    for entry in os.scandir(parent):
        if not entry.name.startswith(prefix) or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _SWEEP_AFTER_SECONDS:
                continue
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry.path, ignore_errors=True)
            finally:
                os.close(descriptor)
