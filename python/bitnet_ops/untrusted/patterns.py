"""Regular expressions of strangers, and the limits within which they are matched.

An expression of a hundred bytes can take years on a name of thirty. What the lists of modules in a
config.json or adapter_config.json and the steps of a tokenizer.json need lies far within these
limits. The tokenizers library stops after ten million steps at one place of a text, which is too
late: a text has thousands of places.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from bitnet_ops.errors import BitNetError

MAX_PATTERNS = 4096  # of one list: a name for every projection of the largest models
MAX_CHARACTERS = 4000  # published tokenizers have a tenth
# Of one alternative of an expression that Python matches, on names of modules: with four `.*` a
# name of sixty characters takes half a million steps at most.
_MAX_UNBOUNDED, _MAX_CHOICES = 4, 8
# Of one alternative of an expression of a tokenizer, which is tried at every place of a text.
_MAX_WAYS = 16  # in which its options, branches and short repetitions can turn out
_MAX_LENGTHS = 4  # of a short repetition; one that has more counts as one without bounds
_MAX_REPEATS = 256
_DEEPEST = 8  # groups within groups
_QUANTIFIER = re.compile(r"([*+?])[?+]?|\{(\d*)(,?)(\d*)\}\??")
_GROUP = re.compile(r"\((?:\?(?:[ims-]*:|<?[=!]|>|<\w+>|[ims-]+(?=\)))|(?!\?))")
_ESCAPE = re.compile(r"\\(?:[pPxuN]\{[^}]*\}|.)?", re.DOTALL)


class PatternError(BitNetError, ValueError):
    """An expression that is none or goes beyond a limit; the message goes on from "expected"."""


def matches(
    patterns: Sequence[str], names: Sequence[str], *, within: str = "%s"
) -> list[list[bool]]:
    """For each of `patterns`, which of `names` it matches from their start, as `re.match` does.

    `within`: an expression of ours with %s, where a pattern stands. Raises PatternError.
    """
    if len(patterns) > MAX_PATTERNS:
        raise PatternError(f"at most {MAX_PATTERNS} of them, got {len(patterns)}")
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
    inside; and in each alternative eight repetitions, options and branches, four of which may be
    without bounds. One `of_tokenizer`, which is tried at every place of a long text, may instead
    have nothing that can fail behind two repetitions without bounds, since all divisions of a
    text between them would be tried; and its options and branches at most 16 outcomes.
    """
    problem = _problem(expression, of_tokenizer)
    if problem is None and of_tokenizer:
        problem = _problem_of_tokenizer(expression)
    if problem is not None:
        raise PatternError(
            f"regular expressions that end soon, got {expression[:80]!r} with {problem}"
        )


def _problem(expression: str, of_tokenizer: bool) -> str | None:
    if len(expression) > MAX_CHARACTERS:
        return f"{len(expression)} characters, more than {MAX_CHARACTERS}"
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
        if not of_tokenizer and (unbounded > _MAX_UNBOUNDED or choices > _MAX_CHOICES):
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


class _Slow(Exception):
    """A limit that an expression of a tokenizer is beyond."""


def _problem_of_tokenizer(expression: str) -> str | None:
    try:
        _alternatives(expression, 0, 0, 0)
    except _Slow as slow:
        return str(slow)
    return None


def _alternatives(text: str, i: int, before: int, depth: int) -> tuple[int, int, int]:
    """Of the alternatives from `i` to a bracket: (end, repetitions without bounds, outcomes).

    `before`: repetitions without bounds that stand before them, in the same alternative.
    """
    if depth > _DEEPEST:
        raise _Slow(f"groups more than {_DEEPEST} deep")
    max_unbounded = unbounded = outcomes = 0
    ways = 1
    while i < len(text) and not (text[i] == ")" and depth):
        if text[i] == "|":
            max_unbounded, outcomes = max(max_unbounded, unbounded), outcomes + ways
            i, unbounded, ways = i + 1, 0, 1
            continue
        i, minimum, lengths, inner, inner_ways = _part(text, i, before + unbounded, depth)
        if minimum and before + unbounded >= 2:
            raise _Slow("what can fail behind two repetitions without bounds")
        if lengths > _MAX_LENGTHS:
            unbounded += 1
        else:
            unbounded += inner
            ways *= inner_ways + lengths - 1
        if ways > _MAX_WAYS:
            raise _Slow(f"options and branches of more than {_MAX_WAYS} outcomes")
    return i, max(max_unbounded, unbounded), outcomes + ways


def _part(text: str, i: int, before: int, depth: int) -> tuple[int, int, int, int, int]:
    """Of one part: (end, least repetitions, how many lengths), and of a group as _alternatives."""
    if text[i] == "(":
        opened = _GROUP.match(text, i)
        if opened is None:
            raise _Slow("an unusual group")
        begin = opened.end()
        i, inner, ways = _alternatives(text, begin, 0, depth + 1)
        end, minimum, lengths = _quantifier(text, i + 1)
        if minimum and inner:  # one that may be left out makes nothing before it be tried again
            _alternatives(text, begin, before, depth + 1)
        return end, minimum, lengths, inner, ways
    if text[i] == "\\" and (escape := _ESCAPE.match(text, i)):
        if escape[0] == "\\g":
            raise _Slow("a call of a group")
        i = escape.end()
    else:
        i = _end_of_class(text, i, nested=True) if text[i] == "[" else i + 1
    return *_quantifier(text, i), 0, 1


def _quantifier(text: str, i: int) -> tuple[int, int, int]:
    """(end, least, how many lengths) of the quantifier at `i`; of once if there is none."""
    found = _QUANTIFIER.match(text, i)
    if found is None:
        return i, 1, 1
    sign, low, comma, high = found.groups()
    if _QUANTIFIER.match(text, found.end()):
        raise _Slow("a repeated repetition")
    if sign:
        return found.end(), int(sign == "+"), 2 if sign == "?" else _MAX_LENGTHS + 1
    minimum = int(low or 0)
    lengths = _MAX_LENGTHS + 1 if comma and not high else int(high or minimum) - minimum + 1
    if minimum > _MAX_REPEATS:
        raise _Slow(f"more than {_MAX_REPEATS} repetitions")
    return found.end(), minimum, max(1, lengths)
