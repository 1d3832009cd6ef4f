"""Options mean the same in every command, have the names of the field, and errors one style."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

from bitnet_ops.bench import shapes
from bitnet_ops.cli import COMMANDS, build_parser, main
from bitnet_ops.cli.arguments import Parser, did_you_mean
from bitnet_ops.cli.terminal import one_line
from bitnet_ops.convert import gguf_export, quantize
from bitnet_ops.convert.quantize import FORMS
from bitnet_ops.dummy import model as dummy
from bitnet_ops.formats.gguf_layouts import I2S_LAYOUTS
from bitnet_ops.nn import storage
from cache_types import KV_TYPES_TEXT

STYLE = re.compile(r"bitnet-ops: error: ([^:]+: )*expected .*, got .*\[[a-z0-9-]+\]\n")


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
        *("cache", "bench ops", "bench model"),
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


# words -> what the message says
HOW = "expected auto, ngram, head, off or an integer at least 0, got"
USAGE: list[tuple[str, str]] = [
    # commands and options that are none, with the nearest one
    ("train", "expected a command among generate, chat"),
    ("generte", "did you mean generate?"),
    # commands of other programs, with the one that does it here
    ("run my-model", "expected a command, got run; here `bitnet-ops chat MODEL`"),
    ("pull org/name", "`bitnet-ops chat ORG/NAME`"),
    ("list", "`bitnet-ops cache list`"),
    ("ls", "`bitnet-ops cache list`"),
    ("generate x --beams 4", "expected an option of this command, got --beams"),
    ("generate x --tempreature 1", "did you mean --temperature?"),
    ("generate x --temper 1", "got --temper; did you mean --temp"),  # a beginning is none
    ("generate x --max-tokns=4", "got --max-tokns; did you mean --max-tokens?"),
    ("generate x --kv-dtype bfloat", "did you mean bfloat16?"),
    ("generate x --kv-dtype int4", f"{KV_TYPES_TEXT}, got 'int4'"),
    ("convert a b --froce", "did you mean --force?"),
    ("dummy 2b-4 x", "did you mean 2b-4t?"),
    ("bench model --dumy tiny", "did you mean --dummy?"),
    ("bench modl", "did you mean model?"),
    ("inspect a --difff b", "did you mean --diff?"),
    ("bench", "expected ops|model|attention|sparsity|engine|serve, got none"),
    ("vllm", "expected MODEL, got none"),
    ("vllm --port 1 m", "got --port; vLLM's options stand behind MODEL"),
    ("sglang m --max-total-tokens 1", "SGLang's options stand behind --;"),
    ("sglang m --prot 1", "got --prot; did you mean --port?"),
    # too little, too much, what contradicts itself
    ("generate", "expected [MODEL] PROMPT"),
    ("generate a b c", "put the prompt in quotes"),
    ("generate -m a b c", "put the prompt in quotes"),
    ("generate -m a -p b c", "put the prompt in quotes"),
    ("chat a -m b", "expected one model"),
    ("chat --plain --system x", "--system only with"),
    ("embed", "expected MODEL TEXT..., got neither"),
    ("embed -m x", "got only x"),
    ("convert a", "expected DST, got none"),
    ("convert a b c", "expected no further argument, got c"),
    ("convert a b --text x", "--text only with --verify"),
    ("inspect", "expected PATH, got none"),
    ("doctor now", "expected no further argument, got now"),
    ("bench model m --dummy tiny", "expected MODEL or --dummy"),
    ("bench ops --output /nowhere/x", "/nowhere"),
    # values
    ("generate x -n", "-n/--max-new-tokens/--max-tokens: expected a value, got none"),
    ("generate x -n -1", "an integer at least 0, got '-1'"),
    ("generate x -n many", "an integer at least 0, got 'many'"),
    ("generate x --seed -1", "--seed: expected an integer from 0"),
    ("generate x --temp nan", "a number at least 0, got 'nan'"),
    ("generate x --temperature inf", "a number at least 0"),
    ("generate x --top-p 3", "above 0 and at most 1, got '3'"),
    ("generate x --cache ''", "a text that is not empty"),
    ("generate x --stop ''", "a text that is not empty"),
    ("generate x --threads 0", "an integer from 1 to 1024, got '0'"),
    ("generate x --threads 99999999999", "from 1 to 1024"),
    ("generate x --logit-bias 7", "expected ID=B, a token id and a number from -100"),
    ("generate x --logit-bias x=1", "expected ID=B, a token id and a number from -100"),
    ("generate x --logit-bias 7=101", "to 100, got '7=101'"),
    ("generate x --logprobs 21", "--logprobs: expected an integer from 0 to 20, got '21'"),
    ("generate x --frequency-penalty 3", "--frequency-penalty: expected a number from -2 to 2"),
    ("generate x --speculation fast", f"{HOW} 'fast'"),
    ("serve x --speculation fast", f"{HOW} 'fast'"),
    ("generate x --speculation -1", f"{HOW} '-1'"),
    ("generate x --speculation head --no-draft", "expected --speculation head or --no-draft"),
    ("chat --speculation head --no-draft", "expected --speculation head or --no-draft"),
    ("serve x --speculation head --no-draft", "expected --speculation head or --no-draft"),
    ("embed x y --no-draft", "--no-draft"),
    ("dummy tiny x --seed x", "--seed: expected an integer from 0"),
]


@pytest.mark.parametrize(("line", "message"), USAGE, ids=[line for line, _ in USAGE])
def test_wrong_usage_has_one_style_and_status_2(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line)
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and STYLE.fullmatch(err) and err.endswith("[usage]\n"), err
    assert message in err and (
        words[0] not in COMMANDS or err.startswith(f"bitnet-ops: error: {words[0]}")
    )


def test_nothing_is_guessed_where_nothing_is_like_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert did_you_mean("--zzz", ["--model"]) == ""
    assert main(["generate", "x", "--zzz"]) == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "/nowhere/model", "x"], "got no such file or directory [load]"),
        (["generate", "word " * 3000], "at most 1024 tokens"),
        (["generate", "x", "--lora", "/nowhere"], "[lora]"),
        (["generate", "x", "--attention", "window:-1"], "got '-1'; a policy is such as window:256"),
        (["generate", "x", "--attention", "top_k:1.5"], "above 0 and at most 1, got '1.5'"),
        (["generate", "x", "--sparsity", "top_k:1.5"], "above 0 and at most 1, got '1.5'"),
        (["convert", "/nowhere", "/nowhere2"], "[source-missing]"),
        (["export", "/nowhere", "/nowhere2"], "[io]"),
        (["inspect", "/nowhere"], "/nowhere"),
        # before an address or anything else is promised
        (["serve", "/nowhere/model"], "got no such file or directory [load]"),
        (["serve", "--model", "a=org/name"], "HF_HUB_OFFLINE is set, got no copy of it"),
        (["serve", "--adapter", "a=/nowhere"], "[lora]"),
        (["serve", "--lora", "/nowhere"], "[lora]"),
        (["serve", __file__], "[magic]"),
    ],
)
def test_failures_have_the_same_style_and_status_1(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert out == "" and STYLE.fullmatch(err) and message in err, err


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
