"""Every type of KV caches against a float32 cache: attention within a bound, a model's logits.

What each type rounds to is tests/kernels/test_float_caches.py's matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bitnet_ops
from bitnet_ops import ops
from bitnet_ops.language_model import LanguageModel
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.kv_config import KV_DTYPES
from bitnet_ops.nn.kv_pool import attend_rectangular, update_rectangular
from bitnet_ops.nn.storage import KV_TYPES
from bounds import assert_equal, assert_within
from cache_types import rounded
from op_catalogue import composed
from op_schema import named
from ops_attention import attention_bound
from ops_model_step import model_step_arguments

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
    update_rectangular(*cache, keys, values, torch.zeros(1, dtype=torch.int64), *scales)
    starts = torch.tensor([length - tokens])
    got = attend_rectangular(query, *cache, starts, scale, *scales)

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


# A step, and a model ------------------------------------------------------------------------------


class Rounding:
    """The ops, over float32 caches of numbers as a smaller type holds them, by torch's casts."""

    def __init__(self, smaller: torch.dtype) -> None:
        self.smaller = smaller

    def __getattr__(self, op: str) -> Any:
        return getattr(ops, op)

    def paged_cache_update(self, keys: Tensor, values: Tensor, *new: Any) -> None:
        key, value, *rest = new
        key, value = (rounded(x, self.smaller).float() for x in (key, value))
        ops.paged_cache_update(keys, values, key, value, *rest)

    def paged_attention(self, query: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
        if self.smaller == torch.bfloat16:  # whose arithmetic is its own
            keys, values = keys.bfloat16(), values.bfloat16()
        return ops.paged_attention(query, keys, values, *rest)


@pytest.mark.parametrize("tokens", [1, 30])
@pytest.mark.parametrize("name", [n for n in ROUNDED if not KV_TYPES[n].has_scales])
def test_a_step_is_what_it_is_over_the_rounded_numbers(name: str, tokens: int, isa: str) -> None:
    """To the bit; the oracle is composed of the other ops over float32 caches."""
    made = [
        named("model_step", model_step_arguments(
            torch.Generator().manual_seed(8), layers=2, heads=6, head_dim=46, block_size=16,
            new=(tokens, tokens), lengths=(100, 31), logit_rows=None, cache_dtype=KV_DTYPES[name],
        ))
        for _ in range(3)
    ]  # fmt: skip
    ours, oracle, exact = made
    for arguments in (oracle, exact):
        arguments["caches"] = [cache.float() for cache in arguments["caches"]]
    got = ops.model_step(**ours)
    assert_equal(got, composed(Rounding(KV_DTYPES[name]), "model_step", **oracle), name)
    for cache, wanted in zip(ours["caches"], oracle["caches"], strict=True):
        assert_equal(cache.float(), wanted)
    assert not torch.equal(got, ops.model_step(**exact)), "nothing was rounded"


@pytest.fixture(scope="module")
def demo() -> LanguageModel:
    return bitnet_ops.load()


@pytest.mark.parametrize(("name", "ratio"), [("float8_e4m3fn", 16.0), ("float8_e5m2", 32.0)])
def test_logits_move_as_far_as_the_rounding_of_the_cache_says(
    demo: LanguageModel, name: str, ratio: float
) -> None:
    """Beside bfloat16, root mean square of all logits.

    A number's relative rounding is 16 or 32 times bfloat16's. Where it moves an activation by more
    than a step of its int8 codes, the codes move as far; where by less, as often, and then the root
    mean square goes with the root of the rounding.
    """
    squares = {}
    parts = [demo.encode(part) for part in VAL.read_text().split("\n\n")[:6]]
    for kind in ("float32", "bfloat16", name):
        caches = [KVCache(demo.config, 1, len(ids), KV_DTYPES[kind]) for ids in parts]
        with torch.inference_mode():
            pairs = zip(parts, caches, strict=True)
            logits = [demo.model(torch.tensor([ids]), cache)[0] for ids, cache in pairs]
        if kind == "float32":
            exact = torch.cat(logits).double()
        squares[kind] = float((torch.cat(logits).double() - exact).square().sum())
    assert len(exact) > 1000
    assert 0 < squares[name] <= ratio**2 * squares["bfloat16"]
