"""Placing: a conversation in a form that its chat template takes, and tells all of.

Templates have rules: one system message, in front, or none; turns that alternate; a question of the
user. Clients have others. So a conversation is given as it is first; where the template refuses it,
or leaves a system message out, it is changed step by step, as little as will do. Each change is
made where it stands and depends on what comes before it alone: later requests begin with the same
tokens, and find them in the cache.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bitnet_ops.generate.chat import ChatTemplateRefusal
from bitnet_ops.generate.given_text import ChatText
from bitnet_ops.server.tools import IN_WORDS

_LOG = logging.getLogger(__name__)
_TURNS = ("user", "assistant", "tool")

Message = Mapping[str, Any]


def read_placed(
    read: Callable[[Sequence[Message]], ChatText], messages: Sequence[Message]
) -> ChatText:
    """What `read`, which gives messages to the template, makes of the first form that it takes.

    Raises ChatTemplateError: what the template said of the messages as they are.
    """
    refusal: ChatTemplateRefusal | None = None
    partial: ChatText | None = None
    tried: list[Sequence[Message]] = []
    for placed in _forms(messages):
        if placed in tried:
            continue
        tried.append(placed)
        try:
            found = read(placed)
        except ChatTemplateRefusal as error:
            refusal = refusal or error
            continue
        if _tells(found.text, messages, placed):
            return found
        partial = partial or found
    if partial is None:
        assert refusal is not None
        raise refusal
    _LOG.warning("the chat template leaves a system message of a conversation out")
    return partial


def _forms(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """The conversation as it is, and in forms that more and more templates take."""
    yield messages
    for change in (_late_in_place, _one_in_front, _alternating):
        messages = change(messages)
        yield messages
    yield _told_calls(messages)
    messages = _without_system(messages)
    yield messages
    yield _told_calls(messages)


def _late_in_place(messages: Sequence[Message]) -> list[Message]:
    """Who is neither the user nor the model speaks at the end of the turn before, in a tag.

    Results stay beside their calls.
    """
    found: list[Message] = []
    waiting = ""  # behind a call
    for message in messages:
        role = message["role"]
        if role in _TURNS or (role == "system" and all(m["role"] == "system" for m in found)):
            if waiting and role != "tool":
                found.append({"role": "user", "content": waiting})
                waiting = ""
            found.append(_with_text(message, waiting))
            waiting = ""
            continue
        tag = re.sub(r"\W", "_", role)
        text = f"<{tag}>\n{message['content']}\n</{tag}>"
        last = found[-1] if found else {"role": "system"}
        if last.get("tool_calls"):
            waiting = f"{waiting}\n\n{text}".lstrip()
        elif last["role"] in ("user", "tool"):
            found[-1] = _with_text(last, text)
        else:
            found.append({"role": "user", "content": text})
    return [*found, {"role": "user", "content": waiting}] if waiting else found


def _with_text(message: Message, text: str) -> Message:
    """`message` with one more paragraph."""
    if not text:
        return message
    return {**message, "content": f"{message.get('content') or ''}\n\n{text}".lstrip("\n")}


def _one_in_front(messages: Sequence[Message]) -> list[Message]:
    """The first system messages as one."""
    system = [m for m in messages if m["role"] == "system"]
    if len(system) < 2:
        return list(messages)
    text = "\n\n".join(m["content"] for m in system)
    return [{**system[0], "content": text}, *messages[len(system) :]]


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """The user speaks first, though it be nothing, and turns of one side are one."""
    found: list[Message] = []
    for message in messages:
        role, last = message["role"], found[-1] if found else {"role": "system"}
        if found and role == last["role"] != "tool":
            merged = _with_text(last, message.get("content") or "")
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            found[-1] = {**message, **merged, "tool_calls": calls} if calls else merged
            continue
        if last["role"] == "system" and role not in ("system", "user"):
            found.append({"role": "user", "content": ""})
        found.append(message)
    if found and found[-1]["role"] == "system":
        found.append({"role": "user", "content": ""})
    return found


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """The system message at the beginning of the user's first."""
    if len(messages) < 2 or messages[0]["role"] != "system":
        return list(messages)
    system, first, *rest = messages
    return [_with_text({**first, "content": system["content"]}, first["content"]), *rest]


def _told_calls(messages: Sequence[Message]) -> list[Message]:
    """Calls and their results in words, for templates that have other rules for them."""
    told, _ = IN_WORDS.prompt(messages, ())
    return _alternating(told)


def _tells(text: str, messages: Sequence[Message], placed: Sequence[Message]) -> bool:
    """Whether all that neither the user nor the model says is in the text of the template."""
    said = {_key(m["content"]) for m in messages if m["role"] not in _TURNS} - {""}
    if not said:
        return True
    rendered = _letters(text)
    given = [_letters(m.get("content") or "") for m in placed if m["role"] != "assistant"]
    return all(rendered.count(key) >= sum(one.count(key) for one in given) for key in said)


def _key(content: str) -> str:
    """What a template leaves as it is, though it strips, indents or quotes: a line's letters."""
    return max(map(_letters, content.splitlines()), key=len, default="")


def _letters(text: str) -> str:
    return re.sub(r"\W+", "", text).casefold()
