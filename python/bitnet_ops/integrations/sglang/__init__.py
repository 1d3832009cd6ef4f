"""The SGLang plug-in: `register()` is the entry point of group `sglang.srt.plugins`.

SGLang calls it in the launching process and first thing in every scheduler it spawns. Importing
this module does not import sglang; `register` and `doctor` do, `status` does not.
SGLang logs and swallows an exception of a plug-in, and then reports "Unknown quantization method";
so a failure is logged here too, with its cause. It must not know weights or kernels.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any

METHOD = "bitnet"
CONFIG_CLASS = "bitnet_ops.integrations.sglang.config:BitNetConfig"
MODEL_PACKAGE = "bitnet_ops.integrations.sglang.models"
ATTENTION_VARIABLE = "BITNET_OPS_SGLANG_ATTENTION"  # 1: our attention as torch_native
ENTRY_POINT_GROUP = "sglang.srt.plugins"
TESTED_VERSIONS = ("0.5.20", "0.5.21")

logger = logging.getLogger(__name__)


class RegistrationError(RuntimeError):
    """This SGLang's tables are of a kind that the plug-in does not know."""


def sglang_version() -> str:
    """The installed distribution's version, or "unknown"."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _unsupported(what: str, found: object) -> RegistrationError:
    return RegistrationError(
        f"bitnet: expected {what}, got {found} in sglang {sglang_version()}; tested with sglang "
        f"{', '.join(TESTED_VERSIONS)}: install that version, or report this one"
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
        raise _unsupported(
            f"{name} to be a mutable mapping or to have .specs", type(table).__name__
        )


def _put_everywhere() -> None:
    quantization = importlib.import_module("sglang.srt.layers.quantization")
    # The first table is consulted always; the second as well where SGLang sees AMX.
    for name in ("QUANTIZATION_METHODS", "CPU_QUANTIZATION_METHODS"):
        if not hasattr(quantization, name):
            raise _unsupported(f"the table {name}", "none")
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
    try:
        _put_everywhere()
        _put_choice()
        _put_attention()
        _put_model()
    except Exception:
        logger.exception(
            "bitnet_ops could not register with sglang %s: a BitNet checkpoint will fail with "
            "'Unknown quantization method'; run bitnet_ops.integrations.sglang.doctor()",
            sglang_version(),
        )
        raise
    logger.info("bitnet_ops registered the quantisation method %r with sglang", METHOD)


def status() -> dict[str, Any]:
    """What can be known of the plug-in without importing sglang, which takes seconds.

    Keys: installed (bool), version (of sglang, or None), entry_point (registered for this Python:
    SGLang will find the plug-in), active (sglang is installed, finds it and may load it),
    SGLANG_PLUGINS (the user's list of plug-ins to load, or None), tested (sglang versions),
    version_tested (bool).
    """
    version = sglang_version()
    installed = version != "unknown"
    listed = os.environ.get("SGLANG_PLUGINS") or None
    allowed = listed is None or METHOD in [name.strip() for name in listed.split(",")]
    entry_point = _entry_point_installed()
    return {
        "installed": installed,
        "version": version if installed else None,
        "entry_point": entry_point,
        "active": installed and entry_point and allowed,
        "SGLANG_PLUGINS": listed,
        "tested": list(TESTED_VERSIONS),
        "version_tested": version in TESTED_VERSIONS,
    }


def doctor() -> dict[str, Any]:
    """What a user with a failing set-up should look at; `problems` is empty when all is well.

    Keys: sglang (version), tested (versions), entry_point (found among installed distributions),
    registered ({table: bool}), model_package, cpu_engine (SGLANG_USE_CPU_ENGINE is 1),
    problems (one sentence each). Calls register() first; never raises.
    """
    report: dict[str, Any] = {
        "sglang": sglang_version(),
        "tested": list(TESTED_VERSIONS),
        "entry_point": _entry_point_installed(),
        "model_package": os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"),
        "cpu_engine": os.environ.get("SGLANG_USE_CPU_ENGINE") == "1",
    }
    problems: list[str] = []
    try:
        register()
        report.update(_registered())
        problems += [
            f"{key} lacks {METHOD!r}" for key, ok in report["registered"].items() if not ok
        ]
    except Exception as error:  # a diagnosis must survive whatever it diagnoses
        problems.append(f"registration failed: {type(error).__name__}: {error}")
    if not report["entry_point"]:
        problems.append(
            f"no entry point of group {ENTRY_POINT_GROUP}: spawned schedulers will not know "
            f"{METHOD!r}; install bitnet-ops with pip (a source tree on PYTHONPATH has none)"
        )
    if not report["cpu_engine"]:
        problems.append("SGLANG_USE_CPU_ENGINE is not 1: sglang will not use the CPU")
    report["problems"] = problems
    return report


def _entry_point_installed() -> bool:
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return any(point.value == f"{__name__}:register" for point in points)


def _holds_method(table: Any) -> bool:
    return METHOD in table or METHOD in getattr(table, "specs", ())


def _registered() -> dict[str, Any]:
    quantization = importlib.import_module("sglang.srt.layers.quantization")
    tables = ("QUANTIZATION_METHODS", "CPU_QUANTIZATION_METHODS")
    return {
        "registered": {name: _holds_method(getattr(quantization, name)) for name in tables},
        "model_package": os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"),
    }
