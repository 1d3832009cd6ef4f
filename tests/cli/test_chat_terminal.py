"""`bitnet-ops chat` as somebody at a terminal meets it: keys, commands, several lines; scripts."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitnet_ops.cli.chat import _thoughts_apart
from bitnet_ops.language_model import DEMO_DIR
from chat_templates import STYLES
from cli_process import COMMAND, CTRL_C, CTRL_D, Terminal, cli, environment

PROMPT = "\n> "


def chat(*arguments: str) -> Terminal:
    terminal = Terminal(["chat", "-n", "8", *arguments])
    terminal.wait_for("/help lists the commands")
    terminal.wait_for("> ")
    return terminal


def test_ctrl_c_at_the_prompt_clears_the_line_and_twice_leaves() -> None:
    with chat() as terminal:
        terminal.send("never sent" + CTRL_C)
        terminal.wait_for("Ctrl-C again")
        terminal.wait_for(PROMPT)
        terminal.send("/help\n")  # the half line before is gone, or this would be a message
        terminal.wait_for("/reset ")
        terminal.wait_for(PROMPT)
        terminal.send(CTRL_C)
        terminal.wait_for("Ctrl-C again")
        terminal.send(CTRL_C)
        assert terminal.finish() == 0
        assert "Traceback" not in terminal.text


def test_ctrl_d_leaves() -> None:
    with chat() as terminal:
        terminal.send(CTRL_D)
        assert terminal.finish() == 0


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on() -> None:
    with Terminal(["chat", "-n", "1000", "--temp", "1", "--seed", "1", "--stats"]) as terminal:
        terminal.wait_for("> ")
        ends = []
        for message in ("In the beginning\n", "And Moses\n"):
            terminal.send(message)
            terminal.wait_for(message)
            terminal.wait_for_more(20)
            terminal.interrupt()
            terminal.wait_for("ended: ")
            ends.append(terminal.wait_for("\n"))
            terminal.wait_for("> ")
            if "interrupted" not in ends[-1]:  # the answer was faster: the key meets the prompt
                terminal.wait_for(PROMPT)
        assert "it was interrupted" in ends
        terminal.send("/exit\n")
        assert terminal.finish() == 0
        assert "Traceback" not in terminal.text


@pytest.mark.parametrize(
    "typed",
    ['"""And God\nsaid unto"""\n', "And God\\\nsaid unto\n", '"""\nAnd God\nsaid unto\n"""\n'],
)
@pytest.mark.sampled(1)
def test_a_message_of_several_lines_is_one_message(typed: str) -> None:
    expected = cli("chat", "--plain", "-n", "8", "--temp", "0", data=typed.encode())
    whole = cli("generate", "And God\nsaid unto", "-n", "8")
    assert expected.returncode == 0, expected.stderr
    assert whole.stdout.decode() == "And God\nsaid unto" + expected.stdout.decode()
    with chat("--plain", "--temp", "0") as terminal:
        terminal.send(typed)
        terminal.wait_for(expected.stdout.decode().strip("\n"))
        terminal.wait_for(PROMPT)
        assert terminal.text.count(". ") >= 1  # the prompt of a line that goes on
        terminal.send(CTRL_D)
        assert terminal.finish() == 0


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with a template that begins answers in thought."""
    folder = tmp_path_factory.mktemp("thinker") / "m"
    shutil.copytree(DEMO_DIR, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = STYLES["qwen35"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_thoughts_are_dimmed_on_a_terminal_alone(thinker: Path) -> None:
    options = (str(thinker), "-n", "8", "--temp", "0")
    with Terminal(["chat", *options], term="vt100") as terminal:
        terminal.wait_for("> ")
        terminal.send("In the beginning\n")
        terminal.wait_for("\x1b[2m<think>")
        terminal.wait_for("\x1b[22m")
        terminal.wait_for("> ")
        terminal.send(CTRL_D)
        assert terminal.finish() == 0
    piped = cli("chat", *options, data=b"In the beginning\n")
    alone = cli("generate", *options[:1], "In the beginning", "--chat", *options[1:])
    assert piped.returncode == alone.returncode == 0, piped.stderr + alone.stderr
    assert piped.stdout == alone.stdout and piped.stdout.startswith(b"<think>\n")
    plain = cli("chat", *options, "--no-enable-thinking", data=b"In the beginning\n")
    assert plain.returncode == 0 and b"<think>" not in plain.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["chat", "--reasoning-effort", "wild"], "rejects: reasoning_effort must be low, medium"),
        (["generate", "Hi", "--chat", "--reasoning-effort", "wild"], "rejects: reasoning_effort"),
        (["generate", "Hi", "--no-enable-thinking"], "generate: expected --enable-thinking only "
         "with a chat template; add --chat"),
        (["chat", "--plain", "--reasoning-effort", "low"], "chat: expected --reasoning-effort only "
         "with a chat template; leave --plain out"),
    ],
)  # fmt: skip
def test_options_of_a_template_that_do_not_fit(
    thinker: Path, arguments: list[str], words: str
) -> None:
    done = cli(*arguments, "-m", str(thinker))
    errors = done.stderr.decode().strip().splitlines()
    assert done.returncode != 0 and len(errors) == 1 and words in errors[0]


def test_an_option_that_a_template_never_mentions_is_refused() -> None:
    done = cli("chat", "--enable-thinking")
    assert "enable_thinking, which it never mentions; leave it out" in done.stderr.decode()
    assert done.returncode == 1


@given(cuts=st.lists(st.integers(0, 40), max_size=12), opened=st.booleans())
def test_thoughts_end_where_their_tag_ends(cuts: list[int], opened: bool) -> None:
    thought, answer = " <think>a </ b</thin\n</think>", "\n\nc <think> d</think>"
    opening = thought[:9] if opened else ""
    text = (thought + answer)[len(opening) :]
    ends = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(ends)]
    parts = list(_thoughts_apart(opening, iter(pieces)))
    assert "".join(part for part, dim in parts if dim) == thought
    assert "".join(part for part, dim in parts if not dim) == answer


def test_unknown_commands_are_errors_and_not_sent() -> None:
    done = cli("chat", "-n", "4", data=b"/rest\n/reset\n//rest\n")
    lines = done.stderr.decode().splitlines()
    errors = [line for line in lines if line.startswith("bitnet-ops: error: ")]
    assert len(errors) == 1
    assert "chat: expected a command, got /rest; did you mean /reset?" in errors[0]
    assert len(done.stdout.decode().splitlines()) == 1  # the answer to //rest alone
    assert done.returncode == 1  # in a script a failed turn is not lost


def test_help_and_its_aliases() -> None:
    done = cli("chat", data=b"/help\n/?\n/quit\nnever\n")
    text = done.stderr.decode()
    assert text.count("/reset   forget the conversation") == 2
    assert "Ctrl-C" in text and "/exit" in text
    assert done.returncode == 0 and done.stdout == b""


def test_a_conversation_is_answered_again_saved_and_loaded(tmp_path: Path) -> None:
    """The file is a body that the server takes, here without the message of the system at last."""
    file, other = tmp_path / "talk.json", tmp_path / "notes.txt"
    other.write_text("my notes")
    (tmp_path / "wrong.json").write_text('{"messages": [{"role": "user", "content": 1}]}')
    typed = [
        "/regen",  # nothing yet
        "/system Be brief\\",
        "and kind",
        "And God said unto",
        "/regen",
        f"/save {file}",
        "/reset",
        f"/load {file}",
        f"/save {tmp_path / 'before.json'}",
        "/system",
        f"/save {file}",
        f"/save {other}",
        f"/load {other}",
        f"/load {tmp_path / 'wrong.json'}",
        "/save",
        "/reset all",
        f"/load {tmp_path / 'none.json'}",
    ]
    done = cli("chat", "-n", "6", data="\n".join(typed).encode())
    first, again = done.stdout.decode().splitlines()
    errors = [line for line in done.stderr.decode().splitlines() if "error: " in line]
    expected = ["regenerate: expected a message", "got ", "chat: expected valid JSON",
                "chat: expected messages with a role", "chat: expected /save FILE, got no file",
                "chat: expected /reset alone, got /reset all", "chat: expected "]  # fmt: skip
    assert len(errors) == len(expected)
    assert all(words in line for words, line in zip(expected, errors, strict=True))
    assert str(other) in errors[1] and other.read_text() == "my notes"
    assert done.returncode == 1 and done.stderr.decode().count("read 3 messages") == 1
    assert first != again  # the demo's seed is fixed, but an answer is not asked for twice
    before, saved = (json.loads((tmp_path / n).read_text()) for n in ("before.json", file.name))
    assert before["messages"][0] == {"role": "system", "content": "Be brief\nand kind"}
    assert before["messages"][1:] == saved["messages"]
    assert saved == {"model": "demo", "messages": [
        {"role": "user", "content": "And God said unto"}, {"role": "assistant", "content": again},
    ]}  # fmt: skip
    plain = cli("chat", "--plain", data=b"/regen\n/help\n/reset\n")
    assert b"expected /regen only with a chat template, got --plain" in plain.stderr


def test_a_byte_that_is_no_utf8_ends_the_turn_alone() -> None:
    done = cli("chat", "-n", "2", data=b"ab\xff\nAnd God\n")
    assert b"got the byte 0xff at offset 2" in done.stderr
    assert len(done.stdout.splitlines()) == 1 and done.returncode == 1


def test_ctrl_c_in_a_script_is_130() -> None:
    process = subprocess.Popen(
        [*COMMAND, "chat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdin and process.stderr
    while b"/help" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_the_demo_is_sampled_with_a_fixed_seed() -> None:
    first, again = (cli("chat", "-n", "40", data=b"In the beginning\n") for _ in "ab")
    greedy = cli("chat", "-n", "40", "--temp", "0", data=b"In the beginning\n")
    assert first.stdout == again.stdout != greedy.stdout
    other = cli("chat", "-n", "40", "--temp", "0.7", "--seed", "5", data=b"In the beginning\n")
    assert other.stdout not in (first.stdout, greedy.stdout)
