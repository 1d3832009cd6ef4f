"""Attention that reads fewer positions: what each policy means, in float64 over the whole context,
and the same bits whatever the instruction set, the threads and the chunks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitnet_ops import _runtime, ops
from bitnet_ops.nn.kv_config import KV_DTYPES, KVCacheConfig
from bitnet_ops.nn.kv_pool import KVPool
from isa_control import forced_isa, torch_threads
from ops_attention import attention_bound

HEADS, KV_HEADS, DIM, LENGTH, BLOCK = 4, 2, 32, 400, 64
SCALE = DIM**-0.5


class Context:
    """Random keys and values of one sequence in a pool, its blocks in another order."""

    def __init__(self, dtype: torch.dtype, length: int = LENGTH, block_size: int = BLOCK) -> None:
        g = torch.Generator().manual_seed(3)
        config = KVCacheConfig(length, 1, KV_HEADS, DIM)
        blocks = -(-length // block_size)
        self.pool = KVPool(config, blocks, block_size, dtype)
        self.table = torch.randperm(blocks, generator=g)
        at = torch.arange(length)
        self.slots = self.table[at // block_size] * block_size + at % block_size
        keys, values = (torch.randn(length, KV_HEADS, DIM, generator=g) for _ in "kv")
        self.pool.update(0, keys, values, self.slots)
        self.query = torch.randn(length, HEADS, DIM, generator=g)

    def attend(self, begin: int, end: int, policy: str) -> Tensor:
        """Of the tokens [begin, end), as one call."""
        (keys, values), scales = self.pool._layer(0)
        return ops.paged_attention(
            self.query[begin:end], keys, values, torch.tensor([0, end - begin]),
            torch.tensor([end]), self.table[None], SCALE, *scales, self.pool.layout, 0, policy,
        )  # fmt: skip

    def stored(self) -> dict[str, Tensor]:
        return self.pool.stored(self.table.tolist(), len(self.slots))


def seen(position: int, window: int, sinks: int = 0, stride: int = 0) -> Tensor:
    """Whether a token at `position` sees each position, by the words of the documentation."""
    j = torch.arange(position + 1)
    strided = (j // 64) % stride == 0 if stride else torch.zeros_like(j, dtype=torch.bool)
    return (j > position - window) | (j < sinks) | strided


def by_definition(c: Context, masks: list[Tensor], begin: int) -> Tensor:
    """float64 attention of the tokens from `begin` on over the positions that `masks` shows."""
    found = c.stored()
    keys, values = (found[name][0].double() for name in ("key", "value"))
    if "key_scale" in found:
        keys *= found["key_scale"][0].double()[..., None]
        values *= found["value_scale"][0].double()[..., None]
    out = torch.empty(len(masks), HEADS, DIM, dtype=torch.float64)
    for t, mask in enumerate(masks):
        for h in range(HEADS):
            kv, n = h // (HEADS // KV_HEADS), len(mask)
            scores = keys[kv, :n] @ c.query[begin + t, h].double() * SCALE
            weights = scores.masked_fill(~mask, -torch.inf).softmax(0)
            out[t, h] = weights @ values[kv, :n]
    return out


def tolerance(c: Context, expected: Tensor, begin: int) -> Tensor:
    """What roundings may do to attention over all positions; fewer leave out terms of it."""
    found, end = c.stored(), begin + len(expected)
    scales = [found[name] for name in ("key_scale", "value_scale") if name in found]
    args = (
        c.query[begin:end][None], found["key"], found["value"], torch.tensor([begin]), SCALE,
        *scales,
    )  # fmt: skip
    return attention_bound(args, expected[None].float())[0]


POLICIES = {
    "window=1": (1,),
    "window=70": (70,),
    "window=16 sinks=4": (16, 4),
    "window=130 sinks=64": (130, 64),
    "window=40 sinks=100": (40, 100),
    "window=30 stride=3": (30, 0, 3),
    "window=80 sinks=70 stride=2": (80, 70, 2),
    "window=390 sinks=4": (390, 4),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=str)
def test_a_window_reads_what_it_says(dtype: torch.dtype, policy: str) -> None:
    """Every token of a prompt; and those at its end one by one, with the same bits."""
    c = Context(dtype)
    masks = [seen(p, *POLICIES[policy]) for p in range(LENGTH)]
    expected = by_definition(c, masks, 0)
    whole = c.attend(0, LENGTH, policy)
    assert ((whole - expected).abs() <= tolerance(c, expected, 0)).all()
    for p in (0, 5, 63, 64, 150, 333, LENGTH - 1):
        assert torch.equal(c.attend(p, p + 1, policy)[0], whole[p]), p
    assert torch.equal(c.attend(77, 301, policy), whole[77:301])


@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=str)
def test_where_nothing_is_skipped_the_bits_are_those_of_all(dtype: torch.dtype) -> None:
    c = Context(dtype)
    dense = c.attend(0, LENGTH, "")
    for policy in ("window=400", "window=396 sinks=4", "window=999 sinks=4 stride=5"):
        assert torch.equal(c.attend(0, LENGTH, policy), dense), policy
    some = c.attend(0, LENGTH, "window=100 sinks=20")  # as long as that
    assert torch.equal(some[:120], dense[:120])
    assert not torch.equal(some[120], dense[120])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("block_size", [16, 48, 64, 128])
def test_positions_that_nothing_reads_may_hold_anything(
    dtype: torch.dtype, block_size: int
) -> None:
    """Their blocks too: the table may name any."""
    c = Context(dtype, block_size=block_size)
    policy, begin = "window=100 sinks=4", 380
    expected = c.attend(begin, LENGTH, policy)
    first, last = -(-4 // block_size), (begin - 99) // block_size
    c.table[first:last] = c.table[0]
    assert torch.equal(c.attend(begin, LENGTH, policy), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_instruction_sets_and_threads_agree(dtype: torch.dtype) -> None:
    c = Context(dtype)
    for policy in ("window=70 sinks=4", "window=30 sinks=9 stride=2"):
        expected = [c.attend(0, LENGTH, policy), c.attend(LENGTH - 1, LENGTH, policy)]
        for isa in _runtime.available_isas():
            for threads in (1, 2, 3):
                with forced_isa(isa), torch_threads(threads):
                    assert torch.equal(c.attend(0, LENGTH, policy), expected[0])
                    assert torch.equal(c.attend(LENGTH - 1, LENGTH, policy), expected[1])


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("window=-1", "key window of line 1 .policy. from 0"),
        ("sinks=4", "key sinks of line 1 .policy. beside a window"),
        ("window=4 sinks=0", "key sinks of line 1 .policy. from 1"),
        ("window=4 stride=-2", "key stride of line 1 .policy. from 1"),
        ("window=4 widow=2", "keys that it knows, got widow"),
        ("256", "256"),
        ("window=4\nwindow=5", "policy of one line, got 2|key=value"),
    ],
)
def test_what_is_no_policy_is_refused(policy: str, words: str) -> None:
    c = Context(torch.float32, 10)
    with pytest.raises(RuntimeError, match=f"paged_attention: .*({words})"):
        c.attend(0, 1, policy)
