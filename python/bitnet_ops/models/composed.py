"""A program interpreted by single ops: one function a kind of block, over modules.

The readable reference of what C++ runs as one call: equal to it bit for bit. It also runs what C++
does not know: projections of other classes, and caches that another engine keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bitnet_ops import ops
from bitnet_ops.models.listing import Line, Listing
from bitnet_ops.nn.lora import LoraWeight, add_side_path

# What puts keys and values F [..., KV, D] into the cache of an attention block, by its number, and
# returns the attention of the queries F [..., H, D] over it, in their shape.
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# What runs qkv F [..., C] and a, b f32 [..., HV] of a block delta_net, by its number and its line,
# through its convolution and its states, and returns f32 [..., HV * DV].
Mix: TypeAlias = Callable[[int, Line, Tensor, Tensor, Tensor], Tensor]
# Side paths by the name of their projection, and the rows of the tokens that take them; None: all.
Side: TypeAlias = "tuple[Tensor | None, Mapping[str, LoraWeight]]"

_GATED = {"silu": ops.silu_and_mul, "gelu_pytorch_tanh": ops.gelu_tanh_and_mul}


@dataclass(frozen=True)
class Composed:
    """What the blocks of one call share.

    module: the module that a name stands for. positions: int64 [...], where the tokens stand.
    ropes: frequencies f32 [head_dim / 2] and attention factor, by the name of a rope.
    """

    listing: Listing
    module: Callable[[str], Any]
    positions: Tensor
    ropes: Mapping[str, tuple[Tensor, float]]
    attend: Attend
    sides: Sequence[Side] = ()
    mix: Mix | None = None

    def run(self, x: Tensor) -> Tensor:
        """x f32 [..., hidden] behind all blocks but the head."""
        attention_blocks = delta_blocks = 0
        for line in self.listing.blocks:
            if line.kind == "attention":
                x = attention(self, line, attention_blocks, x)
                attention_blocks += 1
            elif line.kind == "delta_net":
                x = delta_net(self, line, delta_blocks, x)
                delta_blocks += 1
            elif line.kind == "mlp":
                x = mlp(self, line, x)
        return x

    def eps(self, name: str = "eps") -> float:
        model = self.listing.model
        return model.number(name, model.number("eps"))

    def rounded(self, x: Tensor) -> Tensor:
        return x.to(getattr(torch, str(self.listing.model.keys["dtype"])))

    def norm(self, line: Line, key: str, x: Tensor, eps: str = "eps") -> Tensor:
        """The norm that a key names; x itself where the line has none."""
        name = line.name(key)
        return x if name is None else ops.rms_norm(x, self.module(name).weight, self.eps(eps))

    def project(self, line: Line, key: str, x: Tensor) -> Tensor:
        """A projection with what lies inside it, its norm first, its bias last, and beside it."""
        name = str(line.keys[key])
        module: nn.Module = self.module(name)
        if (inside := module._modules.get("rms_norm")) is not None:
            x = ops.rms_norm(x, inside.get_buffer("weight"), self.eps("linear_norm_eps"))
        y: Tensor = module(kept_inputs(line, x) if key == "down" else x)
        for rows, paths in self.sides:
            if (lora := paths.get(name)) is None:
                continue
            if rows is None:
                y = add_side_path(y, x, lora)
            else:
                y = y.index_copy(0, rows, add_side_path(y[rows], x[rows], lora))
        return y


def attention(c: Composed, line: Line, number: int, x: Tensor) -> Tensor:
    """x + post_norm(o(sub_norm(sigmoid(gate) * attention(rope(q), rope(k), v)))) of h = norm(x).

    Without `output_gate` there is no gate.
    """
    dim, gated = line.integer("head_dim"), line.integer("output_gate")
    h = c.norm(line, "norm", c.rounded(x))
    q, k, v = (c.project(line, key, h) for key in "qkv")
    q, k, v = (
        q.unflatten(-1, (-1, dim * (1 + gated))),
        *(t.unflatten(-1, (-1, dim)) for t in (k, v)),
    )
    q, gate = q[..., :dim].contiguous(), q[..., dim:].flatten(-2)
    q, k = c.norm(line, "q_norm", q), c.norm(line, "k_norm", k)
    q, k = (_turned(c, line, heads) for heads in (q, k))
    a = c.attend(number, q, k, v).flatten(-2)
    if gated:
        a = ops.gated(gate, a, "sigmoid")
    y = c.project(line, "o", c.norm(line, "sub_norm", a, "sub_norm_eps"))
    return x + c.norm(line, "post_norm", y)


def _turned(c: Composed, line: Line, heads: Tensor) -> Tensor:
    """Heads by their positions, in the features for which the rope has frequencies."""
    inv_freq, factor = c.ropes[str(line.keys["rope"])]
    first, rest = heads.tensor_split([2 * len(inv_freq)], dim=-1)
    first = ops.rope(first.contiguous(), c.positions, inv_freq, factor)
    return torch.cat([first, rest], dim=-1) if rest.shape[-1] else first


def delta_net(c: Composed, line: Line, number: int, x: Tensor) -> Tensor:
    """x + out(gated_norm(heads) * silu(z)), heads of the delta rule, of h = norm(x)."""
    assert c.mix is not None
    h = c.norm(line, "norm", c.rounded(x))
    qkv, z = c.project(line, "qkv", h), c.project(line, "z", h)
    a, b = (ops.lm_head(h, c.module(str(line.keys[key])).weight) for key in "ab")
    heads = c.mix(number, line, qkv, a, b).unflatten(-1, (-1, line.integer("value_dim")))
    heads = c.norm(line, "gated_norm", heads).flatten(-2)
    return x + c.project(line, "out", c.rounded(ops.gated(z.float(), heads, "silu")))


def kept_inputs(line: Line, x: Tensor) -> Tensor:
    """x F [..., K] with 0 where the activation sparsity of the block `mlp` drops its code.

    The largest code of a token stays, and with it the scale of the others. Values that become code
    0 in any case stay, too: so does a row that is not finite.
    """
    keys = line.keys
    if not keys.keys() & {"threshold", "top_k", "max_ratio"}:
        return x
    size = ops.quantize_activations(x)[0].int().abs()
    if "threshold" in keys:
        cut = torch.ceil(127 * torch.tensor(line.number("threshold"), dtype=torch.float32))
        return x.masked_fill((size > 0) & (size < cut), 0)
    k = x.shape[-1]
    count = torch.zeros(*x.shape[:-1], 129, dtype=torch.int64)
    count.scatter_add_(-1, size.long(), torch.ones_like(size, dtype=torch.int64))
    low, high = (
        torch.tensor(float(keys.get("top_k", keys.get(name, 0))), dtype=torch.float32)
        for name in ("min_ratio", "max_ratio")
    )
    ratio = low.double()
    if high > low:
        code = torch.arange(1, 129, dtype=torch.float64)
        weight = count[..., 1:] * code
        total = weight.sum(-1).clamp(min=1)
        entropy = total.log() - (weight * code.log()).sum(-1) / total
        spread = (entropy / math.log(k)).clamp(0, 1) if k > 1 else torch.zeros_like(entropy)
        ratio = ratio + (high - low).double() * spread
    most = torch.ceil(ratio * k).unsqueeze(-1)
    left = count.flip(-1).cumsum(-1).flip(-1)  # codes of at least that magnitude
    largest = size.amax(-1, keepdim=True).clamp(min=1)
    stays = (left <= most) | (torch.arange(129) >= largest)
    stays[..., 0] = False
    cut = stays.int().argmax(-1, keepdim=True)
    return x.masked_fill((size > 0) & (size < cut), 0)


def mlp(c: Composed, line: Line, x: Tensor) -> Tensor:
    """x + post_norm(down(sub_norm(activation(gate(h)) * up(h)))) of h = norm(x)."""
    h = c.norm(line, "norm", c.rounded(x))
    gate, up = c.project(line, "gate", h), c.project(line, "up", h)
    activation = str(line.keys["activation"])
    if activation == "relu2":
        z = ops.relu2_mul(gate, up)
    else:
        z = _GATED[activation](torch.cat([gate, up], dim=-1))
    y = c.project(line, "down", c.norm(line, "sub_norm", z, "sub_norm_eps"))
    return x + c.norm(line, "post_norm", y)
