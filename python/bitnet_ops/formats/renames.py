"""Renames that lose nothing: to a name that must be free, and two names exchanged; and a lock.

Linux and macOS have system calls for both; elsewhere, and on file systems without them, the same is
made of calls that every POSIX system has.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

_AT_FDCWD = -100
_LINUX = {"new": 1, "exchange": 2}  # RENAME_NOREPLACE, RENAME_EXCHANGE
_MACOS = {"new": 4, "exchange": 2}  # RENAME_EXCL, RENAME_SWAP
# What a kernel or a file system without the call answers.
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
_NO_LOCKS = {*_UNSUPPORTED, errno.ENOLCK, errno.EBADF}  # EBADF: NFS, of folders


def rename_new(source: Path, target: Path) -> None:
    """Rename `source` to `target`; FileExistsError, and nothing changed, if there is something."""
    if not _system_rename(source, target, "new"):
        _rename_new_portably(source, target)


def exchange(source: Path, target: Path) -> None:
    """Let `source` and `target`, both of which exist, change places.

    Where the system cannot do it at once, `target` is missing for a moment; never is anything lost.
    """
    if _system_rename(source, target, "exchange"):
        return
    aside = target.with_name(f"{target.name}.{secrets.token_hex(8)}")
    rename_new(target, aside)
    try:
        rename_new(source, target)
    except OSError:
        rename_new(aside, target)
        raise
    rename_new(aside, source)


def _system_rename(source: Path, target: Path, how: str) -> bool:
    """Whether the system has renamed; OSError where it could and rejects."""
    call = _system_call(how)
    if call is None:
        return False
    if call(os.fsencode(source), os.fsencode(target)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(source), None, str(target))


def _system_call(how: str) -> Callable[[bytes, bytes], int] | None:
    library = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux" and hasattr(library, "renameat2"):
        flag = ctypes.c_uint(_LINUX[how])
        return lambda a, b: int(library.renameat2(_AT_FDCWD, a, _AT_FDCWD, b, flag))
    if sys.platform == "darwin" and hasattr(library, "renamex_np"):
        flag = ctypes.c_uint(_MACOS[how])
        return lambda a, b: int(library.renamex_np(a, b, flag))
    return None


def _rename_new_portably(source: Path, target: Path) -> None:
    if stat.S_ISDIR(source.lstat().st_mode):
        target.mkdir()  # fails if there is something
        try:
            os.rename(source, target)  # onto an empty folder alone: what came into it stays
        except OSError:
            with contextlib.suppress(OSError):
                target.rmdir()
            raise
        return
    try:
        os.link(source, target, follow_symlinks=False)  # fails if there is something
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: the name is claimed by an empty file
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.replace(source, target)
        return
    source.unlink()


# Locks --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(file: Path) -> Iterator[bool]:
    """Hold the lock `file` during the block, if it is to be had: False if another one holds it.

    The lock ends with its process, however that ends; a file that a killed process has left is
    taken over. The file is removed at the end. On file systems without locks there are none: True.
    """
    descriptor = _acquire(file)
    if descriptor is None:
        yield False
        return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            file.unlink()  # while it is held: who waits for it sees that it is another file
        os.close(descriptor)


def _acquire(file: Path) -> int | None:
    """A descriptor of `file`, which exists and is locked by us; None if another one has it."""
    while True:
        # O_NONBLOCK: something else under that name, such as a FIFO, must not stop us
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(file, flags, 0o644)
        if try_lock(descriptor) is False:
            os.close(descriptor)
            return None
        if is_at(descriptor, file):
            return descriptor
        os.close(descriptor)  # its last holder has removed it meanwhile


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file or folder; False if another one has, None where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def is_at(descriptor: int, path: Path) -> bool:
    """Whether `path` still names the file or folder that was opened."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)
