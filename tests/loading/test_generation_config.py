"""generation_config.json: ends of turns end a text; the makers' sampling is the default of chat."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.convert.gguf_export import export_gguf
from bitnet_ops.language_model import DEMO_DIR, load
from cli_process import cli
from gguf_bytes import key
from gguf_models import byte_tokenizer, model_file
from hf_writer import FAMILIES, make_network, write_checkpoint

BITNET = FAMILIES["bitnet-offline"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}END{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
OWN = "<|fin-de-tour|>"  # no name that anybody knows


def checkpoint(folder: Path, token: str, settings: dict[str, Any]) -> Path:
    """One whose vocabulary has `token` (258) too, which its config.json does not name."""
    write_checkpoint(folder, BITNET)
    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([token])
    tokenizer.save(str(file))
    config.write_text(json.dumps({**json.loads(config.read_text()), **settings}))
    return folder


@pytest.mark.parametrize(
    ("token", "settings"),
    [
        ("<|eot_id|>", {}),
        ("<|im_end|>", {}),
        (OWN, {"eos_token": OWN}),
        (OWN, {"eos_token": {"content": OWN}}),
        (OWN, {"chat_template": TEMPLATE.replace("END", OWN)}),
        (OWN, {"chat_template": TEMPLATE.replace("END", "\n" + OWN + "\n")}),
    ],
)
@pytest.mark.parametrize("generation", [True, False])
def test_every_end_of_a_turn_ends_a_text(
    tmp_path: Path, token: str, settings: dict[str, Any], generation: bool
) -> None:
    source = checkpoint(tmp_path / "in", token, settings)
    if not generation:
        (source / "generation_config.json").unlink()
    report = convert(source, tmp_path / "out")
    assert [r for r in report.remarks if f"{token} (258) ends a text too" in r]
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["eos_token_id"] == [1, 258] and "generation_config.json" in report.files
    assert load(tmp_path / "out").stop_ids == {1, 258}
    export_gguf(tmp_path / "out", tmp_path / "m.gguf")
    again = convert(tmp_path / "m.gguf", tmp_path / "again")
    assert load(tmp_path / "again").stop_ids == {1, 258}
    assert not [remark for remark in again.remarks if "ends a text" in remark]


@pytest.mark.parametrize("template", ["{{ messages[9].x.y }}", "{% for m in messages %}", "yes"])
def test_a_template_that_says_nothing_of_ends_adds_none(tmp_path: Path, template: str) -> None:
    source = checkpoint(tmp_path / "in", OWN, {"chat_template": template})
    assert not convert(source, tmp_path / "out").remarks
    assert load(tmp_path / "out").stop_ids == {1}


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_ends_of_gguf_files(tmp_path: Path, kind: int) -> None:
    """The token has no key, and converters call it ordinary (1), control (3) or user's (4)."""
    tokens = ["<s>", "</s>", *sorted(ByteLevel.alphabet()), "<|eot_id|>"]
    keys = [k for k in byte_tokenizer(BITNET.vocab) if b"ggml.token" not in k]
    keys += [
        key("tokenizer.ggml.tokens", "[str]", tokens),
        key("tokenizer.ggml.token_type", "[i32]", [3, 3, *[1] * 256, kind]),
    ]
    keys += [
        key("general.sampling.temp", "f32", 0.6),
        key("general.sampling.top_k", "i32", 20),
    ]
    file = tmp_path / "m.gguf"
    file.write_bytes(model_file(BITNET, make_network(BITNET), "bitnet-b1.58", "I2_S", keys=keys))
    report = convert(file, tmp_path / "out")
    assert [remark for remark in report.remarks if "<|eot_id|> (258) ends a text too" in remark]
    lm = load(tmp_path / "out")
    assert lm.stop_ids == {1, 258} and lm.tokenizer.decode([258]) == ""
    assert lm.generation.sampling == {"temperature": 0.6, "top_k": 20}


def test_a_broken_file_is_no_conversion(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", OWN, {})
    (source / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ConvertError, match="expected eos_token_id in .* to be ids") as caught:
        convert(source, tmp_path / "out")
    assert caught.value.code == "generation-config" and not (tmp_path / "out").exists()


# Sampling -----------------------------------------------------------------------------------------

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}


def demo(folder: Path, settings: dict[str, Any]) -> Path:
    shutil.copytree(DEMO_DIR, folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "sampling", "ignored"),
    [
        (QWEN, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, ()),
        ({**QWEN, "do_sample": False}, {}, ()),
        ({"do_sample": True, "top_p": 1.0}, {"temperature": 1.0}, ()),
        ({"repetition_penalty": 1.1, "temperature": 0.6}, {"repetition_penalty": 1.1}, ()),
        (
            {**QWEN, "top_k": -1, "no_repeat_ngram_size": 3, "use_cache": True, "num_beams": 1},
            {"temperature": 0.6, "top_p": 0.95},
            ("top_k -1", "no_repeat_ngram_size 3"),
        ),
        ({"do_sample": True, "temperature": "hot"}, {}, ("temperature 'hot'",)),
    ],
)
def test_what_the_file_asks_for(
    tmp_path: Path, settings: dict[str, Any], sampling: dict[str, float], ignored: tuple[str, ...]
) -> None:
    found = load(demo(tmp_path / "m", settings)).generation
    assert (found.sampling, found.ignored) == (sampling, ignored)


def test_chat_follows_the_file_and_generate_says_that_it_does_not(tmp_path: Path) -> None:
    model = str(demo(tmp_path / "m", {**QWEN, "temperature": 1.5, "no_repeat_ngram_size": 3}))
    text = b"In the beginning\n"
    chats = [cli("chat", model, "--plain", "--seed", seed, data=text) for seed in ("1", "2")]
    assert chats[0].stdout != chats[1].stdout
    notes = [line for line in chats[0].stderr.decode().splitlines() if line.startswith("note:")]
    assert len(notes) == 1 and "temperature 1.5, top_k 20, top_p 0.95" in notes[0]
    assert "ignored: no_repeat_ngram_size 3" in notes[0]
    greedy = demo(tmp_path / "greedy", {})
    zero = cli("chat", model, "--plain", "--temp", "0", data=text)
    assert zero.stdout == cli("chat", str(greedy), "--plain", data=text).stdout
    plain = cli("generate", model, "In the beginning", "-n", "4")
    assert b"temperature 1.5, top_k 20, top_p 0.95 is not used; chat does" in plain.stderr
    same = cli("generate", str(greedy), "In the beginning", "-n", "4")
    assert plain.stdout == same.stdout and b"note" not in same.stderr


def test_the_demo_samples_in_chats_and_a_stated_temperature_wins() -> None:
    """Greedy, a model so small repeats itself until its context is full."""
    lm = load()
    assert lm.generation.sampling == {"temperature": 0.7}
    text, length = "In the beginning", 200

    def answer(**options: Any) -> str:
        return "".join(lm.chat(max_new_tokens=length, **options).say(text))

    assert answer(seed=1) == lm.generate(text, max_new_tokens=length, temperature=0.7, seed=1)
    assert answer(temperature=0) == lm.generate(text, max_new_tokens=length)
    talk = lm.chat(max_new_tokens=length)
    said = "".join(talk.say(text)).split()
    runs = [tuple(said[i : i + 8]) for i in range(len(said) - 8)]
    assert len(runs) - len(set(runs)) < 8
