"""What the options of `bench` may ask for: shapes, formats, counts. Read without torch.

Dimensions carry the Hugging Face names of a model's config.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bitnet_ops.dummy.configs import CONFIGS
from bitnet_ops.nn import storage

WEIGHT_FORMATS = storage.FORMATS
USUAL = storage.USUAL_FORMAT  # what models are loaded in
HEAD_FORMATS = ("bf16", *(n for n, row in storage.HEAD_FORMATS.items() if row.quantized))
KV_DTYPES = tuple(n for n in storage.KV_TYPES if n != "float32")
_MAX_FEATURES = 131072


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of one decoder layer and of the head."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    @property
    def q_features(self) -> int:
        return self.num_attention_heads * self.head_dim

    def linears(self, *, quick: bool) -> list[tuple[int, int]]:
        """(N, K) of the ternary matrices, each once; gate and up as one matrix unless quick."""
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes = [(self.num_key_value_heads * self.head_dim, hidden), (self.q_features, hidden)]
        shapes += [(inner, hidden)] if quick else [(inner, hidden), (2 * inner, hidden)]
        shapes += [(hidden, self.q_features), (hidden, inner)]
        return list(dict.fromkeys(shapes))


_B = CONFIGS["2b-4t"]
MODELS = {
    "2b-4t": ModelShape(
        _B["hidden_size"],
        _B["intermediate_size"],
        _B["num_attention_heads"],
        _B["num_key_value_heads"],
        _B["hidden_size"] // _B["num_attention_heads"],
        _B["vocab_size"],
    ),
    "demo": ModelShape(256, 768, 4, 2, 64, 4096),  # bitnet_ops/data/demo
}


@dataclass(frozen=True)
class ShapeSet:
    """What `--shapes` asks for: whole models by name, and single matrices (N, K)."""

    models: dict[str, ModelShape]
    matrices: list[tuple[int, int]]


def parse_shapes(text: str) -> ShapeSet:
    """Read `--shapes`: model names and NxK, separated by commas."""
    models, matrices = {}, []
    for word in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word)
        if word in MODELS:
            models[word] = MODELS[word]
        elif match and int(match[2]) <= _MAX_FEATURES:
            matrices.append((int(match[1]), int(match[2])))
        else:
            raise ValueError(
                f"--shapes: expected names among {', '.join(MODELS)} or NxK such as 2560x6912 with "
                f"K up to {_MAX_FEATURES}, got '{word}'"
            )
    return ShapeSet(models, matrices)


def parse_counts(option: str, text: str, maximum: int, minimum: int = 1) -> tuple[int, ...]:
    """Read a list of integers such as "1,4,32", each from `minimum` to `maximum`."""
    counts = []
    for word in text.split(","):
        if not word.isdigit() or not minimum <= int(word) <= maximum:
            raise ValueError(
                f"{option}: expected integers from {minimum} to {maximum}, got '{word}'"
            )
        counts.append(int(word))
    return tuple(dict.fromkeys(counts))


def parse_words(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Read a list of words separated by commas, each one of `known`."""
    words = text.split(",")
    for word in words:
        if word not in known:
            raise ValueError(f"{option}: expected names among {', '.join(known)}, got '{word}'")
    return tuple(dict.fromkeys(words))
