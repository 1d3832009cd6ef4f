"""`bitnet-ops inspect`: its figures against a file counted by hand, and its rejections.

The file is written by sglbitnt_bytes.py; no figure is taken from the package.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

import sglbitnt_bytes as raw
from bitnet_ops.cli import main
from bitnet_ops.convert import inspect as command
from bitnet_ops.formats.sglbitnt import SglbitntError
from sglbitnt_malformed import MALFORMED

# K of 192, 200 and 192: none a multiple of 128, so padding must not be counted as zeros.
CONFIG: dict[str, Any] = {
    "architectures": ["BitNetForCausalLM"],
    "model_type": "bitnet",
    "vocab_size": 10,
    "hidden_size": 192,
    "intermediate_size": 200,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "bitnet_ops": {"format_version": 1, "source_mode": "online"},
}
TERNARY = {
    "self_attn.q_proj": (192, 192),
    "self_attn.k_proj": (96, 192),
    "self_attn.v_proj": (96, 192),
    "self_attn.o_proj": (192, 192),
    "mlp.gate_proj": (200, 192),
    "mlp.up_proj": (200, 192),
    "mlp.down_proj": (192, 200),
}
GAINS = {
    "layers.0.input_layernorm": 192,
    "layers.0.self_attn.attn_sub_norm": 192,
    "layers.0.post_attention_layernorm": 192,
    "layers.0.mlp.ffn_sub_norm": 200,
    "norm": 192,
}


def weights(name: str) -> list[list[int]]:
    n, k = TERNARY[name]
    generator = random.Random(name)
    return [generator.choices((-1, 0, 1), (1, 2, 3), k=k) for _ in range(n)]


WEIGHTS = {f"model.layers.0.{name}.weight": weights(name) for name in TERNARY}


def model_bytes(config: dict[str, Any] = CONFIG) -> bytes:
    records = [raw.tensor(b"model.embed_tokens.weight", 3, (10, 192), b"\x80\x3f" * 1920)]
    for name, size in GAINS.items():
        records.append(
            raw.tensor(f"model.{name}.weight".encode(), 1, (size,), struct.pack("<f", 0.5) * size)
        )
    for name, rows in WEIGHTS.items():
        data = b"".join(map(raw.pack_row, rows))
        dims = (len(rows), len(data) // len(rows))
        records.append(raw.tensor(name.encode(), 0, dims, data, scale=1.5))
    return raw.file(*records, config=config)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.bin"
    path.write_bytes(model_bytes())
    return path


def run(*words: str) -> int:
    return main(["inspect", *words])


def test_every_figure(model: Path) -> None:
    report = command.inspect(model)
    rows = {row["name"]: row for row in report["tensors"]}
    assert len(rows) == 13 and report["remarks"] == []
    assert (report["model_type"], report["bitnet_ops"]) == ("bitnet", CONFIG["bitnet_ops"])
    assert report["bytes"] == model.stat().st_size
    for name, matrix in WEIGHTS.items():
        row, flat = rows[name], [w for line in matrix for w in line]
        packed = b"".join(map(raw.pack_row, matrix))
        assert (row["format"], row["scale"]) == ("ternary", 1.5)
        assert row["shape"] == [len(matrix), len(matrix[0])]
        assert [row["minus"], row["zero"], row["plus"]] == [flat.count(w) for w in (-1, 0, 1)]
        assert (row["nbytes"], row["sha256"]) == (len(packed), hashlib.sha256(packed).hexdigest())
    embedding = rows["model.embed_tokens.weight"]
    assert (embedding["format"], embedding["shape"]) == ("bfloat16", [10, 192])
    assert (embedding["scale"], embedding["zero"]) == (None, None)
    assert embedding["sha256"] == hashlib.sha256(b"\x80\x3f" * 1920).hexdigest()


def test_totals(model: Path) -> None:
    flat = [w for matrix in WEIGHTS.values() for line in matrix for w in line]
    packed_bytes = sum(64 * len(matrix) for matrix in WEIGHTS.values())  # 2 blocks a row
    dense_bytes, dense = 2 * 1920 + 4 * sum(GAINS.values()), 1920 + sum(GAINS.values())
    assert command.inspect(model)["totals"] == {
        "tensors": 13,
        "packed_tensors": 7,
        "dense_tensors": 6,
        "ternary_weights": len(flat),
        "dense_parameters": dense,
        "packed_bytes": packed_bytes,
        "dense_bytes": dense_bytes,
        "share_zero": flat.count(0) / len(flat),
        "bits_per_ternary_weight": 8 * packed_bytes / len(flat),
        "bits_per_parameter": 8 * (packed_bytes + dense_bytes) / (len(flat) + dense),
    }


def test_json_output_of_a_folder(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(model.parent), "--json") == 0
    assert json.loads(capsys.readouterr().out) == command.inspect(model)


def test_plain_table_when_the_output_is_no_terminal(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(model)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["tensor", "format", "shape", "scale"]
    down = next(line for line in lines if "down_proj" in line)
    flat = [w for row in WEIGHTS["model.layers.0.mlp.down_proj.weight"] for w in row]
    shares = " / ".join(f"{100 * flat.count(w) / len(flat):.1f}" for w in (-1, 0, 1))
    assert "192 x 200" in down and " 1.5 " in down and shares in down
    assert any(line.startswith("ternary     7 tensors") for line in lines)
    assert not any(line.startswith("remark") for line in lines)


def test_whole_table_on_a_wide_terminal(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("sys.stdout", screen)
    assert run(str(model)) == 0
    text = screen.getvalue()
    assert "192 x 200" in text and "left out" not in text
    for row in command.inspect(model)["tensors"]:
        assert row["name"] in text and row["sha256"][:12] in text


@pytest.mark.parametrize(
    ("change", "remark"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"num_hidden_layers": 2}, "missing: model.layers.1."),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"intermediate_size": 300}, "[in_features]"),
    ],
)
def test_config_that_does_not_fit_is_a_remark(
    tmp_path: Path, change: dict[str, Any], remark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(model_bytes({**CONFIG, **change}))
    report = command.inspect(path)
    assert any(remark in line for line in report["remarks"]), report["remarks"]
    down = next(row for row in report["tensors"] if "down_proj" in row["name"])
    assert down["shape"] == [192, 256]  # 4 weights for each of the row's 64 bytes
    assert down["minus"] + down["zero"] + down["plus"] == 192 * 256
    assert run(str(path)) == 0
    assert "remark: " in capsys.readouterr().out


def test_a_file_of_another_writer(tmp_path: Path) -> None:
    """No private block, no config to speak of, names that no model knows."""
    path = tmp_path / "old.bin"
    path.write_bytes(raw.file(raw.tensor(b"w"), raw.tensor(b"w.weight_scale", 1, (1,))))
    report = command.inspect(path)
    assert (report["model_type"], report["bitnet_ops"]) == (None, None)
    assert [row["shape"] for row in report["tensors"]] == [[1, 128], [1]]
    assert len(report["remarks"]) == 1


def test_an_empty_file_of_no_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.bin"
    path.write_bytes(raw.file())
    assert run(str(path)) == 0
    assert "0 tensors" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["zeros", "code_3_first_byte", "f32_nan_first", "config_not_json"])
def test_rejections_are_one_line(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data, code = MALFORMED[name]
    path = tmp_path / "m.bin"
    path.write_bytes(data)
    assert run(str(path)) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"bitnet-ops: error: {path}: ") and err.endswith(f"[{code}]\n")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SglbitntError, match=r"model\.bin.*\[io\]"):
        command.inspect(tmp_path)
