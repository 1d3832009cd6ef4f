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
import secrets
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
    # Words that are nowhere else tell what the template leaves out.
    words = {i: f"word{secrets.token_hex(8)}" for i, m in enumerate(messages) if _speaks_up(m)}
    marked = [{**m, "content": words[i]} if i in words else m for i, m in enumerate(messages)]
    refusal: ChatTemplateRefusal | None = None
    partial: Sequence[Message] | None = None
    tried: list[Sequence[Message]] = []
    for placed, probe in zip(_forms(messages), _forms(marked), strict=True):
        if placed in tried:
            continue
        tried.append(placed)
        try:
            text = read(probe).text.casefold() if words else ""
            if all(word in text for word in words.values()):
                return read(placed)
            partial = partial or placed
        except ChatTemplateRefusal as error:
            refusal = refusal or error
    if partial is None:
        assert refusal is not None
        raise refusal
    _LOG.warning("the chat template leaves a system message of a conversation out")
    return read(partial)


def _speaks_up(message: Message) -> bool:
    """Whether neither the user nor the model says something."""
    return message["role"] not in _TURNS and bool(message["content"].strip())


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


def behind_results(messages: Sequence[Message]) -> list[Message]:
    """Results stay beside their calls: who else speaks in between does so behind them."""
    found, waiting = list[Message](), list[Message]()
    for message in messages:
        role, last = message["role"], found[-1] if found else {"role": ""}
        if role not in _TURNS and (last["role"] == "tool" or last.get("tool_calls")):
            waiting.append(message)
            continue
        if role != "tool":
            found += waiting
            waiting = []
        found.append(message)
    return [*found, *waiting]


def _late_in_place(messages: Sequence[Message]) -> list[Message]:
    """Who is neither the user nor the model speaks at the end of the turn before, in a tag."""
    found, in_front = list[Message](), True
    for message in behind_results(messages):
        role = message["role"]
        in_front = in_front and role == "system"
        if in_front or role in _TURNS:
            found.append(message)
        elif _speaks_up(message):
            tag = re.sub(r"\W", "_", role)
            text = f"<{tag}>\n{message['content']}\n</{tag}>"
            if found and found[-1]["role"] in ("user", "tool"):
                found[-1] = _with_text(found[-1], text)
            else:
                found.append({"role": "user", "content": text})
    return found


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
    in_words, _ = IN_WORDS.prompt(messages, ())
    return _alternating(in_words)
