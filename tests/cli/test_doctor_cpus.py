"""The text of `doctor` on every kind of CPU, from made-up facts: this machine is one kind only.

What the facts are, and how they are read, is the matter of test_doctor.py and test_machine.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from bitnet_ops import machine
from bitnet_ops.cli import doctor

AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni")
MORE = ("avx512_vbmi", "avx512_bf16")
AMX = ("amx_tile", "amx_int8", "amx_bf16")
ARM = ["neon_i8mm", "neon_dotprod", "scalar"]
X86 = ["amx_int8", "avx512_vnni", "avx_vnni", "avx2", "scalar"]
NEEDED = {
    "scalar": (),
    "avx2": AVX2,
    "avx_vnni": (*AVX2, "avx_vnni"),
    "avx512_vnni": AVX512,
    "amx_int8": (*AVX512, "amx_tile", "amx_int8"),
    "neon_dotprod": ("neon_dotprod",),
    "neon_i8mm": ("neon_dotprod", "neon_i8mm"),
}
# kind -> (ISAs of the build, features, BITNET_OPS_ISA, what the CPU says of AMX, ISA in use)
KINDS: dict[str, tuple[list[str], tuple[str, ...], str | None, bool, str]] = {
    "baseline": (X86, (), None, False, "scalar"),
    "avx2": (X86, AVX2, None, False, "avx2"),
    "avx-vnni": (X86, (*AVX2, "avx_vnni"), None, False, "avx_vnni"),
    "avx512-vnni": (X86, (*AVX512, *MORE), None, False, "avx512_vnni"),
    "amx": (X86, (*AVX512, "avx_vnni", *MORE, *AMX), None, True, "amx_int8"),
    "amx-rejected": (X86, (*AVX512, "avx_vnni", *MORE), None, True, "avx512_vnni"),
    "amx-not-asked": (X86, (*AVX512, "avx_vnni", *MORE), "avx2", True, "avx2"),
    "amx-unused": (X86, (*AVX512, "avx_vnni", *MORE, *AMX), "avx2", True, "avx2"),
    "amx-bf16-only": (X86, (*AVX512, "amx_tile", "amx_bf16"), None, True, "avx512_vnni"),
    "arm": (ARM, ("neon", "neon_dotprod", "neon_i8mm"), None, False, "neon_i8mm"),
    "arm-dotprod": (ARM, ("neon", "neon_dotprod"), None, False, "neon_dotprod"),
    "arm-old": (ARM, ("neon",), None, False, "scalar"),
}  # fmt: skip
AMX_LINE = {
    "amx": "permission granted; in use: amx_int8",
    "amx-rejected": "on this CPU; permission rejected",
    "amx-not-asked": "on this CPU; permission not asked for",
    "amx-unused": "permission granted; not in use: avx2 is chosen",
    "amx-bf16-only": "permission granted; no kernels for what this CPU has of it",
}


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    return doctor.collect()


def facts_of(kind: str, real: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """This process's facts with the CPU of `kind`."""
    isas, features, forced, amx_on_cpu, selected = KINDS[kind]
    monkeypatch.setattr(machine, "cpu_flags", lambda: {"amx_tile"} if amx_on_cpu else set())
    facts = copy.deepcopy(real)
    names = dict.fromkeys([*real["cpu"]["features"], *features], False)
    facts["cpu"]["features"] = names | dict.fromkeys(features, True)
    rows = []
    for isa in isas:
        missing = [name for name in NEEDED[isa] if name not in features]
        rows.append({"isa": isa, "available": not missing, "missing": missing,
                     "selected": isa == selected})  # fmt: skip
    best = next(row["isa"] for row in rows if row["available"])
    for row in rows:
        row["reason"] = doctor._reason(row, best, forced)
    facts["isa"] = {"selected": selected, "BITNET_OPS_ISA": forced, "error": None, "table": rows}
    facts["amx"] = doctor._amx(facts["cpu"]["features"], forced)
    facts["problems"] = doctor.find_problems(facts)
    return facts


@pytest.mark.parametrize("kind", KINDS)
def test_text_fits_and_says_what_is_in_use(
    kind: str, real: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = facts_of(kind, real, monkeypatch)
    lines = doctor.render(facts)
    # a path is not cut, or nobody could copy it
    assert all(len(line) <= 100 or line[10:].startswith("/") for line in lines), lines
    assert len(lines) <= 45
    (amx,) = [line for line in lines if line.startswith("amx ")]
    assert amx == f"amx       {AMX_LINE.get(kind, 'not on this CPU')}"
    (isa,) = [line for line in lines if line.startswith("isa ")]
    assert isa.split()[1] == facts["isa"]["selected"]
    text = " ".join(" ".join(lines).split())
    assert all(f" {name} " in text for name in KINDS[kind][1])
    # and problems are those of the kind
    found = {problem for _, problem, _ in doctor._isa_problems(facts["isa"], facts["amx"])}
    expected = {
        "baseline": {"no SIMD kernels for this CPU: everything runs in plain C++, slowly"},
        "arm-old": {"no SIMD kernels for this CPU: everything runs in plain C++, slowly"},
        "amx-rejected": {"the CPU has AMX, the operating system rejects its tile state"},
        "amx-not-asked": {"avx2 is in use although avx512_vnni is available"},
        "amx-unused": {"avx2 is in use although amx_int8 is available"},
    }
    assert found == expected.get(kind, set())


def test_long_lines_are_cut_at_blanks_and_go_on_under_their_text() -> None:
    line = doctor._line("features", "word " * 30)
    first, second = doctor._wrapped(line)
    assert len(first) <= 100 and first.startswith("features  word")
    assert second.startswith(" " * 10 + "word") and len(f"{first}{second}".split()) == 31
    assert doctor._wrapped("  remedy: " + "x " * 60)[1].startswith("    x")
    assert doctor._wrapped("") == [""]
