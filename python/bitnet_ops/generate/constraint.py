"""Constraints: which tokens a request may choose next, token by token.

A `Constraint` is asked for a mask before each token and told each token after it; it knows nothing
of the prompt. Here: thoughts that end (`Thoughts`), and what holds behind them. grammar.py has the
constraints that follow a grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from bitnet_ops.generate.chat import END_OF_THOUGHT, THINK
from bitnet_ops.generate.tokenizer import Tokenizer

Mask = npt.NDArray[np.uint8]


class Constraint(Protocol):
    """What a request's next token may be; one object serves one request."""

    def mask(self) -> Mask | None:
        """A bit for each token id, the lowest bit of a byte first: 1 if it may come; None: all may.

        Raises BitNetError where nothing can go on; the request fails with it, alone.
        """

    def add(self, token: int) -> None:
        """The next token is this one; raises nothing."""


@runtime_checkable
class LooksAhead(Protocol):
    """A constraint that drafts are shown to before they are verified; not every one is."""

    def allowed_prefix(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, from the first, may come next, or more; nothing changes.

        It is asked before a step for what the step may guess: to say too many costs time, to say
        too few loses some, and neither changes a token. Raises nothing.
        """


class TextConstraint(Constraint, LooksAhead, Protocol):
    """One that can also be told text, where a token has ended what was before it."""

    def feed(self, data: bytes) -> None:
        """The next bytes are these; raises nothing."""


def only(vocab_size: int, ids: Sequence[int]) -> Mask:
    """The mask that allows `ids` alone."""
    bits = np.zeros(vocab_size, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little")


class TokenTexts:
    """The bytes of each token; those of a special token are its name.

    tokens: of each id from 0 on, b"" for ids without a text. stop_ids: those that end an answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        tokens: Sequence[bytes],
        stop_ids: Sequence[int],
    ) -> None:
        self.tokenizer, self.vocab_size, self._tokens = tokenizer, vocab_size, tokens
        self.stop_ids = stop_ids

    def __getitem__(self, token: int) -> bytes:
        return self._tokens[token] if token < len(self._tokens) else b""

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


class Thoughts:
    """Thoughts between <think> and </think>, and behind them what `answer` allows.

    Args:
        texts: of the model's tokens.
        answer: holds from the end of the thoughts on, or from the beginning where there are none;
            None: everything is allowed.
        opened: whether the prompt has opened the thoughts; else the model may, by its first token.
        budget: after so many tokens of thought they are closed; None: the model closes them.
    """

    def __init__(
        self,
        texts: TokenTexts,
        answer: TextConstraint | None = None,
        *,
        opened: bool,
        budget: int | None = None,
    ) -> None:
        if budget is not None and (not isinstance(budget, int) or budget < 0):
            raise ValueError(f"constraint: expected a budget of at least 0 tokens, got {budget!r}")
        self._texts, self._answer, self._budget = texts, answer, budget
        self._state = "thinking" if opened else "before"
        self._seen = b""  # in which a tag may have begun
        self._waiting: list[int] = []  # tokens before it is known whether they open thoughts
        self._spent = 0
        self._forced: list[int] = []  # tokens that have to come next
        self._open = texts.tokenizer.token_id(THINK)
        # where the answer has to have a form, thoughts are not its end
        strict = answer is not None and answer.mask() is not None
        self._thinking = ~only(texts.vocab_size, texts.stop_ids) if strict else None

    def mask(self) -> Mask | None:
        if self._state == "thinking" and not self._forced and self._budget is not None:
            if self._spent >= self._budget:
                self._forced = self._closing()
        if self._forced:
            return only(self._texts.vocab_size, self._forced[:1])
        if self._state == "thinking":
            return self._thinking
        if self._answer is None:
            return None
        mask = self._answer.mask()
        if self._state == "before" and mask is not None and self._open is not None:
            mask = mask.copy()
            mask[self._open >> 3] |= 1 << (self._open & 7)
        return mask

    def allowed_prefix(self, tokens: Sequence[int]) -> int:
        forced = self._forced
        if self._state == "thinking" and not forced:
            left = len(tokens) if self._budget is None else self._budget - self._spent
            if left > 0:
                ends = self._texts.stop_ids if self._thinking is not None else ()
                free = (i for i, token in enumerate(tokens) if token in ends)
                return min(left, next(free, len(tokens)))
            forced = self._closing()
        if forced:
            pairs = enumerate(zip(tokens, forced, strict=False))
            return next((i for i, (token, other) in pairs if token != other), len(tokens))
        if self._answer is None or not tokens:
            return len(tokens)
        if self._state == "before" and tokens[0] == self._open:
            return len(tokens)
        return self._answer.allowed_prefix(tokens)

    def _closing(self) -> list[int]:
        """What closes the thoughts when their budget is spent."""
        return self._texts.encode(f"\n{END_OF_THOUGHT}\n\n")

    def add(self, token: int) -> None:
        if self._forced:
            self._forced.pop(0)
            if self._state == "answer":  # the space behind the tag, which is no answer
                return
        if self._state == "before":
            self._begin(token)
        elif self._state == "thinking":
            self._think(token)
        elif self._answer is not None:
            self._answer.add(token)

    def _begin(self, token: int) -> None:
        self._seen += self._texts[token]
        self._waiting.append(token)
        text, tag = self._seen.lstrip(), THINK.encode()
        if text.startswith(tag):
            self._state, self._seen = "thinking", text[len(tag) :]
        elif self._answer is None:
            self._state = "before" if tag.startswith(text) else "answer"
        elif not tag.startswith(text) or self._answer.mask() is not None:
            self._state = "answer"
            for one in self._waiting:
                self._answer.add(one)

    def _think(self, token: int) -> None:
        self._spent += 1
        tag = END_OF_THOUGHT.encode()
        self._seen += self._texts[token]
        at = self._seen.find(tag)
        if at < 0:
            self._seen = self._seen[-len(tag) + 1 :]
            return
        self._state, rest = "answer", self._seen[at + len(tag) :]
        if rest.strip() and self._answer is not None:
            self._answer.feed(rest.lstrip())
        elif not rest and not self._forced and self._answer is not None:
            if self._answer.mask() is not None:  # as models write it: their answer stands apart
                self._forced = self._texts.encode("\n\n")
