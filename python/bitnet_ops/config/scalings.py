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

# family -> the keys of config.json that are read here
KEYS: dict[str, frozenset[str]] = {
    "": frozenset(),
    "minicpm": frozenset({"scale_emb", "scale_depth", "dim_model_base", "mup_denominator"}),
    "gemma3_text": frozenset(
        {"query_pre_attn_scalar", "sliding_window", "layer_types", "sliding_window_pattern",
         "_sliding_window_pattern", "rope_local_base_freq", "hidden_activation"}
    ),
}  # fmt: skip
_FULL, _SLIDING = "full_attention", "sliding_attention"
_PATTERN = 6  # of Gemma 3: every sixth layer sees everything


@dataclass(frozen=True)
class Scalings:
    """embedding: multiplies embedded tokens. residual: multiplies what attention and MLP give.

    logits: what the last states are divided by. attention: of the scores, None: 1 / sqrt(head_dim).
    local_theta: the base of the rotary embedding of the layers `local`; None: they have no other.
    window: some layers see no more positions than this; up to that many they see all, and longer
    texts are rejected.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    attention: float | None = None
    local_theta: float | None = None
    local: tuple[int, ...] = ()
    window: int | None = None


def read_scalings(
    config: Mapping[str, Any], kind: str, hidden: int, positions: int
) -> tuple[Scalings, Mapping[str, Any], tuple[str, ...]]:
    """(scalings, config.json with a rotary embedding that all layers share, remarks)."""
    if kind == "minicpm":
        return _minicpm(config, hidden), config, ()
    if kind == "gemma3_text":
        return _gemma(config, hidden, positions)
    return Scalings(), config, ()


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


def _gemma(
    config: Mapping[str, Any], hidden: int, positions: int
) -> tuple[Scalings, Mapping[str, Any], tuple[str, ...]]:
    layers = integer(config, "num_hidden_layers")
    plain, local_theta = _gemma_rope(config)
    local = tuple(i for i, kind in enumerate(_layer_types(config, layers)) if kind == _SLIDING)
    remarks: tuple[str, ...] = ()
    window = None
    if local:
        window = integer(config, "sliding_window", 4096)
        if window < positions:
            remarks = (
                f"layers with a window of {window} positions: texts end there, since sliding "
                "windows are not implemented and up to that length they see everything",
            )
        else:
            window = None
    scalings = Scalings(
        embedding=math.sqrt(hidden),
        attention=positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        local_theta=local_theta if local else None,
        local=local,
        window=window,
    )
    return scalings, plain, remarks


def _gemma_rope(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
    """(config with the rotary embedding of full layers, theta of the sliding ones)."""
    block = config.get("rope_parameters")
    if not isinstance(block, Mapping) or not {_FULL, _SLIDING} & block.keys():
        return config, positive(config, "rope_local_base_freq", 10000.0)
    unknown = block.keys() - {_FULL, _SLIDING}
    if unknown:
        expected = f"to have {_FULL} and {_SLIDING} alone"
        raise reject("rope_parameters", sorted(unknown), expected, "repair config.json")
    own = block.get(_SLIDING) or {}
    kind = own.get("rope_type", "default") if isinstance(own, Mapping) else own
    if kind != "default":
        name = f"rope_parameters.{_SLIDING}.rope_type"
        raise reject(name, kind, "'default'", "scaled rotary embedding there is not implemented")
    theta = number(f"rope_parameters.{_SLIDING}.rope_theta", own.get("rope_theta", 10000.0))
    return {**config, "rope_parameters": block.get(_FULL) or {}}, theta


def _layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    kinds = config.get("layer_types")
    if kinds is None:
        names = ("sliding_window_pattern", "_sliding_window_pattern")
        name = next((name for name in names if config.get(name) is not None), names[0])
        pattern = integer(config, name, _PATTERN)
        return [_SLIDING if (i + 1) % pattern else _FULL for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {_FULL, _SLIDING}:
        expected = f"to be {layers} of {_FULL!r} and {_SLIDING!r}"
        raise reject("layer_types", str(kinds)[:60], expected, "other layers are not implemented")
    return kinds
