"""Chat: templates render as in transformers and hostile ones end; conversations reuse what was run.

Every hostile template is tried with its cost bounded by the test's own limits of time and memory.
Tokens are counted where they enter the model, not by the figures that the engine gives.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from bitnet_ops.dummy import model as dummy
from bitnet_ops.generate import chat
from bitnet_ops.generate.chat import (
    ChatTemplateError,
    opened_thought,
    render,
    whole_answer,
    without_oldest_turn,
)
from bitnet_ops.generate.engine import Engine
from bitnet_ops.generate.run_ids import RunIds
from bitnet_ops.generate.tokenizer import Tokenizer
from bitnet_ops.language_model import DEMO_DIR, LanguageModel, load
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.untrusted import bounded
from bitnet_ops.untrusted.bounded import (
    BoundedProcess,
    ChildError,
    LimitError,
    ProcessError,
    interpreter,
)
from chat_templates import BOMBS, STYLES

DEMO = Path(__file__).resolve().parents[1] / "data" / "demo-model"
CALL = {"function": {"name": "add", "arguments": {"a": 1, "b": [2.5, None, "ü<&>"]}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "Hi <b>\u2028 & 'you' \"there\" 👍🏽"}],
    "turns": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "2 + 2?\n"},
        {"role": "assistant", "content": "<think>\nsum\n</think>\n\n Four "},
        {"role": "user", "content": "Sûr ?"},
    ],
    "an answer last": [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>sum</think>Four"},
    ],
    "a call": [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"sum": 4}'},
        {"role": "assistant", "content": "Four"},
    ],
    "no alternation": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
}


@pytest.fixture(scope="module")
def theirs() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DEMO)


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("style", STYLES)
def test_styles_of_published_models_render_as_in_transformers(
    style: str, chat: str, prompt: bool, theirs: Any
) -> None:
    template = STYLES[style]
    tokens = {"bos_token": theirs.bos_token, "eos_token": theirs.eos_token}
    try:
        expected = theirs.apply_chat_template(
            CHATS[chat], chat_template=template, tokenize=False, add_generation_prompt=prompt
        )
    except Exception as error:
        with pytest.raises(ChatTemplateError) as caught:
            render(template, CHATS[chat], prompt, tokens)
        assert str(error) in str(caught.value)
        return
    assert expected and render(template, CHATS[chat], prompt, tokens) == expected


@pytest.mark.parametrize("effort", [None, "low", "medium", "xhigh", "wild"])
@pytest.mark.parametrize("thinking", [None, True, False])
def test_options_reach_the_template_as_in_transformers(
    theirs: Any, thinking: bool | None, effort: str | None
) -> None:
    given = {"enable_thinking": thinking, "reasoning_effort": effort}
    options = {name: value for name, value in given.items() if value is not None}
    asked = {"chat_template": STYLES["qwen35"], "tokenize": False, "add_generation_prompt": True}
    if effort == "wild":
        with pytest.raises(ChatTemplateError, match="rejects: reasoning_effort must be low, .* wi"):
            render(STYLES["qwen35"], CHATS["turns"], True, {}, options)
        return
    text = render(STYLES["qwen35"], CHATS["turns"], True, {}, options)
    assert text == theirs.apply_chat_template(CHATS["turns"], **asked, **options)
    assert text.endswith("<think>\n\n</think>\n\n" if thinking is False else "<think>\n")
    assert ("Think long." in text) == (effort in (None, "xhigh"))
    assert "sum" not in text  # the thought of the turn before


@pytest.mark.parametrize(
    ("style", "options", "words"),
    [
        ("llama", {"enable_thinking": True}, "got enable_thinking, which it never mentions"),
        ("qwen", {"enable": True}, "got enable, which it never mentions"),
        ("qwen", {"messages": []}, "the template's own options, got 'messages'"),
        ("qwen", {5: 1}, "the template's own options, got 5"),
        ("qwen", {"enable_thinking": b"x"}, "messages and options of texts, numbers"),
        ("qwen", ["enable_thinking"], "a dict of the template's variables, got a list"),
    ],
)
def test_options_that_no_template_reads(style: str, options: Any, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        render(STYLES[style], CHATS["turns"], True, {}, options)


def test_some_chats_render_and_some_are_rejected(theirs: Any) -> None:
    """What the test above compares is not rejections alone."""
    for style, template in STYLES.items():
        tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        assert "2 + 2?" in render(template, CHATS["turns"], True, tokens), style
    with pytest.raises(ChatTemplateError, match="rejects: roles must alternate"):
        render(STYLES["mistral"], CHATS["no alternation"], True, {"bos_token": "<s>"})


# One process, so that its children are the templates' alone; a line of JSON for each.
_TRY = """
import json, resource, time
from bitnet_ops.generate.chat import ChatTemplateError, render
from chat_templates import BOMBS
for name, (template, _) in BOMBS.items():
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        said = render(template, [{"role": "user", "content": "hi"}], True, {})
        kind = "rendered"
    except ChatTemplateError as error:
        said, kind = str(error), "rejected"
    spent = time.process_time() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    again = render("{{ messages[0].content }}", [{"role": "u", "content": "x"}], True, {})
    print(json.dumps([name, kind, said[:2000], spent, grown, child, again]), flush=True)
"""


@pytest.fixture(scope="module")
def hostile() -> dict[str, list[Any]]:
    """By template: kind, message, seconds and KiB of the process, KiB of the largest child."""
    helpers = Path(__file__).resolve().parents[1] / "helpers"
    environment = {**os.environ, "PYTHONPATH": str(helpers)}
    done = subprocess.run(
        [sys.executable, "-c", _TRY], capture_output=True, text=True, env=environment, timeout=500
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: rest for name, *rest in rows}


@pytest.mark.parametrize("name", BOMBS)
def test_hostile_templates_end_in_one_line(name: str, hostile: dict[str, list[Any]]) -> None:
    kind, message, seconds, grown, child, again = hostile[name]
    assert kind == "rejected" and re.search(BOMBS[name][1], message), message
    assert len(message) < 800 and "\n" not in message
    assert seconds < 2, "the work is the child's"
    assert grown < 200 << 10
    assert child < 2 << 20 or sys.platform != "linux", "a child had gigabytes"
    assert again == "x"


def test_the_file_of_a_hostile_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    config = {"chat_template": BOMBS["nested loops"][0]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ChatTemplateError, match="to end, with a text, got no end within 2 s"):
        Tokenizer.from_dir(tmp_path).render_chat(CHATS["turns"])


def test_contents_are_texts_or_lists_of_texts() -> None:
    tokenizer = Tokenizer.from_dir(DEMO)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"

    def rendered(content: Any, **more: Any) -> str:
        return tokenizer.render_chat([{"role": "user", "content": content, **more}])

    parts = [{"type": "text", "text": "two"}, {"type": "text", "text": "lines"}]
    assert rendered("one") == "<one>" and rendered(parts) == "<two\nlines>"
    assert rendered([]) == "<>" and rendered(None, tool_calls=[{}]) == "<None>"
    for bad in (None, 5, {"text": "x"}, [{"type": "image", "image": "x"}], ["x"], b"x"):
        with pytest.raises(ChatTemplateError, match="a content as a text, or a list of"):
            rendered(bad)


def test_contents_that_are_no_json_are_rejected() -> None:
    with pytest.raises(ChatTemplateError, match="texts, numbers, lists and dicts, got: "):
        render("x", [{"role": "user", "content": b"bytes"}], True, {})


def test_lone_surrogates_and_nulls_pass_through() -> None:
    text = "a\ud800\x00\x1b[0m"
    assert render("{{ messages[0].content }}", [{"role": "u", "content": text}], True, {}) == text


# The process ----------------------------------------------------------------------------------


def test_threads_take_turns() -> None:
    results: dict[int, str] = {}

    def work(number: int) -> None:
        for _ in range(20):
            chat = [{"role": "user", "content": f"number {number}"}]
            results[number] = render("{{ messages[0].content }}", chat, True, {})
            assert results[number] == f"number {number}"

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: f"number {i}" for i in range(8)}


def test_a_fork_has_a_child_of_its_own() -> None:
    chat = [{"role": "user", "content": "x"}]
    assert render("{{ messages[0].content }}", chat, True, {}) == "x"
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if render("fork", chat, True, {}) == "fork" else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert render("parent", chat, True, {}) == "parent"


def test_a_child_that_dies_is_replaced() -> None:
    process = BoundedProcess(64 << 20)
    assert process.call(2.0, template="a", variables={}) == "a"
    assert process._child is not None
    process._child.kill()
    with pytest.raises(LimitError, match="no answer"):
        process.call(2.0, template="a", variables={})
    assert process.call(2.0, template="b", variables={}) == "b"
    with pytest.raises(ChildError, match="no"):
        process.call(2.0, template="{{ raise_exception('no') }}", variables={})
    process.close()
    assert process._child is None


@pytest.mark.parametrize(
    ("executable", "frozen", "words"),
    [
        (None, False, "sys.executable ''"),
        ("", False, "sys.executable ''"),
        ("/bin/sh", False, "sys.executable '/bin/sh'"),  # an application that embeds Python
        ("/no/such/python", False, "sys.executable '/no/such/python'"),
        (sys.executable, True, "a frozen application"),
    ],
)
def test_no_python_to_be_had(
    monkeypatch: pytest.MonkeyPatch, executable: str | None, frozen: bool, words: str
) -> None:
    """Nothing is started, and the template is not blamed."""
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "exec_prefix", "/no/such")
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(chat, "_process", BoundedProcess(64 << 20))
    with pytest.raises(ChatTemplateError, match=f"a process of Python .*{words}") as caught:
        chat.render("a", [], True, {})
    assert "hostile" not in str(caught.value)


def test_an_embedded_python_is_found_beside_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    assert os.path.samefile(interpreter(), sys.exec_prefix + "/bin/python3")


def test_a_child_that_cannot_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bounded, "_SCRIPT", tmp_path / "gone.py")
    process = BoundedProcess(64 << 20)
    with pytest.raises(ProcessError, match="ended at its start"):
        process.call(2.0, template="a", variables={})
    assert process._child is None


def test_the_child_ends_with_its_parent_and_is_silent() -> None:
    code = (
        "from bitnet_ops.generate import chat as c\n"
        "c.render('x', [], True, {})\nprint(c._process._child.pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


# Conversations --------------------------------------------------------------------------------

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
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')  # greedy
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
    talk = lm.chat(max_new_tokens=12, ignore_eos=True, speculation="off", **sampling)
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


@pytest.mark.parametrize(
    ("prompt", "answer", "held"),
    [
        ("assistant\n<think>\n", "sum\n</think>\n\nFour", "<think>\nsum\n</think>\n\nFour"),
        ("assistant\n<think>\n", "su", "<think>\nsu\n</think>\n\n"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Four", "Four"),
        ("<think> is a tag\nassistant: ", "Four", "Four"),
        ("assistant: ", "\n<think>sum</think>Four", "\n<think>sum</think>Four"),
        ("assistant: ", "<think>su", "<think>su\n</think>\n\n"),
        ("assistant: ", "The tag <think> opens", "The tag <think> opens"),
    ],
)  # fmt: skip
def test_a_history_holds_whole_thoughts(prompt: str, answer: str, held: str) -> None:
    assert whole_answer(opened_thought(prompt), answer) == held


@pytest.mark.parametrize("thinking", [True, False])
def test_thoughts_of_earlier_turns_are_not_run_again(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch, thinking: bool
) -> None:
    monkeypatch.setattr(lm.tokenizer, "chat_template", STYLES["qwen35"])
    options = {"enable_thinking": thinking, "reasoning_effort": "medium"}
    talk = lm.chat(max_new_tokens=9, ignore_eos=True, chat_template_kwargs=options)
    first = "".join(talk.say("In the beginning"))
    said = talk.messages[-1]["content"]
    assert first and said == (f"<think>\n{first.rstrip()}\n</think>\n\n" if thinking else first)
    assert talk.opening == ("<think>\n" if thinking else "")
    list(talk.say("And"))
    assert talk.last is not None
    (request,) = talk.last._run._requests
    tail = "<think>\n" if thinking else "<think>\n\n</think>\n\n"
    kept = "" if thinking else first.strip()
    expected = (
        "<|im_start|>user\nIn the beginning<|im_end|>\n"
        f"<|im_start|>assistant\n{kept}<|im_end|>\n"
        f"<|im_start|>user\nAnd<|im_end|>\n<|im_start|>assistant\n{tail}"
    )
    run = lm.tokenizer.decode(request.ids[: request.prompt_tokens].tolist())
    assert run == expected


def test_the_tokens_are_those_of_a_fresh_run(tmp_path: Path) -> None:
    dummy.write("tiny", tmp_path / "d", seed=2)
    lm = load(tmp_path / "d")
    talk = lm.chat(max_new_tokens=9)
    for text in ("one", "two", "three"):
        list(talk.say(text))
        assert talk.last is not None
        (request,) = talk.last._run._requests
        prompt = request.ids[: request.prompt_tokens].tolist()
        with torch.inference_mode():
            fresh = Engine(lm.model).generate([prompt], limits=talk._request.limits)[0].token_ids
        assert talk.last.generation.token_ids == fresh
