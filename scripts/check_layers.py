#!/usr/bin/env python3
"""Proves who may know whom: imports of python/bitnet_ops, includes of csrc. Standard library only.

Each rule is a row of a table below; CONTRIBUTING.md draws the same picture. It must not know what
the modules do, and it imports none of them. Exit status 1 and one line per violation.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import import_graph  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent

# Layer -> the layers of bitnet_ops it may import, from the bottom to the top: a row names only
# rows above it. A layer is the first part of a module's name below bitnet_ops; a module may
# always import its own layer. "*" = all rows above but those of NEVER_BY_STAR.
PYTHON_LAYERS: dict[str, set[str]] = {
    "_runtime": set(),
    "errors": set(),  # every layer may import it
    "_interrupt": set(),
    "config": set(),
    "machine": set(),
    "untrusted": set(),
    "memory": {"_runtime"},
    "ops": {"_runtime"},
    "formats": {"_runtime", "memory", "untrusted"},
    "nn": {"_runtime", "config", "formats", "ops", "untrusted"},
    "models": {"config", "memory", "nn", "ops"},
    "generate": {"config", "models", "nn", "ops", "untrusted"},
    "loading": {"_runtime", "config", "formats", "memory", "models", "nn", "ops"},
    # what an engine of others serves: its linears, or a whole model in its cache
    # its launchers look at the machine and at config files of checkpoints before they start
    "integrations": {"config", "formats", "loading", "models", "nn", "ops"}
    | {"machine", "untrusted"},
    # verify runs the converted model; obtain converts what is not converted, for language_model
    "convert": {"_runtime", "config", "formats", "generate", "loading", "models", "nn", "ops"}
    | {"untrusted"},
    "language_model": {"config", "convert", "formats", "generate", "loading", "models", "nn"}
    | {"untrusted"},
    # makes transformers models and hands what was trained to the converter
    "training": {"config", "convert", "formats", "language_model", "loading", "models", "nn"}
    | {"ops", "untrusted"},
    "dummy": {"config", "formats", "generate", "loading", "models", "nn", "untrusted"},
    "bench": {"_runtime", "dummy", "formats", "generate", "language_model", "machine", "models"}
    | {"nn", "ops", "untrusted"},
    "evaluation": {"generate", "language_model"},
    "cli": {"*", "integrations"},
    "__main__": {"cli"},
    "__init__": {"*", "integrations"},  # the lazy face: imports at first use what it exports
}
NEVER_BY_STAR = {"integrations"}

# Packages that only some modules may import, by the prefix of the module below bitnet_ops.
GUARDED_PACKAGES: dict[str, tuple[str, ...]] = {
    "transformers": (
        "integrations.transformers",
        "convert.verify",
        "training.model",
    ),
    "lm_eval": ("evaluation",),
    "benchmarks": (),  # of the source tree, not of the wheel
    "sglang": ("integrations.sglang",),
    "vllm": ("integrations.vllm",),
    "pybind11": (),
}

# Directory or file prefix below csrc -> (allowed own headers, allowed system headers). First match.
# Own headers are what a file includes itself. System headers are also those that it reaches through
# own headers, so a layer cannot get torch by way of another.
INTRINSICS = r"immintrin\.h|arm_neon\.h|cstdint|cstddef"
NO_TORCH = r"(?!torch/|ATen/|c10/).*"
NO_TORCH_NO_PYTHON = r"(?!torch/|ATen/|c10/|pybind11/|Python\.h).*"
CPP_LAYERS: list[tuple[str, str, str]] = [
    (
        "kernels/dispatch",
        r"kernels/(dispatch|features|kernel_table|isa_tables)\.h",
        NO_TORCH_NO_PYTHON,
    ),
    ("kernels/features", r"kernels/features\.h", NO_TORCH_NO_PYTHON),
    ("kernels/check_words", "", NO_TORCH_NO_PYTHON),
    ("kernels/tile_check", r"kernels/(check_words|features|tile_check)\.h", NO_TORCH_NO_PYTHON),
    (
        "kernels/pair_unit",
        r"kernels/(check_words|dispatch|features|kernel_table|pair_unit)\.h",
        NO_TORCH_NO_PYTHON,
    ),
    ("kernels/", r"kernels/(?!dispatch).*|format/layout\.h", INTRINSICS),
    ("runtime/", r"runtime/.*", NO_TORCH_NO_PYTHON),
    ("format/", r"format/.*", NO_TORCH_NO_PYTHON),
    (
        "engine/",
        r"engine/.*|runtime/.*|format/layout\.h|kernels/(dispatch|kernel_table|pair_unit)\.h",
        NO_TORCH_NO_PYTHON + r"(?<!mmintrin\.h)(?<!arm_neon\.h)",
    ),
    (
        "tests/",
        r"tests/.*|engine/.*|runtime/.*|format/.*|kernels/.*\.h",
        NO_TORCH_NO_PYTHON,
    ),
    (
        "bindings",
        r"bindings.*|runtime/.*|format/.*|"
        r"kernels/(dispatch|features|kernel_table|pair_unit|tile_check)\.h",
        NO_TORCH,
    ),
    (
        "hf_kernel",
        r"runtime/.*|format/layout\.h|kernels/(dispatch|kernel_table)\.h",
        NO_TORCH_NO_PYTHON,
    ),
    (
        "ops",
        r"ops/.*|engine/.*|runtime/.*|format/layout\.h|kernels/(dispatch|kernel_table)\.h",
        r"torch/(csrc/stable|csrc/inductor/aoti_torch/c|headeronly)/.*|"
        r"(?!torch/|ATen/|c10/|pybind11/|Python\.h|omp\.h).*",
    ),
]


def imported_modules(tree: ast.AST, package: str) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every import in `tree`, function-level ones included.

    `package` is the package of the module, against which relative imports are resolved. For
    ``from a import b`` both ``a`` and ``a.b`` are returned, since b may be a module.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def own_layer(name: str, layers: set[str]) -> str | None:
    """The layer that the dotted name `bitnet_ops.x.y` belongs to; None when it is not ours."""
    parts = name.split(".")
    if parts[0] != "bitnet_ops":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in layers else "__init__"


def may_import(layer: str, target: str) -> bool:
    allowed, order = PYTHON_LAYERS[layer], list(PYTHON_LAYERS)
    if target in (layer, "errors") or target in allowed:
        return True
    below = order.index(target) < order.index(layer)
    return "*" in allowed and below and target not in NEVER_BY_STAR


def check_order(table: dict[str, set[str]]) -> list[str]:
    """Rows of `table` that name a layer which does not stand above them, hence is not below."""
    order = ["*", *table]
    return [
        f"PYTHON_LAYERS: '{layer}' must not name '{target}', which stands behind it"
        for layer, allowed in table.items()
        for target in sorted(allowed)
        if target not in order or order.index(target) >= order.index(layer)
    ]


def check_circles(package_root: Path) -> list[str]:
    """Modules of the package that import each other in a circle, be it inside functions."""
    _, imports = import_graph.read(package_root)
    found = import_graph.circles((i.source, i.target) for i in imports)
    return [f"{package_root}: imports in a circle: {', '.join(names)}" for names in found]


def check_python_file(path: Path, package_root: Path) -> list[str]:
    """Violations in one file of the package whose directory is `package_root` (.../bitnet_ops)."""
    relative = path.relative_to(package_root).with_suffix("")
    module = ".".join(relative.parts)
    layer = relative.parts[0]
    if layer not in PYTHON_LAYERS:
        return [f"{path}: layer '{layer}' has no row in PYTHON_LAYERS of scripts/check_layers.py"]
    package = ".".join(["bitnet_ops", *relative.parts[:-1]])
    problems = []
    for line, name in imported_modules(ast.parse(path.read_text(encoding="utf-8")), package):
        target = own_layer(name, set(PYTHON_LAYERS))
        if target is not None and not may_import(layer, target):
            problems.append(f"{path}:{line}: '{layer}' must not import '{target}' ({name})")
        allowed = GUARDED_PACKAGES.get(name.split(".")[0])
        if allowed is not None and not module.startswith(allowed):
            problems.append(f"{path}:{line}: only {allowed} may import {name.split('.')[0]}")
    return problems


INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]', re.MULTILINE)


def includes_of(path: Path) -> list[tuple[int, str, bool]]:
    """(line, header, in quotes) of every include in `path`."""
    text = path.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, found.start()) + 1, found[2], found[1] == '"')
        for found in INCLUDE.finditer(text)
    ]


def reached_headers(path: Path, source_root: Path) -> dict[str, list[str]]:
    """System headers that `path` reaches -> the own headers on the way there, the nearest first."""
    reached: dict[str, list[str]] = {}
    seen: set[Path] = {path}
    todo: list[tuple[Path, list[str]]] = [(path, [])]
    for file, way in todo:  # grows: breadth first
        for _, header, quoted in includes_of(file):
            own = source_root / header
            if own.is_file():
                if own not in seen:
                    seen.add(own)
                    todo.append((own, [*way, header]))
            elif not quoted or way:
                reached.setdefault(header, way)
    return reached


def check_cpp_file(path: Path, source_root: Path) -> list[str]:
    """Violations in one file below `source_root` (.../csrc)."""
    relative = path.relative_to(source_root).as_posix()
    rule = next((row for row in CPP_LAYERS if relative.startswith(row[0])), None)
    if rule is None:
        return [f"{path}: no row for it in CPP_LAYERS of scripts/check_layers.py"]
    problems = []
    for line, header, quoted in includes_of(path):
        is_own = quoted or (source_root / header).is_file()
        if not re.fullmatch(rule[1] if is_own else rf"{rule[1]}|{rule[2]}", header):
            problems.append(f"{path}:{line}: '{rule[0]}' must not include {header}")
    for header, way in reached_headers(path, source_root).items():
        if way and not re.fullmatch(rule[2], header):
            chain = " -> ".join([*way, header])
            problems.append(f"{path}: '{rule[0]}' must not reach {header}: {chain}")
    return problems


def check(root: Path) -> list[str]:
    """Every violation below `root`, and a complaint when there is nothing to check."""
    package_root, source_root = root / "python" / "bitnet_ops", root / "csrc"
    python_files = sorted(package_root.rglob("*.py")) + sorted(package_root.rglob("*.pyi"))
    cpp_files = [p for p in sorted(source_root.rglob("*")) if p.suffix in {".cpp", ".h", ".inl"}]
    if not python_files or not cpp_files:
        return [f"{root}: expected python/bitnet_ops/*.py and csrc/**, found none"]
    problems = check_order(PYTHON_LAYERS) + check_circles(package_root)
    problems += [line for path in python_files for line in check_python_file(path, package_root)]
    return problems + [line for path in cpp_files for line in check_cpp_file(path, source_root)]


def main() -> int:
    problems = check(ROOT)
    for line in problems:
        print(line, file=sys.stderr)
    print(f"check_layers: {len(problems)} violation(s)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
