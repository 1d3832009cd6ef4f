"""How the byte-level BPE tokenizers of GGUF files cut a text, by the name in tokenizer.ggml.pre.

The patterns are those of llama.cpp's `llama-vocab.cpp` (before its rewrites for C++ where it quotes
the original). Only names of ternary models' tokenizers and their nearest kin stand here; any other
is rejected, since a text cut otherwise gives other ids in silence. It must not know vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


@dataclass(frozen=True)
class PreTokenizer:
    """`patterns` cut the text one after the other; every match and every gap is a piece.

    `ignore_merges`: a piece that is a token as a whole is not merged. `bos`: what an absent
    add_bos_token means. `nfc`: the text is normalised first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    bos: bool = False
    nfc: bool = False

    def to_json(self) -> dict[str, Any]:
        """The pre_tokenizer of tokenizer.json."""
        if self is GPT2:  # the library has this pattern built in
            return _byte_level(use_regex=True)
        splits = [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
            for pattern in self.patterns
        ]
        return {"type": "Sequence", "pretokenizers": [*splits, _byte_level(use_regex=False)]}


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


GPT2 = PreTokenizer((_GPT2,))
_LLAMA3 = PreTokenizer(
    (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), ignore_merges=True, bos=True
)
_LLAMA3_MERGED = PreTokenizer(_LLAMA3.patterns)
_QWEN2 = PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",), nfc=True)
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

PRE_TOKENIZERS = {
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "olmo": GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": _LLAMA3_MERGED,
    "dbrx": _LLAMA3_MERGED,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "exaone": _DIGITS,
    "default": _DEFAULT,
}
# The names tried when a tokenizer is exported, one of each behaviour, the simplest first.
EXPORTED = ("gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "default")
