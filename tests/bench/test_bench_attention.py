"""`bitnet-ops bench attention` measures what its rows say. Nothing here asserts a speed."""

from __future__ import annotations

import json

import pytest
import torch

from bitnet_ops import cli
from bitnet_ops.bench.attention import Caches, policy_words


def test_policies_are_measured_beside_dense(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--quick -t 1 --contexts 2113 --shapes 2b-4t --kv-dtype int8 --json"
    policies = ["window:64", "top_k:0.5,dense_below=0"]
    words = [word for policy in policies for word in ("--policy", policy)]
    assert cli.main(["bench", "attention", *asked.split(), *words]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {row["policy"]: row["read"] for row in report["rows"]}
    assert list(found) == ["dense", *policies]
    assert found["dense"] == 1 and found["top_k:0.5,dense_below=0"] == 0.5  # 17 of 34 pages
    assert found["window:64"] == round(2 / 34, 4)
    assert all(row["time_us"]["median"] > 0 for row in report["rows"])


def test_chunks_of_a_prompt_are_measured_too(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--quick -t 1 --contexts 640 --shapes 2b-4t --kv-dtype int8 --tokens 1,65 --json"
    policy = "top_k:0.5,dense_below=0"
    assert cli.main(["bench", "attention", *asked.split(), "--policy", policy]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["tokens"], row["policy"]) for row in rows] == [
        (tokens, name) for tokens in (1, 65) for name in ("dense", policy)
    ]
    assert rows[1]["read"] == 0.5  # of 10 pages
    assert rows[3]["read"] == round((64 * 5 + 5) / (64 * 10 + 9), 4)  # the first of 9
    assert cli.main(["bench", "attention", "--tokens", "99", "--contexts", "64"]) != 0
    assert "--tokens: expected at most a context, 64, got 99" in capsys.readouterr().err


def test_what_is_no_policy_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "attention", "--policy", "window:-1"]) != 0
    assert "expected window an integer of at least 1" in capsys.readouterr().err


def test_layers_take_turns_and_give_the_same() -> None:
    caches = Caches((4, 2, 32), 200, "bfloat16")
    word = policy_words("top_k:0.5,dense_below=0")
    first = caches.attend(0, word)
    assert torch.equal(first, caches.attend(1, word)) and not torch.equal(
        first, caches.attend(1, "")
    )
    assert len({pool.key_pool.data_ptr() for pool in caches.pools}) == len(caches.pools) > 1
