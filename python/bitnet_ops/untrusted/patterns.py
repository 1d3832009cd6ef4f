"""Regular expressions of strangers, and the limits within which they are matched.

An expression of a hundred bytes can take years on a name of thirty. What the lists of modules in a
config.json or adapter_config.json and the steps of a tokenizer.json need lies far within these
limits; the tokenizers library stops besides after ten million steps at one place of a text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from bitnet_ops.errors import BitNetError

MOST_PATTERNS = 4096  # of one list: a name for every projection of the largest models
MOST_CHARACTERS = 4000  # published tokenizers have a tenth
# Of one alternative of an expression that Python matches, on names of modules: with four `.*` a
# name of sixty characters takes half a million steps at most.
_MOST_UNBOUNDED, _MOST_CHOICES = 4, 8
_ESCAPE = re.compile(r"\\(?:[pPxuN]\{[^}]*\}|.)?", re.DOTALL)


class PatternError(BitNetError, ValueError):
    """An expression that is none or goes beyond a limit; the message goes on from "expected"."""


def matches(
    patterns: Sequence[str], names: Sequence[str], *, within: str = "%s"
) -> list[list[bool]]:
    """For each of `patterns`, which of `names` it matches from their start, as `re.match` does.

    `within`: an expression of ours with %s, where a pattern stands. Raises PatternError.
    """
    if len(patterns) > MOST_PATTERNS:
        raise PatternError(f"at most {MOST_PATTERNS} of them, got {len(patterns)}")
    rows = []
    for pattern in patterns:
        check_limits(pattern)
        try:
            re.compile(pattern)  # alone: one that closes a group of `within` is none
            compiled = re.compile(within % pattern)
        except (re.error, OverflowError, RecursionError) as error:
            found = f"{pattern[:80]!r}: {error}"
            raise PatternError(f"valid regular expressions, got {found}") from None
        rows.append([compiled.match(name) is not None for name in names])
    return rows


def check_limits(expression: str, *, of_tokenizer: bool = False) -> None:
    """Raise PatternError unless `expression` ends soon on any text.

    It may have 4,000 characters, no comments, and no repeated group that repeats or branches
    inside; and, unless it is `of_tokenizer` and runs in a library with limits of its own, in each
    alternative eight repetitions, options and branches, four of which may be without bounds.
    """
    problem = _problem(expression, of_tokenizer)
    if problem is not None:
        raise PatternError(
            f"regular expressions that end soon, got {expression[:80]!r} with {problem}"
        )


def _problem(expression: str, of_tokenizer: bool) -> str | None:
    if len(expression) > MOST_CHARACTERS:
        return f"{len(expression)} characters, more than {MOST_CHARACTERS}"
    if re.search(r"\(\?(#|[a-zA-Z-]*x)", expression):
        return "comments"
    groups = [False]  # whether the open groups, the outermost first, repeat or branch
    unbounded = choices = i = 0
    while i < len(expression):
        c = expression[i]
        if c == "\\":
            found = _ESCAPE.match(expression, i)
            i = found.end() if found else i + 1
            continue
        if c == "[":
            i = _end_of_class(expression, i, nested=of_tokenizer)
            continue
        i += 1
        if c == "(":
            groups.append(False)
            i += expression[i : i + 1] == "?"  # of the group's own syntax
        elif c == ")" and len(groups) > 1:
            inside = groups.pop()
            if inside and expression[i : i + 1] in ("*", "+", "{"):
                return "a repeated group that repeats or branches inside"
            groups[-1] |= inside
        elif c == "|" and len(groups) == 1:
            groups[0], unbounded, choices = False, 0, 0
        elif c in "*+{?|":
            if c == "?" and expression[i - 2 : i - 1] in ("*", "+", "}", "?"):
                continue  # of the quantifier before it
            choices += c != "|" or not groups[-1]  # the branches of a group are one choice
            unbounded += c in "*+{"
            groups[-1] = True
        if not of_tokenizer and (unbounded > _MOST_UNBOUNDED or choices > _MOST_CHOICES):
            return f"{choices} repetitions, options and branches in a row"
    return None


def _end_of_class(expression: str, i: int, *, nested: bool) -> int:
    """Where the class [...] that begins at `i` ends; Oniguruma's may be `nested`, Python's not."""
    depth = 0
    while i < len(expression):
        c = expression[i]
        i += 2 if c == "\\" else 1
        if c == "[" and (nested or depth == 0):
            depth += 1
            i += expression[i : i + 1] == "^"
            i += expression[i : i + 1] == "]"  # the first one is a member
        elif c == "]":
            depth -= 1
            if depth == 0:
                break
    return i
