"""The Hugging Face folder in which SGLang or vLLM finds a converted model.

Its config.json is that of the model file with where the file lies, and with what the engine has to
know besides; everything else is a link. It must not import an engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from bitnet_ops.config import ModelConfig
from bitnet_ops.errors import BitNetError
from bitnet_ops.formats import sglbitnt
from bitnet_ops.loading.model_contents import completed_config, model_config

# The entries of a config.json, and what they say -> those that the engine is given.
Adapt: TypeAlias = Callable[[dict[str, Any], ModelConfig], dict[str, Any]]

_FILE = "bitnet_ops_model"
# what must not reach an engine: it would choose a quantisation method, or a dtype, by them
_DROPPED = ("quantization_config", "auto_map", "torch_dtype", "dtype")
_LINKED = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "*.jinja")


class ServingError(BitNetError, ValueError):
    """A model that cannot be served in an engine, or a folder that is not ours."""


def write_folder(engine: str, file: Path, folder: Path, adapt: Adapt) -> Path:
    """Make `folder`, which exists and is empty, what `engine` takes as the model of `file`.

    Raises ServingError without a tokenizer, or for a model that gives no logits; what reading the
    file raises.
    """
    reader = sglbitnt.Reader(file, check_codes=False)
    about = model_config(reader)
    if about.embedding_only:
        raise ServingError(
            f"{engine}: expected a model with an output head, got {file}, without one"
        )
    if not (file.parent / "tokenizer.json").is_file():
        raise ServingError(
            f"{engine}: expected tokenizer.json beside {file}, got none; copy it from the original "
            "checkpoint"
        )
    config = completed_config(reader.config, reader.tensors)
    config = {key: value for key, value in config.items() if key not in _DROPPED}
    config |= {_FILE: str(file.resolve()), "max_position_embeddings": about.max_position_embeddings}
    (folder / "config.json").write_text(json.dumps(adapt(config, about), indent=1))
    os.symlink(file.resolve(), folder / "model.bin")
    for pattern in _LINKED:
        for found in sorted(file.parent.glob(pattern)):
            os.symlink(found.resolve(), folder / found.name)
    return folder


def model_file(engine: str, config: Any) -> Path:
    """The model file that the config of such a folder names. Raises ServingError for another."""
    name = getattr(config, _FILE, None)
    if not isinstance(name, str):
        raise ServingError(
            f"{engine}: expected {_FILE} in config.json, got {name!r}; such folders are made by "
            f"bitnet-ops {engine}"
        )
    return Path(name)
