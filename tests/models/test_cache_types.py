"""Every type of KV caches against a float32 cache: attention within a bound, a model's logits.

What each type rounds to is tests/kernels/test_float_caches.py's matter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import bitnet_ops
from bitnet_ops import ops
from bitnet_ops.language_model import LanguageModel
from bitnet_ops.models import Decoder
from bitnet_ops.nn.kv_cache import KV_DTYPES, KVCache
from bitnet_ops.nn.storage import KV_TYPES
from bounds import assert_equal, assert_within
from ops_attention import attention_bound, rounded
from tiny_models import NAMES, SMALL, random_ids, tiny_model

VAL = Path(__file__).resolve().parents[1] / "data/demo-model/val.txt"
ROUNDED = [name for name in KV_TYPES if name != "float32"]


def rounding(x: Tensor, name: str) -> Tensor:
    """How far each number of rows [..., D] may move when a cache of that type takes it."""
    kind = KV_TYPES[name]
    size = x.double().abs()
    return (kind.error * (size.amax(-1, keepdim=True) if kind.has_scales else size)).clamp(
        min=kind.floor
    )


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("name", ROUNDED)
def test_attention_moves_as_far_as_the_rounding_of_the_cache_says(
    name: str, tokens: int, isa: str, rng: torch.Generator
) -> None:
    """Against float64 over the numbers that were written.

    A score moves by at most d, the sum of |query| times the rounding of the key; a weight, of which
    both the exponential and the sum of all move, by a factor within exp(2 d); and what the values
    are off is averaged by the weights.
    """
    length, dim, scale = 150, 64, 0.1
    query = torch.randn(1, tokens, 4, dim, generator=rng)
    keys, values = torch.randn(2, 1, length, 1, dim, generator=rng) + 0.5
    cache = [torch.zeros(1, 1, length, dim, dtype=KV_DTYPES[name]) for _ in "kv"]
    scales = [torch.zeros(1, 1, length) for _ in "kv"] if KV_TYPES[name].has_scales else []
    ops.kv_cache_update(*cache, keys, values, torch.zeros(1, dtype=torch.int64), *scales)
    starts = torch.tensor([length - tokens])
    got = ops.attention(query, *cache, starts, scale, *scales)

    k, v = keys[0, :, 0], values[0, :, 0]
    moved = torch.einsum("bthd,ld->bthl", query.double().abs(), rounding(k, name)) * scale
    factor = torch.expm1(2 * moved.amax(-1, keepdim=True))
    scores = torch.einsum("bthd,ld->bthl", query.double(), k.double()) * scale
    seen = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
    weights = torch.softmax(scores.masked_fill(~seen[:, None], -torch.inf), -1)
    spread = torch.einsum("bthl,ld->bthd", weights, v.double().abs() + rounding(v, name))
    bound = factor * spread + torch.einsum("bthl,ld->bthd", weights, rounding(v, name))
    exact = torch.einsum("bthl,ld->bthd", weights, v.double())
    own = attention_bound((query, *cache, starts, scale, *scales), got)
    assert_within(got.double(), exact, bound + own, name)


# Models -------------------------------------------------------------------------------------------


class RoundedCache(KVCache):
    """A float32 cache of numbers as a smaller type would hold them, by torch."""

    smaller: torch.dtype

    def update(self, layer: int, key: Tensor, value: Tensor) -> None:
        key, value = (rounded(x, self.smaller).float() for x in (key, value))
        super().update(layer, key, value)


@torch.inference_mode()
def decode(model: Decoder, ids: Tensor, cache: KVCache) -> Tensor:
    """Logits of every position of ids [B, T] after a prefill of 5."""
    logits = [model(ids[:, :5], cache)]
    logits += [model(ids[:, t : t + 1], cache) for t in range(5, ids.shape[1])]
    return torch.cat(logits, 1)


@pytest.mark.parametrize("name", [n for n in ROUNDED if not KV_TYPES[n].has_scales])
@pytest.mark.parametrize("family", NAMES)
def test_a_model_is_what_it_is_over_the_rounded_numbers(family: str, name: str) -> None:
    """decode_step over each type, to the bit; the oracle is composed of ops over float32."""
    model, ids = tiny_model(SMALL[family]), random_ids(1, 2, 12)
    ours = decode(model, ids, KVCache(model.config, 2, 12, KV_DTYPES[name]))
    model.fused_step = False
    oracle = RoundedCache(model.config, 2, 12)
    oracle.smaller = KV_DTYPES[name]
    assert_equal(ours, decode(model, ids, oracle), name)
    assert not torch.equal(ours, decode(model, ids, KVCache(model.config, 2, 12))), "not rounded"


@pytest.fixture(scope="module")
def demo() -> LanguageModel:
    return bitnet_ops.load()


@pytest.mark.parametrize(
    ("name", "ratio"), [("float16", 2.0**-1.5), ("float8_e4m3fn", 16.0), ("float8_e5m2", 32.0)]
)
def test_logits_move_as_far_as_the_rounding_of_the_cache_says(
    demo: LanguageModel, name: str, ratio: float
) -> None:
    """Beside bfloat16, root mean square of all logits.

    A number's relative rounding is 16 or 32 times bfloat16's, or an eighth. Where it moves an
    activation by more than a step of its int8 codes, the codes move as far; where by less, as
    often: then the root mean square goes with the root of the rounding.
    """
    squares = {}
    parts = [demo.encode(part) for part in VAL.read_text().split("\n\n")[:6]]
    for kind in ("float32", "bfloat16", name):
        caches = [KVCache(demo.config, 1, len(ids), KV_DTYPES[kind]) for ids in parts]
        with torch.inference_mode():
            logits = [demo.model(torch.tensor([i]), c)[0] for i, c in zip(parts, caches, strict=True)]
        if kind == "float32":
            exact = torch.cat(logits).double()
        squares[kind] = float((torch.cat(logits).double() - exact).square().sum())
    assert len(exact) > 1000
    assert 0 < squares[name] <= ratio**2 * squares["bfloat16"]
