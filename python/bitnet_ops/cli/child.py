"""A server of another program that runs as a child of a command, and ends with it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence

_PATIENCE_S = 30.0  # for the requests that a server is answering when it is to end


def run_until_it_ends(words: Sequence[str], env: Mapping[str, str] | None) -> int:
    """The exit status of `words`; Ctrl-C and a kill reach it as they reach this process."""
    process = subprocess.Popen(words, env=env)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
