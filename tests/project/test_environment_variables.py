"""docs/guide/environment.md names every BITNET_OPS_* variable that the code reads, and no other.

A name counts as read where it stands as a whole string: that is how getenv, os.environ and the
lists of names take it. Prose and messages that name one are held against the same table.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guide" / "environment.md"
READ = re.compile(r'"(BITNET_OPS_[A-Z_]+)"')
ROW = re.compile(r"^\| `(BITNET_OPS_\w+)` \| ([^|]+) \| ([^|]+) \|$", flags=re.MULTILINE)
NAMED = re.compile(r"\bBITNET_OPS_[A-Z_]*[A-Z]\b")
OF_THE_BUILD = {"BITNET_OPS_NAMESPACE"}  # a macro
HISTORY = {"log.md", "CHANGELOG.md"}


def sources() -> list[Path]:
    files = [p for p in (ROOT / "python").rglob("*") if p.suffix in {".py", ".pyi"}]
    files += [p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".cpp", ".h", ".inl"}]
    return [p for p in files if "tests" not in p.relative_to(ROOT).parts]


def read_by(files: list[Path]) -> set[str]:
    return {name for path in files for name in READ.findall(path.read_text(encoding="utf-8"))}


def rows() -> dict[str, tuple[str, str]]:
    found = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert len(found) == len({name for name, _, _ in found}), "a variable has two rows"
    return {name: (default.strip(), meaning.strip()) for name, default, meaning in found}


def test_the_table_has_what_the_code_reads() -> None:
    assert len(sources()) > 200
    assert set(rows()) == read_by(sources())


def test_every_row_says_default_and_meaning() -> None:
    assert all(default and len(meaning) > 20 for default, meaning in rows().values())


def test_nothing_names_a_variable_that_is_not_there() -> None:
    pages = [p for p in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
             if p.name not in HISTORY]  # fmt: skip
    named = {
        name: path.name
        for path in [*pages, *sources()]
        for name in NAMED.findall(path.read_text(encoding="utf-8"))
    }
    assert {name: named[name] for name in named.keys() - rows().keys() - OF_THE_BUILD} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('os.environ.get("BITNET_OPS_NEW")', {"BITNET_OPS_NEW"}),
        ('std::getenv("BITNET_OPS_ISA")', {"BITNET_OPS_ISA"}),
        ('"BITNET_OPS_ISA: expected one of"', set()),
    ],
)
def test_reading_is_seen(tmp_path: Path, text: str, found: set[str]) -> None:
    (tmp_path / "a.py").write_text(text)
    assert read_by([tmp_path / "a.py"]) == found
