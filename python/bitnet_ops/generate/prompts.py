"""Prompts as users give them: lists, tensors or arrays of token ids; what is wrong with others."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import Tensor


class PromptError(ValueError):
    """A prompt that cannot be run: empty, with ids outside the vocabulary, or too long."""


def token_ids(prompt: object, who: str = "prompt") -> list[int]:
    """The ids of one prompt: of a sequence of integers, or of a tensor or array [T] or [1, T].

    Raises TypeError for anything else, texts and booleans included.
    """
    values: object = prompt
    if callable(tolist := getattr(prompt, "tolist", None)):  # a tensor, a NumPy array
        values = tolist()
        if isinstance(values, list) and len(values) == 1 and isinstance(values[0], list):
            values = values[0]
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise TypeError(f"{who}: expected token ids as a list of integers, got {kind_of(prompt)}")
    if all(type(i) is int for i in values):
        return list(values)
    ids = []
    for at, value in enumerate(values):
        if isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, Tensor):
            raise TypeError(
                f"{who}: expected token ids as a list of integers, got {kind_of(value)} at {at}"
            )
        ids.append(operator.index(value))
    return ids


def kind_of(value: object) -> str:
    """What `value` is, in words for a message."""
    if isinstance(value, Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    text = repr(value)
    shown = text if len(text) <= 40 else text[:37] + "..."
    return "None" if value is None else f"{shown} ({type(value).__name__})"


def check_prompt(ids: Sequence[int], vocab_size: int, max_positions: int) -> None:
    """Raise PromptError for ids that a model of these sizes cannot run."""
    if not len(ids):
        raise PromptError(
            "engine: expected a prompt of at least one token, got an empty one; start it with the "
            "model's bos token"
        )
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise PromptError(
            f"engine: expected prompt ids from 0 to {vocab_size - 1}, got {min(ids)} to "
            f"{max(ids)}; the tokenizer belongs to another model"
        )
    if len(ids) > max_positions:
        raise PromptError(
            f"engine: expected a prompt of at most {max_positions} tokens "
            f"(max_position_embeddings), got {len(ids)}; shorten it"
        )
