"""A converted model of any family in vLLM, in one op a forward; hybrids with their states.

The config.json that `bitnet-ops vllm` writes (`vllm/serving.py`) names one of these classes and a
model file, which is loaded as `bitnet_ops.load` loads it. Loaded by vLLM's registry only, by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec

from bitnet_ops.config import ModelConfig
from bitnet_ops.formats import sglbitnt
from bitnet_ops.integrations.checkpoint import check_activation_dtype
from bitnet_ops.integrations.states import slot_bytes, state_steps
from bitnet_ops.integrations.vllm.serving import model_file
from bitnet_ops.integrations.vllm.states import StateLayer
from bitnet_ops.integrations.vllm.whole import WholeDecoder, float32_default
from bitnet_ops.loading.model_contents import model_config
from bitnet_ops.loading.weights import load_model
from bitnet_ops.nn.kv_config import kept_of


def _config_of(vllm_config: Any) -> ModelConfig:
    """Of the model file: vLLM's config.json has passed through the classes of transformers."""
    file = model_file(vllm_config.model_config.hf_config)
    return model_config(sglbitnt.Reader(file, check_codes=False))


class ConvertedForCausalLM(WholeDecoder):
    """The decoder of a model file behind vLLM's interface of a model; one rank.

    Option (--additional-config): as of `model.BitNetForCausalLM`.
    """

    # vLLM's loader is to look for our file, not for a checkpoint's; it is read by load_weights
    allow_patterns_overrides: ClassVar = ["model.bin"]
    fall_back_to_pt_during_load = False

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        del prefix
        check_activation_dtype(vllm_config.model_config.dtype)
        super().__init__(_config_of(vllm_config), vllm_config)
        self.file = model_file(vllm_config.model_config.hf_config)

    @torch.no_grad()
    @float32_default
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the model file that config.json names; vLLM's iterator is not asked."""
        del weights
        self.decoder = load_model(self.file, self.dtype, head_format=self.head_format)


class HybridForCausalLM(ConvertedForCausalLM):
    """A model with layers of Gated DeltaNet: vLLM keeps a page of states for each sequence.

    Prefixes are reused where vLLM has a checkpoint of the states (`--mamba-cache-mode align`).
    """

    is_hybrid: ClassVar = True
    has_inner_state: ClassVar = True
    supports_mamba_prefix_caching: ClassVar = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.states = StateLayer(self.config, vllm_config, "model.layers.0.states", self.kv)

    def _state_steps(self, metadata: Any) -> Tensor:
        return state_steps(metadata[self.states.name].slots)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        """What vLLM sizes a block of keys by, so that it is no smaller than a sequence's states.

        vLLM counts the keys of one layer of attention, and ours lie in one block for all layers: so
        these are the states for each of them. The states themselves are `StateLayer`'s.
        """
        config = _config_of(vllm_config)
        assert config.delta_net is not None
        layers = kept_of(config)["key"].layers
        return ((-(-slot_bytes(config.delta_net) // (4 * layers)),),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        return (torch.float32,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        """How vLLM copies each buffer of a state into another page: as a whole."""
        return (get_temporal_copy_spec,) * 2

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types: set[Any]) -> dict[Any, tuple[Any, ...]]:
        return {kind: cls.get_mamba_state_copy_func() for kind in mamba_types}
