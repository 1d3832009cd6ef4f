"""What a tokenizer.json may hold, whoever wrote it: expressions that end, texts that stay short.

A pre-tokenizer, a normalizer or a decoder may hold any regular expression, and a normalizer may
turn one character into a million.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as Backend

from bitnet_ops.untrusted.patterns import check_limits

MOST_BYTES = 256 << 20  # of the file: vocabularies of 256k tokens take 35 MB
_MOST_GROWTH = 64  # characters that the normalizer may make of one

# The alternatives that the patterns of GPT-2, Llama 3, Qwen, StarCoder, BLOOM and their kin are
# made of.
_KNOWN = frozenset(
    {
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"'(?i:[sdmt]|ll|ve|re)",
        *(r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"),
        *(r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\s+(?!\S)", r"\s+", r"\s*[\r\n]+", r"\s*[\r\n]"),
        *(r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r"\d", r"\d+", r"[0-9]", r"[0-9]+"),
        *("[0-9][0-9][0-9]", r"[\p{P}\$\+<=>\^~\|]+", r" ?[^(\s|[.,!?…。，、।۔،])]+"),
    }
)


def check_backend(backend: Backend) -> None:
    """Raise ValueError, "expected ..., got ...", for an expression or a step beyond the limits."""
    growth = 1.0
    for step in _steps(backend):
        if isinstance(step.get("Regex"), str):
            check_limits(step["Regex"], of_tokenizer=True)
        growth *= _growth(step)
    if growth > _MOST_GROWTH:
        raise ValueError(
            f"a normalizer that makes at most {_MOST_GROWTH} characters of one, got {growth:.0f}"
        )


def is_known(backend: Backend) -> bool:
    """Whether every expression of `backend` is made of those that published tokenizers have."""
    expressions = (step["Regex"] for step in _steps(backend) if isinstance(step.get("Regex"), str))
    return all(part in _KNOWN for expression in expressions for part in _alternatives(expression))


def _steps(backend: Backend) -> Iterator[dict[str, Any]]:
    """Every object in the JSON of the parts that look at a text, however deep."""
    waiting: list[Any] = []
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        part = getattr(backend, name)
        try:
            waiting += [json.loads(part.__getstate__())] if part is not None else []
        except Exception:  # written in Python by whoever made `backend`: nobody's file
            continue
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield item
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item


def _growth(step: dict[str, Any]) -> float:
    """How much longer a Replace or a Prepend makes a text, at most."""
    if step.get("type") == "Prepend":
        return max(1.0, len(str(step.get("prepend"))) / 2)
    if step.get("type") != "Replace":
        return 1.0
    pattern = step.get("pattern")
    text = pattern.get("String", "") if isinstance(pattern, dict) else ""
    return max(1.0, len(str(step.get("content"))) / max(1, len(text)))


def _alternatives(expression: str) -> list[str]:
    """The alternatives of an expression; those within groups and classes stay together."""
    found, depth, begin, i = [], 0, 0, 0
    while i < len(expression):
        c = expression[i]
        if c == "\\":
            i += 1
        elif c in "([":
            depth += 1
        elif c in ")]":
            depth -= 1
        elif c == "|" and depth == 0:
            found.append(expression[begin:i])
            begin = i + 1
        i += 1
    return [*found, expression[begin:]]
