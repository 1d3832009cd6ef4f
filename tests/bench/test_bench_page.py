"""docs/notes/performance.md: what its figures say and nothing else; a machine's own section.

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

from benchmarks import update_performance
from bitnet_ops import cli
from bitnet_ops.bench.page import render
from bitnet_ops.bench.page.render import FIGURES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "notes"
PNG = b"\x89PNG\r\n\x1a\n"


# --- the page of the repository ------------------------------------------------------------------


def test_the_page_is_what_its_figures_say() -> None:
    assert (DOCS / "performance.md").read_text(encoding="utf-8") == render.render(DOCS)


def test_every_picture_and_machine_of_the_repository_is_on_the_page() -> None:
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    stored = sorted((DOCS / "plots").iterdir())
    assert stored
    for folder in stored:
        figures = json.loads((folder / FIGURES).read_text(encoding="utf-8"))
        assert render.slug(figures["environment"]) == folder.name
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


def figures(load: list[float] | None, *notes: str) -> render.Figures:
    return {
        "environment": {"load_average": load, "cpus_available": 2},
        "goals": {"table": ["", [], [["a", note] for note in notes]]},
        "others": ["", [], []],
        "models": [{"tables": [["", ["notes"], [["b", "disturbed"]]], ["", ["s"], [["c", ""]]]]}],
    }


def test_the_state_is_one_honest_line() -> None:
    busy = "load average 1.45 on 2 CPUs before, so other processes ran; 2 of 3 rows disturbed"
    assert render.state_line(figures([1.45], "x", "y (disturbed)")).endswith(
        f"{busy}: use the ratios only"
    )
    assert render.state_line(figures([0.1], "x")).endswith(
        "load average 0.1 on 2 CPUs before; 1 of 2 rows disturbed: use the ratios only"
    )
    quiet = figures(None, "x") | {"models": []}
    assert render.state_line(quiet).endswith(
        "load average unknown on 2 CPUs before; 0 of 1 rows disturbed"
    )


def test_unstable_limits_have_no_figures_on_the_page() -> None:
    (stored, *_) = sorted(DOCS.glob(f"plots/*/{FIGURES}"))
    shown = json.loads(stored.read_text(encoding="utf-8"))
    none = {"read_gb_s": None, "int8_peak_gmac_s": None, "read_forms_gb_s": {}}
    shown["limits"] = [{"threads": 2, "unstable": True, "read_form": "1 stream"} | none]
    (line,) = [x for x in render.machine_lines(shown) if x.startswith("- limits")]
    assert line == "- limits with 2 thread(s): none, others had the CPUs"


def test_figures_survive_being_stored(tmp_path: Path) -> None:
    made = {"a": [["x", "|"], []], "b": {"c": [1, 2.5], "d": None, "e": {}}, "f": "µ"}
    render.write_figures(made, tmp_path / "f.json")
    assert json.loads((tmp_path / "f.json").read_text(encoding="utf-8")) == made


def test_slug_names_cpu_and_kernels() -> None:
    environment: dict[str, Any] = {"cpu": "Intel(R) Xeon(R) @ 2.0 (family 6)", "isa": "amx_int8"}
    assert render.slug(environment) == "intel-r-xeon-r-2-0-family-6-amx-int8"


# --- a page of this machine ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page beside another machine's figures, written in --quick by the command line."""
    file = tmp_path_factory.mktemp("docs") / "performance.md"
    (other,) = sorted(DOCS.glob(f"plots/amd-epyc-family-25-model-1-avx2/{FIGURES}"))
    folder = file.parent / "plots" / "other-cpu"
    folder.mkdir(parents=True)
    (folder / FIGURES).write_text(
        other.read_text(encoding="utf-8").replace("AMD EPYC", "Another CPU"), encoding="utf-8"
    )
    arguments = ["bitnet_ops", "bench", "page", str(file), "--quick"]
    arguments += ["--data", str(file.parent / "data")]
    done = subprocess.run(
        [sys.executable, "-m", *arguments], check=True, cwd=ROOT, capture_output=True, text=True
    )
    first, second = done.stdout.splitlines()
    assert first == f"wrote {file}"
    assert (Path(second.removeprefix("this machine's figures and plots: ")) / FIGURES).is_file()
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
    written.write_text(render.HEADER + "edited by hand")
    assert cli.main(["bench", "page", str(written), "--stored"]) == 0
    assert written.read_text(encoding="utf-8") == before


def test_page_needs_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "page", "/nowhere/at/all.md"]) == 2
    assert "expected a file in a directory that exists" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        update_performance.main(["/nowhere/at/all.md"])
    assert "expected a file in a directory that exists" in capsys.readouterr().err


def test_another_file_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes.md"
    file.write_text("mine")
    assert cli.main(["bench", "page", str(file), "--quick"]) == 2
    assert "expected a page that bench page wrote, or a new file" in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_script_calls_the_entry_point() -> None:
    script = ROOT / "scripts" / "update_performance"
    assert os.access(script, os.X_OK)
    assert "-m benchmarks.update_performance docs/notes/performance.md" in script.read_text()
