"""The model file read: malformed files, truncation and bit flips, and FORMAT.md kept true.

Bytes come from sglbitnt_bytes.py, which shares no code with the package.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import socket
import struct
from pathlib import Path

import pytest
import torch

import golden
import sglbitnt_bytes as raw
from bitnet_ops import _runtime, ops
from bitnet_ops.formats.sglbitnt import Reader, SglbitntError, model_file
from sglbitnt2_malformed import MALFORMED2
from sglbitnt_malformed import MALFORMED

FORMAT_MD = (Path(__file__).resolve().parents[2] / "FORMAT.md").read_text(encoding="utf-8")

# One tensor of every dtype; the packed one has 2 rows of K = 200. All its bits get flipped below.
W = [((7 * i * i + i) % 3) - 1 for i in range(200)]
SMALL = raw.file(
    raw.tensor(b"w.\xc3\xa9", 0, (2, 64), raw.pack_row(W) + raw.pack_row(W[::-1]), scale=1.25),
    raw.tensor(b"a", 1, (3,), struct.pack("<3f", 1.5, -2.0, 3e38)),
    raw.tensor(b"b", 2, (1, 2), struct.pack("<2e", 0.5, -65504.0)),
    raw.tensor(b"c", 3, (1, 1, 2), bytes.fromhex("803f7fff")),
    config={"hidden_size": 200, "bitnet_ops": {"format_version": 1}},
)
DATA_RANGES = [range(SMALL.index(body), SMALL.index(body) + len(body))
               for *_, body in raw.read(SMALL)["tensors"]]  # fmt: skip


def put(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "m.bin"
    path.write_bytes(data)
    return path


def rejection(path: Path, check_codes: bool = True) -> SglbitntError:
    with pytest.raises(SglbitntError) as caught:
        Reader(path, check_codes)
    return caught.value


def assert_same(reader: Reader, data: bytes) -> None:
    """`reader` shows exactly what the independent reader finds in `data`."""
    expected = raw.read(data)
    assert list(reader.tensors) == [name for name, *_ in expected["tensors"]]
    dtypes = {0: torch.uint8, 1: torch.float32, 2: torch.float16, 3: torch.bfloat16}
    for name, dtype, dims, scale, body in expected["tensors"]:
        info, tensor = reader.tensors[name], reader.tensor(name)
        assert (info.dtype, info.shape, info.nbytes) == (dtypes[dtype], dims, len(body))
        assert (tensor.dtype, tuple(tensor.shape)) == (dtypes[dtype], dims)
        assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == body
        assert bytes(reader.memory(name)) == body == data[info.offset : info.offset + info.nbytes]
        assert (info.scale is None) == (dtype != 0)
        assert info.scale is None or struct.pack("<f", info.scale) == scale


# --- FORMAT.md ------------------------------------------------------------------------------------


def documented_messages() -> dict[str, list[re.Pattern[str]]]:
    """Code -> patterns of its messages, from the table of rules: `<...>` stands for anything."""
    out: dict[str, list[re.Pattern[str]]] = {}
    for line in FORMAT_MD.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != 6 or not cells[1].isdigit():
            continue
        codes, texts = (re.findall(r"`([^`]+)`", cell) for cell in cells[3:5])
        patterns = [
            re.compile(".+".join(map(re.escape, re.split(r"<[^>]+>", text)))) for text in texts
        ]
        for code in codes:
            out.setdefault(code, []).extend(patterns)
    return out


MESSAGES = documented_messages()


def assert_documented(error: SglbitntError, path: Path) -> None:
    """The line is the one FORMAT.md promises for its code."""
    line = str(error)
    assert "\n" not in line and line.isprintable()
    assert line.startswith(f"{path}: ") and line.endswith(f" [{error.code}]")
    text = line.removeprefix(f"{path}: ").removesuffix(f" [{error.code}]")
    if error.code != "io":
        where, _, text = text.partition(": expected ")
        assert re.fullmatch(r'header|tensor \d+( "[^\n]*"(\.\.\.)?)?', where), where
        text = f"expected {text}"
    assert any(pattern.fullmatch(text) for pattern in MESSAGES[error.code]), line


def test_every_code_is_documented_and_every_documented_code_exists() -> None:
    of_the_reader = {*_runtime.format_error_codes(), "config_json", "private_block"}
    assert set(MESSAGES) == of_the_reader
    # the two that need more than a file: a path, and the true K
    assert {code for _, code in (MALFORMED | MALFORMED2).values()} == of_the_reader - {
        "io", "in_features"
    }  # fmt: skip


def test_the_worked_example_is_a_file_and_reads_as_it_says(tmp_path: Path) -> None:
    block = FORMAT_MD.split("```example\n")[1].split("```")[0]
    data = bytearray()
    for line in block.splitlines():
        offset, octets = line[:4], line[6:53]
        assert int(offset, 16) == len(data), "offsets are consecutive"
        data += bytes.fromhex(octets)
    assert len(data) == 197
    with Reader(put(tmp_path, bytes(data))) as reader:
        assert reader.config == {"hidden_size": 100, "bitnet_ops": {"format_version": 1}}
        weight = reader.tensor("q_proj.weight")
        reader.check_in_features("q_proj.weight", 100)
        assert torch.equal(ops.unpack(weight, 100)[0], golden.golden_codes()[:100])
        assert reader.tensors["q_proj.weight"].scale == 0.5
        assert reader.tensor("norm.weight").tolist() == [1.0, -0.5]
        assert reader.tensor("norm.weight").dtype == torch.bfloat16
    w = golden.golden_codes()[:100].tolist()
    assert data == raw.file(
        raw.tensor(b"q_proj.weight", 0, (1, 32), raw.pack_row(w), scale=0.5),
        raw.tensor(b"norm.weight", 3, (2,), bytes.fromhex("803f00bf")),
        config={"hidden_size": 100, "bitnet_ops": {"format_version": 1}},
    )


def test_the_golden_vector_of_the_page() -> None:
    text = FORMAT_MD.split("```golden\n")[1].split("\n```")[0]
    assert text == golden.I2S_A_HEX
    assert raw.pack_row(golden.golden_codes().tolist()).hex() == text


# --- malformed files ------------------------------------------------------------------------------


def test_the_table_is_as_long_as_promised() -> None:
    assert len(MALFORMED) >= 60


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_file_is_rejected_with_its_code(tmp_path: Path, name: str) -> None:
    data, code = MALFORMED[name]
    path = put(tmp_path, data)
    error = rejection(path)
    assert error.code == code, str(error)
    assert_documented(error, path)
    with pytest.raises(raw.Rejected):  # the independent reader agrees that it is malformed
        raw.read(data)


@pytest.mark.parametrize("name", [n for n, (_, c) in MALFORMED.items() if c in
                                  ("invalid_code", "non_finite")])  # fmt: skip
def test_data_are_not_scanned_without_check_codes(tmp_path: Path, name: str) -> None:
    reader = Reader(put(tmp_path, MALFORMED[name][0]), check_codes=False)
    assert len(reader.tensors) >= 1


def test_unreadable_paths(tmp_path: Path) -> None:
    fifo, sock, odd = tmp_path / "fifo", tmp_path / "socket", tmp_path / "odd\udcff\n"
    os.mkfifo(fifo)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(sock))
        for path in (tmp_path / "missing", tmp_path, fifo, sock, Path("/dev/null")):
            error = rejection(path)
            assert error.code == "io"
            assert_documented(error, path)
    assert rejection(odd).code == "io"
    assert rejection(Path(f"{tmp_path}/a\0b")).code == "io"


def test_every_limit_itself_is_allowed(tmp_path: Path) -> None:
    largest = raw.file(
        raw.tensor(b"n" * 1024, 1, (1,) * 8),
        raw.tensor("é".encode() * 512, 2, (1,)),
        raw.tensor(b" ", 0, (1, 32), scale=raw.u32(0x00800000)),  # the smallest normal scale
        raw.tensor(b"\xc2\xa0\xf4\x8f\xbf\xbf", 0, (1, 32), scale=raw.u32(0x7F7FFFFF)),
        config=b"{" + b" " * (2**20 - 2) + b"}",
    )
    assert_same(Reader(put(tmp_path, largest)), largest)
    many = raw.file(*(raw.tensor(b"%x" % i, 2, (1,)) for i in range(65536)))
    assert len(Reader(put(tmp_path, many)).tensors) == 65536
    empty = raw.file()
    assert Reader(put(tmp_path, empty)).tensors == {}


# --- every byte, every bit ------------------------------------------------------------------------


def test_cve_2024_32878_truncation_at_every_byte(tmp_path: Path) -> None:
    for size in range(len(SMALL)):
        path = put(tmp_path, SMALL[:size])
        error = rejection(path)
        assert error.code in {"truncated", "tensor_count"}
        assert_documented(error, path)


def test_every_bit_flip_is_rejected_or_another_well_formed_file(tmp_path: Path) -> None:
    rejected = accepted = 0
    for bit in range(8 * len(SMALL)):
        data = bytearray(SMALL)
        data[bit // 8] ^= 1 << (bit % 8)
        path = put(tmp_path, bytes(data))
        try:
            assert_same(Reader(path), bytes(data))
            accepted += 1
        except SglbitntError as error:
            assert_documented(error, path)
            with pytest.raises(raw.Rejected):
                raw.read(bytes(data))
            rejected += 1
    in_data = 8 * sum(map(len, DATA_RANGES))
    assert rejected > 8 * len(SMALL) - in_data - 8 * 64  # names, config and scale may vary
    assert accepted > 0


def test_flips_of_magic_version_lengths_and_counts_are_all_rejected(tmp_path: Path) -> None:
    count_at = 16 + SMALL[16:].index(b"}}") + 2
    for bit in [*range(8 * 16), *range(8 * count_at, 8 * (count_at + 4))]:
        data = bytearray(SMALL)
        data[bit // 8] ^= 1 << (bit % 8)
        assert rejection(put(tmp_path, bytes(data))).code


def mutant(generator: random.Random) -> bytes:
    """SMALL with one to three edits: a number overwritten, a bit flipped, bytes cut or repeated."""
    data = bytearray(SMALL)
    for _ in range(generator.randint(1, 3)):
        at, size = generator.randrange(len(data) + 1), generator.randint(1, 40)
        match generator.randrange(5):
            case 0:
                data[at : at + 4] = raw.u32(
                    generator.choice([0, 1, 2, 3, 32, 64, 2**31, 2**32 - 1])
                )
            case 1:
                data[at : at + 1] = bytes([generator.randrange(256)])
            case 2:
                del data[at : at + size]
            case 3:
                data[at:at] = data[at : at + size]
            case 4:
                data[at : at + 1] = bytes(
                    b ^ 1 << generator.randrange(8) for b in data[at : at + 1]
                )
    return bytes(data)


def test_verdicts_agree_with_the_independent_reader(tmp_path: Path) -> None:
    """3000 mutants here; SGLBITNT_MUTANTS=1000000 makes a campaign of it."""
    generator = random.Random(20261121)
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
    assert mutants / 100 < accepted < mutants / 2  # both verdicts are exercised


# --- the true K -----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 31, 32, 33, 96, 97, 100, 127, 128, 129, 200, 256, 576])
def test_in_features_against_row_bytes_and_padding(tmp_path: Path, k: int) -> None:
    rows = [raw.pack_row([(-1) ** (i + n) for i in range(k)]) for n in range(3)]
    row_bytes = len(rows[0])
    path = put(tmp_path, raw.file(raw.tensor(b"w", 0, (3, row_bytes), b"".join(rows))))
    reader = Reader(path)
    reader.check_in_features("w", k)
    lowest, highest = 4 * row_bytes - 127, 4 * row_bytes
    for wrong in {lowest - 1, highest + 1, 0, -1, 2**31, 2**63}:
        with pytest.raises(SglbitntError) as caught:
            reader.check_in_features("w", wrong)
        assert caught.value.code == "in_features"
    if k < highest:
        reader.check_in_features("w", k + 1)  # one more weight, which is 0: cannot be told
    if k > lowest:
        with pytest.raises(SglbitntError) as caught:  # the last weight is not 0
            reader.check_in_features("w", k - 1)
        assert caught.value.code == "padding_code"
        assert_documented(caught.value, path)


@pytest.mark.parametrize("position", range(100, 128))
def test_every_padding_position_is_checked(tmp_path: Path, position: int) -> None:
    weights = [0] * 128
    weights[position] = 1
    data = raw.pack_row([0] * 128) + raw.pack_row(weights)
    reader = Reader(put(tmp_path, raw.file(raw.tensor(b"w", 0, (2, 32), data))))
    reader.check_in_features("w", position + 1)
    with pytest.raises(SglbitntError, match=r"row 1; .*\[padding_code\]"):
        reader.check_in_features("w", 100)


def test_in_features_of_a_dense_tensor(tmp_path: Path) -> None:
    path = put(tmp_path, SMALL)
    with pytest.raises(SglbitntError) as caught:
        Reader(path).check_in_features("a", 3)
    assert caught.value.code == "in_features"
    assert_documented(caught.value, path)


# --- what a Reader hands out ----------------------------------------------------------------------


def test_contents_of_a_file_of_the_independent_writer(tmp_path: Path) -> None:
    reader = Reader(put(tmp_path, SMALL))
    assert_same(reader, SMALL)
    assert reader.config == {"hidden_size": 200, "bitnet_ops": {"format_version": 1}}
    assert reader.tensor("c").tolist() == [[[1.0, -3.3895313892515355e38]]]
    codes = ops.unpack(reader.tensor("w.é"), 200)
    assert codes.tolist() == [W, W[::-1]]
    counts = tuple(2 * W.count(w) for w in (-1, 0, 1))
    assert reader.code_counts("w.é") == (counts[0], counts[1] + 2 * 56, counts[2])
    assert reader.code_counts("a") == (0, 0, 0)


def test_packed_tensors_are_views_that_keep_the_file(tmp_path: Path) -> None:
    path = put(tmp_path, SMALL)
    with Reader(path) as reader:
        first, second = reader.tensor("w.é"), reader.tensor("w.é")
        memory = reader.memory("w.é")
        assert first.data_ptr() == second.data_ptr()
    path.unlink()
    assert bytes(first.reshape(-1).tolist()) == bytes(memory) == raw.read(SMALL)["tensors"][0][4]
    with pytest.raises(TypeError):
        memory[0] = 0
    with pytest.raises(SglbitntError, match="missing_tensor"):
        reader.tensor("w.é")


def test_writing_through_a_view_cannot_reach_the_file(tmp_path: Path) -> None:
    path = put(tmp_path, SMALL)
    view = Reader(path).tensor("w.é")
    view.zero_()
    assert int(view.sum()) == 0
    assert path.read_bytes() == SMALL
    assert_same(Reader(path), SMALL)


def test_unknown_name(tmp_path: Path) -> None:
    reader = Reader(put(tmp_path, SMALL))
    for call in (reader.tensor, reader.memory, reader.code_counts):
        with pytest.raises(SglbitntError, match=r"4 tensors, got 'x'; .*\[missing_tensor\]"):
            call("x")


def test_a_folder_stands_for_its_model_file(tmp_path: Path) -> None:
    assert model_file(tmp_path) == tmp_path / "model.bin"
    assert model_file(tmp_path / "m.bin") == tmp_path / "m.bin"


def test_the_error_survives_pickling_between_processes() -> None:
    error = pickle.loads(pickle.dumps(SglbitntError("magic", "text")))
    assert (error.code, str(error)) == ("magic", "text [magic]")
