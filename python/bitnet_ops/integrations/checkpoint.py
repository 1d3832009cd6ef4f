"""What a Hugging Face BitNet checkpoint says, for every integration: settings and tensors.

`Settings` reads quantization_config: how weights and scales are stored, which layers stay as they
are. `logical_codes` and `stored_scale` read the tensors of one matrix. It must not import an
engine, nor know its layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.config.scheme import ScaleRule, SchemeError, quantized_scheme
from bitnet_ops.errors import BitNetError
from bitnet_ops.nn import packing
from bitnet_ops.nn.packing import packed_row_bytes, unpack_hf
from bitnet_ops.untrusted.patterns import PatternError, matches

ACTIVATION_DTYPES = (torch.bfloat16, torch.float32)
# Fused layer -> the checkpoint's layers, where a model class of an engine does not say it itself.
FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
_KNOWN_KEYS = {
    *("quant_method", "linear_class", "quantization_mode", "modules_to_not_convert"),
    *("use_rms_norm", "rms_norm_eps"),
    *("packed_modules_mapping", "hf_config"),  # put into the dict by engines
}


class CheckpointError(BitNetError, ValueError):
    """A tensor or setting of a checkpoint that cannot be served, named with the remedy."""


def in_layer(name: str) -> str:
    """The words that name a layer in a message; none for a layer without a name."""
    return f" in {name}" if name else ""


def scale_rule(quantization_config: Mapping[str, object]) -> ScaleRule:
    """The rule that a Hugging Face `quantization_config` means; absent keys have HF's defaults.

    Raises CheckpointError for another quant_method, an unknown class or mode, or `use_rms_norm`.
    """
    try:
        scheme = quantized_scheme({"quant_method": "bitnet", **quantization_config})
    except SchemeError as error:
        raise CheckpointError(f"bitnet: {error}") from None
    if quantization_config.get("use_rms_norm", False):
        raise CheckpointError(
            "bitnet: expected use_rms_norm false, got true; a norm inside each linear is not served"
        )
    return cast(ScaleRule, scheme.rule)


class Settings:
    """quantization_config, read: the scale rule and the layers that stay as they are.

    Args:
        checkpoint: quantization_config of config.json; None or empty means transformers' defaults
            (linear class "bitlinear", packed).
    Raises CheckpointError where `scale_rule` does, and for a key without a known meaning.
    """

    def __init__(self, checkpoint: Mapping[str, Any] | None = None) -> None:
        settings = dict(checkpoint or {})
        self.rule = scale_rule(settings)
        self.listed = _listed_modules(settings)
        unknown = sorted(k for k in set(settings) - _KNOWN_KEYS if settings[k] is not None)
        if unknown:
            raise CheckpointError(
                f"bitnet: expected quantization_config keys that are known here, got {unknown}; "
                "they may change what the model computes; only if they do not, remove them"
            )

    def is_skipped(self, prefix: str, fused: Mapping[str, Sequence[str]]) -> bool:
        """Whether the layer of that name is left unquantised; a fused one by all of its parts.

        An entry matches a name from its start, as a regular expression, or as its suffix: what
        transformers 5 does. Raises CheckpointError if only some parts of a fused layer match.
        """
        parent, _, leaf = prefix.rpartition(".")
        names = [f"{parent}.{part}" if parent else part for part in fused.get(leaf, [leaf])]
        hits = [self._is_listed(name) for name in names]
        if any(hits) and not all(hits):
            raise CheckpointError(
                f"bitnet: expected all or none of {names} in modules_to_not_convert, got a part; "
                f"the engine fuses them into {prefix}"
            )
        return all(hits)

    def _is_listed(self, name: str) -> bool:
        if name.endswith(tuple(self.listed)):
            return True
        try:
            return any(row[0] for row in matches(self.listed, [name]))
        except PatternError as error:
            raise CheckpointError(
                f"bitnet: expected {error}; repair modules_to_not_convert in config.json"
            ) from None

    def check_head(self, hf_config: Any) -> None:
        """Reject a model whose output head transformers would have made ternary."""
        tied = bool(getattr(hf_config, "tie_word_embeddings", True))
        if not tied and self.listed and not self.is_skipped("lm_head", {}):
            raise CheckpointError(
                "bitnet: expected modules_to_not_convert to list lm_head (the head is not tied to "
                f"the embedding), got {self.listed}; transformers would have made the head "
                "ternary, which is not served"
            )


def _listed_modules(settings: Mapping[str, Any]) -> list[str]:
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


def check_activation_dtype(dtype: torch.dtype, name: str = "") -> None:
    """Reject a model dtype that BitNet cannot run in (float16: relu(x)^2 * y passes 65504)."""
    if dtype not in ACTIVATION_DTYPES:
        raise CheckpointError(
            f"bitnet: expected the model dtype bfloat16 or float32, got {dtype}{in_layer(name)}; "
            "start the engine with dtype bfloat16 (float16 overflows in squared-ReLU models)"
        )


def logical_codes(
    loaded: Tensor, rule: ScaleRule, rows: int, columns: int, name: str
) -> tuple[Tensor, Tensor | None]:
    """A checkpoint's weight tensor -> (codes int8 [rows, columns], scale f32 [1] or None).

    Packed: contiguous quarters of the outputs, scale elsewhere. Full-precision weights: absmean
    ternarised over the WHOLE matrix, before any slicing. Raises CheckpointError on a dtype or shape
    that the rule does not allow, and on a code 3.
    """
    online = rule is ScaleRule.ONLINE
    if loaded.is_floating_point() != online or not (online or loaded.dtype == torch.uint8):
        wanted = "floating-point masters" if online else "packed uint8 weights"
        raise CheckpointError(
            f"bitnet: expected {wanted} (quantization_config says {rule.value}), got "
            f"{loaded.dtype}{in_layer(name)}; the checkpoint and its config.json disagree"
        )
    expected = (rows if online else -(-rows // 4), columns)
    if tuple(loaded.shape) != expected:
        along_inputs = [(rows, packed_row_bytes(columns)), (rows, -(-columns // 4))]
        remedy = "the tensor is short, or the engine padded the heads"
        if not online and tuple(loaded.shape) in along_inputs:
            remedy = (
                "these bytes are packed along the inputs, not in transformers' order: use the "
                "original checkpoint, or convert it and serve the model.bin"
            )
        raise CheckpointError(
            f"bitnet: expected weight {list(expected)} for {rows} outputs and {columns} inputs, "
            f"got {list(loaded.shape)}{in_layer(name)}; {remedy}"
        )
    if online:
        return ops.quantize_weights(loaded.detach().contiguous())
    try:
        return unpack_hf(loaded, rows), None
    except ValueError as error:
        raise CheckpointError(f"bitnet: {error}{in_layer(name)}") from error


def stored_scale(loaded: Tensor, rule: ScaleRule, name: str) -> Tensor:
    """A checkpoint's weight_scale -> the multiplying scale, f32 [1]; reciprocals invert in fp32."""
    if rule is ScaleRule.ONLINE:
        raise CheckpointError(
            f"bitnet: expected no weight_scale (quantization_config says {rule.value}), got one"
            f"{in_layer(name)}; the checkpoint and its config.json disagree"
        )
    if not loaded.is_floating_point():
        raise CheckpointError(
            f"bitnet: expected a floating-point weight_scale, got {loaded.dtype}{in_layer(name)}"
        )
    linear_class = "bitlinear" if rule is ScaleRule.DIVIDE else "autobitlinear"
    try:
        return packing.multiplying_scale(loaded, linear_class)
    except ValueError as error:
        raise CheckpointError(f"bitnet: {error}{in_layer(name)}") from error
