"""`bitnet-ops bench ops` as a user runs it: arguments, warnings, the JSON, the table, exit status.

Nothing here asserts a speed.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bitnet_ops import _runtime, cli, machine
from bitnet_ops.bench import environment, limits, report, run_ops, shapes
from bitnet_ops.bench.measure import IMPOSSIBLE

ROOT = Path(__file__).resolve().parents[2]


# --- shapes and arguments ------------------------------------------------------------------------


def test_shapes_of_the_2b_model() -> None:
    found = shapes.parse_shapes("2b-4t,64x300")
    assert found.matrices == [(64, 300)]
    model = found.models["2b-4t"]
    five = {(640, 2560), (2560, 2560), (6912, 2560), (13824, 2560), (2560, 6912)}
    assert set(model.linears(quick=False)) == five
    assert set(model.linears(quick=True)) == five - {(13824, 2560)}


def test_demo_shape_is_that_of_the_demo_model() -> None:
    config = json.loads((ROOT / "tests/data/demo-model/config.json").read_text())
    demo = shapes.MODELS["demo"]
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    for name in (*names, "head_dim", "vocab_size"):
        assert getattr(demo, name) == config[name], name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "3b"], "--shapes: expected names among 2b-4t, demo or NxK"),
        (["--shapes", "0x5"], "got '0x5'"),
        (["--shapes", "5x999999"], "K up to 131072"),
        (["--m", "0"], "--m: expected integers from 1 to 4096, got '0'"),
        (["--threads", "two"], "--threads: expected integers from 1 to 1024, got 'two'"),
        (["--cold-mib", "1"], "--cold-mib: expected 16 to 65536, got 1"),
        (["--seconds", "0"], "--seconds: expected more than 0 and at most 60, got 0.0"),
        (["--weight-format", "3bit"], "--weight-format: expected names among canonical"),
        (["--output", "/nowhere/x.json"], "--output: expected a file in a directory to write to"),
    ],
)
def test_bad_arguments_are_rejected_before_anything_runs(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "ops", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_short_memory_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    little = {"total": 1 << 31, "available": 1 << 30, "limit": None}
    monkeypatch.setattr(machine, "memory_bytes", lambda: little)
    with pytest.raises(ValueError, match="MiB of free memory, got 1024 MiB; lower --cold-mib"):
        run_ops.make_workspace(run_ops.OpsSettings())


def test_warnings_name_what_spoils_results() -> None:
    quiet = {
        "load_average": [0.2, 0, 0],
        "cpus_available": 2,
        "threads": [1, 2],
        "cache_bytes": {"L3": 32 << 20},
        "cold_bytes": [512 << 20, 512 << 20],
    }
    even = [{"threads": t, "unstable": False} for t in (1, 2)]
    assert environment.warnings(quiet, even) == []
    (busy,) = environment.warnings(quiet | {"load_average": [1.1, 0, 0]}, even)
    assert "other processes run; use the ratios only" in busy
    (small,) = environment.warnings(quiet | {"cold_bytes": [64 << 20, 0]}, even)
    assert "cold rows may be warm" in small
    (many,) = environment.warnings(quiet | {"threads": [4]}, even)
    assert "4 threads on 2 CPUs" in many
    (waiting,) = environment.warnings(quiet, [even[0], even[1] | {"unstable": True}])
    assert "no limits for 2 thread(s)" in waiting


# --- the whole -----------------------------------------------------------------------------------

NUMBER = (int, float)
ROW_FIELDS: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "shape": dict,
    "dtype": str,
    "threads": int,
    "memory": str,
    "format": str,
    "fits_in": str,
    "bytes": int,
    "macs": int,
    "samples": int,
    "rounds": int,
    "quiet_rounds": int,
    "time_us": dict,
    "call_us": NUMBER,
    "gb_s": NUMBER,
    "gmac_s": NUMBER,
    "limit": str,
    "limit_value": NUMBER,
    "limit_unit": str,
    "ratio": dict,
    "limits": dict,
    "baselines": dict,
    "attempts": int,
    "ping_pong_ns": (int, float, type(None)),
    "flags": list,
}
LIMIT_FIELDS = {
    *("threads", "read_gb_s", "read_form", "read_forms_gb_s", "int8_peak_gmac_s", "unstable"),
}
ENVIRONMENT_FIELDS = {
    *("time_utc", "cpu", "virtual", "cpus_available", "cache_bytes", "isa", "threads", "build"),
    *("thread_environment", "bitnet_ops", "torch", "python", "page_bytes", "load_average"),
    *("transparent_huge_pages", "cold_bytes", "cold_huge_share", "ping_pong_ns", "op_call_us"),
}


def assert_percentiles(summary: dict[str, float]) -> None:
    assert set(summary) == {"median", "p10", "p90"}
    assert all(math.isfinite(v) and v > 0 for v in summary.values())
    assert summary["p10"] <= summary["median"] <= summary["p90"]


def assert_row(row: dict[str, Any]) -> None:
    assert {
        name: isinstance(row[name], kind) for name, kind in ROW_FIELDS.items()
    } == dict.fromkeys(row, True)
    assert row["memory"] in {"cold", "hot"} and row["rounds"] >= 5
    assert row["limit"] in row["limits"] and row["limit_value"] > 0
    assert row["limit_unit"] == {"read": "GB/s", "int8_peak": "GMAC/s"}[row["limit"]]
    for summary in (row["time_us"], row["ratio"]):
        assert_percentiles(summary)
    assert row["samples"] in {row["rounds"], row["quiet_rounds"]}
    for baseline in row["baselines"].values():
        assert_percentiles(baseline["time_us"])
        assert_percentiles(baseline["speedup"])
    assert row["gb_s"] == pytest.approx(row["bytes"] / row["time_us"]["median"] / 1e3, rel=1e-3)
    assert row["gmac_s"] == pytest.approx(row["macs"] / row["time_us"]["median"] / 1e3, rel=1e-3)
    assert "wrong_result" not in row["flags"]


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The command line as a user runs it, on tiny shapes: (JSON, stdout)."""
    path = tmp_path_factory.mktemp("bench") / "out.json"
    arguments = ["bench", "ops", "--quick", "--shapes", "demo,70x300", "--m", "1,2"]
    arguments += [
        "--threads",
        "1,2",
        "--cold-mib",
        "16",
        "--seconds",
        "0.002",
        "--output",
        str(path),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "bitnet_ops", *arguments], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return json.loads(path.read_text()), done.stdout


@pytest.mark.slow
def test_small_run_has_every_row_with_its_limit(small_run: tuple[dict[str, Any], str]) -> None:
    result, _ = small_run
    assert (result["schema"], result["schema_version"]) == ("bitnet_ops.bench.ops", 4)
    assert result["ok"] is True
    assert set(result["environment"]) == ENVIRONMENT_FIELDS
    assert result["environment"]["isa"] == _runtime.isa()
    assert [limit["threads"] for limit in result["limits"]] == [1, 2]
    for limit in result["limits"]:
        assert set(limit) == LIMIT_FIELDS
        forms = limit["read_forms_gb_s"]
        if limit["unstable"]:
            assert not forms and limit["read_gb_s"] is limit["int8_peak_gmac_s"] is None
            continue
        assert len(forms) == len(limits.FORMS) and max(forms.values()) == limit["read_gb_s"]
        assert forms[limit["read_form"]] == limit["read_gb_s"]
        assert limit["read_gb_s"] > 0 and limit["int8_peak_gmac_s"] > 0
    for row in result["rows"]:
        assert_row(row)
    # matrices: 5 shapes x (cold, hot at M = 1; cold at M = 2); fused: 3 ops x 3; the rest 16,
    # attention over five types of cache in rows and two in panels among them
    assert len(result["rows"]) == 2 * (5 * 3 + 3 * 3 + 16)
    assert result["settings"]["tokens"] == [1, 2]


@pytest.mark.slow
def test_small_run_prints_the_state_and_every_row(small_run: tuple[dict[str, Any], str]) -> None:
    result, text = small_run
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("op  "))
    assert result["environment"]["cpu"] in lines[0] and "core-to-core round trip" in text
    assert len(lines[head + 1 :]) >= len(result["rows"])
    for row, line in zip(result["rows"], lines[head + 1 :], strict=False):
        # a figure that cannot be is not shown, and its flag says so
        shown = " - " if IMPOSSIBLE & set(row["flags"]) else f"{row['ratio']['median']:.2f}"
        assert line.split()[0] == row["name"] and shown in line
    assert all(f"WARNING: {warning}" in text for warning in result["warnings"])


def tiny_report(flags: list[str]) -> report.Report:
    summary = {"median": 0.8, "p10": 0.7, "p90": 0.9}
    row = {
        "name": "attention",
        "shape": {"M": 1, "context": 512, "heads": 20, "kv_heads": 5, "head_dim": 128},
        "threads": 1,
        "memory": "cold",
        "format": "2bit",
        "fits_in": "memory",
        "time_us": {"median": 123.4, "p10": 12.34, "p90": 1234.5},
        "gb_s": 1.0,
        "gmac_s": 0.0,
        "limit": "read",
        "limit_value": 20.0,
        "ratio": summary,
        "baselines": {
            "torch_bf16": {"time_us": summary, "speedup": {"median": 3.5}, "disturbed": True},
            "torch_int8_onednn": {"time_us": {"median": 5.0}},
            "torch_int8_fbgemm": {"time_us": {"median": 7.0}},
        },
        "flags": flags,
    }
    env = dict.fromkeys(ENVIRONMENT_FIELDS, "?") | {
        "threads": [1],
        "build": {"compiler": "12"},
        "cold_bytes": [1 << 24, 1 << 24],
        "cold_huge_share": [None, None],
        "load_average": None,
        "ping_pong_ns": None,
        "op_call_us": 1.5,
    }
    return {
        "schema": "bitnet_ops.bench.ops",
        "ok": "wrong_result" not in flags,
        "seconds": 1.0,
        "environment": env,
        "limits": [],
        "warnings": ["careful"],
        "rows": [row],
    }


def test_table_shows_every_figure() -> None:
    text = "\n".join(report.lines(tiny_report(["disturbed"])))
    for word in ("attention", "0.80", "WARNING: careful", "12.3-1234", "3.50?", "disturbed"):
        assert word in text
    assert "ctx 512, 20/5 heads" in text


def test_wrong_result_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args = ["bench", "ops", "--quick", "--force", "--output", str(tmp_path / "out.json")]
    for flags, status in (([], 0), (["disturbed"], 0), (["wrong_result"], 1)):
        result = tiny_report(flags)
        monkeypatch.setattr(run_ops, "run", lambda settings, progress, r=result: r)
        assert cli.main(args) == status
        assert json.loads((tmp_path / "out.json").read_text())["ok"] is (status == 0)


def test_a_wrong_result_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = run_ops.OpsSettings(shapes="64x128", tokens=(1,), cold_mib=16)
    for flags, ok in ([], True), (["disturbed"], True), (["disturbed", "wrong_result"], False):
        monkeypatch.setattr(run_ops, "measure", lambda *_, f=flags: {"flags": f})
        assert run_ops.run(settings)["ok"] is ok


@pytest.mark.parametrize(
    ("arguments", "entry"),
    [
        (["ops", "--plots", "x"], "bitnet_ops.bench.page.plots"),
        (["model", "--rivals", "none"], "benchmarks.compare_engines"),
        (["model", "--rival-seconds", "5"], "benchmarks.compare_engines"),
    ],
)
def test_what_has_moved_says_where(
    arguments: list[str], entry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert f"python -m {entry}" in error and error.count("\n") == 1
    assert importlib.util.find_spec(entry) is not None
