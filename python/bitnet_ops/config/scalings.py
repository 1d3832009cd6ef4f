"""Constant factors of a family's maths, and what it does otherwise in single layers.

MiniCPM scales embeddings, what each sub-block adds, and the last states; Gemma 3 scales embeddings
and scores, and turns layers with a sliding window by other frequencies. Sources: MiniCPM's
modeling_minicpm.py, transformers 5 configuration_gemma3.py. It must not know tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitnet_ops.config.values import integer, number, positive, reject
from bitnet_ops.config.windows import FULL, SLIDING, layer_kinds

# family -> the keys of config.json that are read here
KEYS: dict[str, frozenset[str]] = {
    "": frozenset(),
    "minicpm": frozenset({"scale_emb", "scale_depth", "dim_model_base", "mup_denominator"}),
    "gemma3_text": frozenset(
        {"query_pre_attn_scalar", "rope_local_base_freq", "hidden_activation"}
    ),
}


@dataclass(frozen=True)
class Scalings:
    """embedding: multiplies embedded tokens. residual: multiplies what attention and MLP give.

    logits: what the last states are divided by. attention: of the scores, None: 1 / sqrt(head_dim).
    local_theta: the base of the rotary embedding of the layers `local`; None: they have no other.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    attention: float | None = None
    local_theta: float | None = None
    local: tuple[int, ...] = ()


def read_scalings(
    config: Mapping[str, Any], kind: str, hidden: int
) -> tuple[Scalings, Mapping[str, Any]]:
    """(scalings, config.json with a rotary embedding that all layers share)."""
    if kind == "minicpm":
        return _minicpm(config, hidden), config
    if kind == "gemma3_text":
        return _gemma(config, hidden)
    return Scalings(), config


def _stated(config: Mapping[str, Any], name: str) -> float:
    """A number that has no default: what a checkpoint was trained with is not guessed."""
    if config.get(name) is None:
        raise reject(name, None, "to be a number for minicpm", "its own default would be a guess")
    return positive(config, name, 1.0)


def _minicpm(config: Mapping[str, Any], hidden: int) -> Scalings:
    layers = integer(config, "num_hidden_layers")
    denominator = config.get("mup_denominator")
    if denominator is not None and denominator != layers:
        raise reject(
            "mup_denominator", denominator, f"to be absent or num_hidden_layers {layers}",
            "a residual scale by another depth is not implemented",
        )  # fmt: skip
    base = _stated(config, "dim_model_base")
    return Scalings(
        embedding=_stated(config, "scale_emb"),
        residual=_stated(config, "scale_depth") / math.sqrt(layers),
        logits=hidden / base,
    )


def _gemma(config: Mapping[str, Any], hidden: int) -> tuple[Scalings, Mapping[str, Any]]:
    plain, local_theta = _gemma_rope(config)
    kinds = layer_kinds(config, "gemma3")
    local = tuple(i for i, kind in enumerate(kinds) if kind == SLIDING)
    scalings = Scalings(
        embedding=math.sqrt(hidden),
        attention=positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        local_theta=local_theta if local else None,
        local=local,
    )
    return scalings, plain


def _gemma_rope(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
    """(config with the rotary embedding of full layers, theta of the sliding ones)."""
    block = config.get("rope_parameters")
    if not isinstance(block, Mapping) or not {FULL, SLIDING} & block.keys():
        return config, positive(config, "rope_local_base_freq", 10000.0)
    unknown = block.keys() - {FULL, SLIDING}
    if unknown:
        expected = f"to have {FULL} and {SLIDING} alone"
        raise reject("rope_parameters", sorted(unknown), expected, "repair config.json")
    own = block.get(SLIDING) or {}
    kind = own.get("rope_type", "default") if isinstance(own, Mapping) else own
    if kind != "default":
        name = f"rope_parameters.{SLIDING}.rope_type"
        raise reject(name, kind, "'default'", "scaled rotary embedding there is not implemented")
    theta = number(f"rope_parameters.{SLIDING}.rope_theta", own.get("rope_theta", 10000.0))
    return {**config, "rope_parameters": block.get(FULL) or {}}, theta
