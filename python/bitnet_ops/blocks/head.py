"""The block `head`, the last one: norm and the matrix of the vocabulary."""

from __future__ import annotations

from bitnet_ops.blocks.block import Block, Line, Tensors, TensorSpec, Value
from bitnet_ops.config import ModelConfig

EMBEDDING = "model.embed_tokens"


class Head(Block):
    """Logits of norm(x); without `weight` and `vocab` norm(x) itself, without `norm` x."""

    kind = "head"

    def line(self, c: ModelConfig, layer: int) -> Line:
        weight = EMBEDDING if c.tie_word_embeddings else "lm_head"
        keys: dict[str, Value] = {"norm": "model.norm", "weight": weight, "vocab": c.vocab_size}
        return Line(self.kind, keys)

    def tensors(self, line: Line, model: Line) -> dict[str, TensorSpec]:
        t = Tensors(line, model)
        t.norm("norm", model.integer("hidden"))
        if "weight" in line.keys:
            t.matrix("weight", line.integer("vocab"), model.integer("hidden"))
        return t.found
