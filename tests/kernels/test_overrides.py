"""What an ISA writes instead of a default primitive it declares (BITNET_OVERRIDES).

The compiler refuses a declared name that either side lacks; here: that it does, and that no name
of isa/defaults*.h or template of isa/defaults_float.inl is replaced without a declaration.
"""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
ISA = CSRC / "kernels" / "isa"
HEADERS = [path for path in sorted(ISA.glob("*.h")) if "defaults" not in path.name]


def declared_names(path: Path) -> set[str]:
    """Types, constants and functions at namespace scope: what begins in the first column."""
    names: set[str] = set()
    for line in path.read_text().replace("int64_t{1}", "1").splitlines():
        line = re.sub(r"^\[\[[^]]*\]\] ", "", line)
        if found := re.match(r"(?:struct|using) (\w+)\b(?! namespace)", line):
            names.add(found[1])
        elif re.match(r"constexpr [^(]*=", line):
            names.update(re.findall(r"(\w+) =", line))
        elif found := re.match(r"inline [^(]*?(\w+)\(", line):
            names.add(found[1])
    return names


def templates_of_lanes() -> set[str]:
    """What an enumeration of isa/defaults.h stands for."""
    text = re.sub(r"\[\[[^]]*\]\] ", "", (ISA / "defaults_float.inl").read_text())
    return set(re.findall(r"^template <[^\n]*>\ninline [^(]*?(\w+)\(", text, re.M))


(LIST,) = re.findall(r"^enum LaneDefaults \{([^}]*)\};", (ISA / "defaults.h").read_text(), re.M)
DEFAULTS = set(re.findall(r"\w+", LIST)).union(
    *(declared_names(path) for path in ISA.glob("defaults*.h"))
)


def overrides(path: Path) -> list[str]:
    lists = re.findall(r"^BITNET_OVERRIDES\(([^)]*)\)", path.read_text(), re.M)
    return re.findall(r"\w+", " ".join(lists))


def test_the_defaults_are_found() -> None:
    assert {"dot", "TileStep", "kRegs", "head8_dot", "kFlushSteps"} <= DEFAULTS
    assert len(DEFAULTS) > 150
    assert templates_of_lanes() <= DEFAULTS
    assert set(re.findall(r"\w+", LIST)) <= templates_of_lanes()


@pytest.mark.parametrize("path", HEADERS, ids=lambda path: path.name)
def test_what_hides_a_default_is_declared(path: Path) -> None:
    assert sorted(overrides(path)) == sorted(declared_names(path) & DEFAULTS)


# One of each kind, in the header of an ISA of this machine's architecture.
MISSPELT = {
    "x86_64": [
        ("avx2.h", r"inline Partial dot\("),
        ("avx2.h", r"using Partial ="),
        ("ymm_float.h", r"inline F32x16 pow2\("),
    ],
    "aarch64": [("neon_dotprod.h", r"inline Partial dot\(")],
}.get(platform.machine(), [])
X86_FLAGS = ["-mavx2", "-mfma", "-mf16c"]


@pytest.mark.parametrize(("header", "definition"), [("", ""), *MISSPELT])
def test_a_misspelt_override_does_not_compile(tmp_path: Path, header: str, definition: str) -> None:
    original = header or (MISSPELT[0][0] if MISSPELT else "scalar.h")
    text = (ISA / original).read_text()
    if definition:
        name = re.findall(r"\w+", definition)[-1]
        text, changed = re.subn(definition, lambda m: m[0].replace(name, name + "x"), text)
        assert changed == 1
    (tmp_path / "primitives.h").write_text(text)
    (tmp_path / "x.cpp").write_text('#include "primitives.h"\n')
    done = subprocess.run(
        ["g++", "-std=c++20", "-fsyntax-only", "-DBITNET_ISA=tried", f"-I{CSRC}"]
        + [*(X86_FLAGS if platform.machine() == "x86_64" else []), "x.cpp"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    if not definition:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode != 0
    assert re.search(rf"error: .*\b{name}\b", done.stderr), done.stderr
