"""The table of rotary frequencies against transformers' own functions, and rejected blocks."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from bitnet_ops import ops
from bitnet_ops.config import ModelConfig, UnsupportedModelError
from bitnet_ops.nn import rotary as nn_rotary
from bitnet_ops.nn.rotary import Rotary, rotary
from bounds import assert_equal
from ops_rowwise import cosines_and_sines

# transformers takes the power in float32 (torch's vectorised one), this package in double precision
# through libm, rounded once, and the same on every CPU.
POWER_ULP = 2
MAX_POSITIONS = 32768
BASE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64,
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
    "max_position_embeddings": MAX_POSITIONS,
}  # fmt: skip


def made(block: dict[str, Any], name: str = "rope_scaling", **fields: Any) -> Rotary:
    return rotary(ModelConfig.from_hf({**BASE, name: block, **fields}))


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Random parameter sets make transformers warn by the hundred."""
    logging.getLogger("transformers").setLevel(logging.ERROR)


def theirs(block: dict[str, Any], **fields: Any) -> tuple[torch.Tensor, float]:
    """What LlamaForCausalLM would multiply positions by; longrope's list by max_position."""
    fields = {**BASE, **fields}
    config = LlamaConfig(**{k: v for k, v in fields.items() if k != "architectures"},
                         rope_scaling=dict(block))  # fmt: skip
    if config.rope_parameters["rope_type"] == "default":
        return LlamaRotaryEmbedding(config).inv_freq, 1.0
    function = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]]
    return function(config, "cpu", seq_len=config.max_position_embeddings)


def ulps(found: torch.Tensor, expected: torch.Tensor) -> float:
    spacing = torch.nextafter(expected, torch.tensor(math.inf)).double() - expected.double()
    return float(((found.double() - expected.double()).abs() / spacing).max())


THETAS = st.sampled_from([1e4, 5e5, 1e6, 5e6, 1000042.0]) | st.floats(2.0, 1e8)
FACTORS = st.sampled_from([1.0, 1.5, 2.0, 4.0, 8.0, 32.0]) | st.floats(1.0, 100.0)
ORIGINALS = st.sampled_from([512, 4096, 8192, 16384, 32768]) | st.integers(64, 65536)
HEAD_DIMS = st.sampled_from([2, 6, 64, 80, 96, 128])


def optional(**options: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=options)


YARN = st.builds(
    lambda needed, rest: {"rope_type": "yarn", **needed, **rest},
    st.fixed_dictionaries({"factor": FACTORS | st.none()}),
    optional(
        original_max_position_embeddings=ORIGINALS,
        attention_factor=st.floats(0.1, 4.0),
        mscale=st.just(0.0) | st.floats(1e-6, 2.0),
        mscale_all_dim=st.just(0.0) | st.floats(1e-6, 2.0),
        beta_fast=st.sampled_from([0, 8, 32.0, 64]),
        beta_slow=st.sampled_from([0, 0.5, 1, 32]),
        truncate=st.booleans(),
    ),
)
LLAMA3 = st.builds(
    lambda factor, low, ratio, rest: {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low,
        "high_freq_factor": low * ratio, **rest,
    },
    FACTORS, st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([1.5, 4.0, 8.0]),
    optional(original_max_position_embeddings=ORIGINALS),
)  # fmt: skip
LINEAR = st.builds(lambda factor: {"type": "linear", "factor": factor}, FACTORS)


@st.composite
def longrope(draw: st.DrawFn, head_dim: int) -> dict[str, Any]:
    numbers = st.floats(1.0, 80.0)
    lists = {
        name: draw(st.lists(numbers, min_size=head_dim // 2, max_size=head_dim // 2))
        for name in ("short_factor", "long_factor")
    }
    rest = draw(optional(
        factor=st.floats(0.5, 64.0), attention_factor=st.floats(0.5, 2.0),
        original_max_position_embeddings=ORIGINALS,
    ))  # fmt: skip
    return {"rope_type": "longrope", **lists, **rest}


def float32_powers(theta: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return theta**exponents


@given(THETAS, HEAD_DIMS)
@settings(max_examples=400, deadline=None)
def test_powers_are_those_of_transformers_within_two_ulp(theta: float, head_dim: int) -> None:
    ours = nn_rotary._powers(theta, head_dim)
    assert ulps(ours, float32_powers(theta, head_dim)) <= POWER_ULP
    exponents = (torch.arange(0, head_dim, 2).float() / head_dim).double()
    assert ulps(ours, (torch.tensor(theta, dtype=torch.float64) ** exponents).float()) <= 1


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn", "longrope"])
def test_table_equals_that_of_transformers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of random parameter sets; every override key is there in some and not in others.

    Bit for bit where both start from the same powers.
    """
    monkeypatch.setattr(nn_rotary, "_powers", float32_powers)

    @given(st.data(), THETAS, HEAD_DIMS, st.sampled_from([2048, 8192, MAX_POSITIONS]))
    @settings(max_examples=300, deadline=None)
    def compare(data: st.DataObject, theta: float, head_dim: int, positions: int) -> None:
        blocks = {"linear": LINEAR, "llama3": LLAMA3, "yarn": YARN, "longrope": longrope(head_dim)}
        block = data.draw(blocks.get(kind, st.just({"rope_type": "default"})))
        fields = {
            "rope_theta": theta, "head_dim": head_dim, "max_position_embeddings": positions
        }  # fmt: skip
        inv_freq, attention_factor = theirs(block, **fields)
        found = made(block, **fields)
        assert_equal(found.inv_freq, inv_freq)
        assert found.attention_factor == attention_factor

    compare()


@pytest.mark.parametrize(
    "theta, original, low, high",
    [(1e6, 8192, 17, 34), (5e6, 8192, 15, 30), (1e6, 16384, 20, 37)],
)
def test_published_ternary_bonsai(theta: float, original: int, low: int, high: int) -> None:
    """The ramp of 1.7B, 4B and 8B: pairs below `low` are plain, those above `high` a quarter."""
    block = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
    fields = {"rope_theta": theta, "head_dim": 128, "max_position_embeddings": 4 * original}
    found = made(block, **fields)
    plain = made({"type": "default"}, **fields).inv_freq
    ratio = found.inv_freq / plain
    assert found.attention_factor == 0.1 * math.log(4) + 1
    assert (ratio[: low + 1] == 1).all() and (ratio[low + 1 : high] < 1).all()
    assert (ratio[low + 1 : high] > 0.25).all()
    assert ((ratio[high:] / 0.25 - 1).abs() < 2**-22).all()


def test_both_spellings_and_the_original_outside_of_the_block() -> None:
    block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    for name in ("rope_parameters", "rope_scaling"):
        same = made({**block, "rope_theta": 5e5}, name)
        assert torch.equal(same.inv_freq, made(block, rope_theta=5e5).inv_freq)
    outside = {"original_max_position_embeddings": 2048}
    assert ulps(made(block, **outside).inv_freq, theirs(block, **outside)[0]) <= 2 * POWER_ULP
    assert torch.equal(made(block, **outside).inv_freq, made({**block, **outside}).inv_freq)


def test_lists_of_longrope_that_differ_are_told() -> None:
    lists = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    block = {"rope_type": "longrope", **lists, "original_max_position_embeddings": 4096}
    config = ModelConfig.from_hf({**BASE, "rope_scaling": block})
    assert config.rope_scaling is not None and config.rope_scaling.extension[0] == 2.0
    assert "long_factor is taken at every position" in " ".join(config.notes)
    short = ModelConfig.from_hf({**BASE, "rope_scaling": block, "max_position_embeddings": 4096})
    assert short.rope_scaling is not None and short.rope_scaling.extension[0] == 1.0
    same = ModelConfig.from_hf({**BASE, "rope_scaling": {**block, "long_factor": [1.0] * 64}})
    assert not same.notes


_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0] * 64}
REJECTED = {
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, "change with the length of the text"),
    "proportional": ({"rope_type": "proportional"}, "rope_scaling.rope_type 'default' or"),
    "not a name": ({"rope_type": 3}, "rope_scaling.rope_type 'default' or"),
    "unknown option": ({"type": "yarn", "factor": 4.0, "beta": 1}, "beta to be absent, got 1"),
    "another kind's": ({"type": "linear", "factor": 4.0, "mscale": 1.0}, "mscale to be absent"),
    "partial": ({"type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5}, "partial_rotary"),
    "no factor": ({"type": "linear"}, "rope_scaling.factor to be a number, got None"),
    "small factor": ({"type": "yarn", "factor": 0.5}, "factor to be from 1 to 1e"),
    "infinite factor": ({"type": "yarn", "factor": math.inf}, "factor to be finite"),
    "text": ({"type": "yarn", "factor": "4"}, "factor to be a number, got '4'"),
    "negative beta": ({"type": "yarn", "factor": 4.0, "beta_fast": -1}, "beta_fast to be finite"),
    "truncate": ({"type": "yarn", "factor": 4.0, "truncate": 1}, "truncate to be true or false"),
    "attention": ({"type": "yarn", "factor": 4.0, "attention_factor": 0}, "attention_factor to be"),
    "original": (
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0.5},
        "original_max_position_embeddings to be a positive integer",
    ),
    "no low": ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor to be a number"),
    "crossed": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
        "high_freq_factor above low_freq_factor 4, got 1.0",
    ),
    "no list": ({"rope_type": "longrope", "short_factor": [1.0] * 64}, "long_factor to be 64"),
    "short list": ({**_LONG, "long_factor": [1.0] * 63}, "long_factor to be 64 numbers"),
    "zero in a list": ({**_LONG, "long_factor": [0.0] * 64}, "long_factor to be 64 numbers from"),
    "text in a list": ({**_LONG, "long_factor": ["1"] * 64}, "long_factor to be a number"),
    "original of 1": ({**_LONG, "original_max_position_embeddings": 1}, "to be 2 or more, got 1"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected_blocks(name: str) -> None:
    block, text = REJECTED[name]
    with pytest.raises(UnsupportedModelError) as error:
        made(block)
    assert text in str(error.value)


def test_blocks_that_disagree_are_rejected() -> None:
    yarn = {"type": "yarn", "factor": 4.0}
    other = {"rope_parameters": {"rope_type": "default"}}
    with pytest.raises(UnsupportedModelError, match="to say the same"):
        made(yarn, **other)
    with pytest.raises(UnsupportedModelError, match="above 1 with yarn"):
        made(yarn, rope_theta=1.0)


def test_attention_factor_multiplies_cosines_and_sines() -> None:
    block = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    fields = {**BASE, "rope_theta": 1e6, "head_dim": 128}
    config = LlamaConfig(**{k: v for k, v in fields.items() if k != "architectures"},
                         rope_scaling=dict(block))  # fmt: skip
    positions = torch.tensor([[0, 1, 8191, 8192, 20000, 32767]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    table = cosines_and_sines(ops, positions, *made(block, rope_theta=1e6, head_dim=128))
    angle = positions[..., None] * made(block, rope_theta=1e6, head_dim=128).inv_freq.double()
    bound = 1.2 * (angle * 6 * 2.0**-24 + 4 * 2.0**-24)
    for ours, expected in ((table[..., :64], cos), (table[..., 64:], sin)):
        assert bool(((ours - expected[..., :64]).abs() <= bound).all())
