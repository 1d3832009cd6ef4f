"""Templates in the styles of published models render as in transformers; hostile ones end.

Every hostile template is tried with its cost bounded by the test's own limits of time and memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import transformers

from bitnet_ops.generate.chat_template import ChatTemplateError, render
from bitnet_ops.generate.tokenizer import Tokenizer
from bitnet_ops.untrusted.bounded import BoundedProcess, ChildError, LimitError
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
from bitnet_ops.generate.chat_template import ChatTemplateError, render
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
    process = BoundedProcess("templates", 64 << 20)
    assert process.call("render", 2.0, template="a", variables={}) == "a"
    assert process._child is not None
    process._child.kill()
    with pytest.raises(LimitError, match="no answer"):
        process.call("render", 2.0, template="a", variables={})
    assert process.call("render", 2.0, template="b", variables={}) == "b"
    with pytest.raises(ChildError, match="no"):
        process.call("render", 2.0, template="{{ raise_exception('no') }}", variables={})
    process.close()
    assert process._child is None


def test_no_process_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(LimitError, match="no process to run it in"):
        BoundedProcess("templates", 64 << 20).call("render", 2.0, template="a", variables={})


def test_the_child_ends_with_its_parent_and_is_silent() -> None:
    code = (
        "from bitnet_ops.generate import chat_template as c\n"
        "c.render('x', [], True, {})\nprint(c._process._child.pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
