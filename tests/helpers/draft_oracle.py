"""The layer of an MTP head in plain float64, written from its formulas.

    head = RandomHead.of(config, seed)      weights that three ternary digits hold exactly
    head.tensors()                          as a model file has them, matrices as digits
    Layer(config, head).pairs(e, h, ...)    states and logits of every pair

It reads the config's numbers alone; bitnet_ops only packs what it made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.config.draft import DraftConfig
from bitnet_ops.nn.digits import to_digits

GROUP = 64
_LAYER = "mtp.layers.0."


@dataclass
class RandomHead:
    """values: float32 tensors by module name, matrices as they are stored."""

    draft: DraftConfig
    values: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, c: ModelConfig, seed: int = 1, *, feed: str = "after", rotated: bool = False
    ) -> RandomHead:
        made = torch.Generator().manual_seed(seed)
        hidden, width = c.hidden_size, c.intermediate_size
        query, key = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim

        def levels(rows: int, columns: int) -> Tensor:
            found = torch.randint(-13, 14, (rows, columns), generator=made).float()
            found[:, ::GROUP] = 13.0  # so that 13 is the largest of every group
            step = 2.0 ** torch.randint(-2, 3, (rows, columns // GROUP), generator=made)
            step = step.repeat_interleave(GROUP, 1)
            return found * step / (13 * math.sqrt(columns))

        matrices = {
            "mtp.fc": levels(hidden, 2 * hidden),
            f"{_LAYER}self_attn.q_proj": levels(query * (2 if c.output_gate else 1), hidden),
            f"{_LAYER}self_attn.k_proj": levels(key, hidden),
            f"{_LAYER}self_attn.v_proj": levels(key, hidden),
            f"{_LAYER}self_attn.o_proj": levels(hidden, query),
            f"{_LAYER}mlp.gate_proj": levels(width, hidden),
            f"{_LAYER}mlp.up_proj": levels(width, hidden),
            f"{_LAYER}mlp.down_proj": levels(hidden, width),
        }
        norms = {"mtp.pre_fc_norm_embedding": hidden, "mtp.pre_fc_norm_hidden": hidden}
        norms |= {f"{_LAYER}input_layernorm": hidden, f"{_LAYER}post_attention_layernorm": hidden}
        norms |= {"mtp.norm": hidden}
        if c.qk_norm:
            norms |= {f"{_LAYER}self_attn.{n}": c.head_dim for n in ("q_norm", "k_norm")}
        if c.sub_norms:
            norms |= {f"{_LAYER}self_attn.attn_sub_norm": query, f"{_LAYER}mlp.ffn_sub_norm": width}
        values = {n: torch.rand(size, generator=made) * 1.5 + 0.25 for n, size in norms.items()}
        names = tuple(matrices) if rotated else ()
        names = tuple(n for n in names if n != "mtp.fc")  # no signs of its width
        return cls(DraftConfig(width, feed=feed, rotated=names), matrices | values)

    def tensors(self) -> dict[str, Any]:
        return {
            f"{name}.weight": to_digits(value, GROUP) if value.dim() == 2 else value
            for name, value in self.values.items()
        }


class Layer:
    """signs: float64 by width, and the size of their blocks, where matrices are rotated."""

    def __init__(
        self,
        c: ModelConfig,
        head: RandomHead,
        signs: dict[int, Tensor] | None = None,
        block: int = 0,
    ) -> None:
        self.c, self.w = c, {n: v.double() for n, v in head.values.items()}
        for name in head.draft.rotated:
            assert signs is not None
            w = self.w[name]
            i = torch.arange(block)
            bits = torch.tensor([[bin(int(a & b)).count("1") % 2 for b in i] for a in i])
            turn = (1.0 - 2.0 * bits.double()) / math.sqrt(block)
            turned = (w.unflatten(1, (-1, block)) @ turn).flatten(1)
            self.w[name] = turned * signs[w.shape[1]]
        self.feed = head.draft.feed

    def norm(self, name: str, x: Tensor) -> Tensor:
        scaled = x / (x.pow(2).mean(-1, keepdim=True) + self.c.rms_norm_eps).sqrt()
        return scaled * self.w[name]

    def enter(self, embedded: Tensor, states: Tensor) -> Tensor:
        """x f64 [n, hidden] of n pairs."""
        halves = [
            self.norm("mtp.pre_fc_norm_embedding", embedded),
            self.norm("mtp.pre_fc_norm_hidden", states),
        ]
        return torch.cat(halves, -1) @ self.w["mtp.fc"].T

    def run(self, x: Tensor, positions: Tensor) -> Tensor:
        """The layer over the pairs of one sequence, causal: f64 [n, hidden]."""
        c, w = self.c, self.w
        n, dim, heads = len(x), c.head_dim, c.num_attention_heads
        h = self.norm(f"{_LAYER}input_layernorm", x)
        q = (h @ w[f"{_LAYER}self_attn.q_proj"].T).view(n, heads, -1)
        gate = q[..., dim:].flatten(1)
        q = q[..., :dim]
        k, v = ((h @ w[f"{_LAYER}self_attn.{name}_proj"].T).view(n, -1, dim) for name in ("k", "v"))
        if c.qk_norm:
            q, k = (self.norm(f"{_LAYER}self_attn.{s}_norm", t) for s, t in (("q", q), ("k", k)))
        q, k = (self.rope(t, positions) for t in (q, k))
        share = heads // c.num_key_value_heads
        k, v = (t.repeat_interleave(share, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * c.attention_scale
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        p = scores.masked_fill(hidden, -math.inf).softmax(-1)
        a = torch.einsum("hqk,khd->qhd", p, v).flatten(1)
        if c.output_gate:
            a = a * gate.sigmoid()
        if c.sub_norms:
            a = self.norm(f"{_LAYER}self_attn.attn_sub_norm", a)
        x = x + a @ w[f"{_LAYER}self_attn.o_proj"].T
        h = self.norm(f"{_LAYER}post_attention_layernorm", x)
        gate, up = (h @ w[f"{_LAYER}mlp.{name}_proj"].T for name in ("gate", "up"))
        z = gate.relu().pow(2) * up if c.hidden_act == "relu2" else gate * gate.sigmoid() * up
        if c.sub_norms:
            z = self.norm(f"{_LAYER}mlp.ffn_sub_norm", z)
        return x + z @ w[f"{_LAYER}mlp.down_proj"].T

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        dim = self.c.rotary_dim
        inv = self.c.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = positions.double()[:, None] * inv
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., : dim // 2], x[..., dim // 2 : dim]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., dim:]], -1)

    def last(self, y: Tensor) -> Tensor:
        """Behind the head's last norm."""
        return self.norm("mtp.norm", y)

    def next_state(self, y: Tensor) -> Tensor:
        """What the next draft is fed."""
        return self.last(y) if self.feed == "after" else y
