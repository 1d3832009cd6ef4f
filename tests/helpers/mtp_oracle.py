"""What a draft head computes: two independent references, over a whole prompt.

    oracle = Transformers(weights, shape)          one layer of Qwen3_5TextModel, float32
    oracle = Plain(weights, shape)                 a layer of its own, float64
    found = run(oracle, hidden, embedded, positions)      .before and .after [T, H]; the norm of the
                                                   head lies between them
    steps = drafts(oracle, hidden, embedded, positions, embed, logits, depth=3, feed="after")

`weights`: `mtp.fc.weight` and so on as they multiply: matrices [N, K] that are not rotated, norms
1 + w (helpers/mtp.py `plain`, or what a model file stands for). `hidden` [T, H]: of position t the
trunk's state h_t behind its output norm. `embedded` [T, H]: row t is the embedding of token t + 1,
turned back where the table is rotated. `positions` [T], or [3, T] with images: those of tokens
t + 1. Everything is computed anew for every draft, so that nothing is kept that could be kept
wrongly. It must never import bitnet_ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import hybrids

LAYER = "mtp.layers.0."
Weights = Mapping[str, "np.ndarray[Any, Any] | Tensor"]


@dataclass(frozen=True)
class Shape:
    """Of the trunk's layers of attention. rotary: features of a head that are turned, the first
    ones. gate: rows of q_proj are, head by head, a query's and its gate's. sections: pairs that
    turn by time, height and width, interleaved; None: by the one position."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    theta: float
    eps: float = 1e-6
    gate: bool = True
    activation: str = "silu"
    sections: tuple[int, int, int] | None = None


def shape_of(made: hybrids.Hybrid) -> Shape:
    s, sections = made.sizes, hybrids.text_config(made)["rope_parameters"]["mrope_section"]
    return Shape(s.heads, s.kv_heads, s.head_dim, s.head_dim // 4, hybrids.THETA, hybrids.EPS,
                 sections=tuple(sections))  # fmt: skip


class Oracle(Protocol):
    weights: dict[str, Tensor]  # float64
    shape: Shape

    def layer(self, x: Tensor, positions: Tensor) -> Tensor:
        """float64 [T, H] -> what the layer gives, causal, before the head's norm."""


def _double(weights: Weights) -> dict[str, Tensor]:
    return {name: torch.as_tensor(np.asarray(value)).double() for name, value in weights.items()}


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


class Plain:
    """float64, of any family: without norms on queries and keys where `weights` has none."""

    def __init__(self, weights: Weights, shape: Shape) -> None:
        self.weights, self.shape = _double(weights), shape

    def _of(self, name: str) -> Tensor:
        return self.weights[f"{LAYER}{name}.weight"]

    def layer(self, x: Tensor, positions: Tensor) -> Tensor:
        s = self.shape
        h = norm(x, self._of("input_layernorm"), s.eps)
        x = x + self._attention(h, positions)
        h = norm(x, self._of("post_attention_layernorm"), s.eps)
        gate, up = h @ self._of("mlp.gate_proj").T, h @ self._of("mlp.up_proj").T
        act = {"silu": F.silu, "relu2": lambda t: t.relu().square()}[s.activation]
        return x + (act(gate) * up) @ self._of("mlp.down_proj").T

    def _attention(self, h: Tensor, positions: Tensor) -> Tensor:
        s, tokens = self.shape, len(h)
        q = (h @ self._of("self_attn.q_proj").T).view(tokens, s.heads, -1)
        k = (h @ self._of("self_attn.k_proj").T).view(tokens, s.kv_heads, s.head_dim)
        v = (h @ self._of("self_attn.v_proj").T).view(tokens, s.kv_heads, s.head_dim)
        gate = None
        if s.gate:
            q, gate = q[..., : s.head_dim], q[..., s.head_dim :]
        if f"{LAYER}self_attn.q_norm.weight" in self.weights:
            q = norm(q, self._of("self_attn.q_norm"), s.eps)
            k = norm(k, self._of("self_attn.k_norm"), s.eps)
        angles = self._angles(positions)
        q, k = _turned(q, angles), _turned(k, angles)
        out = torch.empty(tokens, s.heads, s.head_dim, dtype=torch.float64)
        later = torch.ones(tokens, tokens).triu(1).bool()
        for head in range(s.heads):
            own = head // (s.heads // s.kv_heads)
            scores = q[:, head] @ k[:, own].T / s.head_dim**0.5
            out[:, head] = scores.masked_fill(later, -torch.inf).softmax(-1) @ v[:, own]
        if gate is not None:
            out = out * gate.sigmoid()
        return out.flatten(1) @ self._of("self_attn.o_proj").T

    def _angles(self, positions: Tensor) -> Tensor:
        """[T, pairs]"""
        s = self.shape
        pair = torch.arange(s.rotary // 2).double()
        streams = positions.double().expand(3, -1) if positions.dim() == 1 else positions.double()
        of = torch.zeros(s.rotary // 2, dtype=torch.long)
        if s.sections is not None:
            for axis in (1, 2):
                of[axis : 3 * s.sections[axis] : 3] = axis
        return streams[of].T * s.theta ** (-2 * pair / s.rotary)


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """[T, heads, head_dim], of which the first 2 * pairs are halves of pairs."""
    pairs = angles.shape[1]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class Transformers:
    """The layer of transformers' Qwen3_5TextModel of one layer, which is one of attention."""

    def __init__(self, weights: Weights, shape: Shape) -> None:
        from transformers.models.qwen3_5 import modeling_qwen3_5
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

        self.weights, self.shape = _double(weights), shape
        sections = shape.sections or (shape.rotary // 2, 0, 0)
        config = Qwen3_5TextConfig(
            vocab_size=8, hidden_size=len(self.weights["mtp.norm.weight"]), num_hidden_layers=1,
            intermediate_size=len(self.weights[f"{LAYER}mlp.gate_proj.weight"]),
            num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim, rms_norm_eps=shape.eps, layer_types=["full_attention"],
            rope_parameters={
                "rope_type": "default", "rope_theta": shape.theta, "mrope_interleaved": True,
                "partial_rotary_factor": shape.rotary / shape.head_dim,
                "mrope_section": list(sections),
            },
        )  # fmt: skip
        config._attn_implementation = "eager"
        self._model = modeling_qwen3_5.Qwen3_5TextModel(config).float().eval()
        inside = {
            name.removeprefix("mtp."): value
            for name, value in self.weights.items()
            if name.startswith(LAYER) or name == "mtp.norm.weight"
        }
        state = {  # its norms multiply by 1 + w
            name: (value - 1 if name.endswith("norm.weight") else value).float()
            for name, value in inside.items()
        }
        missing, unexpected = self._model.load_state_dict(state, strict=False)
        assert missing == ["embed_tokens.weight"] and not unexpected

    def layer(self, x: Tensor, positions: Tensor) -> Tensor:
        kept: list[Tensor] = []
        hook = self._model.layers[0].register_forward_hook(lambda m, given, out: kept.append(out))
        axes = positions.expand(3, -1) if positions.dim() == 1 else positions
        with torch.inference_mode():
            self._model(inputs_embeds=x.float()[None], position_ids=axes[:, None], use_cache=False)
        hook.remove()
        (found,) = kept
        return found[0].double()


@dataclass
class Outputs:
    """[T, H]: of the layer, before and after the head's norm. Row t is about token t + 2."""

    before: Tensor
    after: Tensor


def fused(oracle: Oracle, hidden: Tensor, embedded: Tensor) -> Tensor:
    """What the layer reads: fc of both norms, the embedding's half first."""
    w, eps = oracle.weights, oracle.shape.eps
    token = norm(embedded.double(), w["mtp.pre_fc_norm_embedding.weight"], eps)
    state = norm(hidden.double(), w["mtp.pre_fc_norm_hidden.weight"], eps)
    return torch.cat([token, state], dim=-1) @ w["mtp.fc.weight"].T


def run(oracle: Oracle, hidden: Tensor, embedded: Tensor, positions: Tensor) -> Outputs:
    before = oracle.layer(fused(oracle, hidden, embedded), positions)
    return Outputs(before, norm(before, oracle.weights["mtp.norm.weight"], oracle.shape.eps))


@dataclass
class Draft:
    """One drafted token, the logits that chose it, and the outputs of its pair, both [H]."""

    token: int
    logits: Tensor
    before: Tensor
    after: Tensor


def drafts(
    oracle: Oracle,
    hidden: Tensor,
    embedded: Tensor,
    positions: Tensor,
    embed: Callable[[int], Tensor],
    logits: Callable[[Tensor], Tensor],
    *,
    depth: int = 3,
    feed: str = "after",
) -> list[Draft]:
    """Greedy drafts behind the last pair, each of which is fed the one before.

    embed: [H] of a token's id. logits: [V] of a normed output [H]: the trunk's output head. feed:
    what is the next pair's state, the layer's output "after" the head's norm or "before" it.
    """
    found: list[Draft] = []
    for _ in range(depth):
        outputs = run(oracle, hidden, embedded, positions)
        before, after = outputs.before[-1], outputs.after[-1]
        scores = logits(after)
        found.append(Draft(int(scores.argmax()), scores, before, after))
        state = {"after": after, "before": before}[feed]
        hidden = torch.cat([hidden.double(), state[None]])
        embedded = torch.cat([embedded.double(), embed(found[-1].token).double()[None]])
        positions = torch.cat([positions, positions[..., -1:] + 1], dim=-1)
    return found
