"""What `bitnet-ops doctor` says of the SGLang plug-in, with and without sglang installed.

sglang itself is never imported for it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import bitnet_ops.integrations.sglang as plugin
from bitnet_ops.cli import doctor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sglang_proof"))
import environment  # noqa: E402  (lives beside the proof, which is no package)

TESTED = plugin.TESTED_VERSIONS[-1]
ALL = ", ".join(plugin.TESTED_VERSIONS)


@pytest.fixture
def installed(monkeypatch):
    """sglang of a tested version is installed, nothing restricts its plug-ins."""
    monkeypatch.setattr(plugin, "sglang_version", lambda: TESTED)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)


def report():
    """(the line of doctor, the problems it finds in the plug-in)"""
    facts = doctor.collect()
    (line,) = [text for text in doctor.render(facts) if text.startswith("sglang ")]
    return line, [p for p in facts["problems"] if "sglang" in p["problem"]]


def test_without_sglang_the_plug_in_waits_and_nothing_is_wrong(monkeypatch):
    monkeypatch.setattr(plugin, "sglang_version", lambda: "unknown")
    line, problems = report()
    assert line == f"sglang    not installed; plug-in registered, tested with {ALL}"
    assert problems == []
    status = plugin.status()
    assert status["version"] is None and not status["active"] and not status["version_tested"]


def test_with_sglang_it_is_active(installed):
    line, problems = report()
    assert line == f"sglang    {TESTED}, plug-in active, tested with {ALL}"
    assert problems == [] and plugin.status()["active"]


def test_another_version_is_said(monkeypatch, installed):
    monkeypatch.setattr(plugin, "sglang_version", lambda: "9.9.9")
    line, problems = report()
    assert line.startswith("sglang    9.9.9, plug-in active,")
    assert line.endswith(", not with this version") and problems == []
    assert len(line) <= 100


def test_a_source_tree_that_nobody_installed_is_a_problem(monkeypatch, installed):
    monkeypatch.setattr(plugin, "ENTRY_POINT_GROUP", "no.such.group")
    line, (problem,) = report()
    assert "plug-in NOT active" in line
    assert problem["severity"] == "warning" and "will not load our plug-in" in problem["problem"]
    assert "install bitnet-ops with pip" in problem["remedy"]


@pytest.mark.parametrize(
    ("value", "active"),
    [("", True), ("bitnet", True), ("other, bitnet", True), ("other", False), ("bitnets", False)],
)
def test_a_list_of_plug_ins_is_obeyed_as_sglang_obeys_it(monkeypatch, installed, value, active):
    monkeypatch.setenv("SGLANG_PLUGINS", value)
    assert plugin.status()["active"] is active
    problems = report()[1]
    assert bool(problems) is not active
    if problems:
        assert problems[0]["remedy"] == f"add bitnet to SGLANG_PLUGINS={value}, or unset it"


def test_the_version_that_the_proof_installs_is_one_of_the_tested():
    assert environment.SGLANG.removeprefix("sglang==") in plugin.TESTED_VERSIONS


def test_the_status_imports_no_engine():
    code = (
        "import sys, bitnet_ops.cli.doctor as d; d.collect();"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('sglang', 'transformers')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
