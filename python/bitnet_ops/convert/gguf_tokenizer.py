"""The tokenizer of a GGUF file's metadata -> tokenizer.json and tokenizer_config.json.

Two kinds are rebuilt: byte-level BPE ("gpt2") and SentencePiece as llama.cpp runs it ("llama": the
best-scored neighbours are joined until none is left, bytes stand in for what is unknown). The
`tokenizers` library reads the result once, so that what is written works. It must not know tensors.

How byte-level tokenizers cut a text is named in tokenizer.ggml.pre. The patterns are those of
llama.cpp's `llama-vocab.cpp` (before its rewrites for C++ where it quotes the original). Only names
of ternary models' tokenizers and their nearest kin stand here; any other is rejected, since a text
cut otherwise gives other ids in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitnet_ops.config import ModelConfig
from bitnet_ops.convert.errors import listed, reject, shown
from bitnet_ops.formats.gguf import is_strings
from bitnet_ops.generate.tokenizer import END_TOKENS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"
_REMEDY = "give the original tokenizer's folder with --tokenizer, or --tokenizer none"
# Llama 3's vocabulary, which BitNet 2B-4T has too: ordinary tokens, then special ones. Published
# files of the latter name no pre-tokenizer, so that llama.cpp cuts texts otherwise than the model
# was trained to.
_LLAMA3_BEGIN, _LLAMA3_SIZE, LLAMA3_TOKEN = 128000, 128256, "<|begin_of_text|>"
_MAX_TOKEN = 1024  # characters
# What looking for merges may cost: the characters of all pieces that are tried, and the merges that
# are found. The largest vocabularies of SentencePiece take 20 million and 0.6 million.
_MAX_TRIED = 1 << 26
_MAX_MERGES = 1 << 21
# Keys that are read, or that leave texts and their ids as they are.
_KNOWN = frozenset(
    """model pre tokens token_type scores merges add_bos_token add_eos_token add_space_prefix
    token_type_count precompiled_charsmap remove_extra_whitespaces""".split()
)
_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


def tokenizer_files(
    metadata: Mapping[str, Any], model: ModelConfig
) -> tuple[dict[str, str], list[str]]:
    """(file name -> its text, remarks); no files where the metadata holds no vocabulary."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or (isinstance(kind, str) and kind in ("none", "no_vocab")):
        return {}, ["the file has no vocabulary: the model takes token ids alone"]
    if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
        reject(
            "tokenizer-model", 'tokenizer.ggml.model "gpt2" or "llama"', shown(kind, 40), _REMEDY
        )
    _check_keys(metadata)
    vocabulary = Vocabulary(metadata, model.vocab_size)
    remarks: list[str] = []
    built = _byte_level(vocabulary, remarks) if kind == "gpt2" else _sentencepiece(vocabulary)
    built["post_processor"] = _post_processor(vocabulary, built.pop("bos"))
    text = json.dumps(built, ensure_ascii=False, indent=1)
    _check_loads(text)
    config = json.dumps(_config(vocabulary, model), ensure_ascii=False, indent=1)
    return {"tokenizer.json": text, "tokenizer_config.json": config}, remarks


def _check_keys(metadata: Mapping[str, Any]) -> None:
    """Reject what may cut texts otherwise; the chat templates of other names, ids of single tokens
    and the tokenizers of other programs do not.
    """
    unknown = []
    for full, value in metadata.items():
        key = full.removeprefix("tokenizer.ggml.")
        if key == full or key in _KNOWN or key.endswith("_token_id"):
            continue
        if not (key == "add_sep_token" and value is False):
            unknown.append(full)
    if unknown:
        expected = "keys of a tokenizer that are known here"
        reject("tokenizer-key", expected, listed(unknown), _REMEDY)


def first_twice(texts: Iterable[str]) -> str | None:
    """The first text that stands there a second time, None if all differ."""
    seen: set[str] = set()
    for text in texts:
        if text in seen:
            return text
        seen.add(text)
    return None


class Vocabulary:
    """The tokenizer.ggml.* keys, checked; ids of roles are absent where the file has none."""

    def __init__(self, metadata: Mapping[str, Any], rows: int) -> None:
        """`rows` of the embedding: there are no more tokens."""
        self._metadata = metadata
        stored = self._get("tokens")
        if not is_strings(stored) or not len(stored):
            reject("tokenizer-tokens", "tokenizer.ggml.tokens, a list of strings", "none", _REMEDY)
        if len(stored) > rows:
            expected = f"a vocabulary of at most {rows} tokens, the rows of token_embd"
            reject("tokenizer-size", expected, f"{len(stored)}", _REMEDY)
        tokens = list(stored)
        if max(map(len, tokens)) > _MAX_TOKEN:
            found = f"one of {max(map(len, tokens))}"
            reject("tokenizer-tokens", f"tokens of at most {_MAX_TOKEN} characters", found, _REMEDY)
        self.tokens: list[str] = tokens
        self.types = self._numbers("token_type", np.full(len(tokens), NORMAL)).astype(int).tolist()
        self.is_llama3 = len(tokens) >= _LLAMA3_SIZE and tokens[_LLAMA3_BEGIN] == LLAMA3_TOKEN
        if self.is_llama3:
            head, tail = self.types[:_LLAMA3_BEGIN], self.types[_LLAMA3_BEGIN:]
            self.types = head + [CONTROL if kind == NORMAL else kind for kind in tail]
        self.types = [  # some converters call every token an ordinary one
            CONTROL if kind in (NORMAL, USER_DEFINED) and token in END_TOKENS else kind
            for token, kind in zip(tokens, self.types, strict=True)
        ]
        twice = first_twice(tokens)
        if twice is not None:
            reject("tokenizer-tokens", "every token once", f"{twice!r} twice", _REMEDY)
        self.roles: dict[str, int] = {}
        for name, role in _ROLES.items():
            value = self._get(f"{name}_token_id")
            if value is None:
                continue
            if type(value) is not int or not 0 <= value < len(tokens):
                expected = f"{name}_token_id below {len(tokens)}"
                reject("tokenizer-ids", expected, shown(value, 40), _REMEDY)
            self.roles[role] = value

    def _get(self, name: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def _numbers(self, name: str, default: Any) -> Any:
        values = self._get(name)
        if values is None:
            return default
        right = isinstance(values, np.ndarray) and values.dtype != bool
        if not right or len(values) != len(self.tokens) or not np.isfinite(values).all():
            expected = f"tokenizer.ggml.{name}, a number for each of {len(self.tokens)} tokens"
            reject("tokenizer-tokens", expected, type(values).__name__, _REMEDY)
        return values

    @property
    def scores(self) -> list[float]:
        values = self._numbers("scores", None)
        if values is None:
            reject("tokenizer-tokens", "tokenizer.ggml.scores", "no such key", _REMEDY)
        scores: list[float] = values.astype(float).tolist()
        return scores

    @property
    def merges(self) -> list[list[str]]:
        merges = self._get("merges")
        if not is_strings(merges):
            reject("tokenizer-merges", "tokenizer.ggml.merges, pairs of tokens", "none", _REMEDY)
        if len(merges) > _MAX_MERGES:
            reject("tokenizer-merges", f"at most {_MAX_MERGES} merges", f"{len(merges)}", _REMEDY)
        pairs = []
        for merge in merges:
            pair = merge.split(" ", 2)
            if len(pair) != 2:
                expected = "tokenizer.ggml.merges, pairs of tokens"
                reject("tokenizer-merges", expected, repr(merge[:60]), _REMEDY)
            pairs.append(pair)
        return pairs

    @property
    def pre(self) -> str | None:
        value = self._get("pre")
        if value is not None and not isinstance(value, str):
            reject("tokenizer-pre", "tokenizer.ggml.pre as a name", shown(value, 40), _REMEDY)
        return value

    @property
    def template(self) -> str | None:
        value = self._metadata.get("tokenizer.chat_template")
        return value if isinstance(value, str) else None

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name)
        return value if isinstance(value, bool) else default

    def ids(self) -> dict[str, int]:
        """Token -> id, without the unused ones, which fill up the embedding's rows."""
        pairs = zip(self.tokens, self.types, strict=True)
        return {token: i for i, (token, kind) in enumerate(pairs) if kind != UNUSED}

    def added(self) -> list[dict[str, Any]]:
        """Tokens that are found in a text before anything else is done to it."""
        return [
            {
                "id": i,
                "content": self.tokens[i],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != USER_DEFINED,
            }
            for i, kind in enumerate(self.types)
            if kind in (CONTROL, USER_DEFINED, UNKNOWN) and self.tokens[i]
        ]


def _frame(vocabulary: Vocabulary, bos: bool) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "bos": vocabulary.flag("add_bos_token", bos),
    }


def _byte_level(vocabulary: Vocabulary, remarks: list[str]) -> dict[str, Any]:
    name = vocabulary.pre
    if name is None and vocabulary.is_llama3:
        remarks.append('tokenizer.ggml.pre is absent: "llama-bpe", since the vocabulary is Llama 3')
        name = "llama-bpe"
    if name is None:
        remarks.append('tokenizer.ggml.pre is absent: "default", as llama.cpp takes it')
        name = "default"
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        reject("tokenizer-pre", f"tokenizer.ggml.pre among {known}", shown(name, 40), _REMEDY)
    pre = PRE_TOKENIZERS[name]
    ids = vocabulary.ids()
    merges = vocabulary.merges
    for left, right in merges:
        if not {left, right, left + right} <= ids.keys():
            reject("tokenizer-merges", "merges of tokens", f"{left!r} with {right!r}", _REMEDY)
    return {
        **_frame(vocabulary, pre.bos),
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": pre.to_json(),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": _bpe(ids, merges, ignore_merges=pre.ignore_merges),
    }


def _bpe(ids: dict[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": ids,
        "merges": merges,
    }


def _sentencepiece(vocabulary: Vocabulary) -> dict[str, Any]:
    ids = vocabulary.ids()
    bytes_ = [i for i, kind in enumerate(vocabulary.types) if kind == BYTE]
    unknown = vocabulary.roles.get("unk")
    prefix = vocabulary.flag("add_space_prefix", True)
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return {
        **_frame(vocabulary, True),
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": _bpe(
            ids,
            _merges_by_score(vocabulary),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=len(bytes_) == 256,
        ),
    }


def _merges_by_score(vocabulary: Vocabulary) -> list[list[str]]:
    """Every way to join two tokens to a third, the best-scored result first."""
    scores = {
        token: score
        for token, score, kind in zip(
            vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True
        )
        if kind in (NORMAL, USER_DEFINED)
    }
    tried = sum(len(token) ** 2 for token in scores)
    if tried > _MAX_TRIED:
        expected = f"tokens whose lengths have squares of {_MAX_TRIED} in all"
        reject("tokenizer-tokens", expected, f"{tried}", _REMEDY)
    found = []  # (-score, -at, token): the pieces are cut once the order is known
    for token, score in scores.items():
        found += [
            (-score, -at, token)
            for at in range(1, len(token))
            if token[:at] in scores and token[at:] in scores
        ]
        if len(found) > _MAX_MERGES:
            expected = f"at most {_MAX_MERGES} ways to join tokens"
            reject("tokenizer-tokens", expected, "more", _REMEDY)
    found.sort()
    return [[token[:-at], token[-at:]] for _, at, token in found]


def _post_processor(vocabulary: Vocabulary, bos: bool) -> dict[str, Any] | None:
    """A template that puts bos before a text and eos behind it, as the file asks for."""
    wanted = {"bos": bos, "eos": vocabulary.flag("add_eos_token", False)}
    if any(wanted[role] and role not in vocabulary.roles for role in wanted):
        role = next(role for role in wanted if wanted[role] and role not in vocabulary.roles)
        reject("tokenizer-ids", f"{role}_token_id, since add_{role}_token is true", "no such key",
               _REMEDY)  # fmt: skip
    ids = {role: vocabulary.roles[role] for role in wanted if wanted[role]}
    if not ids:
        return None

    def special(role: str) -> list[dict[str, Any]]:
        if role not in ids:
            return []
        return [{"SpecialToken": {"id": vocabulary.tokens[ids[role]], "type_id": 0}}]

    def text(name: str) -> list[dict[str, Any]]:
        return [*special("bos"), {"Sequence": {"id": name, "type_id": 0}}, *special("eos")]

    tokens = {
        vocabulary.tokens[i]: {
            "id": vocabulary.tokens[i],
            "ids": [i],
            "tokens": [vocabulary.tokens[i]],
        }
        for i in ids.values()
    }
    return {
        "type": "TemplateProcessing",
        "single": text("A"),
        "pair": [*text("A"), *text("B")],
        "special_tokens": tokens,
    }


def _config(vocabulary: Vocabulary, model: ModelConfig) -> dict[str, Any]:
    """tokenizer_config.json."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    for role, token_id in vocabulary.roles.items():
        config[f"{role}_token"] = vocabulary.tokens[token_id]
    if vocabulary.template is not None:
        config["chat_template"] = vocabulary.template
    return config


def _check_loads(text: str) -> None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        reject("tokenizer-broken", "a vocabulary that makes a tokenizer", f"{error}", _REMEDY)


# How a text is cut --------------------------------------------------------------------------------

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
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
            return _byte_level_step(use_regex=True)
        splits = [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
            for pattern in self.patterns
        ]
        return {"type": "Sequence", "pretokenizers": [*splits, _byte_level_step(use_regex=False)]}


def _byte_level_step(*, use_regex: bool) -> dict[str, Any]:
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
# marks go with letters: vowel signs of Devanagari, Thai, Arabic
_QWEN35 = PreTokenizer(
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
        rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    nfc=True,
)
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
    "qwen35": _QWEN35,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "exaone": _DIGITS,
    "default": _DEFAULT,
}
# The names tried when a tokenizer is exported, one of each behaviour, the simplest first.
EXPORTED = ("gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "qwen35", "default")
