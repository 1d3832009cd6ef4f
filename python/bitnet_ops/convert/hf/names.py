"""How families spell the tensors of one architecture: stored names -> those of models/tensors.py.

| stored                               | here                         | written by              |
|--------------------------------------|------------------------------|-------------------------|
| inner_attn_ln, ffn_layernorm         | attn_sub_norm, ffn_sub_norm  | 1bitLLM                 |
| o_proj.0, o_proj.1; down_proj alike  | the sub-norm, the projection | SubLN (nn.Sequential)   |
| <projection>.norm                    | <projection>.rms_norm        | BitNet-embedding        |
| embed_tokens, layers.N, norm         | with "model." in front       | models saved headless   |

It must not know shapes, values or files; what the norms it finds mean goes into the private block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bitnet_ops.config.families import PROJECTIONS, Family
from bitnet_ops.convert.errors import reject

_HEADLESS = ("embed_tokens.", "layers.", "norm.")
_SUBLN = {
    ".self_attn.o_proj.0.": ".self_attn.attn_sub_norm.",
    ".self_attn.o_proj.1.": ".self_attn.o_proj.",
    ".mlp.down_proj.0.": ".mlp.ffn_sub_norm.",
    ".mlp.down_proj.1.": ".mlp.down_proj.",
}
_INNER = {f".{name}.norm.": f".{name}.rms_norm." for name in PROJECTIONS}
# No config.json states it: the epsilon of LlamaRMSNorm where code that adds SubLN names none.
SUBLN_EPS = 1e-6


@dataclass(frozen=True)
class Naming:
    """Stored names by the names used here, and what they show of the architecture.

    `found` goes into the private block of the config, where ModelConfig.from_hf reads it.
    `bitlinear_norms`: the checkpoint spells norms inside its projections as BitLinear code does.
    """

    stored: dict[str, str]
    found: dict[str, Any]
    bitlinear_norms: bool
    remarks: tuple[str, ...]


def find_naming(config: Mapping[str, Any], family: Family | None, names: Iterable[str]) -> Naming:
    """The Naming of a checkpoint; ConvertError if two of its tensors are one tensor here."""
    names = list(names)
    headless = any(name.startswith("embed_tokens.") for name in names)
    table = {**_INNER, **(family.renamed if family is not None else {})}
    subln = any(part in name for name in names for part in _SUBLN)
    if subln:
        table |= _SUBLN
    inner = any(part in f".{name}" for name in names for part in _INNER)
    found, remarks = _found(config, family, subln, inner)
    stored: dict[str, str] = {}
    for name in names:
        here = _rename(name, table, headless)
        if here in stored:
            reject("duplicate-tensor", f"{here} once", f"it as {stored[here]} and as {name}")
        stored[here] = name
    return Naming(stored, found, inner, remarks)


def _rename(name: str, table: Mapping[str, str], headless: bool) -> str:
    if headless and name.startswith(_HEADLESS):
        name = f"model.{name}"
    for old, new in table.items():
        if old in name:
            return name.replace(old, new)
    return name


def _found(
    config: Mapping[str, Any], family: Family | None, subln: bool, inner: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    found: dict[str, Any] = {}
    remarks = []
    if subln:
        if family is not None and family.sub_norms:
            reject(
                "per-linear-norms",
                "sub-norms under one name",
                "SubLN as o_proj.0 and o_proj.1 in an architecture that has sub-norms already",
            )
        found |= {"sub_norms": True, "sub_norm_eps": SUBLN_EPS}
        remarks.append(
            f"SubLN stored as o_proj.0 and down_proj.0: config.json does not state its epsilon, "
            f"{SUBLN_EPS:g} was taken"
        )
    if inner:
        found |= {"linear_norms": True}
        eps = config.get("rms_norm_eps")
        if isinstance(eps, int | float):
            found["linear_norm_eps"] = eps  # ModelConfig checks it
    return found, tuple(remarks)
