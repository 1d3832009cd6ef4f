"""Full logits of converted models, through torch.ops.bitnet, against transformers in fp32.

Bounds: the integer part of a linear is exact, so without rounding ties two right forwards agree to
fp32 rounding, and tiny models on prompts chosen to keep clear of ties must. With a tie one code
moves by a whole step, and later layers multiply it; so on long texts loss, argmax and margins are
what can agree. The transformers side is compare_hf, which leaves everything to
transformers.
"""

import json
from pathlib import Path

import pytest
import torch

import compare_hf
import forward_fp64
import hf_writer
from bitnet_ops import ops
from bitnet_ops.convert import convert
from bitnet_ops.formats.sglbitnt import Reader
from bitnet_ops.language_model import load
from bitnet_ops.models import build
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.packing import PackedWeight
from hf_writer import FAMILIES
from isa_control import torch_threads

DEMO = Path(__file__).resolve().parents[1] / "data" / "demo-model"
FP32_ROUNDING = 5e-6  # relative to the largest logit; observed 3e-7 to 9e-7
CLEAR_OF_TIES = 2e-5  # of a code; fp32 errs by about 1e-5


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny matrices are slower on several threads; results are the same bit for bit."""
    with torch_threads(1):
        yield


class Case:
    """One tiny family: its network, transformers' model and ours."""

    def __init__(self, folder, family):
        self.family, self.network = family, hf_writer.make_network(family)
        source = hf_writer.write_checkpoint(folder / "source", family, network=self.network)
        convert(source, folder / "out")
        self.hf = compare_hf.load_hf(source)
        self.ours = load(folder / "out", head_format="stored").model
        self.file = folder / "out" / "model.bin"

    def logits(self, ids):
        """(transformers', ours), both [T, V]."""
        return compare_hf.hf_logits(self.hf, ids), compare_hf.our_logits(self.ours, ids)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    return Case(tmp_path_factory.mktemp(request.param), FAMILIES[request.param])


def relative(a, b):
    """The largest difference of logits, relative to the largest of b."""
    return ((a.double() - b.double()).abs().max() / b.abs().max()).item()


def agreement(a, b):
    return (a.argmax(-1) == b.argmax(-1)).double().mean().item()


def random_ids(family, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, family.vocab, (tokens,), generator=generator).tolist()


# Tiny families -----------------------------------------------------------------------------------


def test_logits_agree_to_fp32_rounding(case, record_property):
    """On a prompt clear of ties: ours == transformers == the float64 forward, to fp32 rounding."""
    ids, margin = forward_fp64.clear_prompt(case.family.name)
    assert margin > CLEAR_OF_TIES
    exact, _ = forward_fp64.forward(case.family, case.network, ids)
    theirs, ours = case.logits(ids)
    record_property("relative_logit_difference", relative(ours, theirs))
    print(f"\n{case.family.name}: {relative(ours, theirs):.1e} of {theirs.abs().max():.2f}")
    assert relative(theirs, exact) < FP32_ROUNDING, "the oracle itself"
    assert relative(ours, theirs) < FP32_ROUNDING
    assert relative(ours, exact) < FP32_ROUNDING


def test_a_larger_difference_has_a_tie_behind_it(case):
    """On 64 random tokens: either fp32 rounding, or a code near a tie explains what is more."""
    ids = random_ids(case.family, 64, seed=10)
    _, margin = forward_fp64.forward(case.family, case.network, ids)
    theirs, ours = case.logits(ids)
    difference = relative(ours, theirs)
    assert difference < FP32_ROUNDING or margin < CLEAR_OF_TIES
    assert difference < 0.1
    assert agreement(theirs, ours) >= 0.9


def test_every_linear_on_identical_inputs(case):
    """int8 codes and integer sums equal transformers' on the inputs that it fed its linears."""
    sequences = [random_ids(case.family, 64, seed=seed) for seed in (20, 21)]
    with Reader(case.file) as reader:
        figures = compare_hf.compare_linears(case.hf, compare_hf.packed_tensors(reader), sequences)
    assert figures.linears == 2 * 7 * case.family.layers
    check_linears(figures)


def check_linears(figures):
    """The same float32 arithmetic on the same inputs: every code and every sum is equal."""
    assert figures.codes_different == 0 and figures.codes > 0
    assert figures.sums_different == 0 and figures.sums > 0
    assert figures.worst_remainder < 0.1, "transformers' float sums must be near integers"
    assert figures.worst_output < 2e-6


def test_cached_decode_agrees_with_transformers_prefill(case):
    """Token by token over our cache, against transformers' single forward: positions and mask."""
    ids, _ = forward_fp64.clear_prompt(case.family.name)
    cache = KVCache(case.ours.config, 1, len(ids), torch.float32)
    with torch.inference_mode():
        steps = [case.ours(torch.tensor([[i]]), cache)[0, 0] for i in ids]
    assert relative(torch.stack(steps), case.logits(ids)[0]) < FP32_ROUNDING


# The wrong readings that earlier implementations fell for ----------------------------------------


def misread(network, change):
    """The network with `change` applied to every stored projection."""
    return {n: change(dict(v)) if isinstance(v, dict) else v for n, v in network.items()}


def strided_rows(projection):
    packed = hf_writer.pack_quarters(projection["codes"])
    return {**projection, "codes": hf_writer.unpack_strided(packed)}


def inverse_scale(projection):
    return {**projection, "stored_scale": 1.0 / projection["stored_scale"]}


@pytest.mark.parametrize("mistake", [strided_rows, inverse_scale])
@pytest.mark.parametrize("name", ["bitnet-offline", "llama-bitlinear"])
def test_r1_a_wrong_reading_gives_clearly_other_logits(name, mistake, tmp_path):
    """R1: interleaved rows, or the scale taken the wrong way, cannot hide within these bounds."""
    family = FAMILIES[name]
    right = Case(tmp_path / "right", family)
    source = tmp_path / "wrong"
    hf_writer.write_checkpoint(source, family, network=misread(right.network, mistake))
    convert(source, tmp_path / "out", trust_scales=True)
    ids = random_ids(family, 64, seed=10)
    wrong = compare_hf.our_logits(load(tmp_path / "out", head_format="stored").model, ids)
    theirs, ours = right.logits(ids)
    assert relative(ours, theirs) < 0.1
    assert relative(wrong, theirs) > 0.4
    assert agreement(wrong, theirs) < 0.7


# The demo model ----------------------------------------------------------------------------------


class Demo:
    """The trained demo model: checkpoint, stored answers of transformers, transformers and ours."""

    def __init__(self, folder):
        convert(DEMO, folder / "out")
        self.file = folder / "out" / "model.bin"
        self.expected = json.loads((DEMO / "expected.json").read_text())
        self.hf = compare_hf.load_hf(DEMO)
        self.ours = load(folder / "out", head_format="stored").model
        self.sequences = compare_hf.chapters(DEMO, (DEMO / "val.txt").read_text())


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return Demo(tmp_path_factory.mktemp("demo"))


def test_demo_every_linear_on_identical_inputs(demo):
    shortest = sorted(demo.sequences, key=len)[:3]
    with Reader(demo.file) as reader:
        figures = compare_hf.compare_linears(demo.hf, compare_hf.packed_tensors(reader), shortest)
    assert figures.linears == 3 * 42 and figures.codes > 10_000_000
    check_linears(figures)


@pytest.mark.slow
def test_demo_logits_over_the_held_out_text(demo):
    """All 12149 tokens against transformers run here and against the losses stored from it."""
    total, stored = compare_hf.LogitFigures(), demo.expected["val"]
    assert len(demo.sequences) == len(stored["chapters"])
    for ids, chapter in zip(demo.sequences, stored["chapters"], strict=True):
        before = total.our_nats
        theirs = compare_hf.hf_logits(demo.hf, ids)
        total.add(ids, theirs, compare_hf.our_logits(demo.ours, ids))
        assert len(ids) - 1 == chapter["tokens"]
        nats = (total.our_nats - before) / chapter["tokens"]
        assert nats == pytest.approx(chapter["nats"] / chapter["tokens"], abs=0.005)
    print("\n" + "\n".join(total.lines()))
    assert total.predicted == stored["tokens"] == 12149
    assert total.loss_difference < 0.001
    assert total.our_nats / total.predicted == pytest.approx(stored["nats_per_token"], abs=0.001)
    assert total.top1 >= 0.99
    assert total.relative_difference < 0.1
    assert total.largest_lead_lost < 0.05 * total.max_logit, "argmax differs only on small leads"


def test_demo_greedy_continuations_token_for_token(demo):
    """The 8 prompts of expected.json, 48 tokens each, decoded over our cache."""
    assert len(demo.expected["cases"]) == 8
    for case in demo.expected["cases"]:
        ids, best = greedy(demo.ours, case["prompt_ids"], 48)
        assert ids == case["greedy_ids"], case["prompt"]
        assert best == pytest.approx(case["best_logits"], abs=0.1), case["prompt"]


@torch.inference_mode()
def greedy(model, prompt, count):
    """(ids, best logits) of `count` greedy steps; the end of a text does not stop it."""
    cache = KVCache(model.config, 1, len(prompt) + count, torch.float32)
    logits, ids, best = model(torch.tensor([prompt]), cache)[0, -1], [], []
    for _ in range(count):
        ids.append(int(logits.argmax()))
        best.append(float(logits.max()))
        logits = model(torch.tensor([ids[-1:]]), cache)[0, -1]
    return ids, best


def test_demo_r1_strided_rows_destroy_the_model(demo):
    """R1 on a trained model: the interleaved reading of the same bytes costs nats a token."""
    with Reader(demo.file) as reader:
        tensors = {}
        for name, info in reader.tensors.items():
            tensors[name] = reader.tensor(name)
            if info.packed:
                tensors[name] = _strided(tensors[name], info, demo.ours.config)
        wrong = build(demo.ours.config, tensors)
    figures = compare_hf.LogitFigures()
    ids = min(demo.sequences, key=len)
    figures.add(ids, compare_hf.hf_logits(demo.hf, ids), compare_hf.our_logits(wrong, ids))
    assert (figures.our_nats - figures.hf_nats) / figures.predicted > 2
    assert figures.relative_difference > 0.3 and figures.top1 < 0.5


def _strided(packed, info, config):
    down = info.name.endswith("down_proj.weight")
    in_features = config.intermediate_size if down else config.hidden_size
    codes = ops.unpack(packed, in_features).numpy()
    wrong = torch.from_numpy(hf_writer.unpack_strided(hf_writer.pack_quarters(codes)))
    assert not torch.equal(wrong, torch.from_numpy(codes))
    scale = torch.tensor([info.scale])
    return PackedWeight(ops.pack(wrong), scale, len(codes), in_features)
