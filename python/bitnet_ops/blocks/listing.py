"""A family's config as a program: the listing of blocks that C++ binds and composed.py interprets.

The names that keys hold are those of modules in the decoder, which are Hugging Face's.
docs/reference/program.md lists every kind of line and its keys. What a model is made of is read off
the listing: its tensors, and what it keeps between steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from bitnet_ops.blocks.attention import GLOBAL_ROPE, LOCAL_ROPE, Attention
from bitnet_ops.blocks.block import Block, Buffer, Line, TensorSpec, Value
from bitnet_ops.blocks.delta_net import GatedDeltaNet
from bitnet_ops.blocks.draft import DraftInput, DraftKeys, attention_line, mlp_line
from bitnet_ops.blocks.embedding import Embedding
from bitnet_ops.blocks.head import Head
from bitnet_ops.blocks.mlp import Mlp
from bitnet_ops.config import ModelConfig, Rotation
from bitnet_ops.config.attention import AttentionPolicy

KINDS: Mapping[str, Block] = {
    block.kind: block
    for block in (
        *(Embedding(), Attention(), GatedDeltaNet(), Mlp()),
        *(DraftKeys(), DraftInput(), Head()),
    )
}


class Kept(NamedTuple):
    """A buffer, and its layers: one for every line of the kinds that keep it.

    One for pages has the layers of the keys that it bounds.
    """

    buffer: Buffer
    layers: int


def kept_by(lines: Sequence[Line]) -> dict[str, Kept]:
    """What lines keep between steps, by name. Raises ValueError for one name of two forms."""
    found: dict[str, Buffer] = {}
    kinds: dict[str, set[str]] = {}
    counts = Counter(line.kind for line in lines)
    for line in lines:
        for buffer in KINDS[line.kind].state(line):
            kinds.setdefault(buffer.name, set()).add(line.kind)
            if (one := found.setdefault(buffer.name, buffer)) != buffer:
                raise ValueError(
                    f"listing: expected buffers {buffer.name} of one form, got {one} and {buffer}"
                )
    layers = {name: sum(counts[kind] for kind in kinds[name]) for name in found}
    return {
        name: Kept(buffer, layers["key" if buffer.per == "page" else name])
        for name, buffer in found.items()
    }


@dataclass(frozen=True)
class Listing:
    """A whole program. `str` of it is the text that `ops.bind_program` takes.

    embedding: what gives the tokens that enter it, no line of the text. rotation: of the ternary
    matrices, as config/hybrid.py has it.
    """

    model: Line
    ropes: tuple[Line, ...]
    blocks: tuple[Line, ...]
    lora: tuple[Line, ...] = field(default=())
    embedding: Line | None = None
    rotation: Rotation | None = None

    def __iter__(self) -> Iterator[Line]:
        yield self.model
        yield from self.ropes
        yield from self.blocks
        yield from self.lora

    def __str__(self) -> str:
        return "\n".join(map(str, self)) + "\n"

    @property
    def of_states(self) -> Listing:
        """The same program with the rows behind the last norm as its result, not logits."""
        *blocks, head = self.blocks
        return replace(self, blocks=(*blocks, Line("head", {"norm": head.keys["norm"]})))

    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor of the model, in file order, under its Hugging Face name."""
        found: dict[str, TensorSpec] = {}
        *blocks, head = self.blocks
        for line in blocks if self.embedding is None else (self.embedding, *blocks):
            found |= KINDS[line.kind].tensors(line, self.model)
        for name, shape in self.rotation.shapes.items() if self.rotation else ():
            found[name] = TensorSpec("dense", shape)
        return found | KINDS[head.kind].tensors(head, self.model)

    @cached_property
    def kept(self) -> Mapping[str, Kept]:
        """What is kept between steps, by name."""
        return kept_by(self.blocks)

    @cached_property
    def _reads(self) -> frozenset[AttentionPolicy]:
        found = (KINDS[line.kind].reads(line) for line in self.blocks)
        return frozenset(policy for policy in found if policy is not None)

    def unread(self, position: int) -> tuple[int, int]:
        """Positions [begin, end) that no token from `position` on reads in any block."""
        ranges = [policy.unread(position) for policy in self._reads]
        begin, end = (max(r[0] for r in ranges), min(r[1] for r in ranges)) if ranges else (0, 0)
        return begin, max(begin, end)

    def added(self) -> frozenset[str]:
        """The projections whose results are added to the residual stream."""
        keys = ((line, KINDS[line.kind].added) for line in self.blocks)
        return frozenset(str(line.keys[key]) for line, key in keys if key is not None)


@lru_cache(maxsize=16)
def listing(config: ModelConfig, dtype: str = "float32", attention_factor: float = 1.0) -> Listing:
    """The program of a model of `config` that computes on `dtype`, "float32" or "bfloat16"."""
    c = config
    model: dict[str, Value] = {"hidden": c.hidden_size, "dtype": dtype, "eps": c.rms_norm_eps}
    if c.sub_norm_eps is not None:
        model["sub_norm_eps"] = c.sub_norm_eps
    if c.linear_norms:
        model["linear_norm_eps"] = c.linear_norm_eps
    ropes = [_rope(GLOBAL_ROPE, c.rotary_dim, attention_factor, c.rope_sections)]
    if c.scalings.local:
        ropes.append(_rope(LOCAL_ROPE, c.rotary_dim, 1.0))
    kinds = [
        (kind, layer)
        for layer in range(c.num_hidden_layers)
        for kind in ("delta_net" if c.is_delta_net(layer) else "attention", "mlp")
    ]
    if c.draft is not None:
        kinds.append(("draft_keys", -1))
    return Listing(
        Line("model", model),
        tuple(ropes),
        tuple(KINDS[kind].line(c, layer) for kind, layer in [*kinds, ("head", -1)]),
        embedding=KINDS["embedding"].line(c, -1),
        rotation=c.rotation,
    )


@lru_cache(maxsize=16)
def draft_listing(
    config: ModelConfig, dtype: str = "float32", attention_factor: float = 1.0
) -> Listing:
    """The program of the MTP head of such a model: rows behind its layer, before its last norm.

    Its cache is the last layer of the model's.
    """
    lines = listing(config, dtype, attention_factor)
    blocks = KINDS["draft_input"].line(config, -1), attention_line(config), mlp_line(config)
    return replace(lines, blocks=(*blocks, Line("head", {})))


def _rope(name: str, dim: int, factor: float, sections: Sequence[int] | None = None) -> Line:
    keys: dict[str, Value] = {"name": name, "dim": dim, "inv_freq": f"rope.{name}"}
    keys["factor"] = factor
    if sections is not None:
        keys["sections"] = ",".join(map(str, sections))
    return Line("rope", keys)
