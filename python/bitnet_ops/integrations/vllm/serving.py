"""The folder in which vLLM finds a converted model: config.json, model.bin, tokenizer.

vLLM wants a Hugging Face folder. Its config.json is that of the model file with two entries more:
the class of `vllm/converted.py`, and where the model file lies. Everything else is a link. It must
not import vllm.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitnet_ops.config import ModelConfig
from bitnet_ops.config.draft import draft_config
from bitnet_ops.formats import sglbitnt
from bitnet_ops.integrations import model_folder
from bitnet_ops.integrations.model_folder import ServingError
from bitnet_ops.integrations.vllm import CONVERTED_CLASS, HYBRID_CLASS
from bitnet_ops.loading.model_contents import model_config
from bitnet_ops.vision.weights import vision_config

# of rope_parameters: they place images, which this class reads none of
_IMAGE_ROPE = ("mrope_section", "mrope_interleaved")


def write_folder(file: Path, folder: Path) -> Path:
    """Make `folder` what vLLM takes as the model of `file`: as `model_folder.write_folder`."""
    return model_folder.write_folder("vllm", file, folder, _adapted)


def _adapted(config: dict[str, Any], about: ModelConfig) -> dict[str, Any]:
    served = CONVERTED_CLASS if about.delta_net is None else HYBRID_CLASS
    return {key: _of_texts(value) for key, value in config.items()} | {"architectures": [served]}


def _of_texts(value: Any) -> Any:
    """An entry of config.json; of one that has the rotary embedding what texts need."""
    if not isinstance(value, dict):
        return value
    return {key: inner for key, inner in value.items() if key not in _IMAGE_ROPE}


def model_file(config: Any) -> Path:
    """As `model_folder.model_file`."""
    return model_folder.model_file("vllm", config)


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
