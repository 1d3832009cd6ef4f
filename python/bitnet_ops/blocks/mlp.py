"""The block `mlp`: norm, gate and up, activation, norm, down."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.blocks.block import Block, Line, Ops, Tensors, TensorSpec, Value
from bitnet_ops.config import ModelConfig

_GATED = {"silu": "silu_and_mul", "gelu_pytorch_tanh": "gelu_tanh_and_mul"}


class Mlp(Block):
    """x + post_norm(down(sub_norm(activation(gate(h)) * up(h)))) of h = norm(x)."""

    kind = "mlp"
    inputs = ("gate", "up"), ("down",)
    added = "down"

    def line(self, c: ModelConfig, layer: int) -> Line:
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
        biased = (key for key in ("gate", "up", "down") if f"mlp.{key}_proj" in c.biases)
        return Line(self.kind, keys, frozenset(biased))

    def tensors(self, line: Line, model: Line) -> dict[str, TensorSpec]:
        hidden, width = model.integer("hidden"), line.integer("width")
        t = Tensors(line, model)
        t.norm("norm", hidden)
        t.projection("gate", width, hidden)
        t.projection("up", width, hidden)
        t.norm("sub_norm", width)
        t.projection("down", hidden, width)
        t.norm("post_norm", hidden)
        return t.found

    def input(self, line: Line, key: str, x: Tensor) -> Tensor:
        return kept_inputs(line, x) if key == "down" else x

    def run(self, c: Ops, line: Line, number: int, x: Tensor) -> Tensor:
        h = c.norm(line, "norm", c.rounded(x))
        gate, up = c.project(line, "gate", h), c.project(line, "up", h)
        activation = str(line.keys["activation"])
        if activation == "relu2":
            z = c.ops.relu2_mul(gate, up)
        else:
            z = getattr(c.ops, _GATED[activation])(torch.cat([gate, up], dim=-1))
        y = c.project(line, "down", c.norm(line, "sub_norm", z, "sub_norm_eps"))
        return x + c.norm(line, "post_norm", y)


def kept_inputs(line: Line, x: Tensor) -> Tensor:
    """x F [..., K] with 0 where the activation sparsity of the block `mlp` drops its code.

    The largest code of a token stays, and with it the scale of the others. Values that become code
    0 in any case stay, too: so does a row that is not finite.
    """
    keys = line.keys
    if not keys.keys() & {"threshold", "top_k", "max_ratio"}:
        return x
    size = ops.quantize_activations(x)[0].int().abs()
    if "threshold" in keys:
        cut = torch.ceil(127 * torch.tensor(line.number("threshold"), dtype=torch.float32))
        return x.masked_fill((size > 0) & (size < cut), 0)
    k = x.shape[-1]
    count = torch.zeros(*x.shape[:-1], 129, dtype=torch.int64)
    count.scatter_add_(-1, size.long(), torch.ones_like(size, dtype=torch.int64))
    low, high = (
        torch.tensor(float(keys.get("top_k", keys.get(name, 0))), dtype=torch.float32)
        for name in ("min_ratio", "max_ratio")
    )
    ratio = low.double()
    if high > low:
        code = torch.arange(1, 129, dtype=torch.float64)
        weight = count[..., 1:] * code
        total = weight.sum(-1).clamp(min=1)
        entropy = total.log() - (weight * code.log()).sum(-1) / total
        spread = (entropy / math.log(k)).clamp(0, 1) if k > 1 else torch.zeros_like(entropy)
        ratio = ratio + (high - low).double() * spread
    maximum = torch.ceil(ratio * k).unsqueeze(-1)
    left = count.flip(-1).cumsum(-1).flip(-1)  # codes of at least that magnitude
    largest = size.amax(-1, keepdim=True).clamp(min=1)
    stays = (left <= maximum) | (torch.arange(129) >= largest)
    stays[..., 0] = False
    cut = stays.int().argmax(-1, keepdim=True)
    return x.masked_fill((size > 0) & (size < cut), 0)
