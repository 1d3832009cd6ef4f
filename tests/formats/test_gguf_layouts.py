"""The ternary layouts of GGUF against golden vectors, plain loops and the official gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_ops import ops
from bitnet_ops.formats import gguf_layouts as layouts
from bitnet_ops.formats.gguf_layouts import LayoutError
from gguf_bytes import i2s, q2_0
from golden import I2S_A_HEX, I2S_B_HEX, TQ1_HEX, TQ2_HEX

OFFICIAL = {"TQ1_0": gguf.GGMLQuantizationType.TQ1_0, "TQ2_0": gguf.GGMLQuantizationType.TQ2_0}


def random_codes(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1, 2, (n, k)).astype(np.int8)


def rows_of(codes: np.ndarray) -> np.ndarray:
    """Canonical rows by the C++ op, which the golden vectors of its own tests prove."""
    return ops.pack(torch.from_numpy(codes)).numpy()


def golden(hexadecimal: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(hexadecimal), dtype=np.uint8)


@pytest.mark.parametrize(("type_name", "hexadecimal"), [("TQ1_0", TQ1_HEX), ("TQ2_0", TQ2_HEX)])
def test_golden_vector_both_ways(type_name: str, hexadecimal: str) -> None:
    rows = golden(I2S_A_HEX).reshape(1, 64)
    decoded = layouts.decode(type_name, golden(hexadecimal), 1, 256)
    assert np.array_equal(decoded.rows, rows)
    assert decoded.one_scale() == 1.5
    assert layouts.encode(type_name, rows, 256, 1.5).tobytes().hex() == hexadecimal


@pytest.mark.parametrize(("layout", "hexadecimal"), [("a", I2S_A_HEX), ("b", I2S_B_HEX)])
def test_golden_vector_of_i2s(layout: str, hexadecimal: str) -> None:
    tail = np.array([1.5], dtype="<f4").tobytes() + b"\xff" * 28  # rubbish, as their writer leaves
    data = golden(hexadecimal + tail.hex())
    decoded = layouts.decode("I2_S", data, 1, 256, layout)
    assert decoded.rows.tobytes().hex() == I2S_A_HEX
    assert (decoded.one_scale(), decoded.block) == (1.5, 0)


def test_encoded_i2s_is_the_rows_the_scale_and_zeros() -> None:
    rows = golden(I2S_A_HEX).reshape(1, 64)
    data = layouts.encode("I2_S", rows, 256, 0.3)
    assert data.tobytes() == rows.tobytes() + np.float32(0.3).tobytes() + bytes(28)


@pytest.mark.parametrize("layout", ["a", "b", "c"])
@pytest.mark.parametrize(("n", "k"), [(4, 128), (8, 384), (12, 256)])
def test_i2s_layouts_against_a_plain_loop(layout: str, n: int, k: int) -> None:
    codes = random_codes(n, k, seed=n * k)
    data = np.frombuffer(i2s(codes, 0.25, layout), dtype=np.uint8)
    decoded = layouts.decode("I2_S", data, n, k, layout)
    assert np.array_equal(decoded.rows, rows_of(codes))
    assert decoded.one_scale() == 0.25
    others = {
        other: layouts.decode("I2_S", data, n, k, other).rows.tobytes()
        for other in layouts.I2S_LAYOUTS
    }
    assert len(set(others.values())) == 3, "the three layouts must not be mistaken for each other"


@pytest.mark.parametrize("layout", ["a", "b", "c"])
@pytest.mark.parametrize(("n", "k"), [(4, 192), (16, 8640), (128, 8641), (64, 100)])
def test_i2s_rows_that_begin_inside_a_block(
    monkeypatch: pytest.MonkeyPatch, layout: str, n: int, k: int
) -> None:
    """The layouts are streams over all rows; only bitnet.cpp's kernels want whole blocks."""
    if layout == "a" and n * k % 128:
        pytest.raises(LayoutError, layouts.decode, "I2_S", np.zeros(0, np.uint8), n, k, layout)
        return
    monkeypatch.setattr(layouts, "_CHUNK", 1 << 14)  # several parts
    codes = random_codes(n, k)
    data = np.frombuffer(i2s(codes, 1.0, layout), dtype=np.uint8)
    assert np.array_equal(layouts.decode("I2_S", data, n, k, layout).rows, rows_of(codes))


@pytest.mark.parametrize("type_name", ["TQ1_0", "TQ2_0"])
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 5), blocks=st.integers(1, 4),
       scale=st.floats(2.0**-13, 2.0**15, width=32), share=st.floats(0, 1))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_bytes_equal_the_gguf_package(
    type_name: str, seed: int, n: int, blocks: int, scale: float, share: float
) -> None:
    random = np.random.default_rng(seed)
    codes = random.integers(-1, 2, (n, 256 * blocks)).astype(np.int8)
    codes[random.random((n, blocks)).repeat(256, axis=1) < share * 0.5] = 0  # blocks of zeros
    values = codes.astype(np.float32) * np.float32(scale)
    theirs = gguf.quants.quantize(values, OFFICIAL[type_name])
    ours = layouts.encode(type_name, rows_of(codes), 256 * blocks, scale)
    assert ours.tobytes() == theirs.tobytes()
    decoded = layouts.decode(type_name, ours, n, 256 * blocks)
    assert np.array_equal(decoded.rows, rows_of(codes))
    assert decoded.one_scale() == (float(np.float16(np.float32(scale))) if codes.any() else None)


@pytest.mark.parametrize("type_name", ["TQ1_0", "TQ2_0"])
def test_every_valid_byte_reads_as_the_gguf_package_reads_it(type_name: str) -> None:
    random = np.random.default_rng(5)
    nbytes = {"TQ1_0": 54, "TQ2_0": 66}[type_name]
    data = random.integers(0, 256, (8, 3, nbytes), dtype=np.uint8)
    if type_name == "TQ2_0":
        data[data & (data >> 1) & 0x55 != 0] &= 0xAA  # no code 3
    data[..., -2:] = np.float16(0.5).reshape(1).view(np.uint8)
    theirs = gguf.quants.dequantize(data.reshape(8, -1), OFFICIAL[type_name])
    decoded = layouts.decode(type_name, data, 8, 768)
    assert np.array_equal(layouts.unpack_rows(decoded.rows, 768).astype(np.float32) - 1, theirs * 2)


@pytest.mark.parametrize(("type_name", "block"), [("Q2_0", 64), ("Q2_0_128", 128)])
def test_q2_0_against_a_plain_loop(type_name: str, block: int) -> None:
    codes = random_codes(3, 384, seed=1)
    scales = np.linspace(0.25, 4, 3 * 384 // block).reshape(3, -1).astype(np.float16)
    data = np.frombuffer(q2_0(codes, scales, block), dtype=np.uint8)
    decoded = layouts.decode(type_name, data, 3, 384)
    assert np.array_equal(decoded.rows, rows_of(codes))
    assert np.array_equal(decoded.scales, scales.astype(np.float32))
    assert (decoded.block, decoded.one_scale()) == (block, None)


def test_blocks_whose_scale_is_zero_hold_zeros() -> None:
    codes = random_codes(2, 256)
    scales = np.array([[0.5, 0, 0.5, 0.5], [0.5, 0.5, 0.5, 0]], dtype=np.float16)
    decoded = layouts.decode("Q2_0", np.frombuffer(q2_0(codes, scales), np.uint8), 2, 256)
    codes[0, 64:128] = codes[1, 192:] = 0
    assert np.array_equal(decoded.rows, rows_of(codes))
    assert decoded.one_scale() == 0.5


@pytest.mark.parametrize(
    ("type_name", "n", "k", "layout", "code"),
    [
        ("I2_S", 3, 64, "a", "row_length"),
        ("I2_S", 4, 24, "b", "row_length"),
        ("I2_S", 6, 128, "c", "row_length"),
        ("TQ1_0", 4, 3200, "a", "row_length"),
        ("TQ2_0", 4, 128, "a", "row_length"),
        ("Q2_0", 4, 96, "a", "row_length"),
    ],
)
def test_shapes_that_a_layout_cannot_hold(
    type_name: str, n: int, k: int, layout: str, code: str
) -> None:
    with pytest.raises(LayoutError, match="expected [KN *]+ a multiple of") as caught:
        layouts.decode(type_name, np.zeros(0, np.uint8), n, k, layout)
    assert caught.value.code == code


def _data(type_name: str) -> np.ndarray:
    if type_name == "I2_S":
        return np.frombuffer(i2s(random_codes(2, 256), 0.5), np.uint8).copy()
    if type_name == "Q2_0":
        return np.frombuffer(q2_0(random_codes(2, 256), np.full((2, 4), 0.5)), np.uint8).copy()
    return layouts.encode(type_name, rows_of(random_codes(2, 256)), 256, 0.5).copy()


@pytest.mark.parametrize(("type_name", "at"), [("I2_S", 77), ("TQ2_0", 70), ("Q2_0", 40)])
def test_code_3_is_rejected(type_name: str, at: int) -> None:
    data = _data(type_name)
    data[at] |= 0x0C
    with pytest.raises(LayoutError, match="got code 3") as caught:
        layouts.decode(type_name, data, 2, 256)
    assert caught.value.code == "code_3"


@pytest.mark.parametrize(
    ("type_name", "at", "kind"),
    [("I2_S", 128, "<f4"), ("TQ1_0", 52, "<f2"), ("TQ2_0", 64, "<f2"), ("Q2_0", 0, "<f2")],
)
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_bad_scales_are_rejected(type_name: str, at: int, kind: str, scale: float) -> None:
    data = _data(type_name)
    data[at : at + int(kind[2])] = np.array([scale], dtype=kind).view(np.uint8)
    with pytest.raises(LayoutError, match="finite scale") as caught:
        layouts.decode(type_name, data, 2, 256)
    assert caught.value.code == "scale"


@pytest.mark.parametrize("scale", [1e6, 1e-6])
def test_a_scale_that_float16_cannot_hold(scale: float) -> None:
    with pytest.raises(LayoutError, match="float16"):
        layouts.encode("TQ2_0", rows_of(random_codes(1, 256)), 256, scale)
