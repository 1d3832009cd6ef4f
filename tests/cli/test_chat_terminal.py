"""`bitnet-ops chat` as somebody at a terminal meets it: keys, commands, several lines; scripts."""

from __future__ import annotations

import signal
import subprocess

import pytest

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
