"""The harness's model class against the harness's own `hf` on the same checkpoint, offline.

Three tasks are written here over the demo model's validation text, one for each thing that a model
is asked for. transformers multiplies rounded floating numbers and this package sums integers, so
log probabilities agree within what one int8 step of an activation can move; choices and greedy
texts have to be equal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from bitnet_ops.evaluation import BitnetOpsLM, EvaluationError
from bitnet_ops.generate.chat import ChatTemplateError
from bitnet_ops.generate.engine import PromptError
from bitnet_ops.generate.scoring import score
from bitnet_ops.language_model import load
from chat_templates import STYLES

DEMO = Path(__file__).resolve().parents[1] / "data" / "demo-model"
_COMMON = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
"""
_CHOICES = """
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""
_ROLLING = """
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
"""
_UNTIL = """
doc_to_text: "{{context}}"
doc_to_target: "{{target}}"
generation_kwargs:
  until: ["\\n\\n", "."]
  do_sample: false
  max_gen_toks: 24
metric_list:
  - metric: exact_match
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    words = (DEMO / "val.txt").read_text().split()
    pieces = [words[i : i + 24] for i in range(0, 24 * 40, 24)]
    choices = []
    for i, piece in enumerate(pieces):
        ends = [" " + " ".join(pieces[(i + k) % 40][18:]) for k in range(4)]
        choices.append({"context": " ".join(piece[:18]), "choices": ends, "answer": 0})
    texts = [{"text": " ".join(words[i : i + 400])} for i in range(0, 1200, 400)]
    starts = [{"context": " ".join(p[:12]), "target": " ".join(p[12:])} for p in pieces[:8]]
    files = {
        "demo_choices": ("multiple_choice", choices, _CHOICES),
        "demo_rolling": ("loglikelihood_rolling", texts, _ROLLING),
        "demo_until": ("generate_until", starts, _UNTIL),
    }
    for name, (kind, rows, text) in files.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(_COMMON.format(name=name, data=data, kind=kind) + text)
    return folder


@pytest.fixture(scope="module")
def results(tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of both classes: what simple_evaluate gives for the three tasks."""
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    arguments = {
        "hf": f"pretrained={DEMO},dtype=float32,max_length=256",
        "bitnet_ops": f"path={DEMO},max_length=256",
    }
    found = {}
    for model, given in arguments.items():
        found[model] = lm_eval.simple_evaluate(
            model=model,
            model_args=given,
            tasks=["demo_choices", "demo_rolling", "demo_until"],
            task_manager=manager,
            device="cpu",
            batch_size=4,
            bootstrap_iters=0,
            log_samples=True,
        )
    return found


def _samples(results: dict[str, dict[str, Any]], model: str, task: str) -> list[dict[str, Any]]:
    return sorted(results[model]["samples"][task], key=lambda s: s["doc_id"])


@pytest.mark.slow
def test_choices_are_those_of_hf(results: dict[str, dict[str, Any]]) -> None:
    theirs, ours = (_samples(results, m, "demo_choices") for m in ("hf", "bitnet_ops"))
    assert len(ours) == len(theirs) == 40
    largest = 0.0
    for a, b in zip(theirs, ours, strict=True):
        for (x,), (y,) in zip(a["resps"], b["resps"], strict=True):
            largest = max(largest, abs(float(x[0]) - float(y[0])) / abs(float(x[0])))
    assert largest < 5e-3
    scores = [results[m]["results"]["demo_choices"]["acc,none"] for m in ("hf", "bitnet_ops")]
    assert scores[0] == scores[1] > 0.4  # it has learnt something: chance is a quarter


@pytest.mark.slow
def test_perplexity_is_that_of_hf(results: dict[str, dict[str, Any]]) -> None:
    theirs, ours = (
        results[m]["results"]["demo_rolling"]["bits_per_byte,none"] for m in ("hf", "bitnet_ops")
    )
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert 0.3 < ours < 3


@pytest.mark.slow
def test_greedy_answers_are_those_of_hf(results: dict[str, dict[str, Any]]) -> None:
    theirs, ours = (
        [s["filtered_resps"] for s in _samples(results, m, "demo_until")]
        for m in ("hf", "bitnet_ops")
    )
    assert ours == theirs
    assert any(answer[0] for answer in ours)


def test_scores_are_the_logits() -> None:
    """score() against a softmax in float64 of the model's logits, long and short texts mixed."""
    lm = load(kv_dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    lengths = [2, 700, 33, 1, 129, 5]
    texts = [
        torch.randint(0, lm.config.vocab_size, (n,), generator=generator).tolist() for n in lengths
    ]
    for ids, found in zip(texts, lm.score(texts), strict=True):
        if len(ids) == 1:
            assert found.logprobs.shape == found.greedy.shape == (0,)
            continue
        logits = lm.model(torch.tensor([ids[:-1]]))[0].double()
        expected = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        assert (found.logprobs.double() - expected).abs().max() < 1e-5
        assert torch.equal(found.greedy, logits.argmax(-1) == torch.tensor(ids[1:]))


def test_scores_from_a_token_on() -> None:
    lm = load()
    ids = lm.encode("Once there was a house in the middle of a wood")
    whole, part = score(lm.model, [ids, ids], [1, 5])
    assert torch.equal(whole.logprobs[4:], part.logprobs)
    assert score(lm.model, [ids], [len(ids)])[0].logprobs.shape == (0,)
    long = (ids * 60)[:700]  # of two steps, of the first of which nothing is wanted
    whole, part = score(lm.model, [long, long], [1, 650])
    assert torch.equal(whole.logprobs[649:], part.logprobs)


def test_embeddings_are_the_last_hidden_states_whatever_is_beside_them() -> None:
    lm = load(kv_dtype=torch.float32)
    texts = [lm.encode("Once there was a house"), [5], (lm.encode("in the wood") * 300)[:700]]
    vectors = lm.embed(texts)
    for ids, vector in zip(texts, vectors, strict=True):
        assert torch.equal(lm.embed([ids])[0], vector)
        state = lm.model.hidden(torch.tensor([ids]))[0, -1]
        assert torch.equal(torch.nn.functional.normalize(state, dim=-1), vector)
    few = torch.nn.functional.normalize(vectors[:, :8], dim=-1)
    torch.testing.assert_close(lm.embed(texts, dimensions=8), few)
    assert lm.embed([]).shape == (0, lm.config.hidden_size)
    for wrong, message in (
        ([[]], "at least one token in every text, got none in text 1 of 1"),
        ([[1] * 2000], "at most 1024 tokens"),
        ([[10**6]], "prompt ids from 0"),
    ):
        with pytest.raises(ValueError, match=message):
            lm.embed(wrong)
    with pytest.raises(ValueError, match="dimensions an integer from 1 to"):
        lm.embed(texts, dimensions=0)


@pytest.mark.parametrize(
    ("ids", "first", "message"),
    [
        ([], 1, "expected 1 to"),
        ([1, 2], 0, "first token to score from 1 to 2"),
        ([1, 2], 3, "first token to score from 1 to 2"),
        ([1, -1], 1, "expected token ids from 0"),
        ([10**6, 1], 1, "expected token ids from 0"),
    ],
)
def test_what_cannot_be_scored(ids: list[int], first: int, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        score(load().model, [ids], [first])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pretrained": "x"}, "expected model_args among path"),
        ({"dtype": "float99"}, "expected a type of torch .* got float99"),
    ],
)
def test_arguments_that_it_does_not_know(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        BitnetOpsLM(**{"path": str(DEMO), **arguments})


# Options of the chat template -------------------------------------------------------------------

QUESTION = [{"role": "user", "content": "2 + 2?"}]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"enable_thinking": False},
        {"enable_thinking": True, "think_end_token": "</think>"},
        {"chat_template_args": {"enable_thinking": False}},
        {"chat_template_args": {"reasoning_effort": "low", "enable_thinking": True},
         "enable_thinking": False},
    ],
    ids=str,
)  # fmt: skip
def test_options_of_the_template_are_those_of_hf(given: dict[str, Any]) -> None:
    """Names and texts of the class `hf`; an option of its own wins over the dict."""
    ours = BitnetOpsLM(path=str(DEMO), **given)
    theirs = HFLM(pretrained=str(DEMO), dtype="float32", device="cpu", **given)
    ours.lm.tokenizer.chat_template = theirs.tokenizer.chat_template = STYLES["qwen35"]
    expected = theirs.apply_chat_template(QUESTION)
    assert ours.apply_chat_template(QUESTION) == expected
    plain = BitnetOpsLM(path=str(DEMO))
    plain.lm.tokenizer.chat_template = STYLES["qwen35"]
    without_thoughts = "False" in str(given)
    assert (plain.apply_chat_template(QUESTION) != expected) == without_thoughts
    assert (plain.tokenizer_name == ours.tokenizer_name) == (given == {})  # one cache of prompts


def test_options_that_the_template_does_not_know() -> None:
    lm = BitnetOpsLM(path=str(DEMO), enable_thinking=False)
    lm.lm.tokenizer.chat_template = STYLES["llama"]
    with pytest.raises(ChatTemplateError, match="enable_thinking, which it never mentions"):
        lm.apply_chat_template(QUESTION)
    with pytest.raises(EvaluationError, match="think_end_token beside enable_thinking"):
        BitnetOpsLM(path=str(DEMO), enable_thinking=True)
    with pytest.raises(EvaluationError, match="chat_template_args as a dict, got '{x: 1}'"):
        BitnetOpsLM(path=str(DEMO), chat_template_args="{x: 1}")
    thinks = BitnetOpsLM(path=str(DEMO), enable_thinking=True, think_end_token="</think>")
    with pytest.raises(EvaluationError, match="tasks of answers with enable_thinking"):
        thinks.loglikelihood([])


@pytest.mark.parametrize("as_id", [False, True])
def test_an_answer_begins_behind_its_thought(as_id: bool) -> None:
    """Its stop texts end what stands behind the last end of a thought alone."""
    context, settings = "Once there was a house", {"do_sample": False, "max_gen_toks": 24}
    plain = BitnetOpsLM(path=str(DEMO))
    (whole,) = plain._answers([context], settings)
    ids = plain.tok_encode(context)
    made = plain.lm.generate_batch([ids], max_new_tokens=24)[0].token_ids
    end = next(i for i in made[4:] if made.count(i) == 1)
    text = plain.lm.tokenizer.decode([end])
    behind = plain.lm.tokenizer.decode(made[made.index(end) + 1 :]).lstrip()
    stop = behind[len(behind) // 2 :][:4]
    thought = plain.lm.tokenizer.decode(made[: made.index(end)])
    first = thought.split()[0]
    lm = BitnetOpsLM(path=str(DEMO), think_end_token=str(end) if as_id else text)
    (found,) = lm._answers([context], settings)
    assert found == behind and whole.endswith(found) and len(found) < len(whole)
    (found,) = lm._answers([context], {**settings, "until": [first, stop]})
    assert found == behind.split(first)[0].split(stop)[0]
    assert plain._answers([context], {**settings, "until": [first]})[0].strip() == ""


def test_generation_settings_that_it_does_not_know() -> None:
    lm = BitnetOpsLM(path=str(DEMO))
    with pytest.raises(EvaluationError, match="expected generation settings .* got typical_p"):
        lm._answers(["Once"], {"do_sample": True, "typical_p": 0.5})
    with pytest.raises(EvaluationError, match="expected max_gen_toks below max_length"):
        lm._answers(["Once"], {"do_sample": False, "max_gen_toks": 10**6})


@pytest.mark.slow
def test_the_harness_command_line(tasks: Path, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "bitnet_ops.evaluation", "run"),
        *("--model", "bitnet_ops", "--model_args", f"path={DEMO},max_length=256"),
        *("--include_path", str(tasks), "--tasks", "demo_until", "--limit", "2"),
        *("--output_path", str(tmp_path / "out")),
    ]
    env = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "datasets"), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=500)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "demo_until" in ran.stdout and "exact_match" in ran.stdout
