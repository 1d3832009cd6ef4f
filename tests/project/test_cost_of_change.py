"""What one more of a kind touches, counted by scripts/cost_of_change, stays within the goals.

Goals that are not met yet stand in MISSED with the number of today, which must not grow.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "CONTRIBUTING.md"

MISSED = {
    "operator without SIMD": 13,
    "operator with SIMD": 17,
    "instruction set": 10,
    "model family, same maths": 12,
    "model family, new maths": 20,
    "packed layout": 40,
    "KV cache type": 24,
}


def load_script() -> ModuleType:
    loader = SourceFileLoader("cost_of_change", str(ROOT / "scripts" / "cost_of_change"))
    spec = importlib.util.spec_from_loader("cost_of_change", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    sys.modules["cost_of_change"] = module
    loader.exec_module(module)
    return module


cost = load_script()


@pytest.fixture(scope="module")
def rows() -> Any:
    return cost.count(ROOT)


@pytest.fixture(scope="module")
def counts(rows: Any) -> dict[str, tuple[int, int]]:
    """Kind -> (files, goal)."""
    return {kind.title: (len(files), kind.goal) for kind, _, files in rows}


def test_no_kind_costs_more_than_its_goal_or_than_it_did(
    counts: dict[str, tuple[int, int]],
) -> None:
    over = {
        title: f"{files} files, at most {MISSED.get(title, goal)}"
        for title, (files, goal) in counts.items()
        if files > MISSED.get(title, goal)
    }
    assert over == {}


def test_what_is_listed_as_missed_is_missed(counts: dict[str, tuple[int, int]]) -> None:
    met = [title for title in MISSED if counts[title][0] <= counts[title][1]]
    assert met == [], "the goal is met: take it from MISSED"


def test_the_table_of_contributing_is_current(rows: Any) -> None:
    page = PAGE.read_text(encoding="utf-8")
    remedy = "run scripts/cost_of_change --write CONTRIBUTING.md"
    assert cost.with_table(page, rows) == page, remedy


@pytest.mark.parametrize(
    ("path", "text", "counts"),
    [
        ("python/x.py", 'ROWS = {"rope_table": 1}\n', True),
        ("python/x.py", "def rope_table(x):\n    return x\n", True),
        ("python/x.py", "y = ops.rope_table(x)\n", False),
        ("python/x.py", "# rope_table is elsewhere\n", False),
        ("python/x.py", '"""Not rope_table."""\n', False),
        ("python/x.py", "def rope_tables(x):\n    return x\n", False),
        ("csrc/x.cpp", "Tensor rope_table();\n", True),
        ("csrc/x.cpp", "int x;  // rope_table\n", False),
        ("README.md", "| `rope_table` |\n", True),
        ("CHANGELOG.md", "- `rope_table`\n", False),
    ],
)
def test_what_counts(tmp_path: Path, path: str, text: str, counts: bool) -> None:
    """A definition, a row or a page counts; a call, a comment or the changelog does not."""
    everything = tmp_path / "csrc" / "kernels" / "all.h"
    everything.parent.mkdir(parents=True)
    words = "unprepack quantize_weights rope_table relu2_mul avx_vnni avx512_vnni neon_dotprod trit"
    quoted = (
        "qwen2 qwen3 dummy doctor inspect convert embed export verify silu_and_mul group_linear"
    )
    quoted_words = " ".join(f'"{word}"' for word in quoted.split())
    everything.write_text(f"{words} {quoted_words} silu_and_mul group_linear Int8Attention\n")
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    found = next(kind for kind, *_ in cost.count(tmp_path) if "without" in kind.title).found
    assert (path in found["rope_table"]) is counts


def test_a_name_that_nothing_has_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="no file below .* names 'rope_table'"):
        cost.count(tmp_path)
