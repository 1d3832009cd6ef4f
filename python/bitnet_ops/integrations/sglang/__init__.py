"""The SGLang plug-in: `register()` is the entry point of group `sglang.srt.plugins`.

SGLang calls it in the launching process and first thing in every scheduler it spawns. Importing
this module does not import sglang; `register` and `doctor` do, `status` does not. It must not know
weights or kernels.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import MutableMapping
from typing import Any

from bitnet_ops.integrations.plugin import METHOD, Plugin

CONFIG_CLASS = "bitnet_ops.integrations.sglang.quantization:BitNetConfig"
MODEL_PACKAGE = "bitnet_ops.integrations.sglang.models"
# of SGLang's module mamba_hook, by which it says that a CPU keeps no states inside of prompts
PLATFORM_CHECK = "_platform_supports_mamba_cache_extra_buffer"
# 1, which the launcher sets: our attention as torch_native, and requests with pictures are refused
ATTENTION_VARIABLE = "BITNET_OPS_SGLANG_ATTENTION"
_TABLES = "QUANTIZATION_METHODS", "CPU_QUANTIZATION_METHODS"  # the second where SGLang sees AMX
_QUANTIZATION = "sglang.srt.layers.quantization"
_HOOKS = "sglang.srt.plugins.hook_registry"
# What SGLang calls first of a request of /generate and of its engine.
_REQUEST = "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments"
_HYBRIDS = "sglang.srt.configs.linear_attn_model_registry"
HYBRID = "BitnetOpsHybridForCausalLM"  # the class of converted hybrids


def _allows(listed: str | None) -> bool:
    return not listed or METHOD in [name.strip() for name in listed.split(",")]


PLUGIN = Plugin(
    engine="sglang",
    distributions=("sglang",),
    group="sglang.srt.plugins",
    variable="SGLANG_PLUGINS",
    allows=_allows,
    tested=("0.5.20", "0.5.21", "0.5.23"),
)


def put_method(table: Any, name: str) -> None:
    """Enter our config class under METHOD into one of SGLang's tables, whatever its kind.

    A mutable mapping takes the class; a lazy read-only registry takes "module:Class" in `.specs`.
    """
    if isinstance(table, MutableMapping):
        module, attribute = CONFIG_CLASS.split(":")
        table[METHOD] = getattr(importlib.import_module(module), attribute)
    elif isinstance(getattr(table, "specs", None), MutableMapping):
        table.specs[METHOD] = CONFIG_CLASS
    else:
        raise PLUGIN.unsupported(
            f"{name} to be a mutable mapping or to have .specs", type(table).__name__
        )


def _put_everywhere() -> None:
    quantization = importlib.import_module(_QUANTIZATION)
    for name in _TABLES:
        if not hasattr(quantization, name):
            raise PLUGIN.unsupported(f"the table {name}", "none")
        put_method(getattr(quantization, name), name)


def _put_choice() -> None:
    """Allow `--quantization bitnet`; a checkpoint that names the method needs no flag.

    The adder is a list's bound `extend`, which would enter the name again on every call.
    """
    add = importlib.import_module("sglang.srt.server_args").add_quantization_method_choices
    if METHOD not in getattr(add, "__self__", ()):
        add([METHOD])


def _put_attention() -> None:
    """Put our paged attention in the place of torch_native's, if the launcher has asked for it.

    Under that name, for SGLang takes every backend of another name for one that runs Triton. Not
    unasked: models of others may use torch_native in the same process.
    """
    if os.environ.get(ATTENTION_VARIABLE) == "1":
        registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
        registry.register_attention_backend("torch_native")(_attention_backend)


def _attention_backend(model_runner: Any) -> Any:
    module = importlib.import_module(f"{__name__}.attention")
    return module.BitnetAttentionBackend(model_runner)


def _put_refusal() -> None:
    """Have requests with pictures refused, if the launcher has asked for it.

    SGLang looks at the pictures of models of its own alone, and drops those of others unread.
    """
    if os.environ.get(ATTENTION_VARIABLE) == "1":
        hooks = importlib.import_module(_HOOKS)
        hooks.HookRegistry.register(_REQUEST, refuse_pictures, hooks.HookType.BEFORE)


def refuse_pictures(request: Any) -> None:
    """Raise ValueError, an answer of status 400, for a request with pictures, films or sounds."""
    if request.contains_mm_input():
        raise ValueError(
            "bitnet: expected a text, got image_data, video_data or audio_data beside it; SGLang "
            "runs the decoder alone: bitnet-ops serve reads pictures, of models with a tower"
        )


def _put_hybrids() -> None:
    """Let SGLang know of converted hybrids, whose states it is to keep."""
    importlib.import_module(f"{__name__}.hybrid").put_hybrids()


def _put_model() -> None:
    """Offer the fused BitNetForCausalLM; without it SGLang runs transformers' model unfused.

    Importing SGLang's model registry imports every model, so the package is named in the variable
    that the registry reads when it is imported; only a taken variable or a registry already
    there is worth the import.
    """
    variable = "SGLANG_EXTERNAL_MODEL_PACKAGE"
    registry_name = "sglang.srt.models.registry"
    if os.environ.setdefault(variable, MODEL_PACKAGE) == MODEL_PACKAGE:
        if registry_name not in sys.modules:
            return
    registry = importlib.import_module(registry_name).ModelRegistry
    registry.register(MODEL_PACKAGE, overwrite=True)


def register() -> None:
    """Make SGLang know the quantisation method "bitnet" and its model. May be called repeatedly.

    Raises RegistrationError, or ImportError if sglang cannot be imported; both are logged first.
    """
    with PLUGIN.registering():
        _put_everywhere()
        _put_choice()
        _put_attention()
        _put_refusal()
        _put_hybrids()
        _put_model()


def status() -> dict[str, Any]:
    """`Plugin.status`: imports no engine."""
    return PLUGIN.status()


def doctor() -> dict[str, Any]:
    """`Plugin.doctor`, with the keys model_package and cpu_engine (SGLANG_USE_CPU_ENGINE is 1)."""
    report = PLUGIN.doctor(register, _registered)
    report["cpu_engine"] = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
    if not report["cpu_engine"]:
        report["problems"].append("SGLANG_USE_CPU_ENGINE is not 1: sglang will not use the CPU")
    return report


def _registered() -> dict[str, Any]:
    quantization = importlib.import_module(_QUANTIZATION)
    tables = {name: getattr(quantization, name) for name in _TABLES}
    hybrids = importlib.import_module(_HYBRIDS)
    return {
        "registered": {
            **{
                name: METHOD in table or METHOD in getattr(table, "specs", ())
                for name, table in tables.items()
            },
            "linear_attn_model_registry": hybrids.get_linear_attn_spec_by_arch(HYBRID) is not None,
        },
        "model_package": os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"),
    }
