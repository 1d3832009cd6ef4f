"""Neurons that are always zero are left out of model.bin, and no result changes by a bit.

The networks have them in the published pattern (tests/helpers/dead_neurons.py); the oracle is the
same checkpoint converted with keep_dead, and what was left out is counted from the network itself.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hf_writer
from bitnet_ops import ops
from bitnet_ops.cli import main
from bitnet_ops.convert import ConvertError, convert, convert_gguf
from bitnet_ops.convert.gguf.export import export_gguf
from bitnet_ops.convert.inspect import inspect
from bitnet_ops.convert.pipeline import convert_bin
from bitnet_ops.convert.verify import verify
from bitnet_ops.formats.sglbitnt import Reader
from bitnet_ops.language_model import load
from bitnet_ops.loading.model_contents import model_config
from bitnet_ops.loading.weights import load_model
from bitnet_ops.models import Decoder
from bitnet_ops.models.step_batch import SequenceStep, StepBatch
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.nn.lora import Adapter, LoraError, LoraWeight
from bitnet_ops.training import load_for_training
from dead_neurons import DEAD, INTER, places, published, with_dead
from gguf_models import model_file
from hf_families import CASES
from isa_control import every_configuration

PACKED = published("bitnet-offline", "dead-offline")
KINDS = {
    "packed": PACKED,
    "masters": published("bitnet-online", "dead-online"),
    "no sub-norms": published("llama-bitlinear", "dead-llama", heads=2, kv_heads=1),
    "norms inside": dataclasses.replace(
        CASES["qwen3-rms-norm"].family, name="dead-inside", inter=INTER, hidden=128
    ),
    "scales a row": dataclasses.replace(
        CASES["trilm"].family, name="dead-trilm", inter=INTER, hidden=128
    ),
}


def same_places(family: hf_writer.Family) -> list[np.ndarray]:
    return [places(family)] * family.layers


def write(folder: Path, family: hf_writer.Family, dead: list[np.ndarray]) -> Path:
    return hf_writer.write_checkpoint(folder, family, network=with_dead(family, dead))


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(family, source, folder without the dead neurons, folder with them)."""
    family, folder = KINDS[request.param], tmp_path_factory.mktemp("dead")
    source = write(folder / "source", family, same_places(family))
    without = convert(source, folder / "without", verify=True)
    assert without.verification is not None and without.verification["passed"]
    convert(source, folder / "with", keep_dead=True)
    return family, source, folder / "without", folder / "with"


def logits(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Of a prompt in two pieces and single tokens, over a float32 cache."""
    cache = KVCache(model.config, len(ids), ids.shape[1], torch.float32)
    pieces = ids.split([5, 1, ids.shape[1] - 6], dim=1)
    return torch.cat([model(piece, cache) for piece in pieces], dim=1)


def random_ids(family: hf_writer.Family, *shape: int) -> torch.Tensor:
    return torch.randint(0, family.vocab, shape, generator=torch.Generator().manual_seed(3))


def test_logits_are_the_same_bit_for_bit(pair: Any) -> None:
    """Must show: on the step and on composed ops, on float32 and bfloat16."""
    family, _, without, with_them = pair
    ids = random_ids(family, 3, 12)
    for dtype in (torch.float32, torch.bfloat16):
        whole = load_model(with_them / "model.bin", dtype)
        model = load_model(without / "model.bin", dtype)
        expected = logits(whole, ids)
        assert expected.abs().max() > 0.1
        assert torch.equal(logits(model, ids), expected)
        model.fused_step = False
        assert torch.equal(logits(model, ids), expected)
        assert torch.equal(model.hidden(ids), whole.hidden(ids))


def test_and_on_every_instruction_set(tmp_path: Path) -> None:
    source = write(tmp_path / "source", PACKED, same_places(PACKED))
    convert(source, tmp_path / "without")
    convert(source, tmp_path / "with", keep_dead=True)
    ids, first = random_ids(PACKED, 2, 9), None
    for _ in every_configuration():
        for name in ("without", "with"):
            found = logits(load_model(tmp_path / name / "model.bin"), ids)
            first = found if first is None else first
            assert torch.equal(found, first)


def test_and_in_batches_of_blocks(pair: Any) -> None:
    family, _, without, with_them = pair
    ids = random_ids(family, 2, 7).tolist()
    found = []
    for folder in (without, with_them):
        model = load_model(folder / "model.bin")
        pool = KVPool(model.config, 8, 4, torch.float32)
        steps = [SequenceStep(ids[0], 0, [0, 1]), SequenceStep(ids[1], 0, [2, 3])]
        found.append(model.step(StepBatch.of(steps, 4), pool))
    assert torch.equal(*found)


def test_the_file_has_fewer_bytes_and_says_which_neurons(pair: Any) -> None:
    family, _, without, with_them = pair
    with Reader(without / "model.bin") as reader, Reader(with_them / "model.bin") as whole:
        block = reader.config["bitnet_ops"]
        assert block["dropped_neurons"] == places(family).tolist()  # once for all layers
        assert "dropped_neurons" not in whole.config["bitnet_ops"]
        assert reader.config["intermediate_size"] == INTER
        assert model_config(reader).stored_neurons == INTER - DEAD
        ternary = [name for name, info in whole.tensors.items() if info.packed]
        sizes = [sum(r.tensors[n].nbytes for n in ternary) for r in (reader, whole)]
    saved = 1 - sizes[0] / sizes[1]
    print(f"\n{family.name}: {100 * saved:.2f} % fewer ternary bytes, {sizes[1]} -> {sizes[0]}")
    assert saved > 0.03


def test_inspect_counts_them(pair: Any, capsys: pytest.CaptureFixture[str]) -> None:
    family, source, without, with_them = pair
    total, dead = family.layers * INTER, family.layers * DEAD
    left_out = {"neurons": total, "dead": dead, "left_out": dead}
    kept = {"neurons": total, "dead": dead, "left_out": 0}
    assert inspect(without)["neurons"] == left_out
    assert inspect(with_them)["neurons"] == kept
    assert inspect(source)["neurons"] == kept
    assert main(["inspect", str(without)]) == 0
    printed = capsys.readouterr().out
    assert f"{total:,} of all MLPs, {dead:,} with gate and up rows of zeros" in printed
    assert "dropped_neurons" not in printed


def test_the_report_says_so_and_the_proof_can_be_made_again(pair: Any) -> None:
    family, source, without, _ = pair
    total, dead = family.layers * INTER, family.layers * DEAD
    remarks = json.loads((without / "report.json").read_text())["remarks"]
    said = f"{dead:,} of {total:,} neurons have gate and up rows of zeros; {dead:,} were left out"
    assert any(remark.startswith(said) for remark in remarks)
    if family.quantized:
        assert verify(without, source)["verification"]["failures"] == []


def test_the_published_counts_are_those_of_this_pattern() -> None:
    assert (30 * DEAD, 30 * INTER) == (9870, 207360)


def test_layers_leave_out_equally_many(tmp_path: Path) -> None:
    """The layer with fewer decides; the other keeps what is more than that, and says so."""
    dead = [places(PACKED, 40, 1), places(PACKED, 33, 2)]
    report = convert(write(tmp_path / "source", PACKED, dead), tmp_path / "out")
    assert "73 of 13,824 neurons" in report.remarks[-1] and "66 were left" in report.remarks[-1]
    with Reader(tmp_path / "out" / "model.bin") as reader:
        found = reader.config["bitnet_ops"]["dropped_neurons"]
    assert found == [dead[0][:33].tolist(), dead[1].tolist()]
    assert inspect(tmp_path / "out")["neurons"] == {"neurons": 13824, "dead": 73, "left_out": 66}


@pytest.mark.parametrize("dead", [0, 1], ids=["none in the first", "none in the second"])
def test_a_layer_without_any_keeps_all(dead: int, tmp_path: Path) -> None:
    planted = [places(PACKED), np.zeros(0, dtype=int)]
    source = write(tmp_path / "source", PACKED, planted if dead else planted[::-1])
    convert(source, tmp_path / "out")
    with Reader(tmp_path / "out" / "model.bin") as reader:
        assert "dropped_neurons" not in reader.config["bitnet_ops"]


def test_columns_of_groups_stay(tmp_path: Path) -> None:
    """Of down with scales of groups; rows of gate and up go. No result changes by a bit."""
    family = dataclasses.replace(CASES["bonsai"].family, name="dead-bonsai", hidden=128, inter=768)
    source = write(tmp_path / "source", family, [places(family, 30)] * family.layers)
    report = convert(source, tmp_path / "out", verify=True)
    assert report.verification is not None and report.verification["passed"]
    assert any("columns of down, which has scales of groups" in r for r in report.remarks)
    convert(source, tmp_path / "with", keep_dead=True)
    with Reader(tmp_path / "out" / "model.bin") as reader:
        assert reader.config["bitnet_ops"]["whole_down"] is True
        for name, info in reader.tensors.items():
            if name.endswith(("gate_proj.weight", "up_proj.weight")):
                assert info.shape[0] == 738
            if name.endswith("down_proj.weight"):
                assert info.in_features == 768 and info.group_size == 128
    assert inspect(tmp_path / "out")["neurons"]["left_out"] == 30 * family.layers
    ids = random_ids(family, 3, 12)
    for activation_format in ("int8", "int8_group", "int16_group"):
        found = []
        for name in ("with", "out"):
            model = load_model(tmp_path / name / "model.bin")
            model.set_activation_format(activation_format)
            found.append(logits(model, ids))
            model.fused_step = False
            found.append(logits(model, ids))
        assert found[0].abs().max() > 0.1
        assert all(torch.equal(one, found[0]) for one in found[1:])


# Other ways in and out ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["I2_S", "TQ2_0"])
def test_gguf_in_and_out(kind: str, tmp_path: Path) -> None:
    """A GGUF source loses them too, and an export has them again, as rows and columns of zeros."""
    family = published("bitnet-offline", "dead-gguf", hidden=256, heads=4, kv_heads=2)
    network = with_dead(family, same_places(family))
    (tmp_path / "model.gguf").write_bytes(model_file(family, network, "bitnet-b1.58", kind))
    convert_gguf(tmp_path / "model.gguf", tmp_path / "without", verify=True)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "with", keep_dead=True)
    ids = random_ids(family, 1, 9)
    found = [logits(load_model(tmp_path / n / "model.bin"), ids) for n in ("without", "with")]
    assert torch.equal(*found)
    assert inspect(tmp_path / "without")["neurons"]["left_out"] == 2 * DEAD  # type: ignore[index]
    export_gguf(tmp_path / "without", tmp_path / "again.gguf", type=kind.lower())
    convert_gguf(tmp_path / "again.gguf", tmp_path / "again")
    convert_gguf(tmp_path / "again.gguf", tmp_path / "whole", keep_dead=True)
    with (
        Reader(tmp_path / "without" / "model.bin") as a,
        Reader(tmp_path / "again" / "model.bin") as b,
    ):
        for name in a.tensors:
            assert bytes(a.memory(name)) == bytes(b.memory(name)), name
    assert torch.equal(logits(load_model(tmp_path / "whole" / "model.bin"), ids), found[0])


def test_version_1_and_copies_of_files(tmp_path: Path) -> None:
    source = write(tmp_path / "source", PACKED, same_places(PACKED))
    convert(source, tmp_path / "old", format_version=1)
    with Reader(tmp_path / "old" / "model.bin") as reader:
        assert "dropped_neurons" not in reader.config["bitnet_ops"]
    convert(source, tmp_path / "new")
    convert_bin(tmp_path / "new", tmp_path / "copy")
    ids = random_ids(PACKED, 1, 8)
    models = [load_model(tmp_path / name / "model.bin") for name in ("new", "copy")]
    assert torch.equal(*(logits(model, ids) for model in models))
    with pytest.raises(ConvertError, match="convert its source with --keep-dead") as caught:
        convert_bin(tmp_path / "new", tmp_path / "older", format_version=1)
    assert caught.value.code == "dropped-neurons"


def test_training_starts_from_all_neurons(tmp_path: Path) -> None:
    source = write(tmp_path / "source", PACKED, same_places(PACKED))
    convert(source, tmp_path / "out")
    model, whole = load_for_training(tmp_path / "out"), load_for_training(source)
    ids = random_ids(PACKED, 1, 8)
    with torch.no_grad():
        found, expected = (m.eval()(ids).logits for m in (model, whole))
    # a master's size is what makes its matrix's absmean the scale: another count of zeros, another
    # rounding of it
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def _adapter(model: Decoder, width: int, dead: list[int], zero: bool) -> Adapter:
    g, weights = torch.Generator().manual_seed(5), {}
    for layer in range(model.config.num_hidden_layers):
        for name in ("gate", "up", "down"):
            module = f"model.layers.{layer}.mlp.{name}_proj"
            rows, columns = (128, width) if name == "down" else (width, 128)
            a, b = torch.randn(3, columns, generator=g), torch.randn(rows, 3, generator=g)
            if zero and name != "down":
                b[dead] = 0
            weights[module] = LoraWeight(a, b, 0.1)
    return Adapter(Path("made"), 3, weights)


def test_adapters_of_all_neurons_fit(tmp_path: Path) -> None:
    """One that leaves the dead alone gives what it gives with them; one that wakes them is told."""
    source = write(tmp_path / "source", PACKED, same_places(PACKED))
    convert(source, tmp_path / "without")
    convert(source, tmp_path / "with", keep_dead=True)
    dead, ids = places(PACKED).tolist(), random_ids(PACKED, 1, 8)
    models = [load_model(tmp_path / name / "model.bin") for name in ("without", "with")]
    for model in models:
        model.add_adapter(_adapter(model, INTER, dead, zero=True))
    found = [logits(model, ids) for model in models]
    assert torch.equal(*found)
    models[0].fused_step = False
    assert torch.equal(logits(models[0], ids), found[0])
    with pytest.raises(LoraError, match="convert the model again with --keep-dead"):
        models[0].add_adapter(_adapter(models[0], INTER, dead, zero=False), "waking")


def test_the_command_keeps_them_on_request(tmp_path: Path) -> None:
    source = write(tmp_path / "source", PACKED, same_places(PACKED))
    assert main(["convert", str(source), str(tmp_path / "out"), "--keep-dead"]) == 0
    assert load(tmp_path / "out").model.config.dropped_neurons == ()


@pytest.mark.parametrize(
    "places_said",
    [[], [3, 3], [4, 2], [-1], [INTER], "all", [[1], [2, 3]], [[1]], [1.0], [[1], 2]],
)
def test_wrong_places_are_rejected(places_said: Any) -> None:
    from bitnet_ops.config import ModelConfig, UnsupportedModelError

    config = hf_writer.config_dict(PACKED)
    block = {"format_version": 1, "dropped_neurons": places_said}
    with pytest.raises(UnsupportedModelError, match="bitnet_ops.dropped_neurons"):
        ModelConfig.from_hf({**config, "bitnet_ops": block})


def test_codes_are_cut_as_the_network_has_them(tmp_path: Path) -> None:
    """Element by element, from the network: rows of gate and up, columns of down."""
    network = with_dead(PACKED, same_places(PACKED))
    source = hf_writer.write_checkpoint(tmp_path / "source", PACKED, network=network)
    convert(source, tmp_path / "out")
    alive = np.setdiff1d(np.arange(INTER), places(PACKED))
    with Reader(tmp_path / "out" / "model.bin") as reader:
        for layer in range(PACKED.layers):
            for name in ("gate", "up", "down"):
                module = f"model.layers.{layer}.mlp.{name}_proj"
                codes = network[module]["codes"]
                codes = codes[:, alive] if name == "down" else codes[alive]
                found = ops.unpack(reader.tensor(f"{module}.weight"), codes.shape[1]).numpy()
                assert np.array_equal(found, codes)
