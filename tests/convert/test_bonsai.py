"""Ternary-Bonsai as published: every form of its files, against transformers and the fixture.

The fixture (helpers/bonsai.py) has the published config's keys and every peculiarity of the
published weights. Oracle of the logits: transformers' Qwen3ForCausalLM in fp32 on the unpacked
weights, at positions beyond the original context.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import bonsai
import rounding_ties
from bitnet_ops import ops
from bitnet_ops.cli import main
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.convert.inspect import inspect
from bitnet_ops.formats.sglbitnt import Reader
from bitnet_ops.language_model import load
from bitnet_ops.models.step_batch import SequenceStep, StepBatch
from bitnet_ops.nn.head import HeadWeight
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.nn.rotary import rotary
from bonsai import Bonsai
from gguf_bytes import gguf, key
from isa_control import torch_threads

FORMS = ["unpacked", "mlx", *bonsai.TYPES]
BOTH = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
# a tied embedding in one file of each way to store it; what is not tied in all of them
MODELS = [*((False, form) for form in FORMS), (True, "unpacked"), (True, "PQ2_0"), (True, "PTQ1_0")]
EVERY = pytest.mark.parametrize("tied, form", MODELS)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    with torch_threads(1):
        yield


def write(folder: Path, made: Bonsai, form: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if form == "unpacked":
        return bonsai.write_unpacked(folder / form, made)
    if form == "mlx":
        return bonsai.write_mlx(folder / form, made)
    (folder / f"{form}.gguf").write_bytes(bonsai.gguf_file(made, form))
    return folder / f"{form}.gguf"


def run(source: Path, out: Path, **options: Any) -> Any:
    if source.suffix == ".gguf":
        return convert(source, out, tokenizer="none", **options)
    return convert(source, out, **options)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, str], tuple[Path, Any]]:
    """(tied, form) -> the converted folder and its report."""
    found = {}
    for tied, form in MODELS:
        folder = tmp_path_factory.mktemp("bonsai")
        report = run(write(folder, bonsai.make(tied), form), folder / "out")
        found[tied, form] = folder / "out", report
    return found


# Weights ----------------------------------------------------------------------------------------


@EVERY
def test_every_code_and_scale_survives(models: Any, tied: bool, form: str) -> None:
    """Codes exactly; a group's scale is its larger magnitude; subnormal ones to the last bit."""
    made, subnormal = bonsai.make(tied), 0
    with Reader(models[tied, form][0] / "model.bin") as reader:
        for name, matrix in made.matrices.items():
            tensor = reader.tensor(f"{name}.weight")
            if "_proj" not in name:
                continue
            k = matrix.codes.shape[1]
            assert np.array_equal(ops.unpack(tensor, k).numpy(), matrix.codes), name
            scales, used = reader.scales(f"{name}.weight").numpy(), matrix.scales > 0
            assert np.array_equal(scales[used], matrix.scales.astype(np.float32)[used]), name
            subnormal += int((scales < 2.0**-14)[used].sum())
        for name, norm in made.norms.items():
            assert np.array_equal(reader.tensor(f"{name}.weight").float().numpy(), norm), name
    assert subnormal > 100


@EVERY
def test_embedding_and_head_stay_ternary(models: Any, tied: bool, form: str) -> None:
    """Codes exactly and float16 scales, in the file and in the model that is loaded of it."""
    folder, report = models[tied, form]
    made = bonsai.make(tied)
    model = load(folder).model  # whatever head_format says
    names = [name for name in made.matrices if "_proj" not in name]
    with Reader(folder / "model.bin") as reader:
        for name in names:
            matrix, info = made.matrices[name], reader.tensors[f"{name}.weight"]
            n, k = matrix.codes.shape
            assert info.packed and info.scale_kind == "group" and info.scale_dtype == torch.float16
            codes = ops.unpack(reader.tensor(info.name), k).numpy()
            assert np.array_equal(codes, matrix.codes)
            scales, used = reader.scales(info.name).numpy(), matrix.scales > 0
            assert np.array_equal(scales[used], matrix.scales.astype(np.float32)[used])
            head = model.get_submodule(name)
            assert head.head_format == "ternary" and head.scale.dtype == torch.float16
            rows = head.embed(torch.arange(n))
            assert np.array_equal(rows.numpy(), matrix.merged.astype(np.float32))
            x = torch.randn(3, k, generator=torch.Generator().manual_seed(1))
            exact = x.double() @ torch.from_numpy(matrix.merged.astype(np.float64)).T
            # half a unit of 16 bits a feature, and float32 roundings of a few groups
            maximum = x.abs().max() / 32512 * (0.5 + 32512 * 2.0**-22)
            bound = float(maximum) * np.abs(matrix.merged.astype(np.float64)).sum(axis=1)
            assert bool(((head(x).double() - exact).abs() <= torch.from_numpy(bound)).all())
    assert len(names) == 2 - tied
    assert any("ternary" in r and "codes and scales" in r for r in report.remarks), report.remarks


def with_dense_matrices(model: Any) -> Any:
    """The model with embedding and head as dense float32, whose products round nothing to 16 bits.

    So what lies between them can be held against a float implementation to its own roundings.
    """
    for name in ("model.embed_tokens", "lm_head"):
        parent, _, child = name.rpartition(".")
        module = model.get_submodule(parent)
        if hasattr(module, child):
            head = getattr(module, child)
            dense = head.embed(torch.arange(head.out_features))
            setattr(module, child, HeadWeight.from_dense(dense, "stored"))
    return model


@EVERY
def test_two_magnitudes_are_counted(models: Any, tied: bool, form: str) -> None:
    report, made = models[tied, form][1], bonsai.make(tied)
    found = report.ternary.uneven
    if form not in ("unpacked", "Q2_0"):
        assert found.groups == 0
        return
    assert found.groups == made.uneven_groups > 100
    assert 0.004 < found.largest_relative < 0.006
    errors = [
        np.abs(m.merged.astype(np.float64) - m.values).max()
        for name, m in made.matrices.items() if "_proj" in name
    ]  # fmt: skip
    halves = [  # a file of 64 says nothing of weights: the halves' scales differ by as much
        np.abs(np.repeat(m.scales, 2, 1).astype(np.float64) - m.halves)[m.halves > 0].max()
        for name, m in made.matrices.items() if "_proj" in name
    ]  # fmt: skip
    assert found.largest_error == max(errors) == max(halves)
    assert any("two magnitudes" in line for line in report.lines())
    assert report.to_dict()["ternary"]["uneven"]["groups"] == found.groups


@pytest.mark.parametrize("form", ["unpacked", "Q2_0", "mlx", "PTQ1_0"])
def test_inspect_counts_them_too(tmp_path: Path, form: str) -> None:
    made = bonsai.make(False)
    remarks = inspect(write(tmp_path, made, form))["remarks"]
    lines = [r for r in remarks if "two magnitudes" in r]
    if form in ("mlx", "PTQ1_0"):
        assert lines == []
        return
    every = sum(  # of a GGUF file embedding and head are ternary too
        int(bonsai._uneven(m).sum()) for name, m in made.matrices.items()
        if form == "Q2_0" or "_proj" in name
    )  # fmt: skip
    assert lines and lines[0].startswith(f"{every:,} groups")


def test_magnitudes_further_apart_are_groups_of_64(tmp_path: Path) -> None:
    """Of one matrix: the others keep their groups of 128."""
    made = bonsai.make(True)
    name = "model.layers.1.mlp.up_proj"
    halves = made.matrices[name].halves.copy()
    halves[3::9, 1] *= np.float16(0.98)
    made.matrices[name] = dataclasses.replace(made.matrices[name], halves=halves)
    for form in ("unpacked", "Q2_0"):
        run(write(tmp_path / form, made, form), tmp_path / f"out-{form}")
        with Reader(tmp_path / f"out-{form}" / "model.bin") as reader:
            sizes = {n: t.group_size for n, t in reader.tensors.items() if t.group_size}
            assert sizes.pop(f"{name}.weight") == 64 and set(sizes.values()) == {128}
            found, used = reader.scales(f"{name}.weight").numpy(), halves > 0
            assert np.array_equal(found[used], halves.astype(np.float32)[used])


# Logits -----------------------------------------------------------------------------------------

GAPS = [0, 3, 4, 1000, 8190, 8191, 8192, 8200, 12000, 20000, 30000, 32767]


def int8_activations(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
    """What this package computes and transformers does not: int8 a token and group of 128."""
    (x,) = inputs
    rounded = []
    for part in x.split(128, dim=-1):
        multiplier = 127.0 / part.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        rounded.append((part * multiplier).round().clamp(-128, 127) / multiplier)
    return (torch.cat(rounded, dim=-1),)


class Theirs:
    """transformers' Qwen3ForCausalLM in fp32; `rounded`: with int8 activations put in."""

    def __init__(self, folder: Path, rounded: bool) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        names = [n for n, _ in self.model.named_modules() if n.endswith("_proj")]
        self.linears = [self.model.get_submodule(n) for n in names]
        for linear in self.linears if rounded else []:
            linear.register_forward_pre_hook(int8_activations)

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(ids)  # or gaps between positions would count as other sequences
        found = self.model(ids, position_ids=positions[None], attention_mask=mask)
        return found.logits[0]


def ours_at(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of tokens that stand at any positions, through the step over a paged cache."""
    pool = KVPool(model.config, 8, 4, torch.float32)
    tokens = ids[0].tolist()
    batch = StepBatch.of([SequenceStep(tokens, 0, list(range(8)), len(tokens))], 4)
    logits: torch.Tensor = model.step(dataclasses.replace(batch, positions=positions), pool)
    return logits


@BOTH
@pytest.mark.parametrize("rounding", ["this-cpu", "another-cpu"])
def test_transformers_gives_the_same_logits(
    tmp_path: Path, models: Any, tied: bool, rounding: str
) -> None:
    """Up to position 32,767, four times the original context; fused and composed.

    transformers runs the weights with one magnitude a group, which is what is stored.
    """
    folder = bonsai.write_unpacked(tmp_path / "merged", bonsai.make(tied), merged=True)
    theirs = Theirs(folder, True)
    model = with_dense_matrices(load(models[tied, "PTQ1_0"][0], head_format="stored").model)
    positions = {n: torch.tensor(GAPS[-n:]) for n in (2, 3, 4, 6, 12)}

    def both_paths(ids: torch.Tensor) -> torch.Tensor:
        at = positions[ids.shape[1]]
        logits = ours_at(model, ids, at)
        model.run_as = "ops"
        assert torch.equal(ours_at(model, ids, at), logits)
        model.run_as = "program"
        return logits

    watch = rounding_ties.TieWatch(theirs.linears, group=128)
    shaken = theirs.linears if rounding == "another-cpu" else []
    with torch.no_grad(), rounding_ties.rounding_of_another_cpu(shaken):
        rounding_ties.assert_alike(
            both_paths,
            lambda ids: theirs(ids, positions[ids.shape[1]]),
            watch,
            rounding_ties.prompts(bonsai.VOCAB, seed=5),
        )


def test_without_yarn_it_would_be_another_model(tmp_path: Path, models: Any) -> None:
    """The fixture can tell: the same weights with plain positions give other logits."""
    folder = bonsai.write_unpacked(tmp_path / "plain", bonsai.make(True), merged=True)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "rope_scaling": None}))
    ids, at = torch.arange(12)[None] * 7 % bonsai.VOCAB, torch.tensor(GAPS)
    expected = Theirs(folder, True)(ids, at)
    found = ours_at(load(models[True, "PQ2_0"][0], head_format="stored").model, ids, at)
    assert (found - expected).abs().max() > 0.05 * expected.abs().max()


@BOTH
def test_floating_activations_cost_little(models: Any, tied: bool, tmp_path: Path) -> None:
    """The checkpoint itself, both magnitudes and no rounding: what a user compares with."""
    folder = bonsai.write_unpacked(tmp_path / "hf", bonsai.make(tied))
    ids = torch.randint(0, bonsai.VOCAB, (1, 200), generator=torch.Generator().manual_seed(3))
    expected = Theirs(folder, False)(ids, torch.arange(200))
    model = load(models[tied, "unpacked"][0], head_format="stored").model
    with torch.inference_mode():
        found = model(ids, KVCache(model.config, 1, 200, torch.float32))[0]
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()
    assert (found.argmax(-1) == expected.argmax(-1)).double().mean() > 0.9


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_are_one_model(models: Any, form: str) -> None:
    ids = torch.arange(20)[None] * 13 % bonsai.VOCAB
    tables, logits = [], []
    for name in ("PQ2_0", form):
        model = load(models[False, name][0], head_format="stored").model
        tables.append(rotary(model.config))
        with torch.inference_mode():
            logits.append(model(ids, KVCache(model.config, 1, 20, torch.float32)))
    config = AutoConfig.for_model(**bonsai.config(False))
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    for table in tables:
        assert ((table.inv_freq / expected - 1).abs() < 4 * 2.0**-23).all()
        assert table.attention_factor == factor == pytest.approx(1.1386294, abs=1e-7)
    assert torch.equal(logits[0], logits[1])  # of two magnitudes of a group all take the larger


# Bytes ------------------------------------------------------------------------------------------

# Weight j of the block is -1, 0, +1 by (j * j + j // 5) mod 3; the scale is 0.5, which is 0x3800.
GOLDEN_CODES = np.array([(j * j + j // 5) % 3 - 1 for j in range(128)], dtype=np.int8)[None]
GOLDEN = {
    "Q2_0": ("00381499060245a6814091692050641a0814003899060245a6814091692050641a081499"),
    "Q2_0_128": ("00381499060245a6814091692050641a081499060245a6814091692050641a081499"),
    "PQ2_0": ("00381499060245a6814091692050641a081499060245a6814091692050641a081499"),
    "PTQ1_0": ("27786735a1e2a5eeca5c1339ac050d27b76bc2d4720636e72a6f0038"),
}
GOLDEN_WORDS = "1499060245a6814091692050641a081499060245a6814091692050641a081499"


@pytest.mark.parametrize("kind", bonsai.TYPES)
def test_golden_vectors(kind: str) -> None:
    """Bytes written down; the fixture's writer makes them, and the package reads them."""
    from bitnet_ops.formats import gguf_layouts

    block = bonsai.TYPES[kind][1]
    matrix = bonsai.Grouped(GOLDEN_CODES, np.full((1, 2), 0.5, dtype=np.float16))
    data = bonsai.packed(kind, matrix)
    assert data.hex() == GOLDEN[kind]
    decoded = gguf_layouts.decode(kind, np.frombuffer(data, np.uint8), 1, 128)
    assert np.array_equal(gguf_layouts.unpack_rows(decoded.rows, 128).astype(np.int8) - 1,
                          GOLDEN_CODES)  # fmt: skip
    assert decoded.scales.tolist() == [[0.5] * (128 // block)]


def test_ptq1_0_by_its_definition() -> None:
    """Any bytes: digit n of byte b is (((b * 3^n) mod 256) * 3) >> 8; where, as in the kernels."""
    from bitnet_ops.formats import gguf_layouts

    rng = np.random.default_rng(9)
    data = rng.integers(0, 256, (40, 28), dtype=np.uint8)
    data[:, 26:] = np.frombuffer(np.float16(SUBNORMAL).tobytes(), np.uint8)
    found = gguf_layouts.decode("PTQ1_0", data.reshape(-1), 20, 256)
    codes = gguf_layouts.unpack_rows(found.rows, 256).reshape(40, 128)
    for block, row in zip(data.tolist(), codes.tolist(), strict=True):
        for at, value in enumerate(block[:26]):
            for n in range(4 if at >= 24 else 5):
                weight = 16 * n + at if at < 16 else 80 + 8 * n + at - 16
                weight = weight if at < 24 else 120 + 2 * n + at - 24
                assert row[weight] == value * 3**n % 256 * 3 >> 8


SUBNORMAL = bonsai.SUBNORMAL


def test_golden_mlx_words(tmp_path: Path) -> None:
    assert bonsai.mlx_words(GOLDEN_CODES).astype("<u4").tobytes().hex() == GOLDEN_WORDS
    made = bonsai.make(True)
    source = bonsai.write_mlx(tmp_path / "mlx", made)
    with safe_open(source / "model.safetensors", framework="pt") as file:
        assert file.get_slice("model.embed_tokens.weight").get_dtype() == "U32"


# Rejections -------------------------------------------------------------------------------------


def rejected(source: Path, out: Path, **options: Any) -> str:
    with pytest.raises(ConvertError) as caught:
        run(source, out, **options)
    assert not out.exists() and "\n" not in str(caught.value)
    return f"[{caught.value.code}] {caught.value}"


Q_NAME = "model.layers.0.self_attn.q_proj"


def _code_3(words: torch.Tensor) -> torch.Tensor:
    words = words.clone()
    words.view(torch.int32)[5, 3] |= 3 << 4
    return words


def _scaled(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: t * by


MLX = {
    "code 3": ({f"{Q_NAME}.weight": _code_3}, r"\[code-3\].*code 3 at \[5, 50\]"),
    "code 3 in the embedding": ({"model.embed_tokens.weight": _code_3}, r"\[code-3\]"),
    "biases": ({f"{Q_NAME}.biases": _scaled(0.5)}, r"\[mlx-bias\] .*biases = -scales"),
    "negative": (
        {f"{Q_NAME}.biases": _scaled(-1.0), f"{Q_NAME}.scales": _scaled(-1.0)}, r"\[bad-scale\]",
    ),
    "not finite": ({f"{Q_NAME}.scales": _scaled(float("inf"))}, r"\[bad-scale\]"),
    "4 bits": ({"quantization": {"group_size": 128, "bits": 4}}, r"\[mlx\].*with 4 bits"),
    "groups": ({"quantization": {"group_size": 256, "bits": 2}}, r"\[mlx\].*groups of 256"),
    "another mode": (
        {"quantization": {"group_size": 128, "bits": 2, "mode": "mxfp4"}}, r"\[mlx\].*mxfp4",
    ),
    "a mixed package": (
        {"quantization": {"group_size": 128, "bits": 2, "lm_head": {"group_size": 64, "bits": 8}}},
        r"\[mlx\] .*lm_head affine with 2 bits",
    ),
    "unknown option": (
        {"quantization": {"group_size": 128, "bits": 2, "seed": 5}}, r"\[mlx\].*got seed",
    ),
    "shape": ({f"{Q_NAME}.scales": lambda t: t[:, :1].contiguous()}, r"\[mlx\] .*floating scales"),
}  # fmt: skip


@pytest.mark.parametrize("name", MLX)
def test_mlx_packages_that_are_not_ternary(tmp_path: Path, name: str) -> None:
    change, text = MLX[name]
    source = bonsai.write_mlx(tmp_path / "mlx", bonsai.make(True), **change)
    assert re.search(text, rejected(source, tmp_path / "out"))


@pytest.mark.parametrize("part", ["attn_q", "token_embd"])
@pytest.mark.parametrize("kind", ["Q2_0", "Q2_0_128", "PQ2_0"])
def test_code_3_is_rejected(tmp_path: Path, kind: str, part: str) -> None:
    parts = []
    for name, shape, number, data in bonsai.gguf_tensors(bonsai.make(True), kind):
        parts.append((name, shape, number, data[:-1] + b"\xff" if part in name else data))
    (tmp_path / "m.gguf").write_bytes(gguf(bonsai.gguf_keys(), parts))
    assert "[code-3]" in rejected(tmp_path / "m.gguf", tmp_path / "out")


# What number 42 may mean, by its bytes for 256 weights.


def _with_embedding(data_bytes: int, number: int = 42) -> bytes:
    """A file whose first matrix has so many bytes for 256 weights."""
    parts = bonsai.gguf_tensors(bonsai.make(True), "PQ2_0")
    name, shape, _, _ = parts[0]
    parts[0] = (name, shape, number, bytes(shape[0] * shape[1] // 256 * data_bytes))
    return gguf(bonsai.gguf_keys(), parts)


FORTY_TWO = {
    "STQ1_0": (_with_embedding(42), r"\[gguf-unreadable\].*got STQ1_0: .*Sherry"),
    "STQ1_0, later number": (_with_embedding(42, 43), r"\[gguf-unreadable\].*got STQ1_0"),
    "TL2": (_with_embedding(44), r"\[gguf-size\].*or holds TL2: its bytes are tiled"),
    "OxiBonsai by version": (
        bonsai.gguf_file(bonsai.make(True), "Q2_0_128", [
            key("general.quantization_version", "str", "TQ2_0_G128")]),
        r"\[gguf-unreadable\].*TQ2_0_g128 of OxiBonsai.*--q2-block 128",
    ),
    "OxiBonsai by its own key": (
        bonsai.gguf_file(bonsai.make(True), "Q2_0_128", [
            key("oxibonsai.quant_format", "str", "tq2_0_g128")]),
        r"\[gguf-unreadable\].*OxiBonsai.*--q2-block 128",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORTY_TWO)
def test_meanings_of_number_42_that_are_not_read(tmp_path: Path, name: str) -> None:
    data, text = FORTY_TWO[name]
    (tmp_path / "m.gguf").write_bytes(data)
    message = rejected(tmp_path / "m.gguf", tmp_path / "out")
    assert re.search(text, message), message


def test_the_flag_decides_what_the_file_leaves_open(tmp_path: Path) -> None:
    """OxiBonsai's mark in a file of Prism's; and a flag that the sizes contradict."""
    marked = bonsai.gguf_file(bonsai.make(True), "Q2_0_128", [
        key("oxibonsai.quant_format", "str", "x")])  # fmt: skip
    (tmp_path / "m.gguf").write_bytes(marked)
    run(tmp_path / "m.gguf", tmp_path / "out", q2_block=128, verify=True)
    assert "[gguf-size]" in rejected(tmp_path / "m.gguf", tmp_path / "other", q2_block=64)
    command = ["convert", str(tmp_path / "m.gguf"), str(tmp_path / "cli"), "--tokenizer", "none"]
    assert main([*command, "--q2-block", "128"]) == 0
    assert main(["verify", str(tmp_path / "cli"), str(tmp_path / "m.gguf")]) == 0


def test_sizes_that_tell_nothing_name_the_flag(tmp_path: Path) -> None:
    """A file so small that padding hides the difference: 68 or 72 bytes in 96."""
    from bitnet_ops.formats.gguf import GgufError
    from bitnet_ops.formats.gguf import Reader as GgufReader

    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([], [("a", (1, 256), 42, bytes(72) + bytes(24))]))
    with pytest.raises(GgufError, match="--q2-block 64 .Q2_0. or --q2-block 128"):
        GgufReader(path)
    for block, name in ((64, "Q2_0"), (128, "Q2_0_128")):
        with GgufReader(path, block) as reader:
            assert reader.tensors["a"].type.name == name
