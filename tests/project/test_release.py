"""scripts/release: each check of the checklist can fail, and the tag is made if none does."""

from __future__ import annotations

import hashlib
import io
import runpy
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "release"))
PAGE = "docs/releases/1.2.3.md"
RECIPE = "packaging/conda/recipe.yaml"
PARAGRAPH = "This release can be installed " + "and used " * 20
TREE = {
    "pyproject.toml": 'version = "1.2.3"\nHomepage = "https://example.org/home"\n',
    "CITATION.cff": "version: 1.2.3\ndate-released: 2026-01-02\n",
    "CHANGELOG.md": f"""# Changelog

## [Unreleased]

## [1.2.3] - 2026-01-02

- The first one: [notes]({PAGE}).

[Unreleased]: https://example.org/compare
[1.2.3]: https://example.org/1.2.3
""",
    PAGE: f"""# bitnet_ops 1.2.3

{PARAGRAPH}

See [elsewhere](https://example.org/), [format](../../FORMAT.md#bytes).
""",
    "FORMAT.md": "# Format\n",
    RECIPE: 'context:\n  version: "1.2.3"\n',
}
INFO = "bitnet_ops-1.2.3.dist-info"
SOURCES = "bitnet_ops-1.2.3.tar.gz"
ARM, X86 = (f"bitnet_ops-1.2.3-py3-none-manylinux_2_28_{m}.whl" for m in ("aarch64", "x86_64"))
FILES = {
    SOURCES: {
        f"bitnet_ops-1.2.3/{name}": ""
        for name in ("pyproject.toml", "LICENSE", "CMakeLists.txt", "csrc/ops.cpp")
    }
    | {"bitnet_ops-1.2.3/tests/conftest.py": "build = True"},
    **{
        wheel: {
            f"{INFO}/METADATA": "Metadata-Version: 2.4\nName: bitnet-ops\nVersion: 1.2.3\n",
            f"{INFO}/WHEEL": f"Wheel-Version: 1.0\nTag: {wheel[17:-4]}\n",
            f"{INFO}/sboms/bitnet-ops.cdx.json": '{\n "bomFormat": "CycloneDX"\n}\n',
        }
        for wheel in (ARM, X86)
    },
}


def git(tree: Path, *words: str) -> str:
    identity = ("-c", "user.name=Tester", "-c", "user.email=tester@example.org")
    done = subprocess.run(
        ["git", "-C", str(tree), *identity, *words], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def commit(tree: Path) -> None:
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--allow-empty", "-m", "state")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project that is ready for its release."""
    for who in ("AUTHOR", "COMMITTER"):  # a runner may have no identity
        monkeypatch.setenv(f"GIT_{who}_NAME", "Tester")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "tester@example.org")
    tree = tmp_path / "tree"
    for name, text in TREE.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text, encoding="utf-8")
    git(tree, "init", "--quiet", "--initial-branch=main")
    commit(tree)
    return tree


def write_files(out: Path, files: dict[str, dict[str, str]]) -> Path:
    """What scripts/build_wheels writes, as far as the checks look at it."""
    out.mkdir()
    for name, members in files.items():
        if name.endswith(".whl"):
            with zipfile.ZipFile(out / name, "w") as wheel:
                for member, text in members.items():
                    wheel.writestr(member, text)
            continue
        with tarfile.open(out / name, "w:gz") as archive:
            for member, text in members.items():
                about = tarfile.TarInfo(member)
                about.size = len(text)
                archive.addfile(about, io.BytesIO(text.encode()))
    sums = [f"{hashlib.sha256((out / n).read_bytes()).hexdigest()}  {n}\n" for n in sorted(files)]
    (out / "SHA256SUMS").write_text("".join(sums))
    return out


def states(capsys: pytest.CaptureFixture[str], state: str) -> set[str]:
    """The steps that the program said this of."""
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    return {line[8:].split()[0] for line in lines if line.startswith(state)}


def without_twine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves its check out, which has a test of its own: samples hold no README."""
    steps = tuple(step for step in SCRIPT["FILES"] if step[0] is not SCRIPT["index"])
    monkeypatch.setitem(SCRIPT["walk"].__globals__, "FILES", steps)


def test_a_tag_is_made_where_nothing_fails(
    tree: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = write_files(tmp_path / "out", FILES)
    steps = {"version", "day", "changelog", "notes", "clean", "place"}
    assert SCRIPT["main"](["--dry-run"], tree) == 0
    assert states(capsys, "ok") == steps
    assert git(tree, "tag") == ""
    without_twine(monkeypatch)
    assert SCRIPT["main"](["--wheels", str(out)], tree) == 0
    assert states(capsys, "ok") == {*steps, "hashes", "metadata", "sources"}
    kind, text = git(tree, "cat-file", "tag", "v1.2.3").split("\n")[1], git(tree, "tag", "-n99")
    assert kind == "type commit" and "bitnet_ops 1.2.3" in text and "and used" in text
    git(tree, "checkout", "--quiet", "--detach")  # as a workflow that the tag starts
    assert SCRIPT["main"](["--dry-run"], tree) == 0
    assert SCRIPT["main"]([], tree) == 1  # it is there already


BROKEN_TREE = [
    ("version", "CITATION.cff", "version: 1.2.3", "version: 1.2.4"),
    ("version", RECIPE, "1.2.3", "1.2"),
    ("version", PAGE, "# bitnet_ops 1.2.3", "# bitnet_ops"),
    (
        "version",
        "CHANGELOG.md",
        "## [1.2.3] - 2026",
        "## [1.3.0] - 2026-01-02\n\n## [1.2.3] - 2026",
    ),
    ("day", "CITATION.cff", "2026-01-02", "2026-01-03"),
    ("day", "CITATION.cff", "date-released: 2026-01-02\n", ""),
    ("day", "CITATION.cff CHANGELOG.md", "2026-01-02", "9999-01-02"),
    ("changelog", "CHANGELOG.md", "- The first one: [notes]", "[notes]: ["),
    ("changelog", "CHANGELOG.md", "[Unreleased]\n", "[Unreleased]\n\n- A thing.\n"),
    ("changelog", "CHANGELOG.md", "## [Unreleased]\n", ""),
    ("changelog", "CHANGELOG.md", "[1.2.3]: https://example.org/1.2.3\n", ""),
    ("notes", PAGE, PARAGRAPH, "It is."),
    ("notes", PAGE, "../../FORMAT.md", "../../FORMATS.md"),
    ("notes", "CHANGELOG.md", PAGE, "FORMAT.md"),
]


@pytest.mark.parametrize(("step", "paths", "old", "new"), BROKEN_TREE)
def test_a_broken_tree_is_seen(
    step: str, paths: str, old: str, new: str, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in paths.split():
        text = (tree / path).read_text(encoding="utf-8")
        assert old in text
        (tree / path).write_text(text.replace(old, new), encoding="utf-8")
    commit(tree)
    assert SCRIPT["main"]([], tree) == 1
    assert states(capsys, "failed") == {step}
    assert git(tree, "tag") == ""


def test_a_state_of_git_that_cannot_be_released_is_seen(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "new.txt").write_text("")
    assert SCRIPT["main"]([], tree) == 1 and states(capsys, "failed") == {"clean"}
    commit(tree)
    git(tree, "tag", "v1.2.3", "HEAD~1")
    assert SCRIPT["main"]([], tree) == 1 and states(capsys, "failed") == {"place"}
    git(tree, "tag", "--delete", "v1.2.3")
    git(tree, "checkout", "--quiet", "-b", "topic")
    assert SCRIPT["main"]([], tree) == 1 and states(capsys, "failed") == {"place"}


BROKEN_FILES = [
    ("metadata", X86, f"{INFO}/METADATA", "Version: 1.2.3", "Version: 1.2.2"),
    ("metadata", ARM, f"{INFO}/WHEEL", "aarch64", "x86_64"),
    ("metadata", ARM, f"{INFO}/sboms/bitnet-ops.cdx.json", "CycloneDX", "SPDX"),
    ("sources", SOURCES, "bitnet_ops-1.2.3/csrc/ops.cpp", None, None),
    ("sources", SOURCES, "bitnet_ops-1.2.3/build/object.o", None, ""),
]


@pytest.mark.parametrize(("step", "file", "member", "old", "new"), BROKEN_FILES)
def test_a_broken_file_of_a_release_is_seen(
    step: str, file: str, member: str, old: str | None, new: str | None,
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    members = dict(FILES[file])
    if new is None:
        del members[member]
    else:
        members[member] = members.get(member, "").replace(old or new, new)
    out = write_files(tmp_path / "out", FILES | {file: members})
    without_twine(monkeypatch)
    assert SCRIPT["main"](["--dry-run", "--wheels", str(out)], tree) == 1
    assert states(capsys, "failed") == {step}


@pytest.mark.parametrize("broken", ["changed", "not listed", "listed alone", "no list"])
def test_hashes_that_do_not_match_are_seen(broken: str, tree: Path, tmp_path: Path) -> None:
    out = write_files(tmp_path / "out", FILES)
    if broken == "changed":
        (out / X86).write_bytes(b"other")
    elif broken == "not listed":
        (out / "more.json").write_text("{}")
    elif broken == "listed alone":
        (out / ARM).unlink()
    else:
        (out / "SHA256SUMS").unlink()
    found = list(SCRIPT["walk"](SCRIPT["Release"](tree, out), built=True))
    wrong = {
        said.split(":")[0] for state, name, said in found if (state, name) == ("failed", "hashes")
    }
    assert (
        wrong
        == {
            "changed": {X86},
            "not listed": {"more.json"},
            "listed alone": {ARM},
            "no list": {
                "expected readable files, got FileNotFoundError(2, 'No such file or directory')"
            },
        }[broken]
    )


def test_what_twine_rejects_is_seen(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = SCRIPT["Release"](tree, write_files(tmp_path / "out", FILES))
    stand_in, asked = tmp_path / "twine.py", tmp_path / "asked"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    stand_in.write_text(f"import sys; print(*sys.argv[1:], file=open({str(asked)!r}, 'w'))")
    assert list(SCRIPT["index"](release)) == []
    assert {Path(word).name for word in asked.read_text().split()} >= {
        "--strict",
        SOURCES,
        X86,
        ARM,
    }
    stand_in.write_text("print('no markup'); raise SystemExit(1)")
    assert list(SCRIPT["index"](release)) == ["expected twine to accept the files, got: no markup"]


def test_notes_on_the_page_of_a_release_have_whole_addresses(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert SCRIPT["main"](["--notes"], tree) == 0
    text = capsys.readouterr().out
    assert text.startswith(PARAGRAPH[:30]) and "(https://example.org/)" in text
    assert "(https://example.org/home/blob/v1.2.3/FORMAT.md#bytes)" in text


def test_this_project_says_one_version_and_has_notes_for_it() -> None:
    release = SCRIPT["Release"](ROOT, ROOT)
    assert [*SCRIPT["version"](release), *SCRIPT["notes"](release)] == []
    days = {release.first(pattern, place) for place, pattern in SCRIPT["DATES"].items()}
    assert len(days) == 1 and None not in days
