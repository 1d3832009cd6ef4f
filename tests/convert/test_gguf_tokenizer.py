"""Tokenizers rebuilt from GGUF metadata: the same ids as the original on many texts.

The originals are tokenizers the `tokenizers` library trained or transformers wrote; the metadata is
written here as llama.cpp's converter does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from bitnet_ops.config import ModelConfig
from bitnet_ops.convert.gguf_tokenizer import tokenizer_files
from hf_writer import FAMILIES, config_dict

DEMO = Path(__file__).resolve().parents[1] / "data" / "demo-model"
CORPUS = (DEMO / "val.txt").read_text(encoding="utf-8")
TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces\n\n\nand\tlines \r\n",
    "don't DON'T I'LL we've 'tis",
    "1 12 123 1234 12345, 3.14159 and 2^10",
    "Grüße, naïve café, e\u0301 combining",
    "日本語テキスト と 한국어, русский",
    "हिन्दी में किताबें, ภาษาไทยที่นี่ กำลัง, مُحَمَّدٌ كِتَابٌ, שָׁלוֹם, தமிழ்",
    "🙂 👨‍👩‍👧‍👦 \u200d\u2581 \x00 \x7f",
    "<s>special</s> in text <|end|>",
    "....!!! (brackets) [x] {y} `code` $x + y = z$",
    CORPUS[:4000],
]
MODEL = ModelConfig.from_hf({**config_dict(FAMILIES["llama-bitlinear"]), "vocab_size": 4096})


def rebuilt(metadata: dict[str, Any]) -> Tokenizer:
    files, _ = tokenizer_files(metadata, MODEL)
    return Tokenizer.from_str(files["tokenizer.json"])


def byte_level_metadata(tokenizer: Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    """As llama.cpp's converter writes it: tokens by id, types, merges."""
    stored = json.loads(tokenizer.to_str())
    by_id = {i: token for token, i in tokenizer.get_vocab().items()}
    special = {t["id"]: t["special"] for t in stored["added_tokens"]}
    types = [{True: 3, False: 4}.get(special.get(i), 1) for i in range(len(by_id))]
    merges = [m if isinstance(m, str) else " ".join(m) for m in stored["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [by_id[i] for i in range(len(by_id))],
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": merges,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def assert_same(original: Tokenizer, made: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        expected = original.encode(text)
        assert made.encode(text).ids == expected.ids, repr(text[:80])
        plain = original.encode(text, add_special_tokens=False).ids
        assert made.encode(text, add_special_tokens=False).ids == plain, repr(text[:80])
        assert made.decode(expected.ids) == original.decode(expected.ids), repr(text[:80])
        raw = made.decode(expected.ids, skip_special_tokens=False)
        assert raw == original.decode(expected.ids, skip_special_tokens=False), repr(text[:80])


# --- byte-level BPE -------------------------------------------------------------------------------

DEMO_TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
DEMO_MADE = rebuilt(
    byte_level_metadata(DEMO_TOKENIZER, "gpt-2", bos_token_id=0, eos_token_id=1, add_bos_token=True)
)


def test_the_demo_models_tokenizer() -> None:
    assert_same(DEMO_TOKENIZER, DEMO_MADE, TEXTS)


@given(text=st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_the_demo_models_tokenizer_on_any_text(text: str) -> None:
    assert_same(DEMO_TOKENIZER, DEMO_MADE, [text])


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


# Restated from the tokenizer.json files of the models themselves.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# of transformers' tokenization_qwen3_5.py
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def bytes_after(*steps: pre_tokenizers.PreTokenizer, use_regex: bool) -> Any:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return pre_tokenizers.Sequence([*steps, level])


ORIGINALS = {
    "llama-bpe": (bytes_after(split(LLAMA3), use_regex=False), True, False),
    "falcon3": (bytes_after(split(LLAMA3), use_regex=False), True, False),
    "qwen2": (bytes_after(split(QWEN2), use_regex=False), False, True),
    "qwen35": (bytes_after(split(QWEN35), use_regex=False), False, True),
    "smollm": (
        bytes_after(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
        False,
        False,
    ),
    "gpt-2": (bytes_after(use_regex=True), False, False),
}


def trained(name: str) -> Tokenizer:
    cut, ignore_merges, nfc = ORIGINALS[name]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    marks = "किताबें कि में หนังสือที่นี่ กำลัง كِتَابٌ مُحَمَّدٌ " * 200
    tokenizer.train_from_iterator([CORPUS, "1234 123 12 2024 " * 200, marks], trainer)
    stored = json.loads(tokenizer.to_str())
    stored["model"]["ignore_merges"] = ignore_merges
    return Tokenizer.from_str(json.dumps(stored))


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[Tokenizer, Tokenizer]]:
    out = {}
    for name in ORIGINALS:
        original = trained(name)
        out[name] = original, rebuilt(byte_level_metadata(original, name, add_bos_token=False))
    return out


@pytest.mark.parametrize("name", list(ORIGINALS))
def test_trained_tokenizers(pairs: dict[str, tuple[Tokenizer, Tokenizer]], name: str) -> None:
    assert_same(*pairs[name], TEXTS)


@given(text=st.text(max_size=60) | st.text("a1 '\n\tI'll.", max_size=60))
@settings(max_examples=200, deadline=None)
def test_trained_tokenizers_on_any_text(
    pairs: dict[str, tuple[Tokenizer, Tokenizer]], text: str
) -> None:
    for original, made in pairs.values():
        assert_same(original, made, [text])


def test_another_name_gives_other_ids(pairs: dict[str, tuple[Tokenizer, Tokenizer]]) -> None:
    """The negative control: the cut matters, so a wrong name must not pass for a right one."""
    for right, name, text in (
        ("llama-bpe", "smollm", "in 2024"),
        ("qwen35", "qwen2", "किताबें"),
        ("qwen35", "qwen2", "ที่นี่ กำลัง"),
        ("qwen35", "qwen2", "كِتَابٌ"),
    ):
        original = pairs[right][0]
        wrong = rebuilt(byte_level_metadata(original, name))
        assert wrong.encode(text).ids != original.encode(text).ids, text


def test_added_and_unused_tokens() -> None:
    metadata = byte_level_metadata(DEMO_TOKENIZER, "gpt-2", add_bos_token=False)
    tokens = metadata["tokenizer.ggml.tokens"] + ["<tool>", "[PAD4097]"]
    metadata["tokenizer.ggml.tokens"] = tokens
    types = metadata["tokenizer.ggml.token_type"].tolist() + [4, 5]
    metadata["tokenizer.ggml.token_type"] = np.array(types)
    model = ModelConfig.from_hf({**config_dict(FAMILIES["llama-bitlinear"]), "vocab_size": 5000})
    files, _ = tokenizer_files(metadata, model)
    made = Tokenizer.from_str(files["tokenizer.json"])
    assert 4096 in made.encode("a <tool> b").ids
    assert 4097 not in made.encode("a [PAD4097] b").ids
    assert "<tool>" in made.decode([4096])  # user-defined, not special: it is text


def test_config_and_chat_template() -> None:
    metadata = byte_level_metadata(DEMO_TOKENIZER, "gpt-2", bos_token_id=0, eos_token_id=1)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}x"
    files, _ = tokenizer_files(metadata, MODEL)
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    assert config["chat_template"] == "{{ bos_token }}x"


def test_end_of_text_behind_every_text() -> None:
    metadata = byte_level_metadata(
        DEMO_TOKENIZER, "gpt-2", bos_token_id=0, eos_token_id=1, add_eos_token=True
    )
    assert rebuilt(metadata).encode("a").ids[-1] == 1
    assert rebuilt(metadata).encode("a", add_special_tokens=False).ids[-1] != 1


def test_defaults_of_absent_keys() -> None:
    metadata = byte_level_metadata(DEMO_TOKENIZER, "llama-bpe", bos_token_id=0)
    assert rebuilt(metadata).encode("a").ids[0] == 0  # llama-bpe puts bos first unless told not to
    metadata["tokenizer.ggml.pre"] = "smollm"
    assert rebuilt(metadata).encode("a").ids[0] != 0
    del metadata["tokenizer.ggml.pre"]
    _, remarks = tokenizer_files(metadata, MODEL)
    assert any("default" in remark for remark in remarks)


def test_the_published_2b_files_vocabulary() -> None:
    """No tokenizer.ggml.pre and special tokens typed as ordinary ones: known by what it holds."""
    metadata = byte_level_metadata(trained("llama-bpe"), "", bos_token_id=128000)
    del metadata["tokenizer.ggml.pre"]
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens += [f"filler{i}" for i in range(128000 - len(tokens))]
    tokens += ["<|begin_of_text|>", *(f"<|reserved_{i}|>" for i in range(255))]
    metadata["tokenizer.ggml.token_type"] = np.ones(128256, dtype=np.int32)
    model = ModelConfig.from_hf({**config_dict(FAMILIES["llama-bitlinear"]), "vocab_size": 128256})
    files, remarks = tokenizer_files(metadata, model)
    made = Tokenizer.from_str(files["tokenizer.json"])
    assert any("Llama 3" in remark for remark in remarks)
    assert made.encode("a<|reserved_7|>b").ids.count(128008) == 1
    plain = [i for i in made.encode("in 2024, I'LL").ids if i != 128000]
    assert plain == trained("llama-bpe").encode("in 2024, I'LL").ids


def test_no_vocabulary() -> None:
    for metadata in ({}, {"tokenizer.ggml.model": "no_vocab"}):
        files, remarks = tokenizer_files(metadata, MODEL)
        assert files == {} and len(remarks) == 1


# --- SentencePiece --------------------------------------------------------------------------------


def pieces() -> tuple[list[str], list[float], list[int]]:
    """A SentencePiece-like vocabulary: a BPE trained with spaces as U+2581, scores by rank."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False)
    tokenizer.train_from_iterator([CORPUS], trainer)
    stored = json.loads(tokenizer.to_str())["model"]
    rank: dict[str, int] = {}
    for i, merge in enumerate(stored["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        rank.setdefault(left + right, i)
    words = sorted(stored["vocab"], key=lambda token: rank.get(token, 10**6))
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *words]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    scores = [0.0] * 259 + [-float(rank.get(token, 10**6)) for token in words]
    return tokens, scores, types


TOKENS, SCORES, TYPES = pieces()
SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": np.array(SCORES, dtype=np.float32),
    "tokenizer.ggml.token_type": np.array(TYPES, dtype=np.int32),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}
SPM_MADE = rebuilt(SENTENCEPIECE)


def reference_ids(text: str) -> list[int]:
    """The algorithm as llama.cpp states it: join the best-scored neighbours, leftmost first."""
    scores = {t: s for t, s, kind in zip(TOKENS, SCORES, TYPES, strict=True) if kind == 1}
    ids = {t: i for i, t in enumerate(TOKENS)}
    symbols = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        joined = [(scores.get(a + b), i) for i, (a, b) in enumerate(zip(symbols, symbols[1:]))]  # noqa: B905
        known = [(score, -i) for score, i in joined if score is not None]
        if not known:
            break
        at = -max(known)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    out = []
    for symbol in symbols:
        known_id = ids.get(symbol)
        out += (
            [known_id] if known_id is not None else [ids[f"<0x{b:02X}>"] for b in symbol.encode()]
        )
    return out


@pytest.mark.parametrize("text", [t for t in TEXTS if "<s>" not in t])
def test_sentencepiece_against_the_stated_algorithm(text: str) -> None:
    made = SPM_MADE.encode(text[:1500])
    assert made.ids == [1, *reference_ids(text[:1500])]
    assert SPM_MADE.decode(made.ids) == text[:1500].replace("\u2581", " ")


@given(text=st.text(max_size=40) | st.text("the and.\n", max_size=40))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_on_any_text(text: str) -> None:
    assert SPM_MADE.encode(text, add_special_tokens=False).ids == reference_ids(text)


def test_sentencepiece_specials_and_prefix() -> None:
    assert SPM_MADE.encode("the<s>the").ids == [1, *reference_ids("the"), 1, *reference_ids("the")]
    without = rebuilt({**SENTENCEPIECE, "tokenizer.ggml.add_space_prefix": False})
    assert "".join(without.encode("the", add_special_tokens=False).tokens) == "the"
    assert without.decode(without.encode(" the").ids) == " the"
    config = json.loads(tokenizer_files(SENTENCEPIECE, MODEL)[0]["tokenizer_config.json"])
    assert config["unk_token"] == "<unk>"
