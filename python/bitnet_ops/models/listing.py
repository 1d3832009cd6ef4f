"""A family's config as a program: the listing of blocks that C++ binds and composed.py interprets.

The names that keys hold are those of modules in the decoder, which are Hugging Face's.
docs/reference/program.md lists every kind of line and its keys. It must not know tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from bitnet_ops.config import ModelConfig
from bitnet_ops.config.attention import POLICY_KEYS

Value: TypeAlias = "str | int | float"


@dataclass(frozen=True)
class Line:
    """One line of a program: its kind, and its keys in their order."""

    kind: str
    keys: Mapping[str, Value]

    def __str__(self) -> str:
        return " ".join([self.kind, *(f"{key}={value}" for key, value in self.keys.items())])

    def name(self, key: str) -> str | None:
        """The name that `key` holds; None where the line has no such key."""
        value = self.keys.get(key)
        return None if value is None else str(value)

    def integer(self, key: str, otherwise: int = 0) -> int:
        return int(self.keys.get(key, otherwise))

    def number(self, key: str, otherwise: float = 1.0) -> float:
        return float(self.keys.get(key, otherwise))

    @property
    def policy(self) -> str:
        """Of an attention block, as `ops.paged_attention` takes it."""
        return " ".join(f"{key}={self.keys[key]}" for key in POLICY_KEYS if key in self.keys)

    def with_keys(self, **keys: Value) -> Line:
        return replace(self, keys={**self.keys, **keys})


@dataclass(frozen=True)
class Listing:
    """A whole program. `str` of it is the text that `ops.bind_program` takes."""

    model: Line
    ropes: tuple[Line, ...]
    blocks: tuple[Line, ...]
    lora: tuple[Line, ...] = field(default=())

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


# Keys that name a projection, and those that name a norm.
PROJECTION_KEYS = ("q", "k", "v", "o", "gate", "up", "down", "qkv", "z", "out")
NORM_KEYS = ("norm", "q_norm", "k_norm", "sub_norm", "post_norm", "gated_norm")
# Those that name a dense matrix or vector of float32.
DENSE_KEYS = ("a", "b", "conv")
VECTOR_KEYS = ("A_log", "dt_bias")
GLOBAL_ROPE, LOCAL_ROPE = "global", "local"


def listing(config: ModelConfig, dtype: str = "float32", attention_factor: float = 1.0) -> Listing:
    """The program of a model of `config` that computes on `dtype`, "float32" or "bfloat16"."""
    c = config
    model: dict[str, Value] = {"hidden": c.hidden_size, "dtype": dtype, "eps": c.rms_norm_eps}
    if c.sub_norm_eps is not None:
        model["sub_norm_eps"] = c.sub_norm_eps
    if c.linear_norms:
        model["linear_norm_eps"] = c.linear_norm_eps
    ropes = [_rope(GLOBAL_ROPE, c.rotary_dim, attention_factor)]
    if c.scalings.local:
        ropes.append(_rope(LOCAL_ROPE, c.rotary_dim, 1.0))
    blocks = []
    for layer in range(c.num_hidden_layers):
        mixer = _delta_net if c.is_delta_net(layer) else _attention
        blocks += [mixer(c, layer), _mlp(c, layer)]
    head = "model.embed_tokens" if c.tie_word_embeddings else "lm_head"
    blocks.append(Line("head", {"norm": "model.norm", "weight": head, "vocab": c.vocab_size}))
    return Listing(Line("model", model), tuple(ropes), tuple(blocks))


def _rope(name: str, dim: int, factor: float) -> Line:
    return Line("rope", {"name": name, "dim": dim, "inv_freq": f"rope.{name}", "factor": factor})


def _attention(c: ModelConfig, layer: int) -> Line:
    prefix = f"model.layers.{layer}."
    keys: dict[str, Value] = {"norm": prefix + "input_layernorm"}
    keys |= {key: f"{prefix}self_attn.{key}_proj" for key in "qkvo"}
    keys |= {
        "heads": c.num_attention_heads,
        "kv_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "rope": LOCAL_ROPE if layer in c.scalings.local else GLOBAL_ROPE,
        "scale": c.attention_scale,
    }
    if window := c.window(layer):
        keys["window"] = window
    if policy := c.policy(layer):
        keys |= dict(policy.keys)
    if c.output_gate:
        keys["output_gate"] = 1
    if c.qk_norm:
        keys |= {key: f"{prefix}self_attn.{key}" for key in ("q_norm", "k_norm")}
    if c.sub_norms:
        keys["sub_norm"] = prefix + "self_attn.attn_sub_norm"
    if c.post_norms:
        keys["post_norm"] = prefix + "post_attention_layernorm"
    return Line("attention", keys)


def _delta_net(c: ModelConfig, layer: int) -> Line:
    d, prefix = c.delta_net, f"model.layers.{layer}."
    assert d is not None
    inside = prefix + "linear_attn."
    keys: dict[str, Value] = {"norm": prefix + "input_layernorm"}
    keys |= {key: f"{inside}in_proj_{key}" for key in ("qkv", "z", "a", "b")}
    keys |= {"conv": inside + "conv1d", "A_log": inside + "A_log", "dt_bias": inside + "dt_bias"}
    keys |= {"gated_norm": inside + "norm", "out": inside + "out_proj"}
    keys |= {"key_heads": d.key_heads, "value_heads": d.value_heads}
    keys |= {"key_dim": d.key_dim, "value_dim": d.value_dim, "kernel": d.kernel}
    return Line("delta_net", keys)


def _mlp(c: ModelConfig, layer: int) -> Line:
    prefix = f"model.layers.{layer}."
    keys: dict[str, Value] = {"norm": prefix + c.mlp_norm}
    keys |= {key: f"{prefix}mlp.{key}_proj" for key in ("gate", "up", "down")}
    keys |= {"width": c.intermediate_size, "activation": c.hidden_act}
    if c.sub_norms:
        keys["sub_norm"] = prefix + "mlp.ffn_sub_norm"
    if c.post_norms:
        keys["post_norm"] = prefix + "post_feedforward_layernorm"
    if c.sparsity is not None:
        keys |= dict(c.sparsity.keys)
    return Line("mlp", keys)
