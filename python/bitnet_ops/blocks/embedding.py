"""The block `embedding`: token ids become the residual stream, before a program begins."""

from __future__ import annotations

from bitnet_ops.blocks.block import Block, Line, Tensors, TensorSpec, Value
from bitnet_ops.blocks.head import EMBEDDING
from bitnet_ops.config import ModelConfig


class Embedding(Block):
    """The rows of `weight` that tokens name, times `scale`."""

    kind = "embedding"

    def line(self, c: ModelConfig, layer: int) -> Line:
        scale = c.scalings.embedding
        keys: dict[str, Value] = {"weight": EMBEDDING, "vocab": c.vocab_size, "scale": scale}
        return Line(self.kind, keys)

    def tensors(self, line: Line, model: Line) -> dict[str, TensorSpec]:
        t = Tensors(line, model)
        t.matrix("weight", line.integer("vocab"), model.integer("hidden"))
        return t.found
