"""History: what clients send of a conversation, as messages that chat templates read.

What stands before the newest turn was accepted once, and comes with every later request: what
cannot be read of it is told to the model as far as it can be, or left out with a word in the log.
The newest turn is what comes behind the last answer, and what is wrong there is an error; but what
a tool gives nobody can mend, and is read like the history.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from bitnet_ops.errors import printable
from bitnet_ops.generate.pictures import Picture, PictureMarks
from bitnet_ops.server.exchange import AskError, remark

_LOG = logging.getLogger(__name__)
_TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")
_THOUGHT_PARTS = ("thinking", "think", "reasoning", "redacted_thinking")
# As vLLM and OpenRouter, DeepSeek, Copilot, Ollama and LiteLLM call the thoughts of an answer.
_THOUGHTS = ("reasoning_content", "reasoning", "reasoning_text", "thinking", "thinking_blocks")
# What a person would read of a part of another kind.
_SAID = ("title", "context", "url", "text", "stdout", "stderr", "error_code", "tool_name")
_MAX_DEPTH = 64
# Chat completions, Responses, Anthropic and tools of MCP.
_PICTURES = ("image_url", "input_image", "image")

Message = dict[str, Any]


class Reader:
    """Reads one conversation.

    Args:
        field: of the request, where it stands, as errors say it.
    Attributes: `new`: whether what is read belongs to the newest turn; `marks`: of its pictures.
    """

    def __init__(self, field: str) -> None:
        self.field, self.new, self.marks = field, False, PictureMarks()
        self._entry = ""  # the one that is read, with a dot
        self._left = Counter[str]()

    def read(
        self,
        entries: Sequence[Any],
        messages: Callable[[Reader, Mapping[str, Any]], Iterable[Message]],
        answers: Callable[[Mapping[str, Any]], bool],
    ) -> list[Message]:
        """The messages of all entries; `answers`: whether an entry is of an answer."""
        found: list[Message] = []
        last = [i for i, one in enumerate(entries) if isinstance(one, Mapping) and answers(one)]
        for i, entry in enumerate(entries):
            self.new, self._entry = not last or i > last[-1], f"{self.field}[{i}]."
            if isinstance(entry, Mapping):
                found += messages(self, entry)
            else:
                self.reject(f"objects in {self.field}, got {type(entry).__name__}")
                self.left_out(type(entry).__name__)
        if self._left:
            kinds = ", ".join(f"{kind} ({n})" for kind, n in self._left.items())
            _LOG.warning("left out of a conversation, or told by a remark alone: %s", kinds)
        return found

    def reject(self, wrong: str) -> None:
        """Raise AskError where it is the newest turn that has something wrong."""
        if self.new:
            raise AskError(f"server: expected {wrong}", field=self.field)

    def left_out(self, kind: str) -> None:
        self._left[printable(kind[:40])] += 1

    # Texts ---------------------------------------------------------------------------------------

    def text(self, content: Any, path: str = "content") -> str:
        """The text of a content: a text, or parts with a line each, marks in place of pictures.

        path: of the content in its entry, as errors say it.
        """
        if isinstance(content, str) or content is None:
            return content or ""
        parts = content if isinstance(content, list) else [content]
        texts = (self.part(part, f"{path}[{i}]") for i, part in enumerate(parts))
        return self.marks.joined(text for text in texts if text is not None)

    def result(self, content: Any, path: str = "content") -> str:
        """The text of what a tool gave."""
        with self.leniently():
            return self.text(content, path)

    @contextlib.contextmanager
    def leniently(self) -> Iterator[None]:
        """Within it nothing is rejected: what a tool gave, its caller cannot take back."""
        new, self.new = self.new, False
        try:
            yield
        finally:
            self.new = new

    def part(self, part: Any, path: str) -> str | None:
        """The text of one part of a content. None: it is no part of the text."""
        if isinstance(part, str):
            return part
        if not isinstance(part, Mapping):
            self.reject(f"parts of a content as objects, got {type(part).__name__!r}")
            return None if part is None else json.dumps(part)
        kind = part.get("type")
        if kind in _TEXTS or (kind is None and "text" in part):
            text = part.get("text", part.get("refusal"))
            if not isinstance(text, str):
                self.reject(f"a part of type {kind} with a text text, got {str(text)[:80]!r}")
            return text if isinstance(text, str) else None
        if kind in _PICTURES:
            if (picture := picture_of(part)) is not None:
                return self.picture(picture, path)
            self.reject(
                f"the picture of {self._entry}{path} as a data: URI or in base64, got a part of "
                f"type {kind} without one; uploaded files are not kept here"
            )
        source = part.get("source")
        if isinstance(source, Mapping) and source.get("type") in ("text", "content"):
            inner = self.text(source.get("content"), f"{path}.source.content")
            found = [part.get("title"), source.get("data"), inner]
            return "\n".join(text for text in found if isinstance(text, str) and text)
        self.reject(
            "parts of type text, or what a turn of this kind may have, got "
            f"{str(kind)[:80]!r}; texts and pictures alone are read here"
        )
        if kind in _THOUGHT_PARTS:
            return None
        said = [str(part[name]) for name in _SAID if isinstance(part.get(name), str) and part[name]]
        if inner := self.text(part.get("content"), f"{path}.content"):
            said.append(inner)
        if not said:
            self.left_out(str(kind))
            said = [remark(str(kind)[:40])]
        return "\n".join(said)

    def picture(self, source: str, path: str) -> str:
        """The mark of a picture that `source` says where to find; see `picture_of`."""
        where = f"{self._entry}{path}"
        return self.marks.put(Picture(source=source, where=where, needed=self.new))

    def name(self, value: Any) -> str:
        """The name of a function that was called."""
        if isinstance(value, str) and value:
            return value
        self.left_out("the name of a call")
        return "unknown"


def picture_of(part: Mapping[str, Any]) -> str | None:
    """What says where the picture of a part is found: a data: URI, base64, or an address.

    None for a part in no known form, such as one that names an uploaded file.
    """
    found = part.get("image_url", part.get("source", part.get("data")))
    if isinstance(found, Mapping):
        found = found.get("url", found.get("data"))
    return found if isinstance(found, str) and found else None


def thoughts_of(message: Mapping[str, Any]) -> str:
    """The thoughts of an answer, whatever a client calls them."""
    for name in _THOUGHTS:
        if found := _thought(message.get(name)):
            return found
    if found := _thought(message.get("reasoning_details"), ""):  # as they were streamed
        return found
    parts = message.get("content")
    parts = parts if isinstance(parts, list) else []
    return _thought(
        [p for p in parts if isinstance(p, Mapping) and p.get("type") in _THOUGHT_PARTS]
    )


def _thought(value: Any, between: str = "\n") -> str:
    if isinstance(value, Mapping):
        names = ("text", "thinking", "think", "summary", "content")
        value = next((value[name] for name in names if value.get(name)), None)
        return _thought(value)
    if isinstance(value, list):
        return between.join(filter(None, map(_thought, value)))
    return value if isinstance(value, str) else ""


def call_of(id: Any, name: str, arguments: Any) -> dict[str, Any]:
    """A call as templates read it; see arguments_of."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments_of(arguments)}}
    return {"id": id, **call} if isinstance(id, str) and id else call


def arguments_of(value: Any) -> dict[str, Any]:
    """Arguments of an earlier call, always an object, since templates look through it.

    Of a text that was cut off it is what had come; what is none becomes the value of `arguments`.
    """
    for _ in range(2):  # some models write a text of JSON into the text
        if isinstance(value, str):
            value = _parsed(value)
    if isinstance(value, Mapping) and not _deep(value):
        return dict(value)
    if isinstance(value, Mapping | list) and _deep(value):
        value = "..."
    return {} if value in (None, "", []) else {"arguments": value}


def _parsed(text: str) -> Any:
    if not text.strip():
        return None
    for parse in (json.loads, lambda text: from_json(text, allow_partial="trailing-strings")):
        try:
            return parse(text)
        except (ValueError, RecursionError):
            continue
    return text


def _deep(value: Any) -> bool:
    """Whether it has more levels than anybody's arguments, or templates' filters, bear."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for one in level
            if isinstance(one, Mapping | list)
            for inner in (one.values() if isinstance(one, Mapping) else one)
        ]
    return bool(level)
