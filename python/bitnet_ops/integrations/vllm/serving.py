"""The folder in which vLLM finds a converted model: config.json, model.bin, tokenizer.

vLLM wants a Hugging Face folder. Its config.json is that of the model file with two entries more:
the class of `vllm/converted.py`, and where the model file lies. Everything else is a link. It must
not import vllm.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitnet_ops.config.draft import draft_config
from bitnet_ops.errors import BitNetError
from bitnet_ops.formats import sglbitnt
from bitnet_ops.integrations.vllm import CONVERTED_CLASS, HYBRID_CLASS
from bitnet_ops.loading.model_contents import completed_config, model_config
from bitnet_ops.vision.weights import vision_config

_FILE = "bitnet_ops_model"
# what must not reach vLLM: it would choose a quantisation method, or a dtype, by them
_DROPPED = ("quantization_config", "auto_map", "torch_dtype", "dtype")
# of rope_parameters: they place images, which this class reads none of
_IMAGE_ROPE = ("mrope_section", "mrope_interleaved")
_LINKED = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "*.jinja")


class ServingError(BitNetError, ValueError):
    """A model that cannot be served in vLLM, or a folder that is not ours."""


def write_folder(file: Path, folder: Path) -> Path:
    """Make `folder`, which exists and is empty, what vLLM takes as the model of `file`.

    Raises ServingError without a tokenizer, or for a model that gives no logits; what reading the
    file raises.
    """
    reader = sglbitnt.Reader(file, check_codes=False)
    about = model_config(reader)
    if about.embedding_only:
        raise ServingError(f"vllm: expected a model with an output head, got {file}, without one")
    if not (file.parent / "tokenizer.json").is_file():
        raise ServingError(
            f"vllm: expected tokenizer.json beside {file}, got none; copy it from the original "
            "checkpoint"
        )
    config = completed_config(reader.config, reader.tensors)
    config = {key: _of_texts(value) for key, value in config.items() if key not in _DROPPED}
    served = CONVERTED_CLASS if about.delta_net is None else HYBRID_CLASS
    config |= {"architectures": [served], _FILE: str(file.resolve())}
    config |= {"max_position_embeddings": about.max_position_embeddings}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    os.symlink(file.resolve(), folder / "model.bin")
    for pattern in _LINKED:
        for found in sorted(file.parent.glob(pattern)):
            os.symlink(found.resolve(), folder / found.name)
    return folder


def _of_texts(value: Any) -> Any:
    """An entry of config.json; of one that has the rotary embedding what texts need."""
    if not isinstance(value, dict):
        return value
    return {key: inner for key, inner in value.items() if key not in _IMAGE_ROPE}


def model_file(config: Any) -> Path:
    """The model file that the config of such a folder names. Raises ServingError for another."""
    name = getattr(config, _FILE, None)
    if not isinstance(name, str):
        raise ServingError(
            f"vllm: expected {_FILE} in config.json, got {name!r}; such folders are made by "
            "bitnet-ops vllm"
        )
    return Path(name)


def is_hybrid(file: Path) -> bool:
    """Whether the model of a file has recurrent layers."""
    return model_config(sglbitnt.Reader(file, check_codes=False)).delta_net is not None


def check_options(options: Sequence[str]) -> None:
    """Raise ServingError for speculative decoding, which no class of ours does in vLLM."""
    asked = [option for option in options if option.startswith(("--speculative", "--spec-"))]
    if asked:
        raise ServingError(
            f"vllm: expected no speculative decoding of a converted model, got {asked[0]}; leave "
            "it out, or use bitnet-ops serve, which drafts by itself and with a model's draft head"
        )


def left_out(file: Path) -> list[str]:
    """What the model of a file could do that is not done in vLLM, a line each."""
    config = sglbitnt.Reader(file, check_codes=False).config
    lines = []
    if vision_config(config) is not None:
        lines.append(
            "vllm: this model reads pictures, and in vLLM texts alone; for pictures use "
            "bitnet-ops serve"
        )
    if draft_config(config) is not None:
        lines.append(
            "vllm: this model has a draft head, which is not used in vLLM; bitnet-ops serve uses it"
        )
    return lines
