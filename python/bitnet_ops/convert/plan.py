"""Matching what a config expects with what a checkpoint holds, before any tensor is read.

Strict in both directions: every expected tensor must be there in the right form, and nothing else
may be. The messages for unexpected names say which unsupported family they betray. Of the data only
scales are looked at: whether they lie where only the other sense of weight_scale would put them.

Families spell the tensors of one architecture differently:

| stored                               | here                         | written by              |
|--------------------------------------|------------------------------|-------------------------|
| inner_attn_ln, ffn_layernorm         | attn_sub_norm, ffn_sub_norm  | 1bitLLM                 |
| o_proj.0, o_proj.1; down_proj alike  | the sub-norm, the projection | SubLN (nn.Sequential)   |
| <projection>.norm                    | <projection>.rms_norm        | BitNet-embedding        |
| embed_tokens, layers.N, norm         | with "model." in front       | models saved headless   |
| model.language_model.                | model.                       | Qwen3.5, with images    |
"""

from __future__ import annotations

import importlib.metadata
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitnet_ops.config import PRIVATE_BLOCK, ModelConfig
from bitnet_ops.config.families import BY_MODEL_TYPE, PROJECTIONS, Family, family_of
from bitnet_ops.config.scheme import (
    ScaleRule,
    Scheme,
    SchemeError,
    Storage,
    decide_scheme,
)
from bitnet_ops.convert.checkpoint import TensorRecord
from bitnet_ops.convert.errors import ConvertError, listed, reject
from bitnet_ops.convert.hybrid import (
    NOT_TERNARY,
    draft_name,
    is_gate,
    own_name,
    stored_shapes,
    tower_name,
)
from bitnet_ops.convert.source import EMBEDDING, HEAD, Plan, model_of
from bitnet_ops.models import TensorSpec, expected_tensors
from bitnet_ops.untrusted.patterns import PatternError, matches

FLOATING = {"F32", "BF16", "F16"}
_ARCHITECTURES = {
    "gemma3": "images beside the text",
}
# A part of an unexpected tensor's name -> (code, what it betrays). First match wins.
_BETRAYALS = (
    ("inner_attn_ln", "1bitllm-norms", "1bitLLM's norms, but config.json does not say "
     "architectures [BitnetForCausalLM], model_type llama"),
    ("ffn_layernorm", "1bitllm-norms", "1bitLLM's norms, but config.json does not say "
     "architectures [BitnetForCausalLM], model_type llama"),
    ("q_norm", "qk-norm", "norms on queries and keys, which this architecture does not have"),
    ("k_norm", "qk-norm", "norms on queries and keys, which this architecture does not have"),
    ("proj.rms_norm.", "use-rms-norm", "norms inside projections, but quantization_config does not "
     "say use_rms_norm"),
    ("proj.qweight", "other-quantisation", "another quantisation (GPTQ or AWQ)"),
    ("proj.scales", "group-scales", "scales per group; only one scale per projection converts"),
    ("block_sparse_moe", "experts", "a mixture of experts, which is not supported"),
    ("mlp.experts.", "experts", "a mixture of experts, which is not supported"),
    ("lora_", "lora-adapter", "a LoRA adapter in the checkpoint; merge it or convert it apart"),
    ("lm_head.weight_scale", "quantised-head", "a ternary output head, which is not supported"),
    ("lm_head.", "unknown-tensor", "an output head, which this architecture does not have"),
    ("_scale", "unknown-tensor", "scales that belong to no projection of this config"),
    (".bias", "bias", "biases that this architecture does not have"),
)  # fmt: skip


def make_plan(
    config: dict[str, Any],
    tensors: dict[str, TensorRecord],
    *,
    assume_online: bool = False,
    looks_ternary: Callable[[str], bool] | None = None,
    found: Mapping[str, Any] | None = None,
) -> Plan:
    """Decide how to convert a checkpoint; ConvertError names the first obstacle.

    `found`: what the checkpoint shows beside its config, for the private block.

    `looks_ternary` tells whether the values of a stored projection are ternary already; it is asked
    about one of them, and only where nothing else says what the weights are.
    """
    _explain_architecture(config)
    if config.get(PRIVATE_BLOCK):
        reject(
            "private-block",
            f"config.json without {PRIVATE_BLOCK}, which a conversion writes",
            repr(config[PRIVATE_BLOCK])[:80],
            "remove it: it says how another checkpoint was read",
        )
    family = family_of(config)
    naming = find_naming(config, family, tensors)
    try:
        scheme = decide_scheme(
            config,
            family,
            assume_online=assume_online,
            bitlinear_norms=naming.bitlinear_norms,
            looks_ternary=_asked(config, tensors, looks_ternary),
        )
    except SchemeError as error:
        hybrid = family is not None and family.hybrid and error.code == "no-quantization-config"
        reject(error.code, error.expected, error.found, NOT_TERNARY if hybrid else error.remedy)
    shown = {**naming.found, **(found or {})}
    model = model_of({**config, PRIVATE_BLOCK: shown} if shown else config)
    records = {here: tensors[stored] for here, stored in naming.stored.items()}
    specs = dict(expected_tensors(model))
    ternary = [name for name, spec in specs.items() if spec.kind == "ternary"]
    modules = [name.removesuffix(".weight") for name in ternary]
    check_exclusions(config, modules, [n.removesuffix(".weight") for n in specs if is_gate(n)])
    ignored = {name for name in records if name.endswith(".rotary_emb.inv_freq")}
    tied_head = model.tie_word_embeddings and not model.embedding_only and HEAD in records
    _check_names(specs, records, scheme, ignored | ({HEAD} if tied_head else set()))
    for name, spec in specs.items():
        _check_tensor(spec, records, name, scheme)
    if tied_head:
        _check_dense(specs[EMBEDDING], records[HEAD])
    return Plan(
        model,
        scheme,
        specs,
        naming.stored,
        config,
        {**_private_block(model, scheme), **shown},
        tied_head,
        (*model.notes, *naming.remarks),
        naming.tower,
        naming.drafts,
    )


def _private_block(model: ModelConfig, scheme: Scheme) -> dict[str, Any]:
    """How the checkpoint was read."""
    return {
        "format_version": 1,
        "source_linear_class": scheme.linear_class,
        "source_mode": scheme.quantization_mode,
        "converter_version": importlib.metadata.version("bitnet-ops"),
        "activation": model.hidden_act,
        "sub_norms": model.sub_norms,
        "head_dim": model.head_dim,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.rms_norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
    }


def _asked(
    config: dict[str, Any],
    tensors: dict[str, TensorRecord],
    looks_ternary: Callable[[str], bool] | None,
) -> bool:
    if looks_ternary is None or config.get("quantization_config") is not None:
        return False
    first = next((n for n in sorted(tensors) if n.endswith("self_attn.q_proj.weight")), None)
    if first is None or tensors[first].dtype not in FLOATING or len(tensors[first].shape) != 2:
        return False  # which is said where every tensor is checked
    return looks_ternary(first)


def _explain_architecture(config: dict[str, Any]) -> None:
    model_type = config.get("model_type")
    reason = _ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if reason is not None:
        reject(
            "unsupported-architecture",
            f"model_type {_one_of(list(BY_MODEL_TYPE))}",
            f"{model_type!r}: {reason}",
            "this architecture is not supported",
        )


def _one_of(names: list[str]) -> str:
    quoted = [f'"{name}"' for name in names]
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"


# Names ----------------------------------------------------------------------------------------


def scale_name(weight_name: str) -> str:
    """`x.weight` -> `x.weight_scale`."""
    return f"{weight_name}_scale"


def _check_names(
    specs: dict[str, TensorSpec],
    tensors: dict[str, TensorRecord],
    scheme: Scheme,
    allowed: set[str],
) -> None:
    scales = {scale_name(n): n for n, spec in specs.items() if spec.kind == "ternary"}
    unknown = [n for n in tensors if n not in specs and n not in scales and n not in allowed]
    if unknown:
        _reject_unknown([tensors[name].name for name in unknown])
    missing = [name for name in specs if name not in tensors]
    if HEAD in missing:
        reject(
            "tie-mismatch",
            f"{HEAD}, since tie_word_embeddings is false",
            "no such tensor",
            "set tie_word_embeddings to true if the head shares the embedding",
        )
    inner = [name for name in missing if name.endswith(".rms_norm.weight")]
    if inner and not any(name.endswith(".rms_norm.weight") for name in tensors):
        reject("use-rms-norm", "a norm in every projection, as use_rms_norm says", "no such tensor")
    if missing:
        reject("missing-tensor", f"all {len(specs)} tensors", f"no {listed(missing)}")
    if scheme.storage is not Storage.PACKED:
        _reject_scales([name for name in scales if name in tensors])


def _reject_unknown(unknown: list[str]) -> None:
    for part, code, meaning in _BETRAYALS:
        names = [name for name in unknown if part in name]
        if names:
            reject(code, "the tensors of this config alone", f"{listed(names)}: {meaning}")
    remedy = "is config.json the one of this checkpoint?"
    reject("unknown-tensor", "the tensors of this config alone", listed(unknown), remedy)


def _reject_scales(names: list[str]) -> None:
    if names:
        reject(
            "packed-under-online",
            "floating weights without weight_scale, as this config says",
            listed(names),
            "is the checkpoint offline? then config.json must say so",
        )


# One tensor -----------------------------------------------------------------------------------


def _check_tensor(
    spec: TensorSpec, tensors: dict[str, TensorRecord], name: str, scheme: Scheme
) -> None:
    record = tensors[name]
    if spec.kind == "dense":
        _check_dense(spec, record)
    elif scheme.storage is not Storage.PACKED:
        _check_masters(spec, record)
    else:
        _check_packed(spec, record)
        _check_scale(tensors.get(scale_name(name)), name)


def _form(record: TensorRecord) -> str:
    return f"{record.dtype} {list(record.shape)}"


def _check_dense(spec: TensorSpec, record: TensorRecord) -> None:
    if record.name == HEAD and record.dtype in ("U8", "I8"):
        reject("quantised-head", "a floating output head", f"{HEAD} as {_form(record)}")
    _check_values(spec, record)


def _check_values(spec: TensorSpec, record: TensorRecord) -> None:
    if record.shape not in (shapes := stored_shapes(record.name, spec.shape)):
        reject("shape", f"{record.name} of shape {list(shapes[0])}", _form(record))
    _check_floating(record)


def _check_floating(record: TensorRecord) -> None:
    if record.dtype not in FLOATING:
        reject("dtype", f"{record.name} as F32, BF16 or F16", _form(record))


def _check_masters(spec: TensorSpec, record: TensorRecord) -> None:
    if record.dtype in ("U8", "I8"):
        reject(
            "packed-under-online",
            f"master weights in {record.name}",
            f"{_form(record)} (already packed)",
            'quantization_mode "offline" is the one for packed weights',
        )
    _check_values(spec, record)


def _check_packed(spec: TensorSpec, record: TensorRecord) -> None:
    rows, columns = spec.shape
    if record.dtype in FLOATING:
        reject(
            "masters-under-offline",
            f"{record.name} packed as U8 [{-(-rows // 4)}, {columns}]",
            f"floating {_form(record)}",
            'if these are masters, config.json must say "autobitlinear" and "online"',
        )
    if record.dtype != "U8":
        reject("dtype", f"{record.name} as U8", _form(record))
    if rows % 4 or record.shape != (rows // 4, columns):
        expected = f"{record.name} as U8 of shape [{rows} / 4, {columns}]"
        reject("shape", expected, _form(record), "four output rows share a byte")


def _check_scale(record: TensorRecord | None, weight_name: str) -> None:
    if record is None:
        reject("missing-scale", f"{scale_name(weight_name)}", "no such tensor")
    _check_floating(record)
    if record.shape not in ((), (1,)):
        reject(
            "group-scales",
            f"one scale in {record.name}",
            _form(record),
            "scales per row or per group are not supported",
        )


# Scales and options -----------------------------------------------------------------------------

# Absmeans of published models lie near 0.01-0.05 (masters of Llama type) or near 1.5 (2B-4T), and
# those of one model within a factor of ten.
LARGEST_SCALE = 10.0
_LARGEST_RATIO = 30.0


def check_scale_sense(scales: Mapping[str, float], scheme: Scheme) -> None:
    """Reject stored scales that only the other sense of weight_scale would explain.

    `scales`: the multiplying scale of every packed projection, by weight name. Two tests: a
    multiplier above any known absmean, and one that lies far from its neighbours while its
    reciprocal does not. What neither test tells apart is left to the config.
    """
    if scheme.storage is not Storage.PACKED or not scales:
        return
    divides = scheme.rule is ScaleRule.DIVIDE
    middle = statistics.median(math.log(scale) for scale in scales.values())
    for name, scale in scales.items():
        distance, reciprocal = abs(math.log(scale) - middle), abs(-math.log(scale) - middle)
        far = distance > math.log(_LARGEST_RATIO) and reciprocal < distance / 2
        if scale > LARGEST_SCALE or far:
            stored = 1.0 / scale if divides else scale
            why = f"{math.exp(distance):.3g} times off its neighbours" if far else "far too large"
            reject(
                "scale-sense",
                f"a weight_scale that {'divides' if divides else 'multiplies'}, as "
                f'linear_class "{scheme.linear_class}" says',
                f"{name}_scale {stored:.4g}, which makes the weights +-{scale:.4g}: {why}",
                "bitlinear divides by weight_scale, autobitlinear multiplies; correct linear_class "
                "in config.json, or convert with --trust-scales if the file is right",
            )


def check_exclusions(
    config: dict[str, Any], projections: list[str], gates: Sequence[str] = ()
) -> None:
    """`modules_to_not_convert` must leave out the output head and none of the projections.

    Likewise the gates of a hybrid, which stay floating here. Matching is that of transformers 5
    (`should_convert_module`): an entry matches a module from its start, as a regular expression, or
    as its suffix. Absent or null means the head.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return
    entries = quantization.get("modules_to_not_convert")
    if entries is None:
        entries = ["lm_head"]
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        reject("modules-to-not-convert", "modules_to_not_convert as a list of names", repr(entries))
    excluded = _excluded(["lm_head", *projections, *gates], entries)
    if "lm_head" not in excluded:
        reject(
            "quantised-head",
            "the output head left unquantised",
            f"modules_to_not_convert {entries!r} without lm_head, which asks for a ternary head",
            "a ternary head is not supported; add lm_head to the list if it was not ternarised",
        )
    ternary = [name for name in gates if name not in excluded]
    if ternary:
        reject(
            "modules-to-not-convert",
            "the gates in_proj_a and in_proj_b left unquantised",
            f"modules_to_not_convert without {listed(ternary)}, which asks for ternary ones",
            "ternary gates are not supported; add them to the list if they were not ternarised",
        )
    kept = [name for name in projections if name in excluded]
    if kept:
        reject(
            "modules-to-not-convert",
            "every projection of the layers ternary",
            f"{listed(kept)} left out by modules_to_not_convert",
            "models that mix ternary and plain projections are not supported",
        )


def _excluded(modules: list[str], entries: list[str]) -> set[str]:
    """Those of `modules` that an entry leaves out."""
    try:
        rows = matches(entries, modules)
    except PatternError as error:
        raise ConvertError(
            "modules-to-not-convert",
            f"convert: expected {error}; repair modules_to_not_convert in config.json",
        ) from None
    found = {name for row in rows for name, hit in zip(modules, row, strict=True) if hit}
    return found | {name for name in modules if name.endswith(tuple(entries))}


# Spellings ----------------------------------------------------------------------------------------

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
    `tower`: stored names of a tower for images, by their names inside it. `drafts`: those of layers
    that draft tokens, by their names from `mtp.` on.
    """

    stored: dict[str, str]
    found: dict[str, Any]
    bitlinear_norms: bool
    remarks: tuple[str, ...]
    tower: dict[str, str]
    drafts: dict[str, str]


def find_naming(config: Mapping[str, Any], family: Family | None, names: Iterable[str]) -> Naming:
    """The Naming of a checkpoint; ConvertError if two of its tensors are one tensor here."""
    prefix = _wrapper_prefix(names := list(names))
    given, names = names, [name.removeprefix(prefix) for name in names]
    tower: dict[str, str] = {}
    drafts = {d: whole for whole, n in zip(given, names, strict=True) if (d := draft_name(n))}
    if drafts:
        kept = [(whole, n) for whole, n in zip(given, names, strict=True) if not draft_name(n)]
        given, names = [whole for whole, _ in kept], [name for _, name in kept]
    if family is not None and family.hybrid:
        for whole, name in zip(given, names, strict=True):
            if (inside := tower_name(name)) is not None:
                tower[inside] = whole
        owned = {whole: own_name(name) for whole, name in zip(given, names, strict=True)}
        given, names = [n for n in given if owned[n]], [n for n in owned.values() if n]
    headless = any(name.startswith("embed_tokens.") for name in names)
    table = {**_INNER, **(family.renamed if family is not None else {})}
    subln = any(part in name for name in names for part in _SUBLN)
    if subln:
        table |= _SUBLN
    inner = any(part in f".{name}" for name in names for part in _INNER)
    found, remarks = _found(config, family, subln, inner)
    stored: dict[str, str] = {}
    for name, as_given in zip(names, given, strict=True):
        here = _rename(name, table, headless)
        if here in stored:
            reject("duplicate-tensor", f"{here} once", f"it as {stored[here]} and as {as_given}")
        stored[here] = as_given
    if prefix:
        remarks = (*remarks, f"every name begins with {prefix}, which a wrapper left; taken away")
    return Naming(stored, found, inner, remarks, tower, drafts)


_WRAPPERS = ("module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module")


def _wrapper_prefix(names: list[str]) -> str:
    """What torch's wrappers (DDP, compile, FSDP) have put before every name; else nothing."""
    prefix = ""
    first = names[0] if names else ""
    for part in first.split("."):
        longer = f"{prefix}{part}."
        if part not in _WRAPPERS or not all(name.startswith(longer) for name in names):
            break
        prefix = longer
    return prefix


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
