"""Calls as models write them, read piece by piece: a name, then arguments as JSON.

A reader gets what stands behind a trigger, in pieces cut anywhere, and takes all that belongs to
the call. What it gives does not depend on the cuts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from bitnet_ops.generate.schema_rules import (
    LeftOut,
    arguments_of,
    branches,
    kinds_of,
    types_of,
    values_of,
)

_WHITE = " \t\r\n"
_KEYS = ("arguments", "parameters")


class Part(NamedTuple):
    """A part of a call: its name, which comes first, or a piece of its arguments."""

    kind: Literal["name", "arguments"]
    text: str


class CallReader:
    """One call.

    Attributes: `state`: "open", "done", or "failed" where what was read is no call; `rest`: what
    has come behind the end, or, of one that failed, all; `named`: whether a name has been given;
    `broken`: whether it went on as no call does behind its name.
    """

    def __init__(self, closing: str) -> None:
        self._closing = closing
        self.state: Literal["open", "done", "failed"] = "open"
        self.rest, self.named, self.broken = "", False, False
        self._text, self._at = "", 0  # what has come, and where reading goes on
        self._step = self._begin
        self._parts: list[Part] = []

    def push(self, text: str) -> list[Part]:
        """The parts that `text` completes."""
        self._text += text
        while self.state == "open" and self._step():
            pass
        if self.state == "open" and self._streams:  # what was said is not needed again
            self._text, self._at = self._text[self._at :], 0
        elif self.state != "open":
            self.rest = self._text[self._at :] if self.state == "done" else self._text
        parts, self._parts = self._parts, []
        return parts

    @property
    def whole(self) -> bool:
        """Whether all arguments have come; only the closing tag may be missing."""
        return not self.broken and (self.state == "done" or self._step == self._close)

    @property
    def unread(self) -> str:
        """All that has come of a call without a name."""
        return self._text

    @property
    def _streams(self) -> bool:
        return False

    # A step reads on from `_at` and says whether it got anywhere; else more text is needed.

    def _begin(self) -> bool:
        raise NotImplementedError

    def _close(self) -> bool:
        """The closing tag; where another text comes, the call has ended without."""
        self._skip()
        found = self._expect(self._closing) if self._closing else True
        if found is None:
            return False
        self.state = "done"
        return True

    def _fail(self) -> bool:
        """This is no call; one that has been named ends broken, with its closing tag."""
        if self.named:
            self._step, self.broken = self._junk, True
        else:
            self.state = "failed"
        return True

    def _junk(self) -> bool:
        end = self._text.find(self._closing, self._at) if self._closing else -1
        if end < 0:
            return False
        self._at, self.state = end + len(self._closing), "done"
        return True

    def _skip(self, more: str = "") -> None:
        white = _WHITE + more
        while self._at < len(self._text) and self._text[self._at] in white:
            self._at += 1

    def _expect(self, word: str) -> bool | None:
        """Whether `word` comes next, and is passed; None: that cannot be told yet."""
        if self._text.startswith(word, self._at):
            self._at += len(word)
            return True
        return None if word.startswith(self._text[self._at :]) else False

    def _name(self, name: str) -> None:
        self.named = True
        self._parts.append(Part("name", name))

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(Part("arguments", text))


# JSON --------------------------------------------------------------------------------------------


class JsonCall(CallReader):
    """{"name": ..., "arguments": {...}}, in any order, "parameters" for "arguments"."""

    def __init__(self, closing: str) -> None:
        super().__init__(closing)
        self._key = ""
        self._begun = 0  # where the value begins
        self._depth, self._quoted, self._escaped = 0, False, False
        self._held: str | None = None  # arguments that wait for the name
        self._given = False  # whether the arguments have been given, as far as they came

    def _begin(self) -> bool:
        self._skip()
        if self._at == len(self._text):
            return False
        return self._go(self._member) if self._expect("{") else self._fail()

    def _go(self, step: Any) -> bool:
        self._step = step
        return True

    def _member(self) -> bool:
        """A key, or the end of the object."""
        self._skip(",")
        if self._at == len(self._text):
            return False
        if self._text[self._at] == "}":
            self._at += 1
            if not self.named:
                return self._fail()
            if not self._given:
                self._say("{}")
            return self._go(self._close)
        end = self._end_of_string()
        if end is None:
            return False
        key = _loaded(self._text[self._at : end]) if end else None
        if not isinstance(key, str):
            return self._fail()
        self._key, self._at = key, end or 0
        return self._go(self._colon)

    def _end_of_string(self) -> int | None:
        """Where the string that begins here ends; None: later; 0: there is none."""
        if self._text[self._at] != '"':
            return 0
        i = self._at + 1
        while i < len(self._text):
            if self._text[i] == '"':
                return i + 1
            i += 2 if self._text[i] == "\\" else 1
        return None

    def _colon(self) -> bool:
        self._skip()
        if self._at == len(self._text):
            return False
        return self._go(self._first) if self._expect(":") else self._fail()

    def _first(self) -> bool:
        self._skip()
        if self._at == len(self._text):
            return False
        self._begun, self._depth, self._quoted, self._escaped = self._at, 0, False, False
        streamed = self._key in _KEYS and self._text[self._at] == "{"
        streamed = streamed and self.named and not self._given
        return self._go(self._object if streamed else self._value)

    @property
    def _streams(self) -> bool:
        return self._step == self._object

    def _object(self) -> bool:
        """Arguments, as they come."""
        begin, self._given = self._at, True
        over = self._scan()
        self._say(self._text[begin : self._at])
        return self._go(self._member) if over else False

    def _value(self) -> bool:
        if not self._scan():
            return False
        text = self._text[self._begun : self._at]
        if self._key == "name":
            name = _loaded(text)
            if not isinstance(name, str) or self.named:
                return self._fail()
            self._name(name)
            if self._held is not None:
                self._say(self._held)
                self._given = True
        elif self._key in _KEYS and not self._given:
            found = _loaded(text)
            if isinstance(found, str):  # an object within a string
                text, found = found, _loaded(found)
            text = "{}" if found is None else text
            if not isinstance(found, dict | None):
                return self._fail()
            if self.named:
                self._say(text)
                self._given = True
            else:
                self._held = text
        return self._go(self._member)

    def _scan(self) -> bool:
        """Read on in a value; whether it is over."""
        while self._at < len(self._text):
            c = self._text[self._at]
            if self._quoted:
                self._at += 1
                if self._escaped:
                    self._escaped = False
                elif c == "\\":
                    self._escaped = True
                elif c == '"':
                    self._quoted = False
                    if not self._depth:
                        return True
                continue
            if not self._depth and c in ",}" + _WHITE:
                return True
            self._at += 1
            if c == '"':
                self._quoted = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return True
        return False


def _loaded(text: str) -> Any:
    """The value of a JSON text; `_loaded` itself, which is no such value, where it is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _loaded


def _refuse(text: str) -> None:
    raise ValueError(text)


# XML ---------------------------------------------------------------------------------------------


class XmlCall(CallReader):
    """<function=NAME>, a <parameter=NAME> for each argument, </function>.

    `schemas`: of the arguments of each function, which say what is text and what JSON.
    """

    def __init__(self, closing: str, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(closing)
        self._schemas = schemas
        self._arguments: Mapping[str, Any] = {}  # the schema of this function's,
        self._named: Mapping[str, Any] = {}  # of each argument that it names,
        self._others: Any = True  # and of others
        self._seen: set[str] = set()  # names of parameters
        self._value = value_of(True, {})  # of the newest one,
        self._skipped = False  # and whether it is a second of its name

    def _begin(self) -> bool:
        self._skip()
        found = self._expect("<function=") if self._at < len(self._text) else None
        if not found:
            return False if found is None else self._fail()
        self._step = self._function
        return True

    def _function(self) -> bool:
        name = self._up_to(">")
        if name is None:
            return False
        if not name.strip() or "\n" in name:
            return self._fail()
        self._arguments = self._schemas.get(name.strip()) or {}
        self._named, _, self._others = arguments_of(self._arguments)
        self._name(name.strip())
        self._step = self._next
        return True

    def _up_to(self, word: str) -> str | None:
        end = self._text.find(word, self._at)
        if end < 0:
            return None
        text, self._at = self._text[self._at : end], end + len(word)
        return text

    def _next(self) -> bool:
        """A parameter, or the end."""
        self._skip()
        if self._at == len(self._text):
            return False
        opened = self._expect("<parameter=")
        closed = False if opened else self._expect("</function>")
        ended = False if opened or closed else self._ends_early()
        if opened:
            self._step = self._parameter
        elif closed or ended:
            self._say("}" if self._seen else "{}")
            self._step = self._close
        elif None in (opened, closed, ended):
            return False
        else:
            return self._fail()
        return True

    def _ends_early(self) -> bool | None:
        """Whether the call is closed without its function's end; the tag is left there."""
        at = self._at
        found = self._expect(self._closing)
        self._at = at
        return found

    def _parameter(self) -> bool:
        name = self._up_to(">")
        if name is None:
            return False
        schema = self._named.get(name, self._others or True)
        self._value = value_of(schema, self._arguments)
        self._skipped = name in self._seen
        if not self._skipped:
            self._say(("{" if not self._seen else ", ") + json.dumps(name, ensure_ascii=False))
            self._say(": ")
        self._seen.add(name)
        self._step = self._lead
        return True

    def _lead(self) -> bool:
        """The line end behind the tag."""
        if self._at == len(self._text):
            return False
        self._expect("\n")
        raw = self._value.kind == "raw" and not self._skipped
        if raw:
            self._say('"')
        self._step = self._streamed if raw else self._whole
        return True

    @property
    def _streams(self) -> bool:
        return self._step == self._streamed

    def _streamed(self) -> bool:
        """A text, as it comes; the line end before its closing tag does not belong to it."""
        tag = "</parameter>"
        end = self._text.find(tag, self._at)
        if end >= 0:
            text, self._at = self._text[self._at : end], end + len(tag)
            self._say(_inside(text.removesuffix("\n")) + '"')
            self._step = self._next
            return True
        keep = overlap(self._text[self._at :], "\n" + tag) or overlap(self._text[self._at :], tag)
        text = self._text[self._at : len(self._text) - keep]
        self._at += len(text)
        self._say(_inside(text))
        return False

    def _whole(self) -> bool:
        text = self._up_to("</parameter>")
        if text is None:
            return False
        if not self._skipped:
            self._say(self._value.json_of(text.removesuffix("\n")))
        self._step = self._next
        return True


def _inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that is a beginning of `word`, and not all of it."""
    longest = min(len(text), len(word) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)


# What a value is written as -----------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """How a parameter is written between its tags.

    kind: "raw", a text as it is; "free", a text or what else the schema allows, by its looks;
    "json". kinds: of JSON values that may come. choices: texts of values that the schema names.
    rest: schemas of the others, without applicators.
    """

    kind: Literal["raw", "free", "json"]
    kinds: frozenset[str]
    choices: tuple[str, ...] = ()
    rest: tuple[Mapping[str, Any], ...] = ()

    def json_of(self, text: str) -> str:
        """The JSON of a value's text."""
        stripped = {"True": "true", "False": "false", "None": "null"}.get(
            text.strip(), text.strip()
        )
        for one in (text.strip(), stripped):
            value = _loaded(one)
            if value is _loaded or (self.kind == "free" and isinstance(value, str)):
                continue
            if not self.kinds.isdisjoint(types_of(value)):
                return one
        return json.dumps(text, ensure_ascii=False)


def value_of(schema: Any, root: Any, left_out: LeftOut | None = None) -> Value:
    """How a parameter of this schema is written; `root`: the schema in which it stands.

    left_out: gets the keywords that are not held. Raises SchemaError.
    """
    kinds, choices, rest = set[str](), list[str](), list[Mapping[str, Any]]()
    for one in branches(schema, root, left_out):
        values = values_of(one)
        if values is None:
            kinds.update(kinds_of(one))
            rest.append(one)
            continue
        for value in values:
            kinds.update(types_of(value))
            if isinstance(value, list | Mapping):
                rest.append({"type": types_of(value)[0], "const": value})
            else:
                choices.append(value if isinstance(value, str) else json.dumps(value))
    kind: Literal["raw", "free", "json"] = "raw" if kinds == {"string"} else "free"
    return Value(
        kind if "string" in kinds else "json", frozenset(kinds), tuple(choices), tuple(rest)
    )
