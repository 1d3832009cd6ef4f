"""LoRA adapters as PEFT writes them: read strictly, run beside ternary projections.

    y = projection(x) + (x A^T) B^T * scaling      scaling = lora_alpha / r, or / sqrt(r) (rsLoRA)

LoRA sees the activations before they are rounded to int8 and sums in float32 in the fixed
order of the dense head, so that a token's result depends on neither batch nor threads. peft is not
needed. All that a directory asks for beyond this formula is rejected by name. It must not know how
adapters are trained, nor what else is in a model.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from bitnet_ops import ops
from bitnet_ops.arguments import check_path
from bitnet_ops.errors import BitNetError
from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.untrusted import (
    LFS_POINTER,
    UntrustedFileError,
    check_links,
    check_safetensors_header,
    is_lfs_pointer,
    read_json_object,
)
from bitnet_ops.untrusted.patterns import PatternError, matches

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_CONFIG_LIMIT_BYTES = 1 << 20
_PREFIX = "base_model.model."
# How wrappers and classes spell where a decoder's layers are -> as it is spelled here: models for
# images beside the text, decoders without a head.
_SPELLINGS = (
    ("_orig_mod.", ""), ("module.", ""), ("model.language_model.", "model."),
    ("language_model.", ""), ("layers.", "model.layers."),
)  # fmt: skip
_FOREIGN = "the adapter belongs to another model"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(\.default)?\.weight")

# Options that change the formula -> what they switch on.
_REJECTED = {
    "use_dora": "DoRA (a magnitude per output)",
    "lora_bias": "biases of LoRA's B",
    "modules_to_save": "whole modules trained beside the adapter",
    "fan_in_fan_out": "transposed weights (Conv1D)",
    "layer_replication": "layers used several times",
    "target_parameters": "adapters of bare parameters",
    "trainable_token_indices": "trained rows of the embedding",
    "alora_invocation_tokens": "aLoRA (an adapter switched on by tokens)",
    "arrow_config": "Arrow (a router over adapters)",
    "use_qalora": "QALoRA (pooled inputs)",
    "use_bdlora": "BD-LoRA (block diagonal factors)",
}
# These initialisations move a part of the base weights into the adapter, which then fits no other.
_BASE_CHANGING = ("pissa", "olora", "loftq", "corda", "lora_ga")
# Options of training, of initialisation, or about where the adapter came from.
_HARMLESS = frozenset(
    """peft_type task_type base_model_name_or_path revision inference_mode r lora_alpha use_rslora
    bias target_modules rank_pattern alpha_pattern lora_dropout init_lora_weights auto_mapping
    layers_to_transform layers_pattern exclude_modules megatron_config megatron_core eva_config
    corda_config loftq_config lora_ga_config runtime_config peft_version ephemeral_gpu_offload
    qalora_group_size ensure_weight_tying""".split()
)
_TASKS = (None, "CAUSAL_LM", "FEATURE_EXTRACTION")


class LoraError(BitNetError, ValueError):
    """An adapter that cannot be applied; the message says what was expected and found."""


def _reject(expected: str, found: object, remedy: str) -> NoReturn:
    raise LoraError(f"lora: expected {expected}, got {found}; {remedy}")


@dataclass(frozen=True)
class LoraWeight:
    """One projection's LoRA: `a` F [r, K], `b` F [N, r], and the factor of their product."""

    a: Tensor
    b: Tensor
    scaling: float

    def to(self, dtype: torch.dtype) -> LoraWeight:
        """With contiguous factors of `dtype`."""
        a, b = (factor.to(dtype).contiguous() for factor in (self.a, self.b))
        return LoraWeight(a, b, self.scaling)

    def delta(self) -> Tensor:
        """What LoRA adds to the weight: `B A * scaling`, float32 [N, K]."""
        return (self.b.float() @ self.a.float()) * self.scaling


def own_module(name: str) -> str:
    """A decoder's module under the name that it has here, whatever class it was trained in."""
    for prefix, instead in _SPELLINGS:
        if name.startswith(prefix):
            name = instead + name.removeprefix(prefix)
    return name


@dataclass(frozen=True)
class Adapter:
    """A PEFT directory: its name and, by module name (`model.layers.0...q_proj`), its weights.

    Names are those of `own_module`.
    """

    folder: Path
    rank: int
    weights: Mapping[str, LoraWeight]

    def describe(self) -> str:
        return f"LoRA adapter {self.folder.resolve().name} (rank {self.rank}, " + (
            f"{len(self.weights)} projections)"
        )


# Reading ------------------------------------------------------------------------------------------


def read_adapter(folder: str | os.PathLike[str]) -> Adapter:
    """Read the PEFT directory `folder`: adapter_config.json and adapter_model.safetensors.

    Raises LoraError for a missing or damaged file, any option beyond plain LoRA and rsLoRA (with
    rank and alpha patterns), and factors that are incomplete, misshapen or not finite.
    """
    path = check_path("lora: expected the folder of an adapter", folder)
    config = _read_config(path)
    _check_config(config)
    pairs = _read_factors(path)
    ranks = _values("rank_pattern", "r", list(pairs), config)
    alphas = _values("alpha_pattern", "lora_alpha", list(pairs), config)
    weights: dict[str, LoraWeight] = {}
    spelled: dict[str, str] = {}
    for module, factors in pairs.items():
        found = _weight(module, factors, int(ranks[module]), alphas[module], config)
        first = spelled.setdefault(own_module(module), module)
        if first != module and not _same(weights[own_module(module)], found):
            _reject("one adapter of a module", f"others as {first} and as {module}",
                    "the file has two names for it")  # fmt: skip
        weights[own_module(module)] = found
    _check_targets(config, list(pairs))
    return Adapter(path, config["r"], weights)


def _same(a: LoraWeight, b: LoraWeight) -> bool:
    return a.scaling == b.scaling and _equal(a.a, b.a) and _equal(a.b, b.b)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, in any dtype."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG_FILE
    if not os.path.isfile(file):  # False for a name that is too long
        _reject(f"a PEFT directory with {CONFIG_FILE}", path, "name the adapter's folder")
    try:
        check_links(path, [CONFIG_FILE, WEIGHTS_FILE])
    except UntrustedFileError as error:
        raise LoraError(f"lora: {error}") from None
    try:
        return read_json_object(file, limit=_CONFIG_LIMIT_BYTES)
    except UntrustedFileError as error:
        raise LoraError(f"lora: {error}; save the adapter again") from None


def _check_config(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        _reject("peft_type LORA", repr(config.get("peft_type")), "other adapters are not supported")
    if config.get("task_type") not in _TASKS:
        found = repr(config["task_type"])
        _reject("task_type CAUSAL_LM", found, "its head is not part of this model")
    if config.get("bias", "none") != "none":
        _reject("bias none", repr(config["bias"]), "trained biases are not supported")
    for key, what in _REJECTED.items():
        if config.get(key):
            _reject(f"plain LoRA without {key}", repr(config[key]), f"{what} is not supported")
    unknown = [
        key for key, value in config.items() if value and key not in {*_HARMLESS, *_REJECTED}
    ]
    if unknown:
        _reject("known options of LoRA", f"{unknown[0]} = {config[unknown[0]]!r}", "not supported")
    initialisation = str(config.get("init_lora_weights", True)).lower()
    if initialisation.startswith(_BASE_CHANGING):
        _reject(
            "an adapter of the unchanged base model",
            f"init_lora_weights {initialisation!r}, which changes the base",
            "convert it to plain LoRA with peft (path_initial_model_for_weight_conversion)",
        )
    for key in ("r", "lora_alpha"):
        value = config.get(key)
        if not _is_positive(value) or (key == "r" and not isinstance(value, int)):
            _reject(f"{key} as a number above zero", repr(value), f"repair {CONFIG_FILE}")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            _reject(f"{key} as an object", repr(config[key]), f"repair {CONFIG_FILE}")


def _read_factors(path: Path) -> dict[str, dict[str, Tensor]]:
    file = path / WEIGHTS_FILE
    if not file.is_file():
        found = "adapter_model.bin" if (path / "adapter_model.bin").is_file() else "no such file"
        _reject(f"{WEIGHTS_FILE} in {path}", found, "pickles are never opened; save as safetensors")
    if is_lfs_pointer(file):
        raise LoraError(f"lora: expected the weights in {file}, got {LFS_POINTER}")
    pairs: dict[str, dict[str, Tensor]] = {}
    names: dict[tuple[str, str], str] = {}
    try:
        check_safetensors_header(file)
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
                match = _FACTOR.fullmatch(name)
                if match is None or not name.startswith(_PREFIX):
                    _reject_tensor(name)
                module, factor = match["module"].removeprefix(_PREFIX), match["factor"]
                tensor, pair = tensors.get_tensor(name), pairs.setdefault(module, {})
                first = names.setdefault((module, factor), name)
                if first != name and not _equal(pair[factor], tensor):
                    _reject(f"lora_{factor} of {module} once", f"others as {first} and as {name}",
                            "keep one of them")  # fmt: skip
                pair[factor] = tensor
    except (SafetensorError, OSError, UntrustedFileError) as error:
        _reject(f"a valid safetensors file {file}", error, "save the adapter again")
    if not pairs:
        _reject(f"factors lora_A and lora_B in {file}", "none", "is it an adapter at all?")
    return pairs


def _reject_tensor(name: str) -> NoReturn:
    remedy = "it is not part of plain LoRA"
    if "lora_magnitude_vector" in name:
        remedy = "a DoRA magnitude; DoRA is not supported"
    elif "lora_embedding" in name:
        remedy = "an adapter of the embedding; only ternary projections take one"
    _reject(f"tensors {_PREFIX}<module>.lora_A.weight and lora_B.weight alone", name, remedy)


def _values(
    pattern_key: str, key: str, modules: list[str], config: Mapping[str, Any]
) -> dict[str, float]:
    """For each module the value of the first pattern that matches its end, as peft matches it."""
    patterns: Mapping[str, Any] = config.get(pattern_key) or {}
    try:
        rows = matches(list(patterns), modules, within=r"(.*\.)?(%s)$")
    except PatternError as error:
        raise LoraError(f"lora: expected {error}; repair {pattern_key} in {CONFIG_FILE}") from None
    found = dict.fromkeys(modules, float(config[key]))
    for (pattern, value), row in reversed(list(zip(patterns.items(), rows, strict=True))):
        if any(row) and not _is_positive(value):
            _reject(f"patterns of numbers above zero in {pattern_key}", f"{pattern!r}: {value!r}",
                    f"repair {CONFIG_FILE}")  # fmt: skip
        found |= {module: float(value) for module, hit in zip(modules, row, strict=True) if hit}
    return found


def _is_positive(value: object) -> bool:
    """Whether `value` is a number above zero that a float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= sys.float_info.max


def _weight(
    module: str,
    factors: Mapping[str, Tensor],
    rank: int,
    alpha: float,
    config: Mapping[str, Any],
) -> LoraWeight:
    if len(factors) < 2:
        absent = "B" if "A" in factors else "A"
        _reject(f"lora_A and lora_B of {module}", f"no lora_{absent}", "the file is incomplete")
    a, b = factors["A"], factors["B"]
    for factor, tensor in factors.items():
        if tensor.dtype not in _DTYPES or tensor.dim() != 2:
            found = f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
            _reject(f"a floating matrix lora_{factor} of {module}, of 16 bits or more", found,
                    "not plain LoRA: save it in another dtype")  # fmt: skip
        if not torch.isfinite(tensor).all():
            _reject(f"finite lora_{factor} of {module}", "a NaN or an infinity", "training failed")
    if a.shape[0] != rank or b.shape[1] != rank:
        found = f"lora_A {list(a.shape)}, lora_B {list(b.shape)}"
        _reject(f"rank {rank} in {module}", found, "config and weights disagree")
    return LoraWeight(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _check_targets(config: Mapping[str, Any], modules: list[str]) -> None:
    targets = config.get("target_modules")
    if not isinstance(targets, list):
        return  # a regular expression, or "all-linear": the tensors say what it matched
    for module in modules:
        if not any(module == target or module.endswith(f".{target}") for target in targets):
            _reject(
                f"factors of target_modules {targets} alone", module, "another config's weights"
            )
    for target in targets:
        if not any(module == target or module.endswith(f".{target}") for module in modules):
            _reject(f"factors of the target module {target!r}", "none", "the file is incomplete")


# Running ------------------------------------------------------------------------------------------


def add_side_path(y: Tensor, x: Tensor, lora: LoraWeight, by: Any = ops) -> Tensor:
    """y F [..., N] + LoRA of x F [..., K], added in float32 and rounded to y's dtype; by ops."""
    side = by.lm_head(by.lm_head(x, lora.a), lora.b)
    return (y.float() + side * lora.scaling).to(y.dtype)


class LoraBitLinear(BitLinear):
    """A BitLinear with LoRA, for use on its own: a decoder takes adapters by name."""

    lora: LoraWeight

    @classmethod
    def from_base(cls, base: BitLinear, lora: LoraWeight) -> LoraBitLinear:
        """A layer over the memory of `base`."""
        layer = cls.from_packed(base.packed, base.bias)
        layer.lora = lora
        return layer

    def forward(self, x: Tensor) -> Tensor:
        # the projection first: it knows its in_features and rejects another x by name
        return add_side_path(super().forward(x), x, self.lora)


def check_fits(model: nn.Module, adapter: Adapter) -> None:
    """Raise LoraError unless each of the adapter's modules is a ternary projection of `model`."""
    modules = dict(model.named_modules())
    for name, lora in adapter.weights.items():
        base = modules.get(name)
        if type(base) is not BitLinear:
            found = "no such module" if base is None else f"a {type(base).__name__}"
            _reject(f"{name} to be a ternary projection", found, _FOREIGN)
        shape, expected = (len(lora.b), lora.a.shape[1]), (base.out_features, base.in_features)
        if shape != expected:
            _reject(f"{name} as {list(expected)}", list(shape), _FOREIGN)
