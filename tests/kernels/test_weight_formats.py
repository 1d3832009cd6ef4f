"""Layouts of ternary weights in memory: one model, the same bits out, whatever the layout.

Formats, ISAs and threads against the canonical layout; BitLinear's state_dict; the arena that holds
a model's weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bitnet_ops import ops
from bitnet_ops.cli import main
from bitnet_ops.dummy import model as dummy
from bitnet_ops.formats.sglbitnt import MODEL_FILE, SglbitntError, Writer
from bitnet_ops.generate.engine import Engine, Limits
from bitnet_ops.language_model import DEMO_DIR, load
from bitnet_ops.loading import weights as loading
from bitnet_ops.loading.weights import repack_all
from bitnet_ops.memory.arena import ALIGNMENT, Arena
from bitnet_ops.models import Decoder, build
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.nn.packing import (
    PackedWeight,
    choose_format,
    pack_ternary,
    packed_row_bytes,
    packed_shape,
)
from bitnet_ops.nn.storage import (
    CPU_SPECIFIC,
    FORMATS,
    HEAD_FORMATS,
    WEIGHT_FORMATS,
)  # fmt: skip
from hf_writer import config_dict, make_network
from isa_control import ISAS, every_configuration, forced_isa, torch_threads
from tiny_models import SMALL, config_of, random_ids, tensors_of, tiny_model

PROMPT = "And God said unto"
# Greedy tokens of the demo model as the first release computed them, with canonical weights alone.
EXPECTED_TEXT = " him, Thou art my servant, and"


def logits_of(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids, KVCache(model.config, ids.shape[0], ids.shape[1]))


def matrix(n: int, k: int, seed: int = 0) -> PackedWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-1, 2, (n, k), generator=generator, dtype=torch.int8)
    return pack_ternary(codes, 0.5)


# The model -------------------------------------------------------------------------------------


def test_the_demo_writes_the_same_text_in_every_format_isa_and_thread_count() -> None:
    for label in every_configuration():
        for weight_format in WEIGHT_FORMATS:
            lm = load(weight_format=weight_format)  # anew: layouts fit the kernels in use
            text = lm.generate(PROMPT, max_new_tokens=8)
            assert text == EXPECTED_TEXT, f"{label} {weight_format}"


def test_the_demo_has_the_same_logits_in_every_format_isa_and_thread_count() -> None:
    ids = random_ids(3, 1, 23, below=4000)
    expected = None
    for label in every_configuration():
        for weight_format in WEIGHT_FORMATS:
            logits = logits_of(load(weight_format=weight_format).model, ids)
            expected = logits if expected is None else expected
            assert torch.equal(logits, expected), f"{label} {weight_format}"


@pytest.mark.parametrize("head_format", HEAD_FORMATS)
@pytest.mark.parametrize("name", ["bitnet-offline", "bitnet-offline-untied"])
def test_the_loader_quantises_as_the_model_does(
    name: str, head_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's head, quantised by pieces of rows, gives the bits of the whole matrix."""
    monkeypatch.setattr(loading, "_HEAD_ROWS", 48)
    family = SMALL[name]
    tensors = tensors_of(family, make_network(family))
    config = {**config_dict(family), "bitnet_ops": {"format_version": 1}}
    with Writer(tmp_path / MODEL_FILE, config, len(tensors)) as writer:
        for key, tensor in tensors.items():
            if isinstance(tensor, PackedWeight):
                writer.add_packed(key, tensor.weight, tensor.scale, tensor.in_features)
            else:
                writer.add_dense(key, tensor)
    direct = build(config_of(family), tensors, head_format=head_format)
    ids = random_ids(6, 2, 5)
    for weight_format in WEIGHT_FORMATS:
        loaded = load(tmp_path, weight_format=weight_format, head_format=head_format).model
        assert loaded.head.head_format == direct.head.head_format
        assert torch.equal(logits_of(loaded, ids), logits_of(direct, ids)), weight_format


@pytest.mark.parametrize("family", SMALL)
def test_every_architecture_has_the_same_logits_in_every_format(family: str) -> None:
    """K that is no multiple of 64, N that fills no tile, grouped queries, tied heads and not."""
    model = tiny_model(SMALL[family])
    ids = random_ids(4, 2, 9)
    expected = logits_of(model, ids)
    for weight_format in CPU_SPECIFIC:
        for module in model.modules():
            if isinstance(module, BitLinear):
                module.repack(weight_format)
        rebound = model.float()  # anything that goes through _apply looks the buffers up again
        assert rebound.weight_format == weight_format
        assert torch.equal(logits_of(rebound, ids), expected), weight_format


def test_steps_are_the_same_in_every_format() -> None:
    limits, prompts = Limits(20), [[5, 9, 200], [7], [1, 2, 3, 4, 5, 6, 7]]
    runs = [
        Engine(dummy.decoder("tiny", weight_format=f)).generate(prompts, limits=limits)
        for f in WEIGHT_FORMATS
    ]
    assert all(run == runs[0] for run in runs)
    assert len(runs[0][0].token_ids) == 20


def test_load_says_which_format_it_chose(capsys: pytest.CaptureFixture[str]) -> None:
    assert load().model.weight_format == "2bit"
    assert load(weight_format="canonical").model.weight_format == "canonical"
    for given, used in (("auto", "2bit"), *((name, name) for name in CPU_SPECIFIC)):
        assert main(["generate", PROMPT, "-n", "8", "--json", "--weight-format", given]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["weight_format"] == used
        assert report["text"] == EXPECTED_TEXT


def test_unknown_formats_are_rejected() -> None:
    message = "weight_format: expected one of auto, canonical, 2bit, 1.6bit, got '3bit'"
    with pytest.raises(ValueError, match=message):
        load(weight_format="3bit")
    with pytest.raises(ValueError, match=message):
        dummy.decoder("tiny", weight_format="3bit")


# Memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_format", CPU_SPECIFIC)
def test_a_model_is_one_sequential_read(weight_format: str) -> None:
    """The matrices of a decode step lie one after the other in memory, aligned, no gaps."""
    for model in (
        load(weight_format=weight_format).model,
        dummy.decoder("tiny", weight_format=weight_format),
    ):
        names = [f"self_attn.{p}_proj" for p in "qkvo"]
        names += [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
        weights = [
            layer.get_buffer(f"{name}.weight") for layer in model.model.layers for name in names
        ]
        at = weights[0].data_ptr()
        for weight in weights:
            assert weight.is_contiguous() and weight.data_ptr() == at and at % ALIGNMENT == 0
            at += -(-weight.nbytes // ALIGNMENT) * ALIGNMENT


def test_the_file_is_mapped_for_canonical_weights_alone(tmp_path: Path) -> None:
    # A folder of its own: another test's model may still have the demo's file mapped.
    folder = shutil.copytree(DEMO_DIR, tmp_path / "model")

    def mapped() -> bool:
        return f"{folder / MODEL_FILE}\n" in Path("/proc/self/maps").read_text()

    lm = load(folder, weight_format="2bit")
    assert lm.generate(PROMPT, max_new_tokens=1) and not mapped()
    canonical = load(folder, weight_format="canonical")
    assert canonical.generate(PROMPT, max_new_tokens=1) and mapped()


def test_an_arena_hands_out_aligned_tensors_until_it_is_full() -> None:
    arena = Arena(1000)
    first, second = arena.take((3, 33)), arena.take((50,), torch.bfloat16)
    third = arena.take((7, 11), torch.float32)
    assert first.data_ptr() % ALIGNMENT == 0
    assert second.data_ptr() - first.data_ptr() == 128  # 99 bytes, aligned
    assert third.data_ptr() - second.data_ptr() == 128
    for tensor in (first, second, third):
        tensor.fill_(3)
    assert (first == 3).all() and (second == 3).all()
    with pytest.raises(ValueError, match="expected at most 424 more bytes, got 425"):
        arena.take((425,))
    assert arena.take((424,)).numel() == 424


def test_a_large_arena_begins_on_a_huge_page() -> None:
    memory = Arena((8 << 20) + 5).memory
    assert memory.data_ptr() % (2 << 20) == 0 and memory.numel() == (8 << 20) + 5


# One matrix ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (33, 130), (80, 64), (81, 300)])
def test_packing_there_and_back(shape: tuple[int, int], isa: str) -> None:
    canonical = matrix(*shape)
    for weight_format in CPU_SPECIFIC:
        private = canonical.repack(weight_format)
        assert private.format == weight_format and private.scale is canonical.scale
        assert tuple(private.weight.shape) == packed_shape(*shape, weight_format)
        assert torch.equal(private.to_canonical().weight, canonical.weight)
        other = private.repack(CPU_SPECIFIC[1 - CPU_SPECIFIC.index(weight_format)])
        assert torch.equal(other.repack("canonical").weight, canonical.weight)
        assert private.repack(weight_format) is private
    assert canonical.repack("canonical") is canonical
    assert packed_shape(*shape, "canonical") == tuple(canonical.weight.shape)


def test_auto_keeps_what_no_private_layout_takes() -> None:
    assert choose_format("auto", 32768) == "2bit"
    assert choose_format("auto", 32769) == "canonical"
    wide = matrix(2, 32769)
    assert wide.repack("auto") is wide
    with pytest.raises(RuntimeError, match="repack: expected in_features at most 32768"):
        wide.repack("2bit")
    mixed = repack_all({"narrow": matrix(9, 70), "wide": wide}, "auto")
    assert isinstance(mixed["narrow"], PackedWeight) and mixed["narrow"].format == "2bit"
    assert mixed["wide"] is wide


def test_packed_weights_check_private_shapes() -> None:
    private = matrix(33, 130).repack("2bit")
    parts = private.weight, private.scale
    with pytest.raises(ValueError, match="for 33 x 200"):
        PackedWeight(*parts, 33, 200, "2bit")
    with pytest.raises(ValueError, match="for 330 x 130"):
        PackedWeight(*parts, 330, 130, "2bit")
    for other in {*FORMATS} - {"2bit"}:
        with pytest.raises(ValueError, match="PackedWeight: expected weight uint8"):
            PackedWeight(*parts, 33, 130, other)
    with pytest.raises(ValueError, match="PackedWeight: expected weight uint8"):
        PackedWeight(matrix(33, 130).weight, private.scale, 33, 130, "2bit")
    with pytest.raises(ValueError, match="format among canonical, 2bit, 1.6bit, got 'auto'"):
        PackedWeight(*parts, 33, 130, "auto")


@pytest.mark.parametrize("weight_format", CPU_SPECIFIC)
def test_layouts_of_other_kernels_are_rejected(weight_format: str) -> None:
    """What was packed before another ISA was forced: an error, never a wrong result."""
    here = matrix(64, 128).repack(weight_format).weight
    lanes = here.shape[2] // 4 if weight_format == "2bit" else here.shape[2]
    for other in {4, 8, 16} - {lanes}:
        rows = other * (4 if weight_format == "2bit" else 5)
        tail = (4 * other,) if weight_format == "2bit" else (other, 4)
        weight = torch.zeros((-(-64 // rows), 32, *tail), dtype=torch.uint8)
        packed = PackedWeight(weight, torch.ones(1), 64, 128, weight_format)  # valid in itself
        with pytest.raises(RuntimeError, match="linear: expected weight"):
            BitLinear.from_packed(packed)(torch.ones(1, 128))


def test_a_weight_packed_for_one_isa_runs_on_those_with_its_lanes() -> None:
    x = torch.randn(3, 130, generator=torch.Generator().manual_seed(1))
    canonical = matrix(33, 130)
    expected = BitLinear.from_packed(canonical)(x)
    for made_for in ISAS:
        with forced_isa(made_for):
            layer = BitLinear.from_packed(canonical).repack("2bit")
            assert torch.equal(layer(x), expected)


# state_dict ------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_format", CPU_SPECIFIC)
def test_a_state_dict_holds_canonical_rows(weight_format: str) -> None:
    plain = dummy.decoder("tiny", weight_format="canonical")
    private = dummy.decoder("tiny", weight_format=weight_format)
    state = private.state_dict()
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    other = dummy.decoder("tiny", weight_format=weight_format, seed=7)
    ids = random_ids(5, 1, 6)
    assert not torch.equal(logits_of(other, ids), logits_of(plain, ids))
    address = other.model.layers[2].mlp.down_proj.weight.data_ptr()
    other.load_state_dict(state)
    assert torch.equal(logits_of(other, ids), logits_of(plain, ids))
    assert other.model.layers[2].mlp.down_proj.weight.data_ptr() == address  # still in the arena
    assert other.weight_format == weight_format


def test_a_state_dict_that_does_not_fit_is_rejected() -> None:
    layer = BitLinear.from_packed(matrix(33, 130)).repack("2bit")
    state = layer.state_dict()
    with pytest.raises(RuntimeError, match=r"weight as canonical rows \[33, 64\], got \[32, 64\]"):
        layer.load_state_dict({**state, "weight": state["weight"][:32]})
    with pytest.raises(RuntimeError, match="a state_dict holds no CPU-specific layout"):
        layer.load_state_dict({**state, "weight": layer.weight})
    with pytest.raises(RuntimeError, match="packed as uint8, got torch.float32"):
        layer.load_state_dict({**state, "weight": state["weight"].float()})
    with pytest.raises(RuntimeError, match="code 3"):
        layer.load_state_dict({**state, "weight": torch.full_like(state["weight"], 255)})


def test_an_empty_layer_can_be_repacked() -> None:
    layer = BitLinear(130, 33).repack()
    assert layer.weight_format == "2bit" and torch.isnan(layer(torch.ones(130))).all()
    layer.load_state_dict(BitLinear.from_packed(matrix(33, 130)).state_dict())
    assert torch.isfinite(layer(torch.ones(130))).all()
    assert tuple(layer.state_dict()["weight"].shape) == (33, packed_row_bytes(130))
    assert "weight_format=2bit" in repr(layer)


# Damaged files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_damaged_data_are_named_in_every_format(weight_format: str, tmp_path: Path) -> None:
    data = bytearray((DEMO_DIR / MODEL_FILE).read_bytes())
    name = b"model.layers.1.mlp.gate_proj.weight"
    at = data.index(name) + len(name) + 100
    data[at] = 0xFF
    (tmp_path / MODEL_FILE).write_bytes(data)
    with pytest.raises(SglbitntError, match="gate_proj.* got code 3 in byte") as caught:
        load(tmp_path, weight_format=weight_format)
    assert caught.value.code == "invalid_code"


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_values_that_are_not_finite_are_named(name: str, tmp_path: Path) -> None:
    data = bytearray((DEMO_DIR / MODEL_FILE).read_bytes())
    at = data.index(name.encode()) + len(name) + 40
    data[at : at + 4] = b"\xff\x7f\xff\x7f"
    (tmp_path / MODEL_FILE).write_bytes(data)
    with pytest.raises(SglbitntError, match=f"{name}.*NaN or infinity"):
        load(tmp_path)


# The first token -------------------------------------------------------------------------------


def test_the_first_token_costs_what_the_next_one_does() -> None:
    """No compilation and no packing waits for the first request: within a generous 20 times."""
    with torch_threads(1):
        engine = Engine(dummy.decoder("tiny"))
        run = engine.start([[1]], limits=Limits(40))
        times: list[float] = []
        while run.active:
            run.step()
            done: Any = run.timing
            times.append(done.first_token_s + done.decode_s - sum(times))
    assert len(times) == 40
    assert times[0] < 20 * sorted(times)[20] + 0.05


def test_ops_take_the_rows_of_padded_weights() -> None:
    private = matrix(33, 130).repack("2bit")
    x = torch.ones(130)
    assert ops.linear(x, private.weight, private.scale, None, private.shape).shape == (33,)


def test_build_shares_private_weights() -> None:
    tensors = repack_all(dummy.tensors("tiny"), "1.6bit")
    model = build(dummy.config("tiny"), tensors)
    name = "model.layers.1.self_attn.k_proj"
    packed = tensors[f"{name}.weight"]
    assert isinstance(packed, PackedWeight)
    assert model.get_buffer(f"{name}.weight").data_ptr() == packed.weight.data_ptr()
