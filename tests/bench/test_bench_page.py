"""`bitnet-ops bench page`: one machine's section of docs/performance.md, and only that one.

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

from bitnet_ops import cli
from bitnet_ops.bench import pages

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG\r\n\x1a\n"
OTHER = "<!-- begin other-cpu -->\n## Another CPU\n\nfigures\n<!-- end other-cpu -->\n"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page that had another machine's section, written in --quick by the command line."""
    page = tmp_path_factory.mktemp("docs") / "performance.md"
    page.write_text(pages.HEADER + "\n" + OTHER)
    arguments = ["bench", "page", str(page), "--quick", "--data", str(page.parent / "data")]
    subprocess.run([sys.executable, "-m", "bitnet_ops", *arguments], check=True)
    return page


@pytest.mark.slow
def test_page_has_this_machine_and_keeps_the_others(written: Path) -> None:
    text = written.read_text()
    assert text.startswith("# Performance") and OTHER in text
    result = json.loads((written.parent / "data" / "ops.json").read_text())
    cpu, name = result["environment"]["cpu"], pages.slug(result["environment"])
    assert f"<!-- begin {name} -->\n## {cpu}" in text and text.endswith(f"<!-- end {name} -->\n")
    for title in ("### Goals", "### The model tiny", "### Ternary products", "### Other ops"):
        assert title in text
    assert "ping-pong" in text and "GMAC/s" in text and "g++" in text


@pytest.mark.slow
def test_pictures_of_the_page_are_there(written: Path) -> None:
    names = [line.split("(")[1][:-1] for line in written.read_text().splitlines() if "![" in line]
    assert len(names) >= 6
    for name in names:
        assert not os.path.isabs(name)
        data = (written.parent / name).read_bytes()
        assert data.startswith(PNG) and len(data) < 200_000


@pytest.mark.slow
def test_goals_of_other_cpus_are_named_as_not_timed(written: Path) -> None:
    checked = json.loads((written.parent / "data" / "check.json").read_text())
    absent = {g["goal"] for g in checked["goals"] if g["verdict"] == "not on this CPU"}
    text = written.read_text()
    assert all(goal in text.split("Not timed here")[1] for goal in absent)


def test_a_section_is_replaced_where_it_stands() -> None:
    page = pages.replace_section("", "a", "first figures\n")
    page = pages.replace_section(page, "b", "others\n")
    again = pages.replace_section(page, "a", "later figures\n")
    assert page.replace("first figures", "later figures") == again and again.count("begin a") == 1
    assert page.startswith(pages.HEADER)


def test_slug_names_cpu_and_kernels() -> None:
    environment: dict[str, Any] = {"cpu": "Intel(R) Xeon(R) @ 2.0 (family 6)", "isa": "amx_int8"}
    assert pages.slug(environment) == "intel-r-xeon-r-2-0-family-6-amx-int8"


def test_page_needs_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "page", "/nowhere/at/all.md"]) == 2
    assert "expected a file in a directory that exists" in capsys.readouterr().err


def test_script_calls_the_command() -> None:
    script = ROOT / "scripts" / "update_performance"
    assert os.access(script, os.X_OK)
    assert "bitnet_ops bench page docs/performance.md" in script.read_text()
