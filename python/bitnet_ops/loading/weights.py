"""A model file's tensors, checked and in the layouts that the kernels want, ready for `build`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.config import ModelConfig
from bitnet_ops.formats import sglbitnt
from bitnet_ops.loading.model_contents import model_config, own_tensors
from bitnet_ops.memory.arena import Arena, aligned, return_heap
from bitnet_ops.models import Decoder, TensorError, TensorSpec, build, check_names, expected_tensors
from bitnet_ops.nn.head import HeadWeight
from bitnet_ops.nn.packing import PackedWeight, choose_format, packed_shape
from bitnet_ops.nn.storage import check_head_format, find_head_format

Tensors = dict[str, Tensor | PackedWeight | HeadWeight]
_HEAP_BYTES = 1 << 28  # of temporary matrices, before their memory goes back to the system
_HEAD_ROWS = 4096  # quantised at a time: 20 MB of a 2B model; a multiple of the tiles of int4


def load_model(
    file: Path,
    dtype: torch.dtype = torch.float32,
    weight_format: str = "auto",
    head_format: str = "stored",
    attention: str | None = None,
    arena: Arena | None = None,
) -> Decoder:
    """The model in `file`; its formats as of `load_tensors`, which says what is raised, and build.

    The embedding of a model without a head is read a row a token, and kept as it is stored.
    `attention`: as of `Decoder.set_attention`. `weight_format` "auto" is "2bit" here: what suits a
    machine and a use is chosen before, by `weight_choice.choose_for_file`. `arena`: memory for
    the ternary weights, None: as much as they need.
    """
    reader = sglbitnt.Reader(file, check_codes=False)  # load_tensors checks what it reads
    config = model_config(reader)
    if attention is not None:
        config = config.with_attention(attention)
    if config.embedding_only:
        head_format = "stored"
    tensors = load_tensors(reader, config, weight_format, head_format, arena)
    model = build(config, tensors, dtype, check_values=False)
    if (digest := reader.digest()) is not None:
        model.comes_from(digest)
    return model


def load_tensors(
    reader: sglbitnt.Reader,
    config: ModelConfig,
    weight_format: str = "auto",
    head_format: str = "stored",
    arena: Arena | None = None,
) -> Tensors:
    """Every tensor of `config`, values checked, in the layout `weight_format`, `head_format`.

    `reader`: opened with check_codes=False, for everything is checked here as it is read. Canonical
    weights, and in version 2 whatever is used as it is stored, stay views of the mapped file; the
    rest is memory of its own, and the file's pages are released.
    Raises SglbitntError, TensorError, and ValueError for an unknown format.
    """
    check_names(config, own_tensors(reader, config))
    for name, spec in expected_tensors(config).items():  # before memory is asked for
        _check_shape(reader, name, spec)
    check_head_format(head_format)
    formats = {
        name: choose_format(weight_format, spec.shape[1])
        for name, spec in expected_tensors(config).items()
        if spec.kind == "ternary" or _stored_ternary(reader, name, spec)
    }
    return _read(reader, config, formats, head_format, arena)


def _stored_ternary(reader: sglbitnt.Reader, name: str, spec: TensorSpec) -> bool:
    """Whether an embedding or a head lies in the file as packed ternary weights."""
    return spec.may_be_ternary and reader.tensors[name].packed


def _head_of(config: ModelConfig) -> str:
    return "model.embed_tokens" if config.tie_word_embeddings else "lm_head"


def repack_all(
    tensors: Mapping[str, Tensor | PackedWeight | HeadWeight], weight_format: str
) -> Tensors:
    """The same tensors, ternary ones in the layout `weight_format`, in order in one Arena."""
    formats = {
        name: choose_format(weight_format, value.in_features, value.group_size)
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
    reader: sglbitnt.Reader,
    config: ModelConfig,
    formats: Mapping[str, str],
    head_format: str,
    arena: Arena | None,
) -> Tensors:
    head, specs = _head_of(config), expected_tensors(config)
    shapes = [(specs[name].shape, format) for name, format in formats.items()]
    needed = _arena_bytes((shape[0], shape[1], format) for shape, format in shapes)
    if arena is None or arena.memory.nbytes < needed:
        arena = Arena(needed)
    tensors: Tensors = {}
    repacked = 0
    for name, spec in specs.items():
        if repacked > _HEAP_BYTES:
            return_heap()
            repacked = 0
        if name in formats and reader.tensors[name].packed:
            packed = _ternary(reader, name, spec, formats[name], arena)
            repacked += packed.weight.nbytes
            ternary = spec.kind == "ternary"
            tensors[name] = packed if ternary else HeadWeight.from_packed(packed)
            continue
        if name == f"{head}.weight" and find_head_format(head_format).quantized:
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


def _check_shape(reader: sglbitnt.Reader, name: str, spec: TensorSpec) -> None:
    """Reject a tensor that is smaller or larger in the file than its config says."""
    info = reader.tensors[name]
    if info.packed:
        if info.shape[0] != spec.shape[0]:
            raise TensorError(
                f"model: expected {name} with {spec.shape[0]} rows, got {info.shape[0]}"
            )
        reader.check_in_features(name, spec.shape[-1])
    elif info.shape != spec.shape:
        raise TensorError(f"model: expected {name} {list(spec.shape)}, got {list(info.shape)}")


def _quantised_head(
    reader: sglbitnt.Reader, name: str, spec: TensorSpec, head_format: str
) -> HeadWeight | Tensor:
    """The head by pieces of rows, so that the file's matrix is never in memory as a whole."""
    info = reader.tensors[name]
    if info.packed or info.shape != spec.shape:
        return reader.tensor(name)  # `build` rejects it
    rows, features = spec.shape
    format = find_head_format(head_format).name
    whole = ops.quantize_head(torch.empty(spec.shape, dtype=torch.float32, device="meta"), format)
    arena = Arena(sum(aligned(part.nbytes) for part in whole))
    weight, scale = (arena.take(part.shape, part.dtype) for part in whole)
    reader.check_sum(name)
    reader.release(name)
    at = 0
    for begin in range(0, rows, _HEAD_ROWS):
        piece = reader.rows(name, begin, min(begin + _HEAD_ROWS, rows))
        try:
            codes, scales = ops.quantize_head(piece, format)
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
    weight.copy_(made.weight)  # on all threads: the first touch of these pages is what costs
    return made.with_weight(weight, format)
