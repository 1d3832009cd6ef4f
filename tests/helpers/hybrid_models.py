"""Decoders of the tiny hybrids of hybrids.py."""

from __future__ import annotations

import numpy as np
import torch

import hybrids
from bitnet_ops import models
from bitnet_ops.config import ModelConfig
from bitnet_ops.nn.packing import pack_ternary


def decoder(
    made: hybrids.Hybrid, dtype: torch.dtype = torch.float32, weight_format: str = "2bit"
) -> models.Decoder:
    """The model as a converted file has it."""
    tensors = {}
    for name, found in hybrids.converted(made).items():
        if isinstance(found, tuple):
            codes, scales = found
            scale = torch.from_numpy(scales.astype(np.float32))
            packed = pack_ternary(torch.from_numpy(codes), scale, hybrids.GROUP)
            tensors[name] = packed.repack(weight_format)
        else:
            tensors[name] = torch.from_numpy(np.ascontiguousarray(found))
    return models.build(ModelConfig.from_hf(hybrids.converted_config(made)), tensors, dtype)


def hybrid(case: str | hybrids.Sizes, layers: int = 0, **options: object) -> models.Decoder:
    return decoder(hybrids.make(case, layers=layers), **options)  # type: ignore[arg-type]
