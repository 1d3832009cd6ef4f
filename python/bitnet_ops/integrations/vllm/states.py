"""The states of a hybrid's recurrent layers as one vLLM layer: a page of vLLM's pool a sequence.

vLLM keeps keys, values and states in one pool of pages, hands pages out, copies a state into the
page that goes on from it, and keeps checkpoints for its prefix cache (`--mamba-cache-mode align`).
So a slot of `ops.delta_net` is the number of a page. Contract: vllm 0.32.0
model_executor/layers/mamba/abstract.py. It must not know weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import KVCacheLayout, MambaSpec

from bitnet_ops.config import ModelConfig
from bitnet_ops.integrations.checkpoint import CheckpointError
from bitnet_ops.integrations.states import EngineStates, sizes_of
from bitnet_ops.integrations.vllm.kv_layer import KVLayer


@dataclass
class StateMetadata:
    """slots: int64 [sequences], the page that holds the state of each and takes the new one."""

    slots: Tensor


class StateMetadataBuilder(AttentionMetadataBuilder[StateMetadata]):
    """Tells the page of each sequence from vLLM's block table."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.spec = kv_cache_spec

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> StateMetadata:
        m, n = common_attn_metadata, common_attn_metadata.num_reqs
        table = m.block_table_tensor[:n], m.seq_lens[:n]
        pages = mamba_get_block_table_tensor(*table, self.spec, self.spec.mamba_cache_mode)
        return StateMetadata(pages[:, 0].long())


class StateBackend(AttentionBackend):
    """A backend without a kernel of its own: ops.run_program reads and writes the states."""

    @staticmethod
    def get_name() -> str:
        return "BITNET_STATES"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("bitnet: the whole decoder is one op, no layer runs by itself")

    @staticmethod
    def get_builder_cls() -> type[StateMetadataBuilder]:
        return StateMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)


class StateLayer(nn.Module, MambaBase):
    """Registers with vLLM under `name`, and views the pages that it gets as the op's states.

    Args:
        kv: the layer of keys and values, which shares the pool; it is told the states once vLLM has
            bound memory.
    """

    def __init__(self, config: ModelConfig, vllm_config: Any, name: str, kv: KVLayer) -> None:
        super().__init__()
        self.config, self.name = config, name
        self._kv = (kv,)  # not a second time among the modules
        self.kv_cache: tuple[Tensor, ...] = ()
        asked = vllm_config.cache_config.mamba_ssm_cache_dtype
        if asked not in ("auto", "float32"):
            raise CheckpointError(
                f"bitnet: expected states of float32, got {asked}; leave --mamba-ssm-cache-dtype "
                "at auto or float32"
            )
        vllm_config.compilation_config.static_forward_context[name] = self

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.GDN_ATTN

    def get_attn_backend(self) -> type[AttentionBackend]:
        return StateBackend

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return state_shapes(self.config)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.float32,) * len(self.get_state_shape())

    def get_kv_cache_spec(self, vllm_config: Any) -> MambaSpec:
        (kv,), cache = self._kv, vllm_config.cache_config
        return MambaSpec(
            shapes=self.get_state_shape(),
            dtypes=self.get_state_dtype(),
            block_size=cache.mamba_block_size,
            page_size_padded=kv.get_kv_cache_spec(vllm_config).page_size_bytes,
            mamba_type=self.mamba_type,
            mamba_cache_mode=cache.mamba_cache_mode,
        )

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """kv_cache int8 [pages, 1, 1, bytes], of which the states take the first."""
        super().bind_kv_cache(kv_cache)
        bound: tuple[Tensor, ...] = self.kv_cache
        recurrent, inputs = (state.transpose(0, 1) for state in bound)
        self._kv[0].beside = EngineStates(self.config, recurrent, inputs).tensors


def state_shapes(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Of the recurrent states and of the convolutions' last inputs of all layers, for a sequence.

    [layers, value heads, value_dim, key_dim] and [layers, kernel - 1, channels], as many numbers as
    `ops.delta_net` keeps, in its own order.
    """
    net = config.delta_net
    assert net is not None
    inputs, state = sizes_of(net)
    layers = len(net.layers)
    return (layers, *state), (layers, *inputs)
