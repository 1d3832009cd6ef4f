"""Chat: a conversation as text, through its model's template, and as the ids that were run.

Templates are programs in Jinja that come with a checkpoint, and are therefore not trusted. They are
rendered in jinja2's immutable sandbox, with what transformers gives them, in a process with limits
(bounded.py): an endless loop or a string of gigabytes is an error of one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bitnet_ops.errors import BitNetError
from bitnet_ops.untrusted import printable
from bitnet_ops.untrusted.bounded import BoundedProcess, ChildError, LimitError, ProcessError

if TYPE_CHECKING:
    from bitnet_ops.generate.tokenizer import Tokenizer

Message = Mapping[str, str]

_CPU_S = 2.0  # published templates take a millisecond
_MEMORY_BYTES = 256 << 20
_process = BoundedProcess(_MEMORY_BYTES)


class ChatTemplateError(BitNetError, ValueError):
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
        raise ChatTemplateError(_reason(error)) from None


def _reason(error: ChildError) -> str:
    message = printable(" ".join(error.message.split()))
    if "TemplateSyntaxError" in error.classes:
        return f"chat: expected a chat template that parses, got line {error.line}: {message}"
    if "TemplateError" in error.classes:  # raise_exception, the sandbox, an undefined name
        return f"chat: the model's chat template rejects: {message}"
    return f"chat: the model's chat template fails: {error.name}: {message}"


class RunIds:
    """The ids of the newest prompt and of its answer, for the next prompt to begin with.

    A template turns messages into text, and a tokenizer that text into ids; but the ids of an
    answer are those that the model chose, and text written by a model is often cut into others when
    it is read again. What was run stays as it was run, so that its cache can be used.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._read = ""  # the text of the newest prompt
        self._prompt, self._answer, self._ids = "", "", list[int]()

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The ids of `messages` through the template; those that were run stay as they were."""
        text = self._read = self._tokenizer.render_chat(messages)
        start = self._end_of_known(text)
        tail = None if start is None else self._tokenizer.encode_from(text, start)
        if tail is None:
            return self._tokenizer.encode(text, add_special_tokens=False)
        return [*self._ids, *tail]

    def ran(self, prompt: Sequence[int], answer: str, ids: Sequence[int]) -> None:
        """Remember that what `encode` gave last, `prompt`, got `answer`, which came as `ids`."""
        known = self._tokenizer.decode(ids) == answer  # not so where a stop text was cut off
        self._prompt, self._answer = self._read, answer
        self._ids = [*prompt, *ids] if known else []

    def _end_of_known(self, text: str) -> int | None:
        """Where what was run ends in `text`; None if `text` does not begin with it.

        Templates strip answers: then what was run stands, with its white space.
        """
        if not self._ids or not text.startswith(self._prompt):
            return None
        said = self._answer
        for answer in (said, said.rstrip(), said.lstrip(), said.strip()):
            if text.startswith(answer, len(self._prompt)):
                return len(self._prompt) + len(answer)
        return None


def without_oldest_turn(messages: Sequence[Message]) -> list[Message] | None:
    """`messages` less the first turn, a user's message and what follows; None if it is the last.

    System messages at the beginning stay.
    """
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if len(users) < 2:
        return None
    return [*messages[: users[0]], *messages[users[1] :]]
