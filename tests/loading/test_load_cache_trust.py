"""The load cache takes nothing on trust: not bytes, not names, not owners.

Whatever lies under a cache file's name, a load ends with the right tokens, one line of warning and
a good file. The digests of forged files are made by the package `xxhash`. Must not know private
layouts.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from bitnet_ops.formats.sglbitnt import MODEL_FILE, Reader
from bitnet_ops.language_model import load
from bitnet_ops.loading import cache_files
from cached_models import cache as cache
from cached_models import files, load_without_warning, rewritten, tokens
from cached_models import model_dir as model_dir

CHUNK, HEADER = 4 << 20, 64


class Cached:
    """A model whose cached form lies in a cache, and what it says."""

    def __init__(self, model: Path, cache: Path) -> None:
        self.model, self.cache = model, cache
        self.expected = tokens(load_without_warning(model, cache=cache))
        (self.file,) = files(cache)
        self.good = self.file.read_bytes()

    def is_made_again(self, match: str = "expected a cached model in .*; it is made again") -> None:
        with pytest.warns(UserWarning, match=match) as caught:
            assert tokens(load(self.model, cache=self.cache)) == self.expected
        assert len(caught) == 1
        assert files(self.cache) == [self.file] and self.file.read_bytes() == self.good
        status = self.file.lstat()
        assert stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
        assert tokens(load_without_warning(self.model, cache=self.cache)) == self.expected


@pytest.fixture
def cached(model_dir: Path, cache: Path) -> Cached:
    return Cached(model_dir, cache)


# --- content --------------------------------------------------------------------------------------


def digest_of(data: bytes) -> bytes:
    """What a file's header must say, from the description in load_cache.py."""
    starts = range(0, len(data), CHUNK)
    chunks = [data[max(at, HEADER) : at + CHUNK] for at in starts]
    return xxhash.xxh3_128_digest(data[:28] + b"".join(map(xxhash.xxh3_128_digest, chunks)))


def test_the_header_is_as_described(cached: Cached) -> None:
    magic, version, length, body = struct.unpack_from("<8sIQQ", cached.good)
    assert (magic, version, body) == (b"BITNETPM", 3, len(cached.good) - HEADER)
    assert cached.good[28:44] == digest_of(cached.good) and cached.good[44:HEADER] == bytes(20)
    assert json.loads(cached.good[HEADER : HEADER + length])["key"] == cached.file.stem


def swapped_words(data: bytes) -> bytes:
    """Two different words of 8 bytes change places: their sum stays."""
    out, at = bytearray(data), len(data) // 2 // 8 * 8
    other = next(i for i in range(at + 8, len(data), 8) if data[i : i + 8] != data[at : at + 8])
    out[at : at + 8], out[other : other + 8] = data[other : other + 8], data[at : at + 8]
    return bytes(out)


def added_and_taken(data: bytes) -> bytes:
    """One more in one word, one less in another."""
    out, at = bytearray(data), len(data) // 2 // 8 * 8
    for place, step in ((at, 1), (at + 64, -1)):
        (word,) = struct.unpack_from("<Q", data, place)
        struct.pack_into("<Q", out, place, (word + step) % 2**64)
    return bytes(out)


def flipped(at: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        out = bytearray(data)
        out[at] ^= 1
        return bytes(out)

    return change


CONTENT = {
    "words change places": swapped_words,
    "the same sum": added_and_taken,
    "the reserved part of the header": flipped(60),
    "the version": flipped(8),
    "the length of the JSON": flipped(12),
    "the length of the body": flipped(20),
    "the digest": flipped(28),
    "the first byte of the JSON": flipped(HEADER),
    "the last byte": flipped(-1),
}


@pytest.mark.parametrize("name", CONTENT)
def test_other_bytes_are_noticed(name: str, cached: Cached) -> None:
    cached.file.write_bytes(CONTENT[name](cached.good))
    cached.is_made_again()


# --- forged files, whose digest is right ----------------------------------------------------------


def forge(good: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The file with another JSON and a digest that fits it."""
    (length,) = struct.unpack_from("<Q", good, 12)
    content = json.loads(good[HEADER : HEADER + length])
    made = change(content)
    text = made if isinstance(made, bytes) else json.dumps(content if made is None else made)
    text = text if isinstance(text, bytes) else text.encode()
    padded = text.ljust(-(-len(text) // 64) * 64, b"\0")
    data = padded + good[HEADER + -(-length // 64) * 64 :]
    file = good[:12] + struct.pack("<QQ", len(text), len(data)) + bytes(36) + data
    return file[:28] + digest_of(file) + file[44:]


def entry(content: dict[str, Any], kind: str) -> Any:
    return next(e for e in content["tensors"] if e["kind"] == kind)


def setter(kind: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        entry(content, kind)[key] = value

    return change


def part_setter(kind: str, index: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        entry(content, kind)["parts"][0][index] = value

    return change


def about_setter(kind: str, index: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        entry(content, kind)["about"][index] = value

    return change


def deleter(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["tensors"][0].pop(key)


FORGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no JSON": lambda c: b"not JSON at all",
    "no UTF-8": lambda c: b"\xff\xfe",
    "nested too deep": lambda c: b"[" * 100_000,
    "a list": lambda c: [],
    "a number": lambda c: 7,
    "an empty object": lambda c: {},
    "no tensors": lambda c: c.pop("tensors"),
    "no key": lambda c: c.pop("key") and None,
    "an entry less": lambda c: c["tensors"].pop() and None,
    "an entry twice": lambda c: c["tensors"].append(c["tensors"][0]),
    "no name": deleter("name"),
    "no kind": deleter("kind"),
    "no parts": deleter("parts"),
    "no about": deleter("about"),
    "an unknown name": setter("dense", "name", "model.other.weight"),
    "a name that is a list": setter("dense", "name", ["a"]),
    "an unknown kind": setter("dense", "kind", "sparse"),
    "a kind for another": setter("dense", "kind", "head"),
    "empty parts": setter("ternary", "parts", []),
    "many parts": setter("dense", "parts", [["uint8", [0], 0, 0]] * 9),
    "an unknown dtype": part_setter("dense", 0, "complex128"),
    "a dtype that is a function": part_setter("dense", 0, "load"),
    "another dtype": part_setter("head", 0, "uint8"),
    "another shape": part_setter("dense", 1, [1, 64]),
    "a negative shape": part_setter("dense", 1, [-1]),
    "a shape of texts": part_setter("dense", 1, ["64"]),
    "a huge shape": part_setter("dense", 1, [1 << 40]),
    "a negative place": part_setter("dense", 2, -64),
    "a place beyond the end": part_setter("dense", 2, 1 << 40),
    "an unaligned place": part_setter("dense", 2, 1),
    "a place that is a fraction": part_setter("dense", 2, 0.5),
    "other bytes": part_setter("dense", 3, 1),
    "fewer rows": about_setter("ternary", 0, 1),
    "other columns": about_setter("ternary", 1, 1 << 20),
    "another layout": about_setter("ternary", 2, "1.6bit"),
    "an unknown layout": about_setter("ternary", 2, "3bit"),
    "groups": about_setter("ternary", 3, 128),
    "a scale that is no number": about_setter("ternary", 4, float("nan")),
    "a scale that is a text": about_setter("ternary", 4, "x"),
    "more rows of the head": about_setter("head", 0, 1 << 20),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_files_are_made_again_and_raise_nothing(name: str, cached: Cached) -> None:
    forged = forge(cached.good, FORGED[name])
    assert forged != cached.good
    cached.file.write_bytes(forged)
    cached.is_made_again()


def test_forging_alone_changes_nothing(cached: Cached) -> None:
    """What the forged files have in common is accepted: each is rejected for what is special."""
    assert forge(cached.good, lambda c: None) == cached.good


# --- owners, modes and kinds of files -------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o666, 0o644, 0o620, 0o604])
def test_a_file_that_others_may_use_is_not_used(mode: int, cached: Cached) -> None:
    cached.file.chmod(mode)
    cached.is_made_again("got a file that others may use")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away; see the next test")
def test_a_file_of_another_user_is_not_used(cached: Cached) -> None:
    os.chown(cached.file, 65534, 65534)
    cached.is_made_again("got a file of another user")
    assert cached.file.stat().st_uid == os.geteuid()


def test_a_directory_of_another_user_is_not_used(
    cached: Cached, monkeypatch: pytest.MonkeyPatch
) -> None:
    us = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    with pytest.warns(
        UserWarning, match="got a directory of another user .* going on without"
    ) as w:
        assert tokens(load(cached.model, cache=cached.cache)) == cached.expected
    assert len(w) == 1


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_directory_that_others_may_write_to_is_not_used(mode: int, cached: Cached) -> None:
    cached.cache.chmod(mode)
    with pytest.warns(UserWarning, match="a directory that others may use .* mode 700") as caught:
        assert tokens(load(cached.model, cache=cached.cache)) == cached.expected
    assert len(caught) == 1 and files(cached.cache) == [cached.file]


def test_a_directory_that_others_may_read_is_used(cached: Cached) -> None:
    cached.cache.chmod(0o755)
    assert tokens(load_without_warning(cached.model, cache=cached.cache)) == cached.expected


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def unix_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def link(path: Path) -> None:
    target = path.parent.parent / "planted"
    target.write_bytes(b"")
    path.symlink_to(target)


def link_to_a_good_file(path: Path) -> None:
    path.with_suffix(".aside").rename(path.parent.parent / "good")
    path.symlink_to(path.parent.parent / "good")


def dangling_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "nothing")


KINDS = [fifo, unix_socket, link, link_to_a_good_file, dangling_link]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", KINDS, ids=lambda f: f.__name__)
def test_what_is_no_file_is_replaced_and_not_waited_for(
    make: Callable[[Path], None], cached: Cached
) -> None:
    cached.file.rename(cached.file.with_suffix(".aside"))
    make(cached.file)
    cached.file.with_suffix(".aside").unlink(missing_ok=True)
    cached.is_made_again()
    assert not (cached.cache.parent / "nothing").exists()


def test_a_directory_in_the_way_costs_warnings(cached: Cached) -> None:
    cached.file.unlink()
    cached.file.mkdir()
    with pytest.warns(UserWarning) as caught:
        assert tokens(load(cached.model, cache=cached.cache)) == cached.expected
    assert ["no regular file" in str(w.message) for w in caught] == [True, False]
    assert "going on without" in str(caught[1].message)
    assert files(cached.cache) == [cached.file]


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
def test_nobody_else_may_enter_or_read_whatever_the_umask(model_dir: Path, cache: Path) -> None:
    Cached(model_dir, cache)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in files(cache)] == [0o600]


def test_a_file_system_without_permissions_holds_no_cache(
    model_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As exFAT has it: every file is everybody's."""
    expected = tokens(load(model_dir))
    opened = os.open

    def open_for_all(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        descriptor = opened(path, flags, mode, **options)
        if flags & os.O_CREAT:
            os.fchmod(descriptor, 0o777)
        return descriptor

    monkeypatch.setattr(os, "open", open_for_all)
    with pytest.warns(UserWarning, match="others may use .*; going on without") as caught:
        assert tokens(load(model_dir, cache=cache)) == expected
    assert len(caught) == 1 and files(cache) == []


# --- several at a time ----------------------------------------------------------------------------

LOAD = """
import sys, warnings
warnings.simplefilter("error")
from bitnet_ops.generate.engine import Limits
from bitnet_ops.language_model import load
for _ in range(3):
    lm = load(sys.argv[1], cache=sys.argv[2])
    print(lm.engine.generate([[1, 2, 3]], limits=Limits(12))[0].token_ids)
"""


def test_writers_at_the_same_time(model_dir: Path, cache: Path) -> None:
    command = [sys.executable, "-c", LOAD, str(model_dir), str(cache)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    texts = [run.communicate(timeout=300)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert texts == [f"{tokens(load(model_dir))}\n" * 3] * 3
    assert [file.suffix for file in files(cache)] == [".prepared"]


def test_the_leftovers_of_killed_processes_are_removed(model_dir: Path, cache: Path) -> None:
    cache.mkdir(mode=0o700)
    old, busy, young = (cache / f".bitnet-ops-{name}.tmp" for name in ("old", "busy", "young"))
    for file in (old, busy, young):
        file.touch(0o600)
    for file in (old, busy):
        os.utime(file, (time.time() - 3600,) * 2)
    with open(busy, "rb") as held:
        cache_files.lock(held.fileno())
        load_without_warning(model_dir, cache=cache)
    assert {f.name for f in files(cache) if f.suffix == ".tmp"} == {busy.name, young.name}


# --- the model's own file -------------------------------------------------------------------------


def test_a_file_of_version_1_changed_in_place_is_read_again(
    model_dir: Path, cache: Path, tmp_path: Path
) -> None:
    """Any of its bytes, with size and time kept: one embedding row of the prompt's tokens."""
    file = tmp_path / "v1.bin"
    rewritten(model_dir / MODEL_FILE, file, 1)
    first = load_without_warning(file, cache=cache).model.model.embed_tokens.embed(
        torch.tensor([2])
    )
    status, reader = file.stat(), Reader(file)
    info = reader.tensors["model.embed_tokens.weight"]
    row = info.nbytes // info.shape[0]
    reader.close()
    with open(file, "r+b") as out:
        out.seek(info.offset + 2 * row)
        out.write(bytes(row))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = load_without_warning(file, cache=cache).model.model.embed_tokens.embed(
        torch.tensor([2])
    )
    assert first.abs().max() > 0 and second.abs().max() == 0
    assert len(files(cache)) == 2


def test_a_copy_shares_the_cached_form(model_dir: Path, cache: Path, tmp_path: Path) -> None:
    for version in (1, 2):
        for name in ("a", "b"):
            rewritten(model_dir / MODEL_FILE, tmp_path / f"{name}{version}.bin", version)
            load_without_warning(tmp_path / f"{name}{version}.bin", cache=cache)
        assert len(files(cache)) == version
