"""Models of a few thousand weights for tests, built straight from hf_writer's networks.

No file and no converter takes part: codes are packed by the op, scales turned here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.models import Decoder, build
from bitnet_ops.nn.packing import PackedWeight, pack_ternary
from hf_writer import DTYPES, FAMILIES, Family, config_dict, make_network

# One of each kind: BitNet and Llama, tied and not, GQA, head_dim != hidden / heads, K % 128 != 0.
NAMES = [
    "bitnet-offline",
    "bitnet-offline-untied",
    "bitnet-odd-k",
    "llama3-8b-like",
    "falcon3-like",
]
SMALL = {name: dataclasses.replace(FAMILIES[name], vocab=260) for name in NAMES}


def config_of(family: Family) -> ModelConfig:
    return ModelConfig.from_hf(config_dict(family))


def tensors_of(family: Family, network: dict[str, Any]) -> dict[str, Tensor | PackedWeight]:
    """The network as `models.build` wants it."""
    tensors: dict[str, Tensor | PackedWeight] = {}
    for name, value in network.items():
        if isinstance(value, dict):
            stored = value["stored_scale"]
            scale = 1.0 / stored if family.reciprocal else stored
            tensors[f"{name}.weight"] = pack_ternary(torch.from_numpy(value["codes"]), scale)
        else:
            tensors[f"{name}.weight"] = torch.from_numpy(value).to(DTYPES[family.dtype])
    return tensors


def tiny_model(
    family: Family, network: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32
) -> Decoder:
    """The model of `family`, with its own network unless another is given."""
    network = make_network(family) if network is None else network
    return build(config_of(family), tensors_of(family, network), dtype)


def random_ids(seed: int, *shape: int, below: int = 260) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))
