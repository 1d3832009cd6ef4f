"""A program interpreted by single ops over modules: `run` of each block of its listing.

The readable reference of what C++ runs as one call: equal to it bit for bit. It also runs what C++
does not know: projections of other classes, and caches that another engine keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bitnet_ops import ops
from bitnet_ops.blocks.block import Line
from bitnet_ops.blocks.listing import KINDS, Listing
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.digits import repeated
from bitnet_ops.nn.lora import LoraWeight, add_side_path

# What puts keys and values F [..., KV, D] into the cache of an attention block, by its number, and
# returns the attention of the queries F [..., H, D] over it, in their shape.
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# Side paths by the name of their projection, and the rows of the tokens that take them; None: all.
Side: TypeAlias = "tuple[Tensor | None, Mapping[str, LoraWeight]]"


@dataclass(frozen=True)
class Composed:
    """What the blocks of one call share.

    module: the module that a name stands for. positions: int64 [...], where the tokens stand, or
    [3, ...], in time, height and width.
    store: what puts keys and values [..., KV, D] into the cache of a block that does not attend, by
    its number. embedded: what entered the first block.
    ropes: frequencies f32 [head_dim / 2] and attention factor, by the name of a rope. states: what
    blocks keep for sequences, by name. step: whose tokens these are, where a block has states. ops:
    those that all is made of.
    """

    listing: Listing
    module: Callable[[str], Any]
    positions: Tensor
    ropes: Mapping[str, tuple[Tensor, float]]
    attend: Attend
    sides: Sequence[Side] = ()
    states: Mapping[str, Tensor] = field(default_factory=dict)
    step: StepBatch | None = None
    ops: Any = field(default_factory=lambda: ops)
    store: Callable[[int, Tensor, Tensor], None] | None = None
    embedded: Tensor = field(default_factory=lambda: torch.empty(0))

    def run(self, x: Tensor) -> Tensor:
        """x f32 [..., hidden] behind all blocks but the head."""
        numbers = Counter[str]()
        shared = replace(self, embedded=x)
        for line in self.listing.blocks:
            if line.kind != "head":
                x = KINDS[line.kind].run(shared, line, numbers[line.kind], x)
                numbers[line.kind] += 1
        return x

    def sections(self, rope: str) -> Sequence[int]:
        """How many pairs turn by time, height and width; empty: all by time."""
        line = next(line for line in self.listing.ropes if line.name("name") == rope)
        return [int(count) for count in (line.name("sections") or "").split(",") if count]

    def eps(self, name: str = "eps") -> float:
        model = self.listing.model
        return model.number(name, model.number("eps"))

    def rounded(self, x: Tensor) -> Tensor:
        return x.to(getattr(torch, str(self.listing.model.keys["dtype"])))

    def tensor(self, name: str) -> Tensor:
        """A dense tensor by its name."""
        module, _, own = name.rpartition(".")
        found: Tensor = getattr(self.module(module), own)
        return found

    def norm(self, line: Line, key: str, x: Tensor, eps: str = "eps") -> Tensor:
        """The norm that a key names; x itself where the line has none."""
        name = line.name(key)
        return x if name is None else self.ops.rms_norm(x, self.module(name).weight, self.eps(eps))

    def project(self, line: Line, key: str, x: Tensor) -> Tensor:
        """A projection with what lies inside it, its norm first, its bias last, and beside it."""
        name = str(line.keys[key])
        module: nn.Module = self.module(name)
        if (inside := module._modules.get("rms_norm")) is not None:
            x = self.ops.rms_norm(x, inside.get_buffer("weight"), self.eps("linear_norm_eps"))
        y: Tensor = module(
            repeated(KINDS[line.kind].input(line, key, x), line.integer("digits", 1))
        )
        for rows, paths in self.sides:
            if (lora := paths.get(name)) is None:
                continue
            if rows is None:
                y = add_side_path(y, x, lora, self.ops)
            else:
                y = y.index_copy(0, rows, add_side_path(y[rows], x[rows], lora, self.ops))
        return y
