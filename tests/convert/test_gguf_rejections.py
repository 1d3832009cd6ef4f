"""GGUF files that the converter rejects: one code and one line each, and nothing is left behind.

The damaged files of test_gguf_reader.py do not get this far; these can be read and mean nothing, or
something that is not implemented.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_gguf_import import BITNET, converted

from bitnet_ops.convert import ConvertError
from bitnet_ops.convert.gguf_source import GgufSource
from bitnet_ops.convert.gguf_tokenizer import tokenizer_files
from bitnet_ops.formats.gguf import Reader as GgufReader
from bitnet_ops.formats.sglbitnt import Reader
from gguf_bytes import gguf, key
from gguf_models import byte_tokenizer, metadata, model_file, tensors
from hf_writer import make_network

ARCH = "bitnet-b1.58"


@functools.cache
def base_parts() -> list[Any]:
    return tensors(BITNET, make_network(BITNET), ARCH, "I2_S")


Change = Callable[[list[bytes], list[Any]], None]


def _replace_key(name: str, kind: str, value: Any) -> Change:
    def change(keys: list[bytes], parts: list[Any]) -> None:
        start = key(name, "str", "")[: 8 + len(name)]
        keys[:] = [k for k in keys if not k.startswith(start)] + [key(name, kind, value)]

    return change


def _without_key(name: str) -> Change:
    def change(keys: list[bytes], parts: list[Any]) -> None:
        start = key(name, "str", "")[: 8 + len(name)]
        keys[:] = [k for k in keys if not k.startswith(start)]

    return change


def _tensor(name: str, shape: tuple[int, ...], number: int, data: bytes) -> Change:
    def change(keys: list[bytes], parts: list[Any]) -> None:
        parts[:] = [p for p in parts if p[0] != name] + [(name, shape, number, data)]

    return change


def _without_tensor(name: str) -> Change:
    def change(keys: list[bytes], parts: list[Any]) -> None:
        parts[:] = [p for p in parts if p[0] != name]

    return change


Q = "blk.0.attn_q.weight"
RANDOM = np.random.default_rng(0).normal(size=(256, 256)).astype("<f4")


def _i2s_with(at: int, value: int) -> Change:
    def change(keys: list[bytes], parts: list[Any]) -> None:
        for i, (name, shape, number, data) in enumerate(parts):
            if name == Q:
                parts[i] = (name, shape, number, data[:at] + bytes([value]) + data[at + 1 :])

    return change


def _many_tokens(keys: list[bytes], parts: list[Any]) -> None:
    _replace_key("tokenizer.ggml.tokens", "[str]", [f"t{i}" for i in range(301)])(keys, parts)
    _without_key("tokenizer.ggml.token_type")(keys, parts)


def _with_both(keys: list[bytes], parts: list[Any]) -> None:
    """Factors of frequencies, and a scaling by a factor too."""
    _tensor("rope_freqs.weight", (32,), 0, np.full(32, 8, "<f4").tobytes())(keys, parts)
    keys.append(key(f"{ARCH}.rope.scaling.factor", "f32", 4.0))


REJECTIONS: list[tuple[str, str, Change]] = [
    ("gguf-architecture", "'gemma3'; convert the Hugging Face", _replace_key(
        "general.architecture", "str", "gemma3")),
    ("gguf-architecture", "None", _without_key("general.architecture")),
    ("gguf-kind", "'adapter'", _replace_key("general.type", "str", "adapter")),
    ("gguf-split", "one of 2 parts", _replace_key("split.count", "u32", 2)),
    ("gguf-metadata", "block_count", _without_key(f"{ARCH}.block_count")),
    ("gguf-metadata", "'2'", _replace_key(f"{ARCH}.block_count", "str", "2")),
    ("gguf-metadata", "head_count", _replace_key(f"{ARCH}.attention.head_count", "[i32]", [4, 2])),
    ("gguf-metadata", "size of a head", _replace_key(f"{ARCH}.rope.dimension_count", "u32", 32)),
    ("gguf-metadata", "rows", _replace_key(f"{ARCH}.vocab_size", "u32", 299)),
    ("gguf-metadata", "eos_token_id",
     _replace_key("tokenizer.ggml.eos_token_id", "u32", 300)),
    ("gguf-maths", "sliding_window", _replace_key(f"{ARCH}.attention.sliding_window", "u32", 64)),
    ("gguf-maths", "expert_count", _replace_key(f"{ARCH}.expert_count", "u32", 8)),
    ("gguf-maths", "'ntk'", _replace_key(f"{ARCH}.rope.scaling.type", "str", "ntk")),
    ("gguf-metadata", "as a string", _replace_key(f"{ARCH}.rope.scaling.type", "u32", 2)),
    ("gguf-maths", "attn_factor of 1 with rope scaling linear, got 2.0",
     _replace_key(f"{ARCH}.rope.scaling.attn_factor", "f32", 2.0)),
    ("gguf-maths", "yarn_log_multiplier",
     _replace_key(f"{ARCH}.rope.scaling.yarn_log_multiplier", "f32", 0.1)),
    ("missing-tensor", "rope_factors_long", _replace_key(f"{ARCH}.rope.scaling.type", "str",
                                                         "longrope")),
    ("shape", "a number for every pair",
     _tensor("rope_freqs.weight", (16, 2), 0, np.full(32, 8, "<f4").tobytes())),
    ("unsupported-model", "short_factor to be 32 numbers",
     _tensor("rope_freqs.weight", (31,), 0, np.full(31, 8, "<f4").tobytes())),
    ("gguf-maths", "rope_freqs.weight alone",
     _tensor("rope_factors_long.weight", (32,), 0, np.full(32, 8, "<f4").tobytes())),
    ("gguf-maths", "both at once", _with_both),
    ("gguf-key", "prism.hadamard.version", _replace_key("prism.hadamard.version", "u32", 1)),
    ("gguf-key", "xielu.eps", _replace_key("xielu.eps", "f32", 0.0)),
    ("gguf-key", f"{ARCH}.use_sub_norms", _replace_key(f"{ARCH}.use_sub_norms", "bool", False)),
    ("gguf-key", "llama.block_count", _replace_key("llama.block_count", "u32", 2)),
    ("tokenizer-key", "tokenizer.ggml.normalizer.lowercase",
     _replace_key("tokenizer.ggml.normalizer.lowercase", "bool", True)),
    ("tokenizer-key", "add_sep_token", _replace_key("tokenizer.ggml.add_sep_token", "bool", True)),
    ("unsupported-model", "got 'gelu'", _replace_key(f"{ARCH}.hidden_activation", "str", "gelu")),
    ("missing-tensor", "blk.1.ffn_up", _without_tensor("blk.1.ffn_up.weight")),
    ("missing-tensor", "token_embd", _without_tensor("token_embd.weight")),
    ("missing-tensor", "all 1091 tensors", _replace_key(f"{ARCH}.block_count", "u32", 99)),
    ("unknown-tensor", "blk.0.attn_qkv.weight",
     _tensor("blk.0.attn_qkv.weight", (8,), 0, bytes(32))),
    ("unknown-tensor", "blk.5.attn_norm.weight",
     _tensor("blk.5.attn_norm.weight", (256,), 0, bytes(1024))),
    ("bias", "blk.0.attn_q.bias", _tensor("blk.0.attn_q.bias", (256,), 0, bytes(1024))),
    ("shape", "[128, 256]", _tensor(Q, (128, 256), 36, bytes(128 * 64 + 32))),
    ("gguf-not-ternary", "Q8_0", _tensor(Q, (256, 256), 8, bytes(256 * 8 * 34))),
    ("gguf-not-ternary", "--assume-online", _tensor(Q, (256, 256), 0, RANDOM.tobytes())),
    ("non-finite", "nan", _tensor("output_norm.weight", (256,), 0,
                                  np.full(256, np.nan, "<f4").tobytes())),
    ("code-3", "code 3", _i2s_with(100, 0xFF)),
    ("bad-scale", "scale above 0", _i2s_with(256 * 64 + 3, 0xFF)),
    ("gguf-tiled", "TL1", _tensor(Q, (256, 256), 38, bytes(256 * 64 + 32))),
    ("tokenizer-pre", "'falcon'", _replace_key("tokenizer.ggml.pre", "str", "falcon")),
    ("tokenizer-model", "'t5'", _replace_key("tokenizer.ggml.model", "str", "t5")),
    ("tokenizer-tokens", "'a' twice", _replace_key("tokenizer.ggml.tokens", "[str]", ["a"] * 300)),
    ("tokenizer-tokens", "1024", _replace_key("tokenizer.ggml.tokens", "[str]", ["a" * 1025])),
    ("tokenizer-size", "at most 300 tokens", _many_tokens),
    ("gguf-type", "token_embd.weight of a type", _tensor(
        "token_embd.weight", (300, 256), 9, bytes(300 * 8 * 40))),
    ("tokenizer-merges", "pairs", _replace_key("tokenizer.ggml.merges", "[str]", ["abc"])),
    ("tokenizer-merges", "'a' with 'q'", _replace_key("tokenizer.ggml.merges", "[str]", ["a q"])),
    ("tokenizer-ids", "bos_token_id, since", _without_key("tokenizer.ggml.bos_token_id")),
    ("tokenizer-tokens", "token_type", _replace_key("tokenizer.ggml.token_type", "[i32]", [1])),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "text", "change"), REJECTIONS, ids=[f"{i}-{c}" for i, (c, *_) in enumerate(REJECTIONS)]
)
def test_rejections(tmp_path: Path, code: str, text: str, change: Change) -> None:
    keys, parts = [*metadata(BITNET, ARCH), *byte_tokenizer(300)], list(base_parts())
    change(keys, parts)
    with pytest.raises(ConvertError) as caught:
        converted(tmp_path, gguf(keys, parts))
    message = str(caught.value)
    assert caught.value.code == code, message
    assert text in message and "expected" in message and "\n" not in message
    assert not (tmp_path / "out").exists()


WRONG: list[tuple[str, Any]] = [
    ("u32", 0), ("u32", 2**32 - 1), ("i32", -1), ("f32", 0.5), ("f32", float("nan")),
    ("bool", True), ("str", ""), ("str", "x"), ("[str]", ["x"]), ("[str]", []), ("[u32]", [1]),
    ("[u32]", []), ("[f32]", [0.5, float("inf")]), ("[bool]", [True] * 300),
    ("[f32]", [float("nan")] * 300), ("f64", 1e300),
]  # fmt: skip
MORE_KEYS = [
    key("split.count", "u32", 1),
    key("tokenizer.ggml.eot_token_id", "u32", 1),
    key("tokenizer.ggml.scores", "[f32]", [0.0] * 300),
    key("tokenizer.ggml.add_space_prefix", "bool", True),
    key("tokenizer.ggml.unknown_token_id", "u32", 0),
    key("tokenizer.chat_template", "str", "x"),
    key(f"{ARCH}.rope.scaling.type", "str", "linear"),
    key(f"{ARCH}.rope.scaling.factor", "f32", 1.0),
    key("bitnet_ops.scale_names", "[str]", []),
    key("bitnet_ops.scales", "[f32]", []),
]


@pytest.mark.filterwarnings("error::RuntimeWarning")  # NumPy's show where its files lie
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_any_value_under_any_key_is_read_or_rejected(tmp_path: Path, model: str) -> None:
    """Every key with values of every type: a ConvertError, or a plan and a tokenizer."""
    keys = [*metadata(BITNET, ARCH), *byte_tokenizer(300), *MORE_KEYS]
    keys = [k for k in keys if b"tokenizer.ggml.model" not in k]
    keys.append(key("tokenizer.ggml.model", "str", model))
    empty = gguf(keys, list(base_parts()))
    (tmp_path / "x").write_bytes(empty)
    with GgufReader(tmp_path / "x") as reader:
        tokenizer_files(reader.metadata, GgufSource(reader).plan.config)
        names, good = list(reader.metadata), dict(reader.metadata)
        for name in names:
            for kind, value in WRONG:
                is_array = kind.startswith("[") and kind != "[str]"
                dtype = {"[u32]": np.uint32, "[f32]": np.float32, "[bool]": bool}.get(kind)
                reader.metadata = {**good, name: np.array(value, dtype) if is_array else value}
                try:
                    tokenizer_files(reader.metadata, GgufSource(reader).plan.config)
                except ConvertError as error:
                    assert not re.search(r"\n|array\(|np\.|dtype", str(error)), error


def _rejected(tmp_path: Path, change: Change, **options: Any) -> str:
    keys, parts = [*metadata(BITNET, ARCH), *byte_tokenizer(300)], list(base_parts())
    change(keys, parts)
    with pytest.raises(ConvertError) as caught:
        converted(tmp_path, gguf(keys, parts), **options)
    assert not (tmp_path / "out").exists()
    return caught.value.code


def test_options_that_are_rejected(tmp_path: Path) -> None:
    unchanged = _without_tensor("none")
    assert _rejected(tmp_path, unchanged, i2s_layout="d") == "i2s-layout"
    masters = _tensor(Q, (256, 256), 0, RANDOM.tobytes())
    assert _rejected(tmp_path, masters, assume_online=True, verify=True) == "gguf-verify"


def test_without_the_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ternary types need nothing; a quantised embedding says what it needs."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    quantised = _tensor("token_embd.weight", (300, 256), 8, bytes(300 * 8 * 34))
    assert _rejected(tmp_path, quantised) == "gguf-package"
    converted(tmp_path, gguf([*metadata(BITNET, ARCH), *byte_tokenizer(300)], list(base_parts())))


def test_every_code_is_tested() -> None:
    """Each code that the GGUF half of the converter can reject with occurs in its tests."""
    here = Path(__file__).resolve().parent
    convert = here.parents[1] / "python" / "bitnet_ops" / "convert"
    sources = [*convert.glob("gguf_*.py"), convert / "oracles.py"]
    raised = {
        code
        for path in sources
        for code in re.findall(r'reject\(\s*"([a-z0-9-]+)"', path.read_text())
    }
    tests = "".join(path.read_text() for path in here.glob("test_gguf_*.py"))
    assert len(raised) > 20
    assert sorted(code for code in raised if f'"{code}"' not in tests) == []


def test_masters_on_the_callers_word(tmp_path: Path) -> None:
    keys, parts = [*metadata(BITNET, ARCH), *byte_tokenizer(300)], list(base_parts())
    _tensor(Q, (256, 256), 0, RANDOM.tobytes())(keys, parts)
    folder = converted(tmp_path, gguf(keys, parts), assume_online=True)
    with Reader(folder / "model.bin") as reader:
        scale = reader.tensors["model.layers.0.self_attn.q_proj.weight"].scale
        assert scale == pytest.approx(np.abs(RANDOM.astype(float)).mean(), rel=1e-6)


def test_tokenizer_from_elsewhere_or_none(tmp_path: Path) -> None:
    data = model_file(BITNET, make_network(BITNET), ARCH, "I2_S",
                      keys=[key("tokenizer.ggml.model", "str", "t5")])  # fmt: skip
    folder = converted(tmp_path, data, tokenizer="none")
    assert not (folder / "tokenizer.json").exists()
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConvertError, match="no such file") as caught:
        converted(tmp_path, data, tokenizer=other, force=True)
    assert caught.value.code == "tokenizer-missing"
    (other / "tokenizer.json").write_text("{}")
    folder = converted(tmp_path, data, tokenizer=other, force=True)
    assert (folder / "tokenizer.json").read_text() == "{}"
