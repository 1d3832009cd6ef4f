"""The block `attention`: norm, q, k and v, rotation, attention over the cache, out."""

from __future__ import annotations

import torch
from torch import Tensor

from bitnet_ops.blocks.block import Block, Buffer, Line, Ops, Tensors, TensorSpec, Value
from bitnet_ops.config import ModelConfig
from bitnet_ops.config.attention import PAGE_KEYS, POLICY_KEYS, AttentionPolicy

GLOBAL_ROPE, LOCAL_ROPE = "global", "local"


class Attention(Block):
    """x + post_norm(o(sub_norm(sigmoid(gate) * attention(rope(q), rope(k), v)))) of h = norm(x).

    Without `output_gate` there is no gate.
    """

    kind = "attention"
    inputs = ("q", "k", "v"), ("o",)
    added = "o"

    def line(self, c: ModelConfig, layer: int) -> Line:
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
        biased = frozenset(key for key in "qkvo" if f"self_attn.{key}_proj" in c.biases)
        return Line(self.kind, keys, biased)

    def tensors(self, line: Line, model: Line) -> dict[str, TensorSpec]:
        hidden, dim = model.integer("hidden"), line.integer("head_dim")
        query, key = line.integer("heads") * dim, line.integer("kv_heads") * dim
        t = Tensors(line, model)
        t.norm("norm", hidden)
        t.projection("q", query * (1 + line.integer("output_gate")), hidden)
        t.projection("k", key, hidden)
        t.projection("v", key, hidden)
        t.norm("q_norm", dim)
        t.norm("k_norm", dim)
        t.norm("sub_norm", query)
        t.projection("o", hidden, query)
        t.norm("post_norm", hidden)
        return t.found

    def state(self, line: Line) -> tuple[Buffer, ...]:
        heads, dim = line.integer("kv_heads"), line.integer("head_dim")
        rows = [Buffer(name, "position", (heads, dim)) for name in ("key", "value")]
        if PAGE_KEYS & line.keys.keys():
            rows.append(Buffer("key_bounds", "page", (heads, 2 * dim), "bfloat16"))
        return tuple(rows)

    def reads(self, line: Line) -> AttentionPolicy:
        if "window" not in line.keys:
            return AttentionPolicy("all", ())
        words = ("window", "sinks", "stride")
        return AttentionPolicy("window", tuple((word, line.integer(word)) for word in words))

    def run(self, c: Ops, line: Line, number: int, x: Tensor) -> Tensor:
        dim, gated = line.integer("head_dim"), line.integer("output_gate")
        h = c.norm(line, "norm", c.rounded(x))
        q, k, v = (c.project(line, key, h) for key in "qkv")
        q, k, v = (
            q.unflatten(-1, (-1, dim * (1 + gated))),
            *(t.unflatten(-1, (-1, dim)) for t in (k, v)),
        )
        q, gate = q[..., :dim].contiguous(), q[..., dim:].flatten(-2)
        q, k = c.norm(line, "q_norm", q), c.norm(line, "k_norm", k)
        q, k = (rotated(c, line, heads) for heads in (q, k))
        a = c.attend(number, q, k, v).flatten(-2)
        if gated:
            a = c.ops.gated(gate, a, "sigmoid")
        y = c.project(line, "o", c.norm(line, "sub_norm", a, "sub_norm_eps"))
        return x + c.norm(line, "post_norm", y)


def policy_of(line: Line) -> str:
    """What its tokens attend to, as `ops.paged_attention` takes it."""
    keys = *POLICY_KEYS, "skip"
    return " ".join(f"{key}={line.keys[key]}" for key in keys if key in line.keys)


def rotated(c: Ops, line: Line, heads: Tensor) -> Tensor:
    """Heads by their positions, in the features for which the rope has frequencies."""
    inv_freq, factor = c.ropes[str(line.keys["rope"])]
    first, rest = heads.tensor_split([2 * len(inv_freq)], dim=-1)
    first, positions, sections = first.contiguous(), c.positions, list[int]()
    if positions.dim() == heads.dim() - 1:  # in time, height and width
        sections = list(c.sections(str(line.keys["rope"])))
        positions = positions if sections else positions[0]
    more = (sections,) if sections else ()
    first = c.ops.rope(first, positions, inv_freq, factor, *more)
    return torch.cat([first, rest], dim=-1) if rest.shape[-1] else first
