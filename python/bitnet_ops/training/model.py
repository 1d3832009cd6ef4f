"""transformers models made trainable: linears replaced, masters loaded from any checkpoint we read.

The one module of the package that builds a transformers model for people rather than as an oracle.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bitnet_ops.config import PRIVATE_BLOCK, ModelConfig, UnsupportedModelError
from bitnet_ops.config.families import family_of
from bitnet_ops.config.hybrid import flat
from bitnet_ops.config.scheme import Storage
from bitnet_ops.convert.checkpoint import Checkpoint
from bitnet_ops.convert.errors import ConvertError, said_by
from bitnet_ops.convert.hf_source import HfSource
from bitnet_ops.convert.hybrid import own_name, to_transformers
from bitnet_ops.convert.ternary import check_masters
from bitnet_ops.errors import BitNetError, install
from bitnet_ops.formats.sglbitnt import Reader, model_file
from bitnet_ops.loading.model_contents import completed_config, model_config, own_tensors
from bitnet_ops.models import TensorSpec, check_names, expected_tensors
from bitnet_ops.nn.packing import MIN_SCALE, PackedWeight
from bitnet_ops.training.linear import TrainableBitLinear, masters_from_codes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# of a config.json: how the source was stored, which a model of masters is not
DROPPED = (
    "quantization_config", "quantization", "torch_dtype", "dtype", "auto_map", PRIVATE_BLOCK
)  # fmt: skip


class TrainingError(BitNetError, ValueError):
    """A model that cannot be trained or exported; the message names what and the remedy."""


def replace_linears(model: nn.Module, skip: Sequence[str] | None = None) -> list[str]:
    """Replace every nn.Linear of `model` by a TrainableBitLinear over the same Parameters.

    Args:
        model: changed in place.
        skip: names of modules left alone, as `named_modules` spells them, with all below them;
            None is the output head ("lm_head", or what a transformers model calls its head) and,
            in an architecture that `convert` knows, all that is not ternary there: the gates of
            Gated DeltaNet, a tower for images.
    Returns the names of the replaced modules.
    Raises TrainingError: nothing to replace, a name in `skip` that is no module, or a module that
        transformers loaded packed, which has no masters.
    """
    names = [*_heads(model), *_plain(model)] if skip is None else list(skip)
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


def architecture_of(model: nn.Module) -> dict[str, TensorSpec]:
    """The tensors that `convert` expects of a transformers model, under the names it has here.

    Empty for an architecture that `convert` does not know.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    try:
        specs = expected_tensors(ModelConfig.from_hf(config.to_dict(), ignore_unknown=True))
    except UnsupportedModelError:
        return {}
    names = model.state_dict().keys()
    return {name: spec for name in names if (spec := specs.get(str(own_name(name)))) is not None}


def _plain(model: nn.Module) -> list[str]:
    """Names of the linears of an architecture that `convert` knows which are not ternary there."""
    specs = architecture_of(model)
    if not specs:
        return []
    kinds = {name: spec.kind for name, spec in specs.items()}
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and kinds.get(f"{name}.weight") != "ternary"
    ]


def _reject_packed(name: str, module: nn.Module) -> None:
    weight = getattr(module, "weight", None)
    packed = isinstance(weight, Tensor) and not weight.is_floating_point()
    if packed or isinstance(getattr(module, "weight_scale", None), Tensor):
        raise TrainingError(
            f"replace_linears: expected master weights in {name}, got a packed "
            f"{type(module).__name__}; training.load_for_training reads packed checkpoints"
        )


@said_by("load_for_training")
def load_for_training(
    path: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """A transformers causal model whose projections are TrainableBitLinear; needs transformers.

    Args:
        path: a Hugging Face checkpoint folder that `convert` reads (masters, packed, or stored as
            code * scale; masters without quantization_config too), or a converted model: a folder
            with model.bin, or the file. None is the demo model of the package. Ternary weights
            become masters by `masters_from_codes`, and the model computes what they do.
        dtype: of all parameters. float32 keeps scales exact; bfloat16 halves the memory and moves
            the scales of packed weights by up to 2^-9 of their value.
        attn_implementation: as transformers has it.
    Returns the model, in training mode; `model.config` has no quantization_config.
    Raises TrainingError without transformers, for a model that its classes do not compute (rotated
    matrices, norms inside projections, embedding models) and for weights with several scales in a
    matrix; otherwise as the converter or the Reader does.
    """
    if path is None:
        from bitnet_ops.language_model import DEMO_DIR

        path = DEMO_DIR
    folder = Path(path)
    if (folder / "config.json").is_file():
        about, config, tensors = _from_checkpoint(folder)
    else:
        about, config, tensors = _from_file(model_file(folder))
    model = _empty_model(about, dtype, attn_implementation)
    specs = expected_tensors(config)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    ternary = {name.removesuffix(".weight") for name, s in specs.items() if s.kind == "ternary"}
    replace_linears(model, skip=[name for name in linears if name not in ternary])
    # A tied head is listed by state_dict, but shares the embedding's Parameter.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, tensor in tensors:
            _fill(parameters, name, tensor)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if parameters.keys() - tied:
        raise TrainingError(
            f"load_for_training: expected a tensor for every parameter, got none for "
            f"{sorted(parameters.keys() - tied)[:4]}"
        )
    return model.train()


def _fill(parameters: dict[str, nn.Parameter], name: str, tensor: Tensor) -> None:
    """Move `tensor` into the parameter `name`, which is taken out of `parameters`."""
    found = parameters.pop(name, None)
    if found is None or found.shape != tensor.shape:
        shape = "no such parameter" if found is None else f"{list(found.shape)}"
        raise TrainingError(
            f"load_for_training: expected {name} {list(tensor.shape)} in transformers' class, got "
            f"{shape}; install another version of transformers"
        )
    found.copy_(tensor)


def _empty_model(config: dict[str, Any], dtype: torch.dtype, attention: str) -> PreTrainedModel:
    try:
        from transformers import AutoModelForCausalLM, __version__
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise TrainingError(
            f"load_for_training: expected transformers to be installed, got {error}; "
            f"run: {install('train')}, or use replace_linears on a model of your own"
        ) from error
    kind = config["model_type"]
    if kind not in CONFIG_MAPPING:
        raise TrainingError(
            f"load_for_training: expected a model_type that transformers has, got {kind!r}, which "
            f"{__version__} has not; use replace_linears on its own code"
        )
    known = {key: value for key, value in config.items() if key not in DROPPED}
    hf_config = CONFIG_MAPPING[kind].from_dict(known)
    return AutoModelForCausalLM.from_config(
        hf_config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
    )


def _check_architecture(config: ModelConfig) -> None:
    if config.as_transformers:
        return
    found = f"the norms and factors of {config.model_type}"
    if config.rotation is not None:
        found = "rotated matrices"
    elif config.linear_norms or config.sub_norms:
        found = f"other norms than {config.model_type} has there"
    elif config.embedding_only:
        found = "no head, since it is for embeddings"
    raise TrainingError(
        "load_for_training: expected a model that a transformers class computes (bitnet, llama, "
        f"qwen2, qwen3 or qwen3_5_text), got one with {found}; use replace_linears on its own code"
    )


Tensors = Iterator[tuple[str, Tensor]]


def _from_checkpoint(folder: Path) -> tuple[dict[str, Any], ModelConfig, Tensors]:
    """config.json, what it means and the tensors of a Hugging Face folder, as masters."""
    source = _opened(Checkpoint(folder))
    plan, scheme = source.plan, source.plan.scheme
    _check_architecture(plan.config)
    source.check()

    def tensors() -> Tensors:
        for name, spec in plan.specs.items():
            if spec.kind == "dense":
                yield name, to_transformers(name, source.dense(name), plan.config)
            elif scheme.storage is Storage.MASTERS:
                masters = source.tensor(name)
                check_masters(name, masters, scheme)
                yield name, masters
            else:
                found = source.ternary(name)
                assert found.codes is not None
                yield name, _masters(name, found.codes, found.scale)

    return dict(flat(plan.hf_config)), plan.config, tensors()


def _opened(checkpoint: Checkpoint) -> HfSource:
    """The checkpoint as `convert` reads it; of what says nothing of its weights they are masters.

    Whether they are ternary already is looked at first. A hybrid may have been rotated, so that its
    own values were never trained to be ternary.
    """
    try:
        return HfSource(checkpoint)
    except ConvertError as error:
        family = family_of(flat(checkpoint.config))
        if error.code != "no-quantization-config" or (family is not None and family.hybrid):
            raise
        return HfSource(checkpoint, assume_online=True)


def _from_file(file: Path) -> tuple[dict[str, Any], ModelConfig, Tensors]:
    """The same of a .bin file."""
    reader = Reader(file)
    config = model_config(reader)
    check_names(config, own_tensors(reader, config))
    _check_architecture(config)
    specs = expected_tensors(config)

    def tensors() -> Tensors:
        for name, spec in specs.items():
            tensor, info = reader.tensor(name), reader.tensors[name]
            reader.check_sum(name)
            if not info.packed:
                yield name, to_transformers(name, tensor, config)
                continue
            reader.check_in_features(name, spec.shape[1])
            scales = reader.scales(name)
            rows, columns = spec.shape
            packed = PackedWeight(tensor, scales, rows, columns, group_size=info.group_size)
            if spec.kind == "ternary":
                yield name, _masters(name, packed.codes(), scales)
            else:  # an embedding or a head, which stays as it is
                yield name, packed.dequantize()

    return completed_config(reader.config, reader.tensors), config, tensors()


def _masters(name: str, codes: Tensor, scales: Tensor) -> Tensor:
    """Masters of one ternary matrix; TrainingError where no TrainableBitLinear computes it."""
    found = scales.unique()
    if len(found) > 1:
        raise TrainingError(
            f"load_for_training: expected one scale in {name}, got {len(found)}, one for "
            "a row or a group of weights; a TrainableBitLinear has one for its matrix: train from "
            "masters of this model, if there are any"
        )
    if float(found) < MIN_SCALE:
        raise TrainingError(
            f"load_for_training: expected a scale of {MIN_SCALE:g} or more in {name}, got "
            f"{float(found):.3g}, below which training rounds all weights to 0"
        )
    return masters_from_codes(codes, found)
