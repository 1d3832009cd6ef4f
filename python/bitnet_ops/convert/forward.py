"""A plain float64 forward of the supported networks, written from the published maths.

It is what `convert --verify` compares a result with where transformers cannot serve, and what the
tests compare with. It knows torch's own operators and nothing of this package: neither the ops, nor
packing, ternarisation, models or the reading of configs, so that a mistake there cannot cancel out.
Slow and obvious: whole sequences, layer by layer, no cache; memory is bounded by one layer's
weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

_GROUPS = (128, 64)  # weights that share a scale, and the features that meet them
_HEAD_ROWS = 8192  # of the output head at a time


@dataclass(frozen=True)
class DeltaNet:
    """Layers of Gated DeltaNet: which, and heads of keys (queries too) and of values."""

    layers: Collection[int]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Maths:
    """What a network computes.

    rope: of every layer the frequency of each pair of a head, and what multiplies cosines and
        sines. windows: of every layer how many positions a token sees, itself included; 0: all.
    sub_norm_eps: of norms on the attention output and on the MLP's product, None where there are
        none. linear_norm_eps: of norms inside the projections, likewise. post_norms: norms on what
        attention and MLP give (Gemma 3). biases: projections that have one.
    bias_is_scaled: y = (x W + bias) * weight_scale, as transformers' offline AutoBitLinear has it.
    group_scales: weights of a row may have several scales; the features that meet weights of one
        scale are then rounded together.
    embedding, residual, logits, attention: factors of embedded tokens, of what attention and MLP
        add and of scores; `logits` divides the last states.
    tied: the head is the embedding.
    delta_net: layers without attention. output_gate: what attention gives is multiplied by the
        sigmoid of a gate, which lies behind each head's query. Fewer frequencies than pairs in a
        head turn its first features alone.
    sections: how many of the turning pairs go by time, height and width of rows of pictures, one
        after the other until height's and width's are used up (Qwen3.5); empty: all go by time.
    blocks: of each input width that a Hadamard matrix transforms, after the signs that are called
        model.rotation.<width>. plain: modules with inputs of such widths that it leaves alone.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: str
    eps: float
    rope: Sequence[tuple[Tensor, float]]
    attention: float
    windows: Sequence[int] = ()
    sub_norm_eps: float | None = None
    linear_norm_eps: float | None = None
    qk_norm: bool = False
    post_norms: bool = False
    biases: tuple[str, ...] = ()
    bias_is_scaled: bool = False
    group_scales: bool = False
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    tied: bool = False
    delta_net: DeltaNet | None = None
    output_gate: bool = False
    sections: Sequence[int] = ()
    blocks: Mapping[int, int] = field(default_factory=dict)
    plain: Collection[str] = ()


@dataclass(frozen=True)
class PictureRows:
    """Rows of a picture in the place of tokens: [height * width, hidden], row after row of it."""

    rows: Tensor
    height: int
    width: int


Prompt = Sequence["int | PictureRows"]
Get = Callable[[str], Tensor]


class Forward:
    """A network over its tensors.

    read: the value of a tensor by its published name ("model.norm.weight"); of a ternary matrix
        code * scale [N, K], of a norm what it multiplies by. int8: round activations to int8.
    note: told the activations of every rounding just before it, in steps.
    nudge: change every embedded value by up to this share of it, as rounding does: what becomes of
        it says how much two right forwards may differ.
    """

    def __init__(
        self,
        maths: Maths,
        read: Get,
        *,
        int8: bool = True,
        note: Callable[[Tensor], None] | None = None,
        nudge: float = 0.0,
    ) -> None:
        self.maths, self._read, self._int8, self._note = maths, read, int8, note
        self._nudge = nudge

    def logits(self, sequences: Sequence[Prompt]) -> list[Tensor]:
        """float64 logits [T, V] of every sequence of token ids and pictures."""
        states = self.hidden(sequences)
        name = "model.embed_tokens" if self.maths.tied else "lm_head"
        states = [self._rotated(x, name) for x in states]
        pieces = self._read(f"{name}.weight").split(_HEAD_ROWS)
        return [torch.cat([x @ piece.double().t() for piece in pieces], dim=1) for x in states]

    def hidden(self, sequences: Sequence[Prompt]) -> list[Tensor]:
        """float64 states [T, hidden] behind the last norm."""
        m = self.maths
        embedding = self._read("model.embed_tokens.weight")
        states = [self._embedded(prompt, embedding) for prompt in sequences]
        places = [_places(prompt) for prompt in sequences]
        if self._nudge:
            g = torch.Generator().manual_seed(0)
            signs = [torch.rand(x.shape, generator=g, dtype=torch.float64) * 2 - 1 for x in states]
            states = [x * (1 + self._nudge * s) for x, s in zip(states, signs, strict=True)]
        for layer in range(m.layers):
            get = self._getter(f"model.layers.{layer}.")
            states = [self._layer(x, get, layer, p) for x, p in zip(states, places, strict=True)]
        norm = self._read("model.norm.weight").double()
        return [_rms_norm(x, norm, m.eps) / m.logits for x in states]

    def _embedded(self, prompt: Prompt, embedding: Tensor) -> Tensor:
        parts = []
        for part in prompt:
            if isinstance(part, PictureRows):
                parts.append(part.rows.double())
            else:
                row = self._rotated_back(embedding[part].double()[None], "model.embed_tokens")
                parts.append(row * self.maths.embedding)
        return torch.cat(parts)

    def _getter(self, prefix: str) -> Get:
        """The tensors of a layer by the rest of their names, each read once."""
        kept: dict[str, Tensor] = {}

        def get(suffix: str) -> Tensor:
            if suffix not in kept:
                vector = suffix.endswith(("A_log", "dt_bias"))
                name = f"{prefix}{suffix}" if vector else f"{prefix}{suffix}.weight"
                kept[suffix] = self._read(name).double()
            return kept[suffix]

        return get

    def _rotation(self, width: int, module: str) -> tuple[int, Tensor] | None:
        """(block, signs) of a matrix with inputs of that width, None without a transform."""
        block = self.maths.blocks.get(width, 0)
        if not block or module in self.maths.plain:
            return None
        return block, self._read(f"model.rotation.{width}.weight").double().flatten()

    def _rotated(self, x: Tensor, module: str) -> Tensor:
        """x as the matrix `module` wants it."""
        found = self._rotation(x.shape[-1], module)
        return x if found is None else _by_hadamard(x * found[1], found[0])

    def _rotated_back(self, x: Tensor, module: str) -> Tensor:
        """Rows of the matrix `module` as what they mean."""
        found = self._rotation(x.shape[-1], module)
        return x if found is None else _by_hadamard(x, found[0]) * found[1]

    def _layer(self, x: Tensor, get: Get, layer: int, places: Tensor) -> Tensor:
        m = self.maths
        h = _rms_norm(x, get("input_layernorm"), m.eps)
        if m.delta_net is not None and layer in m.delta_net.layers:
            a = self._delta_net(h, get, layer) * m.residual
        else:
            a = self._attention(h, get, layer, places) * m.residual
        if not m.post_norms:
            x = x + a
            y = self._mlp(_rms_norm(x, get("post_attention_layernorm"), m.eps), get, layer)
            return x + y * m.residual
        x = x + _rms_norm(a, get("post_attention_layernorm"), m.eps)
        y = self._mlp(_rms_norm(x, get("pre_feedforward_layernorm"), m.eps), get, layer)
        return x + _rms_norm(y * m.residual, get("post_feedforward_layernorm"), m.eps)

    def _linear(self, x: Tensor, name: str, get: Get, layer: int) -> Tensor:
        """A projection: its own norm, rounded activations, the product, its bias."""
        m = self.maths
        if m.linear_norm_eps is not None:
            x = _rms_norm(x, get(f"{name}.rms_norm"), m.linear_norm_eps)
        weight = get(name)
        x = self._rotated(x, f"model.layers.{layer}.{name}")
        if self._int8:
            group = _group_of(weight) if m.group_scales else 0
            parts = x.split(group, dim=-1) if group else (x,)
            x = torch.cat([self._round(part) for part in parts], dim=-1)
        y = x @ weight.t()
        if name not in m.biases:
            return y
        scale = float(weight.abs().max()) if m.bias_is_scaled else 1.0
        return y + self._read(f"model.layers.{layer}.{name}.bias").double() * scale

    def _round(self, x: Tensor) -> Tensor:
        """Activations on 255 levels per token: absmax, half to even."""
        multiplier = 127.0 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        if self._note is not None:
            self._note(x * multiplier)
        return (x * multiplier).round().clamp(-128, 127) / multiplier

    def _attention(self, h: Tensor, get: Get, layer: int, places: Tensor) -> Tensor:
        m, tokens = self.maths, len(h)
        q, k, v = (self._linear(h, f"self_attn.{p}_proj", get, layer) for p in "qkv")
        q, k, v = (x.view(tokens, heads, -1) for x, heads in
                   zip((q, k, v), (m.heads, m.kv_heads, m.kv_heads), strict=True))  # fmt: skip
        if m.output_gate:
            q, gate = q.split(m.head_dim, dim=-1)
        if m.qk_norm:
            q = _rms_norm(q, get("self_attn.q_norm"), m.eps)
            k = _rms_norm(k, get("self_attn.k_norm"), m.eps)
        frequencies, factor = m.rope[layer]
        angles = _angles(places, frequencies.double(), m.sections)
        q, k = (_rotate(x, angles, factor) for x in (q, k))
        group = m.heads // m.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        back = torch.arange(tokens)[:, None] - torch.arange(tokens)  # from a token to another
        window = (m.windows[layer] if m.windows else 0) or tokens
        scores = torch.einsum("thd,shd->hts", q, k) * m.attention
        scores = scores.masked_fill((back < 0) | (back >= window), float("-inf"))
        a = torch.einsum("hts,shd->thd", scores.softmax(-1), v)
        a = (a * torch.sigmoid(gate) if m.output_gate else a).reshape(tokens, -1)
        if m.sub_norm_eps is not None:
            a = _rms_norm(a, get("self_attn.attn_sub_norm"), m.sub_norm_eps)
        return self._linear(a, "self_attn.o_proj", get, layer)

    def _delta_net(self, h: Tensor, get: Get, layer: int) -> Tensor:
        """Gated DeltaNet (arXiv 2412.06464), token by token, as in Qwen3.5: short convolution,
        queries and keys of length 1, a value head has the key head of its place in a group.
        """
        d, tokens = self.maths.delta_net, len(h)
        assert d is not None
        u = self._linear(h, "linear_attn.in_proj_qkv", get, layer)
        z = self._linear(h, "linear_attn.in_proj_z", get, layer).view(tokens, d.value_heads, -1)
        a, b = (h @ get(f"linear_attn.in_proj_{name}").t() for name in "ab")
        taps = get("linear_attn.conv1d")
        y = F.conv1d(u.t()[None], taps, padding=taps.shape[-1] - 1, groups=len(taps))
        y = F.silu(y[0, :, :tokens].t())
        keys = d.key_heads * d.key_dim
        q, k = (x.view(tokens, d.key_heads, -1) for x in y[:, : 2 * keys].chunk(2, dim=1))
        v = y[:, 2 * keys :].view(tokens, d.value_heads, -1)
        group = d.value_heads // d.key_heads
        q, k = (_unit(x).repeat_interleave(group, 1) for x in (q, k))
        q = q / d.key_dim**0.5
        beta = torch.sigmoid(b)
        decay = torch.exp(
            -get("linear_attn.A_log").exp() * F.softplus(a + get("linear_attn.dt_bias"))
        )
        state = torch.zeros(d.value_heads, d.key_dim, d.value_dim, dtype=torch.float64)
        outputs = []
        for t in range(tokens):
            state = state * decay[t, :, None, None]
            error = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + torch.einsum("hk,hv->hkv", k[t], error)
            outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
        o = _gated_norm(torch.stack(outputs), z, get("linear_attn.norm"), self.maths.eps)
        return self._linear(o.reshape(tokens, -1), "linear_attn.out_proj", get, layer)

    def _mlp(self, h: Tensor, get: Get, layer: int) -> Tensor:
        m = self.maths
        gate, up = (self._linear(h, f"mlp.{name}_proj", get, layer) for name in ("gate", "up"))
        if m.activation == "gelu_pytorch_tanh":
            z = F.gelu(gate, approximate="tanh")
        else:
            z = F.relu(gate).square() if m.activation == "relu2" else F.silu(gate)
        z = z * up
        if m.sub_norm_eps is not None:
            z = _rms_norm(z, get("mlp.ffn_sub_norm"), m.sub_norm_eps)
        return self._linear(z, "mlp.down_proj", get, layer)


def _rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def _gated_norm(x: Tensor, gate: Tensor, gain: Tensor, eps: float) -> Tensor:
    return _rms_norm(x, gain, eps) * F.silu(gate)


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


@functools.cache
def _hadamard(block: int) -> Tensor:
    """The normalised matrix of that size, by Sylvester's doubling."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / block**0.5


def _by_hadamard(x: Tensor, block: int) -> Tensor:
    """Every block of the last axis times the matrix, which is its own inverse."""
    return (x.unflatten(-1, (-1, block)) @ _hadamard(block)).flatten(-2)


def _places(prompt: Prompt) -> Tensor:
    """Time, height and width of every row of a prompt: float64 [T, 3].

    A picture's rows stand at one time, and as far down and to the right as in the picture; the text
    behind it goes on as far away as its longer side.
    """
    found, t = [], 0
    for part in prompt:
        if isinstance(part, PictureRows):
            found += [(t, t + r, t + c) for r in range(part.height) for c in range(part.width)]
            t += max(part.height, part.width)
        else:
            found.append((t, t, t))
            t += 1
    return torch.tensor(found, dtype=torch.float64).view(-1, 3)


def _angles(places: Tensor, frequencies: Tensor, sections: Sequence[int]) -> Tensor:
    """Of every row and frequency, float64 [T, pairs]: pairs go by time, height, width in turn."""
    axes = [0] * len(frequencies)
    for axis in (1, 2):
        for i in range(sections[axis] if sections else 0):
            axes[axis + 3 * i] = axis
    return places[:, axes] * frequencies


def _rotate(x: Tensor, angles: Tensor, factor: float) -> Tensor:
    """Half-split rotary embedding of x [T, heads, d] by angles [T, pairs].

    Features beyond two for each angle stay as they are.
    """
    pairs = angles.shape[1]
    x, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    cos, sin = (f(angles).unsqueeze(1) * factor for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


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
