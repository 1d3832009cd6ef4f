"""The folder in which SGLang finds a converted model: config.json, model.bin, tokenizer.

SGLang wants a Hugging Face folder. Its config.json is that of the model file with two entries more:
the class of `models/whole.py`, and where the model file lies. That of a hybrid has a model_type of
our own besides, by which SGLang finds out about its states (`hybrid.py`). Everything else is a
link. It must not import sglang.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitnet_ops.config import ModelConfig
from bitnet_ops.config.draft import draft_config
from bitnet_ops.errors import BitNetError
from bitnet_ops.formats import sglbitnt
from bitnet_ops.integrations.sglang import HYBRID
from bitnet_ops.loading.model_contents import completed_config, model_config
from bitnet_ops.nn.storage import DEFAULT_HEAD_FORMAT
from bitnet_ops.vision.weights import vision_config

ARCHITECTURE = "BitnetOpsForCausalLM"
_FILE, _HEAD = "bitnet_ops_model", "bitnet_ops_head"
# model_type in a hybrid's config.json, beside which stands that of the model file
MODEL_TYPE, _SOURCE_TYPE = "bitnet_ops_hybrid", "bitnet_ops_model_type"
# What must not reach SGLang: it would choose a quantisation method by the first.
_DROPPED = ("quantization_config", "auto_map", "torch_dtype", "dtype")
_LINKED = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "*.jinja")


class ServingError(BitNetError, ValueError):
    """A model that cannot be served in SGLang, or a folder that is not ours."""


def write_folder(file: Path, folder: Path, head: str = DEFAULT_HEAD_FORMAT) -> Path:
    """Make `folder`, which exists and is empty, what SGLang takes as the model of `file`.

    Raises ServingError without a tokenizer, or for a model that gives no logits; what reading the
    file raises.
    """
    reader = sglbitnt.Reader(file, check_codes=False)
    about = model_config(reader)
    if about.embedding_only:
        raise ServingError(f"sglang: expected a model with an output head, got {file}, without one")
    if not (file.parent / "tokenizer.json").is_file():
        raise ServingError(
            f"sglang: expected tokenizer.json beside {file}, got none; copy it from the original "
            "checkpoint"
        )
    config = completed_config(reader.config, reader.tensors)
    config = {key: value for key, value in config.items() if key not in _DROPPED}
    config |= {"architectures": [ARCHITECTURE], _FILE: str(file.resolve()), _HEAD: head}
    config |= {"max_position_embeddings": about.max_position_embeddings}
    config |= _of_hybrid(config, about)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    os.symlink(file.resolve(), folder / "model.bin")
    for pattern in _LINKED:
        for found in sorted(file.parent.glob(pattern)):
            os.symlink(found.resolve(), folder / found.name)
    return folder


def _of_hybrid(config: Mapping[str, Any], about: ModelConfig) -> dict[str, Any]:
    """What config.json says of a hybrid; nothing of another model.

    Sizes of attention are said whether the model's own config.json says them or not, for SGLang
    knows no defaults of a model_type that is not its own.
    """
    if about.delta_net is None:
        return {}
    layers = sorted({*range(about.num_hidden_layers)} - {*about.delta_net.layers})
    return {
        "architectures": [HYBRID],
        "model_type": MODEL_TYPE,
        _SOURCE_TYPE: config["model_type"],
        "full_attention_layer_ids": layers,
        "head_dim": about.head_dim,
        "num_key_value_heads": about.num_key_value_heads,
    }


def left_alone(file: Path) -> list[str]:
    """What the model file has that SGLang does not serve, in words."""
    config = sglbitnt.Reader(file, check_codes=False).config
    has = {"tower for pictures": vision_config(config), "draft head": draft_config(config)}
    return [words for words, found in has.items() if found is not None]


def model_of(config: Mapping[str, Any]) -> ModelConfig:
    """The model of a folder's config.json, or of what a package has made of it."""
    source = config.get(_SOURCE_TYPE, config.get("model_type"))
    plain = {**config, "model_type": source, "architectures": None}
    return ModelConfig.from_hf(plain, ignore_unknown=True)


def model_file(config: Any) -> Path:
    """The model file that the config of such a folder names. Raises ServingError for another."""
    name = getattr(config, _FILE, None)
    if not isinstance(name, str):
        raise ServingError(
            f"sglang: expected {_FILE} in config.json, got {name!r}; such folders are made by "
            "bitnet-ops sglang"
        )
    return Path(name)


def head_format(config: Any) -> str:
    """The head's format that the launcher was asked for."""
    return str(getattr(config, _HEAD, DEFAULT_HEAD_FORMAT))
