"""transformers models made trainable: linears replaced, masters loaded from any checkpoint we read.

The one module of the package that builds a transformers model for people rather than as an oracle.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitnet_ops import ops
from bitnet_ops.config import PRIVATE_BLOCK, ModelConfig
from bitnet_ops.config.scheme import Storage
from bitnet_ops.convert.checkpoint import Checkpoint
from bitnet_ops.convert.hf_source import HfSource
from bitnet_ops.errors import BitNetError, install
from bitnet_ops.formats.sglbitnt import Reader, model_file
from bitnet_ops.loading.model_contents import completed_config, model_config, own_tensors
from bitnet_ops.models import check_names, expected_tensors
from bitnet_ops.training.linear import TrainableBitLinear, masters_from_codes

_DROPPED = ("quantization_config", "torch_dtype", "dtype", "auto_map", PRIVATE_BLOCK)


class TrainingError(BitNetError, ValueError):
    """A model that cannot be trained or exported; the message names what and the remedy."""


def replace_linears(model: nn.Module, skip: Sequence[str] | None = None) -> list[str]:
    """Replace every nn.Linear of `model` by a TrainableBitLinear over the same Parameters.

    Args:
        model: changed in place.
        skip: names of modules left alone, as `named_modules` spells them, with all below them;
            None is the output head ("lm_head", or what a transformers model calls its head).
    Returns the names of the replaced modules.
    Raises TrainingError: nothing to replace, a name in `skip` that is no module, or a module that
        transformers loaded packed, which has no masters.
    """
    names = _heads(model) if skip is None else list(skip)
    modules = dict(model.named_modules())
    unknown = [] if skip is None else [name for name in names if name not in modules]
    if unknown:
        raise TrainingError(
            f"replace_linears: expected modules of the model in skip, got {unknown}"
        )
    replaced = []
    for name, module in modules.items():
        if any(name == s or name.startswith(f"{s}.") for s in names):
            continue
        _reject_packed(name, module)
        if isinstance(module, nn.Linear) and not isinstance(module, TrainableBitLinear):
            model.set_submodule(name, TrainableBitLinear.from_linear(module))
            replaced.append(name)
    if not any(isinstance(module, TrainableBitLinear) for module in model.modules()):
        raise TrainingError(
            f"replace_linears: expected nn.Linear modules outside {names}, got none in a "
            f"{type(model).__name__}; only nn.Linear becomes ternary"
        )
    return replaced


def _heads(model: nn.Module) -> list[str]:
    """The name of the output head of a transformers model; "lm_head" elsewhere."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    return [name for name, module in model.named_modules() if module is head] or ["lm_head"]


def _reject_packed(name: str, module: nn.Module) -> None:
    weight = getattr(module, "weight", None)
    packed = isinstance(weight, Tensor) and not weight.is_floating_point()
    if packed or isinstance(getattr(module, "weight_scale", None), Tensor):
        raise TrainingError(
            f"replace_linears: expected master weights in {name}, got a packed "
            f"{type(module).__name__}; training.load_for_training reads packed checkpoints"
        )


def load_for_training(
    path: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
) -> Any:
    """A transformers causal model whose projections are TrainableBitLinear; needs transformers.

    Args:
        path: a Hugging Face checkpoint folder that `convert` reads (masters or packed; masters
            without quantization_config too), or a converted model: a folder with model.bin, or the
            file. None is the demo model of the package. Packed weights become masters by
            `masters_from_codes`, and the model computes what was packed.
        dtype: of all parameters. float32 keeps scales exact; bfloat16 halves the memory and moves
            the scales of packed weights by up to 2^-9 of their value.
        attn_implementation: as transformers has it.
    Returns the model, in training mode; `model.config` has no quantization_config.
    Raises TrainingError without transformers, and as the converter or the Reader does.
    """
    if path is None:
        from bitnet_ops.language_model import DEMO_DIR

        path = DEMO_DIR
    folder = Path(path)
    if (folder / "config.json").is_file():
        config, tensors = _from_checkpoint(folder)
    else:
        config, tensors = _from_file(model_file(folder))
    model = _empty_model(config, dtype, attn_implementation)
    replace_linears(model)
    # A tied head is listed by state_dict, but shares the embedding's Parameter.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, tensor in tensors:
            parameters.pop(name).copy_(tensor)
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    if parameters.keys() - tied:
        raise TrainingError(
            f"load_for_training: expected a tensor for every parameter, got none for "
            f"{sorted(parameters.keys() - tied)[:4]}"
        )
    return model.train()


def _empty_model(config: dict[str, Any], dtype: torch.dtype, attention: str) -> Any:
    try:
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise TrainingError(
            f"load_for_training: expected transformers to be installed, got {error}; "
            f"run: {install('train')}, or use replace_linears on a model of your own"
        ) from error
    known = {key: value for key, value in config.items() if key not in _DROPPED}
    hf_config = CONFIG_MAPPING[config["model_type"]].from_dict(known)
    return AutoModelForCausalLM.from_config(
        hf_config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
    )


def _check_architecture(config: ModelConfig, *, renamed: bool) -> None:
    if renamed or not config.as_transformers:
        raise TrainingError(
            "load_for_training: expected a model that a transformers class computes, got one with "
            f"other norms than {config.model_type} has there; use replace_linears on its own code"
        )


def _from_checkpoint(folder: Path) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """config.json and the tensors of a Hugging Face folder, projections as masters."""
    checkpoint = Checkpoint(folder)
    unmarked = checkpoint.config.get("quantization_config") is None
    source = HfSource(checkpoint, assume_online=unmarked)
    plan = source.plan
    _check_architecture(plan.config, renamed=plan.renamed)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, spec in plan.specs.items():
            tensor = source.tensor(name)
            if spec.kind == "ternary" and plan.scheme.storage is Storage.PACKED:
                codes, scale = source.codes(name)
                tensor = masters_from_codes(codes, scale)
            yield name, tensor

    return checkpoint.config, tensors()


def _from_file(file: Path) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """The config and the tensors of a .bin file, projections as masters."""
    reader = Reader(file)
    model = model_config(reader)
    check_names(model, own_tensors(reader, model))
    _check_architecture(model, renamed=False)
    specs = expected_tensors(model)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, spec in specs.items():
            tensor, info = reader.tensor(name), reader.tensors[name]
            if info.packed and info.scale is None:
                raise TrainingError(
                    f"load_for_training: expected one scale in {name}, got one per "
                    f"{info.scale_kind}; a TrainableBitLinear has one for its matrix"
                )
            if info.scale is not None:
                codes = ops.unpack(tensor, spec.shape[1])
                tensor = masters_from_codes(codes, info.scale)
            yield name, tensor

    return completed_config(reader.config, reader.tensors), tensors()
