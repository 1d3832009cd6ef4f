"""CPU-specific weight layouts: golden bytes, exact round trips, errors, and one answer from all.

The golden bytes stand in docs/reference/layouts.md and were written by hand-made code; products are
compared with sums that torch computes from the codes.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bitnet_ops import _runtime, ops
from bounds import assert_equal
from isa_control import every_configuration
from op_values import FORMATS, int8_values, pack_codes, positive, random_codes, random_packed

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "layouts.md"


def _golden() -> dict[tuple[str, int], str]:
    block = re.search(r"```golden-layouts\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    assert block
    rows = [line.split() for line in block.group(1).splitlines()]
    return {(name, int(lanes)): line for name, lanes, line in rows}


def _formula_codes(n: int, k: int) -> Tensor:
    i = 7 * torch.arange(n)[:, None] + torch.arange(k)
    return ((5 * i * i + 3 * i + i // 7) % 3 - 1).to(torch.int8)


@pytest.mark.parametrize("fmt", FORMATS)
def test_golden_lines_of_the_page_of_layouts(fmt: str, isa: str) -> None:
    lanes = _runtime.tile_lanes()
    packed = ops.repack(pack_codes(_formula_codes(5 * lanes, 64)), 64, fmt)
    assert bytes(packed[0, 0].flatten().tolist()).hex() == _golden()[fmt, lanes]


def test_the_page_has_a_golden_line_for_every_layout() -> None:
    assert set(_golden()) == {(fmt, lanes) for fmt in FORMATS for lanes in (4, 8, 16)}


@pytest.mark.parametrize("k", [1, 63, 64, 65, 128, 129, 300, 576])
def test_the_runtime_knows_the_shape_of_every_layout(k: int, isa: str) -> None:
    rng = torch.Generator().manual_seed(k)
    for n in (1, 31, 33, 81):
        weight = random_packed(rng, n, k)
        for name in _runtime.layouts():
            packed = weight if name == "canonical" else ops.repack(weight, k, name)
            assert _runtime.packed_shape(name, n, k) == tuple(packed.shape), name
            assert packed.dim() == _runtime.layouts()[name]["dimensions"]


def test_the_layout_table_and_its_errors() -> None:
    rows = _runtime.layouts()
    assert list(rows) == ["canonical", *FORMATS]
    assert [row["bits"] for row in rows.values()] == [2.0, 2.0, 1.6]
    assert [row["cpu_specific"] for row in rows.values()] == [False, True, True]
    assert rows["2bit"]["max_in_features"] == 32768
    assert rows["2bit"]["max_grouped_in_features"] == 65536
    assert _runtime.packed_shape("canonical", 5, 129) == (5, 64)
    assert _runtime.packed_shape("2bit", 33, 65, lanes=8) == (2, 32, 32)
    assert _runtime.packed_shape("1.6bit", 81, 64, lanes=16) == (2, 16, 16, 4)
    for arguments in [("3bit", 1, 1), ("2bit", -1, 1), ("2bit", 1, 1 << 50), ("2bit", 1, 1, 17)]:
        with pytest.raises(ValueError, match="packed_shape: expected"):
            _runtime.packed_shape(*arguments)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("k", [1, 63, 64, 65, 128, 129, 300, 576])
def test_round_trip_is_exact(fmt: str, k: int, isa: str) -> None:
    rng = torch.Generator().manual_seed(k)
    for n in (1, 31, 32, 33, 40, 41, 79, 80, 81, 161):
        weight = random_packed(rng, n, k)
        assert_equal(ops.unrepack(ops.repack(weight, k, fmt), (n, k)), weight, f"{n} x {k}")


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 7, 13, 64, 65, 129])
def test_every_layout_gives_the_canonical_sums(m: int) -> None:
    rng = torch.Generator().manual_seed(m)
    n, k = 165, 451
    codes, x = random_codes(rng, n, k), int8_values(rng, m, k)
    weight = pack_codes(codes)
    expected = (x.double() @ codes.double().T).to(torch.int32)
    for configuration in every_configuration():
        assert_equal(ops.gemm(weight, x), expected, configuration)
        for fmt in FORMATS:
            private = ops.repack(weight, k, fmt)
            got = ops.gemm(private, x, shape=(n, k))
            assert_equal(got, expected, f"{fmt} {configuration}")


@pytest.mark.parametrize("fmt", FORMATS)
def test_largest_k_with_the_largest_values(fmt: str, isa: str) -> None:
    k = 32768
    for code in (-1, 0, 1):
        weight = pack_codes(torch.full((1, 128), code, dtype=torch.int8)).repeat(3, k // 128)
        private = ops.repack(weight, k, fmt)
        for value in (127, -128):
            x = torch.full((5, k), value, dtype=torch.int8)
            expected = torch.full((5, 3), k * code * value, dtype=torch.int32)
            assert_equal(ops.gemm(private, x, shape=(3, k)), expected, f"{code} {value}")
            assert_equal(ops.gemv(private, x[0], shape=(3, k)), expected[0], f"{code} {value}")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("k", "group"), [(36864, 128), (65536, 64)])
@pytest.mark.by_turns
def test_groups_have_sums_of_their_own(k: int, group: int, fmt: str, isa: str) -> None:
    """So K may be larger than one sum allows: the bits of canonical rows, which have no bound."""
    rng, n = torch.Generator().manual_seed(k), 83
    weight = random_packed(rng, n, k)
    scale = torch.rand(n, k // group, generator=rng) + 0.1
    private = ops.repack(weight, k, fmt, group)
    for m in (1, 3, 9, 40):
        x = torch.randn(m, k, generator=rng)
        x[0] = 127.0  # codes that are all the largest there are
        for activations in ("int8", "int8_group", "int16_group"):
            expected = ops.linear(x, weight, scale, None, (n, k), activations)
            found = ops.linear(x, private, scale, None, (n, k), activations)
            assert_equal(found, expected, f"{m} {activations}")
    codes = ops.unpack(weight, k).double().unflatten(1, (-1, group))
    exact = (codes * scale.double()[:, :, None]).sum((1, 2)) * 127
    assert torch.allclose(
        expected[0].double(), exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max())
    )


def _weight(n: int = 40, k: int = 100) -> Tensor:
    return random_packed(torch.Generator().manual_seed(0), n, k)


def test_rejections_name_the_remedy() -> None:
    weight, x = _weight(), torch.zeros(100, dtype=torch.int8)
    private = ops.repack(weight, 100, "2bit")
    with pytest.raises(RuntimeError, match=r"repack: expected format '2bit' or '1.6bit', got"):
        ops.repack(weight, 100, "3bit")
    with pytest.raises(RuntimeError, match="expected shape given.*got none"):
        ops.gemv(private, x)
    with pytest.raises(RuntimeError, match="repack again after changing the instruction set"):
        ops.gemv(private, x, shape=(400, 100))
    with pytest.raises(RuntimeError, match="repack again"):
        ops.gemv(private, torch.zeros(200, dtype=torch.int8), shape=(40, 200))
    with pytest.raises(RuntimeError, match="shape with the 40 rows of weight"):
        ops.gemv(weight, x, shape=(41, 100))
    with pytest.raises(RuntimeError, match="expected weight in a CPU-specific layout"):
        ops.unrepack(weight, (40, 100))
    with pytest.raises(RuntimeError, match="at most 32768"):
        ops.repack(torch.full((1, 8224), 0x55, dtype=torch.uint8), 32896, "2bit")
    with pytest.raises(RuntimeError, match="at most 65536.*with scales of groups"):
        ops.repack(torch.full((1, 16416), 0x55, dtype=torch.uint8), 65664, "2bit", 128)
    grouped = ops.repack(torch.full((1, 8224), 0x55, dtype=torch.uint8), 32896, "2bit", 128)
    with pytest.raises(RuntimeError, match="gemv: expected in_features at most 32768.*without"):
        ops.gemv(grouped, torch.zeros(32896, dtype=torch.int8), shape=(1, 32896))
    with pytest.raises(RuntimeError, match="linear: expected in_features at most 32768.*without"):
        ops.linear(torch.zeros(1, 32896), grouped, torch.ones(1), None, (1, 32896))
    with pytest.raises(RuntimeError, match="shape empty or with 6 elements, got 2"):
        scale = positive(torch.Generator(), 1)
        triple = [weight, scale] * 3
        ops.qkv_forward(torch.zeros(100), torch.ones(100), *triple, 1e-5, [40, 40])


@pytest.mark.parametrize("fmt", FORMATS)
def test_code_3_is_rejected_both_ways(fmt: str) -> None:
    weight = _weight()
    weight[7, 3] |= 0b11
    with pytest.raises(RuntimeError, match="repack: expected weight with codes 0, 1, 2 only"):
        ops.repack(weight, 100, fmt)
    if fmt == "2bit":
        private = ops.repack(_weight(), 100, fmt)
        private[0, 0, 0] |= 0b11
        with pytest.raises(RuntimeError, match="unrepack: expected weight with codes 0, 1, 2"):
            ops.unrepack(private, (40, 100))


PREFETCH = {  # what each value means; None: an error
    "4096:L2": {"prefetch_bytes": 4096, "head_into_l2": True},
    "4096:L3": None,
    "65537": None,
    "4096": {"prefetch_bytes": 4096, "head_bytes": 4096},
    "4096:L1": {"prefetch_bytes": 4096, "head_into_l2": False},
    **dict.fromkeys(("-1", "far", "4096:", ":L2", "4096 ")),
}


@pytest.mark.parametrize("value", PREFETCH)
@pytest.mark.sampled(2)
def test_an_ill_set_prefetch_distance_is_one_clear_error(value: str, tmp_path: Path) -> None:
    program, good = "import bitnet_ops; print(bitnet_ops._runtime.tuning())", PREFETCH[value]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"BITNET_OPS_TUNING": f"prefetch={value}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (done.returncode == 0) == (good is not None), done.stderr
    if good is not None:
        assert good.items() <= ast.literal_eval(done.stdout).items()
    else:
        expected = (
            f"BITNET_OPS_TUNING: expected prefetch=bytes from 0 to 65536, got 'prefetch={value}'"
        )
        assert expected in done.stderr
