"""A program interpreted by single ops: one function a kind of block, over modules.

The readable reference of what C++ runs as one call: equal to it bit for bit. It also runs what C++
does not know: projections of other classes, and caches that another engine keeps.
"""

from __future__ import annotations

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

    def run(self, x: Tensor) -> Tensor:
        """x f32 [..., hidden] behind all blocks but the head."""
        attention_blocks = 0
        for line in self.listing.blocks:
            if line.kind == "attention":
                x = attention(self, line, attention_blocks, x)
                attention_blocks += 1
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
        y: Tensor = module(x)
        for rows, paths in self.sides:
            if (lora := paths.get(name)) is None:
                continue
            if rows is None:
                y = add_side_path(y, x, lora)
            else:
                y = y.index_copy(0, rows, add_side_path(y[rows], x[rows], lora))
        return y


def attention(c: Composed, line: Line, number: int, x: Tensor) -> Tensor:
    """x + post_norm(o(sub_norm(attention(rope(q), rope(k), v)))) of h = norm(x)."""
    dim = line.integer("head_dim")
    h = c.norm(line, "norm", c.rounded(x))
    q, k, v = (c.project(line, key, h).unflatten(-1, (-1, dim)) for key in "qkv")
    q, k = c.norm(line, "q_norm", q), c.norm(line, "k_norm", k)
    where = c.positions, *c.ropes[str(line.keys["rope"])]
    a = c.attend(number, ops.rope(q, *where), ops.rope(k, *where), v).flatten(-2)
    y = c.project(line, "o", c.norm(line, "sub_norm", a, "sub_norm_eps"))
    return x + c.norm(line, "post_norm", y)


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
