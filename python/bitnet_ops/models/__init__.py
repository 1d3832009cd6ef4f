"""The registry of models: model_type -> class, so that no file can name a class.

The maths of a family is in its row of config.families: norms, biases, activation. One whose layers
are more than that gets a class of its own, here.

Also the strict check of a set of tensors against a config. It must not know file formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from bitnet_ops.blocks.block import TensorSpec
from bitnet_ops.blocks.listing import listing
from bitnet_ops.config import ModelConfig, UnsupportedModelError
from bitnet_ops.config.families import BY_MODEL_TYPE
from bitnet_ops.errors import BitNetError
from bitnet_ops.models.decoder import Decoder, dtype_of
from bitnet_ops.nn.head import HeadWeight
from bitnet_ops.nn.packing import PackedWeight
from bitnet_ops.nn.storage import check_head_format

REGISTRY: dict[str, type[Decoder]] = dict.fromkeys(BY_MODEL_TYPE, Decoder)

__all__ = [
    "REGISTRY",
    "Decoder",
    "TensorError",
    "TensorSpec",
    "build",
    "dtype_of",
    "check_names",
    "expected_tensors",
]


class TensorError(BitNetError, ValueError):
    """The tensors given are not those of the config; the message names the first that differs."""


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the model, in file order, under its Hugging Face name.

    Whatever a checkpoint calls them: the converter renames.
    """
    return listing(config).tensors()


def check_names(config: ModelConfig, names: Iterable[str]) -> None:
    """Raise TensorError unless `names` are exactly those of `expected_tensors(config)`."""
    given = set(names)
    expected = set(expected_tensors(config))
    for word, difference in (("missing", expected - given), ("unknown", given - expected)):
        if difference:
            more = f" and {len(difference) - 1} more" if len(difference) > 1 else ""
            raise TensorError(
                f"model: expected the {len(expected)} tensors of this config, got {len(given)}; "
                f"{word}: {min(difference)}{more}"
            )


def build(
    config: ModelConfig,
    tensors: Mapping[str, Tensor | PackedWeight | HeadWeight],
    dtype: torch.dtype = torch.float32,
    *,
    check_values: bool = True,
    head_format: str = "stored",
) -> Decoder:
    """The model of `config` over `tensors`, every one of which is checked first.

    `check_values`: look for NaN and infinity too; False where the source of the tensors has done so
    (it takes as long as reading them). `head_format`: of the output head and an embedding tied to
    it, one of HEAD_FORMATS. Raises TensorError for a missing, unknown, misshapen,
    mistyped or non-finite tensor, and UnsupportedModelError for a model_type without a class.
    """
    if config.model_type not in REGISTRY:
        raise UnsupportedModelError(
            f"config: expected model_type one of {', '.join(sorted(REGISTRY))}, "
            f"got {config.model_type!r}; other architectures are not implemented"
        )
    check_names(config, tensors)
    for name, spec in expected_tensors(config).items():
        _check_tensor(name, spec, tensors[name], check_values)
    check_head_format(head_format)
    return REGISTRY[config.model_type](config, tensors, dtype, head_format)


def _check_tensor(
    name: str, spec: TensorSpec, tensor: Tensor | PackedWeight | HeadWeight, check_values: bool
) -> None:
    kind: str
    shape: tuple[int, ...]
    if isinstance(tensor, PackedWeight):
        kind, shape = "ternary", (tensor.out_features, tensor.in_features)
    elif isinstance(tensor, HeadWeight):
        kind, shape = "dense", (tensor.out_features, tensor.in_features)
    else:
        kind, shape = "dense", tuple(tensor.shape)
    if kind != spec.kind and not (kind == "ternary" and spec.may_be_ternary):
        raise TensorError(f"model: expected {name} {spec.kind}, got {kind}")
    if shape != spec.shape:
        raise TensorError(f"model: expected {name} {list(spec.shape)}, got {list(shape)}")
    if isinstance(tensor, Tensor):
        _check_dense(name, tensor, check_values)


def _check_dense(name: str, tensor: Tensor, check_values: bool) -> None:
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TensorError(
            f"model: expected {name} float32, bfloat16 or float16, got {tensor.dtype}"
        )
    if not check_values:
        return
    low, high = torch.aminmax(tensor)  # one pass, no temporary; NaN spreads into both
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise TensorError(f"model: expected {name} finite, got a NaN or an infinity")
