"""`BitNetConfig`: config.json's quantization_config, as SGLang asks for it.

Loaded by `register()` only, since it imports sglang. Which layers are ternary and how they are
stored is `_settings`' business. Contract: sglang 0.5.20 srt/layers/quantization/base_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from bitnet_ops.integrations import _settings
from bitnet_ops.integrations._core import ACTIVATION_DTYPES, CheckpointError
from bitnet_ops.integrations.sglang import METHOD
from bitnet_ops.integrations.sglang.linear import BitNetLinearMethod

LINEARS = (ReplicatedLinear, ColumnParallelLinear, RowParallelLinear)


class BitNetConfig(QuantizationConfig):
    """The quantisation method "bitnet" for SGLang.

    Args:
        checkpoint: quantization_config of config.json; None or empty means transformers' defaults
            (linear class "bitlinear", packed).
        packed_modules_mapping: fused layer -> the checkpoint's layers, as the model class has it.
    """

    def __init__(
        self,
        checkpoint: Mapping[str, Any] | None = None,
        packed_modules_mapping: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__()
        self.settings = _settings.Settings(checkpoint)
        # SGLang's __init__ leaves an empty mapping that nobody fills.
        self.packed_modules_mapping = {**_settings.FUSED, **(packed_modules_mapping or {})}

    def __repr__(self) -> str:
        return f"BitNetConfig({self.settings.rule.value}, not converted: {self.settings.listed})"

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """No float16: squared ReLU overflows it, from the first layer on."""
        return list(ACTIVATION_DTYPES)

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # no GPU

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json has it all

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BitNetConfig:
        """From quantization_config, with what SGLang adds to it.

        Raises CheckpointError where `scale_rule` does, and where an untied output head would be
        ternary (a list of modules_to_not_convert that lacks lm_head): SGLang's head is not.
        """
        _settings.warn_of_unknown_keys(config)
        result = cls(config, config.get("packed_modules_mapping"))
        hf_config = config.get("hf_config")
        if hf_config is not None:
            result.settings.check_head(bool(getattr(hf_config, "tie_word_embeddings", True)))
        return result

    def is_skipped(self, prefix: str) -> bool:
        """Whether the layer of that name is left unquantised; see `Settings.is_skipped`."""
        return self.settings.is_skipped(prefix, self.packed_modules_mapping)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Our method for a ternary linear, the unquantised one for a skipped linear, else None.

        A linear must never get None (SGLang asserts); embeddings, heads and attention do.
        """
        if not isinstance(layer, LinearBase):
            return None
        if self.is_skipped(prefix):
            return UnquantizedLinearMethod()
        if not isinstance(layer, LINEARS):
            raise CheckpointError(
                "bitnet: expected a replicated, column- or row-parallel linear, got "
                f"{type(layer).__name__} at {prefix}: not supported"
            )
        return BitNetLinearMethod(self.settings.rule, prefix)

    def get_scaled_act_names(self) -> list[str]:
        return []
