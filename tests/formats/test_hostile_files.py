"""Files and paths that are not what they should be: typed errors in one line, no hang, no crash.

Through the Python API, since the command line is only one of its callers. Damage inside files is
test_gguf_reader.py's and test_sglbitnt*.py's business, work and memory test_reader_work.py's.
"""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sglbitnt_bytes
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.convert.checkpoint import Checkpoint
from bitnet_ops.convert.inspect import inspect
from bitnet_ops.formats import CodedError, gguf, sglbitnt
from bitnet_ops.formats.gguf import GgufError, is_gguf
from bitnet_ops.formats.sglbitnt import SglbitntError, is_sglbitnt
from gguf_bytes import gguf as gguf_file
from gguf_bytes import key, pad, record

NORM = ("n", (8,), 0, np.arange(8, dtype="<f4").tobytes())
NASTY = "w\x1b[2J\r\n\x9b31m\u202e"


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """A reader that waits for a pipe fails its test."""

    def give_up(*_: object) -> None:
        raise TimeoutError("the reader hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def error_of(act: Callable[[], Any]) -> Any:
    with pytest.raises(ValueError) as caught:
        act()
    text = str(caught.value)
    assert text.isprintable(), ascii(text)
    assert "expected" in text
    return caught.value


# --- what a path may lead to ----------------------------------------------------------------------


def made(kind: str, folder: Path) -> str:
    path = folder / f"{kind}.gguf"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        import socket

        with socket.socket(socket.AF_UNIX) as server:
            os.chdir(folder)
            server.bind(path.name)
    elif kind == "device":
        return "/dev/zero"
    elif kind == "zero byte":
        return f"{folder}/a\0b.gguf"
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "nasty name":
        return f"{folder}/{NASTY}\udcff.gguf"
    return str(path)


KINDS = ["pipe", "directory", "socket", "device", "zero byte", "loop", "nasty name", "nothing"]


@pytest.mark.parametrize("kind", KINDS)
def test_readers_take_regular_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = made(kind, tmp_path)
    for reader in (gguf.Reader, sglbitnt.Reader):
        error = error_of(partial(reader, path))
        assert isinstance(error, CodedError) and error.code == "io"
    assert not is_sglbitnt(path)


@pytest.mark.parametrize("kind", KINDS)
def test_converters_and_inspect_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = made(kind, tmp_path)
    for act in (convert, convert, convert):
        error_of(partial(act, path, tmp_path / "out"))
    error_of(lambda: inspect(path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("kind", ["pipe", "directory"])
def test_checkpoint_folders_too(tmp_path: Path, name: str, kind: str) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name) if kind == "pipe" else (folder / name).mkdir()
    error = error_of(lambda: Checkpoint(folder))
    assert error.code == ("config-missing" if name == "config.json" else "weights-missing")


def test_an_unreadable_file_is_told_by_its_reader(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"")
    path.chmod(0)
    assert is_gguf(path)
    assert error_of(lambda: gguf.Reader(path)).code in ("io", "truncated")  # root reads it


# --- a file that is cut while it is mapped --------------------------------------------------------


def test_a_gguf_cut_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(gguf_file([], [("w", (1024, 1024), 0, bytes(4 << 20))]))
    with gguf.Reader(path) as reader:
        assert reader.data("w").sum() == 0
        os.truncate(path, 4096)
        error = error_of(lambda: reader.data("w"))
        assert error.code == "truncated" and "got 4096; it was shortened" in str(error)


@pytest.mark.parametrize(
    "read",
    [
        lambda reader: reader.tensor("w"),
        lambda reader: reader.tensor("p"),
        lambda reader: reader.scales("p"),
        lambda reader: reader.rows("w", 0, 1),
        lambda reader: reader.memory("w"),
        lambda reader: reader.check_data("w"),
        lambda reader: reader.check_in_features("p", 128),
        lambda reader: reader.code_counts("p"),
    ],
)
def test_a_bin_cut_while_it_is_open(tmp_path: Path, read: Callable[[Any], Any]) -> None:
    path = tmp_path / "x.bin"
    dense = sglbitnt_bytes.tensor(b"w", 1, (1 << 18, 4))
    path.write_bytes(sglbitnt_bytes.file(dense, sglbitnt_bytes.tensor(b"p", 0, (4, 32))))
    with sglbitnt.Reader(path) as reader:
        read(reader)
        os.truncate(path, 4096)
        error = error_of(lambda: read(reader))
        assert error.code == "truncated" and "it was shortened while in use" in str(error)


def test_a_version_2_file_cut_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    with sglbitnt.Writer(path, {}, 1) as writer:
        writer.add_dense("w", torch.zeros(1 << 20))
    with sglbitnt.Reader(path) as reader:
        os.truncate(path, 4096)
        assert error_of(lambda: reader.check_sum("w")).code == "truncated"


def test_a_file_that_grows_or_is_replaced_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(gguf_file([], [NORM]))
    with gguf.Reader(path) as reader:
        with path.open("ab") as file:
            file.write(b"more")
        assert reader.data("n").tobytes() == NORM[3]
        (tmp_path / "y").write_bytes(b"")
        os.replace(tmp_path / "y", path)
        assert reader.data("n").tobytes() == NORM[3]


# --- GGUF files that hold no model ----------------------------------------------------------------


def test_no_tensors(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(gguf_file([key("general.architecture", "str", "llama")], []))
    assert error_of(lambda: gguf.Reader(tmp_path / "x")).code == "tensor_count"
    error = error_of(lambda: gguf.Writer(tmp_path / "y", {}, {}))
    assert error.code == "tensor_count"


@pytest.mark.parametrize("extra", [1, 31, 32, 33, 5000])
def test_bytes_behind_the_last_tensor(tmp_path: Path, extra: int) -> None:
    unpadded = ("m", (6,), 0, bytes(24))
    for tensors in ([NORM], [NORM, unpadded]):
        (tmp_path / "x").write_bytes(gguf_file([], tensors) + bytes(extra))
        error = error_of(lambda: gguf.Reader(tmp_path / "x"))
        assert error.code == "trailing_bytes" and f"got {extra} more bytes" in str(error)


@pytest.mark.parametrize("character", ["\0", "\n", "\r", "\x1b", "\x7f", "\x85", "\x9b"])
def test_control_characters_in_names(tmp_path: Path, character: str) -> None:
    name = f"a{character}b"
    files = {
        "tensor": gguf_file([], [(name, *NORM[1:])]),
        "key": gguf_file([key(name, "u8", 1)], [NORM]),
    }
    for place, data in files.items():
        (tmp_path / "x").write_bytes(data)
        error = error_of(lambda: gguf.Reader(tmp_path / "x"))
        assert error.code == "name_control" and place in str(error)
    for act in (
        lambda: gguf.Writer(tmp_path / "y", {}, {name: ("F32", (8,))}),
        lambda: gguf.Writer(tmp_path / "y", {name: ("uint8", 1)}, {"n": ("F32", (8,))}),
    ):
        assert error_of(act).code == "name_control"


# --- messages -------------------------------------------------------------------------------------


def test_errors_are_printable() -> None:
    for error in (CodedError("c", NASTY), ConvertError("c", NASTY)):
        assert str(error).isprintable()


def test_names_of_a_checkpoint_in_messages(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    text = json.dumps({NASTY: entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    config = {"model_type": "llama", "quantization_config": {"quant_method": "bitnet"},
              "hidden_size": 128, "num_attention_heads": 1, "intermediate_size": 128,
              "vocab_size": 8, "num_hidden_layers": 1}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = error_of(lambda: convert(tmp_path, tmp_path.parent / "out"))
    assert error.code == "unknown-tensor" and "w\\x1b[2J" in str(error)


def test_names_of_a_gguf_in_messages(tmp_path: Path) -> None:
    """Marks that turn text round are allowed in names, and escaped."""
    keys = [key("general.architecture", "str", "llama\u202e\n")]
    (tmp_path / "x").write_bytes(gguf_file(keys, [("w\u202e", *NORM[1:])]))
    error = error_of(lambda: convert(tmp_path / "x", tmp_path / "out"))
    assert error.code == "gguf-architecture" and "\\u202e" in str(error)
    damaged = pad(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + record("w\u202e", (8,), 99, 0), 32)
    (tmp_path / "x").write_bytes(damaged + bytes(32))
    error = error_of(lambda: gguf.Reader(tmp_path / "x"))
    assert error.code == "type" and "\\u202e" in str(error)


def test_names_of_a_bin_in_messages(tmp_path: Path) -> None:
    path = tmp_path / f"{NASTY}.bin"
    path.write_bytes(sglbitnt_bytes.file(sglbitnt_bytes.tensor(b"w", 9)))
    error = error_of(lambda: sglbitnt.Reader(path))
    assert isinstance(error, SglbitntError) and "\\x1b[2J\\r\\n" in str(error)
    path.write_bytes(sglbitnt_bytes.file())
    with sglbitnt.Reader(path) as reader:
        assert error_of(lambda: reader.tensor(NASTY)).code == "missing_tensor"
    with pytest.raises(GgufError):
        gguf.Reader(path)
