"""`BitNetConfig`: config.json's quantization_config, as vLLM asks for it.

Loaded by `register()` only, since it imports vllm. Which layers are ternary and how they are stored
is `_settings`' business. Contract: vllm 0.32.0 model_executor/layers/quantization/base_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from bitnet_ops.integrations import _settings
from bitnet_ops.integrations._core import ACTIVATION_DTYPES, CheckpointError
from bitnet_ops.integrations.vllm import METHOD
from bitnet_ops.integrations.vllm.linear import BitNetLinearMethod

LINEARS = (ReplicatedLinear, ColumnParallelLinear, RowParallelLinear)


class BitNetConfig(QuantizationConfig):
    """The quantisation method "bitnet" for vLLM; `checkpoint` is quantization_config, None: {}."""

    def __init__(self, checkpoint: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.settings = _settings.Settings(checkpoint)
        self.sub_norms = False

    def __repr__(self) -> str:
        return f"BitNetConfig({self.settings.rule.value}, not converted: {self.settings.listed})"

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """No float16: squared ReLU overflows it, from the first layer on."""
        return list(ACTIVATION_DTYPES)

    @classmethod
    def get_min_capability(cls) -> int:
        return -1  # no GPU

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json has it all

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BitNetConfig:
        """From quantization_config. Raises CheckpointError where `scale_rule` does."""
        _settings.warn_of_unknown_keys(config)
        return cls(config)

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """vLLM shows the model's config here: the head that is not tied must not be ternary."""
        del model_name, revision
        if hf_config is not None:
            self.settings.check_head(bool(getattr(hf_config, "tie_word_embeddings", True)))
            self.sub_norms = getattr(hf_config, "model_type", None) == "bitnet"

    def is_skipped(self, prefix: str) -> bool:
        """Whether the layer of that name is left unquantised; see `Settings.is_skipped`."""
        # Models fill the mapping while they are made, those of transformers do not.
        return self.settings.is_skipped(
            prefix, {**_settings.FUSED, **(self.packed_modules_mapping or {})}
        )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Our method for a ternary linear, the unquantised one for a skipped linear, else None."""
        if not isinstance(layer, LinearBase):
            return None
        if self.is_skipped(prefix):
            return UnquantizedLinearMethod()
        if not isinstance(layer, LINEARS):
            raise CheckpointError(
                "bitnet: expected a replicated, column- or row-parallel linear, got "
                f"{type(layer).__name__} at {prefix}: not supported"
            )
        if self.sub_norms and getattr(layer, "tp_size", 1) > 1:
            raise CheckpointError(
                f"bitnet: expected tensor-parallel size 1, got {layer.tp_size} at {prefix}; this "
                "architecture's sub-norms span the columns of all ranks, and no reduction across "
                "ranks is implemented"
            )
        return BitNetLinearMethod(self.settings.rule, prefix)
