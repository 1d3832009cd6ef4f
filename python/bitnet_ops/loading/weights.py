"""A model file's tensors, checked and in the layouts that the kernels want, ready for `build`.

They come from the file itself or from what an earlier load has left in the load cache
(load_cache.py). It must not know what a model computes, text or engines.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.config import ModelConfig
from bitnet_ops.formats import sglbitnt
from bitnet_ops.loading import load_cache
from bitnet_ops.loading.model_contents import model_config, own_tensors
from bitnet_ops.memory.arena import Arena, aligned
from bitnet_ops.models import Decoder, TensorError, TensorSpec, build, check_names, expected_tensors
from bitnet_ops.nn.head import HeadWeight
from bitnet_ops.nn.packing import BLOCK, PackedWeight, blocked_shape, choose_format, packed_shape
from bitnet_ops.nn.storage import HEAD_FORMATS, check_head_format

Tensors = dict[str, Tensor | PackedWeight | HeadWeight]
_HEAD_ROWS = 4096  # quantised at a time: 20 MB of a 2B model; a multiple of the tiles of int4


def load_model(
    file: Path,
    dtype: torch.dtype = torch.float32,
    weight_format: str = "auto",
    head_format: str = "stored",
    cache: Path | None = None,
) -> Decoder:
    """The model in `file`; its formats as of `load_tensors`, which says what is raised, and build.

    The embedding of a model without a head is read a row a token, and kept as it is stored.
    """
    reader = sglbitnt.Reader(file, check_codes=False)  # load_tensors checks what it reads
    config = model_config(reader)
    if config.embedding_only:
        head_format = "stored"
    tensors = load_tensors(reader, config, weight_format, head_format, cache)
    return build(config, tensors, dtype, check_values=False)


def load_tensors(
    reader: sglbitnt.Reader,
    config: ModelConfig,
    weight_format: str = "auto",
    head_format: str = "stored",
    cache: Path | None = None,
) -> Tensors:
    """Every tensor of `config`, values checked, in the layout `weight_format`, `head_format`.

    `reader`: opened with check_codes=False, for everything is checked here as it is read. `cache`:
    the directory of the load cache, or None. Canonical weights, and in version 2 whatever is used
    as it is stored, stay views of the mapped file, and nothing is cached if all weights are
    canonical; the rest is memory of its own, and the file's pages are released.
    Raises SglbitntError, TensorError, and ValueError for an unknown format.
    """
    check_names(config, own_tensors(reader, config))
    check_head_format(head_format)
    formats = {
        name: choose_format(weight_format, spec.shape[1])
        for name, spec in expected_tensors(config).items()
        if spec.kind == "ternary" or _stored_ternary(reader, name, spec)
    }
    if cache is None or all(format == "canonical" for format in formats.values()):
        return _read(reader, config, formats, head_format)
    layouts = [*sorted(set(formats.values())), head_format]
    file = cache / load_cache.file_name(reader, layouts)

    def check(tensors: Tensors) -> None:
        _check_cached(tensors, reader, config, formats, head_format)

    found = load_cache.read(file, check)
    if found is not None:
        return found
    tensors = _read(reader, config, formats, head_format)
    with contextlib.suppress(TensorError):  # `build` says what is wrong with the model's file
        check(tensors)
        load_cache.write(file, tensors)
    return tensors


def _check_cached(
    tensors: Tensors,
    reader: sglbitnt.Reader,
    config: ModelConfig,
    formats: Mapping[str, str],
    head_format: str,
) -> None:
    """Raise TensorError unless `tensors` are of the kinds, shapes and types that `_read` makes."""
    specs, head = expected_tensors(config), f"{_head_of(config)}.weight"
    if tensors.keys() != specs.keys():
        raise TensorError(f"expected {len(specs)} tensors, got {len(tensors)} of other names")
    for name, spec in specs.items():
        if spec.kind == "ternary":
            wanted = _ternary_form(reader.tensors[name], spec, formats[name])
        elif name in formats:
            wanted = _ternary_head_form(reader.tensors[name], spec, formats[name], tensors[name])
        elif name == head and head_format != "stored":
            wanted = _head_form(spec, head_format)
        else:
            wanted = ("dense", reader.tensors[name].dtype, spec.shape)
        if _form(tensors[name]) != wanted:
            raise TensorError(f"expected {name} as {wanted}, got {_form(tensors[name])}")


def _ternary_form(info: sglbitnt.TensorInfo, spec: TensorSpec, format: str) -> tuple[Any, ...]:
    n, k = spec.shape
    scales = {"tensor": 1, "row": n, "group": n * -(-k // (info.group_size or 1))}.get(
        info.scale_kind
    )
    return "ternary", n, k, format, info.group_size, packed_shape(n, k, format), scales


def _stored_ternary(reader: sglbitnt.Reader, name: str, spec: TensorSpec) -> bool:
    """Whether an embedding or a head lies in the file as packed ternary weights."""
    return spec.may_be_ternary and reader.tensors[name].packed


def _ternary_head_form(
    info: sglbitnt.TensorInfo,
    spec: TensorSpec,
    format: str,
    found: Tensor | PackedWeight | HeadWeight,
) -> tuple[Any, ...]:
    n, k = spec.shape
    weight = torch.empty(packed_shape(n, k, format), dtype=torch.uint8, device="meta")
    size = info.group_size or BLOCK
    scale = torch.empty(n, -(-k // size), dtype=torch.float32, device="meta")
    shape = blocked_shape(PackedWeight.unchecked(weight, scale, n, k, format, size))
    dtype = torch.float32  # or what all of them fit in
    if format != "canonical" and isinstance(found, HeadWeight) and found.scale is not None:
        dtype = torch.float16 if found.scale.dtype == torch.float16 else dtype
    return "head", n, k, torch.uint8, tuple(weight.shape), (dtype, shape)


def _head_form(spec: TensorSpec, head_format: str) -> tuple[Any, ...]:
    like = HeadWeight.from_dense(
        torch.empty(spec.shape, dtype=torch.float32, device="meta"), head_format
    )
    return _form(like)


def _form(value: Tensor | PackedWeight | HeadWeight) -> tuple[Any, ...]:
    """All that can be said of a tensor without its values."""
    if isinstance(value, PackedWeight):
        shape = (value.out_features, value.in_features, value.format, value.group_size)
        return "ternary", *shape, tuple(value.weight.shape), value.scale.numel()
    if isinstance(value, HeadWeight):
        weight, scale = value.weight, value.scale
        about = None if scale is None else (scale.dtype, tuple(scale.shape))
        features = value.out_features, value.in_features
        return "head", *features, weight.dtype, tuple(weight.shape), about
    return "dense", value.dtype, tuple(value.shape)


def _head_of(config: ModelConfig) -> str:
    return "model.embed_tokens" if config.tie_word_embeddings else "lm_head"


def repack_all(
    tensors: Mapping[str, Tensor | PackedWeight | HeadWeight], weight_format: str
) -> Tensors:
    """The same tensors, ternary ones in the layout `weight_format`, in order in one Arena."""
    formats = {
        name: choose_format(weight_format, value.in_features)
        for name, value in tensors.items()
        if isinstance(value, PackedWeight)
    }
    arena = Arena(
        _arena_bytes(
            (value.out_features, value.in_features, formats[name])
            for name, value in tensors.items()
            if isinstance(value, PackedWeight)
        )
    )
    return {
        name: _repack(value, formats[name], arena) if isinstance(value, PackedWeight) else value
        for name, value in tensors.items()
    }


def _read(
    reader: sglbitnt.Reader, config: ModelConfig, formats: Mapping[str, str], head_format: str
) -> Tensors:
    head, specs = _head_of(config), expected_tensors(config)
    shapes = [(specs[name].shape, format) for name, format in formats.items()]
    arena = Arena(_arena_bytes((shape[0], shape[1], format) for shape, format in shapes))
    tensors: Tensors = {}
    for name, spec in specs.items():
        if name in formats and reader.tensors[name].packed:
            packed = _ternary(reader, name, spec, formats[name], arena)
            ternary = spec.kind == "ternary"
            tensors[name] = packed if ternary else HeadWeight.from_packed(packed)
            continue
        if name == f"{head}.weight" and HEAD_FORMATS[head_format].quantized:
            tensors[name] = _quantised_head(reader, name, spec, head_format)
            continue
        reader.check_data(name)
        tensor = reader.tensor(name)
        if reader.version == 1:  # it is a copy
            reader.release(name)
        cast = name == f"{head}.weight" and head_format != "stored" and tensor.shape == spec.shape
        # `build` rejects what does not fit
        tensors[name] = HeadWeight.from_dense(tensor, head_format) if cast else tensor
    return tensors


def _arena_bytes(matrices: Iterable[tuple[int, int, str]]) -> int:
    """What matrices (N, K, format) take in an arena; canonical ones stay where they are."""
    return sum(
        count * aligned(math.prod(packed_shape(*matrix)))
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
    scales = reader.scales(name)
    if format == "canonical" or len(scales) > 1:  # many scales are values to be checked, too
        reader.check_data(name)
    else:
        reader.check_sum(name)
    rows = PackedWeight(reader.tensor(name), scales, n, k, group_size=info.group_size)
    if format == "canonical":
        return rows
    try:
        packed = _repack(rows, format, arena)
    except RuntimeError:
        reader.check_data(name)  # says which byte is wrong, where that is the reason
        raise
    reader.release(name)
    return packed


def _quantised_head(
    reader: sglbitnt.Reader, name: str, spec: TensorSpec, head_format: str
) -> HeadWeight | Tensor:
    """The head by pieces of rows, so that the file's matrix is never in memory as a whole."""
    info = reader.tensors[name]
    if info.packed or info.shape != spec.shape:
        return reader.tensor(name)  # `build` rejects it
    rows, features = spec.shape
    whole = ops.quantize_head(
        torch.empty(spec.shape, dtype=torch.float32, device="meta"), head_format
    )
    arena = Arena(sum(aligned(part.nbytes) for part in whole))
    weight, scale = (arena.take(part.shape, part.dtype) for part in whole)
    reader.check_sum(name)
    reader.release(name)
    at = 0
    for begin in range(0, rows, _HEAD_ROWS):
        piece = reader.rows(name, begin, min(begin + _HEAD_ROWS, rows))
        try:
            codes, scales = ops.quantize_head(piece, head_format)
        except RuntimeError:
            reader.check_data(name)  # says which element is wrong, where that is the reason
            raise
        weight[at : at + len(codes)] = codes
        scale[at : at + len(codes)] = scales
        at += len(codes)
        reader.release(name)
    return HeadWeight(weight, scale, rows, features)


def _repack(packed: PackedWeight, format: str, arena: Arena) -> PackedWeight:
    made = packed.repack(format)
    if format == "canonical":
        return made
    weight = arena.take(made.weight.shape)
    weight.numpy()[...] = made.weight.numpy()  # torch would wake every thread for 3 MB
    return made.with_weight(weight, format)
