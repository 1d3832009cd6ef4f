"""The blocks of an MTP head: `draft_keys` in the model's program, `draft_input` in its own.

A head guesses the token at position t + 1 from pairs up to t: the embedding of token t and the
state, behind the model's last norm, of token t - 1. Both are known as soon as the model has token
t, so the model's own program makes the keys and values of the head's attention (`draft_keys`), for
the whole prompt too. They are one more layer of its cache, at the positions of the tokens: what is
shared, saved, forked or taken back of the model's positions is so of the head's. The newest state
of each sequence is kept as the inputs of a convolution are, with those of drafts behind it.
Source: DeepSeek-V3, arXiv 2412.19437, 2.2 (multi-token prediction).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bitnet_ops.blocks.attention import Attention, rotated
from bitnet_ops.blocks.block import Block, Buffer, Line, Ops, Tensors, TensorSpec, Value
from bitnet_ops.blocks.mlp import Mlp
from bitnet_ops.config import ModelConfig
from bitnet_ops.config.attention import POLICY_KEYS

HEAD = "mtp."  # in front of the names of its tensors
STATES = "draft_states"
_LAYER = f"{HEAD}layers.0."
_SPARSITY = frozenset({"sparsity", "threshold", "top_k", "min_ratio", "max_ratio"})


def pair_keys(c: ModelConfig) -> dict[str, Value]:
    """The keys of what makes pairs."""
    assert c.draft is not None
    return {
        "embedding_norm": f"{HEAD}pre_fc_norm_embedding",
        "state_norm": f"{HEAD}pre_fc_norm_hidden",
        "fc": f"{HEAD}fc",
        "digits": c.draft.digits,
    }


def attention_line(c: ModelConfig) -> Line:
    """The attention of the head: as the model's last one, over all pairs."""
    assert c.draft is not None
    layer = max(i for i in range(c.num_hidden_layers) if not c.is_delta_net(i))
    line = Attention().line(c, layer)
    keys = _renamed(line.keys, layer)
    keys = {key: value for key, value in keys.items() if key not in POLICY_KEYS}
    keys["skip"] = 1  # at position 0 stands no pair
    return Line(line.kind, {**keys, "digits": c.draft.digits})


def mlp_line(c: ModelConfig) -> Line:
    """The MLP of the head."""
    assert c.draft is not None
    layer = c.num_hidden_layers - 1
    line = Mlp().line(c, layer)
    keys = {k: v for k, v in _renamed(line.keys, layer).items() if k not in _SPARSITY}
    keys["width"] = c.draft.intermediate_size
    return Line(line.kind, {**keys, "digits": c.draft.digits})


def _renamed(keys: Mapping[str, Value], layer: int) -> dict[str, Value]:
    prefix = f"model.layers.{layer}."
    return {
        key: value.replace(prefix, _LAYER) if isinstance(value, str) else value
        for key, value in keys.items()
    }


def _kept(model_hidden: int) -> Buffer:
    return Buffer(STATES, "sequence", (model_hidden,), "float32", 1)


def _pair_tensors(t: Tensors, hidden: int) -> None:
    t.norm("embedding_norm", hidden)
    t.norm("state_norm", hidden)
    t.projection("fc", hidden, 2 * hidden)


def _pairs(c: Ops, line: Line, embedded: Tensor, states: Tensor) -> Tensor:
    """fc of the normalised halves: F [tokens, hidden]."""
    halves = (("embedding_norm", embedded), ("state_norm", states))
    parts = [c.norm(line, key, c.rounded(half)) for key, half in halves]
    return c.project(line, "fc", torch.cat(parts, dim=-1))


class DraftKeys(Block):
    """Keys and values of the head for the new tokens; the residual stream stays as it is."""

    kind = "draft_keys"
    inputs = ("fc",), ("k", "v")

    def line(self, c: ModelConfig, layer: int) -> Line:
        of = attention_line(c).keys
        taken = ("norm", "k", "v", "k_norm", "kv_heads", "head_dim", "rope")
        keys = {**pair_keys(c), **{key: of[key] for key in taken if key in of}}
        return Line(self.kind, {**keys, "output_norm": "model.norm", "hidden": c.hidden_size})

    def tensors(self, line: Line, model: Line) -> dict[str, TensorSpec]:
        hidden, dim = model.integer("hidden"), line.integer("head_dim")
        t = Tensors(line, model)
        _pair_tensors(t, hidden)
        t.norm("output_norm", hidden)
        t.norm("norm", hidden)
        t.projection("k", line.integer("kv_heads") * dim, hidden)
        t.projection("v", line.integer("kv_heads") * dim, hidden)
        t.norm("k_norm", dim)
        return t.found

    def state(self, line: Line) -> tuple[Buffer, ...]:
        heads, dim = line.integer("kv_heads"), line.integer("head_dim")
        rows = [Buffer(name, "position", (heads, dim)) for name in ("key", "value")]
        return *rows, _kept(line.integer("hidden"))

    def run(self, c: Ops, line: Line, number: int, x: Tensor) -> Tensor:
        dim = line.integer("head_dim")
        states = c.norm(line, "output_norm", x)
        before = _shift(states, c)
        h = c.norm(line, "norm", _pairs(c, line, c.embedded, before))
        k, v = (c.project(line, key, h).unflatten(-1, (-1, dim)) for key in "kv")
        k = rotated(c, line, c.norm(line, "k_norm", k))
        c.store(number, k, v)
        return x


class DraftInput(Block):
    """The residual stream of pairs, from embeddings and kept states."""

    kind = "draft_input"
    inputs = (("fc",),)

    def line(self, c: ModelConfig, layer: int) -> Line:
        return Line(self.kind, {**pair_keys(c), "hidden": c.hidden_size})

    def tensors(self, line: Line, model: Line) -> dict[str, TensorSpec]:
        t = Tensors(line, model)
        _pair_tensors(t, model.integer("hidden"))
        return t.found

    def state(self, line: Line) -> tuple[Buffer, ...]:
        return (_kept(line.integer("hidden")),)

    def run(self, c: Ops, line: Line, number: int, x: Tensor) -> Tensor:
        slots, replays = c.step.state_steps[:, 0], c.step.state_steps[:, 1]
        return _pairs(c, line, x, c.states[STATES][slots, 0, replays]).float()


def _shift(states: Tensor, c: Ops) -> Tensor:
    """Of every token the state of the token before; the kept states become those of this step."""
    before = torch.zeros_like(states)
    begins, lengths = c.step.query_start_loc.tolist(), c.step.seq_lens.tolist()
    kept = c.states[STATES]
    for i, (slot, replays, drafts) in enumerate(c.step.state_steps.tolist()):
        begin, end = begins[i], begins[i + 1]
        rows = kept[slot, 0]
        old = torch.zeros_like(rows[0]) if lengths[i] == end - begin else rows[replays].clone()
        known = torch.cat([old[None], states[begin:end]])
        before[begin:end] = known[:-1]
        rows[: drafts + 1] = known[len(known) - 1 - drafts :]
    return before
