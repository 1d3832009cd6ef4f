#!/usr/bin/env python3
"""The import graph of python/bitnet_ops in figures: scripts/import_graph.py [ROOT].

Modules and folders at the package's top level, imports between these rooms, those that go upward
in the order of scripts/check_layers.py, and circles, between modules and between rooms. An import
inside a function is counted apart; one under TYPE_CHECKING never runs and is left out.
Standard library only.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "bitnet_ops"


@dataclass(frozen=True)
class Import:
    """One import: modules by dotted name below the package; `late`: inside a function."""

    source: str
    target: str
    line: int
    late: bool


def room(module: str) -> str:
    """The module or folder at the top of the package that `module` is, or lies in."""
    return module.split(".")[0]


def read(package_root: Path) -> tuple[dict[str, Path], list[Import]]:
    """(every module, every import of one by another) of the package in `package_root`."""
    paths = [p for p in sorted(package_root.rglob("*.py*")) if p.suffix in (".py", ".pyi")]
    modules = {_name(path, package_root): path for path in paths}
    found = []
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node, late in _imports(tree, late=False):
            for target in sorted(set(_targets(node, package, modules)) - {name}):
                found.append(Import(name, target, node.lineno, late))
    return modules, found


def _name(path: Path, package_root: Path) -> str:
    parts = path.relative_to(package_root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _imports(node: ast.AST, *, late: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, late
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield from _imports(other, late=late)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, late=late or inside)


def _targets(
    node: ast.Import | ast.ImportFrom, package: str, modules: Mapping[str, Path]
) -> Iterator[str]:
    """The modules that a statement imports; `from a import b` means a.b where that is one."""
    if isinstance(node, ast.Import):
        names = [(alias.name, "") for alias in node.names]
    else:
        base = node.module or ""
        if node.level:
            parts = [PACKAGE, *filter(None, package.split("."))]
            parents = parts[: len(parts) - node.level + 1]
            base = ".".join([*parents, base] if base else parents)
        names = [(base, alias.name) for alias in node.names]
    for base, name in names:
        if base.split(".")[0] != PACKAGE:
            continue
        below = base.removeprefix(PACKAGE).lstrip(".")
        inner = ".".join(filter(None, (below, name)))
        while inner and inner not in modules:
            inner = inner.rpartition(".")[0]
        yield inner or "__init__"


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The strongly connected components of more than one node, each sorted; the largest first."""
    graph: dict[str, set[str]] = {}
    for source, target in edges:
        graph.setdefault(source, set()).add(target)
        graph.setdefault(target, set())
    reach = {node: _reachable(graph, node) for node in graph}
    found = {frozenset({n} | {m for m in reach[n] if n in reach[m]}) for n in graph}
    return sorted((sorted(c) for c in found if len(c) > 1), key=lambda c: (-len(c), c))


def _reachable(graph: Mapping[str, set[str]], node: str) -> set[str]:
    seen: set[str] = set()
    ahead = [*graph[node]]
    while ahead:
        at = ahead.pop()
        if at not in seen:
            seen.add(at)
            ahead += graph[at]
    return seen


def upward(imports: Iterable[Import], order: list[str]) -> list[Import]:
    """The imports of a room that stands above the importing one; rooms without a place are none."""
    place = {name: i for i, name in enumerate(order)}
    return [
        i
        for i in imports
        if room(i.source) in place
        and room(i.target) in place
        and place[room(i.target)] > place[room(i.source)]
    ]


def report(root: Path, order: list[str]) -> list[str]:
    """The figures of the tree at `root` as lines."""
    modules, imports = read(root / "python" / PACKAGE)
    files = [n for n, p in modules.items() if "." not in n and p.name != "__init__.py"]
    folders = sorted({room(name) for name in modules} - set(files) - {"__init__"})
    between = {(room(i.source), room(i.target)) for i in imports} - {(r, r) for r in folders}
    lines = [
        f"modules: {len(modules)}; at the top level: {len(files)} files besides __init__, "
        f"{len(folders)} folders",
        f"imports between modules: {len({(i.source, i.target) for i in imports})}; between rooms: "
        f"{len(between)}",
    ]
    face = [i for i in imports if i.source == "__init__"]
    inner = [i for i in imports if i.source != "__init__"]
    for late in (False, True):
        where = "inside functions" if late else "at import time"
        found = upward([i for i in inner if i.late == late], order)
        lines.append(f"upward, {where}: {len(found)}")
        lines += [f"  {i.source}:{i.line} -> {i.target}" for i in found]
    lines.append(f"of the face __init__: {len(face)} imports")
    for level, name in (("modules", str), ("rooms", room)):
        for kind, chosen in (
            ("at import time", [i for i in imports if not i.late]),
            ("functions included", imports),
        ):
            pairs = {(name(i.source), name(i.target)) for i in chosen}
            found_circles = circles((a, b) for a, b in pairs if a != b)
            lines.append(f"circles of {level}, {kind}: {len(found_circles)}")
            lines += [f"  {len(c)}: {', '.join(c)}" for c in found_circles]
    return lines


def main() -> int:
    from check_layers import PYTHON_LAYERS

    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    print("\n".join(report(root, list(PYTHON_LAYERS))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
