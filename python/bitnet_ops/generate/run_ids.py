"""A conversation as the ids that were run, for the next prompt to begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bitnet_ops.generate.chat import Message, opened_thought
from bitnet_ops.generate.given_text import ChatText
from bitnet_ops.generate.images import NO_TOWER
from bitnet_ops.generate.pictures import Picture, PictureMarks, marked_content
from bitnet_ops.generate.tokenizer import Tokenizer
from bitnet_ops.vision.errors import ImageError


class RunIds:
    """The ids of the newest prompt and of its answer, for the next prompt to begin with.

    A template turns messages into text, and a tokenizer that text into ids; but the ids of an
    answer are those that the model chose, and text written by a model is often cut into others when
    it is read again. What was run stays as it was run, so that its cache can be used.
    `picture_ids`: the tokens that stand for a picture; none for a model that reads texts alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: Mapping[str, Any] | None = None,
        picture_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._options, self._picture_ids = tokenizer, options, picture_ids
        self._read: ChatText | None = None  # the newest prompt
        self._prompt, self._answer, self._ids = "", "", list[int]()

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The ids of `messages` through the template; those that were run stay as they were.

        A picture is one padding token; `pictures` gives them in their order.
        """
        marks = PictureMarks()
        marked = [{**m, "content": marked_content(m.get("content"), marks)} for m in messages]
        if marks.pictures and not self._picture_ids:
            raise ImageError(*NO_TOWER)
        read = self._read = self._tokenizer.read_chat(
            marked,
            chat_template_kwargs=self._options,
            pictures=marks,
            picture_ids=self._picture_ids,
        )
        start = self._end_of_known(read.text)
        tail = None if start is None else read.ids_from(start)
        return read.ids() if tail is None else [*self._ids, *tail]

    @property
    def pictures(self) -> list[Picture]:
        """Those of the newest prompt."""
        return [] if self._read is None else self._read.pictures

    @property
    def opening(self) -> str:
        """The beginning of the newest answer that its prompt has written; see opened_thought."""
        return "" if self._read is None else opened_thought(self._read.text)

    def ran(self, prompt: Sequence[int], answer: str, ids: Sequence[int]) -> None:
        """Remember that what `encode` gave last, `prompt`, got `answer`, which came as `ids`."""
        known = self._tokenizer.decode(ids) == answer  # not so where a stop text was cut off
        self._prompt = "" if self._read is None else self._read.text
        self._answer = answer
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
