"""Given text stays text: special tokens written out in a conversation are read as plain text.

A template makes one text of a conversation, and `<|im_end|>` in a message looks there like that of
the template: a message could end its turn and go on as the system. So special tokens in what is
given are marked before the template sees it: their characters become private-use characters that
occur nowhere else. What is a special token afterwards is the template's. It gets another name, an
alias, the marks are taken back, and a copy of the tokenizer, to which special tokens are text and
aliases are tokens, reads the whole at once. Templates see what they know otherwise: `<think>` of
an answer, and all that is not special.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from itertools import islice
from random import SystemRandom
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from bitnet_ops.generate.chat import END_OF_THOUGHT, THINK
from bitnet_ops.generate.tokenizer_guard import TokenizerError, encoding

_WRITTEN = ("content", "reasoning_content", "reasoning", "thinking")  # whole texts of a message
_MARKS, _ALIASES = range(0xE000, 0xF900), range(0xF0000, 0xFFFFE)  # private use
_BETWEEN = "\U0010ffff"  # no character
_ALIAS = 3  # characters at least, drawn at random: nobody writes one by chance or by guessing
_LONGEST = 256  # longer tokens are not looked for in halves
_MOST_WRITTEN = 100_000  # special tokens in what is given: each takes a hundred times its length


class GivenText:
    """The special tokens of one tokenizer, and its copy that reads marked texts.

    `ends`: texts of tokens that count as special, whatever tokenizer.json says of them.
    """

    def __init__(self, backend: Backend, ends: Collection[str]) -> None:
        self._backend = backend
        self._tokens = {
            i: token
            for i, token in backend.get_added_tokens_decoder().items()
            if token.content and (token.special or token.content in ends)
        }
        self._names = sorted((t.content for t in self._tokens.values()), key=len, reverse=True)
        # letters of both cases: templates write roles in capitals
        self._pattern = re.compile("|".join(map(re.escape, self._names)), re.IGNORECASE)
        normal = backend.normalizer is not None
        self._normalized = normal and any(t.normalized for t in self._tokens.values())
        halves = [name for name in self._names if len(name) <= _LONGEST]
        self._begins = {name[:n] for name in halves for n in range(1, len(name))}
        self._ends = {name[n:] for name in halves for n in range(1, len(name))}
        self._longest_half = max(map(len, self._begins), default=0)

    def mark(self, template: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], Marks] | None:
        """`given` ("messages", "tools", options) with special tokens marked; None if it has none.

        `template`: may hold private-use characters too.
        """
        found: dict[tuple[str, bool, bool], list[tuple[int, int]]] = {}
        left = _MOST_WRITTEN

        def find(text: str, written: bool, answer: bool) -> str:
            nonlocal left
            if spans := self._spans(text, written, answer, left):
                found[text, written, answer] = spans
                left -= len(spans)
            return text

        _each_text(given, find)
        if not found:
            return None
        characters = {c for (text, *_), spans in found.items() for a, b in spans for c in text[a:b]}
        marks = Marks(characters, json.dumps(given, ensure_ascii=False) + template)

        def put(text: str, written: bool, answer: bool) -> str:
            pieces, at = [], 0
            for begin, end in sorted(found.get((text, written, answer), ())):
                pieces += [text[at:begin], marks.put(text[max(at, begin) : end])]
                at = max(at, end)
            return "".join([*pieces, text[at:]])

        return _each_text(given, put), marks

    def _spans(
        self, text: str, written: bool, answer: bool, most: int = _MOST_WRITTEN
    ) -> list[tuple[int, int]]:
        """Where characters are to be marked, in `most` places.

        written: the template may write the rest of a token directly beside this text.
        answer: thoughts may stand in it, between their tags.
        """
        if not self._names:
            return []
        matches = islice(self._pattern.finditer(text), most + 1)
        if len(spans := [match.span() for match in matches]) > most:
            raise TokenizerError(
                f"tokenizer: expected at most {_MOST_WRITTEN:,} special tokens written out in "
                "texts, got more; leave them out"
            )
        if self._normalized:
            spans += [(begin, end) for _, begin, end in self._special(text)]
        if written and text:
            if len(text) <= self._longest_half and any(text in name for name in self._names):
                spans.append((0, len(text)))
            for n in range(1, min(len(text), self._longest_half) + 1):
                if text[-n:] in self._begins:
                    spans.append((len(text) - n, len(text)))
                if text[:n] in self._ends:
                    spans.append((0, n))
        if answer:
            spans = [s for s in spans if text[slice(*s)] not in (THINK, END_OF_THOUGHT)]
        return spans

    def _special(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Special tokens that the tokenizer finds: (id, begin, end), without space around them."""
        finder, ids = self._finder
        found = encoding(finder, text, False)
        for place, (begin, end) in zip(found.ids, found.offsets, strict=True):
            if (i := ids.get(place)) is not None:
                inner = text[begin:end]
                at = begin + len(inner) - len(inner.lstrip())
                yield i, at, at + len(inner.strip()) if inner.strip() else end

    @cached_property
    def _finder(self) -> tuple[Backend, dict[int, int]]:
        """What finds added tokens alone, and the special token of each of its ids.

        To it whatever stands between two is one token: a text of marks has many thousands.
        """
        finder = Backend(WordLevel({_BETWEEN: 0}, unk_token=_BETWEEN))
        if self._backend.normalizer is not None:
            finder.normalizer = self._backend.normalizer
        added = self._backend.get_added_tokens_decoder()
        finder.add_tokens([token for _, token in sorted(added.items())])
        return finder, {finder.token_to_id(t.content): i for i, t in self._tokens.items()}

    def read(self, marked: str, marks: Marks) -> ChatText:
        """What a template made of marked texts."""
        text, tokens = marks.take_back(marked), list(self._special(marked))
        if list(self._special(text)) == tokens:  # halves of tokens that found no other half
            return ChatText(text, self._backend)
        reader, aliases, ids = self._reader
        pieces, at, same = [], 0, True
        for i, begin, end in tokens:
            alias = aliases[i]
            same = same and len(alias) == end - begin
            pieces += [marked[at:begin], alias]
            at = end
        coded = marks.take_back("".join([*pieces, marked[at:]]))
        return ChatText(text, reader, coded, ids, len(tokens), same)

    def encode(self, text: str) -> list[int]:
        """The ids of a text without special tokens."""
        backend = self._reader[0] if self._spans(text, False, False) else self._backend
        return list(encoding(backend, text, False).ids)

    @cached_property
    def _reader(self) -> tuple[Backend, dict[int, str], dict[int, int]]:
        """The copy, the alias of each special token, and the token of each alias' id."""
        text = self._backend.to_str()
        if not all(token.special for token in self._tokens.values()):
            state = json.loads(text)
            for token in state["added_tokens"]:
                token["special"] |= token["content"] in self._names
            text = json.dumps(state)
        reader = Backend.from_str(text)
        reader.encode_special_tokens = True
        draw, aliases = SystemRandom(), dict[int, str]()
        for i, token in self._tokens.items():
            name = "".join(map(chr, draw.choices(_ALIASES, k=max(_ALIAS, len(token.content)))))
            flags = ("single_word", "lstrip", "rstrip", "normalized")
            reader.add_tokens([AddedToken(name, **{f: getattr(token, f) for f in flags})])
            aliases[i] = name
        return reader, aliases, {reader.token_to_id(name): i for i, name in aliases.items()}


class Marks:
    """Private-use characters for `characters`; neither they nor their escapes are in `text`."""

    def __init__(self, characters: Collection[str], text: str) -> None:
        free = (c for c in _MARKS if chr(c) not in text and f"\\u{c:04x}" not in text)
        self._put = dict(zip(map(ord, sorted(characters)), free, strict=False))
        self._back = {mark: chr(c) for c, mark in self._put.items()}
        if len(self._put) < len(characters):
            raise TokenizerError(
                "tokenizer: expected messages that leave some private-use characters unused beside "
                "the special tokens written out in them, got all; leave them out"
            )

    def put(self, text: str) -> str:
        return text.translate(self._put)

    def take_back(self, text: str) -> str:
        """The characters themselves, also where a template has made JSON in ASCII of the marks."""
        text = text.translate(self._back)
        return re.sub(r"\\u([ef][0-9a-f]{3})", self._unescaped, text) if "\\u" in text else text

    def _unescaped(self, match: re.Match[str]) -> str:
        character = self._back.get(int(match[1], 16))
        return match[0] if character is None else json.dumps(character)[1:-1]


class ChatText:
    """A conversation as a text, and as ids in which special tokens are the template's alone."""

    def __init__(
        self,
        text: str,
        backend: Backend,
        coded: str | None = None,
        tokens: Mapping[int, int] | None = None,
        count: int = 0,
        same: bool = True,
    ) -> None:
        self.text = text
        self._backend, self._coded = backend, text if coded is None else coded
        self._tokens, self._count, self._same = tokens or {}, count, same

    def ids(self) -> list[int]:
        """The ids of the whole text; no special token is added."""
        return self._ids(self._read())

    def ids_from(self, start: int) -> list[int] | None:
        """The ids from the character `start` on, cut as the whole text is cut.

        None where a token lies across `start`, or behind it is none.
        """
        if not self._same:
            return None
        found = self._read()
        ids, offsets = self._ids(found), found.offsets
        for i, (begin, _) in enumerate(offsets):
            if begin >= start:
                return None if i > 0 and offsets[i - 1][1] > start else ids[i:]
        return None

    def _read(self) -> Any:
        return encoding(self._backend, self._coded, False)

    def _ids(self, found: Any) -> list[int]:
        ids = list(found.ids)
        if self._tokens:
            if sum(i in self._tokens for i in ids) != self._count:
                raise TokenizerError(
                    "tokenizer: expected one that leaves private-use characters as they are, got "
                    "one that changes them; leave special tokens out of messages"
                )
            return [self._tokens.get(i, i) for i in ids]
        return ids


def _each_text(given: Mapping[str, Any], do: Callable[[str, bool, bool], str]) -> dict[str, Any]:
    """`given` with do(text, written, answer) in the place of every text; keys are texts too."""

    def key(name: Any) -> Any:
        return do(name, False, False) if isinstance(name, str) else name

    def walk(value: Any, written: bool = False, answer: bool = False) -> Any:
        if isinstance(value, str):
            return do(value, written, answer)
        if isinstance(value, Mapping):
            return {key(k): walk(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [walk(item, written, answer) for item in value]
        return value

    def message(one: Mapping[str, Any]) -> dict[str, Any]:
        answer = one.get("role") == "assistant"
        return {key(k): walk(v, k in _WRITTEN, answer) for k, v in one.items()}

    rest = {name: walk(value) for name, value in given.items() if name != "messages"}
    return {**rest, "messages": [message(one) for one in given["messages"]]}
