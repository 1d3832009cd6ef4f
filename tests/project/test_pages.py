"""The pages hold: links, examples, versions, and the lists that they keep of what the code has."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch

import benchmarks.other_engines as other_engines
import bitnet_ops  # noqa: F401  (loads torch.ops.bitnet)
from bitnet_ops.dummy import model as dummy
from bitnet_ops.dummy.configs import GROUPED
from bitnet_ops.errors import install
from bitnet_ops.models import expected_tensors

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ADDRESS = PROJECT["urls"]["Homepage"] + "/blob/main/"
PICTURES = ADDRESS.replace("github.com", "raw.githubusercontent.com").replace("blob/", "")
TEXT = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("csrc/**/*.md")]
}
HISTORY = ("CHANGELOG.md", "docs/log.md")  # what they name may be gone
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", flags=re.MULTILINE)


# --- links ---------------------------------------------------------------------------------------


def prose(page: str) -> str:
    return re.sub(r"```.*?```", "", TEXT[page], flags=re.DOTALL)


def links_of(page: str) -> list[tuple[str, str]]:
    """(path from the root, anchor) of each link of `page` into the project."""
    found = []
    for inline, reference in LINK.findall(prose(page)):
        target, _, anchor = (inline or reference).replace(PICTURES, ADDRESS).partition("#")
        if target.startswith(ADDRESS):
            found.append((target.removeprefix(ADDRESS), anchor))
        elif "://" not in target:
            path = (ROOT / page).parent / target if target else ROOT / page
            found.append((path.resolve().relative_to(ROOT).as_posix(), anchor))
    return found


def anchors_of(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted(TEXT))
def test_every_link_into_the_project_leads_somewhere(page: str) -> None:
    for path, anchor in links_of(page):
        assert (ROOT / path).exists(), path
        assert not anchor or anchor in anchors_of(path), f"{path}#{anchor}"


def test_the_readme_reads_the_same_on_a_package_index() -> None:
    """An index shows README alone: a relative link leads nowhere there, nor does a bare [name]."""
    readme = re.sub(r"`[^`]*`", "", prose("README.md"))
    assert [link for link in LINK.findall(readme) if "://" not in "".join(link)] == []
    defined = set(re.findall(r"^\[([^\]]+)\]: ", readme, flags=re.MULTILINE))
    assert set(re.findall(r"\[([^\]]+)\](?!:|\()", readme)) == defined


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen: set[str] = set()
    todo = ["README.md"]
    while todo:
        page = todo.pop()
        if page in TEXT and page not in seen:
            seen.add(page)
            todo += [path for path, _ in links_of(page)]
    assert set(TEXT) - seen == set()


@pytest.mark.parametrize("page", sorted(set(TEXT) - set(HISTORY)))
def test_every_source_file_that_a_page_names_exists(page: str) -> None:
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|cpp|h|inl|md|txt)|scripts/\w+)`", TEXT[page])
    bases = (ROOT, (ROOT / page).parent, ROOT / "python" / "bitnet_ops", ROOT / "csrc")
    assert [path for path in named if not any((base / path).exists() for base in bases)] == []


def test_one_chain_of_next_leads_through_the_whole_guide() -> None:
    page, seen = "docs/guide/getting-started.md", list[str]()
    while page not in seen:
        seen.append(page)
        (link,) = re.findall(r"^Next: \[[^\]]+\]\(([^)]+)\)$", TEXT[page], flags=re.MULTILINE)
        page = ((ROOT / page).parent / link).resolve().relative_to(ROOT).as_posix()
    guide = {name for name in TEXT if name.startswith("docs/guide/")}
    assert guide - set(seen) == set()


# --- lists ---------------------------------------------------------------------------------------


def test_a_page_lists_every_operator() -> None:
    table = TEXT["docs/reference/operators.md"].split("\n| what they work on ")[1].split("\n\n")[0]
    registered = {
        name.split("::")[1]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("bitnet::") and not name.startswith("bitnet::_")
    }
    assert set(re.findall(r"`(\w+)`", table)) == registered


def test_the_versions_are_those_of_the_last_run() -> None:
    """scripts/versions writes them."""
    runner = runpy.run_path(str(ROOT / "tests" / "versions" / "run.py"))
    page = TEXT["docs/guide/environment.md"]
    assert page == runner["replaced"](page)
    assert {"torch", "transformers"} <= {row["package"] for row in runner["read_record"]()}


def test_the_figures_beside_other_engines_are_those_of_the_record() -> None:
    """One run, one pair, one number: what differs, `python -m benchmarks.other_engines` writes."""
    for page, shown in other_engines.PAGES.items():
        assert TEXT[page] == other_engines.replaced(TEXT[page], *shown), page
    record = other_engines.read_record()
    (llama,) = (pairs for (*_, engine), pairs in record.items() if "TQ2_0" in engine)
    said = [other_engines.rounded(llama[work][1]) for work in ("decode", "prompt of 128")]
    fast = TEXT["README.md"].split("**Fast**")[1].split("\n- ")[0]
    assert re.findall(r"(\S+) times", fast) == said


def test_the_sizes_of_models_are_those_of_their_tensors() -> None:
    """By sums of our own: 2 bits a ternary weight, rows of whole 128, a float32 scale a group."""
    table = TEXT["docs/guide/models.md"].split("<!-- begin sizes -->")[1]
    rows = re.findall(r"\| `([\w.-]+)` \| ([\d.]+) \| ([\d.]+) \|", table.split("<!-- end -->")[0])
    assert len(rows) == 12
    for name, file_gb, memory_gb in rows:
        config, grouped = dummy.config(name), name in GROUPED
        file = memory = 0
        for spec in expected_tensors(config).values():
            *_, n, k = (1, *spec.shape)
            if spec.kind == "ternary" or (grouped and spec.may_be_ternary):
                groups = -(-k // 128)
                both = n * groups * (32 + 4 * grouped)
                file, memory = file + both, memory + both
            else:
                file, memory = file + 2 * n * k, memory + n * k
        d = config.delta_net
        layers = config.num_hidden_layers - (0 if d is None else len(d.layers))
        cache = 2 * layers * config.num_key_value_heads * config.head_dim * 2
        state = 0 if d is None else d.values * d.key_dim + (d.kernel - 1) * d.channels
        states = 4 * state * (config.num_hidden_layers - layers)
        assert float(file_gb) == pytest.approx(file / 1e9, abs=0.006 + file / 1e11), name
        memory += 4096 * cache + states + 5e8
        assert float(memory_gb) == pytest.approx(memory / 1e9, abs=0.06), name


def test_the_page_lists_every_environment_variable() -> None:
    """A name is read where it is a whole string: getenv, os.environ, lists of names."""
    page = TEXT["docs/guide/environment.md"]
    rows = re.findall(r"^\| `(BITNET_OPS_\w+)` \| [^|]+ \| [^|]{20,} \|$", page, flags=re.MULTILINE)
    sources = [
        path.read_text(encoding="utf-8")
        for folder in ("python", "csrc")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".pyi", ".cpp", ".h", ".inl"}
        and "tests" not in path.relative_to(ROOT).parts
    ]
    read = {name for text in sources for name in re.findall(r'"(BITNET_OPS_[A-Z_]+)"', text)}
    assert sorted(rows) == sorted(read) and len(rows) > 5
    pages = [text for page, text in TEXT.items() if page not in HISTORY]
    named = re.findall(r"\bBITNET_OPS_[A-Z_]*[A-Z]\b", "\n".join([*pages, *sources]))
    # a macro, and what keys of BITNET_OPS_TUNING replace
    older = {f"BITNET_OPS_{key}" for key in ("PREFETCH", "TABLES", "SPREAD", "BACK_OFF")}
    assert set(named) - read == {"BITNET_OPS_NAMESPACE", *older}


def test_extras_named_in_the_pages_exist() -> None:
    for page, text in TEXT.items():
        for named in re.findall(r"(?:bitnet-ops|'\.)\[([\w,]+)\]", text):
            assert set(named.split(",")) <= set(PROJECT["optional-dependencies"]), page


def test_nobody_is_sent_to_an_index_that_has_no_such_package() -> None:
    """Messages name the packages of an extra. A page names a file, or says "once released"."""
    places = {path.name: path.read_text() for path in [*ROOT.glob("examples/**/*.py")]}
    places |= {path.name: path.read_text() for path in ROOT.glob("python/bitnet_ops/**/*.py")}
    for place, text in (places | TEXT).items():
        for line in re.findall(r"pip install\b[^`\n]*\bbitnet[-_]ops\b.*|bitnet-ops\[.*", text):
            said = re.search(r"uninstall|--find-links|\.whl|# once released", line)
            assert said or place in HISTORY, (place, line)
    for extra, packages in PROJECT["optional-dependencies"].items():
        words = shlex.split(install(extra))
        assert words[:2] == ["pip", "install"] and sorted(words[2:]) == sorted(packages)


def test_one_version_everywhere_and_every_python_from_the_floor_on() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {PROJECT['version']}\n" in citation
    assert f'repository-code: "{PROJECT["urls"]["Homepage"]}"' in citation
    assert f"## [{PROJECT['version']}] - " in TEXT["CHANGELOG.md"]
    version = re.compile(r"Programming Language :: Python :: 3\.(\d+)")
    minors = [int(m[1]) for m in map(version.fullmatch, PROJECT["classifiers"]) if m]
    floor = int(PROJECT["requires-python"].removeprefix(">=3."))
    assert minors == list(range(floor, floor + len(minors)))
