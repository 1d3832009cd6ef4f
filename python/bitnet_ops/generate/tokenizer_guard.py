"""What a tokenizer.json may hold, whoever wrote it: parts that are known, within limits.

The tokenizers library runs in this process, and some of its parts can be made to take gigabytes for
two letters, or years. So a part that is not listed here is rejected by its name; of those that are,
expressions must end, a text must stay short whatever is done to it, and a special token may not
stand for thousands.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer as Backend

from bitnet_ops.errors import BitNetError
from bitnet_ops.untrusted.patterns import check_limits

MOST_BYTES = 256 << 20  # of the file: vocabularies of 256k tokens take 35 MB
_MOST_GROWTH = 256  # characters that all the steps of a part may make of one
_MOST_IDS = 1024  # that one character may become, in all parts together
_MOST_TEXT = 1 << 14  # characters that an id may become
_MOST_STEPS = 64  # of a part; published ones have less than ten
_MOST_ADDED = 64  # ids that a post-processor may put around a text
MOST_TOKEN = 8192  # characters of one; published ones have at most some hundred
_MOST_UNIGRAM = 512  # of Unigram, which tries every beginning of a token at every character
_MOST_AFFIX = 16
_MOST_WORD = 1000  # characters of a word of WordPiece, which takes their square

# part -> its known types -> by how much one of them may lengthen a text, 0: by what it says itself
_KNOWN_STEPS: dict[str, dict[str, float]] = {
    "normalizer": {
        **dict.fromkeys(("Sequence", "Strip", "StripAccents", "Nmt"), 1.0),
        **dict.fromkeys(("NFC", "NFD", "Lowercase", "BertNormalizer"), 4.0),
        **dict.fromkeys(("NFKC", "NFKD"), 18.0),  # of U+FDFA
        "ByteLevel": 4.0,
        **dict.fromkeys(("Replace", "Prepend", "Precompiled"), 0.0),
    },
    "pre_tokenizer": {
        **dict.fromkeys(("Sequence", "Split", "Digits", "Punctuation", "Whitespace"), 1.0),
        **dict.fromkeys(("WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"), 1.0),
        **dict.fromkeys(("UnicodeScripts", "FixedLength"), 1.0),
        "Metaspace": 2.0,  # each puts a character before every piece
        "ByteLevel": 5.0,  # likewise, and makes a character of every byte
    },
    "decoder": {
        **dict.fromkeys(("Sequence", "ByteLevel", "ByteFallback", "Fuse", "Strip"), 1.0),
        **dict.fromkeys(("Metaspace", "BPEDecoder", "WordPiece"), 2.0),
        "Replace": 0.0,
    },
    "post_processor": dict.fromkeys(
        ("Sequence", "ByteLevel", "TemplateProcessing", "BertProcessing", "RobertaProcessing"), 1.0
    ),
    "model": {
        **dict.fromkeys(("WordPiece", "WordLevel"), 1.0),
        **dict.fromkeys(("BPE", "Unigram"), 0.0),
    },
}

# The alternatives that the patterns of GPT-2, Llama 3, Qwen, StarCoder, BLOOM and their kin are
# made of.
_KNOWN = frozenset(
    {
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"'(?i:[sdmt]|ll|ve|re)",
        *(r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"),
        *(r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\s+(?!\S)", r"\s+", r"\s*[\r\n]+", r"\s*[\r\n]"),
        *(r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),
        *(r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r"\d", r"\d+", r"[0-9]", r"[0-9]+"),
        *("[0-9][0-9][0-9]", r"[\p{P}\$\+<=>\^~\|]+", r" ?[^(\s|[.,!?…。，、।۔،])]+"),
    }
)


class TokenizerError(BitNetError, ValueError):
    """A tokenizer that is missing or broken, or an id it does not have."""


@contextlib.contextmanager
def library_errors(expected: str) -> Iterator[None]:
    """What comes out of the tokenizers library, panics included, as one line."""
    try:
        yield
    except BaseException as error:  # a panic of Rust is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"tokenizer: expected {expected}, got: {error}") from None


def check_backend(backend: Backend) -> None:
    """Raise ValueError, "expected ..., got ...", for a part that is not known or beyond a limit."""
    longest = max(map(len, backend.get_vocab()), default=0)
    most = _MOST_UNIGRAM if type(backend.model).__name__ == "Unigram" else MOST_TOKEN
    if longest > most:
        raise ValueError(f"tokens of at most {most} characters, got one of {longest}")
    made = {part: _check_part(backend, part, known) for part, known in _KNOWN_STEPS.items()}
    of_text = made["normalizer"] * made["pre_tokenizer"] * made["model"]
    if of_text > _MOST_IDS:
        raise ValueError(f"at most {_MOST_IDS} ids of a character, got {of_text:.0f}")
    if longest * made["decoder"] > _MOST_TEXT:
        got = f"{longest * made['decoder']:.0f}"
        raise ValueError(f"at most {_MOST_TEXT} characters of an id, got {got}")


def _check_part(backend: Backend, part: str, known: Mapping[str, float]) -> float:
    """How many characters a part makes of one, at most, once its steps are known to be good."""
    growth, added = 1.0, 0
    steps = list(_steps(backend, part))
    if len(steps) > _MOST_STEPS:
        raise ValueError(f"at most {_MOST_STEPS} steps in the {part}, got {len(steps)}")
    for step in steps:
        kind = step["type"]
        if kind not in known:
            raise ValueError(f"a {part} among {', '.join(known)}, got {str(kind)[:40]!r}")
        pattern = step.get("pattern")
        if isinstance(pattern, Mapping) and isinstance(pattern.get("Regex"), str):
            check_limits(pattern["Regex"], of_tokenizer=True)
        growth *= known[kind] or _growth(step)
        added += _added(step)
        if step.get("max_input_chars_per_word", 0) > _MOST_WORD:
            raise ValueError(f"words of at most {_MOST_WORD} characters, got more")
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):  # of every letter
            if len(step.get(name) or "") > _MOST_AFFIX:
                raise ValueError(f"{name} of at most {_MOST_AFFIX} characters, got more")
    if growth > _MOST_GROWTH:
        got = f"{growth:.0f}"
        raise ValueError(f"a {part} that makes at most {_MOST_GROWTH} characters of one, "
                         f"got {got}")  # fmt: skip
    if added > _MOST_ADDED:
        raise ValueError(f"at most {_MOST_ADDED} ids around a text, got {added}")
    return growth


def is_known(backend: Backend) -> bool:
    """Whether every expression of `backend` is made of those that published tokenizers have."""
    steps = [step for part in ("normalizer", "pre_tokenizer") for step in _steps(backend, part)]
    patterns = (step["pattern"] for step in steps if isinstance(step.get("pattern"), Mapping))
    expressions = (pattern["Regex"] for pattern in patterns if "Regex" in pattern)
    return all(part in _KNOWN for expression in expressions for part in _alternatives(expression))


def _steps(backend: Backend, part: str) -> Iterator[dict[str, Any]]:
    """The steps of a part, those of sequences among them, however deep."""
    found = getattr(backend, part)
    if part == "model":  # its state is the whole vocabulary
        names = ("max_input_chars_per_word", "continuing_subword_prefix", "end_of_word_suffix")
        values = {name: getattr(found, name) for name in names if hasattr(found, name)}
        values["byte_fallback"] = getattr(found, "byte_fallback", True)  # Unigram does not say it
        yield {"type": type(found).__name__, **values}
        return
    try:
        waiting = [json.loads(found.__getstate__())] if found is not None else []
    except Exception:  # written in Python by whoever made `backend`: nobody's file
        return
    while waiting:
        step = waiting.pop()
        yield step
        for key in ("normalizers", "pretokenizers", "decoders", "processors"):
            waiting += step.get(key) or []


def _growth(step: Mapping[str, Any]) -> float:
    """How much longer a step makes a text that says it itself: at most."""
    if "byte_fallback" in step:
        return 4.0 if step["byte_fallback"] else 1.0
    if step["type"] == "Prepend":
        return 1.0 + len(str(step.get("prepend")))
    if step["type"] == "Precompiled":
        try:
            data = base64.b64decode(step.get("precompiled_charsmap") or "")
        except (binascii.Error, ValueError):
            return float("inf")
        # a trie, and behind it the replacements, each with a zero behind it
        table = data[4 + int.from_bytes(data[:4], "little") :]
        return float(max(1, *map(len, table.split(b"\0"))))
    pattern, content = step.get("pattern"), len(str(step.get("content")))
    text = pattern.get("String") if isinstance(pattern, Mapping) else None
    if not text:  # an expression may match between any two characters
        return 1.0 + content
    return max(1.0, content / len(text))


def _added(step: Mapping[str, Any]) -> int:
    """How many ids a post-processor puts around a text; a text that it repeats counts as many."""
    if step["type"] != "TemplateProcessing":
        return 2
    ids = {name: len(one.get("ids", ())) for name, one in step.get("special_tokens", {}).items()}
    pieces = step.get("single") or []
    texts = sum("Sequence" in piece for piece in pieces)
    if texts > 1:
        return _MOST_ADDED * texts
    return sum(
        ids.get(piece["SpecialToken"].get("id"), 1) for piece in pieces if "SpecialToken" in piece
    )


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
