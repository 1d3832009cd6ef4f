"""Version 2 of the model file: malformed files, bit flips, FORMAT.md kept true, views, writing.

Bytes come from sglbitnt2_bytes.py, which shares no code with the package.
"""

from __future__ import annotations

import os
import random
import re
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sglbitnt import FORMAT_MD, assert_documented, put, rejection
from test_sglbitnt_writer import configs, dense_tensors, names, octets
from torch import Tensor

import golden
import sglbitnt2_bytes as raw
from bitnet_ops import _runtime, ops
from bitnet_ops.formats.sglbitnt import Reader, SglbitntError, Writer
from sglbitnt2_malformed import MALFORMED2
from sglbitnt_bytes import pack_row

DTYPES = {0: torch.uint8, 1: torch.float32, 2: torch.float16, 3: torch.bfloat16}
KINDS = ("none", "tensor", "row", "group")
W = [((7 * i * i + i) % 3) - 1 for i in range(200)]
ROWS = pack_row(W) + pack_row(W[::-1])

# Every kind of scale and every dtype. All its bits get flipped below.
SMALL = raw.file(
    raw.Tensor(b"w.\xc3\xa9", 0, (2, 200), ROWS, scale=1.25),
    raw.Tensor(b"r", 0, (2, 200), ROWS, kind=2, scale_dtype=2),
    raw.Tensor(b"g", 0, (2, 200), ROWS, kind=3, scales=struct.pack("<4f", 0.5, 0.0, 2.0, 0.125)),
    raw.Tensor(b"a", 1, (3,), struct.pack("<3f", 1.5, -2.0, 3e38)),
    raw.Tensor(b"b", 2, (1, 2), struct.pack("<2e", 0.5, -65504.0)),
    raw.Tensor(b"c", 3, (1, 1, 2), bytes.fromhex("803f7fff")),
    config={"hidden_size": 200, "bitnet_ops": {"format_version": 1}},
)


def assert_same(reader: Reader, data: bytes) -> None:
    """`reader` shows exactly what the independent reader finds in `data`."""
    expected = raw.read(data)
    assert reader.version == 2
    assert list(reader.tensors) == [t["name"] for t in expected["tensors"]]
    for t in expected["tensors"]:
        info, tensor = reader.tensors[t["name"]], reader.tensor(t["name"])
        packed = t["dtype"] == 0
        shape = (t["dims"][0], 32 * -(-t["dims"][1] // 128)) if packed else t["dims"]
        assert (info.dtype, tensor.dtype, tuple(tensor.shape)) == (*[DTYPES[t["dtype"]]] * 2, shape)
        assert octets(tensor) == t["data"] and info.checksum == raw.xxh64(t["data"])
        assert info.in_features == (t["dims"][1] if packed else None)
        assert info.scale_kind == KINDS[t["kind"]]
        if t["kind"] == 1:
            assert struct.pack("<f", info.scale) == t["scale"]
        if t["kind"] >= 2:
            stored = reader.scales(t["name"]).to(DTYPES[t["scale_dtype"]])
            assert octets(stored) == t["scales"] and len(stored) == t["dims"][0]
            assert stored.dim() == t["kind"] - 1


# --- FORMAT.md ------------------------------------------------------------------------------------


def test_the_worked_example_is_a_file_and_reads_as_it_says(tmp_path: Path) -> None:
    data = bytearray()
    for line in FORMAT_MD.split("```example-2\n")[1].split("```")[0].splitlines():
        assert int(line[:4], 16) == len(data), "offsets are consecutive"
        data += bytes.fromhex(line[6:53])
    w = golden.golden_codes()[:200].tolist()
    assert data == raw.file(
        raw.Tensor(b"q_proj.weight", 0, (1, 200), pack_row(w), kind=3, scale_dtype=2,
                   scales=struct.pack("<2e", 0.5, 0.25)),
        raw.Tensor(b"norm.weight", 3, (2,), bytes.fromhex("803f00bf")),
        config={"hidden_size": 200, "bitnet_ops": {"format_version": 1}},
    )  # fmt: skip
    with Reader(put(tmp_path, bytes(data))) as reader:
        assert reader.scales("q_proj.weight").tolist() == [[0.5, 0.25]]
        assert ops.unpack(reader.tensor("q_proj.weight"), 200).tolist() == [w]
        assert reader.tensor("norm.weight").tolist() == [1.0, -0.5]


def test_xxh64_against_published_values_and_the_independent_one() -> None:
    published = {b"": 0xEF46DB3751D8E999, b"a": 0xD24EC4F1A98C6E5B, b"abc": 0x44BC2CF5AD770999}
    for data, value in published.items():
        assert raw.xxh64(data) == _runtime.xxh64(data) == value
    data = random.Random(1).randbytes(200)
    for size in range(200):
        assert raw.xxh64(data[:size]) == _runtime.xxh64(data[:size])


# --- malformed files ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MALFORMED2)
def test_malformed_file_is_rejected_with_its_code(tmp_path: Path, name: str) -> None:
    data, code = MALFORMED2[name]
    path = put(tmp_path, data)
    error = rejection(path)
    assert error.code == code, str(error)
    assert_documented(error, path)
    with pytest.raises(raw.Rejected):  # the independent reader agrees that it is malformed
        raw.read(data)


def test_truncation_at_every_byte(tmp_path: Path) -> None:
    for size in range(len(SMALL)):
        path = put(tmp_path, SMALL[:size])
        error = rejection(path)
        assert error.code == ("truncated" if size < 64 else "file_length")
        assert_documented(error, path)


def test_every_bit_flip_is_found(tmp_path: Path) -> None:
    path = put(tmp_path, SMALL)
    with open(path, "r+b") as file:
        for bit in range(8 * len(SMALL)):
            at, flipped = bit // 8, SMALL[bit // 8] ^ 1 << bit % 8
            os.pwrite(file.fileno(), bytes([flipped]), at)
            error = rejection(path)
            if bit % 97 == 0:  # the rest of a line is the same for all of them
                assert_documented(error, path)
            os.pwrite(file.fileno(), SMALL[at : at + 1], at)
    assert_same(Reader(path), SMALL)


def test_verdicts_agree_with_the_independent_reader(tmp_path: Path) -> None:
    """3000 mutants with right checksums; SGLBITNT_MUTANTS=1000000 makes a campaign of it."""
    generator = random.Random(20261122)
    accepted = mutants = int(os.environ.get("SGLBITNT_MUTANTS", "3000"))
    for _ in range(mutants):
        data = mutant(generator)
        path = put(tmp_path, data)
        try:
            assert_same(Reader(path), data)
        except SglbitntError as error:
            accepted -= 1
            assert_documented(error, path)
            with pytest.raises(raw.Rejected):
                raw.read(data)
    assert mutants / 20 < accepted < mutants * 0.9  # both verdicts are exercised


def mutant(generator: random.Random) -> bytes:
    """A file of one to three tensors, each argument of the writer wrong now and then."""

    def odd(*values: Any) -> Any:
        return generator.choice(values) if generator.random() < 0.1 else None

    tensors = []
    for i in range(generator.randint(1, 3)):
        kind, k = generator.randrange(1, 4), generator.choice([1, 100, 128, 129, 200])
        size = 2 * 32 * -(-k // 128)
        body = (
            bytes(generator.choice(b"\x55\x59\x65") for _ in range(size)) if k % 128 == 0 else None
        )
        tensors.append(
            raw.Tensor(
                bytes([97 + i]) if generator.random() < 0.95 else b"a",
                dims=(2, k),
                data=odd(b"", b"\x55" * 32, b"\x57" * size) or body,
                kind=kind if generator.random() < 0.95 else generator.randrange(6),
                scale_dtype=generator.choice([1, 2]) if generator.random() < 0.95 else 3,
                group_size=128 if generator.random() < 0.95 else 32,
                offset=odd(0, 64, 128, 2**63),
                nbytes=odd(0, 32, 64, 2**40),
                checksum=odd(0, 1) if generator.random() < 0.3 else None,
                scales=odd(b"\xff\xff", bytes(4), b"\0\0\0\x80") if kind > 1 else None,
            )
        )
    tensors.append(raw.Tensor(b"z", generator.choice([1, 2, 3]), (2,)))
    return raw.file(*tensors, gap=odd(b"\1") or b"\0", count=odd(0, 1, 9), reserved=odd(1) or 0)


# --- what a Reader hands out ----------------------------------------------------------------------


def test_every_tensor_is_an_aligned_view_of_the_mapping(tmp_path: Path) -> None:
    path = put(tmp_path, SMALL)
    reader = Reader(path)
    assert_same(reader, SMALL)
    begin = reader._bytes.data_ptr()
    for name, info in reader.tensors.items():
        tensor = reader.tensor(name)
        assert tensor.data_ptr() == begin + info.offset and tensor.data_ptr() % 64 == 0
    view = reader.tensor("a")
    reader.close()
    path.unlink()
    assert view.tolist()[:2] == [1.5, -2.0]
    view.zero_()  # copy-on-write: neither a crash nor a change of the file


def test_scales_come_as_float32_of_their_shape(tmp_path: Path) -> None:
    reader = Reader(put(tmp_path, SMALL))
    assert reader.scales("w.é").tolist() == [1.25]
    assert reader.scales("r").tolist() == [0.5, 0.5]
    assert reader.scales("g").tolist() == [[0.5, 0.0], [2.0, 0.125]]
    with pytest.raises(ValueError, match="expected a packed tensor, got a"):
        reader.scales("a")


def test_k_of_the_config_must_be_that_of_the_file(tmp_path: Path) -> None:
    path = put(tmp_path, SMALL)
    reader = Reader(path, check_codes=False)
    reader.check_in_features("g", 200)
    for wrong in (199, 201, 256):
        with pytest.raises(SglbitntError) as caught:
            reader.check_in_features("g", wrong)
        assert caught.value.code == "in_features"
        assert_documented(caught.value, path)


def test_checksums_are_checked_one_by_one(tmp_path: Path) -> None:
    data = bytearray(SMALL)
    data[64] ^= 1
    reader = Reader(put(tmp_path, bytes(data)), check_codes=False)
    reader.check_sum("g")
    with pytest.raises(SglbitntError, match=r"XXH64 .* of the data, got .*\[data_checksum\]"):
        reader.check_sum("w.é")


# --- the Writer -----------------------------------------------------------------------------------


@st.composite
def packed_tensors(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, int]:
    """Rows, scales of any kind, K and the group size."""
    n, k = draw(st.integers(1, 3)), draw(st.integers(1, 300))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    weight = ops.pack(torch.randint(-1, 2, (n, k), dtype=torch.int8, generator=generator))
    shape = draw(st.sampled_from([(1,), (n,), (n, -(-k // 128))]))
    dtype = (
        draw(st.sampled_from([torch.float32, torch.float16])) if shape != (1,) else torch.float32
    )
    scales = (torch.rand(shape, generator=generator) + 0.01).to(dtype)
    return weight, scales, k, 128 if len(shape) == 2 else 0


def as_raw(name: str, value: Any) -> raw.Tensor:
    if value[1] is None:
        number = {v: k for k, v in DTYPES.items()}[value[0].dtype]
        return raw.Tensor(name.encode(), number, tuple(value[0].shape), octets(value[0]))
    weight, scales, k, group = value
    kind = 3 if group else 1 if scales.numel() == 1 else 2
    dims, number = (len(weight), k), 1 if scales.dtype == torch.float32 else 2
    body, sides = octets(weight), octets(scales)
    return raw.Tensor(
        name.encode(), 0, dims, body, kind=kind, scale=sides, scale_dtype=number, scales=sides
    )


@settings(max_examples=150)
@given(configs, st.dictionaries(names, packed_tensors() | dense_tensors(), max_size=5))
def test_read_of_write_is_the_identity(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.bin"
        with Writer(path, config, len(tensors), names=tensors) as writer:
            for name, value in tensors.items():
                if value[1] is None:
                    writer.add_dense(name, value[0])
                else:
                    writer.add_packed(name, *value)
        data = path.read_bytes()
        expected = raw.file(*(as_raw(n, v) for n, v in tensors.items()), config=config)
        assert data == expected
        assert os.listdir(folder) == ["m.bin"]
        reader = Reader(path)
        assert reader.config == config
        assert_same(reader, data)


PACKED = torch.full((2, 64), 0x55, dtype=torch.uint8)
F32, NAN = torch.ones(2, 2), torch.full((2, 2), float("nan"))
REJECTIONS: dict[str, tuple[str, Callable[[Writer], None]]] = {
    "rows_of_another_count": ("scale_kind", lambda w: w.add_packed("n", PACKED, torch.ones(3))),
    "groups_unannounced": ("scale_kind", lambda w: w.add_packed("n", PACKED, F32)),
    "groups_of_another_count": (
        "scale_kind", lambda w: w.add_packed("n", PACKED, torch.ones(2, 3), 200, 128)),
    "group_size_32": ("group_size", lambda w: w.add_packed("n", PACKED, F32, 200, 32)),
    "scales_double": ("scale_dtype", lambda w: w.add_packed("n", PACKED, F32.double(), 200, 128)),
    "scales_negative": ("scale_value", lambda w: w.add_packed("n", PACKED, -F32, 200, 128)),
    "scales_minus_zero": ("scale_value", lambda w: w.add_packed("n", PACKED, F32 * -0.0, 200, 128)),
    "scales_nan": ("scale_value", lambda w: w.add_packed("n", PACKED, NAN, 200, 128)),
    "scales_subnormal": ("scale_value", lambda w: w.add_packed("n", PACKED, F32 * 1e-40, 200, 128)),
    "one_scale_zero": ("scale_value", lambda w: w.add_packed("n", PACKED, torch.zeros(1))),
}  # fmt: skip


@pytest.mark.parametrize("case", REJECTIONS)
def test_rejected_scales(tmp_path: Path, case: str) -> None:
    code, add = REJECTIONS[case]
    with Writer(tmp_path / "m.bin", {}, 1) as writer:
        with pytest.raises(SglbitntError) as caught:
            add(writer)
        writer.add_packed("n", PACKED, 1.0)
    assert caught.value.code == code and re.search("expected .* got ", str(caught.value))
    assert Reader(tmp_path / "m.bin").tensors["n"].in_features == 256


def test_version_1_holds_one_scale(tmp_path: Path) -> None:
    with pytest.raises(SglbitntError, match=r"use version 2 \[scale_kind\]"):
        with Writer(tmp_path / "m.bin", {}, 1, version=1) as writer:
            writer.add_packed("n", PACKED, F32, 200, 128)
    with pytest.raises(SglbitntError, match=r"version 1 or 2, got 3; .*\[version\]"):
        Writer(tmp_path / "m.bin", {}, 0, version=3)
    assert os.listdir(tmp_path) == []
