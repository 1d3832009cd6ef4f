"""The laboratory, benchmarks/ of the source tree: each part of it imports, each entry point runs.

That is all that is tested of it; nothing here asserts a speed.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.process import Floor
from bitnet_ops.config.attention import read_policies
from bitnet_ops.config.sparsity import read_sparsity

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "xllamacpp_worker"
)


def entry(words: str) -> str:
    """What `python -m benchmarks.WORDS` prints."""
    command = ["-m", *(word.replace("~", " ") for word in f"benchmarks.{words}".split())]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_imports() -> None:
    assert len(MODULES) > 25
    for name in MODULES:
        importlib.import_module(f"benchmarks.{name}" if name != "__init__" else "benchmarks")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            "before_after PYTHON --dummy tiny --turns 2 --prompts 8 --contexts 0 --batches 2"
            " --kv-dtype int8",
            "2 sequences",
        ),
        ("bench_apply --shape 64x128 --tokens 1 --threads 1 --seconds 0.01", "apply adds"),
        (
            "compare_engines --dummy tiny --engines hf-bf16 --seconds 0.1 --prompts 16 --quick",
            "hf-bf16",
        ),
        ("compare_kv --help", "--model MODEL"),
        ("engine_studies --dummy tiny --quick -t 1", '"speculation"'),
        ("goals --help", "--check"),
        ("many_cores --help", "--bandwidth"),
        ("interference --runs 1 --layers 1 --prompt 4 --only one~thread --before PYTHON", "before"),
        (
            "products_before_after PYTHON --shapes 64x128 300x256 --tokens 1 3 --threads 1"
            " --turns 2 --format 1.6bit",
            "| 300 x 256 | ",
        ),
        ("page FOLDER/page.md --quick --data FOLDER", "wrote "),
    ],
    ids=lambda words: words.split()[0],
)
@pytest.mark.sampled(2)
def test_every_entry_point_runs(words: str, shown: str, tmp_path: Path) -> None:
    words = words.replace("PYTHON", sys.executable).replace("FOLDER", str(tmp_path))
    assert shown in entry(words)
    if words.startswith("page"):
        page = (tmp_path / "page.md").read_text()
        assert "share of a step outside its kernels" in page
        for title in ("## Goals", "## The model tiny", "## Ternary products", "## Other ops"):
            assert title in page
        reports = sorted(tmp_path.glob("*.json"))
        assert [path.stem for path in reports] == ["goals", "model", "ops", "small-model"]
        assert len(list(tmp_path.glob("*.png"))) in (0, 6)


def test_the_gate_for_speed_sees_what_most_turns_say() -> None:
    """One turn that others disturbed is no loss; three quarters below the ratio are."""
    floor = Floor(0.95)
    floor.see("disturbed", [1.0, 0.99, 0.5, 1.01])
    floor.leave()
    floor.see("slower", [0.9, 0.91, 0.94, 0.93])
    with pytest.raises(SystemExit, match=r"at least 0.95, got: slower 0.92"):
        floor.leave()


def test_curves_of_quality_are_of_policies_that_there_are() -> None:
    from benchmarks import attention_policies, sparsity_quality

    kinds = attention_policies.CURVES
    for kind, texts in {**kinds, "table": attention_policies.POLICIES.values()}.items():
        for text in texts:
            (policy,) = read_policies(text, 1, lambda _: None)
            assert policy is not None and (policy.kind == kind or kind == "table")
    for kind, texts in sparsity_quality.CURVES.items():
        assert {read_sparsity(text).kind for text in texts} == {kind}


def test_quality_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plots import Field, draw_quality

    lines = {"window": [(50.0, 0.9), (20.0, 0.5)], "exact": [(90.0, 1.0)]}
    fields = [Field("read, %", what, lines, ("all", 1.0)) for what in ("cosine", "loss")]
    assert draw_quality(fields, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_process_that_dies_or_complains_is_an_error() -> None:
    from benchmarks.process import Process

    with pytest.raises(RuntimeError, match="shell: expected an answer, got the end"):
        Process("shell", ["true"])
    talk = "echo noise; echo '{\"ready\": true}'; read line; echo '{\"error\": \"no '$line'\"}'"
    with (
        Process("shell", [str(shutil.which("bash")), "-c", talk]) as process,
        pytest.raises(RuntimeError, match="shell: no prefill 3"),
    ):
        process.ask("prefill", 3)
