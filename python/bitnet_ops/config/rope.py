"""What config.json says of rotary embedding: its base, and how it is stretched to long contexts.

Source of the kinds, their options and defaults: transformers 5 `modeling_rope_utils.py`. What they
amount to in numbers is made by nn/rotary.py; here names and ranges are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitnet_ops.config.values import (
    UnsupportedModelError,
    base,
    factor,
    flag,
    integer,
    number,
    reject,
)

_BLOCKS = ("rope_parameters", "rope_scaling")
_LARGEST = 1e6  # of a factor; published ones stay below 100
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_ORIGINAL = "original_max_position_embeddings"
# kind -> its options
_OPTIONS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL},
    "yarn": {"factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"}
    | {"truncate", _ORIGINAL},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor", _ORIGINAL},
}
_NO_SCALING = "scaled rotary embedding of this kind is not implemented"
_WHY_NOT = {
    "dynamic": "its frequencies change with the length of the text, so that keys in the cache "
    "would have been turned by others; that is not implemented",
}


@dataclass(frozen=True)
class RopeScaling:
    """A stretched rotary embedding; options as config.json spells them, defaults filled in.

    factor: as stated, or max_position_embeddings / original.
    original: the context that the model was first trained on.
    attention_factor: of cosines and sines where it is stated; None: what the kind makes of factor.
    mscale, mscale_all_dim: of yarn; 0: not stated.
    extension: of longrope, what divides each frequency: its long_factor where
        max_position_embeddings is beyond the original, else its short_factor.
    lists_differ: those two; transformers would then change from one to the other.
    """

    kind: str
    factor: float
    original: int
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    extension: tuple[float, ...] = ()
    lists_differ: bool = False


def read_rope(
    config: Mapping[str, Any], default_theta: float, head_dim: int, positions: int
) -> tuple[float, RopeScaling | None, tuple[str, ...]]:
    """(theta, scaling, remarks) of config.json; `positions`: its max_position_embeddings."""
    blocks = {name: _block(config, name) for name in _BLOCKS if config.get(name) is not None}
    theta = _theta(config, blocks, default_theta)
    plain = {name: {**block, "rope_theta": None} for name, block in blocks.items()}
    found = {
        name: _scaling(name, block, config, head_dim, positions) for name, block in plain.items()
    }
    if len(set(found.values())) > 1:
        raise reject(" and ".join(found), config["rope_scaling"], "to say the same", "keep one")
    scaling = next(iter(found.values()), None)
    if scaling is not None and scaling.kind == "yarn" and theta <= 1:
        raise reject("rope_theta", theta, "above 1 with yarn", "repair config.json")
    if scaling is None or not scaling.lists_differ:
        return theta, scaling, ()
    return theta, scaling, (_switch(scaling, positions),)


def _block(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    block = config[name]
    if not isinstance(block, Mapping):
        raise reject(name, block, "to be an object", "repair config.json")
    return block


def _theta(
    config: Mapping[str, Any], blocks: Mapping[str, Mapping[str, Any]], default: float
) -> float:
    """theta from `rope_theta`, `rope_parameters.rope_theta` or `rope_scaling.rope_theta`."""
    found: dict[str, float] = {}
    if config.get("rope_theta") is not None:
        found["rope_theta"] = base("rope_theta", config["rope_theta"])
    for name, block in blocks.items():
        if block.get("rope_theta") is not None:
            found[f"{name}.rope_theta"] = base(f"{name}.rope_theta", block["rope_theta"])
    if len(set(found.values())) > 1:
        raise reject("rope_theta", found, "to be the same in every spelling", "keep one of them")
    return next(iter(found.values()), default)


def _kind(name: str, block: Mapping[str, Any]) -> str:
    """The kind that a block asks for; rejects what is not implemented."""
    kind = block.get("rope_type")
    kind = block.get("type", "default") if kind is None else kind
    if not isinstance(kind, str) or kind not in _OPTIONS:
        names = " or ".join(repr(known) for known in _OPTIONS)
        reason = _WHY_NOT.get(kind, _NO_SCALING) if isinstance(kind, str) else _NO_SCALING
        raise reject(f"{name}.rope_type", kind, names, reason)
    for option, value in block.items():
        whole = option == "partial_rotary_factor" and value == 1
        known = option in _OPTIONS[kind] or (
            option in _COMMON and option != "partial_rotary_factor"
        )
        if value is not None and not whole and not known:
            remedy = f"rotary embedding {kind!r} with it is not implemented"
            raise reject(f"{name}.{option}", value, "to be absent", remedy)
    return kind


def _scaling(
    name: str, block: Mapping[str, Any], config: Mapping[str, Any], head_dim: int, positions: int
) -> RopeScaling | None:
    kind = _kind(name, block)
    if kind == "default":
        return None
    own = {f"{name}.{key}": value for key, value in block.items() if value is not None}
    # transformers prefers the one outside of the block, as Phi-3 has it
    outside = config.get(_ORIGINAL) is not None and kind != "linear"
    original = integer(config, _ORIGINAL) if outside else integer(own, f"{name}.{_ORIGINAL}",
                                                                  positions)  # fmt: skip
    options: dict[str, Any] = {"factor": positions / original}
    for option in ("factor", "attention_factor", "low_freq_factor", "high_freq_factor"):
        if f"{name}.{option}" in own:
            options[option] = factor(own, f"{name}.{option}", 1.0)
    for option in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
        if block.get(option):  # 0 means the default, there as here
            options[option] = factor(own, f"{name}.{option}", 1.0)
    if kind == "yarn":
        options["truncate"] = flag(block, "truncate", True)
    if kind == "longrope":
        if original < 2:
            raise reject(_ORIGINAL, original, "to be 2 or more", "repair config.json")
        which = "long_factor" if positions > original else "short_factor"
        lists = {key: _extension(name, block, key, head_dim) for key in _LISTS}
        options["extension"] = lists[which]
        options["lists_differ"] = len(set(lists.values())) > 1
    else:
        _check_factor(name, kind, own, options)
    return RopeScaling(kind, original=original, **options)


def _check_factor(
    name: str, kind: str, own: Mapping[str, Any], options: Mapping[str, float]
) -> None:
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    for option in needed.get(kind, ()):
        if f"{name}.{option}" not in own:
            raise reject(f"{name}.{option}", None, "to be a number", "repair config.json")
    if f"{name}.factor" in own and not 1 <= options["factor"] <= _LARGEST:
        raise reject(f"{name}.factor", options["factor"], f"to be from 1 to {_LARGEST:g}",
                     "repair config.json")  # fmt: skip
    if kind == "llama3" and not options["low_freq_factor"] < options["high_freq_factor"]:
        raise reject(f"{name}.high_freq_factor", options["high_freq_factor"],
                     f"above low_freq_factor {options['low_freq_factor']:g}",
                     "repair config.json")  # fmt: skip


_LISTS = ("short_factor", "long_factor")


def _extension(
    name: str, block: Mapping[str, Any], option: str, head_dim: int
) -> tuple[float, ...]:
    values = block.get(option)
    expected = f"to be {head_dim // 2} numbers from 1e-6 to {_LARGEST:g}"
    if not isinstance(values, list) or len(values) != head_dim // 2:
        raise reject(f"{name}.{option}", str(values)[:60], expected, "repair config.json")
    numbers = tuple(number(f"{name}.{option}", value) for value in values)
    if not all(1e-6 <= value <= _LARGEST for value in numbers):
        raise reject(f"{name}.{option}", str(values)[:60], expected, "repair config.json")
    return numbers


def _switch(scaling: RopeScaling, positions: int) -> str:
    """The remark on lists that differ: keys in a cache cannot be turned anew, so one is taken."""
    taken = "long" if positions > scaling.original else "short"
    return (
        f"longrope: short_factor and long_factor differ; {taken}_factor is taken at every position "
        f"(transformers changes to long_factor when a text passes {scaling.original} positions). "
        "max_position_embeddings decides: up to that number short_factor, above it long_factor"
    )


__all__ = ["RopeScaling", "UnsupportedModelError", "read_rope"]
