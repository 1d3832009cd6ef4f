"""A tower in a model file: its tensors beside those of the text model, and how it is loaded.

Their names are Hugging Face's, `model.visual.` and the name of the parameter; the sizes stand in
the config's private block under `vision`. Who opens the text model reads none of their bytes: they
are mapped, and read when the tower is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitnet_ops.config import PRIVATE_BLOCK
from bitnet_ops.formats.sglbitnt import Reader, model_file
from bitnet_ops.vision.config import VisionConfig
from bitnet_ops.vision.tower import VisionError, VisionTower

PREFIX = "model.visual."
KEY = "vision"  # of the private block


def vision_config(config: Mapping[str, Any]) -> VisionConfig | None:
    """Of a model file's config; None for a model that reads texts alone.

    Raises UnsupportedModelError for an entry of another form.
    """
    block = config.get(PRIVATE_BLOCK)
    found = block.get(KEY) if isinstance(block, Mapping) else None
    return None if found is None else VisionConfig.from_json(found)


@cache
def shapes(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of a tower: names without PREFIX, shapes as Hugging Face's."""
    with torch.device("meta"):
        tower = VisionTower(config)
    return {name: tuple(value.shape) for name, value in tower.named_parameters()}


def check_tensors(config: VisionConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise VisionError unless `found`, names without PREFIX, are exactly the tower's tensors."""
    expected = shapes(config)
    for name in [*(expected.keys() - found.keys()), *(found.keys() - expected.keys())]:
        if name in expected:
            raise VisionError(f"vision: expected {PREFIX}{name}, got no such tensor")
        raise VisionError(f"vision: expected the tensors of the tower alone, got {PREFIX}{name}")
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            got = f"{list(found[name])}"
            raise VisionError(f"vision: expected {PREFIX}{name} {list(shape)}, got {got}")


def tower_tensors(reader: Reader) -> dict[str, tuple[int, ...]]:
    """Shapes of the tower's tensors in a model file, by their names without PREFIX."""
    return {
        name.removeprefix(PREFIX): info.shape
        for name, info in reader.tensors.items()
        if name.startswith(PREFIX)
    }


def load_tower(
    path: str | os.PathLike[str] | Reader, dtype: torch.dtype = torch.float32
) -> VisionTower | None:
    """The tower in the model file, or folder, `path`; None for a model that reads texts alone.

    Values that the file holds in the dtype of use are views of the mapped file, which every process
    shares; others are copied. All are checked against the file's checksums first.
    Raises SglbitntError, UnsupportedModelError, and VisionError for a tower that is not whole.
    """
    reader = path if isinstance(path, Reader) else Reader(model_file(Path(path)), check_codes=False)
    config = vision_config(reader.config)
    if config is None:
        return None
    check_tensors(config, tower_tensors(reader))
    with torch.device("meta"):
        tower = VisionTower(config, dtype)
    for name, parameter in dict(tower.named_parameters()).items():
        owner, _, own = name.rpartition(".")
        value = _value(reader, PREFIX + name, parameter.dtype)
        setattr(tower.get_submodule(owner), own, nn.Parameter(value, requires_grad=False))
    return tower


def _value(reader: Reader, name: str, dtype: torch.dtype) -> Tensor:
    if reader.tensors[name].packed:
        raise VisionError(f"vision: expected {name} as floating values, got ternary ones")
    reader.check_data(name)
    stored = reader.tensor(name)
    if stored.dtype == dtype:
        return stored
    value = stored.to(dtype)
    reader.release(name)
    return value
