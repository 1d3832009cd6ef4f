"""The README's examples run as pasted, and its list of operators is the library's.

It must not know the examples' text: they are cut out of README.md.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bitnet_ops  # noqa: F401  (loads torch.ops.bitnet)

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_examples():
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs_as_pasted(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_table_lists_every_operator():
    table = README.split("operators of `torch.ops.bitnet`")[1].split("\n\n")[0]
    listed = set(re.findall(r"`(\w+)`", table))
    registered = {
        name.split("::")[1]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("bitnet::") and not name.startswith("bitnet::_")
    }
    assert listed == registered
