"""Every exception of the package is a BitNetError, so that a caller can catch them all by one name.

Read from the source, since importing every module would need every engine that one of them bridges.
"""

from __future__ import annotations

import ast
import builtins
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "bitnet_ops"


def exceptions() -> dict[str, set[str]]:
    """Name of every public class whose bases are exceptions -> the names of these bases."""
    found: dict[str, set[str]] = {"BitNetError": set()}
    classes = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }
    of_python = {
        name for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }  # fmt: skip
    while True:
        known = of_python | found.keys()
        fresh = {n: b for n, b in classes.items() if n not in found and b & known}
        if not fresh:
            return found
        found |= fresh


def test_every_exception_is_a_bitnet_error() -> None:
    found = exceptions()
    ours = {"BitNetError"}
    while fresh := {name for name, bases in found.items() if name not in ours and bases & ours}:
        ours |= fresh
    assert len(found) > 20
    assert sorted(found.keys() - ours) == []
