"""Spec of delta_net: Gated DeltaNet over the states of its sequences, token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bounds import EXP_ERROR, U, smallest
from op_changes import BF16, F32, F64, FLOATS_TEXT, I32, add_dim, narrow, noncontiguous, to, value
from op_schema import bound, names, positional
from op_spec import Call, Named, Rejections, spec
from op_values import FLOATS, Arguments, Built, activations, dtype_name, strided

SLAB = 32  # columns of a state that lie together
EXTRA = SLAB + 16  # behind a draft's key: its errors, its decay, padding


class States:
    """One layer of a slot, as float64 of the plain shapes."""

    def __init__(self, states: list[Tensor], slot: int, layer: int) -> None:
        self.recurrent, self.inputs, self.kept = (t[slot, layer] for t in states)

    def read(self) -> Tensor:
        """[HV, DK, DV]"""
        return self.recurrent.double().permute(0, 2, 1, 3).flatten(2)

    def write(self, s: Tensor) -> None:
        self.recurrent.copy_(s.unflatten(-1, (-1, SLAB)).permute(0, 2, 1, 3))

    def draft(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """k [HV, DK], e [HV, DV], decay [HV]"""
        kept = self.kept[number].double()
        dim = kept.shape[-1] - EXTRA
        return kept[:, 0, :dim], kept[..., dim : dim + SLAB].flatten(1), kept[:, 0, dim + SLAB]

    def keep(self, number: int, k: Tensor, e: Tensor, decay: Tensor) -> None:
        kept, dim = self.kept[number], k.shape[-1]
        kept[..., :dim] = k[:, None]
        kept[..., dim : dim + SLAB] = e.unflatten(1, (-1, SLAB))
        kept[..., dim + SLAB] = decay[:, None]


def followed(s: Tensor, k: Tensor, e: Tensor, decay: Tensor) -> Tensor:
    return decay[:, None, None] * s + k[:, :, None] * e[:, None, :]


def correction(s: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    predicted = torch.einsum("hkv,hk->hv", decay[:, None, None] * s, k)
    return beta[:, None] * (v - predicted)


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803
    softplus = torch.logaddexp(a.double() + dt_bias.double(), torch.zeros((), dtype=F64))
    return torch.exp(-torch.exp(A_log.double()) * softplus), torch.sigmoid(b.double())


def convolved(past: Tensor, u: Tensor, conv: Tensor) -> Tensor:
    """u [tokens, C] behind past [kernel - 1, C] -> [tokens, C]"""
    taps = conv.double()
    rows = torch.cat([past, u])
    y = sum((taps[j] * rows[j : j + len(u)] for j in range(len(taps))), torch.zeros_like(u))
    return y / (1 + torch.exp(-y))


def heads_of(a: SimpleNamespace, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y [tokens, C] -> q, k [tokens, HV, DK], v [tokens, HV, DV]"""
    keys, heads = a.key_heads * a.key_dim, len(a.A_log)
    q, k = (part.unflatten(1, (a.key_heads, -1)) for part in (y[:, :keys], y[:, keys : 2 * keys]))
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    repeats = heads // a.key_heads
    q, k = (x.repeat_interleave(repeats, dim=1) for x in (q / a.key_dim**0.5, k))
    return q, k, y[:, 2 * keys :].unflatten(1, (heads, -1))


def run(a: SimpleNamespace) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Of each sequence its tokens, their results, and how large its state was, at most.

    The states are written.
    """
    begins = a.query_start_loc.tolist()
    decays, betas = gates(a.a, a.b, a.A_log, a.dt_bias)
    for i, (slot, replays, drafts) in enumerate(a.state_steps.tolist()):
        tokens = slice(begins[i], begins[i + 1])
        count, before = tokens.stop - tokens.start, len(a.conv) - 1
        fresh = int(a.seq_lens[i]) == count
        states = States(a.states, slot, a.layer)
        u, s = a.qkv[tokens].double(), states.read()
        past = states.inputs[replays : replays + before].double()
        if fresh:
            past, s = torch.zeros_like(past), torch.zeros_like(s)
        for number in range(replays):
            s = followed(s, *states.draft(number))
        q, k, v = heads_of(a, convolved(past, u, a.conv))
        certain, largest = s, s.norm(dim=1).amax(0)
        out = torch.zeros(count, *v.shape[1:], dtype=F64)
        for t in range(count):
            decay, beta = decays[tokens][t], betas[tokens][t]
            e = correction(s, k[t], v[t], decay, beta)
            s = followed(s, k[t], e, decay)
            out[t] = torch.einsum("hkv,hk->hv", s, q[t])
            largest = largest.maximum(s.norm(dim=1).amax(0)).maximum(v[t].abs().amax(0))
            if t < count - drafts:
                certain = s
            else:
                states.keep(t - (count - drafts), k[t], e, decay)
        states.write(certain)
        inputs = torch.cat([past, u])[count - drafts :]
        states.inputs[: len(inputs)] = inputs[: before + drafts]
        yield tokens, out.flatten(1), largest.max()


def delta_net(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv: Tensor,
    A_log: Tensor,  # noqa: N803
    dt_bias: Tensor,
    states: list[Tensor],
    layer: int,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    state_steps: Tensor,
    key_heads: int,
    key_dim: int,
) -> Tensor:
    given = SimpleNamespace(**locals())
    out = torch.empty(len(qkv), qkv.shape[1] - 2 * key_heads * key_dim)
    for tokens, result, _ in run(given):
        out[tokens] = result
    return out


def delta_net_bound(args: Arguments, expected: Tensor) -> Tensor:
    """Errors of a state add up: a token's update, decay (1 - beta k k^T), makes none larger.

    Each token adds that of S^T k, a sum of DK products, of k and q, which the convolution's own
    roundings shift by as much as their lengths are smaller than their terms', and of decay and
    beta, whose exponents are off by some roundings where exp is at most 1 / e. What the states were
    before has the size of what they are.
    """
    a = bound("delta_net", args, {})
    taps, keys = len(a.conv), a.key_heads * a.key_dim
    terms = a.conv.double().abs().amax(0)
    if len(a.qkv):
        terms = terms * a.qkv.double().abs().amax(0)
    largest = float(a.states[0].double().norm(dim=-2).max())
    condition = 1.0
    for tokens, _, size in run(SimpleNamespace(**{**vars(a), "states": [
        t.clone() for t in a.states
    ]})):  # fmt: skip
        largest = max(largest, float(size))
        if tokens.stop > tokens.start:
            y = convolved(torch.zeros(taps - 1, a.qkv.shape[1], dtype=F64), a.qkv[tokens].double(),
                          a.conv)[:, : 2 * keys].unflatten(1, (-1, a.key_dim))  # fmt: skip
            sizes = (taps * terms)[: 2 * keys].view(-1, a.key_dim).norm(dim=-1)
            condition = max(condition, float((sizes / (y.square().sum(-1) + 1e-6).sqrt()).max()))
    steps = int(a.query_start_loc.diff().max()) + a.states[2].shape[2] if len(a.seq_lens) else 1
    each = (a.key_dim + 2 * (taps + 4) * condition + 60) * U + 4 * EXP_ERROR
    return torch.full(expected.shape, steps * each * max(1.0, largest)) + smallest(torch.float32)


def delta_net_arguments(
    g: torch.Generator,
    *,
    new: tuple[int, ...] = (1, 3, 0, 2),
    lengths: tuple[int, ...] = (7, 3, 4, 12),
    steps: tuple[tuple[int, int], ...] | None = None,
    dtype: torch.dtype = torch.float32,
    key_heads: int = 1,
    value_heads: int = 2,
    key_dim: int = 32,
    value_dim: int = 32,
    kernel: int = 4,
    layers: int = 2,
    drafts: int = 3,
) -> Arguments:
    """steps: (replays, drafts) of every sequence; None: as many of both as may be."""
    heads, channels = value_heads, 2 * key_heads * key_dim + value_heads * value_dim
    tokens, slots = sum(new), len(new) + 2
    states = random_states(
        g, slots, layers, heads, key_dim, value_dim, kernel, channels, drafts=drafts
    )
    if steps is None:
        steps = tuple(
            (drafts if n > k else 0, min(drafts, k)) for k, n in zip(new, lengths, strict=True)
        )
    order = torch.randperm(slots, generator=g).tolist()
    rows = [[slot, *step] for slot, step in zip(order, steps, strict=False)]
    return (
        activations(g, tokens, channels, dtype=dtype),
        torch.randn(tokens, heads, generator=g), torch.randn(tokens, heads, generator=g),
        torch.randn(kernel, channels, generator=g) / 2,
        torch.rand(heads, generator=g) * 3 - 2, torch.rand(heads, generator=g) * 3 - 2,
        states, layers - 1, torch.tensor([0, *new]).cumsum(0),
        torch.tensor(lengths, dtype=torch.int64),
        torch.tensor(rows, dtype=torch.int64).view(-1, 3), key_heads, key_dim,
    )  # fmt: skip


def random_states(
    g: torch.Generator, slots: int, layers: int, heads: int, key_dim: int, value_dim: int,
    kernel: int, channels: int, *, drafts: int,
) -> list[Tensor]:  # fmt: skip
    slabs = value_dim // SLAB
    kept = torch.rand(slots, layers, drafts, heads, slabs, key_dim + EXTRA, generator=g) / 4
    for part in (slice(0, key_dim), slice(key_dim + SLAB, None)):  # slabs share key and decay
        kept[..., part] = kept[..., :1, part].clone()
    return [
        torch.randn(slots, layers, heads, slabs, key_dim, SLAB, generator=g) / 4,
        torch.randn(slots, layers, kernel - 1 + drafts, channels, generator=g),
        kept,
    ]


def layers_first(states: Tensor) -> Tensor:
    """The same values as other engines keep them: all slots of a layer together, with gaps."""
    slots, layers, *rest = states.shape
    wide = torch.full((layers, slots, math.prod(rest) + 16), 9.0)
    found = wide[..., : math.prod(rest)].unflatten(2, rest).transpose(0, 1)
    return found.copy_(states)


def _delta_net_samples() -> Built:
    for dtype in FLOATS:
        yield dtype_name(dtype), lambda g, d=dtype: delta_net_arguments(g, dtype=d)
    yield "kernel_2", lambda g: delta_net_arguments(g, kernel=2)
    yield "kernel_8", lambda g: delta_net_arguments(g, kernel=8)
    yield "three_slabs", lambda g: delta_net_arguments(g, value_dim=96, key_heads=2, value_heads=6)
    yield "widest_key", lambda g: delta_net_arguments(g, key_dim=256, value_heads=1)
    yield "no_drafts", lambda g: delta_net_arguments(g, drafts=0)
    yield "some_drafts", lambda g: delta_net_arguments(
        g, steps=((0, 1), (0, 2), (3, 0), (1, 0))
    )  # fmt: skip
    yield "no_tokens", lambda g: delta_net_arguments(g, new=(0, 0), lengths=(0, 5))
    yield "no_sequences", lambda g: delta_net_arguments(g, new=(), lengths=())
    yield "int32_indices", lambda g: (
        lambda *args: (*args[:8], args[8].int(), args[9].int(), *args[10:])
    )(*delta_net_arguments(g))  # fmt: skip
    yield "slots_of_a_layer_together", lambda g: (
        lambda *args: (*args[:6], [layers_first(t) for t in args[6]], *args[7:])
    )(*delta_net_arguments(g))  # fmt: skip
    yield "strided", lambda g: (
        lambda qkv, a, b, *rest: (strided(qkv), strided(a), strided(b), *rest)
    )(*delta_net_arguments(g))  # fmt: skip


def _states(index: int, change: Any) -> Any:
    return lambda a: [change(t) if i == index else t for i, t in enumerate(a["states"])]


def _step(sequence: int, column: int, number: int) -> Any:
    def changed(a: Named) -> Tensor:
        steps: Tensor = a["state_steps"].clone()
        steps[sequence, column] = number
        return steps

    return changed


def _inside_states(name: str) -> Any:
    return lambda a: a["states"][0].view(-1)[: a[name].numel()].view(a[name].shape)


_DELTA_NET_REJECTIONS: Rejections = [
    ({"qkv": to("qkv", F64)}, "qkv", FLOATS_TEXT + "float64"),
    ({"qkv": add_dim("qkv")}, "qkv", "with 2 dimensions"),
    ({"qkv": narrow("qkv")}, "conv", "of shape [4, 127], got [4, 128]"),
    ({"qkv": narrow("qkv", 0)}, "a", "of shape [5, 2], got [6, 2]"),
    ({"qkv": _inside_states("qkv")}, "qkv", "in its own memory"),
    ({"a": to("a", BF16)}, "a", "of dtype float32, got bfloat16"),
    ({"a": narrow("a")}, "a", "of shape [6, 2], got [6, 1]"),
    ({"b": to("b", F64)}, "b", "of dtype float32, got float64"),
    ({"b": narrow("b", 0)}, "b", "of shape [6, 2], got [5, 2]"),
    ({"conv": to("conv", BF16)}, "conv", "of dtype float32"),
    ({"conv": lambda a: a["conv"][0]}, "conv", "with 2 dimensions"),
    ({"conv": lambda a: a["conv"][:1]}, "conv", "with 2 to 8 rows, got 1"),
    ({"conv": lambda a: torch.ones(9, 128)}, "conv", "with 2 to 8 rows, got 9"),
    ({"conv": noncontiguous("conv")}, "conv", "contiguous"),
    ({"conv": lambda a: a["conv"][:3]}, "states[1] (inputs)", "of shape [6, 2, 5, 128]"),
    ({"A_log": to("A_log", F64)}, "A_log", "of dtype float32"),
    ({"A_log": add_dim("A_log")}, "A_log", "with 1 dimension"),
    ({"A_log": noncontiguous("A_log")}, "A_log", "contiguous"),
    ({"A_log": lambda a: torch.ones(3)}, "qkv", "then values, got 128 features"),
    ({"A_log": lambda a: torch.ones(4)}, "the values of a head", "of 32 up to 256, got 16"),
    ({"A_log": lambda a: torch.ones(0)}, "key_heads", "a divisor of the 0 heads"),
    ({"dt_bias": to("dt_bias", BF16)}, "dt_bias", "of dtype float32"),
    ({"dt_bias": narrow("dt_bias")}, "dt_bias", "of shape [2], got [1]"),
    ({"dt_bias": noncontiguous("dt_bias")}, "dt_bias", "contiguous"),
    ({"states": lambda a: a["states"][:2]}, "states", "kept drafts, got 2 tensors"),
    ({"states": lambda a: []}, "states", "kept drafts, got 0 tensors"),
    ({"states": _states(0, lambda t: t.double())}, "states[0] (recurrent)", "of dtype float32"),
    ({"states": _states(0, lambda t: t[0])}, "states[0] (recurrent)", "with 6 dimensions"),
    ({"states": _states(0, lambda t: t[..., :16].contiguous())}, "states[0] (recurrent)",
     "of shape [6, 2, 2, 1, 32, 32]"),
    ({"states": _states(0, strided)}, "states[0] (recurrent)", "contiguous"),
    ({"states": _states(1, lambda t: t.bfloat16())}, "states[1] (inputs)", "of dtype float32"),
    ({"states": _states(1, lambda t: t[:5])}, "states[1] (inputs)", "of shape [6, 2, 6, 128]"),
    ({"states": _states(1, lambda t: t[None])}, "states[1] (inputs)", "with 4 dimensions"),
    ({"states": _states(1, strided)}, "states[1] (inputs)", "contiguous"),
    ({"states": _states(2, lambda t: t.bfloat16())}, "states[2] (kept)", "of dtype float32"),
    ({"states": _states(2, lambda t: t[:, :1].contiguous())}, "states[2] (kept)", "of shape [6, 2"),
    ({"states": _states(2, lambda t: t[0])}, "states[2] (kept)", "with 6 dimensions"),
    ({"states": _states(2, strided)}, "states[2] (kept)", "contiguous"),
    ({"states": _states(0, lambda t: t[:1].expand(t.shape))}, "states[0] (recurrent)",
     "memory of its own for every element, got overlapping strides"),
    ({"layer": value(2)}, "layer", "in [0, 2), got 2"),
    ({"layer": value(-1)}, "layer", "in [0, 2), got -1"),
    ({"query_start_loc": to("query_start_loc", F32)}, "query_start_loc", "of dtype int64 or int32"),
    ({"query_start_loc": narrow("query_start_loc")}, "query_start_loc", "of shape [5]"),
    ({"query_start_loc": lambda a: a["query_start_loc"] + 1}, "query_start_loc", "from 0 to the"),
    ({"query_start_loc": value(torch.tensor([0, 4, 1, 6, 6]))}, "query_start_loc", "ascending"),
    ({"seq_lens": to("seq_lens", F32)}, "seq_lens", "of dtype int64 or int32"),
    ({"seq_lens": add_dim("seq_lens")}, "seq_lens", "with 1 dimension"),
    ({"seq_lens": value(torch.tensor([7, 2, 4, 12]))}, "seq_lens", "the 3 new tokens, got 2 for"),
    ({"state_steps": to("state_steps", I32)}, "state_steps", "of dtype int64, got int32"),
    ({"state_steps": narrow("state_steps", 0)}, "state_steps", "of shape [4, 3], got [3, 3]"),
    ({"state_steps": noncontiguous("state_steps")}, "state_steps", "contiguous"),
    ({"state_steps": _step(1, 0, 6)}, "state_steps", "slots in [0, 6), got 6 for sequence 1"),
    ({"state_steps": _step(1, 0, -1)}, "state_steps", "slots in [0, 6), got -1 for sequence 1"),
    ({"state_steps": lambda a: _step(1, 0, int(a["state_steps"][3, 0]))(a)}, "state_steps",
     "with different slots, got"),
    ({"state_steps": _step(1, 1, 1)}, "state_steps", "replays from 0 to 0, got 1 for sequence 1"),
    ({"state_steps": _step(0, 1, 4)}, "state_steps", "replays from 0 to 3, got 4 for sequence 0"),
    ({"state_steps": _step(0, 1, -1)}, "state_steps", "replays from 0 to 3, got -1 for"),
    ({"state_steps": _step(0, 2, 2)}, "state_steps", "drafts from 0 to 1, got 2 for sequence 0"),
    ({"state_steps": _step(2, 2, 1)}, "state_steps", "drafts from 0 to 0, got 1 for sequence 2"),
    ({"state_steps": _step(3, 2, -1)}, "state_steps", "drafts from 0 to 2, got -1 for"),
    ({"key_heads": value(0)}, "key_heads", "a divisor of the 2 heads of A_log, got 0"),
    ({"key_heads": value(3)}, "key_heads", "a divisor of the 2 heads of A_log, got 3"),
    ({"key_heads": value(2)}, "qkv", "then values, got 128 features"),
    ({"key_dim": value(33)}, "key_dim", "a multiple of 32 up to 256, got 33"),
    ({"key_dim": value(0)}, "key_dim", "a multiple of 32 up to 256, got 0"),
    ({"key_dim": value(288)}, "key_dim", "a multiple of 32 up to 256, got 288"),
]  # fmt: skip

spec(
    delta_net,
    samples=_delta_net_samples,
    large=[
        lambda g: delta_net_arguments(
            g, new=(1, 37, 9), lengths=(700, 37, 300), steps=((2, 0), (0, 5), (0, 8)), key_heads=2,
            value_heads=6, key_dim=96, value_dim=64, drafts=8,
        ),
    ],
    calls={
        "": Call(
            lambda g: dict(zip(names("delta_net"), delta_net_arguments(g), strict=True)),
            _DELTA_NET_REJECTIONS,
        ),
    },
    bound=delta_net_bound,
    mutates=frozenset({"states"}),
    overlapping=lambda g, dtype: delta_net_arguments(g),
    empty={
        "no_slots": lambda: positional("delta_net", **{
            **dict(zip(names("delta_net"), delta_net_arguments(
                torch.Generator(), new=(), lengths=()), strict=True)),
            "states": [torch.empty(0, 2, 2, 1, 32, 32), torch.empty(0, 2, 6, 128),
                       torch.empty(0, 2, 3, 2, 1, 80)],
        }),
    },
)  # fmt: skip
