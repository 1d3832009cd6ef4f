"""The folder in which SGLang finds a converted model: config.json, model.bin, tokenizer.

SGLang wants a Hugging Face folder. Its config.json is that of the model file with two entries more:
the class of `models/whole.py`, and where the model file lies. That of a hybrid has a model_type of
our own besides, by which SGLang finds out about its states (`hybrid.py`). Everything else is a
link. It must not import sglang.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitnet_ops.config import ModelConfig
from bitnet_ops.config.draft import draft_config
from bitnet_ops.formats import sglbitnt
from bitnet_ops.integrations import model_folder
from bitnet_ops.integrations.sglang import HYBRID
from bitnet_ops.nn.storage import DEFAULT_HEAD_FORMAT
from bitnet_ops.vision.weights import vision_config

ARCHITECTURE = "BitnetOpsForCausalLM"
_HEAD = "bitnet_ops_head"
# model_type in a hybrid's config.json, beside which stands that of the model file
MODEL_TYPE, _SOURCE_TYPE = "bitnet_ops_hybrid", "bitnet_ops_model_type"


def write_folder(file: Path, folder: Path, head: str = DEFAULT_HEAD_FORMAT) -> Path:
    """Make `folder` what SGLang takes as the model of `file`: as `model_folder.write_folder`.

    head: the format of its output head.
    """

    def adapted(config: dict[str, Any], about: ModelConfig) -> dict[str, Any]:
        return config | {"architectures": [ARCHITECTURE], _HEAD: head} | _of_hybrid(config, about)

    return model_folder.write_folder("sglang", file, folder, adapted)


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
    """As `model_folder.model_file`."""
    return model_folder.model_file("sglang", config)


def head_format(config: Any) -> str:
    """The head's format that the launcher was asked for."""
    return str(getattr(config, _HEAD, DEFAULT_HEAD_FORMAT))
