"""`bitnet-ops bench sparsity` measures what its rows say. Nothing here asserts a speed."""

from __future__ import annotations

import json

import pytest

from bitnet_ops import cli
from bitnet_ops.bench.sparsity import POLICIES


def test_policies_are_measured_beside_dense(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--quick -t 1 --dummy tiny --zeros 0.25,0.9 --json"
    assert cli.main(["bench", "sparsity", *asked.split()]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["policy"] for row in rows] == [*POLICIES, *POLICIES]
    few, many = rows[0]["zeros"], rows[3]["zeros"]
    assert 0.2 < few < 0.6 and 0.88 < many < 1
    for row in rows:
        assert row["time_us"]["median"] > 0
        if row["policy"] != "auto":
            assert row["skipped"] == (row["zeros"] if row["policy"] == "exact" else 0)


@pytest.mark.parametrize("zeros", ["1.5", "-0.1", "many"])
def test_what_is_no_share_is_refused(zeros: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "sparsity", f"--zeros={zeros}"]) != 0
    assert f"--zeros: expected shares from 0 to 1, got {zeros}" in capsys.readouterr().err


def test_a_model_without_a_norm_to_silence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "sparsity", "--dummy", "bonsai-1.7b", "--quick"]) != 0
    assert "expected a model with a norm before down_proj" in capsys.readouterr().err
