"""The keys and tensors by which GGUF stretches rotary embedding -> rope_scaling of config.json.

llama.cpp's meanings: `rope.scaling.type` yarn, linear, longrope or none; factors of frequencies in
tensors beside the layers. Its yarn multiplies cosines and sines by attn_factor * (0.1 ln factor
+ 1), its longrope by attn_factor alone. Source: llama.cpp `llama-arch.cpp`, `llama-context.cpp`,
`ggml.c` (rope_yarn). It must not know tensors beyond their values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from bitnet_ops.config import RopeScaling
from bitnet_ops.convert.errors import reject

FREQUENCIES = "rope_freqs.weight"  # of any kind; the other two are longrope's
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
FACTOR_TENSORS = (FREQUENCIES, LONG, SHORT)
_ATTENTION = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
_BETAS = ("yarn_beta_fast", "yarn_beta_slow")
READ = {
    "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.original_context_length", *_ATTENTION,
    *(f"rope.scaling.{beta}" for beta in _BETAS),
}  # fmt: skip
# key -> the values that leave the maths as here
FIXED: dict[str, tuple[Any, ...]] = {
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_KINDS = ("none", "linear", "yarn", "longrope")


class Keys(Protocol):
    """The keys of one architecture."""

    def __contains__(self, key: str) -> bool: ...
    def name(self, key: str) -> str: ...
    def text(self, key: str, default: str) -> str: ...
    def integer(self, key: str, default: int | None = None) -> int: ...
    def decimal(self, key: str, default: float | None = None) -> float: ...


def rope_scaling(
    keys: Keys, context: int, factors: Mapping[str, list[float]]
) -> dict[str, Any] | None:
    """rope_scaling as config.json has it, None for plain; `factors`: the tensors, by name."""
    kind = keys.text("rope.scaling.type", "longrope" if LONG in factors else "linear")
    if kind not in _KINDS:
        expected = f"{keys.name('rope.scaling.type')} among {', '.join(_KINDS)}"
        reject("gguf-maths", expected, repr(kind)[:60], "it asks for maths that is not implemented")
    stated = "rope.scaling.factor" if "rope.scaling.factor" in keys else "rope.scale_linear"
    factor = keys.decimal(stated, 1.0)
    attention = math.prod(keys.decimal(key, 1.0) for key in _ATTENTION)
    original = context
    if kind in ("yarn", "longrope"):
        original = keys.integer("rope.scaling.original_context_length", context)
    if factors:
        return _by_tensors(kind, factor, attention, original, factors)
    if kind == "longrope":
        reject("missing-tensor", f"{LONG} and {SHORT}, as longrope has them", "no such tensor")
    if kind == "yarn":
        found: dict[str, Any] = {"factor": factor, "original_max_position_embeddings": original}
        for beta in _BETAS:
            if f"rope.scaling.{beta}" in keys:
                found[beta.removeprefix("yarn_")] = keys.decimal(f"rope.scaling.{beta}")
        if attention != 1:
            found["attention_factor"] = attention * (0.1 * math.log(max(factor, 1)) + 1)
        return {"rope_type": "yarn", **found}
    if attention != 1:
        expected = f"{keys.name(_ATTENTION[0])} of 1 with rope scaling {kind}"
        reject("gguf-maths", expected, str(attention), "it asks for maths that is not implemented")
    if kind == "none" or factor == 1:
        return None
    return {"rope_type": "linear", "factor": factor}


def _by_tensors(
    kind: str, factor: float, attention: float, original: int, factors: Mapping[str, list[float]]
) -> dict[str, Any] | None:
    """Divisors of every frequency, in config.json's words a longrope of equal lists or of two."""
    names = set(factors)
    if names not in ({FREQUENCIES}, {LONG, SHORT}):
        reject(
            "gguf-maths", f"{FREQUENCIES} alone, or {LONG} and {SHORT}", ", ".join(sorted(names))
        )
    if kind == "yarn" or factor != 1:
        found = f"{', '.join(sorted(names))} with scaling {kind} by {factor:g}"
        reject("gguf-maths", "factors of frequencies or a scaling factor", found,
               "both at once are not implemented")  # fmt: skip
    long, short = (factors.get(name, factors.get(FREQUENCIES, [])) for name in (LONG, SHORT))
    if set(long) == set(short) == {1.0} and attention == 1:
        return None
    return {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }


def exported(scaling: RopeScaling | None, prefix: str) -> dict[str, tuple[str, Any]]:
    """The keys that say the same; ConvertError for what they cannot say."""
    if scaling is None:
        return {}
    whole = RopeScaling(
        scaling.kind, scaling.factor, scaling.original, beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
    )  # fmt: skip
    if scaling.kind not in ("linear", "yarn") or scaling != whole:
        found = f"{scaling.kind} with options that they have no words for"
        reject("gguf-rope", "rope_scaling of GGUF's keys, linear or yarn", found)
    keys: dict[str, tuple[str, Any]] = {
        "type": ("string", scaling.kind),
        "factor": ("float32", scaling.factor),
    }
    if scaling.kind == "yarn":
        keys["original_context_length"] = ("uint32", scaling.original)
        keys["yarn_beta_fast"] = ("float32", scaling.beta_fast)
        keys["yarn_beta_slow"] = ("float32", scaling.beta_slow)
    return {f"{prefix}.rope.scaling.{key}": value for key, value in keys.items()}
