"""The examples of README and of two pages run as pasted; the README lists every operator.

Its figures for speed are those of the pages that it names.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bitnet_ops  # noqa: F401  (loads torch.ops.bitnet)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import operators_table  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
STARTED = (ROOT / "docs" / "guide" / "getting-started.md").read_text(encoding="utf-8")
ENGINE = (ROOT / "docs" / "guide" / "engine.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README + STARTED + ENGINE, flags=re.DOTALL)


def test_there_are_examples():
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs_as_pasted(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


FIGURE = re.compile(r"\d+(?:\.\d+)?")


def figures_of_speed() -> list[tuple[str, str, str]]:
    """Page, figure and row of each figure in the tables below "Speed"."""
    section = README.split("\n## Speed\n")[1].split("\n## ")[0]
    found = []
    for row in re.findall(r"^\|.*\|$", section, flags=re.MULTILINE):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if page := re.fullmatch(r"\[(docs/\w+/\w+\.md)\]", cells[-1]):
            figures = [cell for cell in cells if FIGURE.fullmatch(cell)]
            assert figures, row
            found += [(page[1], figure, row) for figure in figures]
    return found


def test_the_figures_for_speed_are_those_of_the_pages() -> None:
    assert len(figures_of_speed()) > 10
    for page, figure, row in figures_of_speed():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)", text), f"{page}: {row}"


def test_the_table_lists_every_operator() -> None:
    listed = set(re.findall(r"`(\w+)`", operators_table.table()))
    registered = {
        name.split("::")[1]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("bitnet::") and not name.startswith("bitnet::_")
    }
    assert listed == registered
    stale = "run python scripts/operators_table.py --write README.md"
    assert operators_table.with_table(README) == README, stale
