"""The cache directory, and files in it that nobody but this user can have written.

A directory or file of another user, or one that others may write to, is not used: whoever could
plant a file there would choose what a model says. Everything is opened relative to the directory's
descriptor, so that what was checked is what is used. It must not know what the files hold.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

ENVIRONMENT = "BITNET_OPS_CACHE"
_OTHERS, _OTHERS_WRITE = 0o077, 0o022
_ABANDONED_S = 60.0
_TEMPORARY_PREFIX, _TEMPORARY_SUFFIX = ".bitnet-ops-", ".tmp"


class CacheError(Exception):
    """Why a directory or file of the cache cannot be used; the message ends a sentence."""


def directory(choice: bool | str | os.PathLike[str] | None) -> Path | None:
    """Where the load cache lies, None for no cache.

    `choice`: a directory; True, the one of the environment variable BITNET_OPS_CACHE or else
    bitnet_ops in the user's cache directory; False, none; None, that of BITNET_OPS_CACHE if set.
    Raises ValueError where True finds no home directory.
    """
    given = os.environ.get(ENVIRONMENT)
    if choice is False or (choice is None and not given):
        return None
    if choice is not None and choice is not True:
        return Path(choice)
    return Path(given) if given else _directory_of_user()


def _directory_of_user() -> Path:
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the specification of that variable has others ignored
        return Path(named) / "bitnet_ops"
    try:
        return Path.home() / ".cache" / "bitnet_ops"
    except RuntimeError:
        raise ValueError(
            f"cache: expected a home directory, got none; set {ENVIRONMENT} to a directory"
        ) from None


class PrivateDirectory:
    """An open directory of this user that no other can write to; a context manager.

    `make`: create it, and what is missing above it, if it is not there.
    Raises CacheError, and OSError (FileNotFoundError if it is not there).
    """

    def __init__(self, path: Path, *, make: bool = False) -> None:
        self.path = path
        if make:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _check_owner(os.fstat(self.descriptor), _OTHERS_WRITE, "directory")
        except CacheError:
            self.close()
            raise

    def close(self) -> None:
        os.close(self.descriptor)

    def __enter__(self) -> PrivateDirectory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def open(self, name: str) -> BinaryIO:
        """The file `name`, for reading. It is never waited for, nor a link followed.

        Raises CacheError for a file that others may have written or may read, or that is no file;
        OSError.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=self.descriptor)
        try:
            check_private_file(os.fstat(descriptor))
        except CacheError:
            os.close(descriptor)
            raise
        return os.fdopen(descriptor, "rb")

    @contextlib.contextmanager
    def new(self, name: str) -> Iterator[BinaryIO]:
        """Yield a file that becomes `name`, for this user alone, when the block ends well.

        Of several writers at a time each has a file of its own, and the last rename wins. After an
        exception nothing is left; a killed process leaves a file that a later writer removes.
        Raises CacheError where the file system keeps no permissions, OSError.
        """
        temporary = _TEMPORARY_PREFIX + secrets.token_hex(16) + _TEMPORARY_SUFFIX
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.fdopen(os.open(temporary, flags, 0o600, dir_fd=self.descriptor), "w+b")
        try:
            with file:
                with contextlib.suppress(OSError):  # a file system without locks
                    lock(file.fileno())
                check_private_file(os.fstat(file.fileno()))
                self._remove_abandoned()
                yield file
                file.flush()
                os.fsync(file.fileno())
                here = self.descriptor
                os.replace(temporary, name, src_dir_fd=here, dst_dir_fd=here)
        except BaseException:
            self.remove(temporary)
            raise
        os.fsync(self.descriptor)  # the name itself survives a power cut

    def remove(self, name: str) -> None:
        """Remove the file `name` if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def _remove_abandoned(self) -> None:
        """Remove the temporary files of processes that were killed: those that nobody locks."""
        for name in os.listdir(self.descriptor):
            if not (name.startswith(_TEMPORARY_PREFIX) and name.endswith(_TEMPORARY_SUFFIX)):
                continue
            with contextlib.suppress(OSError, CacheError), self.open(name) as file:
                if os.fstat(file.fileno()).st_mtime > time.time() - _ABANDONED_S:
                    continue  # its writer may not have come to lock it
                lock(file.fileno())
                self.remove(name)


def check_private_file(status: os.stat_result) -> None:
    """Raise CacheError unless `status` is that of a regular file of this user alone."""
    if not stat.S_ISREG(status.st_mode):
        raise CacheError("something that is no regular file")
    _check_owner(status, _OTHERS, "file")


def _check_owner(status: os.stat_result, forbidden: int, what: str) -> None:
    if status.st_uid != os.geteuid():
        raise CacheError(f"a {what} of another user (uid {status.st_uid})")
    if status.st_mode & forbidden:
        mode = stat.S_IMODE(status.st_mode)
        raise CacheError(f"a {what} that others may use (mode {mode:04o})")


def lock(descriptor: int, *, wait: bool = False) -> None:
    """Take an open file's lock, which ends with the process; OSError if somebody else has it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
