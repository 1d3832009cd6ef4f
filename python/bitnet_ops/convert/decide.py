"""What a checkpoint's quantization_config and tensors mean: the converter's only decision table.

| linear_class        | quantization_mode | stored weight   | stored scale | Scheme           |
|---------------------|-------------------|-----------------|--------------|------------------|
| absent, "bitlinear" | absent, "offline" | uint8 [N/4, K]  | 1 / absmean  | packed, inverted |
| "autobitlinear"     | absent, "offline" | uint8 [N/4, K]  | absmean      | packed           |
| "autobitlinear"     | "online"          | floating [N, K] | none         | masters          |

Everything else is refused, and so is a file that disagrees with its config. Source of the table:
transformers integrations/bitnet.py (BitLinear divides by weight_scale, AutoBitLinear multiplies).
Knows names, dtypes and shapes; must not read tensor data.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

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

    `mode` is "packed" or "masters"; `inverted` says that weight_scale holds 1 / absmean.
    `linear_class` and `quantization_mode` are what the config says, defaults filled in.
    """

    linear_class: str
    quantization_mode: str
    mode: str
    inverted: bool
    assumed: bool = False


def decide_scheme(config: dict[str, Any], *, assume_online: bool = False) -> Scheme:
    """The Scheme that config.json asks for; ConvertError where it is unsupported or silent."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return _without_quantization_config(assume_online)
    if not isinstance(quantization, dict):
        refuse("quantization-config", "quantization_config as an object", repr(quantization)[:80])
    method = quantization.get("quant_method")
    if method != "bitnet":
        refuse("quant-method", 'quant_method "bitnet"', repr(method), _supported())
    _refuse_options(quantization)
    return _table(quantization)


def _supported() -> str:
    return "only BitNet b1.58 checkpoints (one scale per projection, int8 activations) convert"


def _without_quantization_config(assume_online: bool) -> Scheme:
    if assume_online:
        return Scheme("autobitlinear", "online", "masters", inverted=False, assumed=True)
    refuse(
        "no-quantization-config",
        "a quantization_config in config.json",
        f"none: {_NOTHING_SAYS}",
        "if they were (quantisation-aware training, absmean), convert with --assume-online",
    )


def _refuse_options(quantization: dict[str, Any]) -> None:
    if quantization.get("use_rms_norm"):
        refuse(
            "use-rms-norm",
            "projections without a norm of their own",
            "use_rms_norm true (an RMSNorm inside every linear)",
            "per-linear norms are not supported",
        )
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
