"""Sliding windows: which layers of a config.json see only the last positions, and how many.

A token at position p of a layer with a window w sees positions p - w + 1 .. p. Sources:
transformers 5 masking_utils.py, configuration_{gemma3,qwen2,qwen3}.py. It must not know tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitnet_ops.config.values import flag, integer, reject

FULL, SLIDING = "full_attention", "sliding_attention"
_WINDOW = 4096  # where a config.json is silent, in all these families
_PATTERN = 6  # of Gemma 3: every sixth layer sees everything
_FULL_LAYERS = 28  # of Qwen: so many layers in front of those with a window
_MOST_LAYERS = 1 << 16  # a list of them is made before anything proves that they are there

# kind of a family's windows -> the keys of config.json that are read here
KEYS: dict[str, frozenset[str]] = {
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
    layers = integer(config, "num_hidden_layers")
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
    _check_count(layers)
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    name = next((name for name in names if config.get(name) is not None), names[0])
    pattern = integer(config, name, _PATTERN)
    return [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]


def _behind_full_layers(config: Mapping[str, Any], layers: int) -> list[str]:
    """Qwen's: from layer max_window_layers on, which may be 0, every layer has a window."""
    _check_count(layers)
    first = config.get("max_window_layers")
    if first is None or isinstance(first, bool) or first != 0:
        first = integer(config, "max_window_layers", _FULL_LAYERS)
    return [SLIDING if i >= first else FULL for i in range(layers)]


def _check_count(layers: int) -> None:
    if layers > _MOST_LAYERS:
        raise reject("num_hidden_layers", layers, f"at most {_MOST_LAYERS}", "repair config.json")


def _check_kinds(kinds: object, layers: int) -> None:
    known = isinstance(kinds, list) and all(kind in (FULL, SLIDING) for kind in kinds)
    if not known or len(kinds) != layers:  # type: ignore[arg-type]
        expected = f"to be {layers} of {FULL!r} and {SLIDING!r}"
        raise reject("layer_types", str(kinds)[:60], expected, "other layers are not implemented")
