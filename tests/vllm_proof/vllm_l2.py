"""Rung L2: the plug-in in the real vLLM: its entry point, its tables, its classes.

The stand-in that the ordinary suite tests against (helpers/vllm_surface.py) must agree with the
real classes in what is abstract and in every parameter it names. Prints one line per check.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "helpers"))

import vllm_surface


def check_entry_point_registers():
    """load_general_plugins() alone makes method and model known, and doctor is content."""
    from vllm.model_executor.layers import quantization
    from vllm.model_executor.models import ModelRegistry
    from vllm.plugins import load_general_plugins

    assert "bitnet" not in quantization.QUANTIZATION_METHODS
    load_general_plugins()
    assert "bitnet" in quantization.QUANTIZATION_METHODS
    assert {"BitNetForCausalLM", "BitnetOpsForCausalLM"} <= set(ModelRegistry.get_supported_archs())
    from bitnet_ops.integrations.vllm import doctor

    problems = doctor()["problems"]
    assert not problems, problems


def check_foreign_checkpoints_are_left_alone():
    """vLLM polls every class for every checkpoint; ours answers None."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    cls = get_quantization_config("bitnet")
    for method in ("awq", "fp8", "compressed-tensors", "bitnet"):
        assert cls.override_quantization_method({"quant_method": method}, None) is None


def check_stand_in_agrees_with_vllm():
    """Abstract members and parameters of helpers/vllm_surface.py, class by class."""
    for module, classes in vllm_surface.CONFORMANCE:
        for ours in classes:
            real = getattr(importlib.import_module(module), ours.__name__)
            abstract = [getattr(cls, "__abstractmethods__", set()) for cls in (ours, real)]
            assert abstract[0] == abstract[1], (ours.__name__, *abstract)
            for name, method in vars(ours).items():
                if not inspect.isfunction(method) or name.startswith("_make"):
                    continue
                theirs = inspect.signature(getattr(real, name)).parameters
                named = [
                    p.name
                    for p in inspect.signature(method).parameters.values()
                    if p.kind is not p.VAR_KEYWORD and p.kind is not p.VAR_POSITIONAL
                ]
                missing = [n for n in named[1:] if n not in theirs]
                assert not missing or "args" in theirs or name == "forward", (
                    ours.__name__,
                    name,
                    missing,
                )


if __name__ == "__main__":
    for check in (
        check_entry_point_registers,
        check_foreign_checkpoints_are_left_alone,
        check_stand_in_agrees_with_vllm,
    ):
        check()
        print(f"ok: {check.__doc__.splitlines()[0]}")
