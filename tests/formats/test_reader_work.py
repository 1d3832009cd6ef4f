"""What a small file can make a reader do: work and memory grow with the file, counts are bounded.

Operations are counted where they can be; where a built-in does the work, processor time of a file
is compared with that of one four times as large (16 times as much if it were quadratic).
"""

from __future__ import annotations

import gc
import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sglbitnt_bytes
from bitnet_ops import untrusted
from bitnet_ops.config import ModelConfig
from bitnet_ops.convert import ConvertError, gguf_tokenizer
from bitnet_ops.convert.checkpoint import Checkpoint
from bitnet_ops.convert.gguf_tokenizer import tokenizer_files
from bitnet_ops.formats import gguf, gguf_header, sglbitnt, sglbitnt_layouts
from bitnet_ops.formats.gguf import GgufError, Reader, StringArray
from gguf_bytes import gguf as gguf_file
from gguf_bytes import key, pad, record, string
from hf_writer import FAMILIES, config_dict

GROWTH, LIMIT = 4, 9  # a file so many times as large may take so many times as long
NORM = ("n", (8,), 0, bytes(32))


def seconds(act: Callable[[], Any]) -> float:
    times = []
    for _ in range(3):
        begin = time.process_time()
        act()
        times.append(time.process_time() - begin)
    return min(times)


def assert_linear(act: Callable[[int], Callable[[], Any]], small: int) -> None:
    few, many = act(small), act(GROWTH * small)
    assert seconds(many) < LIMIT * max(seconds(few), 0.002)


def rejected(code: str, act: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        with pytest.raises(ValueError) as caught:
            act()
        assert caught.value.code == code  # type: ignore[attr-defined]
        assert "\n" not in str(caught.value)

    return run


def small_tensors(names: list[str], shape: tuple[int, ...], number: int, nbytes: int) -> bytes:
    records = b"".join(
        record(name, shape, number, i * pad_to(nbytes)) for i, name in enumerate(names)
    )
    head = b"GGUF" + struct.pack("<IQQ", 3, len(names), 0)
    return pad(head + records, 32) + bytes(pad_to(nbytes) * len(names))


def pad_to(nbytes: int) -> int:
    return -(-nbytes // 32) * 32


# --- GGUF -----------------------------------------------------------------------------------------


def test_ambiguous_types_are_settled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of 4 x 256 fits both kinds of type 42; the last one tells which it is."""
    calls = 0
    fits = gguf._Rooms.fits

    def counting(self: Any, size: int | None, room: int, last: bool) -> bool:
        nonlocal calls
        calls += 1
        return fits(self, size, room, last)

    monkeypatch.setattr(gguf._Rooms, "fits", counting)
    counts = {}
    for many in (500, 1000):
        tensors = [(f"w{i}", (4, 256), 42, bytes(288)) for i in range(many)]
        tensors.append(("large", (16, 256), 42, bytes(16 * 256 // 64 * 18)))
        (tmp_path / "x").write_bytes(gguf_file([], tensors))
        calls = 0
        with Reader(tmp_path / "x") as reader:
            assert {info.type.name for info in reader.tensors.values()} == {"Q2_0"}
        counts[many] = calls
    assert counts[1000] <= 2.1 * counts[500] and counts[1000] <= 5 * 1001 + 1


def test_a_name_twice_among_many(tmp_path: Path) -> None:
    def act(count: int) -> Callable[[], None]:
        names = [f"w{min(i, count - 2)}" for i in range(count)]
        path = tmp_path / str(count)
        path.write_bytes(small_tensors(names, (8,), 0, 32))
        return rejected("tensor_name", lambda: Reader(path))

    assert_linear(act, 4000)


def test_many_short_arrays_are_not_read_ahead_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading ahead must not read the whole file once more for every array."""
    taken = 0
    take = gguf_header._HeaderReader._take

    def counting(self: Any, count: int, where: str) -> bytes:
        nonlocal taken
        taken += count
        return take(self, count, where)

    monkeypatch.setattr(gguf_header._HeaderReader, "_take", counting)
    keys = [key(f"k{i}", "[str]", ["x"]) for i in range(2000)]
    (tmp_path / "x").write_bytes(gguf_file(keys, [NORM]))
    with Reader(tmp_path / "x") as reader:
        assert all(values == ["x"] for values in reader.metadata.values())
        assert taken < 3 * reader.size


@pytest.mark.parametrize("text", [b"", b"ab", b"\xc3\xbc" * 40])
def test_strings_take_the_memory_of_the_file(tmp_path: Path, text: bytes) -> None:
    count = 300_000
    head = string("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, count)
    data = gguf_file([head + string(text) * count], [NORM])
    path = tmp_path / "x"
    path.write_bytes(data)
    del data
    gc.collect()
    tracemalloc.start()
    try:
        with Reader(path) as reader:
            held, maximum = tracemalloc.get_traced_memory()
            assert reader.metadata["tokenizer.ggml.tokens"][count - 1] == text.decode()
            size = reader.size
    finally:
        tracemalloc.stop()
    constant = 1 << 20
    assert held < size + constant and maximum < 2 * size + (
        8 << 20
    )  # a piece of the file at a time


def test_a_string_array_is_a_list_of_strings(tmp_path: Path) -> None:
    texts = [chr(0x41 + i % 50) * (i % 7) + "\u00fc" * (i % 3) for i in range(1000)]
    (tmp_path / "x").write_bytes(gguf_file([key("k", "[str]", texts)], [NORM]))
    with Reader(tmp_path / "x") as reader:
        found = reader.metadata["k"]
    assert isinstance(found, StringArray) and len(found) == 1000
    assert list(found) == texts and found == texts and found != texts[:-1] and found != 7
    assert [found[i] for i in range(-1000, 1000)] == texts + texts
    for cut in (slice(3, 400), slice(None, None, -7), slice(990, 2000), slice(5, 5)):
        assert found[cut] == texts[cut]
    with pytest.raises(IndexError):
        found[1000]
    assert "ABC" not in found and texts[17] in found and len(repr(found)) < 120


@pytest.mark.parametrize("at", [0, 1, 63, 64, 65, 70_000, 99_999])
def test_strings_across_the_pieces_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Damage is found wherever it lies, and its place in the file is right."""
    monkeypatch.setattr(gguf_header, "_PIECE_BYTES", 4093)
    texts = [b"t%d" % i for i in range(100_000)]
    whole = gguf_file([key("k", "[str]", texts)], [NORM]) if at == 0 else None
    if whole is not None:
        (tmp_path / "x").write_bytes(whole)
        with Reader(tmp_path / "x") as reader:
            assert reader.metadata["k"] == [text.decode() for text in texts]
    texts[at] = b"\xffq"
    data = gguf_file([key("k", "[str]", texts)], [NORM])
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(GgufError) as caught:
        Reader(tmp_path / "x")
    assert caught.value.code == "utf8"
    assert f"at byte {data.index(bytes([0xFF]))}" in str(caught.value)


@pytest.mark.parametrize(
    ("limit", "count", "code"),
    [("MAX_ARRAY_STRINGS", 4, "array_length"), ("MAX_STRING_BYTES", 4, "string_length")],
)
def test_limits_of_strings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, count: int, code: str
) -> None:
    for array in (["abcde"], ["abc", "abcde"], ["a"] * 5):
        (tmp_path / "x").write_bytes(gguf_file([key("k", "[str]", array)], [NORM]))
        with Reader(tmp_path / "x") as reader:
            assert reader.metadata["k"] == array
    monkeypatch.setattr(gguf_header, limit, count)
    array = ["a"] * 5 if code == "array_length" else ["abc", "abcde"]
    (tmp_path / "x").write_bytes(gguf_file([key("k", "[str]", array)], [NORM]))
    rejected(code, lambda: Reader(tmp_path / "x"))()


def test_unknown_keys_are_not_all_named(tmp_path: Path) -> None:
    from bitnet_ops.convert.gguf_config import ARCHITECTURES, _Keys

    metadata = {f"llama.odd{i}": i for i in range(1000)}
    with pytest.raises(ConvertError, match=r"llama\.odd0, .*more") as caught:
        _Keys(metadata, ARCHITECTURES["llama"]).reject_other_maths()
    assert len(str(caught.value)) < 600


def test_the_writer_joins_records_once(tmp_path: Path) -> None:
    def act(count: int) -> Callable[[], Any]:
        tensors = {f"{'w' * 500}{i}": ("F32", (8,)) for i in range(count)}
        return lambda: gguf.Writer(tmp_path / "x", {}, tensors)

    assert_linear(act, 3000)


# --- configs --------------------------------------------------------------------------------------


class CountingKey(str):
    """Counts comparisons; a dict compares a key only with one of the same hash."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountingKey.compared += 1
        return str.__eq__(self, other)


@pytest.mark.parametrize("reader", ["sglbitnt", "untrusted"])
def test_a_key_twice_takes_one_look(reader: str) -> None:
    look = sglbitnt_layouts._unique_keys if reader == "sglbitnt" else untrusted._unique
    CountingKey.compared = 0
    pairs = [(CountingKey(f"k{i}"), 1) for i in range(5000)] + [(CountingKey("k4999"), 1)]
    with pytest.raises(ValueError, match="k4999"):
        look(pairs)
    assert CountingKey.compared < 100


def test_a_config_of_many_keys_with_one_twice(tmp_path: Path) -> None:
    def act(count: int) -> Callable[[], None]:
        pairs = ",".join(f'"k{min(i, count - 2)}":1' for i in range(count))
        path = tmp_path / str(count)
        path.write_bytes(sglbitnt_bytes.file(config=f"{{{pairs}}}".encode()))
        return rejected("config_json", lambda: sglbitnt.Reader(path))

    assert_linear(act, 20_000)


# --- safetensors ----------------------------------------------------------------------------------


def write_source(folder: Path, count: int) -> Path:
    folder.mkdir()
    entries = {
        f"model.layers.{i}.x.weight": {
            "dtype": "F32",
            "shape": [4],
            "data_offsets": [16 * i, 16 * i + 16],
        }
        for i in range(count)
    }
    text = json.dumps(entries).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(16 * count)
    (folder / "model.safetensors").write_bytes(data)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_checkpoint_of_many_tensors(tmp_path: Path) -> None:
    """Its header is parsed once, not once a tensor."""

    def act(count: int) -> Callable[[], None]:
        source = Checkpoint(write_source(tmp_path / str(count), count))

        def read() -> None:
            for name in source.tensors:
                source.tensor(name)

        return read

    assert_linear(act, 1000)


def test_pages_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitnet_ops.convert import checkpoint as source

    opened = 0
    safe_open = source._safe_open

    def counting(path: Path) -> tuple[Any, int]:
        nonlocal opened
        opened += 1
        return safe_open(path)

    monkeypatch.setattr(source, "_safe_open", counting)
    monkeypatch.setattr(source, "_REMAP_SHARE", 0)
    found = Checkpoint(write_source(tmp_path / "x", 100))
    assert all(found.tensor(name).eq(0).all() for name in found.tensors)
    assert opened == 1 + 99  # anew after every tensor but the last


def test_a_checkpoint_of_too_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitnet_ops.convert import checkpoint as source

    monkeypatch.setattr(source, "_MAX_TENSORS", 99)
    write_source(tmp_path / "x", 100)
    rejected("tensor-count", lambda: Checkpoint(tmp_path / "x"))()
    monkeypatch.setattr(source, "_MAX_TENSORS", 100)
    assert len(Checkpoint(tmp_path / "x").tensors) == 100


def test_a_checkpoint_that_changes_while_it_is_read(tmp_path: Path) -> None:
    folder = write_source(tmp_path / "x", 3)
    source = Checkpoint(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-16])
    rejected("source-changed", lambda: source.tensor("model.layers.0.x.weight"))()


@pytest.mark.parametrize(
    ("name", "limit", "code"),
    [("config.json", "_CONFIG_LIMIT_BYTES", "config-json")],
)
def test_limits_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: str, code: str
) -> None:
    from bitnet_ops.convert import checkpoint as source

    folder = write_source(tmp_path / "x", 1)
    (folder / name).write_text(json.dumps({"a": "x" * 1000}))
    assert Checkpoint(folder).config["a"] == "x" * 1000
    monkeypatch.setattr(source, limit, 1000)
    rejected(code, lambda: Checkpoint(folder))()


# --- tokenizers of GGUF metadata ------------------------------------------------------------------

MODEL = ModelConfig.from_hf({**config_dict(FAMILIES["bitnet-offline"]), "vocab_size": 1 << 20})


def sentencepiece(tokens: list[str]) -> dict[str, Any]:
    import numpy as np

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(len(tokens), np.float32),
        "tokenizer.ggml.add_bos_token": False,
    }


def test_a_token_twice_among_many() -> None:
    def act(count: int) -> Callable[[], None]:
        tokens = [f"t{min(i, count - 2)}" for i in range(count)]
        return rejected("tokenizer-tokens", lambda: tokenizer_files(sentencepiece(tokens), MODEL))

    assert_linear(act, 10_000)


def test_merges_of_long_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece of every token is one: half a megabyte would give half a million merges."""
    tokens = ["a" * i for i in range(1, 1001)]
    with pytest.raises(ConvertError, match="squares") as caught:
        tokenizer_files(sentencepiece(tokens), MODEL)
    assert caught.value.code == "tokenizer-tokens"
    files, _ = tokenizer_files(sentencepiece(tokens[:50]), MODEL)
    assert len(json.loads(files["tokenizer.json"])["model"]["merges"]) == 49 * 50 // 2
    monkeypatch.setattr(gguf_tokenizer, "_MAX_MERGES", 1000)
    with pytest.raises(ConvertError, match="1000 ways") as caught:
        tokenizer_files(sentencepiece(tokens[:50]), MODEL)


def test_merges_of_blanks_are_not_split_up() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": [" " * (1 << 22)],
        "tokenizer.ggml.add_bos_token": False,
    }
    tracemalloc.start()
    try:
        with pytest.raises(ConvertError) as caught:
            tokenizer_files(metadata, MODEL)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.code == "tokenizer-merges" and len(str(caught.value)) < 400


def test_a_vocabulary_larger_than_the_model_is_not_read() -> None:
    small = ModelConfig.from_hf(config_dict(FAMILIES["bitnet-offline"]))

    class Untouched(list[str]):
        def __iter__(self) -> Any:
            raise AssertionError("read before its length was looked at")

    metadata = sentencepiece(["x"] * (small.vocab_size + 1))
    metadata["tokenizer.ggml.tokens"] = Untouched(metadata["tokenizer.ggml.tokens"])
    rejected("tokenizer-size", lambda: tokenizer_files(metadata, small))()
