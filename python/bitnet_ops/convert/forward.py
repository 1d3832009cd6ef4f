"""A plain fp32 forward of a checkpoint, read from the source itself: the oracle of last resort.

Written from the published maths with torch's own operators; it uses neither our ops nor our
packing, ternarisation or model code, so that a mistake there cannot cancel out; of the model it
shares the table of rotary frequencies, which the tests hold against transformers. Streams layer by
layer: memory is bounded by one layer's weights. Slow, and used by `convert --verify` alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bitnet_ops.config.scheme import ScaleRule, Storage
from bitnet_ops.convert.hf_source import HfSource
from bitnet_ops.convert.plan import scale_name
from bitnet_ops.convert.source import Source
from bitnet_ops.nn.rotary import Rotary, rotary

Get = Callable[[str], Tensor]
_GROUPS = (128, 64)  # weights that share a scale, and the features that meet them
_WITH_GROUPS = (Storage.TERNARY, Storage.GGUF)


class PlainOracle:
    """The source checkpoint as a reference: its ternary weights and its logits."""

    name = "plain fp32 forward"

    def __init__(self, source: Source, *, int8_activations: bool = True) -> None:
        self._source, self._plan = source, source.plan
        config = source.plan.config
        self._rope = rotary(config)
        theta, half = config.scalings.local_theta or 1.0, config.head_dim // 2
        exponents = torch.arange(half, dtype=torch.float64) / half
        self._local_rope = Rotary((theta**-exponents).float(), 1.0)
        self.int8_activations = int8_activations

    def projection(self, weight_name: str) -> tuple[Tensor, float | Tensor]:
        """(codes int8 [N, K], multiplying scale) of one projection, straight from the source.

        Where a matrix may have several scales, every weight has its own: [N, K], 0 where it is 0.
        """
        stored, scheme = self._read(weight_name), self._plan.scheme
        if scheme.storage is Storage.MASTERS:
            return _ternarise(stored.float())
        if scheme.storage is Storage.TERNARY:
            return stored.float().sign().to(torch.int8), stored.float().abs()
        value = float(self._read(scale_name(weight_name)).float())
        return _unpack_quarters(stored), 1.0 / value if scheme.rule is ScaleRule.DIVIDE else value

    @torch.inference_mode()
    def logits(self, sequences: list[list[int]]) -> list[Tensor]:
        """fp32 logits [T, V] of every sequence of token ids."""
        config = self._plan.config
        embedding = self._dense("model.embed_tokens")
        factors = config.scalings
        states = [embedding[torch.tensor(ids)] * factors.embedding for ids in sequences]
        for layer in range(config.num_hidden_layers):
            weights: dict[str, Tensor] = {}
            get = self._layer(f"model.layers.{layer}.", weights)
            rope = self._rope
            if factors.local_theta is not None and layer in factors.local:
                rope = self._local_rope
            states = [self._block(x, get, rope, config.window(layer)) for x in states]
        states = [self._norm(x, self._dense("model.norm")) for x in states]
        head = embedding if config.tie_word_embeddings else self._dense("lm_head")
        return [x / factors.logits @ head.t() for x in states]

    def _read(self, name: str) -> Tensor:
        assert isinstance(self._source, HfSource)
        return self._source.tensor(name)

    def _dense(self, name: str) -> Tensor:
        return self._value(f"{name}.weight")

    def _value(self, name: str) -> Tensor:
        """A dense tensor; a norm as what it multiplies by."""
        value = self._read(name).float()
        if not name.endswith("norm.weight") or not isinstance(self._source, HfSource):
            return value
        # Gemma's norms store it less 1; of those inside projections their values say it
        gemma = self._plan.config.model_type == "gemma3_text"
        inside = name.endswith(".rms_norm.weight")
        return value + 1 if gemma and (not inside or bool(value.median() < 0.5)) else value

    def _layer(self, prefix: str, weights: dict[str, Tensor]) -> Get:
        """A getter of a layer's tensors by suffix; ternary ones arrive as fp32 codes * scale."""

        def get(suffix: str) -> Tensor:
            if suffix not in weights:
                name = f"{prefix}{suffix}"
                if self._plan.specs[name].kind == "dense":
                    weights[suffix] = self._value(name)
                else:
                    codes, scale = self.projection(name)
                    weights[suffix] = codes.float() * scale
            return weights[suffix]

        return get

    def _block(self, x: Tensor, get: Get, rope: Rotary, window: int) -> Tensor:
        c = self._plan.config
        a = self._attention(self._norm(x, get("input_layernorm.weight")), get, rope, window)
        if not c.post_norms:
            x = x + a * c.scalings.residual
            y = self._mlp(self._norm(x, get("post_attention_layernorm.weight")), get)
            return x + y * c.scalings.residual
        x = x + self._norm(a, get("post_attention_layernorm.weight"))
        y = self._mlp(self._norm(x, get("pre_feedforward_layernorm.weight")), get)
        return x + self._norm(y, get("post_feedforward_layernorm.weight"))

    def _norm(self, x: Tensor, gain: Tensor, eps: float | None = None) -> Tensor:
        eps = self._plan.config.rms_norm_eps if eps is None else eps
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean_square + eps) * gain

    def _linear(self, x: Tensor, name: str, get: Get) -> Tensor:
        """A projection: its own norm, activations rounded to int8, the product, its bias."""
        c = self._plan.config
        if c.linear_norms:
            x = self._norm(x, get(f"{name}.rms_norm.weight"), c.linear_norm_eps)
        weight = get(f"{name}.weight")
        if self.int8_activations:
            group = _group_of(weight) if self._plan.scheme.storage in _WITH_GROUPS else 0
            x = _round_groups(x, group) if group else _round_to_int8(x)
        y = x @ weight.t()
        if name not in c.biases:
            return y
        # transformers' offline AutoBitLinear scales x W + bias as a whole
        scale = float(weight.abs().max()) if self._plan.scheme.bias_is_scaled else 1.0
        return y + get(f"{name}.bias") * scale

    def _attention(self, h: Tensor, get: Get, rope: Rotary, window: int) -> Tensor:
        c = self._plan.config
        q, k, v = (
            self._linear(h, f"self_attn.{p}_proj", get).view(len(h), -1, c.head_dim) for p in "qkv"
        )
        if c.qk_norm:
            q = self._norm(q, get("self_attn.q_norm.weight"))
            k = self._norm(k, get("self_attn.k_norm.weight"))
        q, k = _rotate(q, rope), _rotate(k, rope)
        group = c.num_attention_heads // c.num_key_value_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q, k) * c.attention_scale
        everything = torch.ones(scores.shape[1:], dtype=torch.bool)
        unseen = everything.triu(1)
        if window:
            unseen |= everything.tril(-window)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        a = torch.einsum("hts,shd->thd", weights, v).reshape(len(h), -1)
        if c.sub_norms:
            a = self._norm(a, get("self_attn.attn_sub_norm.weight"), c.sub_norm_eps)
        return self._linear(a, "self_attn.o_proj", get)

    def _mlp(self, h: Tensor, get: Get) -> Tensor:
        c = self._plan.config
        gate, up = self._linear(h, "mlp.gate_proj", get), self._linear(h, "mlp.up_proj", get)
        if c.hidden_act == "gelu_pytorch_tanh":
            z = F.gelu(gate, approximate="tanh")
        else:
            z = F.relu(gate).square() if c.hidden_act == "relu2" else F.silu(gate)
        z = z * up
        if c.sub_norms:
            z = self._norm(z, get("mlp.ffn_sub_norm.weight"), c.sub_norm_eps)
        return self._linear(z, "mlp.down_proj", get)


def _unpack_quarters(packed: Tensor) -> Tensor:
    """uint8 [N/4, K] -> int8 [N, K]: lane i of the bytes is the i-th quarter of the rows."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1, 1)
    codes = (packed.unsqueeze(0) >> shifts) & 3
    return codes.view(-1, packed.shape[1]).to(torch.int8) - 1


def _ternarise(masters: Tensor) -> tuple[Tensor, float]:
    """fp32 [N, K] -> (codes, absmean), with the mean taken in double precision."""
    absmean = max(float(masters.abs().mean(dtype=torch.float64)), 1e-5)
    codes = (masters * (1.0 / torch.tensor(absmean, dtype=torch.float32))).round().clamp(-1, 1)
    return codes.to(torch.int8), absmean


def _round_to_int8(x: Tensor) -> Tensor:
    """Activations on 255 levels per token: absmax, half to even."""
    multiplier = 127.0 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (x * multiplier).round().clamp(-128, 127) / multiplier


def _group_of(weight: Tensor) -> int:
    """How many weights share a magnitude, 2^-7 apart at most; 0 where all of a row do."""
    size = weight.abs()
    if ((size == 0) | (size == size.amax(1, keepdim=True))).all():
        return 0
    for group in _GROUPS:
        parts = size.split(group, dim=1)
        if all(((p == 0) | (p >= p.amax(1, keepdim=True) * (1 - 2**-7))).all() for p in parts):
            return group
    return _GROUPS[-1]


def _round_groups(x: Tensor, group: int) -> Tensor:
    """Every `group` features of a token on levels of their own."""
    return torch.cat([_round_to_int8(part) for part in x.split(group, dim=-1)], dim=-1)


def _rotate(x: Tensor, rope: Rotary) -> Tensor:
    """Half-split RoPE of x [T, heads, d] at positions 0..T-1."""
    positions = torch.arange(len(x), dtype=torch.float32)
    angles = torch.outer(positions, rope.inv_freq).unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    cos, sin = (f(angles) * rope.attention_factor for f in (torch.cos, torch.sin))
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
