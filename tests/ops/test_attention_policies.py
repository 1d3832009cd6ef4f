"""Attention that reads fewer positions: what each policy means, in float64 over the whole context,
and the same bits whatever the instruction set, the threads and the chunks.
"""

from __future__ import annotations

import math

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
        config = KVCacheConfig(length, 1, KV_HEADS, DIM, key_bounds=block_size % 64 == 0)
        blocks = -(-length // block_size)
        self.pool = KVPool(config, blocks, block_size, dtype)
        self.table = torch.randperm(blocks, generator=g)
        at = torch.arange(length)
        self.slots = self.table[at // block_size] * block_size + at % block_size
        keys, values = (torch.randn(length, KV_HEADS, DIM, generator=g) for _ in "kv")
        keys += torch.randn(-(-length // 64), KV_HEADS, DIM, generator=g)[at // 64]  # of a page
        self.pool.update(0, keys, values, self.slots)
        self.query = torch.randn(length, HEADS, DIM, generator=g)

    def attend(self, begin: int, end: int, policy: str) -> Tensor:
        """Of the tokens [begin, end), as one call."""
        (keys, values), scales, bounds = self.pool._layer(0)
        return ops.paged_attention(
            self.query[begin:end], keys, values, torch.tensor([0, end - begin]),
            torch.tensor([end]), self.table[None], SCALE, *scales, self.pool.layout, 0, policy,
            bounds,
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


# Pages -----------------------------------------------------------------------------------------


def bounds_of(c: Context) -> Tensor:
    """[pages, KV, 2 * D] as the pool holds them, in the order of the text."""
    found = c.pool.key_bounds
    assert found is not None
    return found[0, c.table].flatten(0, 1)


def chosen(c: Context, position: int, name: str, numbers: list[float], sinks: int) -> list[Tensor]:
    """By KV head whether a token reads each position, from the words of the documentation."""
    pages, masks = position // 64 + 1, []
    for kv in range(KV_HEADS):
        maximum, minimum = bounds_of(c)[: pages - 1, kv].double().chunk(2, -1)
        group = HEADS // KV_HEADS
        q = c.query[position, kv * group : (kv + 1) * group].double()[:, None] * SCALE
        scores = torch.maximum(q * maximum, q * minimum).sum((0, 2))
        forced = torch.arange(pages - 1) < -(-sinks // 64)
        p = (scores / group).softmax(0)
        if name == "threshold":
            read = forced | (p >= numbers[0] * p.max())
        else:
            low, high = numbers[0], numbers[-1]
            entropy = -(p * p.log()).sum() / math.log(pages - 1)
            ratio = low + (high - low) * float(entropy)
            count = max(math.ceil(ratio * pages - 1e-6), int(forced.sum()) + 2) - 1
            count = min(count, pages - 1)
            best = scores.masked_fill(forced, torch.inf).topk(count).indices
            read = torch.zeros(pages - 1, dtype=torch.bool).index_fill(0, best, True)
        read = torch.cat([read, torch.tensor([True])])
        masks.append(read.repeat_interleave(64)[: position + 1])
    return masks


PAGES = {
    "top_k=0.3": ("top_k", [0.3], 0),
    "top_k=0.25 sinks=70": ("top_k", [0.25], 70),
    "threshold=0.2": ("threshold", [0.2], 0),
    "threshold=0.9 sinks=4": ("threshold", [0.9], 4),
    "min_ratio=0.2 max_ratio=0.9 sinks=4": ("dynamic", [0.2, 0.9], 4),
}


@pytest.mark.parametrize("policy", PAGES)
@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=str)
def test_pages_are_chosen_by_their_bounds(dtype: torch.dtype, policy: str) -> None:
    """For each token and KV head; with other tokens beside it or not."""
    c = Context(dtype)
    words = f"{policy} dense_below=0"
    whole, counts = c.attend(0, LENGTH, words), set()
    for p in (0, 64, 130, 255, 256, 333, LENGTH - 1):
        masks = chosen(c, p, *PAGES[policy]) if p >= 128 else [seen(p, LENGTH)] * KV_HEADS
        heads = [by_definition(c, [mask], p)[:, h : h + 1]
                 for h in range(HEADS) for mask in [masks[h // (HEADS // KV_HEADS)]]]  # fmt: skip
        expected = torch.cat(heads, 1)
        assert ((whole[p] - expected[0]).abs() <= tolerance(c, expected, p)[0]).all(), p
        assert torch.equal(c.attend(p, p + 1, words)[0], whole[p]), p
        counts |= {int(mask.sum()) for mask in masks if p == LENGTH - 1}
    assert counts != {LENGTH}, "nothing was left out"
    assert torch.equal(c.attend(130, 262, words), whole[130:262])
    assert torch.equal(c.attend(0, 300, f"{policy} dense_below=300"), c.attend(0, 300, ""))


@pytest.mark.parametrize("policy", PAGES)
def test_pages_are_chosen_of_many(policy: str) -> None:
    """More than are sorted to choose of them; the tokens of a prompt read different ones."""
    c, words = Context(torch.float32, 64 * 300 + 70), f"{policy} dense_below=0"
    begin = len(c.slots) - 90
    together, lists = c.attend(begin, begin + 90, words), set()
    for p in range(begin, begin + 90, 7):
        masks = chosen(c, p, *PAGES[policy])
        heads = [by_definition(c, [masks[h // (HEADS // KV_HEADS)]], p)[:, h : h + 1]
                 for h in range(HEADS)]  # fmt: skip
        expected = torch.cat(heads, 1)
        assert ((together[p - begin] - expected[0]).abs() <= tolerance(c, expected, p)[0]).all(), p
        assert torch.equal(c.attend(p, p + 1, words)[0], together[p - begin]), p
        lists |= {tuple(mask[: begin // 64 * 64 : 64].tolist()) for mask in masks}
    assert len(lists) > 2
    with torch_threads(2):
        assert torch.equal(c.attend(begin, begin + 90, words), together)


@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=str)
@pytest.mark.parametrize("block_size", [64, 128])
def test_bounds_are_those_of_the_keys_that_attention_reads(
    dtype: torch.dtype, block_size: int
) -> None:
    """The nearest bfloat16 numbers outside of them; also where a pool is filled by `store`."""
    c = Context(dtype, 384, block_size)
    keys, _ = c.pool.read(0, c.table.tolist(), 384)
    pages = keys.unflatten(1, (-1, 64)).transpose(0, 1)
    maximum, minimum = bounds_of(c).float().chunk(2, -1)
    for bound, exact, sign in ((maximum, pages.amax(2), 1), (minimum, pages.amin(2), -1)):
        assert (bound * sign >= exact * sign).all()
        assert ((bound - exact).abs() <= exact.abs() * 2**-7).all()
        assert torch.equal(bound, exact) or dtype not in (torch.bfloat16, torch.float8_e5m2)
    before, blocks = bounds_of(c), c.table.tolist()
    found = c.pool.stored(blocks, 384)
    assert c.pool.key_bounds is not None
    c.pool.key_bounds.fill_(7)
    c.pool.store(blocks, found)
    assert torch.equal(bounds_of(c), before)


def test_a_page_that_holds_no_number_is_read() -> None:
    c = Context(torch.float32)
    c.pool.update(0, torch.full((1, KV_HEADS, DIM), torch.nan), torch.zeros(1, KV_HEADS, DIM),
                  c.slots[70:71])  # fmt: skip
    last = c.slots[127:128]
    c.pool.update(0, torch.zeros(1, KV_HEADS, DIM), torch.zeros(1, KV_HEADS, DIM), last)
    assert c.attend(LENGTH - 1, LENGTH, "top_k=0.3 dense_below=0").isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_choices_are_the_same_on_instruction_sets_and_threads(dtype: torch.dtype) -> None:
    c = Context(dtype)
    for policy in PAGES:
        words = f"{policy} dense_below=0"
        expected = [c.attend(200, LENGTH, words), c.attend(LENGTH - 1, LENGTH, words)]
        for isa in _runtime.available_isas():
            for threads in (1, 2, 3):
                with forced_isa(isa), torch_threads(threads):
                    assert torch.equal(c.attend(200, LENGTH, words), expected[0])
                    assert torch.equal(c.attend(LENGTH - 1, LENGTH, words), expected[1])


def test_where_all_pages_are_chosen_the_bits_are_those_of_all() -> None:
    c = Context(torch.bfloat16)
    dense = c.attend(0, LENGTH, "")
    for policy in ("top_k=1", "min_ratio=1 max_ratio=1", "threshold=1e-30", "top_k=.9 sinks=400"):
        assert torch.equal(c.attend(0, LENGTH, f"{policy} dense_below=0"), dense), policy


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("window=-1", "key window of line 1 .policy. from 0"),
        ("sinks=4", "key sinks of line 1 .policy. beside a window"),
        ("window=4 sinks=0", "key sinks of line 1 .policy. from 1"),
        ("window=4 stride=-2", "key stride of line 1 .policy. from 1"),
        ("top_k=0", "key top_k of line 1 .policy. above 0 and at most 1, got"),
        ("top_k=1.5", "key top_k .* above 0 and at most 1, got"),
        ("threshold=-1", "key threshold .* above 0 and at most 1, got"),
        ("max_ratio=.5", "key min_ratio .* to be given"),
        ("min_ratio=.6 max_ratio=.5", "key min_ratio .* at most max_ratio"),
        ("top_k=.5 threshold=.1", "key threshold .* without ratios"),
        ("top_k=.5 window=9", "key window .* without a choice of pages"),
        ("top_k=.5 stride=2", "key stride .* beside a window"),
        ("sinks=4 dense_below=3", "sinks .* beside a window or"),
        ("window=4 widow=2", "keys that it knows, got widow"),
        ("256", "256"),
        ("window=4\nwindow=5", "policy of one line, got 2|key=value"),
    ],
)
def test_what_is_no_policy_is_refused(policy: str, words: str) -> None:
    c = Context(torch.float32, 10)
    with pytest.raises(RuntimeError, match=f"paged_attention: .*({words})"):
        c.attend(0, 1, policy)


def test_a_choice_needs_bounds() -> None:
    c = Context(torch.float32, 96, 48)
    with pytest.raises(RuntimeError, match="expected key_bounds with a policy that chooses pages"):
        c.attend(0, 1, "top_k=.5")
    with pytest.raises(ValueError, match="block_size a multiple of 64 .*, got 48"):
        KVPool(KVCacheConfig(96, 1, KV_HEADS, DIM, key_bounds=True), 2, 48)
