"""`bitnet-ops bench model` on a tiny model: rows, tables, what a step reads.

Nothing here asserts a speed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from bitnet_ops import cli
from bitnet_ops.bench import model, report, shapes
from bitnet_ops.dummy import model as dummy
from bitnet_ops.nn.packing import packed_row_bytes
from bitnet_ops.nn.storage import KV_TYPES


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The command line as a user runs it: (JSON, what it printed)."""
    output = tmp_path_factory.mktemp("bench-model") / "out.json"
    arguments = ["bench", "model", "--dummy", "tiny", "--quick", "--prompts", "16"]
    arguments += ["--contexts", "0,8", "--batches", "1,2", "--threads", "1,2"]
    arguments += ["--kv-dtype", "bfloat16,int8"]
    arguments += ["--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "bitnet_ops", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return json.loads(output.read_text()), done.stdout


def rows(result: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["kind"] == kind]


@pytest.mark.slow
def test_small_run_has_every_row(small_run: tuple[dict[str, Any], str]) -> None:
    result, _ = small_run
    assert (result["schema"], result["schema_version"]) == ("bitnet_ops.bench.model", 4)
    # for each of two thread counts: two contexts, one more batch, and the contexts with int8
    decode = rows(result, "decode")
    expected_rows = [("bfloat16", 1, 0), ("bfloat16", 1, 8), ("bfloat16", 2, 0)]
    expected_rows += [("int8", 1, 0), ("int8", 1, 8)]
    assert [(r["threads"], r["kv"], r["batch"], r["context"]) for r in decode] == [
        (t, *row) for t in (1, 2) for row in expected_rows
    ]
    for row in decode:
        assert row["steps"] >= 3 and row["tokens_per_s"] > 0
        assert 0 < row["share"]["p10"] <= row["share"]["median"] <= row["share"]["p90"]
        expected = row["batch"] / row["step_ms"]["median"] * 1e3
        assert row["tokens_per_s"] == pytest.approx(expected, rel=1e-3)
    assert [r["kv"] for r in rows(result, "prefill")] == ["bfloat16", "int8"] * 2
    assert len(result["rows"]) == 14
    for limit in result["limits"]:
        assert limit["unstable"] or limit["read_gb_s"] > 0


@pytest.mark.slow
def test_small_run_prints_every_table(small_run: tuple[dict[str, Any], str]) -> None:
    result, text = small_run
    assert "Decode:" in text and "Prefill:" in text
    assert result["environment"]["cpu"] in text and "core-to-core round trip" in text
    for title, columns, cells in report.model_tables(result):
        assert title in text and all(len(row) == len(columns) for row in cells)


def test_bytes_of_a_step_are_those_of_the_tensors() -> None:
    tiny = model.BenchModel("tiny", "canonical", "bf16")
    c = dummy.config("tiny")
    size = tiny.bytes()
    assert size.per_position == 2 * 2 * 3 * 2 * 32
    # packed rows and a scale of 4 bytes a matrix
    shapes = [(m.out_features, m.in_features) for _, ms in tiny.projections() for m in ms]
    assert size.body == sum(n * packed_row_bytes(k) + 4 for n, k in shapes)
    assert size.step(2, 10) == size.body + size.head + 20 * size.per_position
    assert tiny.macs_per_token() == sum(n * k for n, k in shapes)
    assert len(shapes) == 7 * c.num_hidden_layers


def test_an_int8_cache_has_a_byte_for_a_number_and_four_for_a_scale() -> None:
    tiny = model.BenchModel("tiny", "canonical", "bf16", "int8")
    cache = tiny.cache(2, 6, 0)
    assert tiny.bytes().per_position == 2 * 3 * 2 * (32 + 4)
    assert cache.nbytes == 2 * 64 * tiny.bytes().per_position  # a block for each sequence


@pytest.mark.parametrize("kv_dtype", KV_TYPES)
def test_decode_runs_start_again_behind_their_context(kv_dtype: str) -> None:
    tiny = model.BenchModel("tiny", "canonical", "bf16", kv_dtype)
    with torch.inference_mode():
        run = tiny.decode_run(2, 5, tokens=3)
        for i in range(7):  # more than the cache has room for without going back
            run.call(i)
        cache = tiny.cache(2, 5, 3)
    assert cache.lengths.tolist() == [5, 5] and cache.max_len == 8
    assert all(torch.isfinite(rows).all() and rows.abs().sum() > 0 for rows in cache.get(0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dummy", "7b"], "--dummy: expected names among 2b-4t"),
        (["--formats", "2bit"], "--formats: expected pairs such as 2bit+int8, got '2bit'"),
        (["--formats", "3bit+int8"], "--formats: expected names among canonical"),
        (["--formats", "auto+int3"], "--formats: expected names among bf16, int8, int4"),
        (["--prompts", "0"], "--prompts: expected integers from 1 to 8192, got '0'"),
        (["--contexts", "-1"], "--contexts: expected integers from 0 to 16320, got '-1'"),
    ],
)
def test_bad_arguments_are_rejected_before_anything_runs(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"{arguments[0]}={arguments[1]}"]
    assert cli.main(["bench", "model", *given]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_contexts_may_be_zero() -> None:
    assert shapes.parse_counts("--contexts", "0,2048,0", 16000, least=0) == (0, 2048)
    with pytest.raises(ValueError, match="from 1 to 64, got '0'"):
        shapes.parse_counts("--batches", "0", 64)
