"""The networks that hf_writer draws in the plain float64 forward: an oracle without transformers.

The forward is bitnet_ops.convert.forward, which knows nothing of the package. What a family
computes is said here once more, from hf_writer's description and never from a ModelConfig.
"""

import math

import torch

import hf_writer
from bitnet_ops.convert.forward import Forward, Maths


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


def window_of(family, layer):
    """How many positions a token of the layer sees, itself included; 0: all before it."""
    extra, sliding = family.config_extra, False
    if "layer_types" in extra:
        sliding = extra["layer_types"][layer] == "sliding_attention"
    elif extra.get("use_sliding_window"):
        sliding = layer >= extra["max_window_layers"]
    return extra["sliding_window"] if sliding else 0


def maths(family):
    """What the family's networks compute, from hf_writer's description of it."""
    extra, attention, ropes = family.config_extra, family.head_dim**-0.5, {}
    if family.gemma:
        attention = extra["query_pre_attn_scalar"] ** -0.5
        ropes = dict.fromkeys(
            [i for i, kind in enumerate(extra["layer_types"]) if kind == "sliding_attention"],
            local_rotary(family),
        )
    minicpm = family.model_type == "minicpm"
    return Maths(
        layers=family.layers,
        heads=family.heads,
        kv_heads=family.kv_heads,
        head_dim=family.head_dim,
        activation=family.activation,
        eps=family.eps,
        rope=[ropes.get(layer) or rotary(family) for layer in range(family.layers)],
        attention=attention,
        windows=[window_of(family, layer) for layer in range(family.layers)],
        sub_norm_eps=(family.sub_eps or family.eps) if family.sub_norms else None,
        linear_norm_eps=family.inner_eps if family.inner_norms else None,
        qk_norm=family.qk_norm,
        post_norms=family.gemma,
        biases=tuple(f"self_attn.{p}_proj" for p in "qkv") if family.qkv_bias else (),
        # offline AutoBitLinear of transformers multiplies x W + bias by weight_scale
        bias_is_scaled=not (family.reciprocal or family.online),
        group_scales=family.dense_ternary,
        embedding=family.hidden**0.5 if family.gemma else extra["scale_emb"] if minicpm else 1.0,
        residual=extra["scale_depth"] / family.layers**0.5 if minicpm else 1.0,
        logits=family.hidden / extra["dim_model_base"] if minicpm else 1.0,
        tied=family.tied or family.headless,
    )


class Network:
    """hf_writer.make_network's network, its projections ternarised once.

    `int8`: round activations to int8, as every family but the dense ternary one does.
    """

    def __init__(self, family, network, int8=True):
        self.family, self.maths, self.int8 = family, maths(family), int8
        self.tensors = {name: self._values(name, value) for name, value in network.items()}

    def _values(self, name, value):
        if not isinstance(value, dict):
            value = torch.from_numpy(value)
            gemma = self.family.gemma and name.endswith("norm") and not name.endswith("rms_norm")
            return 1 + value if gemma else value  # what a norm multiplies by
        if self.family.dense_ternary:
            return torch.from_numpy(value["codes"] * hf_writer.dense_scales(
                self.family, name, value))  # fmt: skip
        codes, scale = ternary(value, self.family.reciprocal)
        return codes * scale

    def _read(self, name):
        return self.tensors[name.removesuffix(".weight")]

    def forward(self, ids, margins):
        """Token ids -> float64 logits [T, vocab]."""
        return self._of(margins).logits([ids])[0]

    def hidden(self, ids, margins):
        """Token ids -> float64 hidden states [T, hidden] after the last norm."""
        return self._of(margins).hidden([ids])[0]

    def _of(self, margins):
        return Forward(self.maths, self._read, int8=self.int8, note=margins.note)


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
