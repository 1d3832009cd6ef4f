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
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from bitnet_ops.errors import BitNetError
from bitnet_ops.untrusted.patterns import check_limits

MAX_BYTES = 256 << 20  # of the file: vocabularies of 256k tokens take 35 MB
_MAX_GROWTH = 256  # characters that all the steps of a part may make of one
_MAX_IDS = 1024  # that one character may become, in all parts together
_MAX_TEXT = 1 << 14  # characters that an id may become
_MAX_STEPS = 64  # of a part; published ones have less than ten
_MAX_ADDED = 64  # ids that a post-processor may put around a text
MAX_TOKEN = 8192  # characters of one; published ones have at most some hundred
_MAX_UNIGRAM = 512  # of Unigram, which tries every beginning of a token at every character
_MAX_AFFIX = 16
_MAX_WORD = 1000  # characters of a word of WordPiece, which takes their square

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


class TextLengthError(TokenizerError):
    """A text that has more tokens than there is room for."""


@contextlib.contextmanager
def library_errors(expected: str) -> Iterator[None]:
    """What comes out of the tokenizers library, panics included, as one line."""
    try:
        yield
    except BaseException as error:  # a panic of Rust is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"tokenizer: expected {expected}, got: {error}") from None


def encoding(backend: Backend, text: str, add_special_tokens: bool) -> Any:
    """`text` as ids and offsets.

    Where TOKENIZERS_PARALLELISM is set, as the server sets it, other threads go on meanwhile:
    `encode` holds Python's lock, a batch does not, but without that variable it starts threads of
    its own, and a process that is forked afterwards would complain.
    """
    with library_errors("text (str)"):
        if "TOKENIZERS_PARALLELISM" in os.environ:
            return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return backend.encode(text, add_special_tokens=add_special_tokens)


def check_backend(backend: Backend) -> None:
    """Raise ValueError, "expected ..., got ...", for a part that is not known or beyond a limit."""
    longest = max(map(len, backend.get_vocab()), default=0)
    maximum = _MAX_UNIGRAM if type(backend.model).__name__ == "Unigram" else MAX_TOKEN
    if longest > maximum:
        raise ValueError(f"tokens of at most {maximum} characters, got one of {longest}")
    made = {part: _check_part(backend, part, known) for part, known in _KNOWN_STEPS.items()}
    of_text = made["normalizer"] * made["pre_tokenizer"] * made["model"]
    if of_text > _MAX_IDS:
        raise ValueError(f"at most {_MAX_IDS} ids of a character, got {of_text:.0f}")
    if longest * made["decoder"] > _MAX_TEXT:
        got = f"{longest * made['decoder']:.0f}"
        raise ValueError(f"at most {_MAX_TEXT} characters of an id, got {got}")


def _check_part(backend: Backend, part: str, known: Mapping[str, float]) -> float:
    """How many characters a part makes of one, at most, once its steps are known to be good."""
    growth, added = 1.0, 0
    steps = list(_steps(backend, part))
    if len(steps) > _MAX_STEPS:
        raise ValueError(f"at most {_MAX_STEPS} steps in the {part}, got {len(steps)}")
    for step in steps:
        kind = step["type"]
        if kind not in known:
            raise ValueError(f"a {part} among {', '.join(known)}, got {str(kind)[:40]!r}")
        pattern = step.get("pattern")
        if isinstance(pattern, Mapping) and isinstance(pattern.get("Regex"), str):
            check_limits(pattern["Regex"], of_tokenizer=True)
        growth *= known[kind] or _growth(step)
        added += _added(step)
        if step.get("max_input_chars_per_word", 0) > _MAX_WORD:
            raise ValueError(f"words of at most {_MAX_WORD} characters, got more")
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):  # of every letter
            if len(step.get(name) or "") > _MAX_AFFIX:
                raise ValueError(f"{name} of at most {_MAX_AFFIX} characters, got more")
    if growth > _MAX_GROWTH:
        got = f"{growth:.0f}"
        raise ValueError(f"a {part} that makes at most {_MAX_GROWTH} characters of one, "
                         f"got {got}")  # fmt: skip
    if added > _MAX_ADDED:
        raise ValueError(f"at most {_MAX_ADDED} ids around a text, got {added}")
    return growth


def max_bytes_of_token(backend: Backend) -> int:
    """How many bytes of a text a token stands for, at most.

    Exactly so where every byte ends in some token. Where parts of a text are left out, or any
    number of letters may become one unknown token, it is at least 64, which no text of people comes
    near on average.
    """
    steps = [step for part in ("normalizer", "pre_tokenizer") for step in _steps(backend, part)]
    by_letter, vocabulary = any(s["type"] == "ByteLevel" for s in steps), backend.get_vocab()
    added = backend.get_added_tokens_decoder().values()
    longest = max((len(t) if by_letter else len(t.encode()) for t in vocabulary), default=1)
    longest = max([longest, *(len(token.content.encode()) for token in added)])
    letters = ByteLevel.alphabet() if by_letter else [f"<0x{byte:02X}>" for byte in range(256)]
    whole = isinstance(backend.model, BPE) and (by_letter or backend.model.byte_fallback)
    shrinks = [_shrinks(step) for step in steps]
    if (
        not (whole and vocabulary.keys() >= set(letters))
        or None in shrinks
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return max(longest, 64)
    return longest * math.prod(s for s in shrinks if s is not None)


_SHRINKS = {  # how many bytes may become one
    **dict.fromkeys(("Sequence", "ByteLevel", "Prepend", "Digits", "Metaspace"), 1),
    **dict.fromkeys(("UnicodeScripts", "FixedLength"), 1),
    **dict.fromkeys(("NFC", "NFD", "Lowercase"), 3),  # the Kelvin sign; a syllable of Hangul
    **dict.fromkeys(("NFKC", "NFKD"), 4),  # mathematical letters
}


def _shrinks(step: Mapping[str, Any]) -> int | None:
    """How many bytes of a text this step makes one of, at most; None: any number."""
    kind, pattern = step["type"], step.get("pattern")
    if kind in ("Split", "Punctuation"):
        return None if step.get("behavior") == "Removed" else 1
    if kind == "Replace" and isinstance(pattern, Mapping) and pattern.get("String"):
        content = str(step.get("content")).encode()
        return math.ceil(len(pattern["String"].encode()) / len(content)) if content else None
    return _SHRINKS.get(kind)


def bytes_of_token(backend: Backend) -> Callable[[str], bytes]:
    """What gives the bytes of a token of the vocabulary, as the decoder reads it."""
    steps = list(_steps(backend, "decoder"))
    kinds = {step["type"] for step in steps}
    spaces = [step["replacement"] for step in steps if step["type"] == "Metaspace"]
    spaces += [step["suffix"] for step in steps if step["type"] == "BPEDecoder"]
    patterns = [(step["pattern"], step["content"]) for step in steps if step["type"] == "Replace"]
    texts = [(space, " ") for space in spaces]
    texts += [(p["String"], content) for p, content in patterns if "String" in p]
    prefixes = [step["prefix"] for step in steps if step["type"] == "WordPiece"]

    def read(token: str) -> bytes:
        if "ByteLevel" in kinds and all(letter in _BYTES for letter in token):
            return bytes(_BYTES[letter] for letter in token)
        if "ByteFallback" in kinds and (byte := re.fullmatch("<0x([0-9A-F]{2})>", token)):
            return bytes.fromhex(byte[1])
        for old, new in texts:
            token = token.replace(old, new)
        for prefix in prefixes:
            token = token[len(prefix) :] if token.startswith(prefix) else f" {token}"
        return token.encode()

    return read


# The letter of each byte in tokens of bytes, as GPT-2 has it: those that print are themselves.
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + at): byte for at, byte in enumerate(sorted(set(range(256)).difference(_PRINTED)))
}


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
        return _MAX_ADDED * texts
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
