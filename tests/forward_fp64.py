"""A plain float64 forward of the networks that hf_writer draws: the oracle without a model library.

torch.float64 arithmetic only, written from the published maths of BitNet b1.58 and Llama (no code
of bitnet_ops, none of transformers). Slow and obvious: whole sequences, head by head, no cache.
"""

import functools

import torch

import hf_writer


def quantize_activations(x):
    """x [T, K] -> (integer codes [T, K], multiplier s [T, 1]) with s = 127 / max(absmax, 1e-5)."""
    multiplier = 127.0 / x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-5)
    return (x * multiplier).round().clamp(-128, 127), multiplier


def ternary(projection, reciprocal):
    """(codes [M, K] in {-1, 0, 1}, the scale that multiplies) of one stored projection."""
    if "masters" in projection:
        masters = torch.from_numpy(projection["masters"])
        absmean = max(masters.abs().mean().item(), 1e-5)
        return (masters / absmean).round().clamp(-1, 1), absmean
    stored = projection["stored_scale"]
    codes = torch.from_numpy(projection["codes"]).double()
    return codes, 1.0 / stored if reciprocal else stored


class Margins:
    """The smallest distance of any x * s to a rounding tie: where fp32 may round otherwise."""

    def __init__(self):
        self.smallest = 0.5

    def note(self, scaled):
        distance = (scaled - scaled.floor() - 0.5).abs().min().item()
        self.smallest = min(self.smallest, distance)


def bit_linear(x, weight, margins):
    """x [T, K] through the (codes, scale) of `ternary`."""
    codes, scale = weight
    integers, multiplier = quantize_activations(x)
    margins.note(x * multiplier)
    return integers @ codes.T / multiplier * scale


def rms_norm(x, gain, eps):
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * gain


def rotate(x, theta):
    """Half-split RoPE of x [T, heads, d] at positions 0..T-1."""
    tokens, _, d = x.shape
    frequencies = theta ** (-2.0 * torch.arange(d // 2, dtype=torch.float64) / d)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None, None] * frequencies
    first, second = x[..., : d // 2], x[..., d // 2 :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def causal_attention(q, k, v):
    """q [T, H, d], k and v [T, KV, d] -> [T, H * d]."""
    tokens, heads, d = q.shape
    group, output = heads // k.shape[1], torch.empty_like(q)
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    for head in range(heads):
        scores = q[:, head] @ k[:, head // group].T / d**0.5
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        output[:, head] = weights @ v[:, head // group]
    return output.reshape(tokens, heads * d)


def activation(family, gate):
    relu2 = family.model_type == "bitnet"
    return gate.clamp(min=0).square() if relu2 else gate / (1 + (-gate).exp())


class Network:
    """hf_writer.make_network's network, its projections ternarised once."""

    def __init__(self, family, network):
        self.family = family
        self.tensors = {
            name: ternary(value, family.reciprocal)
            if isinstance(value, dict)
            else torch.from_numpy(value)
            for name, value in network.items()
        }

    def forward(self, ids, margins):
        """Token ids -> float64 logits [T, vocab]."""
        family = self.family
        x = self.tensors["model.embed_tokens"][torch.tensor(ids)]
        for layer in range(family.layers):

            def get(suffix, prefix=f"model.layers.{layer}."):
                return self.tensors[prefix + suffix]

            x = x + self._attention(get, x, margins)
            x = x + self._mlp(get, x, margins)
        x = rms_norm(x, self.tensors["model.norm"], family.eps)
        return x @ self.tensors["model.embed_tokens" if family.tied else "lm_head"].T

    def _attention(self, get, x, margins):
        family, tokens = self.family, len(x)
        h = rms_norm(x, get("input_layernorm"), family.eps)
        q, k, v = (bit_linear(h, get(f"self_attn.{n}_proj"), margins) for n in "qkv")
        q = rotate(q.reshape(tokens, family.heads, family.head_dim), family.theta)
        k = rotate(k.reshape(tokens, family.kv_heads, family.head_dim), family.theta)
        a = causal_attention(q, k, v.reshape(tokens, family.kv_heads, family.head_dim))
        if family.sub_norms:
            a = rms_norm(a, get("self_attn.attn_sub_norm"), family.eps)
        return bit_linear(a, get("self_attn.o_proj"), margins)

    def _mlp(self, get, x, margins):
        h = rms_norm(x, get("post_attention_layernorm"), self.family.eps)
        gate = bit_linear(h, get("mlp.gate_proj"), margins)
        z = activation(self.family, gate) * bit_linear(h, get("mlp.up_proj"), margins)
        if self.family.sub_norms:
            z = rms_norm(z, get("mlp.ffn_sub_norm"), self.family.eps)
        return bit_linear(z, get("mlp.down_proj"), margins)


def forward(family, network, ids):
    """Token ids (a list) -> (float64 logits [T, vocab], the smallest distance to a tie)."""
    margins = Margins()
    return Network(family, network).forward(ids, margins), margins.smallest


@functools.cache
def clear_prompt(name, tokens=16, tries=64):
    """Of `tries` random prompts the one whose codes keep furthest from ties: (ids, that distance).

    `name` is one of hf_writer.FAMILIES. fp32 errs by some 1e-5 of a code, so a right fp32 forward
    has all codes of a prompt whose distance is well above that, and must then give the logits of
    `forward` to fp32 rounding.
    """
    family = hf_writer.FAMILIES[name]
    network = Network(family, hf_writer.make_network(family))
    best: tuple[list[int], float] = ([], -1.0)
    for seed in range(tries):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, family.vocab, (tokens,), generator=generator).tolist()
        margins = Margins()
        network.forward(ids, margins)
        if margins.smallest > best[1]:
            best = (ids, margins.smallest)
    return best
