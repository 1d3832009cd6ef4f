"""A conversation as token ids: what was run stays as it was run, so that its cache can be used.

A template turns messages into text, and a tokenizer that text into ids; but the ids of an answer
are those that the model chose, and text written by a model is often cut into others when it is read
again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bitnet_ops.generate.tokenizer import Tokenizer

Message = Mapping[str, str]


class RunIds:
    """The ids of the newest prompt and of its answer, for the next prompt to begin with."""

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
