"""The models: against transformers' answers, a float64 forward of tiny ones, and themselves.

Equality between two ways of running ONE model (prefill or decode, alone or in a batch, any ISA) is
bit for bit; everything else has a bound with a reason.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bitnet_ops
import forward_fp64
from bitnet_ops import _runtime
from bitnet_ops.config import ModelConfig
from bitnet_ops.config.families import BY_MODEL_TYPE
from bitnet_ops.generate.engine import Limits
from bitnet_ops.language_model import LanguageModel
from bitnet_ops.models import Decoder, expected_tensors
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.kv_config import CacheCapacityError
from hf_writer import Family, make_network
from isa_control import ISAS, forced_isa, torch_threads
from tiny_models import NAMES, SMALL, config_of, random_ids, tiny_model

EXPECTED = json.loads(
    (Path(__file__).resolve().parents[1] / "data/demo-model/expected.json").read_text()
)
CASES = {case["prompt"]: case for case in EXPECTED["cases"]}
# Between fp32 and fp64, of the largest logit, where no code is near a tie: a few dozen roundings of
# 2^-24 each on the way of a value through two layers.
FP32_ROUNDING = 5e-6
CLEAR_OF_TIES = 2e-5  # of a code; fp32 errs by about 1e-5


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Any:
    """Tiny matrices are quicker on one thread; that the result is the same is tested below."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def demo() -> LanguageModel:
    return bitnet_ops.load(head_format="stored")


@pytest.fixture(scope="module", params=[*NAMES, "demo"])
def model(request: pytest.FixtureRequest) -> Decoder:
    """Every tiny family, and the demo."""
    return made(request.param)


def made(name: str) -> Decoder:
    """The model, its weights repacked for the kernels in force."""
    if name == "demo":
        return bitnet_ops.load(head_format="stored").model
    return tiny_model(SMALL[name])


@torch.inference_mode()
def run(model: Decoder, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of one prefill of ids [B, T]."""
    return model(ids, KVCache(model.config, ids.shape[0], ids.shape[1], dtype))


@torch.inference_mode()
def run_in_pieces(model: Decoder, ids: Tensor, *sizes: int, dtype: Any = torch.float32) -> Tensor:
    """Logits of ids [B, T] fed in pieces of the given sizes."""
    cache = KVCache(model.config, ids.shape[0], ids.shape[1], dtype)
    return torch.cat([model(piece, cache) for piece in ids.split(list(sizes), dim=1)], dim=1)


# Against transformers' answers ----------------------------------------------------------------


@pytest.mark.parametrize("prompt", CASES)
def test_demo_greedy_ids_are_those_of_transformers(demo: LanguageModel, prompt: str) -> None:
    case = CASES[prompt]
    (generation,) = demo.engine.generate([case["prompt_ids"]], None, Limits(48))
    assert generation.token_ids == case["greedy_ids"]
    assert demo.generate(prompt, max_new_tokens=48, ignore_eos=True) == case["greedy_text"]


@pytest.mark.parametrize("prompt", CASES)
def test_demo_first_logits(demo: LanguageModel, prompt: str) -> None:
    """The five best logits after the prompt; 0.05 is what rounding to int8 can move."""
    case = CASES[prompt]
    row = run(demo.model, torch.tensor([case["prompt_ids"]]))[0, -1]
    top = case["first_top5"]
    torch.testing.assert_close(row[top["ids"]], torch.tensor(top["logits"]), rtol=0, atol=0.05)
    assert int(row.argmax()) == top["ids"][0]


def test_demo_best_logits_along_the_way(demo: LanguageModel) -> None:
    """Every best logit of the 8 x 48 greedy steps within 0.1 of transformers'."""
    for case in CASES.values():
        ids = torch.tensor([case["prompt_ids"] + case["greedy_ids"][:-1]])
        best = run(demo.model, ids)[0, len(case["prompt_ids"]) - 1 :].max(-1).values
        torch.testing.assert_close(best, torch.tensor(case["best_logits"]), rtol=0, atol=0.1)


# Against float64 ------------------------------------------------------------------------------


def clear_of_ties(family: Family, network: dict[str, Any]) -> tuple[list[int], Tensor]:
    """A prompt no code of which is near a rounding tie, and its float64 logits [T, V]."""
    for seed in range(100):
        ids = random_ids(seed, 10, below=family.vocab).tolist()
        exact, margin = forward_fp64.forward(family, network, ids)
        if margin > CLEAR_OF_TIES:
            return ids, torch.as_tensor(exact)
    raise AssertionError("no prompt can tell a wrong model from a tie")


def check_against_fp64(family: Family) -> None:
    network = make_network(family)
    ids, exact = clear_of_ties(family, network)
    ours = run(tiny_model(family, network), torch.tensor([ids]))[0].double()
    assert float((ours - exact).abs().max()) < FP32_ROUNDING * float(exact.abs().max())


# K7, K8: each of these fields was ignored or hard-wired somewhere before.
FIELDS: dict[str, dict[str, Any]] = {
    "untied": {"tied": False},
    "head_dim 64": {"model_type": "llama", "head_dim": 64},
    "head_dim 16": {"model_type": "llama", "head_dim": 16, "tied": False},
    "silu": {"model_type": "llama"},
    "eps 1e-2": {"eps": 1e-2},
    "eps 1e-6": {"eps": 1e-6},
    "theta 100": {"theta": 100.0},
    "theta 5e5": {"theta": 500000.0},
    "mha": {"kv_heads": 4},
    "mqa": {"kv_heads": 1},
    "one layer": {"layers": 1},
    "odd widths": {"hidden": 192, "inter": 200, "heads": 3, "head_dim": 64, "kv_heads": 1},
}


@pytest.mark.parametrize("name", FIELDS)
def test_k7_k8_every_config_field_takes_part(name: str) -> None:
    """K7, K8: theta, eps, head_dim, activation, tie, kv heads: as the float64 forward has them."""
    small = {"hidden": 128, "inter": 192, "heads": 4, "head_dim": 32}
    family = dataclasses.replace(SMALL["bitnet-offline"], **small)
    family = dataclasses.replace(family, name=f"field {name}", **FIELDS[name])
    check_against_fp64(family)


@pytest.mark.parametrize("field", ["theta", "eps"])
def test_k8_a_wrong_field_shows(field: str) -> None:
    """The bound above is tight enough to see theta or eps a little off."""
    family = SMALL["bitnet-offline"]
    network = make_network(family)
    ids = torch.tensor([clear_of_ties(family, network)[0]])
    right = run(tiny_model(family, network), ids)
    other = dataclasses.replace(family, **{field: getattr(family, field) * 2})
    wrong = run(tiny_model(other, network), ids)
    assert float((right - wrong).abs().max()) > 4 * FP32_ROUNDING * float(right.abs().max())


# R2, R3 and what follows from them ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_r2_prefill_and_decode_agree(model: Decoder, dtype: torch.dtype) -> None:
    """R2: prefill of n + 1 tokens == prefill of n + decode of 1, bit for bit, at many lengths."""
    ids = random_ids(1, 1, 34)
    whole = run(model, ids, dtype)
    assert torch.equal(run_in_pieces(model, ids, 33, 1, dtype=dtype), whole)
    assert torch.equal(run_in_pieces(model, ids, *[1] * 34, dtype=dtype), whole)


@torch.inference_mode()
def test_r2_the_position_comes_from_the_cache(model: Decoder) -> None:
    """R2: one token decoded at position 100 is not what it is at position 99 or 0."""
    ids = random_ids(2, 1, 101)
    rows = []
    for length in (0, 99, 100):
        cache = KVCache(model.config, 1, 128)
        model(torch.full((1, length or 1), 7), cache)  # the same past everywhere but its length
        cache.truncate(length)
        rows.append(model(ids[:, -1:], cache)[0, 0])
        assert cache.lengths.tolist() == [length + 1]
    assert not torch.equal(rows[1], rows[2]) and not torch.equal(rows[0], rows[2])


@pytest.mark.parametrize("at", [0, 1, 15, 30])
def test_r3_attention_is_causal(model: Decoder, at: int) -> None:
    """R3: changing token t changes nothing before t, bit for bit, and something from t on."""
    ids = random_ids(3, 1, 31)
    changed = ids.clone()
    changed[0, at] = (ids[0, at] + 1) % 260
    before, after = run(model, ids), run(model, changed)
    assert torch.equal(before[:, :at], after[:, :at])
    assert not torch.equal(before[:, at], after[:, at])
    if at < 30:
        assert not torch.equal(before[:, -1], after[:, -1])


@pytest.mark.parametrize("sizes", [(40,), (1, 39), (39, 1), (16, 16, 8), (7, 13, 20)], ids=str)
def test_chunked_prefill_is_the_whole(model: Decoder, sizes: tuple[int, ...]) -> None:
    ids = random_ids(4, 1, 40)
    assert torch.equal(run_in_pieces(model, ids, *sizes), run(model, ids))


def test_r4_a_row_does_not_depend_on_its_batch(model: Decoder) -> None:
    """R4 end to end: each sequence alone gives the bits it gives among others."""
    ids = random_ids(5, 5, 12)
    together = run(model, ids)
    for row in range(5):
        assert torch.equal(together[row], run(model, ids[row : row + 1])[0])


@torch.inference_mode()
def test_rows_of_different_lengths_decode_together(model: Decoder) -> None:
    """A batch whose sequences stand at 3, 17 and 9 positions, one decode step, as each alone."""
    prompts = [random_ids(6 + n, 1, n) for n in (3, 17, 9)]
    cache, token = KVCache(model.config, 3, 20), torch.tensor([[5], [6], [7]])
    for i, prompt in enumerate(prompts):
        model(prompt, cache.row(i))
    together = model(token, cache)
    for i, prompt in enumerate(prompts):
        alone = run(model, torch.cat([prompt, token[i : i + 1]], 1))
        assert torch.equal(together[i, 0], alone[0, -1])
    assert cache.lengths.tolist() == [4, 18, 10]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_slots_above_a_length_are_never_read(model: Decoder, dtype: torch.dtype) -> None:
    """NaN and infinities in every unwritten slot of the cache change no bit."""
    ids = random_ids(8, 2, 40)
    clean, poisoned = (KVCache(model.config, 2, 48, dtype) for _ in range(2))
    for tensor in (poisoned.pool.key_pool, poisoned.pool.value_pool):
        tensor.fill_(float("nan"))
        tensor[:, :, 1::2] = float("inf")
    for piece in ids.split([1, 22, 1, 16], dim=1):
        assert torch.equal(model(piece, poisoned), model(piece, clean))


@pytest.mark.parametrize("name", [*NAMES, "demo"])
def test_every_isa_and_thread_count_gives_the_same_logits(name: str) -> None:
    """Made anew for each ISA: a repacked weight has the lanes of its kernels."""
    ids = random_ids(9, 2, 19)
    with forced_isa("scalar"):
        expected = run_in_pieces(made(name), ids, 18, 1)
    for isa in ISAS:
        with forced_isa(isa):
            model = made(name)
            for threads in (1, 2):
                with torch_threads(threads):
                    assert torch.equal(run_in_pieces(model, ids, 18, 1), expected), (isa, threads)


@torch.inference_mode()
def test_weights_made_for_other_lanes_are_rejected_by_name() -> None:
    """On every CPU with kernels of 16 or 4 lanes beside those of 8; one error, one remedy."""
    lanes = {}
    for isa in ISAS:
        with forced_isa(isa):
            lanes[isa] = _runtime.tile_lanes()
    with forced_isa("scalar"):
        model, ids = made("demo"), random_ids(9, 1, 3)
    for isa, count in lanes.items():
        with forced_isa(isa):
            if count == lanes["scalar"]:
                run(model, ids)
                continue
            for fused in (True, False):
                model.run_as = "program" if fused else "ops"
                with pytest.raises(RuntimeError, match=f"repacked for {isa}; repack again"):
                    run(model, ids)


def test_bf16_cache_is_close(demo: LanguageModel) -> None:
    """A bf16 cache rounds keys and values to 8 bits: the text's loss stays, single logits move."""
    text = (
        (Path(__file__).resolve().parents[1] / "data/demo-model/val.txt")
        .read_text()
        .split("\n\n")[3]
    )
    ids = torch.tensor([demo.encode(text)[:400]])
    exact, rounded = run(demo.model, ids), run(demo.model, ids, torch.bfloat16)
    assert not torch.equal(exact, rounded)
    loss = [torch.nn.functional.cross_entropy(x[0, :-1], ids[0, 1:]) for x in (exact, rounded)]
    assert abs(float(loss[0] - loss[1])) < 0.01
    assert float((exact.argmax(-1) == rounded.argmax(-1)).float().mean()) > 0.95
    assert float((exact - rounded).abs().max()) < 0.1 * float(exact.abs().max())


def test_bf16_activations_are_close(demo: LanguageModel) -> None:
    bf16 = bitnet_ops.load(dtype=torch.bfloat16, head_format="stored").model
    ids = torch.tensor([CASES["In the beginning"]["prompt_ids"]])
    exact, rounded = run(demo.model, ids), run(bf16, ids)
    assert rounded.dtype == torch.float32 and not torch.equal(exact, rounded)
    assert float((exact - rounded).abs().max()) < 0.1 * float(exact.abs().max())
    whole = random_ids(10, 1, 20)
    assert torch.equal(run_in_pieces(bf16, whole, 19, 1), run(bf16, whole))


# The module's manners -------------------------------------------------------------------------


def test_logits_to_keep(model: Decoder) -> None:
    ids = random_ids(11, 2, 9)
    whole = run(model, ids)
    assert whole.shape == (2, 9, model.config.vocab_size) and whole.dtype == torch.float32
    with torch.inference_mode():
        for keep in (1, 4, 9, 20):
            kept = model(ids, KVCache(model.config, 2, 9), keep)
            assert torch.equal(kept, whole[:, -min(keep, 9) :])


def test_works_without_inference_mode(demo: LanguageModel) -> None:
    cache = KVCache(demo.config, 1, 8)
    logits = demo.model(torch.tensor([[0, 5]]), cache)
    assert torch.equal(logits, run(demo.model, torch.tensor([[0, 5]])))
    assert not logits.requires_grad


def test_bad_inputs(demo: LanguageModel) -> None:
    model, cache = demo.model, KVCache(demo.config, 1, 4)
    for ids in ([[1.0]], [1], [[[1]]], [[]]):
        with pytest.raises(ValueError, match=r"input_ids int64 \[B, T\]"):
            model(torch.tensor(ids), cache)
    with pytest.raises(ValueError, match="the cache's 1 sequences, got 2"):
        model(torch.tensor([[1], [2]]), cache)
    for bad in (-1, 4096):
        with pytest.raises(ValueError, match="token ids from 0 to 4095"):
            model(torch.tensor([[3, bad]]), cache)
    with pytest.raises(CacheCapacityError, match="at most 4 new tokens, got 5"):
        model(torch.tensor([[1, 2, 3, 4, 5]]), cache)
    other = dataclasses.replace(demo.config, num_hidden_layers=2)
    with pytest.raises(ValueError, match="a cache of 6 layers, got 2"):
        model(torch.tensor([[1]]), KVCache(other, 1, 4))
    assert cache.lengths.tolist() == [0]


def test_context_ends_at_max_position_embeddings(demo: LanguageModel) -> None:
    """K7: max_position was ignored."""
    with pytest.raises(CacheCapacityError, match="max_position_embeddings 1024"):
        KVCache(demo.config, 1, 1025)


def test_names_are_those_of_hugging_face(model: Decoder) -> None:
    names = {n for n in model.state_dict() if not n.endswith("weight_scale")}
    head = {n for n in names if n.startswith("mtp.")}  # of a model with a draft head
    assert bool(head) == (model.draft_head is not None)
    assert names - head == set(expected_tensors(model.config))


def test_2b_4t_has_332_tensors() -> None:
    config = ModelConfig(
        family=BY_MODEL_TYPE["bitnet"],
        vocab_size=128256,
        hidden_size=2560,
        intermediate_size=6912,
        num_hidden_layers=30,
        num_attention_heads=20,
        num_key_value_heads=5,
        head_dim=128,
        hidden_act="relu2",
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        sub_norms=True,
    )
    specs = expected_tensors(config)
    assert len(specs) == 332
    assert sum(s.kind == "ternary" for s in specs.values()) == 210
    assert len(expected_tensors(dataclasses.replace(config, tie_word_embeddings=False))) == 333


def test_copies_and_loaded_states_compute_the_same() -> None:
    """What forward uses follows the buffers when they are replaced."""
    family = SMALL["bitnet-offline"]
    ids = random_ids(12, 1, 9)
    model = tiny_model(family)
    expected = run(model, ids)
    assert torch.equal(run(copy.deepcopy(model), ids), expected)
    assert torch.equal(run(model._apply(torch.clone), ids), expected), "_apply replaces buffers"
    other = tiny_model(family, make_network(dataclasses.replace(family, name="another")))
    assert not torch.equal(run(other, ids), expected)
    other.load_state_dict(model.state_dict())
    assert torch.equal(run(other, ids), expected)
    third = tiny_model(family, make_network(dataclasses.replace(family, name="a third")))
    third.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(run(third, ids), expected)


def test_float16_is_rejected() -> None:
    with pytest.raises(ValueError, match="float32 or bfloat16, got torch.float16; relu2 overflows"):
        tiny_model(SMALL["bitnet-offline"], dtype=torch.float16)


def test_config_of_tiny_families_differs_as_named() -> None:
    """The list of families really covers what it claims."""
    configs = [config_of(SMALL[name]) for name in NAMES]
    assert (
        {c.sub_norms for c in configs} == {c.tie_word_embeddings for c in configs} == {True, False}
    )
    assert {c.hidden_act for c in configs} == {"relu2", "silu"}
    assert any(c.head_dim * c.num_attention_heads != c.hidden_size for c in configs)
    assert any(c.hidden_size % 128 for c in configs)
    assert any(1 < c.num_key_value_heads < c.num_attention_heads for c in configs)
