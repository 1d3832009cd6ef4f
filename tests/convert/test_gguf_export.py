""".bin -> GGUF: read by the official package and by transformers, and back again without a loss.

The official package never sees I2_S, which it cannot read; there the bytes themselves are compared.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import gguf as official
import numpy as np
import pytest
import torch
from test_gguf_tokenizer import SENTENCEPIECE, TEXTS, assert_same, rebuilt, trained
from tokenizers import Tokenizer

import bitnet_ops
import bonsai
import hybrids
import rounding_ties
from bitnet_ops import ops
from bitnet_ops.cli import main
from bitnet_ops.config import ModelConfig
from bitnet_ops.convert import ConvertError, convert, gguf_export
from bitnet_ops.convert.gguf_config import unknown_general
from bitnet_ops.convert.gguf_export import export_gguf
from bitnet_ops.dummy.configs import CONFIGS
from bitnet_ops.formats.gguf import Reader as GgufReader
from bitnet_ops.formats.sglbitnt import Reader, Writer
from bitnet_ops.language_model import DEMO_DIR
from bitnet_ops.nn.kv_cache import KVCache
from gguf_models import permute, scale_of, tensor_name
from hf_families import CASES
from hf_writer import FAMILIES, Family, make_network, write_checkpoint

KINDS = ["i2_s", "tq1_0", "tq2_0"]
BITNET = dataclasses.replace(FAMILIES["bitnet-offline"], name="gguf-export-bitnet")
LLAMA = dataclasses.replace(
    FAMILIES["llama-bitlinear"], name="gguf-export-llama", hidden=256, inter=512
)
# scales that float16 holds exactly, and heads of a size of their own
HALF = dataclasses.replace(
    FAMILIES["llama-autobitlinear"], name="gguf-export-half", head_dim=64, heads=8, dtype="float16"
)
QWEN3 = dataclasses.replace(
    HALF,
    name="gguf-export-qwen3",
    model_type="qwen3",
    qk_norm=True,
    heads=4,
    head_dim=128,
    eps=1e-6,
    theta=1000000.0,
)


def model_of(folder: Path, family: Family) -> tuple[Path, dict[str, Any]]:
    network = make_network(family)
    write_checkpoint(folder / "hf", family, network=network)
    convert(folder / "hf", folder / "model")
    return folder / "model", network


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    return {f.name: model_of(tmp_path_factory.mktemp("m"), f) for f in (BITNET, LLAMA, HALF, QWEN3)}


def same_tensors(a: Path, b: Path) -> None:
    """Codes and scales exactly; dense values exactly, norms perhaps in a wider dtype."""
    with Reader(a / "model.bin") as first, Reader(b / "model.bin") as second:
        assert list(first.tensors) == list(second.tensors)
        for name, info in first.tensors.items():
            assert second.tensors[name].scale == info.scale
            ours, theirs = first.tensor(name), second.tensor(name)
            assert torch.equal(ours if info.packed else ours.float(), theirs.to(
                ours.dtype if info.packed else torch.float32))  # fmt: skip


@pytest.mark.parametrize("family", [BITNET, LLAMA, HALF], ids=lambda f: f.name)
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(
    tmp_path: Path, models: dict[str, tuple[Path, dict[str, Any]]], family: Family, kind: str
) -> None:
    folder, _ = models[family.name]
    report = export_gguf(folder, tmp_path / "x.gguf", type=kind)
    assert (report.largest_rounding == 0) == (kind == "i2_s" or family is not LLAMA)
    convert(tmp_path / "x.gguf", tmp_path / "back")
    same_tensors(folder, tmp_path / "back")
    for name in ("head_dim", "rms_norm_eps", "tie_word_embeddings", "hidden_act", "eos_token_id"):
        with Reader(folder / "model.bin") as a, Reader(tmp_path / "back" / "model.bin") as b:
            assert a.config[name] == b.config[name]
    tokenizers = [Tokenizer.from_file(str(d / "tokenizer.json"))
                  for d in (folder, tmp_path / "back")]  # fmt: skip
    assert_same(*tokenizers, TEXTS)


@pytest.mark.parametrize("family", [BITNET, LLAMA], ids=lambda f: f.name)
@pytest.mark.parametrize("kind", ["tq1_0", "tq2_0"])
def test_the_official_reader_and_quantiser_agree(
    tmp_path: Path, models: dict[str, tuple[Path, dict[str, Any]]], family: Family, kind: str
) -> None:
    """Every tensor of the file is, byte for byte, what the gguf package makes of the weights."""
    folder, network = models[family.name]
    export_gguf(folder, tmp_path / "x.gguf", type=kind)
    theirs = {t.name: t for t in official.GGUFReader(tmp_path / "x.gguf").tensors}
    assert len(theirs) == len(network)
    number = official.GGMLQuantizationType[kind.upper()]
    for name, value in network.items():
        tensor = theirs[tensor_name(name)]
        if not isinstance(value, dict):
            stored = official.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(stored, value.astype(np.float32))
            continue
        codes = value["codes"]
        if family is LLAMA and name.endswith(("q_proj", "k_proj")):
            codes = permute(codes, family.heads if "q_proj" in name else family.kv_heads)
        values = codes.astype(np.float32) * np.float32(scale_of(family, value))
        assert tensor.tensor_type == number
        assert tensor.data.tobytes() == official.quants.quantize(values, number).tobytes()


def test_i2s_is_the_packed_rows(
    tmp_path: Path, models: dict[str, tuple[Path, dict[str, Any]]]
) -> None:
    folder, _ = models[BITNET.name]
    export_gguf(folder, tmp_path / "x.gguf")
    with Reader(folder / "model.bin") as ours, GgufReader(tmp_path / "x.gguf") as theirs:
        assert theirs.architecture == "bitnet-b1.58"
        info = ours.tensors["model.layers.1.mlp.up_proj.weight"]
        expected = bytes(ours.memory(info.name)) + np.float32(info.scale).tobytes() + bytes(28)
        assert theirs.data("blk.1.ffn_up.weight").tobytes() == expected


BITNET_CPP, LLAMA_CPP, PRISM = "bitnet.cpp", "llama.cpp", "PrismML's fork of llama.cpp"


@pytest.mark.parametrize(
    ("name", "kind", "programs"),
    [
        (BITNET.name, "i2_s", [BITNET_CPP]),
        (BITNET.name, "tq2_0", [BITNET_CPP]),  # llama.cpp's BitNet is another network
        (BITNET.name, "pq2_0", []),
        (LLAMA.name, "i2_s", [BITNET_CPP]),
        (LLAMA.name, "tq1_0", [BITNET_CPP, LLAMA_CPP, PRISM]),
        (LLAMA.name, "pq2_0", [PRISM]),
        (QWEN3.name, "i2_s", []),  # bitnet.cpp has no Qwen3
        (QWEN3.name, "tq2_0", [LLAMA_CPP, PRISM]),
    ],
)
def test_it_is_said_which_program_opens_the_file(
    tmp_path: Path,
    models: dict[str, tuple[Path, dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
    name: str,
    kind: str,
    programs: list[str],
) -> None:
    assert main(["export", str(models[name][0]), str(tmp_path / "x.gguf"), "--type", kind]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    opens, _, others = line.partition(", not in ")
    assert opens == "opens in " + " and ".join(programs) if programs else "no program" in line
    assert not programs or all((p in others.split(" or ")) != (p in programs) for p in
                               (BITNET_CPP, LLAMA_CPP, PRISM))  # fmt: skip


def test_a_rotated_file_is_opened_by_the_fork_alone() -> None:
    assert gguf_export.opened_by("TQ2_0", "qwen35") == [LLAMA_CPP, PRISM]
    assert gguf_export.opened_by("TQ2_0", "qwen35", rotated=True) == [PRISM]


# --- transformers, as a second opinion on a llama file --------------------------------------------


def int8_activations(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
    """transformers dequantises the weights and knows no int8 activations: they are put in here."""
    (x,) = inputs
    multiplier = 127.0 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return ((x * multiplier).round().clamp(-128, 127) / multiplier,)


@pytest.mark.parametrize("rounding", ["this-cpu", "another-cpu"])
@pytest.mark.parametrize(
    ("family", "kind"), [(HALF, "tq1_0"), (HALF, "tq2_0"), (QWEN3, "tq2_0")],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_transformers_reads_the_file_and_answers_alike(
    tmp_path: Path,
    models: dict[str, tuple[Path, dict[str, Any]]],
    family: Family,
    kind: str,
    rounding: str,
) -> None:
    """Its float kernels differ by CPU, so the other kind's rounding is simulated beside its own."""
    import transformers

    folder, network = models[family.name]
    export_gguf(folder, tmp_path / "x.gguf", type=kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="x.gguf", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert theirs.config.head_dim == family.head_dim
    linears = []
    for name, value in network.items():
        if isinstance(value, dict):
            module = theirs.get_submodule(name)
            expected = value["codes"].astype(np.float32) * np.float32(value["stored_scale"])
            assert np.array_equal(module.weight.detach().numpy(), expected), name
            module.register_forward_pre_hook(int8_activations)
            linears.append(module)
    ours = bitnet_ops.load(folder, head_format="stored").model

    def our_logits(ids: torch.Tensor) -> torch.Tensor:
        return ours(ids, KVCache(ours.config, 1, ids.shape[1], torch.float32))[0]

    watch = rounding_ties.TieWatch(linears)
    shaken = rounding_ties.rounding_of_another_cpu(linears if rounding == "another-cpu" else [])
    with torch.no_grad(), shaken:
        rounding_ties.assert_alike(
            our_logits,
            lambda ids: theirs(ids).logits[0],
            watch,
            rounding_ties.prompts(256, seed=3),
        )


# --- hybrids: heads of every size, scales of every kind -------------------------------------------

# of keys and of values, and how many features they have
HEADS = [(2, 4, 32), (2, 6, 64), (1, 2, 64), (4, 4, 32), (2, 4, 96), (2, 6, 128), (1, 3, 128),
         (2, 4, 192), (2, 4, 256)]  # fmt: skip


def hybrid_of(keys: int, values: int, dim: int, scales: str) -> hybrids.Hybrid:
    """Unrotated, the vocabulary floating; scales are one a matrix, one a row or one a group."""
    made = hybrids.make(hybrids.Sizes(inter=512, dim=dim, key_heads=keys, value_heads=values,
                                      vocab=64, layers=4))  # fmt: skip
    for module in ("model.embed_tokens", "lm_head"):
        noise = np.random.default_rng(3).normal(0, 0.1, made.codes.pop(module).shape)
        made.dense[f"{module}.weight"] = noise.astype(np.float32)
        del made.scales[module]
    for module, found in made.scales.items():
        if scales != "groups":
            found[:] = found[:1, :1] if scales == "one" else found[:, :1]
        if scales == "rows":  # a group without weights has no scale to disagree with
            made.codes[module][::3, : hybrids.GROUP] = 0
    return made


def same_values(a: Path, b: Path) -> None:
    """Every weight; A_log has been through a logarithm."""
    with Reader(a / "model.bin") as first, Reader(b / "model.bin") as second:
        assert list(first.tensors) == list(second.tensors)
        for name in first.tensors:
            ours, theirs = (values_of(reader, name) for reader in (first, second))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 if "A_log" in name else 0)


def values_of(reader: Reader, name: str) -> torch.Tensor:
    tensor, info = reader.tensor(name), reader.tensors[name]
    if not info.packed:
        return tensor.float()
    codes, scales = ops.unpack(tensor, info.in_features).float(), reader.scales(name)
    if info.group_size:
        return codes * scales.repeat_interleave(info.group_size, 1)[:, : codes.shape[1]]
    return codes * scales.reshape(-1, 1)


def dequantised(reader: GgufReader, name: str) -> np.ndarray:
    """The values of a ternary matrix: as the gguf package has them, or by the type's description
    where it does not know the type."""
    info, data = reader.tensors[name], np.asarray(reader.data(name))
    (rows, columns), kind = info.shape, info.type.name
    if kind.startswith("TQ"):
        number = official.GGMLQuantizationType[kind]
        return official.quants.dequantize(data.reshape(rows, -1), number).astype(np.float64)
    if kind == "PQ2_0":
        blocks = data.reshape(rows, -1, 34)
        codes = np.stack([blocks[..., 2:] >> s & 3 for s in (0, 2, 4, 6)], -1)
        scales = blocks[..., :2].copy().view("<f2").astype(np.float64)
        return ((codes.reshape(*codes.shape[:2], -1) - 1.0) * scales).reshape(rows, columns)
    assert kind == "I2_S"
    body = data[: rows * columns // 4].reshape(rows, -1, 32)
    codes = np.stack([body >> s & 3 for s in (6, 4, 2, 0)], -2).reshape(rows, columns)
    return (codes - 1.0) * float(data[rows * columns // 4 :][:4].copy().view("<f4")[0])


@pytest.mark.parametrize("scales", ["one", "rows", "groups"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.sampled(8)
def test_hybrids_keep_the_scale_of_every_weight(
    tmp_path: Path, heads: tuple[int, int, int], scales: str
) -> None:
    """Whatever is written holds every weight, heads tiled, and becomes the same model again."""
    made = hybrid_of(*heads, scales)
    source = hybrids.write_unpacked(tmp_path / "source", made, dtype=torch.float32)
    convert(source, tmp_path / "out")
    in_order = heads[0] in (1, heads[1]) or heads[1] * heads[2] == hybrids.GROUP
    whole = in_order or heads[2] % hybrids.GROUP == 0 or scales != "groups"
    written = []
    for kind in gguf_export.TYPES:
        file = tmp_path / f"{kind}.gguf"
        try:
            export_gguf(tmp_path / "out", file, type=kind, tokenizer=False)
        except ConvertError as error:
            assert error.code in ("group-scales", "gguf-row-length") and not file.exists()
            continue
        written.append(kind)
        with GgufReader(file) as reader:
            for module in made.codes:
                expected = hybrids.tiled(made.sizes, module, made.stored(module))
                if module.endswith("linear_attn.out_proj"):
                    expected = hybrids.tiled(made.sizes, "in_proj_z", expected.T).T
                found = dequantised(reader, hybrids.gguf_name(module))
                assert np.array_equal(found, expected), module
        convert(file, tmp_path / f"back-{kind}")
        same_values(tmp_path / "out", tmp_path / f"back-{kind}")
    several = [kind for kind in written if kind != "pq2_0"]
    assert ("pq2_0" in written) == whole and bool(several) == (scales == "one"), written


# --- what is written is read ----------------------------------------------------------------------


def source_of(folder: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """A checkpoint by the name of its family, and options of its conversion."""
    if name in hybrids.CASES:
        return hybrids.write_mlx(folder / "hf", hybrids.make(name, layers=4)), {}
    if name.startswith("bonsai-"):
        return bonsai.write_mlx(folder / "hf", bonsai.make(name == "bonsai-tied")), {}
    case = CASES.get(name)
    family = FAMILIES[name] if case is None else case.family
    return write_checkpoint(folder / "hf", family), {} if case is None else case.options


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "name", [*FAMILIES, *CASES, *hybrids.CASES, "bonsai-tied", "bonsai-untied"]
)
def test_every_file_that_is_written_is_read(name: str, tmp_path: Path) -> None:
    source, options = source_of(tmp_path, name)
    convert(source, tmp_path / "out", **options)
    for kind in gguf_export.TYPES:
        file = tmp_path / f"{kind}.gguf"
        try:
            export_gguf(tmp_path / "out", file, type=kind, tokenizer=False)
        except ConvertError as error:
            assert error.code.startswith(("gguf-", "group-scales")) and not file.exists()
        else:
            convert(file, tmp_path / f"back-{kind}")


def rewritten(model: Path, folder: Path, part: str, value: float) -> Path:
    """A model.bin whose tensors with `part` in their name, or the first rows of their scales, are
    `value`.
    """
    folder.mkdir()
    with Reader(model / "model.bin") as reader:
        with Writer(folder / "model.bin", reader.config, len(reader.tensors)) as writer:
            for name, info in reader.tensors.items():
                tensor, hit = reader.tensor(name), part in name
                if not info.packed:
                    writer.add_dense(name, tensor.new_full(tensor.shape, value) if hit else tensor)
                    continue
                scales = reader.scales(name).clone()
                scales[:3] = value if hit else scales[:3]
                size = {"group_size": info.group_size} if info.group_size else {}
                writer.add_packed(name, tensor, scales, in_features=info.in_features, **size)
    return folder


@pytest.fixture(scope="module")
def plain_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    convert(hybrids.write_mlx(folder / "hf", hybrids.make("plain", layers=4)), folder / "model")
    return folder / "model"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("part", "value", "code"),
    [
        ("0.linear_attn.A_log", 100.0, "gguf-values"),  # exp gives an infinity
        ("0.linear_attn.A_log", -110.0, "gguf-values"),  # and 0
        ("0.linear_attn.A_log", -80.0, None),
        ("1.mlp.up_proj", 65519.0, None),
        ("1.mlp.up_proj", 65536.0, "bad-scale"),
        ("1.mlp.up_proj", 1e38, "bad-scale"),
        ("1.mlp.up_proj", 6e-8, None),
        ("1.mlp.up_proj", 2.5e-8, "bad-scale"),
        ("1.mlp.up_proj", 0.0, "bad-scale"),  # beside weights that are not 0
    ],
)
def test_values_that_a_file_does_not_hold_are_named(
    tmp_path: Path, plain_hybrid: Path, part: str, value: float, code: str | None
) -> None:
    model = rewritten(plain_hybrid, tmp_path / "m", part, value)
    file = tmp_path / "x.gguf"
    if code is None:
        export_gguf(model, file, type="pq2_0", tokenizer=False)
        convert(file, tmp_path / "back")
        return
    with pytest.raises(ConvertError, match=re.escape(f"got {value:g} [")) as caught:
        export_gguf(model, file, type="pq2_0", tokenizer=False)
    assert caught.value.code == code and part in str(caught.value) and not file.exists()
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.filterwarnings("error")
def test_scales_of_groups_without_weights_are_zero(tmp_path: Path) -> None:
    """As files of other writers have them."""
    made = hybrids.make("plain", layers=4)
    for module, codes in made.codes.items():
        codes[:3], made.scales[module][:3] = 0, 0
    with Writer(
        tmp_path / "m.bin", hybrids.converted_config(made), len(hybrids.converted(made))
    ) as writer:
        for name, value in hybrids.converted(made).items():
            if isinstance(value, tuple):
                codes, scales = map(torch.from_numpy, value)
                writer.add_packed(name, ops.pack(codes), scales.float(), group_size=128)
            else:
                writer.add_dense(name, torch.from_numpy(value))
    export_gguf(tmp_path / "m.bin", tmp_path / "x.gguf", type="pq2_0", tokenizer=False)
    convert(tmp_path / "x.gguf", tmp_path / "back")


def test_a_hybrid_of_attention_alone_is_no_qwen35(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrids.Sizes, "is_full", lambda self, layer: True)
    source = hybrids.write_unpacked(tmp_path / "hf", hybrids.make("plain", layers=2))
    convert(source, tmp_path / "out")
    with pytest.raises(ConvertError, match="attention in every layer") as caught:
        export_gguf(tmp_path / "out", tmp_path / "x.gguf", type="pq2_0", tokenizer=False)
    assert caught.value.code == "gguf-architecture"


# --- the demo model -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_demo_model_says_the_same(tmp_path: Path, kind: str) -> None:
    assert main(["export", str(DEMO_DIR), str(tmp_path / "d.gguf"), "--type", kind]) == 0
    assert main(["convert", str(tmp_path / "d.gguf"), str(tmp_path / "back")]) == 0
    same_tensors(DEMO_DIR, tmp_path / "back")
    before, after = bitnet_ops.load(), bitnet_ops.load(tmp_path / "back")
    prompt = "Once upon a time"
    expected = before.generate(prompt, max_new_tokens=24)
    assert after.generate(prompt, max_new_tokens=24) == expected
    chat = [{"role": "user", "content": "Hello"}]
    assert before.tokenizer.encode_chat(chat) == after.tokenizer.encode_chat(chat)


def test_without_a_vocabulary(tmp_path: Path) -> None:
    export_gguf(DEMO_DIR, tmp_path / "d.gguf", tokenizer=False)
    report = convert(tmp_path / "d.gguf", tmp_path / "back")
    assert not (tmp_path / "back" / "tokenizer.json").exists()
    assert any("no vocabulary" in remark for remark in report.remarks)


def test_the_json_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(DEMO_DIR), str(tmp_path / "d.gguf"), "--type", "tq2_0",
                 "--json"]) == 0  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert (report["architecture"], report["type"]) == ("bitnet-b1.58", "TQ2_0")
    assert 0 < report["largest_rounding"] < 2**-11


@pytest.mark.parametrize(
    ("settings", "read"),
    [
        ({"do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.95},
         {"temperature": 0.7, "top_k": 40, "top_p": 0.95}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": False, "top_k": 40}, {}),
    ],
)  # fmt: skip
def test_the_sampling_goes_along(
    tmp_path: Path, settings: dict[str, Any], read: dict[str, float]
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(DEMO_DIR, folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert bitnet_ops.load(folder).generation.sampling == read
    export_gguf(folder, tmp_path / "x.gguf")
    convert(tmp_path / "x.gguf", tmp_path / "back")
    assert bitnet_ops.load(tmp_path / "back").generation.sampling == read
    with GgufReader(tmp_path / "x.gguf") as reader:
        named = {name for name in reader.metadata if name.startswith("general.sampling.")}
    assert bool(named) == bool(read) and named <= {
        f"general.sampling.{key}" for key in ("temp", "top_k", "top_p", "min_p", "penalty_repeat")
    }


def test_unknown_keys_of_the_file_are_one_note() -> None:
    known = {"general.name": "a", "general.base_model.0.name": "b", "general.license": "c"}
    assert unknown_general({**known, "llama.x": 1}) == []
    (note,) = unknown_general({**known, "general.twist": 1, "general.rotation": 2})
    assert note.endswith("ignored: rotation, twist")


# --- tokenizers -----------------------------------------------------------------------------------


def with_tokenizer(folder: Path, model: Path, tokenizer: Tokenizer) -> Path:
    folder.mkdir()
    (folder / "model.bin").write_bytes((model / "model.bin").read_bytes())
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    original = rebuilt(SENTENCEPIECE)
    folder = with_tokenizer(tmp_path / "m", DEMO_DIR, original)
    stored = json.loads(original.to_str())
    stored["post_processor"] = None  # the demo model's bos is another id
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    export_gguf(folder, tmp_path / "x.gguf")
    convert(tmp_path / "x.gguf", tmp_path / "back")
    made = Tokenizer.from_file(str(tmp_path / "back" / "tokenizer.json"))
    assert_same(Tokenizer.from_str(json.dumps(stored)), made, TEXTS)


@pytest.mark.parametrize("name", ["qwen2", "qwen35"])
def test_how_texts_are_cut_is_told_from_its_kin(tmp_path: Path, name: str) -> None:
    """They differ in marks alone, and in nothing that English texts show."""
    folder = with_tokenizer(tmp_path / "m", DEMO_DIR, trained(name))
    config = bitnet_ops.load(folder).config
    keys, _ = gguf_export.vocabulary_keys(folder, config)
    assert keys["tokenizer.ggml.pre"] == ("string", name)


def _changed(**model: Any) -> str:
    stored = json.loads((DEMO_DIR / "tokenizer.json").read_text())
    stored.update(model)
    return json.dumps(stored)


@pytest.mark.parametrize(
    ("code", "text", "tokenizer"),
    [
        ("tokenizer-broken", "to be readable", "{"),
        ("tokenizer-model", "Unigram", _changed(
            model={"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]]}, added_tokens=[],
            post_processor=None)),
        ("tokenizer-pre", "other token ids", _changed(
            pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                           "use_regex": True})),
        ("tokenizer-pre", "cuts texts like", _changed(normalizer={"type": "Lowercase"})),
        ("tokenizer-special", "before a text", _changed(post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}})),
    ],
)  # fmt: skip
def test_tokenizers_that_gguf_cannot_express(
    tmp_path: Path, code: str, text: str, tokenizer: str
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.bin").write_bytes((DEMO_DIR / "model.bin").read_bytes())
    (tmp_path / "m" / "tokenizer.json").write_text(tokenizer)
    with pytest.raises(ConvertError) as caught:
        export_gguf(tmp_path / "m", tmp_path / "x.gguf")
    assert caught.value.code == code
    assert text in str(caught.value) and "--no-tokenizer" in str(caught.value)
    assert not (tmp_path / "x.gguf").exists()
    export_gguf(tmp_path / "m", tmp_path / "x.gguf", tokenizer=False)


# --- rejections -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "code"), [("i2_s", "gguf-row-length"), ("tq2_0", "gguf-row-length")]
)
def test_rows_that_are_no_whole_blocks(tmp_path: Path, kind: str, code: str) -> None:
    folder, _ = model_of(tmp_path, FAMILIES["bitnet-odd-k"])
    with pytest.raises(ConvertError, match="weight: expected K a .*; .*K % 256 == 0") as caught:
        export_gguf(folder, tmp_path / "x.gguf", type=kind)
    assert caught.value.code == "gguf-row-length"


MINICPM = {"model_type": "minicpm", "hidden_act": "silu", "scale_emb": 1, "dim_model_base": 192}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "bitnet-b1.58"),
        ({"hidden_act": "silu"}, "bitnet"),  # by the maths: model_type is bitnet's all the same
        ({"hidden_act": "gelu_pytorch_tanh"}, "gguf-architecture"),
        ({"tie_word_embeddings": False}, "gguf-head"),  # other programs use the embedding
        ({"hidden_act": "silu", "tie_word_embeddings": False}, "gguf-head"),
        ({"model_type": "llama", "hidden_act": "silu"}, "llama"),
        ({"model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": False}, "llama"),
        ({"model_type": "llama", "hidden_act": "relu2"}, "gguf-architecture"),
        ({"model_type": "qwen2", "hidden_act": "silu"}, "gguf-architecture"),
        ({"model_type": "qwen3", "hidden_act": "silu"}, "qwen3"),
        ({**MINICPM, "scale_depth": math.sqrt(3)}, "llama"),
        ({**MINICPM, "scale_depth": 1.4}, "gguf-architecture"),
        ({"model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh"}, "gguf-architecture"),
    ],
)
def test_the_maths_decide_on_the_architecture(changes: dict[str, Any], expected: str) -> None:
    model = ModelConfig.from_hf({**CONFIGS["tiny"], **changes})
    try:
        found = gguf_export.architecture_for(model).name
    except ConvertError as error:
        found = error.code
    assert found == expected


def test_scales_beyond_float16(tmp_path: Path) -> None:
    with Reader(DEMO_DIR / "model.bin") as reader:
        with Writer(tmp_path / "m.bin", reader.config, len(reader.tensors)) as writer:
            for name, info in reader.tensors.items():
                if info.packed:
                    writer.add_packed(name, reader.tensor(name), 1e-7)
                else:
                    writer.add_dense(name, reader.tensor(name))
    with pytest.raises(ConvertError, match="float16 holds") as caught:
        export_gguf(tmp_path / "m.bin", tmp_path / "x.gguf", type="tq2_0", tokenizer=False)
    assert caught.value.code == "bad-scale"
    export_gguf(tmp_path / "m.bin", tmp_path / "x.gguf", type="i2_s", tokenizer=False)


def test_scales_of_groups(tmp_path: Path) -> None:
    with Reader(DEMO_DIR / "model.bin") as reader:
        with Writer(tmp_path / "m.bin", reader.config, len(reader.tensors)) as writer:
            for name, info in reader.tensors.items():
                if info.packed:
                    scales = torch.ones(info.shape[0], info.shape[1] // 32)
                    writer.add_packed(name, reader.tensor(name), scales, group_size=128)
                else:
                    writer.add_dense(name, reader.tensor(name))
    with pytest.raises(ConvertError, match="only the type pq2_0 holds them") as caught:
        export_gguf(tmp_path / "m.bin", tmp_path / "x.gguf", type="tq2_0", tokenizer=False)
    assert caught.value.code == "group-scales"


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_export._Export, "write", full)
    with pytest.raises(ConvertError, match="No space left on device") as caught:
        export_gguf(DEMO_DIR, tmp_path / "x.gguf", tokenizer=False)
    assert caught.value.code == "write-failed" and list(tmp_path.iterdir()) == []


def test_files_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"mine")
    with pytest.raises(ConvertError, match="--force replaces it") as caught:
        export_gguf(DEMO_DIR, tmp_path / "x.gguf")
    assert caught.value.code == "destination-exists"
    assert (tmp_path / "x.gguf").read_bytes() == b"mine"
    with pytest.raises(ConvertError) as caught:
        export_gguf(DEMO_DIR, tmp_path / "x.gguf", force=True)
    assert caught.value.code == "destination-foreign"
    assert (tmp_path / "x.gguf").read_bytes() == b"mine"
    (tmp_path / "x.gguf").write_bytes(b"GGUF of an earlier export")
    export_gguf(DEMO_DIR, tmp_path / "x.gguf", force=True)
    with pytest.raises(ConvertError) as caught:
        export_gguf(DEMO_DIR, tmp_path / "no" / "x.gguf")
    assert caught.value.code == "destination-parent"
    (tmp_path / "y.bin").write_bytes(b"SGLBITNT")
    with pytest.raises(ConvertError) as caught:
        export_gguf(tmp_path / "y.bin", tmp_path / "y.gguf")
    assert caught.value.code == "export-source"
    with pytest.raises(ConvertError, match="'q4_0'"):
        export_gguf(DEMO_DIR, tmp_path / "z.gguf", type="q4_0")
