"""BitNetForCausalLM for vLLM: the whole decoder in one op, of a Hugging Face checkpoint.

Loaded by vLLM's registry only, by name. On one rank: elsewhere vLLM's own model classes run with
our linear method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.config import ModelConfig
from bitnet_ops.config.hybrid import refuse_states
from bitnet_ops.integrations.checkpoint import (
    FUSED,
    CheckpointError,
    logical_codes,
    stored_scale,
)
from bitnet_ops.integrations.vllm.quantization import BitNetConfig
from bitnet_ops.integrations.vllm.whole import WholeDecoder, float32_default
from bitnet_ops.models import TensorSpec, expected_tensors
from bitnet_ops.models.decoder import Decoder
from bitnet_ops.nn.packing import PackedWeight


class BitNetForCausalLM(WholeDecoder):
    """Any ternary model of `bitnet_ops.config` with quant_method "bitnet", on one rank.

    Option (--additional-config): bitnet_head_format, one of nn.storage.HEAD_FORMATS.
    """

    packed_modules_mapping = FUSED  # what the linear method's classes ask for; nothing fused here

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        quantization = vllm_config.quant_config
        if not isinstance(quantization, BitNetConfig):
            found = quantization.get_name() if quantization is not None else "none"
            raise CheckpointError(
                f"bitnet: expected a checkpoint with quant_method 'bitnet', got {found}; run it as "
                "vLLM would without this plug-in: --model-impl transformers"
            )
        super().__init__(read_config(vllm_config.model_config.hf_config), vllm_config)
        self.settings = quantization.settings

    @torch.no_grad()
    @float32_default
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a checkpoint's tensors by their Hugging Face names, strictly.

        Raises CheckpointError for a tensor without a place, of another shape or dtype, and for one
        that is missing.
        """
        loader = Loader(self.config, self.settings.rule, self._check_skipped())
        for name, tensor in weights:
            loader.add(name, tensor)
        self.decoder = Decoder(self.config, loader.finish(), self.dtype, self.head_format)

    def _check_skipped(self) -> dict[str, TensorSpec]:
        """The tensors that a checkpoint must have; all projections must be ternary."""
        specs = expected_tensors(self.config)
        for name, spec in specs.items():
            if spec.kind == "ternary" and self.settings.is_skipped(
                name.removesuffix(".weight"), {}
            ):
                raise CheckpointError(
                    f"bitnet: expected every projection ternary, got {name} in "
                    "modules_to_not_convert; serve it with --model-impl transformers"
                )
        return specs


class Loader:
    """Tensors of a checkpoint, one after the other, into what a Decoder is made of.

    Args:
        config: the architecture.
        rule: how the checkpoint stores weights and scales.
        specs: `expected_tensors(config)`.
    """

    def __init__(self, config: ModelConfig, rule: Any, specs: dict[str, TensorSpec]) -> None:
        self.config, self.rule, self.specs = config, rule, specs
        self.tensors: dict[str, Any] = {}
        self.scales: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; what is ternary is packed at once, so one matrix at most is large."""
        if name.endswith(".rotary_emb.inv_freq"):
            return  # written by old transformers; computed from the config
        if name == "lm_head.weight" and self.config.tie_word_embeddings:
            return  # some writers store the tied head a second time
        target = name.removesuffix("_scale")
        spec = self.specs.get(target)
        if spec is None or (target != name and spec.kind != "ternary"):
            raise CheckpointError(
                f"bitnet: expected only tensors of {self.config.model_type}, got {name!r} "
                f"{list(tensor.shape)}; config.json and the weights disagree"
            )
        if target != name:
            self.scales[target] = stored_scale(tensor, self.rule, name)
        elif spec.kind == "dense":
            self.tensors[name] = _dense(name, tensor, spec)
        else:
            rows, columns = spec.shape
            codes, scale = logical_codes(tensor, self.rule, rows, columns, name)
            packed = PackedWeight(
                ops.pack(codes), torch.ones(1, dtype=torch.float32), rows, columns
            )
            self.tensors[name] = packed.repack()
            if scale is not None:
                self.scales[name] = scale

    def finish(self) -> dict[str, Any]:
        """All tensors, scales in place. Raises CheckpointError where one never came."""
        ternary = [name for name, spec in self.specs.items() if spec.kind == "ternary"]
        missing = [name for name in self.specs if name not in self.tensors]
        missing += [f"{name}_scale" for name in ternary if name not in self.scales]
        if missing:
            raise CheckpointError(
                f"bitnet: expected every tensor of {self.config.model_type}, got none for "
                f"{missing[:4]}{' and more' if len(missing) > 4 else ''}; the checkpoint is "
                "incomplete, or stored as another linear_class"
            )
        for name in ternary:
            self.tensors[name] = dataclasses.replace(self.tensors[name], scale=self.scales[name])
        return self.tensors


def _dense(name: str, tensor: Tensor, spec: TensorSpec) -> Tensor:
    if not tensor.is_floating_point() or tuple(tensor.shape) != spec.shape:
        raise CheckpointError(
            f"bitnet: expected {name} floating-point {list(spec.shape)}, got {tensor.dtype} "
            f"{list(tensor.shape)}"
        )
    return tensor.detach().clone()  # vLLM's may be a view of a file that it closes


def read_config(hf_config: Any) -> ModelConfig:
    """The architecture, from the config that vLLM holds (with the user's --hf-overrides)."""
    # The class of --hf-overrides is ours; model_type says which family it is.
    config = {**hf_config.to_dict(), "architectures": None}
    refuse_states("vllm", config)
    return ModelConfig.from_hf(config, ignore_unknown=True)
