"""A plain float64 forward of the networks that hf_writer draws: the oracle without a model library.

torch.float64 arithmetic only, written from the published maths of BitNet b1.58 and Llama (no code
of bitnet_ops, none of transformers). Slow and obvious: whole sequences, head by head, no cache.
"""

import math

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
    codes, scale, *group = weight
    if group:  # scales of groups of inputs: activations are rounded by these, too
        parts = zip(x.split(group[0], dim=1), codes.split(group[0], dim=1), strict=True)
        return sum(bit_linear(part, (c, scale), margins) for part, c in parts)
    integers, multiplier = quantize_activations(x)
    margins.note(x * multiplier)
    return integers @ codes.T / multiplier * scale


def rms_norm(x, gain, eps):
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * gain


def rotary(family):
    """(frequency of every pair, what multiplies cosines and sines) of a config's rope_scaling."""
    d, theta = family.head_dim, family.theta
    frequencies = theta ** (-2.0 * torch.arange(d // 2, dtype=torch.float64) / d)
    yarn = family.config_extra.get("rope_scaling")
    if yarn is None:
        return frequencies, 1.0
    kind = yarn.get("rope_type", yarn.get("type"))
    if kind == "longrope":
        return frequencies / torch.tensor(yarn["long_factor"], dtype=torch.float64), 1.0
    if kind == "llama3":
        return _llama3(frequencies, yarn), 1.0
    assert set(yarn) == {"type", "factor", "original_max_position_embeddings"}
    turns = [yarn["original_max_position_embeddings"] / (r * 2 * math.pi) for r in (32, 1)]
    low, high = (d * math.log(t) / (2 * math.log(theta)) for t in turns)
    low, high = max(math.floor(low), 0), min(math.ceil(high), d - 1)
    ramp = ((torch.arange(d // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    slowed = frequencies / yarn["factor"] * ramp + frequencies * (1 - ramp)
    return slowed, 0.1 * math.log(yarn["factor"]) + 1


def _llama3(frequencies, options):
    """By how often a pair turns within the original context: pair by pair, as Meta's code does."""
    out, original = [], options["original_max_position_embeddings"]
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    for frequency in frequencies.tolist():
        turns = original * frequency / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        out.append(kept * frequency + (1 - kept) * frequency / options["factor"])
    return torch.tensor(out, dtype=torch.float64)


def local_rotary(family):
    """Of Gemma's layers with a window: a base of their own, never scaled."""
    base, d = family.config_extra["rope_local_base_freq"], family.head_dim
    return base ** (-2.0 * torch.arange(d // 2, dtype=torch.float64) / d), 1.0


def rotate(x, frequencies, factor):
    """Half-split RoPE of x [T, heads, d] at positions 0..T-1."""
    tokens, _, d = x.shape
    angles = torch.arange(tokens, dtype=torch.float64)[:, None, None] * frequencies
    first, second = x[..., : d // 2], x[..., d // 2 :]
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def window_of(family, layer):
    """How many positions a token of the layer sees, itself included; None: all before it."""
    extra, sliding = family.config_extra, False
    if "layer_types" in extra:
        sliding = extra["layer_types"][layer] == "sliding_attention"
    elif extra.get("use_sliding_window"):
        sliding = layer >= extra["max_window_layers"]
    return extra["sliding_window"] if sliding else None


def causal_attention(q, k, v, scale=None, window=None):
    """q [T, H, d], k and v [T, KV, d] -> [T, H * d]; scale None: 1 / sqrt(d)."""
    tokens, heads, d = q.shape
    group, output = heads // k.shape[1], torch.empty_like(q)
    back = torch.arange(tokens)[:, None] - torch.arange(tokens)  # from a token to another
    unseen = (back < 0) | (back >= (tokens if window is None else window))
    for head in range(heads):
        scores = q[:, head] @ k[:, head // group].T * (d**-0.5 if scale is None else scale)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
        output[:, head] = weights @ v[:, head // group]
    return output.reshape(tokens, heads * d)


def activation(family, gate):
    if family.activation == "gelu_pytorch_tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return gate / 2 * (1 + inner.tanh())
    relu2 = family.activation == "relu2"
    return gate.clamp(min=0).square() if relu2 else gate / (1 + (-gate).exp())


class Network:
    """hf_writer.make_network's network, its projections ternarised once.

    `int8`: round activations to int8, as every family but the dense ternary one does.
    """

    def __init__(self, family, network, int8=True):
        self.family, self.int8 = family, int8
        self.tensors = {
            name: self._ternary(name, value) if isinstance(value, dict) else torch.from_numpy(value)
            for name, value in network.items()
        }
        for name, value in self.tensors.items():  # what a norm multiplies by
            if family.gemma and name.endswith("norm") and not name.endswith("rms_norm"):
                self.tensors[name] = 1 + value
        extra = family.config_extra
        self.embedding = self.residual = self.logits = 1.0
        if family.gemma:
            self.embedding = family.hidden**0.5
        if family.model_type == "minicpm":
            self.embedding = extra["scale_emb"]
            self.residual = extra["scale_depth"] / family.layers**0.5
            self.logits = family.hidden / extra["dim_model_base"]

    def _ternary(self, name, value):
        if not self.family.dense_ternary:
            return ternary(value, self.family.reciprocal)
        scales = hf_writer.dense_scales(self.family, name, value)
        dense = torch.from_numpy(value["codes"] * scales)
        return (dense, 1.0, 128) if (scales != scales[:, :1]).any() else (dense, 1.0)

    def forward(self, ids, margins):
        """Token ids -> float64 logits [T, vocab]."""
        x = self.hidden(ids, margins)
        tied = self.family.tied or self.family.headless
        return x @ self.tensors["model.embed_tokens" if tied else "lm_head"].T

    def hidden(self, ids, margins):
        """Token ids -> float64 hidden states [T, hidden] after the last norm."""
        family = self.family
        x = self.tensors["model.embed_tokens"][torch.tensor(ids)] * self.embedding
        for layer in range(family.layers):

            def get(suffix, prefix=f"model.layers.{layer}."):
                return self.tensors[prefix + suffix]

            a = self._attention(get, x, margins, layer) * self.residual
            x = x + (self._gemma_norm(get, "post_attention", a) if family.gemma else a)
            y = self._mlp(get, x, margins) * self.residual
            x = x + (self._gemma_norm(get, "post_feedforward", y) if family.gemma else y)
        return rms_norm(x, self.tensors["model.norm"], family.eps) / self.logits

    def _gemma_norm(self, get, name, x):
        return rms_norm(x, get(f"{name}_layernorm"), self.family.eps)

    def _linear(self, get, name, x, margins):
        """A projection with the norm inside it and its bias."""
        if self.family.inner_norms:
            x = rms_norm(x, get(f"{name}.rms_norm"), self.family.inner_eps)
        codes, scale = get(name)[:2]
        y = bit_linear(x, get(name), margins) if self.int8 else x @ codes.T * scale
        if not (self.family.qkv_bias and name[-6:] in ("q_proj", "k_proj", "v_proj")):
            return y
        # offline AutoBitLinear of transformers multiplies x W + bias by weight_scale
        multiplied = not (self.family.reciprocal or self.family.online)
        return y + get(f"{name}.bias") * (scale if multiplied else 1.0)

    def _sub_norm(self, x, gain):
        eps = self.family.sub_eps
        return rms_norm(x, gain, self.family.eps if eps is None else eps)

    def _attention(self, get, x, margins, layer):
        family, tokens = self.family, len(x)
        h = rms_norm(x, get("input_layernorm"), family.eps)
        q, k, v = (self._linear(get, f"self_attn.{n}_proj", h, margins) for n in "qkv")
        q = q.reshape(tokens, family.heads, family.head_dim)
        k = k.reshape(tokens, family.kv_heads, family.head_dim)
        if family.qk_norm:
            q = rms_norm(q, get("self_attn.q_norm"), family.eps)
            k = rms_norm(k, get("self_attn.k_norm"), family.eps)
        rope, scale = rotary(family), None
        if family.gemma:
            scale = family.config_extra["query_pre_attn_scalar"] ** -0.5
            if family.config_extra["layer_types"][layer] == "sliding_attention":
                rope = local_rotary(family)
        q, k = rotate(q, *rope), rotate(k, *rope)
        v = v.reshape(tokens, family.kv_heads, family.head_dim)
        a = causal_attention(q, k, v, scale, window_of(family, layer))
        if family.sub_norms:
            a = self._sub_norm(a, get("self_attn.attn_sub_norm"))
        return self._linear(get, "self_attn.o_proj", a, margins)

    def _mlp(self, get, x, margins):
        norm = "pre_feedforward_layernorm" if self.family.gemma else "post_attention_layernorm"
        h = rms_norm(x, get(norm), self.family.eps)
        gate = self._linear(get, "mlp.gate_proj", h, margins)
        z = activation(self.family, gate) * self._linear(get, "mlp.up_proj", h, margins)
        if self.family.sub_norms:
            z = self._sub_norm(z, get("mlp.ffn_sub_norm"))
        return self._linear(get, "mlp.down_proj", z, margins)


def forward(family, network, ids):
    """Token ids (a list) -> (float64 logits [T, vocab], the smallest distance to a tie)."""
    margins = Margins()
    return Network(family, network).forward(ids, margins), margins.smallest


def clear_prompt(name, tokens=16, tries=64):
    """As `clear_prompt_of`, for one of hf_writer.FAMILIES."""
    return clear_prompt_of(name, hf_writer.FAMILIES[name], tokens, tries)


_found: dict = {}


def clear_prompt_of(name, family, tokens=16, tries=64):
    """Of `tries` random prompts the one whose codes keep furthest from ties: (ids, that distance).

    `name` is the key of the result, which is kept. fp32 errs by some 1e-5 of a code, so a right
    fp32 forward has all codes of a prompt whose distance is well above that, and must then give the
    logits of `forward` to fp32 rounding.
    """
    key = (name, tokens, tries)
    if key not in _found:
        _found[key] = _search(family, tokens, tries)
    return _found[key]


def _search(family, tokens, tries):
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
