"""A draft head for a model that has none: one layer, distilled from the model's own states.

    head = train_draft_head(lm.model, sequences, steps=2000)
    head.save("draft/", config)

The head reads, for each position p, the embedding of token p and the model's state before it, and
gives the model's distribution of token p + 1. It is trained as it will run: with the roundings of
its matrices and their inputs, and for drafts of several tokens, each fed by the state of the one
before it. Plain torch; the model itself is only read.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from bitnet_ops.config import ModelConfig
from bitnet_ops.config.scalings import Scalings
from bitnet_ops.convert.write import building, check_destination
from bitnet_ops.models import Decoder
from bitnet_ops.nn.digits import DIGITS, digit_group
from bitnet_ops.nn.rotary import rotary
from bitnet_ops.training.linear import quantize_activations_ste
from bitnet_ops.training.model import DROPPED, TrainingError

Feed = Literal["after", "before"]
PREFIX = "mtp."
GATE = f"{PREFIX}layers.0.mlp.gate_proj.weight"
MAX_DEPTH = 3


class _RoundToLevels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: int, digits: int) -> Tensor:
        w = weight.unflatten(-1, (-1, group))
        step = w.abs().amax(-1, keepdim=True) / ((3**digits - 1) // 2)
        step = step.clamp(min=torch.finfo(w.dtype).tiny)
        return ((w / step).round() * step).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


def round_to_levels_ste(weight: Tensor, digits: int) -> Tensor:
    """A matrix F [N, K] as `nn.digits.to_digits` keeps it: 3^digits levels a group of weights.

    The gradient passes unchanged.
    """
    group = digit_group(weight.shape[-1])
    return cast(Tensor, _RoundToLevels.apply(weight, group, digits))


class DigitLinear(nn.Linear):
    """y = q8(x) @ levels(weight)^T, as a matrix of digits gives it; gradients skip both roundings.

    Inputs are rounded to int8 with a scale for every group of features, as the product of a matrix
    with scales of groups does. `compute`: the dtype of the product.
    """

    digits = DIGITS
    compute = torch.float32
    rounded: Tensor | None = None  # while one forward reads it several times

    def forward(self, input: Tensor) -> Tensor:
        group = digit_group(self.in_features)
        x = quantize_activations_ste(input.unflatten(-1, (-1, group))).flatten(-2)
        w = self.rounded
        if w is None:
            w = round_to_levels_ste(self.weight, self.digits).to(self.compute)
        return F.linear(x.to(self.compute), w).to(input.dtype)


class _Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class _Keys:
    """Keys and values [B, kv heads, n, head_dim] of one depth."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v


class _Attention(nn.Module):
    frequencies: Tensor
    compute = torch.float32

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        dim, hidden = c.head_dim, c.hidden_size
        self.heads, self.kv_heads, self.dim = c.num_attention_heads, c.num_key_value_heads, dim
        self.gated, self.scale = int(c.output_gate), c.attention_scale
        query, key = self.heads * dim, self.kv_heads * dim
        self.q_proj = DigitLinear(hidden, query * (1 + self.gated), bias=False)
        self.k_proj = DigitLinear(hidden, key, bias=False)
        self.v_proj = DigitLinear(hidden, key, bias=False)
        self.o_proj = DigitLinear(query, hidden, bias=False)
        none = nn.Identity()
        self.q_norm = _Norm(dim, c.rms_norm_eps) if c.qk_norm else none
        self.k_norm = _Norm(dim, c.rms_norm_eps) if c.qk_norm else none
        self.attn_sub_norm = _Norm(query, _sub_eps(c)) if c.sub_norms else none
        frequencies, self.factor = rotary(c)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: Tensor, first: int, before: list[_Keys]) -> Tensor:
        """What is added to the residual stream, [B, n, hidden].

        x: the normed rows of depth d = len(before) + 1, of positions first .. first + n - 1. Row i
        sees rows up to i of depth 1, and row i of every other depth: what a draft of that many
        tokens finds in the cache. Its own keys are appended to `before`.
        """
        n = x.shape[1]
        q, k, v = (
            p(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for p, heads in (
                (self.q_proj, self.heads),
                (self.k_proj, self.kv_heads),
                (self.v_proj, self.kv_heads),
            )
        )
        q, gate = q[..., : self.dim], q[..., self.dim :]
        angle = torch.arange(first, first + n, device=x.device)[:, None] * self.frequencies
        cos, sin = angle.cos() * self.factor, angle.sin() * self.factor
        q = _turned(self.q_norm(q), cos, sin) * self.scale
        k = _turned(self.k_norm(k), cos, sin)
        before.append(_Keys(k, v))
        groups = self.heads // self.kv_heads

        def shared(t: Tensor) -> Tensor:
            return t[:, :, :n].repeat_interleave(groups, 1)

        prompt, *drafts = before
        kind = self.compute
        scores = (q.to(kind) @ shared(prompt.k).to(kind).transpose(-1, -2)).to(q.dtype)
        scores = scores + torch.full((n, n), -math.inf, dtype=q.dtype).triu(1)
        single = [(q * shared(keys.k)).sum(-1, keepdim=True) for keys in drafts]
        shares = torch.softmax(torch.cat([scores, *single], -1), -1)
        y = (shares[..., :n].to(kind) @ shared(prompt.v).to(kind)).to(q.dtype)
        for i, keys in enumerate(drafts):
            y = y + shares[..., n + i, None] * shared(keys.v)
        if self.gated:
            y = y * torch.sigmoid(gate)
        return cast(Tensor, self.o_proj(self.attn_sub_norm(y.transpose(1, 2).flatten(-2))))


def _sub_eps(c: ModelConfig) -> float:
    return c.rms_norm_eps if c.sub_norm_eps is None else c.sub_norm_eps


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads F [..., n, dim] by their positions, in the features that have a frequency."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class _Mlp(nn.Module):
    def __init__(self, c: ModelConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = DigitLinear(c.hidden_size, width, bias=False)
        self.up_proj = DigitLinear(c.hidden_size, width, bias=False)
        self.down_proj = DigitLinear(width, c.hidden_size, bias=False)
        self.ffn_sub_norm = _Norm(width, _sub_eps(c)) if c.sub_norms else nn.Identity()
        self.activation = _ACTIVATIONS[c.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        product = self.activation(self.gate_proj(x)) * self.up_proj(x)
        return cast(Tensor, self.down_proj(self.ffn_sub_norm(product)))


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class _Layer(nn.Module):
    def __init__(self, c: ModelConfig, width: int) -> None:
        super().__init__()
        self.input_layernorm = _Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = _Attention(c)
        self.post_attention_layernorm = _Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = _Mlp(c, width)

    def forward(self, x: Tensor, first: int, before: list[_Keys]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), first, before)
        return x + cast(Tensor, self.mlp(self.post_attention_layernorm(x)))


class DraftHead(nn.Module):
    """The layer that is trained; its parameters are named as in a file, without "mtp."

    Args:
        config: of the model that it drafts for, whose layers give it its form.
        intermediate_size: of its MLP; None: the model's.
        feed: what the next draft reads: its rows after the last norm, or before it.
        digits: each of its weights has 3^digits levels.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        intermediate_size: int | None = None,
        feed: Feed = "after",
        digits: int = DIGITS,
    ) -> None:
        super().__init__()
        check_has_head(config)
        config = replace(config, draft=None)  # a head that the model has says nothing of this one
        hidden, eps = config.hidden_size, config.rms_norm_eps
        width = config.intermediate_size if intermediate_size is None else intermediate_size
        self.config, self.feed, self.digits, self.width = config, feed, digits, width
        self.fc = DigitLinear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = _Norm(hidden, eps), _Norm(hidden, eps)
        self.layers = nn.ModuleList([_Layer(config, width)])
        self.norm = _Norm(hidden, eps)
        for module in self.modules():
            if isinstance(module, DigitLinear):
                digit_group(module.in_features)
                module.digits = digits
                nn.init.normal_(module.weight, 0, 0.02)

    def forward(self, embeddings: Tensor, states: Tensor, depth: int = 1) -> list[Tensor]:
        """What the output head reads for each depth: F [B, T - d, hidden] for d = 1 .. depth.

        Args:
            embeddings: F [B, T, hidden] of the tokens.
            states: F [B, T, hidden] of the model, behind its last norm.
        Row i of depth d has read token i + d, and the model's states up to i: it says what token
        i + d + 1 will be.
        """
        rows: list[Tensor] = []
        before: list[_Keys] = []
        matrices = [module for module in self.modules() if isinstance(module, DigitLinear)]
        for m in matrices:
            m.rounded = round_to_levels_ste(m.weight, m.digits).to(m.compute)
        for d in range(1, depth + 1):
            pair = (
                self.pre_fc_norm_embedding(embeddings[:, d:]),
                self.pre_fc_norm_hidden(states[:, : embeddings.shape[1] - d]),
            )
            x = self.layers[0](self.fc(torch.cat(pair, -1)), d, before)
            rows.append(self.norm(x))
            states = rows[-1] if self.feed == "after" else x
        for m in matrices:
            m.rounded = None
        return rows

    def compute_on(self, dtype: torch.dtype) -> None:
        """Let matrices multiply in `dtype`; all else stays as its parameters are."""
        for module in self.modules():
            if isinstance(module, DigitLinear | _Attention):
                module.compute = dtype


def check_has_head(config: ModelConfig) -> None:
    """Raise TrainingError unless a DraftHead can be made for models of `config`."""
    found = None
    if config.rotation is not None:
        found = "rotated matrices"
    elif config.scalings != Scalings() or config.post_norms or config.linear_norms:
        found = f"the factors or norms of {config.model_type}"
    elif config.biases:
        found = "biases"
    elif config.embedding_only:
        found = "no output head"
    if found is not None:
        raise TrainingError(
            "draft head: expected a model whose layers are norm, attention, norm and MLP, got one "
            f"with {found}; draft by n-grams there (speculation='ngram')"
        )


# Training ------------------------------------------------------------------------------------


class _Distilled(torch.autograd.Function):
    """Cross entropy of softmax(states @ head^T) to a target, summed over rows; gradient to states.

    `wanted` F [rows, hidden] is target @ head: all that is needed of the target.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, wanted: Tensor) -> Tensor:
        logits = states.to(head.dtype) @ head.t()
        shares = torch.softmax(logits, -1)
        ctx.save_for_backward((shares @ head).float().sub_(wanted))
        # the logarithm of the sum of exponentials, by the largest share
        largest, at = shares.max(-1)
        logs = logits.gather(-1, at.unsqueeze(-1)).squeeze(-1).float() - largest.float().log()
        return (logs - (states * wanted).sum(-1)).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (difference,) = ctx.saved_tensors
        return difference * gradients[0], None, None


@dataclass(frozen=True)
class Trunk:
    """What a head is trained over: a model, its embedding and its output head, float32 [V, hidden].

    Both are as the model has them in memory, rounded where they are.
    """

    model: Decoder
    embedding: Tensor
    head: Tensor

    @classmethod
    def of(cls, model: Decoder) -> Trunk:
        """Raises TrainingError for a model whose layers a head cannot have."""
        check_has_head(model.config)
        ids = torch.arange(model.config.vocab_size)
        embedding = model.model.embed_tokens.embed(ids).float().clone()
        tied = model.config.tie_word_embeddings
        return cls(model, embedding, embedding if tied else model.head.embed(ids).float().clone())

    @torch.no_grad()
    def states(self, sequence: Sequence[int] | Tensor) -> Tensor:
        """F32 [T, hidden], behind the last norm, of the ids [T] of one text."""
        ids = torch.as_tensor(sequence, dtype=torch.int64)
        return self.model.hidden(ids.unsqueeze(0))[0].clone()


@dataclass(frozen=True)
class DraftHeadWeights:
    """A trained head: float32 tensors under their names in a file, and what they belong to.

    Matrices stand at their levels, so that they lose nothing when they are stored as digits.
    losses: of every step, cross entropy to the model's distribution in nats, of each depth.
    """

    tensors: Mapping[str, Tensor]
    config: ModelConfig
    intermediate_size: int
    feed: Feed = "after"
    digits: int = DIGITS
    losses: Sequence[tuple[float, ...]] = field(default=(), repr=False)

    def save(self, folder: str | os.PathLike[str], config: Mapping[str, Any]) -> Path:
        """Write config.json and model.safetensors into the new folder `folder`, and return it.

        `bitnet-ops convert MODEL OUT --draft-from FOLDER` takes the head from there, with
        `--draft-feed before` where that is its `feed`. config: the parsed config.json of the model
        that the head was trained over. Matrices become bfloat16, which keeps their levels. Raises
        TrainingError for another config, ConvertError where the folder exists.
        """
        own = replace(self.config, draft=None, policies=(), sparsity=None)
        if ModelConfig.from_hf(config, ignore_unknown=True) != own:
            raise TrainingError(
                "draft head: expected the config.json of the model that the head was trained over, "
                "got another one; pass its own"
            )
        kept = {key: value for key, value in config.items() if key not in DROPPED}
        target = Path(folder)
        check_destination(target / "draft-head", target, force=False)
        tensors = {
            name: (t.to(torch.bfloat16) if t.dim() == 2 else t).contiguous()
            for name, t in self.tensors.items()
        }
        with building(target, force=False) as place:
            save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
            text = json.dumps(kept, indent=2)
            (place / "config.json").write_text(text + "\n", encoding="utf-8")
        return target

    def head(self) -> DraftHead:
        """The module with these weights."""
        head = DraftHead(
            self.config,
            intermediate_size=self.intermediate_size,
            feed=self.feed,
            digits=self.digits,
        )
        _fill(head, self.tensors)
        return head.eval()


def _fill(head: DraftHead, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors, by their names in a file, into a head; TrainingError where they are others."""
    own = {f"{PREFIX}{name}": tuple(p.shape) for name, p in head.named_parameters()}
    given = {name: tuple(t.shape) for name, t in tensors.items()}
    if given != own:
        wrong = sorted(
            name for name in own.keys() | given.keys() if own.get(name) != given.get(name)
        )
        raise TrainingError(
            f"draft head: expected {wrong[0]} {_shown(own, wrong[0])} for this model, got "
            f"{_shown(given, wrong[0])}; the head belongs to another model, or another width"
        )
    head.load_state_dict({name.removeprefix(PREFIX): t for name, t in tensors.items()})


def _shown(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "none"


class _Batches:
    """Pieces of `length` tokens, in a new random order each time all have been taken."""

    def __init__(self, texts: Sequence[tuple[Tensor, Tensor]], length: int, seed: int) -> None:
        self.texts, self.length, self.random = texts, length, random.Random(seed)
        self.pieces: list[tuple[int, int]] = []

    def take(self, count: int) -> tuple[Tensor, Tensor]:
        """ids int64 [count, length], states F32 [count, length, hidden]."""
        while len(self.pieces) < count:
            again = []
            for number, (ids, _) in enumerate(self.texts):
                spare = len(ids) % self.length  # so that every place begins a piece now and then
                first = self.random.randint(0, spare)
                again += [
                    (number, at) for at in range(first, len(ids) - self.length + 1, self.length)
                ]
            self.random.shuffle(again)
            self.pieces += again
        taken, self.pieces = self.pieces[:count], self.pieces[count:]
        parts = [tuple(t[at : at + self.length] for t in self.texts[n]) for n, at in taken]
        ids, states = (torch.stack(t) for t in zip(*parts, strict=True))
        return ids, states.float()


def train_draft_head(
    model: Decoder,
    sequences: Iterable[Sequence[int] | Tensor],
    *,
    steps: int,
    minutes: float = math.inf,
    intermediate_size: int | None = None,
    feed: Feed = "after",
    digits: int = DIGITS,
    depth: int = MAX_DEPTH,
    length: int = 256,
    batch: int = 8,
    rate: float = 2e-3,
    compute: torch.dtype = torch.float32,
    compiled: bool = False,
    start: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    report: Callable[[int, tuple[float, ...], DraftHead], None] | None = None,
) -> DraftHeadWeights:
    """A head that drafts for `model`, trained to give the model's own distributions.

    Args:
        model: stays as it is. Its layers give the head its form.
        sequences: ids of texts like those that it will write. A text of fewer than `length` tokens
            is left out. States of all are computed first and kept: 2 * hidden bytes a token.
        steps, minutes: whichever ends first; the rate falls to nothing by then.
        intermediate_size: of the head's MLP; None: the model's.
        feed: what the next draft reads, the head's rows after its last norm, or before it.
        digits: weights are trained at 3^digits levels a group.
        depth: how many drafts in a row it is trained for, 1 to 3, each fed by the one before.
        length, batch: tokens of a piece of text, pieces of a step.
        rate: of AdamW.
        compute: of products of matrices; bfloat16 is faster on CPUs with AMX.
        compiled: let torch.compile fuse the head's forward.
        start: weights to begin with, by their names in a file (DraftHeadWeights.tensors); None:
            random ones. Those of another head decide intermediate_size.
        report: called after every step with its number, the losses of each depth, and the head.
    Returns the weights. Raises TrainingError for a model whose layers a head cannot have, for
    other depths, and where no text is long enough.
    """
    if not 1 <= depth <= MAX_DEPTH:
        raise TrainingError(f"draft head: expected depth from 1 to {MAX_DEPTH}, got {depth}")
    trunk = Trunk.of(model)
    texts = [torch.as_tensor(s, dtype=torch.int64) for s in sequences]
    texts = [ids for ids in texts if len(ids) >= length]
    if not texts:
        raise TrainingError(
            f"draft head: expected a text of {length} tokens or more, got none; give longer ones, "
            "or a smaller length"
        )
    if intermediate_size is None and start is not None and GATE in start:
        intermediate_size = len(start[GATE])
    batches = _Batches([(ids, trunk.states(ids).half()) for ids in texts], length, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = DraftHead(
            model.config, intermediate_size=intermediate_size, feed=feed, digits=digits
        )
    if start is not None:
        _fill(head, start)
    head.compute_on(compute)
    forward = torch.compile(head, dynamic=False) if compiled else head
    optimizer = _Both(head, rate)
    output, shares = trunk.head.to(compute), [1 / (1 + d) for d in range(depth)]
    losses: list[tuple[float, ...]] = []
    began, progress = time.monotonic(), 0.0
    while progress < 1.0:
        step = len(losses) + 1
        progress = max(step / steps, (time.monotonic() - began) / (60 * minutes))
        ids, states = batches.take(batch)
        with torch.no_grad():
            wanted = torch.softmax(states.to(compute) @ output.t(), -1) @ output
        rows = forward(F.embedding(ids, trunk.embedding), states, depth)
        of_depths = [
            _Distilled.apply(r.flatten(0, 1), output, wanted[:, d:].float().flatten(0, 1))
            / (r.shape[0] * r.shape[1])
            for d, r in enumerate(rows, 1)
        ]
        loss = sum(share * value for share, value in zip(shares, of_depths, strict=True))
        cast(Tensor, loss).backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step(rate * min(step / 50, 0.5 + 0.5 * math.cos(math.pi * min(progress, 1))))
        losses.append(tuple(float(value.detach()) for value in of_depths))
        if report is not None:
            report(step, losses[-1], head)
    return weights_of(head, losses)


class _Both:
    """Muon for matrices, AdamW for norms, as one optimizer."""

    def __init__(self, head: DraftHead, rate: float) -> None:
        matrices = [p for p in head.parameters() if p.dim() == 2]
        norms = [p for p in head.parameters() if p.dim() != 2]
        self.parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, rate, 0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(norms, rate, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, rate: float) -> None:
        """One step at this rate; gradients are dropped."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)


def weights_of(head: DraftHead, losses: Sequence[tuple[float, ...]] = ()) -> DraftHeadWeights:
    """What a trained module is in a file."""
    found = {f"{PREFIX}{n}": p.detach().float().clone() for n, p in head.named_parameters()}
    tensors = {
        name: round_to_levels_ste(t, head.digits) if t.dim() == 2 else t
        for name, t in found.items()
    }
    return DraftHeadWeights(tensors, head.config, head.width, head.feed, head.digits, losses)


# Measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Acceptance:
    """How often drafts of a head are what its model gives, by depth, the first draft first.

    agreeing: shares of all drafts of that depth, each made with the text's own tokens before it.
    accepted: shares of all places at which this draft and those before it agree: what a step that
    verifies so many keeps. places: how many were looked at.
    """

    agreeing: tuple[float, ...]
    accepted: tuple[float, ...]
    places: int

    @property
    def tokens_a_step(self) -> float:
        """Tokens that a step gives which verifies a draft of every depth."""
        return 1 + sum(self.accepted)


@torch.no_grad()
def measure_acceptance(
    model: Decoder,
    weights: DraftHeadWeights,
    sequences: Iterable[Sequence[int] | Tensor],
    *,
    prompts: Sequence[int] | None = None,
    temperature: float = 0.0,
    depth: int = MAX_DEPTH,
    seed: int = 0,
) -> Acceptance:
    """Drafts at every place of texts against what `model` gives there; the head runs in float64.

    Args:
        sequences: ids of texts. Behind each place stand the text's own tokens, whatever the model
            would have given: of texts that the model has written itself, acceptance is what a
            generation sees.
        prompts: for each text how many of its first tokens the model was given; drafts there do not
            count. None: all count.
        temperature: 0: both take the largest logit. Above it, the texts must be drawn by the model
            at this temperature; the head draws with the noise that made the model draw them.
        seed: of that noise.
    """
    trunk, head = Trunk.of(model), weights.head().double()
    head.compute_on(torch.float64)
    output, noise = trunk.head.double(), torch.Generator().manual_seed(seed)
    agreeing, accepted, drafts = torch.zeros(3, depth, dtype=torch.float64)
    places = 0
    for number, text in enumerate(sequences):
        ids = torch.as_tensor(text, dtype=torch.int64)
        starts = slice(0 if prompts is None else max(prompts[number] - 1, 0), len(ids) - depth - 1)
        if starts.stop <= starts.start:
            continue
        states = trunk.states(ids).double()
        logits, given, added = states @ output.t(), ids[1:], torch.zeros(())
        if temperature > 0:
            logits = logits[:-1] / temperature
            added = _noise_of(logits, given, noise)
        else:
            given = logits.argmax(-1)
        embeddings = trunk.embedding.double()[ids]
        kept = torch.ones(starts.stop - starts.start, dtype=torch.bool)
        for d, rows in enumerate(head(embeddings[None], states[None], depth), 1):
            drawn = rows[0] @ output.t() / (temperature or 1.0)
            drawn = drawn[: len(given) - d]
            agree = (drawn + (added[d:] if temperature > 0 else added)).argmax(-1) == given[d:]
            agree = agree[starts.start :]
            agreeing[d - 1] += agree.sum()
            drafts[d - 1] += len(agree)
            kept &= agree[: len(kept)]
            accepted[d - 1] += kept.sum()
        places += len(kept)
    if not places:
        raise TrainingError(
            f"draft head: expected a text of more than {depth + 1} tokens behind its prompt, got "
            "none; give longer ones"
        )
    return Acceptance(
        tuple((agreeing / drafts).tolist()), tuple((accepted / places).tolist()), places
    )


def _noise_of(logits: Tensor, drawn: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise F64 [n, V] of which a draw by the largest of logits + noise gave `drawn` [n].

    The largest sum is Gumbel-distributed about the logarithm of the sum of exponentials, whichever
    token has it; the others are Gumbel-distributed below it.
    """

    def exponential(*shape: int) -> Tensor:
        u = torch.rand(*shape, dtype=torch.float64, generator=generator)
        return (-torch.log1p(-u)).clamp(min=1e-300)

    largest = torch.logsumexp(logits, -1) - exponential(len(logits)).log()
    below = torch.exp(-largest).unsqueeze(-1) + exponential(*logits.shape) * torch.exp(-logits)
    sums = -torch.log(below)
    sums.scatter_(-1, drawn.unsqueeze(-1), largest.unsqueeze(-1))
    return sums - logits
