"""Draft heads as files have them: checkpoints, MLX packages, GGUF, model files.

Sources: llama.cpp `conversion.qwen` (`mtp.*` becomes a block behind the decoder's, with the norm
of the head as nextn.shared_head_norm; norms are written as 1 + w); mlx-lm, whose converter drops
`mtp.*`; vllm-mlx `add_mtp_weights_qwen35`, which puts them beside a package, norms as 1 + w,
matrices as they are or in groups as MLX's `quantize` has them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.config.draft import FC, MATRICES, PREFIX, DraftConfig, draft_config
from bitnet_ops.config.draft_shapes import draft_shapes
from bitnet_ops.config.hybrid import ROTATION
from bitnet_ops.convert import hybrid
from bitnet_ops.convert.draft import GATE, DraftHead, HeadError, Turned, check_names, check_shapes
from bitnet_ops.convert.draft import is_matrix as _is_matrix
from bitnet_ops.convert.draft import matrices as _matrices
from bitnet_ops.convert.errors import ConvertError, listed
from bitnet_ops.errors import install
from bitnet_ops.formats.gguf import Reader as GgufReader
from bitnet_ops.formats.gguf import TensorInfo, is_strings
from bitnet_ops.formats.sglbitnt import Reader
from bitnet_ops.nn.packing import PackedWeight

Form = tuple[str, tuple[int, ...]]  # dtype as safetensors spell it, and shape

# Checkpoints --------------------------------------------------------------------------------------

_FLOATING = ("F32", "BF16", "F16")
_BITS = (2, 4, 8)  # of MLX's modules, a whole number of codes a word


def checkpoint_head(
    config: Mapping[str, Any],
    model: ModelConfig,
    forms: Mapping[str, Form],
    read: Callable[[str], Tensor],
    *,
    summed: bool,
    origin: str,
) -> DraftHead:
    """The head of a checkpoint, by names that begin with `mtp.`; HeadError where it has another.

    config: its config.json, flat. forms, read: of every tensor of the head, as stored. summed: its
    norms hold what they multiply by, as those of MLX packages do.
    """
    _check_stated(config)
    check_names(forms)
    quantised = {
        name
        for name, (dtype, _) in forms.items()
        if dtype == "U32" and all(part in forms for part in _parts(name))
    }
    parts = {part for name in quantised for part in _parts(name)}
    shapes = {name: shape for name, (_, shape) in forms.items() if name not in parts}
    expected = draft_shapes(model, shapes[GATE][0]) if len(shapes.get(GATE, ())) == 2 else {}
    for name in quantised & expected.keys():
        _check_groups(name, expected[name], forms)
        shapes[name] = expected[name]
    size = check_shapes(model, shapes)
    for name in shapes.keys() - quantised:
        if (dtype := forms[name][0]) not in _FLOATING:
            raise HeadError("draft-dtype", f"{name} as F32, BF16 or F16", dtype)
    offset, remarks = model.family.norm_offset, []
    if summed and offset:
        norms = [name for name in shapes if not _is_matrix(name)]
        # a norm that multiplies by so little everywhere would be no norm of a trained model
        if all(float(read(name).float().median()) < 0.5 for name in norms):
            remarks.append("norms of the draft head are all near 0: taken as w of 1 + w")
        else:
            offset = 0.0

    def values(name: str) -> Tensor:
        if name in quantised:
            return _dequantised(name, read, shapes[name])
        tensor = read(name)
        return tensor if _is_matrix(name) else tensor.float() + offset

    head = DraftConfig(size, origin=origin)
    return DraftHead(head, shapes, values, remarks=tuple(remarks))


def _check_stated(config: Mapping[str, Any]) -> None:
    """Raise HeadError for a config.json that speaks of another head."""
    layers = config.get("mtp_num_hidden_layers")
    if type(layers) is int and layers > 1:
        raise HeadError("draft-kind", "one layer that drafts tokens", f"{layers} by config.json")
    if config.get("mtp_use_dedicated_embeddings"):
        raise HeadError("draft-kind", "one layer over the model's own embedding",
                        "mtp_use_dedicated_embeddings true in config.json")  # fmt: skip


def _parts(name: str) -> tuple[str, str]:
    module = name.removesuffix(".weight")
    return f"{module}.scales", f"{module}.biases"


def _check_groups(name: str, shape: tuple[int, ...], forms: Mapping[str, Form]) -> None:
    """Raise HeadError for a module that is not codes of 2, 4 or 8 bits in groups."""
    words, scales, biases = (forms[part][1] for part in (name, *_parts(name)))
    rows, columns = shape
    good = len(words) == len(scales) == 2 and words[0] == scales[0] == rows and scales == biases
    good = good and 32 * words[1] % columns == 0 and 32 * words[1] // columns in _BITS
    if not (good and scales[1] and columns % scales[1] == 0):
        found = f"{list(words)} with scales {list(scales)}, biases {list(biases)}"
        expected = f"{name} {list(shape)} in 2, 4 or 8 bits of groups"
        raise HeadError("draft-shape", expected, found)


def _dequantised(name: str, read: Callable[[str], Tensor], shape: tuple[int, ...]) -> Tensor:
    """float32 [N, K]: code * scale + bias of every group; codes fill words from the lowest bits."""
    words, scales, biases = (read(part) for part in (name, *_parts(name)))
    bits = 32 * words.shape[1] // shape[1]
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words.view(torch.int32).unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)
    groups = codes.unflatten(1, (scales.shape[1], -1)).float()
    return (groups * scales.float().unsqueeze(-1) + biases.float().unsqueeze(-1)).flatten(1)


# GGUF ---------------------------------------------------------------------------------------------

_NEXTN = {
    "nextn.eh_proj": FC,
    "nextn.enorm": f"{PREFIX}pre_fc_norm_embedding",
    "nextn.hnorm": f"{PREFIX}pre_fc_norm_hidden",
    "nextn.shared_head_norm": f"{PREFIX}norm",
}
_OUTPUT_NORM = "output_norm.weight"  # of the trunk; where a head has no norm of its own
_EMBEDDING = "token_embd.weight"
# read without another package
_PLAIN_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q2_0", "Q2_0_128", "PQ2_0", "PTQ1_0")
_BLOCK = np.dtype([("scale", "<f2"), ("codes", "i1", 32)])  # of Q8_0


def gguf_head(
    reader: GgufReader,
    model: ModelConfig,
    names: Mapping[str, str],
    blocks: range,
    dense: Callable[[TensorInfo], Tensor],
    origin: str,
) -> DraftHead:
    """The head in a file's blocks behind the decoder's; HeadError where it has another.

    names: of a layer's modules, GGUF -> Hugging Face. blocks: their numbers. dense: the values of a
    tensor of any type.
    """
    if len(blocks) != 1:
        raise HeadError("draft-kind", "one layer that drafts tokens", str(len(blocks)))
    prefix = f"blk.{blocks[0]}."
    infos: dict[str, TensorInfo] = {}
    for name, info in reader.tensors.items():
        if name.startswith(prefix):
            inner = name.removeprefix(prefix)
            stem, _, kind = inner.rpartition(".")
            here = _NEXTN.get(stem) or (f"mtp.layers.0.{names[stem]}" if stem in names else inner)
            infos[f"{here}.{kind}" if here != inner else f"{PREFIX}{inner}"] = info
    norm = f"{PREFIX}norm.weight"
    if norm not in infos and _OUTPUT_NORM in reader.tensors:  # as llama.cpp does
        infos[norm] = reader.tensors[_OUTPUT_NORM]
    size = check_shapes(model, {name: info.shape for name, info in infos.items()})
    shapes = {name: infos[name].shape for name in draft_shapes(model, size)}
    kinds = sorted({infos[name].type.name for name in shapes} - {*_PLAIN_TYPES})
    if kinds and importlib.util.find_spec("gguf") is None:
        found = f"{listed(kinds)}, which the gguf package reads ({install('gguf')})"
        raise HeadError("draft-type", "F32, F16, BF16, Q8_0 or a ternary type", found)
    rotated, turned = _gguf_rotation(reader, model, infos)

    def values(name: str) -> Tensor:
        info = infos[name]
        return _q8_0(reader, info) if info.type.name == "Q8_0" else dense(info)

    config = DraftConfig(size, rotated=rotated, origin=origin)
    return DraftHead(config, shapes, values, turned=turned)


def _gguf_rotation(
    reader: GgufReader, model: ModelConfig, infos: Mapping[str, TensorInfo]
) -> tuple[tuple[str, ...], Turned | None]:
    """The head's modules whose input is rotated: those that the file lists, whatever its trunk."""
    named = reader.metadata.get(f"{hybrid.HADAMARD}weight_names")
    stored = {info.name: name.removesuffix(".weight") for name, info in infos.items()}
    rotated = [stored[n] for n in named if n in stored] if is_strings(named) else []
    if not rotated:
        return (), None
    matrices = {n: (m, infos[f"{m}.weight"].shape[1]) for n, m in stored.items() if m in MATRICES}
    if _EMBEDDING in reader.tensors:
        matrices[_EMBEDDING] = ("model.embed_tokens", reader.tensors[_EMBEDDING].shape[1])
    tied = "output.weight" not in reader.tensors
    try:
        found = hybrid.gguf_rotation(
            reader.metadata, matrices, model.delta_net, tied, lambda name: name not in stored
        )
    except ConvertError as error:
        text = str(error).removeprefix("convert: expected ")
        expected, _, got = text.partition(", got ")
        raise HeadError("draft-rotation", expected, got) from None
    assert found is not None
    signs = {width: torch.from_numpy(values) for width, values in found.signs.items()}
    ordered = tuple(module for module in MATRICES if module in rotated)
    return ordered, Turned(dict(found.rotation.blocks), signs)


def _q8_0(reader: GgufReader, info: TensorInfo) -> Tensor:
    """float32; without the gguf package, which conversions of bundles must not need."""
    blocks: Any = reader.data(info.name).view(_BLOCK)
    values = blocks["codes"].astype(np.float32)
    values *= blocks["scale"].astype(np.float32)[:, None]
    reader.release(info.name)
    return torch.from_numpy(values).view(info.shape)


# Model files --------------------------------------------------------------------------------------


def bin_head(reader: Reader, model: ModelConfig) -> DraftHead | None:
    """The head in a model file, as it lies there; None without one. HeadError for a broken one."""
    config = draft_config(reader.config)
    if config is None:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    for name, info in reader.tensors.items():
        if not name.startswith(PREFIX):
            continue
        columns = info.in_features or 0
        whole = info.packed and columns % config.digits == 0
        shapes[name] = (info.shape[0], columns // config.digits) if whole else info.shape
        if info.packed != _is_matrix(name):
            kind = "a ternary matrix" if info.packed else "floating values"
            raise HeadError("draft-tensors", f"digits of the head's matrices alone as {name}", kind)
    size = check_shapes(model, shapes)
    if size != config.intermediate_size:
        expected = f"an MLP of {config.intermediate_size} features, as its config says"
        raise HeadError("draft-shape", expected, str(size))
    ordered = {name: shapes[name] for name in draft_shapes(model, size)}
    blocks = {width: model.rotation.block(width) if model.rotation else 0
              for _, _, width in _matrices(shapes)}  # fmt: skip
    signs = {width: f"{ROTATION}{width}.weight" for width in blocks}
    held = {width: reader.tensor(name) for width, name in signs.items() if name in reader.tensors}
    turned = Turned(blocks, held)

    def values(name: str) -> Tensor:
        reader.check_data(name)
        return reader.tensor(name)

    def packed(name: str) -> PackedWeight:
        reader.check_data(name)
        info = reader.tensors[name]
        rows, scales, columns = reader.tensor(name), reader.scales(name), info.in_features or 0
        return PackedWeight(rows, scales, info.shape[0], columns, group_size=info.group_size)

    return DraftHead(config, ordered, values, packed, turned)
