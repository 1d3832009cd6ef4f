"""The error of a file format: a sentence for people and a short code for tests and scripts.

It must not know any format, nor which codes there are.
"""

from __future__ import annotations


class CodedError(ValueError):
    """`code` is the rule's short name, `message` the line for people; str() is both."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"
