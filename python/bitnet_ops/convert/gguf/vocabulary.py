"""A model folder's tokenizer.json -> the tokenizer.ggml.* keys of a GGUF file.

What is written is read back by gguf_tokenizer.py and compared with the original on texts that make
tokenizers differ, so a tokenizer that the keys cannot express is rejected, never approximated. It
must not know tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bitnet_ops.config import ModelConfig
from bitnet_ops.convert.errors import ConvertError, reject
from bitnet_ops.convert.gguf.pretokenizers import EXPORTED, PRE_TOKENIZERS
from bitnet_ops.convert.gguf.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    tokenizer_files,
)
from bitnet_ops.generate.tokenizer_guard import is_known
from bitnet_ops.untrusted import UntrustedFileError, read_json_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Keys = dict[str, tuple[str, Any]]  # as gguf.Writer takes them
_REMEDY = "export with --no-tokenizer; the file then takes token ids alone"
# Texts in which cuts differ: contractions, runs of digits and spaces, line ends, scripts, marks.
PROBES = (
    "Hello world, this is a test.",
    "  two  spaces\n\n\n and\t\ttabs \r\n\r\n x   ",
    "don't DON'T I'LL we'Ve 'tis o'clock",
    "1 12 123 1234 12345678 3.14159 2^10 x1y22z333",
    "Gr\u00fc\u00dfe na\u00efve caf\u00e9 e\u0301 \ufb01 \u2126 \u00bd \u0664\u0665\u0666",
    "\u65e5\u672c\u8a9e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4 \u0440\u0443\u0441\u0441\u043a",
    "\U0001f642 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u200b\ufeff \u00a0 \x07",
    "...!!! (a)[b]{c} `code` $x+y=z$ a/b\\c <tag> #1 @me ~ ^ | ===== ----",
    "https://example.org/a?b=1&c=%20 foo_bar fooBar FooBAR",
)


def vocabulary_keys(folder: Path, model: ModelConfig) -> tuple[Keys, list[str]]:
    """(tokenizer.ggml.* keys, remarks) of the model in `folder`; ConvertError if inexpressible."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {"tokenizer.ggml.model": ("string", "no_vocab")}, [
            "no tokenizer.json: no vocabulary"
        ]
    from tokenizers import Tokenizer

    try:
        original = Tokenizer.from_file(str(file))
        stored = json.loads(original.to_str())
    except Exception as error:  # the library raises plain Exception
        reject("tokenizer-broken", f"a readable {file}", f"{error}", _REMEDY)
    if not is_known(original):
        found = "a regular expression that none of them has"
        reject("tokenizer-pre", f"one of {', '.join(EXPORTED)}, or SentencePiece", found, _REMEDY)
    config = _object(folder / "tokenizer_config.json")
    keys = _frame(stored, original, config, model, folder)
    kind = stored["model"].get("type")
    decoder = (stored.get("decoder") or {}).get("type")
    if kind == "BPE" and decoder == "ByteLevel":
        candidates = _byte_level(stored, keys)
    elif kind == "BPE" and stored["model"].get("byte_fallback"):
        candidates = _sentencepiece(stored, keys)
    else:
        found = f"{kind} with the decoder {decoder}"
        reject("tokenizer-model", "byte-level or SentencePiece BPE", found, _REMEDY)
    for candidate in candidates:
        if _expresses(candidate, original, model):
            return candidate, []
    reject(
        "tokenizer-pre",
        f"a tokenizer that cuts texts like one of {', '.join(EXPORTED)}, or SentencePiece",
        "other token ids on the texts compared",
        _REMEDY,
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path) if path.is_file() else {}
    except UntrustedFileError as error:
        raise ConvertError("tokenizer-broken", f"export: {error}") from None


def _frame(
    stored: Mapping[str, Any],
    original: Tokenizer,
    config: Mapping[str, Any],
    model: ModelConfig,
    folder: Path,
) -> Keys:
    """Everything but the model's kind, the merges and the scores."""
    tokens, types = _tokens(stored, original, model)
    keys: Keys = {
        "tokenizer.ggml.tokens": ("[string]", tokens),
        "tokenizer.ggml.token_type": ("[int32]", types),
    }
    ids = {"bos": model.bos_token_id}
    ends = list(model.eos_token_ids)
    ids["eos"] = ends[0] if ends else None
    for i, name in enumerate(("eot", "eom")):
        ids[name] = ends[i + 1] if len(ends) > i + 1 else None
    for name, token in (("unknown", "unk_token"), ("padding", "pad_token")):
        content = config.get(token)
        content = content.get("content") if isinstance(content, dict) else content
        ids[name] = original.token_to_id(content) if isinstance(content, str) else None
    for name, token_id in ids.items():
        if token_id is not None:
            keys[f"tokenizer.ggml.{name}_token_id"] = ("uint32", token_id)
    before, behind = _around(original)
    if before not in ([], [ids["bos"]]) or behind not in ([], [ids["eos"]]):
        found = f"{before} before a text and {behind} behind it"
        reject("tokenizer-special", "at most bos before a text and eos behind it", found, _REMEDY)
    keys["tokenizer.ggml.add_bos_token"] = ("bool", bool(before))
    keys["tokenizer.ggml.add_eos_token"] = ("bool", bool(behind))
    template = config.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, str):
        keys["tokenizer.chat_template"] = ("string", template)
    return keys


def _tokens(
    stored: Mapping[str, Any], original: Tokenizer, model: ModelConfig
) -> tuple[list[str], list[int]]:
    """Tokens and types by id, filled up to the rows of the embedding."""
    if original.get_vocab_size() > model.vocab_size:
        found = f"{original.get_vocab_size()} tokens"
        reject("tokenizer-size", f"at most {model.vocab_size} tokens, as the model has rows", found)
    tokens = [f"[PAD{i}]" for i in range(model.vocab_size)]
    types = [UNUSED] * model.vocab_size
    fallback = bool(stored["model"].get("byte_fallback"))
    for token, i in original.get_vocab().items():
        if i >= model.vocab_size:
            reject("tokenizer-size", f"ids below {model.vocab_size}", f"{token!r} with {i}")
        is_byte = fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        tokens[i], types[i] = token, BYTE if is_byte else NORMAL
    for added in stored.get("added_tokens", ()):
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    unknown = stored["model"].get("unk_token")
    if isinstance(unknown, str) and original.token_to_id(unknown) is not None:
        types[original.token_to_id(unknown)] = UNKNOWN
    return tokens, types


def _around(original: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and behind a text."""
    plain = original.encode("a", add_special_tokens=False).ids
    whole = original.encode("a").ids
    for at in range(len(whole) - len(plain) + 1):
        if whole[at : at + len(plain)] == plain:
            return whole[:at], whole[at + len(plain) :]
    return whole, whole


def _merges(stored: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = (m.split(" ") if isinstance(m, str) else m for m in stored["model"]["merges"])
    return [(left, right) for left, right in merges]


def _byte_level(stored: Mapping[str, Any], keys: Keys) -> Iterator[Keys]:
    normalizer = (stored.get("normalizer") or {}).get("type")
    for name in EXPORTED:
        pre = PRE_TOKENIZERS[name]
        same_merges = pre.ignore_merges == bool(stored["model"].get("ignore_merges"))
        if same_merges and normalizer == ("NFC" if pre.nfc else None):
            yield {
                "tokenizer.ggml.model": ("string", "gpt2"),
                "tokenizer.ggml.pre": ("string", name),
                **keys,
                "tokenizer.ggml.merges": ("[string]", [f"{a} {b}" for a, b in _merges(stored)]),
            }


def _sentencepiece(stored: Mapping[str, Any], keys: Keys) -> Iterator[Keys]:
    """Scores are minus the rank of the first merge that makes a token, as SentencePiece's are."""
    rank: dict[str, int] = {}
    for i, (left, right) in enumerate(_merges(stored)):
        rank.setdefault(left + right, i)
    lowest = float(len(rank) + 1)
    scores = [
        -float(rank.get(token, lowest)) if kind in (NORMAL, USER_DEFINED) else 0.0
        for token, kind in zip(
            keys["tokenizer.ggml.tokens"][1], keys["tokenizer.ggml.token_type"][1], strict=True
        )
    ]
    for prefix in (True, False):
        yield {
            "tokenizer.ggml.model": ("string", "llama"),
            "tokenizer.ggml.pre": ("string", "default"),
            **keys,
            "tokenizer.ggml.scores": ("[float32]", scores),
            "tokenizer.ggml.add_space_prefix": ("bool", prefix),
        }


def _expresses(keys: Keys, original: Tokenizer, model: ModelConfig) -> bool:
    """Whether a tokenizer rebuilt from `keys` gives the original's ids on every probe."""
    from tokenizers import Tokenizer

    metadata = {
        name: np.array(value) if kind in ("[int32]", "[float32]") else value
        for name, (kind, value) in keys.items()
    }
    try:
        files, _ = tokenizer_files(metadata, model)
    except ConvertError:
        return False
    made = Tokenizer.from_str(files["tokenizer.json"])
    return all(made.encode(text).ids == original.encode(text).ids for text in PROBES)
