"""`bitnet-ops bench model` on a tiny model: rows, tables, plots, other engines.

Nothing here asserts a speed.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bitnet_ops import cli
from bitnet_ops.bench import (
    command_model,
    parts,
    plots,
    report_model,
    rival_gguf,
    rivals,
    subject,
    weights,
)
from bitnet_ops.dummy import model as dummy

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """The command line as a user runs it: (JSON, what it printed, folder of plots)."""
    folder = tmp_path_factory.mktemp("bench-model")
    arguments = ["bench", "model", "--dummy", "tiny", "--quick", "--prompts", "16"]
    arguments += ["--contexts", "0,8", "--batches", "1,2", "--threads", "1,2"]
    arguments += ["--rivals", "hf-bf16", "--rival-seconds", "0.1"]
    arguments += ["--output", str(folder / "out.json"), "--plots", str(folder / "plots")]
    done = subprocess.run(
        [sys.executable, "-m", "bitnet_ops", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    return json.loads((folder / "out.json").read_text()), said, folder / "plots"


def rows(report: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if row["kind"] == kind]


@pytest.mark.slow
def test_small_run_has_every_row(small_run: tuple[dict[str, Any], str, Path]) -> None:
    report, _, _ = small_run
    assert (report["schema"], report["schema_version"]) == ("bitnet_ops.bench.model", 1)
    # for each of two thread counts: two contexts, one more batch
    decode = rows(report, "decode")
    assert [(r["threads"], r["batch"], r["context"]) for r in decode] == [
        (t, b, c) for t in (1, 2) for b, c in ((1, 0), (1, 8), (2, 0))
    ]
    for row in decode:
        assert row["steps"] >= 3 and row["tokens_per_s"] > 0
        assert 0 < row["share"]["p10"] <= row["share"]["median"] <= row["share"]["p90"]
        expected = row["batch"] / row["step_ms"]["median"] * 1e3
        assert row["tokens_per_s"] == pytest.approx(expected, rel=1e-3)
    assert len(rows(report, "prefill")) == 2 and len(rows(report, "parts")) == 4
    for row in rows(report, "parts"):
        total = sum(row["parts_ms"].values()) + row["rest_ms"]
        assert total == pytest.approx(row["step_ms"], rel=1e-3)
        assert row["overhead"] == pytest.approx(row["rest_ms"] / row["step_ms"], rel=1e-3)
    assert {r["what"] for r in rows(report, "rival")} == {"decode", "prefill"}
    assert all(math.isfinite(limit["read_gb_s"]) for limit in report["limits"])


@pytest.mark.slow
def test_small_run_prints_every_table(small_run: tuple[dict[str, Any], str, Path]) -> None:
    report, text, _ = small_run
    titles = ("Decode:", "Prefill:", "Where a decode step goes", "Other engines")
    assert all(title in text for title in titles)
    assert report["environment"]["cpu"] in text and "core-to-core round trip" in text
    for title, columns, cells in report_model.tables(report):
        assert title in text and all(len(row) == len(columns) for row in cells)


@pytest.mark.slow
def test_plots_are_pictures(small_run: tuple[dict[str, Any], str, Path]) -> None:
    _, text, folder = small_run
    drawn = sorted(folder.iterdir())
    assert [p.name for p in drawn] == ["batch.png", "context.png", "parts.png", "threads.png"]
    for path in drawn:
        data = path.read_bytes()
        assert data.startswith(PNG) and 2000 < len(data) < 200_000
        assert f"wrote {path}" in text


def test_bytes_of_a_step_are_those_of_the_tensors() -> None:
    tiny = subject.Subject("tiny", weights.CANONICAL, "bf16")
    c = dummy.config("tiny")
    size = tiny.bytes()
    assert size.per_position == 2 * 2 * 3 * 2 * 32
    # packed rows and a scale of 4 bytes a matrix
    shapes = [(m.out_features, m.in_features) for _, ms in tiny.projections() for m in ms]
    assert size.body == sum(n * weights.row_bytes(k) + 4 for n, k in shapes)
    assert size.step(2, 10) == size.body + size.head + 20 * size.per_position
    assert tiny.macs_per_token() == sum(n * k for n, k in shapes)
    assert len(shapes) == 7 * c.num_hidden_layers


def test_an_int8_cache_has_a_byte_for_a_number_and_four_for_a_factor() -> None:
    tiny = subject.Subject("tiny", weights.CANONICAL, "bf16", "int8")
    cache = tiny.cache(2, 6, 0)
    assert tiny.bytes().per_position == 2 * 3 * 2 * (32 + 4)
    assert cache.nbytes == 2 * 6 * tiny.bytes().per_position


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_decode_runs_start_again_behind_their_context(kv_dtype: str) -> None:
    tiny = subject.Subject("tiny", weights.CANONICAL, "bf16", kv_dtype)
    with torch.inference_mode():
        run = tiny.decode_run(2, 5, tokens=3)
        for i in range(7):  # more than the cache has room for without going back
            run.call(i)
        cache = tiny.cache(2, 5, 3)
    assert cache.lengths.tolist() == [5, 5] and cache.max_len == 8
    assert torch.isfinite(cache.keys[0]).all()


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_parts_call_every_kernel_of_a_step_once(kv_dtype: str) -> None:
    tiny = subject.Subject("tiny", weights.CANONICAL, "bf16", kv_dtype)
    with torch.inference_mode():
        found = parts.part_runs(tiny, 1, 4)
        for run, _ in found.values():
            run.call(0)
    assert set(found) == set(subject.PARTS)
    calls = {"qkv": 9, "attention": 3, "o": 3, "gate/up": 6, "down": 3, "head": 1}
    assert {part: count for part, (_, count) in found.items()} == calls


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dummy", "7b"], "--dummy: expected names among 2b-4t"),
        (["--formats", "2bit"], "--formats: expected pairs such as 2bit+int8, got '2bit'"),
        (["--formats", "3bit+int8"], "--formats: expected names among canonical"),
        (["--formats", "auto+int3"], "--formats: expected names among bf16, int8, int4"),
        (["--prompts", "0"], "--prompts: expected integers from 1 to 8192, got '0'"),
        (["--contexts", "-1"], "--contexts: expected integers from 1 to 16000, got '-1'"),
        (["--rivals", "vllm"], "--rivals: expected names among hf-bf16"),
        (["--rival-seconds", "0"], "--rival-seconds: expected more than 0"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"{arguments[0]}={arguments[1]}"]
    assert cli.main(["bench", "model", *given]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_contexts_may_be_zero() -> None:
    assert command_model._counts("--contexts", "0,2048,0", 16000, least=0) == (0, 2048)
    assert command_model._counts("--contexts", "0", 16000, least=0) == (0,)


def test_plots_without_matplotlib_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "model", "--plots", str(tmp_path)]) == 2
    assert "pip install 'bitnet-ops[bench]'" in capsys.readouterr().err


def test_importing_the_command_draws_nothing() -> None:
    """The command line must not pay for matplotlib or transformers before it needs them."""
    code = (
        "import sys, bitnet_ops.bench.command\n"
        "print([m for m in ('matplotlib', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- other engines -------------------------------------------------------------------------------


def test_missing_engines_are_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)
    assert rivals.missing(["litespark", "llama-cpp"]) == ["litespark", "llama-cpp"]
    assert list(rivals.installed_rivals(["litespark"], "tiny")) == []


ENGINE = """
import json, sys
print("noise of a library")
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    print(json.dumps({"error": "no"} if line == "prefill 3\\n" else {"done": True}), flush=True)
"""


def test_worker_answers_and_passes_errors_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        assert command[1:] == ["-m", "bitnet_ops.bench.rival_worker", "litespark", "tiny", "2"]
        assert options["env"]["OMP_NUM_THREADS"] == "2"
        return real([sys.executable, "-c", ENGINE], **options)

    monkeypatch.setattr(rivals.subprocess, "Popen", popen)
    worker = rivals.Worker("litespark", "tiny")
    worker.decode_run(2).call(0)
    worker.prefill_run(4, 2).call(0)
    with pytest.raises(RuntimeError, match="litespark: no"):
        worker.prefill_run(3, 2).call(0)
    worker.close()
    worker.close()


def test_worker_that_dies_is_an_error() -> None:
    worker = rivals.Worker("no-such-engine", "tiny")
    with pytest.raises(RuntimeError, match="no-such-engine: KeyError"):
        worker.decode_run(1).call(0)
    worker.close()


def test_random_gguf_reads_back(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "random.gguf"
    with pytest.raises(ValueError, match="multiple of 256, got 192"):
        rival_gguf.write_random(dummy.config("tiny"), path)
    c = dummy.config("0.7b")
    few = type(c)(**{**c.__dict__, "num_hidden_layers": 1, "vocab_size": 320})
    rival_gguf.write_random(few, path)
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert len(tensors) == 2 + 7 + 4
    down = tensors["blk.0.ffn_down.weight"]
    assert down.tensor_type == gguf.GGMLQuantizationType.TQ2_0
    assert list(map(int, down.shape)) == [4096, 1536]


def test_hugging_face_model_has_the_dimensions_asked_for() -> None:
    rival = rivals.HuggingFace("hf-fp32", "tiny", torch.float32)
    c = dummy.config("tiny")
    with torch.inference_mode():
        output = rival.prefill_run(5, 1).call(0)
        rival.decode_run(1).call(0)
    assert output.logits.shape == (1, 1, c.vocab_size)  # type: ignore[attr-defined]
    assert torch.isfinite(output.logits).all()  # type: ignore[attr-defined]
    rival.close()
