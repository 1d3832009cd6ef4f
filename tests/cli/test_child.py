"""A server that is a command's child: its status is the command's, and it ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from bitnet_ops.cli.child import run_until_it_ends

PARENT = """
import sys
from bitnet_ops.cli.child import run_until_it_ends
child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
sys.exit(run_until_it_ends([sys.executable, "-c", child], None) % 256)
"""


@pytest.fixture(autouse=True)
def handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("status", [0, 7])
def test_its_status_is_handed_on(status):
    code = f"import os, sys; sys.exit({status} if os.environ['GIVEN'] == '1' else 9)"
    env = {**os.environ, "GIVEN": "1"}
    assert run_until_it_ends([sys.executable, "-c", code], env) == status


def test_a_kill_of_the_command_ends_it():
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(60) == -signal.SIGTERM % 256
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the child is still there")
