"""The command line starts without torch, and Ctrl-C while it starts is silent.

The import of the package is another matter: it loads torch and the ops at once, as test_import.py
has it; here only that this holds for everything but the command.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from bitnet_ops.cli import COMMANDS
from cli_process import COMMAND, environment

HEAVY = ("torch", "numpy", "tokenizers", "safetensors", "jinja2", "rich")
SCRIPT = Path(sysconfig.get_path("scripts")) / "bitnet-ops"


def imported(command: list[str], *args: str) -> tuple[int, set[str], str]:
    """Exit status, the HEAVY packages that were imported, and the rest of stderr."""
    done = subprocess.run(
        [command[0], "-X", "importtime", *command[1:], *args],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
    )
    lines = done.stderr.splitlines()
    names = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "argparse" in names  # the list is there
    rest = "\n".join(line for line in lines if not line.startswith("import time:"))
    return done.returncode, names & set(HEAVY), rest


HELP = [f"{command} --help" for command in ("", *COMMANDS, "bench ops", "bench model")]
WRONG = ["generat", "generate", "generate /", "generate a b c", "generate x --tempreature 1"]
WRONG += ["generate x --top-p 3", "generate x --kv-dtype int4", "chat --plain --system x"]
WRONG += ["embed model", "convert a b --text c", "dummy 7b x", "bench oops"]
# One process for all: what a line imports is there for those after it.
EACH = """
import contextlib, io, json, sys
lines, heavy = json.loads(sys.argv[1]), json.loads(sys.argv[2])
sys.argv = ["bitnet-ops"]  # as the command itself is started
from bitnet_ops.cli import main
for line in lines:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(line.split())
        except SystemExit as end:
            status = end.code
    found = [name for name in heavy if name in sys.modules]
    print(json.dumps([line, status, found, err.getvalue()]))
"""


def test_help_and_wrong_usage_import_nothing_heavy() -> None:
    lines = [*HELP, "--version", *WRONG]
    command = [sys.executable, "-c", EACH, json.dumps(lines), json.dumps(HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line, *_ in answers] == lines
    for line, status, heavy, error in answers:
        assert heavy == [], line
        if line in WRONG:
            assert status == 2 and error.startswith("bitnet-ops: error: ")
            assert error.endswith(" [usage]\n") and error.count("\n") == 1
        else:
            assert status == 0 and error == "", line


def test_the_command_itself_imports_nothing_heavy() -> None:
    assert imported(COMMAND, "--help") == (0, set(), "")
    assert imported(COMMAND, "generate")[:2] == (2, set())


@pytest.mark.skipif(
    not SCRIPT.is_file(), reason="the console script is not installed beside this Python"
)
def test_the_console_script_starts_as_quickly() -> None:
    assert imported([sys.executable, str(SCRIPT)], "--help") == (0, set(), "")
    assert imported([sys.executable, str(SCRIPT)], "generate")[:2] == (2, set())


@pytest.mark.parametrize("order", ["import torch, bitnet_ops", "import bitnet_ops, torch"])
@pytest.mark.parametrize("name", ["-c", "bitnet-ops-tool.py", "other.py"])
@pytest.mark.sampled(2)
def test_everybody_else_gets_the_ops_by_importing(name: str, order: str, tmp_path: Path) -> None:
    code = f"{order}\nprint(torch.ops.bitnet.gemv.default, bitnet_ops.ops.__name__)\n"
    script = [name, code]
    if name != "-c":
        (tmp_path / name).write_text(code)
        script = [str(tmp_path / name)]
    done = subprocess.run([sys.executable, *script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "bitnet.gemv.default bitnet_ops.ops\n", done.stderr


def test_a_tool_inside_the_package_gets_them_as_well() -> None:
    """`python -m bitnet_ops.cli.doctor` and the like import what they need themselves."""
    done = subprocess.run(
        [sys.executable, "-m", "bitnet_ops.cli.doctor", "--json"], capture_output=True, timeout=120
    )
    assert b'"selected"' in done.stdout and done.stderr == b""


def started(*, ignored: bool = False) -> subprocess.Popen[bytes]:
    """A process that is in the midst of importing torch."""
    process = subprocess.Popen(
        [*COMMAND, "generate", "In the beginning", "-n", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignored else None,
    )
    maps = Path(f"/proc/{process.pid}/maps")
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        if "libtorch" in maps.read_text():
            return process
        time.sleep(0.002)
    raise AssertionError("torch was never mapped")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.parametrize("delay", [0, 0.1, 0.4])
def test_ctrl_c_while_torch_is_imported_is_silent(delay: float) -> None:
    process = started()
    time.sleep(delay)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    if process.returncode != 0:  # 0: a fast machine was done before
        assert (process.returncode, err) == (130, b""), err
        assert b"In the" not in out or out.endswith(b"\n")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_ctrl_c_that_the_parent_ignores_stays_ignored() -> None:
    process = started(ignored=True)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and out.startswith(b"In the beginning"), err
