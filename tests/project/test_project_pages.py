"""What the project says of itself holds: links, metadata, versions, words, pictures, spelling.

`test_readme.py` runs the README's examples.
"""

from __future__ import annotations

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
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", flags=re.MULTILINE)


def links_of(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [inline or reference for inline, reference in LINK.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_into_the_project_leads_to_a_file(page: Path) -> None:
    for link in links_of(page):
        target = link.split("#")[0]
        if target.startswith(ADDRESS + "/blob/main/"):
            path = ROOT / target.removeprefix(ADDRESS + "/blob/main/")
        elif "://" in target or not target:
            continue
        else:
            path = page.parent / target
        assert path.exists(), f"{page.name}: {link}"


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
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert word in readme, f"{word}: no longer in README, take it from this list"
    assert re.search(rf"^\| \*\*[^*]*{word}", glossary, flags=re.MULTILINE)


def test_the_pictures_of_the_layers_are_current() -> None:
    script = ROOT / "scripts" / "draw_layers.py"
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = subprocess.run([sys.executable, "-B", script], capture_output=True, text=True)
    pictures = re.findall(r"```mermaid\n.*?```\n", drawn.stdout, flags=re.DOTALL)
    assert len(pictures) == 2, drawn.stderr
    for name, picture in zip(("python", "csrc"), pictures, strict=True):
        begin = f"<!-- begin layers of {name} -->\n"
        assert f"{begin}{picture}<!-- end -->" in page, (
            "run scripts/draw_layers.py --write docs/architecture.md"
        )


def test_extras_named_in_the_pages_exist() -> None:
    extras = set(PROJECT["optional-dependencies"])
    for page in PAGES:
        for named in re.findall(r"(?:bitnet-ops|'\.)\[([\w,]+)\]", page.read_text("utf-8")):
            assert extras >= set(named.split(",")), f"{page.name} names the extras {named!r}"
