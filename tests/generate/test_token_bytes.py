"""How many bytes a token stands for, and which; the oracles are texts, llguidance and Unicode."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from bitnet_ops.generate.tokenizer import TextLengthError, Tokenizer
from tool_tokenizers import tokenizer_of

DEMO = Path(__file__).resolve().parents[1] / "data" / "demo-model"
DEMO_TOKENIZER = Tokenizer.from_dir(DEMO)

# Bytes ------------------------------------------------------------------------------------------

TEXTS = (
    "Hello world,  two   spaces\n\tand a line",
    "\U0001f600 na\u00efve \u4f60\u597d \u00a0\u00ad\u0120",
    "<|im_end|> \ufffd \x00\x7f",
)


def metaspace_unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), *((f"<0x{i:02X}>", -9.0) for i in range(256))]
    pieces += [(p, -2.0) for p in ("\u2581", "\u2581Hello", "\u2581wor", "ld", "a", "n", "d", ",")]
    backend = Backend(models.Unigram(pieces, 0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return Tokenizer(backend)


def llama_like() -> Tokenizer:
    """Spaces by a normaliser, as in Llama 2's tokenizer.json."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"\u2581": 256, "a": 257, "\u2581a": 258}
    backend = Backend(models.BPE(vocab, [("\u2581", "a")], byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            *(decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend)


@pytest.mark.parametrize(
    "make", [lambda: DEMO_TOKENIZER, tokenizer_of, metaspace_unigram, llama_like]
)
def test_the_bytes_of_the_tokens_of_a_text_are_the_text(make: Any) -> None:
    tokenizer = make()
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.token_id("<unk>") in ids:  # it stands for anything
            continue
        data = b"".join(map(tokenizer.token_bytes, ids))
        assert data.removeprefix(b" ") == text.encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size + 3) == b""


@pytest.mark.parametrize("make", [lambda: DEMO_TOKENIZER, tokenizer_of, llama_like])
def test_the_bytes_of_every_token_are_those_of_the_grammar_library(make: Any) -> None:
    tokenizer = make()
    backend = tokenizer.backend
    known = pytest.importorskip("llguidance").LLTokenizer(backend.to_str(), eos_token=[1])
    added = backend.get_added_tokens_decoder()
    for token in range(tokenizer.vocab_size):
        wanted = added[token].content.encode() if token in added else known.decode_bytes([token])
        found = tokenizer.token_bytes(token)
        assert found == (wanted or b"\xff")  # which is a mark of the library's own


def test_the_bytes_of_parts_of_words() -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "wo": 1, "##rd": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    assert [Tokenizer(backend).token_bytes(i) for i in (1, 2)] == [b" wo", b"rd"]


# Lengths ----------------------------------------------------------------------------------------


def composed() -> Tokenizer:
    backend = Backend.from_file(str(DEMO / "tokenizer.json"))
    backend.normalizer = normalizers.NFC()
    return Tokenizer(backend)


def collapsing() -> Tokenizer:
    """Any number of spaces become one, and what is not known one token."""
    backend = Backend(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend)


LONG_TEXTS = (
    *("a", " ", "a b ", "In the beginning God created ", "\U0001f600", "\u1112\u1161\u11ab"),
    *("<|im_end|>", "\u212a", "e\u0302\u0301", "\n", "\u4f60", "0123456789"),
)


@pytest.mark.parametrize("text", LONG_TEXTS)
@pytest.mark.parametrize("make", [lambda: DEMO_TOKENIZER, tokenizer_of, composed, llama_like])
def test_no_text_that_fits_is_called_too_long(make: Any, text: str, monkeypatch: Any) -> None:
    """And one that is, is known for it before it is read."""
    tokenizer = make()
    for piece in (1 << 18, 199):
        monkeypatch.setattr("bitnet_ops.generate.tokenizer._PIECE", piece)
        for times in (1, 3, 500):
            count = len(tokenizer.encode(text * times, add_special_tokens=False))
            tokenizer.check_length(text * times, count)
    with pytest.raises(TextLengthError, match="expected a text of at most 100 tokens, got "):
        tokenizer.check_length(text * 100_000, 100)


@pytest.mark.parametrize("text", ["a ", "a" * 9 + " ", "word " * 5])
def test_where_nothing_bounds_a_token_texts_of_people_still_fit(text: str) -> None:
    tokenizer = collapsing()
    count = len(tokenizer.encode(text * 100))
    tokenizer.check_length(text * 100, count)
    with pytest.raises(TextLengthError):
        tokenizer.check_length(" " * 1_000_000, 100)


def test_a_letter_is_made_of_as_many_bytes_as_the_bound_says() -> None:
    """All letters of Unicode, whole and taken apart, and syllables of Hangul."""
    for form, maximum in (("NFC", 3), ("NFD", 3), ("NFKC", 4), ("NFKD", 4), ("lower", 3)):
        for c in map(chr, (*range(0xD800), *range(0xE000, 0x110000))):
            for given in {c, unicodedata.normalize("NFD", c), unicodedata.normalize("NFKD", c)}:
                made = given.lower() if form == "lower" else unicodedata.normalize(form, given)
                assert len(given.encode()) <= maximum * len(made.encode()), (form, given)


@pytest.mark.parametrize("make", [lambda: DEMO_TOKENIZER, composed, collapsing, llama_like])
def test_a_text_without_its_middle_begins_and_ends_alike(make: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("bitnet_ops.generate.tokenizer._PIECE", 64)
    tokenizer = make()
    for text in ("In the beginning was the word a. " * 5000, "a" * 50_000 + " b"):
        whole, cut = tokenizer.encode(text), tokenizer.shortened(text, 20)
        assert len(cut) < len(text)
        ids = tokenizer.encode(cut)
        assert ids[:19] == whole[:19] and ids[-1] == whole[-1]
