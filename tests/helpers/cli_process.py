"""The command line in a process of its own, with pipes or at a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from types import TracebackType

COMMAND = [sys.executable, "-m", "bitnet_ops"]
CTRL_C, CTRL_D = "\x03", "\x04"


def environment(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("BITNET_OPS_")}
    return {**kept, "OMP_NUM_THREADS": "1", **extra}


def cli(*args: str, data: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run `bitnet-ops args` with `data` on stdin."""
    return subprocess.run(
        [*COMMAND, *args], input=data, capture_output=True, timeout=300, env=environment(**env)
    )


class Terminal:
    """A process whose stdin, stdout and stderr are one pseudo-terminal that controls it."""

    def __init__(self, arguments: Sequence[str], columns: int = 100, term: str = "dumb") -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env=environment(TERM=term, INPUTRC="/dev/null"),
        )
        os.close(slave)
        self.text, self._seen = "", 0  # everything that was shown; what was waited for

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def send(self, keys: str) -> None:
        """Type `keys`; Ctrl-C a moment later, once the process waits for keys.

        Python notices a signal that comes between readline's prompt and its wait at the next key.
        """
        before, _, after = keys.partition(CTRL_C)
        if before:
            os.write(self._master, before.encode())
        if CTRL_C in keys:
            time.sleep(0.3)
            os.write(self._master, (CTRL_C + after).encode())

    def interrupt(self) -> None:
        """Ctrl-C at once, while the process works."""
        os.write(self._master, CTRL_C.encode())

    def wait_for_more(self, characters: int) -> None:
        """Until so much more is shown than what was waited for."""
        while len(self.text) - self._seen < characters:
            assert self._read(0.2), f"ended with {self.text[self._seen :]!r}"

    def wait_for(self, text: str, timeout: float = 120) -> str:
        """What is shown from here up to `text`, which must come."""
        start = self._seen
        end = time.monotonic() + timeout
        while (at := self.text.find(text, start)) < 0:
            assert time.monotonic() < end, f"no {text!r} in {self.text[start:]!r}"
            assert self._read(0.2), f"ended without {text!r}: {self.text[start:]!r}"
        self._seen = at + len(text)
        return self.text[start:at]

    def finish(self, timeout: float = 60) -> int:
        """The exit status, after the process has ended by itself."""
        end = time.monotonic() + timeout
        while self._read(0.2):
            assert time.monotonic() < end, f"still running: {self.text!r}"
        return self.process.wait(timeout)

    def _read(self, seconds: float) -> bool:
        """Take in what is there; False at the end."""
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # the other side is closed
            return False
        self.text += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)
