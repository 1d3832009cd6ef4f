"""The model file written: round trips, rejections, and that a failure leaves nothing behind.

The bytes are compared with those of sglbitnt_bytes.py, which shares no code with the package.
"""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sglbitnt_bytes as raw
from bitnet_ops.formats import atomic
from bitnet_ops.formats.sglbitnt import Reader, SglbitntError, Writer

CONFIG = {"hidden_size": 128, "bitnet_ops": {"format_version": 1}}
PACKED = torch.full((2, 32), 0x55, dtype=torch.uint8)
DENSE = torch.arange(6, dtype=torch.float32).view(2, 3)
NUMBER = {torch.uint8: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


def octets(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


# --- read(write(x)) == x --------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=24).filter(
    lambda s: len(s.encode()) <= 1024
)
scales = st.floats(2.0**-126, 3.4028234663852886e38, width=32)
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
values = st.recursive(
    leaves | texts, lambda x: st.lists(x, max_size=3) | st.dictionaries(texts, x, max_size=3)
)
configs = st.dictionaries(texts.filter(lambda key: key != "bitnet_ops"), values, max_size=5)


@st.composite
def packed_tensors(draw: st.DrawFn) -> tuple[Tensor, float]:
    n, blocks = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    seed = draw(st.integers(0, 2**31))
    codes = torch.randint(0, 3, (4, n, 32 * blocks), generator=torch.Generator().manual_seed(seed))
    weight = sum(codes[i] << 2 * i for i in range(4)).to(torch.uint8)
    return weight, draw(scales)


@st.composite
def dense_tensors(draw: st.DrawFn) -> tuple[Tensor, None]:
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=8))
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(bits)
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randint(limits.min, limits.max, shape, dtype=bits, generator=generator)
    tensor = tensor.view(dtype)  # any bit pattern: subnormals, minus zero, the largest
    return torch.where(torch.isfinite(tensor), tensor, torch.zeros((), dtype=dtype)), None


@settings(max_examples=200)
@given(configs, st.dictionaries(names, packed_tensors() | dense_tensors(), max_size=5))
def test_read_of_write_is_the_identity(
    config: dict[str, Any], tensors: dict[str, tuple[Tensor, float | None]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.bin"
        with Writer(path, config, len(tensors), names=tensors, version=1) as writer:
            for name, (tensor, scale) in tensors.items():
                if scale is None:
                    writer.add_dense(name, tensor)
                else:
                    writer.add_packed(name, tensor, scale)
        records = [
            raw.tensor(
                name.encode(), NUMBER[t.dtype], tuple(t.shape), octets(t), scale=scale or 0.0
            )
            for name, (t, scale) in tensors.items()
        ]
        assert path.read_bytes() == raw.file(*records, config=config)
        assert os.listdir(folder) == ["m.bin"]
        reader = Reader(path)
        assert reader.config == config
        assert list(reader.tensors) == list(tensors)
        for name, (tensor, scale) in tensors.items():
            got = reader.tensor(name)
            assert (got.dtype, got.shape, octets(got)) == (
                tensor.dtype,
                tensor.shape,
                octets(tensor),
            )
            assert reader.tensors[name].scale == scale


def test_layout_of_memory_does_not_matter(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(DENSE.bfloat16().t())
    strided = PACKED.repeat(2, 2)[::2, ::2].clone().repeat(1, 2)[:, 10:42]
    assert not parameter.is_contiguous() and not strided.is_contiguous()
    with Writer(tmp_path / "m.bin", CONFIG, 2) as writer:
        writer.add_dense("d", parameter)
        writer.add_packed("p", strided, torch.tensor([0.1]), in_features=100)
    reader = Reader(tmp_path / "m.bin")
    assert torch.equal(reader.tensor("d"), parameter.detach())
    assert torch.equal(reader.tensor("p"), strided)
    assert reader.tensors["p"].scale == struct.unpack("<f", struct.pack("<f", 0.1))[0]


# --- rejections -----------------------------------------------------------------------------------

HOLE = PACKED.clone()
HOLE[1, 7] = 0b01_11_01_01
UNPADDED = PACKED.clone()
UNPADDED[1, 31] = 0b01_01_01_10  # weight 127 of row 1


def nan(dtype: torch.dtype) -> Tensor:
    return torch.tensor([0.0, float("nan")], dtype=dtype)


REJECTIONS: dict[str, tuple[str, Callable[[Writer], None]]] = {
    "name_empty": ("name_length", lambda w: w.add_dense("", DENSE)),
    "name_1025_bytes": ("name_length", lambda w: w.add_dense("é" * 512 + "n", DENSE)),
    "name_surrogate": ("name_utf8", lambda w: w.add_dense("\ud800", DENSE)),
    "name_newline": ("name_control", lambda w: w.add_dense("a\n", DENSE)),
    "name_c1": ("name_control", lambda w: w.add_dense("a\x85", DENSE)),
    "name_twice": ("name_duplicate", lambda w: w.add_dense("first", DENSE)),
    "not_announced": ("writer_count", lambda w: w.add_dense("third", DENSE)),
    "packed_as_dense": ("dtype", lambda w: w.add_dense("n", PACKED)),
    "dense_as_packed": ("dtype", lambda w: w.add_packed("n", DENSE, 1.0)),
    "int8": ("dtype", lambda w: w.add_packed("n", PACKED.to(torch.int8), 1.0)),
    "float64": ("dtype", lambda w: w.add_dense("n", DENSE.double())),
    "meta": ("dtype", lambda w: w.add_dense("n", DENSE.to("meta"))),
    "sparse": ("dtype", lambda w: w.add_dense("n", DENSE.to_sparse())),
    "packed_1d": ("ndim", lambda w: w.add_packed("n", PACKED.view(-1), 1.0)),
    "packed_3d": ("ndim", lambda w: w.add_packed("n", PACKED.view(1, 2, 32), 1.0)),
    "scalar": ("ndim", lambda w: w.add_dense("n", torch.tensor(1.0))),
    "nine_dims": ("ndim", lambda w: w.add_dense("n", torch.zeros((1,) * 9))),
    "no_rows": ("dim", lambda w: w.add_packed("n", PACKED[:0], 1.0)),
    "dense_empty": ("dim", lambda w: w.add_dense("n", DENSE[:, :0])),
    "row_bytes_31": ("packed_shape", lambda w: w.add_packed("n", PACKED[:, :31], 1.0)),
    "code_3": ("invalid_code", lambda w: w.add_packed("n", HOLE, 1.0)),
    "nan_f32": ("non_finite", lambda w: w.add_dense("n", nan(torch.float32))),
    "nan_bf16": ("non_finite", lambda w: w.add_dense("n", nan(torch.bfloat16))),
    "infinite_f16": ("non_finite", lambda w: w.add_dense("n", DENSE.half() / 0)),
    "scale_zero": ("scale_value", lambda w: w.add_packed("n", PACKED, 0.0)),
    "scale_negative": ("scale_value", lambda w: w.add_packed("n", PACKED, -1.0)),
    "scale_nan": ("scale_value", lambda w: w.add_packed("n", PACKED, float("nan"))),
    "scale_subnormal": ("scale_value", lambda w: w.add_packed("n", PACKED, 1e-40)),
    "scale_rounds_to_inf": ("scale_value", lambda w: w.add_packed("n", PACKED, 3.5e38)),
    "k_too_large": ("in_features", lambda w: w.add_packed("n", PACKED, 1.0, in_features=129)),
    "k_zero": ("in_features", lambda w: w.add_packed("n", PACKED, 1.0, in_features=0)),
    "padding": ("padding_code", lambda w: w.add_packed("n", UNPADDED, 1.0, in_features=127)),
}


@pytest.mark.parametrize("case", REJECTIONS)
def test_rejected_tensor_leaves_the_file_as_it_was(tmp_path: Path, case: str) -> None:
    code, add = REJECTIONS[case]
    names = {"first", "n", "", "é" * 512 + "n", "\ud800", "a\n", "a\x85"}
    with Writer(tmp_path / "m.bin", CONFIG, 2, names=None) as writer:
        writer._promised = names  # every name but "third"; the count stays 2
        writer.add_dense("first", DENSE)
        with pytest.raises(SglbitntError) as caught:
            add(writer)
        writer.add_packed("n", PACKED, 1.0)
    assert caught.value.code == code
    assert "expected " in str(caught.value) and " got " in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'm.bin'}: tensor 1 ")
    assert list(Reader(tmp_path / "m.bin").tensors) == ["first", "n"]


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ([], "config_json"),
        ({"a": float("nan")}, "config_json"),
        ({"a": {1, 2}}, "config_json"),
        ({1: "integer key"}, "config_json"),
        ({"a": (1, 2)}, "config_json"),
        ({"a": "\ud800"}, "config_json"),
        ({"a": "x" * 2**20}, "config_length"),
        ({"bitnet_ops": {"format_version": 2}}, "private_block"),
        ({"bitnet_ops": {}}, "private_block"),
        ({"bitnet_ops": 1}, "private_block"),
    ],
)
def test_rejected_config(tmp_path: Path, config: Any, code: str) -> None:
    with pytest.raises(SglbitntError) as caught:
        Writer(tmp_path / "m.bin", config, 0)
    assert caught.value.code == code
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("count", [-1, 65537])
def test_rejected_count(tmp_path: Path, count: int) -> None:
    with pytest.raises(SglbitntError, match="tensor_count"):
        Writer(tmp_path / "m.bin", CONFIG, count)


def test_writer_outside_its_block(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "m.bin", CONFIG, 0)
    with pytest.raises(SglbitntError, match="writer_closed"):
        writer.add_dense("n", DENSE)
    with writer:
        pass
    with pytest.raises(SglbitntError, match="writer_closed"):
        writer.add_dense("n", DENSE)


# --- nothing half-written -------------------------------------------------------------------------


def test_promises_of_count_and_names_are_held(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    with pytest.raises(SglbitntError, match=r"2 tensors as announced, got 1; .*missing: b \["):
        with Writer(path, CONFIG, 2, names=["a", "b"]) as writer:
            writer.add_dense("a", DENSE)
    with pytest.raises(SglbitntError, match=r"1 tensors as announced, got one more"):
        with Writer(path, CONFIG, 1) as writer:
            writer.add_dense("a", DENSE)
            writer.add_dense("b", DENSE)
    with pytest.raises(SglbitntError, match=r"expected 2 names, got 1"):
        Writer(path, CONFIG, 2, names=["a", "a"])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt, SystemExit, MemoryError])
def test_any_exception_removes_the_file_and_keeps_the_old_one(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(b"old")
    with pytest.raises(error):
        with Writer(path, CONFIG, 1) as writer:
            writer.add_dense("a", DENSE)
            assert len(os.listdir(tmp_path)) == 2
            raise error
    assert os.listdir(tmp_path) == ["m.bin"]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_failing_file_system_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic.os, function, fail)
    with pytest.raises(SglbitntError, match=r"got error .*No space left on device.*\[io\]"):
        with Writer(tmp_path / "m.bin", CONFIG, 1) as writer:
            writer.add_dense("a", DENSE)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_in_the_middle_of_a_tensor(tmp_path: Path) -> None:
    """The operating system forbids the file to grow beyond 100 kB, as a full disk would."""
    script = """
        import resource, sys, torch
        from bitnet_ops.formats.sglbitnt import SglbitntError, Writer
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            with Writer(sys.argv[1], {}, 2) as writer:
                writer.add_dense("small", torch.ones(10))
                writer.add_dense("large", torch.ones(1_000_000))
        except SglbitntError as error:
            print(error.code, error)
    """
    out = run_python(script, tmp_path / "m.bin")
    assert out.stdout.startswith("io ") and "File too large" in out.stdout, out
    assert os.listdir(tmp_path) == []


def test_a_swallowed_write_error_cannot_end_in_a_file(tmp_path: Path) -> None:
    script = """
        import resource, sys, torch
        from bitnet_ops.formats.sglbitnt import SglbitntError, Writer
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        with Writer(sys.argv[1], {}, 2) as writer:
            try:
                writer.add_dense("large", torch.ones(1_000_000))
            except SglbitntError:
                pass
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            writer.add_dense("a", torch.ones(10))
            writer.add_dense("b", torch.ones(10))
    """
    out = run_python(script, tmp_path / "m.bin", check=False)
    assert out.returncode == 1 and "SglbitntError" in out.stderr, out
    assert os.listdir(tmp_path) == []


def test_control_c_while_writing(tmp_path: Path) -> None:
    script = """
        import sys, torch
        from bitnet_ops.formats.sglbitnt import Writer
        with Writer(sys.argv[1], {}, 65536) as writer:
            print("writing", flush=True)
            for i in range(65536):
                writer.add_dense(str(i), torch.ones(10))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "m.bin")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        assert len(os.listdir(tmp_path)) == 1
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in stderr
    assert os.listdir(tmp_path) == []


def run_python(script: str, *args: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=120)


def test_a_destination_that_cannot_be(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "m.bin", tmp_path / ("n" * 300)):
        with pytest.raises(SglbitntError, match=r"\[io\]"):
            with Writer(path, CONFIG, 0):
                pass
    assert os.listdir(tmp_path) == []


def test_a_new_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    with Writer(tmp_path / "m.bin", CONFIG, 0):
        pass
    modes = {os.stat(tmp_path / name).st_mode for name in ("plain", "m.bin")}
    assert len(modes) == 1


def test_replacing_a_file_that_is_being_read(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    for value in (1.0, 2.0):
        with Writer(path, CONFIG, 1) as writer:
            writer.add_packed("w", PACKED, value)
        if value == 1.0:
            reader = Reader(path)
            view = reader.tensor("w")
    assert reader.tensors["w"].scale == 1.0 and torch.equal(view, PACKED)
    assert Reader(path).tensors["w"].scale == 2.0
