"""What the project says of itself holds: links, metadata, versions, words, pictures, spelling.

`test_readme.py` runs the README's examples.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ADDRESS = PROJECT["urls"]["Homepage"]
SOURCES = ("python", "csrc", "tests", "scripts", "benchmarks", "examples", "build_backend")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", flags=re.MULTILINE)


def links_of(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [inline or reference for inline, reference in LINK.findall(text)]


def anchors_of(page: Path) -> set[str]:
    """What a link to a heading of `page` has behind #."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_into_the_project_leads_to_a_file(page: Path) -> None:
    for link in links_of(page):
        target, _, anchor = link.partition("#")
        if target.startswith(ADDRESS + "/blob/main/"):
            path = ROOT / target.removeprefix(ADDRESS + "/blob/main/")
        elif "://" in target:
            continue
        else:
            path = page.parent / target if target else page
        assert path.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors_of(path), f"{page.name}: {link}"


def test_the_readme_reads_the_same_on_a_package_index() -> None:
    """A package index shows README alone: a relative link would lead nowhere there."""
    relative = [link for link in links_of(ROOT / "README.md") if "://" not in link]
    assert relative == []
    assert any(link.startswith(ADDRESS) for link in links_of(ROOT / "README.md"))


def test_every_reference_link_of_the_readme_is_used_and_defined() -> None:
    """`[FORMAT.md]` without a definition would be printed with its brackets."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    defined = set(re.findall(r"^\[([^\]]+)\]: ", prose, flags=re.MULTILINE))
    used = set(re.findall(r"\[([^\]]+)\](?!:|\()", prose))
    assert used == defined


def test_every_page_of_docs_can_be_reached_from_the_readme() -> None:
    seen: set[str] = set()
    todo = ["README.md"]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        for link in links_of(ROOT / page):
            target = link.split("#")[0].removeprefix(ADDRESS + "/blob/main/")
            if target.endswith(".md") and "://" not in target:
                base = ROOT if link.startswith(ADDRESS) else (ROOT / page).parent
                path = (base / target).resolve()
                if path.is_relative_to(ROOT):
                    todo.append(path.relative_to(ROOT).as_posix())
    missing = {p.relative_to(ROOT).as_posix() for p in PAGES} - seen
    assert missing == set()


def test_the_classifiers_name_every_python_from_the_floor_on() -> None:
    floor = int(PROJECT["requires-python"].removeprefix(">=3."))
    minors = sorted(
        int(c.rsplit(".", 1)[1])
        for c in PROJECT["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", c)
    )
    assert minors and minors == list(range(floor, minors[-1] + 1))


def test_one_version_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {PROJECT['version']}\n" in citation
    assert f"## {PROJECT['version']} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f'repository-code: "{ADDRESS}"' in citation


def test_the_workflow_runs_the_continuous_integration() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert re.search(r"^\s+- run: .*bash \.ci/run$", workflow, flags=re.MULTILINE)


@pytest.mark.parametrize("word", ["masters", "sub-norms", "load cache", "stored", "prefill"])
def test_words_of_the_readme_are_explained(word: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    glossary = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    assert word in readme, f"{word}: no longer in README, take it from this list"
    assert re.search(rf"^\| \*\*[^*]*{word}", glossary, flags=re.MULTILINE)


def test_the_pictures_of_the_layers_are_current() -> None:
    script = ROOT / "scripts" / "draw_layers.py"
    page = (ROOT / "docs" / "reference" / "architecture.md").read_text(encoding="utf-8")
    drawn = subprocess.run([sys.executable, "-B", script], capture_output=True, text=True)
    pictures = re.findall(r"```mermaid\n.*?```\n", drawn.stdout, flags=re.DOTALL)
    assert len(pictures) == 2, drawn.stderr
    for name, picture in zip(("python", "csrc"), pictures, strict=True):
        begin = f"<!-- begin layers of {name} -->\n"
        assert f"{begin}{picture}<!-- end -->" in page, (
            "run scripts/draw_layers.py --write docs/reference/architecture.md"
        )


def test_extras_named_in_the_pages_exist() -> None:
    extras = set(PROJECT["optional-dependencies"])
    for page in PAGES:
        for named in re.findall(r"(?:bitnet-ops|'\.)\[([\w,]+)\]", page.read_text("utf-8")):
            assert extras >= set(named.split(",")), f"{page.name} names the extras {named!r}"


# --- paths and spelling ---------------------------------------------------------------------------


def paths_named_by(page: Path) -> list[str]:
    """Paths of source files in backticks: `tests/x/y.py`, not `models/<name>.py` or `simd_*.h`."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|cpp|h|inl|md|txt)|scripts/\w+)`", text)


HISTORY = {"log.md", "CHANGELOG.md"}  # what they name may be gone


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in HISTORY], ids=lambda p: p.name)
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    bases = (ROOT, page.parent, ROOT / "python" / "bitnet_ops", ROOT / "csrc")
    gone = [p for p in paths_named_by(page) if not any((base / p).exists() for base in bases)]
    assert gone == []


# American spellings. CONTRIBUTING.md: prose is British, identifiers are the field's.
AMERICAN = re.compile(
    r"(?<![\w./`'\"-])\w*(?:ternariz|normaliz(?!er)|recogniz|initializ|specializ|summariz|serializ|"
    r"organiz|optimiz|minimiz|maximiz|quantiz(?!e\b)|synchroniz|vectoriz|materializ|randomiz|behavior|"
    r"neighbor|colors?\b|favor|flavor|honor|analyz|center|catalog(?!ue)|gray|license\b|artifact|defense|"
    r"fulfill|modeling|labeled|canceled|traveled)\w*(?![\w`(/=\"'-]|\.\w)",
    flags=re.IGNORECASE,
)
OF_OTHERS = {"Unknown quantization method"}  # messages of other programs, quoted


def prose_of(path: Path) -> str:
    """The text of a page without code, or the comments and docstrings of a source file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        nodes = ast.walk(ast.parse(text))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings = [ast.get_docstring(n) or "" for n in nodes if isinstance(n, documented)]
        text = "\n".join([*docstrings, *re.findall(r"(?:^|\s)# .*", text)])
    elif path.suffix != ".md":
        text = "\n".join(re.findall(r"//.*", text))
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|\w*_\w+", "", text, flags=re.DOTALL)
    for quoted in OF_OTHERS:
        text = text.replace(quoted, "")
    return text


def test_prose_is_spelt_one_way() -> None:
    suffixes = {".py", ".cpp", ".h", ".inl"}
    files = [
        path
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes and not {"data", "stubs"} & set(path.parts)
    ]
    files.remove(Path(__file__).resolve())  # shows what is not wanted
    assert len(files) > 200
    found = [f"{path.relative_to(ROOT)}: {word}" for path in [*PAGES, *files]
             for word in AMERICAN.findall(prose_of(path))]  # fmt: skip
    assert found == []


def test_american_spelling_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""Quantizes a row."""\nquantized = 1  # the neighbor\n')
    (tmp_path / "a.md").write_text("`quantize_row` quantises; `color` behavior.\n")
    assert AMERICAN.findall(prose_of(tmp_path / "a.py")) == ["Quantizes", "neighbor"]
    assert AMERICAN.findall(prose_of(tmp_path / "a.md")) == ["behavior"]
