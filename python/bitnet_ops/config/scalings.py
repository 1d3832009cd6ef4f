"""What families do otherwise in single layers, or by a constant factor: windows and scalings.

Which layers of a config.json see only the last positions, and how many: a token at position p of a
layer with a window w sees positions p - w + 1 .. p. MiniCPM scales embeddings, what each sub-block
adds, and the last states; Gemma 3 scales embeddings and scores, and turns layers with a sliding
window by other frequencies. Sources: transformers 5 masking_utils.py,
configuration_{gemma3,qwen2,qwen3}.py; MiniCPM's modeling_minicpm.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitnet_ops.config.values import MAX_LAYERS, base, factor, flag, integer, reject

FULL, SLIDING = "full_attention", "sliding_attention"
_WINDOW = 4096  # where a config.json is silent, in all these families
_PATTERN = 6  # of Gemma 3: every sixth layer sees everything
_FULL_LAYERS = 28  # of Qwen: so many layers in front of those with a window

# kind of a family's windows -> the keys of config.json that are read here
WINDOW_KEYS: dict[str, frozenset[str]] = {
    "": frozenset(),
    "qwen": frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}),
    "gemma3": frozenset(
        {"sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"}
    ),
}


def read_windows(config: Mapping[str, Any], kind: str) -> tuple[int, ...]:
    """The window of every layer, 0: none; empty where no layer has one."""
    kinds = layer_kinds(config, kind)
    if SLIDING not in kinds:
        return ()
    window = integer(config, "sliding_window", _WINDOW)
    return tuple(window if layer == SLIDING else 0 for layer in kinds)


def layer_kinds(config: Mapping[str, Any], kind: str) -> list[str]:
    """FULL or SLIDING of every layer; empty for families without windows."""
    if not kind:
        return []
    layers = integer(config, "num_hidden_layers", maximum=MAX_LAYERS)
    stated = config.get("layer_types")
    if stated is not None:
        _check_kinds(stated, layers)
    if kind == "gemma3":
        return _by_pattern(config, layers) if stated is None else stated
    on = config.get("use_sliding_window") is not None and flag(config, "use_sliding_window", False)
    on = on and config.get("sliding_window", _WINDOW) is not None  # null: there are none
    if stated is None:
        return _behind_full_layers(config, layers) if on else []
    if SLIDING in stated and not on:
        expected = f"to hold only {FULL!r} where use_sliding_window is off"
        raise reject("layer_types", str(stated)[:60], expected, "which of them holds is not clear")
    return stated


def _by_pattern(config: Mapping[str, Any], layers: int) -> list[str]:
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    name = next((name for name in names if config.get(name) is not None), names[0])
    pattern = integer(config, name, _PATTERN)
    return [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]


def _behind_full_layers(config: Mapping[str, Any], layers: int) -> list[str]:
    """Qwen's: from layer max_window_layers on, which may be 0, every layer has a window."""
    first = config.get("max_window_layers")
    if first is None or isinstance(first, bool) or first != 0:
        first = integer(config, "max_window_layers", _FULL_LAYERS)
    return [SLIDING if i >= first else FULL for i in range(layers)]


def _check_kinds(kinds: object, layers: int) -> None:
    known = isinstance(kinds, list) and all(kind in (FULL, SLIDING) for kind in kinds)
    if not known or len(kinds) != layers:  # type: ignore[arg-type]
        expected = f"to be {layers} of {FULL!r} and {SLIDING!r}"
        raise reject("layer_types", str(kinds)[:60], expected, "other layers are not implemented")


# Constant factors --------------------------------------------------------------------------------

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
    return factor(config, name, 1.0)


def _minicpm(config: Mapping[str, Any], hidden: int) -> Scalings:
    layers = integer(config, "num_hidden_layers", maximum=MAX_LAYERS)
    denominator = config.get("mup_denominator")
    if denominator is not None and denominator != layers:
        raise reject(
            "mup_denominator", denominator, f"to be absent or num_hidden_layers {layers}",
            "a residual scale by another depth is not implemented",
        )  # fmt: skip
    return Scalings(
        embedding=_stated(config, "scale_emb"),
        residual=_stated(config, "scale_depth") / math.sqrt(layers),
        logits=hidden / _stated(config, "dim_model_base"),
    )


def _gemma(config: Mapping[str, Any], hidden: int) -> tuple[Scalings, Mapping[str, Any]]:
    plain, local_theta = _gemma_rope(config)
    kinds = layer_kinds(config, "gemma3")
    local = tuple(i for i, kind in enumerate(kinds) if kind == SLIDING)
    scalings = Scalings(
        embedding=math.sqrt(hidden),
        attention=factor(config, "query_pre_attn_scalar", 256) ** -0.5,
        local_theta=local_theta if local else None,
        local=local,
    )
    return scalings, plain


def _gemma_rope(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
    """(config with the rotary embedding of full layers, theta of the sliding ones)."""
    block = config.get("rope_parameters")
    if not isinstance(block, Mapping) or not {FULL, SLIDING} & block.keys():
        return config, base("rope_local_base_freq", config.get("rope_local_base_freq", 10000.0))
    # transformers 5 saves a rope_theta of null and the default rope_type beside the two kinds
    unknown = {k for k, v in block.items() if v is not None} - {FULL, SLIDING}
    if block.get("rope_type") == "default":
        unknown -= {"rope_type"}
    if unknown:
        expected = f"to have {FULL} and {SLIDING} alone"
        raise reject("rope_parameters", sorted(unknown), expected, "repair config.json")
    own = block.get(SLIDING) or {}
    kind = own.get("rope_type", "default") if isinstance(own, Mapping) else own
    if kind != "default":
        name = f"rope_parameters.{SLIDING}.rope_type"
        raise reject(name, kind, "'default'", "scaled rotary embedding there is not implemented")
    theta = base(f"rope_parameters.{SLIDING}.rope_theta", own.get("rope_theta", 10000.0))
    return {**config, "rope_parameters": block.get(FULL) or {}}, theta
