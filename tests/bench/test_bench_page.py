"""docs/performance.md: what its figures say and nothing else; a machine's own section.

Nothing here asserts a speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page, update_performance

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PNG = b"\x89PNG\r\n\x1a\n"


# --- the page of the repository ------------------------------------------------------------------


def test_the_page_is_what_its_figures_say() -> None:
    assert (DOCS / "performance.md").read_text(encoding="utf-8") == page.render(DOCS)


def test_every_picture_and_machine_of_the_repository_is_on_the_page() -> None:
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    stored = sorted((DOCS / "plots").iterdir())
    assert stored
    for folder in stored:
        figures = json.loads((folder / page.FIGURES).read_text(encoding="utf-8"))
        assert page.slug(figures["environment"]) == folder.name
        assert f"\n## {figures['environment']['cpu']}, {figures['environment']['isa']}\n" in text
        for file in folder.glob("*.png"):
            assert f"![{file.stem}](plots/{folder.name}/{file.name})" in text


def test_the_page_does_not_claim_an_idle_machine_beside_other_processes() -> None:
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    assert "nobody else" not in text
    for section in text.split("\n## ")[1:]:
        assert section.count("\n- **State**: load average") == 1
        disturbed = [
            line for line in section.splitlines()
            if line.startswith("| ") and "disturbed" in line.rsplit("|", 2)[1]
        ]  # fmt: skip
        assert f"; {len(disturbed)} of " in section.split("**State**")[1].splitlines()[0]


def figures(load: list[float] | None, *notes: str) -> page.Figures:
    return {
        "environment": {"load_average": load, "cpus_available": 2},
        "goals": {"table": ["", [], [["a", note] for note in notes]]},
        "others": ["", [], []],
        "models": [{"tables": [["", ["notes"], [["b", "disturbed"]]], ["", ["s"], [["c", ""]]]]}],
    }


def test_the_state_is_one_honest_line() -> None:
    busy = "load average 1.45 on 2 CPUs before, so other processes ran; 2 of 3 rows disturbed"
    assert page.state_line(figures([1.45], "x", "y (disturbed)")).endswith(
        f"{busy}: use the ratios only"
    )
    assert page.state_line(figures([0.1], "x")).endswith(
        "load average 0.1 on 2 CPUs before; 1 of 2 rows disturbed: use the ratios only"
    )
    quiet = figures(None, "x") | {"models": []}
    assert page.state_line(quiet).endswith(
        "load average unknown on 2 CPUs before; 0 of 1 rows disturbed"
    )


def test_unstable_limits_have_no_figures_on_the_page() -> None:
    (stored, *_) = sorted(DOCS.glob(f"plots/*/{page.FIGURES}"))
    shown = json.loads(stored.read_text(encoding="utf-8"))
    none = {"read_gb_s": None, "int8_peak_gmac_s": None, "read_forms_gb_s": {}}
    shown["limits"] = [{"threads": 2, "unstable": True, "read_form": "1 stream"} | none]
    (line,) = [x for x in page.machine_lines(shown) if x.startswith("- limits")]
    assert line == "- limits with 2 thread(s): none, others had the CPUs"


def test_figures_survive_being_stored(tmp_path: Path) -> None:
    made = {"a": [["x", "|"], []], "b": {"c": [1, 2.5], "d": None, "e": {}}, "f": "µ"}
    page.write_figures(made, tmp_path / "f.json")
    assert json.loads((tmp_path / "f.json").read_text(encoding="utf-8")) == made


def test_slug_names_cpu_and_kernels() -> None:
    environment: dict[str, Any] = {"cpu": "Intel(R) Xeon(R) @ 2.0 (family 6)", "isa": "amx_int8"}
    assert page.slug(environment) == "intel-r-xeon-r-2-0-family-6-amx-int8"


# --- a page of this machine ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page beside another machine's figures, written in --quick by the command line."""
    file = tmp_path_factory.mktemp("docs") / "performance.md"
    (other,) = sorted(DOCS.glob(f"plots/amd-epyc-family-25-model-1-avx2/{page.FIGURES}"))
    folder = file.parent / "plots" / "other-cpu"
    folder.mkdir(parents=True)
    (folder / page.FIGURES).write_text(
        other.read_text(encoding="utf-8").replace("AMD EPYC", "Another CPU"), encoding="utf-8"
    )
    arguments = ["benchmarks.update_performance", str(file), "--quick"]
    arguments += ["--data", str(file.parent / "data")]
    subprocess.run([sys.executable, "-m", *arguments], check=True, cwd=ROOT)
    return file


@pytest.mark.slow
def test_page_has_this_machine_and_keeps_the_others(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    assert text.startswith("# Performance") and "## Another CPU (family 25, model 1)" in text
    result = json.loads((written.parent / "data" / "ops.json").read_text())
    assert f"\n## {result['environment']['cpu']}, {result['environment']['isa']}\n" in text
    for title in ("### Goals", "### The model tiny", "### Ternary products", "### Other ops"):
        assert text.count(title) >= 2
    assert "ping-pong" in text and "GMAC/s" in text and "g++" in text
    assert "Where a decode step goes" in text and "torch int8" in text


@pytest.mark.slow
def test_pictures_of_the_page_are_there(written: Path) -> None:
    lines = written.read_text(encoding="utf-8").splitlines()
    names = [line.split("(")[1][:-1] for line in lines if line.startswith("![")]
    assert len(names) >= 6
    for name in names:
        assert not os.path.isabs(name)
        data = (written.parent / name).read_bytes()
        assert data.startswith(PNG) and len(data) < 200_000


@pytest.mark.slow
def test_goals_of_other_cpus_are_named_as_not_timed(written: Path) -> None:
    checked = json.loads((written.parent / "data" / "goals.json").read_text())
    text = written.read_text(encoding="utf-8")
    assert checked["absent"]
    assert f"for want of the instructions: {'; '.join(checked['absent'])}." in text


@pytest.mark.slow
def test_stored_figures_give_the_same_page_again(written: Path) -> None:
    before = written.read_text(encoding="utf-8")
    written.write_text("edited by hand")
    assert update_performance.main([str(written), "--stored"]) == 0
    assert written.read_text(encoding="utf-8") == before


def test_page_needs_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        update_performance.main(["/nowhere/at/all.md"])
    assert "expected a file in a directory that exists" in capsys.readouterr().err


def test_script_calls_the_entry_point() -> None:
    script = ROOT / "scripts" / "update_performance"
    assert os.access(script, os.X_OK)
    assert "-m benchmarks.update_performance docs/performance.md" in script.read_text()
