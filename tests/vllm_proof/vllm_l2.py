"""Rung L2: the plug-in in the real vLLM: its entry point, its tables, its classes.

Prints one line per check.
"""

from __future__ import annotations


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


if __name__ == "__main__":
    for check in (
        check_entry_point_registers,
        check_foreign_checkpoints_are_left_alone,
    ):
        check()
        print(f"ok: {check.__doc__.splitlines()[0]}")
