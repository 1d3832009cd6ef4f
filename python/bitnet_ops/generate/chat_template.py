"""Chat templates: programs in Jinja that come with a checkpoint, and are therefore not trusted.

They are rendered in jinja2's immutable sandbox, with what transformers gives them, in a process
with limits (bounded.py): an endless loop or a string of gigabytes is an error of one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bitnet_ops.untrusted import printable
from bitnet_ops.untrusted.bounded import BoundedProcess, ChildError, LimitError

_CPU_S = 2.0  # published templates take a millisecond
_MEMORY_BYTES = 256 << 20
_process = BoundedProcess("templates", _MEMORY_BYTES)


class ChatTemplateError(ValueError):
    """A model without a chat template, or a template that rejects or breaks."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    special_tokens: Mapping[str, str],
) -> str:
    """The text of a conversation; `messages` hold what JSON can. Raises ChatTemplateError."""
    variables = {
        "messages": [dict(m) for m in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **special_tokens,
    }
    try:
        json.dumps(variables)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(
            f"chat: expected messages of texts, numbers, lists and dicts, got: {error}"
        ) from None
    try:
        return str(_process.call("render", _CPU_S, template=template, variables=variables))
    except LimitError as error:
        raise ChatTemplateError(
            f"chat: expected the model's chat template to end, with a text, got {error}; the "
            "template is broken or hostile: use plain continuation (generate, or chat --plain)"
        ) from None
    except ChildError as error:
        raise ChatTemplateError(_reason(error)) from None


def _reason(error: ChildError) -> str:
    message = printable(" ".join(error.message.split()))
    if "TemplateSyntaxError" in error.classes:
        return f"chat: expected a chat template that parses, got line {error.line}: {message}"
    if "TemplateError" in error.classes:  # raise_exception, the sandbox, an undefined name
        return f"chat: the model's chat template rejects: {message}"
    return f"chat: the model's chat template fails: {error.name}: {message}"
