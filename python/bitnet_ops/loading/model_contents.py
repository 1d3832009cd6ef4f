"""What a model file holds, whoever wrote it: its config made complete, its tensors without copies.

Other writers of SGLBITNT keep tensors that only repeat something (`*.weight_scale`, the head of a
tied model) and copy a config.json without model_type. Copies are compared with what they repeat,
and a model_type is taken from the file only where no other would do. It must not know kernels, nor
how a file is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.config.draft import PREFIX as DRAFTS
from bitnet_ops.config.draft import draft_config
from bitnet_ops.config.families import BY_MODEL_TYPE, QK_NORMS, SUB_NORMS, model_type_of_class
from bitnet_ops.config.scalings import KEYS as SCALING_KEYS
from bitnet_ops.config.scheme import stated_linear_class
from bitnet_ops.formats.sglbitnt import Reader, TensorInfo
from bitnet_ops.models import TensorError, expected_tensors
from bitnet_ops.vision.tower import VisionError
from bitnet_ops.vision.weights import PREFIX, check_tensors, tower_tensors, vision_config

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SCALE_SUFFIX = "_scale"  # of the name of the weight
_ROUNDING = 2.0**-8  # relative: copies may have gone through bfloat16
_PIECE_ELEMS = 1 << 22

# Parts of a layer that families differ in, and two that none of them has.
_TELLING = {*SUB_NORMS, *QK_NORMS, "bias", "rms_norm", "norm"}
# What model_type would decide where config.json is silent, in every spelling.
_DECIDED = ("hidden_act", "rms_norm_eps", "rope_theta")


def model_config(reader: Reader) -> ModelConfig:
    """The architecture of the file; raises config.UnsupportedModelError."""
    return ModelConfig.from_hf(completed_config(reader.config, reader.tensors))


def completed_config(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """`config` with the model_type that it lacks, if `architectures` or the `names` of its tensors
    leave no choice; else as it is.

    From names alone it is taken only where activation, epsilon and rope_theta are stated, so that
    nothing is computed by the defaults of a guess.
    """
    complete = dict(config)
    if complete.get("model_type") is None:
        found = _from_class(complete) or _from_names(complete, names)
        if found is not None:
            complete["model_type"] = found
    return complete


def _from_class(config: Mapping[str, Any]) -> str | None:
    classes = config.get("architectures")
    if isinstance(classes, list) and len(classes) == 1:
        return model_type_of_class(classes[0])
    return None


def _from_names(config: Mapping[str, Any], names: Iterable[str]) -> str | None:
    if config.get("architectures") is not None:
        return None  # a class that is none of these
    spellings = [config, config.get("rope_parameters"), config.get("rope_scaling")]
    stated = {key for part in spellings if isinstance(part, Mapping) for key in part}
    if not stated.issuperset(_DECIDED):
        return None
    parts = {part for name in names if ".layers." in name for part in name.split(".")[-2:]}
    found = (config["hidden_act"], parts & _TELLING)
    same = [k for k, row in BY_MODEL_TYPE.items() if (row.hidden_act, row.telling_parts) == found]
    # MiniCPM's layers are Llama's but for factors that its config states
    keys = {name: stated & SCALING_KEYS[BY_MODEL_TYPE[name].scalings] for name in same}
    return max(same, key=lambda name: len(keys[name]), default=None)


def own_tensors(reader: Reader, config: ModelConfig) -> dict[str, TensorInfo]:
    """The text model's tensors without those that repeat others or belong to a draft head.

    Raises TensorError where such a copy is not equal to what it repeats, and for a tower for images
    that is not whole, of which no data are read.
    """
    tensors = _without_head(reader, _without_tower(reader))
    expected = expected_tensors(config)
    extra = [name for name in tensors if name not in expected]
    copies = {name for name in extra if _check_copy(reader, config, name)}
    return {name: info for name, info in tensors.items() if name not in copies}


def _without_tower(reader: Reader) -> dict[str, TensorInfo]:
    """The file's tensors but for those of a tower for images, if its config has one."""
    vision = vision_config(reader.config)
    if vision is None:
        return reader.tensors
    try:
        check_tensors(vision, tower_tensors(reader))
    except VisionError as error:
        raise TensorError(f"model: {error}; convert the model again") from None
    return {n: info for n, info in reader.tensors.items() if not n.startswith(PREFIX)}


def _without_head(reader: Reader, tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """`tensors` but for those of a draft head, if the file's config has one.

    They are checked where the head is read (loading/draft.py).
    """
    if draft_config(reader.config) is None:
        return tensors
    return {name: info for name, info in tensors.items() if not name.startswith(DRAFTS)}


def _check_copy(reader: Reader, config: ModelConfig, name: str) -> bool:
    """Whether the tensor `name` repeats something; TensorError where it should and does not."""
    if name == HEAD and config.tie_word_embeddings and not config.embedding_only:
        _check_head(reader)
        return True
    weight = name.removesuffix(_SCALE_SUFFIX)
    if weight == name or weight not in reader.tensors or not reader.tensors[weight].packed:
        return False
    _check_scale(reader, name, weight)
    return True


def _check_head(reader: Reader) -> None:
    head, embedding = reader.tensors[HEAD], reader.tensors.get(EMBEDDING)
    if embedding is None:
        return  # which is said elsewhere
    same = head.shape == embedding.shape and not head.packed and not embedding.packed
    step = max(1, _PIECE_ELEMS // max(1, head.shape[-1]))
    for begin in range(0, head.shape[0] if same else 0, step):
        end = min(begin + step, head.shape[0])
        pieces = [reader.rows(name, begin, end).float() for name in (HEAD, EMBEDDING)]
        same = same and torch.equal(*pieces)
    reader.release(HEAD)
    if not same:
        raise TensorError(
            f"model: expected {HEAD} to repeat {EMBEDDING}, since tie_word_embeddings is true, got "
            "other values; if the head is its own matrix, convert the model again with "
            "tie_word_embeddings false"
        )


def _check_scale(reader: Reader, name: str, weight: str) -> None:
    """The copy multiplies, or is the reciprocal that a bitlinear checkpoint stores."""
    info = reader.tensors[name]
    scales = reader.scales(weight).reshape(-1)
    copy = scales.new_empty(0) if info.packed else reader.tensor(name).float().reshape(-1)
    if len(copy) == len(scales):
        if _equal(copy, scales) or (_divides(reader.config) and _equal(1 / copy, scales)):
            return
        at = int(((copy - scales).abs() / scales.abs()).nan_to_num(torch.inf).argmax())
        got = f"{float(copy[at]):.6g}"
        got += ", its reciprocal" if _equal(1 / copy, scales) else ""
        expected = f"{float(scales[at]):.6g}"
    else:
        got, expected = f"{len(copy)} values", f"{len(scales)} of them"
    raise TensorError(
        f"model: expected {name} to repeat the scale of {weight}, {expected}, got {got}; one of "
        "them is wrong: convert the model again from its checkpoint"
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a - b).abs() <= _ROUNDING * b.abs()).all())


def _divides(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint's weight_scale was a divisor: that of transformers' BitLinear."""
    block = config.get("quantization_config")
    return isinstance(block, Mapping) and stated_linear_class(config) == "bitlinear"
