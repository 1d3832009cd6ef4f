"""What strangers may put into a checkpoint or a command line: one line each, nothing followed.

Links, JSON without end, regular expressions, numbers out of range, zero bytes, control characters,
bytes that are no UTF-8, closed streams. Chat templates are test_chat.py's business.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

import hf_writer
from bitnet_ops.cli import COMMANDS, main
from bitnet_ops.config import ModelConfig, UnsupportedModelError
from bitnet_ops.convert import ConvertError, convert, export_gguf
from bitnet_ops.formats.sglbitnt import Reader, replace_config
from bitnet_ops.generate.given_text import ChatText
from bitnet_ops.generate.tokenizer import Tokenizer, TokenizerError
from bitnet_ops.generate.tokenizer_guard import is_known
from bitnet_ops.language_model import DEMO_DIR, LoadError, load
from bitnet_ops.nn.lora import LoraError, read_adapter
from bitnet_ops.untrusted import UntrustedFileError, printable, read_json_object
from hf_writer import FAMILIES

DEEP = "[" * 100_000
OBJECT_DEEP = '{"a":' * 5000 + "1" + "}" * 5000
CONFIG = {
    "model_type": "bitnet",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
MINICPM = {"model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
GEMMA = {"model_type": "gemma3_text", "num_key_value_heads": 2, "vocab_size": 32}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(hf_writer.write_checkpoint(tmp_path / "source", FAMILIES["bitnet-offline"]))


# Links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "generation_config.json", "config.json", "model.safetensors"]
)
def test_links_out_of_a_checkpoint_are_not_followed(
    name: str, source: Path, tmp_path: Path
) -> None:
    (source / name).replace(tmp_path / "elsewhere")
    (source / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConvertError, match=f"{name}.*a link out of it.*link-outside") as caught:
        convert(source, tmp_path / "out")
    assert caught.value.code == "link-outside" and not (tmp_path / "out").exists()


def test_links_inside_and_links_to_the_folder_are_followed(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").rename(source / "weights")
    (source / "model.safetensors").symlink_to("weights")
    (tmp_path / "link").symlink_to(source)
    assert convert(tmp_path / "link", tmp_path / "out").tensors == 24


def test_the_cache_of_the_hub_is_followed(source: Path, tmp_path: Path) -> None:
    """Files of models--A--B/snapshots/REVISION are links to ../../blobs/HASH."""
    home = tmp_path / "models--a--b"
    snapshot = home / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        file.rename(home / "blobs" / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    assert convert(snapshot, tmp_path / "out").tensors == 24
    (tmp_path / "secret").write_text("{}")
    (snapshot / "tokenizer_config.json").unlink()
    (snapshot / "tokenizer_config.json").symlink_to("../../../secret")
    with pytest.raises(ConvertError, match="link-outside"):
        convert(snapshot, tmp_path / "out2")


def test_links_out_of_an_adapter_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "secret").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter" / "adapter_config.json").symlink_to("../secret")
    with pytest.raises(LoraError, match="a link out of it"):
        read_adapter(tmp_path / "adapter")


# JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [DEEP, OBJECT_DEEP, "[1]", "{", '{"a": "\xff"', ""])
def test_json_without_end_is_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UntrustedFileError, match="^expected .*, got ") as caught:
        read_json_object(file)
    assert len(str(caught.value)) < 400


def test_json_that_is_no_file_or_too_large(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UntrustedFileError, match="a regular file"):
        read_json_object(tmp_path / "fifo")
    (tmp_path / "large").write_text('{"a": "' + "x" * 100 + '"}')
    with pytest.raises(UntrustedFileError, match="below"):
        read_json_object(tmp_path / "large", limit=64)
    (tmp_path / "twice").write_text('{"a": 1, "a": 2}')
    assert read_json_object(tmp_path / "twice") == {"a": 2}
    with pytest.raises(UntrustedFileError, match="a key twice: 'a'"):
        read_json_object(tmp_path / "twice", strict=True)


@pytest.mark.parametrize("text", [DEEP, OBJECT_DEEP])
def test_every_json_file_is_read_that_way(text: str, source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model.bin", "tokenizer.json"):
        (folder / name).write_bytes((DEMO_DIR / name).read_bytes())
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(TokenizerError, match="nested at most 64 deep"):
        load(folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(LoadError, match="nested at most 64 deep"):
        load(folder)
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(LoraError, match="nested at most 64 deep"):
        read_adapter(folder)
    (source / "config.json").write_text(text)
    with pytest.raises(ConvertError, match="nested at most 64 deep.*config-json"):
        convert(source, tmp_path / "out")


# Regular expressions --------------------------------------------------------------------------


def tokenizer_with(tmp_path: Path, **parts: Any) -> Tokenizer:
    backend = Backend.from_file(str(DEMO_DIR / "tokenizer.json"))
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.from_dir(tmp_path)


def split(expression: str) -> Any:
    return pre_tokenizers.Split(Regex(expression), "isolated")


def charsmap(replacement: str) -> bytes:
    """SentencePiece's precompiled_charsmap: the size of a trie, the trie, then replacements."""
    return bytes([0, 4, 0, 0]) + bytes(1024) + replacement.encode() + b"\0"


def template(single: str, ids: Sequence[int] = (0,)) -> Any:
    made = json.loads(
        processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
        ).__getstate__()
    )
    made["special_tokens"]["<s>"] |= {"ids": list(ids), "tokens": ["<s>"] * len(ids)}
    backend = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    return Backend.from_str(json.dumps({**backend, "post_processor": made})).post_processor


LENGTHENS, SHORTENS = charsmap("x" * 5000), charsmap("x")
REPLACES_SPACES = normalizers.Replace(" ", "▁")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
DOUBLES = pre_tokenizers.Metaspace()
EIGHTFOLD = pre_tokenizers.Sequence([pre_tokenizers.Digits(), DOUBLES, DOUBLES, DOUBLES])


@pytest.mark.parametrize(
    "part",
    [
        {"pre_tokenizer": split(r"(a+)+$")},
        {"pre_tokenizer": split(r"(?:a|aa)+$")},
        {"pre_tokenizer": pre_tokenizers.Sequence([split(r"\p{N}"), split(r"(\w+\s?)*!")])},
        {"pre_tokenizer": split("a" * 5000)},
        {"normalizer": normalizers.Replace(Regex(r"(\s*\w)*!"), "")},
        {"normalizer": normalizers.Replace(Regex(r"a+a+a+c"), "")},
        {"decoder": decoders.Replace(Regex(r"a+a+c"), "")},
        {"decoder": decoders.Replace(Regex("(a*)*"), "")},
        {"normalizer": normalizers.Sequence([normalizers.Replace("a", "a" * 60)] * 8)},
        {"normalizer": normalizers.Replace(Regex(""), "a" * 400)},
        {"normalizer": normalizers.Prepend("a" * 400)},
        {"normalizer": normalizers.Precompiled(LENGTHENS)},
        {"normalizer": normalizers.Sequence([normalizers.NFKC()] * 100)},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 20)},
        {"pre_tokenizer": pre_tokenizers.Sequence([split("."), pre_tokenizers.Metaspace()] * 20)},
        {"decoder": decoders.Sequence([decoders.Replace("e", "ee" * 60)] * 8)},
        {"decoder": decoders.CTC()},  # no part of a language model's tokenizer
        {"post_processor": template("<s> $A", ids=[0] * 20000)},
        {"post_processor": template("<s> $A $A $A")},
        {"post_processor": processors.Sequence([template("<s> $A")] * 70)},
        {"model": models.WordPiece({"a": 0}, unk_token="a", max_input_chars_per_word=10**9)},
        {"model": models.BPE({"a": 0}, [], end_of_word_suffix="x" * 5000)},
        {"model": models.WordLevel({"a" * 9000: 0}, unk_token="a")},
        # parts that are within their limits, and together beyond that of the whole
        {"normalizer": normalizers.Replace("a", "a" * 200), "pre_tokenizer": EIGHTFOLD},
        {
            "normalizer": normalizers.Replace("a", "a" * 200),
            "pre_tokenizer": DOUBLES,
            "model": models.BPE({"a": 0}, [], byte_fallback=True),
        },
        {"decoder": decoders.Replace("a", "a" * 200), "model": models.BPE({"a" * 100: 0}, [])},
        {"model": models.Unigram([("a", 0.0), ("a" * 600, 0.0)], 0)},
    ],
)
def test_a_tokenizer_that_may_not_end_is_rejected(part: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="tokenizer: expected .*, got .*hostile") as caught:
        tokenizer_with(tmp_path, **part)
    assert "\n" not in str(caught.value)
    shutil.copyfile(DEMO_DIR / "model.bin", tmp_path / "model.bin")
    with pytest.raises(ConvertError, match="--no-tokenizer.*tokenizer-broken"):
        export_gguf(tmp_path, tmp_path / "out.gguf")


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": normalizers.Sequence([normalizers.Prepend("▁"), REPLACES_SPACES])},
        {"normalizer": normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])},
        {"normalizer": normalizers.Precompiled(SHORTENS)},
        {"normalizer": normalizers.Sequence([normalizers.Precompiled(charsmap("x" * 33)),
                                             normalizers.Replace(Regex(" {2,}"), "▁")]),
         "pre_tokenizer": DOUBLES, "model": models.Unigram([("a", 0.0), ("▁" * 100, 0.0)], 0)},
        {"pre_tokenizer": pre_tokenizers.Sequence([split(r"\p{N}{1,3}"), BYTES])},
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
        {"decoder": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                       decoders.Fuse(), decoders.Strip(" ", 1, 0)])},
        {"post_processor": processors.Sequence([processors.ByteLevel(), template("<s> $A </s>")])},
    ],
)  # fmt: skip
def test_parts_of_published_tokenizers_are_taken(part: dict[str, Any], tmp_path: Path) -> None:
    assert tokenizer_with(tmp_path, **part).encode("In the") is not None


@pytest.mark.parametrize("in_a_server", [False, True])
def test_what_the_library_panics_at_is_one_line(
    monkeypatch: pytest.MonkeyPatch, in_a_server: bool
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if in_a_server:  # which sets it, so that other threads go on
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    tokenizer = Tokenizer.from_dir(DEMO_DIR)

    class PanicException(BaseException):
        """As pyo3's, which is no Exception."""

    class Panics:
        def encode(self, *_: Any, **__: Any) -> None:
            raise PanicException("index out of bounds")

        encode_batch = encode

    monkeypatch.setattr(tokenizer, "_backend", Panics())
    chat = ChatText("a", Panics())
    for call in (lambda: tokenizer.encode("a"), chat.ids, lambda: chat.ids_from(0)):
        with pytest.raises(TokenizerError, match="got: index out of bounds"):
            call()


def test_tokens_that_tokenizer_config_declares(tmp_path: Path) -> None:
    """As in transformers: they are tokens, with the ids behind the vocabulary."""
    shutil.copyfile(DEMO_DIR / "tokenizer.json", tmp_path / "tokenizer.json")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": {"__type": "AddedToken", "content": "<|pad|>", "lstrip": True},
        "additional_special_tokens": ["<|tool|>"],
        "added_tokens_decoder": {
            "4097": {"content": "<think>", "special": False, "normalized": False},
            "4096": {"content": "<|im_start|>", "special": True, "rstrip": True},
            "0": {"content": "<s>", "special": True},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.from_dir(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "<|im_start|> In <think>the<|im_end|> <|pad|>beginning<|tool|>"
    assert ours.encode(text) == theirs(text).input_ids
    assert len([i for i in ours.encode(text) if i >= 4096]) == 5
    assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), True)


def test_a_tokenizer_file_beyond_every_use_is_rejected(tmp_path: Path) -> None:
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(TokenizerError, match="tokenizer.json below 256 MiB, got more"):
        Tokenizer.from_dir(tmp_path)


def test_unusual_expressions_give_the_same_ids(tmp_path: Path) -> None:
    part = pre_tokenizers.Sequence(
        [split(r"[aeiou]+(?=[bc])|\w+'\w"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer = tokenizer_with(tmp_path, pre_tokenizer=part)
    plain = Backend.from_file(str(tmp_path / "tokenizer.json"))
    assert not is_known(plain) and is_known(Backend.from_file(str(DEMO_DIR / "tokenizer.json")))
    for text in ("In the beginning, abc don't aebc", "naïve 日本 👍🏽", ""):
        ids = tokenizer.encode(text)
        assert ids == plain.encode(text).ids
        assert tokenizer.decode(ids) == plain.decode(ids)
    with pytest.raises(TokenizerError, match="expected text"):
        tokenizer.encode("\ud800")
    with pytest.raises(TokenizerError, match="token ids at least 0"):
        tokenizer.decode([-1])


def test_a_file_cannot_cut_or_fill_prompts(tmp_path: Path) -> None:
    backend = Backend.from_file(str(DEMO_DIR / "tokenizer.json"))
    expected = backend.encode("In the beginning God created").ids
    backend.enable_truncation(2)
    backend.enable_padding(length=100)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_dir(tmp_path).encode("In the beginning God created") == expected


# Numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rms_norm_eps": 1e308}, "rms_norm_eps"),
        ({"rms_norm_eps": 1e-300}, "rms_norm_eps"),
        ({"rope_theta": 1e308}, "rope_theta"),
        ({"rope_theta": 1e-5}, "rope_theta"),
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling.factor"),
        (
            {"rope_scaling": {"type": "default", "low_freq_factor": 1}},
            "rope_scaling.low_freq_factor",
        ),
        ({"rope_scaling": {"rope_type": "unheard-of"}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"type": "yarn", "beta_fast": 1e-320}}, "rope_scaling.beta_fast"),
        ({"rope_scaling": {"type": "yarn", "attention_factor": 1e300}}, "rope_scaling.attention_f"),
        ({"num_hidden_layers": 5000}, "num_hidden_layers"),
        ({"head_dim": 1 << 17}, "head_dim"),
        ({"hidden_size": 1 << 20, "num_attention_heads": 1}, "head_dim"),
        ({**MINICPM, "scale_emb": 1e300}, "scale_emb"),
        ({**MINICPM, "scale_depth": 1e300}, "scale_depth"),
        ({**MINICPM, "dim_model_base": 1e-300}, "dim_model_base"),
        ({**GEMMA, "query_pre_attn_scalar": 1e-300}, "query_pre_attn_scalar"),
        ({**GEMMA, "rope_local_base_freq": 1e300}, "rope_local_base_freq"),
        ({"rope_parameters": {"rope_theta": 1e308}}, "rope_parameters.rope_theta"),
        ({"bitnet_ops": {"sub_norm_eps": 1e308}}, "sub_norm_eps"),
        ({"bitnet_ops": {"linear_norm_eps": 1e308}}, "linear_norm_eps"),
    ],
)
def test_numbers_that_no_model_has_are_rejected(change: dict[str, Any], field: str) -> None:
    ModelConfig.from_hf(CONFIG)
    with pytest.raises(UnsupportedModelError, match=f"config: expected {field}"):
        ModelConfig.from_hf({**CONFIG, **change})


def test_they_are_rejected_at_convert(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    for change in ({"rms_norm_eps": 1e308}, {"rope_scaling": {"factor": 8.0}}):
        (source / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ConvertError, match=f"{next(iter(change))}.*unsupported-model"):
            convert(source, tmp_path / "out")


# The command line -----------------------------------------------------------------------------


def test_printable() -> None:
    assert printable("plain – ü 日本 \xa0") == "plain – ü 日本 \xa0"
    shown = printable("\x1b[2J\n\x9b\u202e\u2028\udcff\x7f")
    assert shown == r"\x1b[2J\n\x9b\u202e\u2028\udcff\x7f"


NASTY = "\x1b]0;x\x07\n\x9b\u202e"


@pytest.fixture
def nasty(source: Path, tmp_path: Path) -> Path:
    """Models full of what a terminal obeys, in a folder of such a name.

    `source`: a checkpoint whose config has such keys and values. `model`: a converted model with
    them in its config, whose tokens are escape sequences.
    """
    folder = tmp_path / NASTY
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = config["_name_or_path"] = {NASTY: NASTY}
    (source / "config.json").write_text(json.dumps(config))
    source.rename(folder / "source")
    shutil.copytree(DEMO_DIR, folder / "model")
    file = folder / "model" / "model.bin"
    with Reader(file) as reader:
        block = {"format_version": 1, NASTY: NASTY, "verified": {NASTY: NASTY}}
        replaced = {**reader.config, "auto_map": {NASTY: NASTY}, "bitnet_ops": block}
    replace_config(file, replaced)
    backend = Backend.from_file(str(folder / "model" / "tokenizer.json"))
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("e", NASTY)])
    backend.save(str(folder / "model" / "tokenizer.json"))
    return folder


# command -> command lines, in which {} is the folder of `nasty`, and their exit statuses
NASTY_LINES: dict[str, list[tuple[str, int]]] = {
    "generate": [("{}/model In -n 4 --logprobs 1", 0), ("{}/model In -n 4 --json", 0),
                 ("{}/model {} -n 1", 0), ("{}/none In", 1), ("In --lora {}", 1)],
    "chat": [("{}/model -n 4 --stats", 0), ("{}/source", 1)],
    "embed": [("{}/model {}", 0), ("{}/model {} --json", 0)],
    "serve": [("--api-key-file {}/none", 1)],
    "sglang": [("{}/none --print", 1)],
    "vllm": [("{}/none", 1)],
    "convert": [("{}/source {}/out", 0), ("{}/source {}/out --json", 0), ("{}/model {}/out", 0),
                ("{}/none x", 1)],
    "export": [("{}/model {}/out.gguf --no-tokenizer", 0), ("{}/model {}/out.gguf", 1),
               ("{}/none x", 1)],
    "quantize": [("{}/source {}/out", 1), ("{}/none {}/out", 1)],
    "verify": [("{}/model {}/source", 1), ("{}/none {}/source", 1)],
    "inspect": [("{}/model", 0), ("{}/model --json", 0), ("{}/source", 0),
                ("{}/model --program", 0), ("{}/model --diff {}/source", 1),
                ("{}/model --diff {}/none --json", 2)],
    "doctor": [("--json", 0)],
    "cache": [("list --cache {}", 0), ("prune --cache {} --json", 0)],
    "dummy": [("tiny {}/made", 0), ("tiny {}/made", 1)],
    "bench": [("ops --output {}/none/x", 2)],
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_of_a_file_is_obeyed_by_a_terminal(
    command: str, nasty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = ""
    for line, status in NASTY_LINES[command]:
        words = [word.replace("{}", str(nasty)) for word in line.split()]
        monkeypatch.setattr("sys.stdin", io.StringIO("In\n"))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        assert main([command, *words]) == status, capsys.readouterr().err
        shown = capsys.readouterr()
        for text in (shown.out, shown.err):
            assert all(line.isprintable() for line in text.split("\n")), ascii(text)
        everything += shown.out + shown.err
        for file in nasty.glob("out*"):
            for report in file.glob("report.*"):
                text = report.read_text()
                assert all(line.isprintable() for line in text.split("\n")), ascii(text)
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    escaped = "x1b]0;x" in everything or "u001b]0;x" in everything
    # doctor reads no file of strangers, and engines that are not installed reject before they do
    assert escaped or command in ("doctor", "sglang", "vllm")


def test_a_pipe_gets_a_text_as_it_is(nasty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(nasty / "model"), "In the", "-n", "8"]) == 0
    assert NASTY in capsys.readouterr().out


def test_prose_keeps_what_shapes_letters() -> None:
    family = "a\n\tb \U0001f468\u200d\U0001f469 \u0645\u06cc\u200c\u062e \u200f"
    assert printable(family, prose=True) == family
    assert printable("\r\x1b\x9b\u202e\udcff", prose=True) == "\\r\\x1b\\x9b\\u202e\\udcff"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["inspect", "a\0"], 1),
        (["convert", "a\0", "b"], 1),
        (["convert", str(DEMO_DIR), "b\0"], 1),
        (["export", str(DEMO_DIR), "b\0"], 1),
        (["quantize", "a\0", "b"], 1),
        (["verify", "a\0", "b"], 1),
        (["generate", "a\0", "hi"], 1),
        (["generate", "hi", "--lora", "a\0"], 1),
        (["embed", "a\0", "hi"], 1),
        (["dummy", "tiny", "a\0"], 1),
        (["bench", "ops", "--output", "a\0"], 1),
    ],
)
def test_zero_bytes_in_paths(
    arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "\0" not in err and "expected" in err


def run(command: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """A shell command; bitnet-ops is `"$0" -m bitnet_ops`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["sh", "-c", command, sys.executable, *arguments],
        capture_output=True,
        timeout=300,
        env=environment,
        check=False,
        **options,
    )


def test_bytes_that_are_no_utf8_in_a_process_of_their_own() -> None:
    done = run(r"printf 'ab\377' | " + '"$0" -m bitnet_ops generate - -n 1')
    assert done.returncode == 1 and done.stderr.count(b"\n") == 1 and done.stdout == b""
    assert b"stdin: expected UTF-8 text, got the byte 0xff at offset 2" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("generate hi -n 2", 0),
        ("generate hi -n 2 --json", 0),
        ("chat", 0),
        ("generate -", 1),
        ("inspect a", 1),
        ("doctor", 0),
        ("dummy tiny made", 0),
        ("bench ops --output /no/x", 2),
        ("--version", 0),
        ("--help", 0),
    ],
)
@pytest.mark.sampled(4)
def test_closed_streams(arguments: str, status: int, tmp_path: Path) -> None:
    done = run(f'"$0" -m bitnet_ops {arguments} <&- >&-', cwd=tmp_path)
    assert done.returncode == status and b"Traceback" not in done.stderr
    assert b"error" in done.stderr or status == 0
    if arguments.startswith("dummy"):
        assert (tmp_path / "made" / "model.bin").read_bytes().startswith(b"SGLBITNT")
