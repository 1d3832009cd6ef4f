"""`bitnet-ops bench ops|model|engine` as a user runs it, and what it measures.

Nothing here asserts a speed.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bitnet_ops import _runtime, cli, machine, ops
from bitnet_ops.bench import cases, limits, memory, model, report, run_model, shapes
from bitnet_ops.bench import ops as bench_ops
from bitnet_ops.bench.engine import Streams
from bitnet_ops.bench.images import noise
from bitnet_ops.cli import main
from bitnet_ops.dummy import model as dummy
from bitnet_ops.language_model import DEMO_DIR
from bitnet_ops.nn.packing import packed_row_bytes
from bitnet_ops.vision.decode import decode_image, image_size

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ws() -> memory.Workspace:
    return memory.Workspace(16 << 20, 1 << 20)


# --- cold and hot memory -------------------------------------------------------------------------


def test_slots_are_disjoint_pages_of_valid_weights(ws: memory.Workspace) -> None:
    slots = ws.ternary.slots(5000)
    starts = [slot.data_ptr() for slot in slots]
    assert len(slots) == (16 << 20) // 8192 and all(slot.numel() == 5000 for slot in slots)
    assert all(start % 4096 == 0 for start in starts)
    assert all(b - a == 8192 for a, b in zip(starts, starts[1:], strict=False))
    for shift in (0, 2, 4, 6):
        assert int((ws.ternary.bytes >> shift & 3).max()) == 2
    assert torch.isfinite(ws.dense.bytes.view(torch.bfloat16)).all()


@pytest.mark.parametrize("hot", [False, True])
def test_cold_calls_never_meet_their_memory_again_soon_and_hot_ones_do(
    hot: bool, ws: memory.Workspace
) -> None:
    slots = [(slot,) for slot in ws.ternary.slots(1 << 20)]
    seen: list[int] = []
    run = cases.cycle(lambda slot: seen.append(slot.data_ptr()), slots, hot=hot)
    for i in range(len(slots)):
        run.call(i)
    probe = limits.read_limit(ws.ternary, 1 << 20, hot=hot)
    assert (run.cold, run.warm) == (probe.run().cold, probe.run().warm) == (not hot, hot)
    assert len(set(seen)) == len(probe.slots) == (1 if hot else 16)


def test_a_matrix_too_large_for_cold_memory_is_rejected(ws: memory.Workspace) -> None:
    with pytest.raises(ValueError, match="two copies of 8192x8192, got 1; raise --cold-mib"):
        cases.matmul_case(ws, 8192, 8192, 1, hot=False, weight_format="2bit")


def test_short_memory_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    little = {"total": 1 << 31, "available": 1 << 30, "limit": None}
    monkeypatch.setattr(machine, "memory_bytes", lambda: little)
    with pytest.raises(ValueError, match="MiB of free memory, got 1024 MiB; lower --cold-mib"):
        bench_ops.make_workspace(bench_ops.OpsSettings())


# --- every result is checked ---------------------------------------------------------------------

OPS = ("gemv", "gemm", "linear", "quantize_activations", "rms_norm", "attention", "lm_head")


def all_cases(ws: memory.Workspace) -> list[cases.Case]:
    settings = bench_ops.OpsSettings(
        shapes="demo,70x300", tokens=(1, 11), quick=True, formats=shapes.WEIGHT_FORMATS
    )
    return list(bench_ops.all_cases(ws, settings))


def test_every_case_checks_its_result(ws: memory.Workspace, threads: int) -> None:
    with torch.inference_mode():
        found = all_cases(ws)
        assert all(case.check() for case in found)
    assert {case.name for case in found} == set(OPS)


def spoiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with 1 added to its first result, on every ISA but scalar."""

    def wrong(*args: Any, **names: Any) -> Any:
        result = function(*args, **names)
        if _runtime.isa() == "scalar":
            return result
        return result + 1 if isinstance(result, Tensor) else (result[0] + 1, *result[1:])

    return wrong


@pytest.mark.skipif(_runtime.available_isas() == ["scalar"], reason="scalar is its own reference")
@pytest.mark.parametrize("name", OPS)
@pytest.mark.sampled(2)
def test_every_check_sees_a_wrong_result(
    name: str, ws: memory.Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = "paged_attention" if name == "attention" else name
    monkeypatch.setattr(ops, op, spoiled(getattr(ops, op)))
    with torch.inference_mode():
        wrong = [case for case in all_cases(ws) if case.name == name]
        assert wrong and not any(case.check() for case in wrong)


def test_a_wrong_result_is_not_ok_and_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = bench_ops.OpsSettings(shapes="64x128", tokens=(1,), cold_mib=16)
    for flags, ok in ([], True), (["disturbed"], True), (["disturbed", "wrong_result"], False):
        monkeypatch.setattr(bench_ops, "measure", lambda *_, f=flags: {"flags": f})
        assert bench_ops.run(settings)["ok"] is ok
    monkeypatch.setattr(report, "lines", lambda result: [])
    for ok in (True, False):
        monkeypatch.setattr(bench_ops, "run", lambda *_, r={"ok": ok}: r)
        assert cli.main(["bench", "ops", "--output", str(tmp_path / f"{ok}.json")]) == (not ok)


@pytest.mark.parametrize(("head", "size"), [("int8", 5000 * 68), ("int4", 313 * (1024 + 32))])
def test_a_quantised_head_is_as_large_as_the_op_makes_it(
    head: str, size: int, ws: memory.Workspace
) -> None:
    packed, scale = ops.quantize_head(torch.randn(5000, 64), head)
    with torch.inference_mode():
        case = cases.head_case(ws, shapes.ModelShape(64, 128, 2, 1, 32, 5000), head)
        assert case.check() and case.format == head
    assert case.bytes == packed.nbytes + scale.nbytes == size


# --- the model that is timed ---------------------------------------------------------------------


def test_bytes_of_a_step_are_those_of_the_tensors() -> None:
    tiny, c = model.BenchModel("tiny", "canonical", "bf16"), dummy.config("tiny")
    size = tiny.bytes()
    assert size.per_position == 2 * 2 * 3 * 2 * 32
    # packed rows and a scale of 4 bytes a matrix
    matrices = [(m.out_features, m.in_features) for _, ms in tiny.projections() for m in ms]
    assert size.body == sum(n * packed_row_bytes(k) + 4 for n, k in matrices)
    assert size.step(2, 10) == size.body + size.head + 20 * size.per_position
    assert tiny.macs_per_token() == sum(n * k for n, k in matrices)
    assert len(matrices) == 7 * c.num_hidden_layers
    tiny.use_kv_dtype("int8")  # a byte for a number and four for a scale
    assert tiny.bytes().per_position == 2 * 3 * 2 * (32 + 4)
    assert tiny.cache(2, 6, 0).nbytes == 2 * 64 * tiny.bytes().per_position  # a block a sequence


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_decode_runs_start_again_behind_their_context(kv_dtype: str) -> None:
    tiny = model.BenchModel("tiny", "canonical", "bf16", kv_dtype)
    with torch.inference_mode():
        run = tiny.decode_run(2, 5, tokens=3)
        for i in range(7):  # more than the cache has room for without going back
            run.call(i)
        cache = tiny.cache(2, 5, 3)
    assert cache.lengths.tolist() == [5, 5] and cache.max_len == 8


def test_contexts_are_admitted_without_the_model_and_decoded_with_it() -> None:
    run = Streams(model.BenchModel("tiny", "2bit", "int8"), 3 * 200, 3, 16)
    ids = run.decoding(3, 50)
    assert run.model_s > 0  # the warm steps
    before = [run.engine._core.requests[i].computed for i in ids]
    assert all(50 <= n <= 56 for n in before)
    run.engine.step()
    assert [run.engine._core.requests[i].computed for i in ids] == [n + 1 for n in before]


# --- the commands --------------------------------------------------------------------------------


def test_shapes_are_those_of_the_models() -> None:
    found = shapes.parse_shapes("2b-4t,64x300")
    five = {(640, 2560), (2560, 2560), (6912, 2560), (13824, 2560), (2560, 6912)}
    assert found.matrices == [(64, 300)]
    assert set(found.models["2b-4t"].linears(quick=False)) == five
    config = json.loads((ROOT / "tests/data/demo-model/config.json").read_text())
    for name, value in vars(shapes.MODELS["demo"]).items():
        assert value == config[name], name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ops --shapes=3b", "--shapes: expected names among 2b-4t, demo or NxK"),
        ("ops --shapes=5x999999", "K up to 131072"),
        ("ops --m=0", "--m: expected integers from 1 to 4096, got '0'"),
        ("ops --threads=two", "--threads: expected integers from 1 to 1024, got 'two'"),
        ("ops --cold-mib=1", "--cold-mib: expected 16 to 65536, got 1"),
        ("ops --seconds=0", "--seconds: expected more than 0 and at most 60, got 0.0"),
        ("ops --weight-format=3bit", "--weight-format: expected names among canonical"),
        ("ops --output=/nowhere/x.json", "--output: expected a file in a directory to write to"),
        ("model --dummy=7b", "--dummy: expected names among 2b-4t"),
        ("model --formats=2bit", "--formats: expected pairs such as 2bit+int8, got '2bit'"),
        ("model --formats=auto+int3", "--formats: expected names among bf16, int8, int4"),
        ("model --contexts=-1", "--contexts: expected integers from 0 to 16320, got '-1'"),
        ("engine --streams=0", "--streams: expected integers from 1 to 64, got '0'"),
        ("engine --formats=2bit+int8,2bit+int4", "--formats: expected one pair"),
        ("engine --dummy=huge", "--dummy: expected names among"),
    ],
)
def test_bad_arguments_are_rejected_before_anything_runs(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def run_bench(output: Path, *words: str) -> tuple[dict[str, Any], str]:
    """The command line as a user runs it: (JSON, what it printed)."""
    command = [sys.executable, "-m", "bitnet_ops", "bench", *words, "--quick"]
    command += ["--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    # steps that take long, as on a busy machine, are named on stderr
    assert done.returncode == 0 and re.fullmatch(r"(\d+ s: .*\n)*", done.stderr), done.stderr
    result = json.loads(output.read_text())
    for word in (result["environment"]["cpu"], "core-to-core round trip", *result["warnings"]):
        assert word in done.stdout
    assert result["environment"]["isa"] == _runtime.isa() and result["ok"] is True
    return result, done.stdout


@pytest.mark.slow
def test_bench_ops(tmp_path: Path) -> None:
    result, text = run_bench(
        tmp_path / "out.json", "ops", "--shapes", "demo,70x300", "--m", "1,2", "--threads", "1,2",
        "--cold-mib", "16", "--seconds", "0.002",
    )  # fmt: skip
    assert [limit["threads"] for limit in result["limits"]] == [1, 2]
    for limit in result["limits"]:
        forms = limit["read_forms_gb_s"]
        assert limit["unstable"] or forms[limit["read_form"]] == max(forms.values()) > 0
    # matrices: 5 shapes x (cold, hot at M = 1; cold at M = 2), linear likewise; rows, caches, heads
    rows = result["rows"]
    assert len(rows) == 2 * (5 * 3 + 3 + 2 * 2 + len(shapes.KV_DTYPES) + len(shapes.HEAD_FORMATS))
    head = text.splitlines().index(next(x for x in text.splitlines() if x.startswith("op  ")))
    for row, line in zip(rows, text.splitlines()[head + 1 :], strict=False):
        assert "wrong_result" not in row["flags"] and row["rounds"] >= 5
        for summary in (row["time_us"], row["ratio"], *(
            b["speedup"] for b in row["baselines"].values()
        )):  # fmt: skip
            assert all(math.isfinite(v) and v > 0 for v in summary.values())
            assert summary["p10"] <= summary["median"] <= summary["p90"]
        for rate, amount in (("gb_s", "bytes"), ("gmac_s", "macs")):
            expected = row[amount] / row["time_us"]["median"] / 1e3
            assert row[rate] == pytest.approx(expected, rel=1e-3)
        # a figure that cannot be is not shown, and its flag says so
        impossible = report.IMPOSSIBLE & set(row["flags"])
        assert line.split()[0] == row["name"]
        assert (" - " if impossible else f"{row['ratio']['median']:.2f}") in line


@pytest.mark.slow
def test_bench_model(tmp_path: Path) -> None:
    result, text = run_bench(
        tmp_path / "out.json", "model", "--dummy", "tiny", "--prompts", "16", "--contexts", "0,8",
        "--batches", "1,2", "--threads", "1,2", "--kv-dtype", "bfloat16,int8",
    )  # fmt: skip
    decode = [row for row in result["rows"] if row["kind"] == "decode"]
    prefill = [row for row in result["rows"] if row["kind"] == "prefill"]
    # for each of two thread counts: two contexts, one more batch, and the contexts with int8
    wanted = [("bfloat16", 1, 0), ("bfloat16", 1, 8), ("bfloat16", 2, 0), ("int8", 1, 0)]
    wanted.append(("int8", 1, 8))
    found = [(r["threads"], r["kv"], r["batch"], r["context"]) for r in decode]
    assert found == [(t, *row) for t in (1, 2) for row in wanted]
    for row in decode:
        expected = row["batch"] / row["step_ms"]["median"] * 1e3
        assert row["tokens_per_s"] == pytest.approx(expected, rel=1e-3) and row["steps"] >= 3
        assert 0 < row["share"]["p10"] <= row["share"]["median"] <= row["share"]["p90"]
    assert [row["kv"] for row in prefill] == ["bfloat16", "int8"] * 2
    assert [row["weights"] for row in result["weight_choices"]] == ["2bit", "2bit"]
    for choice in result["weight_choices"]:
        threads = {1: "1 thread", 2: "2 threads"}[choice["threads"]]
        assert f"auto, {threads}: 2bit, because {choice['reason']}" in text
    first, *_, last = (line for line in text.splitlines() if not line.startswith("WARNING"))
    assert re.fullmatch(r"synthetic tiny, about (1 minute|\d+ minutes); name a MODEL .*", first)
    assert re.fullmatch(rf"{len(result['rows'])} rows in [\d.]+ s\.", last)
    for title, columns, cells in report.model_tables(result):
        assert title in text and all(len(row) == len(columns) for row in cells)


def test_rows_of_a_model_are_told_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each before the next one is measured, under the head of its table; all in the same widths."""
    formats = {"weights": "2bit", "head": "int8", "kv": "bfloat16", "threads": 1}
    decode = {**formats, "kind": "decode", "batch": 1, "context": 0, "tokens_per_s": 19.0,
              "step_ms": {"median": 52.6}, "bytes_per_step": 85e7, "limit_tokens_per_s": 18.6,
              "share": {"median": 1.02}, "impossible": False, "ping_pong_ns": None,
              "disturbed": False}  # fmt: skip
    prefill = {**formats, "kind": "prefill", "tokens": 128, "tokens_per_s": 283.0, "seconds": 0.45,
               "gmac_s": 589.0, "share": 1.36}  # fmt: skip
    told: list[list[str]] = []

    def rows(*_: Any, first: bool) -> Iterator[dict[str, Any]]:
        for row in (decode, {**decode, "context": 8192}, prefill, {"kind": "of others"}):
            count = len(told)
            yield row
            assert len(told) == count + 1

    monkeypatch.setattr(run_model, "_rows", rows)
    monkeypatch.setattr(run_model, "measured", lambda _k, _s, _w, measure, *_: measure(None, []))
    found = run_model.run(
        run_model.ModelSettings("tiny", quick=True), tell=lambda lines: told.append(lines)
    )
    first, second, third, fourth = told[-4:]
    assert first[:2] == ["", "Decode: 64 tokens behind a context"] and len(first) == 4
    assert third[:2] == ["", "Prefill: a prompt into an empty cache"] and fourth == []
    assert len(second) == 1 and second[0].index("8192") + 4 == first[2].index("context") + 7
    environment = {"schema": "bitnet_ops.bench.model", "seconds": 3.0, "warnings": ["busy"]}
    closing = "\n".join(report.closing_lines({**environment, **found}))
    for words in ("just above 1 = as fast as reading", "share of int8 peak above 1", "4 rows in 3"):
        assert words in closing
    for line in sum(told[1:], []):  # the same text as of the whole report, but for the machine
        assert line in report._model_lines({**found, "settings": {"dummy": "tiny"}})


@pytest.mark.slow
def test_bench_of_pictures(tmp_path: Path) -> None:
    """Prompts have a token for 32 x 32 pixels, two around a picture, 16 behind it."""
    dummy.write("tiny-images", tmp_path / "model")
    result, text = run_bench(
        tmp_path / "out.json", "model", str(tmp_path / "model"), "--prompts", "16", "--contexts",
        "0", "--batches", "1", "--threads", "1,2", "--image", "256,320",
    )  # fmt: skip
    rows = [row for row in result["rows"] if row["kind"] == "image"]
    found = [(row["threads"], row["side"], row["tokens"]) for row in rows]
    assert found == [(1, 256, 82), (1, 320, 118), (2, 256, 82), (2, 320, 118)]
    for row in rows:
        assert min(row["tower_s"], row["prompt_s"], row["again_s"]) > 0
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["prompt_s"], rel=0.02)
    assert "Images: the tower, and a prompt of its tokens" in text and " 320x320 " in text
    assert "again = tower and prompt of the same picture" in text


def test_a_picture_of_noise_is_as_large_as_it_says() -> None:
    for side in (32, 65):
        height, width = image_size(noise(side).data)
        assert (height, width) == (side, side)
        pixels = np.asarray(decode_image(noise(side).data))
        assert pixels.shape == (side, side, 3) and 110 < pixels.mean() < 145


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--image", "256"], "--image: expected a MODEL that reads pictures, got a synthetic one"),
        ([str(DEMO_DIR), "--image", "256"], "--image: expected a model that reads pictures, got "),
        ([str(DEMO_DIR), "--image", "0"], "--image: expected integers from 1 to 4096, got '0'"),
    ],
)
def test_pictures_that_cannot_be_timed(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "model", *words]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_bench_engine(tmp_path: Path) -> None:
    result, text = run_bench(
        tmp_path / "out.json", "engine", "--dummy", "tiny", "--streams", "1,3",
        "--contexts", "16,40", "--threads", "1", "--kv-dtype", "int8",
    )  # fmt: skip
    *streams, queue = result["rows"]
    assert [(r["context"], r["streams"]) for r in streams] == [(16, 1), (16, 3), (40, 1), (40, 3)]
    for row in streams:
        gap = row["gap_ms"]["median"]
        assert row["tokens_per_s"] == pytest.approx(row["streams"] / gap * 1e3, rel=1e-3)
        assert row["reading_ms"] > 0 and row["computing_ms"] > 0 and 0 <= row["outside_model"] < 1
    assert queue["kind"] == "queue" and queue["requests"] == 8 and queue["tokens_per_s"] > 0
    for title, columns, cells in report.engine_tables(result):
        assert title in text and all(len(row) == len(columns) for row in cells)
