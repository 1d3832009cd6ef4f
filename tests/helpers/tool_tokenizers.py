"""Tokenizers of models that think and call tools, and random answers under masks."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from bitnet_ops.dummy import tokenizer as dummy_tokenizer
from bitnet_ops.generate.constraint import Constraint
from bitnet_ops.generate.grammar import Grammars
from bitnet_ops.generate.text import StreamDecoder
from bitnet_ops.generate.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[1] / "data" / "demo-model" / "tokenizer.json"
END = "<|im_end|>"


def tokenizer_of(
    *, words: bool = True, tags: bool | None = False, template: str | None = None
) -> Tokenizer:
    """words: with the demo's vocabulary, else bytes. tags: <think>, <tool_call> and their ends are
    tokens, special ones or not; None: they are plain text."""
    if words:
        backend = Backend.from_file(str(DEMO))
    else:
        backend = dummy_tokenizer.build({"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 1})
    special = [END, "<|im_start|>", "<|python_tag|>"]
    backend.add_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    if tags is not None:
        names = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
        backend.add_tokens([AddedToken(t, special=tags, normalized=False) for t in names])
    return Tokenizer(backend, {"chat_template": template} if template else None)


def grammars_of(tokenizer: Tokenizer, vocab_size: int | None = None) -> Grammars:
    end = tokenizer.token_id(END)
    assert end is not None
    return Grammars(tokenizer, vocab_size or tokenizer.vocab_size + 5, [1, end])


def allowed(constraint: Constraint) -> list[int] | None:
    mask = constraint.mask()
    return None if mask is None else np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


def random_answer(
    grammars: Grammars, constraint: Constraint, seed: int, maximum: int = 600
) -> tuple[list[int], bool]:
    """Tokens chosen at random among those that may come, mostly short ones; whether it ended.

    Where everything may come, an answer of a few words is given, and ends.
    """
    draw, ids = random.Random(seed), list[int]()
    while len(ids) < maximum:
        may = allowed(constraint)
        assert may != [], grammars.texts.tokenizer.decode(ids)
        if may is None:
            may = [1] if draw.random() < 0.3 else [draw.randrange(300, 320)]
        ends = [i for i in may if i in grammars.stop_ids]
        token = draw.choice(ends if ends and draw.random() < 0.3 else may)
        constraint.add(token)
        if token in grammars.stop_ids:
            return ids, True
        ids.append(token)
    return ids, False


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = StreamDecoder(tokenizer, skip_special_tokens=False)
    return "".join([*map(decoder.push, ids), decoder.finish()])
