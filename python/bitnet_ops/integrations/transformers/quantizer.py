"""accelerate(model), and the quantiser "bitnet_ops" by which transformers loads and saves.

A checkpoint says `quant_method: "bitnet"`, which is transformers' own name and must go on meaning
its own quantiser; so ours is asked for by `quantization_config=BitnetOpsConfig()`. What it saves
says "bitnet" again, packed as transformers packs: every reader of such checkpoints takes it.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.integrations.bitnet import BitNetDeserialize
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.quantizers import (
    AutoHfQuantizer,
    HfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from bitnet_ops.config.scheme import ScaleRule, SchemeError, quantized_scheme
from bitnet_ops.integrations.checkpoint import CheckpointError
from bitnet_ops.integrations.transformers import layers
from bitnet_ops.nn.storage import check_head_format, check_weight_format

METHOD = "bitnet_ops"
# What a checkpoint of transformers' own quantiser says, which ours reads too.
_CHECKPOINT_KEYS = (
    "linear_class",
    "quantization_mode",
    "use_rms_norm",
    "rms_norm_eps",
    "modules_to_not_convert",
)


@register_quantization_config(METHOD)
class BitnetOpsConfig(QuantizationConfigMixin):
    """How `from_pretrained(path, quantization_config=BitnetOpsConfig())` loads a BitNet checkpoint.

    Args:
        weight_format: layout of the ternary weights in memory, as `PackedWeight.repack` has them.
        norms, mlp, head: as `accelerate`.
        linear_class, quantization_mode, use_rms_norm, rms_norm_eps, modules_to_not_convert: as
            transformers' BitNetQuantConfig. A checkpoint's own quantization_config says them; give
            them for one that has none (masters: "autobitlinear", "online").
    """

    def __init__(
        self,
        *,
        weight_format: str = "auto",
        norms: bool = True,
        mlp: bool = True,
        head: str | None = None,
        linear_class: str = "bitlinear",
        quantization_mode: str = "offline",
        use_rms_norm: bool = False,
        rms_norm_eps: float = 1e-6,
        modules_to_not_convert: list[str] | None = None,
        **_: Any,
    ) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # an enumeration of its own
        _check_options(weight_format, head)
        self.weight_format, self.norms, self.mlp, self.head = weight_format, norms, mlp, head
        self.linear_class, self.quantization_mode = linear_class, quantization_mode
        self.use_rms_norm, self.rms_norm_eps = use_rms_norm, rms_norm_eps
        self.modules_to_not_convert = modules_to_not_convert

    @property
    def rule(self) -> ScaleRule:
        """How the checkpoint stores weights and scales. Raises CheckpointError for another way."""
        said = {"quant_method": "bitnet", "linear_class": self.linear_class}
        try:
            rule = quantized_scheme({**said, "quantization_mode": self.quantization_mode}).rule
        except SchemeError as error:
            raise CheckpointError(f"bitnet: {error}") from None
        return cast(ScaleRule, rule)

    @property
    def divides(self) -> bool:
        """Whether a stored weight_scale is a reciprocal."""
        return self.rule is ScaleRule.DIVIDE

    def to_dict(self) -> dict[str, Any]:
        """What a saved config.json says: transformers' own words for what `save_pretrained` writes.

        Weights are packed, whatever the checkpoint had; scales divide where they did.
        """
        said = {"quant_method": "bitnet", "quantization_mode": "offline"}
        said["linear_class"] = "bitlinear" if self.divides else "autobitlinear"
        kept = ("use_rms_norm", "rms_norm_eps", "modules_to_not_convert")
        return {**said, **{key: getattr(self, key) for key in kept}}


class _Placeholder(nn.Module):
    """A linear on the meta device, to be filled with what the checkpoint has, of whatever shape.

    Its parameters are floating, so that transformers casts masters to the model's dtype; integers
    it leaves alone, and a scale stays float32.
    """

    def __init__(self, source: nn.Linear, config: BitnetOpsConfig) -> None:
        super().__init__()
        self.out_features, self.in_features = source.out_features, source.in_features
        self.weight, self.bias = source.weight, source.bias
        if config.rule is not ScaleRule.ONLINE:
            self.register_buffer("weight_scale", torch.ones(1, dtype=torch.float32))
        self.rms_norm = None
        if config.use_rms_norm:
            self.rms_norm = LlamaRMSNorm(source.in_features, eps=config.rms_norm_eps)

    def filled(self, rule: ScaleRule, name: str, weight_format: str) -> layers.TernaryLinear:
        """The layer of what has been loaded."""
        scale = cast("Tensor | None", getattr(self, "weight_scale", None))
        given = {"weight": self.weight, "weight_scale": scale, "bias": self.bias}
        missing = [
            key
            for key, tensor in given.items()  # transformers marks what it has loaded
            if tensor is not None and not getattr(tensor, "_is_hf_initialized", False)
        ]
        if missing:
            raise CheckpointError(f"bitnet: expected {' and '.join(missing)} of {name}, got none")
        shape = self.out_features, self.in_features
        norm = self.rms_norm
        return layers.ternary_linear(
            self.weight, scale, self.bias, norm, rule, shape, name, weight_format
        )


@register_quantizer(METHOD)
class BitnetOpsQuantizer(HfQuantizer):
    """Loads BitNet checkpoints into this package's layers, and saves them as transformers packs."""

    requires_calibration = False
    quantization_config: BitnetOpsConfig

    def __init__(self, quantization_config: BitnetOpsConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = True  # nothing is left for transformers to quantise while it loads

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        devices = device_map.values() if isinstance(device_map, dict) else [device_map]
        strange = [d for d in devices if d is not None and str(d) not in ("cpu", "auto")]
        if strange:
            raise ValueError(f'bitnet_ops: expected device_map None or "cpu", got {strange[0]!r}')

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        config = self.quantization_config
        skipped = self.get_modules_to_not_convert(
            model, config.modules_to_not_convert, model._keep_in_fp32_modules
        )
        swapped = 0
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and should_convert_module(name, skipped):
                with torch.device("meta"):
                    model.set_submodule(name, _Placeholder(module, config))
                swapped += 1
        if not swapped:
            raise ValueError(
                f"bitnet_ops: expected a model with linear layers, got none to convert in "
                f"{type(model).__name__}"
            )

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """Whether a tensor may have another shape than the model's: packed weights have."""
        path, _, name = param_name.rpartition(".")
        return name == "weight" and isinstance(model.get_submodule(path), _Placeholder)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        config = self.quantization_config
        for name, module in list(model.named_modules()):
            if isinstance(module, _Placeholder):
                layer = module.filled(config.rule, name, config.weight_format)
                layer.train(module.training)
                model.set_submodule(name, layer)
        _swap_around(model, config)
        return model

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor], dict]:
        """What `save_pretrained` writes: ternary weights packed as transformers packs them."""
        return _saved_state(model, self.quantization_config), {}

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def accelerate(
    model: nn.Module,
    *,
    weight_format: str = "auto",
    norms: bool = True,
    mlp: bool = True,
    head: str | None = None,
) -> nn.Module:
    """Swap the ternary linears of a loaded transformers model for this package's, in place.

    Weights become 2 bits, activations int8 with exact integer sums; `generate`, `save_pretrained`
    and everything else of the model stay. On a CPU; gradients reach activations, not weights.

    Args:
        model: holds transformers' BitLinear or AutoBitLinear modules (`quant_method` "bitnet"), or
            nn.Linear modules whose weights are -s, 0 and s, with one s a matrix, a row, or a group
            of 128 or 64: packages of unpacked models, such as the first generation of
            Ternary-Bonsai. Others stay floating.
        weight_format: layout of the weights in memory, as `PackedWeight.repack` has them.
        norms: swap the RMSNorms that compute what `ops.rms_norm` does.
        mlp: one op for activation and product in gated MLPs.
        head: None leaves a floating output head; "int8" or "int4" quantises it, which changes
            logits by its rounding. An embedding that is tied to it stays as it is. A ternary head
            is swapped as any other matrix.
    Returns:
        `model` itself.
    Raises:
        TypeError: something else than a model.
        ValueError: no ternary linear in it, or none any more, a model elsewhere than on the CPU,
            another format.
        CheckpointError: a layer that does not hold what its class promises.
    """
    _check_options(weight_format, head)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"accelerate: expected a loaded transformers model, got a {type(model).__name__}; load "
            "one with AutoModelForCausalLM.from_pretrained, or give the path to bitnet_ops.load"
        )
    for module in model.modules():
        weight = getattr(module, "weight", None)
        is_linear = isinstance(module, nn.Linear) or layers.rule_of(module) is not None
        if is_linear and isinstance(weight, Tensor) and weight.device.type != "cpu":
            raise ValueError(f"accelerate: expected a model on the CPU, got {weight.device}")
    packed = [(n, m) for n, m in model.named_modules() if layers.rule_of(m) is not None]
    if not packed and any(isinstance(m, layers.TernaryLinear) for m in model.modules()):
        raise ValueError(
            "accelerate: expected a model as transformers loads it, got one that has been "
            "accelerated, or loaded with BitnetOpsConfig; load it anew for other options"
        )
    if packed and all(cast(Tensor, m.weight).dtype == torch.float32 for _, m in packed):
        _widen(model)
    for name, module in packed:
        _swap(model, name, cast(nn.Module, layers.replacement(module, name, weight_format)))
    if not packed and not _swap_unpacked(model, weight_format):
        raise ValueError(
            "accelerate: expected a model with BitLinear or AutoBitLinear layers of transformers, "
            "or with matrices of -s, 0 and s, got none in "
            f"{type(model).__name__}; bitnet_ops.load takes checkpoints of other forms"
        )
    config = _config_of(model, weight_format=weight_format, norms=norms, mlp=mlp, head=head)
    _swap_around(model, config)
    if hasattr(model, "config"):  # so that save_pretrained writes what other readers know
        quantizer = BitnetOpsQuantizer(config)
        model.hf_quantizer = quantizer  # type: ignore[assignment]
        # Its own unpacking of weights at loading, which saving would try to undo.
        conversions = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [  # type: ignore[assignment]
            c for c in conversions if not _unpacks(c)
        ] or None
        if packed:  # unpacked matrices are saved as they were
            model.config.quantization_config = config  # type: ignore[union-attr]
    return model


def _swap(model: nn.Module, name: str, layer: nn.Module) -> None:
    layer.train(model.get_submodule(name).training)
    model.set_submodule(name, layer)


def _swap_unpacked(model: nn.Module, weight_format: str) -> bool:
    """Every nn.Linear that holds an unpacked ternary matrix, swapped; whether there was one.

    One at a time, so that the memory of a floating matrix is free before the next.
    """
    found = False
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            layer = layers.unpacked_linear(module, name, weight_format)
            if layer is not None:
                _swap(model, name, layer)
                found = True
    return found


def _widen(model: nn.Module) -> None:
    """What a model asked for in float32 has in fewer bits.

    transformers from 5.21 on leaves norms, embedding and head of packed checkpoints as stored; the
    model would compute in bfloat16.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype in (torch.bfloat16, torch.float16):
            tensor.data = tensor.data.float()


def _unpacks(conversion: Any) -> bool:
    operations = getattr(conversion, "operations", ())
    return any(isinstance(operation, BitNetDeserialize) for operation in operations)


def _config_of(model: nn.Module, **options: Any) -> BitnetOpsConfig:
    """`options`, and what the model's own quantization_config says."""
    said = getattr(getattr(model, "config", None), "quantization_config", None)
    if said is not None and not isinstance(said, dict):
        said = said.to_dict()
    return _merged(said or {}, BitnetOpsConfig(**options))


def _merged(checkpoint: dict[str, Any], given: BitnetOpsConfig) -> BitnetOpsConfig:
    """What the checkpoint says of its weights, and `given` of how to hold them."""
    said = {key: checkpoint[key] for key in _CHECKPOINT_KEYS if key in checkpoint}
    options = {key: getattr(given, key) for key in ("weight_format", "norms", "mlp", "head")}
    return BitnetOpsConfig(**options, **said)


def _check_options(weight_format: str, head: str | None) -> None:
    check_weight_format(weight_format)
    if head is not None:
        check_head_format(head)


def _swap_around(model: nn.Module, config: BitnetOpsConfig) -> None:
    """Norms, MLPs and head around the linears, as the config asks."""
    for name, module in list(model.named_modules()):
        swapped: nn.Module | None = None
        if config.norms:
            swapped = layers.faster_norm(module)
        if swapped is None and config.mlp:
            swapped = layers.faster_mlp(module)
        if swapped is not None:
            model.set_submodule(name, swapped.train(module.training))
    if config.head is not None:
        head = cast(Any, model).get_output_embeddings()
        if isinstance(head, layers.TernaryLinear):
            return  # 2 bits a weight, and none of them rounded
        if not isinstance(head, nn.Linear):
            raise ValueError(f"bitnet_ops: expected an nn.Linear as head, got {type(head)}")
        cast(Any, model).set_output_embeddings(layers.QuantizedHead(head.weight, config.head))


def _saved_state(model: nn.Module, config: BitnetOpsConfig) -> dict[str, Tensor]:
    """state_dict as transformers stores it."""
    state = model.state_dict()
    tied_head = cast(Any, model).get_output_embeddings() if _is_tied(model) else None
    for name, module in model.named_modules():
        if not isinstance(module, (layers.TernaryLinear, layers.QuantizedHead)):
            continue
        prefix = f"{name}."
        if module is tied_head:  # the embedding has the weight
            saved: dict[str, Tensor] = {}
        elif isinstance(module, layers.TernaryLinear):
            try:
                saved = module.for_checkpoint(config.divides)
            except ValueError as error:
                raise ValueError(f"save_pretrained: {name}: {error}") from None
        else:
            saved = {"weight": module.for_checkpoint()}
        own = {prefix + k for k in module.state_dict() if not k.startswith("rms_norm.")}
        state = {key: tensor for key, tensor in state.items() if key not in own}
        state.update({prefix + key: tensor for key, tensor in saved.items()})
    return state


def _is_tied(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))


def _let_our_config_meet_bitnet() -> None:
    """from_pretrained rejects a quantization_config of another class than the checkpoint's.

    For BitnetOpsConfig alone, and a checkpoint of method "bitnet" or none of its own, the two are
    merged; all else goes transformers' way.
    """
    quantizers: Any = AutoHfQuantizer
    theirs = quantizers.merge_quantization_configs.__func__

    @functools.wraps(theirs)
    def merge(cls: type, checkpoint: Any, given: Any) -> Any:
        if not isinstance(given, BitnetOpsConfig):
            return theirs(cls, checkpoint, given)
        said = checkpoint if isinstance(checkpoint, dict) else checkpoint.to_dict()
        if said.get("quant_method") != "bitnet":
            raise ValueError(
                'bitnet_ops: expected a checkpoint of quant_method "bitnet", got '
                f"{said.get('quant_method')!r}"
            )
        return _merged(said, given)

    quantizers.merge_quantization_configs = classmethod(merge)


_let_our_config_meet_bitnet()
