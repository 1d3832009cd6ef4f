"""The exception above every exception of this package, and the words of its messages."""

from __future__ import annotations

import importlib.metadata
import re
import unicodedata

# Controls, formats (which turn the direction of text round), surrogates, private use, line ends.
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_OBEYED = frozenset({"Cc", "Cs"})  # by a terminal, or not to be encoded
_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: object, *, prose: bool = False) -> str:
    """`text` with everything that a terminal would obey, or could not show, as \\x1b or \\u202e.

    `prose`: text of several lines that may be of any script: line ends, tabs and characters that
    are not seen but shape others stay.
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(
        c.encode("unicode_escape").decode() if _is_escaped(c, prose) else c for c in shown
    )


def _is_escaped(c: str, prose: bool) -> bool:
    category = unicodedata.category(c)
    if prose:
        return c in _DIRECTIONS or (category in _OBEYED and c not in "\n\t")
    return category in _UNPRINTABLE


def counted(count: int, noun: str, several: str = "") -> str:
    """`1 token`, `2 tokens`; `several`: the noun's plural where it is not made by an s."""
    return f"{count} {noun if count == 1 else several or noun + 's'}"


def install(extra: str) -> str:
    """The pip command for the packages of `extra`, one of pyproject.toml's optional dependencies.

    It names these themselves: the same words are right in a clone and where a wheel was installed.
    A copy that pip did not install has no metadata; its remedy is a clone.
    """
    try:
        found = importlib.metadata.requires("bitnet-ops") or ()
    except importlib.metadata.PackageNotFoundError:
        return f"pip install '.[{extra}]' in a clone"
    rows = (row.partition(";") for row in found)
    mark = re.compile(rf"extra == ['\"]{extra}['\"]")
    packages = [name.strip() for name, _, condition in rows if mark.search(condition)]
    return " ".join(["pip install", *(f"'{p}'" if re.search("[<>=]", p) else p for p in packages)])


class BitNetError(Exception):
    """What bitnet_ops raises on purpose: one line, `<who>: expected ..., got ...; remedy`.

    Each is also a ValueError or RuntimeError, whichever it resembles most. Names out of a file
    cannot reach a terminal unescaped.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))
