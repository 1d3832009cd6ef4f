"""What a checkpoint's config and tensors mean: the converter's only decision table.

| linear_class        | quantization_mode | stored weight   | stored scale | Scheme           |
|---------------------|-------------------|-----------------|--------------|------------------|
| absent, "bitlinear" | absent, "offline" | uint8 [N/4, K]  | 1 / absmean  | packed, inverted |
| "autobitlinear"     | absent, "offline" | uint8 [N/4, K]  | absmean      | packed           |
| "autobitlinear"     | "online"          | floating [N, K] | none         | masters          |

Without quantization_config (which asks for none of the above):

| what the checkpoint shows                                  | Scheme                          |
|------------------------------------------------------------|---------------------------------|
| 1bitLLM's architecture with weight_bits 1, input_bits 8    | masters                         |
| a BitLinear norm inside each projection (`<proj>.norm`)    | masters                         |
| the user's word (--assume-online)                          | masters, assumed                |
| projections whose values are -s, 0 and s already (TriLM)   | ternary, every tensor checked   |

Everything else is refused, and so is a file that disagrees with its config or whose scales lie
where only the other sense of the scale would put them. Source of the first table: transformers
integrations/bitnet.py (BitLinear divides by weight_scale, AutoBitLinear multiplies).
Knows names, dtypes, shapes and scales; must not read the data of weights.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitnet_ops.config import is_1bitllm
from bitnet_ops.convert.errors import listed, refuse

FLOATING = {"F32", "BF16", "F16"}
_KNOWN_KEYS = {
    "quant_method",
    "linear_class",
    "quantization_mode",
    "modules_to_not_convert",
    "use_rms_norm",
    "rms_norm_eps",
}
_GROUP_KEYS = ("group_size", "weight_block_size", "block_size")
_NOTHING_SAYS = "nothing in the checkpoint says that its weights were trained to be ternary"


@dataclass(frozen=True)
class Scheme:
    """How the ternary projections are stored.

    `mode` is "packed", "masters" or "ternary" (floating, already code * scale); `inverted` says
    that weight_scale holds 1 / absmean. `linear_class` and `quantization_mode` are what the config
    says, defaults filled in, or what its family amounts to. `remark`: for the report.
    """

    linear_class: str
    quantization_mode: str
    mode: str
    inverted: bool
    assumed: bool = False
    remark: str | None = None

    @property
    def bias_is_scaled(self) -> bool:
        """Whether y = (x W + bias) * weight_scale, as transformers' offline AutoBitLinear has it.

        Everywhere else the bias is added last.
        """
        return self.mode == "packed" and not self.inverted


def decide_scheme(
    config: dict[str, Any],
    *,
    assume_online: bool = False,
    bitlinear_norms: bool = False,
    looks_ternary: bool = False,
) -> Scheme:
    """The Scheme that config.json asks for; ConvertError where it is unsupported or silent.

    `bitlinear_norms`: a norm as of BitLinear code lies inside the projections (names.py).
    `looks_ternary`: the values of a projection are -s, 0 and s.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return _without_quantization_config(config, assume_online, bitlinear_norms, looks_ternary)
    if not isinstance(quantization, dict):
        refuse("quantization-config", "quantization_config as an object", repr(quantization)[:80])
    method = quantization.get("quant_method")
    if method != "bitnet":
        refuse("quant-method", 'quant_method "bitnet"', repr(method), _supported())
    _refuse_options(quantization)
    return _table(quantization)


def _supported() -> str:
    return "only BitNet b1.58 checkpoints (one scale per projection, int8 activations) convert"


def _without_quantization_config(
    config: dict[str, Any], assume_online: bool, bitlinear_norms: bool, looks_ternary: bool
) -> Scheme:
    if is_1bitllm(config):
        return Scheme("1bitllm", "online", "masters", inverted=False)
    if bitlinear_norms:
        remark = (
            "no quantization_config: ternarised by absmean, because every projection has the norm "
            "of a BitLinear inside"
        )
        return Scheme("bitlinear with norm", "online", "masters", inverted=False, remark=remark)
    if assume_online:
        remark = "no quantization_config: ternarised by absmean on the caller's word"
        return Scheme(
            "autobitlinear", "online", "masters", inverted=False, assumed=True, remark=remark
        )
    if looks_ternary:
        remark = (
            "weights stored as code * scale, without activation quantisation: the source computes "
            "with floating activations, this package rounds them to int8 per token"
        )
        return Scheme("none", "dense ternary", "ternary", inverted=False, remark=remark)
    refuse(
        "no-quantization-config",
        "a quantization_config in config.json",
        f"none: {_NOTHING_SAYS}",
        "if they were (quantisation-aware training, absmean), convert with --assume-online",
    )


def _refuse_options(quantization: dict[str, Any]) -> None:
    for key in _GROUP_KEYS:
        if quantization.get(key) is not None:
            found = f"{key} {quantization[key]!r}"
            refuse("group-scales", "one scale per projection", found, _supported())


def _table(quantization: dict[str, Any]) -> Scheme:
    linear_class = quantization.get("linear_class", "bitlinear")
    mode = quantization.get("quantization_mode", "offline")
    if linear_class not in ("bitlinear", "autobitlinear"):
        refuse("linear-class", 'linear_class "bitlinear" or "autobitlinear"', repr(linear_class))
    if mode not in ("offline", "online"):
        refuse("quantization-mode", 'quantization_mode "offline" or "online"', repr(mode))
    if linear_class == "bitlinear" and mode == "online":
        refuse(
            "bitlinear-online",
            'quantization_mode "offline" with linear_class "bitlinear" (packed weights only)',
            '"online"',
            'for bf16 masters set linear_class to "autobitlinear"',
        )
    stored = "masters" if mode == "online" else "packed"
    return Scheme(linear_class, mode, stored, inverted=linear_class == "bitlinear")


# Scales -----------------------------------------------------------------------------------------

# Absmeans of published models lie near 0.01-0.05 (masters of Llama type) or near 1.5 (2B-4T), and
# those of one model within a factor of ten.
LARGEST_SCALE = 10.0
_LARGEST_RATIO = 30.0


def check_scale_sense(scales: Mapping[str, float], scheme: Scheme) -> None:
    """Refuse stored scales that only the other sense of weight_scale would explain.

    `scales`: the multiplying scale of every packed projection, by weight name. Two tests: a
    multiplier above any known absmean, and one that lies far from its neighbours while its
    reciprocal does not. What neither test tells apart is left to the config.
    """
    if scheme.mode != "packed" or not scales:
        return
    middle = statistics.median(math.log(scale) for scale in scales.values())
    for name, scale in scales.items():
        distance, reciprocal = abs(math.log(scale) - middle), abs(-math.log(scale) - middle)
        far = distance > math.log(_LARGEST_RATIO) and reciprocal < distance / 2
        if scale > LARGEST_SCALE or far:
            stored = 1.0 / scale if scheme.inverted else scale
            why = f"{math.exp(distance):.3g} times off its neighbours" if far else "far too large"
            refuse(
                "scale-sense",
                f"a weight_scale that {'divides' if scheme.inverted else 'multiplies'}, as "
                f'linear_class "{scheme.linear_class}" says',
                f"{name}_scale {stored:.4g}, which makes the weights +-{scale:.4g}: {why}",
                "bitlinear divides by weight_scale, autobitlinear multiplies; correct linear_class "
                "in config.json, or convert with --trust-scales if the file is right",
            )


def unknown_options(config: dict[str, Any]) -> list[str]:
    """Keys of quantization_config that have no meaning here; the report lists them as ignored."""
    quantization = config.get("quantization_config") or {}
    return sorted(set(quantization) - _KNOWN_KEYS - set(_GROUP_KEYS))


def check_exclusions(config: dict[str, Any], projections: list[str]) -> None:
    """`modules_to_not_convert` must leave out the output head and none of the projections.

    Matching is that of transformers 5 (`should_convert_module`): an entry matches a module from its
    start, as a regular expression, or as its suffix. Absent or null means the head.
    """
    entries = (config.get("quantization_config") or {}).get("modules_to_not_convert")
    if entries is None:
        return
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        refuse("modules-to-not-convert", "modules_to_not_convert as a list of names", repr(entries))
    if not _excluded("lm_head", entries):
        refuse(
            "quantised-head",
            "the output head left unquantised",
            f"modules_to_not_convert {entries!r} without lm_head, which asks for a ternary head",
            "a ternary head is not supported; add lm_head to the list if it was not ternarised",
        )
    kept = [name for name in projections if _excluded(name, entries)]
    if kept:
        refuse(
            "modules-to-not-convert",
            "every projection of the layers ternary",
            f"{listed(kept)} left out by modules_to_not_convert",
            "models that mix ternary and plain projections are not supported",
        )


def _excluded(module: str, entries: list[str]) -> bool:
    try:
        return any(re.match(entry, module) or module.endswith(entry) for entry in entries)
    except re.error as error:
        refuse("modules-to-not-convert", "valid regular expressions", f"{entries!r}: {error}")
