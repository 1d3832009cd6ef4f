"""Options mean the same in every command, have the names of the field, and errors one style."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

import pytest

from bitnet_ops.bench import shapes
from bitnet_ops.cli import COMMANDS, build_parser, main
from bitnet_ops.cli.arguments import Parser, did_you_mean
from bitnet_ops.cli.terminal import one_line
from bitnet_ops.convert import quantize
from bitnet_ops.convert.gguf import export as gguf_export
from bitnet_ops.convert.quantize import FORMS
from bitnet_ops.dummy import model as dummy
from bitnet_ops.formats.gguf_layouts import I2S_LAYOUTS
from bitnet_ops.nn import storage

STYLE = re.compile(r"bitnet-ops: error: ([^:]+: )+expected .*, got .*\[[a-z0-9-]+\]\n")


def parser_of(name: str, parser: argparse.ArgumentParser | None = None) -> Parser:
    """The parser of `generate`, or of `bench ops`."""
    first, _, rest = name.partition(" ")
    within = build_parser(first) if parser is None else parser
    (subparsers,) = (a for a in within._actions if isinstance(a, argparse._SubParsersAction))
    found = subparsers.choices[first]
    assert isinstance(found, Parser)
    return parser_of(rest, found) if rest else found


def all_parsers() -> Iterator[tuple[str, Parser]]:
    for name in COMMANDS:
        if name == "bench":
            for kind in ("ops", "model"):
                yield f"bench {kind}", parser_of(f"bench {kind}")
        else:
            yield name, parser_of(name)


def option(parser: Parser, text: str) -> argparse.Action | None:
    return next((a for a in parser._actions if text in a.option_strings), None)


def test_json_is_one_object_on_stdout_everywhere() -> None:
    having = set()
    for name, parser in all_parsers():
        if (action := option(parser, "--json")) is not None:
            having.add(name)
            assert action.nargs == 0 and action.help == "one JSON object on stdout instead of text"
    assert having == {
        *("generate", "embed", "convert", "export", "quantize", "verify", "inspect", "doctor"),
        *("bench ops", "bench model"),
    }


def test_force_replaces_everywhere() -> None:
    having = set()
    for name, parser in all_parsers():
        if (action := option(parser, "--force")) is not None:
            having.add(name)
            assert action.nargs == 0 and re.fullmatch("replace .* if it exists", str(action.help))
    assert having >= {"convert", "export", "quantize"}


ALIASES = {
    "generate": [
        *("-m --model", "-p --prompt", "-n --max-new-tokens --max-tokens", "-t --threads"),
        "--temperature --temp",
    ],
    "chat": ["-m --model", "-n --max-new-tokens --max-tokens", "-t --threads"],
    "embed": ["-m --model", "-t --threads"],
    "bench ops": ["-t --threads"],
    "bench model": ["-t --threads"],
}


@pytest.mark.parametrize("command", ALIASES)
def test_the_fields_names_are_aliases(command: str) -> None:
    parser = parser_of(command)
    for line in ALIASES[command]:
        action = option(parser, line.split()[0])
        assert action is not None and action.option_strings == line.split()


@pytest.mark.parametrize(
    ("words", "guess"),
    [
        (["generte"], "did you mean generate?"),
        (["generate", "x", "--tempreature", "1"], "did you mean --temperature?"),
        (["generate", "x", "--max-tokns=4"], "got --max-tokns; did you mean --max-tokens?"),
        (["generate", "x", "--kv-dtype", "bfloat"], "did you mean bfloat16?"),
        (["convert", "a", "b", "--froce"], "did you mean --force?"),
        (["dummy", "2b-4", "x"], "did you mean 2b-4t?"),
        (["bench", "model", "--dumy", "tiny"], "did you mean --dummy?"),
        (["bench", "modl"], "did you mean model?"),
        (["inspect", "a", "--difff", "b"], "did you mean --diff?"),
        (["bench"], "expected ops|model|engine, got none"),
        (["vllm"], "expected MODEL, got none"),
        (["vllm", "--port", "1", "m"], "got --port; vLLM's options stand behind MODEL"),
        (["sglang", "m", "--max-total-tokens", "1"], "SGLang's options stand behind --;"),
        (["sglang", "m", "--prot", "1"], "got --prot; did you mean --port?"),
    ],
)
def test_what_was_meant_is_said(
    words: list[str], guess: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert guess in capsys.readouterr().err


def test_nothing_is_guessed_where_nothing_is_like_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert did_you_mean("--zzz", ["--model"]) == ""
    assert main(["generate", "x", "--zzz"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_a_beginning_of_an_option_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--temper", "1"]) == 2
    assert "got --temper; did you mean --temp" in capsys.readouterr().err


USAGE = [
    ["generate"],
    ["generate", "x", "-n", "-1"],
    ["generate", "x", "-n"],
    ["generate", "x", "--seed", "-1"],
    ["generate", "x", "--temp", "nan"],
    ["generate", "x", "--cache", ""],
    ["generate", "-m", "a", "b", "c"],
    ["generate", "-m", "a", "-p", "b", "c"],
    ["chat", "a", "-m", "b"],
    ["embed"],
    ["embed", "-m", "x"],
    ["convert", "a"],
    ["convert", "a", "b", "c"],
    ["convert", "a", "b", "--text", "x"],
    ["inspect"],
    ["doctor", "now"],
    ["dummy", "tiny", "x", "--seed", "x"],
    ["bench", "model", "m", "--dummy", "tiny"],
    ["bench", "ops", "--output", "/nowhere/x"],
]


@pytest.mark.parametrize("words", USAGE, ids=" ".join)
def test_wrong_usage_has_one_style_and_status_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and STYLE.fullmatch(err) and err.endswith("[usage]\n"), err
    assert err.startswith(f"bitnet-ops: error: {words[0]}")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["generate", "/nowhere/model", "x"], "load"),
        (["generate", "word " * 3000], "prompt"),
        (["generate", "x", "--lora", "/nowhere"], "lora"),
        (["convert", "/nowhere", "/nowhere2"], "source-missing"),
        (["export", "/nowhere", "/nowhere2"], "io"),
        (["inspect", "/nowhere"], "source-missing"),
    ],
)
def test_failures_have_the_same_style_and_status_1(
    words: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert out == "" and STYLE.fullmatch(err), err


def test_control_characters_in_messages_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "/nowhere/\x1b[31mred\n", "x"]) == 1
    err = capsys.readouterr().err
    assert "\x1b" not in err and "\\x1b[31mred" in err and err.count("\n") == 1
    assert one_line(ValueError("a: expected b, got \udcff")).endswith("\\udcff [value]")


def test_codes_are_made_of_the_errors_name() -> None:
    assert one_line(OSError("disk")) == "disk [os]"
    assert one_line(FileNotFoundError("x")) == "x [file-not-found]"
    assert one_line(KeyError("x")) == "KeyError: 'x' [key]"
    assert one_line(RuntimeError("x [runtime]")) == "x [runtime]"


def test_the_words_of_options_are_those_of_the_modules_that_know_them() -> None:
    """The parser may not import those modules: they need torch."""
    generate = parser_of("generate")

    def choices(parser: Parser, text: str) -> set[str]:
        action = option(parser, text)
        assert action is not None and action.choices is not None
        return set(action.choices)

    assert choices(generate, "--kv-dtype") == set(storage.KV_TYPES)
    assert choices(generate, "--weight-format") == set(storage.WEIGHT_FORMATS)
    assert choices(generate, "--head-format") == set(storage.HEAD_FORMATS)
    assert choices(parser_of("convert"), "--i2s-layout") == set(I2S_LAYOUTS)
    assert choices(parser_of("export"), "--type") == set(gguf_export.TYPES)
    assert choices(parser_of("quantize"), "--form") == set(FORMS)
    assert set(shapes.WEIGHT_FORMATS) == set(storage.FORMATS)
    assert set(shapes.HEAD_FORMATS) <= set(storage.HEAD_FORMATS)
    assert set(shapes.KV_DTYPES) <= set(storage.KV_TYPES)
    assert "2b-4t" in dummy.CONFIGS


def test_the_converter_package_still_gives_its_names() -> None:
    import bitnet_ops.convert as package

    assert all(callable(getattr(package, name)) for name in package.__all__)
    assert quantize.quantize is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018
