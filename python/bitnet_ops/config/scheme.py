"""Scheme: what a checkpoint's quantisation means. The one decision table of the package.

| linear_class        | quantization_mode | stored weight   | weight_scale | storage, rule     |
|---------------------|-------------------|-----------------|--------------|-------------------|
| absent, "bitlinear" | absent, "offline" | uint8 [N/4, K]  | 1 / absmean  | PACKED, DIVIDE    |
| "autobitlinear"     | absent, "offline" | uint8 [N/4, K]  | absmean      | PACKED, MULTIPLY  |
| "autobitlinear"     | "online"          | floating [N, K] | none         | MASTERS, ONLINE   |

Without quantization_config (which asks for none of the above):

| what the checkpoint shows                                | storage, rule                   |
|----------------------------------------------------------|---------------------------------|
| 1bitLLM's architecture (weight_bits 1, input_bits 8)     | MASTERS, ONLINE                 |
| a BitLinear norm inside each projection (`<proj>.norm`)  | MASTERS, ONLINE                 |
| the user's word (--assume-online)                        | MASTERS, ONLINE, assumed        |
| projections whose values are -s, 0 and s already (TriLM) | TERNARY, every tensor checked   |

Everything else is rejected. Source of the first table: transformers integrations/bitnet.py
(BitLinear divides by weight_scale, AutoBitLinear multiplies). It must not know torch or files.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitnet_ops.config.families import ONEBIT, Family
from bitnet_ops.errors import BitNetError


class SchemeError(BitNetError, ValueError):
    """A quantisation that is not implemented; `code` names the reason."""

    def __init__(self, code: str, expected: str, found: str, remedy: str = "") -> None:
        tail = f"; {remedy}" if remedy else ""
        super().__init__(f"expected {expected}, got {found}{tail}")
        self.code, self.expected, self.found, self.remedy = code, expected, found, remedy


class Storage(enum.Enum):
    """How the ternary matrices of a source are stored."""

    PACKED = "packed"  # uint8 [N/4, K] as transformers packs, weight_scale beside it
    MASTERS = "masters"  # floating, to be ternarised
    TERNARY = "ternary"  # floating values that are code * scale already
    GGUF = "gguf"  # blocks of a GGUF type
    SGLBITNT = "sglbitnt"  # rows of an older model.bin


class ScaleRule(enum.Enum):
    """What the scale of a matrix is, after transformers' three linear flavours."""

    DIVIDE = "bitlinear"  # uint8, weight_scale holds 1 / absmean
    MULTIPLY = "autobitlinear offline"  # uint8, weight_scale holds absmean
    ONLINE = "autobitlinear online"  # floating masters, no weight_scale: absmean of the matrix


@dataclass(frozen=True)
class Scheme:
    """What the quantisation of a checkpoint means.

    storage: how the matrices lie there.
    rule: None where scales come with the values, for a matrix, a row or a group of 128 weights;
        otherwise one scale a matrix.
    linear_class, quantization_mode: what the config says, defaults filled in, or what its family
        or file amounts to.
    assumed: on the caller's word.
    rounds_activations: the source's own code rounds activations to int8 per token, as this
        package does; otherwise it computes with floating ones.
    remark: for the report.
    """

    storage: Storage
    rule: ScaleRule | None
    linear_class: str
    quantization_mode: str
    assumed: bool = False
    rounds_activations: bool = True
    remark: str | None = None

    @property
    def bias_is_scaled(self) -> bool:
        """Whether y = (x W + bias) * weight_scale, as transformers' offline AutoBitLinear has it.

        Everywhere else the bias is added last.
        """
        return self.rule is ScaleRule.MULTIPLY


_TABLE = {
    ("bitlinear", "offline"): (Storage.PACKED, ScaleRule.DIVIDE),
    ("autobitlinear", "offline"): (Storage.PACKED, ScaleRule.MULTIPLY),
    ("autobitlinear", "online"): (Storage.MASTERS, ScaleRule.ONLINE),
}
_GROUP_KEYS = ("group_size", "weight_block_size", "block_size")
KNOWN_KEYS = {
    "quant_method",
    "linear_class",
    "quantization_mode",
    "modules_to_not_convert",
    "use_rms_norm",
    "rms_norm_eps",
    *_GROUP_KEYS,
}
_SUPPORTED = "only BitNet b1.58 checkpoints (one scale per projection, int8 activations) convert"
_NOTHING_SAYS = "nothing in the checkpoint says that its weights were trained to be ternary"


def quantization_options(quantization: object) -> tuple[str, str]:
    """(linear_class, quantization_mode) of a quantization_config; SchemeError for an unknown one.

    Absent and null mean transformers' defaults, "bitlinear" and "offline".
    """
    if not isinstance(quantization, Mapping):
        found = repr(quantization)[:80]
        raise SchemeError("quantization-config", "quantization_config as an object", found)
    method = quantization.get("quant_method")
    if method != "bitnet":
        raise SchemeError("quant-method", 'quant_method "bitnet"', repr(method), _SUPPORTED)
    linear_class = quantization.get("linear_class")
    linear_class = "bitlinear" if linear_class is None else linear_class
    mode = quantization.get("quantization_mode")
    mode = "offline" if mode is None else mode
    if linear_class not in ("bitlinear", "autobitlinear"):
        expected = 'linear_class "bitlinear" or "autobitlinear"'
        raise SchemeError("linear-class", expected, repr(linear_class))
    if mode not in ("offline", "online"):
        expected = 'quantization_mode "offline" or "online"'
        raise SchemeError("quantization-mode", expected, repr(mode))
    return linear_class, mode


def quantized_scheme(quantization: object) -> Scheme:
    """The Scheme that a quantization_config asks for; SchemeError where it is unsupported."""
    linear_class, mode = quantization_options(quantization)
    if (linear_class, mode) not in _TABLE:
        raise SchemeError(
            "bitlinear-online",
            'quantization_mode "offline" with linear_class "bitlinear" (packed weights only)',
            '"online"',
            'for bf16 masters set linear_class to "autobitlinear"',
        )
    return Scheme(*_TABLE[linear_class, mode], linear_class, mode)


def decide_scheme(
    config: Mapping[str, Any],
    family: Family | None,
    *,
    assume_online: bool = False,
    bitlinear_norms: bool = False,
    looks_ternary: bool = False,
) -> Scheme:
    """The Scheme of a checkpoint with this config.json; SchemeError if unsupported or silent.

    `family`: of config.json, None for an unknown one.
    `bitlinear_norms`: a norm as of BitLinear code lies inside the projections.
    `looks_ternary`: the values of a projection are -s, 0 and s.
    """
    quantization = config.get("quantization_config")
    if quantization is not None:
        _reject_groups(quantization)
        return quantized_scheme(quantization)
    masters = Storage.MASTERS, ScaleRule.ONLINE
    if family == ONEBIT:
        return Scheme(*masters, "1bitllm", "online")
    if bitlinear_norms:
        remark = (
            "no quantization_config: ternarised by absmean, because every projection has the norm "
            "of a BitLinear inside"
        )
        return Scheme(*masters, "bitlinear with norm", "online", remark=remark)
    if assume_online:
        remark = "no quantization_config: ternarised by absmean on the caller's word"
        return Scheme(*masters, "autobitlinear", "online", assumed=True, remark=remark)
    if looks_ternary:
        remark = (
            "weights stored as code * scale, without activation quantisation: the source computes "
            "with floating activations, this package rounds them to int8 per token"
        )
        return Scheme(
            Storage.TERNARY, None, "none", "dense ternary", rounds_activations=False, remark=remark
        )
    raise SchemeError(
        "no-quantization-config",
        "a quantization_config in config.json",
        f"none: {_NOTHING_SAYS}",
        "if they were (quantisation-aware training, absmean), convert with --assume-online",
    )


def _reject_groups(quantization: object) -> None:
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "bitnet":
        return  # said elsewhere
    for key in _GROUP_KEYS:
        if quantization.get(key) is not None:
            found = f"{key} {quantization[key]!r}"
            raise SchemeError("group-scales", "one scale per projection", found, _SUPPORTED)


def stated_linear_class(config: Mapping[str, Any]) -> str:
    """What config.json says of a stored weight_scale, unchecked: a file is only looked at."""
    block = config.get("quantization_config")
    stated = block.get("linear_class") if isinstance(block, Mapping) else None
    return str(stated or "bitlinear")
