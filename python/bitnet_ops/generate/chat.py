"""Chat: a conversation as text, through its model's template.

Templates are programs in Jinja that come with a checkpoint, and are therefore not trusted. They are
rendered in jinja2's immutable sandbox, with what transformers gives them, in a process with limits
(bounded.py): an endless loop or a string of gigabytes is an error of one line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bitnet_ops.errors import BitNetError
from bitnet_ops.untrusted import printable
from bitnet_ops.untrusted.bounded import BoundedProcess, ChildError, LimitError, ProcessError

Message = Mapping[str, Any]
THINK, END_OF_THOUGHT = "<think>", "</think>"

_CPU_S = 2.0  # published templates take a millisecond
_MEMORY_BYTES = 256 << 20
_process = BoundedProcess(_MEMORY_BYTES)


class ChatTemplateError(BitNetError, ValueError):
    """A model without a chat template, or a template that rejects or breaks."""


class ChatTemplateRefusal(ChatTemplateError):
    """A template that rejects these messages, or fails at them: it may take others."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    special_tokens: Mapping[str, str],
    options: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The text of a conversation; `messages`, `options` and `tools` hold what JSON can.

    `options`: variables of the template's own, such as enable_thinking. `tools`: functions that may
    be called, in OpenAI's form. Raises ChatTemplateError, also for what the template never
    mentions.
    """
    variables = {
        **check(template, messages, options, tools),
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **special_tokens,
    }
    try:
        return str(_process.call(_CPU_S, template=template, variables=variables))
    except LimitError as error:
        raise ChatTemplateError(
            f"chat: expected the model's chat template to end, with a text, got {error}; the "
            "template is broken or hostile: use plain continuation (generate, or chat --plain)"
        ) from None
    except ProcessError as error:
        raise ChatTemplateError(
            f"chat: expected a process of Python to render the chat template in, got {error}; use "
            "plain continuation (generate, or chat --plain), or run bitnet-ops by a Python of its "
            "own"
        ) from None
    except ChildError as error:
        raise ChatTemplateRefusal(_reason(error)) from None


_GIVEN = ("messages", "tools", "add_generation_prompt")


def check(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """What is given to a template, as its variables; raises ChatTemplateError as `render`."""
    options = _checked_options(template, {} if options is None else options)
    if tools and not re.search(r"\btools\b", template):
        raise ChatTemplateError(
            "chat: expected a model whose chat template reads tools, got one that never mentions "
            "them; describe the tools in a message"
        )
    tools = None if tools is None else list(tools)
    variables = {**options, "messages": [dict(m) for m in messages], "tools": tools}
    try:
        json.dumps(variables)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(
            f"chat: expected messages and options of texts, numbers, lists and dicts, got: {error}"
        ) from None
    return variables


def check_options_kind(options: object) -> None:
    """Raise ChatTemplateError for what cannot be options of a template."""
    if not isinstance(options, Mapping):
        raise ChatTemplateError(
            "chat: expected chat_template_kwargs as a dict of the template's variables, got a "
            f"{type(options).__name__}"
        )


def _checked_options(template: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options`, if the template can read each: one that it ignores would be a silent mistake."""
    check_options_kind(options)
    for name in options:
        if not isinstance(name, str) or name in _GIVEN:
            raise ChatTemplateError(
                f"chat: expected names of the template's own options, got {printable(repr(name))}"
            )
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ChatTemplateError(
                f"chat: expected an option that the model's chat template reads, got "
                f"{printable(name)}, which it never mentions; leave it out"
            )
    return dict(options)


def _reason(error: ChildError) -> str:
    message = printable(" ".join(error.message.split()))
    if "TemplateSyntaxError" in error.classes:
        return f"chat: expected a chat template that parses, got line {error.line}: {message}"
    if "TemplateError" in error.classes:  # raise_exception, the sandbox, an undefined name
        return f"chat: the model's chat template rejects: {message}"
    return f"chat: the model's chat template fails: {error.name}: {message}"


# Thoughts -------------------------------------------------------------------------------------


def opened_thought(prompt: str) -> str:
    """`<think>` and the space behind it where a prompt ends so; what follows are thoughts."""
    _, tag, space = prompt.rpartition(THINK)
    return tag + space if tag and not space.strip() else ""


def whole_answer(opening: str, answer: str) -> str:
    """An answer as a history holds it: with the `opening` that its prompt wrote, thoughts closed.

    Templates take the thoughts of earlier answers out between the two tags. Of an answer that was
    broken off while it thought, all is thought.
    """
    text = opening + answer
    if text.lstrip().startswith(THINK) and END_OF_THOUGHT not in text:
        return f"{text.rstrip()}\n{END_OF_THOUGHT}\n\n"
    return text


def without_oldest_turn(messages: Sequence[Message]) -> list[Message] | None:
    """`messages` less the first turn, a user's message and what follows; None if it is the last.

    System messages at the beginning stay.
    """
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if len(users) < 2:
        return None
    return [*messages[: users[0]], *messages[users[1] :]]
