"""The rule for whatever a command writes, file or folder: `with new_folder(target) as folder: ...`.

It is built beside its destination and renamed when it is complete: a reader sees nothing, or the
whole. An error, Ctrl-C or a termination signal leaves nothing. Something that is there already is
rejected, at the start and, should it come meanwhile, at the end. Asked to `replace`, an earlier
result of the same kind makes way, and is removed only once the new one has its place; never a link,
a foreign file, or a folder with anything else in it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bitnet_ops.errors import BitNetError
from bitnet_ops.formats.atomic import beside, is_mount, rename_new, sync, sync_tree
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


def folder_kind(known: set[str], file: str, marks: Callable[[bytes], bool]) -> Kind:
    """Folders of files that are all `known`, the first 4096 bytes of one of which satisfy `marks`.

    An empty folder counts: nothing is lost with it.
    """

    def foreign(folder: Path) -> str | None:
        if folder.is_symlink() or not folder.is_dir():
            return f"{folder}, which is none"
        entries = list(os.scandir(folder))
        names = sorted(
            e.name for e in entries if e.name not in known or not e.is_file(follow_symlinks=False)
        )
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            return f"{', '.join(names[:4])}{more} in {folder}"
        if entries and not marks(_head(folder / file)):
            return f"no {file} of ours in {folder}"
        return None

    return Kind("a folder with nothing but an earlier result to replace", foreign)


def _head(path: Path) -> bytes:
    if path.is_symlink() or not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(4096)


def file_kind(what: str, marks: Callable[[bytes], bool]) -> Kind:
    """Regular files whose first 4096 bytes satisfy `marks`; empty ones lose nothing either."""

    def foreign(path: Path) -> str | None:
        if path.is_symlink() or not path.is_file():
            return f"{path}, which is none"
        head = _head(path)
        return None if not head or marks(head) else f"{path}, which is another file"

    return Kind(what, foreign)


MODEL_FOLDER = folder_kind(
    {MODEL_FILE, REPORT_FILE, SUMMARY_FILE, *TOKENIZER_FILES},
    MODEL_FILE,
    lambda head: head.startswith(b"SGLBITNT"),
)
GGUF_FILE = file_kind("a GGUF file to replace", lambda head: head.startswith(b"GGUF"))


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
    if is_mount(Path(os.path.abspath(target))):
        remedy = f"name a new folder in it, as {target / 'model'}"
        if not target.is_dir():
            remedy = "mount its folder instead, and name a file in that"
        found = f"{target}, at which something is mounted"
        raise DestinationError(
            "destination-mount", "a destination that can get its name at the end", found, remedy
        )
    if not replace:
        remedy = f"{option} replaces it" if option else "remove it, or choose another"
        raise DestinationError("destination-exists", "a new destination", str(target), remedy)
    _check_ours(target, target, kind)


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
    with new_file(target, kind, replace=replace, option=option) as folder:
        folder.mkdir()
        yield folder


@contextlib.contextmanager
def new_file(
    target: Path, kind: Kind, *, replace: bool = False, option: str = "--force"
) -> Iterator[Path]:
    """Yield a path to write a file at, which becomes `target`; as `new_folder`."""
    check(target, kind, replace=replace, option=option)
    final = Path(os.path.abspath(target))  # the working directory may be another one at the end
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(beside(final))
        except OSError as error:
            expected = f"a writable folder {target.parent}"
            raise DestinationError("destination-parent", expected, str(error)) from None
        made = place / "new"
        try:
            yield made
            (sync_tree if made.is_dir() else sync)(made)
        except BrokenPipeError:  # of a reader of what is printed
            raise
        except OSError as error:
            raise DestinationError(
                "write-failed", f"to write {target}", str(error), "nothing was kept"
            ) from error
        check(target, kind, replace=replace, option=option)  # what has come meanwhile
        _publish(made, final, kind)


def _publish(made: Path, target: Path, kind: Kind) -> None:
    """Give `made` its name. An earlier result makes way, to a name at which a crash leaves it."""
    if not os.path.lexists(target):
        return _rename(made, target)
    before = target.with_name(f"{target.name[:100]}.before-{secrets.token_hex(8)}")
    os.rename(target, before)
    try:
        _check_ours(before, target, kind)  # it may be another one than a moment ago
        _rename(made, target)
    except BaseException:
        rename_new(before, target)
        raise
    shutil.rmtree(before) if before.is_dir() else before.unlink()


def _rename(made: Path, target: Path) -> None:
    try:
        rename_new(made, target)
    except FileExistsError:
        raise DestinationError(
            "destination-exists", "a new destination", str(target), "something came there meanwhile"
        ) from None
    sync(target.parent)
