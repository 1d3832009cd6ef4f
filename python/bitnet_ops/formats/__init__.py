"""Checkpoint formats: read and write bytes, nothing else; one module a format.

`sglbitnt` is the project's own model file (FORMAT.md).
"""

from __future__ import annotations

from bitnet_ops.errors import BitNetError, printable


class CodedError(BitNetError, ValueError):
    """`code` is the rule's short name, `message` the line for people; str() is both."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, printable(message)

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"
