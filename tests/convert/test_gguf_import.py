"""GGUF -> .bin: files of an independent writer, against the network and a plain fp64 forward."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bitnet_ops
from bitnet_ops import ops
from bitnet_ops.cli import main
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.convert.gguf_export import export_gguf
from bitnet_ops.formats.sglbitnt import Reader
from bitnet_ops.nn.kv_cache import KVCache
from forward_fp64 import forward
from gguf_bytes import gguf, key, q2_0
from gguf_models import (
    byte_tokenizer,
    metadata,
    model_file,
    permute,
    scale_of,
    tensor_name,
    tensors,
)
from hf_writer import FAMILIES, Family, make_network

BITNET = dataclasses.replace(FAMILIES["bitnet-offline"], name="gguf-bitnet")
UNTIED = dataclasses.replace(FAMILIES["bitnet-offline-untied"], name="gguf-untied")
LLAMA = dataclasses.replace(
    FAMILIES["llama-bitlinear"], name="gguf-llama", hidden=256, inter=512, theta=1000042.0
)
WIDE = dataclasses.replace(LLAMA, name="gguf-wide", heads=4, kv_heads=2, head_dim=128)
# 1bitLLM's network, which llama.cpp calls "bitnet": SiLU and sub-norms
ONEBIT = dataclasses.replace(
    FAMILIES["llama-autobitlinear"], name="gguf-1bitllm", spelling="1bitllm", tied=True,
    architecture="BitnetForCausalLM", hidden=256, heads=4, kv_heads=4, theta=10000.0,
)  # fmt: skip
QWEN3 = dataclasses.replace(
    FAMILIES["llama-autobitlinear"], name="gguf-qwen3", model_type="qwen3", qk_norm=True,
    eps=1e-6, heads=4, head_dim=128, theta=1000000.0,
)  # fmt: skip
ALL = [
    (BITNET, "bitnet-b1.58"),
    (UNTIED, "bitnet-25"),
    (LLAMA, "llama"),
    (WIDE, "llama"),
    (ONEBIT, "bitnet"),
    (QWEN3, "qwen3"),
]


def converted(tmp_path: Path, data: bytes, **options: Any) -> Path:
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    convert(file, tmp_path / "out", **options)
    return tmp_path / "out"


def compare(folder: Path, family: Family, network: dict[str, Any], half: bool = False) -> None:
    """Codes and scales exactly; `half`: the scale has gone through float16."""
    with Reader(folder / "model.bin") as reader:
        for name, value in network.items():
            tensor = reader.tensor(f"{name}.weight")
            if not isinstance(value, dict):
                assert torch.equal(tensor.double(), torch.from_numpy(value)), name
                continue
            codes = ops.unpack(tensor, value["codes"].shape[1]).numpy()
            assert np.array_equal(codes, value["codes"]), name
            scale = np.float32(scale_of(family, value))
            expected = np.float32(np.float16(scale)) if half else scale
            assert reader.tensors[f"{name}.weight"].scale == expected


@pytest.mark.parametrize(
    ("family", "architecture"),
    ALL,
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("kind", ["I2_S", "TQ1_0", "TQ2_0", "Q2_0", "F16", "BF16", "F32"])
def test_weights_and_scales_survive(
    tmp_path: Path, family: Family, architecture: str, kind: str
) -> None:
    network = make_network(family)
    if kind == "BF16":
        for value in network.values():  # a scale that bf16 holds, or the values are not ternary
            if isinstance(value, dict):
                value["stored_scale"] = 0.5
    data = model_file(family, network, architecture, kind, embedding="BF16")
    folder = converted(tmp_path, data)
    compare(folder, family, network, half=kind not in ("I2_S", "F32", "BF16"))
    config = json.loads(json.dumps(Reader(folder / "model.bin").config))
    assert config["tie_word_embeddings"] is family.tied
    assert config["head_dim"] == family.head_dim
    assert config["rms_norm_eps"] == family.eps
    assert config["rope_theta"] == family.theta
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)


@pytest.mark.parametrize(("family", "architecture"), ALL, ids=lambda v: getattr(v, "name", v))
@pytest.mark.parametrize("kind", ["i2_s", "tq2_0"])
def test_every_architecture_goes_there_and_back(
    tmp_path: Path, family: Family, architecture: str, kind: str
) -> None:
    network = make_network(family)
    folder = converted(tmp_path, model_file(family, network, architecture, "I2_S"))
    if family.sub_norms and not family.tied:  # read; written, others would take the embedding
        with pytest.raises(ConvertError, match="gguf-head"):
            export_gguf(folder, tmp_path / "again.gguf", type=kind)
        return
    report = export_gguf(folder, tmp_path / "again.gguf", type=kind)
    assert report.architecture == {"bitnet-25": "bitnet-b1.58"}.get(architecture, architecture)
    convert(tmp_path / "again.gguf", tmp_path / "back")
    with Reader(folder / "model.bin") as a, Reader(tmp_path / "back" / "model.bin") as b:
        assert list(a.tensors) == list(b.tensors)
        for name, info in a.tensors.items():
            assert b.tensors[name].scale == info.scale
            assert torch.equal(a.tensor(name), b.tensor(name)), name


@pytest.mark.parametrize("layout", ["a", "b", "c"])
def test_i2s_layouts(tmp_path: Path, layout: str) -> None:
    network = make_network(BITNET)
    data = model_file(BITNET, network, "bitnet-b1.58", "I2_S", layout=layout, embedding="BF16")
    compare(converted(tmp_path, data, i2s_layout=layout), BITNET, network)


def run(folder: Path, ids: list[int]) -> torch.Tensor:
    model = bitnet_ops.load(folder, head_format="stored").model
    return model(torch.tensor([ids]), KVCache(model.config, 1, len(ids), torch.float32))[0]


@pytest.mark.parametrize(
    ("family", "architecture"), ALL, ids=lambda value: getattr(value, "name", value)
)
def test_logits_are_those_of_a_plain_forward(
    tmp_path: Path, family: Family, architecture: str
) -> None:
    network = make_network(family)
    folder = converted(tmp_path, model_file(family, network, architecture, "I2_S",
                                            embedding="BF16"))  # fmt: skip
    # of many prompts the one whose activations keep furthest from ties of their rounding to int8
    prompts = torch.randint(0, 300, (24, 12), generator=torch.Generator().manual_seed(0)).tolist()
    plain, margin, ids = max(
        ((*forward(family, network, ids), ids) for ids in prompts), key=lambda found: found[1]
    )
    assert margin > 1e-5
    difference = float((run(folder, ids).double() - plain).abs().max() / plain.abs().max())
    assert difference < 1e-5, difference


def test_forgetting_the_permutation_would_show(tmp_path: Path) -> None:
    """The negative control: q and k left in GGUF's order give other logits."""
    network = make_network(LLAMA)
    right = converted(tmp_path, model_file(LLAMA, network, "llama", "I2_S"))
    for name, value in network.items():
        if name.endswith(("q_proj", "k_proj")):
            heads = LLAMA.heads if name.endswith("q_proj") else LLAMA.kv_heads
            value["codes"] = permute(value["codes"], heads)
    (tmp_path / "w").mkdir()
    wrong = converted(tmp_path / "w", model_file(LLAMA, network, "llama", "I2_S"))
    ids = [0, 5, 77, 200, 5, 31, 8, 299]
    a, b = run(right, ids), run(wrong, ids)
    assert float((a - b).abs().max() / a.abs().max()) > 0.05


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "Q4_K", "Q4_0", "TQ2_0"])
def test_quantised_embeddings_are_dequantised(tmp_path: Path, kind: str) -> None:
    import gguf as official

    network = make_network(UNTIED)
    parts = tensors(UNTIED, network, "bitnet-b1.58", "I2_S")
    number = official.GGMLQuantizationType[kind]
    random = np.random.default_rng(0)
    block, nbytes = official.GGML_QUANT_SIZES[number]
    raw = random.integers(0, 60, (UNTIED.vocab, UNTIED.hidden // block * nbytes), dtype=np.uint8)
    parts = [
        (n, s, int(number), raw.tobytes()) if n == "output.weight" else (n, s, k, d)
        for n, s, k, d in parts
    ]
    data = gguf([*metadata(UNTIED, "bitnet-b1.58"), *byte_tokenizer(300)], parts)
    folder = converted(tmp_path, data)
    with Reader(folder / "model.bin") as reader:
        expected = official.quants.dequantize(raw, number)
        assert np.array_equal(reader.tensor("lm_head.weight").float().numpy(), expected)


def test_separate_scale_tensors_multiply(tmp_path: Path) -> None:
    """Newer upstream files hold codes * 1 and a tensor `.scale` beside every projection."""
    network = make_network(BITNET)
    plain = {
        n: {**v, "stored_scale": 1.0} if isinstance(v, dict) else v for n, v in network.items()
    }
    parts = tensors(BITNET, plain, "bitnet-b1.58", "TQ2_0", embedding="BF16")
    extra = []
    for name, value in network.items():
        if isinstance(value, dict):
            inner = next(n for n, *_ in tensors(BITNET, {name: value}, "x", "I2_S"))
            scale = np.float32(scale_of(BITNET, value)).tobytes()
            extra.append((inner.replace(".weight", ".scale"), (1,), 0, scale))
    keys = [*metadata(BITNET, "bitnet-b1.58"), *byte_tokenizer(300)]
    compare(converted(tmp_path, gguf(keys, [*parts, *extra])), BITNET, network)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("architecture", ["bitnet-b1.58", "llama"])
def test_group_scales(tmp_path: Path, block: int, architecture: str) -> None:
    """Q2_0 with a scale for 128 weights, as Prism's models have: rows and scales move together."""
    family = BITNET if architecture == "bitnet-b1.58" else LLAMA
    network, random = make_network(family), np.random.default_rng(0)
    scales, parts = {}, []
    for part in tensors(family, network, architecture, "I2_S"):
        name, shape, number, content = part
        if number == 36:
            source = next(n for n, v in network.items() if tensor_name(n) == name)
            codes = network[source]["codes"]
            groups = random.uniform(0.5, 2, (shape[0], shape[1] // 128)).astype(np.float16)
            scales[source] = groups
            if architecture == "llama" and source.endswith(("q_proj", "k_proj")):
                heads = family.heads if source.endswith("q_proj") else family.kv_heads
                codes, groups = permute(codes, heads), permute(groups, heads)
            content = q2_0(codes, groups.repeat(128 // block, axis=1), block)
            part = (name, shape, 42, content)
        parts.append(part)
    folder = converted(
        tmp_path, gguf([*metadata(family, architecture), *byte_tokenizer(300)], parts)
    )
    with Reader(folder / "model.bin") as reader:
        for name, groups in scales.items():
            assert reader.tensors[f"{name}.weight"].group_size == 128
            stored = reader.scales(f"{name}.weight").numpy()
            assert np.array_equal(stored, groups.astype(np.float32)), name
            codes = ops.unpack(reader.tensor(f"{name}.weight"), network[name]["codes"].shape[1])
            assert np.array_equal(codes.numpy(), network[name]["codes"])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(model_file(BITNET, make_network(BITNET), "bitnet-b1.58", "I2_S"))
    assert main(["convert", str(file), str(tmp_path / "out"), "--i2s-layout", "a"]) == 0
    text = capsys.readouterr().out
    assert "14 ternary" in text and "--i2s-layout" in text
    assert main(["generate", str(tmp_path / "out"), "Hello", "--max-new-tokens", "3"]) == 0


def test_what_is_ignored_is_said(tmp_path: Path) -> None:
    keys = [*metadata(BITNET, "bitnet-b1.58"), *byte_tokenizer(300)]
    parts = tensors(BITNET, make_network(BITNET), "bitnet-b1.58", "I2_S")
    parts.append(("rope_freqs.weight", (32,), 0, np.ones(32, "<f4").tobytes()))
    (tmp_path / "m.gguf").write_bytes(gguf(keys, parts))
    remarks = "\n".join(convert(tmp_path / "m.gguf", tmp_path / "out").remarks)
    assert "rope_freqs.weight holds ones alone" in remarks
    assert "--i2s-layout" in remarks


@pytest.mark.parametrize(
    ("family", "architecture", "stated", "hidden_act"),
    [
        (BITNET, "bitnet-b1.58", None, "relu2"),
        (BITNET, "bitnet-b1.58", "silu", "silu"),
        (BITNET, "bitnet-25", "squared_relu", "relu2"),
        (ONEBIT, "bitnet", None, "silu"),
        (ONEBIT, "bitnet", "relu2", "relu2"),
        (LLAMA, "llama", "swiglu", "silu"),
    ],
)
def test_the_activation_that_a_file_names_is_taken(
    tmp_path: Path, family: Family, architecture: str, stated: str | None, hidden_act: str
) -> None:
    keys = byte_tokenizer(family.vocab)
    if stated is not None:
        keys.append(key(f"{architecture}.hidden_activation", "str", stated))
    data = model_file(family, make_network(family), architecture, "I2_S", keys=keys)
    with Reader(converted(tmp_path, data) / "model.bin") as reader:
        assert reader.config["hidden_act"] == hidden_act


def test_bitnet_with_llama_3s_vocabulary_needs_the_activation(tmp_path: Path) -> None:
    """1bitLLM's SiLU and 2B-4T's relu2 have both been written under that name."""
    keys = byte_tokenizer(ONEBIT.vocab)
    tokens = ["<|begin_of_text|>", *(f"t{i}" for i in range(1, ONEBIT.vocab))]
    keys = [k for k in keys if b"ggml.tokens" not in k] + [
        key("tokenizer.ggml.tokens", "[str]", tokens)
    ]
    (tmp_path / "m.gguf").write_bytes(
        model_file(ONEBIT, make_network(ONEBIT), "bitnet", "I2_S", keys=keys)
    )
    with pytest.raises(ConvertError, match="expected bitnet.hidden_activation, .*no such key"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


# --- verify ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "architecture", "kind", "layout"),
    [
        (BITNET, "bitnet-b1.58", "I2_S", "a"),
        (UNTIED, "bitnet-25", "I2_S", "b"),
        (LLAMA, "llama", "I2_S", "c"),
        (WIDE, "llama", "TQ1_0", "a"),
        (LLAMA, "llama", "TQ2_0", "a"),
        (BITNET, "bitnet-b1.58", "Q2_0", "a"),
        (LLAMA, "llama", "F16", "a"),
        (ONEBIT, "bitnet", "TQ2_0", "a"),
        (QWEN3, "qwen3", "I2_S", "a"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_verify(tmp_path: Path, family: Family, architecture: str, kind: str, layout: str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(model_file(family, make_network(family), architecture, kind, layout=layout))
    report = convert(file, tmp_path / "out", verify=True, i2s_layout=layout)
    proof = report.verification
    assert proof["weights_different"] == 0 and proof["passed"]
    assert proof["projections"] == 14 and proof["logits"]["top1_agreement"] > 0.95


def test_the_verify_command_takes_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed in (("m", "gguf-llama"), ("n", "gguf-other")):
        network = make_network(dataclasses.replace(LLAMA, name=seed))
        data = model_file(LLAMA, network, "llama", "I2_S", layout="b")
        (tmp_path / f"{name}.gguf").write_bytes(data)
    convert(tmp_path / "m.gguf", tmp_path / "out", i2s_layout="b")
    assert main(["verify", str(tmp_path / "out"), str(tmp_path / "m.gguf")]) == 0
    assert "0 of" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "out"), str(tmp_path / "n.gguf")]) == 1
    assert "differ" in capsys.readouterr().err
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:-100])
    assert main(["verify", str(tmp_path / "out"), str(tmp_path / "cut.gguf")]) == 1


def test_verify_rejects_and_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitnet_ops.convert import gguf_source as gguf_tensors

    monkeypatch.setattr(gguf_tensors, "head_rows", lambda rows, head_dim: np.arange(rows))
    file = tmp_path / "m.gguf"
    file.write_bytes(model_file(LLAMA, make_network(LLAMA), "llama", "I2_S"))
    with pytest.raises(ConvertError, match="q_proj.weight differ") as caught:
        convert(file, tmp_path / "out", verify=True)
    assert caught.value.code == "verification-failed"
    assert not (tmp_path / "out").exists()
