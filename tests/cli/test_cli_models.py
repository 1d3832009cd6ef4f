"""Commands about models: inspect on a narrow terminal, a dummy that talks, bench of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bitnet_ops.cli import main
from bitnet_ops.cli.inspect import lines
from bitnet_ops.convert.inspect import inspect
from bitnet_ops.dummy import model as dummy
from bitnet_ops.dummy import tokenizer as dummy_tokenizer
from bitnet_ops.dummy.configs import CONFIGS
from bitnet_ops.generate.tokenizer import Tokenizer
from bitnet_ops.language_model import DEMO_DIR, load
from cli_process import Terminal, cli


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dummy") / "tiny"
    dummy.write("tiny", folder)
    return folder


# inspect --------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [100, 80])
def test_inspect_breaks_no_name_and_no_line_at_a_terminal(columns: int) -> None:
    names = [row["name"] for row in inspect(DEMO_DIR)["tensors"]]
    with Terminal(["inspect", str(DEMO_DIR)], columns=columns) as terminal:
        assert terminal.finish() == 0
        shown = terminal.text.splitlines()
    rows = shown[1 : 1 + len(names)]
    assert [row.split()[0] for row in rows] == names
    assert max(map(len, rows)) <= columns


def test_inspect_leaves_columns_out_and_says_so() -> None:
    report = inspect(DEMO_DIR)
    whole = lines(report)
    assert whole[0].split()[-1] == "sha256" and "left out" not in "\n".join(whole)
    widest = max(len(line) for line in whole[: len(report["tensors"]) + 1])
    assert lines(report, widest) == whole
    assert "(left out for want of room: sha256; --json has all)" in lines(report, widest - 1)
    narrow = lines(report, 20)  # a name and its shape are never given up
    assert narrow[0].split() == ["tensor", "format", "shape"]


# dummy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.sampled(5)
def test_the_dummys_tokenizer_has_the_models_vocabulary(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    dummy_tokenizer.write(tmp_path, config)
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.vocab_size == config["vocab_size"]
    assert tokenizer.token_id("<s>") == config["bos_token_id"]
    assert tokenizer.token_id("</s>") == config["eos_token_id"]
    assert (
        len({tokenizer.id_to_token(i) for i in range(config["vocab_size"])})
        == (config["vocab_size"])
    )
    for text in ("In the beginning", "Grüße, 世界 🙂\n\ttab", " two  spaces ", "\x00"):
        ids = tokenizer.encode(text)
        assert len(ids) == len(text.encode()) and max(ids) < config["vocab_size"]
        assert tokenizer.decode(ids) == text


def test_a_vocabulary_without_room_for_the_bytes_is_rejected() -> None:
    with pytest.raises(ValueError, match="vocab_size of at least 258, got 257"):
        dummy_tokenizer.build({"vocab_size": 257, "bos_token_id": 1, "eos_token_id": 2})


def test_generate_chat_and_embed_run_on_a_dummy(tiny: Path) -> None:
    done = cli("generate", str(tiny), "Hello", "-n", "7", "--ignore-eos", "--json")
    report = json.loads(done.stdout)
    assert report["prompt_tokens"] == 5 and report["new_tokens"] == 7 and report["text"]
    done = cli("chat", str(tiny), "-n", "5", "--stats", data=b"Hello\nand again\n")
    assert done.returncode == 0 and done.stderr.count(b"first token") == 2
    assert b" cached)" in done.stderr


def test_a_text_without_tokens_is_named(tiny: Path) -> None:
    done = cli("embed", str(tiny), "a", "")
    assert done.returncode == 1
    assert b"expected at least one token in every text, got none in text 2 of 2" in done.stderr


def test_converting_a_dummy_says_what_it_was(tiny: Path, tmp_path: Path) -> None:
    done = cli("convert", str(tiny), str(tmp_path / "again"))
    assert done.returncode == 0 and b"\nbitnet, SGLBITNT version 2\n" in done.stdout


# bench model MODEL ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("own", ["demo", "tiny"])
def test_bench_model_measures_ones_own(own: str, tiny: Path, tmp_path: Path) -> None:
    path = DEMO_DIR if own == "demo" else tiny / "model.bin"
    done = cli(
        *("bench", "model", str(path), "--quick", "--prompts", "16", "--batches", "1"),
        *("-t", "1", "--json", "--output", str(tmp_path / "out.json")),
    )
    assert done.returncode == 0 and done.stderr == b"", done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "out.json").read_text())
    file = path / "model.bin" if own == "demo" else path
    assert report["settings"]["model"] == str(file)
    config = load(file).config
    (model,) = report["models"]
    linear = config.hidden_size * config.intermediate_size * 3 + 2 * config.hidden_size * (
        config.head_dim * (config.num_attention_heads + config.num_key_value_heads)
    )
    assert model["macs_per_token"] == config.num_hidden_layers * linear
    assert {row["kind"] for row in report["rows"]} == {"decode", "prefill"}
    assert all(row["tokens_per_s"] > 0 for row in report["rows"] if row["kind"] == "decode")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--contexts", "2000"], 2, "--contexts: expected at most 960, for the model has 1024"),
        (["--prompts", "2000"], 2, "--prompts: expected at most 1024"),
        (["--dummy", "tiny"], 2, "expected MODEL or --dummy"),
    ],
)
def test_bench_model_rejects_what_the_model_cannot(
    words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "model", str(DEMO_DIR), *words]) == status
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_bench_model_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "model", "/nowhere/model"]) == 1
    assert "/nowhere/model" in capsys.readouterr().err
