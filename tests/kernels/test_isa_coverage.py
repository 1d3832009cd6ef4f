"""No ISA of this machine may go untested: what the CPU has is read here independently of the code.

Knows /proc/cpuinfo and the ISA fixture; no op but one tiny product. BITNET_TEST_EMULATED names the
ISA that a library under test emulates, on a CPU that may lack it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bitnet_ops import _runtime, ops
from isa_control import ISAS, forced_isa

# Flags of /proc/cpuinfo (the kernel hides a flag that the operating system has not enabled).
_FLAGS = {
    "scalar": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx_vnni": {"avx2", "fma", "f16c", "avx_vnni"},
    "avx512_vnni": {
        "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni",
    },
    "amx_int8": {
        "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni",
        "amx_tile", "amx_int8",
    },
    "neon_dotprod": {"asimd", "asimddp"},
    "neon_i8mm": {"asimd", "asimddp", "i8mm"},
}  # fmt: skip


def _cpu_flags() -> set[str]:
    """What the CPU has, and what scripts/test_emulated --all says that its library emulates."""
    return _flags_of_cpuinfo() | _FLAGS.get(os.environ.get("BITNET_TEST_EMULATED", ""), set())


def _flags_of_cpuinfo() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.split(":")[0].strip() in ("flags", "Features"):
            return set(line.split(":", 1)[1].split())
    raise AssertionError("/proc/cpuinfo has no line of flags")


def _isas_of_this_cpu() -> set[str]:
    on_arm = platform.machine() in ("aarch64", "arm64")
    flags = _cpu_flags()
    return {
        isa
        for isa, needed in _FLAGS.items()
        if needed <= flags and (isa == "scalar" or on_arm == isa.startswith("neon"))
    }


def test_every_isa_of_this_cpu_is_available_and_so_exercised_by_the_isa_fixture() -> None:
    assert set(_runtime.available_isas()) == _isas_of_this_cpu()
    assert set(ISAS) == _isas_of_this_cpu()


def test_all_isas_names_no_isa_that_this_file_does_not_know() -> None:
    assert set(_runtime.all_isas()) <= set(_FLAGS)
    assert set(_runtime.available_isas()) <= set(_runtime.all_isas())


def test_forced_isa_is_in_use_and_computes(isa: str) -> None:
    assert _runtime.isa() == isa
    weight = ops.pack(torch.tensor([[1, -1, 0, 1, 1]], dtype=torch.int8))
    assert ops.gemv(weight, torch.tensor([3, 5, 7, 11, -2], dtype=torch.int8)).tolist() == [7]


def test_kernel_table_agrees_with_the_lists() -> None:
    rows = _runtime.kernel_table()
    assert [row["isa"] for row in rows] == _runtime.all_isas()
    assert [row["isa"] for row in rows if row["available"]] == _runtime.available_isas()


def test_automatic_choice_is_the_best_available() -> None:
    before = _runtime.isa()
    try:
        _runtime.force_isa("")
        assert _runtime.isa() == _runtime.available_isas()[0]
    finally:
        _runtime.force_isa(before)


@pytest.mark.parametrize("name", ["sse9", "AVX2", "avx2 "])
def test_unknown_isa_is_rejected_with_the_list(name: str) -> None:
    with pytest.raises(RuntimeError) as error:
        _runtime.force_isa(name)
    assert repr(name)[1:-1] in str(error.value)
    for isa in _runtime.available_isas():
        assert isa in str(error.value)


def _isa_in_subprocess(value: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import torch, bitnet_ops\n"
        "from bitnet_ops import _runtime, ops\n"
        "w = ops.pack(torch.ones(2, 130, dtype=torch.int8))\n"
        "print(ops.gemv(w, torch.ones(130, dtype=torch.int8)).tolist(), _runtime.isa())\n"
    )
    environment = {**os.environ, "BITNET_OPS_ISA": value}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("name", ISAS)
def test_environment_forces_an_isa(name: str) -> None:
    run = _isa_in_subprocess(name)
    assert run.stdout.strip() == f"[130, 130] {name}", run.stderr


def test_environment_with_an_unavailable_isa_is_an_error_not_a_fallback() -> None:
    missing = sorted(set(_FLAGS) - _isas_of_this_cpu())[0]
    run = _isa_in_subprocess(missing)
    assert run.returncode == 1 and not run.stdout
    assert missing in run.stderr and all(isa in run.stderr for isa in ISAS)


def test_forcing_is_restored_when_a_test_fails() -> None:
    before = _runtime.isa()
    with pytest.raises(ZeroDivisionError), forced_isa("scalar"):
        _ = 1 // 0
    assert _runtime.isa() == before
