"""Other engines, the parts of a step and the plots: what benchmarks/ adds to `bench model`.

Nothing here asserts a speed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import engine_gguf, engines, versions
from bitnet_ops.bench import run_model
from bitnet_ops.bench.harness import Budget
from bitnet_ops.bench.limits import measure_limits
from bitnet_ops.bench.memory import Workspace
from bitnet_ops.bench.model import BenchModel
from bitnet_ops.bench.page import parts, plots, render
from bitnet_ops.dummy import model as dummy
from bitnet_ops.nn.storage import KV_TYPES

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


def entry(name: str, *arguments: str | Path, package: str = "benchmarks") -> str:
    """What `python -m PACKAGE.NAME` prints."""
    command = [sys.executable, "-m", f"{package}.{name}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """Our tiny model beside transformers: (JSON, what was printed, the file of the JSON)."""
    output = tmp_path_factory.mktemp("engines") / "out.json"
    options = ["--dummy", "tiny", "--engines", "hf-bf16", "--seconds", "0.1", "--prompts", "16,64"]
    text = entry("compare_engines", *options, "--quick", "--output", output)
    return json.loads(output.read_text()), text, output


@pytest.mark.slow
def test_an_engine_is_timed_beside_ours(compared: tuple[dict[str, Any], str, Path]) -> None:
    result, text, _ = compared
    rows = [row for row in result["rows"] if row["kind"] == "engine"]
    assert [(r["what"], r["tokens"]) for r in rows] == [
        *(("decode", 1), ("prefill", 16), ("prefill", 64))
    ]
    assert all(("note" in row) != (row.get("tokens_per_s", 0) > 0) for row in rows)
    title, columns, cells = render.engine_table(rows)
    assert title in text and "hf-bf16" in text and {len(row) for row in cells} == {len(columns)}
    assert result["missing"] == []


@pytest.mark.slow
def test_plots_are_pictures(compared: tuple[dict[str, Any], str, Path], tmp_path: Path) -> None:
    text = entry("plots", compared[2], tmp_path, package="bitnet_ops.bench.page")
    drawn = sorted(tmp_path.iterdir())
    assert [p.name for p in drawn] == ["batch.png", "context.png", "parts.png", "threads.png"]
    for path in drawn:
        data = path.read_bytes()
        assert data.startswith(PNG) and 2000 < len(data) < 200_000
        assert f"wrote {path}" in text


@pytest.mark.parametrize(
    "name", ["update_performance", "compare_engines", "before_after", "neighbour"]
)
def test_every_entry_point_says_what_it_does(name: str) -> None:
    assert f"python -m benchmarks.{name}" in entry(name, "--help")


def test_apply_beside_its_op_runs() -> None:
    text = entry("bench_apply", "--shape", "64x128", "--tokens", "1", "--threads", "1",
                 "--seconds", "0.01")  # fmt: skip
    assert "apply adds" in text and "64x128" in text


def test_two_versions_take_turns() -> None:
    """This version beside itself: a row for each measurement, its ratios positive."""
    options = ["--dummy", "tiny", "--turns", "2", "--prompts", "8", "--contexts", "0", "16"]
    text = entry("before_after", sys.executable, *options, "--kv-dtype", "int8")
    rows = [line for line in text.splitlines() if "->" in line]
    assert [row[:22].strip() for row in rows] == [
        *("prompt of 8", "decode behind 0", "decode behind 16")
    ]
    for row in rows:
        ratio, low, high = (float(n) for n in re.findall(r"\d+\.\d\d", row))
        assert 0 < low <= ratio <= high


def test_a_version_that_ends_is_told() -> None:
    command = [sys.executable, "-m", "benchmarks.before_after", "false"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and "got the end of a version's process" in done.stderr


def test_versions_know_older_names(monkeypatch: pytest.MonkeyPatch) -> None:
    older = types.ModuleType("bitnet_ops.bench.subject")
    older.Subject = lambda *asked: asked  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitnet_ops.bench.model", None)
    monkeypatch.setitem(sys.modules, older.__name__, older)
    assert versions.bench_model("tiny") == ("tiny", "auto", "int8")


def test_neighbour_measures_each_version() -> None:
    options = ["--runs", "1", "--layers", "1", "--prompt", "4", "--only", "one thread"]
    text = entry("neighbour", *options, "--before", sys.executable)
    rows = [line.split()[2] for line in text.splitlines() if line.startswith("one thread")]
    assert rows == ["before", "now"]


def test_plots_without_matplotlib_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="expected matplotlib.*pip install matplotlib"):
        plots.require(str(tmp_path))


@pytest.mark.parametrize("kv_dtype", KV_TYPES)
def test_parts_call_every_kernel_of_a_step_once(kv_dtype: str) -> None:
    tiny = BenchModel("tiny", "canonical", "bf16", kv_dtype)
    with torch.inference_mode():
        found = parts.part_runs(tiny, 1, 4)
        for run, _ in found.values():
            run.call(0)
    assert set(found) == set(parts.PARTS)
    calls = {"qkv": 9, "attention": 3, "o": 3, "gate/up": 6, "down": 3, "head": 1}
    assert {part: count for part, (_, count) in found.items()} == calls


def test_parts_and_rest_are_the_step() -> None:
    ws, settings = Workspace(16 << 20, 0), run_model.ModelSettings("tiny", contexts=(0, 8, 16),
                                                                   quick=True)  # fmt: skip
    bench = run_model.ModelBench(ws, BenchModel("tiny", "2bit", "int8"), settings)
    with torch.inference_mode():
        limits = measure_limits(ws.ternary, torch.get_num_threads(), Budget(0.01))
        rows = parts.parts_rows(bench, [limits])
    assert [row["context"] for row in rows] == [0, 8]
    for row in rows:
        total = sum(row["parts_ms"].values()) + row["rest_ms"]
        assert total == pytest.approx(row["step_ms"], rel=1e-3)
        assert row["overhead"] == pytest.approx(row["rest_ms"] / row["step_ms"], rel=1e-3)
    _, titles, cells = parts.parts_table(rows)
    assert {len(row) for row in cells} == {len(titles)}


def test_missing_engines_are_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    assert engines.missing(["litespark", "llama-cpp"]) == ["litespark", "llama-cpp"]
    assert list(engines.installed(["litespark"], "tiny")) == []


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
        assert command[1:] == ["-m", "benchmarks.engine_worker", "litespark", "tiny", "2"]
        assert options["env"]["OMP_NUM_THREADS"] == "2"
        return real([sys.executable, "-c", ENGINE], **options)

    monkeypatch.setattr(engines.subprocess, "Popen", popen)
    worker = engines.Worker("litespark", "tiny")
    worker.decode_run(2).call(0)
    worker.prefill_run(4, 2).call(0)
    with pytest.raises(RuntimeError, match="litespark: no"):
        worker.prefill_run(3, 2).call(0)
    worker.close()
    worker.close()


def test_worker_that_dies_is_an_error() -> None:
    worker = engines.Worker("no-such-engine", "tiny")
    with pytest.raises(RuntimeError, match="no-such-engine: KeyError"):
        worker.decode_run(1).call(0)
    worker.close()


def test_random_gguf_reads_back(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "random.gguf"
    with pytest.raises(ValueError, match="multiple of 256, got 192"):
        engine_gguf.write_random(dummy.config("tiny"), path)
    c = dummy.config("0.7b")
    few = type(c)(**{**c.__dict__, "num_hidden_layers": 1, "vocab_size": 320})
    engine_gguf.write_random(few, path)
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert len(tensors) == 2 + 7 + 4
    down = tensors["blk.0.ffn_down.weight"]
    assert down.tensor_type == gguf.GGMLQuantizationType.TQ2_0
    assert list(map(int, down.shape)) == [4096, 1536]


def test_hugging_face_model_has_the_dimensions_asked_for() -> None:
    engine = engines.HuggingFace("hf-fp32", "tiny", torch.float32)
    c = dummy.config("tiny")
    with torch.inference_mode():
        output = engine.prefill_run(5, 1).call(0)
        engine.decode_run(1).call(0)
    assert output.logits.shape == (1, 1, c.vocab_size)  # type: ignore[attr-defined]
    assert torch.isfinite(output.logits).all()  # type: ignore[attr-defined]
    engine.close()
