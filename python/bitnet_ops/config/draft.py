"""A draft head (multi-token prediction): what a model file says of it, its tensors.

It is one layer of the decoder's kind over the trunk's own states, with the trunk's embedding and
output head. Names are those of Qwen3.5's checkpoints (transformers leaves these tensors out; vLLM
`qwen3_5_mtp` reads them):

    x = fc [ norm(embed(token t + 1); pre_fc_norm_embedding) ; norm(h_t; pre_fc_norm_hidden) ]
    y = layers.0(x);   logits of token t + 2 = output head (norm(y; norm))

h_t: the trunk's state behind its output norm. It must not know torch, tensors or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitnet_ops.config.keys import PRIVATE_BLOCK
from bitnet_ops.config.values import integer, reject

PREFIX = "mtp."  # of every tensor of a head in a model file
KEY = "draft_head"  # of the private block
FEEDS = ("after", "before")
# of a weight (nn/digits.py): of a head that was trained ternary, and of others
DIGITS = (1, 3)
_LAYER = f"{PREFIX}layers.0."
FC = f"{PREFIX}fc"
MATRICES = (
    FC,
    *(f"{_LAYER}self_attn.{name}_proj" for name in "qkvo"),
    *(f"{_LAYER}mlp.{name}_proj" for name in ("gate", "up", "down")),
)
QK_NORMS = (f"{_LAYER}self_attn.q_norm", f"{_LAYER}self_attn.k_norm")
SUB_NORMS = (f"{_LAYER}self_attn.attn_sub_norm", f"{_LAYER}mlp.ffn_sub_norm")
ORDER = (  # of a file
    FC,
    f"{PREFIX}pre_fc_norm_embedding",
    f"{PREFIX}pre_fc_norm_hidden",
    f"{_LAYER}input_layernorm",
    *MATRICES[1:5],
    *QK_NORMS,
    SUB_NORMS[0],
    f"{_LAYER}post_attention_layernorm",
    *MATRICES[5:],
    SUB_NORMS[1],
    f"{PREFIX}norm",
)
NORMS = tuple(module for module in ORDER if module not in MATRICES)
_REMEDY = "convert the model again"


@dataclass(frozen=True)
class DraftConfig:
    """What a model file says of its draft head.

    feed: what the next draft is fed as the state, the layer's output "after" the head's norm or
    "before" it. digits: ternary digits of a weight (nn/digits.py). intermediate_size: of its MLP.
    rotated: modules among MATRICES whose input is turned by the trunk's rotation of that width.
    origin: where the head comes from, for people.
    """

    intermediate_size: int
    feed: str = "after"
    digits: int = DIGITS[-1]
    rotated: tuple[str, ...] = ()
    origin: str = ""

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` reads."""
        return {
            "feed": self.feed,
            "digits": self.digits,
            "intermediate_size": self.intermediate_size,
            "rotated": list(self.rotated),
            "origin": self.origin,
        }

    @classmethod
    def from_dict(cls, found: object) -> DraftConfig:
        """Read the value of KEY. Raises UnsupportedModelError for an entry of another form."""
        name = f"{PRIVATE_BLOCK}.{KEY}"
        if not isinstance(found, Mapping):
            raise reject(name, str(found)[:60], "to be an object", _REMEDY)
        known = cls(1).to_dict()
        if unknown := sorted(str(key) for key in found if key not in known):
            raise reject(name, unknown[0][:60], f"to have {', '.join(known)} alone", _REMEDY)
        feed, digits = found.get("feed", "after"), found.get("digits", DIGITS[-1])
        if feed not in FEEDS:
            expected = f"to be {' or '.join(map(repr, FEEDS))}"
            raise reject(f"{name}.feed", str(feed)[:60], expected, _REMEDY)
        if type(digits) is not int or digits not in DIGITS:
            expected = f"to be {' or '.join(map(str, DIGITS))}"
            raise reject(f"{name}.digits", str(digits)[:60], expected, _REMEDY)
        rotated, origin = found.get("rotated", []), found.get("origin", "")
        if not isinstance(rotated, list) or not set(map(str, rotated)) <= set(MATRICES):
            expected = "to be a list of matrices of the head"
            raise reject(f"{name}.rotated", str(rotated)[:60], expected, _REMEDY)
        if not isinstance(origin, str):
            raise reject(f"{name}.origin", str(origin)[:60], "to be a text", _REMEDY)
        size = integer(found, "intermediate_size")
        return cls(size, feed, digits, tuple(rotated), origin)


def draft_config(config: Mapping[str, Any]) -> DraftConfig | None:
    """Of a model file's config; None for a file without a draft head.

    Raises UnsupportedModelError for an entry of another form.
    """
    block = config.get(PRIVATE_BLOCK)
    found = block.get(KEY) if isinstance(block, Mapping) else None
    return None if found is None else DraftConfig.from_dict(found)
