"""The error of a file format: a sentence for people and a short code for tests and scripts.

A file chooses its names and its path may be anything, so what goes to a terminal passes `printable`
here.
"""

from __future__ import annotations

from bitnet_ops.errors import BitNetError
from bitnet_ops.untrusted import printable


class CodedError(BitNetError, ValueError):
    """`code` is the rule's short name, `message` the line for people; str() is both."""

    def __init__(self, code: str, message: str) -> None:
        message = printable(message)
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"
