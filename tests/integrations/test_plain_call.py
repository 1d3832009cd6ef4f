"""The plain call of earlier BitNet kernels: BitNetLinearMethod(...).apply(packed_weight, ...).

Bytes of the two packings are written here from their descriptions, in plain Python, and as golden
vectors; numbers come from transformers.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._dynamo.utils import counters

from bitnet_ops import BitNetLinearMethod, ops
from bitnet_ops.integrations import ScaleRule
from bitnet_ops.integrations.plain_call import apply_packed
from bitnet_ops.nn import packing
from hf_flavours import hf_bound, hf_linear, hf_packed, random_codes

# w[i] = ((5 i^2 + 3 i + i // 7) mod 3) - 1, i < 256: the golden vector of FORMAT.md's I2_S rows.
GOLDEN_CODES = [(5 * i * i + 3 * i + i // 7) % 3 - 1 for i in range(256)]
GOLDEN_INTERLEAVED = (
    "0998811aa99112211550022660066aa444488554400998811aa9911221155002"
    "811aa99112211550022660066aa444488554400998811aa99112211550022660"
)


def interleaved_bytes(codes):
    """Blocks of 128 weights in 32 bytes; byte j: w[j], w[j+32], w[j+64], w[j+96], high bits first.

    A block that K does not fill is filled up with weight 0.
    """
    rows = []
    for row in codes.tolist():
        row = [w + 1 for w in row] + [1] * (-len(row) % 128)
        blocks, packed = [row[at : at + 128] for at in range(0, len(row), 128)], []
        for b in blocks:
            quads = zip(b, b[32:], b[64:], b[96:], strict=False)  # ends with the shortest, b[96:]
            packed.extend(w << 6 | x << 4 | y << 2 | z for w, x, y, z in quads)
        rows.append(packed)
    return torch.tensor(rows, dtype=torch.uint8)


def consecutive_bytes(codes, first="low", padding=1):
    """Byte j holds w[4j] ... w[4j+3]; from the low bits up, or from the high bits down."""
    shifts = (0, 2, 4, 6) if first == "low" else (6, 4, 2, 0)
    rows = []
    for row in codes.tolist():
        row = [w + 1 for w in row] + [padding] * (-len(row) % 4)
        quads = [row[at : at + 4] for at in range(0, len(row), 4)]
        rows.append([sum(c << s for c, s in zip(q, shifts, strict=True)) for q in quads])
    return torch.tensor(rows, dtype=torch.uint8)


PACKED = {"interleaved": interleaved_bytes, "consecutive": consecutive_bytes}


def random_input(tokens, columns, dtype=torch.float32, seed=6):
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cosine(a, b):
    return float(torch.nn.functional.cosine_similarity(a.flatten().float(), b.flatten().float(), 0))


# Bytes --------------------------------------------------------------------------------------------


def test_golden_vector_goes_from_consecutive_to_the_rows_of_the_format():
    codes = torch.tensor([GOLDEN_CODES], dtype=torch.int8)
    golden = torch.tensor([list(bytes.fromhex(GOLDEN_INTERLEAVED))], dtype=torch.uint8)
    assert torch.equal(interleaved_bytes(codes), golden)  # the writer above is right
    for first in ("low", "high"):
        rows = packing.from_consecutive(consecutive_bytes(codes, first), 256, first)
        assert torch.equal(rows, golden)


def test_a_byte_by_hand():
    # w = -1, 0, 1, 0 -> codes 0, 1, 2, 1 -> 0b01_10_01_00 from the low bits up
    packed = torch.tensor([[0b01100100]], dtype=torch.uint8)
    rows = packing.from_consecutive(packed, 4)
    assert ops.unpack(rows, 4).tolist() == [[-1, 0, 1, 0]]


@pytest.mark.parametrize("columns", [1, 3, 4, 127, 128, 130, 300])
@pytest.mark.parametrize("first", ["low", "high"])
def test_any_width_and_whatever_stands_in_the_padding(columns, first):
    codes = random_codes(5, columns)
    for padding in (0, 1, 3):
        rows = packing.from_consecutive(consecutive_bytes(codes, first, padding), columns, first)
        assert torch.equal(ops.unpack(rows, columns), codes)


@pytest.mark.parametrize(
    ("packed", "options", "message"),
    [
        (torch.zeros(2, 33, dtype=torch.uint8), {}, r"uint8 \[N, 32\] for 128 inputs.*\[2, 33\]"),
        (torch.zeros(2, 32), {}, "torch.float32"),
        (torch.zeros(32, dtype=torch.uint8), {}, r"got torch.uint8 \[32\]"),
        (torch.zeros(2, 32, dtype=torch.uint8), {"first": "left"}, "'low' or 'high', got 'left'"),
    ],
)
def test_bytes_that_cannot_be_read_are_rejected(packed, options, message):
    with pytest.raises(ValueError, match=message):
        packing.from_consecutive(packed, 128, **options)


def test_code_3_is_rejected_with_its_place():
    packed = consecutive_bytes(random_codes(4, 128))
    packed[2, 5] |= 0b00110000
    with pytest.raises(ValueError, match="got code 3 at row 2, column 22"):
        packing.from_consecutive(packed, 128)


# The call -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:apply. a consecutive weight")
@pytest.mark.parametrize("repacked", [False, True], ids=["as it is", "repacked"])
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [256, 200])
def test_every_packing_gives_what_transformers_computes(name, dtype, columns, repacked):
    codes, scale = random_codes(32, columns), 0.37
    x = random_input(4, columns, dtype)
    method = BitNetLinearMethod(compute_dtype=dtype, packing=name)
    weight = PACKED[name](codes)
    if repacked:
        weight = method.repack(weight, 32, columns)
        assert weight.dim() == 3
    y = method.apply(weight, scale, x, 32, columns)
    assert torch.equal(y, torch.ops.bitnet.linear(x, ops.pack(codes), torch.tensor([scale])))
    theirs = hf_linear(ScaleRule.MULTIPLY, hf_packed(codes), torch.tensor([scale]), 32, columns)
    expected = theirs(x.float())
    rounding = 2.0**-8 * expected.abs() if dtype is torch.bfloat16 else 0
    assert ((y.float() - expected).abs() <= hf_bound(x.float(), scale) + rounding).all()


def test_no_packing_is_an_error_that_names_both():
    """Both have the shape [N, K / 4]; taking one for the other gives unrelated outputs."""
    codes, x = random_codes(64, 256), random_input(1, 256)
    weight = consecutive_bytes(codes)
    for call in (
        lambda: BitNetLinearMethod().apply(weight, 1.0, x, 64, 256),
        lambda: BitNetLinearMethod().repack(weight, 64, 256),
        lambda: apply_packed(weight, 1.0, x, 64, 256, packing="interlaced"),
    ):
        with pytest.raises(
            ValueError, match="expected packing 'interleaved' or 'consecutive', got"
        ):
            call()
    with pytest.raises(ValueError, match="'interleaved', 'consecutive' or None, got 'Q2'"):
        BitNetLinearMethod(packing="Q2")
    right = apply_packed(ops.pack(codes), 1.0, x, 64, 256, packing="interleaved")
    mistaken = apply_packed(weight, 1.0, x, 64, 256, packing="interleaved")
    assert abs(cosine(right, mistaken)) < 0.5  # why nothing may be guessed


def test_the_call_says_more_than_the_method():
    codes, x = random_codes(8, 128), random_input(2, 128)
    method = BitNetLinearMethod(packing="consecutive")
    y = method.apply(ops.pack(codes), 1.0, x, 8, 128, packing="interleaved")
    assert torch.equal(y, torch.ops.bitnet.linear(x, ops.pack(codes), torch.ones(1)))


def test_by_keyword_with_bias_and_compute_dtype():
    codes, bias = random_codes(8, 128), torch.arange(8.0)
    x = random_input(2, 128, seed=8)
    method = BitNetLinearMethod(compute_dtype=torch.bfloat16, packing="interleaved")
    y = method.apply(ops.pack(codes), torch.tensor(0.5), x, 8, in_features=128, bias=bias)
    assert y.dtype == torch.bfloat16
    expected = torch.ops.bitnet.linear(x.bfloat16(), ops.pack(codes), torch.tensor([0.5]), bias)
    assert torch.equal(y, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:apply. a consecutive weight")
@pytest.mark.parametrize("repacked", [False, True], ids=["as it is", "repacked"])
@pytest.mark.parametrize("name", PACKED)
def test_the_call_compiles_as_one_graph(name, repacked, monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # conftest.py sets it for the oracles
    torch._dynamo.reset()
    counters.clear()
    method, x = BitNetLinearMethod(packing=name), random_input(3, 256)
    weight = ops.pack(
        random_codes(40, 256)
    )  # both packings have this shape, and all codes are good
    if repacked:
        weight = method.repack(weight, 40, 256)

    def call(weight, x):
        return method.apply(weight, 0.5, x, 40, 256)

    with torch.no_grad():
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(weight, x), call(weight, x))
    assert counters["stats"]["unique_graphs"] == 1  # else eager was compared with eager
    torch._dynamo.reset()


def test_one_scale_a_row():
    codes, x = random_codes(40, 130), random_input(3, 130)
    scales = torch.linspace(0.1, 2, 40)
    method = BitNetLinearMethod(packing="interleaved")
    weight = method.repack(ops.pack(codes), 40, 130)
    expected = torch.ops.bitnet.linear(x, ops.pack(codes), scales)
    assert torch.equal(method.apply(weight, scales, x, 40, 130), expected)


def test_repacking_on_every_call_is_said_and_repacking_once_is_silent():
    codes, x = random_codes(8, 128), random_input(1, 128)
    method = BitNetLinearMethod(packing="consecutive")
    weight = consecutive_bytes(codes)
    with pytest.warns(UserWarning, match=r"repacked on every call.*method.repack\("):
        method.apply(weight, 1.0, x, 8, 128)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method.apply(method.repack(weight, 8, 128), 1.0, x, 8, 128)
        BitNetLinearMethod().apply(ops.pack(codes), 1.0, x, 8, 128, packing="interleaved")


@pytest.mark.filterwarnings("ignore:apply. a consecutive weight")
def test_shapes_that_do_not_fit_are_rejected():
    codes, x = random_codes(64, 128), torch.ones(1, 128)
    method = BitNetLinearMethod(packing="interleaved")
    with pytest.raises(ValueError, match=r"uint8 \[64, 32\].*Hugging Face packing: ops.pack"):
        method.apply(hf_packed(codes), 1.0, x, 64, 128)
    with pytest.raises(ValueError, match=r"expected packed_weight uint8 \[60, 32\]"):
        method.apply(ops.pack(codes), 1.0, x, 60, 128)
    with pytest.raises(ValueError, match=r"uint8 \[64, 25\] \(consecutive\), got .*\[64, 32\]"):
        method.apply(ops.pack(codes), 1.0, x[:, :100], 64, 100, packing="consecutive")
    other = "this is the shape of packing 'interleaved'"
    with pytest.raises(ValueError, match=other):
        method.apply(ops.pack(codes[:, :100]), 1.0, x[:, :100], 64, 100, packing="consecutive")
    with pytest.raises(ValueError, match=r"expected x \[..., 100\], got \[1, 128\]"):
        method.apply(ops.pack(codes[:, :100]), 1.0, x, 64, 100)
    weight = method.repack(ops.pack(codes), 64, 128)
    with pytest.raises(RuntimeError, match="640 x 128 repacked for"):
        method.apply(weight, 1.0, x, 640, 128)
    with pytest.raises(RuntimeError, match="at most 32768"):
        method.repack(torch.full((1, 8224), 85, dtype=torch.uint8), 1, 32896)
