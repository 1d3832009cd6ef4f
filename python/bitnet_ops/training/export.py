"""A trained model written out: packed Hugging Face folder, master checkpoint, or our model.bin.

Whatever is written appears whole or not at all. The .bin goes through the converter, so that there
is one reading of masters in the package.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bitnet_ops.convert import convert
from bitnet_ops.convert.checkpoint import copy_files
from bitnet_ops.convert.write import building, check_destination
from bitnet_ops.formats.atomic import beside
from bitnet_ops.formats.destination import TOKENIZER_FILES
from bitnet_ops.nn.packing import pack_hf
from bitnet_ops.training.linear import TrainableBitLinear
from bitnet_ops.training.model import TrainingError, architecture_of

FORMS = ("packed", "masters", "bin")
STAGING = "trained-model"  # the name that a report gives to the source


class SavedTokenizer(Protocol):
    """What a tokenizer of transformers can do."""

    def save_pretrained(self, save_directory: str, /) -> object: ...


def export(
    model: nn.Module,
    destination: str | os.PathLike[str],
    *,
    form: Literal["packed", "masters", "bin"] = "packed",
    tokenizer: str | os.PathLike[str] | SavedTokenizer | None = None,
    dtype: torch.dtype | None = None,
    verify: bool = False,
    force: bool = False,
) -> Path:
    """Write a transformers model with TrainableBitLinear modules into the new folder `destination`.

    Args:
        model: its `config` and its parameters are written; it stays as it is.
        form: "packed", a Hugging Face folder in the form of microsoft/bitnet-b1.58-2B-4T
            (autobitlinear offline: uint8 in contiguous quarters, float32 weight_scale);
            "masters", one to train on (autobitlinear online); "bin", what `convert` makes.
        tokenizer: a folder whose tokenizer files are copied, or an object with save_pretrained.
        dtype: of everything that is not packed; None keeps what the model has. Masters cast to
            bfloat16 may ternarise differently where they lie near a threshold.
        verify: with "bin", have the converter compare logits with the masters.
        force: with "bin", replace an earlier result.
    Returns `destination`.
    Raises TrainingError: no ternary modules, one that is floating in its architecture, a bias
        that its architecture does not have, outputs not a multiple of 4 (packed form);
        ConvertError: `destination` exists, or the converter does not know the model.
    """
    if form not in FORMS:
        raise TrainingError(f"export: expected form one of {', '.join(FORMS)}, got {form!r}")
    target, ternary = Path(destination), _ternary_modules(model)
    # There is no source folder to protect: one inside the target protects nothing.
    check_destination(target / STAGING, target, force=force and form == "bin")
    if form != "bin":
        with building(target, force=False) as folder:
            _write_checkpoint(model, ternary, folder, form, dtype)
            _write_tokenizer(tokenizer, folder)
        return target
    with beside(target) as place:
        staging = place / STAGING
        staging.mkdir()
        _write_checkpoint(model, ternary, staging, "masters", dtype)
        _write_tokenizer(tokenizer, staging)
        convert(staging, target, verify=verify, force=force)
    return target


def _ternary_modules(model: nn.Module) -> dict[str, TrainableBitLinear]:
    found = {n: m for n, m in model.named_modules() if isinstance(m, TrainableBitLinear)}
    if not found:
        raise TrainingError(
            "export: expected a model with TrainableBitLinear modules, got none; "
            "call training.replace_linears before training"
        )
    parts = architecture_of(model)
    biased = [n for n, m in found.items() if m.bias is not None and parts.get(f"{n}.bias") is None]
    if biased:
        raise TrainingError(
            f"export: expected projections without bias, got one in {biased[0]}; "
            "BitNet projections have none, and offline formats would scale it"
        )
    for name in found:
        spec = parts.get(f"{name}.weight")
        if spec is not None and spec.kind != "ternary":
            raise TrainingError(
                f"export: expected floating weights in {name}, as every reader of this "
                "architecture has there, got a TrainableBitLinear; train without it: "
                "replace_linears leaves it alone unless skip says otherwise"
            )
    return found


def _write_checkpoint(
    model: Any,
    ternary: dict[str, TrainableBitLinear],
    folder: Path,
    form: str,
    dtype: torch.dtype | None,
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and getattr(model.config, "tie_word_embeddings", False):
            continue  # it is the embedding
        tensor = tensor.detach()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        tensors[name] = tensor.cpu().contiguous()
    if form == "packed":
        for name, module in ternary.items():
            tensors[f"{name}.weight"], scale = _packed(name, module)
            tensors[f"{name}.weight_scale"] = scale
            if module.bias is not None:  # AutoBitLinear multiplies it by the scale too
                bias = module.bias.detach().cpu().float() / scale
                tensors[f"{name}.bias"] = bias.to(dtype or module.bias.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(_config(model, ternary, form, dtype), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _packed(name: str, module: TrainableBitLinear) -> tuple[Tensor, Tensor]:
    """uint8 [N / 4, K] in contiguous quarters, and the scale that multiplies, float32 [1]."""
    if module.out_features % 4:
        raise TrainingError(
            f"export: expected outputs in fours in {name}, got {module.out_features}: four rows "
            'share a byte; form="masters" has no such limit'
        )
    codes, scale = module.ternary()
    return pack_hf(codes), scale


def _config(
    model: Any, ternary: dict[str, TrainableBitLinear], form: str, dtype: torch.dtype | None
) -> dict[str, Any]:
    """The model's config.json, with the quantization_config of the form."""
    plain = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in ternary
    ]
    config = {key: value for key, value in model.config.to_dict().items() if value is not None}
    config["dtype"] = str(dtype or next(model.parameters()).dtype).removeprefix("torch.")
    config["architectures"] = [type(model).__name__]
    config["quantization_config"] = {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "offline" if form == "packed" else "online",
        # null means the head alone, and is what published checkpoints say
        "modules_to_not_convert": None if plain in ([], ["lm_head"]) else plain,
    }
    return config


def _write_tokenizer(
    tokenizer: str | os.PathLike[str] | SavedTokenizer | None, folder: Path
) -> None:
    if tokenizer is None:
        return
    if not isinstance(tokenizer, (str, os.PathLike)):
        tokenizer.save_pretrained(str(folder))
        return
    found = [name for name in TOKENIZER_FILES if (Path(tokenizer) / name).is_file()]
    if "tokenizer.json" not in found:
        raise TrainingError(
            f"export: expected tokenizer.json in {tokenizer}, got {found or 'no tokenizer files'}; "
            "leave tokenizer out for a model without one"
        )
    copy_files(Path(tokenizer), folder, found)
