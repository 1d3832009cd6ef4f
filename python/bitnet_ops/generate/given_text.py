"""Given text stays text: special tokens written out in a conversation are read as plain text.

A template makes one text of a conversation, and `<|im_end|>` in a message looks there like that of
the template: a message could end its turn and go on as the system. So special tokens in what is
given are marked before the template sees it: their characters become private-use characters that
occur nowhere else. Halves of tokens at the ends of a text are marked too, names and keys not
excepted, since a template may write the other half beside them. What is a special token afterwards
is the template's. It gets another name, an alias, the marks are taken back, and a copy of the
tokenizer, to which special tokens are text and aliases are tokens, reads the whole at once.
Templates see what they know otherwise: `<think>` of an answer, their own words, roles, and all that
is not special.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from itertools import islice
from random import SystemRandom
from typing import Any, Literal

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from bitnet_ops.generate.chat import END_OF_THOUGHT, THINK
from bitnet_ops.generate.pictures import Picture
from bitnet_ops.generate.tokenizer_guard import TokenizerError, encoding

_WRITTEN = ("content", "reasoning_content", "reasoning", "thinking")  # whole texts of a message
# A template may make a token of a role.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
_TAGS = re.compile(f"{THINK}|{END_OF_THOUGHT}")
_MARKS, _ALIASES = range(0xE000, 0xF900), range(0xF0000, 0xFFFFE)  # private use
_BETWEEN = "\U0010ffff"  # no character
_ALIAS = 3  # characters at least, drawn at random: nobody writes one by chance or by guessing
_LONGEST = 256  # longer tokens are not looked for in halves
_MAX_WRITTEN = 100_000  # special tokens in what is given: each takes a hundred times its length
# text: of a message; answer: of the model's, thoughts between tags; name: any other, keys too;
# word: one of the template's own, in which whole tokens alone are marked.
_Kind = Literal["text", "answer", "name", "word"]


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
        self._begins = tuple({name[:n] for name in halves for n in range(1, len(name))})
        self._ends = tuple({name[n:] for name in halves for n in range(1, len(name))})
        self._longest = max(map(len, halves), default=0)

    def mark(self, template: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], Marks] | None:
        """`given` ("messages", "tools", options) with special tokens marked; None if it has none.

        `template`: may hold private-use characters too.
        """
        found: dict[tuple[str, _Kind], list[tuple[int, int]]] = {}
        words = frozenset(re.findall(r"\w+", template))
        left = _MAX_WRITTEN

        def find(text: str, kind: _Kind) -> str:
            nonlocal left
            own = kind == "name" and text in words
            if spans := self._spans(text, "word" if own else kind, left):
                found[text, kind] = spans
                left -= len(spans)
            return text

        _each_text(given, find)
        if not found:
            return None
        characters = {c for (text, *_), spans in found.items() for a, b in spans for c in text[a:b]}
        marks = Marks(characters, json.dumps(given, ensure_ascii=False) + template)

        def put(text: str, kind: _Kind) -> str:
            pieces, at = [], 0
            for begin, end in sorted(found.get((text, kind), ())):
                pieces += [text[at:begin], marks.put(text[max(at, begin) : end])]
                at = max(at, end)
            return "".join([*pieces, text[at:]])

        return _each_text(given, put), marks

    def _spans(self, text: str, kind: _Kind, maximum: int = _MAX_WRITTEN) -> list[tuple[int, int]]:
        """Where characters are to be marked, in `maximum` places."""
        if not self._names:
            return []
        matches = islice(self._pattern.finditer(text), maximum + 1)
        if len(spans := [match.span() for match in matches]) > maximum:
            raise TokenizerError(
                f"tokenizer: expected at most {_MAX_WRITTEN:,} special tokens written out in "
                "texts, got more; leave them out"
            )
        if self._normalized:
            spans += [(begin, end) for _, begin, end in self._special(text)]
        if kind != "word":
            spans += self._halves(text, 0, len(text), kind != "name")
        if kind == "answer":  # templates take it apart at these
            spans = [s for s in spans if text[slice(*s)] not in (THINK, END_OF_THOUGHT)]
            tags = [match.span() for match in _TAGS.finditer(text)]
            cuts = [0, *(at for tag in tags for at in tag), len(text)]
            for begin, end in zip(cuts[::2], cuts[1::2], strict=True):
                spans += self._halves(text, begin, end, True) if tags else []
        return spans

    def _halves(self, text: str, begin: int, end: int, whole: bool) -> list[tuple[int, int]]:
        """Parts of tokens at the ends of text[begin:end], which templates strip; whole: it may be
        the middle of one too."""
        core = text[begin:end].strip()
        if not core:
            return []
        begin += text[begin:end].index(core)
        end, spans = begin + len(core), []
        if whole and len(core) <= self._longest and any(core in name for name in self._names):
            spans.append((begin, end))
        if core.endswith(self._begins):
            n = max(len(half) for half in self._begins if core.endswith(half))
            spans.append((end - n, end))
        if core.startswith(self._ends):
            n = max(len(half) for half in self._ends if core.startswith(half))
            spans.append((begin, begin + n))
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
        backend = self._reader[0] if self._spans(text, "word") else self._backend
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
    """A conversation as a text, and as ids in which special tokens are the template's alone.

    `pictures`: those for which it has a padding token each, in their order.
    """

    def __init__(
        self,
        text: str,
        backend: Backend,
        coded: str | None = None,
        tokens: Mapping[int, int] | None = None,
        count: int = 0,
        same: bool = True,
    ) -> None:
        self.text, self.pictures = text, list[Picture]()
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


def _each_text(given: Mapping[str, Any], do: Callable[[str, _Kind], str]) -> dict[str, Any]:
    """`given` with do(text, kind) in the place of every text; keys are texts too."""

    def walk(value: Any, kind: _Kind = "name") -> Any:
        if isinstance(value, str):
            return do(value, kind)
        if isinstance(value, Mapping):
            return {walk(k) if isinstance(k, str) else k: walk(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [walk(item, kind) for item in value]
        return value

    def message(one: Mapping[str, Any]) -> dict[str, Any]:
        role = one.get("role")
        written: _Kind = "answer" if role == "assistant" else "text"
        return {
            walk(k): v
            if k == "role" and v in _ROLES
            else walk(v, written if k in _WRITTEN else "name")
            for k, v in one.items()
        }

    rest = {name: walk(value) for name, value in given.items() if name != "messages"}
    return {**rest, "messages": [message(one) for one in given["messages"]]}
