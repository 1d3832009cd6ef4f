"""Files that comments, docstrings and pages name are there: a name that moved is found here."""

from __future__ import annotations

import ast
import collections
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "build_backend", "csrc", "docs", "examples", "python", "scripts", "tests")
# What was so at its time.
HISTORY = ("CHANGELOG.md", "docs/log.md", "docs/notes/", "docs/releases/", "tests/data/")
NAME = re.compile(r"(?<![\w/.<>*{}-])[\w./-]*\w\.(?:py|cpp|h|inl|md)\b(?![\w(.])")
# Files of other projects, of the system, and those that a build, a command or a reader makes.
OTHERS = re.compile(
    r"""(?:.*/)?(?:
    (?:ik_llama|llama|bitnet)\.cpp | ggml[\w-]*\.\w+ | llama-\w+\.cpp | convert_hf_to_gguf\.py
    | (?:modeling|configuration|tokenization)_\w+\.py | masking_utils\.py | qwen3_5\.py
    | prism_hadamard_qwen35\.py | utils_quant\.py | integrations/bitnet\.py | runtime/artifact\.py
    | server_args\.py | X\.Y\.Z\.md | xxhash_spec\.md | Python\.h | fenv\.h | avx512\.h | library\.h
    | isa_list\.h | native_isa\.cpp | page\.md
    )""",
    re.VERBOSE,
)


def tracked() -> list[str]:
    run = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    files = run.stdout.splitlines() or [  # an sdist
        str(file.relative_to(ROOT)) for one in FOLDERS for file in (ROOT / one).rglob("*.*")
    ]
    return [file for file in files if (ROOT / file).is_file()]


def python_text(text: str) -> Iterator[str]:
    """Comments and docstrings."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def prose(file: str) -> Iterator[str]:
    """What people read in a file: not its code, but with what it includes."""
    text = (ROOT / file).read_text()
    if file.endswith(".py"):
        yield from python_text(text)
    elif file.endswith((".cpp", ".h", ".inl")):
        yield from re.findall(r"//.*|#include \".*", text)
    elif file.endswith(".md"):
        blocks = re.findall(r"(?ms)^ *```.*?^ *```", text)
        yield re.sub(r"https?://\S+", "", re.sub(r"(?ms)^ *```.*?^ *```", "", text))
        yield from (line for block in blocks for line in re.findall(r"(?m)^ *#.*", block))


def missing(texts: Iterator[str], there: set[str]) -> list[str]:
    """Names in texts of which no file of the tree has that name, or ends with that path."""
    found = (name for text in texts for name in NAME.findall(text))
    plain = ((name, re.sub(r"^(\.{1,2}/)+", "", name)) for name in found)
    return [n for n, end in plain if f"/{end}" not in there and not OTHERS.fullmatch(n)]


def endings(files: list[str]) -> set[str]:
    """Of every path all its ends at a slash, which a text may write for it."""
    parts = [file.split("/") for file in files]
    return {"/" + "/".join(p[i:]) for p in parts for i in range(len(p))}


def test_named_files_are_there() -> None:
    files = tracked()
    there = endings(files)
    pages = [f for f in files if f.endswith(".md") and "/" not in f]
    read = [
        f
        for f in files
        if f.startswith(FOLDERS) and f.endswith((".py", ".cpp", ".h", ".inl", ".md"))
    ]
    wrong = {
        file: names
        for file in [*pages, *read]
        if not file.startswith(HISTORY) and (names := missing(prose(file), there))
    }
    assert not wrong, "\n".join(f"{file}: {', '.join(names)}" for file, names in wrong.items())


@pytest.mark.parametrize("line", ["see gone.py", "as `engine/gone.h` says", "docs/gone/faq.md"])
def test_a_name_without_a_file_is_found(line: str) -> None:
    there = endings(["docs/guide/faq.md", "csrc/engine/head.h"])
    assert missing(iter([line]), there)
    assert not missing(iter(["engine/head.h, faq.md, ../guide/faq.md, llama.cpp, a.h.in"]), there)


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by their names, and would collect one of them."""
    names = collections.Counter(Path(f).name for f in tracked() if f.startswith("tests/"))
    assert not [n for n, count in names.items() if n.startswith("test_") and count > 1]
