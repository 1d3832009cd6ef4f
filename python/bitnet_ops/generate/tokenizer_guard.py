"""Whether a tokenizer.json may hang or fill the memory, and a process to run it in if it may.

A pre-tokenizer, a normalizer or a decoder of tokenizer.json may hold any regular expression, and a
normalizer may turn one character into a million. The expressions of published tokenizers are known
and run here; a tokenizer with others runs in a process with limits (bounded.py), which costs its
memory a second time and a tenth of a millisecond a call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from bitnet_ops.untrusted.bounded import BoundedProcess, ChildError, LimitError

# The alternatives that the patterns of GPT-2, Llama 3, Qwen, StarCoder, BLOOM and their kin are
# made of. Each fails or matches after time in proportion to what it looks at.
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
_MOST_GROWTH = 64  # characters that the normalizer may make of one
_MEMORY_BYTES = 3 << 30  # vocabularies of 256k tokens take a few hundred MB
_CPU_S, _CPU_S_PER_CHARACTER = 10.0, 2e-5


def needs_guard(backend: Backend) -> bool:
    """Whether `backend` holds an expression that is not known, or a normalizer that inflates."""
    growth = 1.0
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        part = getattr(backend, name)
        if part is None:
            continue
        try:
            state = json.loads(part.__getstate__())
        except Exception:  # written in Python by whoever made `backend`: nobody's file
            continue
        for step in _steps(state):
            if not all(_is_known(expression) for expression in _expressions(step)):
                return True
            growth *= _growth(step)
    return growth > _MOST_GROWTH


def _steps(state: Any) -> Iterator[dict[str, Any]]:
    """Every object in a part's JSON, however deep."""
    waiting = [state]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield item
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item


def _expressions(step: dict[str, Any]) -> list[str]:
    return [step["Regex"]] if isinstance(step.get("Regex"), str) else []


def _growth(step: dict[str, Any]) -> float:
    """How much longer a Replace or a Prepend makes a text, at most."""
    if step.get("type") == "Prepend":
        return max(1.0, len(str(step.get("prepend"))) / 2)
    if step.get("type") != "Replace":
        return 1.0
    pattern = step.get("pattern")
    text = pattern.get("String", "") if isinstance(pattern, dict) else ""
    return max(1.0, len(str(step.get("content"))) / max(1, len(text)))


def _is_known(expression: str) -> bool:
    return all(alternative in _KNOWN for alternative in _alternatives(expression))


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


class GuardedBackend:
    """`encode` and `decode` of a tokenizer in a process; raises LimitError, ChildError."""

    def __init__(self, backend: Backend) -> None:
        self._process = BoundedProcess(
            "tokenizer", _MEMORY_BYTES, ("open", {"text": backend.to_str()})
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of `text`."""
        return list(self._call("encode", text, text=text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of `ids`."""
        ids = list(ids)
        return str(self._call("decode", ids, ids=ids, skip_special_tokens=skip_special_tokens))

    def _call(self, job: str, sized: Sequence[object], **arguments: Any) -> Any:
        return self._process.call(job, _CPU_S + _CPU_S_PER_CHARACTER * len(sized), **arguments)


__all__ = ["ChildError", "GuardedBackend", "LimitError", "needs_guard"]
