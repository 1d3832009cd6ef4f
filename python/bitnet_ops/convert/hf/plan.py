"""Matching what a config expects with what a checkpoint holds, before any tensor is read.

Strict in both directions: every expected tensor must be there in the right form, and nothing else
may be. The messages for unexpected names say which unsupported family they betray. Knows names,
dtypes and shapes; must not read tensor data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bitnet_ops.config import PRIVATE_BLOCK, ModelConfig, UnsupportedModelError
from bitnet_ops.convert.errors import ConvertError, listed, refuse
from bitnet_ops.convert.hf.checkpoint import TensorRecord
from bitnet_ops.convert.hf.decide import FLOATING, Scheme, check_exclusions, decide_scheme
from bitnet_ops.convert.hf.names import find_naming
from bitnet_ops.models import TensorSpec, expected_tensors

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

_ARCHITECTURES = {
    "qwen3_5": "a hybrid attention and scales per group",
    "gemma3": "Gemma's (1 + w) norms, scaled embeddings and per-linear norms",
    "gemma3_text": "Gemma's (1 + w) norms, scaled embeddings and per-linear norms",
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


@dataclass(frozen=True)
class Plan:
    """Everything decided before data is read: the model, the scheme and the tensors to write."""

    config: ModelConfig
    scheme: Scheme
    specs: dict[str, TensorSpec]  # in writing order
    tied_head: bool  # the file repeats the embedding as lm_head.weight; they must be equal
    ignored: tuple[str, ...]  # tensors that hold nothing of the model
    stored: dict[str, str]  # name here -> name in the checkpoint, for every tensor of the latter
    found: dict[str, Any]  # what names showed of the architecture; for the private block
    remarks: tuple[str, ...] = ()

    @property
    def renamed(self) -> bool:
        """Whether the checkpoint's names are not those that transformers' classes have."""
        return any(self.stored[name] != name for name in self.specs)


def make_plan(
    config: dict[str, Any],
    tensors: dict[str, TensorRecord],
    *,
    assume_online: bool = False,
    looks_ternary: Callable[[str], bool] | None = None,
) -> Plan:
    """Decide how to convert a checkpoint; ConvertError names the first obstacle.

    `looks_ternary` tells whether the values of a stored projection are ternary already; it is asked
    about one of them, and only where nothing else says what the weights are.
    """
    _explain_architecture(config)
    naming = find_naming(config, tensors)
    scheme = decide_scheme(
        config,
        assume_online=assume_online,
        bitlinear_norms=naming.bitlinear_norms,
        looks_ternary=_asked(config, tensors, looks_ternary),
    )
    model = _model(config, naming.found)
    records = {here: tensors[stored] for here, stored in naming.stored.items()}
    if model.num_hidden_layers > len(tensors):  # before a list of billions of names is made
        layers = f"tensors for {model.num_hidden_layers} layers"
        refuse("missing-tensor", layers, f"{len(tensors)} tensors in all")
    specs = dict(expected_tensors(model))
    ternary = [name for name, spec in specs.items() if spec.kind == "ternary"]
    check_exclusions(config, [name.removesuffix(".weight") for name in ternary])
    ignored = tuple(name for name in records if name.endswith(".rotary_emb.inv_freq"))
    tied_head = model.tie_word_embeddings and not model.embedding_only and HEAD in records
    _check_names(specs, records, scheme, {*ignored, *([HEAD] if tied_head else [])})
    for name, spec in specs.items():
        _check_tensor(spec, records, name, scheme)
    if tied_head:
        _check_dense(specs[EMBEDDING], records[HEAD])
    return Plan(
        model, scheme, specs, tied_head, ignored, naming.stored, naming.found, naming.remarks
    )


def _model(config: dict[str, Any], found: dict[str, Any]) -> ModelConfig:
    block = {PRIVATE_BLOCK: found} if found else {}
    try:
        return ModelConfig.from_hf({**config, **block})
    except UnsupportedModelError as error:
        raise ConvertError("unsupported-model", f"convert: {error}") from error


def _asked(
    config: dict[str, Any],
    tensors: dict[str, TensorRecord],
    looks_ternary: Callable[[str], bool] | None,
) -> bool:
    if looks_ternary is None or config.get("quantization_config") is not None:
        return False
    first = next((n for n in sorted(tensors) if n.endswith("self_attn.q_proj.weight")), None)
    return first is not None and tensors[first].dtype in FLOATING and looks_ternary(first)


def _explain_architecture(config: dict[str, Any]) -> None:
    model_type = config.get("model_type")
    reason = _ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if reason is not None:
        refuse(
            "unsupported-architecture",
            'model_type "bitnet", "llama", "qwen2" or "qwen3"',
            f"{model_type!r}: {reason}",
            "this architecture is not supported",
        )


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
        _refuse_unknown([tensors[name].name for name in unknown])
    missing = [name for name in specs if name not in tensors]
    if HEAD in missing:
        refuse(
            "tie-mismatch",
            f"{HEAD}, since tie_word_embeddings is false",
            "no such tensor",
            "set tie_word_embeddings to true if the head shares the embedding",
        )
    inner = [name for name in missing if name.endswith(".rms_norm.weight")]
    if inner and not any(name.endswith(".rms_norm.weight") for name in tensors):
        refuse("use-rms-norm", "a norm in every projection, as use_rms_norm says", "no such tensor")
    if missing:
        refuse("missing-tensor", f"all {len(specs)} tensors", f"no {listed(missing)}")
    if scheme.mode != "packed":
        _refuse_scales([name for name in scales if name in tensors])


def _refuse_unknown(unknown: list[str]) -> None:
    for part, code, meaning in _BETRAYALS:
        names = [name for name in unknown if part in name]
        if names:
            refuse(code, "the tensors of this config alone", f"{listed(names)}: {meaning}")
    remedy = "is config.json the one of this checkpoint?"
    refuse("unknown-tensor", "the tensors of this config alone", listed(unknown), remedy)


def _refuse_scales(names: list[str]) -> None:
    if names:
        refuse(
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
    elif scheme.mode != "packed":
        _check_masters(spec, record)
    else:
        _check_packed(spec, record)
        _check_scale(tensors.get(scale_name(name)), name)


def _form(record: TensorRecord) -> str:
    return f"{record.dtype} {list(record.shape)}"


def _check_dense(spec: TensorSpec, record: TensorRecord) -> None:
    if record.name == HEAD and record.dtype in ("U8", "I8"):
        refuse("quantised-head", "a floating output head", f"{HEAD} as {_form(record)}")
    if record.shape != tuple(spec.shape):
        refuse("shape", f"{record.name} of shape {list(spec.shape)}", _form(record))
    _check_floating(record)


def _check_floating(record: TensorRecord) -> None:
    if record.dtype not in FLOATING:
        refuse("dtype", f"{record.name} as F32, BF16 or F16", _form(record))


def _check_masters(spec: TensorSpec, record: TensorRecord) -> None:
    if record.dtype in ("U8", "I8"):
        refuse(
            "packed-under-online",
            f"master weights in {record.name}",
            f"{_form(record)} (already packed)",
            'quantization_mode "offline" is the one for packed weights',
        )
    if record.shape != tuple(spec.shape):
        refuse("shape", f"{record.name} of shape {list(spec.shape)}", _form(record))
    _check_floating(record)


def _check_packed(spec: TensorSpec, record: TensorRecord) -> None:
    rows, columns = spec.shape
    if record.dtype in FLOATING:
        refuse(
            "masters-under-offline",
            f"{record.name} packed as U8 [{-(-rows // 4)}, {columns}]",
            f"floating {_form(record)}",
            'if these are masters, config.json must say "autobitlinear" and "online"',
        )
    if record.dtype != "U8":
        refuse("dtype", f"{record.name} as U8", _form(record))
    if rows % 4 or record.shape != (rows // 4, columns):
        expected = f"{record.name} as U8 of shape [{rows} / 4, {columns}]"
        refuse("shape", expected, _form(record), "four output rows share a byte")


def _check_scale(record: TensorRecord | None, weight_name: str) -> None:
    if record is None:
        refuse("missing-scale", f"{scale_name(weight_name)}", "no such tensor")
    _check_floating(record)
    if record.shape not in ((), (1,)):
        refuse(
            "group-scales",
            f"one scale in {record.name}",
            _form(record),
            "scales per row or per group are not supported",
        )
