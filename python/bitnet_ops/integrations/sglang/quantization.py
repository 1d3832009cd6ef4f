"""The quantisation method "bitnet" with SGLang's base classes, and what SGLang alone knows.

Loaded by `register()` only, since it imports sglang. Contract: sglang 0.5.20
srt/layers/quantization/base_config.py.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from bitnet_ops.integrations.linear_method import BitNetLinearMethod
from bitnet_ops.integrations.plugin import EngineConfig


class SGLangLinearMethod(BitNetLinearMethod, LinearMethodBase):
    """SGLang's linear method for ternary weights."""

    # The engine has no plain call, so the step that tells the two apart is left out.
    apply = BitNetLinearMethod.apply_layer  # type: ignore[assignment]

    def rank_group(self) -> Any:
        from sglang.srt.distributed import get_tp_group

        return get_tp_group().device_group

    def load_format(self) -> object:
        try:
            from sglang.srt.runtime_context import get_model

            return get_model().load_format
        except (ImportError, AttributeError, ValueError):  # not inside an engine
            return None


class BitNetConfig(EngineConfig, QuantizationConfig):
    """The quantisation method "bitnet" for SGLang."""

    linear_base = LinearBase
    linears = (ReplicatedLinear, ColumnParallelLinear, RowParallelLinear)
    unquantized = UnquantizedLinearMethod
    method = SGLangLinearMethod

    def get_scaled_act_names(self) -> list[str]:
        return []
