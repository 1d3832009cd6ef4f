"""PrefixStore: pieces of memory by key in a directory, which outlive the process.

A piece is a file: a header of fixed size, then numbers as they lie in memory. It is written behind
by a thread, under a temporary name and then renamed, and is not synced: whatever a crash leaves,
the checksum tells. What is torn, foreign, changed or of another version is removed and counts as
absent. Several processes may share a directory: no file of a key is ever changed, and all those of
a key hold the same. What keys mean is not its matter.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bitnet_ops import _runtime

_LOG = logging.getLogger(__name__)
_HEADER = struct.Struct("<8sII32sQQ")  # magic, version, 0, key, bytes behind it, their XXH64
_MAGIC, VERSION = b"BITNETKV", 1
_ALIGNMENT = 8  # of the parts of a piece
_NAME = re.compile(r"([0-9a-f]{64})\.kv")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.\d+\.\d+\.tmp")
_KEPT_TEMPORARY_S = 600  # after that its process is gone
_QUEUE_BYTES = 128 << 20  # that wait to be written
_AHEAD_BYTES = 32 << 20  # read before somebody takes them
_DEPTH_NS = 1_000_000  # by which each block of a text looks older than the one before it


class PrefixStore:
    """Files in `directory`, at most `max_mb` MiB of them: those not used for longest go first.

    The directory is made if it is not there, for this user alone: what people wrote could be told
    from the files. Where it cannot be used, or a file cannot be written, there is one warning, and
    nothing is kept any more. Its methods are for one thread, but for `close`.
    """

    def __init__(self, directory: str | os.PathLike[str], max_mb: float) -> None:
        self.directory, self._max_bytes = Path(directory), int(max_mb * 2**20)
        self._changed = threading.Condition()
        self._known: dict[bytes, int] = {}  # bytes of the files, by key
        self._bytes = self._since_scan = 0
        self._pending: deque[tuple[bytes, int, Tensor | None]] = deque()
        self._pending_bytes, self._busy = 0, True
        self._spare: list[Tensor] = []
        self._numbers = itertools.count()
        self._pid, self._closed, self._writes = os.getpid(), False, True
        self._writer: threading.Thread | None = None
        self._reading: Fetch | None = None
        try:
            self._prepare()
        except OSError as error:
            self._give_up(error)
            self._closed = True

    def _prepare(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.directory.stat()
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                "others can write there; give a directory of its own, or one to be made"
            )
        self._writer = threading.Thread(target=self._write, name="bitnet-ops prefix", daemon=True)
        self._writer.start()

    def __repr__(self) -> str:
        return f"PrefixStore({len(self._known)} pieces, {self._bytes / 2**20:.0f} MiB)"

    @property
    def active(self) -> bool:
        """Whether there is anything to ask; not in a forked child, which has no threads."""
        return not self._closed and self._pid == os.getpid()

    @property
    def counts(self) -> tuple[int, int]:
        """How many pieces there are, and their bytes, as far as this process knows."""
        return len(self._known), self._bytes

    def _give_up(self, error: OSError) -> None:
        if self._writes:
            _LOG.warning(
                "prefix cache on disk: expected to write %s, got: %s; nothing more is kept there",
                self.directory,
                error,
            )
        self._writes = False

    def _path(self, key: bytes) -> Path:
        return self.directory / f"{key.hex()}.kv"

    # Writing -------------------------------------------------------------------------------------

    def put(self, key: bytes, parts: Sequence[Tensor], used_ns: int, depth: int = 0) -> bool:
        """Have a copy of `parts` written; False where too much waits to be written already.

        used_ns, depth: when the text was used to which it belongs, and at which place of the text
        it lies; of one text the last pieces go first. A piece that is there is only touched.
        """
        if not self.active or not self._writes:
            return True  # nothing that a later call would change
        used_ns -= depth * _DEPTH_NS
        if key in self._known:
            return self._queue(key, used_ns, None)
        size = _HEADER.size + bytes_of(parts)
        with self._changed:
            if self._pending_bytes and self._pending_bytes + size > _QUEUE_BYTES:
                return False
        piece = self._buffer(size)
        copy_parts(parts, piece, back=False)
        return self._queue(key, used_ns, piece)

    def _queue(self, key: bytes, used_ns: int, piece: Tensor | None) -> bool:
        with self._changed:
            self._pending.append((key, used_ns, piece))
            self._pending_bytes += 0 if piece is None else piece.nbytes
            self._changed.notify_all()
        return True

    def _buffer(self, size: int) -> Tensor:
        """Memory for a piece; used memory where there is some, whose pages the system has given."""
        with self._changed:
            for i, spare in enumerate(self._spare):
                if spare.nbytes == size:
                    return self._spare.pop(i)
        return torch.empty(size, dtype=torch.uint8)

    def give_back(self, piece: Tensor) -> None:
        """Take memory of `Fetch.take` back for later pieces."""
        with self._changed:
            if sum(spare.nbytes for spare in self._spare) + piece.nbytes <= _AHEAD_BYTES:
                self._spare.append(piece)

    def _write(self) -> None:
        """What the writer's thread does."""
        try:
            self._scan()
        except OSError as error:
            self._give_up(error)
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not self._pending and not self._closed:
                    self._changed.wait()
                if not self._pending:
                    return
                key, used_ns, piece = self._pending.popleft()
                self._busy = True
            try:
                if self._writes and not self._touch(key, used_ns) and piece is not None:
                    self._write_one(key, used_ns, piece)
            except OSError as error:
                self._give_up(error)
            if piece is not None:
                with self._changed:
                    self._pending_bytes -= piece.nbytes
                self.give_back(piece)

    def _touch(self, key: bytes, used_ns: int) -> bool:
        """Whether the piece is there; then it has been used now."""
        try:
            os.utime(self._path(key), ns=(used_ns, used_ns))
        except FileNotFoundError:
            self._enter(key, 0)
            return False
        return True

    def _write_one(self, key: bytes, used_ns: int, piece: Tensor) -> None:
        memory = piece.numpy().data
        memory[: _HEADER.size] = _header(key, memory[_HEADER.size :])
        number = f"{os.getpid()}.{next(self._numbers)}"
        temporary = self.directory / f".{key.hex()}.{number}.tmp"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o600), "wb", buffering=0) as file:
                at = 0
                while at < len(memory):
                    at += file.write(memory[at:])
            os.utime(temporary, ns=(used_ns, used_ns))
            os.replace(temporary, self._path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self._enter(key, len(memory))
        self._since_scan += len(memory)
        # Others write too: what there is has to be counted now and then.
        if self._bytes > self._max_bytes or self._since_scan > self._max_bytes // 8:
            self._scan()

    def _enter(self, key: bytes, size: int) -> None:
        """Note the bytes of a piece; 0: it is not there."""
        with self._changed:
            self._bytes += size - self._known.pop(key, 0)
            if size:
                self._known[key] = size

    def _scan(self) -> None:
        """Count what is there, and remove what is too much: those not used for longest."""
        pieces, other, now = [], 0, time.time()
        with os.scandir(self.directory) as entries:
            for entry in entries:
                is_piece = _NAME.fullmatch(entry.name)
                if not is_piece and not _TEMPORARY.fullmatch(entry.name):
                    continue  # a file of somebody else
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if is_piece:
                        key = bytes.fromhex(is_piece[1])
                        pieces.append((found.st_mtime_ns, found.st_size, key))
                    elif now - found.st_ctime > _KEPT_TEMPORARY_S:
                        os.unlink(entry.path)
                    else:
                        other += found.st_size
        pieces.sort()
        total = other + sum(size for _, size, _ in pieces)
        # A little more than needed, so that not every piece needs a scan.
        room = self._max_bytes if total <= self._max_bytes else self._max_bytes * 15 // 16
        gone = 0
        while gone < len(pieces) and total > room:
            _, size, key = pieces[gone]
            with contextlib.suppress(FileNotFoundError):
                self._path(key).unlink()
            total -= size
            gone += 1
        with self._changed:
            self._known = {key: size for _, size, key in pieces[gone:]}
            self._bytes, self._since_scan = sum(self._known.values()), 0

    # Reading -------------------------------------------------------------------------------------

    def exists(self, key: bytes) -> bool:
        """Whether there is a file of this key, of any process; its contents are not looked at."""
        return self.active and os.path.exists(self._path(key))

    def fetch(self, wanted: Iterable[tuple[bytes, int]], used_ns: int, depth: int = 0) -> Fetch:
        """Begin to read pieces (key, `bytes_of` their parts), up to the first that is not there.

        used_ns, depth: as of `put`, the depth of the first one.
        """
        self._reading = Fetch(self, wanted, used_ns - depth * _DEPTH_NS)
        return self._reading

    def read(self, key: bytes, nbytes: int) -> Tensor | None:
        """A piece with its header, for `copy_parts`; None where none of this size is whole."""
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            with open(os.open(self._path(key), flags), "rb", buffering=0) as file:
                piece = self._read(file.fileno(), key, _HEADER.size + nbytes)
        except OSError:
            return None
        if piece is None:
            _LOG.info("prefix cache on disk: removing %s, which is damaged", self._path(key).name)
            with contextlib.suppress(OSError):
                self._path(key).unlink()
            self._enter(key, 0)
        return piece

    def _read(self, file: int, key: bytes, size: int) -> Tensor | None:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            return None  # before memory is asked for
        piece = self._buffer(size)
        memory = piece.numpy().data
        at = 0
        while at < size and (count := os.readv(file, [memory[at:]])):
            at += count
        whole = at == size and memory[: _HEADER.size] == _header(key, memory[_HEADER.size :])
        return piece if whole else None

    # Ends ----------------------------------------------------------------------------------------

    def flush(self, seconds: float) -> bool:
        """Wait until everything is written, but not for longer; whether it is."""
        if self._pid != os.getpid() or self._writer is None:
            return True
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._pending and not self._busy or not self._writer_lives, seconds
            )

    def trim(self, seconds: float) -> None:
        """Write what waits, for so long at most, and give the memory back."""
        self.flush(seconds)
        self._spare.clear()

    @property
    def _writer_lives(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def close(self, seconds: float = 2.0) -> None:
        """Write what waits, for so long at most, and end the threads; nothing is kept any more."""
        if self._pid != os.getpid():
            return
        self.flush(seconds)
        with self._changed:
            self._closed = True
            self._pending.clear()
            self._changed.notify_all()
        if self._reading is not None:
            self._reading.cancel()


def _header(key: bytes, data: memoryview) -> bytes:
    return _HEADER.pack(_MAGIC, VERSION, 0, key, len(data), _runtime.xxh64(data))


def bytes_of(parts: Iterable[Tensor]) -> int:
    """Bytes of a piece that holds `parts`."""
    return sum(part.nbytes + -part.nbytes % _ALIGNMENT for part in parts)


def copy_parts(parts: Sequence[Tensor], piece: Tensor, *, back: bool) -> None:
    """Copy `parts` into a piece, or `back`.

    By numpy, on this thread: torch would wake its threads for every part, which takes longer where
    they sleep, and disturbs what runs on them.
    """
    memory, at = piece.numpy(), _HEADER.size
    for part in parts:
        inside = part.view(torch.uint8).numpy()
        stretch = memory[at : at + part.nbytes].reshape(inside.shape)
        np.copyto(*((inside, stretch) if back else (stretch, inside)))
        at += part.nbytes + -part.nbytes % _ALIGNMENT


class Fetch:
    """Pieces that a thread reads, some ahead; see PrefixStore.fetch."""

    def __init__(
        self, store: PrefixStore, wanted: Iterable[tuple[bytes, int]], used_ns: int
    ) -> None:
        self._store, self._wanted, self._used_ns = store, list(wanted), used_ns
        self._changed = threading.Condition()
        self._read: deque[Tensor] = deque()
        self._ended = False
        threading.Thread(target=self._run, name="bitnet-ops prefix read", daemon=True).start()

    def _run(self) -> None:
        try:
            for i, (key, nbytes) in enumerate(self._wanted):
                piece = self._store.read(key, nbytes)
                if piece is None or not self._offer(piece):
                    return
                used_ns = self._used_ns - i * _DEPTH_NS
                with contextlib.suppress(OSError):
                    os.utime(self._store._path(key), ns=(used_ns, used_ns))
        finally:
            self.cancel()

    def _offer(self, piece: Tensor) -> bool:
        with self._changed:
            self._read.append(piece)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._ended or sum(p.nbytes for p in self._read) < _AHEAD_BYTES
            )
            return not self._ended

    def cancel(self) -> None:
        """Read no further."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until there is a piece to take, or no more come."""
        with self._changed:
            self._changed.wait_for(lambda: self._read or self._ended, seconds)

    def take(self) -> Tensor | None:
        """The next piece, if it is there."""
        with self._changed:
            if not self._read:
                return None
            self._changed.notify_all()
            return self._read.popleft()

    @property
    def over(self) -> bool:
        """Whether no more pieces come."""
        with self._changed:
            return self._ended and not self._read
