"""The GGUF reader and writer: against an independent writer, the official package, and damage.

Every rule has a file that breaks it; cut and flipped files may give GgufError and nothing else.
"""

from __future__ import annotations

import resource
import struct
from collections.abc import Callable
from pathlib import Path

import gguf as official
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitnet_ops.formats.gguf import GgufError, Reader, Writer, is_gguf
from gguf_bytes import gguf, i2s, key, pad, record, string

CODES = np.random.default_rng(0).integers(-1, 2, (4, 256)).astype(np.int8)
KEYS = [
    key("general.architecture", "str", "bitnet-b1.58"),
    key("a.u8", "u8", 200),
    key("a.i32", "i32", -5),
    key("a.u64", "u64", 2**60),
    key("a.f32", "f32", 0.5),
    key("a.bool", "bool", True),
    key("a.text", "str", "Grüße 🙂"),
    key("a.strings", "[str]", ["x", "", "Ġthe"]),
    key("a.floats", "[f32]", [0.5, -1.0]),
    key("a.none", "[i32]", []),
]
NORM = np.arange(6, dtype="<f4")
TENSORS = [
    ("blk.0.attn_q.weight", (4, 256), 36, i2s(CODES, 0.25)),
    ("output_norm.weight", (6,), 0, NORM.tobytes()),
    ("token_embd.weight", (3, 5), 1, np.arange(15, dtype="<f2").tobytes()),
]


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 64])
def test_reads_what_the_independent_writer_wrote(
    tmp_path: Path, version: int, alignment: int
) -> None:
    keys = [*KEYS, key("general.alignment", "u32", alignment)]
    path = written(tmp_path / "x", gguf(keys, TENSORS, version=version, alignment=alignment))
    with Reader(path) as reader:
        assert (reader.version, reader.alignment) == (version, alignment)
        assert reader.architecture == "bitnet-b1.58"
        m = reader.metadata
        assert (m["a.u8"], m["a.i32"], m["a.u64"], m["a.f32"]) == (200, -5, 2**60, 0.5)
        assert (m["a.bool"], m["a.text"]) == (True, "Grüße 🙂")
        assert m["a.strings"] == ["x", "", "Ġthe"]
        assert m["a.floats"].tolist() == [0.5, -1.0] and m["a.none"].tolist() == []
        assert list(reader.tensors) == [name for name, *_ in TENSORS]
        for name, shape, _, content in TENSORS:
            assert reader.tensors[name].shape == shape
            assert reader.data(name).tobytes() == content
            reader.release(name)
            assert reader.data(name).tobytes() == content
        kinds = [info.type.name for info in reader.tensors.values()]
        assert kinds == ["I2_S", "F32", "F16"]


def test_a_file_without_padding_at_its_end(tmp_path: Path) -> None:
    with Reader(written(tmp_path / "x", gguf(KEYS, TENSORS, pad_last=False))) as reader:
        assert reader.tensors["token_embd.weight"].nbytes == 30


def test_is_gguf(tmp_path: Path) -> None:
    assert is_gguf(written(tmp_path / "anything", gguf([], [])))
    assert is_gguf(written(tmp_path / "broken.gguf", b""))
    assert not is_gguf(written(tmp_path / "model.bin", b"SGLBITNT"))
    assert not is_gguf(tmp_path) and not is_gguf(tmp_path / "none.gguf")


# --- our writer -----------------------------------------------------------------------------------

METADATA = {
    "general.architecture": ("string", "llama"),
    "llama.block_count": ("uint32", 2),
    "llama.eps": ("float32", 0.5),
    "flag": ("bool", False),
    "tokens": ("[string]", ["a", "ü", ""]),
    "scores": ("[float32]", [1.0, -2.5]),
    "types": ("[int32]", [1, 3]),
}


def test_our_files_read_by_the_official_package(tmp_path: Path) -> None:
    path = tmp_path / "ours.gguf"
    codes = np.random.default_rng(3).integers(-1, 2, (5, 512)).astype(np.float32)
    stored = official.quants.quantize(codes * np.float32(0.5), official.GGMLQuantizationType.TQ2_0)
    tensors = {"w": ("TQ2_0", (5, 512)), "n": ("F32", (6,)), "e": ("BF16", (3, 5))}
    with Writer(path, METADATA, tensors) as writer:
        writer.add("w", stored)
        writer.add("n", NORM)
        writer.add("e", np.arange(15, dtype=np.uint16))
    theirs = official.GGUFReader(path)
    assert theirs.get_field("tokens").contents() == ["a", "ü", ""]
    assert theirs.get_field("llama.block_count").contents() == 2
    assert theirs.get_field("flag").contents() is False
    by_name = {t.name: t for t in theirs.tensors}
    assert [int(d) for d in by_name["w"].shape] == [512, 5]
    values = official.quants.dequantize(by_name["w"].data, by_name["w"].tensor_type)
    assert np.array_equal(values, codes * np.float32(0.5))
    with Reader(path) as ours:
        assert ours.metadata["tokens"] == ["a", "ü", ""]
        assert ours.metadata["scores"].tolist() == [1.0, -2.5]
        assert np.array_equal(ours.data("n").view("<f4"), NORM)
        assert ours.tensors["e"].shape == (3, 5)


def test_official_files_read_by_us(tmp_path: Path) -> None:
    path = tmp_path / "theirs.gguf"
    writer = official.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_token_list(["a", "b"])
    values = np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32)
    kinds = [official.GGMLQuantizationType[t] for t in ("Q8_0", "TQ1_0", "TQ2_0", "F16")]
    for kind in kinds:
        writer.add_tensor(kind.name, official.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with Reader(path) as reader:
        assert reader.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
        for kind in kinds:
            info = reader.tensors[kind.name]
            assert (info.type.name, info.shape) == (kind.name, (4, 256))
            expected = official.quants.quantize(values, kind)
            assert reader.data(kind.name).tobytes() == expected.tobytes()


def test_sizes_agree_with_the_official_table() -> None:
    from bitnet_ops.formats.gguf_header import TYPES

    for kind, (block, nbytes) in official.GGML_QUANT_SIZES.items():
        ours = TYPES[kind.name]
        assert (ours.number, ours.block, ours.block_bytes) == (int(kind), block, nbytes)


def test_writer_leaves_no_half_file(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="1 fewer"):
        with Writer(tmp_path / "x", {}, {"n": ("F32", (6,))}):
            pass
    with pytest.raises(KeyboardInterrupt):
        with Writer(tmp_path / "x", {}, {"n": ("F32", (6,))}) as writer:
            writer.add("n", NORM)
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "act"),
    [
        ("row_length", lambda p: Writer(p, {}, {"w": ("TQ2_0", (2, 128))})),
        ("dims", lambda p: Writer(p, {}, {"w": ("F32", (1,) * 5)})),
        ("value", lambda p: Writer(p, {"k": ("uint8", 256)}, {})),
        ("value", lambda p: Writer(p, {"k": ("string", 5)}, {})),
        ("order", lambda p: Writer(p, {}, {"n": ("F32", (6,))}).add("n", NORM)),
    ],
)
def test_writer_rejections(tmp_path: Path, code: str, act: Callable[[Path], None]) -> None:
    with pytest.raises(GgufError, match="expected") as caught:
        act(tmp_path / "x")
    assert caught.value.code == code


def test_writer_rejects_other_sizes_and_order(tmp_path: Path) -> None:
    tensors = {"n": ("F32", (6,)), "m": ("F32", (6,))}
    for name, data, code in (("n", NORM[:5], "size"), ("m", NORM, "order")):
        with pytest.raises(GgufError) as caught, Writer(tmp_path / "x", {}, tensors) as writer:
            writer.add(name, data)
        assert caught.value.code == code


# --- colliding and unreadable types ---------------------------------------------------------------


def one_tensor(architecture: str, number: int, shape: tuple[int, ...], nbytes: int) -> bytes:
    keys = [key("general.architecture", "str", architecture)]
    after = ("n", (8,), 0, bytes(32))
    return gguf(keys, [("w", shape, number, bytes(nbytes)), after])


@pytest.mark.parametrize(
    ("architecture", "number", "nbytes", "expected"),
    [
        ("llama", 42, 16 * 256 // 64 * 18, "Q2_0"),
        ("qwen3", 42, 16 * 256 // 128 * 34, "Q2_0_128"),
        ("bitnet-b1.58", 42, 16 * 256 // 64 * 18, "Q2_0"),
        ("llama", 39, 16 * 256 // 32 * 17, "MXFP4"),
        ("bitnet-b1.58", 36, 16 * 256 // 4 + 32, "I2_S"),
    ],
)
def test_colliding_numbers_are_told_apart_by_size(
    tmp_path: Path, architecture: str, number: int, nbytes: int, expected: str
) -> None:
    path = written(tmp_path / "x", one_tensor(architecture, number, (16, 256), nbytes))
    with Reader(path) as reader:
        assert reader.tensors["w"].type.name == expected


def test_small_tensors_take_their_type_from_the_large_ones(tmp_path: Path) -> None:
    """4 x 256 weights take 288 bytes with their padding, in blocks of 64 as in blocks of 128."""
    for block, nbytes in ((64, 18), (128, 34)):
        shapes = {"small": (4, 256), "large": (16, 256)}
        tensors = [
            (name, shape, 42, bytes(shape[0] * 256 // block * nbytes))
            for name, shape in shapes.items()
        ]
        with Reader(written(tmp_path / "x", gguf([], tensors))) as reader:
            kinds = {info.type.block for info in reader.tensors.values()}
            assert kinds == {block}
    with pytest.raises(GgufError, match="Q2_0 or Q2_0_128 apart") as caught:
        Reader(written(tmp_path / "x", gguf([], tensors[:1])))
    assert caught.value.code == "ambiguous"


@pytest.mark.parametrize(
    ("architecture", "number", "nbytes", "code", "text"),
    [
        ("bitnet-b1.58", 38, 288, "tiled", "TL1: its bytes are tiled"),
        ("bitnet-b1.58", 39, 320, "tiled", "TL2: its bytes are tiled"),
        ("bitnet", 42, 320, "tiled", "TL2: its bytes are tiled"),
        ("bitnet-25", 37, 1024, "tiled", "I8_S: it holds activations"),
        ("bitnet-b1.58", 134, 1024, "tiled", "IQ1_BN: the ternary layout of ik_llama.cpp"),
        ("bitnet-b1.58", 135, 1024, "tiled", "IQ2_BN: the ternary layout of ik_llama.cpp"),
        (
            "llama",
            42,
            320,
            "size",
            "288 bytes (Q2_0) or 272 bytes (Q2_0_128) or 168 bytes (STQ1_0) for [4, 256]",
        ),
        ("llama", 36, 256, "size", "expected 288 bytes (I2_S) for [4, 256], got room for 256"),
        ("llama", 99, 256, "type", "got number 99"),
        ("llama", 4, 256, "type", "got number 4"),
    ],
)
def test_types_that_cannot_be_read(
    tmp_path: Path, architecture: str, number: int, nbytes: int, code: str, text: str
) -> None:
    path = written(tmp_path / "x", one_tensor(architecture, number, (4, 256), nbytes))
    with pytest.raises(GgufError) as caught:
        Reader(path)
    assert caught.value.code == code
    assert text in str(caught.value) and "\n" not in str(caught.value)


# --- damage ---------------------------------------------------------------------------------------


def _head(*, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


def _tensor(shape: tuple[int, ...], number: int, offset: int, data: bytes = bytes(64)) -> bytes:
    return pad(_head(tensors=1, rest=record("w", shape, number, offset)), 32) + data


DAMAGED: list[tuple[str, bytes]] = [
    ("truncated", b"GGUF"),
    ("magic", b"GGML" + bytes(40)),
    ("version", b"GGUF" + struct.pack("<IQQ", 1, 0, 0)),
    ("version", b"GGUF" + struct.pack(">IQQ", 3, 0, 0)),
    ("tensor_count", _head(tensors=2**40, rest=bytes(64))),
    ("key_count", _head(keys=2**63, rest=bytes(64))),
    ("truncated", _head(keys=1, rest=struct.pack("<Q", 60) + b"abcdefgh")),
    ("string_length", _head(keys=1, rest=struct.pack("<Q", 2**50) + b"abcdefgh")),
    ("utf8", _head(keys=1, rest=key(b"\xff\xfe", "u8", 1) + bytes(16))),
    ("utf8", _head(keys=1, rest=key("k", "str", b"\xc3") + bytes(16))),
    ("key_name", _head(keys=1, rest=key("", "u8", 1) + bytes(16))),
    ("key_name", _head(keys=2, rest=key("k", "u8", 1) * 2)),
    ("value_type", _head(keys=1, rest=string("k") + struct.pack("<I", 13) + bytes(16))),
    ("value_type", _head(keys=1, rest=string("k") + struct.pack("<IIQ", 9, 99, 1) + bytes(16))),
    ("nested_array", _head(keys=1, rest=string("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(16))),
    ("array_length", _head(keys=1, rest=string("k") + struct.pack("<IIQ", 9, 4, 2**61))),
    ("array_length", _head(keys=1, rest=string("k") + struct.pack("<IIQ", 9, 8, 2**61))),
    ("bool", _head(keys=1, rest=string("k") + struct.pack("<I", 7) + b"\2")),
    ("bool", _head(keys=1, rest=string("k") + struct.pack("<IIQ", 9, 7, 2) + b"\1\2")),
    ("alignment", gguf([key("general.alignment", "u32", 48)], [])),
    ("alignment", gguf([key("general.alignment", "u32", 0)], [])),
    ("alignment", gguf([key("general.alignment", "str", "32")], [])),
    ("alignment", gguf([key("general.alignment", "u32", 2**31)], [])),
    ("ndim", _tensor((1, 1, 1, 1, 8), 0, 0)),
    ("ndim", _tensor((), 0, 0)),
    ("dims", _tensor((0, 8), 0, 0)),
    ("dims", _tensor((2**62, 2**62), 0, 0)),
    ("offset", _tensor((8,), 0, 8)),
    ("size", _tensor((8,), 0, 2**40)),
    ("size", _tensor((17,), 0, 0)),
    ("row_length", _tensor((1, 100), 35, 0)),
    ("tensor_name", gguf([], [("w", (8,), 0, bytes(32)), ("w", (8,), 0, bytes(32))])),
    ("overlap", pad(_head(tensors=2, rest=record("a", (8,), 0, 0) + record("b", (8,), 0, 0)), 32)
     + bytes(32)),
    ("size", pad(_head(tensors=2, rest=record("a", (8,), 0, 0) + record("b", (8,), 0, 64)), 32)
     + bytes(96)),
]  # fmt: skip


@pytest.mark.parametrize(("code", "data"), DAMAGED, ids=[f"{i}-{c}" for i, (c, _) in
                                                         enumerate(DAMAGED)])  # fmt: skip
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, code: str, data: bytes) -> None:
    with pytest.raises(GgufError) as caught:
        Reader(written(tmp_path / "x", data))
    text = str(caught.value)
    assert caught.value.code == code, text
    assert "expected" in text and "got" in text and ";" in text and "\n" not in text


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(GgufError, match="readable file") as caught:
        Reader("no-such-file.gguf")
    assert caught.value.code == "io"


WHOLE = gguf(KEYS, TENSORS)


def outcome(path: Path) -> str:
    """The code of the error, or nothing; reads every tensor that is promised."""
    try:
        with Reader(path) as reader:
            for name, info in reader.tensors.items():
                assert reader.data(name).nbytes == info.nbytes
        return ""
    except GgufError as error:
        assert "\n" not in str(error)
        return error.code


def test_every_cut_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x"
    # what is cut off the end of the last tensor's padding is no loss
    needed = len(WHOLE) - (-TENSORS[-1][1][0] * TENSORS[-1][1][1] * 2) % 32
    for length in range(needed):
        path.write_bytes(WHOLE[:length])
        assert outcome(path) != "", length
    path.write_bytes(WHOLE[:needed])
    assert outcome(path) == ""


@given(flips=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(1, 255)), min_size=1,
                      max_size=4))  # fmt: skip
@settings(max_examples=500, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
def test_flipped_bits_never_crash(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE)
    for at, mask in flips:
        data[at] ^= mask
    outcome(written(tmp_path / "x", bytes(data)))


def test_no_damage_costs_memory(tmp_path: Path) -> None:
    """Counts and lengths that a small file only claims must not be allocated."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i, (_, data) in enumerate(DAMAGED):
        outcome(written(tmp_path / str(i), data))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # KiB
