"""A model file's tensors, checked and in the layouts that the kernels want, ready for `build`.

They come from the file itself or from the prepared form that an earlier load has left in a cache
(prepared.py). It must not know what a model computes, text or engines.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from bitnet_ops import prepared
from bitnet_ops.arena import Arena, aligned
from bitnet_ops.config import ModelConfig
from bitnet_ops.formats import sglbitnt
from bitnet_ops.models import TensorError, TensorSpec, check_names, expected_tensors
from bitnet_ops.packing import PackedWeight, choose_format, prepack, prepacked_shape

Tensors = dict[str, Tensor | PackedWeight]


def load_tensors(
    reader: sglbitnt.Reader,
    config: ModelConfig,
    weight_format: str = "auto",
    cache: Path | None = None,
) -> Tensors:
    """Every tensor of `config`, values checked; ternary ones in the layout `weight_format`.

    `reader`: opened with check_codes=False, for everything is checked here as it is read. `cache`:
    the directory of prepared forms, or None. Canonical weights stay views of the mapped file, and
    nothing is cached then; everything else is memory of its own, and the file's pages are released.
    Raises SglbitntError, TensorError, and ValueError for an unknown format.
    """
    check_names(config, reader.tensors)
    formats = {
        name: choose_format(weight_format, spec.shape[1])
        for name, spec in expected_tensors(config).items()
        if spec.kind == "ternary"
    }
    if cache is None or all(format == "canonical" for format in formats.values()):
        return _read(reader, config, formats)
    file = cache / prepared.file_name(reader, sorted(set(formats.values())))
    tensors = prepared.read(file)
    if tensors is None:
        tensors = _read(reader, config, formats)
        prepared.write(file, tensors)
    return tensors


def prepack_all(tensors: Mapping[str, Tensor | PackedWeight], weight_format: str) -> Tensors:
    """The same tensors, ternary ones in the layout `weight_format`, in order in one Arena."""
    formats = {
        name: choose_format(weight_format, value.in_features)
        for name, value in tensors.items()
        if isinstance(value, PackedWeight)
    }
    arena = Arena(
        _private_bytes(
            (value.out_features, value.in_features, formats[name])
            for name, value in tensors.items()
            if isinstance(value, PackedWeight)
        )
    )
    return {
        name: _prepack(value, formats[name], arena) if isinstance(value, PackedWeight) else value
        for name, value in tensors.items()
    }


def _read(reader: sglbitnt.Reader, config: ModelConfig, formats: Mapping[str, str]) -> Tensors:
    specs = expected_tensors(config)
    shapes = [(specs[name].shape, format) for name, format in formats.items()]
    arena = Arena(_private_bytes((shape[0], shape[1], format) for shape, format in shapes))
    tensors: Tensors = {}
    for name, spec in specs.items():
        if spec.kind == "ternary" and reader.tensors[name].packed:
            tensors[name] = _ternary(reader, name, spec, formats[name], arena)
            continue
        reader.check_data(name)
        tensors[name] = reader.tensor(name)  # `build` refuses what does not fit
        reader.release(name)
    return tensors


def _private_bytes(matrices: Iterable[tuple[int, int, str]]) -> int:
    """What matrices (N, K, format) take in an arena; canonical ones stay where they are."""
    return sum(
        count * aligned(math.prod(prepacked_shape(*matrix)))
        for matrix, count in Counter(matrices).items()  # a model has few shapes, many matrices
        if matrix[2] != "canonical"
    )


def _ternary(
    reader: sglbitnt.Reader, name: str, spec: TensorSpec, format: str, arena: Arena
) -> PackedWeight:
    info = reader.tensors[name]
    n, k = spec.shape
    if info.shape[0] != n:
        raise TensorError(f"model: expected {name} with {n} rows, got {info.shape[0]}")
    reader.check_in_features(name, k)
    rows = PackedWeight(reader.tensor(name), torch.tensor([info.scale]), n, k)
    if format == "canonical":
        reader.check_data(name)
        return rows
    try:
        packed = _prepack(rows, format, arena)
    except RuntimeError:
        reader.check_data(name)  # says which byte is wrong, where that is the reason
        raise
    reader.release(name)
    return packed


def _prepack(packed: PackedWeight, format: str, arena: Arena) -> PackedWeight:
    made = prepack(packed, format)
    if format == "canonical":
        return made
    weight = arena.take(made.weight.shape)
    weight.numpy()[...] = made.weight.numpy()  # torch would wake every thread for 3 MB
    return dataclasses.replace(made, weight=weight)
