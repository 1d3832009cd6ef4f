"""What a checkpoint's quantization_config says to an engine, whatever the engine: which layers are
ternary and how they are stored. An engine's config class asks it and adds the engine's base class.
It must not import an engine, nor know weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from bitnet_ops.integrations._core import CheckpointError, scale_rule
from bitnet_ops.untrusted.patterns import PatternError, matches

logger = logging.getLogger(__name__)

# What engines' models fuse, where the model class does not say it itself.
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
ENGINE_KEYS = {"packed_modules_mapping", "hf_config"}  # put into the dict by engines themselves


def warn_of_unknown_keys(settings: Mapping[str, Any]) -> None:
    """Log the keys of a quantization_config that nothing here knows."""
    unknown = sorted(set(settings) - CHECKPOINT_KEYS - ENGINE_KEYS)
    if unknown:
        logger.warning("bitnet: quantization_config keys without a known meaning: %s", unknown)


class Settings:
    """quantization_config, read: the scale rule and the layers that stay as they are.

    Args:
        checkpoint: quantization_config of config.json; None or empty means transformers' defaults
            (linear class "bitlinear", packed).
    """

    def __init__(self, checkpoint: Mapping[str, Any] | None = None) -> None:
        settings = dict(checkpoint or {})
        self.rule = scale_rule(settings)
        self.listed = listed_modules(settings)

    def is_skipped(self, prefix: str, fused: Mapping[str, Sequence[str]]) -> bool:
        """Whether the layer of that name is left unquantised; a fused one by all of its parts.

        An entry matches a name from its start, as a regular expression, or as its suffix: what
        transformers 5 does. Raises CheckpointError if only some parts of a fused layer match.
        """
        parent, _, leaf = prefix.rpartition(".")
        names = [f"{parent}.{part}" if parent else part for part in fused.get(leaf, [leaf])]
        hits = [is_listed(name, self.listed) for name in names]
        if any(hits) and not all(hits):
            raise CheckpointError(
                f"bitnet: expected all or none of {names} in modules_to_not_convert, got a part; "
                f"the engine fuses them into {prefix}"
            )
        return all(hits)

    def check_head(self, tied: bool) -> None:
        """Reject a checkpoint whose output head transformers would have made ternary."""
        if not tied and self.listed and not self.is_skipped("lm_head", {}):
            raise CheckpointError(
                "bitnet: expected modules_to_not_convert to list lm_head (the head is not tied to "
                f"the embedding), got {self.listed}; transformers would have made the head "
                "ternary, which is not served"
            )


def listed_modules(settings: Mapping[str, Any]) -> list[str]:
    """modules_to_not_convert of a quantization_config; CheckpointError if it is no list of texts.

    A text alone would be taken for its letters, and "m" begins the name of every layer.
    """
    listed = settings.get("modules_to_not_convert")
    if listed is None:
        return []
    if not isinstance(listed, list | tuple) or not all(isinstance(one, str) for one in listed):
        raise CheckpointError(
            f"bitnet: expected modules_to_not_convert as a list of names, got {listed!r}; repair "
            "config.json"
        )
    return list(listed)


def is_listed(name: str, entries: Sequence[str]) -> bool:
    """Whether an entry of modules_to_not_convert matches the module `name`."""
    if name.endswith(tuple(entries)):
        return True
    try:
        return any(row[0] for row in matches(entries, [name]))
    except PatternError as error:
        raise CheckpointError(
            f"bitnet: expected {error}; repair modules_to_not_convert in config.json"
        ) from None
