"""Tokenizer: ids, special tokens, streaming that never splits a character, sandboxed templates.

The oracle for chat templates is transformers' apply_chat_template on the same files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from bitnet_ops.generate.text import StreamDecoder
from bitnet_ops.generate.tokenizer import ChatTemplateError, Tokenizer, TokenizerError
from chat_templates import STYLES

DEMO = Path(__file__).resolve().parents[1] / "data" / "demo-model"
DEMO_TOKENIZER = Tokenizer.from_dir(DEMO)
TEXTS = [
    "In the beginning God created the heaven and the earth.",
    "naïve café — “quotes” … ½",
    "日本語とカタカナ、漢字",
    "👩‍👩‍👧‍👦 family, 🇫🇷 flag, 👍🏽 tone",
    "שלום עולם, مرحبا بالعالم",
    "line\nbreak\ttab  two spaces\r\n",
    "\ufffd is itself a character \ufffd",
    "",
]


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(i) for i in ids), decoder.finish()]


def sentencepiece_like() -> Tokenizer:
    """A vocabulary as Llama's: '▁' for spaces, bytes as <0x..>, a first space that is stripped."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a", "▁bc", "d"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend)


# Ids ------------------------------------------------------------------------------------------


def test_special_tokens_of_the_demo() -> None:
    t = DEMO_TOKENIZER
    assert t.vocab_size == 4096
    assert t.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (t.token_id("<s>"), t.token_id("</s>"), t.token_id("nothing")) == (0, 1, None)
    assert t.id_to_token(1) == "</s>"
    assert t.encode("In the")[0] == 0
    assert t.encode("In the", add_special_tokens=False) == t.encode("In the")[1:]


def test_prompts_have_the_ids_of_transformers() -> None:
    for case in json.loads((DEMO / "expected.json").read_text())["cases"]:
        assert DEMO_TOKENIZER.encode(case["prompt"]) == case["prompt_ids"]
        assert DEMO_TOKENIZER.decode(case["greedy_ids"]) == case["greedy_text"]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(text: str) -> None:
    ids = DEMO_TOKENIZER.encode(text)
    assert DEMO_TOKENIZER.decode(ids) == text
    assert DEMO_TOKENIZER.decode(ids, skip_special_tokens=False) == "<s>" + text


def test_bad_ids_and_text() -> None:
    for bad in (-1, 4096, 2**40):
        with pytest.raises(TokenizerError, match="from 0 to 4095, got"):
            DEMO_TOKENIZER.id_to_token(bad)
    with pytest.raises(TokenizerError, match="token ids at least 0"):
        DEMO_TOKENIZER.decode([-1])
    with pytest.raises(TokenizerError, match="expected text"):
        DEMO_TOKENIZER.encode(3)  # type: ignore[arg-type]
    with pytest.raises(TokenizerError, match="expected text"):
        DEMO_TOKENIZER.encode("lone surrogate \ud800")
    assert DEMO_TOKENIZER.decode([4096, 17]) == DEMO_TOKENIZER.decode([17])


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="expected the file .*tokenizer.json, got none"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="to be readable"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    assert Tokenizer.from_dir(tmp_path).chat_template is None
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(TokenizerError, match="expected a JSON object in .*, got list"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="expected valid JSON in"):
        Tokenizer.from_dir(tmp_path)


# Streaming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_stream_is_the_text_and_never_splits_a_character(text: str) -> None:
    pieces = streamed(DEMO_TOKENIZER, DEMO_TOKENIZER.encode(text))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_of_four_tokens_comes_out_whole() -> None:
    ids = DEMO_TOKENIZER.encode("🜲", add_special_tokens=False)
    assert len(ids) == 4, "this test needs a character that the vocabulary spells in bytes"
    assert streamed(DEMO_TOKENIZER, ids) == ["", "", "", "🜲", ""]
    assert streamed(DEMO_TOKENIZER, ids[:3]) == ["", "", "", "\ufffd"]


def test_special_tokens_have_no_text() -> None:
    ids = [0, *DEMO_TOKENIZER.encode("And God", add_special_tokens=False), 1]
    assert "".join(streamed(DEMO_TOKENIZER, ids)) == "And God"
    kept = StreamDecoder(DEMO_TOKENIZER, skip_special_tokens=False)
    assert "".join(kept.push(i) for i in ids) == "<s>And God</s>"


@given(st.text(max_size=40))
def test_any_text_streams_whole(text: str) -> None:
    try:
        ids = DEMO_TOKENIZER.encode(text)
    except TokenizerError:
        assert any("\ud800" <= c <= "\udfff" for c in text)
        return
    if not any(DEMO_TOKENIZER.id_to_token(i) in ("<s>", "</s>") for i in ids[1:]):
        assert "".join(streamed(DEMO_TOKENIZER, ids)) == text


@given(st.lists(st.integers(0, 4095), max_size=60))
def test_any_ids_stream_to_what_they_decode_to(ids: list[int]) -> None:
    assert "".join(streamed(DEMO_TOKENIZER, ids)) == DEMO_TOKENIZER.decode(ids)


@given(st.lists(st.integers(1, 260), max_size=40))
def test_sentencepiece_bytes_and_spaces_stream_too(ids: list[int]) -> None:
    tokenizer = sentencepiece_like()
    whole = tokenizer.decode(ids)
    pieces = streamed(tokenizer, ids)
    if "\ufffd" not in whole:
        assert "".join(pieces) == whole
        assert all("\ufffd" not in piece for piece in pieces)


# Chat templates -------------------------------------------------------------------------------

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'What is <b>2 + 2</b> & "why"?'},
    {"role": "assistant", "content": " Four. "},
    {"role": "user", "content": "Sûr ?"},
]
TEMPLATES = {
    "demo": json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"],
    "labels": "{% for m in messages %}{{ m.role | capitalize }}: {{ m['content'] | trim }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}",
    "blocks": "{{ bos_token }}\n{%- for m in messages %}\n    {%- if m.role == 'system' %}\n"
    "<<{{ m.content }}>>\n    {%- else %}\n[{{ loop.index0 }}|{{ m.role }}] {{ m.content }}\n"
    "    {%- endif %}\n{%- endfor %}\n{% if add_generation_prompt %}\n[next]\n{% endif %}\n",
    "json": "{% for m in messages %}{{ m | tojson }}{{ m.content | tojson(indent=2) }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if m.role == 'assistant' %}{% break %}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}{{ messages[0].content }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ messages[1:] | length }}",
}


def with_template(template: Any, **config: Any) -> Tokenizer:
    backend = Backend.from_file(str(DEMO / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    return Tokenizer(backend, {**tokens, "chat_template": template, **config})


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str, prompt: bool, tmp_path: Path) -> None:
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATES[name]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_dir(tmp_path)
    expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
    assert ours.render_chat(CHAT, prompt) == expected
    ids = theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False)
    assert ours.encode_chat(CHAT, prompt) == ids


def test_template_file_and_named_templates(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_dir(tmp_path).render_chat(CHAT) == "from the file"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    assert with_template(named).render_chat(CHAT) == "yes"
    with pytest.raises(TokenizerError, match="a list with one named 'default'"):
        with_template(named[:1])


def test_bos_is_not_doubled() -> None:
    ids = DEMO_TOKENIZER.encode_chat([{"role": "user", "content": "And God"}])
    assert ids == DEMO_TOKENIZER.encode("And God")


def test_chat_without_a_template_is_rejected() -> None:
    with pytest.raises(ChatTemplateError, match="a model with a chat template, got one without"):
        with_template(None).render_chat(CHAT)


HOSTILE = {
    "attributes": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ messages.__init__.__globals__ }}",
    "mutation": "{% set _ = messages.append(1) %}",
    "mutation of a message": "{% set _ = messages[0].update({'content': 'x'}) %}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
    "a huge range": "{% for i in range(10000000) %}{% endfor %}",
    "division": "{{ 1 // 0 }}",
    "undefined": "{{ nothing.at.all }}",
    "a type error": "{{ messages + 1 }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_rejected(name: str) -> None:
    chat = [dict(m) for m in CHAT]
    with pytest.raises(ChatTemplateError, match="chat: the model's chat template"):
        with_template(HOSTILE[name]).render_chat(chat)
    assert chat == CHAT


@pytest.mark.parametrize(
    "template", ["{{ '{0.__class__}'.format(messages) }}", "{{ raise_exception.__globals__ }}"]
)
def test_hidden_attributes_show_nothing(template: str) -> None:
    assert with_template(template).render_chat(CHAT) == ""


def test_template_errors_name_their_reason() -> None:
    with pytest.raises(ChatTemplateError, match="template rejects: roles must alternate"):
        with_template("{{ raise_exception('roles must alternate') }}").render_chat(CHAT)
    with pytest.raises(ChatTemplateError, match="got line 2: "):
        with_template("ok\n{% for %}").render_chat(CHAT)


@pytest.mark.parametrize(
    "bad", ["text", {}, [], [{"role": "user"}], [{"content": "x"}], ["x"], None]
)
def test_bad_messages(bad: Any) -> None:
    with pytest.raises(ChatTemplateError, match="chat: expected"):
        DEMO_TOKENIZER.render_chat(bad)


def test_a_qwen35_folder_is_read_as_its_tokenizer_json_says(tmp_path: Path) -> None:
    """Whatever tokenizer_class names: transformers would build Qwen 2's cut, which parts marks."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((both, _),) = words.pre_tokenize_str("\u0915\u093f")  # a letter and its mark
    letter, mark = both[:3], both[3:]
    assert letter[:2] == mark[:2]
    merges = [(both[0], both[1]), (both[:2], both[2]), (both[:2], both[5]), (letter, mark)]
    vocabulary |= {left + right: 256 + i for i, (left, right) in enumerate(merges)}
    backend = Backend(models.BPE(vocabulary, merges))
    backend.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(r"[\p{L}\p{M}]+|[^\p{L}\p{M}]+"), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, words])
    ends = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens(ends)
    backend.add_tokens(["<think>", "</think>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    about = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|endoftext|>",
        "add_bos_token": False,
        "chat_template": STYLES["qwen35"],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.encode("\u0915\u093f") == [vocabulary[both]]
    assert len(tokenizer.encode("a")) == 1
    assert tokenizer.ends() == {tokenizer.token_id(ends[0]), tokenizer.token_id(ends[2])}
    assert tokenizer.turn_end() == tokenizer.token_id("<|im_end|>")
    ids = tokenizer.encode_chat([{"role": "user", "content": "a"}])
    assert tokenizer.decode(ids[-2:-1]) == "<think>"  # no special token: it is shown
