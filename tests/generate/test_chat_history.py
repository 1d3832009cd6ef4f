"""Conversations reuse what was run: only new tokens enter the model; a full context drops turns.

Tokens are counted where they enter the model, not by the figures that the engine gives.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitnet_ops.dummy import model as dummy
from bitnet_ops.generate.chat_history import RunIds, without_oldest_turn
from bitnet_ops.generate.engine import Engine
from bitnet_ops.language_model import DEMO_DIR, LanguageModel, load
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.kv_pool import KVPool

# As most templates: the prompt ends where the answer begins, and answers are stripped.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """The demo model with a template for conversations."""
    folder = tmp_path_factory.mktemp("chat") / "demo"
    shutil.copytree(DEMO_DIR, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load(folder)


class Counted:
    """A model that counts the tokens that enter it, by step."""

    def __init__(self, model: Any) -> None:
        self._model, self.calls = model, list[int]()
        self.config = model.config

    def step(self, batch: StepBatch, pool: KVPool) -> Tensor:
        self.calls.append(len(batch.token_ids))
        logits: Tensor = self._model.step(batch, pool)
        return logits


@pytest.fixture
def counted(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    model = Counted(lm.model)
    monkeypatch.setattr(lm, "engine", Engine(model))
    yield model


def prefilled(counted: Counted, new_tokens: int) -> int:
    """Tokens of the steps before the first answer token; then forgets all."""
    found = sum(counted.calls) - (new_tokens - 1)
    counted.calls.clear()
    return found


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "seed": 3}], ids=["greedy", "hot"])
def test_only_what_is_new_is_prefilled(
    lm: LanguageModel, counted: Counted, sampling: dict[str, Any]
) -> None:
    talk = lm.chat(max_new_tokens=12, ignore_eos=True, **sampling)
    for number, text in enumerate(["In the beginning", "And Moses said", "Selah, my son"]):
        said = "".join(talk.say(text))
        assert talk.messages[-1]["content"] == said
        assert talk.last is not None and len(talk.last.generation.token_ids) == 12
        wrapped = f"user: {text}</s>assistant: "
        if number == 0:
            expected = len(lm.tokenizer.encode("<s>" + wrapped, add_special_tokens=False))
        else:  # the last token of the answer, which was never fed, and what follows the answer
            expected = 1 + len(lm.tokenizer.encode("</s>" + wrapped, add_special_tokens=False))
        assert prefilled(counted, 12) == expected
        assert talk.last.timing.prompt_tokens - talk.last.timing.reused_tokens == expected


def test_ids_that_were_run_stay_although_their_text_is_cut_otherwise(lm: LanguageModel) -> None:
    tokenizer = lm.tokenizer
    odd = [i for letter in "world" for i in tokenizer.encode(letter, add_special_tokens=False)]
    assert tokenizer.encode("world", add_special_tokens=False) != odd
    known = RunIds(tokenizer)
    messages = [{"role": "user", "content": "hello"}]
    prompt = known.encode(messages)
    known.ran(prompt, tokenizer.decode(odd), odd)
    messages += [
        {"role": "assistant", "content": tokenizer.decode(odd)},
        {"role": "user", "content": "and"},
    ]
    ids = known.encode(messages)
    assert ids[: len(prompt) + len(odd)] == [*prompt, *odd]
    tail = tokenizer.encode("</s>user: and</s>assistant: ", add_special_tokens=False)
    assert ids[len(prompt) + len(odd) :] == tail
    # what was edited is read again
    messages[1] = {"role": "assistant", "content": "no"}
    again = tokenizer.encode_chat(messages)
    assert known.encode(messages) == again


def test_answers_that_the_template_strips_are_known(lm: LanguageModel) -> None:
    known, messages = RunIds(lm.tokenizer), [{"role": "user", "content": "hello"}]
    prompt = known.encode(messages)
    answer = lm.tokenizer.encode(" a world \n", add_special_tokens=False)
    known.ran(prompt, " a world \n", answer)
    messages += [
        {"role": "assistant", "content": " a world \n"},
        {"role": "user", "content": "x"},
    ]
    assert known.encode(messages)[: len(prompt) + len(answer)] == [*prompt, *answer]


def test_an_answer_cut_by_a_stop_text_is_read_from_its_text(lm: LanguageModel) -> None:
    talk = lm.chat(max_new_tokens=40, stop="the", ignore_eos=True)
    said = "".join(talk.say("In the beginning"))
    assert talk.last is not None and lm.tokenizer.decode(talk.last.generation.token_ids) != said
    list(talk.say("And"))
    fresh = lm.tokenizer.encode_chat(talk.messages[:-1])
    assert talk.last.timing.prompt_tokens == len(fresh)


def test_a_full_context_drops_the_oldest_turns_and_goes_on(
    lm: LanguageModel, counted: Counted
) -> None:
    talk = lm.chat(max_new_tokens=30, ignore_eos=True)
    talk.messages.append({"role": "system", "content": "Speak plainly."})
    context, drops, kept = lm.config.max_position_embeddings, [], []
    for turn in range(60):
        list(talk.say(f"{turn} and the waters were upon the earth, and the people were afraid"))
        assert talk.last is not None
        assert talk.last.generation.finish_reason == "length"  # there was room for an answer
        assert talk.last.timing.prompt_tokens + 30 <= context
        drops.append(talk.dropped)
        kept.append(talk.last.timing.reused_tokens)
        assert talk.messages[0]["role"] == "system" and talk.messages[1]["role"] == "user"
    events = [i for i, n in enumerate(drops) if n]
    assert len(events) >= 2 and all(n % 2 == 0 for n in drops)
    # half of the context is made free at a time, so that most turns reuse their cache
    assert len(events) <= 6
    assert all(kept[i] > 100 for i in range(events[0] + 1, 60) if i not in events)
    assert len(talk.messages) + sum(drops) == 1 + 2 * 60


def test_a_message_longer_than_the_context_costs_nothing(lm: LanguageModel) -> None:
    talk = lm.chat(max_new_tokens=4)
    list(talk.say("In the beginning"))
    before = list(talk.messages)
    with pytest.raises(ValueError, match="at most 1024 tokens"):
        talk.say("word " * 2000)
    assert talk.messages == before


def test_the_oldest_turn_goes_with_its_answers() -> None:
    def message(role: str) -> dict[str, str]:
        return {"role": role, "content": "x"}

    turn = [message("user"), message("assistant"), message("tool")]
    system = [message("system")]
    assert without_oldest_turn([*system, *turn, *turn]) == [*system, *turn]
    assert without_oldest_turn([*system, *turn]) is None
    assert without_oldest_turn(system) is None


def test_the_tokens_are_those_of_a_fresh_run(tmp_path: Path) -> None:
    dummy.write("tiny", tmp_path / "d", seed=2)
    lm = load(tmp_path / "d")
    talk = lm.chat(max_new_tokens=9)
    for text in ("one", "two", "three"):
        list(talk.say(text))
        assert talk.last is not None
        prompt = talk.last._run._prompts[0]
        with torch.inference_mode():
            fresh = Engine(lm.model).generate([prompt], limits=talk._request.limits)[0].token_ids
        assert talk.last.generation.token_ids == fresh
