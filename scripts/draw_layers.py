#!/usr/bin/env python3
"""Draws the tables of check_layers.py as Mermaid graphs into docs/reference/architecture.md.

    python scripts/draw_layers.py [--write docs/reference/architecture.md]

An arrow means "may import" or "may include". Arrows that follow from others are left out, and
layers that may import each other share a box. Standard library only.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import check_layers

ROOT = Path(__file__).resolve().parent.parent
# What a header of these packages stands for, and one header of each.
SYSTEM = {
    "torch (stable ABI)": "torch/csrc/stable/tensor.h",
    "pybind11": "pybind11/pybind11.h",
    "SIMD intrinsics": "immintrin.h",
}
Graph = dict[str, set[str]]


def python_graph() -> Graph:
    """Layer -> the layers it may import; without the face, which loads every layer at first use."""
    layers = [name for name in check_layers.PYTHON_LAYERS if not name.startswith("__")]
    return {
        layer: {t for t in layers if t != layer and check_layers.may_import(layer, t)}
        for layer in layers
    }


def cpp_graph(source_root: Path) -> Graph:
    """Folder of csrc -> the folders and packages whose headers it may include."""
    rows = [row for row in check_layers.CPP_LAYERS if not row[0].startswith("tests")]
    headers = [p.relative_to(source_root).as_posix() for p in sorted(source_root.rglob("*.h"))]

    def folder(name: str) -> str:
        return name.split("/")[0]

    graph: Graph = {folder(row[0]): set() for row in rows}
    for prefix, own, system, *_ in rows:
        targets = {folder(h) for h in headers if re.fullmatch(own, h)} & set(graph)
        anything = (
            re.fullmatch(system, "vector") is not None
        )  # then intrinsics are no matter of its
        targets |= {
            name
            for name, header in SYSTEM.items()
            if re.fullmatch(system, header) and not (anything and header == "immintrin.h")
        }
        graph[folder(prefix)] |= targets - {folder(prefix)}
    return graph


def reachable(graph: Graph, start: str) -> set[str]:
    """Every node that can be reached from `start`, `start` itself only over a circle."""
    seen: set[str] = set()
    todo = list(graph.get(start, ()))
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += graph.get(node, ())
    return seen


def reduced(graph: Graph) -> Graph:
    """`graph` with every circle as one node ("a, b") and no arrow that follows from others."""
    reach = {node: reachable(graph, node) for node in graph}
    names = {
        node: ", ".join(
            sorted({node} | {other for other in reach[node] if node in reach.get(other, ())})
        )
        for node in graph
    }
    merged: Graph = {}
    for node, targets in graph.items():
        merged.setdefault(names[node], set()).update(names.get(t, t) for t in targets)
    for node, targets in merged.items():
        targets.discard(node)
    return {
        node: {t for t in targets if not any(t in reachable(merged, o) for o in targets - {t})}
        for node, targets in merged.items()
    }


def mermaid(graph: Graph) -> str:
    """The graph, arrows downwards, in the order of names."""
    nodes = sorted({*graph, *(t for targets in graph.values() for t in targets)})
    key = {node: f"n{i}" for i, node in enumerate(nodes)}
    lines = ["```mermaid", "flowchart TD"]
    lines += [f'  {key[node]}["{node}"]' for node in nodes]
    lines += [f"  {key[a]} --> {key[b]}" for a in nodes for b in sorted(graph.get(a, ()))]
    return "\n".join([*lines, "```\n"])


def drawn(root: Path) -> dict[str, str]:
    """Name of the picture -> its text."""
    return {
        "python": mermaid(reduced(python_graph())),
        "csrc": mermaid(reduced(cpp_graph(root / "csrc"))),
    }


def with_pictures(page: str, root: Path) -> str:
    """`page` with the pictures between their marks renewed."""
    for name, picture in drawn(root).items():
        begin, end = f"<!-- begin layers of {name} -->\n", "<!-- end -->"
        before, rest = page.split(begin)
        page = before + begin + picture + end + rest.split(end, 1)[1]
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="PAGE", help="renew its pictures")
    args = parser.parse_args()
    if args.write:
        page = args.write.read_text(encoding="utf-8")
        args.write.write_text(with_pictures(page, ROOT), encoding="utf-8")
    else:
        print("\n".join(drawn(ROOT).values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
