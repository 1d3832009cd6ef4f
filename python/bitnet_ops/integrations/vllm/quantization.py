"""The quantisation method "bitnet" with vLLM's base classes, and what vLLM alone knows.

Loaded by `register()` only, since it imports vllm. Contract: vllm 0.32.0
model_executor/layers/quantization/base_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    LinearMethodBase,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from bitnet_ops.integrations.checkpoint import CheckpointError
from bitnet_ops.integrations.linear_method import BitNetLinearMethod
from bitnet_ops.integrations.plugin import EngineConfig


class VLLMLinearMethod(BitNetLinearMethod, LinearMethodBase):
    """vLLM's linear method for ternary weights."""

    # The engine has no plain call, so the step that tells the two apart is left out.
    apply = BitNetLinearMethod.apply_layer  # type: ignore[assignment]

    def rank_group(self) -> Any:
        from vllm.distributed import get_tp_group

        return get_tp_group().device_group

    def load_format(self) -> object:
        try:
            from vllm.config import get_current_vllm_config

            return get_current_vllm_config().load_config.load_format
        except (ImportError, AttributeError, AssertionError):  # not inside an engine
            return None


class BitNetConfig(EngineConfig, QuantizationConfig):
    """The quantisation method "bitnet" for vLLM."""

    linear_base = LinearBase
    linears = (ReplicatedLinear, ColumnParallelLinear, RowParallelLinear)
    unquantized = UnquantizedLinearMethod
    method = VLLMLinearMethod

    def __init__(self, checkpoint: Mapping[str, Any] | None = None) -> None:
        super().__init__(checkpoint)
        self.sub_norms = False

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """vLLM shows the model's config here."""
        del model_name, revision
        self.settings.check_head(hf_config)
        self.sub_norms = getattr(hf_config, "model_type", None) == "bitnet"

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """As `EngineConfig` has it; several ranks of a model with sub-norms are rejected."""
        method = super().get_quant_method(layer, prefix)
        ranks = getattr(layer, "tp_size", 1)
        if isinstance(method, VLLMLinearMethod) and self.sub_norms and ranks > 1:
            raise CheckpointError(
                f"bitnet: expected tensor-parallel size 1, got {ranks} at {prefix}; this "
                "architecture's sub-norms span the columns of all ranks, and no reduction across "
                "ranks is implemented"
            )
        return method
