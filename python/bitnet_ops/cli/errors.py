"""An error as the line that the command line prints."""

from __future__ import annotations

import re

from bitnet_ops.untrusted import printable


def one_line(error: BaseException) -> str:
    """The error as one line: what went wrong, and in brackets a short word for scripts."""
    text = printable(" ".join(str(error).split()))
    if isinstance(error, KeyError | NotImplementedError | AssertionError) or not text:
        text = f"{type(error).__name__}: {text}"
    code = getattr(error, "code", None)
    if not isinstance(code, str):
        name = type(error).__name__.removeprefix("_")
        words = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z]+", name)
        code = "-".join(words).lower().removesuffix("-error")
    return text if text.endswith(f"[{code}]") else f"{text} [{code}]"
