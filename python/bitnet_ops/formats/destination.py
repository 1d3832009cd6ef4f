"""THE rule for whatever a command writes, file or folder: `with new_folder(target) as folder: ...`.

1. It is built under another name beside its destination and renamed when it is complete: a reader
   sees nothing, or the whole. An error, Ctrl-C or a termination signal leaves nothing.
2. Something that is there already is rejected, at the start and, should it come meanwhile, at the
   end: the last rename never replaces anything.
3. Asked to `replace`, it exchanges old and new in one step and then removes the old: but only a
   result of the same kind, never a link, a foreign file, or a folder with anything else in it.
4. One writer at a time has a destination; a second one is rejected at once.

What a killed process has left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from bitnet_ops.errors import BitNetError
from bitnet_ops.formats.renames import exchange, is_at, locked, rename_new, try_lock
from bitnet_ops.formats.sglbitnt import MODEL_FILE

REPORT_FILE = "report.json"
SUMMARY_FILE = "report.txt"
# Files of the source that travel with the model.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)
_MODEL_NAMES = {MODEL_FILE, REPORT_FILE, SUMMARY_FILE, *TOKENIZER_FILES}
_MODEL_MAGIC = b"SGLBITNT"


class DestinationError(BitNetError, ValueError):
    """A destination that is rejected; `code` names the reason, `expected`, `found`, `remedy` it."""

    def __init__(self, code: str, expected: str, found: str, remedy: str = "") -> None:
        tail = f"; {remedy}" if remedy else ""
        super().__init__(f"destination: expected {expected}, got {found}{tail} [{code}]")
        self.code, self.expected, self.found, self.remedy = code, expected, found, remedy


@dataclass(frozen=True)
class Kind:
    """What may be replaced: `what` for messages, `foreign` says what speaks against a path."""

    what: str
    foreign: Callable[[Path], str | None]


def _foreign_in_model(folder: Path) -> str | None:
    """What is no part of a converted model in `folder`; None if nothing is."""
    if folder.is_symlink() or not folder.is_dir():
        return f"{folder}, which is none"
    entries = list(os.scandir(folder))
    names = [e.name for e in entries if not (e.name in _MODEL_NAMES and _is_plain(e))]
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        return f"{', '.join(sorted(names)[:4])}{more} in {folder}"
    if entries and not _begins(folder / MODEL_FILE, _MODEL_MAGIC):
        return f"no {MODEL_FILE} of ours in {folder}"
    return None


def _is_plain(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False)


def _begins(path: Path, magic: bytes) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def file_kind(what: str, marks: Callable[[bytes], bool]) -> Kind:
    """Regular files whose first 4096 bytes satisfy `marks`; empty ones lose nothing either."""

    def foreign(path: Path) -> str | None:
        if path.is_symlink() or not path.is_file():
            return f"{path}, which is none"
        with path.open("rb") as file:
            head = file.read(4096)
        return None if not head or marks(head) else f"{path}, which is another file"

    return Kind(what, foreign)


# An empty folder counts: nothing is lost with it.
MODEL_FOLDER = Kind("a folder with nothing but an earlier result to replace", _foreign_in_model)
GGUF_FILE = file_kind("a GGUF file to replace", lambda head: head.startswith(b"GGUF"))


# The rule -----------------------------------------------------------------------------------------


def check_name(target: Path) -> None:
    """Reject what no file system can hold, before anything else asks for it."""
    if "\0" in str(target):
        raise DestinationError("destination-name", "a name without zero bytes", repr(str(target)))


def check(target: Path, kind: Kind, *, replace: bool, option: str = "--force") -> None:
    """Reject `target` as `new_folder` and `new_file` would, before there is any work.

    `option` is the name that the caller's command line has for `replace`; "" if it has none.
    """
    check_name(target)
    if not target.parent.is_dir():
        raise DestinationError(
            "destination-parent", f"an existing folder {target.parent}", "none", "create it"
        )
    if not os.path.lexists(target):
        return
    if not replace:
        _reject_existing(target, option)
    _check_ours(target, target, kind)


def _reject_existing(target: Path, option: str) -> NoReturn:
    remedy = f"{option} replaces it" if option else "remove it, or choose another"
    raise DestinationError("destination-exists", "a new destination", str(target), remedy)


def _check_ours(path: Path, target: Path, kind: Kind) -> None:
    """Reject what lies at `path` if it is no earlier result; messages call it `target`."""
    foreign = kind.foreign(path)
    if foreign is not None:
        raise DestinationError(
            "destination-foreign",
            kind.what,
            foreign.replace(str(path), str(target)),
            "choose another destination or remove it yourself",
        )


@contextlib.contextmanager
def new_folder(
    target: Path, kind: Kind = MODEL_FOLDER, *, replace: bool = False, option: str = "--force"
) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends without an exception.

    Raises DestinationError, and OSError as the file system does.
    """
    with _place(target, kind, replace, option) as place:
        folder = place / "new"
        folder.mkdir()
        yield folder
        _sync(folder)
        _publish(folder, target, kind, replace=replace, option=option)


@contextlib.contextmanager
def new_file(
    target: Path, kind: Kind, *, replace: bool = False, option: str = "--force"
) -> Iterator[Path]:
    """Yield a path to write a file at, which becomes `target`; as `new_folder`."""
    with _place(target, kind, replace, option) as place:
        file = place / "new"
        yield file
        _sync(file)
        _publish(file, target, kind, replace=replace, option=option)


@contextlib.contextmanager
def beside(target: Path) -> Iterator[Path]:
    """Yield a folder beside `target` for as long as the block lasts: for large intermediates."""
    with _temporary(target) as place:
        yield place


@contextlib.contextmanager
def _place(target: Path, kind: Kind, replace: bool, option: str) -> Iterator[Path]:
    """The temporary folder that a result is built in, while this process has the destination."""
    check(target, kind, replace=replace, option=option)
    given, target = target, Path(os.path.abspath(target))  # another working directory meanwhile?
    with contextlib.ExitStack() as stack:
        try:
            free = stack.enter_context(locked(_sibling(target, ".bitnet-ops.lock")))
            place = stack.enter_context(_temporary(target)) if free else None
        except OSError as error:
            expected = f"a writable folder {target.parent}"
            raise DestinationError("destination-parent", expected, str(error)) from None
        if place is None:
            found = "another process that is writing it"
            remedy = "wait for it, or choose another destination"
            raise DestinationError("destination-busy", f"{given} for itself", found, remedy)
        check(target, kind, replace=replace, option=option)  # who had the lock may have written it
        yield place


def _publish(made: Path, target: Path, kind: Kind, *, replace: bool, option: str) -> None:
    """Give `made` its name; what an exchange brings out ends with the temporary folder."""
    try:
        rename_new(made, target)
    except FileExistsError:
        if not replace:
            _reject_existing(target, option)
        exchange(made, target)
        try:
            _check_ours(made, target, kind)  # it may be another one than at the start
        except DestinationError:
            exchange(made, target)
            raise
    _sync(target.parent)


# Temporary folders --------------------------------------------------------------------------------

_MARK = ".bitnet-ops-"


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A private folder beside `target`, on its file system; locked, so that it shows who lives."""
    _sweep(target)
    while True:
        place = _sibling(target, _MARK + secrets.token_hex(8))
        place.mkdir(mode=0o700)
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        if try_lock(descriptor) is not False and is_at(descriptor, place):
            break
        os.close(descriptor)  # a sweep was faster
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(descriptor)


def _sibling(target: Path, suffix: str) -> Path:
    """A hidden name beside `target`, of its own for every target, within what names may be long."""
    name = target.name
    if len(os.fsencode(name)) > 150:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return target.with_name(f".{name}{suffix}")


def _sweep(target: Path) -> None:
    """Remove temporary folders for `target` whose process is gone, which left them unlocked."""
    prefix = _sibling(target, _MARK).name
    for entry in os.scandir(target.parent):
        if not entry.name.startswith(prefix) or not _is_mine(entry):
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if try_lock(descriptor) is True:
                    shutil.rmtree(entry.path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _is_mine(entry: os.DirEntry[str]) -> bool:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _sync(path: Path) -> None:
    """Make a file, or a folder and the files in it, survive a power cut."""
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            if inner.is_file() and not inner.is_symlink():
                _sync_one(inner)
    _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir():  # some file systems cannot sync folders
            raise error
    finally:
        os.close(descriptor)
