"""The judges of scripts/prove_sglang can fail: other tokens, apply() calls in the wrong place.

The proof itself needs SGLang and runs in its own environment; here its verdicts are tried on
made-up results.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "sglang_proof"
sys.path.insert(0, str(FOLDER))

import apply_counter  # noqa: E402  (lives beside the proof, which is no package)
import environment  # noqa: E402
import l4_engine  # noqa: E402
import prove  # noqa: E402
import speed_engine  # noqa: E402

ROW = {
    "prompt": "p",
    "prompt_ids_equal": True,
    "same": 48,
    "of": 48,
    "lead_at_difference": None,
    "smallest_lead": 0.05,
    "text": "t",
}
GOOD = {
    "dtype": "float32",
    "prompts": [ROW, ROW],
    "own_pid": 1,
    "apply_calls": {"1": 0, "2": 24 * 97},
    "kinds": ["QKVParallelLinear 2-d torch.float32"],
}


def changed(row=None, **top):
    report = {**copy.deepcopy(GOOD), **top}
    report["prompts"][0].update(row or {})
    return report


def test_good_reports_pass():
    prove.judge_tokens("x", changed())
    prove.judge_calls("x", changed(), 24)
    prove.judge_calls("x", changed(apply_calls={"2": 24 * 48, "3": 24 * 48}), 24, ranks=2)
    near_tie = {"same": 30, "lead_at_difference": 0.03}
    prove.judge_tokens("x", changed(near_tie, dtype="bfloat16"))


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
    with pytest.raises(environment.ProofError):
        prove.judge_tokens("x", report)


@pytest.mark.parametrize(
    "calls",
    [
        {"1": 0},
        {"1": 0, "2": 0},
        {"1": 24, "2": 24 * 97},
        {"1": 0, "2": 24 * 97, "3": 24},
        {"1": 0, "2": 24 * 97 + 1},
        {"1": 0, "2": 24 * 47},
    ],
    ids=["nowhere", "never", "in the parent too", "twice", "some layers not ours", "too few"],
)
def test_calls_elsewhere_or_too_few_fail(calls):
    with pytest.raises(environment.ProofError, match="expected apply"):
        prove.judge_calls("x", changed(apply_calls=calls), 24)


def test_two_ranks_that_are_one_fail():
    with pytest.raises(environment.ProofError, match="expected apply.. in 2 spawned"):
        prove.judge_calls("x", changed(), 24, ranks=2)


def test_the_table_of_speed_has_shares_and_what_is_ours_of_a_forward():
    def row(rate, ours_ms):
        return {"start_s": 7.5, "batch 1": {"rate": rate, "ms": 10.0, "ours_ms": ours_ms}}

    found = {
        "bf16": {"engines": {"SGLang": row(5.0, 0.0)}},
        "whole": {"engines": {"SGLang": row(80.0, 8.0), "own": row(100.0, 0.0)}},
    }
    title, bf16, whole, own = prove.table_of_speed(found)
    assert title.split() == ["tokens", "per", "second", "batch", "1", "start"]
    assert bf16.split() == ["SGLang,", "bf16", "5.0", "0.0/10.0", "ms", "7.5", "s"]
    assert whole.split()[2:] == ["80.0", "(0.80)", "8.0/10.0", "ms", "7.5", "s"]
    assert own.split() == ["own", "engine", "100.0"]


@pytest.mark.parametrize(
    ("part", "calls", "same", "reason"),
    [
        ("whole", 1, True, None),
        ("method", 32, False, None),  # its head is not quantised
        ("bf16", 0, True, None),
        ("whole", 1, False, "tokens of our own engine"),
        ("whole", 0, True, "expected 1 calls of ours"),
        ("method", 28, True, "expected 32 calls of ours"),
        ("bf16", 1, True, "expected 0 calls of ours"),
    ],
)
def test_a_row_that_times_something_else_fails(part, calls, same, reason):
    row = {"start_s": 1.0, "batch 1": {"calls": calls}, "prompt 128": {"calls": 3}}
    found = {part: {"engines": {"SGLang": row}, "same_tokens": same}}
    if reason is None:
        prove.judge_speed(found, 8)
        return
    with pytest.raises(environment.ProofError, match=reason):
        prove.judge_speed(found, 8)


def test_speed_counts_a_decode_as_what_tokens_take_beyond_the_prompt(monkeypatch):
    """A made-up engine of 10 ms a forward, 4 of them in one call of ours."""
    clock = {"now": 0.0, "calls": 0}

    class Engine:
        start_s = 1.0

        def __call__(self, prompts, new):
            clock["now"] += 0.01 * new
            clock["calls"] += new
            return [[7] * new for _ in prompts]

        def calls(self):
            return clock["calls"], 0.004 * clock["calls"]

    monkeypatch.setattr(speed_engine.time, "perf_counter", lambda: clock["now"])
    report = speed_engine.measure({"SGLang": Engine(), "own": Engine()})
    assert report["same_tokens"]
    rows = report["engines"]["SGLang"]
    assert rows["batch 16"] == {"rate": 1600.0, "ms": 10.0, "ours_ms": 4.0, "calls": 1.0}
    assert rows["prompt 512"]["rate"] == 51200.0


def test_comparison_counts_to_the_first_difference():
    case = {"prompt": "p", "prompt_ids": [0, 5], "tokens": [7, 8, 9], "leads": [1.0, 0.5, 0.25]}
    answer = {"output_ids": [7, 4, 9], "meta_info": {"prompt_tokens": 2}, "text": "t"}
    (row,) = l4_engine.compare({"cases": [case]}, [answer])
    assert (row["same"], row["of"], row["lead_at_difference"]) == (1, 3, 0.5)
    assert row["prompt_ids_equal"] and row["smallest_lead"] == 0.25


def test_counter_survives_in_its_file(tmp_path):
    counter = apply_counter.Counter(tmp_path / "apply-77")
    for _ in range(3):
        counter.add_one()
    assert apply_counter.read_counts(tmp_path) == {77: 3}
    counter.add_one(ns=250)
    assert apply_counter.read_times(tmp_path) == {77: (4, 250)}


def test_a_failing_or_hanging_command_is_an_error_with_the_end_of_its_log(tmp_path):
    log = tmp_path / "log"
    code = "print('the reason'); raise SystemExit(3)"
    with pytest.raises(environment.ProofError, match=r"(?s)failed \(3\).*the reason"):
        environment.run_logged([sys.executable, "-c", code], log)
    with pytest.raises(environment.ProofError, match="no end after 1 s"):
        environment.run_logged([sys.executable, "-c", "import time; time.sleep(60)"], log, 1)


def test_digest_follows_the_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "SOURCES", ("a.txt", "folder"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.txt").write_text("1")
    first = environment.digest_of_sources()
    (tmp_path / "folder" / "b.txt").write_text("1")
    second = environment.digest_of_sources()
    (tmp_path / "folder" / "b.txt").write_text("2")
    assert len({first, second, environment.digest_of_sources()}) == 3


def test_the_project_is_installed_as_a_wheel_and_only_after_a_change(tmp_path, monkeypatch):
    """Of the packages nothing is made again for an edit of the sources, and nothing is built."""
    made, digests = [], ["1", "1", "2"]
    monkeypatch.setattr(environment, "digest_of_sources", lambda: digests.pop(0))
    venv = environment.Environment(tmp_path / "venv", tmp_path / "work")
    venv.folder.mkdir()
    monkeypatch.setattr(venv, "_make", lambda say: made.append("packages"))
    monkeypatch.setattr(venv, "_wheel", lambda: "project.whl")
    monkeypatch.setattr(venv, "_pip", lambda log, *words: made.append((log, *words)))
    project = [
        ("project", "--no-deps", "--force-reinstall", "project.whl"),
        ("dependencies", "-c", venv.constraint, "project.whl"),
    ]
    for expected in (["packages", *project], [], project):
        made.clear()
        venv.ensure(lambda text: None)
        assert made == expected


def test_a_started_server_may_keep_its_bytecode(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("KEPT", "1")
    for stubs in (False, True):
        env = prove.child_environment(stubs)
        assert "PYTHONDONTWRITEBYTECODE" not in env and env["KEPT"] == "1"
