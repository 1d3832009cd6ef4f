"""The examples of README and of two pages run as pasted; the README lists every operator."""

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
STARTED = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
ENGINE = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README + STARTED + ENGINE, flags=re.DOTALL)


def test_there_are_examples():
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs_as_pasted(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


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
