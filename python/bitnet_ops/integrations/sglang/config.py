"""`BitNetConfig`: config.json's quantization_config, as SGLang asks for it.

Loaded by `register()` only, since it imports sglang. It decides which layers are ternary; how their
weights are stored is `_core.scale_rule`'s business. Contract: sglang 0.5.20
srt/layers/quantization/base_config.py.
"""

from __future__ import annotations

import logging
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

from bitnet_ops.integrations._core import ACTIVATION_DTYPES, CheckpointError, scale_rule
from bitnet_ops.integrations._settings import is_listed, listed_modules
from bitnet_ops.integrations.sglang import METHOD
from bitnet_ops.integrations.sglang.linear import BitNetLinearMethod

logger = logging.getLogger(__name__)

# What SGLang's models fuse, where the model class does not say it itself.
FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
CHECKPOINT_KEYS = {
    "quant_method",
    "linear_class",
    "quantization_mode",
    "modules_to_not_convert",
    "use_rms_norm",
    "rms_norm_eps",
}
ENGINE_KEYS = {"packed_modules_mapping", "hf_config"}  # put into the dict by SGLang itself
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
        settings = dict(checkpoint or {})
        self.rule = scale_rule(settings)
        self.modules_to_not_convert = listed_modules(settings)
        # SGLang's __init__ leaves an empty mapping that nobody fills.
        self.packed_modules_mapping = {**FUSED, **(packed_modules_mapping or {})}

    def __repr__(self) -> str:
        return f"BitNetConfig({self.rule.value}, not converted: {self.modules_to_not_convert})"

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
        unknown = sorted(set(config) - CHECKPOINT_KEYS - ENGINE_KEYS)
        if unknown:
            logger.warning("bitnet: quantization_config keys without a known meaning: %s", unknown)
        result = cls(config, config.get("packed_modules_mapping"))
        hf_config = config.get("hf_config")
        listed = config.get("modules_to_not_convert")
        untied = hf_config is not None and not getattr(hf_config, "tie_word_embeddings", True)
        if untied and listed and not result.is_skipped("lm_head"):
            raise CheckpointError(
                "bitnet: expected modules_to_not_convert to list lm_head (the head is not tied to "
                f"the embedding), got {listed}; transformers would have made the head ternary, "
                "which is not served"
            )
        return result

    def is_skipped(self, prefix: str) -> bool:
        """Whether the layer of that name is left unquantised; a fused one by all of its parts.

        An entry matches a name from its start, as a regular expression, or as its suffix: what
        transformers 5 does. Raises CheckpointError if only some parts of a fused layer match.
        """
        parent, _, leaf = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(leaf, [leaf])
        names = [f"{parent}.{part}" if parent else part for part in parts]
        hits = [is_listed(name, self.modules_to_not_convert) for name in names]
        if any(hits) and not all(hits):
            raise CheckpointError(
                f"bitnet: expected all or none of {names} in modules_to_not_convert, got a part; "
                f"SGLang fuses them into {prefix}"
            )
        return all(hits)

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
        return BitNetLinearMethod(self.rule, prefix)

    def get_scaled_act_names(self) -> list[str]:
        return []
