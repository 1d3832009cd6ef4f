"""`bitnet-ops bench engine` on a tiny model: rows, tables, and that nothing is pretended.

Nothing here asserts a speed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from bitnet_ops import cli
from bitnet_ops.bench import report
from bitnet_ops.bench.model import BenchModel
from bitnet_ops.bench.run_engine import Streams
from bitnet_ops.bench.run_sampling import logits


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The command line as a user runs it: (JSON, what it printed)."""
    output = tmp_path_factory.mktemp("bench-engine") / "out.json"
    arguments = ["bench", "engine", "--dummy", "tiny", "--quick", "--streams", "1,3"]
    arguments += ["--contexts", "16,40", "--prompt", "100", "--threads", "1"]
    arguments += ["--kv-dtype", "int8", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "bitnet_ops", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return json.loads(output.read_text()), done.stdout


@pytest.mark.slow
def test_small_run_has_every_row_and_table(small_run: tuple[dict[str, Any], str]) -> None:
    result, text = small_run
    assert result["schema"] == "bitnet_ops.bench.engine"
    rows = {kind: [r for r in result["rows"] if r["kind"] == kind] for kind in (
        "streams", "arrival", "queue", "prefix", "drafts", "speculation", "sampling"
    )}  # fmt: skip
    assert [(r["context"], r["streams"]) for r in rows["streams"]] == [
        (16, 1), (16, 3), (40, 1), (40, 3)
    ]  # fmt: skip
    for row in rows["streams"]:
        assert row["tokens_per_s"] == pytest.approx(
            row["streams"] / row["gap_ms"]["median"] * 1e3, rel=1e-3
        )
        assert row["reading_ms"] > 0 and row["computing_ms"] > 0
        assert 0 <= row["outside_model"] < 1
    assert rows["arrival"][0]["prompt"] == 100
    assert rows["queue"][0]["requests"] == 8
    assert [r["drafts"] for r in rows["drafts"]] == [1, 3, 7]
    repetitive, free = rows["speculation"]
    assert repetitive["text"] == "repetitive" and free["text"] == "free"
    for row in (repetitive, free):
        assert 0 <= row["accepted"] <= row["drafted"]
        assert row["speedup"] == pytest.approx(
            row["auto_tokens_per_s"] / row["off_tokens_per_s"], rel=1e-2
        )
    assert repetitive["accepted"] == repetitive["drafted"], "a circle is foreseen"
    shapes, filters = ({r[name] for r in rows["sampling"]} for name in ("logits", "filter"))
    assert len(shapes) == 4 and len(rows["sampling"]) == len(shapes) * len(filters)
    assert all(r["ms"]["median"] > 0 and r["one_row_ms"] > 0 for r in rows["sampling"])
    for title, columns, cells in report.engine_tables(result):
        assert title in text and all(len(row) == len(columns) for row in cells)


def test_logits_have_the_shapes_they_are_named_after() -> None:
    kept = {}
    for shape in ("language-like", "flat", "heavy-tailed", "equal"):
        p = logits(shape, 3, 20_000).softmax(-1).sort(-1, descending=True).values
        kept[shape] = (p.cumsum(-1) < 0.9).sum(-1)  # tokens in the nucleus of .9
    assert bool((kept["language-like"] < 60).all())
    assert bool((kept["heavy-tailed"] > 200).all() and (kept["heavy-tailed"] < 8000).all())
    assert bool((kept["flat"] > 10_000).all() and (kept["equal"] > 17_000).all())


def test_contexts_are_admitted_without_the_model_and_decoded_with_it() -> None:
    model = BenchModel("tiny", "2bit", "int8")
    run = Streams(model, 3 * 200, 3, 16)
    ids = run.decoding(3, 50)
    assert run.model_s > 0  # the warm steps
    before = [run.engine._requests[i].computed for i in ids]
    assert all(50 <= n <= 56 for n in before)
    run.engine.step()
    assert [run.engine._requests[i].computed for i in ids] == [n + 1 for n in before]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--streams", "0"], "--streams"),
        (["--prompt", "0"], "--prompt: expected 1 to 65536, got 0"),
        (["--formats", "2bit+int8,2bit+int4"], "--formats: expected one pair"),
        (["--dummy", "huge"], "--dummy: expected names among"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "engine", *arguments]) == 2
    assert words in capsys.readouterr().err
