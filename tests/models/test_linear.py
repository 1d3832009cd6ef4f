"""BitLinear and packing: layouts by golden vectors and by plain loops, the module's manners.

The expected bytes of the two packings are written out or built element by element here; nothing of
bitnet_ops computes what it is compared with.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.nn.packing import (
    PackedWeight,
    pack_hf,
    pack_ternary,
    packed_row_bytes,
    unpack_hf,
)
from bitnet_ops.nn.storage import FORMATS


def random_codes(rng: torch.Generator, n: int, k: int) -> Tensor:
    return torch.randint(-1, 2, (n, k), generator=rng, dtype=torch.int8)


def golden_sequence() -> list[int]:
    """w[i] = ((5 i^2 + 3 i + floor(i / 7)) mod 3) - 1 for i = 0 .. 255."""
    return [((5 * i * i + 3 * i + i // 7) % 3) - 1 for i in range(256)]


# Packing --------------------------------------------------------------------------------------


def test_canonical_golden_vector() -> None:
    codes = torch.tensor(golden_sequence(), dtype=torch.int8).view(1, 256)
    expected = (
        "0998811aa99112211550022660066aa444488554400998811aa9911221155002"
        "811aa99112211550022660066aa444488554400998811aa99112211550022660"
    )
    packed = pack_ternary(codes, 0.5)
    assert bytes(packed.weight[0].tolist()).hex() == expected
    assert float(packed.scale) == 0.5
    assert torch.equal(packed.codes(), codes)


def test_r1_hf_golden_vectors() -> None:
    """R1: Hugging Face packs contiguous quarters of the outputs, low bits first."""
    packed = torch.tensor([[0xA1, 0x18], [0x90, 0x0A]], dtype=torch.uint8)
    rows = [[0, -1], [-1, 1], [-1, 1], [-1, 1], [1, 0], [0, -1], [1, -1], [1, -1]]
    strided = [[0, -1], [-1, 1], [1, 0], [1, -1], [-1, 1], [-1, 1], [0, -1], [1, -1]]
    assert unpack_hf(packed, 8).tolist() == rows != strided
    assert torch.equal(pack_hf(torch.tensor(rows, dtype=torch.int8)), packed)
    square = torch.tensor(golden_sequence(), dtype=torch.int8).view(16, 16)
    quarter = "288aa2280a024010044110449164599665591685a1"  # 21 bytes, then again from the start
    expected = (quarter * 4)[:128]
    assert bytes(pack_hf(square).flatten().tolist()).hex() == expected
    assert torch.equal(unpack_hf(pack_hf(square), 16), square)


@pytest.mark.parametrize("n", range(1, 14))
def test_hf_packing_element_by_element(rng: torch.Generator, n: int) -> None:
    """Any number of rows: row i * R + r in bits 2i+1..2i of byte row r."""
    codes = random_codes(rng, n, 5)
    before = codes.clone()
    packed = pack_hf(codes)
    assert torch.equal(codes, before), "transformers' pack changes its argument, ours must not"
    quarter = -(-n // 4)
    for row in range(n):
        for column in range(5):
            byte = int(packed[row % quarter, column])
            assert (byte >> 2 * (row // quarter)) & 3 == int(codes[row, column]) + 1
    assert torch.equal(unpack_hf(packed, n), codes)


def test_hf_rejections() -> None:
    with pytest.raises(ValueError, match="got code 3 at row 5, column 1"):
        unpack_hf(torch.tensor([[0, 0], [0, 0b110000]], dtype=torch.uint8), 6)
    with pytest.raises(ValueError, match=r"packed uint8 \[2, K\] for 8 outputs, got .*\[3, 2\]"):
        unpack_hf(torch.zeros((3, 2), dtype=torch.uint8), 8)
    with pytest.raises(ValueError, match="got torch.int8"):
        unpack_hf(torch.zeros((2, 2), dtype=torch.int8), 8)
    with pytest.raises(ValueError, match="codes in {-1, 0, 1}, got values from 0 to 2"):
        pack_hf(torch.tensor([[0, 2]], dtype=torch.int8))
    with pytest.raises(ValueError, match="codes int8"):
        pack_hf(torch.zeros((2, 2)))


@pytest.mark.parametrize("k", [1, 64, 127, 128, 129, 576])
def test_round_trip_of_any_width(rng: torch.Generator, k: int) -> None:
    codes = random_codes(rng, 3, k)
    packed = pack_ternary(codes, torch.tensor([2.0]))
    assert packed.weight.shape == (3, packed_row_bytes(k)) == (3, 32 * ((k + 127) // 128))
    assert torch.equal(packed.codes(), codes)


def test_packed_weight_checks_its_parts(rng: torch.Generator) -> None:
    good = pack_ternary(random_codes(rng, 4, 128))
    with pytest.raises(ValueError, match=r"weight uint8 \[4, 64\] for 4 x 129"):
        PackedWeight(good.weight, good.scale, 4, 129)
    with pytest.raises(ValueError, match="weight uint8"):
        PackedWeight(good.weight.to(torch.int8), good.scale, 4, 128)
    with pytest.raises(ValueError, match=r"scale float32 \[1\] or \[4\]"):
        PackedWeight(good.weight, torch.ones(2), 4, 128)
    with pytest.raises(ValueError, match="finite scales, got"):
        PackedWeight(good.weight, torch.tensor([float("nan")]), 4, 128)


# BitLinear ------------------------------------------------------------------------------------


def expected_linear(x: Tensor, codes: Tensor, scale: float) -> Tensor:
    """The layer in float64 from its definition."""
    x = x.double()
    s = 127 / x.abs().amax(-1, keepdim=True).clamp_min(1e-5)
    return (x * s).round().clamp(-128, 127) / s @ (codes.double() * scale).T


@pytest.mark.parametrize("shape", [(192,), (5, 192), (2, 3, 192), (0, 192)])
def test_forward_is_the_definition(rng: torch.Generator, shape: tuple[int, ...]) -> None:
    codes = random_codes(rng, 7, 192)
    layer = BitLinear.from_packed(pack_ternary(codes, 0.25))
    x = torch.randn(shape, generator=rng)
    expected = expected_linear(x, codes, 0.25)
    # integer sums are exact; three float32 roundings remain, of s, of the scale and of the product
    torch.testing.assert_close(layer(x).double(), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("k", [64, 128, 200, 384])
@pytest.mark.parametrize("form", ["int8", "int8_group", "int16_group"])
def test_group_scales_are_the_definition(
    rng: torch.Generator, k: int, weight_format: str, form: str
) -> None:
    codes, groups = random_codes(rng, 37, k), -(-k // 128)
    scales = torch.rand(37, groups, generator=rng) + 0.1
    layer = BitLinear.from_packed(pack_ternary(codes, scales, 128)).repack(weight_format)
    x, bias = torch.randn(3, k, generator=rng), torch.randn(37, generator=rng)
    weight = codes.double() * scales.double().repeat_interleave(128, dim=1)[:, :k]
    assert layer.activation_format == "int8_group"  # what "auto" means
    layer.set_activation_format(form)
    rounded = []
    for part in x.double().split(k if form == "int8" else 128, dim=-1):
        s = (32512 if form == "int16_group" else 127) / part.abs().amax(-1, keepdim=True)
        rounded.append((part * s).round() / s)
    expected = torch.cat(rounded, -1) @ weight.T
    # a rounding of a product and of an addition a group, of magnitudes that groups may cancel
    sizes = (x.double().abs() @ weight.abs().T) * (2 * groups + 3) * 2.0**-24 + 1e-6
    assert bool(((layer(x).double() - expected).abs() <= sizes).all())
    layer.bias = bias
    assert bool(((layer(x).double() - expected - bias).abs() <= sizes + 1e-6).all())


@pytest.mark.parametrize(("size", "groups"), [(128, 3), (64, 5)])
def test_group_scales_survive_a_state_dict(rng: torch.Generator, size: int, groups: int) -> None:
    packed = pack_ternary(random_codes(rng, 5, 300), torch.rand(5, groups, generator=rng), size)
    source, target = BitLinear.from_packed(packed), BitLinear(300, 5, group_size=size)
    x = torch.randn(2, 300, generator=rng)
    assert bool(target(x).isnan().all())
    target.load_state_dict(source.repack("2bit").state_dict())
    assert torch.equal(target(x), source(x)) and f"group_size={size}" in repr(target)
    with pytest.raises(ValueError, match="group_size 0 or 128 or 64, got 32"):
        BitLinear(300, 5, group_size=32)
    expected = rf"scale float32 \[5, {groups}\], got torch.float32 \[5, 2\]"
    with pytest.raises(ValueError, match=expected):
        pack_ternary(random_codes(rng, 5, 300), torch.ones(5, 2), size)


def test_scales_per_row(rng: torch.Generator) -> None:
    codes, scales = random_codes(rng, 6, 100), torch.rand(6, generator=rng) + 0.1
    x = torch.randn(2, 100, generator=rng)
    plain = BitLinear.from_packed(pack_ternary(codes, 1.0))(x)
    layer = BitLinear.from_packed(pack_ternary(codes, scales))
    torch.testing.assert_close(layer(x), plain * scales, rtol=1e-6, atol=1e-6)


def test_bias_is_added(rng: torch.Generator) -> None:
    packed = pack_ternary(random_codes(rng, 4, 64), 0.5)
    bias, x = torch.randn(4, generator=rng), torch.randn(3, 64, generator=rng)
    plain, biased = BitLinear.from_packed(packed)(x), BitLinear.from_packed(packed, bias)(x)
    torch.testing.assert_close(biased, plain + bias, rtol=1e-6, atol=1e-6)


def test_from_float_ternarises_by_absmean(rng: torch.Generator) -> None:
    weight = torch.randn(6, 100, generator=rng) * 0.02
    layer = BitLinear.from_float(weight)
    scale = float(weight.double().abs().mean())
    codes = (weight.double() / scale).round().clamp(-1, 1).to(torch.int8)
    assert float(layer.weight_scale) == pytest.approx(scale, rel=1e-6)
    rows = layer.state_dict()["weight"]
    assert torch.equal(PackedWeight(rows, layer.weight_scale, 6, 100).codes(), codes)
    module = nn.Linear(100, 6)
    module.weight.data.copy_(weight)
    twin, x = BitLinear.from_float(module), torch.randn(2, 100, generator=rng)
    assert torch.equal(twin(x), BitLinear.from_float(weight, module.bias)(x))


def test_an_unloaded_layer_gives_nan() -> None:
    assert bool(BitLinear(64, 4)(torch.ones(2, 64)).isnan().all())


def test_weights_are_shared_not_copied(rng: torch.Generator) -> None:
    packed = pack_ternary(random_codes(rng, 4, 64))
    assert BitLinear.from_packed(packed).weight.data_ptr() == packed.weight.data_ptr()


def test_state_dict_round_trip(rng: torch.Generator) -> None:
    source = BitLinear.from_packed(pack_ternary(random_codes(rng, 4, 200), 0.5), torch.ones(4))
    target = BitLinear(200, 4, bias=True)
    target.load_state_dict(source.state_dict())
    x = torch.randn(3, 200, generator=rng)
    assert torch.equal(target(x), source(x))
    assert torch.equal(copy.deepcopy(target)(x), source(x))


def test_load_rejects_master_weights_and_other_packings() -> None:
    layer = BitLinear(64, 8)
    scale = {"weight_scale": torch.ones(1)}
    with pytest.raises(RuntimeError, match="weight packed as uint8, got torch.float32"):
        layer.load_state_dict({"weight": torch.zeros(8, 64), **scale})
    other = {"weight": torch.zeros(2, 64, dtype=torch.uint8), **scale}
    with pytest.raises(RuntimeError, match=r"canonical rows \[8, 32\], got \[2, 64\]"):
        layer.load_state_dict(other)
    with pytest.raises(RuntimeError, match="size mismatch"):
        BitLinear(64, 8, weight_format="canonical").load_state_dict(other)


def test_bad_sizes_and_gradients() -> None:
    with pytest.raises(ValueError, match="above 0, got 0 and 4"):
        BitLinear(0, 4)
    packed = pack_ternary(torch.zeros(4, 64, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"bias \[4\], got \[5\]"):
        BitLinear.from_packed(packed, torch.zeros(5))
    layer = BitLinear.from_packed(packed)
    layer.weight_scale.requires_grad_()
    with pytest.raises(RuntimeError, match="requires_grad"):
        layer(torch.ones(64))
    packed.scale.requires_grad_(False)
    with pytest.raises(RuntimeError, match="linear: expected"):
        BitLinear.from_packed(packed)(torch.ones(300))
