"""A file that appears whole or not at all: written under a temporary name, synced, then renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


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
    _sync_directory(final.parent)


def _sync_directory(directory: Path) -> None:
    """Make the new name itself survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
